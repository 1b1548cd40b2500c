"""What an engine sent, per batch size, and what is known of the forward that served it; read off a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphprobe.buckets import MAX_BUCKET, Buckets
from graphprobe.errors import ConfigError, SourceError
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Times
from graphprobe.tools.rows import by_reason, by_size, hit_rate, hits, mean_size
from graphprobe.tools.sources import Reading
from graphprobe.tools.table import literal

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

OFF = frozenset({FallbackReason.DISABLED, FallbackReason.UNSUPPORTED_DEVICE})
"""Those of them that no list changes before something else does."""

UNEXPLAINED = frozenset({FallbackReason.UNKNOWN, FallbackReason.ENGINE_DECLINED})
"""Eager calls that a bucket would have served where none did hold their size, as far as anybody knows."""

WHOLE = ("", "full")
"""Modes of a graph that covers all of a forward."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls of one forward, without prefill.

    ``calls`` are those that a graph of their size could serve, ``windows`` the same in parts of time, the oldest
    first (none where the source knows no time). ``stuck`` are counted calls that run eagerly with any list, ``off``
    those of ``calls`` during which graphs were off, ``warming`` how many of them were of the warm-up. ``hits`` are
    graph calls by bucket, ``partly`` those of a graph that covers only a part. ``graph`` and ``eager`` are seconds
    by size, as measured; an eager time stands at the mean size of what ran eagerly. ``pads`` is None where nothing
    tells. ``processes`` are how many were summed: ranks of one engine count the same steps.
    """

    forward: str
    unit: str
    buckets: tuple[int, ...]
    calls: Mapping[int, int]
    windows: tuple[Mapping[int, int], ...] = ()
    stuck: Mapping[int, int] = field(default_factory=dict)
    stuck_why: Mapping[FallbackReason, int] = field(default_factory=dict)
    off: Mapping[FallbackReason, int] = field(default_factory=dict)
    hits: Mapping[int, int] = field(default_factory=dict)
    partly: int = 0
    hit_rate: float | None = None
    warming: int = 0
    processes: int = 1
    pads: bool | None = None
    graph: Mapping[int, Times] = field(default_factory=dict)
    eager: Mapping[int, Times] = field(default_factory=dict)
    capture_seconds: Mapping[int, float] = field(default_factory=dict)
    graph_bytes: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rows: tuple[Row, ...] = field(default=(), repr=False)

    @property
    def total(self) -> int:
        """Calls that a graph could serve."""
        return sum(self.calls.values())

    @property
    def largest(self) -> int:
        """The largest size of them."""
        return max(self.calls)

    def up_to(self, most: int, why: str) -> Traffic:
        """The same without sizes above ``most``; ``why`` is told. SourceError where nothing is left."""
        over = {size: n for size, n in self.calls.items() if size > most}
        if not over:
            return self
        told = f"{sum(over.values()):,} calls of {min(over):,} to {max(over):,} {self.unit} are left out: {why}"
        rows = tuple(row for row in self.rows if row.batch_size <= most)
        counts = _counts(rows, self.buckets, self.pads)
        if not counts["calls"]:
            raise SourceError(f"{literal(self.forward)}: {told}, and there are no others")
        return replace(
            self,
            **counts,
            rows=rows,
            windows=tuple({size: n for size, n in window.items() if size <= most} for window in self.windows),
            hit_rate=None,  # what was seen is that of other calls
            notes=(*self.notes, told),
        )


def traffic(reading: Reading, forward: str | None = None, phase: str | None = None) -> Traffic:
    """The traffic of one forward of ``reading``: ``forward``, or the only one that has calls; all phases but prefill.

    Beside parts of its own (``vllm.drafter``) a forward is meant itself (``vllm``). ConfigError where the name is none,
    or several have calls; SourceError where there is no call yet.
    """
    for name, given in (("forward", forward), ("phase", phase)):
        if given is not None and not isinstance(given, str):
            raise ConfigError(f"{name} must be a name, got {given!r}")
    chosen, aside = _forward(reading, forward)
    rows = _rows(chosen, phase)
    pads = _pads(rows)
    counts = _counts(rows, chosen.buckets, pads)
    calls = counts["calls"]
    if not calls:
        raise SourceError(f"{literal(chosen.name)}: {_nothing(chosen, counts['stuck_why'], phase)}{_noted(reading)}")
    if max(calls) > MAX_BUCKET:
        what = f"a call of {max(calls):,} {literal(chosen.unit)}, and no bucket may be above {MAX_BUCKET:,}"
        raise SourceError(f"{literal(chosen.name)}: {what}. hint: are sizes bytes, or tokens of whole prompts?")
    parts = [w.forwards.get(chosen.name, ForwardSnapshot(chosen.name)) for w in reading.windows]
    eager = _merged([t for (p, path, _, _), t in chosen.times.items() if path == "eager" and _meant(p, phase)])
    return Traffic(
        forward=chosen.name,
        unit=chosen.unit,
        buckets=chosen.buckets,
        **counts,
        windows=tuple(by_size(_sorted(_rows(part, phase), chosen.buckets, pads)[0]) for part in parts),
        hits=hits(rows),
        hit_rate=hit_rate(rows) if reading.kind != "sizes" else None,
        processes=reading.processes.get(chosen.name, 1),
        pads=pads,
        graph=_graph_times(chosen, phase),
        eager={mean_size(rows): eager} if eager else {},
        capture_seconds=chosen.capture_seconds,
        graph_bytes={n: max(0, grown) for n, grown in chosen.pool_growth.items()},
        notes=(*reading.notes, *aside),
        rows=tuple(rows),
    )


def _counts(rows: Sequence[Row], buckets: tuple[int, ...], pads: bool | None) -> dict[str, Any]:
    """The fields of ``Traffic`` that are sums over rows, as far as sizes that are left out are none of them."""
    servable, stuck = _sorted(rows, buckets, pads)
    return {
        "calls": by_size(servable),
        "stuck": by_size(stuck),
        "stuck_why": by_reason(stuck),
        "off": by_reason([row for row in rows if row.reason in OFF]),
        "partly": sum(row.calls for row in rows if row.path == "graph" and row.mode not in WHOLE),
        "warming": sum(row.calls for row in rows if row.reason is FallbackReason.WARMUP),
    }


def _noted(reading: Reading) -> str:
    """What the source's reader must know, which may be why there is nothing."""
    return f" ({'; '.join(reading.notes)})" if reading.notes else ""


PREFILL = ".prefill"
"""How a forward is called whose calls are prefills alone, with graphs of their own."""


def _forward(reading: Reading, name: str | None) -> tuple[ForwardSnapshot, list[str]]:
    """The forward that is meant, and a note where others have calls, too."""
    forwards = reading.snapshot.forwards
    if name is not None:
        if name not in forwards:
            raise ConfigError(f"there is no forward {name!r}", f"there are: {_names(forwards.values()) or 'none'}")
        if name.endswith(PREFILL):
            raise ConfigError(f"{name} counts tokens of prefill", f"advice is for decode: {name[: -len(PREFILL)]}")
        return forwards[name], []
    if not forwards:
        what = "no forward is in the source. hint: decorate one with capture, or call observe"
        raise SourceError(f"{what}{_noted(reading)}")
    busy = [forward for forward in forwards.values() if forward.rows]
    whole = [forward for forward in busy if all(_is_part(other, forward) for other in busy if other is not forward)]
    if len(busy) > 1 and not whole:
        raise ConfigError(f"{len(busy)} forwards have calls", f"name one of: {_names(busy)}")
    aside = [
        f"{literal(other.name)} has lists and calls of its own: name it"
        for other in busy
        if other not in whole and not other.name.endswith(PREFILL)
    ]
    return (whole or list(forwards.values()))[0], aside


def _is_part(other: ForwardSnapshot, forward: ForwardSnapshot) -> bool:
    """Whether it is a part of the same engine, as a drafter is, with a name below that of the whole."""
    return other.name.startswith(f"{forward.name}.")


def _names(forwards: Iterable[ForwardSnapshot]) -> str:
    return ", ".join(literal(forward.name) for forward in forwards)


def _meant(found: str, phase: str | None) -> bool:
    # Long prefills are eager by design, as the hit-rate alert has it.
    return found != "prefill" if phase is None else found == phase


def _rows(forward: ForwardSnapshot, phase: str | None) -> list[Row]:
    return [row for row in forward.rows if _meant(row.phase, phase) and row.calls > 0 and row.batch_size > 0]


def _sorted(rows: Iterable[Row], buckets: tuple[int, ...], pads: bool | None) -> tuple[list[Row], list[Row]]:
    """The rows that a graph could serve, and those that count and that none can."""
    held = _holder(buckets, pads)
    servable, stuck = [], []
    for row in rows:
        reason = row.reason
        if reason is None or reason in SERVABLE or (reason in UNEXPLAINED and not held(row.batch_size)):
            servable.append(row)
        elif reason.counted:
            stuck.append(row)
    return servable, stuck


def _holder(listed: tuple[int, ...], pads: bool | None) -> Callable[[int], bool]:
    """Whether the list in use has a graph for a size, so that something else kept a call from it."""
    if not listed:
        return lambda size: False
    buckets = Buckets(listed)
    server = buckets.exact if pads is False else buckets.select
    return lambda size: server(size) is not None


def _pads(rows: Iterable[Row]) -> bool | None:
    """Whether a larger bucket serves a smaller batch: seen to, seen not to, or None."""
    rows = list(rows)
    if any(row.path == "graph" and row.bucket is not None and row.bucket > row.batch_size for row in rows):
        return True
    return False if any(row.reason is FallbackReason.NO_EXACT_BUCKET for row in rows) else None


def _graph_times(forward: ForwardSnapshot, phase: str | None) -> dict[int, Times]:
    by_bucket: dict[int, list[Times]] = {}
    for (found, path, _, bucket), times in forward.times.items():
        if path == "graph" and bucket is not None and _meant(found, phase):
            by_bucket.setdefault(bucket, []).append(times)
    return {bucket: merged for bucket, times in by_bucket.items() if (merged := _merged(times))}


def _merged(times: Iterable[Times]) -> Times | None:
    times = list(times)
    count, total = sum(t.count for t in times), sum(t.sum for t in times)
    return Times(count, total, ()) if count > 0 and total > 0 else None


def _nothing(forward: ForwardSnapshot, why: Mapping[FallbackReason, int], phase: str | None) -> str:
    if not forward.rows:
        return "no calls yet. hint: run it under load, then ask again"
    if why:
        named = ", ".join(f"{n:,} {reason}" for reason, n in why.items())
        return f"no list of buckets would have served its calls: {named}. hint: see what each of these reasons means"
    kind = "calls but prefill" if phase is None else f"calls of phase {literal(phase)}"
    return f"no {kind} yet. hint: run it under load, or name a phase"
