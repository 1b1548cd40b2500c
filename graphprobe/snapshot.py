"""Snapshot: a frozen copy of the ledger, its JSON form, and the window between two of them.

Readers (exporters, table, advisor, report) see nothing but this. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from graphprobe.errors import SourceError
from graphprobe.reasons import FallbackReason
from graphprobe.unhurried import unhurried

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Row:
    """Calls of one batch size on one path.

    ``bucket`` is None on an eager row, ``reason`` on a graph row; ``padding`` counts rows added in total.
    """

    batch_size: int
    path: str
    bucket: int | None
    reason: FallbackReason | None
    calls: int
    padding: int = 0
    phase: str = "decode"
    mode: str = ""

    def order(self) -> tuple[str, int, str, str, int, str]:
        """Sort key: phase, batch size, path, mode, bucket, reason."""
        return (self.phase, self.batch_size, self.path, self.mode, self.bucket or 0, str(self.reason or ""))


@dataclass(frozen=True, slots=True)
class Times:
    """Sampled durations: how many, their sum in seconds, and the count per histogram bound (last: overflow)."""

    count: int
    sum: float
    bounds: tuple[int, ...]

    @property
    def mean(self) -> float | None:
        """Mean seconds, None without a sample."""
        return self.sum / self.count if self.count else None


TimeKey = tuple[str, str, str, "int | None"]
"""(phase, path, mode, bucket)."""


@dataclass(frozen=True, slots=True)
class ForwardSnapshot:
    """One forward: what was served, how, what it took and what was captured."""

    name: str
    buckets: tuple[int, ...] = ()
    unit: str = "rows"
    source: str = "capture"
    role: str = ""
    backend: str = ""
    phases: tuple[str, ...] = ("decode",)
    rows: tuple[Row, ...] = ()
    times: Mapping[TimeKey, Times] = field(default_factory=dict)
    captures: Mapping[int, int] = field(default_factory=dict)
    capture_outcomes: Mapping[tuple[int, str], int] = field(default_factory=dict)
    capture_seconds: Mapping[int, float] = field(default_factory=dict)
    live: Mapping[int, bool] = field(default_factory=dict)
    pool_bytes: int | None = None
    pool_growth: Mapping[int, int] = field(default_factory=dict)
    pool_estimate_bytes: int | None = None
    kv_capacity_tokens: int | None = None
    uncovered: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0
    mismatches: Mapping[int, int] = field(default_factory=dict)
    unmatched: Mapping[str, int] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)

    @property
    def graph_calls(self) -> int:
        """Calls whose returned result came from a graph."""
        return sum(row.calls for row in self.rows if row.path == "graph")

    @property
    def eager_calls(self) -> int:
        """All calls served eagerly, whatever the reason."""
        return sum(row.calls for row in self.rows if row.path == "eager")

    @property
    def hit_rate(self) -> float | None:
        """graph / (graph + counted eager); None where no call counts (see graphprobe.reasons)."""
        graph = self.graph_calls
        total = graph + sum(row.calls for row in self.rows if row.reason is not None and row.reason.counted)
        return graph / total if total else None

    @property
    def padding(self) -> int:
        """Rows added in total to reach a bucket."""
        return sum(row.padding for row in self.rows)

    def mean_seconds(self, path: str, bucket: int | None = None) -> float | None:
        """Mean sampled seconds of ``path`` (of one bucket, or of all), None without a sample."""
        chosen = [t for (_, p, _, b), t in self.times.items() if p == path and (bucket is None or b == bucket)]
        count = sum(t.count for t in chosen)
        return sum(t.sum for t in chosen) / count if count else None

    def __sub__(self, earlier: ForwardSnapshot) -> ForwardSnapshot:
        """What happened since ``earlier``; a counter that fell was restarted, so its later value counts."""
        before = {_identity(row): row for row in earlier.rows}
        rows = tuple(_row_since(row, before.get(_identity(row))) for row in self.rows)
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        changed |= {
            "rows": tuple(row for row in rows if row.calls),
            "times": {
                key: since
                for key, value in self.times.items()
                if (since := _times_since(value, earlier.times.get(key))).count
            },
            "captures": _counts_since(self.captures, earlier.captures),
            "capture_outcomes": _counts_since(self.capture_outcomes, earlier.capture_outcomes),
            "dropped": _since(self.dropped, earlier.dropped),
            "mismatches": _counts_since(self.mismatches, earlier.mismatches),
            # With the zeros: they say that there was somebody to see one.
            "unmatched": {path: _since(n, earlier.unmatched.get(path, 0)) for path, n in self.unmatched.items()},
        }
        return ForwardSnapshot(**changed)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every forward of a process at one moment."""

    forwards: Mapping[str, ForwardSnapshot] = field(default_factory=dict)
    internal_errors: Mapping[str, int] = field(default_factory=dict)
    hooks: Mapping[tuple[str, str], bool] = field(default_factory=dict)
    replays_seen: int | None = None

    @property
    def counted(self) -> bool:
        """Whether there was a call, a measured forward or a capture."""
        return any(f.rows or f.times or f.capture_outcomes for f in self.forwards.values())

    def __sub__(self, earlier: Snapshot) -> Snapshot:
        """The window between two snapshots: ``later - earlier``."""
        return Snapshot(
            forwards={
                name: forward - earlier.forwards.get(name, ForwardSnapshot(name))
                for name, forward in self.forwards.items()
            },
            internal_errors=_counts_since(self.internal_errors, earlier.internal_errors),
            hooks=self.hooks,
            replays_seen=None if self.replays_seen is None else _since(self.replays_seen, earlier.replays_seen or 0),
        )

    def to_json(self) -> str:
        """One JSON object: ``{"schema": 1, "forwards": {name: {...}}, ...}`` with the names used here."""
        # One forward at a time: json gives way to nobody.
        each = (f"{json.dumps(name)}: {json.dumps(_forward_to(f))}" for name, f in self.forwards.items())
        rest = json.dumps(
            {
                "internal_errors": dict(self.internal_errors),
                "hooks": [{"engine": e, "hook": h, "bound": b} for (e, h), b in self.hooks.items()],
                "replays_seen": self.replays_seen,
            }
        )
        return f'{{"schema": {SCHEMA}, "forwards": {{{", ".join(unhurried(each))}}}, {rest[1:]}'

    @staticmethod
    def from_json(text: str | bytes) -> Snapshot:
        """The snapshot that ``to_json`` wrote; SourceError where ``text`` is something else."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise SourceError(f"snapshot schema {data['schema']!r}, this version reads {SCHEMA}")
            return Snapshot(
                forwards={name: _forward_from(name, value) for name, value in data["forwards"].items()},
                internal_errors=dict(data.get("internal_errors", {})),
                hooks={(h["engine"], h["hook"]): bool(h["bound"]) for h in data.get("hooks", [])},
                replays_seen=data.get("replays_seen"),
            )
        except SourceError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SourceError(f"not a graphprobe snapshot: {type(error).__name__}: {error}") from error


def _since(later: int, earlier: int) -> int:
    return later - earlier if later >= earlier else later


def _counts_since(later: Mapping[Any, int], earlier: Mapping[Any, int]) -> dict[Any, int]:
    return {key: n for key, value in later.items() if (n := _since(value, earlier.get(key, 0)))}


def _identity(row: Row) -> tuple[object, ...]:
    return (row.phase, row.mode, row.batch_size, row.path, row.bucket, row.reason)


def _row_since(row: Row, before: Row | None) -> Row:
    if before is None or row.calls < before.calls:
        return row
    padding = row.padding - before.padding
    return Row(row.batch_size, row.path, row.bucket, row.reason, row.calls - before.calls, padding, row.phase, row.mode)


def _times_since(value: Times, before: Times | None) -> Times:
    if before is None or value.count < before.count:
        return value
    bounds = tuple(late - early for late, early in zip(value.bounds, before.bounds, strict=False))
    return Times(value.count - before.count, value.sum - before.sum, bounds)


def _forward_to(forward: ForwardSnapshot) -> dict[str, Any]:
    data: dict[str, Any] = {f.name: getattr(forward, f.name) for f in fields(forward) if f.name != "name"}
    data["graph_calls"], data["eager_calls"] = forward.graph_calls, forward.eager_calls
    data["hit_rate"] = forward.hit_rate
    data["rows"] = [{f.name: _plain(getattr(row, f.name)) for f in fields(row)} for row in unhurried(forward.rows)]
    data["times"] = [
        {"phase": p, "path": path, "mode": m, "bucket": b, "count": t.count, "sum": t.sum, "bounds": t.bounds}
        for (p, path, m, b), t in unhurried(forward.times.items())
    ]
    data["capture_outcomes"] = [
        {"bucket": b, "outcome": o, "count": n} for (b, o), n in forward.capture_outcomes.items()
    ]
    return data


def _plain(value: object) -> object:
    return str(value) if isinstance(value, FallbackReason) else value


def _forward_from(name: str, data: dict[str, Any]) -> ForwardSnapshot:
    known = {f.name for f in fields(ForwardSnapshot)} - {"name"}
    given = {key: value for key, value in data.items() if key in known}
    given["buckets"] = tuple(given.get("buckets", ()))
    given["phases"] = tuple(given.get("phases", ("decode",)))
    given["rows"] = tuple(_row_from(row) for row in given.get("rows", ()))
    given["times"] = {
        (t["phase"], t["path"], t["mode"], t["bucket"]): Times(t["count"], t["sum"], tuple(t["bounds"]))
        for t in given.get("times", ())
    }
    given["capture_outcomes"] = {(c["bucket"], c["outcome"]): c["count"] for c in given.get("capture_outcomes", ())}
    for key in ("captures", "capture_seconds", "live", "pool_growth", "mismatches"):
        given[key] = _int_keys(given.get(key, {}).items())
    return ForwardSnapshot(name=name, **given)


def _row_from(data: dict[str, Any]) -> Row:
    reason = data.get("reason")
    row = Row(**{**data, "reason": None if reason is None else FallbackReason(reason)})
    if not all(isinstance(number, int) for number in (row.batch_size, row.calls, row.padding)):
        raise TypeError(f"a row's sizes and counts are whole numbers, got {data}")
    return row


def _int_keys(items: Iterable[tuple[str, Any]]) -> dict[int, Any]:
    return {int(key): value for key, value in items}
