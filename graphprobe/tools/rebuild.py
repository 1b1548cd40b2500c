"""Samples of the metric contract -> the snapshot that they stand for, as far as labels tell it.

The samples may be of several processes: counts are summed, of a gauge the largest is taken. What a page cannot say is
not there: the bounds of durations, causes, and the exact sizes above 64, of which a range stands for its upper end.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from graphprobe import metrics
from graphprobe.errors import SourceError
from graphprobe.metrics import Metric
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot, TimeKey, Times
from graphprobe.tools.findings import short
from graphprobe.tools.series import NUMBER, Series

SIZE = re.compile(r"(?:(?:0|[1-9][0-9]{0,8})-)?(0|[1-9][0-9]{0,8})")

MOST = 1e15
"""Largest value that is one: calls of a thousand years."""

CALLS = (metrics.GRAPH_CALLS, metrics.EAGER_CALLS)
RENAMED = ": was it renamed (exported_forward)? honor_labels: true in the scrape keeps it"

Labels = tuple[str, ...]

Key = tuple[str, str, int, int]
"""Of calls on a graph: phase, mode, batch size, bucket."""


class Rebuilt(NamedTuple):
    """A snapshot, what its reader must know, how many calls are not in it, and processes by forward.

    ``spec_tokens`` is how many tokens an engine drafts ahead, as far as it says so beside ours.
    """

    snapshot: Snapshot
    notes: tuple[str, ...]
    folded: int
    processes: Mapping[str, int] = {}
    spec_tokens: int = 0


def refused_if_folded(rebuilt: Rebuilt, name: str) -> Rebuilt:
    """``rebuilt``; SourceError, with ``name``, where no call has a size any more."""
    if rebuilt.folded and not any(forward.rows for forward in rebuilt.snapshot.forwards.values()):
        why = "the label batch_size is missing, or it is all, above the limit of label sets"
        what = f"none of {rebuilt.folded:,} calls has a size: {why}"
        raise SourceError(f"{name}: {what}. hint: read the exporter's /snapshot, which has exact sizes")
    return rebuilt


def rebuild(series: Iterable[Series]) -> Rebuilt:
    """The snapshot of these series. Series of histograms are not needed, nor read."""
    books = _Books()
    for one in series:
        books.take(one)
    found = {name: _Forward(name, books).snapshot() for name in books.values if name}
    own = books.values[""]
    snapshot = Snapshot(
        forwards=found,
        internal_errors={where: round(n) for (where,), n in own[metrics.INTERNAL_ERRORS].items() if round(n)},
        hooks={(engine, hook): value > 0 for (engine, hook), value in own[metrics.HOOK_BOUND].items()},
        replays_seen=next((round(n) for n in own[metrics.REPLAYS_SEEN].values()), None),
    )
    return Rebuilt(snapshot, books.notes(), round(books.folded))


class _Books:
    """Values by forward, metric and the labels that are left, over all processes; and what there is to note.

    What belongs to no forward is under the name ``""``.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[Metric, dict[Labels, float]]] = defaultdict(lambda: defaultdict(dict))
        self.infos: dict[str, list[tuple[float, Labels]]] = defaultdict(list)
        self.folded = 0.0
        self.ranged = 0.0
        self.unreadable = 0
        self.nameless = 0
        self.unlisted: set[str] = set()
        self.reasons: set[str] = set()
        self.differing: list[str] = []

    def take(self, one: Series) -> None:
        """Count one series in."""
        counter = one.metric.kind == "counter"
        if one.part:
            return
        if not abs(one.value) <= MOST or (counter and one.value < 0):
            self.unreadable += 1
            return
        labels = tuple(one.labels.values())
        forward, *rest = labels if one.metric.labels[:1] == ("forward",) else ("", *labels)
        self.nameless += one.metric in CALLS and not forward
        if one.metric is metrics.FORWARD_INFO:
            self.infos[forward].append((one.value, tuple(rest)))
        known, key = self.values[forward][one.metric], tuple(rest)
        before = known.get(key, 0.0 if counter else one.value)
        known[key] = before + one.value if counter else max(before, one.value)

    def notes(self) -> tuple[str, ...]:
        """One sentence for each thing that is not as it was counted."""
        reasons, differing = ", ".join(map(short, sorted(self.reasons))), ", ".join(self.differing)
        found = (
            (self.ranged, f"{round(self.ranged):,} calls have a range for a size, as 65-72: its upper end is taken"),
            (self.folded, f"{round(self.folded):,} calls have no size (batch_size=all, or none), and are left out"),
            (self.nameless, f"{self.nameless:,} series of calls are without the label forward, and left out{RENAMED}"),
            (self.unlisted, f"buckets that cannot be read, and are left out: {', '.join(sorted(self.unlisted))}"),
            (self.unreadable, f"{self.unreadable:,} values that are no numbers or negative are left out"),
            (self.reasons, f"reasons that are none of the contract's count as unknown: {reasons}"),
            (self.differing, f"processes have different buckets, and the list of most of them counts: {differing}"),
        )
        return tuple(note for happened, note in found if happened)


class _Forward:
    """One forward of the books."""

    def __init__(self, name: str, books: _Books) -> None:
        self.name, self.books = name, books
        self.values = books.values[name]

    def snapshot(self) -> ForwardSnapshot:
        """Everything that the books say of it."""
        unit, listed, backend, source, role = self._info()
        rows = self._rows()
        outcomes = {(b, o): n for (b, o), n in self._outcomes().items() if n}
        captured: Counter[int] = Counter()
        for (bucket, outcome), count in outcomes.items():
            captured[bucket] += count if outcome == "ok" else 0
        return ForwardSnapshot(
            self.name,
            buckets=self._buckets(listed),
            unit=unit or "rows",
            source=source,
            role=role,
            backend=backend,
            phases=tuple(dict.fromkeys(phase for phase, *_ in self.values[metrics.GRAPH_CALLS])) or ("decode",),
            rows=rows,
            times=self._times(rows),
            captures=dict(captured),
            capture_outcomes=outcomes,
            capture_seconds=self._by_bucket(metrics.CAPTURE_DURATION),
            live={bucket: value > 0 for bucket, value in self._by_bucket(metrics.BUCKET_CAPTURED).items()},
            pool_bytes=self._only(metrics.POOL_BYTES),
            pool_growth={b: round(value) for b, value in self._by_bucket(metrics.POOL_GROWTH).items()},
            pool_estimate_bytes=self._only(metrics.POOL_ESTIMATE),
            kv_capacity_tokens=self._only(metrics.KV_CAPACITY),
            uncovered={phase: round(value) for (phase,), value in self.values[metrics.UNCOVERED_SIZES].items()},
            dropped=self._only(metrics.SAMPLES_DROPPED) or 0,
            mismatches={b: round(n) for b, n in self._by_bucket(metrics.VERIFY_MISMATCHES).items() if round(n)},
            unmatched={path: round(n) for (path,), n in self.values[metrics.REPLAY_MISMATCHES].items()},
        )

    def _info(self) -> Labels:
        """Unit, buckets, backend, source and role: those of most processes; a value is how many have them."""
        infos = Counter[Labels]()
        for value, labels in self.books.infos.get(self.name) or [(1.0, ("rows", "", "", "observe", ""))]:
            infos[labels] += round(value)
        lists = Counter[str]()
        for labels, count in infos.items():
            lists[labels[1]] += count
        if len(lists) > 1:
            self.books.differing.append(short(self.name))
        return max(infos, key=lambda labels: (lists[labels[1]], infos[labels]))

    def _buckets(self, listed: str) -> tuple[int, ...]:
        """The sizes of a list; none where one of them is no size."""
        parts = [part.strip() for part in listed.strip(" []()").split(",")] if listed.strip() else []
        if all(NUMBER.fullmatch(part) for part in parts):
            return tuple(sorted(set(map(int, parts))))
        self.books.unlisted.add(short(listed))
        return ()

    def _rows(self) -> tuple[Row, ...]:
        rows = [*self._graph_rows(), *self._eager_rows()]
        return tuple(sorted(rows, key=Row.order))

    def _graph_rows(self) -> list[Row]:
        calls: Counter[Key] = Counter()
        ranged = set()
        for (phase, mode, size, bucket), count in self.values[metrics.GRAPH_CALLS].items():
            rows = self._size(size if NUMBER.fullmatch(bucket) else "", count)
            if rows is not None:
                key = (phase, mode, rows, int(bucket))
                calls[key] += round(count)
                ranged |= {key} if "-" in size else set()
        counted = {key: n for key, n in calls.items() if n}
        padding = self._padding(counted, ranged & counted.keys())
        return [Row(key[2], "graph", key[3], None, n, padding[key], *key[:2]) for key, n in counted.items()]

    def _padding(self, calls: Mapping[Key, int], ranged: Iterable[Key]) -> dict[Key, int]:
        """Rows added: what exact sizes say; of ranges what the counter of their bucket has beyond that."""
        found = {key: n * max(0, key[3] - key[2]) for key, n in calls.items()}
        found |= dict.fromkeys(ranged, 0)
        explained, shared = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        for key, added in found.items():
            explained[key[0], key[3]] += added
        for key in ranged:
            shared[key[0], key[3]] += calls[key]
        for key in ranged:
            phase, bucket = key[0], key[3]
            counted = round(self.values[metrics.PADDING_ROWS].get((phase, str(bucket)), 0.0))
            found[key] = max(0, counted - explained[phase, bucket]) * calls[key] // shared[phase, bucket]
        return found

    def _eager_rows(self) -> list[Row]:
        calls: Counter[tuple[str, int, FallbackReason]] = Counter()
        for (phase, size, reason), count in self.values[metrics.EAGER_CALLS].items():
            rows = self._size(size, count)
            if rows is not None:
                calls[phase, rows, self._reason(reason, count)] += round(count)
        return [Row(size, "eager", None, reason, n, 0, phase) for (phase, size, reason), n in calls.items() if n]

    def _reason(self, text: str, count: float) -> FallbackReason:
        try:
            return FallbackReason(text)
        except ValueError:
            self.books.reasons |= {text} if count else set()
            return FallbackReason.UNKNOWN

    def _size(self, text: str, count: float) -> int | None:
        """The size, or the upper end of a range; None where it was folded away."""
        match = SIZE.fullmatch(text)
        if match is None:
            self.books.folded += count
            return None
        self.books.ranged += count if "-" in text else 0
        return int(match[1])

    def _times(self, rows: Iterable[Row]) -> dict[TimeKey, Times]:
        """Durations by bucket. Which mode they are of is not told: the one with most calls of the bucket."""
        modes: dict[tuple[str, int | None], Counter[str]] = defaultdict(Counter)
        for row in rows:
            modes[row.phase, row.bucket][row.mode] += row.calls if row.path == "graph" else 0
        found: dict[TimeKey, Times] = {}
        seconds = self.values[metrics.FORWARD_SECONDS]
        for (phase, path, text), samples in self.values[metrics.FORWARD_SAMPLES].items():
            count, total = round(samples), seconds.get((phase, path, text))
            bucket = int(text) if NUMBER.fullmatch(text) else None
            if not count or total is None or (text and bucket is None):
                continue
            used = modes[phase, bucket].most_common(1) or [("full", 0)]
            # Prometheus has parts of samples; the mean is what must stay.
            mode = used[0][0] if path == "graph" else ""
            found[phase, path, mode, bucket] = Times(count, total * count / samples, ())
        return found

    def _outcomes(self) -> dict[tuple[int, str], int]:
        told = self.values[metrics.CAPTURES].items()
        return {(int(b), outcome): round(n) for (b, outcome), n in told if NUMBER.fullmatch(b)}

    def _by_bucket(self, metric: Metric) -> dict[int, float]:
        return {int(b): value for (b,), value in self.values[metric].items() if NUMBER.fullmatch(b)}

    def _only(self, metric: Metric) -> int | None:
        return next((round(value) for value in self.values[metric].values()), None)
