"""Why SGLang ran a pass eagerly: the first condition of its own predicate that said no, in each release's order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import graphprobe
from tests.integrations.engine import rows
from tests.integrations.sglang_engine import Engine

PATCHES = (14, 15, 16, 17, 18, 20, 21, 22, 23)
"""Releases 0.5.PATCH, whose predicates differ."""

Make = Callable[..., Engine]

DECODE = {
    "replace_embeds": "engine_declined",
    "ragged": "ragged",
    "width": "spec_width",
    "size": "batch_too_large",
    "rank_size": "rank_vote",
    "ranks": "rank_vote",
    "encoder": "multimodal",
    "tbo": "engine_declined",
    "hidden": "engine_declined",
    "ngram": "ragged",
}
"""What the fake's conditions of decode are called by us. With padding off a size is another matter."""

PREFILL = {
    "ranks": "rank_vote",
    "inactive": "rank_vote",
    "qwen": "multimodal",
    "fa4": "multimodal",
    "slots": "batch_too_large",
    "metadata": "batch_too_large",
    "lora": "adapter",
    "mixed": "mixed_batch",
    "input_embeds": "engine_declined",
    "replace_embeds": "engine_declined",
    "prefix": "engine_declined",
    "chunks": "engine_declined",
    "verify": "engine_declined",
    "hidden": "engine_declined",
    "logprob": "engine_declined",
    "context": "engine_declined",
    "tokens": "batch_too_large",
    "factor": "no_exact_bucket",
    "backend": "engine_declined",
}
"""The same of prefill."""


def reasons(name: str) -> list[tuple[Any, ...]]:
    """Eager calls, as (phase, size, reason)."""
    return [row for row in rows(name) if len(row) == 3]


def some(rng: random.Random, **choices: list[Any]) -> dict[str, Any]:
    """One of each; the first one, which is the plain one, half of the time."""
    return {name: rng.choice([found[0]] * len(found) + found) for name, found in choices.items()}


@pytest.mark.parametrize("patch", PATCHES)
def test_decode_passes_have_the_reason_of_the_first_condition(sglang: Make, patch: int) -> None:
    """Whatever else would have refused them, too."""
    rng = random.Random(patch)
    for _ in range(30):
        flags = some(rng, encoder=[False, True], tbo=[False, True], speculative=["", "eagle", "ngram"])
        more = some(rng, ragged=[False, True], hidden=["NULL", "FULL"], ranks=[False, True], width=[1, 2])
        if flags["encoder"]:
            flags["speculative"] = ""
        engine = sglang(patch, sizes=(1, 2, 4), **flags, **more)
        hidden = type(engine.runner.decode_cuda_graph_runner.capture_hidden_mode)
        for _ in range(4):
            batch = some(
                rng,
                replace_embeds=[None, object()],
                spec_info=[None, SimpleNamespace(num_tokens_per_req=2), SimpleNamespace(num_tokens_per_req=-1)],
                every_request_has_an_image=[True, False],
                can_run_tbo=[True, False],
                capture_hidden_mode=[hidden.NULL, hidden.LAST, hidden.FULL],
            )
            size, may = rng.choice([1, 2, 4, 5]), rng.choice([True, True, False])
            batch |= {"can_run_dp_cuda_graph": may, "can_run_decode_cuda_graph": may}
            batch["original_global_num_tokens_cpu"] = [size, rng.choice([1, 2, 6])]
            mode = rng.choice(["DECODE", "TARGET_VERIFY"]) if flags["speculative"] else "DECODE"
            if flags["encoder"]:
                # Only the device knows about images, so that this comes last.
                batch |= {"can_run_tbo": True, "capture_hidden_mode": hidden.NULL}
            told(engine, "sglang", engine.runner.decode_cuda_graph_runner, DECODE, mode, size, None, **batch)


@pytest.mark.parametrize("patch", PATCHES)
def test_prefill_passes_have_the_reason_of_the_first_condition(sglang: Make, patch: int) -> None:
    """Whatever else would have refused them, too."""
    rng = random.Random(patch)
    backends = ["breakable", "tc_piecewise"] if patch == 14 else ["breakable", "full"]
    for _ in range(30):
        flags = some(rng, prefill_backend=backends, hidden=["NULL", "FULL"], companion=[False, True])
        flags |= some(rng, lora=[False, True], unmixed=[False, True], context=[None, 70], metadata=[None, 1])
        flags |= some(rng, veto=[None, lambda batch: False], fa4=[False, True], qwen=[False, True])
        engine = sglang(patch, prefill=(16, 32, 64), **flags)
        hidden = type(engine.runner.prefill_cuda_graph_runner.capture_hidden_mode)
        for _ in range(4):
            batch = some(
                rng,
                input_embeds=[None, object()],
                replace_embeds=[None, object()],
                extend_prefix_lens_cpu=[[0], [10], [90]],
                capture_hidden_mode=[hidden.NULL, hidden.LAST, hidden.FULL],
                return_logprob=[False, True],
                extend_logprob_start_lens_cpu=[[0], [99]],
                seq_lens_cpu=[[20], [100]],
                global_num_tokens_cpu=[None, [20, 20], [20, 0]],
            )
            may, images = rng.choice([True, True, False]), rng.choice([False, False, True])
            batch |= {"can_run_dp_breakable_cuda_graph": may, "can_run_dp_prefill_cuda_graph": may, "images": images}
            mode, requests = rng.choice(["EXTEND", "MIXED"]), rng.choice([1, 2, 3])
            tokens = rng.choice([3, 20, 64, 65])
            if batch["input_embeds"] or batch["replace_embeds"]:
                batch["images"] = False
            told(
                engine,
                "sglang.prefill",
                engine.runner.prefill_cuda_graph_runner,
                PREFILL,
                mode,
                requests,
                tokens,
                **batch,
            )


def told(
    engine: Engine, name: str, runner: Any, table: dict[str, str], mode: str, requests: int, tokens: Any, **batch: Any
) -> None:
    """One pass has the path that the engine took, and the reason that stands for what it asked."""
    before = dict(rows(name))
    output = engine.runner.forward(engine.batches(mode, requests, tokens, **batch))
    (new,) = [row for row, calls in rows(name).items() if calls != before.get(row, 0)]
    word = runner.refused
    assert output.can_run_graph is (word is None)
    assert len(new) == (4 if word is None else 3)
    if word is not None:
        assert (word, table[word]) == (word, new[2]), (word, new, batch, vars(engine.settings))


@pytest.mark.parametrize("patch", (14, 15))
def test_without_padding_these_releases_replay_nothing(sglang: Make, patch: int) -> None:
    """They look for their graphs under the wrong key: captured sizes are told apart from others."""
    engine = sglang(patch, exact=True)
    engine.decode(2, 3)
    assert [("decode", 2, "not_captured"), ("decode", 3, "no_exact_bucket")] == sorted(reasons("sglang"))


@pytest.mark.parametrize("patch", (16, 23))
def test_without_padding_each_size_needs_a_graph(sglang: Make, patch: int) -> None:
    """A size that has one is refused for other reasons only."""
    engine = sglang(patch, exact=True, ranks=True)
    plain = {"original_global_num_tokens_cpu": [2, 2]}
    engine.run("DECODE", 2, **plain)
    engine.run("DECODE", 3, original_global_num_tokens_cpu=[3, 3])
    engine.run("DECODE", 2, can_run_dp_cuda_graph=False, can_run_decode_cuda_graph=False, **plain)
    found = rows("sglang")
    assert 1 == found["decode", 2, "full", 2]
    assert 1 == found["decode", 3, "no_exact_bucket"]
    assert 1 == found["decode", 2, "rank_vote"]


@pytest.mark.parametrize(("patch", "reason"), [(16, "engine_declined"), (17, "ragged")])
def test_hidden_states_are_a_reason_until_one_release(sglang: Make, patch: int, reason: str) -> None:
    """Later ones do not ask for them, and this pass is refused since its requests differ in length."""
    engine = sglang(patch, speculative="ngram", width=2, hidden="FULL")
    wanted = type(engine.runner.decode_cuda_graph_runner.capture_hidden_mode).LAST
    engine.run("TARGET_VERIFY", 2, 3, capture_hidden_mode=wanted)
    assert [("verify", 2, reason)] == reasons("sglang")


def test_an_engine_without_graphs_has_them_disabled(sglang: Make) -> None:
    """Decode in its settings; prefill has none by nature."""
    engine = sglang(sizes=())
    engine.decode(1, 2)
    engine.prefill(20)
    engine.run("MIXED", 3, 30)
    assert [("decode", 1, "disabled"), ("decode", 2, "disabled")] == sorted(reasons("sglang"))
    assert [("mixed", 30, "wrong_phase"), ("prefill", 20, "wrong_phase")] == sorted(reasons("sglang.prefill"))


def test_what_is_refused_after_the_predicate_is_declined(sglang: Make) -> None:
    """The predicate has said yes, and SGLang asked something else, too."""
    engine = sglang(prefill=(16, 32))
    engine.prefill(20, token_indices_to_pool=object())
    assert [("prefill", 20, "engine_declined")] == reasons("sglang.prefill")


def test_the_word_of_a_declined_condition_is_kept(sglang: Make) -> None:
    """SGLang's own word is in the snapshot."""
    engine = sglang(prefill=(16, 32))
    engine.prefill(20, replace_embeds=object())
    assert "declined/replace_embeds" in graphprobe.snapshot().forwards["sglang.prefill"].causes


def test_images_are_told_apart_from_other_embeddings(sglang: Make) -> None:
    """Both come as embeddings in the place of tokens."""
    engine = sglang(prefill=(16, 32))
    engine.prefill(20, input_embeds=object(), images=True)
    engine.prefill(20, input_embeds=object())
    assert {("prefill", 20, "multimodal"), ("prefill", 20, "engine_declined")} == set(reasons("sglang.prefill"))


def test_a_refused_verification_has_the_reason_of_decode(sglang: Make) -> None:
    """Graphs of prefill are asked as well, and refuse all verifications."""
    engine = sglang(prefill=(16, 32), speculative="eagle", sizes=(1, 2))
    engine.run("TARGET_VERIFY", 5, spec_info=SimpleNamespace(num_tokens_per_req=1))
    assert {("verify", 5, "batch_too_large"): 1} == rows("sglang")
    assert {} == rows("sglang.prefill")


def test_a_reason_that_cannot_be_found_is_unknown(sglang: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition that is new in a release has no word, and the pass is counted all the same."""
    engine = sglang(prefill=(16, 32))
    monkeypatch.setattr(type(engine.runner.prefill_cuda_graph_runner), "_new", lambda *_: [("new", True)])
    monkeypatch.setattr(type(engine.runner.decode_cuda_graph_runner), "conditions", lambda *_: [("new", True)])
    engine.decode(2)
    engine.prefill(20)
    assert {("decode", 2, "unknown"): 1} == rows("sglang")
    assert {("prefill", 20, "unknown"): 1} == rows("sglang.prefill")


def test_drafters_tell_why_they_have_no_graph(sglang: Make) -> None:
    """Too many requests, another width, a vote of the ranks, or no graphs at all."""
    engine = sglang(speculative="eagle", drafter=True, sizes=(1, 2), ranks=True)
    plain = {"original_global_num_tokens_cpu": [1]}
    engine.draft(1, spec_info=SimpleNamespace(num_tokens_per_req=7), **plain)
    engine.draft(2, can_run_decode_cuda_graph=False, **plain)
    engine.draft(5, original_global_num_tokens_cpu=[5])
    found = itertools.chain(reasons("sglang.drafter"))
    assert {("draft", 1, "spec_width"), ("draft", 2, "rank_vote"), ("draft", 5, "batch_too_large")} == set(found)
