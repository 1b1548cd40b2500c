"""The best set of buckets within limits whose use differs from bucket to bucket: bytes, capture seconds, graphs.

A price per unit of each limit (Lagrange multipliers, found by subgradient steps) gives a bound that no set can beat.
Sets are then built from the smallest bucket up, and given up where they are worse than another with the same last
bucket, or cannot beat the best known one even at that bound. Source: Dumitrescu and Boland, "Improved preprocessing,
labeling and scaling algorithms for the weight-constrained shortest path problem", Networks 42 (2003).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from graphprobe.tools.optimum import INFINITE, Choice, Problem, cheapest, frontier

ROUNDS = 80
"""Subgradient steps: the bound moves by less than a thousandth after about 50."""

MOST = 64
"""Buckets of the sets that the search begins with."""

MOST_CANDIDATES = 512
"""Above, the bound is not closed by building sets."""

WORK = 300_000
"""Sets looked at before the best one so far is taken: about a second."""

SLACK = 1e-12
"""Relative: what sums of the same floats in another order differ by, at most."""


@dataclass(frozen=True, slots=True)
class Limit:
    """At most ``most`` of something, of which each bucket uses ``use[bucket]`` (0 where it is not listed)."""

    name: str
    use: Mapping[int, float]
    most: float

    def of(self, buckets: Sequence[int]) -> float:
        """What these buckets use together."""
        return sum(self.use.get(n, 0.0) for n in buckets)


@dataclass(frozen=True, slots=True)
class Within:
    """The best set found within all limits, and how far it may be from the best there is (0: proven to be it)."""

    choice: Choice
    gap: float = 0.0


def within(problem: Problem, limits: Sequence[Limit]) -> Within | None:
    """The set with the lowest total that keeps all ``limits`` and the pace; None where none was found that does."""
    search = _Search(problem, limits)
    if not search.fits([problem.last]):
        return None
    for choice in frontier(problem, MOST):
        search.take([problem.candidates.index(n) for n in choice.buckets])
    search.bound()
    if len(problem.candidates) <= MOST_CANDIDATES and not search.closed:
        search.improve()
        search.enumerate()
    if not search.best.buckets:
        return None
    return Within(search.best, 0.0 if search.closed else 1 - search.low / search.best.total)


@dataclass(slots=True)
class _Label:
    """A set that ends at a candidate: what it costs so far, what it uses, and its last step."""

    cost: float
    used: tuple[float, ...]
    at: int
    before: _Label | None

    def path(self) -> list[int]:
        path = [self.at]
        label = self.before
        while label is not None:
            path.append(label.at)
            label = label.before
        return path[::-1]


@dataclass(slots=True)
class _Search:
    problem: Problem
    limits: Sequence[Limit]
    use: list[tuple[float, ...]] = field(init=False)
    prices: tuple[float, ...] = field(init=False)
    best: Choice = field(init=False)
    low: float = field(init=False, default=-float("inf"))

    def __post_init__(self) -> None:
        # Each limit is scaled to 1, so that one step length suits bytes and seconds alike.
        self.use = [
            tuple(
                limit.use.get(n, 0.0) / limit.most if limit.most else _over(limit.use.get(n, 0.0))
                for limit in self.limits
            )
            for n in self.problem.candidates
        ]
        self.prices = tuple(0.0 for _ in self.limits)
        self.best = Choice((), INFINITE)

    @property
    def closed(self) -> bool:
        return bool(self.best.buckets) and self.best.total - self.low <= SLACK * abs(self.best.total)

    def fits(self, path: Sequence[int]) -> bool:
        return all(used <= 1 + SLACK for used in self.used(path))

    def used(self, path: Sequence[int]) -> list[float]:
        return [sum(self.use[i][r] for i in path) for r in range(len(self.limits))]

    def bound(self) -> None:
        """Raise ``low`` by better prices; sets met on the way that keep the limits may become the best."""
        prices = self.prices
        for _ in range(ROUNDS):
            path, value = self._shortest(prices)
            low = value - sum(prices)
            if low > self.low:
                self.low, self.prices = low, prices
            self._offer(path)
            excess = [used - 1 for used in self.used(path)]
            norm = sum(x * x for x, price in zip(excess, prices, strict=True) if x > 0 or price > 0)
            if self.closed or not norm:
                return
            goal = self.best.total if self.best.buckets else abs(low) * 2
            length = max(goal - low, SLACK * abs(goal)) / norm
            prices = tuple(max(0.0, p + length * x) for p, x in zip(prices, excess, strict=True))

    def _offer(self, path: list[int]) -> None:
        """Take ``path``, thinned out until it keeps the limits, as the best set if it is better."""
        kept = list(path)
        while not self.fits(kept) and len(kept) > 1:
            around = zip([-1, *kept], kept, kept[1:], strict=False)
            losses = [self.problem.step(a, c) - self.problem.step(a, b) - self.problem.step(b, c) for a, b, c in around]
            del kept[losses.index(min(losses))]
        self.take(kept)

    def take(self, path: list[int]) -> None:
        """Make ``path`` the best set if it is better and keeps everything."""
        choice = self.problem.choice(path)
        if choice.total < self.best.total and self.fits(path) and self.problem.allowed(path):
            self.best = choice

    def improve(self) -> None:
        """Exchange one bucket for another, or add one, as long as that helps."""
        candidates = self.problem.candidates
        better = bool(self.best.buckets)
        while better:
            before = self.best.total
            chosen = [candidates.index(n) for n in self.best.buckets]
            for leave in [None, *chosen[:-1]]:
                rest = [i for i in chosen if i != leave]
                for j in sorted(set(range(self.problem.last)) - set(chosen)):
                    self.take(sorted([*rest, j]))
            better = self.best.total < before

    def _priced(self, prices: Sequence[float]) -> list[float]:
        own = self.problem.prices
        return [p + sum(a * b for a, b in zip(prices, use, strict=True)) for p, use in zip(own, self.use, strict=True)]

    def _shortest(self, prices: Sequence[float]) -> tuple[list[int], float]:
        """The best set of any number of buckets at these prices, and its cost."""
        return cheapest(self.problem.at(self._priced(prices)))

    def _to_go(self) -> list[float]:
        """The least that lies after each candidate, at the prices of the bound."""
        problem, priced = self.problem, self._priced(self.prices)
        found = [0.0] * len(priced)
        found[-1] = problem.tail
        for i in range(problem.last - 1, -1, -1):
            found[i] = min(problem.step(i, j) + priced[j] + found[j] for j in range(i + 1, len(priced)))
        return found

    def enumerate(self) -> None:
        """Build sets, the most promising first, until none is left that could be better, or ``WORK`` is done.

        What is left then has the lowest bound of all, which ``low`` becomes.
        """
        problem, to_go, lows = self.problem, self._to_go(), self.problem.lows
        start = _Label(0.0, tuple(0.0 for _ in self.limits), -1, None)
        waiting: list[tuple[float, int, _Label]] = [(self.low, 0, start)]
        seen: list[list[_Label]] = [[] for _ in problem.candidates]
        work = 0
        while waiting and waiting[0][0] < self.best.total and work < WORK:
            _, _, label = heappop(waiting)
            if label.at >= 0 and not _new(label, seen[label.at]):
                continue
            for j in range(label.at + 1, problem.last + 1):
                if lows and lows[j] > label.at:
                    break
                work += 1
                further = self._extended(label, j)
                bound = (
                    further.cost + to_go[j] + sum(p * (u - 1) for p, u in zip(self.prices, further.used, strict=True))
                )
                if bound >= self.best.total or any(u > 1 + SLACK for u in further.used):
                    continue
                if j == problem.last:
                    self.take(further.path())
                elif all(u + n <= 1 + SLACK for u, n in zip(further.used, self.use[-1], strict=True)):
                    heappush(waiting, (bound, work, further))
        self.low = max(self.low, min(self.best.total, waiting[0][0] if waiting else self.best.total))

    def _extended(self, label: _Label, j: int) -> _Label:
        cost = label.cost + self.problem.step(label.at, j) + self.problem.prices[j]
        used = tuple(a + b for a, b in zip(label.used, self.use[j], strict=True))
        return _Label(cost, used, j, None if label.at < 0 else label)


def _new(label: _Label, seen: list[_Label]) -> bool:
    """Whether no set seen before with the same last bucket is at least as good in everything; it is seen then."""
    if any(o.cost <= label.cost and all(a <= b for a, b in zip(o.used, label.used, strict=True)) for o in seen):
        return False
    seen.append(label)
    return True


def _over(use: float) -> float:
    """The scaled use of something of which there is none."""
    return 2.0 if use else 0.0
