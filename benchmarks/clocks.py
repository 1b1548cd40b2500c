"""What hooks take where they are, inside an engine, and how sure a median is."""

from __future__ import annotations

import collections
import functools
import sys
import time
from collections.abc import Iterable
from math import comb
from typing import Any

Place = tuple[str, str, str]
"""A name, a module, and a function there (dotted)."""


class Clocks:
    """Nanoseconds outside of each hook and inside, summed: the difference is what we take, where it is taken.

    ``put`` is called before the hooks are placed, with ``inside``, and afterwards, with ``outside``.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self.outside: collections.Counter[str] = collections.Counter()
        self.inside: collections.Counter[str] = collections.Counter()
        self._places = tuple(places)
        self._layers: list[list[tuple[Any, str, Any]]] = []

    def put(self, sums: collections.Counter[str]) -> None:
        """A clock around what is now at each place."""
        layer = []
        for name, module, path in self._places:
            parent: Any = sys.modules.get(module)
            *parts, attribute = path.split(".")
            for part in parts:
                parent = getattr(parent, part, None)
            if parent is not None and attribute in vars(parent):
                layer.append((parent, attribute, vars(parent)[attribute]))
                setattr(parent, attribute, clocked(vars(parent)[attribute], name, sums))
        self._layers.append(layer)

    def take_off(self) -> None:
        """The clocks that were put last."""
        for parent, attribute, previous in self._layers.pop():
            setattr(parent, attribute, previous)

    def spent(self, steps: int) -> collections.Counter[str]:
        """Nanoseconds per step between the two clocks of each place."""
        return collections.Counter({name: (self.outside[name] - self.inside[name]) / steps for name in self.outside})


def clocked(function: Any, name: str, sums: collections.Counter[str]) -> Any:
    now = time.perf_counter_ns

    @functools.wraps(function)
    def clock(*args: Any, **kwargs: Any) -> Any:
        began = now()
        try:
            return function(*args, **kwargs)
        finally:
            sums[name] += now() - began

    return clock


def interval(n: int) -> tuple[int, int]:
    """Which of n sorted values bound their median with at least 95 % (binomial order statistics)."""
    low, mass = 0, 0.0
    while low < n // 2 and 2 * (mass + comb(n, low) / 2**n) <= 0.05:
        mass += comb(n, low) / 2**n
        low += 1
    low = max(0, low - 1)
    return low, n - 1 - low
