"""Which list of buckets is today's, of infos that were seen at different times."""

from __future__ import annotations

from typing import Any

from graphprobe.tools.infos import ALIVE, Point, newest


def seen(part: int, at: float, buckets: str, instance: str = "a", forward: str = "decode") -> Point:
    labels: dict[str, Any] = {"__name__": "graphprobe_forward_info", "forward": forward, "buckets": buckets}
    return {**labels, "unit": "rows", "instance": instance}, part, at


def lists(*points: Point) -> dict[str, float]:
    """Buckets -> how many processes have them today."""
    return {one.labels["buckets"]: one.value for one in newest(points)[0]}


def test_of_two_lists_of_one_process_the_newer_is_todays() -> None:
    """A restart in the last part: both lists are in it."""
    points = (seen(3, 1000.0, "1,2,3"), seen(3, 1060.0, "1,2,4"))
    assert {"1,2,4": 1} == lists(*points) == lists(*reversed(points))


def test_each_process_has_one_vote_however_often_it_is_scraped() -> None:
    """One every five seconds, three every minute: those three were seen a while before, and live."""
    assert {"A": 1, "B": 3} == lists(seen(0, 1000, "A"), *(seen(0, 950, "B", name) for name in "bcd"))


def test_a_process_that_is_over_has_none() -> None:
    """An old replica was seen last long before those that replaced it."""
    assert {"B": 1} == lists(seen(0, 1000, "A"), seen(0, 1000 + ALIVE + 1, "B", "b"))


def test_a_forward_that_has_ended_has_the_list_that_it_had() -> None:
    """Its last part is long before that of others."""
    assert {"A": 1, "B": 1} == lists(seen(0, 1000, "A", forward="draft"), seen(9, 9000, "B"))


def test_processes_are_the_most_that_any_part_had() -> None:
    """Four ranks until a while ago, then one: their calls are in the window."""
    found = newest(
        [*(seen(0, 1000, "A", name) for name in "abcd"), seen(1, 2000, "A"), seen(1, 2000, "A", "b", "draft")]
    )
    assert {"decode": 4, "draft": 1} == found[1]


def test_nothing_seen_is_nothing() -> None:
    assert ([], {}) == newest([])
