"""The samples of a page, held against the contract of ``graphprobe.metrics``: each one by itself, then all together."""

from __future__ import annotations

import math
import re

from graphprobe import metrics
from graphprobe.metrics import STEPS
from graphprobe.observe import MODES, PHASE
from graphprobe.reasons import FallbackReason
from graphprobe.tools.exposition import Page
from graphprobe.tools.findings import Findings, short
from graphprobe.tools.histograms import look_at_histograms
from graphprobe.tools.processes import look_at_processes
from graphprobe.tools.series import NUMBER, PID, Series, identified, known, look_at_metadata

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
SIZE = re.compile(r"(?:(0|[1-9][0-9]{0,8})-)?(0|[1-9][0-9]{0,8})")

Buckets = tuple[int, ...] | None


def examine(page: Page, found: Findings) -> list[Series]:
    """The series of the contract on a page; what is wrong with them goes to ``found``."""
    series = identified(page, found)
    if not series:
        hint = "give the page of a process after graphprobe.start_exporter(), or of an engine started with GRAPHPROBE=1"
        found.add("no-metric", "", "no metric whose name starts with graphprobe_", hint)
        return series
    look_at_metadata(page, found)
    told = known(series, found)
    for one in series:
        folded = one.process in told.folded
        _labels(one, found)
        _words(one, folded, found)
        # The buckets of a process that has ended are no longer told, and its ranges can be any.
        _sizes(one, told.buckets.get(one.owner), folded or one.process in told.ended, found)
        _value(one, found)
    # A summary is no broken histogram: its type says all.
    look_at_histograms([one for one in series if page.kinds.get(one.metric.name) != "summary"], found)
    look_at_processes(series, told, found)
    return series


def _labels(one: Series, found: Findings) -> None:
    for label in one.written:
        if not (label in one.labels or label in one.constant or _of_its_kind(label, one)):
            rule = "has another name" if label in metrics.RESERVED else "is on every series"
            hint = f"its labels are {', '.join(one.metric.labels) or 'none'}; one of your own {rule}"
            found.add("unknown-label", one.metric.name, f"unknown label {short(label)} on {one}", hint)
    for label, value in one.labels.items():
        if not value and (one.metric, label) not in MAY_BE_EMPTY:
            hint = f"its labels are {', '.join(one.metric.labels)}"
            found.add("missing-label", one.metric.name, f"no {label} on {one}", hint)
    if one.metric is metrics.FORWARD_DURATION and one.of("path") == ("graph",) and not one.labels["mode"]:
        found.add("missing-label", one.metric.name, f"no mode on {one}", f"a graph is one of {', '.join(MODES)}")


def _of_its_kind(label: str, one: Series) -> bool:
    return (label == "le" and one.part == "_bucket") or (label == PID and one.metric.kind in ("gauge", "info"))


def _words(one: Series, folded: bool, found: Findings) -> None:
    for label, words in WORDS.items():
        value = one.labels.get(label, "")
        if not value or value in words or (folded and value == "all" and label in ("phase", "mode")):
            continue
        near = found.near(value, words)
        hint = f"write {near}" if near else f"one of {', '.join(words)}"
        own = OWN_WORDS.get(label)
        rule = "own-word" if own and own.fullmatch(value) else "unknown-word"
        what = f"unknown {label} {short(value)!r} of {short(one.labels['forward'])}"
        found.add(rule, one.metric.name, what, hint)


def _sizes(one: Series, buckets: Buckets, folded: bool, found: Findings) -> None:
    """The spelling of batch sizes and buckets, and whether the one fits into the other."""
    size, bucket = one.labels.get("batch_size", ""), one.labels.get("bucket", "")
    if size and not _size_fits(size, buckets, folded):
        found.add("batch-size", one.metric.name, f"batch_size {short(size)!r} on {one}", _size_hint(size, buckets))
    if bucket and not (NUMBER.fullmatch(bucket) or (folded and _ranged(bucket))):
        hint = "a bucket is one captured size, as 4"
        found.add("bucket", one.metric.name, f"bucket {short(bucket)!r} on {one}", hint)
    if one.metric is metrics.GRAPH_CALLS and NUMBER.fullmatch(bucket):
        _padded(one, size, bucket, buckets, found)


def _padded(one: Series, size: str, bucket: str, buckets: Buckets, found: Findings) -> None:
    match = SIZE.fullmatch(size)
    if match and int(match[1] or match[2]) > int(bucket):
        what = f"batch_size {size} above bucket {bucket}"
        found.add("batch-size", one.metric.name, what, "bucket is the padded size")
    if buckets is not None and int(bucket) not in buckets:
        forward = short(one.labels["forward"])
        what = f"bucket {bucket} of {forward} is not in its list" if buckets else f"{forward} lists no buckets"
        hint = (
            f"name all in the label buckets of {metrics.FORWARD_INFO.name}, and export their series at 0 from the start"
        )
        found.add("unlisted-bucket", one.metric.name, what, hint)


def _ranged(value: str) -> bool:
    match = SIZE.fullmatch(value)
    return value == "all" or bool(match and match[1] and int(match[1]) < int(match[2]))


def _size_fits(value: str, buckets: Buckets, folded: bool) -> bool:
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


def _size_hint(value: str, buckets: Buckets) -> str:
    match = SIZE.fullmatch(value)
    high = int(match[2]) if match else 0
    if buckets is None or high <= metrics.EXACT_LABELS:
        return "exact up to 64, above one range per bucket (65-72), powers of two above the largest bucket"
    return f"write {metrics.size_label(high, buckets)}"


def _value(one: Series, found: Findings) -> None:
    fault = _value_fault(one)
    if fault:
        found.add("value", one.metric.name, f"value {one.value:g} on {one}", fault)


def _value_fault(one: Series) -> str:
    metric, value = one.metric, one.value
    if math.isnan(value) or math.isinf(value):
        return "leave a series out where its value is unknown"
    if value < 0 and metric is not metrics.POOL_GROWTH:
        return "it starts at 0 and only grows" if metric.kind == "counter" or one.part else "it is never negative"
    if value != int(value) and (metric.unit != "s" or one.part in ("_bucket", "_count")):
        return "it counts whole things"
    if metric.kind == "info" and value != 1:
        return "an info is always 1"
    return "it is 0 or 1" if metric in ZERO_OR_ONE and value not in (0, 1) else ""
