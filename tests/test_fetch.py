"""What a source may do to those who read it: each is one line that says what to do, and none takes for ever."""

from __future__ import annotations

import gzip
import io
import os
import ssl
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools import check, sources
from graphprobe.tools.fetch import fetch
from graphprobe.tools.web import _same_server
from tests.servers import Server, certificate

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
LIMIT = 1000


def asked(name: str, timeout: float = 5.0, limit: int = LIMIT) -> bytes:
    return fetch(name, check.WANTED, limit, timeout, check.metrics_url).body


def refused(name: str, timeout: float = 5.0) -> str:
    """The one line that is told."""
    with pytest.raises(SourceError) as caught:
        asked(name, timeout)
    told = str(caught.value)
    assert ". hint: " in told
    assert told.isprintable()
    assert len(told) < 400
    return told


def saying(text: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """A reply of these bytes, and no more."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(text)

    return reply


@pytest.fixture
def dripping(server: Server) -> Iterator[Callable[[bytes, bytes, float], str]]:
    """A server that says the first bytes at once, and then the others again and again; its address."""
    stop = threading.Event()

    def start(first: bytes, then: bytes, pause: float) -> str:
        def reply(handler: BaseHTTPRequestHandler) -> None:
            try:
                handler.wfile.write(first)
                while not stop.wait(pause):
                    handler.wfile.write(then)
            except OSError:
                pass

        server.reply = reply
        return server.url

    yield start
    stop.set()


SLOW = {
    "silence": (b"", b""),
    "a status without end": (b"HTTP/1.1 200 ", b"O"),
    "a header without end": (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    "headers without end": (b"HTTP/1.1 200 OK\r\n", b"X: x\r\n"),
    "continue without end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a body that drips": (OK + b"\r\n", b"x"),
    "a body that stops": (OK + b"\r\nx 1\n", b""),
    "a body shorter than said": (OK + b"Content-Length: 900\r\n\r\nx 1\n", b""),
    "chunks that drip": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "a chunk that stops": (OK + b"Transfer-Encoding: chunked\r\n\r\n900\r\nx", b""),
}


@pytest.mark.parametrize("case", SLOW)
def test_a_slow_server_costs_the_timeout(case: str, dripping: Callable[[bytes, bytes, float], str]) -> None:
    """One deadline is for all of an answer: a byte now and then, in its headers too, does not prolong it."""
    url = dripping(*SLOW[case], 0.02)
    begun = time.monotonic()
    assert "no whole answer in 0.4 s" in refused(url, timeout=0.4)
    assert 0.3 < time.monotonic() - begun < 4


def test_a_fast_server_that_never_answers_costs_the_timeout(dripping: Callable[[bytes, bytes, float], str]) -> None:
    """Bytes without a pause do not prolong the deadline either."""
    assert "no whole answer in 0.4 s" in refused(dripping(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.0), timeout=0.4)


def test_an_endless_body_costs_the_limit(dripping: Callable[[bytes, bytes, float], str]) -> None:
    """Nothing beyond it is read, so that the caller can tell that it was reached."""
    url = dripping(OK + b"\r\n", b"x" * 500, 0.0)
    assert b"x" * (LIMIT + 1) == asked(url, timeout=30)


SAID = {
    "no page": (b"HTTP/1.1 404 Not Found\r\n\r\n", "HTTP 404. hint: give the address of the page"),
    "an error": (b"HTTP/1.1 500 Oh\r\n\r\n", "HTTP 500. hint: see the log of the server"),
    "nothing": (b"HTTP/1.1 204 No Content\r\n\r\n", "HTTP 204"),
    "a part": (b"HTTP/1.1 206 Partial Content\r\n\r\nx 1\n", "HTTP 206"),
    "a lock": (b"HTTP/1.1 401 No\r\nWWW-Authenticate: Weird x\r\n\r\n", "graphprobe sends no credentials"),
    "a redirect to itself": (
        b"HTTP/1.1 302 F\r\nLocation: /metrics\r\n\r\n",
        "redirects to /metrics: a loop. hint: see",
    ),
    "a redirect to itself, part of it": (b"HTTP/1.1 308 P\r\nLocation: #x\r\n\r\n", "redirects to #x: a loop"),
    "a redirect to a file": (b"HTTP/1.1 301 P\r\nLocation: file:///etc/passwd\r\n\r\n", "is another server"),
    "a redirect to another host": (
        b"HTTP/1.1 302 F\r\nLocation: http://h:1/metrics\r\n\r\n",
        "HTTP 302, it redirects to http://h:1/metrics. hint: that is another server; if it is the right one, give its",
    ),
    "a redirect to another name": (b"HTTP/1.1 302 F\r\nLocation: //localhost/x\r\n\r\n", "is another server"),
    "a redirect to another port": (b"HTTP/1.1 302 F\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "is another server"),
    "a redirect to a password": (b"HTTP/1.1 302 F\r\nLocation: http://a:b@127.0.0.1/\r\n\r\n", "is another server"),
    "a redirect to nowhere": (b"HTTP/1.1 302 F\r\n\r\n", "HTTP 302. hint: see the log of the server"),
    "a redirect to nothing": (b"HTTP/1.1 302 F\r\nLocation:\r\n\r\n", "it redirects to : a loop"),
    "a redirect that is no URL": (b"HTTP/1.1 302 F\r\nLocation: http://[::1\r\n\r\n", "is another server"),
    "a redirect for a terminal": (b"HTTP/1.1 302 F\r\nLocation: \x1b[2J\r\n\r\n", r"redirects to \x1b[2J. hint"),
    "a code that is no redirect": (b"HTTP/1.1 304 N\r\nLocation: /x\r\n\r\n", "HTTP 304. hint: see the log"),
    "gzip": (OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(1 << 24)), "compressed (gzip)"),
    "deflate": (OK + b"Content-Encoding: deflate\r\n\r\n" + zlib.compress(bytes(1 << 24)), "compressed (deflate)"),
    "a body that breaks off": (OK + b"Content-Length: 900\r\n\r\nx 1\n", "broke off, 896 bytes are missing"),
    "a chunk that breaks off": (OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\nx", "the answer broke off"),
    "chunks that are none": (OK + b"Transfer-Encoding: chunked\r\n\r\nZ\r\n", "the answer broke off"),
    "an old protocol": (b"x 1\n", "no HTTP answer (BadStatusLine: x 1"),
    "another protocol": (b"SSH-2.0-x\r\n", "no HTTP answer (BadStatusLine: SSH-2.0-x"),
    "a protocol to come": (b"HTTP/9.9 200 OK\r\n\r\n", "no HTTP answer (UnknownProtocol"),
    "a header of a megabyte": (b"HTTP/1.1 200 OK\r\nX: " + bytes(1 << 20), "no HTTP answer (LineTooLong"),
    "a thousand headers": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n", "no HTTP answer (HTTPException"),
    "a hang-up": (b"", "hint: is the engine up, and is this the port of its metrics?"),
}


@pytest.mark.parametrize("case", SAID)
def test_what_a_server_says_instead_of_a_page(case: str, server: Server) -> None:
    """It is told as it is, and what to do."""
    said, expected = SAID[case]
    server.reply = saying(said)
    assert expected in refused(server.url)


def redirecting(server: Server, code: int, onward: Callable[[str], str]) -> list[str]:
    """Let the server redirect to where ``onward`` leads from a path, and answer where it ends; the paths it sees."""
    seen: list[str] = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.path)
        location = onward(handler.path)
        found = f"HTTP/1.1 {code} X\r\nLocation: {location}\r\n\r\n" if location else f"{OK.decode()}\r\nx 1\n"
        handler.wfile.write(found.encode())

    server.reply = reply
    return seen


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("base", ["", "http://127.0.0.1:{}"])
def test_a_redirect_within_the_server_is_followed(server: Server, code: int, base: str) -> None:
    """A mounted application redirects to its address with a slash, relative or whole, as Prometheus follows it."""
    where = base.format(server.server_port)
    seen = redirecting(server, code, {"/metrics": f"{where}/metrics/?a=b#c", "/metrics/?a=b": ""}.__getitem__)
    assert b"x 1\n" == asked(f"{server.url}/metrics")
    assert ["/metrics", "/metrics/?a=b"] == seen


def test_a_slash_at_the_end_is_kept(server: Server) -> None:
    """An address is asked for as it is given."""
    seen = redirecting(server, 307, {"/metrics/": "", "/a/?b=/": "", "/snapshot/": ""}.__getitem__)
    assert b"x 1\n" == asked(f"{server.url}/metrics/")
    assert b"x 1\n" == asked(f"{server.url}/a/?b=/")
    with pytest.raises(SourceError, match="not a graphprobe snapshot"):
        sources.read(f"{server.url}/snapshot/")
    assert ["/metrics/", "/a/?b=/", "/snapshot/"] == seen


def test_redirects_in_a_circle(server: Server) -> None:
    """Each address is asked once."""
    seen = redirecting(server, 302, {"/metrics": "/b", "/b": "/c", "/c": "/metrics"}.__getitem__)
    assert "/c: HTTP 302, it redirects to /metrics: a loop. hint: " in refused(server.url)
    assert ["/metrics", "/b", "/c"] == seen


def test_redirects_without_end(server: Server) -> None:
    """Ten are followed, and no more."""
    seen = redirecting(server, 302, lambda path: f"{path}x" if path != f"/metrics{10 * 'x'}" else "")
    assert b"x 1\n" == asked(server.url)
    assert 11 == len(seen)
    seen = redirecting(server, 302, lambda path: f"{path}x")
    assert f"it redirects to /metrics{11 * 'x'}: after 10 others" in refused(server.url)
    assert 11 == len(seen)


def test_redirects_have_one_deadline(server: Server) -> None:
    """Each of them in time, and all together too late: the timeout is for all."""
    seen: list[str] = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.path)
        time.sleep(0.3)
        handler.wfile.write(f"HTTP/1.1 302 F\r\nLocation: {handler.path}x\r\n\r\n".encode())

    server.reply = reply
    begun = time.monotonic()
    assert "no whole answer in 0.8 s" in refused(server.url, timeout=0.8)
    assert 0.7 < time.monotonic() - begun < 4
    assert 1 < len(seen) < 5


def test_the_body_of_a_redirect_is_not_read(dripping: Callable[[bytes, bytes, float], str]) -> None:
    """It may have no end."""
    url = dripping(b"HTTP/1.1 302 F\r\nLocation: http://h/\r\n\r\n", b"x" * 5000, 0.0)
    begun = time.monotonic()
    assert "is another server" in refused(url, timeout=30)
    assert time.monotonic() - begun < 10


def test_a_redirect_for_safety_is_followed_and_back_it_is_not() -> None:
    """From http:// to https:// of the same host, on whichever port that is; never from https:// to http://."""
    fine = {
        ("http://h/x", "https://h/x"): True,
        ("http://h:80/x", "https://h:8443/x"): True,
        ("http://H/x", "http://h:80/y"): True,
        ("https://h/x", "https://h:443/y"): True,
        ("https://h/x", "http://h/x"): False,
        ("https://h:80/x", "http://h:80/x"): False,
        ("https://h/x", "https://h:8443/x"): False,
        ("http://h/x", "https://h.other/x"): False,
    }
    assert fine == {(one, other): _same_server(urlsplit(one), urlsplit(other)) for one, other in fine}


def test_what_is_asked(server: Server) -> None:
    """The formats that Prometheus asks for, without compression."""
    seen: dict[str, str] = {}

    def reply(handler: BaseHTTPRequestHandler) -> None:
        seen.update(handler.headers)
        handler.wfile.write(OK + b"\r\nx 1\n")

    server.reply = reply
    assert b"x 1\n" == asked(server.url)
    assert seen["Accept"].startswith("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4")
    assert "identity" == seen["Accept-Encoding"]


URLS = ("http://", "http://[::1", "http://h:99999", "http://h:x", "http://h:0", "http://a b", "ftp://h", "://", "x://y")


@pytest.mark.parametrize("url", [*URLS, "file:///etc/passwd", "http://\u00e9", "http://h/\u00e9", "http://h/\n"])
def test_what_is_no_url(url: str) -> None:
    """It is refused, for a page and for a snapshot, before anybody is asked."""
    assert "not an http(s) URL" in refused(url)
    with pytest.raises(SourceError, match="not an http"):
        sources.read(url)


def test_a_url_with_a_password() -> None:
    """It is refused, and neither sent nor told."""
    told = refused("http://me:secret@127.0.0.1:1/metrics")
    assert "graphprobe sends no credentials" in told
    assert "secret" not in told


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e300])
def test_a_timeout_that_is_none(timeout: float) -> None:
    """It is refused where it was passed."""
    with pytest.raises(ConfigError, match="timeout must be a time"):
        asked("http://127.0.0.1:1", timeout)


def test_files_that_are_none(tmp_path: Path) -> None:
    """Folders, names of nothing, devices without end and with nothing."""
    assert "Is a directory" in refused(str(tmp_path))
    assert "No such file" in refused(str(tmp_path / "none"))
    assert "No such file" in refused("")
    assert "null byte" in refused("a\0b")
    assert "too long" in refused("x" * 5000)
    assert LIMIT + 1 == len(asked("/dev/zero"))
    assert b"" == asked("/dev/null")


def test_a_pipe_that_nobody_writes_to(tmp_path: Path) -> None:
    """It costs the timeout."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    begun = time.monotonic()
    assert "a pipe that did not end in time" in refused(str(pipe), timeout=0.3)
    assert 0.2 < time.monotonic() - begun < 4


def test_a_pipe_that_is_written_to(tmp_path: Path) -> None:
    """Whoever comes first, it is read to its end, in pieces; and one that never ends costs the timeout."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = "import sys, time\nwith open(sys.argv[1], 'wb', 0) as p:\n    p.write(b'x 1\\n')\n"
    writer = subprocess.Popen([sys.executable, "-c", f"{code}    p.write(b'y 2\\n')", str(pipe)])
    assert b"x 1\ny 2\n" == asked(str(pipe), timeout=30)
    assert 0 == writer.wait(10)
    with subprocess.Popen([sys.executable, "-c", f"{code}    time.sleep(60)", str(pipe)]) as writer:
        try:
            assert "did not end in time" in refused(str(pipe), timeout=2)
        finally:
            writer.kill()


def test_standard_input_without_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed, or taken by something that has text only, is told."""
    for closed in (None, io.StringIO("x 1\n")):
        monkeypatch.setattr(sys, "stdin", closed)
        assert "no bytes come from standard input" in refused("-")


def test_tls(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that nobody knows is refused, with what to do; once it is done, the page is read, in time."""
    cert, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    server.reply = saying(OK + b"\r\nx 1\n")
    url = server.url.replace("http", "https")
    told = refused(url)
    assert "certificate verify failed" in told
    assert "set SSL_CERT_FILE to the CA of its certificate" in told
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    assert b"x 1\n" == asked(url)
    stop = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(OK + b"X: ")
        while not stop.wait(0.02):
            handler.wfile.write(b"x")

    server.reply = drip
    assert "no whole answer in 0.4 s" in refused(url, timeout=0.4)
    stop.set()


def test_tls_where_there_is_none(server: Server) -> None:
    """https:// on a port that speaks http:// is told as that."""
    server.reply = saying(OK + b"\r\nx 1\n")
    assert "without TLS it is http://" in refused(server.url.replace("http", "https"))


def test_a_proxy_is_asked_for_other_hosts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loopback address is asked directly, another one through the proxy of the environment, within the same time."""
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    seen = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.path)
        handler.wfile.write(OK + b"\r\nx 1\n")

    server.reply = reply
    assert b"x 1\n" == asked("http://engine.invalid:9464/metrics")
    assert b"x 1\n" == asked(server.url)
    assert ["http://engine.invalid:9464/metrics", "/metrics"] == seen
