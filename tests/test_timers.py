from __future__ import annotations

from typing import Any

import pytest

from graphprobe import timers
from graphprobe.timers import TOGETHER, ClockTimer, EventTimer


class Device:
    """A stream whose work is done when the test says so: time is the number of records."""

    def __init__(self) -> None:
        self.now = 0
        self.done = 0
        self.events: list[Event] = []

    def event(self) -> Event:
        self.events.append(Event(self))
        return self.events[-1]

    def finish(self) -> None:
        self.done = self.now


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0
        self.streams: list[Any] = []

    def record(self, stream: Any) -> None:
        self.device.now += 1
        self.at = self.device.now
        self.streams.append(stream)

    def query(self) -> bool:
        return self.at <= self.device.done

    def elapsed_time(self, later: Event) -> float:
        assert later.query(), "an event was read before the device had reached it"
        return float(later.at - self.at)


def test_events_are_recorded_once_before_the_first_sample() -> None:
    """Creation is paid at construction: every event of every pair was recorded."""
    device = Device()
    EventTimer(device.event, lambda: "s", pairs=3)
    assert 6 == len(device.events)
    assert [["s"]] * 6 == [event.streams for event in device.events]


def test_a_sample_arrives_only_when_the_device_is_done() -> None:
    """Harvest hands on nothing before the second event is reached, then its seconds, once."""
    device, seconds = Device(), []
    timer = EventTimer(device.event, lambda: 0, pairs=1)
    timer.stop(timer.start(), seconds.append)
    timer.harvest()
    assert [] == seconds
    device.finish()
    timer.harvest()
    timer.harvest()
    assert [1e-3] == seconds


def test_a_pair_is_used_again_only_after_it_was_read() -> None:
    """With all pairs waiting a sample is dropped; once the device is done the next start reads them and has one."""
    device, seconds = Device(), []
    timer = EventTimer(device.event, lambda: 0, pairs=2)
    for _ in range(2):
        timer.stop(timer.start(), seconds.append)
    assert None is timer.start()
    assert not seconds
    device.finish()
    timer.cancel(timer.start())
    assert 2 == len(seconds)
    assert None is not timer.start()


def test_samples_are_read_in_order() -> None:
    """An unfinished sample holds back later ones, so that each reaches its own sink in turn."""
    device, first, second = Device(), [], []
    timer = EventTimer(device.event, lambda: 0, pairs=2)
    timer.stop(timer.start(), first.append)
    device.finish()
    timer.stop(timer.start(), second.append)
    timer.harvest()
    assert (1, 0) == (len(first), len(second))
    device.finish()
    timer.harvest()
    assert (1, 1) == (len(first), len(second))


def test_both_events_go_to_the_stream_of_the_start() -> None:
    """A sample that began on one stream ends on it, whatever stream is current by then."""
    device, streams = Device(), iter(["made", "made", "one", "two"])
    timer = EventTimer(device.event, lambda: next(streams), pairs=1)
    timer.stop(timer.start(), lambda _: None)
    assert [["made", "one"], ["made", "one"]] == [event.streams for event in device.events]


def test_a_cancelled_sample_gives_its_pair_back() -> None:
    """Cancel leaves no sample, and the pair serves the next one."""
    device, seconds = Device(), []
    timer = EventTimer(device.event, lambda: 0, pairs=1)
    timer.cancel(timer.start())
    device.finish()
    timer.harvest()
    assert [] == seconds
    assert None is not timer.start()


def test_the_clock_hands_on_at_once() -> None:
    """On a device that works synchronously one sample is one value, not below zero."""
    seconds: list[float] = []
    timer = ClockTimer()
    timer.stop(timer.start(), seconds.append)
    timer.cancel(timer.start())
    timer.harvest()
    assert [True] == [value >= 0 for value in seconds]


def test_samples_are_read_several_at_a_time() -> None:
    """A start reads nothing until eight wait, then all of them: asking for each one alone would cost twice as much."""
    device, seconds = Device(), []
    timer = EventTimer(device.event, lambda: 0)
    for _ in range(TOGETHER):
        timer.stop(timer.start(), seconds.append)
        device.finish()
        assert not seconds
    timer.cancel(timer.start())
    assert TOGETHER == len(seconds)


def test_a_lone_sample_does_not_wait_for_others_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second the next start reads what there is."""
    device, seconds = Device(), []
    timer = EventTimer(device.event, lambda: 0)
    timer.stop(timer.start(), seconds.append)
    device.finish()
    monkeypatch.setattr(timers, "LATEST", -1.0)
    timer.cancel(timer.start())
    assert 1 == len(seconds)
