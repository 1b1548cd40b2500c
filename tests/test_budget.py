from __future__ import annotations

import random

import pytest

from graphprobe.tools import budget
from graphprobe.tools.budget import Limit, within
from graphprobe.tools.optimum import Pace, Problem
from graphprobe.tools.times import Curve
from tests.problems import Drawn, close, drawn, keeps, sets, total

BLOCKS = 6


def limits(seed: int, candidates: list[int]) -> list[Limit]:
    """One to three limits; uses of nothing, and limits of nothing."""
    draw = random.Random(-seed)
    found = [
        Limit("a", {n: draw.choice([1.0, draw.random()]) for n in candidates}, draw.random() * 5),
        Limit("b", {n: float(draw.choice([0, 1])) for n in candidates}, float(draw.randint(0, 6))),
        Limit("graphs", dict.fromkeys(candidates, 1.0), float(draw.randint(1, 6))),
    ]
    return found[: draw.randint(1, 3)]


def best(case: Drawn, given: list[Limit]) -> float | None:
    """By trying every set."""
    kept = [s for s in sets(case) if all(limit.of(s) <= limit.most for limit in given)]
    return min((total(case, s) for s in kept), default=None)


@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_best_set_within_limits_is_what_trying_every_set_finds(block: int, paced: bool) -> None:
    for seed in range(block, 120, BLOCKS):
        case = drawn(seed, paced=paced)
        given = limits(seed, case.problem.candidates)
        found, wanted = within(case.problem, given), best(case, given)
        if wanted is None:
            assert found is None, seed
            continue
        assert found is not None, seed
        assert 0.0 == found.gap
        assert close(found.choice.total, wanted), seed
        assert all(limit.of(found.choice.buckets) <= limit.most + 1e-9 for limit in given)
        assert keeps(case, found.choice.buckets)


def test_where_the_search_is_cut_short_the_gap_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best set there is lies no further below than the gap says."""
    monkeypatch.setattr(budget, "WORK", 0)
    monkeypatch.setattr(budget, "ROUNDS", 2)
    gaps = []
    for seed in range(200):
        case = drawn(seed)
        given = limits(seed, case.problem.candidates)
        found, wanted = within(case.problem, given), best(case, given)
        if found is not None and wanted is not None:
            gaps.append(found.gap)
            assert found.choice.total * (1 - found.gap) <= wanted * (1 + 1e-9) + 1e-9, seed
    assert max(gaps) > 0, "no search was cut short"


def test_hundreds_of_candidates_keep_every_limit() -> None:
    draw = random.Random(3)
    calls = {n: draw.randint(1, 10**6) for n in range(1, 257)}
    graph, eager = Curve({1: 9e-3, 256: 78e-3}), Curve({1: 40e-3, 256: 90e-3})
    given = [
        Limit("bytes", {n: draw.randint(20, 60) + n / 10 for n in calls}, 900),
        Limit("seconds", {n: draw.random() + 0.5 for n in calls}, 20),
    ]
    for pad in (True, False):
        found = within(Problem(calls, sorted(calls), graph.along, eager.along, pad=pad), given)
        assert found is not None
        assert found.gap < 0.01
        assert 256 == found.choice.buckets[-1]
        assert all(limit.of(found.choice.buckets) <= limit.most for limit in given)


@pytest.mark.parametrize(("pad", "paced"), [(False, False), (True, False), (True, True)])
def test_thousands_of_uneven_candidates_keep_limits_and_pace_and_leave_a_small_gap(pad: bool, paced: bool) -> None:
    draw = random.Random(5)
    calls = {n: draw.randint(1, 10**6) for n in range(1, 2049)}
    graph, eager = Curve({1: 9e-3, 2048: 78e-3}), Curve({1: 40e-3, 2048: 90e-3})
    pace = Pace(128, 0.6 * 256 / graph(256)) if paced else None
    given = [
        Limit("bytes", {n: draw.uniform(20, 60) for n in calls}, 900),
        Limit("seconds", {n: draw.uniform(0.5, 1.5) for n in calls}, 20),
    ]
    case = Drawn(
        Problem(calls, sorted(calls), graph.along, eager.along, pad=pad, pace=pace), dict(calls), graph, eager, {}, pace
    )
    found = within(case.problem, given)
    assert found is not None
    assert found.gap < 0.001
    assert all(limit.of(found.choice.buckets) <= limit.most * (1 + 1e-9) for limit in given)
    assert keeps(case, found.choice.buckets)
    assert close(found.choice.total, total(case, found.choice.buckets))


@pytest.mark.parametrize("block", range(BLOCKS))
def test_where_a_pace_binds_the_best_set_is_proven(block: int) -> None:
    """The bound is that of sets which keep the pace, not of all."""
    for seed in range(block, 60, BLOCKS):
        draw = random.Random(seed)
        calls = {n: draw.randint(1, 10**6) for n in range(1, 12)}
        graph, eager = Curve({1: 9e-3, 11: 78e-3}), Curve({1: 40e-3, 11: 90e-3})
        pace = Pace(2, draw.uniform(0.5, 0.95) * 4 / graph(4))
        case = Drawn(
            Problem(calls, list(calls), graph.along, eager.along, pace=pace), dict(calls), graph, eager, {}, pace
        )
        given = [Limit("bytes", {n: draw.uniform(20, 60) for n in calls}, draw.uniform(100, 300))]
        found, wanted = within(case.problem, given), best(case, given)
        assert (found is None) == (wanted is None), seed
        if found is not None and wanted is not None:
            assert (True, 0.0) == (close(found.choice.total, wanted), found.gap), seed


def test_a_largest_bucket_that_breaks_a_limit_alone_is_no_answer() -> None:
    problem = drawn(3, pad=True).problem
    assert within(problem, [Limit("bytes", {problem.candidates[-1]: 2.0}, 1.0)]) is None


@pytest.mark.parametrize("block", range(BLOCKS))
def test_sets_that_differ_by_less_than_a_percent_are_told_apart(block: int) -> None:
    """What the bound leaves open is closed by building sets, not taken for proven."""
    for seed in range(block, 300, BLOCKS):
        draw = random.Random(seed)
        calls = {n: draw.randint(900, 1100) for n in range(1, 11)}
        graph, eager = Curve({n: 1 + n * draw.uniform(0.0008, 0.0012) for n in calls}), Curve({1: 1.02})
        problem = Problem(calls, list(calls), graph.rising().along, eager.along, pad=draw.random() < 0.5)
        given = [
            Limit("bytes", {n: draw.uniform(1, 3) for n in calls}, draw.uniform(6, 10)),
            Limit("seconds", {n: draw.uniform(1, 3) for n in calls}, draw.uniform(6, 10)),
        ]
        case = Drawn(problem, dict(calls), graph.rising(), eager, {}, None)
        found, wanted = within(problem, given), best(case, given)
        assert found is not None
        assert wanted is not None
        assert (True, 0.0) == (close(found.choice.total, wanted), found.gap), seed
