"""The days of the benchmarks: batch sizes in their order, pieces of them, and how long they stay alike."""

from __future__ import annotations

import importlib
import random
from collections import Counter

import pytest

from graphprobe.tools.arrivals import Request
from graphprobe.tools.simulate import replay
from graphprobe.tools.times import Curve

pytest.importorskip("numpy")
DAYS = importlib.import_module("benchmarks.days")
GRAPH = Curve({1: 9e-3, 16: 13e-3})


def requests(count: int = 200) -> list[Request]:
    rng, clock, found = random.Random(0), 0.0, []
    for _ in range(count):
        clock += rng.expovariate(20)
        found.append(Request(clock, 100, rng.randint(1, 60)))
    return found


@pytest.mark.parametrize("prefill", [None, Curve({1: 5e-3, 200: 20e-3})])
def test_the_steps_of_a_day_in_order_are_those_that_the_replay_counts(prefill: Curve | None) -> None:
    """As many of each size, and the batch begins and ends with one request."""
    every = DAYS.sizes(requests(), GRAPH, max_batch=8, prefill=prefill)
    counted = replay(requests(), range(1, 9), GRAPH, GRAPH, pad=True, max_batch=8, prefill=prefill)
    assert Counter(every) == counted.sizes
    assert (1, 8, 1) == (every[0], max(every), every[-1])


def test_pieces_are_from_all_over_the_day_each_in_its_order() -> None:
    """The first piece begins the day, the last one ends it; too short a day is taken whole."""
    assert [0, 1, 45, 46, 90, 91] == DAYS.pieces(range(92), 6, 3)
    assert [0, 1, 45, 46, 90] == DAYS.pieces(range(92), 5, 3)
    assert [0, 1, 2] == DAYS.pieces(range(92), 3, 1)
    assert [0, 1, 2] == DAYS.pieces(range(3), 9, 2)


@pytest.mark.parametrize("keeps", [0.0, 0.9, 0.98])
def test_the_autocorrelation_time_of_a_known_series_is_found(keeps: float) -> None:
    """A series that keeps a share r of itself has (1 + r) / (1 - r)."""
    rng, value, series = random.Random(1), 0.0, []
    for _ in range(200_000):
        value = keeps * value + rng.gauss(0, 1)
        series.append(value)
    assert DAYS.autocorrelation_time(series) == pytest.approx((1 + keeps) / (1 - keeps), rel=0.15)


def test_the_end_of_a_series_is_no_neighbour_of_its_beginning() -> None:
    """A step up in the middle: the products of what lies m apart, none of them around the end."""
    series = [-1.0] * 20 + [1.0] * 20
    shares = [sum(a * b for a, b in zip(series, series[m:], strict=False)) / 40 for m in range(40)]
    times = [2 * sum(shares[: m + 1]) - 1 for m in range(40)]
    wanted = next((time for m, time in enumerate(times) if m >= 0.5 * time), times[-1])
    assert DAYS.autocorrelation_time(series, window=0.5) == pytest.approx(wanted)
