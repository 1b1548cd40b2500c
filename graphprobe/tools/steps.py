"""The seconds that advice reckons with: given, measured, or modelled, and which is which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphprobe.errors import ConfigError
from graphprobe.snapshot import Times
from graphprobe.tools.times import Curve

# A model for an engine of which nothing was timed: a decode step of the Qwen3-8B shape in bfloat16 with 1,024 tokens in
# each row, torch 2.11 on one H200, 2026-11-30. Source: docs/advice/steps_qwen3_8b.json, which a test compares.
REFERENCE = Curve({1: 8.9e-3, 16: 10.1e-3, 64: 12.1e-3, 128: 14.9e-3, 256: 21.6e-3})
REFERENCE_EAGER = Curve({1: 27.5e-3, 256: 31.6e-3})
MODEL = "the Qwen3-8B shape on an H200"

SLOWDOWN = 87.0 / 74.7
"""What an eager call takes, in graph calls, where one of them was not timed: a published engine made 74.7 token/s at
batch 3, which had no bucket, and 87.0 with one. Others lose more; advice must not rest on that."""

MOVED = 0.005
"""Relative change of a time below which levelling is told as a number of sizes only."""

NAMED = 6
"""Times that are named in one note."""

SHORTEST, LONGEST = 1e-9, 1e9
"""Seconds: what is outside is no step."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds per call by size on both paths; ``notes`` say where they are from and what was changed."""

    graph: Curve
    eager: Curve
    floored: bool = True
    """Whether an eager call takes at least what a graph call takes, as the same kernels do."""
    guessed: bool = False
    """Whether the times of one path are those of the other by ``SLOWDOWN``, so that to compare them says nothing."""
    notes: tuple[str, ...] = ()

    def eager_along(self, sizes: list[int]) -> list[float]:
        """Eager seconds at each of ``sizes``."""
        own = self.eager.along(sizes)
        return [max(pair) for pair in zip(own, self.graph.along(sizes), strict=True)] if self.floored else own


@dataclass(frozen=True, slots=True)
class _Known:
    """Times of one path, and how to speak of them."""

    curve: Curve
    path: str
    given: bool
    samples: int = 0

    def told(self) -> str:
        """Where they are from."""
        named = _listed([f"{n}: {self.curve.points[n] * 1e3:.3g}" for n in self.curve.sizes])
        if self.given:
            return f"{self.path} times as given: {named} ms"
        return f"{self.path} times as measured ({self.samples:,} samples): {named} ms"


def steps(
    graph: Mapping[int, Times],
    eager: Mapping[int, Times],
    times: Mapping[int, float] | None = None,
    eager_times: Mapping[int, float] | None = None,
) -> Steps:
    """What is given, else what was measured, else a model; graph times made non-decreasing in size.

    ConfigError for times that are none.
    """
    one, two = _known("graph", times, graph), _known("eager", eager_times, eager)
    if one is None and two is None:
        note = f"nothing was timed: both paths are modelled on {MODEL}; trust ratios more than milliseconds"
        return Steps(REFERENCE, REFERENCE_EAGER, notes=(note,))
    notes = [known.told() for known in (one, two) if known is not None]
    fast, told = _graph(one, two)
    rising = fast.rising()
    notes += [*told, *_moved(fast, rising)]
    if two is None:
        notes.append(f"no eager call was timed: taken as {SLOWDOWN:.2f} times a graph call, a cautious figure")
        slow = Curve({n: seconds * SLOWDOWN for n, seconds in rising.points.items()})
        return Steps(rising, slow, guessed=True, notes=tuple(notes))
    return Steps(rising, two.curve, not two.given, one is None, tuple(notes))


def _known(path: str, given: Mapping[int, float] | None, measured: Mapping[int, Times]) -> _Known | None:
    if given is not None:
        name = "times" if path == "graph" else "eager_times"
        return _Known(_curve(given, name), path, True)
    known = {n: t for n, t in measured.items() if t.count > 0 and SHORTEST <= t.sum / t.count <= LONGEST}
    if not known:
        return None
    samples = {size: t.count for size, t in known.items()}
    return _Known(Curve({n: t.sum / t.count for n, t in known.items()}, samples), path, False, sum(samples.values()))


def _curve(given: Mapping[int, float], name: str) -> Curve:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} must be seconds by size, got {given!r}", f"write {name}={{1: 9.1e-3, 16: 13.3e-3}}")
    curve = Curve(given)
    for size, seconds in curve.points.items():
        if not SHORTEST <= seconds <= LONGEST:
            raise ConfigError(f"{name}: size {size} cannot take {seconds!r:.40} seconds", "9.1e-3 is 9.1 ms")
    return Curve({size: float(seconds) for size, seconds in curve.points.items()})


def _graph(one: _Known | None, two: _Known | None) -> tuple[Curve, list[str]]:
    """Graph times of one path known at least, and what of them is modelled."""
    known = one or two
    if known is None:
        return REFERENCE, []
    scale = 1.0 if one is not None else 1 / SLOWDOWN
    points = {size: seconds * scale for size, seconds in known.curve.points.items()}
    notes = []
    if one is None:
        notes.append(f"no graph call was timed: taken as an eager one's time / {SLOWDOWN:.2f}, a cautious figure")
    if len(points) == 1:
        ((size, seconds),) = points.items()
        notes.append(f"{known.path} times are known at one size only: a graph's at others have the ratios of {MODEL}")
        ratio = seconds / REFERENCE(size)
        return Curve({n: REFERENCE(n) * ratio for n in {*REFERENCE.sizes, size}}), notes
    return Curve(points, known.curve.samples), notes


def _moved(before: Curve, after: Curve) -> list[str]:
    """What levelling changed: both values of each size, or how many sizes where that is next to nothing."""
    changes = {n: abs(after.points[n] / before.points[n] - 1) for n in before.sizes}
    moved = [n for n, change in changes.items() if change > MOVED]
    little = sum(0 < change <= MOVED for change in changes.values())
    if not moved and not little:
        return []
    named = _listed([f"{n}: {before.points[n] * 1e3:.4g} -> {after.points[n] * 1e3:.4g} ms" for n in moved])
    rest = f"{little} by less than {100 * MOVED:g} %" if little else ""
    return [f"graph times that fell with size were levelled: {' and '.join(filter(None, (named, rest)))}"]


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return f"{', '.join(items[:NAMED])}{more}"
