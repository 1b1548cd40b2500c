from __future__ import annotations

import os
import random

import pytest

from graphprobe.tools.optimum import Pace, Problem, cheapest, frontier
from graphprobe.tools.times import Curve
from tests.problems import close, drawn, keeps, sets, total

CASES = int(os.environ.get("GRAPHPROBE_EXAMPLES", "0")) or 400
BLOCKS = 8


@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_frontier_is_what_trying_every_set_finds(block: int, paced: bool) -> None:
    """For each number of buckets, on both paths, with prices, sizes without calls, and sizes above every candidate."""
    for seed in range(block, CASES, BLOCKS):
        case = drawn(seed, paced=paced, pad=True if paced else None)
        best: dict[int, float] = {}
        for chosen in sets(case):
            best[len(chosen)] = min(best.get(len(chosen), float("inf")), total(case, chosen))
        found = frontier(case.problem, 64)
        assert set(best) == {len(choice.buckets) for choice in found}, seed
        for choice in found:
            assert keeps(case, choice.buckets)
            assert close(total(case, choice.buckets), choice.total), seed
            assert close(choice.total, best[len(choice.buckets)]), seed


@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_cheapest_set_of_any_size(block: int) -> None:
    """Whatever a pace says: it is the bound of the search within limits."""
    for seed in range(block, CASES, BLOCKS):
        case = drawn(seed)
        path, cost = cheapest(case.problem)
        chosen = tuple(case.problem.candidates[i] for i in path)
        assert close(total(case, chosen), cost)
        assert close(cost, min(total(case, one) for one in sets(case))), seed


def test_as_many_buckets_as_there_may_be() -> None:
    problem = drawn(3, pad=True).problem
    assert list(range(1, 3)) == [len(choice.buckets) for choice in frontier(problem, 2)]
    every = frontier(problem, 10**6)
    assert tuple(problem.candidates) == every[-1].buckets
    assert all(problem.candidates[-1] == choice.buckets[-1] for choice in every)


def test_more_buckets_never_take_longer() -> None:
    draw = random.Random(5)
    calls = {n: draw.randint(1, 10**6) for n in range(1, 300)}
    graph, eager = Curve({1: 9e-3, 300: 90e-3}), Curve({1: 40e-3})
    for pace in (None, Pace(200, 3000.0)):
        times = [
            choice.seconds
            for choice in frontier(Problem(calls, sorted(calls), graph.along, eager.along, pace=pace), 64)
        ]
        assert times == sorted(times, reverse=True)


def test_all_calls_at_one_size_take_one_bucket() -> None:
    problem = Problem({7: 10**15}, [7], Curve({7: 1e-3}).along, Curve({7: 1.0}).along)
    (only,) = frontier(problem, 8)
    assert ((7,), 10**12) == (only.buckets, only.seconds)


def test_a_pace_keeps_a_stray_batch_from_a_slow_bucket() -> None:
    """Sizes never seen, between the largest seen and the declared maximum, are served as fast as they come."""
    seen = dict.fromkeys(range(1, 43), 1000)
    graph, eager = Curve({1: 9.27e-3, 256: 78.1e-3}), Curve({1: 40e-3, 256: 90e-3})
    sizes = list(range(1, 257))
    free = frontier(Problem(seen, sizes, graph.along, eager.along), 8)[-1]
    assert 256 == next(n for n in free.buckets if n > 42), "without it one graph serves all of them"
    pace = Pace(42, 42 / graph(42))
    kept = frontier(Problem(seen, sizes, graph.along, eager.along, pace=pace), 30)[-1].buckets
    for size in range(43, 257):
        bucket = next(n for n in kept if n >= size)
        assert size / graph(bucket) >= pace.rows_per_second or bucket == size


def test_a_pace_that_few_buckets_cannot_keep_leaves_those_out() -> None:
    graph = Curve({1: 1.0, 64: 64.0})
    problem = Problem({1: 5}, list(range(1, 65)), graph.along, Curve({1: 9.0}).along, pace=Pace(1, 1.0))
    assert min(len(choice.buckets) for choice in frontier(problem, 64)) > 1
    assert 1 == len(frontier(problem.free(), 64)[0].buckets)
