"""What Prometheus scrapes in an incident: the demo, engines that are well, and an exporter of something else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import prometheus_client

import graphprobe
from graphprobe.ledger import Ledger
from tests.dashboards.stack import OPENER, ROOT, until

COMMAND = ("demo", "--model", "tiny", "--device", "cpu", "--max-new-tokens", "8", "--requests", "50000", "--no-check")
"""Short answers keep the batch between 2 and 8; it is stopped long before the last one."""

RANK = """
import sys, time, graphprobe
graphprobe.start_exporter(int(sys.argv[1]), directory=sys.argv[2])
probe = graphprobe.observe("decode", buckets=[1, 2, 4])
for _ in range(6_000):
    probe.graph_call(4, 4)
    time.sleep(0.05)
"""
"""A rank that hits with every call, and shares its endpoint with the others of its directory."""


def command(port: int, *options: str) -> list[str]:
    """The arguments of ``graphprobe`` for a demo that serves its metrics on ``port``."""
    return [*COMMAND, *options, "--port", str(port)]


@contextlib.contextmanager
def demo(port: int, folder: Path, *options: str) -> Iterator[None]:
    """The demo as rank 0 in a process of its own, from its first page of metrics on; left, it is gone at once."""
    with _process(
        ["-m", "graphprobe.cli", *command(port, *options)], "0", port, folder / f"demo{''.join(options)}.log"
    ):
        yield


@contextlib.contextmanager
def rank(number: str, port: int, folder: Path) -> Iterator[None]:
    """One of several ranks behind one endpoint, which the first of them serves; left, it is gone at once."""
    with _process(["-c", RANK, str(port), str(folder / "ranks")], number, port, folder / f"rank{number}.log"):
        yield


@contextlib.contextmanager
def _process(arguments: list[str], number: str, port: int, log: Path) -> Iterator[None]:
    environment = {**os.environ, "RANK": number, "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=out, stderr=out, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL
        )
    try:
        until(lambda: _serves(number, port, process, log), 120, f"metrics of rank {number} on port {port}")
        yield
    finally:
        process.kill()
        process.wait()


def _serves(number: str, port: int, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, f"it ended with status {process.returncode}: {log.read_text()[-2_000:]}"
    try:
        with OPENER.open(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return f'rank="{number}"' in answer.read().decode()
    except OSError:
        return False


@contextlib.contextmanager
def engine(port: int) -> Iterator[None]:
    """An engine with graphs of its own: nine of ten calls are hits."""
    ledger, over = Ledger(), threading.Event()
    probe = graphprobe.observe("decode", buckets=[1, 2, 4], ledger=ledger)

    def serve() -> None:
        while not over.wait(0.05):
            for _ in range(9):
                probe.graph_call(4, 4)
            probe.eager_call(3, "no_exact_bucket")

    serving = threading.Thread(target=serve, daemon=True)
    with graphprobe.start_exporter(port=port, ledger=ledger):
        serving.start()
        try:
            yield
        finally:
            over.set()
            serving.join()


@contextlib.contextmanager
def stranger(port: int) -> Iterator[None]:
    """An exporter that has nothing of ours."""
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("room_temperature_celsius", "Of a room.", registry=registry).set(21)
    server, thread = prometheus_client.start_http_server(port, "127.0.0.1", registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
