"""The judgement: numbers reckoned anew, limits that are never passed, and when it says to change nothing."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import NormalDist
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from graphprobe.errors import ConfigError
from graphprobe.tools import case, confidence
from graphprobe.tools.advice import Advice
from graphprobe.tools.advisor import advise
from graphprobe.tools.engines import ENGINE, ENGINES, rule
from graphprobe.tools.judge import EXACTLY, TOLERANCE, judge
from graphprobe.tools.paste import OFF
from graphprobe.tools.sources import Reading
from graphprobe.tools.steps import steps
from graphprobe.tools.times import Curve
from graphprobe.tools.traffic import Traffic
from graphprobe.tools.verdict import LEAST_CALLS, SURE
from tests.traffic import dispatched, reckoned, seen, server, windowed

GRAPH, EAGER = {1: 9e-3, 16: 10.2e-3, 64: 14e-3}, {1: 27e-3, 64: 31e-3}
TIMED: dict[str, Any] = {"times": GRAPH, "eager_times": EAGER}

sizes = st.integers(1, 64)
traffics = st.dictionaries(sizes, st.integers(1, 10**6), min_size=1, max_size=12)
lists = st.lists(sizes, min_size=1, max_size=8, unique=True)
quick = settings(max_examples=60, deadline=None)


def plans(found: Advice) -> list[Any]:
    return [plan for plan in (found.now, found.best, found.leaner, *found.frontier) if plan is not None]


# -- numbers ----------------------------------------------------------------------------------------------------------


@quick
@given(traffics, lists, st.booleans(), st.dictionaries(sizes, st.integers(1, 10**5), max_size=3))
def test_all_figures_are_what_a_walk_over_the_calls_gives(
    calls: dict[int, int], buckets: list[int], pad: bool, stuck: dict[int, int]
) -> None:
    """Seconds per call, hit rate and padding of all lists, with calls that no list helps; the answer is one of them."""
    snapshot = dispatched(calls, buckets, pad)
    forward = snapshot.forwards["decode"]
    more = seen({}, {(size, "adapter"): n for size, n in stuck.items()}).forwards["decode"].rows
    snapshot = seen(buckets=sorted(buckets), rows=(*forward.rows, *more))
    found = advise(snapshot, pad=pad, **TIMED)
    graph, eager = Curve(GRAPH), Curve(EAGER)
    for plan in plans(found):
        seconds, hits, padding = reckoned(calls, plan.buckets, pad, graph, eager, stuck)
        assert (pytest.approx(seconds), pytest.approx(hits)) == (plan.seconds, plan.hit_rate)
        assert (padding, pytest.approx(padding / sum((*calls.values(), *stuck.values())))) == (
            plan.padded_rows,
            plan.padding,
        )
    assert found.now is not None
    assert tuple(sorted(buckets)) == found.now.buckets
    answer = found.now if found.keep else found.best
    assert (answer.buckets, answer.seconds, answer.hit_rate) == (found.buckets, found.expected_seconds, found.hit_rate)
    assert found.eager_seconds == pytest.approx(reckoned(calls, [], pad, graph, eager, stuck)[0])
    assert found.gain == pytest.approx(1 - found.best.seconds / found.now.seconds, abs=1e-8)


@quick
@given(traffics, lists, st.booleans())
def test_the_frontier_falls_to_the_proposal(calls: dict[int, int], buckets: list[int], pad: bool) -> None:
    """Each further point has more graphs and less time; the proposal is the first that is as good as the last."""
    found = advise(dispatched(calls, buckets, pad), pad=pad, **TIMED)
    most = TOLERANCE if pad else EXACTLY
    graphs, seconds = [p.graphs for p in found.frontier], [p.seconds for p in found.frontier]
    assert sorted(set(graphs)) == graphs
    assert sorted(set(seconds), reverse=True) == seconds
    assert found.best.seconds <= seconds[-1] * (1 + most + 1e-9)
    if pad or found.calls >= case.DROPPED:
        fewer = [plan.seconds for plan in found.frontier if plan.graphs < found.best.graphs]
        assert all(time > seconds[-1] * (1 + most) for time in fewer)


@quick
@given(traffics, lists)
def test_no_list_in_use_is_better_by_more_than_the_tolerance(calls: dict[int, int], buckets: list[int]) -> None:
    """Of the lists of up to 64 graphs that end where the best one ends today's is one."""
    assume(max(buckets) >= max(calls))
    found = advise(dispatched(calls, buckets, False), pad=False, **TIMED)
    assert found.now is not None
    assert found.best.seconds <= found.now.seconds * (1 + TOLERANCE + 1e-9)


def test_calls_that_no_list_helps_are_in_the_figures() -> None:
    """Half of the calls have an adapter: the best hit rate is a half, and the time is half an eager one's."""
    found = advise(seen({(4, 4): 5000}, {(4, "adapter"): 5000}, (4, 8)), times={4: 1.0, 8: 2.0}, eager_times={4: 3.0})
    assert (0.5, 2.0, 3.0) == (found.best.hit_rate, found.best.seconds, found.eager_seconds)
    assert any("50 % of the calls run eagerly whatever is captured: 5,000 adapter" in text for text in found.warnings)


# -- what is never left out -------------------------------------------------------------------------------------------


@st.composite
def asked(draw: st.DrawFn) -> tuple[dict[int, int], list[int], dict[str, Any]]:
    """Traffic, today's list, and an engine with a declared maximum."""
    engine = draw(st.sampled_from(ENGINES))
    calls = draw(st.dictionaries(sizes, st.integers(1, 5000), min_size=1, max_size=10))
    pad = draw(st.sampled_from([True, False] if ENGINE[engine].may_choose else [None]))
    more = {"engine": engine, "pad": pad, "max_batch": draw(st.integers(max(calls), 100))}
    return calls, draw(lists), more


@quick
@given(asked(), st.integers(1, 9), st.booleans())
def test_a_declared_maximum_is_never_left_out(
    ask: tuple[dict[int, int], list[int], dict[str, Any]], most: int, thin: bool
) -> None:
    """Whatever the engine, the dispatch, the traffic and the number of graphs: a bucket serves it, kept list or not."""
    calls, today, more = ask
    calls = dict.fromkeys(calls, 1) if thin else calls
    found = advise(dispatched(calls, today, True), max_buckets=most, **more, **TIMED)
    pad = rule(more["engine"], pad=more["pad"]).pads
    for buckets in (found.buckets, found.best.buckets):
        assert server(more["max_batch"], buckets, pad) is not None
        assert len(buckets) <= most


@quick
@given(asked(), st.integers(1, 4), st.integers(0, 5), st.none() | st.integers(1, 70), st.none() | st.integers(1, 9))
def test_an_engine_makes_of_a_proposal_what_the_proposal_says(
    ask: tuple[dict[int, int], list[int], dict[str, Any]], ranks: int, spec: int, largest: int | None, most: int | None
) -> None:
    """It neither drops nor rounds nor adds a size, whatever its limits are."""
    calls, today, more = ask
    limits = {"spec_tokens": spec, "tensor_parallel": ranks, "largest": largest}
    try:
        found = advise(dispatched(calls, today, True), max_buckets=most, **more, **limits, **TIMED)
    except ConfigError as error:
        assert "can capture nothing here" in str(error) or largest not in (None, more["max_batch"])
        return
    bound = rule(more["engine"], pad=more["pad"], **limits)
    assert found.best.buckets == bound.resolve(found.best.buckets)


def test_an_engine_that_captures_its_limit_whatever_it_is_told_has_it_in_the_proposal() -> None:
    """LMDeploy makes a graph of its largest batch: it is one of the four that may be."""
    snapshot = dispatched({4: 3000, 9: 3000, 17: 3000, 30: 3000}, [32], True)
    found = advise(snapshot, engine="lmdeploy", largest=50, max_buckets=4, **TIMED)
    assert (4, 50) == (found.best.graphs, found.best.buckets[-1])


@quick
@given(traffics, lists, st.booleans(), st.none() | st.integers(64, 100))
@example({1: 396, 9: 1}, [10], False, None)
@example({1: 99_000, 9: 1}, [9, 64], False, 64)
@example({8: 99_000, 9: 1}, [7, 8, 9, 64], False, 64)
def test_the_largest_size_seen_is_never_dropped(
    calls: dict[int, int], today: list[int], pad: bool, most: int | None
) -> None:
    """However seldom it came, and whatever larger one is there for other reasons."""
    found = advise(dispatched(calls, today, pad), pad=pad, max_batch=most, **TIMED)
    served = server(max(calls), today, pad) is not None
    lists = [found.best, *([found.leaner] if found.leaner and served else [])]
    assert all(server(max(calls), plan.buckets, pad) for plan in lists)


@quick
@given(
    traffics,
    lists,
    st.booleans(),
    st.integers(1, 6) | st.none(),
    st.integers(1, 50) | st.dictionaries(st.integers(0, 64), st.integers(0, 50), min_size=1),
    st.integers(1, 200) | st.none(),
)
def test_limits_are_never_passed(
    calls: dict[int, int], today: list[int], pad: bool, most: int | None, taken: Any, room: int | None
) -> None:
    """Neither by the answer nor by the best list nor by the leaner one, whether graphs take the same or not.

    Refused is only what cannot be: the one bucket that must be there takes more than there is.
    """
    ask = {"pad": pad, "max_buckets": most, "graph_bytes": taken, "max_bytes": room}
    try:
        found = advise(dispatched(calls, today, pad), **ask, **TIMED)
    except ConfigError as error:
        assert re.search(r"the bucket \d+ must be there, and takes", str(error))
        return
    by_size = taken if isinstance(taken, Mapping) else {0: taken}
    named = [n for size, n in by_size.items() if size]
    other = by_size.get(0, sum(named) / max(1, len(named)))
    lists = [found.buckets, found.best.buckets, *([found.leaner.buckets] if found.leaner else [])]
    for buckets in lists:
        assert len(buckets) <= (most or 64 + len(today))
        assert sum(by_size.get(n, other) for n in buckets) <= (room or 10**9) * (1 + 1e-9)
    assert (found.best.bytes or 0) <= (room or 10**9)


def test_a_limit_of_bytes_is_met_by_fewer_graphs_that_are_the_best_of_their_number() -> None:
    """Eight graphs of 100 bytes, and room for 350: the best three, found without a search."""
    calls = dict.fromkeys(range(1, 65), 1000)
    free = advise(dispatched(calls, range(8, 65, 8), True), **TIMED)
    tight = advise(dispatched(calls, range(8, 65, 8), True), graph_bytes=100, max_bytes=350, **TIMED)
    assert (3, 0.0) == (tight.best.graphs, tight.gap)
    assert next(plan for plan in free.frontier if plan.graphs == 3).buckets == tight.best.buckets


def test_within_a_limit_that_does_not_bind_the_fewest_graphs_are_taken() -> None:
    """Room alone is no reason to use it."""
    calls = dict.fromkeys(range(1, 65), 1000)
    free = advise(dispatched(calls, range(8, 65, 8), True), **TIMED)
    roomy = advise(dispatched(calls, range(8, 65, 8), True), graph_bytes={1: 100, 0: 90}, max_bytes=10**9, **TIMED)
    assert free.best.buckets == roomy.best.buckets
    assert free.best.graphs < free.frontier[-1].graphs


def test_where_one_graph_is_too_dear_the_fewest_others_are_taken_still() -> None:
    """A list found within limits is held against the best of each number that keeps them, as without limits."""
    calls = dict.fromkeys(range(1, 65), 1000)
    free = advise(dispatched(calls, range(8, 65, 8), True), **TIMED)
    for bucket in free.best.buckets[:-1]:
        found = advise(
            dispatched(calls, range(8, 65, 8), True), graph_bytes={bucket: 1000, 0: 1}, max_bytes=999, **TIMED
        )
        assert bucket not in found.best.buckets
        assert found.best.graphs <= free.best.graphs + 3
        assert found.best.seconds <= free.frontier[-1].seconds * (1 + 2 * TOLERANCE)


def test_room_for_more_than_sixty_four_graphs_is_no_reason_for_them() -> None:
    """The best 64 take too much, and 80 small ones would not: nobody asked for a number, and 64 are the most."""
    calls = {n: 100_000 + 2000 * n for n in range(1, 121)}
    room = {"graph_bytes": {n: n * n for n in range(1, 121)}, "max_bytes": 190_000}
    found = advise(dispatched(calls, [120], False), **room, **TIMED)
    assert 190_000 >= (found.best.bytes or 0)
    assert 60 <= found.best.graphs <= 64


def test_a_limit_on_seconds_counts_each_graphs_own() -> None:
    """Capture seconds by size: the large ones are dear, and cannot all be there."""
    calls = {8: 5000, 16: 5000, 32: 5000, 64: 5000}
    dear = {8: 1.0, 16: 2.0, 32: 4.0, 64: 8.0}
    found = advise(dispatched(calls, [8, 16, 32, 64], False), capture_seconds=dear, max_capture_seconds=11.5, **TIMED)
    assert (8, 16, 64) == found.best.buckets
    assert (11.0, 15.0) == (found.best.capture_seconds, found.now and found.now.capture_seconds)


# -- shared memory ----------------------------------------------------------------------------------------------------


def test_dropping_the_largest_graph_does_not_give_back_the_pool() -> None:
    """The first capture made the pool grow, and the next largest would: measured growth of one is no saving."""
    pool = {"pool_growth": {8: 1 << 20, 16: 1 << 20, 32: 150 << 20}}
    snapshot = seen({(16, 16): 7000, (8, 8): 3000}, {}, (8, 16, 32), **pool)
    found = advise(snapshot, **TIMED)
    assert found.now is not None
    assert found.leaner is not None
    assert (152 << 20, (8, 16), 151 << 20) == (found.now.bytes, found.leaner.buckets, found.leaner.bytes)
    text = re.sub(r"\s+", " ", str(found))
    assert "graph memory as measured, by which the pool grew: the largest graph of any list" in text
    assert "captured and never replayed in 10,000 calls: 32 (1.0 MiB)" in text
    given_so = advise(snapshot, graph_bytes={8: 1 << 20, 16: 1 << 20, 32: 150 << 20}, **TIMED)
    assert given_so.leaner is not None
    assert 2 << 20 == given_so.leaner.bytes
    assert "graph memory as given" in str(given_so)


def test_the_memory_of_a_larger_top_is_no_less_than_that_of_todays() -> None:
    """A maximum is declared that was never captured: it is taken to need what the largest one did."""
    pool = {"pool_growth": {4: 0, 8: 100 << 20}}
    found = advise(seen({(8, 8): 5000}, {}, (4, 8), **pool), max_batch=64, pad=True, **TIMED)
    assert 64 in found.best.buckets
    assert 100 << 20 == found.best.bytes


# -- it says no -------------------------------------------------------------------------------------------------------


def article(calls: int = 4250) -> Any:
    """An engine with {1,2,4,8,16}: 2,609 calls by graph, and 1,641 at batch 3 eagerly; or as many in that ratio."""
    missed = calls * 1641 // 4250
    each = (calls - missed) // 5
    rest = calls - missed - 4 * each
    return seen(
        {(1, 1): rest, **{(n, n): each for n in (2, 4, 8, 16)}}, {(3, "no_exact_bucket"): missed}, (1, 2, 4, 8, 16)
    )


def test_a_gain_below_the_threshold_is_no_reason_to_change() -> None:
    """The same question with a lower threshold is one; the text has the gain and the threshold."""
    calls = dict.fromkeys(range(1, 33), 2_000_000)
    snapshot = dispatched(calls, range(4, 33, 4), True)
    found = advise(snapshot, **TIMED)
    assert found.gain is not None
    assert 0 < found.gain < 0.02
    assert (True, found.now and found.now.buckets) == (found.keep, found.buckets)
    assert re.fullmatch(r"the best list saves 0\.\d+ % of the time per call, less than 2 %", found.why)
    lower = advise(snapshot, threshold=found.gain / 4, **TIMED)
    assert (False, lower.best.buckets) == (lower.keep, lower.buckets)


def test_a_list_that_is_the_best_is_kept() -> None:
    """And it says that nothing is saved, not that 1e-16 is."""
    found = advise(dispatched({4: 3000, 8: 2000}, [4, 8], False), **TIMED)
    assert (True, 0.0, "the best list saves nothing, less than 2 %") == (found.keep, found.gain, found.why)


def test_a_list_that_takes_as_long_saves_nothing_whatever_rounding_says() -> None:
    """Padding is free here: any two lists take the same, but for the sixteenth digit of their sums."""
    draw = random.Random(1)
    for _ in range(30):
        calls = {n: draw.randint(1000, 9999) for n in range(1, 41)}
        seconds = draw.uniform(5e-3, 20e-3)
        ask = {"times": {1: seconds, 64: seconds}, "eager_times": {1: 4 * seconds}, "threshold": 0.0}
        found = advise(dispatched(calls, [*draw.sample(range(1, 40), 4), 40], True), **ask)
        assert (0.0, 1) == (found.gain, found.best.graphs)


@pytest.mark.parametrize(("calls", "keep"), [(LEAST_CALLS - 1, True), (LEAST_CALLS, False)])
def test_below_a_thousand_calls_nothing_is_changed(calls: int, keep: bool) -> None:
    """However large the gain; the number of calls is told."""
    found = advise(article(calls), **TIMED)
    assert keep is found.keep
    assert ("999 calls are too few to judge by, 1,000 are the least" in found.why) is keep
    assert 3 in found.best.buckets


@pytest.mark.parametrize("pad", [True, False], ids=["padded", "exact"])
def test_how_sure_it_is_does_not_hang_on_where_sizes_begin(pad: bool) -> None:
    """32 sizes of about a thousand calls each: whether they fill stretches of a thousand exactly is an accident."""
    sure = [
        advise(dispatched(dict.fromkeys(range(1, 33), n), [1, 32], pad), pad=pad, **TIMED).confidence
        for n in (900, 1000, 1100)
    ]
    assert min(sure) > 0.9


def test_a_gain_that_is_not_sure_is_no_reason_to_change() -> None:
    """Four bursts, each of another size: a list that serves these four may serve none of the next."""
    found = advise(dispatched({3: 500, 7: 500, 11: 500, 19: 500}, [1, 2, 4, 8, 16, 32], False), **TIMED)
    assert found.gain is not None
    assert found.gain > 0.5
    assert (True, True) == (found.keep, found.confidence < 0.5)
    assert re.search(
        r"% less time per call, but only \d+ % sure of 2 %, not 90; look again after more traffic", found.why
    )


def test_the_same_bursts_seen_again_and_again_are_sure() -> None:
    """Ten times as much of the same traffic is a reason."""
    found = advise(dispatched({3: 5000, 7: 5000, 11: 5000, 19: 5000}, [1, 2, 4, 8, 16, 32], False), **TIMED)
    assert (False, True) == (found.keep, found.confidence > SURE)


def test_without_a_list_of_today_nothing_can_be_kept() -> None:
    """A list is proposed, with neither gain nor confidence; after a short look it is not sure."""
    eager = {(n, "unknown"): 1000 for n in (3, 5, 7)}
    found = advise(seen({}, eager), **TIMED)
    assert (False, None, 0.0, (3, 5, 7)) == (found.keep, found.gain, found.confidence, found.buckets)
    assert "today's list is not known" in found.why
    thin = advise(seen({}, {(3, "unknown"): 5}), **TIMED)
    assert (True, (3,)) == (thin.keep, thin.buckets)
    assert "not sure enough: 5 calls are too few" in str(thin)


def test_a_list_that_breaks_what_was_asked_is_changed_whatever_that_costs() -> None:
    """A declared maximum and limits are no matter of gain, nor of many calls; what it costs is told."""
    calls = dict.fromkeys(range(1, 65), 300)
    few = advise(dispatched(calls, range(8, 65, 8), True), max_buckets=4, **TIMED)
    assert (False, 4) == (few.keep, few.best.graphs)
    assert re.search(
        r"as it takes 8 graphs, more than 4 graphs; the best one that does takes \d\.\d % more time", few.why
    )
    short = advise(dispatched({4: 10}, [2, 4], True), max_batch=32, **TIMED)
    assert (False, 32) == (short.keep, short.buckets[-1])
    assert "does not hold the declared maximum of 32" in short.why
    assert "10 calls are too few" in short.why


# -- dropping ---------------------------------------------------------------------------------------------------------


def test_an_exact_list_keeps_what_a_short_look_did_not_need() -> None:
    """A size that lost its graph would run eagerly: nothing is dropped below 10,000 calls, then all of it."""
    short = advise(seen({(4, 4): 5000}, {(3, "no_exact_bucket"): 4999}, (1, 2, 4, 8)), **TIMED)
    long = advise(seen({(4, 4): 5000}, {(3, "no_exact_bucket"): 5000}, (1, 2, 4, 8)), **TIMED)
    assert ((1, 2, 3, 4, 8), (3, 4)) == (short.best.buckets, long.best.buckets)


def test_a_limit_goes_before_what_a_short_look_would_keep() -> None:
    """Three graphs are asked for, and three there are."""
    found = advise(seen({(4, 4): 5000}, {(3, "no_exact_bucket"): 4999}, (1, 2, 4, 8)), max_buckets=3, **TIMED)
    assert (3, 4, 8) == found.best.buckets


@pytest.mark.parametrize(("calls", "leaner"), [(9_999, None), (10_000, (8, 16))])
def test_an_idle_graph_is_dropped_after_ten_thousand_calls(calls: int, leaner: tuple[int, ...] | None) -> None:
    """Not before, and today's list is kept beside; an idle top counts as idle too."""
    found = advise(seen({(16, 16): calls - 3000, (8, 8): 3000}, {}, (8, 16, 32)), **TIMED)
    assert (True, (8, 16, 32)) == (found.keep, found.buckets)
    assert leaner == (found.leaner and found.leaner.buckets)


@pytest.mark.parametrize(("calls", "leaner"), [(9_999, None), (10_000, (8, 16))])
def test_an_idle_graph_in_the_middle_is_dropped_no_sooner(calls: int, leaner: tuple[int, ...] | None) -> None:
    """A batch of 12 may still come."""
    found = advise(seen({(16, 16): calls - 3000, (8, 8): 3000}, {}, (8, 12, 16)), **TIMED)
    assert leaner == (found.leaner and found.leaner.buckets)


def test_a_padded_top_that_was_needed_is_not_idle() -> None:
    """Nothing was replayed while graphs were off, but 20 rows would have taken the bucket of 32."""
    off = {(20, "disabled"): 6000, (8, "disabled"): 6000}
    assert 32 == advise(seen({}, off, (8, 16, 32)), pad=True, **TIMED).best.buckets[-1]
    assert 20 == advise(seen({}, off, (8, 16, 32)), pad=False, **TIMED).best.buckets[-1]
    assert 16 == advise(seen({}, {(16, "disabled"): 12_000}, (8, 16, 32)), pad=True, **TIMED).best.buckets[-1]


def test_the_leaner_list_is_as_fast_and_within_all_limits() -> None:
    """Fewer graphs, no more time, no more bytes than there may be; none is named where today's list must go."""
    calls = {**dict.fromkeys(range(1, 65), 10), 13: 10_000, 41: 10_000}
    today = range(4, 65, 4)
    found = advise(
        dispatched(calls, today, True), graph_bytes={0: 10, 64: 100}, max_bytes=10_000, threshold=0.5, **TIMED
    )
    assert found.now is not None
    assert found.leaner is not None
    assert found.leaner.graphs < found.now.graphs
    assert found.leaner.seconds <= found.now.seconds * (1 + 1e-9)
    changed = advise(dispatched(calls, today, True), max_buckets=3, **TIMED)
    assert changed.leaner is None


# -- prices -----------------------------------------------------------------------------------------------------------


def test_a_price_of_captures_is_weighed_against_time() -> None:
    """Started anew every 1,000 calls an engine can afford fewer graphs than one that serves a million between."""
    snapshot = dispatched(dict.fromkeys(range(1, 65), 1000), [64], True)
    often, seldom = (
        advise(snapshot, capture_seconds=0.4, calls_per_start=calls, **TIMED).best for calls in (1_000, 1_000_000)
    )
    assert often.graphs < seldom.graphs
    assert often.seconds > seldom.seconds


def test_a_change_that_pays_in_memory_alone_is_one() -> None:
    """Sixty-four graphs of a GiB, of which each is worth a tenth of a percent of the time: fewer are better."""
    snapshot = dispatched(dict.fromkeys(range(1, 65), 1000), range(1, 65), True)
    free = advise(snapshot, pad=True, graph_bytes=2**30, **TIMED)
    priced = advise(snapshot, pad=True, graph_bytes=2**30, gib_worth=0.001, **TIMED)
    assert free.keep
    assert (False, True) == (priced.keep, priced.best.graphs < 32)
    assert "less time per call, prices included" in priced.why
    assert priced.now is not None
    assert priced.best.seconds > priced.now.seconds


@pytest.mark.parametrize(
    ("ask", "give"),
    [
        ({"max_bytes": 10}, "graph_bytes"),
        ({"gib_worth": 0.01}, "graph_bytes"),
        ({"max_capture_seconds": 10}, "capture_seconds"),
        ({"calls_per_start": 10}, "capture_seconds"),
    ],
)
def test_a_limit_on_what_is_not_known_is_refused(ask: dict[str, Any], give: str) -> None:
    """It would be kept by chance; the message says what to give."""
    with pytest.raises(ConfigError, match=f"needs to know what a graph takes.*give {give}"):
        advise(article(), **ask)


# -- how sure it is ---------------------------------------------------------------------------------------------------

TODAY = (1, 2, 4, 8, 16, 24)
STEPS = steps({}, {}, GRAPH, EAGER)


def independent(draw: random.Random, shares: Sequence[float], calls: int) -> Counter[int]:
    return Counter(draw.choices(range(1, len(shares) + 1), shares, k=calls))


def bursts(draw: random.Random, shares: Sequence[float], calls: int, mean: float = 500) -> Counter[int]:
    """Each size stays for so many calls at the mean: integrated autocorrelation time twice that."""
    found: Counter[int] = Counter()
    while left := calls - found.total():
        size = draw.choices(range(1, len(shares) + 1), shares)[0]
        found[size] += min(left, max(1, round(draw.expovariate(1 / mean))))
    return found


def bound_holds(pad: bool, windows: int, calls: int, make: Callable[..., Counter[int]], trials: int) -> float:
    """How often the true gain of the advised list is at least the one of which the advice is 90 % sure."""
    draw, held = random.Random(7), 0
    for _ in range(trials):
        shares = [draw.gammavariate(0.5, 1) for _ in range(24)]
        parts = [make(draw, shares, calls) for _ in range(windows)]
        total = sum(parts, Counter())
        traffic = Traffic("d", "rows", TODAY, total, tuple(parts) if windows > 1 else (), pads=pad)
        question = case.Question(rule("graphprobe", pad=pad), TODAY)
        best = judge(traffic, question, STEPS).best.buckets
        found = confidence.estimate(case.Case(traffic, question, STEPS), TODAY, best)
        truth = dict(enumerate(shares, start=1))
        now, then = (reckoned(truth, buckets, pad, STEPS.graph, STEPS.eager)[0] for buckets in (TODAY, best))
        held += 1 - then / now >= found.gain - NormalDist().inv_cdf(0.9) * found.error
    return held / trials


@pytest.mark.parametrize("pad", [True, False], ids=["padded", "exact"])
def test_ninety_percent_sure_is_right_nine_times_of_ten(pad: bool) -> None:
    """For independent calls in windows of time, and for bursts that are shorter than a window."""
    assert 0.8 <= bound_holds(pad, 10, confidence.APART, independent, 100) <= 0.97
    assert 0.8 <= bound_holds(pad, 16, confidence.APART, bursts, 100) <= 0.98


@pytest.mark.parametrize("pad", [True, False], ids=["padded", "exact"])
def test_without_windows_it_is_on_the_safe_side(pad: bool) -> None:
    """Independent calls and short bursts are taken for longer ones, and those of 200 calls for what they are."""
    assert bound_holds(pad, 1, 8_000, independent, 60) >= 0.95
    assert bound_holds(pad, 1, 8_000, partial(bursts, mean=50), 60) >= 0.95
    assert bound_holds(pad, 1, 8_000, partial(bursts, mean=200), 100) >= 0.85


def walk(draw: random.Random, mean: float, calls: int, life: float = 500) -> Counter[int]:
    """A batch of as many requests as come and go: each lives so many calls, and so do the sizes that belong to it."""
    found: Counter[int] = Counter()
    size, rate = round(mean), mean / life
    while left := calls - found.total():
        change = rate + size / life
        found[max(1, size)] += min(left, max(1, round(draw.expovariate(change))))
        size += 1 if draw.random() < rate / change else -1
    return found


def poisson(mean: float) -> dict[int, float]:
    """The sizes that such a batch has in the long run."""
    shares = Counter[int]()
    for size in range(120):
        shares[max(1, size)] += math.exp(size * math.log(mean) - mean - math.lgamma(size + 1))
    return shares


@pytest.mark.parametrize(("pad", "calls", "least"), [(True, 20_000, 0.2), (False, 6_000, 0.8)], ids=["padded", "exact"])
def test_a_change_that_is_advised_gains_what_it_says_nine_times_of_ten(pad: bool, calls: int, least: float) -> None:
    """Of engines whose requests live 500 calls, looked at once; and it does not answer them all with a no."""
    draw, right = random.Random(3), []
    for _ in range(60):
        mean = draw.uniform(3, 25)
        found = advise(
            dispatched(walk(draw, mean, calls), (1, 2, 4, 8, 16, 32, 64), pad), pad=pad, max_batch=64, **TIMED
        )
        if not found.keep:
            lists = ((1, 2, 4, 8, 16, 32, 64), found.best.buckets)
            now, then = (reckoned(poisson(mean), one, pad, STEPS.graph, STEPS.eager)[0] for one in lists)
            right.append(1 - then / now >= found.threshold)
    assert len(right) >= 60 * least
    assert sum(right) >= 0.9 * len(right)


def test_short_windows_are_put_together() -> None:
    """A window as short as a burst says little of the next: what is left at the end goes to the last one."""
    windows = [{4: 3000}, {8: 999}, {8: 1}, {}, {2: 5000}, {16: 10}]
    assert [{4: 3000, 8: 1000}, {2: 5000, 16: 10}] == confidence.apart(windows)
    assert [] == confidence.apart([{4: 3999}])


def test_windows_that_differ_make_it_less_sure() -> None:
    """The same calls: spread evenly over the windows, or batch 3 in one of them only."""
    even = [{3: 300, 4: 3700} for _ in range(10)]
    once = [{3: 3000, 4: 1000}, *({4: 4000} for _ in range(9))]
    sure, unsure = (advise(windowed(parts, (4,), False), **TIMED) for parts in (even, once))
    assert sure.gain == pytest.approx(unsure.gain)
    assert (1.0, True) == (sure.confidence, unsure.confidence < 0.9)
    assert (False, True) == (sure.keep, unsure.keep)


def test_what_a_list_was_made_for_does_not_speak_for_it() -> None:
    """Each window has a size that no other has: each best list serves all that was seen, and none what comes."""
    windows = [{n: 4000} for n in range(10, 20)]
    found = advise(windowed(windows, (1, 64), False), **TIMED)
    assert (1.0, True) == (found.best.hit_rate, found.confidence < 0.5)


@pytest.mark.parametrize("windows", [0, 12])
def test_ranks_that_count_the_same_steps_make_nothing_surer(windows: int) -> None:
    """Eight ranks of one engine have eight times the calls and one engine's knowledge."""
    parts = [{3: 300, 5: 300, 9: 200}] * windows
    whole = dispatched({3: 300, 5: 300, 9: 200}, [1, 2, 4, 8, 16], True)
    one = windowed(parts, [1, 2, 4, 8, 16], True) if windows else Reading(whole)
    wide = [{size: 8 * n for size, n in part.items()} for part in parts]
    summed = dispatched({3: 2400, 5: 2400, 9: 1600}, [1, 2, 4, 8, 16], True)
    eight = windowed(wide, [1, 2, 4, 8, 16], True) if windows else Reading(summed)
    eight = replace(eight, processes={"decode": 8})
    steep = {"times": {1: 1e-3, 16: 16e-3}, "eager_times": {1: 30e-3}}
    found, ranks = advise(one, **steep), advise(eight, **steep)
    assert (found.do, found.confidence) == (ranks.do, pytest.approx(ranks.confidence))
    assert ("keep" if not windows else found.do) == ranks.do
    assert windows or "800 calls of each of 8 processes are too few" in ranks.why


# -- where graphs do not pay ------------------------------------------------------------------------------------------


def test_graphs_that_cost_time_are_told() -> None:
    """Who measured eager calls to be faster is told so, with the time."""
    found = advise(
        dispatched({9: 300, 16: 500}, [16, 32], True), times={1: 9e-3, 32: 20e-3}, eager_times={1: 8e-3, 32: 9e-3}
    )
    assert any(text.startswith("without any graph a call would take 8.") for text in found.warnings)
    assert not any("without any graph" in text for text in advise(article(), **TIMED).warnings)


@pytest.mark.parametrize("engine", ENGINES)
def test_where_no_graph_is_faster_than_any_that_is_the_answer(engine: str) -> None:
    """Nine times as fast without: no list is to be captured, and what is pasted switches graphs off."""
    slow = {"times": {1: 9e-3, 256: 20e-3}, "eager_times": {1: 1e-3}}
    found = advise(dispatched({4: 50_000}, [256], True), engine=engine, **slow)
    assert ("eager", False, (), 1e-3) == (found.do, found.keep, found.buckets, pytest.approx(found.expected_seconds))
    assert "run without graphs: a call takes 1 ms without any graph" in str(found)
    assert OFF[engine] == found.line
    assert OFF[engine] in str(found)
    assert "@graphprobe.capture(buckets" not in str(found)
    little = advise(dispatched({4: 50_000}, [4], True), engine=engine, times={4: 9e-3}, eager_times={1: 8.9e-3})
    assert (True, 4) == (little.keep, little.buckets[0])


def test_what_is_best_already_is_kept_whatever_the_threshold() -> None:
    """A threshold of nothing asks for any gain, and there is none."""
    found = advise(dispatched({3: 5000, 8: 5000}, [3, 8], True), threshold=0, **TIMED)
    assert ("keep", (3, 8)) == (found.do, found.buckets)
    assert "keep what you have: the best list saves nothing\n" in str(found)


def test_limits_that_cost_time_are_told_with_what_would_be_taken_without_them() -> None:
    """One graph for up to 4,096 rows, where four would do: that is no improvement, and is not called one."""
    found = advise(dispatched({3: 50_000}, [3], True), max_batch=4096, max_buckets=1)
    assert ("required", (4096,)) == (found.do, found.buckets)
    assert re.search(
        r"to keep what is asked, capture these: .* takes [\d.]+ times as long", " ".join(str(found).split())
    )
    told = next(text for text in found.warnings if text.startswith("to take at most 1 graph costs time"))
    assert re.search(r"without that \d graphs would take [\d.]+ ms per call, not [\d.]+$", told)
    roomy = advise(dispatched({3: 50_000}, [3], True), max_batch=4096, max_buckets=40)
    assert not any("costs time" in text for text in roomy.warnings)


def test_an_exact_list_at_the_cap_says_what_is_left_out() -> None:
    """Nobody asked for a number: the sizes beyond 64 are named, and how to have them."""
    eager = {(n, "no_exact_bucket"): 500 for n in range(1, 101)}
    found = advise(seen({}, eager), max_batch=100, **TIMED)
    assert 64 <= found.best.graphs <= 65
    assert f"{100 - found.best.graphs} other sizes that were seen run eagerly (see max_buckets)" in " ".join(
        found.notes
    )
    assert "with padding (pad=...): hit rate 100 %" in " ".join(found.notes)
    more = advise(seen({}, eager), max_batch=100, max_buckets=100, **TIMED)
    assert (100, True) == (more.best.graphs, "see max_buckets" not in " ".join(more.notes))


def test_a_guessed_time_is_compared_with_nothing() -> None:
    """Eager taken as 1.16 graph calls would make each padding of a quarter look worse than no graph at all."""
    found = advise(dispatched({9: 5000}, [64], True), times={1: 9e-3, 64: 30e-3}, max_buckets=1, max_batch=64)
    assert (found.eager_seconds, found.do == "eager") == (None, False)
    assert not any("without any graph" in text for text in found.warnings)


def test_a_list_that_lets_a_batch_grow_is_a_trap_and_is_told() -> None:
    """Between 16 and 256 nothing: 20 rows take the time of 256, and requests come in faster than that."""
    calls = dict.fromkeys(range(1, 17), 1000)
    found = advise(dispatched(calls, [4, 8, 16, 256], True), times={1: 9e-3, 256: 60e-3}, max_batch=256)
    trap = [text for text in found.warnings if "it would grow, and stay large" in text]
    assert [True] == [text.startswith("with today's list a batch of ") for text in trap]
    few = advise(dispatched(calls, [4, 8, 16, 256], True), times={1: 9e-3, 256: 60e-3}, max_batch=256, max_buckets=2)
    assert any(text.startswith("with the best list a batch of ") for text in few.warnings)


def test_the_best_list_has_no_trap_where_its_number_is_free() -> None:
    """The pace of the busiest is kept for all batches up to the declared maximum."""
    calls = dict.fromkeys(range(1, 17), 1000)
    found = advise(dispatched(calls, [4, 8, 16], True), times={1: 9e-3, 256: 60e-3}, max_batch=256)
    assert not any("with the best list" in text for text in found.warnings)
    assert found.best.buckets[-1] == 256


# -- what a second look found ------------------------------------------------------------------------------------------


def test_prices_count_where_graphs_are_held_against_eager_steps() -> None:
    """Graphs save 2 ms of 11 and their captures cost ten: then none is the answer."""
    found = advise(
        dispatched({3: 5000, 7: 2000}, [1, 2, 4, 8], True),
        times={1: 9e-3, 16: 10e-3},
        eager_times={1: 11e-3},
        capture_seconds=12,
        calls_per_start=1000,
    )
    assert ("eager", ()) == (found.do, found.buckets)


def test_a_list_that_breaks_a_limit_is_no_alternative_to_eager_steps() -> None:
    """The one graph that may be takes 40 ms and an eager step 30: today's five graphs are not allowed."""
    found = advise(
        dispatched({3: 5000, 64: 10}, [4, 8, 64], True),
        max_buckets=1,
        times={1: 9e-3, 64: 40e-3},
        eager_times={1: 30e-3},
    )
    assert ("eager", ()) == (found.do, found.buckets)


def test_the_cap_is_that_of_the_best_list_whatever_todays_is() -> None:
    """A hundred sizes and one graph today: 64 are proposed. With 70 graphs today two that fit need no such note."""
    eager = {(n, "no_exact_bucket"): 500 for n in range(2, 101)}
    capped = advise(seen({(1, 1): 500}, eager, [1]), max_batch=100, **TIMED)
    assert any("no more than 64 graphs are proposed" in note for note in capped.notes)
    many = advise(dispatched({70: 9000, 75: 9000}, range(1, 71), False), pad=False, **TIMED)
    assert not any("graphs are proposed" in note for note in many.notes)


def test_a_limit_that_an_engine_always_captures_is_in_todays_list() -> None:
    """LMDeploy has a graph of its largest batch, whichever way that is said."""
    calls = dispatched({3: 5000, 8: 5000}, [1, 2, 4, 8], True)
    found = [
        advise(calls, engine="lmdeploy", buckets=[1, 2, 4, 8], **said, **TIMED)
        for said in ({"max_seqs": 64}, {"largest": 64}, {"max_batch": 64})
    ]
    assert {(1, 2, 4, 8, 64)} == {one.now.buckets for one in found if one.now}
    assert 1 == len({one.do for one in found})
