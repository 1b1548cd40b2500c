"""The samples of a page, held against the contract of ``graphprobe.metrics``.

Which must exist, their types, labels, words and values, zeros, histograms, the number of label sets, and counters that
fell between two reads.

A label that every one of our series has is a constant one (``rank``, GRAPHPROBE_LABELS): it is allowed, and series that
differ in it are other processes. A label that is left out is an empty one, as to Prometheus.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from graphprobe import metrics
from graphprobe.metrics import LIMIT, STEPS, Metric
from graphprobe.observe import MODES, PHASE, spans
from graphprobe.reasons import FallbackReason
from graphprobe.tools.exposition import OURS, Findings, Line, Page, short

WORDS: dict[str, tuple[str, ...]] = {
    "phase": ("decode", "prefill", "mixed", "verify", "draft", "draft_extend"),
    "mode": MODES,
    "reason": tuple(map(str, FallbackReason)),
    "path": ("graph", "eager"),
    "outcome": ("ok", "error", "oom"),
    "unit": ("rows", "tokens", "requests"),
    "source": ("capture", "observe", "engine"),
}
"""Label -> the words that the contract knows for it."""

OWN_WORDS = {"phase": PHASE, "unit": re.compile(r"[a-z][a-z0-9_]{0,31}")}
"""Labels for which an engine may have a word of its own, and what such a word looks like."""

MAY_BE_EMPTY = {
    (metrics.FORWARD_DURATION, "mode"),
    (metrics.FORWARD_SECONDS, "bucket"),
    (metrics.FORWARD_SAMPLES, "bucket"),
    *((metrics.FORWARD_INFO, label) for label in ("buckets", "backend", "role")),
    *((metrics.BUILD_INFO, label) for label in ("torch", "cuda", "device", "backend")),
}

ZERO_OR_ONE = (metrics.BUCKET_CAPTURED, metrics.HOOK_BOUND)
VALUES = 128
"""Most values of a constant label on one page: ranks of a host, not requests."""

FORWARDS = 200
"""Most forwards that one process is expected to have."""

NUMBER = re.compile(r"[1-9][0-9]{0,8}")
SIZE = re.compile(r"(?:(0|[1-9][0-9]{0,8})-)?(0|[1-9][0-9]{0,8})")


def _parts(metric: Metric) -> Iterator[tuple[str, tuple[Metric, str]]]:
    for part in ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",):
        yield metric.name + part, (metric, part)


NAMES: dict[str, tuple[Metric, str]] = dict(pair for metric in metrics.CATALOGUE for pair in _parts(metric))
"""Name of a sample -> its metric, and which part of a histogram it is."""

CREATED = frozenset(f"{m.family}_created" for m in metrics.CATALOGUE if m.kind in ("counter", "histogram"))
"""Times of birth, which some clients add: allowed, and no part of the contract."""


Process = tuple[tuple[str, str], ...]
"""The constant labels of one process."""


class Series(NamedTuple):
    """One sample of the contract: all of its metric's labels, the constant ones apart, and both as they stood."""

    metric: Metric
    part: str
    labels: dict[str, str]
    constant: Process
    value: float
    written: dict[str, str]

    def of(self, *labels: str) -> tuple[str, ...]:
        """The values of some labels."""
        return tuple(self.labels[label] for label in labels)

    @property
    def owner(self) -> tuple[Process, str]:
        """The process and the forward that it belongs to."""
        return self.constant, self.labels.get("forward", "")

    @property
    def folds(self) -> bool:
        """Whether it counts the folds of a forward with too many label sets."""
        return self.labels.get("where") == "label_limit"

    @property
    def without_bound(self) -> tuple[tuple[str, str], ...]:
        """What makes it a label set: a histogram is one."""
        return tuple(sorted((k, v) for k, v in self.written.items() if k != "le"))

    def __str__(self) -> str:
        return short("{" + ", ".join(f'{k}="{v}"' for k, v in self.written.items()) + "}", 160)


def examine(page: Page, found: Findings) -> list[Series]:
    """The series of the contract on a page; what is wrong with them goes to ``found``."""
    series = _identified(page, found)
    if not series:
        found.error(
            "", "no metric of graphprobe", "is this the page of an engine that graphprobe, or its like, counts?"
        )
        return series
    _metadata(page, found)
    folded = any(one.metric is metrics.INTERNAL_ERRORS and one.folds and one.value > 0 for one in series)
    bucket_lists = _bucket_lists(series, found)
    for one in series:
        _labels(one, found)
        _words(one, folded, found)
        _sizes(one, bucket_lists.get(one.owner), folded, found)
        _value(one, found)
    _duplicates(series, found)
    _limits(series, found)
    _histograms(series, found)
    _infos(series, bucket_lists, found)
    _times(series, found)
    if not folded:
        _zeros(series, bucket_lists, found)
    return series


def _identified(page: Page, found: Findings) -> list[Series]:
    lines = [line for line in page.lines if line.name in NAMES]
    extra = Counter(label for line in lines for label in line.labels if label not in _own(line.name))
    constant = {label for label, count in extra.items() if count == len(lines)}
    names = dict.fromkeys(line.name for line in page.lines if OURS.match(line.name))
    for name in names:
        if name not in NAMES and name not in CREATED:
            _unknown(name, found)
    for label in constant:
        values = {line.labels[label] for line in lines}
        if len(values) > VALUES:
            hint = "a label of every series tells processes apart; what belongs to a request is no label"
            found.error("", f"label {short(label)} has {len(values):,} values", hint)
    return [_series(line, constant) for line in lines]


def _own(name: str) -> tuple[str, ...]:
    metric, part = NAMES[name]
    return (*metric.labels, "le") if part == "_bucket" else metric.labels


def _series(line: Line, constant: set[str]) -> Series:
    metric, part = NAMES[line.name]
    labels = {label: line.labels.get(label, "") for label in metric.labels}
    apart = tuple(sorted((label, line.labels[label]) for label in constant))
    return Series(metric, part, labels, apart, line.value, line.labels)


def _unknown(name: str, found: Findings) -> None:
    near = found.near(name, tuple(NAMES))
    hint = f"write {near}" if near else "the prefix graphprobe_ belongs to the contract: take another one"
    found.error(name, "no metric of the contract", hint)


def _metadata(page: Page, found: Findings) -> None:
    """Types, help texts and units of the metrics that have samples, and families that are none of the contract's."""
    present = {line.name for line in page.lines}
    for metric in metrics.CATALOGUE:
        if not any(name in present for name, _ in _parts(metric)):
            continue
        allowed = {metric.name: {"gauge"} if metric.kind == "info" else {metric.kind}}
        if page.openmetrics and metric.family != metric.name:
            allowed = {metric.family: {metric.kind}, **({metric.name: {"gauge"}} if metric.kind == "info" else {})}
        declared = {name: page.kinds[name] for name in allowed if name in page.kinds}
        wanted = " or ".join(f"# TYPE {name} {' '.join(kinds)}" for name, kinds in allowed.items())
        if not declared:
            found.error(metric.name, "no type", f"write {wanted}")
        for name, kind in declared.items():
            if kind not in allowed[name]:
                found.error(metric.name, f"type {short(kind)}", f"write {wanted}")
        if not any(page.helps.get(name) for name in allowed):
            found.warning(metric.name, "no help text", f"write # HELP {next(iter(allowed))} {metric.help}")
        unit = page.units.get(metric.family)
        if page.openmetrics and unit and unit != metrics.UNITS.get(metric.unit):
            found.error(metric.name, f"unit {short(unit)}", f"write {metrics.UNITS.get(metric.unit) or 'no unit'}")
    known = {name for m in metrics.CATALOGUE for name in (m.name, m.family)} | CREATED
    for name in page.kinds:
        if name not in known and name not in present:
            _unknown(name, found)


def _bucket_lists(series: list[Series], found: Findings) -> dict[tuple[Process, str], tuple[int, ...] | None]:
    """(process, forward) -> its buckets; () where the engine does not know them, None where they cannot be read."""
    lists: dict[tuple[Process, str], tuple[int, ...] | None] = {}
    for one in series:
        if one.metric is not metrics.FORWARD_INFO:
            continue
        forward, text = one.of("forward", "buckets")
        parts = text.split(",") if text else []
        sizes = [int(part) for part in parts if NUMBER.fullmatch(part)]
        fine = len(sizes) == len(parts) and sizes == sorted(set(sizes))
        if not fine:
            found.error(
                one.metric.name, f"buckets {short(text)!r} of {short(forward)}", "write ascending sizes: 1,2,4,8"
            )
        if (one.constant, forward) in lists:
            found.error(one.metric.name, f"a second one of {short(forward)}", "one per forward, which never changes")
        lists.setdefault((one.constant, forward), tuple(sizes) if fine else None)
    return lists


def _labels(one: Series, found: Findings) -> None:
    apart = {label for label, _ in one.constant}
    for label in one.written:
        # prometheus_client's multiprocess mode tells gauges apart by it.
        if label in one.labels or label in apart or (label == "pid" and one.metric.kind in ("gauge", "info")):
            continue
        if not (label == "le" and one.part == "_bucket"):
            hint = "drop it; a constant label (rank, ...) is on every series of graphprobe"
            found.error(one.metric.name, f"unknown label {short(label)} on {one}", hint)
    for label, value in one.labels.items():
        if not value and (one.metric, label) not in MAY_BE_EMPTY:
            found.error(one.metric.name, f"no {label} on {one}", f"its labels are {', '.join(one.metric.labels)}")
    if one.metric is metrics.FORWARD_DURATION and one.of("path") == ("graph",) and not one.labels["mode"]:
        found.error(one.metric.name, f"no mode on {one}", f"a graph is one of {', '.join(MODES)}")


def _words(one: Series, folded: bool, found: Findings) -> None:
    for label, words in WORDS.items():
        value = one.labels.get(label, "")
        if not value or value in words or (folded and value == "all" and label in ("phase", "mode")):
            continue
        near = found.near(value, words)
        hint = f"write {near}" if near else f"one of {', '.join(words)}"
        own = OWN_WORDS.get(label)
        tell = found.warning if own and own.fullmatch(value) else found.error
        tell(one.metric.name, f"unknown {label} {short(value)!r} of {short(one.labels['forward'])}", hint)


def _sizes(one: Series, buckets: tuple[int, ...] | None, folded: bool, found: Findings) -> None:
    """The spelling of batch sizes and buckets, and whether the one fits into the other."""
    size, bucket = one.labels.get("batch_size", ""), one.labels.get("bucket", "")
    if size and not _size_fits(size, buckets, folded):
        found.error(one.metric.name, f"batch_size {short(size)!r} on {one}", _size_hint(size, buckets))
    if bucket and not (NUMBER.fullmatch(bucket) or (folded and _ranged(bucket))):
        found.error(one.metric.name, f"bucket {short(bucket)!r} on {one}", "a bucket is one captured size, as 4")
    if one.metric is not metrics.GRAPH_CALLS or not NUMBER.fullmatch(bucket):
        return
    match = SIZE.fullmatch(size)
    if match and int(match[1] or match[2]) > int(bucket):
        found.error(one.metric.name, f"batch_size {size} above bucket {bucket}", "bucket is the padded size")
    if buckets and int(bucket) not in buckets:
        what = f"bucket {bucket} of {short(one.labels['forward'])} is not in its list"
        found.warning(one.metric.name, what, f"name it in the label buckets of {metrics.FORWARD_INFO.name}")


def _ranged(value: str) -> bool:
    match = SIZE.fullmatch(value)
    return value == "all" or bool(match and match[1] and int(match[1]) < int(match[2]))


def _size_fits(value: str, buckets: tuple[int, ...] | None, folded: bool) -> bool:
    match = SIZE.fullmatch(value)
    if match is None:
        return folded and value == "all"
    high = int(match[2])
    if buckets is None:
        return folded or (
            high <= metrics.EXACT_LABELS if match[1] is None else metrics.EXACT_LABELS < int(match[1]) < high
        )
    steps = STEPS if folded else STEPS[:1]
    return value in {step.size(high, buckets) for step in steps}


def _size_hint(value: str, buckets: tuple[int, ...] | None) -> str:
    match = SIZE.fullmatch(value)
    high = int(match[2]) if match else 0
    if buckets is None or high <= metrics.EXACT_LABELS:
        return "exact up to 64, above one range per bucket (65-72), powers of two above the largest bucket"
    return f"write {metrics.size_label(high, buckets)}"


def _value(one: Series, found: Findings) -> None:
    metric, value = one.metric, one.value
    whole = one.part in ("_bucket", "_count") or (metric.kind == "counter" and metric.unit != "s")
    fault = ""
    if math.isnan(value) or math.isinf(value):
        fault = "leave a series out where its value is unknown"
    elif value < 0 and metric is not metrics.POOL_GROWTH:
        fault = "it starts at 0 and only grows" if metric.kind == "counter" or one.part else "it is never negative"
    elif whole and value != int(value):
        fault = "it counts whole things"
    elif metric.kind == "info" and value != 1:
        fault = "an info is always 1"
    elif metric in ZERO_OR_ONE and value not in (0, 1):
        fault = "it is 0 or 1"
    if fault:
        found.error(metric.name, f"value {value:g} on {one}", fault)


def _duplicates(series: list[Series], found: Findings) -> None:
    seen: set[tuple[object, ...]] = set()
    for one in series:
        # An empty label is none, so these are one series to Prometheus too.
        key = (one.metric, one.part, tuple(sorted(item for item in one.written.items() if item[1])))
        if key in seen:
            found.error(one.metric.name, f"twice on the page: {one}", "Prometheus keeps one of the two; add them up")
        seen.add(key)


def _limits(series: list[Series], found: Findings) -> None:
    sets: dict[tuple[Process, str], set[object]] = defaultdict(set)
    names: dict[Process, set[str]] = defaultdict(set)
    for one in series:
        forward = one.labels.get("forward")
        owner = one.metric.name if forward is None else f"forward {short(forward)}"
        sets[one.constant, owner].add((one.metric, one.without_bound))
        if forward is not None:
            names[one.constant].add(forward)
    for (_, owner), group in sets.items():
        if len(group) > LIMIT:
            hint = f"at most {LIMIT}: write ranges of batch sizes, and nothing that belongs to a request"
            found.error("", f"{owner} has {len(group):,} label sets", hint)
    for forwards in names.values():
        if len(forwards) > FORWARDS:
            what = f"{len(forwards):,} forwards in one process"
            found.warning("", what, "a forward is a function of the model: name no request, layer or instance")


def _histograms(series: list[Series], found: Findings) -> None:
    groups: dict[tuple[Metric, object], list[Series]] = defaultdict(list)
    for one in series:
        if one.part:
            groups[one.metric, one.without_bound].append(one)
    for (metric, _), group in groups.items():
        for what, hint in _histogram_faults(group):
            found.error(metric.name, f"{what}: {group[0]}", hint)


def _histogram_faults(group: list[Series]) -> Iterator[tuple[str, str]]:
    known = {one.part: one.value for one in group if one.part != "_bucket"}
    bounds = [(_bound(one.written.get("le", "")), one.value) for one in group if one.part == "_bucket"]
    if any(math.isnan(bound) for bound, _ in bounds):
        yield "a bound that is no number", 'write le="0.0001", ..., le="+Inf"'
    ordered = sorted(bounds)
    if any(one[0] == other[0] for one, other in pairwise(ordered)):
        yield "a bound twice", "each bound once per label set"
    if any(one[1] > other[1] for one, other in pairwise(ordered)):
        yield "bounds are not cumulative", "each bound counts all samples up to it"
    if not ordered or ordered[-1][0] != math.inf:
        yield "no +Inf bound", 'the last bound is le="+Inf"'
    elif "_count" in known and known["_count"] != ordered[-1][1]:
        yield f"count {known['_count']:g}, +Inf {ordered[-1][1]:g}", "both are the number of samples"
    for part in {"_count", "_sum"} - set(known):
        yield f"no {part}", "a histogram has _bucket, _sum and _count"


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _infos(series: list[Series], lists: Mapping[tuple[Process, str], object], found: Findings) -> None:
    """The two infos: which contract this is, and what each forward is."""
    build = metrics.BUILD_INFO
    versions = {one.constant: one.labels["contract"] for one in series if one.metric is build}
    for process in sorted({one.constant for one in series} - set(versions)):
        found.error(build.name, f"missing{_of(process)}", f'export one with contract="{metrics.CONTRACT}" per process')
    for version in {version for version in versions.values() if version and version != metrics.CONTRACT}:
        what = f"contract {short(version)!r}, this graphprobe checks {metrics.CONTRACT}"
        found.error(build.name, what, "use the graphprobe of that contract")
    counted = {(one.constant, one.labels["forward"]) for one in series if one.labels.get("forward")}
    for process, forward in sorted(counted - set(lists)):
        what = f"missing for forward {short(forward)}{_of(process)}"
        found.error(metrics.FORWARD_INFO.name, what, "export one per forward: its unit, buckets and source")
    if not counted:
        found.warning("", "no forward yet", "check again when the engine has captured or counted one")


def _of(process: Process) -> str:
    return f" ({', '.join(f'{short(k)}={short(v)}' for k, v in process)})" if process else ""


def _times(series: list[Series], found: Findings) -> None:
    """Durations come three ways that agree: as a distribution, as a sum and as a count."""
    three = (metrics.FORWARD_DURATION, metrics.FORWARD_SECONDS, metrics.FORWARD_SAMPLES)
    seen = {
        metric: {(one.constant, one.of("forward", "phase", "path")) for one in series if one.metric is metric}
        for metric in three
    }
    hint = f"export {', '.join(metric.name for metric in three)} together, or none"
    for metric in three:
        for process, where in sorted(set().union(*seen.values()) - seen[metric]):
            found.error(metric.name, f"missing for {', '.join(map(short, where))}{_of(process)}", hint)


def _zeros(series: list[Series], lists: Mapping[tuple[Process, str], tuple[int, ...] | None], found: Findings) -> None:
    groups: dict[tuple[Process, str], list[Series]] = defaultdict(list)
    for one in series:
        groups[one.owner].append(one)
    for owner, buckets in lists.items():
        if buckets:
            _born(groups[owner], buckets, found)


def _born(series: list[Series], buckets: tuple[int, ...], found: Findings) -> None:
    """Zero series of one forward: in at least one phase each must be there, at 0 or above."""
    graph = {s.of("phase", "batch_size", "bucket") for s in series if s.metric is metrics.GRAPH_CALLS}
    eager = {s.of("phase", "batch_size", "reason") for s in series if s.metric is metrics.EAGER_CALLS}
    padding = {s.of("phase", "bucket") for s in series if s.metric is metrics.PADDING_ROWS}
    phases = sorted({key[0] for key in (*graph, *eager)}) or ["decode"]

    def missing(phase: str) -> list[tuple[Metric, list[int], str]]:
        small = set(range(1, min(metrics.EXACT_LABELS, buckets[-1]) + 1)) - set(buckets)
        first = buckets[-1] + 1
        exact, large = FallbackReason.NO_EXACT_BUCKET.value, FallbackReason.BATCH_TOO_LARGE.value
        label = metrics.size_label
        return [
            (metrics.GRAPH_CALLS, [b for b in buckets if (phase, label(b, buckets), str(b)) not in graph], "buckets"),
            (metrics.PADDING_ROWS, [b for b in buckets if (phase, str(b)) not in padding], "buckets"),
            (
                metrics.EAGER_CALLS,
                [n for n in sorted(small) if (phase, str(n), exact) not in eager],
                f"{exact} at sizes",
            ),
            (metrics.EAGER_CALLS, [first] * ((phase, label(first, buckets), large) not in eager), f"{large} at size"),
        ]

    best = min(map(missing, phases), key=lambda gaps: sum(len(sizes) for _, sizes, _ in gaps))
    forward = short(series[0].labels["forward"])
    for metric, sizes, where in best:
        if sizes:
            listed = spans(sizes) if metric is metrics.EAGER_CALLS else ", ".join(map(str, sizes))
            what = f"missing for {forward}: {where} {short(listed)}"
            found.error(metric.name, what, "export it at 0 from the start: a series born above 0 shows no increase")


def compare(earlier: Iterable[Series], later: Iterable[Series], found: Findings) -> None:
    """Counters, and the parts of histograms, only grow and never vanish while a process lives."""
    after = {_key(one): one.value for one in later}
    for one in earlier:
        if one.metric.kind != "counter" and not one.part:
            continue
        value = after.get(_key(one))
        if value is None:
            found.error(one.metric.name, f"gone at the second read: {one}", "a series stays until the process ends")
        elif value < one.value:
            what = f"fell from {one.value:g} to {value:g}: {one}"
            found.error(one.metric.name, what, "a counter never goes down; if the process restarted, check again")


def _key(one: Series) -> tuple[object, ...]:
    return (one.metric, one.part, tuple(sorted(one.written.items())))
