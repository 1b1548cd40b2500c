"""A server whose answers a test decides; the fixture ``server`` runs one."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Answers every request as ``reply`` says."""

    daemon_threads = True
    reply: Callable[[BaseHTTPRequestHandler], None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.reply(self)

    def log_message(self, *_: object) -> None:
        pass
