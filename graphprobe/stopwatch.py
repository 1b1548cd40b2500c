"""What calls of an engine that owns its graphs take: the time of some of them, and what is left of the memory."""

from __future__ import annotations

import os

from graphprobe.ledger import Forward, add
from graphprobe.timers import ClockTimer, EventTimer, Timer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EVERY = 64
"""One call of each kind in so many is timed, the second one first: the first may compile."""


class Stopwatch:
    """Times calls of one thread: with events of ``device`` on whatever stream is current, host time on a CPU.

    Nothing is made before the first call that is due, which must not be one under capture.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._timer: Timer | None = None
        self.every = _every()
        """One call in so many; 0 where none is timed."""
        self._every, self._second = (self.every, 2 % self.every) if self.every else (1, 1)  # 1, 1: never
        self._seen: dict[tuple[str, int | None, str], int] = {}

    def due(self, mode: str, bucket: int | None, phase: str) -> bool:
        """Whether this call of its kind is to be timed; counts it. ``mode`` is "" for an eager one."""
        key = (mode, bucket, phase)
        count = self._seen[key] = self._seen.get(key, 0) + 1
        return count % self._every == self._second

    def stop(self) -> None:
        """Time nothing any more."""
        self.every = 0
        self._every, self._second = 1, 1

    def begin(self, forward: Forward) -> Any:
        """Begin to time a call; None where it was dropped. Reads the times of earlier ones."""
        if self._timer is None:
            self._timer = timer(self._device)
        mark = self._timer.start()
        if mark is None:
            add(forward.dropped)
        return mark

    def end(self, mark: Any, forward: Forward, mode: str, bucket: int | None, phase: str) -> None:
        """End it."""
        path = "graph" if mode else "eager"
        assert self._timer is not None
        self._timer.stop(mark, lambda seconds: forward.time(path, bucket, seconds, phase, mode))

    def cancel(self, mark: Any) -> None:
        """Give it up: the call has raised."""
        if self._timer is not None:
            self._timer.cancel(mark)


def timer(device: str) -> Timer:
    """What measures calls on a kind of device (cuda, xpu, cpu). Not to be called under capture."""
    import torch

    if device in ("", "cpu"):
        return ClockTimer()
    module = torch.get_device_module(device)
    return EventTimer(lambda: module.Event(enable_timing=True), module.current_stream)


def free_bytes() -> int | None:
    """Free memory of the current device; None where there is none. Asks the driver, never synchronizes."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None


def _every() -> int:
    try:
        return max(0, int(os.environ.get("GRAPHPROBE_TIMING", EVERY)))
    except ValueError:
        return EVERY
