"""Start-up and lazy capture: a report from a public engine as tests (H87)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from graphprobe import timers
from graphprobe.graphed import capture
from tests.helpers import counts

pytestmark = pytest.mark.usefixtures("own_forwards", "both_modes")

recorded = functools.partial(capture, backend="recorder", timing=1, name="decode")

HOST_RUN = 100.0
"""Seconds that a run of the forward's host code takes by the clock below; a replay runs none."""


class Clock:
    """A clock that only the forward moves: what a sample contains is known to the second."""

    def __init__(self) -> None:
        # A forward that sets an attribute is no graph, so the runs are kept in a list.
        self.runs: list[float] = []

    @property
    def now(self) -> float:
        return sum(self.runs)

    def perf_counter(self) -> float:
        return self.now

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(HOST_RUN)
        return x * 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timers, "time", clock)
    return clock


def make_inputs(bucket: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(bucket, 3),), {}


def seconds(forward: Any, path: str) -> list[tuple[int, float]]:
    """The samples of a path: how many, and their sum."""
    return [(t.count, t.sum) for (_, p, _, _), t in forward.snapshot().times.items() if p == path]


@pytest.mark.parametrize("eager_first", [1, 3])
@pytest.mark.parametrize("lazy", [True, None], ids=["lazy", "default"])
def test_the_first_calls_of_a_lazy_bucket_are_warm_up_and_no_hits(
    clock: Clock, lazy: bool | None, eager_first: int
) -> None:
    """A lazy bucket's first calls are eager with reason ``warmup``, outside the hit rate; the next one captures, is
    served by the first replay and is a hit (H87, vllm-project/vllm#20098).
    """
    forward = recorded(clock.step, buckets=[1, 3, 4], lazy=lazy, eager_first=eager_first)
    for calls in range(1, eager_first + 1):
        forward(torch.randn(3, 3))
        assert {"warmup": calls} == counts(forward)
        assert (None, {}) == (forward.snapshot().hit_rate, forward.snapshot().captures)
    forward(torch.randn(3, 3))
    assert {"warmup": eager_first, "graph": 1} == counts(forward)
    assert ({3: 1}, 1.0) == (forward.snapshot().captures, forward.snapshot().hit_rate)


def test_the_time_of_a_capture_is_no_latency(clock: Clock) -> None:
    """Neither the eager run before a capture nor the capture is in the duration histogram: only replays are.

    Capture seconds are kept apart (H87, vllm-project/vllm#20098).
    """
    forward = recorded(clock.step, buckets=[3], lazy=True)
    for _ in range(10):
        forward(torch.randn(3, 3))
    assert 2 * HOST_RUN == clock.now
    (samples, total), *others = seconds(forward, "graph")
    assert (0.0, [], []) == (total, others, seconds(forward, "eager"))
    assert 8 <= samples <= 9
    assert {3} == set(forward.snapshot().capture_seconds)


def test_settled_eager_calls_are_timed_without_the_captures_between_them(clock: Clock) -> None:
    """An eager sample is one run of the forward, however many captures came in between (H87, vllm#20098)."""
    forward = recorded(clock.step, buckets=[1, 2, 3, 4], lazy=True)
    for bucket in (1, 2, 3, 4):
        for n in (bucket, 9, bucket, 9, bucket):
            forward(torch.randn(n, 3))
    ((samples, total),) = seconds(forward, "eager")
    assert 1 <= samples <= 8
    assert samples * HOST_RUN == total
    assert all(total == 0.0 for _, total in seconds(forward, "graph"))


def test_a_failed_capture_is_no_latency(clock: Clock) -> None:
    """A call that tried to capture in vain ran the host code twice; no sample says so (H87, vllm#20098)."""

    def step(x: torch.Tensor) -> Any:
        return clock.step(x), object()

    forward = recorded(step, buckets=[3], lazy=True)
    for _ in range(10):
        forward(torch.randn(3, 3))
    assert (1 + 2 * 2 + 7) * HOST_RUN == clock.now
    assert {"warmup": 1, "capture_failed": 9} == counts(forward)
    assert [] == seconds(forward, "graph")
    for samples, total in seconds(forward, "eager"):
        assert samples * HOST_RUN == total


def test_warm_up_ahead_of_traffic_is_no_latency_and_no_call(clock: Clock) -> None:
    """Captured before traffic: the first call of each bucket is a hit, and only replays are timed (H87, vllm#20098)."""
    forward = recorded(clock.step, buckets=[1, 2, 4])
    forward.warmup(make_inputs)
    assert ({}, {}) == (counts(forward), dict(forward.snapshot().times))
    for n in (1, 2, 4, 1, 2, 4):
        forward(torch.randn(n, 3))
    assert {"graph": 6} == counts(forward)
    assert [] == seconds(forward, "eager")
    assert all(total == 0.0 for _, total in seconds(forward, "graph"))


@pytest.mark.parametrize("buckets", [range(1, 68)], ids=["67"])
def test_a_lazy_list_captures_only_what_is_used(clock: Clock, buckets: range) -> None:
    """Of 67 buckets the two that traffic uses are captured, and the snapshot shows which (H87, vllm#20098)."""
    forward = recorded(clock.step, buckets=list(buckets))
    for n in (3, 60) * 5:
        forward(torch.randn(n, 3))
    found = forward.snapshot()
    assert {3: 1, 60: 1} == {bucket: n for bucket, n in found.captures.items() if n}
    assert {3, 60} == {bucket for bucket, live in found.live.items() if live}
    assert {"warmup": 2, "graph": 8} == counts(forward)
