"""What an engine sent, per batch size, and what is known of the forward that served it; read off a source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from graphprobe.buckets import Buckets
from graphprobe.errors import ConfigError, SourceError
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Times
from graphprobe.tools.sources import Reading

SERVABLE = frozenset(
    {
        FallbackReason.NO_EXACT_BUCKET,
        FallbackReason.BATCH_TOO_LARGE,
        FallbackReason.NOT_CAPTURED,
        FallbackReason.GRAPH_LIMIT,
        FallbackReason.WARMUP,
        FallbackReason.DISABLED,
        FallbackReason.UNSUPPORTED_DEVICE,
    }
)
"""Eager calls that a bucket of their size would have served, or will."""

UNEXPLAINED = frozenset({FallbackReason.UNKNOWN, FallbackReason.ENGINE_DECLINED})
"""Eager calls that a bucket would have served where none did hold their size, as far as anybody knows."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls of one forward, without prefill.

    ``calls`` are those that a graph of their size could serve, ``windows`` the same in parts of time, the oldest first
    (none where the source knows no time). ``stuck`` are counted calls that run eagerly with any list.
    ``graph`` and ``eager`` are mean seconds by size, as measured, with how often; an eager time stands at the mean size
    of what ran eagerly. ``pads`` is None where nothing tells.
    """

    forward: str
    unit: str
    buckets: tuple[int, ...]
    calls: Mapping[int, int]
    windows: tuple[Mapping[int, int], ...] = ()
    stuck: Mapping[int, int] = field(default_factory=dict)
    stuck_why: Mapping[FallbackReason, int] = field(default_factory=dict)
    hits: Mapping[int, int] = field(default_factory=dict)
    hit_rate: float | None = None
    pads: bool | None = None
    graph: Mapping[int, Times] = field(default_factory=dict)
    eager: Mapping[int, Times] = field(default_factory=dict)
    capture_seconds: Mapping[int, float] = field(default_factory=dict)
    graph_bytes: Mapping[int, int] = field(default_factory=dict)
    pool_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Calls that a graph could serve."""
        return sum(self.calls.values())

    @property
    def largest(self) -> int:
        """The largest size of them."""
        return max(self.calls)


def traffic(reading: Reading, forward: str | None = None, phase: str | None = None) -> Traffic:
    """The traffic of one forward of ``reading``: ``forward``, or the only one that has calls; all phases but prefill.

    ConfigError where the name is none, or several have calls; SourceError where there is no call yet.
    """
    chosen = _forward(reading.snapshot.forwards, forward)
    rows = _rows(chosen, phase)
    calls, stuck, why = _sorted(rows, chosen)
    if not calls:
        raise SourceError(f"{chosen.name}: {_nothing(chosen, stuck, phase)}")
    parts = [w.forwards.get(chosen.name, ForwardSnapshot(chosen.name)) for w in reading.windows]
    eager = _merged([t for (p, path, _, _), t in chosen.times.items() if path == "eager" and _meant(p, phase)])
    counted = [row for row in rows if row.reason is None or row.reason.counted]
    graph_calls = sum(row.calls for row in rows if row.path == "graph")
    return Traffic(
        chosen.name,
        chosen.unit,
        chosen.buckets,
        calls,
        tuple(dict(_sorted(_rows(part, phase), chosen)[0]) for part in parts),
        stuck,
        why,
        _by(rows, "bucket"),
        graph_calls / sum(row.calls for row in counted) if counted and reading.kind != "sizes" else None,
        _pads(rows),
        _graph_times(chosen, phase),
        {_mean_size(rows): eager} if eager else {},
        chosen.capture_seconds,
        {n: max(0, grown) for n, grown in chosen.pool_growth.items()},
        chosen.pool_bytes,
        reading.notes,
    )


def _forward(forwards: Mapping[str, ForwardSnapshot], name: str | None) -> ForwardSnapshot:
    if name is not None:
        if name not in forwards:
            raise ConfigError(f"there is no forward {name!r}", f"there are: {', '.join(forwards) or 'none'}")
        return forwards[name]
    if not forwards:
        raise SourceError("no forward is in the source. hint: decorate one with capture, or call observe")
    busy = [forward for forward in forwards.values() if forward.rows]
    if len(busy) > 1:
        raise ConfigError(f"{len(busy)} forwards have calls", f"name one of: {', '.join(f.name for f in busy)}")
    return busy[0] if busy else next(iter(forwards.values()))


def _meant(found: str, phase: str | None) -> bool:
    # Long prefills are eager by design, as the hit-rate alert has it.
    return found != "prefill" if phase is None else found == phase


def _rows(forward: ForwardSnapshot, phase: str | None) -> list[Row]:
    return [row for row in forward.rows if _meant(row.phase, phase) and row.calls > 0 and row.batch_size > 0]


def _sorted(
    rows: Iterable[Row], forward: ForwardSnapshot
) -> tuple[Counter[int], Counter[int], Counter[FallbackReason]]:
    """Calls by size that a graph could serve, those that none can, and why those."""
    calls: Counter[int] = Counter()
    stuck: Counter[int] = Counter()
    why: Counter[FallbackReason] = Counter()
    pads = _pads(forward.rows)
    for row in rows:
        if (
            row.reason is None
            or row.reason in SERVABLE
            or (row.reason in UNEXPLAINED and not _held(row, forward, pads))
        ):
            calls[row.batch_size] += row.calls
        elif row.reason.counted:
            stuck[row.batch_size] += row.calls
            why[row.reason] += row.calls
    return calls, stuck, why


def _held(row: Row, forward: ForwardSnapshot, pads: bool | None) -> bool:
    """Whether the list in use has a graph for this size, so that something else kept the call from it."""
    if not forward.buckets:
        return False
    buckets = Buckets(forward.buckets)
    return (buckets.exact if pads is False else buckets.select)(row.batch_size) is not None


def _pads(rows: Iterable[Row]) -> bool | None:
    """Whether a larger bucket serves a smaller batch: seen to, seen not to, or None."""
    rows = list(rows)
    if any(row.path == "graph" and row.bucket is not None and row.bucket > row.batch_size for row in rows):
        return True
    return False if any(row.reason is FallbackReason.NO_EXACT_BUCKET for row in rows) else None


def _by(rows: Iterable[Row], name: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for row in rows:
        if row.path == "graph":
            found[getattr(row, name)] += row.calls
    return found


def _graph_times(forward: ForwardSnapshot, phase: str | None) -> dict[int, Times]:
    by_bucket: dict[int, list[Times]] = {}
    for (found, path, _, bucket), times in forward.times.items():
        if path == "graph" and bucket is not None and _meant(found, phase) and times.count:
            by_bucket.setdefault(bucket, []).append(times)
    return {bucket: merged for bucket, times in by_bucket.items() if (merged := _merged(times)) and merged.sum > 0}


def _merged(times: Iterable[Times]) -> Times | None:
    times = list(times)
    count, total = sum(t.count for t in times), sum(t.sum for t in times)
    return Times(count, total, ()) if count and total > 0 else None


def _mean_size(rows: Iterable[Row]) -> int:
    eager = [(row.batch_size, row.calls) for row in rows if row.path == "eager"]
    return round(sum(size * n for size, n in eager) / sum(n for _, n in eager)) if eager else 1


def _nothing(forward: ForwardSnapshot, stuck: Mapping[int, int], phase: str | None) -> str:
    if not forward.rows:
        return "no calls yet. hint: run it under load, then ask again"
    if stuck:
        return f"none of its {sum(stuck.values()):,} calls could have been served by a graph. hint: see table"
    kind = "calls but prefill" if phase is None else f"calls of phase {phase}"
    return f"no {kind} yet. hint: run it under load, or name a phase"
