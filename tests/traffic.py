"""Traffic that tests of advice ask about, as a snapshot or in windows of time, and what a list costs, reckoned anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot, Times
from graphprobe.tools.sources import Reading

Graph = Mapping[tuple[int, int], int]
"""(batch size, bucket) -> calls."""

Eager = Mapping[tuple[int, str], int]
"""(batch size, reason) -> calls."""


def rows(graph: Graph | None = None, eager: Eager | None = None, phase: str = "decode") -> tuple[Row, ...]:
    hits = [
        Row(size, "graph", bucket, None, n, (bucket - size) * n, phase, "full")
        for (size, bucket), n in (graph or {}).items()
    ]
    missed = [
        Row(size, "eager", None, FallbackReason(reason), n, 0, phase) for (size, reason), n in (eager or {}).items()
    ]
    return (*hits, *missed)


def seen(
    graph: Graph | None = None,
    eager: Eager | None = None,
    buckets: Sequence[int] = (),
    name: str = "decode",
    **more: Any,
) -> Snapshot:
    """The snapshot of one forward with these calls."""
    return Snapshot({name: ForwardSnapshot(name, tuple(buckets), **{"rows": rows(graph, eager), **more})})


def dispatched(
    calls: Mapping[int, int], buckets: Sequence[int], pad: bool, name: str = "decode", **more: Any
) -> Snapshot:
    """The snapshot of these calls by size, as a list serves them."""
    graph: dict[tuple[int, int], int] = {}
    eager: dict[tuple[int, str], int] = {}
    for size, n in calls.items():
        bucket = server(size, buckets, pad)
        if bucket is not None:
            graph[size, bucket] = n
        else:
            eager[size, "batch_too_large" if size > max(buckets) else "no_exact_bucket"] = n
    return seen(graph, eager, sorted(buckets), name, **more)


def windowed(windows: Sequence[Mapping[int, int]], buckets: Sequence[int], pad: bool) -> Reading:
    """The same with windows of time."""
    total: dict[int, int] = {}
    for window in windows:
        for size, n in window.items():
            total[size] = total.get(size, 0) + n
    parts = tuple(dispatched(window, buckets, pad) for window in windows)
    return Reading(dispatched(total, buckets, pad), parts, "prometheus")


def sampled(
    path: str, seconds: Mapping[int | None, tuple[int, float]], phase: str = "decode", mode: str = "full"
) -> Any:
    """Measured durations by bucket: how many, and their mean."""
    return {
        (phase, path, mode if path == "graph" else "", bucket): Times(n, n * mean, ())
        for bucket, (n, mean) in seconds.items()
    }


def server(size: int, buckets: Sequence[int], pad: bool) -> int | None:
    """The rule of dispatch, in its plainest form."""
    holding = [bucket for bucket in buckets if (bucket >= size if pad else bucket == size)]
    return min(holding, default=None)


def reckoned(
    calls: Mapping[int, int],
    buckets: Sequence[int],
    pad: bool,
    graph: Callable[[int], float],
    eager: Callable[[int], float],
    stuck: Mapping[int, int] | None = None,
) -> tuple[float, float, int]:
    """Seconds per call, hit rate and rows of padding, call by call."""
    seconds, hits, padding, total = 0.0, 0, 0, 0
    for size, n in calls.items():
        bucket = server(size, buckets, pad)
        total += n
        if bucket is None:
            seconds += n * eager(size)
        else:
            seconds, hits, padding = seconds + n * graph(bucket), hits + n, padding + n * (bucket - size)
    for size, n in (stuck or {}).items():
        seconds, total = seconds + n * eager(size), total + n
    return seconds / total, hits / total, padding
