"""What each runner of vLLM does with a step, and what graphprobe has to count for it.

A row reads ``phase path sent->bucket`` for a graph and ``phase reason sent`` for an eager call, each with ``x calls``
where there is more than one.
"""

from __future__ import annotations

from tests.engines.vllm_setups import Case, Coverage, Setup, Step, step

BOTH = ("v1", "v2")


VERIFIED = Setup(spec=3, mode="FULL_DECODE_ONLY")
SIXTEEN = Setup(spec=3, sizes=(1, 2, 4, 8, 16))
THREES = Setup(spec=2, sizes=(1, 2, 4, 8, 16, 24))
ADAPTERS = Setup(adapters=2, specialize=False)

CASES = (
    Case(
        "decodes replay full graphs, everything else piecewise ones",
        BOTH,
        Setup(),
        (step("3d1"), step("3d1"), step("2d1 p3"), step("p9")),
        ("decode full 3->4 x2", "mixed piecewise 5->8", "prefill piecewise 9->16"),
    ),
    Case(
        "above the largest size nothing is captured",
        BOTH,
        Setup(),
        (step("p50"), step("1d1 p150")),
        ("prefill batch_too_large 50", "mixed batch_too_large 151"),
    ),
    Case(
        "with graphs switched off every step is eager",
        BOTH,
        Setup(mode="NONE"),
        (step("3d1"), step("p9"), step("p5000")),
        ("decode disabled 3", "prefill disabled 9", "prefill disabled 5000"),
    ),
    Case(
        "graphs for uniform decodes alone serve no prompt",
        BOTH,
        Setup(mode="FULL_DECODE_ONLY"),
        (step("3d1"), step("p9"), step("2p6"), step("1d1 p8"), step("p50")),
        (
            "decode full 3->4",
            "prefill wrong_phase 9",
            "prefill wrong_phase 12",
            "mixed mixed_batch 9",
            "prefill wrong_phase 50",
        ),
    ),
    Case(
        "a full graph for any batch serves prompts too",
        BOTH,
        Setup(mode="FULL"),
        (step("3d1"), step("p9"), step("2d1 p3")),
        ("decode full 3->4", "prefill full 9->16", "mixed full 5->8"),
    ),
    Case(
        "without full graphs decodes run piecewise",
        BOTH,
        Setup(mode="PIECEWISE"),
        (step("3d1"), step("p9")),
        ("decode piecewise 3->4", "prefill piecewise 9->16"),
    ),
    Case(
        "drafts of several lengths are no uniform decode",
        BOTH,
        VERIFIED,
        (step("2v4"), step("v2 v3"), step("v4 d1"), step("2v4 p9")),
        ("verify full 8->8", "verify ragged 5 x2", "mixed mixed_batch 17"),
    ),
    Case(
        "drafts of another length than was captured",
        BOTH,
        VERIFIED,
        (step("2v2"), step("3d1")),
        ("verify spec_width 4", "decode spec_width 3"),
    ),
    Case(
        "the size that must fit counts tokens, not requests",
        BOTH,
        SIXTEEN,
        tuple(step(f"{n}v4") for n in range(1, 9)),
        (
            "verify full 4->4",
            "verify full 8->8",
            "verify full 12->16",
            "verify full 16->16",
            *(f"verify batch_too_large {n}" for n in (20, 24, 28, 32)),
        ),
    ),
    Case(
        "a full graph is padded to",
        ("v1",),
        THREES,
        (step("4v3"),),
        ("verify full 12->18",),
    ),
    Case(
        "a smaller piecewise graph goes before a full one until 0.29",
        ("v2",),
        THREES,
        (step("4v3"),),
        ("verify full 12->18",),
        before=("0.29", ("verify piecewise 12->16",)),
    ),
    Case(
        "graphs with adapters alone serve no batch without one",
        ("v1",),
        ADAPTERS,
        (step("3d1"), step("3d1", adapters=1), step("p50"), step("p9")),
        ("decode adapter 3", "decode full 3->4", "prefill batch_too_large 50", "prefill adapter 9"),
    ),
    Case(
        "graphs with and without adapters serve both",
        ("v2",),
        ADAPTERS,
        (step("3d1"), step("3d1", adapters=1), step("p50"), step("p9")),
        ("decode full 3->4 x2", "prefill batch_too_large 50", "prefill piecewise 9->16"),
    ),
    Case(
        "another rank that has no graph makes this one eager",
        BOTH,
        Setup(peer=(3, "NONE")),
        (step("3d1"), step("p9"), step("p50")),
        ("decode rank_vote 3", "prefill rank_vote 9", "prefill batch_too_large 50"),
    ),
    Case(
        "a rank's own reason stays where all ranks are eager",
        BOTH,
        Setup(mode="FULL_DECODE_ONLY", peer=(3, "NONE")),
        (step("3d1"), step("p9"), step("1d1 p8")),
        ("decode rank_vote 3", "prefill wrong_phase 9", "mixed mixed_batch 9"),
    ),
    Case(
        "all ranks pad to the largest",
        BOTH,
        Setup(peer=(8, "FULL")),
        (step("3d1"),),
        ("decode full 3->8",),
    ),
    Case(
        "the lesser mode of all ranks wins",
        BOTH,
        Setup(peer=(8, "PIECEWISE")),
        (step("3d1"),),
        ("decode piecewise 3->8",),
    ),
    Case(
        "an encoder's outputs run in no full graph",
        BOTH,
        Setup(encoder=True, mode="FULL"),
        (step("3d1"), step("p9"), step("p9", images=1)),
        ("decode full 3->4", "prefill full 9->16", "prefill multimodal 9"),
    ),
    Case(
        "an encoder's outputs run piecewise",
        ("v1",),
        Setup(encoder=True),
        (step("p9", images=1),),
        ("prefill piecewise 9->16",),
    ),
    Case(
        "an encoder's outputs run eagerly",
        ("v2",),
        Setup(encoder=True),
        (step("p9", images=1),),
        ("prefill multimodal 9",),
    ),
    Case(
        "pieces without a compiler are breakable graphs",
        BOTH,
        Setup(breakable=True),
        (step("3d1"), step("p9")),
        ("decode full 3->4", "prefill breakable 9->16"),
    ),
    Case(
        "a drafter is counted apart",
        ("v1",),
        Setup(spec=3),
        (step("2v4"), step("p9")),
        ("verify full 8->8", "prefill piecewise 9->16"),
        drafter=(
            "draft_extend piecewise 8->8",
            "draft_extend piecewise 9->16",
            "draft piecewise 2->4",
            "draft piecewise 1->4",
        ),
    ),
    Case(
        "a drafter has full graphs too",
        ("v2",),
        Setup(spec=3),
        (step("2v4"), step("3v4")),
        ("verify full 8->8", "verify full 12->16"),
        drafter=("draft_extend full 8->8", "draft_extend full 12->16", "draft full 2->2", "draft full 3->4"),
    ),
    Case(
        "a worker without tokens has no step",
        BOTH,
        Setup(),
        (Step(()), step("1d1"), Step(())),
        ("decode full 1->1",),
    ),
)

COVERAGE = (
    Coverage("default sizes with drafts", BOTH, Setup(spec=3), 0),
    Coverage("default sizes without", BOTH, Setup(), 0),
    Coverage("graphs switched off", BOTH, Setup(mode="NONE"), 0),
    Coverage("sizes up to 16", BOTH, SIXTEEN, 4, ("20 to 32 by 4 tokens", "5 to 8 requests", "24, 32]}'")),
    Coverage("a limit of 16", BOTH, Setup(spec=3, limit=16), 4, ("20 to 32 by 4 tokens", "5 to 8 requests")),
    Coverage("42 that vLLM makes 40", BOTH, Setup(requests=6, spec=6, limit=42), 1, ("42 tokens", "42]}'")),
    Coverage(
        "sizes below one request",
        ("v1",),
        Setup(spec=3, sizes=(1, 2)),
        0,
        refused="No valid cudagraph sizes after rounding to multiple of 4",
    ),
    Coverage("sizes below one request", ("v2",), Setup(spec=3, sizes=(1, 2)), 8, ("4 to 32 by 4", "1 to 8 requests")),
    Coverage("100 requests", BOTH, Setup(requests=100), 0, before=("0.31", 4)),
)
