"""The frontier, drawn: expected time per call against the number of graphs, with today's list and the proposal marked.

``bars`` draws it for a terminal, ``frontier`` into a file, with matplotlib (the extra ``graphprobe[plot]``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphprobe.buckets import as_size
from graphprobe.errors import ConfigError
from graphprobe.tools.picture import kind_of, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[int, float]
"""A number of graphs, and the expected time per call with that many."""

ROWS = 12
"""Numbers of graphs that ``bars`` shows; what is marked comes on top."""

LEAST = 0.01
"""Share above the best that the longest bar stands for, at least."""

# Told apart by shape and by darkness, so that grey print keeps them.
LINE, NOW, CHOSEN = "#4a6fa5", "#d9822b", "#1b2a41"


def frontier(
    points: Sequence[Point],
    path: str | os.PathLike[str],
    *,
    now: Point | None = None,
    chosen: Point | None = None,
    title: str = "",
    unit: str = "ms",
) -> None:
    """Draw ``points`` into ``path``, a .png, .svg or .html file that is overwritten; times are in ``unit``.

    ConfigError where there is nothing to draw, where the kind of file is another one, where it cannot be written, and
    where matplotlib is missing.
    """
    kind_of(path)
    known, marks = _checked(points), _marks(now, chosen)
    write(path, lambda: _figure(known, marks, title, unit), title or "Frontier")


def bars(
    points: Sequence[Point],
    *,
    now: Point | None = None,
    chosen: Point | None = None,
    unit: str = "ms",
    width: int = 40,
) -> str:
    """The same as lines of plain ASCII; a bar is the time above the best one, the longest ``width`` characters.

    It stands for one percent at least, so that differences of nothing look like nothing.
    """
    as_size(width, "width")
    marks = _marks(now, chosen)
    shown = sorted({*_thinned(_checked(points)), *marks.values()})
    best = min(time for _, time in shown)
    most = max(LEAST, *(time / best - 1 for _, time in shown))
    lines = [f"{'graphs':>6}  {unit:>9}  {'above best':>10}  (as a bar)"]
    for graphs, time in shown:
        named = ", ".join(name for name, mark in marks.items() if mark == (graphs, time))
        above = time / best - 1
        bar = "#" * round(width * above / most) + (f"  <- {named}" if named else "")
        lines.append(f"{graphs:>6}  {time:>9.4g}  {f'{100 * above:.1f} %':>10}  {bar}".rstrip())
    return "\n".join(lines)


def _checked(points: Sequence[Point], what: str = "points") -> list[Point]:
    checked = []
    for point in points:
        if not isinstance(point, (tuple, list)) or len(point) != 2:
            raise ConfigError(f"{what} must be pairs of (graphs, time), got {point!r}")
        graphs, time = point
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 < time < math.inf:
            raise ConfigError(f"{what}: the time with {graphs!r} graphs must be a number above 0, got {time!r}")
        checked.append((as_size(graphs, f"{what}: a number of graphs", least=0), float(time)))
    if not checked:
        raise ConfigError("there are no points to draw", "a frontier needs traffic and times")
    return sorted(checked)


def _marks(now: Point | None, chosen: Point | None) -> dict[str, Point]:
    given = {"now": now, "proposal": chosen}
    return {name: _checked([point], name)[0] for name, point in given.items() if point is not None}


def _thinned(points: list[Point]) -> list[Point]:
    """At most ``ROWS`` of the points, denser where there are few graphs."""
    if len(points) <= ROWS:
        return points
    last = len(points) - 1
    places = {round(last ** (i / (ROWS - 1))) if i else 0 for i in range(ROWS)}
    return [points[i] for i in sorted(places)]


def _figure(points: list[Point], marks: dict[str, Point], title: str, unit: str) -> Figure:
    from matplotlib.figure import Figure

    # Not through pyplot: no window, no state of the process.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    graphs, times = [n for n, _ in points], [time for _, time in points]
    axes.plot(graphs, times, color=LINE, marker="o", markersize=4, linewidth=1.5, label="best list of that many graphs")
    # The proposal is smaller and on top: both show where they are one point.
    looks = {"now": ("D", 11, NOW), "proposal": ("s", 7, CHOSEN)}
    for name, (count, time) in marks.items():
        shape, size, colour = looks[name]
        text = f"{name}: {count} graph{'' if count == 1 else 's'}, {time:.4g} {unit}"
        axes.plot([count], [time], shape, color=colour, markersize=size, markeredgecolor="black", label=text, zorder=3)
    _label(axes, [*graphs, *(count for count, _ in marks.values())], title, unit)
    return figure


def _label(axes: Axes, graphs: list[int], title: str, unit: str) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, ScalarFormatter

    if title:
        axes.set_title(title.replace("$", r"\$"))
    axes.set_xlabel("graphs (number of captured sizes)")
    axes.set_ylabel(f"expected time per call ({unit})".replace("$", r"\$"))
    if min(graphs) > 0 and max(graphs) >= 16:
        # The first graphs bring most, so they get the room.
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator([1 << i for i in range(max(graphs).bit_length())]))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif max(graphs) < 16:
        axes.xaxis.set_major_locator(FixedLocator(range(min(graphs), max(graphs) + 1)))
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
