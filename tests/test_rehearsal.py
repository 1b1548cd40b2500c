"""A proposal is tried on the day it was made for, and made anew for the batches that it brings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphprobe.errors import SourceError
from graphprobe.tools.advice import Advice, Plan
from graphprobe.tools.advisor import advise
from graphprobe.tools.arrivals import Request, arrivals
from graphprobe.tools.rehearsal import ROUNDS, SHIFT, Day, Rehearsal, rehearse, tried_on
from graphprobe.tools.sources import Reading
from graphprobe.tools.steps import Steps, steps
from graphprobe.tools.times import Curve

TRACES = Path(os.environ.get("GRAPHPROBE_TRACES") or Path(__file__).parents[2] / "shared" / "data")

GRAPH, EAGER = {1: 9e-3, 101: 19e-3}, {1: 40e-3, 101: 42e-3}
STEADY = [Request(0.01 * i, 0, 20) for i in range(5000)]
"""Two thousand tokens per second: about 20 requests at a time with graphs, and 80 without."""

Ask = Callable[[Reading], Advice]


def day(requests: Sequence[Request] = STEADY, pad: bool = True, **options: Any) -> Day:
    return Day(requests, Steps(Curve(GRAPH), Curve(EAGER)), pad, **{"max_batch": 256, **options})


def asking(today: Sequence[int], **options: Any) -> Ask:
    """Asks the advisor, with the times of ``day``."""
    told = {"buckets": today or None, "pad": True, "times": GRAPH, "eager_times": EAGER, **options}
    return lambda seen: advise(seen, **told)


def plan(buckets: tuple[int, ...], seconds: float = 5e-3) -> Plan:
    """A proposal from somewhere."""
    return Plan(buckets=buckets, seconds=seconds, hit_rate=1.0, padding=0.0)


def proposing(today: Sequence[int], *lists: Sequence[int], expected: float = 5e-3) -> Ask:
    """An advisor that proposes these lists, one after the other, and expects a time that does not come true."""
    left = iter(lists)

    def ask(seen: Reading) -> Advice:
        return replace(asking(today)(seen), best=plan(tuple(next(left)), expected), do="change", why="it is better")

    return ask


def watched(ask: Ask, seen: list[Reading]) -> Ask:
    """The same, and what it is asked."""

    def watching(reading: Reading) -> Advice:
        seen.append(reading)
        return ask(reading)

    return watching


def ms(tried: Rehearsal) -> tuple[float, float]:
    """Milliseconds per call of today's day, and of the proposal's."""
    return tuple(1e3 * (one.seconds_per_call or 0) for one in (tried.now, tried.proposal))  # type: ignore[return-value]


def test_a_proposal_that_suits_its_own_batches_is_found_in_one_round() -> None:
    today = range(1, 65)
    tried = rehearse(day(), today, asking(today, max_buckets=8))
    assert (tried.rounds, tried.shifted) == (1, False)
    assert tried.now == day().replayed(today)
    assert tried.proposal == day().replayed(tried.advice.best.buckets)
    assert len(tried.proposal.buckets) <= 8


def test_the_first_round_advises_on_the_day_with_todays_list() -> None:
    seen: list[Reading] = []
    rehearse(day(), [1, 2, 4], watched(asking([1, 2, 4]), seen))
    (forward,) = seen[0].snapshot.forwards.values()
    now = day().replayed([1, 2, 4])
    assert {row.batch_size: row.calls for row in forward.rows} == now.sizes
    assert (forward.buckets, forward.hit_rate) == ((1, 2, 4), now.hit_rate)
    # The times are those of the day already: measured on few sizes, they would be others.
    assert forward.times == {}
    assert "with today's list" in seen[0].notes[0]


def test_batches_that_shift_are_advised_on_as_todays_list_would_serve_them() -> None:
    seen: list[Reading] = []
    tried = rehearse(day(), [1, 2, 4], watched(asking([1, 2, 4], max_buckets=3), seen))
    assert 1 < tried.rounds == len(seen)
    first = day().replayed(asking([1, 2, 4], max_buckets=3)(seen[0]).best.buckets)
    (forward,) = seen[1].snapshot.forwards.values()
    assert {row.batch_size: row.calls for row in forward.rows} == first.sizes
    assert forward.buckets == (1, 2, 4)
    assert {row.bucket for row in forward.rows if row.path == "graph"} <= {1, 2, 4}
    assert "the list proposed before" in seen[1].notes[0]


def test_what_is_found_then_takes_what_was_expected() -> None:
    tried = rehearse(day(), (), asking(()))
    assert (1 < tried.rounds, tried.shifted, tried.slower) == (True, False, False)
    now, own = ms(tried)
    assert own == pytest.approx(1e3 * tried.advice.best.seconds, rel=SHIFT)
    assert own < 0.35 * now
    assert tried.gain == pytest.approx(1 - own / now)


def test_what_comes_back_compares_the_day_with_todays_list() -> None:
    tried = rehearse(day(), [1, 2, 4], asking([1, 2, 4]))
    assert tried.rounds > 1
    now = tried.advice.now
    assert now is not None
    assert (now.buckets, 1e3 * now.seconds) == ((1, 2, 4), pytest.approx(ms(tried)[0]))
    assert tried.advice.gain == pytest.approx(1 - tried.advice.best.seconds / now.seconds)
    assert not tried.advice.keep
    assert tried.advice.why.endswith(f"; the proposal's own day takes {100 * tried.gain:.1f} % less")


def test_where_graphs_are_slower_the_day_is_tried_without_any() -> None:
    """The proposal of which the day is replayed is what is advised: eager steps."""
    slow = replace(day(), steps=steps({}, {}, {1: 9e-3, 100: 20e-3}, {1: 1e-3, 100: 2e-3}))
    given = {"times": {1: 9e-3, 100: 20e-3}, "eager_times": {1: 1e-3, 100: 2e-3}}
    tried = rehearse(slow, [100], lambda seen: advise(seen, buckets=[100], pad=True, **given))
    assert ("eager", 1, ()) == (tried.advice.do, tried.rounds, tried.proposal.buckets)
    assert tried.gain > 0.8


def test_three_rounds_are_all() -> None:
    lists = [[60, 100], [50, 100], [40, 100], [30, 100]]
    seen: list[Reading] = []
    tried = rehearse(day(), (), watched(proposing((), *lists), seen))
    assert (tried.rounds, len(seen), tried.shifted) == (ROUNDS, 3, True)
    assert "the batches shift after 3 rounds: 5 ms/call were expected" in str(tried)


def test_the_list_with_the_fastest_own_day_is_kept_not_the_last_one() -> None:
    lists = [[90], [20, 40, 90], [60, 90]]
    own = [day().replayed(one).seconds_per_call or 0 for one in lists]
    assert own[1] < 0.9 * min(own[0], own[2])
    tried = rehearse(day(), (), proposing((), *lists))
    assert (tried.advice.best.buckets, tried.proposal.seconds_per_call) == ((20, 40, 90), own[1])


def test_of_lists_as_good_the_one_with_the_fewest_graphs_is_kept() -> None:
    few = [12, 14, 16, 18, 20, 40, 90]
    lists = [[10, *few], few, [*few, 91]]
    own = [day().replayed(one).seconds_per_call or 0 for one in lists]
    assert max(own) <= 1.005 * min(own)
    tried = rehearse(day(), (), proposing((), *lists))
    assert tried.advice.best.buckets == tuple(few)


def test_of_lists_as_good_one_that_suits_its_own_batches_is_kept() -> None:
    """What is expected of it comes true, be it with one graph more."""
    seconds = day().replayed([12, 16, 20, 90]).seconds_per_call or 0
    ask = proposing((), [12, 16, 20, 90], [10, 12, 16, 20, 90])
    expected = iter([0.5 * seconds, seconds])
    tried = rehearse(day(), (), lambda seen: _expecting(ask(seen), next(expected)))
    assert (tried.shifted, tried.advice.best.graphs, tried.rounds) == (False, 5, 2)


def _expecting(advice: Advice, seconds: float) -> Advice:
    return replace(advice, best=replace(advice.best, seconds=seconds))


def test_a_first_advice_to_keep_what_there_is_ends_it() -> None:
    today, seen = range(1, 129), []
    ask = watched(asking(today), seen)
    tried = rehearse(day(), today, lambda reading: replace(ask(reading), best=plan((90,))))
    assert (len(seen), tried.rounds, tried.advice.keep) == (1, 1, True)


def test_a_proposal_that_is_slower_on_its_own_day_is_called_that() -> None:
    today = range(1, 65)
    tried = rehearse(day(), today, proposing(today, [90], [90], [90]))
    now, own = ms(tried)
    assert (tried.slower, tried.gain) == (True, pytest.approx(1 - own / now))
    assert own > 1.01 * now
    says = f"the proposal is slower than today's list, by {100 * (own / now - 1):.1f} % per call"
    assert tried.verdict.startswith(says)
    assert says in str(tried)


def test_one_percent_is_no_difference() -> None:
    """Of two lists that differ by less, neither is called faster or slower."""
    tried = tried_on(day(), replace(asking([20, 40])(sized(20)), best=plan((20, 41))))
    assert abs(tried.gain) < SHIFT
    assert (tried.slower, "takes as long per call as today's list" in tried.verdict) == (False, True)


def sized(*sizes: int) -> Reading:
    """Traffic of these sizes from elsewhere."""
    shown = day([Request(0, 0, 2000)] * sizes[0]).replayed([128]).snapshot()
    return Reading(shown)


def test_advice_on_other_traffic_is_tried_with_the_list_that_is_used_there() -> None:
    advice = asking([4, 30, 200])(sized(20))
    tried = tried_on(day(), advice)
    assert (tried.advice, tried.rounds) == (advice, 1)
    assert tried.now == day().replayed([4, 30, 200])
    assert tried.proposal == day().replayed(advice.best.buckets)


def test_without_a_list_today_all_runs_eagerly() -> None:
    tried = tried_on(day(), asking(())(Reading(day().replayed(()).snapshot())))
    assert (tried.now.buckets, tried.now.hit_rate) == ((), None)
    assert "less time per call than eager steps" in tried.verdict
    assert str(tried).splitlines()[2].split()[:2] == ["eager", "-"]


def test_the_limits_of_the_day_hold_in_each_replay() -> None:
    """How many run at a time, what a request sends, whether a larger bucket serves, and what a prompt takes."""
    tried = rehearse(day(max_batch=8, width=3, pad=False, prefill=Curve({1: 1e-3})), (), asking((), pad=False))
    for one in (tried.now, tried.proposal):
        assert max(one.sizes) <= 24
        assert {size % 3 for size in one.sizes} == {0}
        assert one.prefill_seconds == pytest.approx(5000 * 1e-3)
        assert one.padding == 0
    assert tried.now.waiting > 0


def test_a_day_without_a_decode_step_cannot_be_judged() -> None:
    prefilled = day([Request(0, 100, 1)] * 10, prefill=Curve({1: 1e-3}))
    with pytest.raises(SourceError, match=r"no decode step\. hint: "):
        rehearse(prefilled, [1, 2], asking([1, 2]))


def test_the_page_has_the_figures_of_both_days() -> None:
    tried = replace(rehearse(day(), [1, 2, 4], asking([1, 2, 4])), notes=("as it is",))
    text = str(tried)
    lines = text.splitlines()
    assert text.isascii()
    assert lines[0] == "the day replayed: 5,000 requests, 100,000 tokens"
    for line, one in zip(lines[2:4], (tried.now, tried.proposal), strict=True):
        assert f"{1e3 * (one.seconds_per_call or 0):.4g}" in line.split()
        assert f"{one.tokens_per_second:,.1f}" in line
        assert one.tpot is not None
        assert [f"{1e3 * x:,.1f}" for x in (one.ttft.p50, one.ttft.p99, one.tpot.p50, one.tpot.p99)] == line.split()[
            -6:-2
        ]
    assert lines[-2:] == [tried.verdict, "note: as it is"]


def test_the_figures_are_those_of_the_replays_and_make_valid_json() -> None:
    tried = rehearse(day(), (), asking(()))
    told = json.loads(json.dumps(tried.as_dict(), allow_nan=False))
    assert (told["requests"], told["tokens"], told["rounds"]) == (5000, 100_000, tried.rounds)
    assert (told["gain"], told["slower"], told["shifted"]) == (tried.gain, False, False)
    assert told["verdict"] == tried.verdict
    assert told["now"]["hit_rate"] is None
    assert told["proposal"]["buckets"] == list(tried.advice.best.buckets)
    assert told["proposal"]["ttft"]["p99"] == tried.proposal.ttft.p99
    assert told["proposal"]["tokens_per_second"] == tried.proposal.tokens_per_second


@pytest.mark.parametrize("today", [(1, 2, 4, 8, 16), ()], ids=["small", "none"])
def test_a_public_trace(today: tuple[int, ...]) -> None:
    """From a slow day, a list that is as good as a graph for each size, for the batches that it makes itself."""
    if not (TRACES / "azure_llm_2023_conv.csv").exists():
        pytest.skip(f"no trace in {TRACES}")
    busy = day(arrivals(TRACES / "azure_llm_2023_conv.csv", speed=4))
    tried = rehearse(busy, today, asking(today))
    assert (tried.shifted, tried.slower) == (False, False)
    whole = busy.replayed(range(1, 257)).seconds_per_call or 0
    assert (tried.proposal.seconds_per_call or 0) < 1.02 * whole
    assert tried.gain > 0.4


def test_a_later_round_that_finds_graphs_slower_says_so() -> None:
    """The first list brings batches at which an eager step is faster: what is pasted is what was tried."""
    slow = replace(day(), steps=Steps(Curve(GRAPH), Curve({1: 2e-3, 101: 3e-3}), floored=False))
    answers = iter([{"do": "change"}, {"do": "eager", "eager_seconds": 2e-3}, {"do": "eager", "eager_seconds": 2e-3}])

    def ask(seen: Reading) -> Advice:
        return replace(asking([100])(seen), best=plan((60, 100)), why="it is better", **next(answers))

    tried = rehearse(slow, [100], ask)
    assert ("eager", (), ()) == (tried.advice.do, tried.advice.buckets, tried.proposal.buckets)
    assert tried.gain > 0.5
    assert "run without graphs" in str(tried.advice)
