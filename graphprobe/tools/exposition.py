"""A page of metrics -> its families and samples, and what is wrong with its text.

Names, labels and values are read by prometheus_client's text parser, one line at a time, so that a bad line costs one
finding and not the rest of the page. It is laxer than Prometheus, so this is looked at beside it: limits of size and
time, bytes that are no UTF-8, NULs, carriage returns, an end within a line, escapes that do not exist, what follows a
value, and the metadata: a type that is unknown, comes twice or after its samples, families that are interrupted.
A page in OpenMetrics without such a finding is read once more, whole, by prometheus_client's strict parser for that.
"""

from __future__ import annotations

import difflib
import io
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.openmetrics.parser import text_fd_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from graphprobe.tools.table import literal

MAX_BYTES = 16 << 20
"""Longest page that is looked at: a hundred forwards with all their label sets are half of it."""

MAX_LINE = 16 << 10
MAX_SAMPLES = 200_000
MAX_SECONDS = 20.0
"""Longest that one page is parsed: a hostile line costs the parsers the square of its length."""

MANY = 5
"""Findings of one kind that are told one by one; the others are counted."""

KINDS = frozenset({"counter", "gauge", "histogram", "summary"})
TEXT_KINDS = KINDS | {"untyped"}
OPENMETRICS_KINDS = KINDS | {"info", "stateset", "gaugehistogram", "unknown"}
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")
SUFFIXES = (*OF_HISTOGRAMS, "_total", "_info", "_created")

OURS = re.compile(r"graphprobe[_.:]")
META = re.compile(r'#[ \t]+(HELP|TYPE|UNIT)\b[ \t]*("(?:[^"\\]|\\.)*"|[^\s"]+)?(?:[ \t]+(.*))?')
HEAD = re.compile(r'[^\s{]*[ \t]*(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?')
REST = re.compile(r"[ \t]*(?<=[ \t}])([0-9A-Za-z.+-]+)(?:[ \t]+(-?\d+(?:\.\d+)?))?([ \t]+# \{.*)?[ \t]*", re.ASCII)
ESCAPE = re.compile(r"\\(.?)")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it must be. ``severity`` is error or warning; ``metric`` is empty for the page."""

    severity: str
    metric: str
    what: str
    hint: str

    @property
    def kind(self) -> tuple[str, str, str]:
        """What findings that differ in nothing but ``what`` have in common."""
        return (self.severity, self.metric, self.hint)


class Findings:
    """Collects findings; of those that differ in nothing but ``what``, the first few, and how many more there are."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, str], list[str]] = {}
        self._more: dict[tuple[str, str, str], int] = {}
        self._near: dict[tuple[str, tuple[str, ...]], str] = {}

    def error(self, metric: str, what: str, hint: str) -> None:
        """Dashboards or alerts are wrong for it, or Prometheus refuses the page."""
        self._add("error", metric, what, hint)

    def warning(self, metric: str, what: str, hint: str) -> None:
        """Allowed, and most likely not meant."""
        self._add("warning", metric, what, hint)

    def _add(self, severity: str, metric: str, what: str, hint: str) -> None:
        key = (severity, short(metric), hint)
        if key not in self._kinds and len(self._kinds) >= MANY * 20:
            key = (severity, "", "mend the others first")
        told = self._kinds.setdefault(key, [])
        if what in told:
            return
        if len(told) < MANY:
            told.append(what)
        else:
            self._more[key] = self._more.get(key, 0) + 1

    def near(self, value: str, words: tuple[str, ...]) -> str:
        """The word that ``value`` is most like, or nothing; looked for a few times only, since it takes long."""
        key = (value, words)
        if key not in self._near and len(self._near) < MANY * 20:
            self._near[key] = next(iter(difflib.get_close_matches(value[:100], words, 1)), "")
        return self._near.get(key, "")

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def all(self) -> tuple[Finding, ...]:
        """Every finding, errors first, in the order in which they were made."""
        found = []
        for (severity, metric, hint), told in self._kinds.items():
            more = self._more.get((severity, metric, hint))
            told = [*told, f"and {more:,} more like these"] if more else told
            found += [Finding(severity, metric, what, hint) for what in told]
        return tuple(sorted(found, key=lambda finding: finding.severity))


class Line(NamedTuple):
    """One sample as it is written: a histogram has several."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(slots=True)
class Page:
    """What was read of a page. ``kinds``, ``helps`` and ``units`` go by the name that the metadata gives a family."""

    openmetrics: bool = False
    lines: list[Line] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    helps: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)


def short(text: object, length: int = 100) -> str:
    """``text`` on one printable line of at most ``length`` characters."""
    plain = literal(str(text)[: length + 1])
    return plain if len(plain) <= length else f"{plain[: length - 3]}..."


def parse(body: bytes, found: Findings, openmetrics: bool | None = None) -> Page:
    """The page in ``body``; what is wrong with its text goes to ``found``. Raises nothing, whatever the bytes are.

    ``openmetrics`` is what the content type says; None where there is none: then the page's last line tells.
    """
    text = _decoded(body, found)
    if openmetrics is None:
        openmetrics = text.rstrip().endswith("# EOF")
    page = Page(openmetrics)
    deadline = time.monotonic() + MAX_SECONDS
    try:
        reader = _Reader(page, found)
        for number, line in enumerate(_lines(text, found, deadline), start=1):
            reader.take(number, line)
        if openmetrics and not found:
            _strictly(text, found, deadline)
    except _Enough as enough:
        found.error("", str(enough), "a page of metrics is far smaller: is a request's id, a name or a time a label?")
    return page


class _Enough(Exception):
    """A limit is reached; the rest of the page is not looked at."""


def _decoded(body: bytes, found: Findings) -> str:
    if len(body) > MAX_BYTES:
        what = f"longer than {MAX_BYTES >> 20} MiB; the rest was not looked at"
        found.error("", what, "a page of metrics is far smaller: is a request's id, a name or a time a label?")
        body = body[: body.rfind(b"\n", 0, MAX_BYTES) + 1 or MAX_BYTES]
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"not UTF-8 at byte {error.start:,}: {short(body[error.start : error.start + 8])}"
        found.error("", what, "write UTF-8, uncompressed unless the request accepts it")
        text = body.decode("utf-8", "replace")
    if "\0" in text:
        found.error("", f"binary: a NUL at character {text.index(chr(0)):,}", "serve the text format or OpenMetrics")
    if text and not text.endswith(("\n", "# EOF")):
        what = f"ends within a line: {short(text[-60:])}"
        found.error("", what, "end every line with \\n; was the page cut off?")
    return text


def _lines(text: str, found: Findings, deadline: float) -> Iterator[str]:
    """The lines, within the limits; those that are too long are left empty."""
    for number, line in enumerate(text.split("\n"), start=1):
        if time.monotonic() > deadline:
            raise _Enough(f"parsing took more than {MAX_SECONDS:g} s; the rest, from line {number:,}, was left")
        if len(line) > MAX_LINE:
            what = f"line {number:,} has {len(line):,} characters: {short(line, 60)}"
            found.error("", what, f"write lines of at most {MAX_LINE:,} characters")
            line = ""
        if line.endswith("\r"):
            found.error("", f"line {number:,} ends with \\r\\n", "end lines with \\n alone")
        yield line.strip(" \t\r")


class _Reader:
    """Takes one line after the other."""

    def __init__(self, page: Page, found: Findings) -> None:
        self.page = page
        self.found = found
        self._family = ""
        self._seen: set[str] = set()
        self._sampled: set[str] = set()
        self._kinds = OPENMETRICS_KINDS if page.openmetrics else TEXT_KINDS

    def take(self, number: int, line: str) -> None:
        """Read one line into the page."""
        if line.startswith("#"):
            self._metadata(number, line)
        elif line:
            self._sample(number, line)

    def _metadata(self, number: int, line: str) -> None:
        match = META.match(line)
        if match is None:
            return
        word, name, text = match[1], (match[2] or "").strip('"'), (match[3] or "").strip()
        if not name or (word == "TYPE" and not text):
            self._unreadable(number, line)
            return
        if not OURS.match(name):
            return
        self._enter(name)
        known = {"HELP": self.page.helps, "TYPE": self.page.kinds, "UNIT": self.page.units}[word]
        if name in known:
            self.found.error(name, f"line {number:,}: a second {word}", "write the metadata of a metric once")
        if word == "TYPE" and text not in self._kinds:
            self.found.error(
                name, f"line {number:,}: no type: {short(text)}", f"one of {', '.join(sorted(self._kinds))}"
            )
        if name in self._sampled:
            self.found.error(name, f"line {number:,}: {word} after samples", "write metadata before the first sample")
        known.setdefault(name, text)

    def _sample(self, number: int, line: str) -> None:
        if len(self.page.lines) >= MAX_SAMPLES:
            raise _Enough(f"more than {MAX_SAMPLES:,} samples; the rest, from line {number:,}, was left")
        head = HEAD.match(line)
        rest = head and REST.fullmatch(line, head.end())
        if not head or not rest or (rest[3] and not self.page.openmetrics):
            self._unreadable(number, line)
            return
        try:
            # The parser takes whatever follows a value for a time, so it is shown the value alone.
            family = next(iter(text_string_to_metric_families(f"{head[0]} {rest[1]}")))
            sample = family.samples[0]
            read = Line(sample.name, dict(sample.labels), float(sample.value))
        except Exception:
            # Not only ValueError: the parser indexes into what it did not check.
            self._unreadable(number, line)
            return
        self.page.lines.append(read)
        if OURS.match(read.name):
            self._ours(number, head[0], read.name)

    def _ours(self, number: int, head: str, name: str) -> None:
        self._enter(name)
        self._sampled.add(self._family)
        wrong = [escape[0] for escape in ESCAPE.finditer(head) if escape[1] not in ("\\", '"', "n") or not escape[1]]
        if wrong:
            what = f"line {number:,}: no such escape: {short(wrong[0])}"
            self.found.error(name, what, r'escape \ as \\, " as \" and a line feed as \n, and nothing else')

    def _enter(self, name: str) -> None:
        """Lines of one family stand together."""
        family = self._owner(name)
        if family != self._family and family in self._seen:
            self.found.error(
                family, "its lines are interrupted by another metric", "write all lines of a metric together"
            )
        self._family = family
        self._seen.add(family)

    def _owner(self, name: str) -> str:
        """The family that a sample of this name belongs to: declared under the name, or under it without its suffix."""
        if name in self.page.kinds or name in self.page.helps:
            return name
        suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
        bare = name.removesuffix(suffix)
        return bare if bare in self.page.kinds or bare in self.page.helps or suffix in OF_HISTOGRAMS else name

    def _unreadable(self, number: int, line: str) -> None:
        what = f"line {number:,} cannot be read: {short(line)}"
        self.found.error(
            "", what, 'write NAME{LABEL="VALUE",...} NUMBER; Prometheus refuses the whole page for one such'
        )


def _strictly(text: str, found: Findings, deadline: float) -> None:
    try:
        for _ in openmetrics_families(_timed(io.StringIO(text), deadline)):  # type: ignore[no-untyped-call]
            pass
    except _Enough:
        raise
    except Exception as error:
        # Not only ValueError: the parser indexes into what it did not check.
        what = f"not OpenMetrics: {short(error) or type(error).__name__}"
        found.error("", what, "see the specification, or serve the text format as text/plain; version=0.0.4")


def _timed(lines: Iterable[str], deadline: float) -> Iterator[str]:
    for line in lines:
        if time.monotonic() > deadline:
            raise _Enough(f"parsing took more than {MAX_SECONDS:g} s; the rest was left")
        yield line
