"""The best set of buckets for each number of graphs, exactly.

Candidates are the sizes that may be captured, ascending; the last one is always chosen, so that the largest size is
covered. A set is a path through them, and what lies between two chosen ones costs the same whatever else is chosen:
that makes it a shortest path with a given number of steps, solved layer by layer.

Padded dispatch: all calls above one bucket and up to the next take that one's seconds. With prefix sums C of the calls
the step from candidate i to j costs ``(C[j] - C[i]) * seconds[j]``, so a layer is the lower envelope of lines with
falling slopes ``-C[i]``, read at ``seconds[j]``, which never fall (``Curve.rising``): linear in the number of
candidates.
Exact dispatch: what lies between runs eagerly, and a layer is a running minimum.

A ``Pace`` forbids some steps. It makes the best set of few buckets another one, found by divide and conquer over the
candidates, in which the best step before never goes back (the matrix of steps is totally monotone, forbidden ones
included).
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Seconds = Callable[[list[int]], list[float]]
"""Seconds of each of some sizes."""

INFINITE = float("inf")
SLACK = 1e-9
"""Rows: what rounding may cost."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A set of buckets, ascending, and what all calls together take with it, in seconds; prices are not in it."""

    buckets: tuple[int, ...]
    seconds: float
    price: float = 0.0

    @property
    def total(self) -> float:
        """Seconds and prices: what is minimised."""
        return self.seconds + self.price


Costs = list[float] | None
"""Costs of the layer before, by candidate; None: of this layer itself, so that any number of buckets is meant."""

Layer = Callable[["Problem", list[float], list[float]], tuple[list[float], list[int]]]


@dataclass(frozen=True, slots=True)
class Pace:
    """Sizes above ``size`` must be served at ``rows_per_second`` at least, padding included.

    A batch that a slow bucket serves slower than requests come in grows, and stays large: an engine that strays there
    once does not come back.
    """

    size: int
    rows_per_second: float

    def longest(self, size: int) -> float:
        """Seconds that a call of ``size`` rows may take."""
        return (size + SLACK) / self.rows_per_second if size > self.size else INFINITE


class Problem:
    """What is chosen from, and what each step from one chosen candidate to the next costs."""

    def __init__(
        self,
        calls: Mapping[int, float],
        candidates: Sequence[int],
        graph: Seconds,
        eager: Seconds,
        *,
        pad: bool = True,
        price: Mapping[int, float] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """``calls`` by size, ``candidates`` ascending, ``graph`` never falling, ``price`` in seconds by candidate."""
        sizes = sorted(calls)
        self.candidates = list(candidates)
        self.pad = pad
        self.seconds = graph(self.candidates)
        self.prices = [price.get(n, 0.0) if price else 0.0 for n in self.candidates]
        held = [calls[n] for n in sizes]
        lost = [count * seconds for count, seconds in zip(held, eager(sizes), strict=True)]
        upto = [bisect_right(sizes, n) for n in self.candidates]
        below = list(accumulate(held, initial=0.0))
        eagerly = list(accumulate(lost, initial=0.0))
        self.calls = [below[i] for i in upto]
        """Calls of sizes up to each candidate."""
        self.eager = [eagerly[i] for i in upto]
        """Seconds of the same, run eagerly."""
        self.all_eager = eagerly[-1]
        own = [(i - 1) if i and sizes[i - 1] == n else None for i, n in zip(upto, self.candidates, strict=True)]
        self.exactly = [0.0 if i is None else held[i] for i in own]
        """Calls of exactly each candidate."""
        self.lows = self._lows(pace) if pace and pad else None
        """The first candidate from which a step to each may come (-1: the beginning); None where any may."""
        self.under = [all_ - (0.0 if i is None else lost[i]) for all_, i in zip(self.eager, own, strict=True)]

    @property
    def last(self) -> int:
        """Index of the candidate that is always chosen."""
        return len(self.candidates) - 1

    @property
    def tail(self) -> float:
        """Seconds of the sizes above the last candidate, which run eagerly whatever is chosen."""
        return self.all_eager - self.eager[-1]

    def step(self, i: int, j: int) -> float:
        """Seconds of the calls between candidates i and j, where j is the next one chosen; i = -1 is the beginning."""
        if self.pad:
            return (self.calls[j] - (self.calls[i] if i >= 0 else 0.0)) * self.seconds[j]
        return self.under[j] - (self.eager[i] if i >= 0 else 0.0) + self.exactly[j] * self.seconds[j]

    def _lows(self, pace: Pace) -> list[int]:
        """Never falling, and never past the candidate before: with all candidates nothing more could be done."""
        found, low = [], -1
        for j, (size, seconds) in enumerate(zip(self.candidates, self.seconds, strict=True)):
            while low < j - 1 and seconds > pace.longest(min(size, max(self._size(low), pace.size) + 1)):
                low += 1
            found.append(low)
        return found

    def _size(self, i: int) -> int:
        return self.candidates[i] if i >= 0 else 0

    def allowed(self, chosen: Sequence[int]) -> bool:
        """Whether no step of this set is too long."""
        return self.lows is None or all(i >= self.lows[j] for i, j in pairwise([-1, *chosen]))

    def choice(self, chosen: Sequence[int]) -> Choice:
        """What the candidates of these ascending indices cost; the last candidate may be missing here."""
        seconds = sum(self.step(i, j) for i, j in pairwise([-1, *chosen]))
        seconds += self.all_eager - (self.eager[chosen[-1]] if chosen else 0.0)
        return Choice(tuple(self.candidates[i] for i in chosen), seconds, sum(self.prices[i] for i in chosen))

    def free(self) -> Problem:
        """The same problem without a pace."""
        other = copy.copy(self)
        other.lows = None
        return other

    def at(self, prices: list[float]) -> Problem:
        """The same problem at other prices, by candidate."""
        other = copy.copy(self)
        other.prices = prices
        return other

    def bases(self) -> list[float]:
        """What ending at each candidate costs without what an earlier one saves."""
        if self.pad:
            return [c * t + p for c, t, p in zip(self.calls, self.seconds, self.prices, strict=True)]
        parts = zip(self.under, self.exactly, self.seconds, self.prices, strict=True)
        return [u + c * t + p for u, c, t, p in parts]


def frontier(problem: Problem, most: int) -> list[Choice]:
    """The best set of 1, 2, ... up to ``most`` buckets, or as many as there are candidates.

    Numbers of buckets with which a pace cannot be kept are left out; with all candidates it always is.
    """
    return [problem.choice(path) for path in _layers(problem, most) if path]


def cheapest(problem: Problem) -> tuple[list[int], float]:
    """The indices of the best set of any number of buckets, whatever a pace says, and what it costs."""
    costs, parents = (_envelope if problem.pad else _minimum)(problem, problem.bases())
    path = [problem.last]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1], costs[problem.last] + problem.tail


def _layers(problem: Problem, most: int) -> list[list[int]]:
    """The path of the best set for each number of buckets, empty where there is none."""
    costs = bases = problem.bases()
    layer: Layer = _envelope if problem.pad else _minimum
    if problem.lows:
        layer = _divided
        costs = [base if low < 0 else INFINITE for base, low in zip(bases, problem.lows, strict=True)]
    parents = [[-1] * len(bases)]
    found = []
    for k in range(min(most, len(bases))):
        if k:
            costs, parent = layer(problem, bases, costs)
            parents.append(parent)
        found.append(_path(parents, problem.last) if costs[-1] < INFINITE else [])
    return found


def _path(parents: list[list[int]], last: int) -> list[int]:
    path = [last]
    for parent in reversed(parents[1:]):
        path.append(parent[path[-1]])
    return path[::-1]


def _minimum(problem: Problem, bases: list[float], before: Costs = None) -> tuple[list[float], list[int]]:
    """One layer of exact dispatch: cost[j] = base[j] + min over i < j of (before[i] - eager[i])."""
    best, where = (INFINITE, -1) if before else (0.0, -1)
    costs: list[float] = []
    parent = []
    known = before or costs
    for j, (base, eager) in enumerate(zip(bases, problem.eager, strict=True)):
        costs.append(base + best)
        parent.append(where)
        value = known[j] - eager
        if value < best:
            best, where = value, j
    return costs, parent


def _envelope(problem: Problem, bases: list[float], before: Costs = None) -> tuple[list[float], list[int]]:
    """One layer of padded dispatch: cost[j] = base[j] + min over i < j of (before[i] - calls[i] * seconds[j])."""
    n = len(bases)
    costs, parent = [INFINITE] * n, [-1] * n
    known = before or costs
    # The lines that are lowest somewhere, and from where on; those before `head` are past. This is the loop that
    # counts: lists of full length, written by index, are a third faster than lists that grow and shrink.
    starts, slopes, heights, owners = [-INFINITE] * (n + 1), [0.0] * (n + 1), [0.0] * (n + 1), [-1] * (n + 1)
    head, top = 0, -1 if before else 0
    for j, base, x, c in zip(range(n), bases, problem.seconds, problem.calls, strict=False):
        if head <= top:
            while head < top and starts[head + 1] <= x:
                head += 1
            costs[j] = base + heights[head] - slopes[head] * x
            parent[j] = owners[head]
        height, start = known[j], -INFINITE
        if height == INFINITE:
            continue
        while head <= top:
            steeper = c - slopes[top]
            if steeper:
                start = (height - heights[top]) / steeper
                if start > starts[top]:
                    break
                start = -INFINITE
            elif heights[top] <= height:
                start = INFINITE
                break
            top -= 1
        if start < INFINITE:
            top += 1
            starts[top], slopes[top], heights[top], owners[top] = start, c, height, j
    return costs, parent


def _divided(problem: Problem, bases: list[float], before: list[float]) -> tuple[list[float], list[int]]:
    """One layer of padded dispatch where each step has a first candidate from which it may come."""
    calls, seconds, lows = problem.calls, problem.seconds, problem.lows or []
    free = bisect_right(lows, -1)
    costs, parent = _envelope(problem, bases[:free], before)
    costs += [INFINITE] * (len(bases) - free)
    parent += [-1] * (len(bases) - free)
    # A number of steps reaches all candidates from one to another. Rows that reach none are left out: they would say
    # nothing of where their neighbours' best lies, and cost as much as a search without any division.
    reached = [i for i, cost in enumerate(before) if cost < INFINITE]
    first, end = max(reached[0], parent[free - 1]), reached[-1] + 1
    waiting = [(max(free, reached[0] + 1), bisect_right(lows, reached[-1]), first, end)]
    while waiting:
        left, right, first, end = waiting.pop()
        if left >= right:
            continue
        j = (left + right) // 2
        low, high, x = max(first, lows[j]), min(end, j), seconds[j]
        options = [b - c * x for b, c in zip(before[low:high], calls[low:high], strict=True)]
        best = min(options)
        costs[j], parent[j] = bases[j] + best, low + options.index(best)
        waiting += [(left, j, first, parent[j] + 1), (j + 1, right, parent[j], end)]
    return costs, parent
