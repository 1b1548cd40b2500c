"""The best set of buckets within limits whose use differs from bucket to bucket: bytes, capture seconds, graphs.

A price per unit of each limit (Lagrange multipliers, found by subgradient steps) gives a bound that no set can beat.
Sets are then built from the smallest bucket up, and given up where they are worse than another with the same last
bucket, or cannot beat the best known one even at that bound. Source: Dumitrescu and Boland, "Improved preprocessing,
labeling and scaling algorithms for the weight-constrained shortest path problem", Networks 42 (2003).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from operator import add, le, mul, sub

from graphprobe.tools.optimum import INFINITE, Choice, Problem, cheapest, frontier

ROUNDS = 80
"""Subgradient steps: the bound moves by less than a thousandth after about 50."""

MOST = 64
"""Buckets of the sets that the search begins with."""

MOST_CANDIDATES = 4096
"""Above, the bound is not closed by building sets: their number of steps grows with the square."""

PAIRS = 20_000_000
"""Pairs of candidates looked at for the bound where a pace binds: about a second."""

WORK = 100_000
"""Sets built before the best one so far is taken."""

COMPARED = 32
"""Sets with the same last bucket that a further one is compared with: more cost time, and leave out few more."""

SLACK = 1e-12
"""Relative: what sums of the same floats in another order differ by, at most."""

Used = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """At most ``most`` of something, of which each bucket uses ``use[bucket]`` (0 where it is not listed)."""

    name: str
    use: Mapping[int, float]
    most: float

    def of(self, buckets: Sequence[int]) -> float:
        """What these buckets use together."""
        return sum(self.use.get(n, 0.0) for n in buckets)

    def scaled(self, bucket: int) -> float:
        """The part of the limit that this bucket uses; too much where there is none of it."""
        use = self.use.get(bucket, 0.0)
        return use / self.most if self.most else (2.0 if use else 0.0)


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
        search.take([bisect_left(problem.candidates, n) for n in choice.buckets])
    search.bound()
    if not search.closed:
        search.improve()
    if not search.closed and len(problem.candidates) <= MOST_CANDIDATES:
        search.enumerate()
    gap = 0.0 if search.closed else 1 - search.low / search.best.total
    return Within(search.best, gap) if search.path else None


class _Search:
    def __init__(self, problem: Problem, limits: Sequence[Limit]) -> None:
        self.problem = problem
        # Each limit is scaled to 1, so that one step length suits bytes and seconds alike.
        self.use = [tuple(limit.scaled(n) for limit in limits) for n in problem.candidates]
        self.prices = tuple(0.0 for _ in limits)
        self.best, self.path = Choice((), INFINITE), list[int]()
        self.low, self.pairs = -INFINITE, 0

    @property
    def closed(self) -> bool:
        return bool(self.path) and self.best.total - self.low <= SLACK * abs(self.best.total)

    def fits(self, path: Sequence[int]) -> bool:
        return max(self.used(path), default=0.0) <= 1 + SLACK

    def used(self, path: Sequence[int]) -> Used:
        return tuple(map(sum, zip(*(self.use[i] for i in path), strict=True)))

    def bound(self) -> None:
        """Raise ``low`` by better prices; sets met on the way that keep the limits may become the best."""
        prices = self.prices
        for _ in range(ROUNDS):
            path, value = self._cheapest(prices)
            low = value - sum(prices)
            if low > self.low:
                self.low, self.prices = low, prices
            self._offer(path)
            excess = [used - 1 for used in self.used(path)]
            norm = sum(x * x for x, price in zip(excess, prices, strict=True) if x > 0 or price > 0)
            if self.closed or not norm or self.pairs > PAIRS:
                return
            goal = self.best.total if self.best.buckets else abs(low) * 2
            length = max(goal - low, SLACK * abs(goal)) / norm
            prices = tuple(max(0.0, p + length * x) for p, x in zip(prices, excess, strict=True))

    def _cheapest(self, prices: Sequence[float]) -> tuple[list[int], float]:
        """The best set of any number of buckets at these prices, and its cost."""
        problem = self.problem.at(self._priced(prices))
        found = cheapest(problem)
        if problem.allowed(found[0]):
            return found
        self.pairs += len(self.use) ** 2
        steps = _Steps(problem)
        return steps.path(), steps.to_go[-1] + problem.tail

    def _offer(self, path: list[int]) -> None:
        """Take ``path``, thinned out until it keeps the limits, as the best set if it is better.

        The bucket without which least is lost goes first; that changes only what its two neighbours are worth.
        """
        kept, used = [-1, *path], self.used(path)
        loss = {i: self._loss(a, i, c) for a, i, c in zip(kept, path, path[1:], strict=False)}
        waiting = [(lost, i) for i, lost in loss.items()]
        heapify(waiting)
        while waiting and max(used, default=0.0) > 1 + SLACK:
            lost, i = heappop(waiting)
            if loss.get(i) != lost:
                continue
            at = bisect_left(kept, i)
            del kept[at], loss[i]
            used = tuple(map(sub, used, self.use[i]))
            for k in range(max(at - 1, 1), min(at + 1, len(kept) - 1)):
                loss[kept[k]] = self._loss(kept[k - 1], kept[k], kept[k + 1])
                heappush(waiting, (loss[kept[k]], kept[k]))
        self.take(kept[1:])

    def _loss(self, a: int, i: int, c: int) -> float:
        """What is lost where i, between a and c, is not chosen."""
        return self._step(a, c) - self._through(a, i, c)

    def _step(self, i: int, j: int) -> float:
        lows = self.problem.lows
        return INFINITE if lows and lows[j] > i else self.problem.step(i, j)

    def take(self, path: list[int]) -> None:
        """Make ``path`` the best set if it is better and keeps everything."""
        choice = self.problem.choice(path)
        if choice.total < self.best.total and self.fits(path) and self.problem.allowed(path):
            self.best, self.path = choice, path

    def improve(self) -> None:
        """Move one bucket between its neighbours, or add one, as long as that helps."""
        before = INFINITE
        while self.best.total < before:
            before, path = self.best.total, self.path
            moves = sorted(self._moves(path), reverse=True)
            moved = (sorted({*path, j} - {i}) for saved, i, j in moves if saved > 0)
            self.take(next((p for p in moved if self.fits(p)), path))

    def _moves(self, path: list[int]) -> Iterator[tuple[float, int, int]]:
        """What is saved, which bucket leaves (-1: none) and which one comes."""
        for a, c in pairwise([-1, *path]):
            yield from ((self._loss(a, j, c), -1, j) for j in range(a + 1, c))
        for a, i, c in zip([-1, *path], path, path[1:], strict=False):
            held = self._through(a, i, c)
            yield from ((held - self._through(a, j, c), i, j) for j in range(a + 1, c) if j != i)

    def _through(self, a: int, i: int, c: int) -> float:
        return self._step(a, i) + self._step(i, c) + self.problem.prices[i]

    def _priced(self, prices: Sequence[float]) -> list[float]:
        return [p + sum(map(mul, prices, use)) for p, use in zip(self.problem.prices, self.use, strict=True)]

    def enumerate(self) -> None:
        """Build sets, the most promising first, until none that is left can be better or ``WORK`` is done."""
        last, steps = self.problem.last, _Steps(self.problem.at(self._priced(self.prices)))
        self.low = max(self.low, steps.to_go[-1] + self.problem.tail - sum(self.prices))
        # Bound, number, set, what it costs so far, and what it and the last bucket use.
        waiting: list[tuple[float, int, list[int], float, Used]] = [(self.low, 0, [], 0.0, self.use[last])]
        seen: list[list[tuple[float, Used]]] = [[] for _ in range(last + 1)]
        work = 0
        while waiting and waiting[0][0] < self.best.total and work < WORK:
            low, _, path, cost, used = heappop(waiting)
            at = path[-1] if path else -1
            if not _new(cost, used, seen[at]):
                continue
            for further, j in steps.after(at, self.best.total - low):
                if low + further >= self.best.total:
                    break
                if j == last:
                    self.take([*path, last])
                    continue
                work += 1
                using = tuple(map(add, used, self.use[j]))
                if max(using, default=0.0) <= 1 + SLACK:
                    costing = cost + self.problem.step(at, j) + self.problem.prices[j]
                    heappush(waiting, (low + further, work, [*path, j], costing, using))
        self.low = max(self.low, min(self.best.total, waiting[0][0] if waiting else self.best.total))


class _Steps:
    """The steps of a problem by how much worse than the best way to the end each makes it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.weights = problem.seconds if problem.pad else [1.0] * len(problem.seconds)
        self.saved = [*(problem.calls if problem.pad else problem.eager), 0.0]
        self.bases = problem.bases()
        self.to_go = [0.0] * (problem.last + 2)
        """The least that lies after each candidate; at the end, where index -1 finds it, that of the beginning."""
        for i in range(problem.last - 1, -2, -1):
            self.to_go[i] = min(self._ways(i))
        self.known: dict[int, list[tuple[float, int]]] = {}

    def _ways(self, i: int) -> list[float]:
        """The least that lies after i, where the next step goes to i + 1, ... as far as the pace lets it."""
        lows, saved = self.problem.lows, self.saved[i]
        part = slice(i + 1, bisect_right(lows, i) if lows else len(self.bases))
        parts = zip(self.bases[part], self.weights[part], self.to_go[part], strict=True)
        return [base - saved * weight + to_go for base, weight, to_go in parts]

    def path(self) -> list[int]:
        """The best way to the end."""
        path = [-1]
        while path[-1] < self.problem.last:
            ways = self._ways(path[-1])
            path.append(path[-1] + 1 + ways.index(min(ways)))
        return path[1:]

    def after(self, i: int, most: float) -> list[tuple[float, int]]:
        """What each step from i adds, the least first, up to ``most``, which never rises between calls for one i."""
        if i not in self.known:
            found = ((way - self.to_go[i], j) for j, way in enumerate(self._ways(i), i + 1))
            self.known[i] = sorted(x for x in found if x[0] <= most)
        return self.known[i]


def _new(cost: float, used: Used, seen: list[tuple[float, Used]]) -> bool:
    """Whether none of the first sets with the same last bucket is at least as good in everything."""
    if any(least <= cost and all(map(le, uses, used)) for least, uses in seen):
        return False
    if len(seen) < COMPARED:
        seen.append((cost, used))
    return True
