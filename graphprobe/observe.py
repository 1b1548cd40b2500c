"""Inlet 2: an engine that owns its graphs says what it did. Counting on a hit is one look-up and one increment."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import TracebackType

from graphprobe.buckets import Buckets, as_size
from graphprobe.errors import ConfigError, internal_error
from graphprobe.ledger import FREE_THREADED, LEDGER, Cell, Forward, Ledger, add, ignore_active, ignored
from graphprobe.reasons import FallbackReason, as_reason

TYPE_CHECKING = False  # typing is a third of what `import graphprobe` took
if TYPE_CHECKING:
    from graphprobe.snapshot import ForwardSnapshot
    from graphprobe.timers import Timer

MODES = ("full", "piecewise", "breakable")
"""How much of a forward a graph covers."""

PHASE = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""A phase is a word: decode, prefill, mixed, verify, draft, draft_extend, or an engine's own. Never a request's id."""

CACHED = 65_536
"""Most look-ups kept per probe; what comes above is counted too, only more slowly."""


class Probe:
    """Counts the calls of one forward. Safe from any thread; a probe of an equal name counts into the same entry.

    Arguments outside the contract raise ConfigError in the caller. They are checked when a combination is seen first,
    so a value that equals an earlier one (``True``, ``1.0``) passes as that one.
    """

    def __init__(self, forward: Forward, clock: Timer | None = None) -> None:
        self.forward = forward
        """The ledger's entry, for what is no call: captures, pool bytes, causes."""
        self.clock: Timer = _wall_clock() if clock is None else clock
        self._graph: dict[tuple[int, int, str, str], Cell] = {}
        self._eager: dict[tuple[int, FallbackReason | str, str], Cell] = {}

    @property
    def name(self) -> str:
        """The name of the forward, as it is exported."""
        return self.forward.name

    def graph_call(self, batch_size: int, bucket: int, mode: str = "full", phase: str = "decode") -> None:
        """Count one call with ``batch_size`` units that replayed the graph of ``bucket``.

        ``mode`` is full, piecewise or breakable.
        """
        if ignore_active[0] and ignored():
            return
        try:
            cell = self._graph[batch_size, bucket, mode, phase]
        except (KeyError, TypeError):
            cell = self._graph_cell(batch_size, bucket, mode, phase)
        if FREE_THREADED:
            add(cell)
        else:
            cell[0] += 1

    def eager_call(self, batch_size: int, reason: FallbackReason | str, phase: str = "decode") -> None:
        """Count one call with ``batch_size`` units that ran eagerly, for a reason of the closed enum."""
        if ignore_active[0] and ignored():
            return
        try:
            cell = self._eager[batch_size, reason, phase]
        except (KeyError, TypeError):
            cell = self._eager_cell(batch_size, reason, phase)
        if FREE_THREADED:
            add(cell)
        else:
            cell[0] += 1

    def timed(self, path: str, bucket: int | None = None, phase: str = "decode", mode: str | None = None) -> Timing:
        """Time the block as one forward on ``path`` (graph, eager); counts nothing.

        ``mode`` is that of the graph, full by default. A block that raises is not a sample, nor is one in ``ignore()``.
        """
        if path not in ("graph", "eager"):
            raise ConfigError(f"path must be 'graph' or 'eager', got {path!r}")
        if bucket is not None:
            bucket = as_size(bucket, "bucket")
        chosen = "" if path == "eager" else _mode("full" if mode is None else mode)
        return Timing(self, (path, bucket, _phase(phase), chosen))

    def snapshot(self) -> ForwardSnapshot:
        """A frozen copy of what this forward has counted; safe from any thread."""
        return self.forward.snapshot()

    def _graph_cell(self, batch_size: int, bucket: int, mode: str, phase: str) -> Cell:
        size, room = as_size(batch_size, "batch_size", least=0), as_size(bucket, "bucket")
        if room < size:
            raise ConfigError(f"bucket {room} cannot hold batch_size {size}", "pass the padded size as bucket")
        cell = self.forward.graph_cell(size, room, _phase(phase), _mode(mode))
        if len(self._graph) < CACHED:
            self._graph[size, room, mode, phase] = cell
        return cell

    def _eager_cell(self, batch_size: int, reason: FallbackReason | str, phase: str) -> Cell:
        size, why = as_size(batch_size, "batch_size", least=0), as_reason(reason)
        cell = self.forward.eager_cell(size, why, _phase(phase))
        if len(self._eager) < CACHED:
            self._eager[size, why, phase] = cell
        return cell

    def __repr__(self) -> str:
        return f"Probe({self.name!r})"


def _wall_clock() -> Timer:
    from graphprobe.timers import ClockTimer

    return ClockTimer()


class Timing:
    """One timed block of a probe; see :meth:`Probe.timed`."""

    __slots__ = ("_key", "_mark", "_probe")

    def __init__(self, probe: Probe, key: tuple[str, int | None, str, str]) -> None:
        self._probe = probe
        self._key = key
        self._mark: object = None

    def __enter__(self) -> None:
        if not ignored():
            try:
                self._begin(self._probe.clock)
            except Exception as error:
                internal_error("observe.timed", error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mark is not None and kind is None:
            try:
                self._probe.clock.stop(self._mark, self._report)
            except Exception as failure:
                internal_error("observe.timed", failure)

    def _begin(self, clock: Timer) -> None:
        clock.harvest()
        self._mark = clock.start()
        if self._mark is None:
            add(self._probe.forward.dropped)

    def _report(self, seconds: float) -> None:
        path, bucket, phase, mode = self._key
        self._probe.forward.time(path, bucket, seconds, phase, mode)


def observe(
    name: str,
    buckets: Iterable[int] | None = None,
    *,
    unit: str = "rows",
    source: str = "observe",
    max_batch: int | None = None,
    padded: bool = False,
    role: str = "",
    backend: str = "",
    clock: Timer | None = None,
    ledger: Ledger | None = None,
) -> Probe:
    """A probe for the forward ``name`` of an engine that owns its graphs.

    ``buckets`` are the captured batch sizes in ``unit`` (rows, tokens, requests), None where unknown. ``max_batch`` is
    what the engine may send: sizes without a bucket are logged at once (``padded``: the engine pads to a larger
    bucket). ``role`` and ``backend`` are told as they are. ``clock`` measures ``timed`` blocks: by default host time,
    which on a GPU is the time of the launch (see graphprobe.timers.EventTimer).
    """
    known = None if buckets is None else buckets if isinstance(buckets, Buckets) else Buckets(buckets)
    forward = (LEDGER if ledger is None else ledger).forward(_name(name), known, unit=unit, source=source)
    forward.role = role or forward.role
    forward.backend = backend or forward.backend
    if max_batch is not None and forward.buckets is not None:
        _name_uncovered(forward, forward.buckets, as_size(max_batch, "max_batch"), padded)
    return Probe(forward, clock)


def _name_uncovered(forward: Forward, buckets: Buckets, max_batch: int, padded: bool) -> None:
    missing = buckets.uncovered(max_batch, padded)
    forward.uncovered["decode"] = len(missing)
    if missing:
        text = f"{len(missing)} of the batch sizes up to {max_batch} have no bucket and run eagerly: {spans(missing)}"
        forward.explain("uncovered/decode", text)


def spans(sizes: Iterable[int]) -> str:
    """Ascending sizes as short text: ``3, 5-7, 9-12``."""
    found: list[list[int]] = []
    for size in sizes:
        if found and found[-1][1] == size - 1:
            found[-1][1] = size
        else:
            found.append([size, size])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"name must be a text, got {name!r}", 'write observe("decode")')
    return name


def _mode(mode: str) -> str:
    if mode not in MODES:
        raise ConfigError(f"unknown graph mode {mode!r}", f"use one of: {', '.join(MODES)}")
    return mode


def _phase(phase: object) -> str:
    if not isinstance(phase, str) or not PHASE.fullmatch(phase):
        raise ConfigError(f"phase must be a lower-case word, got {phase!r}", "decode, prefill, mixed, verify, draft")
    return phase
