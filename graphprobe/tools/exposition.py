"""A page of metrics -> the samples and metadata of ours on it, and what is wrong with its text.

It is read line by line, so that a bad line costs one finding and not the rest of the page; of other metrics it is only
looked at whether Prometheus can read them. A page in OpenMetrics is read once more, whole, by prometheus_client's
strict parser.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.openmetrics.parser import text_fd_to_metric_families as openmetrics_families

from graphprobe.tools import sglang, vllm
from graphprobe.tools.findings import Findings, short
from graphprobe.tools.grammar import Line, Meta, Unreadable, metadata, sample

BESIDE = vllm.NAMES | sglang.NAMES
"""Series of engines that are kept beside ours."""

MAX_BYTES = 16 << 20
"""Longest page that is looked at: a hundred forwards with all their label sets are half of it."""

MAX_LINE = 16 << 10
"""Longest line: it costs the strict parser the square of its length."""

MAX_SAMPLES = 200_000
"""Most samples of ours."""

MAX_SECONDS = 20.0
"""Longest that one page is parsed."""

KINDS = frozenset({"counter", "gauge", "histogram", "summary"})
TEXT_KINDS = KINDS | {"untyped"}
OPENMETRICS_KINDS = KINDS | {"info", "stateset", "gaugehistogram", "unknown"}
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")
SUFFIXES = (*OF_HISTOGRAMS, "_total", "_info", "_created")

OURS = re.compile(r"graphprobe[_.:]")
OPENMETRICS_MARK = re.compile(r"^# TYPE (graphprobe_\w+)(?:(?<!_total) counter| info)$", re.MULTILINE)
TEXT_MARK = re.compile(r"^# TYPE graphprobe_\w+_total counter$", re.MULTILINE)
ELSEWHERE = re.compile(r'(?:# (?:HELP|TYPE|UNIT) )?[{"]*(?!graphprobe_)[a-zA-Z_:]')


@dataclass(slots=True)
class Page:
    """What was read of a page, of ours alone. Kinds, helps and units go by the name that the metadata gives a family.

    ``whole`` is False where a limit ended the reading. ``beside`` are the few series of an engine's own that say how
    many steps it made.
    """

    openmetrics: bool = False
    whole: bool = True
    lines: list[Line] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    helps: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    beside: list[Line] = field(default_factory=list)


def parse(body: bytes, found: Findings, openmetrics: bool | None = None) -> Page:
    """The page in ``body``; what is wrong with its text goes to ``found``. Raises nothing, whatever the bytes are.

    ``openmetrics`` is what the content type says; None where there is none: then the text tells.
    """
    page = Page(whole=len(body) <= MAX_BYTES)
    text = _decoded(body, found)
    page.openmetrics = _dialect(text, openmetrics, found)
    deadline = time.monotonic() + MAX_SECONDS
    try:
        reader = _Reader(page, found)
        for number, line in enumerate(_lines(text, found, deadline), start=1):
            reader.take(number, line)
        if page.openmetrics and not found.failed:
            _strictly(text, found, deadline)
    except _Enough as enough:
        page.whole = False
        found.add("too-long", "", str(enough), TOO_LONG)
    return page


TOO_LONG = "a page of metrics is far smaller: is a request's id, a name or a time a label?"


class _Enough(Exception):
    """A limit is reached; the rest of the page is not looked at."""


def _decoded(body: bytes, found: Findings) -> str:
    if len(body) > MAX_BYTES:
        found.add("too-long", "", f"longer than {MAX_BYTES >> 20} MiB; the rest was not looked at", TOO_LONG)
        body = body[: body.rfind(b"\n", 0, MAX_BYTES) + 1 or MAX_BYTES]
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"not UTF-8 at byte {error.start:,}: {short(body[error.start : error.start + 8])}"
        found.add("encoding", "", what, "write UTF-8, without compression")
        text = body.decode("utf-8", "replace")
    if text.count("\0") > len(text) // 10:
        found.add("encoding", "", "binary, or UTF-16: full of NULs", "serve the text format or OpenMetrics, in UTF-8")
    if text and not text.endswith(("\n", "# EOF")):
        what = f"ends within a line: {short(text[-60:])}"
        found.add("syntax", "", what, "end every line with \\n; was the page cut off?")
    return text


def _dialect(text: str, said: bool | None, found: Findings) -> bool:
    """Whether the page is OpenMetrics: what the metadata of ours looks like, where the content type is wrong."""
    ends = text.rstrip().endswith("# EOF")
    text_like = TEXT_MARK.search(text) is not None
    mark = OPENMETRICS_MARK.search(text)
    modern = mark is not None and not text_like and any(f"\n{mark[1]}{end}" in text for end in ("_total", "_info"))
    if said is None:
        return modern or (ends and not text_like)
    if modern and not said:
        what = "the content type is that of the text format, the metadata that of OpenMetrics"
        hint = "send application/openmetrics-text, or write # TYPE NAME_total counter and # TYPE NAME_info gauge"
        found.add("content-type", "", what, hint)
    elif said and text_like and not ends:
        what = "the content type is that of OpenMetrics, the page is in the text format"
        found.add("content-type", "", what, "send text/plain; version=0.0.4; Prometheus refuses the page else")
    return modern or (said and (ends or not text_like))


def _lines(text: str, found: Findings, deadline: float) -> Iterator[str]:
    """The lines, within the limits; those that are too long are left empty."""
    for number, line in enumerate(text.split("\n"), start=1):
        if number % 64 == 1 and time.monotonic() > deadline:
            raise _Enough(f"parsing took more than {MAX_SECONDS:g} s; the rest, from line {number:,}, was left")
        if len(line) > MAX_LINE:
            what = f"line {number:,} has {len(line):,} characters: {short(line, 60)}"
            found.add("too-long", "", what, f"write lines of at most {MAX_LINE:,} characters")
            line = ""
        if line.endswith("\r") and not line.startswith("# HELP"):
            found.add("syntax", "", f"line {number:,} ends with \\r\\n", "end lines with \\n alone")
            line = line[:-1]
        yield line


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
        try:
            if not line.startswith("#"):
                self._sample(number, line)
            elif read := metadata(line, self.page.openmetrics):
                self._metadata(number, read)
        except Unreadable as why:
            what = f"line {number:,} cannot be read{f' ({short(why)})' if str(why) else ''}: {short(line)}"
            hint = (
                'write NAME{LABEL="VALUE",...} NUMBER or # TYPE NAME KIND; Prometheus refuses a page for one such line'
            )
            self.found.add("syntax", "", what, hint)

    def _metadata(self, number: int, read: Meta) -> None:
        word, name, text = read
        if OURS.match(name):
            self._ours_is(number, word, name, text)
        else:
            self._family = ""
        if word == "TYPE" and text not in self._kinds:
            raise Unreadable(f"{text[:40]!r} is no type")

    def _ours_is(self, number: int, word: str, name: str, text: str) -> None:
        self._enter(name)
        known = {"HELP": self.page.helps, "TYPE": self.page.kinds, "UNIT": self.page.units}[word]
        if name in known:
            self.found.add("metadata", name, f"line {number:,}: a second {word}", "write the metadata of a metric once")
        if name in self._sampled:
            what = f"line {number:,}: {word} after samples"
            self.found.add("metadata", name, what, "write metadata before the first sample")
        known.setdefault(name, text.strip())

    def _sample(self, number: int, line: str) -> None:
        if not line.strip(" \t"):
            return
        read = sample(line, self.page.openmetrics)
        if OURS.match(read.name):
            self._ours(number, read)
            return
        self._family = ""
        if read.name in BESIDE and len(self.page.beside) < MAX_SAMPLES:
            self.page.beside.append(read)

    def _ours(self, number: int, line: Line) -> None:
        if len(self.page.lines) >= MAX_SAMPLES:
            raise _Enough(f"more than {MAX_SAMPLES:,} samples; the rest, from line {number:,}, was left")
        self.page.lines.append(line)
        self._enter(line.name)
        self._sampled.add(self._family)
        if line.escape:
            hint = r'escape \ as \\, " as \" and a line feed as \n, and nothing else'
            self.found.add("syntax", line.name, f"line {number:,}: no such escape: {short(line.escape)}", hint)
        if line.time:
            hint = "leave it out: Prometheus takes the time of the scrape"
            self.found.add("timestamp", line.name, f"line {number:,} has a time: {short(line.time)}", hint)

    def _enter(self, name: str) -> None:
        """Lines of one family stand together."""
        family = self._owner(name)
        if family != self._family and family in self._seen:
            what = "its lines are interrupted by another metric"
            self.found.add("metadata", family, what, "write all lines of a metric together")
        self._family = family
        self._seen.add(family)

    def _owner(self, name: str) -> str:
        """The family that a sample of this name belongs to: declared under the name, or under it without its suffix."""
        if name in self.page.kinds or name in self.page.helps:
            return name
        suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
        bare = name.removesuffix(suffix)
        return bare if bare in self.page.kinds or bare in self.page.helps or suffix in OF_HISTOGRAMS else name


def _strictly(text: str, found: Findings, deadline: float) -> None:
    """Hold ours, and then the whole page, to the rules of OpenMetrics."""
    fault = _openmetrics_fault(_without_others(text), deadline)
    if fault:
        hint = "see the specification, or serve the text format as text/plain; version=0.0.4"
        found.add("openmetrics", "", f"not OpenMetrics: {fault}", hint)
        return
    fault = _openmetrics_fault(io.StringIO(text), deadline)
    if fault:
        found.add("openmetrics-elsewhere", "", f"not OpenMetrics: {fault}", "it is none of graphprobe's metrics")


def _without_others(text: str) -> Iterator[str]:
    end = False
    for line in io.StringIO(text):
        end = end or line.rstrip("\n") == "# EOF"
        if end or not ELSEWHERE.match(line):
            yield line


def _openmetrics_fault(lines: Iterable[str], deadline: float) -> str:
    try:
        for _ in openmetrics_families(_timed(lines, deadline)):  # type: ignore[no-untyped-call]
            pass
    except _Enough:
        raise
    except Exception as error:
        # Not only ValueError: the parser indexes into what it did not check.
        return short(error) or type(error).__name__
    return ""


def _timed(lines: Iterable[str], deadline: float) -> Iterator[str]:
    for line in lines:
        if time.monotonic() > deadline:
            raise _Enough(f"parsing took more than {MAX_SECONDS:g} s; the rest was left")
        yield line
