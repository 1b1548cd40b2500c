"""Timelines drawn beside each other, eager against graph, and how long the gaps in them are.

matplotlib draws them (the extra ``graphprobe[plot]``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from graphprobe.errors import ConfigError
from graphprobe.tools.picture import kind_of, write
from graphprobe.tools.timeline import Timeline, Work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KERNELS = 60
"""Pieces of work that a timeline shows."""

MOST = 4
"""Timelines in one picture."""

SHORTEST = 0.01
"""Microseconds: shorter gaps, and those of 0, are drawn at the left edge, which a logarithmic axis has not."""

BINS = 40
COLOURS = ("#d9822b", "#4a6fa5", "#5b8c5a", "#7b5ea7")
COPY, INK = "#bbbbbb", "#1b2a41"


def timelines(drawn: Mapping[str, Timeline], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw up to four timelines by name, as ``{"eager": ..., "graph": ...}``, into a .png, .svg or .html file.

    Above, the first pieces of work of each on one scale of time, streams apart; below, how its gaps are distributed.
    The file is overwritten. ConfigError where it cannot be written or is of another kind, where there is nothing to
    draw, and where matplotlib is missing; SourceError for a timeline without kernels.
    """
    kind_of(path)
    if not 1 <= len(drawn) <= MOST:
        raise ConfigError(f"{len(drawn)} timelines cannot be drawn", f"give 1 to {MOST}")
    titles = {name: _title(name, timeline) for name, timeline in drawn.items()}
    write(path, lambda: _figure(drawn, titles, title), title or "Gaps")


def _title(name: str, timeline: Timeline) -> str:
    """What a timeline comes to, in a line."""
    found = timeline.gaps()
    gap = "no gap" if found.gap_us is None else f"median gap {found.gap_us.p50:.3g} us"
    kernels = f"{found.kernels:,} kernel{'' if found.kernels == 1 else 's'}"
    return f"{name}: {gap}, {kernels}, {100 * found.idle_share:.0f} % idle".replace("$", r"\$")


def _figure(drawn: Mapping[str, Timeline], titles: Mapping[str, str], title: str) -> Figure:
    from matplotlib.figure import Figure

    # Not through pyplot: no window, no state of the process.
    figure = Figure(figsize=(9, 3.2 + 1.3 * len(drawn)), dpi=150, layout="constrained")
    grid = figure.add_gridspec(len(drawn) + 1, 1, height_ratios=[*(1 for _ in drawn), 2])
    if title:
        figure.suptitle(title.replace("$", r"\$"))
    axes = None
    shown = {name: timeline.works[:KERNELS] for name, timeline in drawn.items()}
    longest = max(_length(works) for works in shown.values())
    for i, (name, works) in enumerate(shown.items()):
        axes = figure.add_subplot(grid[i], sharex=axes)
        _lanes(axes, works, COLOURS[i], longest)
        axes.set_title(titles[name], loc="left", fontsize="medium")
        axes.tick_params(labelbottom=i == len(drawn) - 1)
    if axes is not None:
        axes.set_xlabel(f"time (us): the first {KERNELS} pieces of work")
    _distributions(figure.add_subplot(grid[len(drawn)]), drawn)
    return figure


def _length(works: tuple[Work, ...]) -> float:
    return max(work.end_us for work in works) - works[0].start_us


def _lanes(axes: Axes, works: tuple[Work, ...], colour: str, longest: float) -> None:
    """One lane per stream, from the first start on."""
    streams = list(dict.fromkeys(work.stream for work in works))
    origin = works[0].start_us
    for lane, stream in enumerate(streams):
        own = [work for work in works if work.stream == stream]
        bars = [(work.start_us - origin, work.end_us - work.start_us) for work in own]
        colours = [COPY if work.kind in ("memcpy", "memset") else colour for work in own]
        axes.broken_barh(bars, (lane + 0.1, 0.8), facecolors=colours, edgecolors=INK, linewidth=0.3)
    axes.set_ylim(len(streams), 0)
    axes.set_yticks([lane + 0.5 for lane in range(len(streams))], [f"stream {stream}" for stream in streams])
    axes.set_xlim(0, longest * 1.01 or 1.0)
    axes.spines[["top", "right"]].set_visible(False)


def _distributions(axes: Axes, drawn: Mapping[str, Timeline]) -> None:
    gaps = {name: [max(gap, SHORTEST) for gap, _ in timeline.between()] for name, timeline in drawn.items()}
    every = [gap for each in gaps.values() for gap in each] or [SHORTEST]
    low, high = math.log10(min(every)) - 1e-3, math.log10(max(every)) + 1e-3
    edges = [10 ** (low + (high - low) * i / BINS) for i in range(BINS + 1)]
    for (name, each), colour in zip(gaps.items(), COLOURS, strict=False):
        if not each:
            continue
        weights = [100 / len(each)] * len(each)
        axes.hist(each, edges, weights=weights, color=colour, alpha=0.6, label=name.replace("$", r"\$"))
        axes.hist(each, edges, weights=weights, color=colour, histtype="step")
        found = drawn[name].gaps().gap_us
        if found is not None:
            axes.axvline(max(found.p50, SHORTEST), color=colour, linestyle="--", linewidth=1.2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(f"gap between work (us); below {SHORTEST:g} at {SHORTEST:g}, medians dashed")
    axes.set_ylabel("share of gaps (%)")
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if any(gaps.values()):
        axes.legend(frameon=False)
