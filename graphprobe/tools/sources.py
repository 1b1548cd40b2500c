"""SOURCE -> snapshots: an exporter, a page of metrics, a Prometheus server, text of sizes, or the log of an engine.

Each is an address, a file, or ``-`` for standard input; what it is, its content tells.
"""

from __future__ import annotations

import os
import re
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlunsplit

from graphprobe.buckets import as_size
from graphprobe.errors import ConfigError, SourceError
from graphprobe.snapshot import Snapshot
from graphprobe.tools import logs, sizes
from graphprobe.tools.fetch import fetch
from graphprobe.tools.web import Wanted, http_url

DEFAULT = "http://127.0.0.1:9464"
"""The exporter of this machine, as ``start_exporter()`` serves it."""

MAX_BYTES = 64 << 20
"""Longest text that is read: ten times a snapshot with every exact size on both paths, or hours of a log."""

PARTS = 24
"""Windows into which a stretch of time is cut by default."""

WANTED = Wanted(
    "application/json",
    "a file of Snapshot.to_json()",
    "there is no graphprobe exporter here; graphprobe.start_exporter() serves /snapshot",
    "is the engine up, and did it call graphprobe.start_exporter()? else give a URL, a file, or -",
)
PAGE = WANTED._replace(accept="text/plain;version=0.0.4,*/*;q=0.1")

READ = (
    "what is read: a snapshot; a page of metrics; batch sizes, one a line, in a column batch_size, or as size,calls; "
    "a log of vLLM with the tables of --cudagraph-metrics; a log of SGLang with decode lines; and, with a window of "
    "time, Prometheus"
)
OURS = re.compile(rb"^(?:# [A-Z]+ )?graphprobe_[a-z]", re.MULTILINE)
PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")

Source = str | os.PathLike[str] | Snapshot | None


@dataclass(frozen=True, slots=True)
class Reading:
    """What a source says.

    ``snapshot`` is all of it, ``windows`` the same in parts of time, the oldest first; none where the source knows no
    time. ``kind`` is ``snapshot``, ``metrics``, ``prometheus``, ``sizes``, ``vllm``, ``sglang`` or ``simulated``.
    ``notes`` are what a reader of the numbers must know, one sentence each. ``processes`` is of how many each
    forward is the sum, where that is more than one, and ``spec_tokens`` how many tokens vLLM says that it drafts ahead.
    """

    snapshot: Snapshot
    windows: tuple[Snapshot, ...] = ()
    kind: str = "snapshot"
    notes: tuple[str, ...] = ()
    processes: Mapping[str, int] = field(default_factory=dict)
    spec_tokens: int = 0


def read(source: Source = None, *, timeout: float = 5.0) -> Snapshot:
    """The snapshot of ``source``, as ``reading`` has it."""
    return reading(source, timeout=timeout).snapshot


def reading(
    source: Source = None,
    *,
    timeout: float = 5.0,
    window: float | None = None,
    end: float | None = None,
    parts: int = PARTS,
    match: str = "",
) -> Reading:
    """What ``source`` says: an http(s) URL, a file, ``-``, or None for the exporter of this machine.

    The URL may be that of an exporter, of its ``/metrics`` or its ``/snapshot``; where a server has no snapshot, its
    page of metrics is read. With ``window``, in seconds, the URL is that of a Prometheus server: read is the window up
    to ``end`` (seconds of the epoch; None: now) of the series that ``match`` selects, as ``job="vllm"``. What knows
    time comes in up to ``parts`` windows. ``timeout`` in seconds is for each answer. A Snapshot is handed through.

    SourceError says what was found instead and what to do, ConfigError which arguments contradict each other.
    """
    as_size(parts, "parts")
    if window is not None:
        if isinstance(source, Snapshot) or "://" not in (name := _name(source)):
            raise ConfigError("only Prometheus has a window of time", "give its address, as http://HOST:9090")
        from graphprobe.tools import prometheus

        history = prometheus.read(name, prometheus.span(window, end, parts), match, timeout)
        return Reading(history.snapshot, history.windows, "prometheus", history.notes, history.processes)
    if end is not None or match:
        given = "match" if match else "end"
        raise ConfigError(f"{given} without a window of time", "window=3600 is the last hour of a Prometheus server")
    if isinstance(source, Snapshot):
        return Reading(source)
    name = _name(source)
    return _told(_fetched(name, timeout), name, parts)


def snapshot_url(url: str) -> str:
    """The address of the snapshot that belongs to the address of an exporter, of its metrics or of the snapshot."""
    parts = http_url(url, "http://HOST:PORT")
    base, _, last = parts.path.rstrip("/").rpartition("/")
    if last == "metrics":
        path = f"{base}/snapshot"
    else:
        given = last == "snapshot" or last.endswith(".json")
        path = parts.path if given else f"{parts.path.rstrip('/')}/snapshot"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def page_url(url: str) -> str:
    """The address of the page of metrics that belongs to the address of an exporter; any other as it is."""
    parts = http_url(url, "http://HOST:PORT")
    path = parts.path if parts.path.rstrip("/") else "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _name(source: str | os.PathLike[str] | None) -> str:
    return DEFAULT if source is None else os.fsdecode(source)


def _fetched(name: str, timeout: float) -> bytes:
    try:
        return fetch(name, WANTED, MAX_BYTES, timeout, snapshot_url).body
    except SourceError as error:
        refused = error.__cause__
        absent = isinstance(refused, urllib.error.HTTPError) and refused.code in (404, 405, 406, 410)
        if not absent or page_url(name) == snapshot_url(name):
            raise
    return fetch(name, PAGE, MAX_BYTES, timeout, page_url).body


def _told(body: bytes, name: str, parts: int) -> Reading:
    if len(body) > MAX_BYTES:
        hint = "give the end of it: tail -c 60M FILE | graphprobe ... -"
        raise SourceError(f"{name}: longer than {MAX_BYTES >> 20} MiB. hint: {hint}")
    text = body.removeprefix(b"\xef\xbb\xbf")
    log = logs.engine(text)
    if text.lstrip().startswith(b"{") and not log:
        return Reading(_snapshot(text, name))
    if OURS.search(text):
        # It imports prometheus_client, which an engine must import first (see export/multiprocess.py).
        from graphprobe.tools.page import from_page

        page = from_page(text, name)
        return Reading(page.snapshot, (), "metrics", page.notes, page.processes, page.spec_tokens)
    told = logs.read(text, name, parts) if log else sizes.read(text, name, parts)
    if told is None:
        raise SourceError(f"{name}: {_strange(text)}")
    return Reading(told.snapshot, told.windows, told.kind, told.notes)


def _snapshot(text: bytes, name: str) -> Snapshot:
    try:
        return Snapshot.from_json(text)
    except SourceError as error:
        hint = "give the exporter's URL, or a file of Snapshot.to_json()"
        raise SourceError(f"{name}: {error}. hint: {hint}") from error


def _strange(text: bytes) -> str:
    """What a text is that cannot be read, and what to do."""
    if text.startswith(PACKED):
        return "it is compressed. hint: unpack it on the way: zcat FILE | graphprobe ... -"
    if text.lstrip().startswith((b"# HELP", b"# TYPE")):
        hint = (
            "does the process call start_exporter(), or was an engine started with GRAPHPROBE=1 (docs/engines.md)? "
            "of a Prometheus server, give a window of time, too (--last 6h)"
        )
        return f"these are metrics, but none of graphprobe's. hint: {hint}"
    begin = text[: 1 << 20].lower()
    hint = READ
    if b"\0" in begin:
        hint = "it is binary, or UTF-16: save it as UTF-8"
    elif b"sglang" in begin or b"prefill batch" in begin:
        hint = logs.SGLANG
    elif b"vllm" in begin:
        hint = logs.VLLM
    return f"not a graphprobe snapshot, and nothing else that is read. hint: {hint}"
