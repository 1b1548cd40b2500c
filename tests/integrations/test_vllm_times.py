"""Times of forwards: per path and size, of few steps, and without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from graphprobe import stopwatch, timers
from graphprobe.timers import PAIRS, EventTimer
from tests.integrations.engine import Device, Engine, forward, rows

Make = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("fresh")

KEY = ("decode", "graph", "full", 2)


class Stream:
    """A device stream, whose clock stands still; its work is done when ``done`` says so."""

    now = 0.0
    done = True


class Event:
    """An event of such a stream: there is nothing to wait for it with."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        self.stream, self.at = stream, stream.now

    def query(self) -> bool:
        return bool(self.stream.done)

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1000


@pytest.fixture
def stream(engine: Make, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream of a fake device, which is asked for events as a GPU is."""
    found = Stream()
    monkeypatch.setattr(stopwatch, "timer", lambda device: EventTimer(Event, lambda: found))
    # The second after which even a single sample is read is over at once.
    monkeypatch.setattr(timers, "LATEST", -1.0)
    return found


def samples() -> dict[Any, int]:
    return {key: times.count for key, times in forward().times.items()}


def test_the_second_step_of_a_kind_is_timed_and_then_one_in_64(engine: Make, runner: str) -> None:
    """The first may compile."""
    found, seen = engine(runner).start(), []
    for _ in range(131):
        found.step(1, 1)
        seen.append(sum(samples().values()))
    assert [n + 1 for n in range(1, 131) if seen[n] > seen[n - 1]] == [2, 66, 130]
    assert samples() == {KEY: 3} and seen[0] == 0


def test_each_kind_has_a_second_step(engine: Make, runner: str) -> None:
    """Full, piecewise and eager forwards, each size of graph, each phase; eager ones of all sizes together."""
    found = engine(runner, mode="FULL_AND_PIECEWISE", seqs=16).start()
    for _ in range(2):
        found.step(1, 1)
        found.step(*[1] * 4)
        found.step(1, new=[3])
        found.step(new=[4])
    for size in (9, 10):
        found.step(*[1] * size)
    assert samples() == {
        KEY: 1,
        ("decode", "graph", "full", 4): 1,
        ("mixed", "graph", "piecewise", 4): 1,
        ("prefill", "graph", "piecewise", 4): 1,
        ("decode", "eager", "", None): 1,
    }


@pytest.mark.parametrize(("setting", "expected"), [("1", 10), ("4", 3), ("0", 0), ("-1", 0), ("often", 1), ("", 1)])
def test_how_often_can_be_set_and_0_is_never(
    engine: Make, runner: str, monkeypatch: pytest.MonkeyPatch, setting: str, expected: int
) -> None:
    """What is no number is as if it were not set."""
    monkeypatch.setenv("GRAPHPROBE_TIMING", setting)
    found = engine(runner).start()
    for _ in range(10):
        found.step(1, 1)
    assert sum(samples().values()) == expected


def test_the_seconds_are_those_of_the_forward(engine: Make, runner: str, stream: Stream) -> None:
    """What a worker does before and after it is not in them."""
    found = engine(runner, mode="PIECEWISE", device=Device("cuda")).start()
    sample = found.runner.sample_tokens

    def work() -> None:
        stream.now += 0.25

    found.runner.model = work
    found.runner.sample_tokens = lambda grammar: (work(), sample(grammar))
    for _ in range(66):
        found.step(1, 1)
    assert forward().mean_seconds("graph", 2) == 0.25


def test_dummy_runs_and_captures_are_not_timed(engine: Make, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that is recorded while a graph is captured breaks the capture."""
    monkeypatch.setenv("GRAPHPROBE_TIMING", "1")
    monkeypatch.setattr(stopwatch, "timer", lambda device: pytest.fail("a clock was asked for"))
    found = engine(runner, mode="FULL_AND_PIECEWISE").start()
    found.worker.execute_dummy_batch()
    assert samples() == {}


def test_a_forward_that_raises_is_no_sample_and_gives_its_clock_back(
    engine: Make, runner: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it does: there are only so many event pairs."""
    monkeypatch.setenv("GRAPHPROBE_TIMING", "1")
    found = engine(runner, mode="NONE", device=Device("cuda")).start()
    found.runner.model = lambda: 1 / 0
    for _ in range(2 * PAIRS):
        with pytest.raises(ZeroDivisionError):
            found.step(1, 1)
    assert (samples(), forward().dropped) == ({}, 0)
    found.runner.model = lambda: None
    for _ in range(20):
        found.step(1, 1)
    assert samples()["decode", "eager", "", None] >= 16
    assert forward().dropped == 0


def test_samples_that_the_device_has_not_finished_are_dropped_and_not_waited_for(
    engine: Make, runner: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps count all the same."""
    monkeypatch.setenv("GRAPHPROBE_TIMING", "1")
    found = engine(runner, device=Device("cuda")).start()
    stream.done = False
    for _ in range(PAIRS + 5):
        found.step(1, 1)
    assert (samples(), forward().dropped) == ({}, 5)
    assert rows() == {("decode", 2, "full", 2): PAIRS + 5}


def test_a_sample_of_a_kind_that_is_not_seen_again_arrives(engine: Make, runner: str, stream: Stream) -> None:
    """With the next sample of any kind."""
    found = engine(runner, device=Device("cuda")).start()
    found.step(1, 1)
    found.step(1, 1)
    assert samples() == {}
    found.step(1)
    found.step(1)
    assert samples() == {KEY: 1}


def test_a_failure_of_the_clock_does_not_reach_the_engine(
    engine: Make, runner: str, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """The step is counted, without a time."""
    monkeypatch.setenv("GRAPHPROBE_STRICT", "0")
    monkeypatch.setattr(stopwatch, "timer", lambda device: 1 / 0)
    found = engine(runner).start()
    said()
    for _ in range(70):
        assert found.step(1, 1) == "tokens"
    assert rows() == {("decode", 2, "full", 2): 70} and samples() == {}
    assert said() == ["graphprobe recorded less; your forward is unaffected (vllm.time)"]
