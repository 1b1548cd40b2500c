"""What the recorder captures, held for a benchmark: to be replayed by hand, or with a replay that does nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from graphprobe.backends.recorder import RecorderBackend

Captured = tuple[Any, Any]
"""A graph and the result that its replays write."""


class NoWork:
    """In place of a tape: replaying it does nothing, so that what a call takes is graphprobe's and the copies'."""

    def __init__(self, tape: Any) -> None:
        self._tape = tape

    def replay(self) -> None:
        pass

    def reset(self) -> None:
        self._tape.reset()


@contextlib.contextmanager
def captures(stand_in: Callable[[Any], Any] = lambda tape: tape) -> Iterator[list[Captured]]:
    """The captures of the block, in their order; a graph is what ``stand_in`` makes of its tape."""
    made: list[Captured] = []
    original = RecorderBackend.capture

    def capture(self: RecorderBackend, *args: Any, **kwargs: Any) -> Captured:
        tape, result = original(self, *args, **kwargs)
        made.append((stand_in(tape), result))
        return made[-1]

    RecorderBackend.capture = capture
    try:
        yield made
    finally:
        RecorderBackend.capture = original
