"""Sampled calls: what is too dear for every call is done for one in N of a route.

Holds nothing that leads back to the routes that call it, so that graphs go with their wrapper.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from graphprobe.backends.base import Backend
from graphprobe.dispatch import Decision
from graphprobe.errors import internal_error
from graphprobe.ledger import Forward, ignored
from graphprobe.options import Options
from graphprobe.reasons import FallbackReason
from graphprobe.routes import Captured, GraphWork, Sampled, Schedule, Serve
from graphprobe.timers import Timer
from graphprobe.turn import MISS, unserved
from graphprobe.verify import Verifier
from graphprobe.watch import CHECK


class Sampler:
    """Times, verifies and checks the sampled calls of one wrapper."""

    def __init__(self, options: Options, entry: Forward, verifier: Verifier) -> None:
        self.options = options
        self.entry = entry
        self._verifier = verifier
        self._timer: Timer | None = None
        self._backend: Backend | None = None
        self._thread = 0
        self._eager: dict[tuple[str, int], Schedule] = {}

    def use(self, backend: Backend) -> None:
        """Time on this backend's device from now on."""
        self._timer = backend.timer() if self.options.timing else None
        self._backend = backend

    def forked(self) -> None:
        """In a forked child: leave the parent's events alone."""
        self._timer = self._backend = None

    def graph_schedule(self, captured: Captured, rows: int) -> Schedule:
        """The schedule of one graph at one size; it outlives the routes that use it."""
        if rows not in captured.schedules:
            verify = self._verifier.period(captured)
            captured.schedules[rows] = Schedule(time=self.options.timing, check=CHECK, verify=verify)
        return captured.schedules[rows]

    def eager_schedule(self, phase: str, reason: FallbackReason) -> Schedule:
        """The schedule of all eager calls of a phase; ``grad`` is looked at again now and then."""
        check = CHECK if reason is FallbackReason.GRAD else 0
        key = (phase, check)
        return self._eager.setdefault(key, Schedule(time=self.options.timing, check=check))

    def sampled(self, decision: Decision, phase: str, work: GraphWork | None) -> Sampled:
        """The function that serves the sampled calls of a route."""
        mode = "full" if decision.is_graph else ""
        sink = partial(self.entry.time, decision.path, decision.bucket, phase=phase, mode=mode)
        return partial(self._serve, sink, phase, work)

    def _serve(
        self, sink: Any, phase: str, work: GraphWork | None, names: list[str], serve: Serve, call: tuple[Any, ...]
    ) -> Any:
        if "check" in names and (work is None or not work.captured.passes()):
            return MISS
        if ignored():
            return serve(*call)
        if "time" in names and self._timer is not None and not self._in_capture():
            self._thread = threading.get_ident()
            serve = partial(self._timed, self._timer, serve, sink)
        if work is not None and "verify" in names:
            return self._verifier.compare(work, serve, call, phase)
        return serve(*call)

    def _in_capture(self) -> bool:
        """Whether this thread is inside a capture, where no event may be looked at."""
        return self._backend is not None and self._backend.capturing()

    def _timed(self, timer: Timer, serve: Serve, sink: Any, *call: Any) -> Any:
        """Serve between the two events of a sample. A call that raised or missed leaves no sample."""
        token = _guarded(timer.start)
        if token is None:
            self.entry.dropped[0] += 1
            return serve(*call)
        result = MISS
        try:
            result = serve(*call)
        finally:
            if unserved(result):
                timer.cancel(token)
            else:
                _guarded(timer.stop, token, sink)
        return result

    def harvest(self) -> None:
        """Read the samples that are done, on the thread that serves; elsewhere they wait for its next sample."""
        if self._timer is not None and self._thread == threading.get_ident() and not self._in_capture():
            _guarded(self._timer.harvest)


def _guarded(step: Callable[..., Any], *args: Any) -> Any:
    """A step of the timer's, which must not fail the caller's forward."""
    try:
        return step(*args)
    except Exception as error:
        internal_error("timing", error)
        return None
