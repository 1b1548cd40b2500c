"""The text of options: sizes, figures by size, durations and points in time. ConfigError says what to write."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from statistics import fmean
from typing import Any

from graphprobe.errors import ConfigError, SourceError

FIGURE = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?) ?(us|ms|s)?")
UNITS = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1)}
LEAST, MOST = 0.1, 10_000.0
"""Milliseconds that are believed without a unit: less was meant as seconds, more as microseconds."""

DURATION = re.compile(r"([0-9]*\.?[0-9]+)(s|m|h|d|w)")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

AHEAD = 60.0
"""Seconds by which our clock may be behind."""


def sizes(text: str) -> list[int]:
    """A list of batch sizes, as ``1,2,4,8``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"buckets must be whole numbers, got {text!r}", "write 1,2,4,8") from None


def times(text: str, option: str) -> dict[int, float]:
    """Seconds by size, from milliseconds or figures with a unit: ``1:9.1,16:13.3`` or ``1:9100us,16:0.0133s``."""
    return {size: _seconds(figure, option) for size, figure in _by_size(text, option, "1:9.1,16:13.3").items()}


def per_graph(text: str, option: str, unit: float = 1.0) -> float | dict[int, float]:
    """What a graph takes, in units: one figure, as ``20``, or one by size, as ``1:20,16:25``."""
    if ":" not in text:
        return _number(text, option, "20, or 1:20,16:25") * unit
    by_size = _by_size(text, option, "20, or 1:20,16:25")
    return {size: _number(figure, option, "1:20,16:25") * unit for size, figure in by_size.items()}


def duration(text: str, option: str) -> float:
    """Seconds of ``90s``, ``15m``, ``6h``, ``2d`` or ``1w``."""
    found = DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{option} must be a time with its unit, got {text!r}", "write 90s, 15m, 6h or 2d")
    return float(found[1]) * SECONDS[found[2]]


def instant(text: str, option: str) -> float:
    """Seconds of the epoch of an ISO 8601 time, UTC where it names no zone; it must be past."""
    try:
        # Python 3.10 knows no Z.
        found = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.strip()))
        seconds = (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        hint = "write 2026-11-30T12:00, which is UTC, or 2026-11-30T12:00+02:00"
        raise ConfigError(f"{option} must be a time, got {text!r}", hint) from None
    if seconds > time.time() + AHEAD:
        raise ConfigError(f"{option} must be past, got {text!r}", "without a zone it is UTC")
    return seconds


def measured(file: str) -> dict[str, dict[int, float]]:
    """What ``benchmarks/steps.py --json`` wrote, by part and size, in seconds and bytes; SourceError where it did not.

    The parts are ``graph``, ``eager``, ``prefill``, ``capture_seconds`` and ``bytes``, those of them that it has.
    """
    try:
        data = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        what = getattr(error, "strerror", None) or f"no JSON: {error}"
        raise SourceError(f"{file}: {what}. hint: give a file of benchmarks/steps.py --json FILE") from error
    parts = ("graph", "eager", "prefill", "capture_seconds", "bytes")
    found = {part: _part(data.get(part), part, file) for part in parts} if isinstance(data, dict) else {}
    if not (found.get("graph") or found.get("eager")):
        raise SourceError(f'{file}: no times in it. hint: it is {{"graph": {{"1": 9.1e-3}}, "eager": ...}}, in seconds')
    if len(taken := found.get("bytes", {})) > 1:
        # A shared pool grows with its largest graph; one of another size takes what the others did.
        taken.setdefault(0, fmean(n for size, n in taken.items() if size < max(taken)))
    return {part: by_size for part, by_size in found.items() if by_size}


def _part(values: Any, part: str, file: str) -> dict[int, float]:
    if values is None:
        return {}
    try:
        found = {int(size): float(value) for size, value in values.items()}
    except (AttributeError, TypeError, ValueError):
        raise SourceError(f"{file}: {part} must be numbers by size, got {str(values)[:60]}") from None
    for size, value in found.items():
        # A capture may leave the pool smaller than it found it.
        if size < 1 or not math.isfinite(value) or (value < 0 and part != "bytes"):
            raise SourceError(f"{file}: {part} of size {size} is {value}")
    return {size: max(0.0, value) for size, value in found.items()}


def _by_size(text: str, option: str, example: str) -> Mapping[int, str]:
    found: dict[int, str] = {}
    for part in text.split(","):
        size, colon, figure = part.partition(":")
        if not (colon and size.strip().isascii() and size.strip().isdigit() and 0 < len(size.strip()) < 8):
            raise ConfigError(f"{option} must be figures by size, got {text!r}", f"write {example}")
        if int(size) in found:
            raise ConfigError(f"{option} names size {int(size)} twice", f"write {example}")
        found[int(size)] = figure.strip()
    return found


def _number(text: str, option: str, example: str) -> float:
    found = FIGURE.fullmatch(text.strip())
    if found is None or found[2] or not math.isfinite(float(found[1])):
        raise ConfigError(f"{option} must be a number from 0 on, got {text!r}", f"write {example}")
    return float(found[1])


def _seconds(text: str, option: str) -> float:
    found = FIGURE.fullmatch(text)
    if found is None or not 0 < float(found[1]) < math.inf:
        raise ConfigError(f"{option} must be milliseconds above 0, got {text!r}", "write 9.1, or 9100us, or 0.0091s")
    number, unit = float(found[1]), found[2]
    if unit is None and not LEAST <= number <= MOST:
        hint = f"write its unit: {text}ms, or {text}{'s' if number < LEAST else 'us'}"
        raise ConfigError(f"{option} is in milliseconds, and {text} is hardly meant", hint)
    # Decimal: 13.3 is then the float of 0.0133.
    return float(Decimal(found[1]) * UNITS[unit or "ms"])
