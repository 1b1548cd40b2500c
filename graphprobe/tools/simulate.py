"""A replay of a day: requests through continuous batching, with given times per step, for any list of buckets.

How it serves. Between two steps the engine takes in who has arrived, first come first served, up to ``max_batch``
requests. Without times of a prefill, a request of n tokens takes part in n decode steps, the first of which gives its
first token. With them, it first has a prefill of its own, a step during which nobody decodes and which gives its first
token; n - 1 decode steps follow. Prefills go before decode steps.

The clock counts whole nanoseconds. Between an arrival that is taken in and a request that ends the batch stays as it
is, so all steps up to there are one multiplication, and come out as if they had been taken one by one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from graphprobe.buckets import Buckets, as_max_batch, as_size
from graphprobe.dispatch import EAGER, GRAPH, Decision, Dispatcher
from graphprobe.errors import ConfigError
from graphprobe.reasons import FallbackReason
from graphprobe.tools.arrivals import Request
from graphprobe.tools.replays import Replay, Served, Spread

SECOND = 10**9
"""In ticks of the clock."""

Seconds = Callable[[int], float]
"""Seconds of a step by its size, as ``graphprobe.tools.times.Curve`` has them."""


def replay(
    requests: Iterable[Request],
    buckets: Iterable[int],
    graph: Seconds,
    eager: Seconds,
    *,
    pad: bool,
    max_batch: int,
    width: int = 1,
    accepted: float = 1.0,
    prefill: Seconds | None = None,
) -> Replay:
    """Serve ``requests`` with graphs of ``buckets`` (none: all eagerly), of which ``pad`` lets a larger one serve.

    ``graph`` has the seconds of a decode step by bucket, ``eager`` by batch size, ``prefill`` those of a prefill by
    tokens. At most ``max_batch`` requests run at a time. Each sends ``width`` rows per step (1 + speculative tokens),
    of which ``accepted`` become tokens, always as many. ConfigError for what is outside this.
    """
    queue = sorted(requests, key=lambda request: request.arrival)
    if not queue:
        raise ConfigError("no request to replay", "arrivals(trace) reads them")
    width, most = as_size(width, "width"), as_max_batch(max_batch)
    if isinstance(accepted, bool) or not isinstance(accepted, (int, float)) or not 1 <= accepted <= width:
        raise ConfigError(f"accepted must be 1 to {width} tokens per request and step (width), got {accepted!r}")
    captured = tuple(buckets)
    steps = _Steps(Buckets(captured).sizes if captured else (), graph, eager, pad, width)
    engine = _Engine(queue, steps, most, accepted, prefill)
    engine.run()
    return engine.report()


class _Steps:
    """The decode step of so many requests: its path and its nanoseconds, decided once."""

    def __init__(self, buckets: tuple[int, ...], graph: Seconds, eager: Seconds, pad: bool, width: int) -> None:
        self.buckets, self.width = buckets, width
        self._dispatcher = Dispatcher(Buckets(buckets), pad) if buckets else None
        self._seconds = {GRAPH: graph, EAGER: eager}
        self._known: dict[int, tuple[Decision, int]] = {}

    def __call__(self, requests: int) -> tuple[Decision, int]:
        known = self._known.get(requests)
        if known is None:
            known = self._known[requests] = self._decided(requests * self.width)
        return known

    def _decided(self, size: int) -> tuple[Decision, int]:
        if self._dispatcher is None:
            decision = Decision(EAGER, reason=FallbackReason.DISABLED)
        else:
            decision = self._dispatcher.decide(size)
        return decision, max(1, _nanoseconds(self._seconds[decision.path], decision.bucket or size, decision.path))


@dataclass(slots=True)
class _Engine:
    """Who runs, who is next, and what was counted. All times are whole nanoseconds."""

    queue: list[Request]
    steps: _Steps
    max_batch: int
    accepted: float
    prefill: Seconds | None
    arrived: list[int] = field(init=False)
    clock: int = field(init=False)
    next: int = 0
    step: int = 0
    running: list[tuple[int, int]] = field(default_factory=list)
    """A heap: the decode step after which a request has all its tokens, and the request."""
    joined: list[int] = field(default_factory=list)
    """Running, and without a token yet."""
    calls: dict[int, int] = field(default_factory=dict)
    prefilling: int = 0
    waiting: int = 0
    first: list[int] = field(init=False)
    last: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.arrived = [round(request.arrival * SECOND) for request in self.queue]
        self.clock = self.arrived[0]
        self.first, self.last = [0] * len(self.queue), [0] * len(self.queue)

    def run(self) -> None:
        while self.running or self.next < len(self.queue):
            if not self.running:
                self.clock = max(self.clock, self.arrived[self.next])
            while self._room() and self._queued():
                self._admit()
            if self.running:
                self._decode()

    def _room(self) -> bool:
        return len(self.running) < self.max_batch

    def _queued(self) -> bool:
        return self.next < len(self.queue) and self.arrived[self.next] <= self.clock

    def _admit(self) -> None:
        index = self.next
        self.next += 1
        left = self.queue[index].generate
        if self.prefill is None:
            self.joined.append(index)
        else:
            self._prefill(index, self.prefill)
            left -= 1
        if left:
            # What is a whole number of steps stays one, whatever the division makes of it.
            heapq.heappush(self.running, (self.step + math.ceil(left / self.accepted - 1e-9), index))

    def _prefill(self, index: int, seconds: Seconds) -> None:
        spent = _nanoseconds(seconds, self.queue[index].context, "prefill")
        if len(self.running) + 1 == self.max_batch and self._queued():
            self.waiting += spent
        self.prefilling += spent
        self.clock += spent
        self.first[index] = self.last[index] = self.clock

    def _decode(self) -> None:
        """Take the steps up to the next one that another batch takes."""
        batch = len(self.running)
        each = self.steps(batch)[1]
        count = self.running[0][0] - self.step
        if self.next < len(self.queue):
            before = -((self.clock - self.arrived[self.next]) // each)  # steps that begin before the next arrival
            if self._room():
                count = min(count, before)
            else:
                self.waiting += max(0, count - max(0, before)) * each
        for index in self.joined:
            self.first[index] = self.clock + each
        self.joined.clear()
        self.calls[batch] = self.calls.get(batch, 0) + count
        self.step += count
        self.clock += count * each
        while self.running and self.running[0][0] == self.step:
            self.last[heapq.heappop(self.running)[1]] = self.clock

    def report(self) -> Replay:
        served = []
        busy = self.prefilling
        for batch, calls in sorted(self.calls.items()):
            decision, each = self.steps(batch)
            served.append(Served(batch * self.steps.width, decision, each / SECOND, calls))
            busy += each * calls
        whole = max(1, self.clock - self.arrived[0])
        per_token = list(self._per_token())
        return Replay(
            buckets=self.steps.buckets,
            served=tuple(served),
            requests=len(self.queue),
            tokens=sum(request.generate for request in self.queue),
            seconds=whole / SECOND,
            busy_seconds=busy / SECOND,
            prefill_seconds=self.prefilling / SECOND,
            waiting=self.waiting / whole,
            ttft=Spread.of((first - came) / SECOND for came, first in zip(self.arrived, self.first, strict=True)),
            tpot=Spread.of(per_token) if per_token else None,
        )

    def _per_token(self) -> Iterator[float]:
        for request, first, last in zip(self.queue, self.first, self.last, strict=True):
            if request.generate > 1:
                yield (last - first) / (request.generate - 1) / SECOND


def _nanoseconds(seconds: Seconds, size: int, what: str) -> int:
    value = seconds(size)
    if not 0 <= value < math.inf:
        raise ConfigError(f"the {what} time of size {size} must be seconds, got {value!r}")
    return round(value * SECOND)
