from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphprobe.errors import ConfigError
from graphprobe.tools.times import Curve


def test_between_known_sizes_it_is_a_line() -> None:
    curve = Curve({16: 20e-3, 4: 8e-3})
    assert [pytest.approx(8e-3), pytest.approx(14e-3), pytest.approx(20e-3)] == curve.along([4, 10, 16])


def test_below_the_first_size_it_is_constant() -> None:
    assert 8e-3 == Curve({4: 8e-3, 16: 20e-3})(1)


def test_beyond_the_last_size_it_goes_on_from_about_half_of_it() -> None:
    """The last two points of a noisy measurement are no slope."""
    assert pytest.approx(64 + 32) == Curve({1: 1.0, 32: 32.0, 63: 64.0, 64: 64.0})(96)


def test_beyond_the_last_size_it_never_falls() -> None:
    assert 1.0 == Curve({8: 2.0, 16: 1.0})(64)


def test_one_known_size_is_a_constant() -> None:
    assert [3.0, 3.0] == Curve({8: 3.0}).along([1, 1000])


@pytest.mark.parametrize(
    "points", [{}, {1: 0.0}, {1: -1.0}, {1: math.nan}, {1: math.inf}, {0: 1.0}, {1: "1"}, {1: True}]
)
def test_what_is_no_time_is_refused(points: dict[int, float]) -> None:
    with pytest.raises(ConfigError, match="time"):
        Curve(points)


POINTS = st.dictionaries(st.integers(1, 60), st.integers(1, 9).map(float), min_size=1, max_size=5)


@given(POINTS, st.lists(st.integers(1, 4), min_size=5, max_size=5))
def test_rising_is_the_nearest_curve_that_never_falls(points: dict[int, float], weights: list[int]) -> None:
    """Against every non-decreasing curve on a grid of quarters: none has a smaller weighted squared distance."""
    samples = dict(zip(sorted(points), weights, strict=False))
    rising = Curve(points, samples).rising()
    sizes = rising.sizes
    assert all(rising.points[a] <= rising.points[b] for a, b in pairwise(sizes))

    def distance(values: list[float]) -> float:
        return sum(samples[n] * (v - points[n]) ** 2 for n, v in zip(sizes, values, strict=True))

    own = distance([rising.points[n] for n in sizes])
    grid = [x / 2 for x in range(2, 19)]
    if len(sizes) <= 3:
        for values in product(grid, repeat=len(sizes)):
            if all(a <= b for a, b in pairwise(values)):
                assert own <= distance(list(values)) + 1e-9
    assert rising.rising().points == pytest.approx(rising.points)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=8))
def test_a_curve_that_rises_is_left_alone(values: list[float]) -> None:
    points = dict(enumerate(sorted(values), start=1))
    assert points == Curve(points).rising().points
