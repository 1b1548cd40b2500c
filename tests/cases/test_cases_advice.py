"""Buckets chosen by hand, and what that cost: reports from public engines, each as a test (H89 to H91)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphprobe
from graphprobe.tools.advice import Advice
from tests.traffic import dispatched, seen, server

TIMED: dict[str, Any] = {"times": {8: 9e-3, 16: 11.8e-3, 32: 15e-3}, "eager_times": {8: 30e-3}}


def flat(found: Advice) -> str:
    return re.sub(r"\s+", " ", str(found))


# -- H89: batch 9 padded to 16 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("timed", [TIMED, {}], ids=["timed", "modelled"])
def test_a_batch_that_is_padded_most_of_the_time_gets_a_bucket_of_its_own(timed: dict[str, Any]) -> None:
    """Nine rows padded to 16 a thousand times are 7,000 rows: they are printed, and the advice has a 9.

    (H89, vllm-project/vllm#12920).
    """
    found = graphprobe.advise(dispatched({9: 1000, 16: 10}, [8, 16, 32], True), **timed)
    assert found.now is not None
    assert (False, True) == (found.keep, 9 in found.buckets)
    assert 7000 == found.now.padded_rows
    assert found.best.padded_rows == sum(
        n * (server(size, found.buckets, True) - size)  # type: ignore[operator]
        for size, n in ((9, 1000), (16, 10))
    )
    assert found.best.padded_rows < 200
    assert re.search(r" now 100 % \S+ 7,000 6\.93 3 ", flat(found))
    assert re.search(rf" best 100 % \S+ {found.best.padded_rows} 0\.\d\d {found.best.graphs} ", flat(found))


def test_the_bucket_of_its_own_saves_what_was_reported() -> None:
    """Twelve milliseconds where nine would do: a quarter of the time (H89, vllm-project/vllm#12920)."""
    found = graphprobe.advise(dispatched({9: 1000, 16: 10}, [8, 16, 32], True), times={8: 9e-3, 9: 9e-3, 16: 12e-3})
    assert found.gain == pytest.approx(0.25, abs=0.02)


def test_a_batch_that_fills_its_bucket_is_left_alone() -> None:
    """A thousand batches of 16 in a bucket of 16: no change is advised (H89, vllm-project/vllm#12920)."""
    for timed in (TIMED, {}):
        found = graphprobe.advise(dispatched({16: 1000}, [8, 16, 32], True), **timed)
        assert (True, (8, 16, 32), 0) == (found.keep, found.buckets, found.best.padded_rows)
        assert "keep what you have" in str(found)


# -- H90: denser lists, and what they take ----------------------------------------------------------------------------

MIB = 1 << 20


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.integers(1, 128), st.integers(1, 10**6), min_size=1, max_size=20),
    st.lists(st.integers(1, 128), min_size=1, max_size=12, unique=True),
    st.booleans(),
)
def test_no_advice_takes_more_graphs_or_memory_than_there_may_be(
    calls: dict[int, int], today: list[int], pad: bool
) -> None:
    """Four graphs of 100 MiB, and 300 MiB in all: neither limit is passed, whatever was seen and is in use.

    (H90, NVIDIA/TensorRT-LLM#12895 and NVIDIA/TensorRT-LLM#13393).
    """
    found = graphprobe.advise(
        dispatched(calls, today, pad), pad=pad, max_buckets=4, graph_bytes=100 * MIB, max_bytes=300 * MIB
    )
    for plan in (found.best, found.plan, found.leaner):
        if plan is not None:
            assert plan.graphs <= 4
            assert plan.graphs * 100 * MIB == plan.bytes
            assert plan.graphs <= 3


def test_padding_and_memory_before_and_after_are_printed() -> None:
    """Rows and MiB of today's list and of the proposal stand side by side (H90, NVIDIA/TensorRT-LLM#12895)."""
    calls = dict.fromkeys(range(1, 65), 300)
    found = graphprobe.advise(
        dispatched(calls, range(8, 65, 8), True), max_buckets=4, graph_bytes=100 * MIB, max_bytes=300 * MIB
    )
    assert re.search(r" now 100 % \S+ 67,200 3\.50 8 800\.0 ", flat(found))
    assert re.search(rf" best 100 % \S+ {found.best.padded_rows:,} [\d.]+ 3 300\.0 ", flat(found))
    assert "today's list does not keep the limits, as it takes 8 graphs, more than 4" in flat(found)


def test_more_graphs_that_gain_too_little_are_not_advised() -> None:
    """Eight graphs more for a gain below 2 %: the answer is to keep the list (H90, NVIDIA/TensorRT-LLM#13393)."""
    calls = dict.fromkeys(range(1, 65), 300_000)
    found = graphprobe.advise(dispatched(calls, range(8, 65, 8), True), times={1: 9e-3, 64: 10.5e-3})
    assert found.gain is not None
    assert (True, True) == (found.keep, 0 < found.gain < 0.02)


# -- H91: buckets that never replay -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [True, False], ids=["padded", "exact"])
def test_a_bucket_that_never_replayed_is_dropped_with_what_that_saves(pad: bool) -> None:
    """Ten thousand calls and none in 32: it goes, with its bytes and its seconds of start-up.

    The largest size seen keeps its bucket (H91, sgl-project/sglang-omni#1433).
    """
    use = {"graph_bytes": {8: MIB, 16: 2 * MIB, 32: 4 * MIB}, "capture_seconds": {8: 0.2, 16: 0.3, 32: 0.4}}
    snapshot = dispatched({16: 7000, 8: 3000}, [8, 16, 32], pad)
    found = graphprobe.advise(snapshot, pad=pad, **use, **TIMED)
    assert (True, (8, 16)) == (found.keep, found.leaner and found.leaner.buckets)
    assert "or drop 32: the time is the same, and that saves 1 graph, 4.0 MiB, 0.4 s of start-up" in flat(found)
    assert "captured and never replayed in 10,000 calls: 32 (4.0 MiB and 0.4 s of start-up)" in flat(found)


@pytest.mark.parametrize("pad", [True, False], ids=["padded", "exact"])
def test_the_largest_size_seen_keeps_its_bucket_however_seldom_it_came(pad: bool) -> None:
    """One call of 32 in a hundred thousand (H91, sgl-project/sglang-omni#1433)."""
    snapshot = dispatched({16: 70_000, 8: 30_000, 32: 1}, [8, 16, 32, 64], pad)
    found = graphprobe.advise(snapshot, pad=pad, **TIMED)
    lists = [found.best, found.leaner or found.best]
    assert [32, 32] == [plan.buckets[-1] for plan in lists]
    assert "64" in next(note for note in found.notes if "never replayed" in note)


def test_a_bucket_that_was_declared_is_not_dropped_for_being_idle() -> None:
    """What the engine may send must have a graph, however long it did not come (H91, sgl-project/sglang-omni#1433)."""
    found = graphprobe.advise(dispatched({16: 70_000, 8: 30_000}, [8, 16, 32], True), max_batch=32, **TIMED)
    assert 32 in found.buckets
    assert 32 in found.best.buckets
    assert found.leaner is None or 32 in found.leaner.buckets


# -- and one from a published account ---------------------------------------------------------------------------------


def test_a_batch_between_the_buckets_of_an_exact_list_is_added() -> None:
    """2,609 replays and 1,641 eager calls at batch 3, as published: 3 is added, and nothing is taken away."""
    graph = {(n, n): count for n, count in ((1, 525), (2, 521), (4, 521), (8, 521), (16, 521))}
    found = graphprobe.advise(seen(graph, {(3, "no_exact_bucket"): 1641}, (1, 2, 4, 8, 16)))
    assert (False, (1, 2, 3, 4, 8, 16)) == (found.keep, found.buckets)
    assert (pytest.approx(2609 / 4250), 1.0) == (found.measured_hit_rate, found.hit_rate)
    assert "@graphprobe.capture(buckets=[1, 2, 3, 4, 8, 16])" in str(found).splitlines()
