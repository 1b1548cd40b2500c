"""Device time of an eager step whose launches were all waiting: what is left of it when the host is no bottleneck.

A kernel that spins is launched first, and the step behind it: the GPU starts on the step when all of it is queued. A
queue takes about a thousand launches before the host has to wait, so a longer step is cut into parts, each behind a
spin of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OPERATORS = (400, 200, 100, 50)
"""Operators of a part; of a part that does not fit into the queue the next number is tried."""

SPINS = (5e-3, 20e-3, 80e-3)
"""Seconds of a spin; where the host is not done before it ends the next one is tried."""

CYCLES = 20_000_000
"""Cycles by which the clock of the spin is measured."""


def filled(run: Callable[[], Any], device: torch.device, times: int = 3) -> float | None:
    """Seconds of the device for one ``run``, the median of some; None where its launches cannot all be queued ahead.

    That is so where the step waits for the device itself.
    """
    per_second = _clock(device)
    for operators in OPERATORS:
        for spin in SPINS:
            found = [_once(run, device, operators, round(spin * per_second)) for _ in range(times)]
            known = sorted(seconds for seconds in found if seconds is not None)
            if len(known) == times:
                return known[times // 2]
    return None


def _once(run: Callable[[], Any], device: torch.device, operators: int, cycles: int) -> float | None:
    parts = _Parts(operators, cycles)
    torch.cuda.synchronize(device)
    parts.begin()
    try:
        with parts:
            run()
    except NotImplementedError:
        # An operator of operators, which no mode is shown.
        parts.seconds = None
    parts.end()
    return parts.seconds


def _clock(device: torch.device) -> float:
    """Cycles of the spin in a second."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(CYCLES)
    begin.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    torch.cuda.synchronize(device)
    return CYCLES / (float(begin.elapsed_time(end)) * 1e-3)


class _Parts(TorchDispatchMode):
    """Cuts what runs inside into parts; ``seconds`` is None where one was not all queued before it began."""

    def __init__(self, operators: int, cycles: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators, self._cycles = operators, cycles
        self._count = 0
        self._started: Any = None
        self.seconds: float | None = 0.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    def begin(self) -> None:
        """Spin, and mark where the part begins."""
        self._count = 0
        torch.cuda._sleep(self._cycles)
        self._started = torch.cuda.Event(enable_timing=True)
        self._started.record()

    def end(self) -> None:
        """Mark where the part ends, and wait for it."""
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        late = self._started.query()
        ended.synchronize()
        if late or self.seconds is None:
            self.seconds = None
            return
        self.seconds += self._started.elapsed_time(ended) * 1e-3

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; before it, cut where the part is full."""
        if not getattr(func, "is_view", False):
            if self._count == self._operators:
                self.end()
                self.begin()
            self._count += 1
        return func(*args, **(kwargs or {}))
