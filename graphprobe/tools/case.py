"""One question about one forward: its traffic, what is asked, and what any list of buckets costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from graphprobe.buckets import Buckets
from graphprobe.tools.advice import Plan
from graphprobe.tools.engines import Rule
from graphprobe.tools.steps import Steps
from graphprobe.tools.traffic import Traffic
from graphprobe.tools.use import Use

THRESHOLD = 0.02
"""Gain below which the answer is to keep what there is: smaller ones have not been seen to repeat."""

DROPPED = 10_000
"""Calls after which a graph that none of them needed is not kept for what may come.

To drop one asks for more than to add one: what it would serve may not have come yet.
"""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked beside the traffic, as ``advise`` has it; ``today`` is the list in use, empty where it is unknown.

    ``assumed`` says that nothing tells whether a larger bucket serves a smaller batch.
    """

    rule: Rule
    today: tuple[int, ...] = ()
    bytes: Use = field(default_factory=Use)
    capture_seconds: Use = field(default_factory=Use)
    max_buckets: int | None = None
    max_batch: int | None = None
    threshold: float = THRESHOLD
    max_bytes: float | None = None
    max_capture_seconds: float | None = None
    calls_per_start: float | None = None
    gib_worth: float | None = None
    assumed: bool = False

    @property
    def priced(self) -> bool:
        """Whether more graphs cost something, so that their number needs no other reason to be small."""
        return self.calls_per_start is not None or self.gib_worth is not None


class _Totals(NamedTuple):
    """Of all calls up to some size."""

    calls: int
    rows: int
    eager: float


class Case:
    """What is known and what is asked; ``total`` is how many calls were looked at, where ``seen`` has only some."""

    def __init__(self, seen: Traffic, question: Question, steps: Steps, total: int | None = None) -> None:
        self.seen = seen
        self.question = question
        self.steps = steps
        self.short = (seen.total if total is None else total) < DROPPED * seen.processes
        """Whether too few calls were looked at to drop a graph that none of them needed."""
        sizes = sorted({*seen.calls, *seen.stuck})
        self.eager = dict(zip(sizes, steps.eager_along(sizes), strict=True))
        """Seconds of an eager call, by size seen."""
        self.stuck = sum(n * self.eager[size] for size, n in seen.stuck.items())
        """Seconds of the calls that run eagerly with any list."""
        self.counted = seen.total + sum(seen.stuck.values())
        self.sizes = sorted(seen.calls)
        held = [seen.calls[size] for size in self.sizes]
        rows = accumulate((n * size for n, size in zip(held, self.sizes, strict=True)), initial=0)
        eager = accumulate((n * self.eager[size] for n, size in zip(held, self.sizes, strict=True)), initial=0.0)
        self._upto = [_Totals(*totals) for totals in zip(accumulate(held, initial=0), rows, eager, strict=True)]

    @property
    def pads(self) -> bool:
        """Whether a larger bucket serves a smaller batch."""
        return self.question.rule.pads

    @property
    def eagerly(self) -> float:
        """Seconds per call without any graph."""
        return (self._upto[-1].eager + self.stuck) / self.counted

    def of(self, calls: Mapping[int, int]) -> Case:
        """The same for some of the calls."""
        return Case(replace(self.seen, calls=calls, windows=()), self.question, self.steps, self.seen.total)

    def padded(self) -> Case:
        """The same with padded dispatch."""
        return Case(self.seen, replace(self.question, rule=replace(self.question.rule, pads=True)), self.steps)

    def server(self, buckets: Buckets, size: int) -> int | None:
        """The bucket that serves a size; None: it runs eagerly."""
        return buckets.select(size) if self.pads else buckets.exact(size)

    def costs(self, buckets: Sequence[int]) -> dict[int, float]:
        """Seconds of a call of each size that a graph could serve; ``buckets`` may be empty."""
        found = {size: self.eager[size] for size in self.sizes}
        if buckets:
            held, graph = Buckets(buckets), dict(zip(buckets, self.steps.graph.along(list(buckets)), strict=True))
            servers = {size: self.server(held, size) for size in self.sizes}
            found.update({size: graph[bucket] for size, bucket in servers.items() if bucket is not None})
        return found

    def plan(self, buckets: Sequence[int]) -> Plan:
        """What the traffic costs with this list."""
        held = Buckets(buckets).sizes
        hits, padding, saved = 0, 0, 0.0
        for bucket, seconds, (low, high) in zip(
            held, self.steps.graph.along(list(held)), self._spans(held), strict=True
        ):
            calls = high.calls - low.calls
            hits += calls
            padding += bucket * calls - (high.rows - low.rows)
            saved += high.eager - low.eager - seconds * calls
        memory, capture = self.question.bytes, self.question.capture_seconds
        return Plan(
            buckets=held,
            seconds=self.eagerly - saved / self.counted,
            hit_rate=hits / self.counted,
            padding=padding / self.counted,
            padded_rows=padding,
            bytes=int(memory.together(held)) if memory.known else None,
            capture_seconds=capture.together(held) if capture.known else None,
        )

    def _spans(self, held: Sequence[int]) -> list[tuple[_Totals, _Totals]]:
        """For each bucket what lies below the calls that it serves, and what with them."""
        ends = [bisect_right(self.sizes, bucket) for bucket in held]
        if self.pads:
            return [(self._upto[low], self._upto[high]) for low, high in pairwise([0, *ends])]
        starts = [end - (bucket in self.seen.calls) for bucket, end in zip(held, ends, strict=True)]
        return [(self._upto[low], self._upto[high]) for low, high in zip(starts, ends, strict=True)]
