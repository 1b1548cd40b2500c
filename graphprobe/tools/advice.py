"""What the advisor answers: plans, a verdict and its confidence; as text, as JSON, and as a line to paste."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from graphprobe.tools.engines import line
from graphprobe.tools.plot import Point, bars
from graphprobe.tools.speculative import spans
from graphprobe.tools.table import literal, percent

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """A list of buckets, and what the traffic costs with it.

    ``seconds`` is the expected time per call, ``padding`` rows added per call, ``hit_rate`` of all calls that count.
    ``bytes`` and ``capture_seconds`` are of all its graphs together, None where nothing is known of them.
    """

    buckets: tuple[int, ...]
    seconds: float
    hit_rate: float
    padding: float
    bytes: int | None = None
    capture_seconds: float | None = None

    @property
    def graphs(self) -> int:
        """How many graphs are captured."""
        return len(self.buckets)


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer to one question about one forward.

    ``keep`` says to change nothing: the gain is below ``threshold``, or it is not sure enough, or too little was seen;
    ``why`` says which, in a sentence. ``now`` is today's list (None: not known), ``best`` the best one, ``leaner`` the
    one with the fewest graphs that is as fast as today's. ``confidence`` is the probability that ``best`` gains
    ``threshold`` at least on traffic like the one seen. ``gap`` is how far ``best`` may be from the best set within
    the limits; 0: proven to be it.
    """

    forward: str
    engine: str
    unit: str
    pads: bool
    calls: int
    now: Plan | None
    best: Plan
    keep: bool
    why: str
    gain: float | None
    confidence: float
    threshold: float
    frontier: tuple[Plan, ...]
    leaner: Plan | None = None
    measured_hit_rate: float | None = None
    max_batch: int | None = None
    gap: float = 0.0
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    @property
    def plan(self) -> Plan:
        """What to run with: today's list where it is kept, else the best one."""
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
        """The text that tells the engine to capture the best list."""
        return line(self.engine, self.best.buckets, max_batch=self.max_batch, pad=self.pads)

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
        answer = {"buckets": self.buckets, "hit_rate": self.hit_rate, "expected_seconds": self.expected_seconds}
        return json.dumps({"schema": SCHEMA, **asdict(self), **answer, "line": self.line})

    def __str__(self) -> str:
        """Plain ASCII lines."""
        lines = [f"{literal(self.forward)}: {self.calls:,} calls, {'padded' if self.pads else 'exact'} dispatch"]
        lines += ["", *_grid(self), "", *_verdict(self)]
        if self.leaner is not None:
            lines.append(_leaner(self.leaner, self.now, self.engine, self.pads))
        lines += [f"warning: {text}" for text in self.warnings]
        if len(self.frontier) > 1:
            now, chosen = self.marks
            lines += ["", "expected time by number of graphs:", bars(self.points, now=now, chosen=chosen)]
        lines += ["", *(f"note: {literal(text)}" for text in self.notes)] if self.notes else []
        return "\n".join(lines)


def _grid(advice: Advice) -> list[str]:
    """Today's list and the best one, side by side."""
    plans = {"now": advice.now, "best": advice.best}
    rows = [["", "hit rate", "ms/call", "padding", "graphs", "MiB", "capture s"]]
    rows += [[name, *_cells(plan)] for name, plan in plans.items() if plan is not None]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join([f"{row[0]:<{widths[0]}}", *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _cells(plan: Plan) -> list[str]:
    memory = "-" if plan.bytes is None else f"{plan.bytes / 2**20:,.1f}"
    spent = "-" if plan.capture_seconds is None else f"{plan.capture_seconds:.1f}"
    return [percent(plan.hit_rate), f"{plan.seconds * 1e3:.4g}", f"{plan.padding:.2f}", str(plan.graphs), memory, spent]


def _verdict(advice: Advice) -> list[str]:
    named = f"[{', '.join(map(str, advice.best.buckets))}]"
    if not advice.keep:
        return [f"change it: {advice.why}", f"buckets {named}", "", *advice.line.splitlines()]
    if advice.now is None:
        return [f"not sure enough: {advice.why}", f"the best list so far is {named}"]
    better = advice.best.seconds < advice.now.seconds
    return [f"keep what you have: {advice.why}", *([f"the best list so far is {named}"] if better else [])]


def _leaner(plan: Plan, now: Plan | None, engine: str, pads: bool) -> str:
    fewer = f"{plan.graphs} graphs rather than {now.graphs}" if now else f"{plan.graphs} graphs"
    saved = []
    if now and plan.bytes is not None and now.bytes is not None:
        saved.append(f"{(now.bytes - plan.bytes) / 2**20:,.1f} MiB")
    if now and plan.capture_seconds is not None and now.capture_seconds is not None:
        saved.append(f"{now.capture_seconds - plan.capture_seconds:.1f} s of start-up")
    saves = f", which saves {' and '.join(saved)}" if saved else ""
    return f"as fast with {fewer}{saves}: {spans(plan.buckets)}"
