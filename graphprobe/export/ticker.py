"""A thread that takes a step every so often, in a forked child too."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

from graphprobe.errors import ConfigError, internal_error


def checked(interval: float) -> float:
    """An interval in seconds that a thread can wait for; ConfigError for anything else."""
    if not isinstance(interval, (int, float)) or not 0 < interval <= threading.TIMEOUT_MAX:
        raise ConfigError(f"interval must be seconds above 0, got {interval!r}", "leave it out for the default")
    return interval


class Ticker:
    """Calls ``step`` at once and then every ``interval`` seconds, from a daemon thread of its own.

    Where a step takes long it is called less often: it has a tenth of the time at most, and a hundredth of a core.

    A step that fails is counted under ``where``, and the next one comes. After a fork the child has a thread, too;
    ``forked`` is called there before anything else, to let go of what is the parent's.
    """

    def __init__(
        self, step: Callable[[], None], interval: float, where: str, forked: Callable[[], None] = lambda: None
    ) -> None:
        self._step, self._interval, self._where, self._forked = step, interval, where, forked
        self._start()
        _tickers.add(self)

    def _start(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"graphprobe {self._where}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        stop = self._stop
        while True:
            began, worked = time.monotonic(), time.thread_time()
            try:
                self._step()
            except Exception as error:
                self._failed(error)
            took, worked = time.monotonic() - began, time.thread_time() - worked
            if stop.wait(max(self._interval, 9 * took, 99 * worked)):
                return

    def _failed(self, error: Exception) -> None:
        try:
            internal_error(self._where, error)
        except Exception:
            # Strict: the failure is shown by threading's own hook, and the thread is over.
            self._stop.set()
            raise

    def close(self) -> None:
        """Stop, and wait for the step that is on its way. May be called again."""
        _tickers.discard(self)
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


_tickers: weakref.WeakSet[Ticker] = weakref.WeakSet()


def _after_fork() -> None:
    for ticker in list(_tickers):
        if not ticker._stop.is_set():
            ticker._forked()
            ticker._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
