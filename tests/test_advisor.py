"""``graphprobe.advise``: what it reads, what it takes the engine to be, and what it refuses."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest

import graphprobe
from graphprobe.buckets import MAX_BUCKET
from graphprobe.errors import ConfigError, SourceError
from graphprobe.ledger import LEDGER, Ledger
from graphprobe.observe import observe
from graphprobe.snapshot import Snapshot
from graphprobe.tools.advice import Advice
from graphprobe.tools.advisor import advise
from graphprobe.tools.sources import Reading
from tests.traffic import dispatched, sampled, seen

TIMED: dict[str, Any] = {"times": {1: 9e-3, 16: 10.2e-3, 64: 14e-3}, "eager_times": {1: 27e-3, 64: 31e-3}}
MISSED = seen({(4, 4): 5000}, {(3, "no_exact_bucket"): 5000}, (1, 2, 4))
PADDED = dispatched({9: 5000, 16: 100}, [8, 16, 32], True)


def said(found: Advice) -> str:
    return "\n".join((*found.warnings, *found.notes))


# -- sources ----------------------------------------------------------------------------------------------------------


def test_without_a_source_it_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live ledger, read and not changed."""
    monkeypatch.setattr(LEDGER, "forwards", {})
    with pytest.raises(SourceError, match="no forward is in the source"):
        graphprobe.advise()
    probe = observe("engine", buckets=[1, 2, 4])
    for _ in range(1200):
        probe.eager_call(3, "no_exact_bucket")
    found = graphprobe.advise(**TIMED)
    assert ("engine", 1200, True) == (found.forward, found.calls, 3 in found.buckets)
    assert 1200 == LEDGER.snapshot().forwards["engine"].eager_calls


@pytest.mark.parametrize("ask", [{"end": 5.0}, {"match": 'job="vllm"'}])
def test_a_time_without_a_window_is_refused_for_this_process_too(ask: dict[str, Any]) -> None:
    """It is no Prometheus, and would answer for its whole life."""
    with pytest.raises(ConfigError, match="without a window of time"):
        advise(**ask)


def test_a_snapshot_a_file_of_one_and_a_reading_say_the_same(tmp_path: Path) -> None:
    """By whatever name the source comes."""
    file = tmp_path / "snapshot.json"
    file.write_text(MISSED.to_json())
    answers = {advise(source, **TIMED).to_json() for source in (MISSED, file, str(file), Reading(MISSED))}
    assert 1 == len(answers)


def test_sizes_alone_are_traffic_of_a_list_that_is_given(tmp_path: Path) -> None:
    """One size a line: nothing tells what served them, so no hit rate was seen."""
    file = tmp_path / "sizes.csv"
    file.write_text("batch_size\n" + "3\n4\n" * 3000)
    found = advise(file, buckets=[4], **TIMED)
    assert (6000, None, (4,), 0.5) == (
        found.calls,
        found.measured_hit_rate,
        found.now and found.now.buckets,
        found.now and found.now.hit_rate,
    )
    assert (3, 4) == found.buckets
    assert "sizes alone do not tell what served them" in said(found)


@pytest.mark.parametrize("source", [5, 1.5, True, [1, 2], {}, {"forwards": {}}, object()])
def test_a_source_that_is_none_is_refused(source: Any) -> None:
    """A list of sizes belongs into a file."""
    with pytest.raises(ConfigError, match="source must be an address, a file or a snapshot"):
        advise(source)


def test_an_engine_that_is_observed_is_advised_like_any_other(ledger: Ledger) -> None:
    """Sizes, times, piecewise graphs and padding, from the ledger to the line."""
    probe = observe("engine", buckets=[4, 8, 64], ledger=ledger)
    for _ in range(2000):
        probe.graph_call(9, 64, mode="piecewise")
    probe.forward.time("graph", 8, 9e-3)
    probe.forward.time("graph", 64, 20e-3)
    found = advise(ledger.snapshot())
    assert (True, False, 9) == (found.pads, found.keep, found.best.buckets[0])
    assert "graph times as measured (2 samples): 8: 9, 64: 20 ms" in said(found)
    assert "100 % of the graph calls were piecewise or breakable: only a part of those is a graph" in said(found)


def test_measured_times_decide_unless_others_are_given() -> None:
    """Expected seconds are those of the samples at the bucket."""
    times = sampled("graph", {4: (10, 7e-3), 8: (10, 8e-3)}) | sampled("eager", {None: (5, 50e-3)})
    snapshot = seen({(4, 4): 3000}, {(3, "no_exact_bucket"): 1000}, (4, 8), times=times)
    assert (0.75 * 7e-3 + 0.25 * 50e-3) == pytest.approx(getattr(advise(snapshot).now, "seconds", None))
    given = advise(snapshot, times={4: 1.0, 8: 1.0}, eager_times={3: 3.0})
    assert 1.5 == pytest.approx(getattr(given.now, "seconds", None))


# -- which engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "engine"),
    [
        ("decode", None, "graphprobe"),
        ("vllm", None, "vllm"),
        ("vllm.drafter", None, "vllm"),
        ("sglang", None, "sglang"),
        ("vllmish", None, "graphprobe"),
        ("decode", "lmdeploy", "lmdeploy"),
        ("vllm", "tensorrt-llm", "tensorrt-llm"),
    ],
)
def test_the_engine_is_that_of_the_forwards_name_or_the_one_that_is_named(
    name: str, given: str | None, engine: str
) -> None:
    """Whose rule holds, and whose line is printed."""
    found = advise(dispatched({4: 2000, 3: 2000}, [4], True, name), engine=given, **TIMED)
    assert engine == found.engine
    assert ("cudagraph_capture_sizes" in found.line) is (engine == "vllm")
    assert ("@graphprobe.capture" in found.line) is (engine == "graphprobe")


def test_dispatch_is_as_told_else_as_seen_else_as_the_engine_does() -> None:
    """And where it is neither told nor seen, the first line says so."""
    only_hits = seen({(4, 4): 2000}, {}, (2, 4))
    assert [False, True, True] == [advise(one, **TIMED).pads for one in (MISSED, PADDED, dispatched({3: 9}, [4], True))]
    assert [True, False] == [advise(MISSED, pad=pad, **TIMED).pads for pad in (True, False)]
    assert not advise(only_hits, **TIMED).pads
    for engine, says in (
        ("graphprobe", "only a bucket of its own size serves a batch; pad=True is the other way)"),
        ("sglang", "a larger bucket serves a smaller batch; pad=False is the other way)"),
    ):
        found = advise(only_hits, engine=engine, **TIMED)
        assert found.assumed
        assert f"dispatch (assumed, no call tells: {says}" in " ".join(str(found).split())
    for sure in (
        advise(PADDED, **TIMED),
        advise(only_hits, pad=False, **TIMED),
        advise(only_hits, engine="vllm", **TIMED),
    ):
        assert not sure.assumed
        assert "assumed" not in str(sure)


def test_what_an_engine_always_does_is_not_asked_of_what_was_seen() -> None:
    """A forward named vllm that missed inside its list is no reason to refuse it; to ask for no padding is one."""
    missed = seen({(4, 4): 2000}, {(3, "no_exact_bucket"): 500}, (2, 4), "vllm")
    assert advise(missed, **TIMED).pads
    with pytest.raises(ConfigError, match="vllm always pads, got pad=False"):
        advise(missed, pad=False, **TIMED)


# -- today's list -----------------------------------------------------------------------------------------------------


def test_todays_list_is_that_of_the_source_or_the_one_that_is_given() -> None:
    """In any order, from anything that yields it."""
    assert (8, 16, 32) == getattr(advise(PADDED, **TIMED).now, "buckets", None)
    assert (9, 16) == getattr(advise(PADDED, buckets=iter([16, 9]), **TIMED).now, "buckets", None)


def test_a_given_list_is_what_the_engine_makes_of_it() -> None:
    """vLLM rounds to whole requests: of five sizes three graphs are left, and that is said."""
    snapshot = seen({(4, 4): 2000, (8, 8): 2000}, {}, (4, 8, 16), "vllm", unit="tokens")
    found = advise(snapshot, buckets=[1, 2, 4, 8, 16], spec_tokens=3, **TIMED)
    assert (4, 8, 16) == getattr(found.now, "buckets", None)
    assert "of today's list vllm makes graphs of 4, 8, 16: vllm rounds sizes up to whole requests of 4" in said(found)


def test_a_list_of_which_the_engine_captures_nothing_is_refused() -> None:
    """With what is wrong with it; one that the source says was captured was captured, whatever the rule says."""
    with pytest.raises(ConfigError, match=r"vllm captures nothing of buckets \[1, 2\]. hint: .*whole requests of 4"):
        advise(PADDED, engine="vllm", buckets=[1, 2], spec_tokens=3, **TIMED)
    odd = seen({(3, 3): 2000}, {}, (3,), "vllm", unit="tokens")
    assert (3,) == getattr(advise(odd, spec_tokens=3, **TIMED).now, "buckets", None)


# -- limits of the engine ---------------------------------------------------------------------------------------------


def test_sizes_above_the_limit_are_told_and_stay_eager() -> None:
    """No list serves them: neither hit rate nor proposal pretends to."""
    found = advise(dispatched({8: 5000, 100: 5000}, [8, 64], True), engine="sglang", largest=64, **TIMED)
    assert (0.5, (8, 64)) == (found.best.hit_rate, found.best.buckets)
    assert "5,000 calls of 100 run eagerly with any list: no decode graph has more than 64 requests" in said(found)


def test_a_declared_maximum_above_the_limit_is_told_before_it_comes() -> None:
    """The largest allowed size is there."""
    found = advise(dispatched({8: 5000}, [8, 64], True), engine="sglang", largest=64, max_batch=200, **TIMED)
    assert 64 == found.best.buckets[-1]
    assert "above 64, batches up to the declared 200 run eagerly with any list: no decode graph has more" in said(found)


def test_an_engine_that_can_capture_nothing_is_refused() -> None:
    """Its limit is below a single request."""
    with pytest.raises(
        ConfigError, match=r"vllm can capture nothing here. hint: .*no decode graph has more than 2 tokens"
    ):
        advise(PADDED, engine="vllm", spec_tokens=3, largest=2, max_batch=16, **TIMED)


def test_all_sizes_above_the_limit_leave_nothing_to_serve() -> None:
    """It still answers, with a hit rate of nothing."""
    found = advise(dispatched({80: 5000}, [80], True), engine="sglang", largest=64, **TIMED)
    assert (0.0, (64,)) == (found.best.hit_rate, found.best.buckets)


# -- tokens, requests, prompts ----------------------------------------------------------------------------------------


def vllm(**more: Any) -> Snapshot:
    """Decode steps of up to 64 tokens, and steps with prompts, as a log of vLLM has them."""
    calls = dict.fromkeys(range(1, 65), 300)
    return seen(
        {(n, -(-n // 8) * 8): count for n, count in calls.items()},
        {(700, "unknown"): 20, (2048, "unknown"): 500},
        range(8, 257, 8),
        "vllm",
        unit="tokens",
        **more,
    )


def test_steps_with_prompts_are_no_reason_for_a_graph_of_thousands_of_tokens() -> None:
    """Above what vLLM captures when told nothing, steps are taken for prompts, and that is said."""
    found = advise(vllm(), **TIMED)
    assert (64 * 300, True) == (found.calls, found.best.buckets[-1] <= 256)
    assert "520 calls of 700 to 2,048 tokens are left out: they are taken for steps with prompts" in said(found)
    assert found.measured_hit_rate is None


def test_a_number_of_requests_tells_which_steps_hold_prompts() -> None:
    """No decode step of 16 requests has more than 16 tokens."""
    found = advise(vllm(), max_seqs=16, **TIMED)
    assert (16 * 300, 16) == (found.calls, found.best.buckets[-1])
    assert "no decode step has more than 16, so these hold prompts" in said(found)
    with pytest.raises(SourceError, match="and there are no others"):
        advise(seen({}, {(2048, "unknown"): 500}, (8,), "vllm", unit="tokens"), max_seqs=16, **TIMED)


def test_a_maximum_in_tokens_is_believed_of_all_steps() -> None:
    """Who declares 2,048 tokens gets a graph of them; who declares fewer than were seen is told so."""
    assert 2048 == advise(vllm(), max_batch=2048, **TIMED).best.buckets[-1]
    with pytest.raises(ConfigError, match="the declared largest batch of 64 is below size 2048, seen 500 times"):
        advise(vllm(), max_batch=64, **TIMED)


@pytest.mark.parametrize(("engine", "widest"), [("vllm", 32), ("graphprobe", 32), ("sglang", 8), ("tensorrt-llm", 8)])
def test_requests_are_counted_in_the_unit_of_the_engine(engine: str, widest: int) -> None:
    """Eight requests of 1 + 3 tokens are 32 tokens, and 8 requests."""
    snapshot = dispatched({8: 3000, 4: 3000}, [4, 8], True, engine)
    found = advise(snapshot, engine=engine, max_seqs=8, spec_tokens=3, **TIMED)
    assert (widest, widest) == (found.max_batch, found.best.buckets[-1])


def test_a_maximum_below_all_requests_contradicts_them() -> None:
    """One above them counts."""
    with pytest.raises(
        ConfigError, match=r"max_batch 16 is below 8 requests of 4 tokens, 32. hint: leave one of them out"
    ):
        advise(PADDED, engine="vllm", max_batch=16, max_seqs=8, spec_tokens=3, **TIMED)
    assert 40 == advise(PADDED, engine="vllm", max_batch=40, max_seqs=8, spec_tokens=3, **TIMED).best.buckets[-1]


def test_what_is_known_ahead_of_traffic_is_told_with_one_line_to_paste() -> None:
    """Speculative tokens that no graph holds are a warning; the line is that of the traffic."""
    snapshot = seen({(4, 4): 3000, (16, 16): 3000}, {}, (4, 8, 16), "vllm", unit="tokens")
    found = advise(snapshot, buckets=[4, 8, 16], max_seqs=8, spec_tokens=3, **TIMED)
    assert "the largest step has 32 tokens, the largest decode graph 16: 5 to 8 requests" in said(found)
    assert 1 == str(found).count("cudagraph_capture_sizes")
    assert (False, 32) == (found.keep, found.buckets[-1])


def test_a_sampled_step_outside_the_times_is_told() -> None:
    """Below the smallest known size nothing is faster, above the largest a line is prolonged."""
    found = advise(dispatched({4: 3000, 90: 10}, [90], True), times={8: 9e-3, 64: 14e-3}, eager_times={8: 3e-2})
    assert "no graph below 8 has a known time: smaller ones are taken to be no faster, which may be wrong" in said(
        found
    )
    assert "no graph above 64 has a known time: the times of larger ones are a prolonged line" in said(found)
    inside = advise(dispatched({8: 3000}, [8, 64], True), times={8: 9e-3, 64: 14e-3}, eager_times={8: 3e-2})
    assert "known time" not in said(inside)


def test_graphs_that_are_off_are_told() -> None:
    """The figures are for when they are on: today's list did not give the hit rate that stands beside it."""
    found = advise(seen({}, {(n, "disabled"): 700 for n in (1, 2, 3, 4)}, (1, 2, 4)), **TIMED)
    assert (2800, None, 0.75) == (found.calls, found.measured_hit_rate, found.now and found.now.hit_rate)
    assert "2,800 calls ran eagerly as graphs are switched off" in said(found)
    assert "never replayed" not in said(found)


def test_warm_up_alone_is_too_thin() -> None:
    """Calls of an engine that just started are no traffic to tune by, however many they are."""
    found = advise(seen({}, {(n, "warmup"): 20_000 for n in (1, 2, 3)}, (1, 2, 4)), **TIMED)
    assert (True, (1, 2, 4)) == (found.keep, found.buckets)
    assert "0 calls beside 60,000 of the warm-up are too few to judge by" in found.why


def test_a_hit_rate_that_the_list_does_not_explain_is_told() -> None:
    """Half of the calls of a bucket that exists were eager, since it was not captured."""
    found = advise(seen({(4, 4): 1000}, {(2, "not_captured"): 1000}, (2, 4)), **TIMED)
    assert "the hit rate was 50 %; with all of today's list captured: 100 %" in said(found)
    assert "the hit rate was" not in said(advise(MISSED, **TIMED))


# -- bad input --------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
NUMBERS: list[Any] = [True, -1, 0, NAN, INF, -INF, "1", [1], {1: 1}, 1e300, 10**400, object()]
WHOLE: list[Any] = [*NUMBERS[:8], 1.5, object()]
BAD: dict[str, list[Any]] = {
    "forward": ["x", "", 5, [], True],
    "phase": ["x", "", 5, []],
    "buckets": [[], 5, "4", [0], [-1], [1.5], ["4"], [4, 4], [None], [MAX_BUCKET + 1], range(1, 2000)],
    "max_buckets": WHOLE,
    "max_batch": [*WHOLE, 3, MAX_BUCKET + 1],
    "max_seqs": [*WHOLE, 3, MAX_BUCKET + 1],
    "spec_tokens": [True, None, -1, NAN, 1.5, "1", [1]],
    "pad": [0, 1, "yes", [], NAN],
    "engine": ["", "x", 5, [], True, b"vllm"],
    "tensor_parallel": [*WHOLE, None],
    "largest": WHOLE,
    "times": [{}, 5, {0: 1e-3}, {1: 0}, {1: NAN}, {1: 1e12}],
    "eager_times": [{}, 5, {0: 1e-3}, {1: 0}, {1: NAN}, {1: 1e12}],
    "threshold": [True, -0.1, 1, 2, NAN, INF, "0.02", None, [0.02]],
    "graph_bytes": [-1, NAN, INF, "1", [1], True, {1: -1}, {1: NAN}, {-1: 1}, {"1": 1}, {1.5: 1}, {1: None}, 1e300],
    "capture_seconds": [-1, NAN, INF, "1", [1], True, {1: -1}, {1: NAN}, {-1: 1}, {"1": 1}, {1.5: 1}, {1: None}, 1e300],
    "max_bytes": NUMBERS,
    "max_capture_seconds": NUMBERS,
    "calls_per_start": [*NUMBERS, 0.5],
    "gib_worth": NUMBERS,
    "window": [5.0],
    "end": [5.0],
    "match": ["x"],
    "timeout": [],
}


def test_the_list_of_bad_input_has_every_argument() -> None:
    """A new one is tested from its first day. (A timeout means nothing to a snapshot.)"""
    assert {*inspect.signature(advise).parameters} - {"source"} == set(BAD)


@pytest.mark.parametrize(
    ("name", "bad"), [(name, bad) for name, values in BAD.items() for bad in values], ids=lambda part: repr(part)[:25]
)
def test_bad_input_is_refused_with_a_message_of_ours(name: str, bad: Any) -> None:
    """Never a TypeError of something within, never an answer to another question than was asked."""
    known = {"graph_bytes": 2**20, "capture_seconds": 0.5, **TIMED}
    with pytest.raises((ConfigError, SourceError)) as caught:
        advise(PADDED, **{**known, name: bad})
    assert re.search(r"\w{4,}.*\w", str(caught.value))


def test_numbers_of_any_kind_that_are_numbers_are_taken() -> None:
    """Whole bytes, parts of a second, a figure by size, and 0 for any other size."""
    found = advise(PADDED, graph_bytes={0: 5, 16: 7.5}, capture_seconds=1, **TIMED)
    assert (17, 3.0) == (found.now and found.now.bytes, found.now and found.now.capture_seconds)
    mean = advise(PADDED, graph_bytes={8: 4, 16: 8}, **TIMED)
    assert 18 == (mean.now and mean.now.bytes)
    assert (None, None) == (advise(PADDED, **TIMED).best.bytes, advise(PADDED, graph_bytes={}, **TIMED).best.bytes)


def test_measured_seconds_of_captures_are_told_as_such() -> None:
    """Those that were given are told as given."""
    snapshot = seen({(8, 8): 3000}, {}, (4, 8), capture_seconds={4: 0.2, 8: 0.4})
    found = advise(snapshot, max_batch=64, **TIMED)
    assert pytest.approx(0.6) == (found.now and found.now.capture_seconds)
    assert "capture seconds as measured, the mean of them for sizes that were not captured" in said(found)
    assert "capture seconds as given" in said(advise(snapshot, capture_seconds=0.5, **TIMED))


def test_a_limit_that_not_even_one_graph_keeps_is_refused_with_both_figures() -> None:
    """The bucket that must be there, what it takes, and what there is."""
    with pytest.raises(
        ConfigError, match=r"the bucket 32 must be there, and takes 200 bytes of 150\b.*declare a smaller"
    ):
        advise(PADDED, graph_bytes={0: 10, 32: 200}, max_bytes=150, max_batch=32, **TIMED)


# -- large input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [True, False])
def test_thousands_of_sizes_and_quadrillions_of_calls_are_answered(pad: bool) -> None:
    """All figures stay finite, and the proposal is no larger than asked."""
    calls = {n: 10**15 - n for n in range(1, 8193)}
    times = {"times": {1: 9e-3, 8192: 1.0}, "eager_times": {1: 3e-2, 8192: 1.2}}
    found = advise(dispatched(calls, [64, 512, 8192], pad), pad=pad, **times)
    assert found.best.graphs <= 64
    assert 8192 == found.best.buckets[-1]
    assert math.isfinite(found.best.seconds)
    assert 0 <= found.confidence <= 1
    assert sum(calls.values()) == found.calls


@pytest.mark.parametrize("engine", ["graphprobe", "vllm"])
def test_a_maximum_of_a_million_is_covered(engine: str) -> None:
    """In tokens or rows; a trap below it is looked for in no million steps."""
    found = advise(PADDED, engine=engine, pad=True, max_batch=10**6, **TIMED)
    assert 10**6 == found.best.buckets[-1]
    assert found.best.graphs <= 64


def test_a_list_in_use_of_a_thousand_graphs_is_compared() -> None:
    """As many as a list may have."""
    found = advise(dispatched(dict.fromkeys(range(1, 1025), 50), range(1, 1025), True), pad=True, **TIMED)
    assert 1024 == (found.now and found.now.graphs)
