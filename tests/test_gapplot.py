"""Timelines and their gaps as a file."""

from __future__ import annotations

import re
import struct
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools.gapplot import KERNELS, timelines
from graphprobe.tools.picture import KINDS
from graphprobe.tools.timeline import Timeline, Work


def even(gap: float, count: int = 100, length: float = 5.0, kind: str = "kernel") -> Timeline:
    starts = [i * (length + gap) for i in range(count)]
    return Timeline(tuple(Work(at, at + length, 7, "k", kind, i + 1) for i, at in enumerate(starts)))


BOTH = {"eager": even(15.0), "graph": even(0.4)}


@pytest.fixture
def matplotlib() -> Any:
    return pytest.importorskip("matplotlib", reason="needs the extra graphprobe[plot]")


def said(path: Path) -> set[str]:
    """The words in a picture: matplotlib writes each text as outlines, with the words in a comment before it."""
    return {words.strip() for words in re.findall(r"<!--(.*?)-->", path.read_text(encoding="utf-8"), re.DOTALL)}


def test_png(matplotlib: Any, tmp_path: Path) -> None:
    """A .png file is a PNG of readable size, not an empty one."""
    path = tmp_path / "gaps.PNG"
    timelines(BOTH, path, title="decode, batch 1")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert (1350, 870) == struct.unpack(">II", data[16:24])
    assert len(data) > 10_000


def test_svg_names_what_it_shows(matplotlib: Any, tmp_path: Path) -> None:
    """Each timeline has its name, its median and its idle share; axes have names and units."""
    path = tmp_path / "gaps.svg"
    timelines(BOTH, str(path), title="decode at $4 a <node>")
    assert ElementTree.fromstring(path.read_text(encoding="utf-8")).tag.endswith("svg")
    words = said(path)
    assert "eager: median gap 15 us, 100 kernels, 75 % idle" in words
    assert "graph: median gap 0.4 us, 100 kernels, 7 % idle" in words
    assert {
        "eager",
        "graph",
        "stream 7",
        f"time (us): the first {KERNELS} pieces of work",
        "share of gaps (%)",
    } <= words
    assert any("node" in each for each in words)


def test_both_timelines_have_one_scale_of_time(matplotlib: Any, tmp_path: Path) -> None:
    """As many pieces of work of both, so that the graph's end where the eager ones have hardly begun."""
    path = tmp_path / "gaps.svg"
    timelines(BOTH, path)
    text = path.read_text(encoding="utf-8")
    rows = []
    for part in text.split('<g id="axes_')[1:3]:
        rows.append(
            [
                float(at)
                for at in re.findall(r'<path d="M ([\d.]+) [\d.]+ \n?L ', part.split('id="matplotlib.axis_1"')[0])
            ]
        )
    eager, graph = (sorted(row)[-KERNELS:] for row in rows)
    assert KERNELS == len(eager) == len(graph)
    assert (eager[-1] - eager[0]) / (graph[-1] - graph[0]) == pytest.approx(20 / 5.4, rel=0.01)


def test_streams_have_lanes_of_their_own(matplotlib: Any, tmp_path: Path) -> None:
    path = tmp_path / "gaps.svg"
    works = [Work(i, i + 3, 7 + i % 2, "k", "kernel") for i in range(10)]
    timelines({"side by side": Timeline(tuple(works))}, path)
    assert {"stream 7", "stream 8", "side by side: median gap 0 us, 10 kernels, 0 % idle"} <= said(path)


def test_html(matplotlib: Any, tmp_path: Path) -> None:
    """A .html file is a page of its own, with the title as text and the picture in it."""
    path = tmp_path / "gaps.html"
    timelines({"<b>eager</b>": BOTH["eager"]}, path, title="<script>alert(1)</script> & more")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "<title>&lt;script&gt;alert(1)&lt;/script&gt; &amp; more</title>" in text
    assert 1 == text.count("<svg ")
    assert "<script" not in text
    assert "<b>" not in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("kind", KINDS)
def test_same_timelines_same_file(kind: str, matplotlib: Any, tmp_path: Path) -> None:
    """A second drawing is the same file, and overwrites it."""
    path = tmp_path / f"gaps{kind}"
    timelines(BOTH, path)
    first = path.read_bytes()
    path.write_text("something else")
    timelines(BOTH, path)
    assert first == path.read_bytes()


@pytest.mark.parametrize(
    ("works", "words"),
    [
        ([Work(5, 8, 7, "k", "kernel")], "x: no gap, 1 kernel, 0 % idle"),
        ([Work(5, 5, 7, "k", "kernel")], "x: no gap, 1 kernel, 0 % idle"),
        ([Work(0, 1, 7, "k", "kernel"), Work(1, 2, 7, "k", "kernel")], "x: median gap 0 us, 2 kernels, 0 % idle"),
        (
            [Work(0, 1, 7, "k", "kernel"), Work(1e6, 1e6 + 1, 7, "k", "memcpy")],
            "x: median gap 1e+06 us, 1 kernel, 100 % idle",
        ),
    ],
)
def test_little_work(works: list[Work], words: str, matplotlib: Any, tmp_path: Path) -> None:
    """One kernel, none of any length, gaps of 0 on a logarithmic axis, and a gap of a second."""
    path = tmp_path / "gaps.svg"
    timelines({"x": Timeline(tuple(works))}, path)
    assert words in said(path)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where matplotlib is missing the message says how to get it, and nothing is written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'graphprobe\[plot\]'"):
        timelines(BOTH, tmp_path / "gaps.png")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gaps", "gaps.pdf", "png"])
def test_other_kinds_of_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.html"):
        timelines(BOTH, tmp_path / name)


def test_a_place_that_cannot_be_written(matplotlib: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*missing.*: No such file"):
        timelines(BOTH, tmp_path / "missing" / "gaps.svg")


@pytest.mark.parametrize("count", [0, 5])
def test_no_timelines_and_too_many(count: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{count} timelines cannot be drawn"):
        timelines({str(i): BOTH["eager"] for i in range(count)}, tmp_path / "gaps.svg")


def test_a_timeline_without_kernels_is_not_drawn(tmp_path: Path) -> None:
    path = tmp_path / "gaps.svg"
    for empty in (Timeline(()), even(1.0, kind="memcpy")):
        with pytest.raises(SourceError, match="no kernel ran"):
            timelines({"eager": BOTH["eager"], "graph": empty}, path)
    assert not path.exists()
