"""What the CPU benchmarks share: variants measured in turn, and what every result file begins with.

A machine that others use may be twice as slow a second later. So variants run in short bursts, one after the other,
round after round: a ratio is the median of the rounds' own ratios, a time the one that a tenth of the rounds undercut.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from timeit import Timer
from typing import Any, TypeVar

BURST = 200
"""Statements per burst: about a millisecond of Python, so that a round is over before the machine changes."""

Name = TypeVar("Name", bound=Hashable)


def options(text: str | None, rounds: int) -> argparse.Namespace:
    """The arguments of a benchmark: ``json`` (a Path or None) and ``rounds``."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N")
    found = parser.parse_args()
    if found.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return found


def timer(statement: str, **names: Any) -> Timer:
    """A statement to time, with the names that it uses; the loop around it is timeit's."""
    return Timer(statement, globals=names)


def interleaved(variants: Mapping[Name, Timer], rounds: int, burst: int = BURST) -> dict[Name, list[float]]:
    """Seconds per statement of each variant, one number per round.

    All variants run in turn, one burst each per round, after one burst that does not count.
    """
    for each in variants.values():
        each.timeit(burst)
    found: dict[Name, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, each in variants.items():
            found[name].append(each.timeit(burst) / burst)
    return found


def low(values: Sequence[float]) -> float:
    """What a tenth of the values undercut: the time on a machine that is left alone."""
    return sorted(values)[len(values) // 10]


def ratio(values: Sequence[float], beside: Sequence[float]) -> float:
    """The median of the ratios of two variants, round by round."""
    return statistics.median(a / b for a, b in zip(values, beside, strict=True))


def head(*packages: str) -> dict[str, Any]:
    """Where and when: cores, Python, the date, and the versions of packages."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "python": platform.python_version()}
    return found | {name: version(name) for name in packages} | {"date": time.strftime("%Y-%m-%d")}


def write(result: Mapping[str, Any], path: Path | None) -> None:
    """Leave a result as JSON, where a path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
