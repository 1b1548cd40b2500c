from __future__ import annotations

import io
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from graphprobe.errors import SourceError
from graphprobe.export.exporter import start_exporter
from graphprobe.ledger import Ledger
from graphprobe.observe import observe
from graphprobe.snapshot import Row, Snapshot
from graphprobe.tools import sources, web
from graphprobe.tools.sources import Reading, page_url, read, reading, snapshot_url
from tests.pages import MODERN, PAGE
from tests.servers import Server


@pytest.fixture
def filled(ledger: Ledger) -> Ledger:
    observe("decode", [1, 2, 4], ledger=ledger).graph_call(3, 4)
    return ledger


def answer(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


@pytest.mark.parametrize("path", ["", "/", "/metrics", "/metrics/", "/snapshot", "/snapshot/"])
def test_exporter(filled: Ledger, path: str) -> None:
    """The address of an exporter, of its metrics and of its snapshot all give the snapshot."""
    with start_exporter(0, ledger=filled) as exporter:
        assert read(exporter.url + path) == filled.snapshot()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1", "http://h:1/snapshot"),
        ("https://h/a/metrics?x=1#y", "https://h/a/snapshot?x=1"),
        ("http://h/a", "http://h/a/snapshot"),
        ("http://h/a/saved.json", "http://h/a/saved.json"),
        ("http://h/a/snapshot/?x", "http://h/a/snapshot/?x"),
        ("http://h/a/metrics/", "http://h/a/snapshot"),
    ],
)
def test_snapshot_url(url: str, expected: str) -> None:
    """A prefix and a query are kept, and a snapshot or a JSON file is taken as it is."""
    assert snapshot_url(url) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1", "http://h:1/metrics"),
        ("http://h:1/?x=1", "http://h:1/metrics?x=1"),
        ("https://h/a/metrics?x=1#y", "https://h/a/metrics?x=1"),
        ("http://h/stats", "http://h/stats"),
        ("http://h/metrics/", "http://h/metrics/"),
    ],
)
def test_page_url(url: str, expected: str) -> None:
    """An address with a path is asked for as it is."""
    assert page_url(url) == expected


def test_a_snapshot_is_all_that_is_known(filled: Ledger, tmp_path: Path) -> None:
    """It knows no time, and there is nothing to note."""
    path = tmp_path / "shot.json"
    path.write_text("\ufeff " + filled.snapshot().to_json())
    assert Reading(filled.snapshot(), (), "snapshot", ()) == reading(path) == reading(filled.snapshot())


@pytest.mark.parametrize("page", [PAGE, MODERN], ids=["text", "openmetrics"])
def test_a_page_of_metrics(tmp_path: Path, page: str) -> None:
    """Saved to a file, in both formats, it is read where there is no snapshot; ``read`` has the same."""
    path = tmp_path / "page"
    path.write_text(page)
    found = reading(path)
    assert ("metrics", ()) == (found.kind, found.windows)
    assert [3, 72, 0, 128] == [row.batch_size for row in sorted(found.snapshot.forwards["decode"].rows, key=_by_path)]
    assert read(path) == found.snapshot


def _by_path(row: Row) -> tuple[bool, int]:
    return row.path == "eager", row.batch_size


@pytest.mark.parametrize("path", ["", "/", "/metrics", "/stats?x=1"])
@pytest.mark.parametrize("code", [404, 405, 406, 410])
def test_an_engine_that_has_only_metrics(server: Server, path: str, code: int) -> None:
    """One in another language serves no snapshot: its page is read instead."""
    asked: list[str] = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        found = not handler.path.startswith(("/snapshot", "/stats/snapshot"))
        answer(handler, PAGE.encode() if found else b"", 200 if found else code)

    server.reply = reply
    found = reading(server.url + path)
    assert "metrics" == found.kind
    assert 2 == found.snapshot.forwards["decode"].graph_calls
    assert 2 == len(asked)
    assert (path if path.strip("/") else "/metrics") == asked[1]


def test_a_snapshot_that_was_asked_for_is_not_replaced(server: Server) -> None:
    """Who names it wants its exact sizes."""
    asked: list[str] = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        answer(handler, b"", 404)

    server.reply = reply
    with pytest.raises(SourceError, match="HTTP 404"):
        reading(f"{server.url}/snapshot")
    assert ["/snapshot"] == asked


def test_a_server_that_fails_is_not_asked_again(server: Server) -> None:
    """Only a snapshot that is not there has a page of metrics in its place."""
    asked: list[str] = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        answer(handler, b"", 500)

    server.reply = reply
    with pytest.raises(SourceError, match="HTTP 500"):
        reading(server.url)
    assert ["/snapshot"] == asked


def test_a_server_with_the_same_page_everywhere(server: Server) -> None:
    """As prometheus_client's is: the page of metrics comes where a snapshot was asked for."""
    server.reply = lambda handler: answer(handler, PAGE.encode())
    assert "metrics" == reading(server.url).kind


def test_sizes_and_logs_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a text is, its content tells, wherever it comes from."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"batch_size\n4\n4\n")))
    found = reading("-", parts=1)
    assert "sizes" == found.kind
    assert (found.snapshot,) == found.windows


def test_default(filled: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a source the exporter of this machine is read."""
    assert sources.DEFAULT == "http://127.0.0.1:9464"
    with start_exporter(0, ledger=filled) as exporter:
        monkeypatch.setattr(sources, "DEFAULT", exporter.url)
        assert read() == filled.snapshot()


def test_proxy_is_not_asked_for_this_machine(filled: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter of this machine is reached directly although the environment names a proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with start_exporter(0, ledger=filled) as exporter:
        assert read(exporter.url) == filled.snapshot()


def test_file(filled: Ledger, tmp_path: Path) -> None:
    """A file, by text or path, gives the snapshot that was saved; so does standard input, and a snapshot itself."""
    path = tmp_path / "shot.json"
    path.write_text(filled.snapshot().to_json())
    assert read(path) == read(str(path)) == read(filled.snapshot()) == filled.snapshot()


def test_standard_input(filled: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """``-`` reads standard input."""
    text = io.TextIOWrapper(io.BytesIO(filled.snapshot().to_json().encode()))
    monkeypatch.setattr(sys, "stdin", text)
    assert read("-") == filled.snapshot()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (b"", "not a graphprobe snapshot"),
        (b"<html>", "not a graphprobe snapshot, and nothing else that is read"),
        (b"\xff", "not a graphprobe snapshot"),
        (b"{}", "not a graphprobe snapshot: KeyError"),
        (b"# HELP x y\n", "these are metrics, but none of graphprobe's"),
        (b'{"schema": 99, "forwards": {}}', "schema 99, this version reads 1"),
    ],
)
def test_other_text(tmp_path: Path, text: bytes, hint: str) -> None:
    """A file of something else is refused by name, saying what it is and what to give instead."""
    path = tmp_path / "other"
    path.write_bytes(text)
    with pytest.raises(SourceError, match=hint) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "hint" in str(caught.value)


@pytest.mark.parametrize(
    "source", ["/no/such/file", "/", "a\0b", "ftp://h/x", "file:///etc/hostname", "http://", "://"]
)
def test_no_source(source: str) -> None:
    """What is neither a readable file nor an http(s) address is refused with a hint."""
    with pytest.raises(SourceError, match="hint"):
        read(source)


def test_refused_connection() -> None:
    """Where nothing listens the message says how to start an exporter."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(SourceError, match=r"refused.*start_exporter"):
            read(f"http://127.0.0.1:{free.getsockname()[1]}")


def test_404(server: Server) -> None:
    """Another server's 404 says that no graphprobe exporter is there."""
    server.reply = lambda handler: answer(handler, b"", 404)
    with pytest.raises(SourceError, match=r"HTTP 404.*no graphprobe exporter"):
        read(server.url)


def test_redirect_to_another_server_is_not_followed(server: Server) -> None:
    """It is named, and nobody is asked."""
    asked: list[str] = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        answer(handler, b"", 302, Location="http://elsewhere/snapshot")

    server.reply = reply
    with pytest.raises(SourceError, match="redirects to http://elsewhere/snapshot"):
        read(server.url)
    assert asked == ["/snapshot"]


def test_redirect_within_the_server_is_followed(server: Server, filled: Ledger) -> None:
    """As one to the address with a slash is."""
    there = filled.snapshot().to_json().encode()

    def reply(handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/snapshot":
            answer(handler, b"", 307, Location="/snapshot/")
        else:
            answer(handler, there)

    server.reply = reply
    assert read(server.url) == filled.snapshot()


def test_not_http() -> None:
    """A port that speaks something else is a SourceError."""
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def speak() -> None:
            talk, _ = plain.accept()
            with talk:
                talk.recv(1000)
                talk.sendall(b"SSH-2.0-x\r\n")

        threading.Thread(target=speak, daemon=True).start()
        with pytest.raises(SourceError, match="hint"):
            read(f"http://127.0.0.1:{plain.getsockname()[1]}")


def test_truncated(server: Server) -> None:
    """An answer that breaks off is a SourceError."""
    server.reply = lambda handler: answer(handler, b'{"schema": 1', **{"Content-Length": "100"})
    with pytest.raises(SourceError, match="hint"):
        read(server.url)


def test_silence_ends(server: Server) -> None:
    """A server that never answers costs the timeout, and one that trickles costs no more."""
    stop = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        answer(handler, b"")
        while not stop.wait(0.05):
            handler.wfile.write(b" " * web.CHUNK)

    for reply in (lambda handler: stop.wait(10), trickle):
        server.reply = reply
        begun = time.monotonic()
        with pytest.raises(SourceError, match=r"no whole answer in 0.4 s|longer"):
            read(server.url, timeout=0.4)
        assert time.monotonic() - begun < 3
    stop.set()


def test_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source without end is given up at the limit."""
    monkeypatch.setattr(sources, "MAX_BYTES", 1 << 20)
    with pytest.raises(SourceError, match="longer than 1 MiB"):
        read("/dev/zero")
    path = tmp_path / "exact"
    path.write_bytes(b" " * ((1 << 20) - 2) + b"{}")
    with pytest.raises(SourceError, match="not a graphprobe snapshot"):
        read(path)
    assert os.path.getsize(path) == 1 << 20


def test_empty_snapshot(server: Server) -> None:
    """A process that has counted nothing gives an empty snapshot, not an error."""
    server.reply = lambda handler: answer(handler, Snapshot().to_json().encode())
    assert read(server.url) == Snapshot()
