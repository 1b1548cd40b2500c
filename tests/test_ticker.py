"""The thread of an exporter gives way to what it reads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from graphprobe.export import ticker


@pytest.mark.parametrize(
    ("wall", "cpu", "waits"),
    [(0.001, 0.001, 2.0), (0.4, 0.001, 3.6), (0.16, 0.16, 15.84)],
    ids=["short", "waits for a disk", "thousands of sizes"],
)
def test_a_step_has_a_tenth_of_the_time_and_a_hundredth_of_a_core(
    monkeypatch: pytest.MonkeyPatch, wall: float, cpu: float, waits: float
) -> None:
    """After a step of some seconds, and of some seconds of work, it waits so long."""
    waited: list[float] = []

    class Once(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread().name.startswith("graphprobe"):
                waited.append(timeout or 0.0)
                return True
            return super().wait(timeout)

    class Clock:
        def __init__(self) -> None:
            self.walls, self.cpus = iter([10.0, 10.0 + wall]), iter([1.0, 1.0 + cpu])

        def monotonic(self) -> float:
            return next(self.walls)

        def thread_time(self) -> float:
            return next(self.cpus)

    clock: Any = Clock()
    monkeypatch.setattr(ticker.threading, "Event", Once)
    made = ticker.Ticker(lambda: None, 2.0, "test")
    made.close()
    waited.clear()
    monkeypatch.setattr(ticker, "time", clock)
    made = ticker.Ticker(lambda: None, 2.0, "test")
    made.close()
    assert waited == [pytest.approx(waits)]
