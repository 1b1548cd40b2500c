"""Which list of buckets is today's, and how many processes there are, by when each info was seen last."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from graphprobe.metrics import FORWARD_INFO
from graphprobe.tools.series import Series

ALIVE = 300.0
"""Seconds after which a process that was not seen is over: Prometheus looks back as long."""

Point = tuple[Mapping[str, Any], int, float]
"""Labels of an info, the part of the window, and when it was seen last in that part, in seconds."""

Process = tuple[str, tuple[tuple[str, str], ...]]
"""A forward, and the labels that tell its processes apart."""


def newest(points: Iterable[Point]) -> tuple[list[Series], dict[str, int]]:
    """The newest info of each living process, as a series that counts them; and the most processes of each forward.

    Living are those of the last part in which a forward is, but for those that were over before others of it.
    """
    parts: dict[str, dict[int, dict[Process, tuple[float, tuple[str, ...]]]]] = defaultdict(lambda: defaultdict(dict))
    for labels, part, at in points:
        told = tuple(str(labels.get(label, "")) for label in FORWARD_INFO.labels)
        known = parts[told[0]][part]
        rest = tuple(sorted((k, str(v)) for k, v in labels.items() if k not in (*FORWARD_INFO.labels, "__name__")))
        known[told[0], rest] = max(known.get((told[0], rest), (at, told)), (at, told))
    found = [one for name in parts for one in _living(parts[name][max(parts[name])].values())]
    return found, {name: max(map(len, by_part.values())) for name, by_part in parts.items()}


def _living(seen: Iterable[tuple[float, tuple[str, ...]]]) -> list[Series]:
    seen = list(seen)
    last = max(at for at, _ in seen)
    votes = Counter(told for at, told in seen if at >= last - ALIVE)
    series = []
    for told, count in votes.items():
        labels = dict(zip(FORWARD_INFO.labels, told, strict=True))
        series.append(Series(FORWARD_INFO, "", labels, (), count, labels, frozenset()))
    return series
