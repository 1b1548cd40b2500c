"""The ledger: plain integers that the serving thread increments and every reader copies.

A cell is a list of one integer. Whoever dispatches fetches its cell once, keeps it and does ``cell[0] += 1``:
that is all a count costs. Nothing here knows a metrics client. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterator

from graphprobe import errors
from graphprobe.buckets import Buckets
from graphprobe.reasons import FallbackReason
from graphprobe.unhurried import unhurried

TYPE_CHECKING = False  # typing is a third of what `import graphprobe` took
if TYPE_CHECKING:
    from graphprobe.feed import Feed
    from graphprobe.snapshot import ForwardSnapshot, Snapshot

Cell = list[int]
"""One count. ``cell[0] += 1`` loses nothing under the GIL: no bytecode in between may switch threads."""

FREE_THREADED = not getattr(sys, "_is_gil_enabled", lambda: True)()
"""Without a GIL an increment takes ``COUNT_LOCK``."""

COUNT_LOCK = threading.Lock()

EXACT_SIZES = 16_384
"""Batch sizes kept exactly per forward; a new size beyond that is counted under the next power of two."""

BOUNDS: tuple[float, ...] = tuple(50e-6 * 2**k for k in range(15))
"""Upper bounds of the duration histogram in seconds: 50 us to 0.82 s, doubling. Above: the overflow count."""

CAUSES = 256
"""Free-text causes kept per forward."""


def add(cell: Cell, calls: int = 1) -> None:
    """Count off the hot path; exact on every build."""
    with COUNT_LOCK:
        cell[0] += calls


class Holder:
    """What one wrapper of a forward name has captured: its buckets, and the bytes of its pool (None: unknown)."""

    __slots__ = ("buckets", "pool_bytes")

    def __init__(self) -> None:
        self.buckets: frozenset[int] = frozenset()
        self.pool_bytes: int | None = 0


class Forward:
    """Everything counted for one forward name. Cells are handed out and never replaced or reset."""

    def __init__(
        self, name: str, buckets: Buckets | None = None, *, unit: str = "rows", source: str = "capture"
    ) -> None:
        self.name = name
        self.buckets = buckets
        self.unit = unit
        self.source = source
        self.role = ""
        self.backend = ""
        self.phases: tuple[str, ...] = ("decode",)
        self.uncovered: dict[str, int] = {}
        self.graph: dict[tuple[str, str, int, int], Cell] = {}
        self.eager: dict[tuple[str, int, FallbackReason], Cell] = {}
        self.captures: dict[tuple[int, str], int] = {}
        self.capture_seconds: dict[int, float] = {}
        self.pool_growth: dict[int, int] = {}
        self.holders: list[Holder] = []
        self.pool_estimate_bytes: int | None = None
        self.kv_capacity_tokens: int | None = None
        self.times: dict[tuple[str, str, str, int | None], list[float]] = {}
        self.dropped: Cell = [0]
        self.mismatches: dict[int, int] = {}
        self.unmatched: dict[str, int] = {}
        self.causes: dict[str, str] = {}
        self.feeds: list[Feed] = []
        self._sizes: set[int] = set()
        self._lock = threading.Lock()

    @property
    def pool_bytes(self) -> int | None:
        """Bytes reserved for graphs by all wrappers of this name, None where none has any or one cannot tell."""
        known = [holder.pool_bytes for holder in list(self.holders) if holder.buckets or holder.pool_bytes != 0]
        return None if not known or None in known else sum(n for n in known if n is not None)

    @property
    def live(self) -> dict[int, bool]:
        """Of each bucket whether a wrapper of this name has a graph of it."""
        if not self.holders and self.source != "capture":
            return {}
        held = [holder.buckets for holder in list(self.holders)]
        known = dict.fromkeys((*(self.buckets or ()), *(b for buckets in held for b in buckets)))
        return {bucket: any(bucket in buckets for buckets in held) for bucket in known}

    def holder(self) -> Holder:
        """The books of a new wrapper of this name."""
        self.holders.append(Holder())
        return self.holders[-1]

    def leave(self, holder: Holder) -> None:
        """A wrapper is gone."""
        self.holders.remove(holder)

    def graph_cell(self, size: int, bucket: int, phase: str = "decode", mode: str = "full") -> Cell:
        """The cell of graph calls with ``size`` units replayed in ``bucket``."""
        with self._lock:
            return self.graph.setdefault((phase, mode, self._known(size), bucket), [0])

    def eager_cell(self, size: int, reason: FallbackReason, phase: str = "decode") -> Cell:
        """The cell of eager calls with ``size`` units for ``reason``."""
        with self._lock:
            return self.eager.setdefault((phase, self._known(size), reason), [0])

    def time(self, path: str, bucket: int | None, seconds: float, phase: str = "decode", mode: str = "") -> None:
        """Add one measured forward: ``seconds`` of stream time on a GPU, of wall time on the recorder."""
        key = (phase, path, mode, bucket)
        with self._lock:
            row = self.times.get(key)
            if row is None:
                row = self.times[key] = [0.0] * (len(BOUNDS) + 2)
            row[bisect_left(BOUNDS, seconds)] += 1
            row[-1] += seconds
        for feed in self.feeds:
            feed.measured(self.name, phase, path, mode, bucket, seconds)

    def captured(self, bucket: int, outcome: str, seconds: float, growth: int | None) -> None:
        """Record one attempt to capture ``bucket``; ``outcome`` is ok, error or oom; ``growth`` in bytes."""
        with self._lock:
            key = (bucket, outcome)
            self.captures[key] = self.captures.get(key, 0) + 1
            if outcome == "ok":
                self.capture_seconds[bucket] = seconds
                if not self.holders:
                    self.holder().pool_bytes = None
                if self.source != "capture" or len(self.holders) == 1:
                    self.holders[0].buckets |= {bucket}
                if growth is not None:
                    self.pool_growth[bucket] = growth
        for feed in self.feeds:
            feed.captured(self.name, bucket, outcome, seconds, growth)

    def mismatch(self, bucket: int) -> None:
        """Count one graph result that differed from eager."""
        with self._lock:
            self.mismatches[bucket] = self.mismatches.get(bucket, 0) + 1

    def unmatch(self, path: str) -> int:
        """Count one pass counted on ``path`` that the launches seen beside it do not confirm; how many there are."""
        with self._lock:
            self.unmatched[path] = self.unmatched.get(path, 0) + 1
            return self.unmatched[path]

    def explain(self, key: str, text: str, level: int = errors.WARNING) -> None:
        """Keep ``text`` as the cause under ``key`` and log it the first time the key is seen."""
        with self._lock:
            known = key in self.causes
            if known or len(self.causes) < CAUSES:
                self.causes[key] = text
            elif not known:
                return
        if not known:
            errors.log(level, "%s: %s", self.name, text)

    def forget(self) -> None:
        """Start from zero in a forked child; cells that were handed out go on counting from zero."""
        self._lock = threading.Lock()
        for cell in (*self.graph.values(), *self.eager.values(), self.dropped):
            cell[0] = 0
        for table in (self.captures, self.capture_seconds, self.pool_growth, self.times, self.mismatches, self.causes):
            table.clear()
        self.unmatched = dict.fromkeys(self.unmatched, 0)
        for holder in self.holders:
            holder.buckets, holder.pool_bytes = frozenset(), 0

    def snapshot(self) -> ForwardSnapshot:
        """A frozen copy; safe from any thread, holds no lock that a forward takes for counting."""
        # Not above: its import is most of the package's, and dear beside a forward only once.
        from graphprobe.snapshot import ForwardSnapshot, Row, Times

        # copy() and not list(items()), whose new tuples may start a garbage collection and with it another thread.
        rows = [
            Row(size, "graph", bucket, None, calls, calls * max(0, bucket - size), phase, mode)
            for (phase, mode, size, bucket), cell in unhurried(self.graph.copy().items())
            if (calls := cell[0])
        ]
        rows += [
            Row(size, "eager", None, reason, calls, 0, phase, "")
            for (phase, size, reason), cell in unhurried(self.eager.copy().items())
            if (calls := cell[0])
        ]
        ordered = sorted((row.order(), row) for row in unhurried(rows))
        times = {
            key: Times(int(sum(row[:-1])), row[-1], tuple(int(n) for n in row[:-1]))
            for key, row in ((key, list(row)) for key, row in unhurried(self.times.copy().items()))
        }
        captures: dict[int, int] = {}
        outcomes: dict[tuple[int, str], int] = self.captures.copy()
        for (bucket, outcome), count in outcomes.items():
            captures[bucket] = captures.get(bucket, 0) + (count if outcome == "ok" else 0)
        return ForwardSnapshot(
            name=self.name,
            buckets=tuple(self.buckets) if self.buckets else (),
            unit=self.unit,
            source=self.source,
            role=self.role,
            backend=self.backend,
            phases=self.phases,
            rows=tuple(row for _, row in ordered),
            times=times,
            captures=captures,
            capture_outcomes=outcomes,
            capture_seconds=self.capture_seconds.copy(),
            live=self.live,
            pool_bytes=self.pool_bytes,
            pool_growth=self.pool_growth.copy(),
            pool_estimate_bytes=self.pool_estimate_bytes,
            kv_capacity_tokens=self.kv_capacity_tokens,
            uncovered=self.uncovered.copy(),
            dropped=self.dropped[0],
            mismatches=self.mismatches.copy(),
            unmatched=self.unmatched.copy(),
            causes=self.causes.copy(),
        )

    def _known(self, size: int) -> int:
        if size in self._sizes:
            return size
        if len(self._sizes) >= EXACT_SIZES:
            return 1 << (size - 1).bit_length()
        self._sizes.add(size)
        return size


class Ledger:
    """All forwards of a process (or of one measurement) by name."""

    def __init__(self) -> None:
        self.forwards: dict[str, Forward] = {}
        self.hooks: dict[tuple[str, str], bool] = {}
        self.replays_seen: Cell | None = None
        self.feeds: list[Feed] = []
        self._lock = threading.Lock()
        _ledgers.add(self)

    def forward(
        self, name: str, buckets: Buckets | None = None, *, unit: str = "rows", source: str = "capture"
    ) -> Forward:
        """The entry for ``name``, made at its first use; equal names share it and the first bucket list wins."""
        with self._lock:
            entry = self.forwards.get(name)
            if entry is None:
                entry = self.forwards[name] = Forward(name, buckets, unit=unit, source=source)
                entry.feeds = self.feeds
        if buckets is not None and entry.buckets is None:
            entry.buckets = buckets
        if buckets is not None and entry.buckets != buckets:
            text = f"buckets {list(buckets)} differ from the first list of this name, {list(entry.buckets or ())}"
            entry.explain(f"buckets/{list(buckets)}", f"{text}; the metrics keep the first, give one of them a name=")
        return entry

    def snapshot(self) -> Snapshot:
        """A frozen copy of everything; safe from any thread."""
        from graphprobe.snapshot import Snapshot

        seen = self.replays_seen
        return Snapshot(
            forwards={name: entry.snapshot() for name, entry in self.forwards.copy().items()},
            internal_errors=errors.internal_errors.copy(),
            hooks=self.hooks.copy(),
            replays_seen=None if seen is None else seen[0],
        )

    def forget(self) -> None:
        """Start from zero in a forked child."""
        self._lock = threading.Lock()
        for feed in self.feeds:
            feed.clear()
        for entry in self.forwards.values():
            entry.forget()
        if self.replays_seen is not None:
            self.replays_seen[0] = 0


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()

LEDGER = Ledger()
"""The ledger of this process: what `graphprobe.snapshot()` reads and the exporters serve."""


class Ignoring(threading.local):
    """Depth of :func:`ignore` in this thread."""

    depth = 0


_ignoring = Ignoring()
ignore_active: Cell = [0]
"""How many `ignore()` blocks are open in the process: the hot path looks here before it looks at its thread."""


@contextlib.contextmanager
def ignore() -> Iterator[None]:
    """Calls of this thread inside the block are served as usual and counted nowhere (dummy and profiling runs)."""
    add(ignore_active)
    _ignoring.depth += 1
    try:
        yield
    finally:
        _ignoring.depth -= 1
        add(ignore_active, -1)


def ignored() -> bool:
    """Whether calls of this thread are to be counted nowhere."""
    return ignore_active[0] > 0 and _ignoring.depth > 0


def _after_fork() -> None:
    global COUNT_LOCK
    COUNT_LOCK = threading.Lock()
    ignore_active[0] = _ignoring.depth
    errors.internal_errors.clear()
    for ledger in list(_ledgers):
        ledger.forget()


def _before_fork() -> None:
    # A thread that is importing it holds a lock that the child would wait for.
    if "graphprobe.snapshot" in sys.modules:
        from graphprobe import snapshot as snapshot


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
