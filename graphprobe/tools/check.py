"""Whether a page of metrics, ours or that of an engine in Rust or C++, conforms to the metric contract.

``graphprobe.tools.exposition`` reads the text, ``graphprobe.tools.contract`` holds its samples against the contract,
and what can be found is the table of ``graphprobe.tools.findings``. Here a source is read, once or twice. Nothing on a
page raises: it is a Finding. Only a source that gives no page at all is a SourceError.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from urllib.parse import urlunsplit

from graphprobe import metrics
from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools import exposition, sources
from graphprobe.tools.agreement import Counted, counted, look_at_launches, look_at_steps, told
from graphprobe.tools.contract import examine
from graphprobe.tools.exposition import Page
from graphprobe.tools.fetch import fetch, seconds
from graphprobe.tools.findings import Finding, Findings, short
from graphprobe.tools.processes import compare
from graphprobe.tools.series import Series, processes
from graphprobe.tools.web import Answer, Wanted, http_url

__all__ = ["Finding", "Report", "check", "findings", "metrics_url"]

WAIT = 1.0
"""Seconds between the two reads of a URL."""

WANTED = Wanted(
    # What Prometheus asks for.
    "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "a file with a page of metrics",
    "give the address of the page of metrics",
    "is the engine up, and is this the port of its metrics?",
)

OURS = re.compile(rb"^(?:# [A-Z]+ )?graphprobe_", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Report:
    """What ``check`` found.

    ``series`` counts the samples of the contract, ``processes`` those whom they are of; ``forwards`` names who has any.
    """

    source: str
    series: int
    processes: int
    forwards: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    """What was compared and agrees, or is merely told."""

    @property
    def ok(self) -> bool:
        """Whether the page conforms to the contract: there may be warnings, but no error."""
        return all(finding.severity == "warning" for finding in self.findings)

    def to_json(self) -> str:
        """The same as one JSON object, with the contract's version."""
        told = {"contract": metrics.CONTRACT, "ok": self.ok, **dataclasses.asdict(self)}
        return json.dumps(told, indent=1)

    def __str__(self) -> str:
        kinds = Counter(finding.severity for finding in self.findings)
        counts = [f"{kinds[kind]} {kind}{'s' * (kinds[kind] > 1)}" for kind in ("error", "warning") if kinds[kind]]
        verdict = ", ".join([*["conforms"] * self.ok, *counts])
        sizes = {"process": self.processes, "forward": len(self.forwards), "sample": self.series}
        what = ", ".join(_counted(number, noun) for noun, number in sizes.items())
        lines = [f"{short(self.source)}: {verdict} (metric contract {metrics.CONTRACT}; {what})"]
        for (rule, metric, hint), group in groupby(self.findings, key=lambda finding: finding.kind):
            told = list(group)
            lines.append(f"{told[0].severity:<7}  {metric or 'page'} ({rule})")
            lines += [*(f"         {one.what}" for one in told), f"         hint: {hint}"]
        return "\n".join([*lines, *(f"note     {short(note)}" for note in self.notes)])


def check(source: str | os.PathLike[str] | None = None, *, wait: float | None = None, timeout: float = 5.0) -> Report:
    """Read a URL, a file, ``-`` or None (the exporter of this machine), and hold it against the contract.

    After ``wait`` seconds it is read once more, to see whether a counter fell: by default a second for a URL and not at
    all for a file; 0 is not at all. ``timeout`` in seconds is for each of the two. SourceError where there is nothing
    to read, ConfigError for a time that is none.
    """
    name = sources.DEFAULT if source is None else os.fsdecode(source)
    pause = (WAIT if "://" in name else 0.0) if wait is None else wait and seconds(wait, "wait")
    if pause and name == "-":
        raise ConfigError("standard input comes once", "give a URL or a file, or leave --wait out")
    answer, earlier = _read(name, timeout), None
    found = Findings()
    if pause:
        time.sleep(pause)
        try:
            earlier, answer = answer, _read(name, timeout)
        except SourceError as error:
            found.add("second-read", "", f"the second read failed: {error}", "did the process end or restart?")
    series, steps = _checked(answer, earlier, found, pause)
    forwards = sorted({one.labels["forward"] for one in series if "forward" in one.labels})
    notes = tuple(told(series, steps))
    return Report(name, len(series), processes(series), tuple(forwards), found.all(), notes)


def findings(
    body: bytes | str, content_type: str | None = None, earlier: bytes | str | None = None, pause: float = 0.0
) -> tuple[Finding, ...]:
    """What is wrong with a page, and with the step from an ``earlier`` page of the same process to it.

    ``pause`` is the time between the two, in seconds: the longer, the less may be on its way from one count to another.
    """
    found = Findings()
    before = None if earlier is None else Answer(_bytes(earlier), content_type)
    _checked(Answer(_bytes(body), content_type), before, found, pause)
    return found.all()


def metrics_url(url: str) -> str:
    """The address of the metrics that belong to the address of an exporter or of its snapshot; any other as it is."""
    parts = http_url(url, "http://HOST:PORT/metrics")
    bare = parts.path.rstrip("/")
    base = bare.removesuffix("/snapshot")
    path = parts.path if base and base == bare else f"{base}/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _counted(number: int, noun: str) -> str:
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def _bytes(body: bytes | str) -> bytes:
    return body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body


def _read(name: str, timeout: float) -> Answer:
    return fetch(name, WANTED, exposition.MAX_BYTES, timeout, metrics_url)


def _checked(
    answer: Answer, earlier: Answer | None, found: Findings, pause: float = 0.0
) -> tuple[list[Series], Counted]:
    """The series of our contract on a page, and an engine's steps; findings of it, and of the way from an earlier."""
    page = _page(answer, found)
    series = examine(page, found)
    now = counted(page, series)
    before = now
    if earlier is not None and page.whole:
        old = _page(earlier, Findings())
        once = examine(old, Findings())
        compare(once, series, found)
        before = counted(old, once)
    look_at_steps(before, now, pause, found)
    look_at_launches(series, found)
    return series, now


def _page(answer: Answer, found: Findings) -> Page:
    openmetrics, text = _content_type(answer.content_type, found)
    # A login page would otherwise be told line by line.
    return exposition.parse(answer.body if text or OURS.search(answer.body) else b"", found, openmetrics)


def _content_type(value: str | None, found: Findings) -> tuple[bool | None, bool]:
    """Whether the page says that it is OpenMetrics, None where it says nothing; and whether it may be a page at all."""
    if value is None:
        return None, True
    kind, *options = [part.strip().lower() for part in value.split(";")]
    given = dict(option.split("=", 1) for option in options if "=" in option)
    versions = {"text/plain": ("0.0.4", "1.0.0"), "application/openmetrics-text": ("0.0.1", "1.0.0")}.get(kind)
    hint = "send text/plain; version=0.0.4, or application/openmetrics-text; version=1.0.0"
    if versions is None:
        what = f"content type {short(value) or 'missing'!r}: Prometheus 3 refuses the page"
        found.add("content-type", "", what, hint)
        return None, not value
    if given.get("version", versions[0]).strip('"') not in versions:
        found.add("content-type", "", f"content type {short(value)!r}: no such version", hint)
    if given.get("charset", "utf-8").strip('"') not in ("utf-8", "utf8"):
        found.add("content-type", "", f"content type {short(value)!r}: the page must be UTF-8", hint)
    return kind == "application/openmetrics-text", True
