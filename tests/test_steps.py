"""The seconds that advice reckons with: which are given, which measured, which modelled, and that this is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from graphprobe.errors import ConfigError
from graphprobe.snapshot import Times
from graphprobe.tools.steps import REFERENCE, REFERENCE_EAGER, SLOWDOWN, Steps, steps

MEASURED = Path(__file__).parent.parent / "docs" / "advice" / "steps_qwen3_8b.json"


def times(**seconds: tuple[int, float]) -> dict[int, Times]:
    """``_8=(100, 9e-3)``: a hundred samples of 9 ms at size 8."""
    return {int(name[1:]): Times(n, n * mean, ()) for name, (n, mean) in seconds.items()}


def told(found: Steps) -> str:
    return "\n".join(found.notes)


# -- the model --------------------------------------------------------------------------------------------------------


def measured(part: str) -> dict[int, float]:
    return {int(size): seconds for size, seconds in json.loads(MEASURED.read_text())[part].items()}


def test_the_model_is_what_was_measured() -> None:
    """Each of its points is the measured one to half a percent, and its lines pass all others by 6 % at most."""
    graph = measured("graph")
    assert {n: pytest.approx(graph[n], rel=5e-3) for n in REFERENCE.sizes} == REFERENCE.points
    assert {n: pytest.approx(seconds, rel=0.06) for n, seconds in graph.items()} == {n: REFERENCE(n) for n in graph}
    assert set(REFERENCE.sizes) <= set(graph)


def test_the_eager_model_is_what_was_measured() -> None:
    """Its ends are the measured ones, and the line is above none of the other sizes by more than 10 %.

    The slowest are above the line by half: the host decides on these, and advice must not rest on a slow one.
    """
    eager = measured("eager")
    assert {n: pytest.approx(eager[n], rel=5e-3) for n in REFERENCE_EAGER.sizes} == REFERENCE_EAGER.points
    assert all(REFERENCE_EAGER(n) <= 1.1 * seconds for n, seconds in eager.items())


def test_where_nothing_was_timed_the_model_says_that_it_is_one() -> None:
    """Both paths are the model's, and no word says that they are measured."""
    found = steps({}, {})
    assert (REFERENCE, REFERENCE_EAGER, False) == (found.graph, found.eager, found.guessed)
    assert "nothing was timed: both paths are modelled on the Qwen3-8B shape on an H200" in told(found)
    assert not re.search("measured|given", told(found))


# -- what is known goes before the model ------------------------------------------------------------------------------


def test_given_times_go_before_measured_ones() -> None:
    """On both paths, each by itself, and it is said whose they are."""
    graph, eager = times(_8=(100, 9e-3), _16=(20, 10e-3)), times(_9=(5, 30e-3))
    both = steps(graph, eager)
    assert ({8: pytest.approx(9e-3), 16: pytest.approx(10e-3)}, {9: pytest.approx(30e-3)}) == (
        both.graph.points,
        both.eager.points,
    )
    assert "graph times as measured (120 samples): 8: 9, 16: 10 ms" in told(both)
    assert "eager times as measured (5 samples): 9: 30 ms" in told(both)
    one = steps(graph, eager, times={1: 5e-3, 32: 7e-3})
    assert (5e-3, pytest.approx(30e-3)) == (one.graph(1), one.eager(9))
    assert "graph times as given: 1: 5, 32: 7 ms" in told(one)
    assert "eager times as measured" in told(one)
    other = steps(graph, eager, eager_times={1: 50e-3})
    assert (pytest.approx(9e-3), 50e-3) == (other.graph(8), other.eager(1))
    assert "graph times as measured" in told(other)
    assert "eager times as given: 1: 50 ms" in told(other)


def test_a_path_that_was_not_timed_is_guessed_from_the_other_and_that_is_said() -> None:
    """By what a published engine lost at its batch 3: 87.0 to 74.7 token/s."""
    assert pytest.approx(1.1647, abs=1e-4) == SLOWDOWN
    graph = steps(times(_8=(1, 9e-3), _16=(1, 10e-3)), {})
    assert pytest.approx(9e-3 * SLOWDOWN) == graph.eager(8)
    assert "no eager call was timed: taken as 1.16 times a graph call, a cautious figure" in told(graph)
    eager = steps({}, times(_8=(1, 30e-3), _16=(1, 31e-3)))
    assert pytest.approx(30e-3 / SLOWDOWN) == eager.graph(8)
    assert "no graph call was timed: taken as an eager one's time / 1.16, a cautious figure" in told(eager)
    assert graph.guessed
    assert eager.guessed
    assert not steps(times(_8=(1, 9e-3)), times(_8=(1, 9e-3))).guessed


@pytest.mark.parametrize("given", [True, False])
def test_one_known_size_gets_the_ratios_of_the_model(given: bool) -> None:
    """A flat line would make padding look free, and no advice would ever name a smaller bucket."""
    found = steps({}, {}, times={16: 20.2e-3}) if given else steps(times(_16=(7, 20.2e-3)), {})
    assert pytest.approx(20.2e-3) == found.graph(16)
    assert pytest.approx(2 * REFERENCE(1)) == found.graph(1)
    assert pytest.approx(2 * REFERENCE(100)) == found.graph(100)
    assert "known at one size only: a graph's at others have the ratios of the Qwen3-8B shape on an H200" in told(found)


def test_without_samples_a_size_is_not_known() -> None:
    """Nor where the sum cannot be a duration."""
    nothing = {1: Times(0, 0.0, ()), 2: Times(3, 0.0, ()), 4: Times(2, float("inf"), ()), 8: Times(2, float("nan"), ())}
    assert steps({}, {}) == steps(nothing, nothing)


# -- levelling --------------------------------------------------------------------------------------------------------


def test_a_measured_time_that_levelling_changed_is_told_with_both_values() -> None:
    """24 rows measured slower than 32: both get the mean of all samples, and the reader sees what was measured."""
    found = steps(times(_8=(100, 9e-3), _24=(10, 12e-3), _32=(30, 10e-3)), {})
    assert (9e-3, 10.5e-3, 10.5e-3) == pytest.approx((found.graph(8), found.graph(24), found.graph(32)))
    assert "graph times that fell with size were levelled: 24: 12 -> 10.5 ms, 32: 10 -> 10.5 ms" in told(found)


def test_small_changes_are_told_as_a_number_of_sizes() -> None:
    """A noise of 0.1 % is no news, and is not hidden either."""
    small = steps({}, {}, times={1: 9e-3, 2: 9.001e-3, 4: 9.0e-3, 8: 10e-3})
    assert "levelled: 2 by less than 0.5 %" in told(small)
    mixed = steps({}, {}, times={1: 9e-3, 2: 9.001e-3, 4: 9.0e-3, 8: 12e-3, 16: 11e-3})
    assert "levelled: 8: 12 -> 11.5 ms, 16: 11 -> 11.5 ms and 2 by less than 0.5 %" in told(mixed)


def test_many_changes_are_cut_short_and_counted() -> None:
    """Six are named."""
    found = steps({}, {}, times={n: (20 - n) * 1e-3 for n in range(1, 11)})
    line = next(note for note in found.notes if "levelled" in note)
    assert (6, " and 4 more") == (line.count("->"), line[-11:])


def test_times_that_rise_are_left_alone() -> None:
    """And nothing is said of levelling."""
    given = {1: 9e-3, 16: 10e-3, 32: 10e-3}
    found = steps({}, {}, given, given)
    assert given == found.graph.points
    assert "levelled" not in told(found)


# -- an eager call takes at least what a graph call takes -------------------------------------------------------------


def test_a_measured_eager_time_is_no_less_than_a_graphs() -> None:
    """It was measured at another size, and the same kernels run."""
    found = steps(times(_1=(1, 5e-3), _64=(1, 50e-3)), times(_2=(1, 20e-3)))
    assert [20e-3, pytest.approx(50e-3)] == found.eager_along([1, 64])


def test_a_given_eager_time_is_believed() -> None:
    """Who says that eager is faster gets advice on that."""
    assert [4e-3] == steps({}, {}, {1: 5e-3, 2: 5e-3}, {1: 4e-3}).eager_along([64])


# -- bad input --------------------------------------------------------------------------------------------------------

BAD: list[Any] = [
    {}, 5, True, "1: 9e-3", [9e-3], {1: 0}, {1: -1e-3}, {1: float("nan")}, {1: float("inf")}, {1: "9"}, {1: None},
    {1: True}, {0: 1e-3}, {-1: 1e-3}, {1.5: 1e-3}, {"1": 1e-3}, {None: 1e-3}, {1: 1e10}, {1: 10**400}, {1: 1e-12},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: repr(bad)[:30])
@pytest.mark.parametrize("name", ["times", "eager_times"])
def test_times_that_are_none_are_refused(name: str, bad: Any) -> None:
    """Whatever they are, with a message of ours; an empty mapping is not taken for nothing."""
    with pytest.raises(ConfigError):
        steps({}, {}, **{name: bad})


def test_a_bad_time_is_named() -> None:
    """Milliseconds given as seconds are no error that can be seen; an hour's worth of nanoseconds is."""
    with pytest.raises(
        ConfigError, match=r"eager_times: size 4 cannot take 9100000000 seconds. hint: 9.1e-3 is 9.1 ms"
    ):
        steps({}, {}, eager_times={4: 9_100_000_000})


def test_whole_seconds_are_seconds() -> None:
    """Integers are times, too."""
    assert 2.0 == steps({}, {}, {1: 1, 3: 3}).graph(2)
