"""The frontier as a file and as lines of a terminal."""

from __future__ import annotations

import re
import struct
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphprobe.errors import ConfigError
from graphprobe.tools.picture import KINDS
from graphprobe.tools.plot import ROWS, bars, frontier

POINTS = [(n, 14.0 + 9.0 / n) for n in range(1, 41)]
NOW, CHOSEN = (35, 15.25), (9, 15.0)

points = st.lists(st.tuples(st.integers(0, 2000), st.floats(1e-3, 1e3)), min_size=1, max_size=80)


@pytest.fixture
def matplotlib() -> Any:
    return pytest.importorskip("matplotlib", reason="needs the extra graphprobe[plot]")


# -- files -----------------------------------------------------------------------------------------------------------


def test_png(matplotlib: Any, tmp_path: Path) -> None:
    """A .png file is a PNG of readable size, not an empty one."""
    path = tmp_path / "frontier.PNG"
    frontier(POINTS, path, now=NOW, chosen=CHOSEN, title="decode")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert (1200, 675) == struct.unpack(">II", data[16:24])
    assert len(data) > 10_000


def test_svg_names_what_it_shows(matplotlib: Any, tmp_path: Path) -> None:
    """Axes have names and units, and both marks their numbers."""
    path = tmp_path / "frontier.svg"
    frontier(POINTS, str(path), now=NOW, chosen=CHOSEN, title="decode at $4 a <node>", unit="us")
    text = path.read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    # matplotlib writes each text as outlines, with the words in a comment before it.
    said = {comment.strip() for comment in re.findall(r"<!--(.*?)-->", text, re.DOTALL)}
    assert {"graphs (number of captured sizes)", "expected time per call (us)", "best list of that many graphs"} <= said
    assert {"now: 35 graphs, 15.25 us", "proposal: 9 graphs, 15 us"} <= said
    assert {"1", "2", "4", "8", "16", "32"} <= said
    assert any("node" in words for words in said)


def test_a_mark_without_the_other(matplotlib: Any, tmp_path: Path) -> None:
    """What is not known is not marked."""
    path = tmp_path / "frontier.svg"
    frontier(POINTS, path, chosen=(1, 23.0))
    text = path.read_text(encoding="utf-8")
    assert "proposal: 1 graph, 23 ms" in text
    assert "now:" not in text


def test_html(matplotlib: Any, tmp_path: Path) -> None:
    """A .html file is a page of its own, with the title as text and the picture in it."""
    path = tmp_path / "frontier.html"
    frontier(POINTS, path, now=NOW, title="<script>alert(1)</script> & more")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "<title>&lt;script&gt;alert(1)&lt;/script&gt; &amp; more</title>" in text
    assert 1 == text.count("<svg ")
    assert "<script" not in text
    assert "<?xml" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_same_figures_same_file(kind: str, matplotlib: Any, tmp_path: Path) -> None:
    """A second drawing of the same figures is the same file, and overwrites it."""
    path = tmp_path / f"frontier{kind}"
    frontier(POINTS, path, now=NOW)
    first = path.read_bytes()
    path.write_text("something else")
    frontier(POINTS[::-1], path, now=NOW)
    assert first == path.read_bytes()


@pytest.mark.parametrize(
    ("drawn", "now"),
    [([(1, 9.1)], None), ([(1, 9.1)], (0, 42.9)), ([(5, 1.0), (5, 1.0)], (5, 1.0)), ([(1, 9.1)], (67, 9.0))],
)
def test_few_points(drawn: list[Any], now: Any, matplotlib: Any, tmp_path: Path) -> None:
    """One point, no graphs at all and equal points can be drawn; numbers of graphs on the axis are whole."""
    path = tmp_path / "frontier.svg"
    frontier(drawn, path, now=now)
    axis = path.read_text(encoding="utf-8").split('id="matplotlib.axis_1"')[1].split('id="matplotlib.axis_2"')[0]
    ticks = [words.strip() for words in re.findall(r"<!--(.*?)-->", axis)]
    assert ticks
    assert all(tick.isdigit() or tick.startswith("graphs") for tick in ticks)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where matplotlib is missing the message says how to get it, and nothing is written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "frontier.png"
    with pytest.raises(ConfigError, match=r"pip install 'graphprobe\[plot\]'"):
        frontier(POINTS, path)
    assert not path.exists()


@pytest.mark.parametrize("name", ["frontier", "frontier.pdf", "png"])
def test_other_kinds_of_file(name: str, tmp_path: Path) -> None:
    """Another kind of file is refused with the kinds that are written."""
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.html"):
        frontier(POINTS, tmp_path / name)


def test_a_place_that_cannot_be_written(matplotlib: Any, tmp_path: Path) -> None:
    """A folder that is missing, and a folder in the file's place, are named."""
    with pytest.raises(ConfigError, match=r"cannot write .*missing"):
        frontier(POINTS, tmp_path / "missing" / "frontier.svg")
    (tmp_path / "frontier.svg").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        frontier(POINTS, tmp_path / "frontier.svg")


# -- lines -----------------------------------------------------------------------------------------------------------


def test_bars() -> None:
    """Each line has graphs, time, what it is above the best, in percent and as a bar; marks are named."""
    lines = bars([(1, 20.0), (2, 15.0), (4, 10.0)], now=(4, 12.5), chosen=(2, 15.0), width=20).splitlines()
    assert [
        "graphs         ms  above best  (as a bar)",
        "     1         20     100.0 %  ####################",
        "     2         15      50.0 %  ##########  <- proposal",
        "     4         10       0.0 %",
        "     4       12.5      25.0 %  #####  <- now",
    ] == lines


def test_lists_that_are_nearly_as_fast_can_be_told_apart() -> None:
    """A bar has the difference alone: of times within a few percent the longest is still a full one."""
    lines = bars([(1, 10.4), (2, 10.2), (3, 10.1), (4, 10.0)], width=40).splitlines()[1:]
    assert [40, 20, 10, 0] == [line.count("#") for line in lines]


def test_a_difference_of_nothing_is_no_bar() -> None:
    """A full bar is one percent at least."""
    lines = bars([(1, 10.005), (2, 10.0)], width=40).splitlines()[1:]
    assert [2, 0] == [line.count("#") for line in lines]
    assert not any("#" in line for line in bars([(1, 5.0), (2, 5.0)]).splitlines())


def test_one_point_with_both_marks() -> None:
    """A list that is kept is marked twice in one line."""
    assert "<- now, proposal" in bars([(1, 2.0), (2, 1.0)], now=(2, 1.0), chosen=(2, 1.0))


@given(points, st.integers(0, 80), st.integers(1, 100))
def test_bars_are_few_and_ascii(drawn: list[Any], place: int, width: int) -> None:
    """However many points there are, lines are few, ascending, and no bar is wider than asked."""
    mark = drawn[place % len(drawn)]
    text = bars(drawn, now=mark, chosen=drawn[0], width=width)
    lines = text.splitlines()[1:]
    assert text.isascii()
    assert len(lines) <= ROWS + 2
    graphs = [int(line.split()[0]) for line in lines]
    assert sorted(graphs) == graphs
    assert {min(n for n, _ in drawn), max(n for n, _ in drawn), mark[0]} <= set(graphs)
    lengths = {time: line.count("#") for line in lines for time in [float(line.split()[2])]}
    assert width >= max(lengths.values())
    assert sorted(lengths.values()) == [lengths[above] for above in sorted(lengths)]
    assert min(lengths.values()) == 0
    assert all(line == line.rstrip() for line in lines)
    assert any("0.0 %" in line for line in lines)
    assert sum("now" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"points": []}, "no points"),
        ({"points": [(1, 0.0)]}, "above 0, got 0.0"),
        ({"points": [(1, -1.0)]}, "got -1.0"),
        ({"points": [(1, float("nan"))]}, "got nan"),
        ({"points": [(1, float("inf"))]}, "got inf"),
        ({"points": [(1, True)]}, "got True"),
        ({"points": [(1, "9")]}, "got '9'"),
        ({"points": [(-1, 9.0)]}, "a number of graphs must be at least 0, got -1"),
        ({"points": [(1.5, 9.0)]}, "whole number, got 1.5"),
        ({"points": [(1, 2, 3)]}, "pairs"),
        ({"points": [5]}, "pairs"),
        ({"now": (1, None)}, "now"),
        ({"chosen": (None, 1.0)}, "proposal"),
    ],
)
def test_refused(wrong: dict[str, Any], named: str, tmp_path: Path) -> None:
    """What cannot be drawn is refused by both, with the value at fault."""
    arguments = {"points": POINTS, **wrong}
    with pytest.raises(ConfigError, match=named):
        bars(**arguments)
    with pytest.raises(ConfigError, match=named):
        frontier(path=tmp_path / "frontier.svg", **arguments)
