"""Long work of a reader, in slices: in between, the threads that serve get the interpreter.

CPython takes it away from a thread only after 5 ms, so long a forward that wants it would wait. Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from threading import local

TYPE_CHECKING = False  # typing is a third of what `import graphprobe` took
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

SLICE = 250e-6
"""Seconds that a reader keeps the interpreter."""

STALE = 5e-3
"""Seconds after which a slice is no longer the last one: a reader that was idle begins one without a pause."""

PAUSE = 1e-6
"""Seconds of the pause: more than 0, which would be over before a waiting thread has woken up."""


class _Turn(local):
    ends = 0.0


_turn = _Turn()


def give_way() -> None:
    """Let other threads run, where this one has not for ``SLICE`` seconds."""
    late = time.perf_counter() - _turn.ends
    if late >= 0:
        if late < STALE:
            time.sleep(PAUSE)
        _turn.ends = time.perf_counter() + SLICE


def unhurried(items: Iterable[T]) -> Iterator[T]:
    """The items, giving way in between."""
    turn, now = _turn, time.perf_counter
    for item in items:
        if now() >= turn.ends:
            give_way()
        yield item
