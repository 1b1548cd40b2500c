"""The metric contract: every name, unit, label and help text, and the samples that a snapshot stands for.

Nothing else in graphprobe spells a metric name. The functions are pure: the same snapshot gives the same samples in
every exporter. The hit rate is no metric: a recording rule derives it. Standard library only.

Above its limit of label sets (see ``limit``) a forward is folded step by step (see ``STEPS``): calls are summed under
coarser labels, never dropped. The text of a range names its set, so a series means the same at every step, and a
forward never goes back to a finer step, so no counter falls.
"""

from __future__ import annotations

import functools
import glob
import importlib.metadata
import logging
import os
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot, Times
from graphprobe.unhurried import unhurried

logger = logging.getLogger("graphprobe")

CONTRACT = "1"
"""Version of this contract; names, labels and meanings change only with it."""

EXACT_LABELS = 64
"""Batch sizes up to this one are a label value each."""

LIMIT = 500
"""Most label sets of one forward; a histogram counts as one."""

ENGINE_LIMIT = 2_000
"""The same of an engine that is observed, which has one forward: vLLM's own list of 51 to 83 sizes, three phases of
steps and two modes come to 800 to 1,500, and without its buckets nobody could choose others."""

UNITS = {"s": "seconds", "By": "bytes"}
"""Units that end a metric's name, as OpenTelemetry writes them -> as Prometheus does."""


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One line of the contract. ``unit`` is UCUM, as OpenTelemetry wants it; ``combine`` is how label sets fold."""

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    help: str
    combine: str = "sum"

    @property
    def family(self) -> str:
        """The name without the suffix that Prometheus clients add themselves (``_total``, ``_info``)."""
        return self.name.removesuffix("_total").removesuffix("_info")

    @property
    def otel_name(self) -> str:
        """The OpenTelemetry name: dots, neither kind nor unit (a Prometheus exporter adds both again)."""
        return self.name.removesuffix("_total").removesuffix("_" + UNITS.get(self.unit, " ")).replace("_", ".")


GRAPH_CALLS = Metric(
    "graphprobe_graph_calls_total",
    "counter",
    "{call}",
    ("forward", "phase", "mode", "batch_size", "bucket"),
    "Calls of a forward whose result came from a graph.",
)
EAGER_CALLS = Metric(
    "graphprobe_eager_calls_total",
    "counter",
    "{call}",
    ("forward", "phase", "batch_size", "reason"),
    "Calls of a forward that ran eagerly, by the reason why.",
)
PADDING_ROWS = Metric(
    "graphprobe_padding_rows_total",
    "counter",
    "{row}",
    ("forward", "phase", "bucket"),
    "Rows added to reach a bucket, in the unit of the forward.",
)
FORWARD_DURATION = Metric(
    "graphprobe_forward_duration_seconds",
    "histogram",
    "s",
    ("forward", "phase", "path", "mode"),
    "Sampled duration of a forward: stream time on a GPU, wall time elsewhere.",
)
FORWARD_SECONDS = Metric(
    "graphprobe_forward_seconds_total",
    "counter",
    "s",
    ("forward", "phase", "path", "bucket"),
    "Sum of the sampled durations by bucket; bucket is empty where none applies.",
)
FORWARD_SAMPLES = Metric(
    "graphprobe_forward_samples_total",
    "counter",
    "{sample}",
    ("forward", "phase", "path", "bucket"),
    "Number of sampled durations by bucket; bucket is empty where none applies.",
)
SAMPLES_DROPPED = Metric(
    "graphprobe_timing_samples_dropped_total",
    "counter",
    "{sample}",
    ("forward",),
    "Samples of duration that were given up because too many were pending.",
)
CAPTURES = Metric(
    "graphprobe_captures_total",
    "counter",
    "{capture}",
    ("forward", "bucket", "outcome"),
    "Attempts to capture a graph, by outcome: ok, error, oom.",
)
CAPTURE_DURATION = Metric(
    "graphprobe_capture_duration_seconds",
    "gauge",
    "s",
    ("forward", "bucket"),
    "Duration of the last capture of a bucket.",
    "max",
)
BUCKET_CAPTURED = Metric(
    "graphprobe_bucket_captured",
    "gauge",
    "{graph}",
    ("forward", "bucket"),
    "1 while a graph of this bucket is ready to replay, 0 while none is.",
    "min",
)
POOL_BYTES = Metric(
    "graphprobe_graph_pool_bytes",
    "gauge",
    "By",
    ("forward",),
    "Device memory that the graphs of a forward hold; absent where unknown.",
)
POOL_GROWTH = Metric(
    "graphprobe_graph_pool_growth_bytes",
    "gauge",
    "By",
    ("forward", "bucket"),
    "Change of the graph pool by the last capture of a bucket; may be negative in a shared pool.",
)
POOL_ESTIMATE = Metric(
    "graphprobe_graph_pool_estimate_bytes",
    "gauge",
    "By",
    ("forward",),
    "What the engine itself estimated for its graphs.",
)
KV_CAPACITY = Metric(
    "graphprobe_kv_capacity_tokens",
    "gauge",
    "{token}",
    ("forward",),
    "Tokens that the engine's KV cache holds.",
)
UNCOVERED_SIZES = Metric(
    "graphprobe_uncovered_sizes",
    "gauge",
    "{size}",
    ("forward", "phase"),
    "Batch sizes that the engine may send and no bucket serves.",
    "max",
)
VERIFY_MISMATCHES = Metric(
    "graphprobe_verify_mismatches_total",
    "counter",
    "{mismatch}",
    ("forward", "bucket"),
    "Graph results that differed from the eager ones.",
)
REPLAY_MISMATCHES = Metric(
    "graphprobe_replay_mismatches_total",
    "counter",
    "{call}",
    ("forward", "path"),
    "Calls whose path the independent count of launches does not confirm: graph without one, or eager with one.",
)
REPLAYS_SEEN = Metric(
    "graphprobe_replays_seen_total",
    "counter",
    "{replay}",
    (),
    "Graph launches seen by an independent count.",
)
HOOK_BOUND = Metric(
    "graphprobe_hook_bound",
    "gauge",
    "{hook}",
    ("engine", "hook"),
    "1 while a hook into an engine is in place, 0 where it found nothing to hook.",
)
INTERNAL_ERRORS = Metric(
    "graphprobe_internal_errors_total",
    "counter",
    "{error}",
    ("where",),
    "Failures of graphprobe itself by place; label_limit counts the folds of a forward with too many label sets.",
)
FORWARD_INFO = Metric(
    "graphprobe_forward_info",
    "info",
    "",
    ("forward", "unit", "buckets", "backend", "source", "role"),
    "What a forward is: its unit, buckets, backend, who reports it, and its role in the engine.",
)
BUILD_INFO = Metric(
    "graphprobe_build_info",
    "info",
    "",
    ("version", "contract", "torch", "cuda", "device", "backend"),
    "Versions of graphprobe, of this metric contract and of torch, and the device.",
)

CATALOGUE: tuple[Metric, ...] = (
    GRAPH_CALLS,
    EAGER_CALLS,
    PADDING_ROWS,
    FORWARD_DURATION,
    FORWARD_SECONDS,
    FORWARD_SAMPLES,
    SAMPLES_DROPPED,
    CAPTURES,
    CAPTURE_DURATION,
    BUCKET_CAPTURED,
    POOL_BYTES,
    POOL_GROWTH,
    POOL_ESTIMATE,
    KV_CAPACITY,
    UNCOVERED_SIZES,
    VERIFY_MISMATCHES,
    REPLAY_MISMATCHES,
    REPLAYS_SEEN,
    HOOK_BOUND,
    INTERNAL_ERRORS,
    FORWARD_INFO,
    BUILD_INFO,
)
"""Every metric, in the order in which it is exposed."""


class Distribution(NamedTuple):
    """The value of a histogram: samples per bound of ``graphprobe.ledger.BOUNDS`` and above the last, and seconds."""

    counts: tuple[int, ...]
    sum: float


Value = float | Distribution


class Series:
    """A metric and one set of its labels, in its order. ``kept`` is what a reader made of it at its last look."""

    __slots__ = ("kept", "labels", "metric")

    def __init__(self, metric: Metric, labels: Mapping[str, str]) -> None:
        self.metric = metric
        self.labels = labels
        self.kept: Any = None


class Sample(NamedTuple):
    """The value of one series."""

    series: Series
    value: Value

    @property
    def metric(self) -> Metric:
        """The metric of the series."""
        return self.series.metric

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels of the metric, in its order."""
        return self.series.labels


class Step(NamedTuple):
    """How one folding step writes a batch size, a bucket and a word (phase, mode); ``spare`` keeps spare zero rows."""

    size: Callable[[int, Sequence[int]], str]
    bucket: Callable[[int], str]
    word: Callable[[str], str]
    spare: bool = False


def size_label(size: int, buckets: Sequence[int] = ()) -> str:
    """The ``batch_size`` label: exact up to 64; above, one range per bucket, then powers of two."""
    return _range(size, buckets, EXACT_LABELS)


def _range(size: int, buckets: Sequence[int], exact: int) -> str:
    if size <= exact:
        return str(size)
    index = bisect_left(buckets, size)
    high = buckets[index] if index < len(buckets) else 1 << (size - 1).bit_length()
    below = buckets[index - 1] if index else 0
    low = max(below, exact, 0 if index < len(buckets) else high // 2) + 1
    return str(high) if low == high else f"{low}-{high}"


def _per_bucket(size: int, buckets: Sequence[int]) -> str:
    return _range(size, buckets, 0)


def _power(size: int, buckets: Sequence[int] = ()) -> str:
    return _range(size, (), 0)


def _all(value: object, buckets: Sequence[int] = ()) -> str:
    return "all"


STEPS = (
    Step(size_label, str, str, spare=True),
    Step(size_label, str, str),
    Step(_per_bucket, str, str),
    Step(_power, str, str),
    Step(_all, str, str),
    Step(_all, _power, str),
    Step(_all, _all, _all),
)
"""From the contract's labels to one label set per reason. The first two differ by zero rows only: they fold nothing."""

Point = tuple[Metric, tuple["str | int | None", ...], Value]
"""A metric of a forward, what its labels stand for (all but the first, which is ``forward``), and the value."""


class Wording:
    """The labels of one forward at one step, as text. Kept by a reader: they are the same at its next look."""

    def __init__(self, name: str, buckets: Sequence[int], step: Step) -> None:
        self._name = text(name)
        self._buckets = buckets
        self._step = step
        self.too_many = False
        """Whether more than the limit were found once: label sets grow in number, so a reader need not look again."""
        self.known: dict[tuple[Metric, tuple[str | int | None, ...]], Series] = {}
        """The series of points that were seen."""
        self._sets: dict[tuple[Metric, tuple[str, ...]], Series] = {}

    def learn(self, metric: Metric, raw: tuple[str | int | None, ...]) -> Series:
        """The series of a point: one object for all points that fold into it."""
        names = metric.labels[1:]
        values = (self._name, *(self._written(*pair) for pair in zip(names, raw, strict=True)))
        made = Series(metric, dict(zip(metric.labels, values, strict=True)))
        self.known[metric, raw] = self._sets.setdefault((metric, values), made)
        return self.known[metric, raw]

    def _written(self, label: str, value: str | int | None) -> str:
        if value is None:
            return ""
        if label == "batch_size" and isinstance(value, int):
            return self._step.size(value, self._buckets)
        if label == "bucket" and isinstance(value, int):
            return self._step.bucket(value)
        return text(self._step.word(str(value)) if label in ("phase", "mode") else str(value))


Memory = dict[tuple[str, tuple[int, ...], int], Wording]
"""What a reader keeps from one look to the next, by forward, buckets and step."""


def limit(source: str) -> int:
    """Most label sets of a forward that comes from ``source`` (capture, observe, engine)."""
    return ENGINE_LIMIT if source == "engine" else LIMIT


def forward_samples(forward: ForwardSnapshot, memory: Memory | None = None) -> tuple[list[Sample], int]:
    """The samples of one forward within its limit, and how many times its labels had to be folded for that.

    ``memory`` makes it faster and changes nothing.
    """
    memory = {} if memory is None else memory
    points = list(unhurried(_points(forward)))
    spare, most = list(_spare_points(forward)), limit(forward.source)
    for folds, step in enumerate(STEPS, start=-1):
        key = (forward.name, forward.buckets, folds)
        wording = memory.get(key) or memory.setdefault(key, Wording(forward.name, forward.buckets, step))
        if wording.too_many:
            continue
        folded = _fold(points + spare if step.spare else points, wording)
        wording.too_many = len(folded) > most and step is not STEPS[-1]
        if not wording.too_many:
            break
    return [Sample(series, value) for series, value in unhurried(folded.items())], max(0, folds)


def process_samples(snapshot: Snapshot, folds: int = 0, build: Mapping[str, str] | None = None) -> list[Sample]:
    """The samples that belong to no forward; ``folds`` is the sum over all forwards, ``build`` the build info."""
    found = [Sample(Series(INTERNAL_ERRORS, {"where": "label_limit"}), folds)]
    found += [Sample(Series(INTERNAL_ERRORS, {"where": text(w)}), n) for w, n in snapshot.internal_errors.items()]
    found += [
        Sample(Series(HOOK_BOUND, {"engine": text(engine), "hook": text(hook)}), int(bound))
        for (engine, hook), bound in snapshot.hooks.items()
    ]
    if snapshot.replays_seen is not None:
        found.append(Sample(Series(REPLAYS_SEEN, {}), snapshot.replays_seen))
    return [*found, Sample(Series(BUILD_INFO, dict(build_info() if build is None else build)), 1)]


def samples(snapshot: Snapshot) -> list[Sample]:
    """All samples of a snapshot, without the constant labels."""
    parts = [forward_samples(forward) for forward in snapshot.forwards.values()]
    return [s for part, _ in parts for s in part] + process_samples(snapshot, sum(folds for _, folds in parts))


def _points(forward: ForwardSnapshot) -> Iterator[Point]:
    yield from _born(forward)
    for row in forward.rows:
        yield from _row_points(row)
    for key, times in forward.times.items():
        yield from _time_points(*key, times)
    yield from _capture_points(forward)
    yield from _whole_points(forward)


def _born(forward: ForwardSnapshot) -> Iterator[Point]:
    """Zeros: a counter whose first sample is above 0 shows no increase to Prometheus.

    A snapshot does not say whether padding is allowed, so ``no_exact_bucket`` is born for padded forwards too, where it
    stays 0.
    """
    buckets = forward.buckets
    for phase in forward.phases if buckets else ():
        for bucket in buckets:
            yield GRAPH_CALLS, (phase, "full", bucket, bucket), 0
            yield PADDING_ROWS, (phase, bucket), 0
        missing = set(range(1, min(EXACT_LABELS, buckets[-1]) + 1)) - set(buckets)
        for size in sorted(missing):
            yield EAGER_CALLS, (phase, size, FallbackReason.NO_EXACT_BUCKET), 0
        yield EAGER_CALLS, (phase, buckets[-1] + 1, FallbackReason.BATCH_TOO_LARGE), 0


def _spare_points(forward: ForwardSnapshot) -> Iterator[Point]:
    """Zeros of failures, so that the first one is seen as an increase; given up first when labels run out."""
    for bucket in forward.buckets if forward.source == "capture" else ():
        yield CAPTURES, (bucket, "ok"), 0
        yield CAPTURES, (bucket, "error"), 0
        yield CAPTURES, (bucket, "oom"), 0
        yield VERIFY_MISMATCHES, (bucket,), 0


def _row_points(row: Row) -> Iterator[Point]:
    if row.path == "eager":
        yield EAGER_CALLS, (row.phase, row.batch_size, row.reason), row.calls
        return
    yield GRAPH_CALLS, (row.phase, row.mode, row.batch_size, row.bucket), row.calls
    yield PADDING_ROWS, (row.phase, row.bucket), row.padding


def _time_points(phase: str, path: str, mode: str, bucket: int | None, times: Times) -> Iterator[Point]:
    yield FORWARD_DURATION, (phase, path, mode), Distribution(times.bounds, times.sum)
    yield FORWARD_SECONDS, (phase, path, bucket), times.sum
    yield FORWARD_SAMPLES, (phase, path, bucket), times.count


def _capture_points(forward: ForwardSnapshot) -> Iterator[Point]:
    for (bucket, outcome), count in forward.capture_outcomes.items():
        yield CAPTURES, (bucket, outcome), count
    for bucket, seconds in forward.capture_seconds.items():
        yield CAPTURE_DURATION, (bucket,), seconds
    known = dict.fromkeys(forward.buckets, False) if forward.source == "capture" else {}
    for bucket, ready in {**known, **forward.live}.items():
        yield BUCKET_CAPTURED, (bucket,), int(ready)
    for bucket, grown in forward.pool_growth.items():
        yield POOL_GROWTH, (bucket,), grown
    for bucket, count in forward.mismatches.items():
        yield VERIFY_MISMATCHES, (bucket,), count


def _whole_points(forward: ForwardSnapshot) -> Iterator[Point]:
    yield SAMPLES_DROPPED, (), forward.dropped
    known = ((POOL_BYTES, forward.pool_bytes), (POOL_ESTIMATE, forward.pool_estimate_bytes))
    for metric, value in (*known, (KV_CAPACITY, forward.kv_capacity_tokens)):
        if value is not None:
            yield metric, (), value
    for path, count in forward.unmatched.items():
        yield REPLAY_MISMATCHES, (path,), count
    for phase, count in forward.uncovered.items():
        yield UNCOVERED_SIZES, (phase,), count
    buckets = ",".join(map(str, forward.buckets))
    yield FORWARD_INFO, (forward.unit, buckets, forward.backend, forward.source, forward.role), 1


def _fold(points: Iterable[Point], wording: Wording) -> dict[Series, Value]:
    found: dict[Series, Value] = {}
    known = wording.known
    for metric, raw, value in unhurried(points):
        series = known.get((metric, raw)) or wording.learn(metric, raw)
        found[series] = _combined(metric.combine, found[series], value) if series in found else value
    return found


def _combined(how: str, one: Value, other: Value) -> Value:
    if isinstance(one, Distribution) and isinstance(other, Distribution):
        return Distribution(tuple(a + b for a, b in zip(one.counts, other.counts, strict=True)), one.sum + other.sum)
    assert not isinstance(one, Distribution) and not isinstance(other, Distribution)
    return one + other if how == "sum" else max(one, other) if how == "max" else min(one, other)


def text(value: str) -> str:
    """A label's value that can be encoded: a name or variable that is no UTF-8 has lone surrogates, here ``?``."""
    return value.encode("utf-8", "replace").decode()


LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
RESERVED = frozenset({"le", "quantile", "pid"}.union(*(metric.labels for metric in CATALOGUE)))
"""Label names that the environment may not set; prometheus_client takes ``pid`` off gauges of several processes."""


def constant_labels(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Labels of every series: ``rank`` from RANK, and ``GRAPHPROBE_LABELS=key=value,...`` (which may override it).

    What is malformed there is logged and left out, never raised.
    """
    environ = os.environ if environ is None else environ
    rank = environ.get("RANK", "").strip()
    found = {"rank": text(rank)} if rank else {}
    for pair in environ.get("GRAPHPROBE_LABELS", "").split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if equals and LABEL_NAME.fullmatch(key) and key not in RESERVED:
            found[key] = text(value)
        elif pair.strip():
            logger.warning("GRAPHPROBE_LABELS: left out %r; write key=value, key a label name of your own", pair)
    return found


def rank_of_group() -> str:
    """The rank in torch.distributed, empty where that is not imported or not initialised."""
    group = getattr(sys.modules.get("torch"), "distributed", None)
    try:
        return str(group.get_rank()) if group is not None and group.is_initialized() else ""
    except Exception:
        # torch without distributed has none of these names, and a group may end meanwhile.
        return ""


def build_info() -> dict[str, str]:
    """The labels of ``graphprobe_build_info``. Never imports torch, never initialises CUDA; unknown is empty."""
    torch = sys.modules.get("torch")
    build = getattr(torch, "version", None)
    built_for = next((name for name in ("cuda", "hip", "xpu") if getattr(build, name, None)), "")
    return {
        "version": str(getattr(sys.modules.get("graphprobe"), "__version__", "")),
        "contract": CONTRACT,
        "torch": str(getattr(torch, "__version__", "") or _installed("torch")),
        "cuda": str(getattr(build, "cuda", None) or ""),
        "device": _devices(),
        "backend": text(os.environ.get("GRAPHPROBE_BACKEND", "") or built_for),
    }


@functools.cache
def _installed(distribution: str) -> str:
    """The installed version of a distribution, empty where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _devices() -> str:
    # The driver's own text: asking torch for the name would initialise CUDA in the exporter's thread.
    models = set()
    for path in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                models |= {line.partition(":")[2].strip() for line in file if line.startswith("Model:")}
        except OSError:
            continue
    return ", ".join(sorted(models))
