"""The histograms of a page: each one whole and cumulative, and all of a metric with the same bounds."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from graphprobe.metrics import Metric
from graphprobe.tools.findings import Findings
from graphprobe.tools.series import Series

BOUND = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|\+Inf", re.ASCII)
INFINITE = '"+Inf"'

Bounds = tuple[float, ...]


def look_at_histograms(series: list[Series], found: Findings) -> None:
    """What is wrong with single histograms, and bounds that are not those of most others, go to ``found``."""
    groups: dict[Metric, dict[object, list[Series]]] = defaultdict(lambda: defaultdict(list))
    for one in series:
        if one.part:
            groups[one.metric][one.all_but("le")].append(one)
    for metric, histograms in groups.items():
        whole: list[tuple[Bounds, Series]] = []
        for group in histograms.values():
            faults = list(_faults(group))
            for what, hint in faults:
                found.add("histogram", metric.name, f"{what}: {group[0]}", hint)
            if not faults:
                whole.append((tuple(sorted(_bound(one) for one in group if one.part == "_bucket")), group[0]))
        _same_bounds(metric, whole, found)


def _faults(group: list[Series]) -> Iterator[tuple[str, str]]:
    known = {one.part: one.value for one in group if one.part != "_bucket"}
    ordered = sorted((_bound(one), one.value) for one in group if one.part == "_bucket")
    if any(math.isnan(bound) for bound, _ in ordered):
        yield "a bound that is no number", f'write le="0.0001", ..., le={INFINITE}'
        return
    yield from _order_faults(ordered)
    if not ordered or ordered[-1][0] != math.inf:
        yield "no +Inf bound", f"the last bound is le={INFINITE}"
    elif "_count" in known and known["_count"] != ordered[-1][1]:
        yield f"count {known['_count']:g}, +Inf {ordered[-1][1]:g}", "both are the number of samples"
    for part in sorted({"_count", "_sum"} - set(known)):
        yield f"no {part}", "a histogram has _bucket, _sum and _count"


def _order_faults(ordered: Sequence[tuple[float, float]]) -> Iterator[tuple[str, str]]:
    if any(one[0] == other[0] for one, other in pairwise(ordered)):
        yield "a bound twice", "each bound once per label set"
    if any(one[1] > other[1] for one, other in pairwise(ordered)):
        yield "bounds are not cumulative", "each bound counts all samples up to it"
    if [bound for bound, _ in ordered] == [math.inf]:
        yield "no bound but +Inf", "no quantile can be read from it: graphprobe's bounds are 5e-05, 0.0001, ... 0.8192"


def _bound(one: Series) -> float:
    text = one.written.get("le", "")
    bound = float(text) if BOUND.fullmatch(text) else math.nan
    return bound if math.isfinite(bound) or text == "+Inf" else math.nan


def _same_bounds(metric: Metric, whole: list[tuple[Bounds, Series]], found: Findings) -> None:
    """A quantile of several series is right only where their bounds are the same."""
    counts = Counter(bounds for bounds, _ in whole)
    usual = max(counts, key=lambda bounds: (counts[bounds], len(bounds)), default=())
    for bounds, one in whole:
        if bounds != usual:
            what = f"{_told(bounds)}, others have {_told(usual)}: {one}"
            found.add("bounds", metric.name, what, "give every series of a metric the same bounds")


def _told(bounds: Bounds) -> str:
    return f"{len(bounds)} bounds from {bounds[0]:g} to {bounds[-2]:g} and +Inf"
