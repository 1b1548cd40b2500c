"""Whether a page of metrics, ours or that of an engine in Rust or C++, keeps the metric contract.

``graphprobe.tools.exposition`` reads the text with prometheus_client's parsers and says what is wrong with it;
``graphprobe.tools.contract`` holds its samples against the contract. Here a source is read, once or twice, with limits
of size and time. Nothing on a page raises: it is a Finding. Only a source that gives no page at all is a SourceError.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from itertools import groupby
from typing import cast
from urllib.parse import urlsplit, urlunsplit

from graphprobe import metrics
from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools import exposition, sources
from graphprobe.tools.contract import Series, compare, examine
from graphprobe.tools.exposition import Finding, Findings, short

__all__ = ["Finding", "Report", "check", "findings", "metrics_url"]

WAIT = 1.0
"""Seconds between the two reads of a URL."""

ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
"""What Prometheus asks for."""


@dataclass(frozen=True, slots=True)
class Report:
    """What ``check`` found. ``series`` counts the samples of the contract; ``forwards`` names who has any."""

    source: str
    series: int
    forwards: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no finding at all."""
        return not self.findings

    def to_json(self) -> str:
        """The same as one JSON object, with the contract's version."""
        told = {"contract": metrics.CONTRACT, "ok": self.ok, **dataclasses.asdict(self)}
        return json.dumps(told, indent=1)

    def __str__(self) -> str:
        kinds = Counter(finding.severity for finding in self.findings)
        counts = ", ".join(
            f"{kinds[kind]} {kind}{'s' * (kinds[kind] > 1)}" for kind in ("error", "warning") if kinds[kind]
        )
        what = f"{self.series:,} samples of {len(self.forwards)} forward{'s' * (len(self.forwards) != 1)}"
        verdict = counts or "keeps it"
        head = f"{short(self.source)}: {verdict} (metric contract {metrics.CONTRACT}, {what})"
        lines = [head]
        for (severity, metric, hint), group in groupby(self.findings, key=lambda finding: finding.kind):
            lines += [f"{severity:<7}  {metric or 'page'}", *(f"         {one.what}" for one in group)]
            lines.append(f"         hint: {hint}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a source gave: at most a little more than ``exposition.MAX_BYTES``; ``content_type`` None: no HTTP."""

    body: bytes
    content_type: str | None = None


def check(source: str | os.PathLike[str] | None = None, *, wait: float | None = None, timeout: float = 5.0) -> Report:
    """Read a URL, a file, ``-`` or None (the exporter of this machine), and hold it against the contract.

    After ``wait`` seconds it is read once more, to see whether a counter fell: by default a second for a URL and not at
    all for a file; 0 is not at all. SourceError where there is nothing to read.
    """
    name = sources.DEFAULT if source is None else os.fspath(source)
    pause = wait if wait is not None else WAIT if "://" in name else 0.0
    if pause and name == "-":
        raise ConfigError("standard input comes once", "give a URL or a file, or leave --wait out")
    answer, earlier = _read(name, timeout), None
    found = Findings()
    if pause:
        time.sleep(pause)
        try:
            earlier, answer = answer, _read(name, timeout)
        except SourceError as error:
            earlier = None
            found.error("", f"the second read failed: {error}", "did the process end or restart?")
    series = _checked(answer, found)
    if earlier is not None:
        compare(_checked(earlier, Findings()), series, found)
    forwards = sorted({one.labels["forward"] for one in series if "forward" in one.labels})
    return Report(name, len(series), tuple(forwards), found.all())


def findings(
    body: bytes | str, content_type: str | None = None, earlier: bytes | str | None = None
) -> tuple[Finding, ...]:
    """What is wrong with a page, and with the step from an ``earlier`` page of the same process to it."""
    found = Findings()
    series = _checked(Answer(_bytes(body), content_type), found)
    if earlier is not None:
        compare(_checked(Answer(_bytes(earlier), content_type), Findings()), series, found)
    return found.all()


def metrics_url(url: str) -> str:
    """The address of the metrics that belong to the address of an exporter, of its snapshot, or of the metrics."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise SourceError(f"{url}: not an http(s) URL. hint: write http://HOST:PORT/metrics, a file, or -")
    path = parts.path.rstrip("/")
    base = path.removesuffix("/snapshot")
    return urlunsplit(
        (parts.scheme, parts.netloc, path if base and base == path else f"{base}/metrics", parts.query, "")
    )


def _bytes(body: bytes | str) -> bytes:
    return body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body


def _read(name: str, timeout: float) -> Answer:
    if name == "-":
        return Answer(_limited(cast(BufferedReader, sys.stdin.buffer).read1))
    if "://" in name:
        return _fetched(metrics_url(name), timeout)
    try:
        with open(name, "rb") as file:
            return Answer(_limited(file.read1))
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise SourceError(f"{name}: {what}. hint: give an http:// URL, a file with a page of metrics, or -") from error


def _fetched(url: str, timeout: float) -> Answer:
    request = urllib.request.Request(url, headers={"Accept": ACCEPT})
    try:
        with sources.opener(url).open(request, timeout=timeout) as answer:
            deadline = time.monotonic() + timeout
            return Answer(_limited(answer.read1, url, deadline), answer.headers.get("Content-Type", ""))
    except urllib.error.HTTPError as error:
        where = f", to {short(error.headers.get('Location'))}" if 300 <= error.code < 400 else ""
        raise SourceError(f"{url}: HTTP {error.code}{where}. hint: give the address of the page of metrics") from error
    except SourceError:
        raise
    except Exception as error:
        # Beside OSError, http.client raises its own family for an answer that is no HTTP.
        cause = getattr(error, "reason", None) or error
        hint = "is the engine up, and is this the port of its metrics?"
        raise SourceError(f"{url}: {short(cause) or type(error).__name__}. hint: {hint}") from error


def _limited(read: Callable[[int], bytes], name: str = "", deadline: float = math.inf) -> bytes:
    """Everything, or a chunk more than the longest page. ``read`` returns what is there, so a trickle ends in time."""
    found, length = [], 0
    while length <= exposition.MAX_BYTES and (chunk := read(sources.CHUNK)):
        found.append(chunk)
        length += len(chunk)
        if time.monotonic() > deadline:
            raise SourceError(f"{name}: the answer did not end in time. hint: Prometheus would give it up as well")
    return b"".join(found)


def _checked(answer: Answer, found: Findings) -> list[Series]:
    """The series of our contract on a page; all findings of that page alone."""
    return examine(exposition.parse(answer.body, found, _content_type(answer.content_type, found)), found)


def _content_type(value: str | None, found: Findings) -> bool | None:
    """Whether the page says that it is OpenMetrics; None where it says nothing."""
    if value is None:
        return None
    kind, *options = [part.strip().lower() for part in value.split(";")]
    given = dict(option.split("=", 1) for option in options if "=" in option)
    versions = {"text/plain": ("0.0.4", "1.0.0"), "application/openmetrics-text": ("0.0.1", "1.0.0")}.get(kind)
    hint = "send text/plain; version=0.0.4, or application/openmetrics-text; version=1.0.0"
    if versions is None:
        found.error("", f"content type {short(value) or 'missing'!r}: Prometheus 3 refuses the page", hint)
        return None
    if given.get("version", versions[0]).strip('"') not in versions:
        found.error("", f"content type {short(value)!r}: no such version", hint)
    if given.get("charset", "utf-8").strip('"') not in ("utf-8", "utf8"):
        found.error("", f"content type {short(value)!r}: the page must be UTF-8", hint)
    return kind == "application/openmetrics-text"
