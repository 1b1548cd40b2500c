"""Prometheus, Alertmanager and a webhook, each run by one test on a loopback port of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from tests.servers import Handler, Server

ROOT = Path(__file__).resolve().parents[2]

# A proxy would look for loopback addresses on its own machine.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

T = TypeVar("T")
S = TypeVar("S", bound="Service")


def binary(name: str) -> str:
    """The path of a program: $GRAPHPROBE_<NAME>, on PATH or in .venv/bin. Without one the test is skipped."""
    variable = f"GRAPHPROBE_{name.upper().replace('-', '_')}"
    at = (os.environ.get(variable), shutil.which(name), ROOT / ".venv" / "bin" / name)
    found = next((str(Path(path).absolute()) for path in at if path and Path(path).is_file()), None)
    if found is None:
        pytest.skip(f"no {name} in ${variable}, on PATH or in .venv/bin")
    return found


def free_port() -> int:
    """A port that is free now. Below those that systems give to outgoing connections, so that it stays free."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no free port between 20000 and 32000")


def until(ask: Callable[[], T], seconds: float = 30, what: str = "") -> T:
    """Ask ten times a second; the first answer that is true. AssertionError with the last one at the deadline."""
    end = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what or ask}; last answer: {answer!r}"
        time.sleep(0.1)
    return answer


class Service:
    """A program that serves HTTP on loopback: ready once entered, gone when left, its log printed where that fails.

    The configuration and the log are written into ``data``, so relative paths in the configuration start there.
    """

    program: ClassVar[str]
    storage: ClassVar[str]

    def __init__(self, config: str, data: Path, *flags: str) -> None:
        self.path = binary(self.program)
        self.config, self.data, self.flags = config, data.absolute(), flags
        self.log = self.data / f"{self.program}.log"
        self.address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{self.address}"

    def command(self) -> list[str]:
        """What is run."""
        # Without an external URL the name of the machine goes into every link.
        web = [f"--web.listen-address={self.address}", f"--web.external-url={self.url}"]
        file = f"--config.file={self.data / self.program}.yml"
        return [self.path, file, f"--{self.storage}={self.data}", *web, *self.flags]

    def __enter__(self: S) -> S:
        self.data.mkdir(parents=True, exist_ok=True)
        (self.data / f"{self.program}.yml").write_text(self.config)
        with self.log.open("w") as log:
            # An Alertmanager that .ci/prometheus unpacked finds its templates only from beside its folder bin.
            beside = Path(self.path).parents[1]
            self.process = subprocess.Popen(
                self.command(), cwd=beside, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        try:
            until(self.ready, what=f"{self.program} ready")
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if kind is not None:
            print(f"--- {self.log}\n{self.log.read_text()[-10_000:]}")

    def ready(self) -> bool:
        """Whether it answers; AssertionError where it has ended instead."""
        ended = self.process.poll()
        assert ended is None, f"{self.program} ended with status {ended}: {self.log.read_text()[-2_000:]}"
        try:
            with OPENER.open(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def get(self, path: str, **params: Any) -> Any:
        """The JSON below ``path``; a list is sent as several parameters. AssertionError with its complaint."""
        query = urllib.parse.urlencode(params, doseq=True)
        try:
            with OPENER.open(f"{self.url}{path}?{query}", timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {params}: {error.code} {error.read().decode()}") from error


class Prometheus(Service):
    """A server on the blocks in ``data``, which may have been backfilled."""

    program = "prometheus"
    storage = "storage.tsdb.path"

    def get(self, path: str, **params: Any) -> Any:
        """What is under ``data`` in the answer of the API."""
        return super().get(path, **params)["data"]

    def query(self, expr: str, at: float | None = None) -> list[dict[str, Any]]:
        """The series of an instant vector: ``metric`` and ``value`` (time, text)."""
        time_of = {} if at is None else {"time": at}
        return self.get("/api/v1/query", query=expr, **time_of)["result"]  # type: ignore[no-any-return]

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The series of a range: ``metric`` and ``values`` (each time, text)."""
        window = {"start": start, "end": end, "step": step}
        return self.get("/api/v1/query_range", query=expr, **window)["result"]  # type: ignore[no-any-return]


class Alertmanager(Service):
    """A server of its own that looks for no others."""

    program = "prometheus-alertmanager"
    storage = "storage.path"

    def command(self) -> list[str]:
        """What is run."""
        return [*super().command(), "--cluster.listen-address="]


class _Receiver(Handler):
    do_POST = Handler.do_GET


class Webhook:
    """Keeps what is posted to ``url``: ``received`` has the time (of the epoch) and the JSON of each, in order."""

    def __init__(self) -> None:
        self.received: list[tuple[float, Any]] = []
        self.server = Server(("127.0.0.1", 0), _Receiver)
        self.server.reply = self._take
        self.url = self.server.url

    def _take(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        self.received.append((time.time(), json.loads(body)))
        request.send_response(200)
        request.end_headers()

    def __enter__(self) -> Webhook:
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
