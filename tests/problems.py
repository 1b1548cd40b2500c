"""Small problems of the advisor, drawn at random, and their answers by trying every set."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from graphprobe.tools.optimum import Pace, Problem
from graphprobe.tools.times import Curve


@dataclass(frozen=True)
class Drawn:
    """A problem, and what it was made of."""

    problem: Problem
    calls: dict[int, float]
    graph: Curve
    eager: Curve
    prices: dict[int, float]
    pace: Pace | None


def drawn(seed: int, *, paced: bool = False, pad: bool | None = None) -> Drawn:
    """Up to nine sizes and ten candidates; calls of nothing, equal times, sizes above the last candidate included."""
    draw = random.Random(seed)
    calls = {
        n: draw.choice([0, 1, 5, 1000, draw.randint(1, 10**6)]) for n in draw.sample(range(1, 40), draw.randint(1, 9))
    }
    candidates = sorted(draw.sample(range(1, 45), draw.randint(1, 10)))
    graph, eager = (
        Curve(
            {
                n: draw.choice([1.0, 2.0, draw.random() * 3 + 0.01])
                for n in draw.sample(range(1, 45), draw.randint(1, 5))
            }
        )
        for _ in range(2)
    )
    graph = graph.rising()
    prices = {n: draw.choice([0.0, draw.random() * 100]) for n in candidates} if draw.random() < 0.5 else {}
    pace = Pace(draw.randint(0, 30), draw.choice([5, 10, 20, 30])) if paced else None
    padded = draw.random() < 0.5 if pad is None else pad
    problem = Problem(calls, candidates, graph.along, eager.along, pad=padded, price=prices, pace=pace)
    return Drawn(problem, dict(calls), graph, eager, prices, pace)


def sets(of: Drawn) -> Iterator[tuple[int, ...]]:
    """Every set that has the last candidate and keeps the pace."""
    candidates = of.problem.candidates
    for mask in range(1 << of.problem.last):
        chosen = (*(n for i, n in enumerate(candidates[:-1]) if mask >> i & 1), candidates[-1])
        if keeps(of, chosen):
            yield chosen


def keeps(of: Drawn, chosen: tuple[int, ...]) -> bool:
    """Each size above the pace's is served fast enough, or by the candidate next to the bucket below it."""
    if of.pace is None or not of.problem.pad:
        return True
    candidates = [0, *of.problem.candidates]
    for low, high in zip((0, *chosen), chosen, strict=False):
        adjacent = candidates.index(high) - candidates.index(low) == 1
        sizes = range(max(low, of.pace.size) + 1, high + 1)
        if not adjacent and any(n / of.graph(high) < of.pace.rows_per_second - 1e-9 for n in sizes):
            return False
    return True


def total(of: Drawn, chosen: tuple[int, ...]) -> float:
    """Seconds and prices of a set, one size after the other."""
    seconds = 0.0
    for size, count in of.calls.items():
        held = [n for n in chosen if (n >= size if of.problem.pad else n == size)]
        seconds += count * (of.graph(held[0]) if held else of.eager(size))
    return seconds + sum(of.prices.get(n, 0.0) for n in chosen)


def close(a: float, b: float) -> bool:
    """Equal but for the order in which the same numbers were summed."""
    return abs(a - b) <= 1e-9 * max(1.0, abs(b))
