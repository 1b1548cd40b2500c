"""What each route costs the thread that counts, and what a scrape costs, in one run.

    python benchmarks/exporting.py [--json FILE] [--seconds S]

One thread counts graph calls of a forward with about 500 label sets, in bursts, while a route exports them: nothing, an
exporter that is scraped every second, a directory written every 2 s, OpenTelemetry collected every second, all of them.
Where there is a GPU, another one replays a captured forward. Routes take turns, round after round. The median of the
bursts is the cost of a call, the mean has what readers take from the thread that serves, the 99.9th percentile how they
take it. Times are of the machine they were taken on: read the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import graphprobe
from graphprobe import metrics
from graphprobe.ledger import LEDGER, Ledger
from graphprobe.observe import observe

BUCKETS = list(range(1, 57))

Route = Callable[[Ledger], contextlib.AbstractContextManager[Any]]


def filled(ledger: Ledger | None = None) -> Ledger:
    """A ledger whose forward has about 500 label sets, as an engine with 56 buckets has after a day."""
    ledger = Ledger() if ledger is None else ledger
    probe = observe("decode", BUCKETS, ledger=ledger)
    for bucket in BUCKETS:
        probe.graph_call(bucket, bucket)
        probe.forward.time("graph", bucket, 5e-3)
        probe.forward.captured(bucket, "ok", 0.1, 1 << 20)
    for size in range(57, 150):
        probe.eager_call(size, "batch_too_large" if size > BUCKETS[-1] else "no_exact_bucket")
    return ledger


@contextlib.contextmanager
def repeatedly(step: Callable[[], Any], interval: float) -> Iterator[None]:
    """Call a step from another thread, as a reader would."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(interval):
            step()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


def scrape(url: str) -> bytes:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return bytes(answer.read())


@contextlib.contextmanager
def exporter(ledger: Ledger) -> Iterator[None]:
    with graphprobe.start_exporter(0, ledger=ledger) as running, repeatedly(lambda: scrape(running.url), 1.0):
        yield


@contextlib.contextmanager
def directory(ledger: Ledger) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as where, graphprobe.start_exporter(None, directory=where, ledger=ledger):
        yield


@contextlib.contextmanager
def otel(ledger: Ledger) -> Iterator[None]:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    with graphprobe.start_otel(provider, ledger=ledger), repeatedly(reader.get_metrics_data, 1.0):
        yield
    provider.shutdown()


@contextlib.contextmanager
def everything(ledger: Ledger) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for route in available():
            stack.enter_context(route(ledger))
        yield


@contextlib.contextmanager
def nothing(ledger: Ledger) -> Iterator[None]:
    yield


def available() -> list[Route]:
    try:
        import opentelemetry.sdk.metrics  # noqa: F401
    except ImportError:
        return [exporter, directory]
    return [exporter, directory, otel]


def bursts(burst: Callable[[], int], seconds: float) -> list[float]:
    """Nanoseconds per call of each burst."""
    found, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        calls = burst()
        found.append((time.perf_counter() - start) / calls * 1e9)
    return found


def counted(ledger: Ledger) -> Callable[[], int]:
    """A thousand counts."""
    count = observe("decode", BUCKETS, ledger=filled(ledger)).graph_call

    def burst() -> int:
        for _ in range(1_000):
            count(8, 8)
        return 1_000

    return burst


def replayed(ledger: Ledger) -> Callable[[], int]:
    """Fifty calls of eight Linear(256) in a graph, which the launch queue holds, and the wait for them."""
    import torch

    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).cuda().bfloat16()
    graphed = graphprobe.capture(lambda x: layers(x), buckets=[4], name="replayed", outputs="alias")
    filled(ledger)
    x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        graphed.warmup(lambda bucket: ((x,), {}))

    def burst() -> int:
        with torch.inference_mode():
            for _ in range(50):
                graphed(x)
        torch.cuda.synchronize()
        return 50

    return burst


def serving(
    make: Callable[[Ledger], Callable[[], int]], ledger: Callable[[], Ledger], seconds: float, rounds: int = 5
) -> dict[str, dict[str, float]]:
    """Each route's cost of a call, beside that without a route."""
    routes: dict[str, Route] = {"nothing": nothing}
    routes |= {route.__name__: route for route in available()}
    routes["everything"] = everything
    found: dict[str, list[float]] = {name: [] for name in routes}
    for _ in range(rounds):
        for name, route in routes.items():
            counts = ledger()
            burst = make(counts)
            with route(counts):
                found[name] += bursts(burst, seconds / rounds)
    plain = found["nothing"]
    return {
        name: {
            "ns": statistics.median(each),
            "ratio": statistics.median(each) / statistics.median(plain),
            "mean_ratio": statistics.fmean(each) / statistics.fmean(plain),
            "p999_ns": sorted(each)[int(0.999 * len(each))],
        }
        for name, each in found.items()
    }


def cuda() -> str:
    """The name of the GPU, empty where there is none."""
    try:
        import torch
    except ImportError:
        return ""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def timed(what: Callable[[], Any], times: int = 20) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        what()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def scraping() -> dict[str, dict[str, float]]:
    """Milliseconds and bytes of a scrape: of one process, and of one endpoint for eight ranks."""
    ledger = filled()
    sets = len(metrics.samples(ledger.snapshot()))
    with graphprobe.start_exporter(0, ledger=ledger) as running:
        one = {"label_sets": sets, "ms": timed(lambda: scrape(running.url)), "bytes": len(scrape(running.url))}
    with tempfile.TemporaryDirectory() as where, contextlib.ExitStack() as stack:
        # One process stands for eight: each of these ledgers has files, and a rank, of its own.
        first = stack.enter_context(graphprobe.start_exporter(0, directory=where, ledger=ledger))
        for _ in range(7):
            stack.enter_context(graphprobe.start_exporter(None, directory=where, ledger=filled()))
        eight = {"label_sets": 8 * sets, "ms": timed(lambda: scrape(first.url), 5), "bytes": len(scrape(first.url))}
        flush = timed(lambda: (observe("decode", ledger=ledger).graph_call(8, 8), first.flush()))
    return {"one process": one, "eight ranks": eight, "one flush": {"label_sets": sets, "ms": flush}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "device": cuda()}
    result["counting"] = serving(counted, Ledger, arguments.seconds)
    result["replaying"] = serving(replayed, lambda: LEDGER, arguments.seconds) if cuda() else {}
    result["scraping"] = scraping()
    for part in ("counting", "replaying"):
        print(f"{part:12} {'ns/call':>9} {'ratio':>6} {'mean':>6} {'p99.9 ns':>9}")
        for name, row in result[part].items():
            print(f"{name:12} {row['ns']:9.1f} {row['ratio']:6.3f} {row['mean_ratio']:6.3f} {row['p999_ns']:9.1f}")
    for name, row in result["scraping"].items():
        print(f"{name:12}", ", ".join(f"{key} {value:,.1f}" for key, value in row.items()))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
