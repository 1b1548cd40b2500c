"""What a device did over time, and the gaps in between."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import Any

from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools.findings import short

KINDS = ("kernel", "memcpy", "memset", "graph")
"""``graph`` is a graph launch recorded as a whole, with unknown kernels in it."""

STEP = "ProfilerStep#"
"""How torch.profiler names the range of a step, before its number."""

NODES = "nsys profile --cuda-graph-trace=node records each kernel of a graph, at some cost"

NAMED = 6
"""Ranges that are named in one message."""


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work of a device; all times are microseconds from any one origin.

    ``correlation`` names its launch, which many kernels of one graph share, and ``launch_us`` is when the host began
    to call for it; None where that is unknown.
    """

    start_us: float
    end_us: float
    stream: int | str
    name: str
    kind: str
    correlation: int | None = None
    launch_us: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"work is one of {', '.join(KINDS)}, not {self.kind!r:.40}")
        if not -math.inf < self.start_us <= self.end_us < math.inf:
            raise ConfigError(f"work cannot last from {self.start_us!r:.40} to {self.end_us!r:.40} us")


@dataclass(frozen=True, slots=True)
class Mark:
    """A range on the host that has a name, in microseconds: a step of the profiler, or one of the user."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Lengths of gaps in microseconds; all 0 where there is none.

    Percentiles are interpolated linearly between neighbours (``statistics.quantiles``, inclusive; numpy's default), so
    that ``p50`` is the median.
    """

    count: int
    p50: float
    p90: float
    max: float
    mean: float
    total: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of ``values``."""
        if len(values) < 2:
            one = float(sum(values))
            return cls(len(values), one, one, one, one, one)
        tenths = quantiles(values, n=10, method="inclusive")
        return cls(len(values), tenths[4], tenths[8], max(values), fmean(values), math.fsum(values))


@dataclass(frozen=True, slots=True)
class Gaps:
    """What a timeline comes to, times in microseconds.

    ``span_us`` is from the first start to the last end, and ``busy_us`` how much of it something ran. ``launches`` are
    distinct correlations: a graph's replay is one launch of many kernels. ``gap_us`` is None for one piece of work
    alone; ``overlapping`` is work that began while another stream's ran, and so left no gap. ``host_us`` is how much
    of the gaps had passed when the host began to call for what ended them; None where a launch is unknown.
    """

    kernels: int
    works: int
    launches: int
    span_us: float
    busy_us: float
    gap_us: Spread | None
    overlapping: int
    host_us: float | None
    notes: tuple[str, ...] = ()

    @property
    def idle_share(self) -> float:
        """Share of the span in which nothing ran."""
        return 1 - self.busy_us / self.span_us if self.span_us > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON has them, times to the nanosecond."""
        names = ("count", "p50", "p90", "max", "mean", "total")
        spread = self.gap_us
        return {
            "kernels": self.kernels,
            "works": self.works,
            "launches": self.launches,
            "span_us": round(self.span_us, 3),
            "busy_us": round(self.busy_us, 3),
            "idle_share": round(self.idle_share, 6),
            "gap_us": dict.fromkeys(names) if spread is None else {n: round(getattr(spread, n), 3) for n in names},
            "overlapping": self.overlapping,
            "host_us": None if self.host_us is None else round(self.host_us, 3),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """The figures as one JSON object."""
        return json.dumps(self.as_dict())

    def __str__(self) -> str:
        rest = self.works - self.kernels
        others = f" and {rest:,} other pieces of work" if rest else ""
        launches = f"{self.launches:,} launch{'' if self.launches == 1 else 'es'}"
        lines = [
            f"{self.kernels:,} kernel{'' if self.kernels == 1 else 's'}{others} from {launches}",
            f"span {self.span_us:,.1f} us, busy {self.busy_us:,.1f} us, idle {100 * self.idle_share:.1f} % of it",
        ]
        if self.gap_us is not None:
            gap = self.gap_us
            told = f"median {gap.p50:.3g} us, 90 % up to {gap.p90:.3g}, largest {gap.max:.4g}, mean {gap.mean:.3g}"
            lines.append(f"gaps: {told}" if gap.count else "gaps: none, as work overlaps throughout")
            if self.host_us is not None and gap.total > 0:
                share = 100 * self.host_us / gap.total
                lines.append(f"{share:.1f} % of the idle time had passed when the host called for what came next")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class Timeline:
    """The work of one device in the order of its start, with the host's ranges around it."""

    works: tuple[Work, ...]
    notes: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        ordered = sorted(self.works, key=lambda work: (work.start_us, work.end_us))
        object.__setattr__(self, "works", tuple(ordered))

    @property
    def kernels(self) -> int:
        """Kernels seen one by one."""
        return sum(work.kind == "kernel" for work in self.works)

    def between(self) -> list[tuple[float, Work]]:
        """Each gap in microseconds, with the work that ended it.

        A gap is between the end of all work so far and the next start, so work that begins while another stream's runs
        leaves none. Work that seems to begin before its own stream's ended (the jitter of a device's clock, or a
        dependent launch) leaves one of 0.
        """
        found: list[tuple[float, Work]] = []
        last: Work | None = None
        for work in self.works:
            if last is not None and (work.start_us >= last.end_us or work.stream == last.stream):
                found.append((max(0.0, work.start_us - last.end_us), work))
            if last is None or work.end_us >= last.end_us:
                last = work
        return found

    def gaps(self) -> Gaps:
        """The figures; SourceError where there is no kernel."""
        if not self.kernels:
            raise SourceError("no kernel ran, so there are no gaps. hint: was a device's work recorded?")
        between = self.between()
        alone = len(self.works) < 2
        span = max(work.end_us for work in self.works) - self.works[0].start_us
        spread = Spread.of([gap for gap, _ in between])
        return Gaps(
            kernels=self.kernels,
            works=len(self.works),
            launches=_launches(self.works),
            span_us=span,
            busy_us=max(0.0, span - spread.total),
            gap_us=None if alone else spread,
            overlapping=len(self.works) - 1 - len(between),
            host_us=None if alone else _waited(between),
            notes=(*self.notes, *_wholes(self.works)),
        )

    def within(self, step: int | str) -> Timeline:
        """What was launched in one range: a step of the profiler by its number, any other by its name.

        Of ranges of one name the last is taken. ConfigError where there is none, or nothing was launched in it.
        """
        name = f"{STEP}{step}" if str(step).isdecimal() else str(step)
        named = sorted((mark for mark in self.marks if mark.name == name), key=lambda mark: mark.start_us)
        if not named:
            raise ConfigError(f"nothing is marked {short(name)!r}", f"marked are: {marked(self.marks)}")
        mark = named[-1]
        works = [work for work in self.works if mark.start_us <= _began(work) < mark.end_us]
        if not works:
            raise ConfigError(f"no work was launched in {short(name)!r}", f"marked are: {marked(self.marks)}")
        unknown = sum(work.launch_us is None for work in works)
        told = (
            (len(named) > 1, f"{len(named)} ranges are named {short(name)}: this is the last"),
            (unknown > 0, f"{unknown:,} of {len(works):,} pieces of work are here by their start: no launch is known"),
        )
        return Timeline(tuple(works), (*self.notes, *(note for so, note in told if so)), self.marks)


def marked(marks: Sequence[Mark]) -> str:
    """The names of ranges, each once."""
    names = list(dict.fromkeys(short(mark.name, 60) for mark in sorted(marks, key=lambda mark: mark.start_us)))
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}" or "none"


def _began(work: Work) -> float:
    return work.start_us if work.launch_us is None else work.launch_us


def _launches(works: Sequence[Work]) -> int:
    known = {work.correlation for work in works if work.correlation is not None}
    return len(known) + sum(work.correlation is None for work in works)


def _waited(between: Sequence[tuple[float, Work]]) -> float | None:
    total = 0.0
    for gap, work in between:
        if work.launch_us is None:
            return None
        total += min(gap, max(0.0, work.launch_us - (work.start_us - gap)))
    return total


def _wholes(works: Sequence[Work]) -> list[str]:
    graphs = sum(work.kind == "graph" for work in works)
    if not graphs:
        return []
    return [f"graph launches are recorded as a whole ({graphs:,}), their kernels and gaps are not seen; {NODES}"]
