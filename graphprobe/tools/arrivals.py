"""Requests of a day: when each arrived, how long its prompt was, and how many tokens it was given."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools.fetch import fetch
from graphprobe.tools.findings import short
from graphprobe.tools.web import Wanted, http_url

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""The columns of AzurePublicDataset's LLM inference traces, in any order and among others."""

MAX_BYTES = 256 << 20
"""Longest trace that is read: about six million requests."""

MAX_TOKENS = 1 << 30
"""Most tokens of one request."""

LONGEST = 10 * 366 * 86_400
"""Longest time between two requests of a trace, in seconds."""

HINT = f"the columns are {','.join(COLUMNS)}, as in AzurePublicDataset's traces"
WANTED = Wanted("text/csv", "a CSV of requests", HINT, "is the server up? else give a file, or -")

INSTANT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class Request:
    """One request: ``arrival`` in seconds since the first, ``context`` tokens of prompt, ``generate`` tokens of answer.

    ConfigError for an arrival below 0 or above ten years, and for an answer of no token.
    """

    arrival: float
    context: int
    generate: int

    def __post_init__(self) -> None:
        if not (0 <= self.arrival <= LONGEST and 0 <= self.context <= MAX_TOKENS and 1 <= self.generate <= MAX_TOKENS):
            raise ConfigError(f"no request: {self}", "seconds since the first, tokens >= 0, and at least one generated")


class _Line(NamedTuple):
    instant: int
    """Nanoseconds since the epoch."""
    context: int
    generate: int


def arrivals(path_or_text: str | os.PathLike[str], *, speed: float = 1.0, timeout: float = 5.0) -> list[Request]:
    """The requests of a trace, earliest first: a CSV with the columns of ``COLUMNS``.

    Given is a file, an http(s) URL, ``-``, or the text itself, which is what has a line break. Times without a zone are
    UTC. With ``speed`` 4 they arrive four times as fast. ``timeout`` in seconds is for the whole answer of a URL.
    SourceError names the line of what cannot be read; ConfigError for a speed that is none.
    """
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 < speed < math.inf:
        raise ConfigError(f"speed must be a number above 0, got {speed!r}", "speed=4 makes arrivals four times as fast")
    name, text = _text(path_or_text, timeout)
    lines = sorted(_lines(name, text), key=lambda line: line.instant)
    if not lines:
        raise SourceError(f"{name}: no request in it. hint: {HINT}, and a line for each request")
    first = lines[0].instant
    span = (lines[-1].instant - first) / 1e9 / speed
    if span > LONGEST:
        hint = "is one of its years wrong, or speed too small?"
        raise SourceError(f"{name}: its requests span {span / 86_400:,.0f} days. hint: {hint}")
    return [Request((line.instant - first) / 1e9 / speed, line.context, line.generate) for line in lines]


def _text(given: str | os.PathLike[str], timeout: float) -> tuple[str, str]:
    if isinstance(given, str) and "\n" in given:
        return "trace", given.removeprefix("\ufeff")
    name = os.fsdecode(given)
    body = fetch(name, WANTED, MAX_BYTES, timeout, _address).body
    shown = short(name)
    if len(body) > MAX_BYTES:
        raise SourceError(f"{shown}: longer than {MAX_BYTES >> 20} MiB. hint: cut it to the hours that matter")
    try:
        return shown, body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise SourceError(f"{shown}: line {line}: not UTF-8. hint: is it compressed? {HINT}") from error


def _address(url: str) -> str:
    return http_url(url, "http://HOST/FILE").geturl()


def _lines(name: str, text: str) -> Iterator[_Line]:
    rows = csv.reader(io.StringIO(text, newline=None))
    begun = 1
    try:
        header = [cell.strip() for cell in next(rows, [])]
        if not set(COLUMNS) <= set(header):
            raise ValueError(f"found {short(','.join(header)) or 'nothing'}, not the names of the columns")
        where = [header.index(column) for column in COLUMNS]
        begun = rows.line_num + 1
        for row in rows:
            if row:
                yield _line(row, len(header), where)
            begun = rows.line_num + 1
    except (ValueError, csv.Error) as error:
        quote = f" (a quote that opens there runs to line {rows.line_num})" if rows.line_num > begun else ""
        raise SourceError(f"{name}: line {begun}: {error}{quote}. hint: {HINT}") from error


def _line(row: list[str], length: int, where: list[int]) -> _Line:
    if len(row) != length:
        raise ValueError(f"{len(row)} fields, the first line has {length}")
    instant, context, generate = (row[index].strip() for index in where)
    return _Line(_instant(instant), _tokens(context, 0, COLUMNS[1]), _tokens(generate, 1, COLUMNS[2]))


def _instant(text: str) -> int:
    found = INSTANT.fullmatch(text)
    if found is None:
        raise ValueError(f"{COLUMNS[0]} {short(repr(text), 40)} is no time such as 2023-11-16 18:17:03.9799600")
    day, clock, fraction, zone = found.groups()
    offset = "+00:00" if zone in (None, "Z") else zone
    # Fractions apart: those of these traces have seven digits, of which datetime keeps six.
    seconds = (datetime.fromisoformat(f"{day}T{clock}{offset}") - EPOCH) // timedelta(seconds=1)
    return seconds * 10**9 + int((fraction or "").ljust(9, "0"))


def _tokens(text: str, least: int, column: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= MAX_TOKENS):
        raise ValueError(f"{column} must be a whole number from {least} to {MAX_TOKENS}, got {short(repr(text), 40)}")
    return int(text)
