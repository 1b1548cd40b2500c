"""How sure a gain is: the probability that it is the threshold at least, on traffic like the one seen.

The best list is made for the traffic that it is judged by, and looks better on that than it will be: of few
observations it serves each one. So the gain is that of lists with as many graphs, each made for one half of the traffic
and tried on the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist, fmean, pstdev
from typing import NamedTuple

from graphprobe.tools.candidates import price, problem
from graphprobe.tools.case import Case
from graphprobe.tools.optimum import frontier

ALIKE = 1_000
"""Calls that count as one independent observation where the source knows no time.

A batch lives as long as its requests: on days of two public traces the integrated autocorrelation time of the batch
size was 62 to 4,915 calls, on half of them below 530 (docs/advise.md).
"""

STRETCHES = 4
"""Least number of stretches of calls, however few there are: two for each half."""

CUTS = 4
"""Ways to cut the calls into stretches, each further on by a part of one: where sizes begin is an accident."""

APART = 4 * ALIKE
"""Calls of a window from which on it says little of the next one; shorter ones are put together."""

LEAST_WINDOWS = 8
"""Windows from which their differences tell how sure it is: with fewer a normal distribution is too narrow."""

Calls = Mapping[int, int]


class Estimate(NamedTuple):
    """The share of the seconds that is saved, and its standard error."""

    gain: float
    error: float

    def reaches(self, threshold: float) -> float:
        """The probability that the share is ``threshold`` at least."""
        if self.error <= 0:
            return float(self.gain >= threshold)
        return 1 - NormalDist(self.gain, self.error).cdf(threshold)


def estimate(case: Case, now: Sequence[int], best: Sequence[int]) -> Estimate:
    """What lists such as ``best`` save on traffic that they were not made for, where ``now`` is today's list."""
    parts = apart(case.seen.windows, case.seen.processes)
    if len(parts) < LEAST_WINDOWS:
        alike = ALIKE * case.seen.processes
        # Of fewer, a stretch cut in two would be in both halves.
        cuts = CUTS if case.seen.total >= STRETCHES * alike else 1
        found = [_halved(case, now, best, _stretches(case.seen.calls, alike, n / cuts), alike) for n in range(cuts)]
        gains = [one.gain for one in found]
        return Estimate(fmean(gains), math.hypot(fmean(one.error for one in found), pstdev(gains)))
    trials = _trials(case, now, best, [_together(parts[0::2]), _together(parts[1::2])])
    return _jackknife([trials[i % 2].sums(part) for i, part in enumerate(parts)])


def _halved(case: Case, now: Sequence[int], best: Sequence[int], halves: tuple[Calls, Calls], alike: int) -> Estimate:
    """What lists that are each made for one half save on the other."""
    trials = _trials(case, now, best, halves)
    sums = [trial.sums(half) for trial, half in zip(trials, halves, strict=True)]
    whole = _Sums(*map(sum, zip(*sums, strict=True)))
    return Estimate(whole.saved / whole.spent, _independent(whole, trials, halves, alike))


def apart(windows: Iterable[Calls], processes: int = 1) -> list[Calls]:
    """The windows, each put together with those after it until it has ``APART`` calls of each process, or more.

    The last one may have more still.
    """
    found: list[Counter[int]] = []
    waiting: Counter[int] = Counter()
    for window in windows:
        waiting.update(window)
        if waiting.total() >= APART * processes:
            found.append(waiting)
            waiting = Counter()
    if found:
        found[-1].update(waiting)
    return list(found)


def _together(parts: Iterable[Calls]) -> Calls:
    found: Counter[int] = Counter()
    for part in parts:
        found.update(part)
    return found


def _stretches(calls: Calls, alike: int, cut: float) -> tuple[Calls, Calls]:
    """The calls by size in stretches of ``alike``, each second one in the other half; ``cut`` of the first is gone."""
    length = min(alike, -(-sum(calls.values()) // STRETCHES))
    halves: tuple[dict[int, int], dict[int, int]] = ({}, {})
    begin = round(cut * length)
    for size in sorted(calls):
        end = begin + calls[size]
        first = _first(end, length) - _first(begin, length)
        for half, n in zip(halves, (first, calls[size] - first), strict=True):
            if n:
                half[size] = n
        begin = end
    return halves


def _first(end: int, length: int) -> int:
    """How many of so many calls are in the first half."""
    pairs, rest = divmod(end, 2 * length)
    return pairs * length + min(rest, length)


class _Sums(NamedTuple):
    """Seconds saved, and seconds as it is today."""

    saved: float
    spent: float


class _Trial(NamedTuple):
    """A list tried against today's: seconds of a call by size with both, and what each call has of all the rest."""

    before: Mapping[int, float]
    after: Mapping[int, float]
    saved: float
    spent: float

    def sums(self, calls: Calls) -> _Sums:
        """Both sums for these calls."""
        spent = math.fsum(n * self.before[size] for size, n in calls.items())
        left = math.fsum(n * self.after[size] for size, n in calls.items())
        count = sum(calls.values())
        return _Sums(spent - left + count * self.saved, spent + count * self.spent)


def _trials(case: Case, now: Sequence[int], best: Sequence[int], halves: Sequence[Calls]) -> list[_Trial]:
    """For each half a list that was made for the other one."""
    total = case.seen.total
    price_now, price_best = (sum(price(case, buckets).values()) for buckets in (now, best))
    rest = ((price_now - price_best) / total, (price_now + case.stuck) / total)
    before = case.costs(now)
    kept = _given(case, now, best)
    lists = [sorted(kept.union(_made_for(case, other, len(best)))) for other in reversed(halves)]
    return [_Trial(before, case.costs(buckets), *rest) for buckets in lists]


def _given(case: Case, now: Sequence[int], best: Sequence[int]) -> set[int]:
    """What of the best list was not chosen for the traffic that was seen: a maximum, and what is kept of today's."""
    top = {best[-1]} if case.pads or best[-1] == case.question.max_batch else set()
    return top.union(n for n in best if n in now and case.short and not case.pads)


def _made_for(case: Case, calls: Calls, most: int) -> Sequence[int]:
    """The best list of at most so many graphs for some of the calls."""
    if not calls:
        return ()
    asked = problem(case.of(calls))
    edge = frontier(asked, most) or frontier(asked.free(), most)
    return min(edge, key=lambda choice: choice.total).buckets


def _jackknife(parts: Sequence[_Sums]) -> Estimate:
    """The ratio of the sums, and its standard error from leaving each part out.

    Source: Efron, "The Jackknife, the Bootstrap and Other Resampling Plans", SIAM 1982, chapter 3.
    """
    saved, spent, n = sum(part.saved for part in parts), sum(part.spent for part in parts), len(parts)
    without = [(saved - part.saved) / (spent - part.spent) for part in parts]
    mean = sum(without) / n
    return Estimate(saved / spent, math.sqrt((n - 1) / n * sum((x - mean) ** 2 for x in without)))


def _independent(whole: _Sums, trials: Sequence[_Trial], halves: Sequence[Calls], alike: int) -> float:
    """The standard error of the ratio where each ``alike`` calls are one observation."""
    gain = whole.saved / whole.spent
    each = [
        (n, trial.before[size] - trial.after[size] - gain * trial.before[size])
        for trial, half in zip(trials, halves, strict=True)
        for size, n in half.items()
    ]
    total = sum(n for n, _ in each)
    mean = math.fsum(n * x for n, x in each) / total
    squares = math.fsum(n * (x - mean) ** 2 for n, x in each)
    return math.sqrt(squares / total / max(1.0, total / alike)) * total / whole.spent
