"""Whose turn it is to replay: one thread at a time per wrapper, without a lock as long as only one serves."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from graphprobe.ledger import FREE_THREADED

MISS: Any = object()
"""Returned by a graph route that cannot be obeyed now; nothing was launched and nothing counted."""

WAIT: Any = object()
"""Returned by a graph route where the turn is another thread's: see :meth:`Turn.serve`."""


Result = TypeVar("Result")


def unserved(result: Any) -> bool:
    """Whether a route served nothing: MISS or WAIT."""
    return result is MISS or result is WAIT


class Turn:
    """Whose turn it is to replay.

    As long as one thread alone serves, it is the ``owner`` and needs no lock: it says that it is ``inside`` and looks
    whether it still is the owner. Another thread that comes makes the turn shared for good: from then on whoever
    holds the lock is the owner, once the one inside has left. Both sides write before they read, so one of them sees
    the other. Setting a field cannot be separated from the ``try`` behind it by a signal's exception; a call can be.
    """

    __slots__ = ("__weakref__", "closed", "inside", "lock", "owner", "shared")

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Nobody's turn: at the start, and in a forked child, where the thread that had it may be missing."""
        self.owner = 0
        self.shared = FREE_THREADED
        self.inside = 0
        self.closed = False
        # The forward or a callback of the caller's may reset its own wrapper while it has the turn.
        self.lock = threading.RLock()

    def claim(self) -> None:
        """The first thread that serves owns the turn."""
        if not (self.shared or self.owner or self.closed):
            self.owner = threading.get_ident()

    def serve(self, serve: Callable[..., Any], call: tuple[Any, ...]) -> Any:
        """Wait for the turn and serve; MISS where waiting would be wrong."""
        me = threading.get_ident()
        if self.closed or self.inside == me:
            # A capture is not waited for; and a callback that calls the wrapper would wait for itself.
            return MISS
        if not self.shared:
            self.owner, self.shared = 0, True
        with self.lock:
            self._until_left()
            self.owner = me
            try:
                return serve(*call)
            finally:
                self.owner = 0

    def whole(self, serve: Callable[..., Any], call: tuple[Any, ...]) -> Any:
        """Serve what replays and does more, with other threads waiting until all of it is done."""
        if self.closed:
            return MISS
        with self.lock:
            result = serve(*call)
            return self.serve(serve, call) if result is WAIT else result

    def _until_left(self) -> None:
        while self.inside not in (0, threading.get_ident()):
            time.sleep(PAUSE)

    def alone(self, step: Callable[..., Result], *args: Any) -> Result:
        """The result of ``step``, while nobody replays; other threads' calls do not wait for it, they run eagerly."""
        with self.lock:
            owner, closed = self.owner, self.closed
            mine = owner == threading.get_ident()
            try:
                self.owner, self.closed = 0, True
                self._until_left()
                return step(*args)
            finally:
                # No call here: a signal's exception could come in between.
                self.owner, self.closed = owner if mine or not self.shared else 0, closed


_TURNS: weakref.WeakValueDictionary[Any, Turn] = weakref.WeakValueDictionary()


def turn_of(pool: Any) -> Turn:
    """The turn of a wrapper: its own, or that of all wrappers with one ``pool``, whose graphs share memory."""
    return Turn() if pool is None else _TURNS.setdefault(pool, Turn())


PAUSE = 50e-6
"""Seconds between two looks at an owner that is inside: less than a forward takes."""
