from __future__ import annotations

from typing import Any

import pytest

from graphprobe.dispatch import EAGER, Decision
from graphprobe.ledger import Ledger, ignore
from graphprobe.options import Options
from graphprobe.reasons import FallbackReason
from graphprobe.sampling import Sampler
from graphprobe.timers import EventTimer
from graphprobe.turn import MISS
from graphprobe.verify import Verifier

MISSED = FallbackReason.NO_EXACT_BUCKET


class Event:
    """Done when its device says so; a second passes with each record."""

    clock = 0
    done = True

    def record(self, stream: Any) -> None:
        Event.clock += 1000
        self.at = Event.clock

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, later: Event) -> int:
        return later.at - self.at


class Device:
    """As much of a backend as timing asks for."""

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs

    def timer(self) -> EventTimer:
        return EventTimer(Event, lambda: 0, self.pairs)

    def capturing(self) -> bool:
        return False


@pytest.fixture
def events() -> Any:
    Event.done = True
    return Event


def sampler(ledger: Ledger, pairs: int = 1, **options: Any) -> Sampler:
    checked, entry = Options([2], **options), ledger.forward("f")
    made = Sampler(checked, entry, Verifier(checked, entry, lambda *_: None))
    device: Any = Device(pairs)
    made.use(device)
    return made


def serve(made: Sampler, result: Any = "result", names: list[str] | None = None) -> Any:
    """One sampled eager call whose forward returns ``result``, or raises it."""

    def forward(*_: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    sampled = made.sampled(Decision(EAGER, reason=MISSED), "decode", None)
    return sampled(names or ["time"], forward, (None, (), {}, (), [0]))


def samples(made: Sampler) -> int:
    return sum(times.count for times in made.entry.snapshot().times.values())


def test_a_sample_reaches_the_ledger_under_its_path(ledger: Ledger, events: Any) -> None:
    """The seconds of a call are read with a later one, and count under phase, path and mode."""
    made = sampler(ledger)
    assert "result" == serve(made)
    made.harvest()
    times = made.entry.snapshot().times
    assert [("decode", "eager", "", None)] == list(times)
    assert (1, 1.0) == (times["decode", "eager", "", None].count, times["decode", "eager", "", None].sum)


def test_a_sample_without_a_free_pair_is_counted_as_dropped(ledger: Ledger, events: Any) -> None:
    """While the device has not finished, further samples are dropped, counted, and their calls served."""
    made = sampler(ledger, pairs=2)
    events.done = False
    assert ["result"] * 5 == [serve(made) for _ in range(5)]
    assert (3, 0) == (made.entry.snapshot().dropped, samples(made))
    events.done = True
    serve(made)
    assert (3, 2) == (made.entry.snapshot().dropped, samples(made))


def test_a_call_that_missed_or_raised_leaves_no_sample(ledger: Ledger, events: Any) -> None:
    """Only a call that returned is measured, and its pair is free for the next one."""
    made = sampler(ledger)
    assert MISS is serve(made, MISS)
    with pytest.raises(ValueError, match="theirs"):
        serve(made, ValueError("theirs"))
    made.harvest()
    assert 0 == samples(made)
    serve(made)
    made.harvest()
    assert (1, 0) == (samples(made), made.entry.snapshot().dropped)


def test_nothing_is_sampled_inside_ignore(ledger: Ledger, events: Any) -> None:
    """A call that is counted nowhere is timed nowhere."""
    made = sampler(ledger)
    with ignore():
        assert "result" == serve(made)
    made.harvest()
    assert 0 == samples(made)


def test_without_timing_there_is_no_timer(ledger: Ledger, events: Any) -> None:
    """timing=0 makes no event and takes no sample."""
    before = events.clock
    made = sampler(ledger, timing=0)
    assert "result" == serve(made)
    made.harvest()
    assert (before, 0) == (events.clock, samples(made))


def test_the_check_of_an_eager_route_has_the_call_decided_afresh(ledger: Ledger, events: Any) -> None:
    """Weights may leave autograd: now and then a call with reason grad is not served by its route."""
    made = sampler(ledger)
    assert MISS is serve(made, names=["check"])
    assert made.eager_schedule("decode", FallbackReason.GRAD) is made.eager_schedule("decode", FallbackReason.GRAD)
    assert made.eager_schedule("decode", FallbackReason.GRAD) is not made.eager_schedule("decode", MISSED)
    assert made.eager_schedule("prefill", MISSED) is not made.eager_schedule("decode", MISSED)
