"""What a reader that must see each event gets: measured forwards and captures, in a bounded queue.

Counts need no feed, since a reader copies them. Standard library only.
"""

from __future__ import annotations

import contextvars
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

SIZE = 8192
"""Events that wait for a reader."""


class Measured(NamedTuple):
    """One measured forward of ``seconds``; ``bucket`` is None on the eager path."""

    forward: str
    phase: str
    path: str
    mode: str
    bucket: int | None
    seconds: float


class Captured(NamedTuple):
    """One attempt to capture ``bucket``: ``seconds`` long, over at ``ended`` (nanoseconds since the epoch).

    ``outcome`` is ok, error or oom, ``growth`` the bytes that the pool grew by (None: unknown). ``context`` is that of
    the thread that captured, so that a span of it finds its parent.
    """

    forward: str
    bucket: int
    outcome: str
    seconds: float
    growth: int | None
    ended: int
    context: contextvars.Context


class Feed:
    """A bounded queue from the threads that serve to one reader. A full one drops what is new: nobody ever waits."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.dropped = 0
        self._events: deque[Measured | Captured] = deque()

    def put(self, event: Measured | Captured) -> None:
        """Append an event, or count it as dropped."""
        if len(self._events) < self.size:
            self._events.append(event)
        else:
            self.dropped += 1

    def measured(self, forward: str, phase: str, path: str, mode: str, bucket: int | None, seconds: float) -> None:
        """Put a measured forward; see `Measured`."""
        self.put(Measured(forward, phase, path, mode, bucket, seconds))

    def captured(self, forward: str, bucket: int, outcome: str, seconds: float, growth: int | None) -> None:
        """Put an attempt to capture that ends now, in this thread; see `Captured`."""
        ended, context = time.time_ns(), contextvars.copy_context()
        self.put(Captured(forward, bucket, outcome, seconds, growth, ended, context))

    def drain(self) -> Iterator[Measured | Captured]:
        """Take what is there, oldest first."""
        while self._events:
            yield self._events.popleft()

    def clear(self) -> None:
        """Forget everything (in a forked child, the events are the parent's)."""
        self._events.clear()
        self.dropped = 0
