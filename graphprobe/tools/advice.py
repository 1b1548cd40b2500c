"""What the advisor answers: plans, a verdict and its confidence; as text, as JSON, and as a line to paste."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from graphprobe.tools.paste import OFF, line
from graphprobe.tools.plot import Point, bars
from graphprobe.tools.speculative import spans
from graphprobe.tools.table import WIDTH, literal, percent

SCHEMA = 1

KEEP, WAIT, CHANGE, CAPTURE, REQUIRED, EAGER = "keep", "wait", "change", "capture", "required", "eager"
DO = {
    KEEP: "keep what you have",
    WAIT: "not sure enough",
    CHANGE: "change it",
    CAPTURE: "capture these",
    REQUIRED: "to keep what is asked, capture these",
    EAGER: "run without graphs",
}
"""What there is to do. ``KEEP`` and ``WAIT`` are to change nothing, ``CAPTURE`` and ``WAIT`` where today's list is not
known."""

SAME = 1e-9
"""Relative difference of two times that sums of the same numbers in another order may have."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A list of buckets, and what the traffic costs with it.

    ``seconds`` is the expected time per call, ``padding`` rows added per call and ``padded_rows`` to all calls,
    ``hit_rate`` of all calls that count. ``bytes`` and ``capture_seconds`` are of all its graphs together, None where
    nothing is known of them.
    """

    buckets: tuple[int, ...]
    seconds: float
    hit_rate: float
    padding: float
    padded_rows: int = 0
    bytes: int | None = None
    capture_seconds: float | None = None

    @property
    def graphs(self) -> int:
        """How many graphs are captured."""
        return len(self.buckets)

    def as_dict(self) -> dict[str, Any]:
        """The fields and ``graphs``, for JSON."""
        return {**asdict(self), "graphs": self.graphs}


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer to one question about one forward.

    ``do`` is a word of ``DO``, and ``why`` says why, in a sentence: nothing is changed where the gain is below
    ``threshold``, or not sure enough, or too little was seen. ``now`` is today's list (None: not known), ``best``
    the best one, ``leaner`` the one with the fewest graphs that is as fast as today's, where that one is kept.
    ``gain`` is the share of the time that ``best`` saves, prices included (None: today's list is not known),
    ``confidence`` the probability that it saves ``threshold`` at least on traffic like the one seen.
    ``eager_seconds`` is the time per call without any graph, None where the time of one path is guessed from the
    other. ``assumed`` says that nothing told whether a larger bucket serves a smaller batch, which ``pads`` is.
    ``gap`` is how far ``best`` may be from the best set within the limits; 0: proven to be it.
    """

    forward: str
    engine: str
    unit: str
    pads: bool
    calls: int
    now: Plan | None
    best: Plan
    do: str
    why: str
    gain: float | None
    confidence: float
    threshold: float
    frontier: tuple[Plan, ...]
    leaner: Plan | None = None
    eager_seconds: float | None = None
    measured_hit_rate: float | None = None
    max_batch: int | None = None
    assumed: bool = False
    gap: float = 0.0
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def keep(self) -> bool:
        """Whether to change nothing."""
        return self.do in (KEEP, WAIT)

    @property
    def plan(self) -> Plan:
        """What to run with: today's list where it is kept, no graph where eager steps are faster, else the best one."""
        if self.do == EAGER and self.eager_seconds is not None:
            return _without_graphs(self.eager_seconds)
        return self.now if self.keep and self.now is not None else self.best

    @property
    def buckets(self) -> tuple[int, ...]:
        """The sizes to capture."""
        return self.plan.buckets

    @property
    def hit_rate(self) -> float:
        """Expected share of the calls that count which a graph serves."""
        return self.plan.hit_rate

    @property
    def expected_seconds(self) -> float:
        """Expected seconds per call."""
        return self.plan.seconds

    @property
    def line(self) -> str:
        """The text that tells the engine to capture the best list, or nothing where that is faster."""
        return OFF[self.engine] if self.do == EAGER else self._line(self.best)

    @property
    def points(self) -> list[Point]:
        """The frontier as (graphs, milliseconds per call)."""
        return [(plan.graphs, plan.seconds * 1e3) for plan in self.frontier]

    @property
    def marks(self) -> tuple[Point | None, Point]:
        """Today's list and the best one, as points of the frontier's picture."""
        now = None if self.now is None else (self.now.graphs, self.now.seconds * 1e3)
        return now, (self.best.graphs, self.best.seconds * 1e3)

    def to_json(self) -> str:
        """One JSON object with the names used here, those of the answer included."""
        plans = {"now": self.now, "best": self.best, "leaner": self.leaner}
        told = {name: None if plan is None else plan.as_dict() for name, plan in plans.items()}
        answer = {
            "keep": self.keep,
            "buckets": self.buckets,
            "hit_rate": self.hit_rate,
            "expected_seconds": self.expected_seconds,
        }
        frontier = [plan.as_dict() for plan in self.frontier]
        data = {"schema": SCHEMA, **asdict(self), **told, "frontier": frontier, **answer, "line": self.line}
        return json.dumps(data, allow_nan=False)

    def __str__(self) -> str:
        """Plain ASCII lines."""
        name, dispatch = literal(self.forward), "padded" if self.pads else "exact"
        paragraphs = [
            _told([f"{name}: {self.calls:,} calls, {dispatch} dispatch{self._assumption()}"]),
            _grid(self),
            *self._verdict(),
            _told(f"warning: {text}" for text in self.warnings),
            self._picture(),
            _told(f"note: {text}" for text in self.notes),
        ]
        text = "\n\n".join("\n".join(lines) for lines in paragraphs if lines)
        return text.encode("ascii", "backslashreplace").decode("ascii")

    def _line(self, plan: Plan) -> str:
        return line(self.engine, plan.buckets, max_batch=self.max_batch, pad=self.pads)

    def _verdict(self) -> list[list[str]]:
        what = f"{DO[self.do]}: {self.why}"
        if not self.keep:
            buckets = [] if self.do == EAGER else [f"buckets {_listed(self.best)}"]
            return [_told([what, *buckets]), self.line.splitlines()]
        better = self.now is None or self.best.seconds < self.now.seconds * (1 - SAME)
        kept = _told([what, *([f"the best list so far is {_listed(self.best)}"] if better else [])])
        if self.now is None:
            return [kept]
        return [kept] if self.leaner is None else [kept, *self._fewer(self.now, self.leaner)]

    def _assumption(self) -> str:
        """That the rule of dispatch is one, and what it says."""
        if not self.assumed:
            return ""
        serves = (
            "a larger bucket serves a smaller batch" if self.pads else "only a bucket of its own size serves a batch"
        )
        return f" (assumed, no call tells: {serves}; pad={not self.pads} is the other way)"

    def _fewer(self, now: Plan, leaner: Plan) -> list[list[str]]:
        """What of today's list can go, and what that saves."""
        gone = [n for n in now.buckets if n not in leaner.buckets]
        do = f"drop {spans(gone)}" if set(leaner.buckets) < set(now.buckets) else f"capture {_listed(leaner)}"
        fewer = now.graphs - leaner.graphs
        saved = [f"{fewer} graph{'' if fewer == 1 else 's'}"]
        if leaner.bytes is not None and now.bytes is not None:
            saved.append(f"{(now.bytes - leaner.bytes) / 2**20:,.1f} MiB")
        if leaner.capture_seconds is not None and now.capture_seconds is not None:
            saved.append(f"{now.capture_seconds - leaner.capture_seconds:,.1f} s of start-up")
        text = f"or {do}: the time is the same, and that saves {', '.join(saved)}"
        return [_told([text]), self._line(leaner).splitlines()]

    def _picture(self) -> list[str]:
        if len(self.frontier) < 2:
            return []
        now, chosen = self.marks
        return ["expected time by number of graphs:", *bars(self.points, now=now, chosen=chosen).splitlines()]


def _grid(advice: Advice) -> list[str]:
    """No graph at all, today's list and the best one, side by side."""
    rows = [["", "hit rate", "ms/call", "rows padded", "per call", "graphs", "MiB", "capture s"]]
    if advice.eager_seconds is not None:
        rows.append(["eager", *_cells(_without_graphs(advice.eager_seconds))])
    plans = {"now": advice.now, "best": advice.best}
    rows += [[name, *_cells(plan)] for name, plan in plans.items() if plan is not None]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join([f"{row[0]:<{widths[0]}}", *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _without_graphs(seconds: float) -> Plan:
    """What calls of so many seconds each make without any graph."""
    return Plan((), seconds, 0.0, 0.0, 0, 0, 0.0)


def _cells(plan: Plan) -> list[str]:
    memory = "-" if plan.bytes is None else f"{plan.bytes / 2**20:,.1f}"
    spent = "-" if plan.capture_seconds is None else f"{plan.capture_seconds:,.1f}"
    padded = [f"{plan.padded_rows:,}", f"{plan.padding:.2f}"]
    return [percent(plan.hit_rate), f"{plan.seconds * 1e3:.4g}", *padded, str(plan.graphs), memory, spent]


def _listed(plan: Plan) -> str:
    return f"[{', '.join(map(str, plan.buckets))}]"


def _told(sentences: Iterable[str]) -> list[str]:
    """Sentences, none wider than a table."""
    wrap = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [line for text in sentences for line in wrap.wrap(literal(text))]
