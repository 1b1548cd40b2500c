"""What graphs take of something, bytes or capture seconds: given, or measured, by size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from graphprobe.buckets import as_size
from graphprobe.errors import ConfigError

PerGraph = float | Mapping[int, float] | None
"""What each graph takes: one figure, or one by size, where 0 stands for any other size."""

MOST = 1e18
"""No figure is above it: an exabyte, or thirty billion years."""


@dataclass(frozen=True, slots=True)
class Use:
    """What graphs take of something.

    ``by_size`` is what a graph of each size takes, ``other`` one of any other size (None: nothing is known).
    ``largest`` is what the largest one of a list takes, whatever its size (None: like any): a pool that graphs share
    grows with the one captured first, and the others fit into it.
    """

    by_size: Mapping[int, float] = field(default_factory=dict)
    other: float | None = None
    largest: float | None = None
    measured: bool = False

    @property
    def known(self) -> bool:
        """Whether anything is."""
        return self.other is not None

    def of(self, bucket: int, last: bool = False) -> float:
        """What one graph takes; ``last``: as the largest of its list."""
        if last and self.largest is not None:
            return self.largest
        return self.by_size.get(bucket, self.other or 0.0)

    def alike(self, buckets: Sequence[int]) -> bool:
        """Whether each of these graphs takes the same."""
        return len({self.of(bucket) for bucket in buckets}) < 2

    def each(self, buckets: Sequence[int]) -> dict[int, float]:
        """What each graph of an ascending list takes."""
        return {n: self.of(n, n == buckets[-1]) for n in buckets}

    def together(self, buckets: Sequence[int]) -> float:
        """What all graphs of an ascending list take."""
        return sum(self.each(buckets).values())


def of_memory(given: PerGraph, grown: Mapping[int, float]) -> Use:
    """Bytes of graphs: as given, else what the pool grew by with each."""
    if given is not None:
        return _by_size(given, "graph_bytes")
    use = replace(_by_size(grown, "graph_bytes"), measured=True)
    if len(grown) < 2:
        return use
    # What the largest took it took as the first.
    rest = {size: n for size, n in use.by_size.items() if size < max(grown)}
    return replace(use, by_size=rest, other=fmean(rest.values()), largest=use.by_size[max(grown)])


def of_captures(given: PerGraph, measured: Mapping[int, float]) -> Use:
    """Seconds of captures: as given, else as measured."""
    if given is not None:
        return _by_size(given, "capture_seconds")
    return replace(_by_size(measured, "capture_seconds"), measured=True)


def number(value: object) -> float:
    """``value`` as a float; NaN where it is no number, or none that can be reckoned with."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MOST:
        return math.nan
    return float(value)


def _by_size(given: PerGraph, name: str) -> Use:
    by_size = {}
    for size, value in (given if isinstance(given, Mapping) else {0: given}).items():
        as_size(size, f"a size of {name}", least=0)
        if not (taken := number(value)) >= 0:
            raise ConfigError(f"{name} must be numbers from 0 on, got {value!r}{f' for size {size}' if size else ''}")
        by_size[size] = taken
    other = by_size.pop(0, fmean(by_size.values()) if by_size else None)
    return Use(by_size, other)
