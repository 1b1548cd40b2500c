"""Sums over the rows of a snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import Row


def by_size(rows: Iterable[Row]) -> dict[int, int]:
    """Calls by batch size."""
    found: Counter[int] = Counter()
    for row in rows:
        found[row.batch_size] += row.calls
    return dict(found)


def by_reason(rows: Iterable[Row]) -> dict[FallbackReason, int]:
    """Eager calls by reason."""
    found: Counter[FallbackReason] = Counter()
    for row in rows:
        if row.reason is not None:
            found[row.reason] += row.calls
    return dict(found)


def hits(rows: Iterable[Row]) -> dict[int, int]:
    """Graph calls by bucket."""
    found: Counter[int] = Counter()
    for row in rows:
        if row.path == "graph" and row.bucket is not None:
            found[row.bucket] += row.calls
    return dict(found)


def hit_rate(rows: Iterable[Row]) -> float | None:
    """Graph calls among those that count; None where none does."""
    counted = [row for row in rows if row.reason is None or row.reason.counted]
    graph = sum(row.calls for row in counted if row.path == "graph")
    return graph / sum(row.calls for row in counted) if counted else None


def mean_size(rows: Iterable[Row]) -> int:
    """The mean size of eager calls; 1 where there is none."""
    eager = [(row.batch_size, row.calls) for row in rows if row.path == "eager"]
    return round(sum(size * n for size, n in eager) / sum(n for _, n in eager)) if eager else 1
