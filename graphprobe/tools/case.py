"""One question about one forward: its traffic, what is asked, and what any list of buckets costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from graphprobe.buckets import Buckets
from graphprobe.tools.advice import Plan
from graphprobe.tools.engines import Rule
from graphprobe.tools.steps import Steps
from graphprobe.tools.traffic import Traffic

THRESHOLD = 0.02
"""Gain below which the answer is to keep what there is: smaller ones have not been seen to repeat."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked beside the traffic, as ``advise`` has it.

    ``today`` is the list in use, empty where it is not known. ``bytes`` and ``capture_seconds`` are what a graph takes,
    by size; 0 stands for any size that is not named; empty where nothing is known.
    """

    rule: Rule
    today: tuple[int, ...] = ()
    bytes: Mapping[int, float] = field(default_factory=dict)
    capture_seconds: Mapping[int, float] = field(default_factory=dict)
    max_buckets: int | None = None
    max_batch: int | None = None
    threshold: float = THRESHOLD
    max_bytes: float | None = None
    max_capture_seconds: float | None = None
    calls_per_start: float | None = None
    gib_worth: float | None = None

    @property
    def priced(self) -> bool:
        """Whether more graphs cost something, so that their number needs no other reason to be small."""
        return self.calls_per_start is not None or self.gib_worth is not None


def use_of(use: Mapping[int, float], bucket: int) -> float:
    """What one graph takes, where 0 stands for any size that is not named."""
    return use.get(bucket, use.get(0, 0.0))


class Case:
    """What is known and what is asked."""

    def __init__(self, seen: Traffic, question: Question, steps: Steps) -> None:
        self.seen = seen
        self.question = question
        self.steps = steps
        sizes = sorted({*seen.calls, *seen.stuck})
        self.eager = dict(zip(sizes, steps.eager_along(sizes), strict=True))
        """Seconds of an eager call, by size seen."""
        self.stuck = sum(n * self.eager[size] for size, n in seen.stuck.items())
        """Seconds of the calls that run eagerly with any list."""
        self.counted = seen.total + sum(seen.stuck.values())

    @property
    def pads(self) -> bool:
        """Whether a larger bucket serves a smaller batch."""
        return self.question.rule.pads

    def padded(self) -> Case:
        """The same with padded dispatch."""
        return Case(self.seen, replace(self.question, rule=replace(self.question.rule, pads=True)), self.steps)

    def server(self, buckets: Buckets, size: int) -> int | None:
        """The bucket that serves a size; None: it runs eagerly."""
        return buckets.select(size) if self.pads else buckets.exact(size)

    def costs(self, buckets: Sequence[int]) -> dict[int, float]:
        """Seconds of a call of each size that a graph could serve."""
        held, graph = Buckets(buckets), dict(zip(buckets, self.steps.graph.along(list(buckets)), strict=True))
        servers = {size: self.server(held, size) for size in self.seen.calls}
        return {size: self.eager[size] if bucket is None else graph[bucket] for size, bucket in servers.items()}

    def plan(self, buckets: Sequence[int]) -> Plan:
        """What the traffic costs with this list."""
        calls, held = self.seen.calls, Buckets(buckets)
        memory, capture = self.question.bytes, self.question.capture_seconds
        costs = self.costs(buckets)
        served = {size: bucket for size in calls if (bucket := self.server(held, size)) is not None}
        return Plan(
            buckets=held.sizes,
            seconds=(sum(n * costs[size] for size, n in calls.items()) + self.stuck) / self.counted,
            hit_rate=sum(calls[size] for size in served) / self.counted,
            padding=sum((bucket - size) * calls[size] for size, bucket in served.items()) / self.counted,
            bytes=round(sum(use_of(memory, n) for n in held)) if memory else None,
            capture_seconds=sum(use_of(capture, n) for n in held) if capture else None,
        )
