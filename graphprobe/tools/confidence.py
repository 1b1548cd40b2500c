"""How sure a gain is: the probability that it is the threshold at least, on traffic like the one seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from graphprobe.tools.advice import Plan
from graphprobe.tools.case import Case

ALIKE = 1_000
"""Calls that count as one independent observation where the source knows no time.

A batch lives as long as its requests: on two public traces the integrated autocorrelation time of the batch size was
126 to 2,057 calls (docs/advise.md).
"""

LEAST_WINDOWS = 4
"""Windows with calls from which their differences tell how sure it is."""


def confidence(case: Case, now: Plan, best: Plan) -> float:
    """The probability that ``best`` gains the threshold at least."""
    before, after = case.costs(now.buckets), case.costs(best.buckets)
    parts = [part for part in case.seen.windows if part]
    if len(parts) >= LEAST_WINDOWS:
        gain, error = _jackknife([_sums(part, before, after, case.stuck / len(parts)) for part in parts])
    else:
        gain, error = _independent(case.seen.calls, before, after, case.stuck)
    if error <= 0:
        return float(gain >= case.question.threshold)
    return 1 - NormalDist(gain, error).cdf(case.question.threshold)


def _sums(
    calls: Mapping[int, int], before: Mapping[int, float], after: Mapping[int, float], stuck: float
) -> tuple[float, float]:
    """Seconds saved, and seconds as it is today."""
    spent = sum(n * before[size] for size, n in calls.items())
    return spent - sum(n * after[size] for size, n in calls.items()), spent + stuck


def _jackknife(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The ratio of the sums of pairs, and its standard error from leaving each out.

    Source: Efron, "The Jackknife, the Bootstrap and Other Resampling Plans", SIAM 1982, chapter 3.
    """
    saved, spent, n = sum(a for a, _ in parts), sum(b for _, b in parts), len(parts)
    without = [(saved - a) / (spent - b) for a, b in parts if spent > b]
    mean = sum(without) / len(without)
    return saved / spent, math.sqrt((n - 1) / n * sum((x - mean) ** 2 for x in without))


def _independent(
    calls: Mapping[int, int], before: Mapping[int, float], after: Mapping[int, float], stuck: float
) -> tuple[float, float]:
    """The same, where each ``ALIKE`` calls are one observation."""
    total = sum(calls.values())
    saved, spent = _sums(calls, before, after, stuck)
    gain = saved / spent
    squares = sum(n * (before[size] - after[size] - gain * before[size]) ** 2 for size, n in calls.items())
    return gain, math.sqrt(squares / total / max(1.0, total / ALIKE)) * total / spent
