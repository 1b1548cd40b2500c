"""What a scrape costs by the number of label sets, and what it costs the forwards that overlap it, in one run.

    python benchmarks/scraping.py [--json FILE] [--seconds S]

A thread serves small forwards, about 50 us of Python and one count each; where there is a GPU, replays of a captured
forward as well. Every 20 ms somebody scrapes 500 label sets: a thread of the same process without HTTP, or another
process over HTTP. In turn with that they sleep as long as a scrape took. Of each such window the slowest forward that
overlaps it is kept; p50 and p90 are over windows. Times are of the machine they were taken on.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from exporting import cuda, scrape
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder

import graphprobe
from graphprobe import metrics
from graphprobe.export.page import Writer
from graphprobe.export.prometheus import register
from graphprobe.ledger import LEDGER, Ledger
from graphprobe.observe import observe

SIZES = (10, 100, 500, 1_000, 10_000)
EVERY = 0.02
Window = tuple[float, float]


def sets(ledger: Ledger) -> int:
    return len(metrics.samples(ledger.snapshot()))


def forward(ledger: Ledger, name: str, most: int) -> None:
    """A forward with ``most`` label sets, most of them of buckets as an engine has them after a day."""
    buckets = range(1, 1 + max(1, (most - 16) // 8))
    probe = observe(name, buckets, ledger=ledger)
    for bucket in buckets if most > 16 else ():
        probe.graph_call(bucket, bucket)
        probe.forward.time("graph", bucket, 5e-3, mode="full")
        probe.forward.captured(bucket, "ok", 0.1, 1 << 20)
    present = len(metrics.forward_samples(probe.snapshot())[0])
    for phase in range(most - present):
        probe.eager_call(1, "unknown", phase=f"p{phase}")


def sized(label_sets: int, ledger: Ledger | None = None) -> Ledger:
    """A ledger with so many label sets; one forward has 500 at most, and what is of the process is three."""
    ledger = Ledger() if ledger is None else ledger
    for number in range(-(-label_sets // 500)):
        forward(ledger, f"decode{number}", min(label_sets, 500))
    return ledger


def timed(what: Callable[[], Any], seconds: float) -> float:
    """Median milliseconds, after a first time that is not counted."""
    what()
    found, end = [], time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        start = time.perf_counter()
        what()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def pages(registry: CollectorRegistry) -> Callable[[], bytes]:
    """What the exporter's thread does for a scrape, without HTTP."""
    writer = Writer(*choose_encoder(""))
    return lambda: writer.page(registry)


def scraping(seconds: float) -> list[dict[str, float]]:
    found = []
    for size in SIZES:
        ledger, registry = sized(size), CollectorRegistry()
        register(registry, ledger)
        with graphprobe.start_exporter(0, registry=registry, ledger=ledger) as running:
            found.append(
                {
                    "label_sets": sets(ledger),
                    "bytes": len(scrape(running.url)),
                    "http_ms": timed(lambda url=running.url: scrape(url), seconds),
                    "ms": timed(pages(registry), seconds),
                    "client_ms": timed(lambda each=registry: generate_latest(each), seconds),
                }
            )
    return found


def counted(ledger: Ledger) -> Callable[[], None]:
    """About 50 us of Python and one count."""
    count = observe("served", [8], ledger=ledger).graph_call

    def serve() -> None:
        total = 0
        for number in range(600):
            total += number
        count(8, 8)

    return serve


def replayed(ledger: Ledger) -> Callable[[], None]:
    """One replay of eight Linear(256), and the wait for it: the ledger is that of the process."""
    import torch

    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).cuda().bfloat16()
    graphed = graphprobe.capture(lambda x: layers(x), buckets=[4], name="replayed", outputs="alias")
    x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        graphed.warmup(lambda bucket: ((x,), {}))

    def serve() -> None:
        with torch.inference_mode():
            graphed(x)
        torch.cuda.current_stream().synchronize()

    return serve


def reading(step: Callable[[], Any], until: float) -> list[Window]:
    """Take a step every 20 ms; when each began and ended."""
    found = []
    while (start := time.perf_counter()) < until:
        step()
        found.append((start, time.perf_counter()))
        time.sleep(EVERY)
    return found


def inside(step: Callable[[], Any], seconds: float) -> Callable[[], list[Window]]:
    """Read from a thread of this process."""
    found: list[Window] = []
    thread = threading.Thread(target=lambda: found.extend(reading(step, time.perf_counter() + seconds)))
    thread.start()

    def windows() -> list[Window]:
        thread.join()
        return found

    return windows


def outside(url: str, pause: float, seconds: float) -> Callable[[], list[Window]]:
    """Read from another process, whose clock is the same one on Linux."""
    command = [sys.executable, __file__, "--client", url, str(pause), str(seconds)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def windows() -> list[Window]:
        return [(start, end) for start, end in json.loads(client.communicate()[0])]

    return windows


def slowest(serve: Callable[[], None], start: Callable[[], Callable[[], list[Window]]], seconds: float) -> list[Window]:
    """Serve while somebody reads: per window its own length and the slowest forward that overlaps it, in ms."""
    windows = start()
    starts, ends, end = [], [], time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        starts.append(now)
        serve()
        ends.append(time.perf_counter())
    found = []
    for first, last in windows():
        low, high = bisect_left(ends, first), bisect_left(starts, last)
        took = [ends[n] - starts[n] for n in range(low, high)]
        if took and last < end:
            found.append(((last - first) * 1e3, max(took) * 1e3))
    return found


def overlap(serve: Callable[[], None], registry: CollectorRegistry, url: str, seconds: float) -> dict[str, Any]:
    """The slowest forwards beside scrapes and beside sleeps, in turn."""
    page, found = pages(registry), {}
    for how in ("thread", "http"):
        busy: list[Window] = []
        idle: list[Window] = []
        for _ in range(5):
            for into in (busy, idle):
                wait = 0.0 if into is busy else statistics.median(each for each, _ in busy) / 1e3
                if how == "http":
                    start = lambda wait=wait: outside(url, wait, seconds / 20)  # noqa: E731
                else:
                    step = (lambda wait=wait: time.sleep(wait)) if wait else page
                    start = lambda step=step: inside(step, seconds / 20)  # noqa: E731
                into += slowest(serve, start, seconds / 20 + (0.5 if how == "http" else 0.0))
        found[how] = compared(busy, idle)
    return found


def compared(busy: list[Window], idle: list[Window]) -> dict[str, float]:
    found: dict[str, float] = {"windows": len(busy), "scrape_ms": statistics.median(each for each, _ in busy)}
    for name, share in (("p50", 0.5), ("p90", 0.9)):
        one, other = (sorted(worst for _, worst in each)[int(share * len(each))] for each in (busy, idle))
        found |= {f"scrape_{name}": one, f"idle_{name}": other, f"more_{name}": one - other}
    return found


def overlaps(seconds: float) -> dict[str, Any]:
    found = {}
    for make in (counted, replayed) if cuda() else (counted,):
        ledger = LEDGER if make is replayed else Ledger()
        serve = make(sized(500, ledger))
        registry = CollectorRegistry()
        register(registry, ledger)
        with graphprobe.start_exporter(0, registry=registry, ledger=ledger) as running:
            found[make.__name__] = overlap(serve, registry, running.url, seconds)
    return found


def client(url: str, pause: str, seconds: str) -> None:
    """The other process: it scrapes, or sleeps ``pause`` seconds instead."""
    wait = float(pause)
    step = (lambda: time.sleep(wait)) if wait else (lambda: scrape(url))
    print(json.dumps(reading(step, time.perf_counter() + float(seconds))))


SHORTEST = 5
"""Seconds in which each of the twenty parts has room for a scrape."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        client(*arguments.client)
        return
    if arguments.seconds < SHORTEST:
        parser.error(f"--seconds must be {SHORTEST} or more, for a scrape in each part")
    result: dict[str, Any] = {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "device": cuda()}
    result["scrape"] = scraping(arguments.seconds / 20)
    result["overlap"] = overlaps(arguments.seconds)
    print(f"{'label sets':>10} {'bytes':>10} {'http ms':>8} {'ms':>8} {'client ms':>9}")
    for row in result["scrape"]:
        print("{label_sets:10,} {bytes:10,} {http_ms:8.2f} {ms:8.2f} {client_ms:9.2f}".format(**row))
    print("slowest forward, ms    scrapes  length   p50 beside idle   more   p90 beside idle   more")
    for name, ways in result["overlap"].items():
        for how, row in ways.items():
            p50, p90 = ([row[f"{each}_{name}"] for each in ("scrape", "idle", "more")] for name in ("p50", "p90"))
            times = "".join(f"{each:8.3f}" for each in (*p50, *p90))
            print(f"{name + ', ' + how:22} {row['windows']:7} {row['scrape_ms']:7.1f} {times}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
