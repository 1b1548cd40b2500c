"""The seconds that advice reckons with: given, measured, or modelled, and which is which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphprobe.snapshot import Times
from graphprobe.tools.times import Curve

# A model for an engine of which nothing was timed: a decode step of the Qwen3-8B shape in bfloat16 with 1,024 tokens in
# each row, torch 2.11 on one H200, 2026-11-30. Source: docs/advice/steps_qwen3_8b.json, which a test compares.
REFERENCE = Curve({1: 8.9e-3, 16: 10.1e-3, 64: 12.1e-3, 128: 14.9e-3, 256: 21.6e-3})
REFERENCE_EAGER = Curve({1: 27.5e-3, 256: 31.6e-3})

SLOWDOWN = 87.0 / 74.7
"""What an eager call takes, in graph calls, where one of them was not timed: a published engine made 74.7 token/s at
batch 3, which had no bucket, and 87.0 with one. Others lose more; advice must not rest on that."""

MOVED = 0.005
"""Relative change of a measured time that is told."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds per call by size on both paths; ``notes`` say where they are from and what was changed."""

    graph: Curve
    eager: Curve
    floored: bool = True
    """Whether an eager call takes at least what a graph call takes, as the same kernels do."""
    notes: tuple[str, ...] = ()

    def eager_along(self, sizes: list[int]) -> list[float]:
        """Eager seconds at each of ``sizes``."""
        own = self.eager.along(sizes)
        return [max(pair) for pair in zip(own, self.graph.along(sizes), strict=True)] if self.floored else own


def steps(
    graph: Mapping[int, Times],
    eager: Mapping[int, Times],
    times: Mapping[int, float] | None = None,
    eager_times: Mapping[int, float] | None = None,
) -> Steps:
    """What is given, else what was measured, else a model; graph times made non-decreasing in size."""
    notes: list[str] = []
    one = Curve(times) if times else _measured(graph)
    two = Curve(eager_times) if eager_times else _measured(eager)
    if one is None and two is None:
        one, two = REFERENCE, REFERENCE_EAGER
        notes.append(
            "nothing was timed: modelled on the Qwen3-8B shape on an H200; trust ratios more than milliseconds"
        )
    elif one is None:
        one = Curve({size: seconds / SLOWDOWN for size, seconds in two.points.items()})  # type: ignore[union-attr]
        notes.append(f"no graph call was timed: taken as an eager one's time / {SLOWDOWN:.2f}, a cautious figure")
    elif two is None:
        two = Curve({size: seconds * SLOWDOWN for size, seconds in one.points.items()})
        notes.append(f"no eager call was timed: taken as {SLOWDOWN:.2f} times a graph call, a cautious figure")
    rising = one.rising()
    notes += _moved(one, rising)
    if not times and graph:
        known = ", ".join(f"{n}: {one.points[n] * 1e3:.3g}" for n in one.sizes[:8])
        notes.append(f"graph times measured at {known}{' ...' if len(one.sizes) > 8 else ''} ms, lines between")
    return Steps(rising, two, not eager_times, tuple(notes))  # type: ignore[arg-type]


def _measured(times: Mapping[int, Times]) -> Curve | None:
    known = {size: t.sum / t.count for size, t in times.items() if t.count and t.sum > 0}
    return Curve(known, {size: t.count for size, t in times.items()}) if known else None


def _moved(before: Curve, after: Curve) -> list[str]:
    moved = [n for n in before.sizes if abs(after.points[n] / before.points[n] - 1) > MOVED]
    if not moved:
        return []
    named = ", ".join(f"{n}: {before.points[n] * 1e3:.4g} -> {after.points[n] * 1e3:.4g} ms" for n in moved[:6])
    more = f" and {len(moved) - 6} more" if len(moved) > 6 else ""
    return [f"times that fell with size were levelled: {named}{more}"]
