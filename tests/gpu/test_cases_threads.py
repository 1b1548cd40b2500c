"""Published failure reports, streams, threads and NCCL: others may use the device while a forward is captured."""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import graphprobe
from graphprobe.graphed import capture
from tests.dashboards.stack import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """Engines serve in inference mode."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def rows(n: int, width: int = 64) -> torch.Tensor:
    return torch.randn(n, width, device="cuda")


def linear(width: int = 64) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width)).cuda().eval()


def wide(x: torch.Tensor) -> torch.Tensor:
    """The rows as they are, by way of 32 MiB per row."""
    return x.repeat(1, 1 << 17).view(x.shape[0], -1, 64).amax(1)


def counts(forward: Any) -> dict[str, int]:
    """Calls by reason; those that a graph served under ``graph``."""
    found: collections.Counter[str] = collections.Counter()
    for row in forward.snapshot().rows:
        found[str(row.reason or "graph")] += row.calls
    return dict(found)


class Meanwhile:
    """Threads that do something over and over while the block runs; ``errors`` is what they raised."""

    def __init__(self, *works: Callable[[], Any]) -> None:
        self.errors: list[BaseException] = []
        self.rounds = [0] * len(works)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i, work)) for i, work in enumerate(works)]

    def _run(self, index: int, work: Callable[[], Any]) -> None:
        while not self._stop.is_set():
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
                return
            self.rounds[index] += 1

    def __enter__(self) -> Meanwhile:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


# -- other threads during a capture (H52, H53) ---------------------------------------------------------------------


def pin() -> None:
    torch.empty(1 << 16, pin_memory=True).fill_(1)


def allocate() -> None:
    torch.empty(3 << 20, device="cuda").fill_(1)


def ask(stream: torch.cuda.Stream) -> None:
    """What a watchdog does: record an event and ask for it until it is done."""
    with torch.cuda.stream(stream):
        event = torch.cuda.Event()
        torch.ones(256, device="cuda").mul_(2)
        event.record()
    while not event.query():
        pass


def test_fifty_captures_succeed_while_others_pin_allocate_and_ask_events() -> None:
    """No capture fails and no other thread does (H52, pytorch/pytorch#104555; H53, LibreYOLO/libreyolo#681)."""
    module, own = linear(), torch.cuda.Stream()
    graphed = capture(lambda x: module(x), buckets=list(range(1, 51)), name="H53")
    with Meanwhile(pin, allocate, lambda: ask(own)) as others:
        for n in range(1, 51):
            for _ in range(3):
                x = rows(n)
                assert torch.equal(module(x), graphed(x))
    assert [] == others.errors
    assert min(others.rounds) > 0
    assert {(n, "ok"): 1 for n in range(1, 51)} == graphed.snapshot().capture_outcomes
    assert {"graph": 100, "warmup": 50} == counts(graphed)


NCCL = """
import json, os, sys, torch
import torch.distributed as dist
from graphprobe.graphed import capture

dist.init_process_group("nccl", init_method="file://" + sys.argv[1], rank=0, world_size=1,
                        device_id=torch.device("cuda", 0))
pending, right = [], []
with torch.inference_mode():
    block = torch.ones(16 << 20, device="cuda")
    module = torch.nn.Linear(64, 64).cuda().eval()

    def make_inputs(bucket):
        # Work that the watchdog has to ask for, in front of each capture.
        pending.append(dist.all_reduce(block, async_op=True))
        return (torch.randn(bucket, 64, device="cuda"),), {}

    refused = capture(lambda x: module(x), buckets=[2], name="lazy")
    for _ in range(4):
        x = torch.randn(2, 64, device="cuda")
        right.append(torch.equal(module(x), refused(x)))
    graphed = capture(lambda x: module(x), buckets=list(range(1, 51)), name="warm")
    graphed.warmup(make_inputs)
    for n in range(1, 51):
        x = torch.randn(n, 64, device="cuda")
        right.append(torch.equal(module(x), graphed(x)))
for work in pending:
    work.wait()
torch.cuda.synchronize()
outcomes = sorted({o for _, o in graphed.snapshot().capture_outcomes})
print(json.dumps({"right": all(right), "captured": len(graphed.snapshot().captures), "outcomes": outcomes,
                  "graph": graphed.snapshot().graph_calls, "pending": len(pending),
                  "lazy": sorted({str(r.reason) for r in refused.snapshot().rows})}), flush=True)
dist.destroy_process_group()
"""


def test_fifty_captures_succeed_with_nccl_work_around_them(tmp_path: Path) -> None:
    """The watchdog that polls events does not end a capture (H52, pytorch/pytorch#104555)."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        pytest.skip("this torch has no NCCL")
    # One process needs no network and no multicast.
    environment = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0", **os.environ}
    environment |= {"PYTHONPATH": str(ROOT), "GRAPHPROBE_STRICT": "1"}
    command = [sys.executable, "-c", NCCL, str(tmp_path / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert 0 == done.returncode, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    expected = {"captured": 50, "outcomes": ["ok"], "graph": 50, "pending": 100, "lazy": ["distributed"]}
    assert {"right": True} | expected == found


ASKED = {"is_initialized", "WORLD", "default_pg"}
"""Whether there is a process group, for the rank of a process without RANK."""


@contextlib.contextmanager
def reading(route: str, where: Path) -> Iterator[Callable[[], bytes]]:
    """A route that is running, and what its reader does."""
    if route == "otel":
        reader = pytest.importorskip("opentelemetry.sdk.metrics.export").InMemoryMetricReader()
        provider = pytest.importorskip("opentelemetry.sdk.metrics").MeterProvider([reader])
        with graphprobe.start_otel(provider, interval=0.01):
            yield lambda: reader.get_metrics_data().to_json().encode()
        provider.shutdown()
        return
    pytest.importorskip("prometheus_client")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    shared: dict[str, Any] = {"directory": where, "interval": 0.01} if route == "directory" else {}
    with graphprobe.start_exporter(0, **shared) as exporter:

        def scrape() -> bytes:
            pages = []
            for path in ("/snapshot", "/metrics"):
                with opener.open(f"{exporter.url}{path}", timeout=30) as answer:
                    pages.append(answer.read())
            return pages[-1]

        yield scrape


@pytest.mark.parametrize("route", ["exporter", "directory", "otel"])
def test_no_route_calls_torch(route: str, tmp_path: Path) -> None:
    """Ten buckets are captured while a route is read on and on; its threads call nothing of torch (H53, vllm#48053)."""
    called: set[str] = set()

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(torch.__path__[0]):
            called.add(frame.f_code.co_name)
        if event == "c_call" and (getattr(argument, "__module__", None) or "").startswith("torch"):
            called.add(argument.__qualname__)

    module, name = linear(), f"H53 {route}"
    graphed = capture(lambda x: module(x), buckets=list(range(1, 11)), name=name, timing=2)
    # Threads that start from here on are watched: those of the route and of its readers. What a collection of
    # garbage runs in them is not theirs.
    gc.collect()
    gc.disable()
    threading.setprofile(watch)
    try:
        with reading(route, tmp_path) as read:
            pages: list[bytes] = []
            with Meanwhile(lambda: pages.append(read())) as scraping:
                for n in range(1, 11):
                    for _ in range(6):
                        x = rows(n)
                        assert torch.equal(module(x), graphed(x))
            until(lambda: name.encode() in read(), 10, f"{name} on the page")
    finally:
        threading.setprofile(None)
        gc.enable()
    assert [] == scraping.errors
    assert set() == called - ASKED
    assert {(n, "ok"): 1 for n in range(1, 11)} == graphed.snapshot().capture_outcomes


# -- one pool, many orders (H56) -----------------------------------------------------------------------------------


def test_two_threads_replay_the_graphs_of_one_pool_in_any_order() -> None:
    """Three buckets, two threads, two streams, 200 random calls each: every result is its own (H56, pytorch#166975).

    DESIGN: replays of one wrapper wait for each other; they are never refused for it.
    """
    module = linear()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return module(wide(x)) + 1

    graphed = capture(forward, buckets=[2, 4, 8], name="H56")
    for n in (8, 4, 2) * 2:
        graphed(rows(n))
    wrong: list[int] = []

    def serve(seed: int) -> None:
        order, kept = random.Random(seed), []
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                x = rows(order.choice((2, 4, 8)))
                kept.append((x, graphed(x)))
            wrong.extend(x.shape[0] for x, result in kept if not torch.equal(forward(x), result))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [] == wrong
    assert {"graph": 403, "warmup": 3} == counts(graphed)


def test_one_thread_that_changes_streams_never_overlaps_two_replays() -> None:
    """A replay waits for the one before it on another stream (H56, pytorch/pytorch#166975)."""
    graphed = capture(lambda x: wide(wide(x)) + 1, buckets=[2, 4, 8], name="H56 streams")
    for n in (8, 4, 2) * 2:
        graphed(rows(n))
    torch.cuda.synchronize()
    streams, order, kept = [torch.cuda.Stream() for _ in range(3)], random.Random(1), []
    for step in range(150):
        with torch.cuda.stream(streams[step % 3]):
            x = rows(order.choice((2, 4, 8)))
            kept.append((x, graphed(x)))
    torch.cuda.synchronize()
    assert all(torch.equal(x + 1, result) for x, result in kept)
    assert {"graph": 153, "warmup": 3} == counts(graphed)


def test_two_wrappers_that_share_a_pool_never_overlap() -> None:
    """With ``pool=`` the memory on the way is shared, too: replays on two streams take turns (H56, pytorch#166975)."""
    pool = torch.cuda.graph_pool_handle()
    first = capture(lambda x: wide(wide(x)) + 1, buckets=[8], pool=pool, name="H56 first")
    second = capture(lambda x: wide(wide(x)) + 2, buckets=[8], pool=pool, name="H56 second")
    for forward in (first, second):
        for _ in range(2):
            forward(rows(8))
    torch.cuda.synchronize()
    streams, kept = [torch.cuda.Stream() for _ in range(2)], []
    for step in range(60):
        with torch.cuda.stream(streams[step % 2]):
            x = rows(8)
            kept.append((x + 1, first(x)) if step % 2 else (x + 2, second(x)))
    torch.cuda.synchronize()
    assert all(torch.equal(expected, result) for expected, result in kept)
