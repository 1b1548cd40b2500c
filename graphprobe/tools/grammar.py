"""One line of a page of metrics, as Prometheus reads it: metadata, or a sample.

prometheus_client's parser of the text format takes lines for which Prometheus refuses a page, and wants the square of a
line's length: it is not used.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

QUOTED = r'"[^"\\]*(?:\\.[^"\\]*)*"'
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = rf"[a-zA-Z_][a-zA-Z0-9_]*|{QUOTED}"
TERM = re.compile(rf"({LABEL})(?:[ \t]*=[ \t]*({QUOTED}))?")
NUMBER = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|inf(?:inity)?)|nan", re.ASCII | re.IGNORECASE)
TEXT_META = re.compile(rf"#[ \t]+(HELP|TYPE|UNIT)[ \t]+({NAME}|{QUOTED})(?:[ \t](.*))?")
OPENMETRICS_META = re.compile(rf"# (HELP|TYPE|UNIT) ({NAME}|{QUOTED}) (.*)")
BEGUN = re.compile(r"#[ \t]+(?:HELP|TYPE)[ \t]")
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
ESCAPED = {"\\": "\\", '"': '"', "n": "\n"}


def _sample(space: str, comma: str, after: str, gap: str, time: str) -> re.Pattern[str]:
    """A sample: name, labels, value, time, exemplar.

    ``space`` may be between labels, ``comma`` after the last, ``after`` behind the brace, and ``gap`` is between words.
    No part starts as the one before goes on, so that no line takes longer than it is long.
    """
    term = rf"(?:{LABEL})(?:{space}={space}{QUOTED})?"
    terms = rf"{term}{space}(?:,{space}{term}{space})*{comma}"
    labels = rf"{space}\{{{space}((?:{terms})?)\}}{after}"
    return re.compile(rf"({NAME})?(?:{labels}|{gap})([^\s{{]\S*)(?:{gap}({time}))?( # \{{.*)?")


TEXT = _sample(r"[ \t]*", r"(?:,[ \t]*)?", r"[ \t]*", r"[ \t]+", r"[0-9]+")
OPENMETRICS = _sample("", "", " ", " ", r"[-+0-9][-+0-9.eE]*")


class Line(NamedTuple):
    """One sample as it is written: a histogram has several."""

    name: str
    labels: dict[str, str]
    value: float
    time: str = ""
    escape: str = ""
    """An escape sequence that does not exist; Prometheus takes it as it stands, other readers refuse it."""


class Meta(NamedTuple):
    """A line of metadata: HELP, TYPE or UNIT of a name."""

    word: str
    name: str
    text: str


class Unreadable(ValueError):
    """Prometheus cannot read this line; says why, where that is known."""


def metadata(line: str, openmetrics: bool) -> Meta | None:
    """The metadata in a line that starts with ``#``, None for a comment or the end; Unreadable where it is neither."""
    match = (OPENMETRICS_META if openmetrics else TEXT_META).fullmatch(line)
    if match:
        return Meta(match[1], match[2].strip('"'), match[3] or "")
    if openmetrics and line != "# EOF":
        raise Unreadable("neither HELP, TYPE, UNIT nor EOF")
    if BEGUN.match(line):
        raise Unreadable("no name")
    return None


def sample(line: str, openmetrics: bool) -> Line:
    """The sample in any other line; Unreadable where there is none."""
    match = OPENMETRICS.fullmatch(line) if openmetrics else TEXT.fullmatch(line.rstrip(" \t"))
    if match is None:
        raise Unreadable("")
    if match[5] and not openmetrics:
        raise Unreadable("only OpenMetrics has exemplars")
    terms = TERM.findall(match[2] or "")
    bare = [name for name, value in terms if not value]
    labels = {_unescaped(name): _unescaped(value) for name, value in terms if value}
    if len(labels) + len(bare) < len(terms) or "__name__" in labels:
        raise Unreadable("a label twice")
    if len(bare) + bool(match[1]) != 1:
        raise Unreadable("two names" if bare else "no name")
    escape = next((e[0] for e in ESCAPE.finditer(match[2] or "") if e[1] not in ESCAPED), "")
    return Line(match[1] or _unescaped(bare[0]), labels, _number(match[3]), match[4] or "", escape)


def _number(text: str) -> float:
    if not NUMBER.fullmatch(text):
        raise Unreadable(f"{text[:40]!r} is no number")
    value = float(text)
    if math.isinf(value) and text[-1].isdigit():
        raise Unreadable("a number too large")
    return value


def _unescaped(quoted: str) -> str:
    text = quoted[1:-1] if quoted.startswith('"') else quoted
    return ESCAPE.sub(lambda match: ESCAPED.get(match[1], match[0]), text) if "\\" in text else text
