"""SOURCE -> Snapshot: the address of an exporter, a file, or ``-`` for standard input."""

from __future__ import annotations

import os
from urllib.parse import urlunsplit

from graphprobe.errors import SourceError
from graphprobe.snapshot import Snapshot
from graphprobe.tools.fetch import fetch
from graphprobe.tools.web import Wanted, http_url

DEFAULT = "http://127.0.0.1:9464"
"""The exporter of this machine, as ``start_exporter()`` serves it."""

MAX_BYTES = 64 << 20
"""Longest text that is read: ten times a snapshot with every exact size on both paths."""

WANTED = Wanted(
    "application/json",
    "a file of Snapshot.to_json()",
    "there is no graphprobe exporter here; graphprobe.start_exporter() serves /snapshot",
    "is the engine up, and did it call graphprobe.start_exporter()? else give a URL, a file, or -",
)

Source = str | os.PathLike[str] | Snapshot | None


def read(source: Source = None, *, timeout: float = 5.0) -> Snapshot:
    """The snapshot of ``source``: an http(s) URL, a file, ``-``, or None for the exporter of this machine.

    The URL may be that of the exporter, of its ``/metrics`` or of its ``/snapshot``. ``timeout`` in seconds is for the
    whole answer. A Snapshot is handed through. SourceError says what was found instead, and what to do.
    """
    if isinstance(source, Snapshot):
        return source
    name = DEFAULT if source is None else os.fsdecode(source)
    text = fetch(name, WANTED, MAX_BYTES, timeout, snapshot_url).body
    if len(text) > MAX_BYTES:
        raise SourceError(f"{name}: longer than {MAX_BYTES >> 20} MiB, which no snapshot is. hint: give {WANTED.file}")
    return _parsed(text, name)


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


def _parsed(text: bytes, name: str) -> Snapshot:
    if text.lstrip().startswith((b"# HELP", b"# TYPE")):
        raise SourceError(f"{name}: these are metrics, not a snapshot. hint: save the exporter's /snapshot instead")
    try:
        return Snapshot.from_json(text)
    except SourceError as error:
        hint = "give the exporter's URL, or a file of Snapshot.to_json()"
        raise SourceError(f"{name}: {error}. hint: {hint}") from error
