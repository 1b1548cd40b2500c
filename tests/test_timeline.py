"""Gaps of a device's timeline, from work that is known."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools.timeline import Gaps, Mark, Spread, Timeline, Work


def work(start: float, end: float, stream: int = 7, kind: str = "kernel", **more: Any) -> Work:
    return Work(start, end, stream, f"{kind}_{start}", kind, **more)


def gaps(*works: Work) -> Gaps:
    return Timeline(works).gaps()


def found(*works: Work) -> list[float]:
    return [gap for gap, _ in Timeline(works).between()]


def test_a_gap_is_from_the_end_of_a_kernel_to_the_next_start() -> None:
    result = gaps(work(100, 105), work(120, 124), work(124.5, 130))
    assert (3, 3, 30.0, 15.0 - 0.5) == (result.kernels, result.works, result.span_us, result.busy_us)
    assert result.gap_us is not None
    assert (7.75, 15.0, 15.5) == (result.gap_us.p50, result.gap_us.max, result.gap_us.total)
    assert pytest.approx(15.5 / 30) == result.idle_share


def test_copies_and_fills_are_work_but_no_kernels() -> None:
    result = gaps(work(0, 2), work(2, 8, kind="memcpy"), work(8, 9, kind="memset"), work(10, 11))
    assert (2, 4, 10.0) == (result.kernels, result.works, result.busy_us)


def test_work_that_overlaps_on_two_streams_leaves_no_gap() -> None:
    """Neither while both run, nor behind the shorter one."""
    works = [work(0, 100), work(10, 20, stream=8), work(50, 120, stream=9), work(130, 140, stream=8)]
    assert [10.0] == found(*works)
    assert 2 == gaps(*works).overlapping


def test_a_gap_is_counted_from_the_latest_end_whatever_started_last() -> None:
    """A kernel within a longer one does not end the device's work."""
    assert [3.0] == found(work(0, 50), work(5, 6, stream=8), work(53, 54, stream=8))


def test_streams_that_never_leave_the_device_alone_have_gaps_of_nothing() -> None:
    result = gaps(work(0, 10), work(5, 20, stream=8), work(15, 30))
    assert Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0) == result.gap_us
    assert (30.0, 0.0, 0.0) == (result.busy_us, result.idle_share, result.host_us or 0.0)
    assert "gaps: none" in str(result)


def test_jitter_within_a_stream_is_a_gap_of_0_never_a_negative_one() -> None:
    """In a stream work is ordered, so that an overlap is the clock's or a dependent launch's."""
    assert [0.0, 2.0] == found(work(0, 10), work(9.7, 15), work(17, 18))


def test_kernels_that_touch_have_a_gap_of_0() -> None:
    assert [0.0, 0.0] == found(work(0, 1), work(1, 2, stream=8), work(2, 3))


def test_the_order_in_which_work_is_given_means_nothing() -> None:
    works = [work(0, 5), work(20, 24), work(40, 41, stream=8), work(22, 30, stream=9)]
    assert gaps(*works) == gaps(*reversed(works))


WORKS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12), st.integers(1, 3)), min_size=1, max_size=25)


@given(WORKS)
def test_busy_time_is_the_union_of_all_work(drawn: list[tuple[int, int, int]]) -> None:
    """Against a count of the microseconds in which anything runs; gaps are what is left."""
    result = gaps(*(work(start, start + length, stream) for start, length, stream in drawn))
    ticks = {tick for start, length, _ in drawn for tick in range(start, start + length)}
    assert len(ticks) == result.busy_us
    first, last = min(start for start, _, _ in drawn), max(start + length for start, length, _ in drawn)
    assert last - first == result.span_us
    if result.gap_us is not None:
        assert result.gap_us.total == last - first - len(ticks)
        assert 0 <= result.gap_us.p50 <= result.gap_us.p90 <= result.gap_us.max
        assert len(drawn) - 1 == result.gap_us.count + result.overlapping


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40))
def test_percentiles_are_interpolated(values: list[float]) -> None:
    """The middle one is the median, and a tenth of the values is above the other."""
    spread = Spread.of(values)
    assert pytest.approx(statistics.median(values)) == spread.p50
    place = 0.9 * (len(values) - 1)
    low, high = sorted(values)[math.floor(place)], sorted(values)[math.ceil(place)]
    assert pytest.approx(low + (high - low) * (place - math.floor(place))) == spread.p90
    assert (max(values), pytest.approx(statistics.fmean(values))) == (spread.max, spread.mean)


def test_a_replay_is_one_launch_of_many_kernels() -> None:
    """Kernels with one correlation were launched at once; each without one counts for itself."""
    replay = [work(10 * i, 10 * i + 9.6, correlation=99) for i in range(50)]
    result = gaps(*replay, work(600, 601, correlation=100), work(610, 611), work(620, 621))
    assert (53, 4) == (result.kernels, result.launches)


def test_one_kernel_has_no_gap_and_not_one_of_0() -> None:
    result = gaps(work(3, 8))
    assert (None, None, 5.0, 0.0) == (result.gap_us, result.host_us, result.busy_us, result.idle_share)
    assert None is json.loads(result.to_json())["gap_us"]["p50"]
    assert "1 kernel from 1 launch" in str(result)


def test_a_kernel_of_no_length_alone() -> None:
    assert 0.0 == gaps(work(3, 3)).idle_share


@pytest.mark.parametrize("works", [(), (work(0, 1, kind="memcpy"), work(5, 6, kind="graph"))])
def test_without_kernels_there_is_no_figure(works: tuple[Work, ...]) -> None:
    with pytest.raises(SourceError, match="no kernel ran"):
        Timeline(works).gaps()


def test_the_host_is_blamed_for_the_part_of_a_gap_before_its_call() -> None:
    """A call within the gap splits it; an earlier one waited for the device; a later one cannot be."""
    works = [work(0, 10, launch_us=-5), work(30, 40, launch_us=25), work(45, 50, launch_us=20)]
    assert 15.0 == gaps(*works).host_us
    assert 15.0 + 10 == gaps(*works, work(60, 61, launch_us=62)).host_us


def test_the_host_is_not_blamed_where_a_launch_is_unknown() -> None:
    result = gaps(work(0, 10, launch_us=-5), work(30, 40))
    assert None is result.host_us
    assert "host" not in str(result)


def test_a_graph_recorded_as_a_whole_is_busy_time_and_said_to_hide_kernels() -> None:
    result = gaps(work(0, 1), work(2, 90, kind="graph"), work(91, 92))
    assert (2, 3, 90.0) == (result.kernels, result.works, result.busy_us)
    assert any("--cuda-graph-trace=node" in note for note in result.notes)


def test_json_has_the_promised_names() -> None:
    """Times to the nanosecond, notes as they are."""
    timeline = Timeline((work(0, 5 + 1 / 3, launch_us=-3), work(20, 24, launch_us=8)), ("as seen",))
    assert {
        "kernels": 2,
        "works": 2,
        "launches": 2,
        "span_us": 24.0,
        "busy_us": 9.333,
        "idle_share": 0.611111,
        "gap_us": {"count": 1, "p50": 14.667, "p90": 14.667, "max": 14.667, "mean": 14.667, "total": 14.667},
        "overlapping": 0,
        "host_us": 2.667,
        "notes": ["as seen"],
    } == json.loads(timeline.gaps().to_json())


def test_text_tells_the_figures_and_the_notes() -> None:
    text = str(Timeline((work(0, 5, launch_us=-3), work(20, 24, launch_us=14)), ("as seen",)).gaps())
    assert text.isascii()
    assert [
        "2 kernels from 2 launches",
        "span 24.0 us, busy 9.0 us, idle 62.5 % of it",
        "gaps: median 15 us, 90 % up to 15, largest 15, mean 15",
        "60.0 % of the idle time had passed when the host called for what came next",
        "note: as seen",
    ] == text.splitlines()


MARKS = (Mark("ProfilerStep#1", 0, 100), Mark("ProfilerStep#2", 100, 200), Mark("decode", 20, 40), Mark("decode", 0, 5))


def marked() -> Timeline:
    """Two steps; the device runs behind the host, so the first one's last kernel ends in the second."""
    first = [work(50, 60, launch_us=10), work(110, 120, launch_us=30)]
    second = [work(125, 130, launch_us=105), work(190, 230, launch_us=199.5)]
    return Timeline((*first, *second), marks=MARKS)


@pytest.mark.parametrize(("step", "starts"), [(1, [50, 110]), ("1", [50, 110]), (2, [125, 190]), ("decode", [110])])
def test_a_step_is_what_was_launched_in_it(step: int | str, starts: list[float]) -> None:
    """Wherever the device ran it; of ranges of one name it is the last in time."""
    assert starts == [one.start_us for one in marked().within(step).works]


def test_a_step_says_what_was_guessed() -> None:
    """Several ranges of one name, and work that is placed by its own start."""
    assert ("2 ranges are named decode: this is the last",) == marked().within("decode").notes
    unknown = Timeline((work(10, 20), work(150, 160)), marks=MARKS)
    assert [10] == [one.start_us for one in unknown.within(1).works]
    assert "1 of 1 pieces of work are here by their start" in unknown.within(1).notes[0]


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (3, "nothing is marked 'ProfilerStep#3'. hint: marked are: ProfilerStep#1, decode, ProfilerStep#2"),
        ("prefill", "nothing is marked 'prefill'"),
        ("", "nothing is marked ''"),
        (-1, "nothing is marked '-1'"),
    ],
)
def test_a_step_that_is_not_there(step: int | str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        marked().within(step)


def test_a_step_without_work_is_no_empty_timeline() -> None:
    timeline = Timeline((work(150, 160, launch_us=150),), marks=MARKS)
    with pytest.raises(ConfigError, match="no work was launched in 'ProfilerStep#1'"):
        timeline.within(1)


def test_a_timeline_without_marks_says_so() -> None:
    with pytest.raises(ConfigError, match="marked are: none"):
        Timeline((work(0, 1),)).within(1)


@pytest.mark.parametrize(
    "wrong",
    [{"end_us": -1.0}, {"start_us": math.nan}, {"end_us": math.inf}, {"start_us": -math.inf}, {"kind": "cpu_op"}],
)
def test_what_cannot_be_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="work"):
        Work(**{"start_us": 0.0, "end_us": 1.0, "stream": 7, "name": "k", "kind": "kernel", **wrong})
