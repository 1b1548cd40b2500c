"""Seconds that a forward takes, by size: known at some sizes, and at all others by straight lines between."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from graphprobe.buckets import as_size
from graphprobe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size. Linear between known sizes, constant below the first.

    Beyond the last it goes on with the slope from the known size nearest to half of the last, so that the noise of two
    neighbours is not prolonged; with one known size it is constant. ``samples`` are how often each was measured; 1
    where that is unknown.
    """

    points: Mapping[int, float]
    samples: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("no time is known at any size", "write times={1: 9.1e-3, 16: 13.3e-3}, in seconds")
        for size, seconds in self.points.items():
            as_size(size, "a size of times")
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
                raise ConfigError(f"the time of size {size} must be seconds above 0, got {seconds!r}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes at which the time is known, ascending."""
        return tuple(sorted(self.points))

    def __call__(self, size: int) -> float:
        """Seconds at ``size``."""
        return self.along([size])[0]

    def along(self, sizes: list[int]) -> list[float]:
        """Seconds at each of ``sizes``."""
        known = self.sizes
        return [self._at(size, known) for size in sizes]

    def _at(self, size: int, known: tuple[int, ...]) -> float:
        index = bisect_left(known, size)
        if index == len(known):
            return self._beyond(size, known)
        high = known[index]
        if high == size or not index:
            return self.points[high]
        low = known[index - 1]
        share = (size - low) / (high - low)
        return self.points[low] + share * (self.points[high] - self.points[low])

    def _beyond(self, size: int, known: tuple[int, ...]) -> float:
        last = known[-1]
        if len(known) == 1:
            return self.points[last]
        base = min(known[:-1], key=lambda n: (abs(n - last / 2), n))
        slope = (self.points[last] - self.points[base]) / (last - base)
        return self.points[last] + max(0.0, slope) * (size - last)

    def rising(self) -> Curve:
        """The nearest curve (least squares, each size weighted by its samples) that never falls as sizes grow.

        Pool adjacent violators; source: Barlow, Bartholomew, Bremner, Brunk, "Statistical Inference under Order
        Restrictions", Wiley 1972, chapter 1.
        """
        pools: list[tuple[float, float, list[int]]] = []
        for size in self.sizes:
            mean, weight, members = self.points[size], float(max(1, self.samples.get(size, 1))), [size]
            while pools and pools[-1][0] > mean:
                other, heft, earlier = pools.pop()
                mean = (mean * weight + other * heft) / (weight + heft)
                weight, members = weight + heft, earlier + members
            pools.append((mean, weight, members))
        return Curve({size: mean for mean, _, members in pools for size in members}, self.samples)
