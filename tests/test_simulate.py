"""A replay of a day is what one step after the other gives, counted by hand and by a loop without shortcuts."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphprobe.errors import ConfigError
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import Snapshot
from graphprobe.tools.arrivals import Request, arrivals
from graphprobe.tools.replays import Replay, Spread
from graphprobe.tools.simulate import Seconds, replay
from graphprobe.tools.table import table
from graphprobe.tools.times import Curve

TRACES = Path(os.environ.get("GRAPHPROBE_TRACES") or Path(__file__).parents[2] / "shared" / "data")


def graph(size: int) -> float:
    return (9 + size) / 1e3


def eager(size: int) -> float:
    return (40 + size) / 1e3


def serve(*requests: tuple[float, int], buckets: Any = range(1, 65), pad: bool = True, **options: Any) -> Replay:
    """Replay requests of (arrival, tokens)."""
    options = {"max_batch": 8, "graph": graph, "eager": eager} | options
    return replay([Request(at, 0, tokens) for at, tokens in requests], buckets, pad=pad, **options)


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_a_request_alone_takes_a_step_per_token() -> None:
    day = serve((0.0, 5))
    assert (day.sizes, day.tokens, day.requests) == ({1: 5}, 5, 1)
    assert day.seconds == day.busy_seconds == pytest.approx(5 * 10e-3)
    assert (day.seconds_per_call, day.tokens_per_second) == (pytest.approx(10e-3), pytest.approx(100))
    assert day.ttft == Spread(0.01, 0.01, 0.01) == day.tpot
    assert (day.waiting, day.prefill_seconds) == (0, 0)


def test_who_arrives_during_a_step_joins_at_its_end_and_who_arrives_with_its_end_does_too() -> None:
    assert serve((0.0, 4), (0.010, 2)).sizes == {1: 2, 2: 2}
    assert serve((0.0, 4), (0.010000001, 2)).sizes == {1: 2, 2: 2}
    assert serve((0.0, 4), (0.009999999, 2)).sizes == {1: 2, 2: 2}
    assert serve((0.0, 4), (0.011, 2)).ttft.p99 == pytest.approx(0.020 - 0.011 + 0.011)


def test_time_without_a_request_is_counted_and_is_not_busy() -> None:
    day = serve((0.0, 1), (10.0, 1))
    assert (day.seconds, day.busy_seconds) == (pytest.approx(10.01), pytest.approx(0.02))


def test_time_starts_with_the_first_arrival_wherever_the_clock_stood() -> None:
    assert serve((3600.0, 5), (3600.03, 1)) == serve((0.0, 5), (0.03, 1))


def test_requests_are_served_in_the_order_of_arrival_up_to_the_limit() -> None:
    day = serve((0.002, 1), (0.0, 3), (0.001, 1), max_batch=2)
    assert day.sizes == {1: 1, 2: 2}
    assert day.ttft.p99 == pytest.approx(0.010 + 0.011 + 0.011 - 0.002)  # the last to come waits for a place


def test_waiting_is_the_share_of_steps_that_begin_full_with_a_request_queued() -> None:
    # Steps of 10 ms; the second request comes during the second of five, so three begin with it in the queue.
    day = serve((0.0, 5), (0.015, 1), max_batch=1)
    assert day.waiting == pytest.approx(0.03 / 0.06)
    assert serve((0.0, 5), (0.015, 1), max_batch=2).waiting == 0


def test_exact_buckets_serve_their_own_size_and_padded_ones_smaller_sizes_too() -> None:
    requests = [(0.0, 1), (0.0, 2), (0.0, 3)]
    exact = serve(*requests, buckets=[4, 1], pad=False)
    assert [(row.size, row.decision.bucket, row.seconds) for row in exact.served] == [
        (1, 1, graph(1)),
        (2, None, eager(2)),
        (3, None, eager(3)),
    ]
    padded = serve(*requests, buckets=[4, 1])
    assert [(row.decision.bucket, row.seconds) for row in padded.served] == [
        (1, graph(1)),
        (4, graph(4)),
        (4, graph(4)),
    ]
    assert (exact.padding, padded.padding) == (0, 3)
    assert (exact.hit_rate, padded.hit_rate) == (1 / 3, 1.0)
    assert (exact.graph_calls, exact.eager_calls, padded.eager_calls) == (1, 2, 0)


def test_reasons_of_eager_calls_are_those_of_the_dispatcher() -> None:
    def reasons(**options: Any) -> set[FallbackReason | None]:
        return {row.decision.reason for row in serve((0.0, 1), (0.0, 1), (0.0, 1), **options).served}

    assert reasons(buckets=[2, 4], pad=False) == {FallbackReason.NO_EXACT_BUCKET}
    assert reasons(buckets=[2]) == reasons(buckets=[2], pad=False) == {FallbackReason.BATCH_TOO_LARGE}
    assert reasons(buckets=[]) == {FallbackReason.DISABLED}


def test_without_buckets_everything_is_eager_and_there_is_no_hit_rate() -> None:
    day = serve((0.0, 4), buckets=[])
    assert (day.graph_calls, day.eager_calls, day.hit_rate) == (0, 4, None)
    assert day.seconds == pytest.approx(4 * eager(1))


def test_with_speculation_a_request_sends_width_rows_and_gets_what_is_accepted() -> None:
    assert serve((0.0, 10), (0.0, 10), width=4).sizes == {8: 10}
    day = serve((0.0, 10), (0.0, 5), width=4, accepted=2.5)
    assert (day.sizes, day.tokens) == ({4: 2, 8: 2}, 15)
    assert serve((0.0, 21), width=2, accepted=1.4).sizes == {2: 15}  # 21 / 1.4 is a bit more than 15 in binary


def test_a_prefill_is_a_step_of_its_own_that_gives_the_first_token() -> None:
    requests = [Request(0.0, 100, 3), Request(0.001, 50, 1)]
    day = replay(requests, [1, 2], graph, eager, pad=True, max_batch=2, prefill=lambda tokens: tokens * 1e-3)
    assert day.sizes == {1: 2}  # the second request is complete with its prefill
    assert (day.prefill_seconds, day.seconds_per_call) == (pytest.approx(0.150), pytest.approx(0.010))
    assert (day.seconds, day.busy_seconds) == (pytest.approx(0.170), pytest.approx(0.170))
    assert day.ttft == Spread(pytest.approx((0.100 + 0.149) / 2), pytest.approx(0.100), pytest.approx(0.149))
    assert day.tpot is not None
    assert day.tpot.mean == pytest.approx((0.170 - 0.100) / 2)


def test_a_day_of_prefills_alone_has_no_decode_call() -> None:
    day = replay([Request(0.0, 9, 1)], [1], graph, eager, pad=True, max_batch=1, prefill=lambda tokens: 1e-3 * tokens)
    assert (day.sizes, day.hit_rate, day.seconds_per_call, day.tpot) == ({}, None, None, None)
    assert (day.seconds, day.tokens_per_second) == (pytest.approx(9e-3), pytest.approx(1 / 9e-3))


def test_percentiles_are_times_that_a_request_had() -> None:
    # One at a time, and each begins with its prefill, of as many seconds as its number.
    requests = [Request(1000.0 * number, number, 1) for number in range(1, 201)]
    day = replay(requests, [1], graph, eager, pad=True, max_batch=1, prefill=float)
    assert day.ttft == Spread(100.5, 100, 198)
    assert replay(requests[:1], [1], graph, eager, pad=True, max_batch=1, prefill=float).ttft == Spread(1, 1, 1)


def test_a_billion_tokens_take_no_longer_than_one() -> None:
    assert serve((0.0, 1 << 30), (1.0, 1 << 29)).sizes == {1: 1 << 29, 2: 1 << 29}


def test_a_step_that_takes_no_time_at_all_still_ends() -> None:
    assert serve((0.0, 4), (1e-9, 1), graph=lambda size: 0.0).sizes == {1: 3, 2: 1}


# -- against one step after the other --------------------------------------------------------------------------------


@dataclasses.dataclass
class Guest:
    """A request on its way."""

    arrived: int
    tokens: int
    context: int
    left: int = 0
    first: int | None = None
    last: int = 0


def ticks(seconds: float) -> int:
    return round(seconds * 10**9)


def loop(
    requests: list[Request], buckets: list[int], pad: bool, max_batch: int, width: int, accepted: float,
    prefill: Seconds | None,
) -> dict[str, Any]:  # fmt: skip
    """What an engine does, one step after the other, without any shortcut."""
    guests = [Guest(ticks(r.arrival), r.generate, r.context) for r in sorted(requests, key=lambda r: r.arrival)]
    queue, running = list(guests), []
    clock = guests[0].arrived
    calls: Counter[int] = Counter()
    bucket_of: dict[int, int | None] = {}
    took: dict[int, int] = {}
    waiting = prefilling = 0

    def come() -> bool:
        return bool(queue) and queue[0].arrived <= clock

    while queue or running:
        if not running and not come():
            clock = queue[0].arrived
        while come() and len(running) < max_batch:
            guest = queue.pop(0)
            guest.left = math.ceil((guest.tokens - (prefill is not None)) / accepted)
            running.append(guest)
            if prefill is not None:
                spent = ticks(prefill(guest.context))
                waiting += spent if come() and len(running) == max_batch else 0
                prefilling += spent
                clock += spent
                guest.first = guest.last = clock
            running = [guest for guest in running if guest.left]
        if not running:
            continue
        rows = len(running) * width
        fitting = [bucket for bucket in sorted(buckets) if bucket == rows or (pad and bucket > rows)]
        bucket_of[rows] = fitting[0] if fitting else None
        took[rows] = ticks(graph(fitting[0]) if fitting else eager(rows))
        waiting += took[rows] if come() and len(running) == max_batch else 0
        calls[rows] += 1
        clock += took[rows]
        for guest in running:
            guest.left -= 1
            guest.last = clock
            guest.first = clock if guest.first is None else guest.first
        running = [guest for guest in running if guest.left]
    decoding = sum(took[rows] * n for rows, n in calls.items())
    return {
        "served": [(rows, bucket_of[rows], took[rows] / 1e9, n) for rows, n in sorted(calls.items())],
        "requests": len(guests),
        "tokens": sum(guest.tokens for guest in guests),
        "seconds": max(1, clock - guests[0].arrived) / 1e9,
        "busy_seconds": (decoding + prefilling) / 1e9,
        "prefill_seconds": prefilling / 1e9,
        "waiting": waiting / max(1, clock - guests[0].arrived),
        "ttft": spread([((guest.first or 0) - guest.arrived) / 1e9 for guest in guests]),
        "tpot": spread([(g.last - (g.first or 0)) / (g.tokens - 1) / 1e9 for g in guests if g.tokens > 1]),
    }


def spread(seconds: list[float]) -> tuple[float, float, float] | None:
    def at(share: float) -> float:
        return min(s for s in seconds if sum(other <= s for other in seconds) >= share * len(seconds))

    return (math.fsum(seconds) / len(seconds), at(0.5), at(0.99)) if seconds else None


def told(day: Replay) -> dict[str, Any]:
    """A replay in the form of ``loop``."""
    fields = {f.name: getattr(day, f.name) for f in dataclasses.fields(day) if f.name != "buckets"}
    fields["served"] = [(row.size, row.decision.bucket, row.seconds, row.calls) for row in day.served]
    for name in ("ttft", "tpot"):
        fields[name] = None if fields[name] is None else dataclasses.astuple(fields[name])
    return fields


# Times in whole and half milliseconds meet the ends of steps, which last whole ones; the others don't.
moments = st.one_of(st.integers(0, 400).map(lambda n: n * 5e-4), st.floats(0, 0.2))
guests = st.lists(
    st.builds(Request, moments, st.integers(0, 30), st.one_of(st.integers(1, 4), st.integers(1, 25))),
    min_size=1,
    max_size=9,
)
prefills = st.sampled_from([None, lambda tokens: tokens * 1e-3, lambda tokens: 0.0, lambda tokens: 1 / 3000])


@settings(max_examples=400, deadline=None)
@given(
    guests, st.lists(st.integers(1, 14), unique=True, max_size=5), st.booleans(), st.integers(1, 5),
    st.sampled_from([(1, 1.0), (2, 1.0), (2, 1.5), (3, 3.0)]), prefills,
)  # fmt: skip
@example([Request(0.0, 0, 2), Request(0.01, 0, 2)], [1], False, 1, (1, 1.0), None)
def test_many_steps_at_once_are_the_same_as_one_after_the_other(
    requests: list[Request], buckets: list[int], pad: bool, max_batch: int, spec: tuple[int, float],
    prefill: Callable[[int], float] | None,
) -> None:  # fmt: skip
    width, accepted = spec
    day = replay(
        requests, buckets, graph, eager, pad=pad, max_batch=max_batch, width=width, accepted=accepted, prefill=prefill
    )
    assert told(day) == loop(requests, buckets, pad, max_batch, width, accepted, prefill)


# -- a snapshot of it ------------------------------------------------------------------------------------------------


def test_the_snapshot_of_a_replay_has_its_counts_and_times_and_survives_json() -> None:
    day = serve((0.0, 3), (0.0, 7), (0.0, 9), buckets=[1, 2])
    forward = day.snapshot().forwards["simulated"]
    assert (forward.graph_calls, forward.eager_calls, forward.padding) == (6, 3, 0)
    assert (forward.hit_rate, forward.buckets) == (day.hit_rate, (1, 2))
    assert (forward.captures, forward.live) == ({1: 1, 2: 1}, {1: True, 2: True})
    assert forward.times["decode", "graph", "full", 2].mean == pytest.approx(graph(2))
    assert forward.mean_seconds("eager") == pytest.approx(eager(3))
    assert Snapshot.from_json(day.snapshot().to_json()) == day.snapshot()


def test_times_of_a_snapshot_are_means_over_all_calls_of_a_bucket_and_in_the_ledgers_bounds() -> None:
    day = serve((0.0, 1), (0.0, 3), (0.0, 9), buckets=[1])
    times = day.snapshot().forwards["simulated"].times["decode", "eager", "", None]
    assert (times.count, times.mean) == (3, pytest.approx((eager(3) + 2 * eager(2)) / 3))
    assert sum(times.bounds) == 3
    assert times.bounds[10] == 3  # 25.6 ms to 51.2 ms


def test_the_table_reads_a_replay() -> None:
    shown = table(serve((0.0, 4), (0.0, 8), buckets=[1]).snapshot())
    assert "simulated (in rows; buckets 1)" in shown
    assert "hit rate: 50 % (4 graph, 4 eager)" in shown


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"buckets": [0]}, "bucket must be at least 1"),
        ({"buckets": "124"}, "bucket must be a whole number"),
        ({"buckets": [2, 2]}, "duplicates"),
        ({"max_batch": 0}, "max_batch must be at least 1"),
        ({"max_batch": 8.0}, "max_batch must be a whole number"),
        ({"width": 0}, "width must be at least 1"),
        ({"accepted": 2.0}, "accepted must be 1 to 1 tokens"),
        ({"width": 4, "accepted": 0.5}, "accepted must be 1 to 4 tokens"),
        ({"width": 4, "accepted": float("nan")}, "accepted must be 1 to 4 tokens"),
        ({"graph": lambda size: -1.0}, "graph time of size 1 must be seconds, got -1.0"),
        ({"graph": lambda size: math.inf}, "graph time of size 1 must be seconds, got inf"),
        ({"buckets": [], "eager": lambda size: math.nan}, "eager time of size 1 must be seconds, got nan"),
        ({"prefill": lambda tokens: math.nan}, "prefill time of size 0 must be seconds, got nan"),
    ],
)
def test_what_no_engine_does_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        serve((0.0, 2), **options)


def test_a_day_without_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request to replay"):
        serve()


# -- the hour of two services ----------------------------------------------------------------------------------------


@functools.cache
def hour(name: str, speed: float) -> Replay:
    """An hour of a trace with a step of 9 ms and 0.27 ms more per row."""
    file = TRACES / f"azure_llm_2023_{name}.csv"
    if not file.exists():
        pytest.skip(f"no trace {file}: set GRAPHPROBE_TRACES to the folder that has it")
    step = Curve({1: 9.27e-3, 256: 9e-3 + 256 * 0.27e-3})
    return replay(arrivals(file, speed=speed), range(1, 257), step, step, pad=True, max_batch=256)


def test_of_two_services_at_two_loads_one_sits_at_the_ceiling() -> None:
    full = hour("conv", 4)
    assert full.waiting > 0.9
    assert full.sizes[256] / sum(full.sizes.values()) > 0.8
    for name, speed in (("conv", 1), ("code", 1), ("code", 4)):
        assert (hour(name, speed).waiting, max(hour(name, speed).sizes) < 256) == (0, True)


@pytest.mark.parametrize("name", ["conv", "code"])
@pytest.mark.parametrize("speed", [1, 4])
def test_every_token_of_an_hour_is_a_row_of_a_step(name: str, speed: float) -> None:
    day = hour(name, speed)
    assert sum(size * calls for size, calls in day.sizes.items()) == day.tokens
    step = sum((9e-3 + 0.27e-3 * size) * calls for size, calls in day.sizes.items())
    assert day.busy_seconds == pytest.approx(step, rel=1e-9)
