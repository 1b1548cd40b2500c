"""SOURCE -> Snapshot: the address of an exporter, a file, or ``-`` for standard input."""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request
from typing import BinaryIO, Protocol
from urllib.parse import urlsplit, urlunsplit

from graphprobe.errors import SourceError
from graphprobe.snapshot import Snapshot

DEFAULT = "http://127.0.0.1:9464"
"""The exporter of this machine, as ``start_exporter()`` serves it."""

MAX_BYTES = 64 << 20
"""Longest text that is read: ten times a snapshot with every exact size on both paths."""

CHUNK = 1 << 16
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Source = str | os.PathLike[str] | Snapshot | None


class Readable(Protocol):
    """What :func:`_limited` reads from."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes, none at the end."""


def read(source: Source = None, *, timeout: float = 5.0) -> Snapshot:
    """The snapshot of ``source``: an http(s) URL, a file, ``-``, or None for the exporter of this machine.

    The URL may be that of the exporter, of its ``/metrics`` or of its ``/snapshot``. ``timeout`` in seconds is for the
    whole answer. A Snapshot is handed through. SourceError says what was found instead, and what to do.
    """
    if isinstance(source, Snapshot):
        return source
    name = DEFAULT if source is None else os.fspath(source)
    return _parsed(_text(name, timeout), name)


def snapshot_url(url: str) -> str:
    """The address of the snapshot that belongs to the address of an exporter, of its metrics or of the snapshot."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise SourceError(f"{url}: not an http(s) URL. hint: write http://HOST:PORT, a file, or -")
    base, _, last = parts.path.rstrip("/").rpartition("/")
    if last in ("metrics", "snapshot"):
        path = f"{base}/snapshot"
    else:
        path = parts.path if last.endswith(".json") else f"{parts.path.rstrip('/')}/snapshot"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _text(name: str, timeout: float) -> bytes:
    if name == "-":
        return _limited(sys.stdin.buffer, name)
    if "://" in name:
        return _fetched(snapshot_url(name), timeout)
    try:
        with open(name, "rb") as file:
            return _limited(file, name)
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise SourceError(f"{name}: {what}. hint: give an http:// URL, a file of Snapshot.to_json(), or -") from error


def _fetched(url: str, timeout: float) -> bytes:
    try:
        with opener(url).open(url, timeout=timeout) as answer:
            return _limited(answer, url, time.monotonic() + timeout)
    except urllib.error.HTTPError as error:
        raise SourceError(f"{url}: HTTP {error.code}. hint: {_http_hint(error)}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        cause = getattr(error, "reason", error)
        hint = "is the engine up, and did it call graphprobe.start_exporter()? else give a URL, a file, or -"
        raise SourceError(f"{url}: {cause or type(error).__name__}. hint: {hint}") from error
    except Exception as error:
        # http.client raises its own family for an answer that is no HTTP.
        text = f"{url}: no HTTP answer ({type(error).__name__}). hint: is this the exporter's port?"
        raise SourceError(text) from error


def _http_hint(error: urllib.error.HTTPError) -> str:
    if error.code == 404:
        return "there is no graphprobe exporter here; graphprobe.start_exporter() serves /snapshot"
    if 300 <= error.code < 400:
        return f"it redirects to {error.headers.get('Location')}; give that address yourself"
    return "see the log of the server"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead to another scheme or host than the one that was asked for."""

    def redirect_request(self, *_: object) -> None:
        """Follow nothing: urllib then reports the answer as an HTTPError."""


def opener(url: str) -> urllib.request.OpenerDirector:
    """What opens ``url``: no redirects are followed, and a loopback address is asked without a proxy."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if urlsplit(url).hostname in LOOPBACK:
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


def _limited(file: Readable | BinaryIO, name: str, deadline: float | None = None) -> bytes:
    found, length = [], 0
    while chunk := file.read(CHUNK):
        found.append(chunk)
        length += len(chunk)
        if length > MAX_BYTES:
            raise SourceError(f"{name}: longer than {MAX_BYTES >> 20} MiB, which no snapshot is")
        if deadline is not None and time.monotonic() > deadline:
            raise SourceError(f"{name}: the answer did not end in time. hint: is this the exporter's port?")
    return b"".join(found)


def _parsed(text: bytes, name: str) -> Snapshot:
    if text.lstrip().startswith((b"# HELP", b"# TYPE")):
        raise SourceError(f"{name}: these are metrics, not a snapshot. hint: save the exporter's /snapshot instead")
    try:
        return Snapshot.from_json(text)
    except SourceError as error:
        hint = "give the exporter's URL, or a file of Snapshot.to_json()"
        raise SourceError(f"{name}: {error}. hint: {hint}") from error
