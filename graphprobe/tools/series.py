"""The samples of a page that are the contract's: of which metric, process and forward each one is.

A label that our series have and no metric of the contract does is a constant one (``rank``, GRAPHPROBE_LABELS, the
``otel_scope_...`` of OpenTelemetry): it is on all of them, and those that differ in it are other processes.
A label that is left out is an empty one, as to Prometheus.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from graphprobe import metrics
from graphprobe.metrics import Metric
from graphprobe.tools.exposition import Page
from graphprobe.tools.findings import Findings, short
from graphprobe.tools.grammar import Line

VALUES = 128
"""Most values of a constant label on one page: ranks of a host, not requests."""

PID = "pid"
"""prometheus_client's multiprocess mode tells gauges of processes apart by it; counters of processes it adds up."""

NUMBER = re.compile(r"[1-9][0-9]{0,8}")


def parts(metric: Metric) -> Iterator[tuple[str, tuple[Metric, str]]]:
    """The names of a metric's samples, each with the metric and which part of a histogram it is."""
    for part in ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",):
        yield metric.name + part, (metric, part)


NAMES: dict[str, tuple[Metric, str]] = dict(pair for metric in metrics.CATALOGUE for pair in parts(metric))
"""Name of a sample -> its metric, and which part of a histogram it is."""

HISTOGRAMS = {metric.name: metric for metric in metrics.CATALOGUE if metric.kind == "histogram"}
"""Names that are no sample's: those that end with a part of a histogram are."""

PREFIX = "graphprobe_"
BARE = tuple(name.removeprefix(PREFIX) for name in NAMES)

CREATED = frozenset(f"{m.family}_created" for m in metrics.CATALOGUE if m.kind in ("counter", "histogram"))
"""Times of birth, which some clients add: allowed, and no part of the contract."""

Process = tuple[tuple[str, str], ...]
"""The constant labels that tell one process of the page from the others."""


class Series(NamedTuple):
    """One sample of the contract: all of its metric's labels, its process, and its labels as they are written.

    ``constant`` names the constant labels of the page.
    """

    metric: Metric
    part: str
    labels: dict[str, str]
    process: Process
    value: float
    written: dict[str, str]
    constant: frozenset[str]

    def of(self, *labels: str) -> tuple[str, ...]:
        """The values of some labels."""
        return tuple(self.labels[label] for label in labels)

    def all_but(self, *labels: str) -> tuple[tuple[str, str], ...]:
        """What is written, without some labels. An empty label is none."""
        return tuple(sorted((k, v) for k, v in self.written.items() if v and k not in labels))

    @property
    def owner(self) -> tuple[Process, str]:
        """The process and the forward that it belongs to."""
        return self.process, self.labels.get("forward", "")

    def __str__(self) -> str:
        return as_written(self.written)


def as_written(labels: Mapping[str, str]) -> str:
    """Labels as they stand on the page, on one short line."""
    return short("{" + ", ".join(f'{k}="{v[:200]}"' for k, v in labels.items()) + "}", 160)


class Known(NamedTuple):
    """What a page says of its forwards and processes.

    Buckets are () where the engine does not know them, and None where they cannot be read. ``folded`` are the processes
    that folded labels to stay within the limit, ``ended`` those of which only counters are left.
    """

    buckets: dict[tuple[Process, str], tuple[int, ...] | None]
    folded: frozenset[Process]
    ended: frozenset[Process]


def identified(page: Page, found: Findings) -> list[Series]:
    """The series of the contract; names and constant labels that are none of it go to ``found``."""
    for name in dict.fromkeys(line.name for line in page.lines):
        if name in HISTOGRAMS:
            _type(HISTOGRAMS[name], page, found)
        elif name not in NAMES and name not in CREATED:
            _unknown(name, found)
    lines = [line for line in page.lines if line.name in NAMES]
    extra = Counter(label for line in lines for label in line.labels if label not in _own(line.name))
    constant = {label for label, count in extra.items() if _constant(label, count, len(lines))}
    for label in sorted(constant):
        _on_all(label, lines, found)
    values = {label: {line.labels[label] for line in lines if label in line.labels} for label in constant}
    apart = tuple(sorted(label for label in constant if len(values[label]) > 1))
    for label in apart:
        if len(values[label]) > VALUES:
            hint = "a label of every series tells processes apart; what belongs to a request is no label"
            found.add("unbounded", "", f"label {short(label)} has {len(values[label]):,} values", hint)
    return [_series(line, apart, frozenset(constant)) for line in lines]


def _constant(label: str, count: int, lines: int) -> bool:
    return label not in metrics.RESERVED and (count == lines or (label != PID and 2 * count > lines))


def _on_all(label: str, lines: list[Line], found: Findings) -> None:
    without = [line for line in lines if label not in line.labels]
    hint = (
        f"{len(lines) - len(without):,} of {len(lines):,} series have it: put it on every one of graphprobe's, or none"
    )
    for line in without:
        found.add("label-on-some", line.name, f"no {short(label)} on {as_written(line.labels)}", hint)


def _own(name: str) -> tuple[str, ...]:
    metric, part = NAMES[name]
    return (*metric.labels, "le") if part == "_bucket" else metric.labels


def _series(line: Line, apart: tuple[str, ...], constant: frozenset[str]) -> Series:
    metric, part = NAMES[line.name]
    labels = {label: line.labels.get(label, "") for label in metric.labels}
    process = tuple((label, line.labels.get(label, "")) for label in apart)
    return Series(metric, part, labels, process, line.value, line.labels, constant)


def _unknown(name: str, found: Findings) -> None:
    near = found.near(name[len(PREFIX) :], BARE)
    hint = f"write {PREFIX}{near}" if near else f"the prefix {PREFIX} belongs to the contract: take another one"
    found.add("unknown-metric", name, "no metric of the contract", hint)


def look_at_metadata(page: Page, found: Findings) -> None:
    """Types, help texts and units of the metrics that have samples, and families that are none of the contract's."""
    present = {line.name for line in page.lines}
    for metric in metrics.CATALOGUE:
        if any(name in present for name, _ in parts(metric)):
            _declared(metric, page, found)
    known = {name for m in metrics.CATALOGUE for name in (m.name, m.family)} | CREATED
    for name in page.kinds:
        if name not in known and name not in present:
            _unknown(name, found)


def _declared(metric: Metric, page: Page, found: Findings) -> None:
    allowed = _allowed(metric, page.openmetrics)
    declared = {name: page.kinds[name] for name in allowed if name in page.kinds}
    if not declared or any(kind != allowed[name] for name, kind in declared.items()):
        _type(metric, page, found)
    if not any(page.helps.get(name) for name in allowed):
        found.add("help", metric.name, "no help text", f"write # HELP {next(iter(allowed))} {metric.help}")
    unit, own = page.units.get(metric.family), metrics.UNITS.get(metric.unit)
    if page.openmetrics and unit and unit != own:
        found.add("unit", metric.name, f"unit {short(unit)}", f"write {own or 'no unit'}")


def _type(metric: Metric, page: Page, found: Findings) -> None:
    """Tell that a metric has no type, another one, or the samples of another one."""
    allowed = _allowed(metric, page.openmetrics)
    others = [kind for name, kind in page.kinds.items() if name in allowed and kind != allowed[name]]
    wrong = [f"type {short(kind)}" for kind in others]
    wanted = " or ".join(f"# TYPE {name} {kind}" for name, kind in allowed.items())
    if metric.kind == "histogram":
        wanted += f", and its samples as {metric.name}_bucket, _sum and _count"
        if not others and metric.name in page.kinds:
            wrong = ["a sample without _bucket, _sum or _count"]
    for what in wrong or ["no type"]:
        found.add("type", metric.name, what, f"write {wanted}")


def _allowed(metric: Metric, openmetrics: bool) -> dict[str, str]:
    """Name in the metadata -> type. OpenMetrics drops suffixes there; an info may be a gauge of value 1 everywhere."""
    kind = "gauge" if metric.kind == "info" else metric.kind
    if not openmetrics or metric.family == metric.name:
        return {metric.name: kind}
    return {metric.family: metric.kind, **({metric.name: kind} if metric.kind == "info" else {})}


def known(series: list[Series], found: Findings) -> Known:
    """What the page says of its forwards; bucket lists that cannot be read go to ``found``."""
    buckets: dict[tuple[Process, str], tuple[int, ...] | None] = {}
    for one in series:
        if one.metric is metrics.FORWARD_INFO:
            buckets.setdefault(one.owner, _buckets(one, found))
    folds = (one for one in series if one.metric is metrics.INTERNAL_ERRORS and one.of("where") == ("label_limit",))
    return Known(buckets, frozenset(one.process for one in folds if one.value > 0), _ended(series))


def _ended(series: list[Series]) -> frozenset[Process]:
    """The processes without a gauge and an info, on a page where others have them."""
    present = {one.process for one in series if one.metric.kind in ("gauge", "info")}
    if not any(one.metric is metrics.BUILD_INFO for one in series):
        return frozenset()
    # Where a label that tells processes apart is missing, that is the fault, and nobody has ended.
    named = (one.process for one in series if all(value for _, value in one.process))
    return frozenset(named) - present


def processes(series: list[Series]) -> int:
    """How many processes the series are of: as many as labels, or the ``pid`` of their infos, tell apart."""
    pids: dict[Process, set[str]] = {one.process: set() for one in series}
    for one in series:
        if one.metric is metrics.BUILD_INFO:
            pids[one.process].add(one.written.get(PID, ""))
    return sum(max(1, len(found)) for found in pids.values())


def _buckets(one: Series, found: Findings) -> tuple[int, ...] | None:
    forward, text = one.of("forward", "buckets")
    listed = text.split(",") if text else []
    sizes = [int(part) for part in listed if NUMBER.fullmatch(part)]
    if len(sizes) == len(listed) and sizes == sorted(set(sizes)):
        return tuple(sizes)
    what = f"buckets {short(text)!r} of {short(forward)}"
    found.add("bucket", one.metric.name, what, "write ascending sizes: 1,2,4,8")
    return None
