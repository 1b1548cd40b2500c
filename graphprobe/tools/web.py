"""The answer to a GET, limited in size and in time, whatever the server does.

Nothing is decompressed, no redirect leads to another server, and a loopback address is asked without a proxy.
"""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from urllib.parse import SplitResult, urljoin, urlsplit

from graphprobe.errors import SourceError
from graphprobe.tools.findings import short

CHUNK = 1 << 16
LOOPBACK = ("localhost", "127.0.0.1", "::1")
REDIRECTS = 10
"""Most redirects of one answer, as Prometheus follows them."""

TLS = "set SSL_CERT_FILE to the CA of its certificate, or fetch it with curl and pipe it in (-); without TLS it is http://"
LOCKED = "graphprobe sends no credentials: fetch it with curl, and pipe it in (-)"


class Wanted(NamedTuple):
    """What a reader looks for, for the request and for the hints of its errors."""

    accept: str
    file: str
    """In which file it may be."""
    absent: str
    """What to do where a server does not have it."""
    silent: str
    """What to do where there is no server."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a source gave: at most a byte more than was asked for. ``content_type`` is None where there is no HTTP."""

    body: bytes
    content_type: str | None = None


def http_url(url: str, example: str) -> SplitResult:
    """The parts of an http(s) URL; SourceError for any other text, with an ``example`` of one."""
    try:
        parts = urlsplit(url)
        fine = url.isascii() and url.isprintable() and " " not in url and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine or parts.scheme not in ("http", "https") or not parts.hostname:
        raise SourceError(f"{short(url)}: not an http(s) URL. hint: write {example}, a file, or -")
    if parts.username is not None:
        raise SourceError(f"{short(parts.hostname)}: credentials in a URL. hint: {LOCKED}")
    return parts


def read_all(read: Callable[[int], bytes], limit: int) -> bytes:
    """What ``read`` gives until its end, or a byte more than ``limit``."""
    found, length = [], 0
    while length <= limit and (chunk := read(min(CHUNK, limit + 1 - length))):
        found.append(chunk)
        length += len(chunk)
    return b"".join(found)


def ask(url: str, wanted: Wanted, limit: int, timeout: float) -> Answer:
    """The answer to a GET of ``url``, within ``timeout`` seconds; SourceError where that is no page."""
    deadline = time.monotonic() + timeout
    asked = [url]
    try:
        while True:
            url = asked[-1]
            request = urllib.request.Request(url, headers={"Accept": wanted.accept})
            try:
                with opener(url).open(request, timeout=_left(deadline)) as answer:
                    return _whole(answer, url, wanted, limit)
            except urllib.error.HTTPError as error:
                with error:
                    asked.append(_onward(asked, error, wanted))
    except SourceError:
        raise
    except Exception as error:
        # Beside OSError, http.client raises its own family for an answer that is no HTTP.
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        hint = TLS if isinstance(cause, ssl.SSLError) else wanted.silent
        raise SourceError(f"{short(url)}: {_told(cause, timeout)}. hint: {hint}") from error


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _onward(asked: list[str], error: urllib.error.HTTPError, wanted: Wanted) -> str:
    """Where an answer that is no page redirects to; SourceError where it does not, or not to the same server."""
    url, location = asked[-1], error.headers.get("Location")
    if error.code not in (301, 302, 303, 307, 308) or location is None:
        raise _refused(url, error.code, wanted) from error
    told = f"{short(url)}: HTTP {error.code}, it redirects to {short(location)}"
    try:
        following = urljoin(url, location)
        # What cannot be printed would be left out on the way, and is no part of an address.
        fine = location.isprintable() and _same_server(urlsplit(url), http_url(following, ""))
    except (SourceError, ValueError):
        fine = False
    if not fine:
        raise SourceError(f"{told}. hint: that is another server; if it is the right one, give its address") from error
    if following in asked or len(asked) > REDIRECTS:
        why = "a loop" if following in asked else f"after {REDIRECTS} others"
        raise SourceError(f"{told}: {why}. hint: see the log of the server, or give another address") from error
    return following


def _same_server(one: SplitResult, other: SplitResult) -> bool:
    """The same host and port; or the same host with TLS, wherever that is, instead of none."""
    upgraded = (one.scheme, other.scheme) == ("http", "https")
    same = (one.scheme, _port(one)) == (other.scheme, _port(other))
    return one.hostname == other.hostname and (same or upgraded)


def _port(parts: SplitResult) -> int:
    return parts.port or {"http": 80, "https": 443}[parts.scheme]


def _whole(answer: http.client.HTTPResponse, url: str, wanted: Wanted, limit: int) -> Answer:
    if answer.status != http.client.OK:
        raise _refused(url, answer.status, wanted)
    coding = answer.headers.get("Content-Encoding", "")
    if coding.strip().lower() not in ("", "identity"):
        hint = "the request says Accept-Encoding: identity; answer it without compression"
        raise SourceError(f"{short(url)}: compressed ({short(coding, 40)}). hint: {hint}")
    body = read_all(answer.read, limit)
    if len(body) <= limit and answer.length:
        hint = "did the process end, or is its Content-Length wrong?"
        raise SourceError(f"{short(url)}: the answer broke off, {answer.length:,} bytes are missing. hint: {hint}")
    return Answer(body, answer.headers.get("Content-Type", ""))


def _refused(url: str, code: int, wanted: Wanted) -> SourceError:
    hint = "see the log of the server"
    if code in (401, 403, 407):
        hint = LOCKED
    elif code in (404, 405, 406, 410):
        hint = wanted.absent
    return SourceError(f"{short(url)}: HTTP {code}. hint: {hint}")


def _told(cause: object, timeout: float) -> str:
    if isinstance(cause, TimeoutError):
        return f"no whole answer in {timeout:g} s"
    if isinstance(cause, http.client.IncompleteRead):
        return "the answer broke off"
    if isinstance(cause, http.client.HTTPException) and not isinstance(cause, OSError):
        return f"no HTTP answer ({type(cause).__name__}: {short(cause, 60)})"
    return short(getattr(cause, "strerror", None) or cause) or type(cause).__name__


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nothing: urllib would go to other hosts, read any body on the way, and begin a new timeout each time."""

    def _none(self, *_: object) -> None:
        """Urllib then reports the answer as an HTTPError."""

    http_error_301 = http_error_302 = http_error_303 = http_error_307 = http_error_308 = _none  # type: ignore[assignment]


class _Timed(io.RawIOBase):
    """Reads from a socket up to a deadline, however slowly the bytes come: its own timeout is for each of them."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw, self._socket, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(_left(self._deadline))
        return cast("int | None", self._raw.readinto(buffer))

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """One deadline for status, headers and body."""

    def __init__(self, deadline: float, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, deadline))


class _Connection(http.client.HTTPConnection):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        deadline = time.monotonic() + cast(float, self.timeout)
        self.response_class = functools.partial(_Response, deadline)  # type: ignore[assignment]


class _TlsConnection(_Connection, http.client.HTTPSConnection):
    pass


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_TlsConnection, request)


def opener(url: str) -> urllib.request.OpenerDirector:
    """What opens ``url``."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect(), _Http(), _Https()]
    if urlsplit(url).hostname in LOOPBACK:
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)
