"""Serving: ``/metrics`` of a registry and ``/snapshot`` of a ledger, from a daemon thread."""

from __future__ import annotations

import contextlib
import errno
import gzip
import inspect
import logging
import os
import re
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client.exposition import choose_encoder, gzip_accepted, make_wsgi_app, start_http_server
from prometheus_client.registry import CollectorRegistry

from graphprobe.buckets import as_size
from graphprobe.errors import ConfigError, ExporterError
from graphprobe.export.closing import Closing
from graphprobe.export.page import FORMATS, Writer
from graphprobe.unhurried import give_way

logger = logging.getLogger("graphprobe")

PATIENCE = 30.0
"""Seconds that a client may say nothing, or take nothing."""

PAUSE = 0.1
"""Seconds until the next try to accept a client, after one that failed."""

BACKLOG = 128
"""Clients that may wait to be accepted."""

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Exporter(Closing):
    """A running exporter: ``/metrics`` for Prometheus, ``/snapshot`` for graphprobe's readers. ``close()`` stops it.

    A forked child inherits neither the thread nor the port.
    """

    def __init__(self, server: WSGIServer, thread: threading.Thread, addr: str, scheme: str) -> None:
        self._server: WSGIServer | None = server
        self._thread = thread
        self.addr = addr
        self.port: int = server.server_port
        self.url = f"{scheme}://{_host(addr)}:{self.port}"
        """Base address; ``/metrics`` and ``/snapshot`` are below it."""
        _open.add(self)

    def close(self) -> None:
        """Stop serving and free the port. May be called again."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()

    def _abandon(self) -> None:
        # In a forked child nobody serves: shutdown() would wait for ever, and an open socket would keep the port.
        server, self._server = self._server, None
        if server is not None:
            server.socket.close()

    def __repr__(self) -> str:
        return f"Exporter({self.url!r}{'' if self._server else ', closed'})"


_open: weakref.WeakSet[Exporter] = weakref.WeakSet()


def _after_fork() -> None:
    for exporter in list(_open):
        exporter._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def serve(
    registry: CollectorRegistry, snapshot: Callable[[], str], port: int, addr: str, options: Mapping[str, Any]
) -> Exporter:
    """Serve ``registry`` whole under ``/metrics``, and the JSON of ``snapshot()`` under ``/snapshot``.

    ``options`` are those of ``prometheus_client.start_http_server``. Arguments are those that `checked` has passed;
    ExporterError where the port is in use or cannot be had.
    """
    # prometheus_client alone would accept clients without a certificate although a CA was named.
    required = bool(options.get("client_cafile") or options.get("client_capath"))
    with _explained(port, addr):
        server, thread = start_http_server(port, addr, registry, **{"client_auth_required": required, **options})
    _calm(server)
    server.set_app(_routes(_metrics(registry), snapshot))
    return Exporter(server, thread, addr, "https" if options.get("certfile") else "http")


class _Calm:
    """What a server of prometheus_client lacks inside an engine. Clients come and go as they like: that is no error."""

    def get_request(self) -> Any:
        try:
            return super().get_request()  # type: ignore[misc]
        except OSError:
            # No file descriptor is left: who waits is asked for again at once, and that without end.
            time.sleep(PAUSE)
            raise

    def handle_error(self, request: object, address: object) -> None:
        logger.debug("a request of %s ended early", address, exc_info=True)


class _Unhurried:
    """Reading a request takes the longest of what is not ours."""

    def parse_request(self) -> Any:
        give_way()
        parsed = super().parse_request()  # type: ignore[misc]
        give_way()
        return parsed


def _calm(server: WSGIServer) -> None:
    server.__class__ = type("Server", (_Calm, type(server)), {})
    # Handlers wait for a client that says nothing, TLS included, and not the thread that accepts the others.
    handler: Any = server.RequestHandlerClass
    server.RequestHandlerClass = type("Handler", (_Unhurried, handler), {"timeout": PATIENCE})
    if isinstance(server.socket, ssl.SSLSocket):
        server.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]
    server.socket.listen(BACKLOG)


def checked(port: int, addr: str, options: Mapping[str, Any]) -> None:
    """ConfigError for arguments that do not fit together, or that no server knows."""
    if as_size(port, "port", least=0) > 65535:
        raise ConfigError(f"port must be at most 65535, got {port}", "port=0 takes a free one")
    if not isinstance(addr, str):
        raise ConfigError(f"addr must be text, got {addr!r}", "pass 127.0.0.1")
    known = list(inspect.signature(start_http_server).parameters)[3:]
    if unknown := sorted(options.keys() - set(known)):
        hint = f"addr= is where it listens; there are also {', '.join(known)}"
        raise ConfigError(f"start_exporter has no {', '.join(unknown)}", hint)
    certfile, keyfile = options.get("certfile"), options.get("keyfile")
    client_ca = options.get("client_cafile") or options.get("client_capath")
    if bool(certfile) != bool(keyfile):
        raise ConfigError("TLS needs certfile and keyfile", "pass both, or neither for plain HTTP")
    if client_ca and not certfile:
        raise ConfigError("client certificates need TLS", "pass certfile and keyfile too")


@contextlib.contextmanager
def _explained(port: int, addr: str) -> Iterator[None]:
    try:
        yield
    except UnicodeError as error:
        raise ConfigError(f"addr must be an address or a host's name, got {addr!r}", "pass 127.0.0.1") from error
    except OSError as error:
        hint = HINTS.get(error.errno or 0, "check addr, and that the certificate files can be read")
        text = f"cannot serve metrics on {addr}:{port}: {error.strerror or error}. hint: {hint}"
        raise ExporterError(error.errno, text) from error


HINTS = {
    errno.EADDRINUSE: "another process has this port: pass another, port=0 for a free one, or directory= in all ranks",
    errno.EACCES: "a port below 1024 needs privileges: pass another port",
    errno.EADDRNOTAVAIL: "addr is no address of this machine: pass 127.0.0.1, or 0.0.0.0 for all",
}


KNOWN = re.compile(r"version=(0\.0\.4|1\.0\.0|2\.0\.0)(;|$)")
"""Formats that scrapers ask for, whatever else is in an Accept header."""


def _metrics(registry: CollectorRegistry) -> Wsgi:
    """The client's app, but that a whole page in a known format is put together from what is kept of the last one."""
    prometheus: Wsgi = make_wsgi_app(registry)
    writers: dict[str, Writer] = {}

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET" or environ.get("QUERY_STRING"):
            return prometheus(environ, start_response)
        encoder, form = choose_encoder(environ.get("HTTP_ACCEPT", ""))
        if form not in writers and KNOWN.search(form) and len(writers) < FORMATS:
            writers[form] = Writer(encoder, form)
        if form not in writers:
            return prometheus(environ, start_response)
        page, headers = writers[form].page(registry), [("Content-Type", form)]
        give_way()
        if gzip_accepted(environ.get("HTTP_ACCEPT_ENCODING", "")):
            page = gzip.compress(page)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", headers)
        return [page]

    return app


def _routes(prometheus: Wsgi, snapshot: Callable[[], str]) -> Wsgi:
    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "").rstrip("/")
        if path == "/metrics":
            return prometheus(environ, start_response)
        if path == "/snapshot" and environ["REQUEST_METHOD"] == "GET":
            return _answer(start_response, "200 OK", "application/json", snapshot())
        return _answer(start_response, "404 Not Found", "text/plain", "graphprobe serves /metrics and /snapshot\n")

    return app


def _answer(start_response: Callable[..., Any], status: str, kind: str, text: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", f"{kind}; charset=utf-8")])
    return [text.encode()]


def _host(addr: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(addr, addr)
    return f"[{host}]" if ":" in host else host
