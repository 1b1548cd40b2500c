"""Timers that never wait: the serving thread starts and stops a sample, and reads it when it is long done.

A sample is dropped, and counted as dropped, rather than waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Sink = Callable[[float], None]
"""Receives the seconds of one sample."""

PAIRS = 32
"""Event pairs per timer: samples that may be unread at one time."""

TOGETHER, LATEST = 8, 1.0
"""Samples that are read together, and the seconds after which fewer are: the second of several costs half."""


class Timer(Protocol):
    """Measures one forward at a time, from the thread that runs it."""

    def start(self) -> Any:
        """Begin a sample; None where it has to be dropped. Hands on what has finished, now and then."""

    def stop(self, token: Any, sink: Sink) -> None:
        """End the sample that ``start`` began; its seconds reach ``sink`` now or at a later ``harvest``."""

    def cancel(self, token: Any) -> None:
        """Give up the sample that ``start`` began."""

    def harvest(self) -> None:
        """Hand on what has finished. Never blocks."""


class ClockTimer:
    """Wall clock, for devices that have finished when the call returns."""

    def start(self) -> float:
        """The present time in seconds."""
        return time.perf_counter()

    def stop(self, token: float, sink: Sink) -> None:
        """Hand on the seconds since ``token``."""
        sink(time.perf_counter() - token)

    def cancel(self, token: float) -> None:
        """Nothing is held."""

    def harvest(self) -> None:
        """Nothing is pending."""


class EventTimer:
    """Pairs of device events on the current stream, made ahead and used again only once they were read.

    The seconds are stream time: from the moment the stream reaches the first event to the moment it reaches the
    second one. An eager forward that the host is too slow to feed counts its gaps.
    """

    def __init__(self, make_event: Callable[[], Any], stream: Callable[[], Any], pairs: int = PAIRS) -> None:
        self._stream = stream
        self._free = [(make_event(), make_event()) for _ in range(pairs)]
        for first, second in self._free:
            # An event is created at its first record, which may cost milliseconds under load.
            first.record(stream())
            second.record(stream())
        self._pending: deque[tuple[Any, Any, Sink]] = deque()
        self._looked = time.monotonic()

    def start(self) -> Any:
        """An event pair with its first event recorded, or None when all pairs are waiting to be read."""
        waiting = len(self._pending)
        if waiting >= TOGETHER or (waiting and (not self._free or time.monotonic() > self._looked + LATEST)):
            self.harvest()
        try:
            pair = self._free.pop()
        except IndexError:
            return None
        stream = self._stream()
        pair[0].record(stream)
        return (*pair, stream)

    def stop(self, token: Any, sink: Sink) -> None:
        """Record the second event; the pair is read by a later ``harvest``."""
        first, second, stream = token
        second.record(stream)
        self._pending.append((first, second, sink))

    def cancel(self, token: Any) -> None:
        """Put the pair back."""
        self._free.append(token[:2])

    def harvest(self) -> None:
        """Read finished pairs in order, asking the device without waiting."""
        self._looked = time.monotonic()
        while self._pending:
            try:
                first, second, sink = self._pending.popleft()
            except IndexError:
                return
            if not second.query():
                self._pending.appendleft((first, second, sink))
                return
            sink(first.elapsed_time(second) * 1e-3)
            self._free.append((first, second))
