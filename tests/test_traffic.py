"""What a source says of a forward's traffic: which calls a list could serve, and what else is known."""

from __future__ import annotations

import pytest

from graphprobe.buckets import MAX_BUCKET
from graphprobe.errors import ConfigError, SourceError
from graphprobe.ledger import Ledger
from graphprobe.observe import observe
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot, Times
from graphprobe.tools.sources import Reading
from graphprobe.tools.traffic import OFF, SERVABLE, UNEXPLAINED, Traffic, traffic
from tests.traffic import dispatched, rows, sampled, seen, windowed


def of(snapshot: Snapshot, forward: str | None = None, phase: str | None = None) -> Traffic:
    return traffic(Reading(snapshot), forward, phase)


# -- which forward ----------------------------------------------------------------------------------------------------


def both() -> Snapshot:
    """A target and its drafter, both with calls, and a forward that has none."""
    idle = ForwardSnapshot("vllm.idle", (1,))
    parts = [seen({(4, 4): 10}, name="vllm"), seen({(2, 2): 7}, name="vllm.drafter"), Snapshot({"vllm.idle": idle})]
    return Snapshot({name: forward for part in parts for name, forward in part.forwards.items()})


def test_of_several_forwards_with_calls_one_must_be_named() -> None:
    """Also of two parts of one engine, and where a name only begins as another one."""
    for name in ("sglang", "vllm2", "vllm.drafter"):
        other = "vllm.encoder" if name == "vllm.drafter" else "vllm"
        parts = (seen({(4, 4): 10}, name=name), seen({(2, 2): 7}, name=other))
        snapshot = Snapshot({name: forward for part in parts for name, forward in part.forwards.items()})
        with pytest.raises(ConfigError, match=rf"2 forwards have calls. hint: name one of: {name}, {other}$"):
            of(snapshot)


def test_an_engine_is_meant_itself_beside_its_drafter() -> None:
    """A drafter's calls are never mixed into those of its target, and a note says that there are some."""
    found = of(both())
    assert ("vllm", {4: 10}) == (found.forward, found.calls)
    assert ("vllm.drafter has lists and calls of its own: name it",) == found.notes
    assert () == of(both(), "vllm").notes
    assert ({4: 10}, {2: 7}) == (of(both(), "vllm").calls, of(both(), "vllm.drafter").calls)


def test_the_only_forward_with_calls_needs_no_name() -> None:
    """Forwards without calls are no choice."""
    idle = {"idle": ForwardSnapshot("idle", (1, 2))}
    assert "decode" == of(Snapshot({**idle, **seen({(1, 1): 1}).forwards})).forward


def test_a_forward_that_is_none_is_told_with_those_that_are() -> None:
    """Names are printed so that they cannot break a terminal."""
    odd = Snapshot({**both().forwards, "a\x1b[0m": ForwardSnapshot("a\x1b[0m")})
    with pytest.raises(
        ConfigError, match=r"there is no forward 'x'. hint: there are: vllm, vllm.drafter, vllm.idle, a\\x1b"
    ):
        of(odd, "x")


@pytest.mark.parametrize("given", [1, ["vllm"], {}, b"vllm", True])
def test_names_are_texts(given: object) -> None:
    """Anything else is refused as an argument, not as a source."""
    with pytest.raises(ConfigError, match="forward must be a name"):
        of(both(), given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="phase must be a name"):
        of(both(), "vllm", given)  # type: ignore[arg-type]


def test_nothing_seen_says_what_to_do() -> None:
    """No forward, no calls, no calls of this phase, no call that a graph could serve: four messages."""
    prefill = Snapshot({"decode": ForwardSnapshot("decode", rows=rows({(8, 8): 5}, phase="prefill"))})
    cases = {
        "no forward is in the source": Snapshot(),
        "decode: no calls yet. hint: run it under load": Snapshot({"decode": ForwardSnapshot("decode", (1,))}),
        "decode: no calls but prefill yet": prefill,
        "decode: no list of buckets would have served its calls: 9 adapter, 2 ragged": seen(
            {}, {(4, "adapter"): 9, (3, "ragged"): 2}, (4,)
        ),
    }
    for text, snapshot in cases.items():
        with pytest.raises(SourceError, match=text):
            of(snapshot)
    with pytest.raises(SourceError, match="decode: no calls of phase draft yet"):
        of(seen({(1, 1): 5}), phase="draft")


# -- which calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", FallbackReason, ids=str)
def test_each_reason_is_for_a_bucket_to_mend_or_not(reason: FallbackReason) -> None:
    """Eager calls could be served, or stay eager and count, or are no traffic at all; none is in two of these.

    What the hit rate does not count and a graph would not serve (training, another phase) is no traffic.
    """
    found = of(seen({(4, 4): 10}, {(3, str(reason)): 5}, (4,)))
    held = reason in UNEXPLAINED
    assert (5 if reason in SERVABLE else 0) == found.calls.get(3, 0)
    assert (5 if reason.counted and (reason not in SERVABLE or held) else 0) == found.stuck.get(3, 0)
    assert 10 == found.calls[4]
    assert found.stuck.get(3, 0) == found.stuck_why.get(reason, 0)


@pytest.mark.parametrize(
    "reason", ["no_exact_bucket", "batch_too_large", "not_captured", "graph_limit", "warmup", "disabled"]
)
def test_calls_that_a_bucket_would_serve_are_traffic(reason: str) -> None:
    """Warm-up and switched-off graphs hide no traffic."""
    assert {3: 5} == of(seen({}, {(3, reason): 5}, (4,))).calls


@pytest.mark.parametrize("reason", ["adapter", "spec_width", "ragged", "multimodal", "signature", "capture_failed"])
def test_calls_that_no_bucket_would_serve_stay_eager(reason: str) -> None:
    """They are kept apart by size and by reason."""
    found = of(seen({(4, 4): 10}, {(3, reason): 5, (2, reason): 1}, (4,)))
    assert ({4: 10}, {3: 5, 2: 1}, {FallbackReason(reason): 6}) == (found.calls, found.stuck, found.stuck_why)


@pytest.mark.parametrize("reason", ["unknown", "engine_declined"])
def test_an_unexplained_eager_call_is_for_a_bucket_where_none_held_it(reason: str) -> None:
    """Where a bucket held its size something else kept it from the graph; without a list nothing is known."""
    eager = {(3, reason): 5, (9, reason): 7}
    padded, exact = {(1, 4): 1}, {(2, "no_exact_bucket"): 1}
    assert ({3: 5, 9: 7}, {}) == (of(seen({}, eager)).calls, of(seen({}, eager)).stuck)
    assert {3: 5} == of(seen(padded, eager, (4,))).stuck
    assert {9: 7, 1: 1} == of(seen(padded, eager, (4,))).calls
    assert {3: 5, 9: 7, 2: 1} == of(seen({}, {**eager, **exact}, (4,))).calls
    assert {3: 5} == of(seen({}, {**eager, **exact}, (3, 4))).stuck


def test_prefill_is_no_traffic() -> None:
    """Long prefills are eager by design: neither calls nor times nor the way of dispatch are taken from them."""
    decode = rows({(4, 4): 10})
    prefill = rows({(100, 128): 30}, {(9000, "batch_too_large"): 5, (1, "no_exact_bucket"): 5}, "prefill")
    times = {**sampled("graph", {4: (2, 9e-3)}), **sampled("graph", {128: (2, 90e-3)}, "prefill")}
    times |= sampled("eager", {None: (4, 0.5)}, "prefill")
    snapshot = Snapshot({"d": ForwardSnapshot("d", (4, 128), rows=decode + prefill, times=times)})
    found = of(snapshot)
    assert ({4: 10}, {4: 10}, None, 1.0) == (found.calls, found.hits, found.pads, found.hit_rate)
    assert ({4}, {}) == (set(found.graph), found.eager)
    assert {100: 30, 9000: 5, 1: 5} == of(snapshot, phase="prefill").calls
    assert of(snapshot, phase="prefill").pads


def test_draft_and_verify_steps_are_traffic() -> None:
    """All phases but prefill are, as the hit-rate alert has it; a phase can be named."""
    parts = rows({(1, 1): 1}, phase="verify") + rows({(2, 2): 2}, phase="draft") + rows({(3, 3): 3}, phase="mixed")
    snapshot = Snapshot({"d": ForwardSnapshot("d", rows=parts)})
    assert ({1: 1, 2: 2, 3: 3}, {2: 2}) == (of(snapshot).calls, of(snapshot, phase="draft").calls)


def test_rows_without_calls_or_rows_are_no_traffic() -> None:
    """A size is never born of a row that counted nothing, nor of an empty batch."""
    found = of(seen({(4, 4): 10, (8, 8): 0, (0, 4): 7}, {(0, "empty_batch"): 3, (16, "batch_too_large"): 0}, (4, 8)))
    assert ({4: 10}, {4: 10}) == (found.calls, found.hits)


def test_a_size_that_is_no_batch_is_refused() -> None:
    """A count of bytes or of a corpus would make a bucket of itself."""
    with pytest.raises(SourceError, match=f"a call of {MAX_BUCKET + 1:,} rows, and no bucket may be above"):
        of(seen({}, {(MAX_BUCKET + 1, "batch_too_large"): 1}, (4,)))


def test_counts_of_any_length_are_exact() -> None:
    """Years of calls are whole numbers."""
    assert 10**18 + 1 == of(seen({(4, 4): 10**18, (2, 2): 1})).total


# -- what is known of the forward -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "eager", "expected"),
    [
        ({(3, 4): 1}, {}, True),
        ({(3, 4): 1}, {(2, "no_exact_bucket"): 9}, True),
        ({(4, 4): 1}, {(2, "no_exact_bucket"): 1}, False),
        ({(4, 4): 1}, {(9, "batch_too_large"): 1}, None),
    ],
)
def test_how_buckets_are_chosen_is_seen_or_not_known(graph: dict, eager: dict, expected: bool | None) -> None:
    """One padded call shows padding; a miss inside the list shows its absence; hits of their own size show nothing."""
    assert expected is of(seen(graph, eager, (2, 4))).pads


def test_calls_while_graphs_were_off_are_told_apart() -> None:
    """They are traffic, but no list would have helped them."""
    found = of(seen({(4, 4): 1}, {(3, "disabled"): 5, (2, "unsupported_device"): 2, (1, "warmup"): 1}, (4,)))
    assert dict(zip(sorted(OFF), [5, 2], strict=True)) == found.off


def test_the_hit_rate_is_that_of_the_snapshot() -> None:
    """As table and alert have it; None where no call counts, or where sizes alone are known."""
    snapshot = seen({(4, 4): 30}, {(3, "no_exact_bucket"): 10, (2, "warmup"): 5, (2, "adapter"): 20}, (4,))
    assert 0.5 == snapshot.forwards["decode"].hit_rate == of(snapshot).hit_rate
    assert of(seen({}, {(2, "disabled"): 5}, (4,))).hit_rate is None
    assert traffic(Reading(snapshot, kind="sizes")).hit_rate is None


def test_times_are_those_of_a_bucket_over_all_its_modes() -> None:
    """Sums and counts add up; what has no sample or no duration is not known."""
    times = sampled("graph", {4: (10, 9e-3), 8: (0, 0.0), 16: (3, 0.0)})
    times |= sampled("graph", {4: (30, 11e-3)}, mode="piecewise") | sampled("graph", {None: (3, 1.0)}, "verify")
    found = of(seen({(4, 4): 1}, {}, (4,), times=times))
    assert {4: Times(40, pytest.approx(0.42), ())} == found.graph


def test_an_eager_time_stands_at_the_mean_size_of_eager_calls() -> None:
    """Which size was timed is not told; the bucket under which a sample stands is none that served it."""
    times = sampled("eager", {None: (3, 30e-3), 8: (1, 70e-3)})
    found = of(seen({(4, 4): 100}, {(3, "no_exact_bucket"): 10, (9, "adapter"): 20}, (4,), times=times))
    assert {7: Times(4, pytest.approx(0.16), ())} == found.eager


def test_piecewise_hits_are_counted_apart() -> None:
    """A hit on a graph of a part is one, and told."""
    found = of(
        Snapshot(
            {
                "d": ForwardSnapshot(
                    "d", rows=(*rows({(4, 4): 3}), Row(4, "graph", 4, None, 5, 0, "decode", "piecewise"))
                )
            }
        )
    )
    assert (8, 5, {4: 8}) == (found.total, found.partly, found.hits)


def test_windows_are_sorted_as_the_whole_is() -> None:
    """A window may show neither padding nor a list: what is known of the whole decides for it."""
    windows = [{3: 5, 9: 2}, {}, {4: 1}]
    found = traffic(windowed(windows, (4,), True))
    assert ({3: 5, 9: 2}, {}, {4: 1}) == found.windows
    whole = seen({(2, 4): 1}, {(3, "unknown"): 4}, (4,))
    window = seen({}, {(3, "unknown"): 4})
    assert ({},) == traffic(Reading(whole, (window,))).windows


def test_a_window_may_lack_the_forward() -> None:
    """It had no calls then."""
    assert ({}, {4: 1}) == traffic(Reading(seen({(4, 4): 1}), (Snapshot(), seen({(4, 4): 1})))).windows


def test_a_pool_that_shrank_is_no_negative_use() -> None:
    """Growth of a shared pool may be negative; a graph takes nothing at least."""
    found = of(seen({(4, 4): 1}, {}, (4, 8), pool_growth={4: -5, 8: 100}, capture_seconds={8: 0.5}))
    assert ({4: 0, 8: 100}, {8: 0.5}) == (found.graph_bytes, found.capture_seconds)


def test_an_engine_that_is_observed_is_read_like_any_other(ledger: Ledger) -> None:
    """Piecewise graphs, padded dispatch and an eager call of its own reason, from the ledger."""
    probe = observe("engine", buckets=[4, 8], ledger=ledger)
    for _ in range(3):
        probe.graph_call(3, 4, mode="piecewise")
    probe.eager_call(12, "batch_too_large")
    probe.eager_call(700, "wrong_phase", phase="prefill")
    found = of(ledger.snapshot())
    assert ({3: 3, 12: 1}, (4, 8), 3, True) == (found.calls, found.buckets, found.partly, found.pads)


# -- what is left out of it -------------------------------------------------------------------------------------------


def test_sizes_above_a_bound_can_be_left_out_and_that_is_told() -> None:
    """Calls, windows and what stays eager lose them; the hit rate was one of other calls."""
    whole = traffic(windowed([{3: 5, 90: 2}, {100: 1}], (4,), True))
    found = whole.up_to(64, "they are prompts")
    assert ({3: 5}, ({3: 5}, {}), None) == (found.calls, found.windows, found.hit_rate)
    assert "3 calls of 90 to 100 rows are left out: they are prompts" == found.notes[-1]
    assert whole is whole.up_to(100, "")
    with pytest.raises(SourceError, match="left out: they are prompts, and there are no others"):
        whole.up_to(2, "they are prompts")


def test_padded_and_exact_dispatch_give_back_the_calls_that_went_in() -> None:
    """Whatever served a size, it was sent."""
    calls = {1: 3, 5: 2, 9: 7, 30: 1}
    for pad in (True, False):
        assert calls == of(dispatched(calls, (4, 8, 16), pad)).calls


def test_what_is_left_out_is_left_out_everywhere() -> None:
    """Warm-up, piecewise graphs and other reasons of sizes that no decode step has are not its own."""
    graph = [
        Row(4, "graph", 8, None, 5000, 0, "decode", "full"),
        Row(300, "graph", 512, None, 5000, 0, "decode", "piecewise"),
    ]
    eager = [Row(2048, "eager", None, FallbackReason.WARMUP, 6000), Row(900, "eager", None, FallbackReason.ADAPTER, 70)]
    found = traffic(Reading(seen(buckets=(8, 512), rows=(*graph, *eager)))).up_to(8, "why")
    assert (5000, 0, 0, {}, {}) == (found.total, found.partly, found.warming, found.stuck, found.stuck_why)
