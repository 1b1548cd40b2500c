"""The OpenTelemetry route, read through the real SDK and through its own Prometheus exporter."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Histogram, Meter, NoOpHistogram, NoOpMeter, NoOpMeterProvider
from opentelemetry.sdk import metrics as sdk_metrics
from opentelemetry.sdk import trace as sdk_trace
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracer, NoOpTracerProvider, Span, StatusCode, Tracer
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from graphprobe import errors, metrics
from graphprobe.errors import ConfigError
from graphprobe.export import instruments, otel
from graphprobe.export.otel import QUEUE, OtelExporter, start_otel
from graphprobe.export.prometheus import register
from graphprobe.feed import SIZE, Captured, Feed
from graphprobe.ledger import BOUNDS, LEDGER, Forward, Ledger
from graphprobe.observe import observe
from graphprobe.snapshot import Snapshot

NEVER = 3600.0
"""An interval after which no test is there any more: it flushes itself."""


class Sdk:
    """An SDK of this test alone, with a reader, OpenTelemetry's Prometheus exporter, and a list of spans."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.registry = CollectorRegistry()
        page = PrometheusMetricReader(True, scope_info_enabled=False, registry=self.registry)
        self.meters = sdk_metrics.MeterProvider([self.reader, page], shutdown_on_exit=False)
        self.spans = InMemorySpanExporter()
        self.tracers = sdk_trace.TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))

    def start(self, ledger: Ledger, interval: float = NEVER) -> OtelExporter:
        return start_otel(self.meters, self.tracers, ledger=ledger, interval=interval)

    def collect(self) -> dict[str, Any]:
        """Metric by name, as the reader is given it."""
        data = self.reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def total(self, name: str) -> float:
        """Sum over the label sets of one metric."""
        found = self.collect().get(name)
        return sum(point.value for point in found.data.data_points) if found else 0

    def durations(self) -> int:
        found = self.collect().get("graphprobe.forward.duration")
        return sum(point.count for point in found.data.data_points) if found else 0


@pytest.fixture
def sdk() -> Iterator[Sdk]:
    yield Sdk()
    for exporter in list(otel._running):
        exporter.close()


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures of graphprobe's own are counted, as in production."""
    monkeypatch.setenv("GRAPHPROBE_STRICT", "0")


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines(registry: CollectorRegistry) -> list[str]:
    """The samples and helps of a page; only OpenMetrics has a type for info, so types may differ."""
    return sorted(line for line in generate_latest(registry).decode().splitlines() if not line.startswith("# TYPE"))


def ours(ledger: Ledger) -> list[str]:
    registry = CollectorRegistry()
    register(registry, ledger)
    return lines(registry)


def busy(ledger: Ledger, name: str = "decode") -> Forward:
    """Every metric of the catalogue has a sample, but for those of a process, which each ledger has once."""
    watched = observe(name, [1, 2, 4, 8, 72], ledger=ledger, source="capture", max_batch=80, clock=None)
    watched.graph_call(3, 4)
    watched.graph_call(70, 72, mode="piecewise", phase="verify")
    watched.eager_call(100, "batch_too_large")
    forward = watched.forward
    forward.time("graph", 4, 0.003, mode="full")
    forward.time("graph", 72, 0.004, phase="verify", mode="piecewise")
    forward.time("eager", None, 3.0)
    forward.captured(4, "ok", 0.5, -8)
    forward.captured(8, "oom", 0.5, None)
    forward.mismatch(4)
    forward.unmatched.update(graph=2, eager=0)
    forward.holders[0].pool_bytes = 1 << 20
    forward.pool_estimate_bytes, forward.kv_capacity_tokens = 5, 6
    ledger.hooks["vllm", "dispatch"] = True
    ledger.replays_seen = [9]
    return forward


def test_same_page_as_prometheus(sdk: Sdk, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through OpenTelemetry's Prometheus exporter every name, label, number and help is that of our own page."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("GRAPHPROBE_LABELS", 'model=ll"ama')
    exporter = sdk.start(ledger)
    busy(ledger)
    busy(ledger, 'a"b\\c\nd {e="f"} é')
    busy(ledger, "\ud800")
    exporter.flush()
    assert lines(sdk.registry) == ours(ledger)
    families = {line.split()[2].removesuffix("_total") for line in ours(ledger) if line.startswith("# HELP")}
    assert families == {metric.name.removesuffix("_total") for metric in metrics.CATALOGUE}
    assert all('model="ll\\"ama"' in line and 'rank="3"' in line for line in lines(sdk.registry) if line[0] != "#")


def test_same_page_where_labels_are_folded(sdk: Sdk, ledger: Ledger) -> None:
    """A forward with too many label sets is folded as on our own page."""
    exporter = sdk.start(ledger)
    wide = observe("wide", ledger=ledger)
    for number in range(6000):
        wide.eager_call(number % 600, "unknown", phase=f"p{number // 600}")
    exporter.flush()
    assert lines(sdk.registry) == ours(ledger)
    assert sdk.total("graphprobe.eager.calls") == 6000


def test_same_page_after_a_capture(sdk: Sdk, own_forwards: None) -> None:
    """What a captured forward counts and measures reaches both pages alike."""
    import torch

    from graphprobe.graphed import capture

    exporter = sdk.start(LEDGER)
    forward = capture(lambda x: x + 1, buckets=[2, 4], name="decode", backend="recorder", timing=1)
    with torch.inference_mode():
        for rows in 4 * [2] + 4 * [3] + 4 * [4]:
            forward(torch.zeros(rows, 3))
    exporter.flush()
    assert lines(sdk.registry) == ours(LEDGER)
    assert (sdk.total("graphprobe.graph.calls"), sdk.total("graphprobe.captures")) == (6, 2)
    assert sdk.durations() == sdk.total("graphprobe.forward.samples") > 0
    spans = sdk.spans.get_finished_spans()
    assert [(span.attributes or {})["graphprobe.bucket"] for span in spans] == [2, 4]


def test_instruments_are_the_catalogue(sdk: Sdk, ledger: Ledger) -> None:
    """Each metric is one instrument of its kind, with its unit, its help and exactly its labels."""
    exporter = sdk.start(ledger)
    busy(ledger)
    exporter.flush()
    found = sdk.collect()
    assert set(found) == {metric.otel_name for metric in metrics.CATALOGUE}
    assert {"graphprobe.graph.calls", "graphprobe.forward", "graphprobe.graph.pool.growth"} < set(found)
    kinds = {"counter": "Sum", "gauge": "Gauge", "info": "Gauge", "histogram": "Histogram"}
    for metric in metrics.CATALOGUE:
        seen = found[metric.otel_name]
        assert (type(seen.data).__name__, seen.unit, seen.description) == (kinds[metric.kind], metric.unit, metric.help)
        assert {tuple(point.attributes) for point in seen.data.data_points} == {metric.labels}
        assert getattr(seen.data, "is_monotonic", True)
    assert [point.value for name in ("forward", "build") for point in found[f"graphprobe.{name}.info"].data.data_points]


def test_histogram_has_our_bounds(sdk: Sdk, ledger: Ledger) -> None:
    """On, below and above each bound a duration is counted where the ledger counts it."""
    exporter = sdk.start(ledger)
    forward = ledger.forward("decode")
    for bound in BOUNDS:
        for seconds in (math.nextafter(bound, 0), bound, math.nextafter(bound, 1)):
            forward.time("graph", 4, seconds, mode="full")
    exporter.flush()
    (point,) = sdk.collect()["graphprobe.forward.duration"].data.data_points
    (times,) = ledger.snapshot().forwards["decode"].times.values()
    assert (point.explicit_bounds, point.bucket_counts) == (BOUNDS, times.bounds)
    assert (point.count, point.sum) == (times.count, pytest.approx(times.sum))


def test_counts_from_before_the_start(sdk: Sdk, ledger: Ledger) -> None:
    """Counters have what was counted before; the histogram, which cannot, has what came since."""
    forward = busy(ledger)
    exporter = sdk.start(ledger)
    forward.time("graph", 4, 0.001, mode="full")
    exporter.flush()
    assert (sdk.total("graphprobe.graph.calls"), sdk.total("graphprobe.forward.samples")) == (2, 4)
    assert sdk.durations() == 1


def test_recorded_without_a_flush(sdk: Sdk, ledger: Ledger) -> None:
    """The exporter's thread records what comes, however long after the start."""
    sdk.start(ledger, 0.01)
    for count in (1, 2):
        ledger.forward("decode").time("graph", 4, 0.001)
        wait_for(lambda count=count: sdk.durations() == count)  # type: ignore[misc]


def test_span_of_a_capture(sdk: Sdk, ledger: Ledger) -> None:
    """A capture is a span with its own times, below the span that was current where it was captured."""
    exporter = sdk.start(ledger)
    forward = ledger.forward("decode")
    before = time.time_ns()
    with sdk.tracers.get_tracer("engine").start_as_current_span("start up") as parent:
        forward.captured(4, "ok", 0.25, -8)
        forward.captured(8, "oom", 0.5, None)
    after = time.time_ns()
    forward.captured(2, "error", 0.0, None)
    exporter.flush()
    ok, oom, root = [span for span in sdk.spans.get_finished_spans() if span.name == "graphprobe.capture"]
    assert ok.attributes == {
        "graphprobe.forward": "decode",
        "graphprobe.bucket": 4,
        "graphprobe.outcome": "ok",
        "graphprobe.pool_growth_bytes": -8,
    }
    assert oom.attributes == {"graphprobe.forward": "decode", "graphprobe.bucket": 8, "graphprobe.outcome": "oom"}
    for span, seconds in ((ok, 0.25), (oom, 0.5)):
        assert span.start_time is not None and span.end_time is not None
        assert before <= span.end_time <= after
        assert span.end_time - span.start_time == round(seconds * 1e9)
        assert span.parent == parent.get_span_context()
    assert root.parent is None
    assert [span.status.status_code for span in (ok, oom, root)] == [
        StatusCode.UNSET,
        StatusCode.ERROR,
        StatusCode.ERROR,
    ]
    assert oom.status.description == "oom"


def test_two_tracers_share_a_parent(sdk: Sdk, ledger: Ledger) -> None:
    """Two exporters of one ledger, each to a provider of its own, both record everything."""
    other = Sdk()
    exporters = [sdk.start(ledger), other.start(ledger)]
    assert exporters[0] is not exporters[1]
    with sdk.tracers.get_tracer("engine").start_as_current_span("start up") as parent:
        busy(ledger)
    for exporter in exporters:
        exporter.flush()
    for each in (sdk, other):
        spans = [span for span in each.spans.get_finished_spans() if span.name == "graphprobe.capture"]
        assert [span.parent for span in spans] == 2 * [parent.get_span_context()]
        assert lines(each.registry) == ours(ledger)


def test_inside_the_context_of_a_capture(sdk: Sdk, ledger: Ledger) -> None:
    """A span is recorded although somebody else is inside the context of its capture."""
    other = Feed()
    ledger.feeds.append(other)
    exporter = sdk.start(ledger)
    ledger.forward("decode").captured(4, "ok", 0.25, None)
    (event,) = other.drain()
    assert isinstance(event, Captured)
    event.context.run(exporter.flush)
    assert len(sdk.spans.get_finished_spans()) == 1


def test_a_second_start_is_the_first(sdk: Sdk, ledger: Ledger) -> None:
    """Starting twice is starting once; after a close it starts again, and no series is there twice."""
    exporter = sdk.start(ledger)
    forward = busy(ledger)
    assert start_otel(sdk.meters, ledger=ledger) is sdk.start(ledger) is exporter
    assert len(ledger.feeds) == 1
    exporter.flush()
    page = lines(sdk.registry)
    exporter.close()
    exporter.close()
    assert (ledger.feeds, repr(exporter)) == ([], "OtelExporter(closed)")
    assert set(sdk.collect()) == {"graphprobe.forward.duration"}
    with sdk.start(ledger) as again:
        assert (again is exporter, repr(again)) == (False, "OtelExporter(running)")
        assert lines(sdk.registry) == page == ours(ledger)
        forward.time("graph", 4, 0.001, mode="full")
        forward.captured(4, "ok", 0.1, None)
    assert (sdk.durations(), len(sdk.spans.get_finished_spans())) == (4, 3)


def test_close_records_the_last_events(sdk: Sdk, ledger: Ledger) -> None:
    """What waited is recorded by close(), what comes later is not."""
    with sdk.start(ledger):
        ledger.forward("decode").time("graph", 4, 0.001)
    ledger.forward("decode").time("graph", 4, 0.001)
    assert sdk.durations() == 1


def test_refused(sdk: Sdk, ledger: Ledger) -> None:
    """A provider that has another ledger or other tracers, and what is no provider, are refused with a hint."""
    sdk.start(ledger)
    with pytest.raises(ConfigError, match="another ledger"):
        sdk.start(Ledger())
    with pytest.raises(ConfigError, match="another tracer provider"):
        start_otel(sdk.meters, Sdk().tracers, ledger=ledger)
    with pytest.raises(ConfigError, match=r"get_meter\(\), got <opentelemetry"):
        start_otel(sdk.meters.get_meter("mine"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"get_tracer\(\), got <opentelemetry"):
        start_otel(sdk.meters, sdk.tracers.get_tracer("mine"))  # type: ignore[arg-type]
    assert len(ledger.feeds) == 1


@pytest.mark.parametrize("interval", [0, -1, math.nan, math.inf, "1", None])
def test_refused_interval(ledger: Ledger, interval: Any) -> None:
    """An interval that is no time is refused before anything is started."""
    with pytest.raises(ConfigError, match="interval"):
        start_otel(ledger=ledger, interval=interval)
    assert ledger.feeds == []


class Watched(Ledger):
    """A ledger that counts a call right after each look at it."""

    looks = 0

    def snapshot(self) -> Snapshot:
        found = super().snapshot()
        self.looks += 1
        observe("decode", [1], ledger=self).graph_call(1, 1)
        return found


def test_one_collection_is_one_snapshot(sdk: Sdk) -> None:
    """All metrics of a collection are of one moment, and the next collection is of a later one."""
    ledger = Watched()
    sdk.start(ledger)
    assert [sdk.total("graphprobe.graph.calls") for _ in range(3)] == [0, 1, 2]
    generate_latest(sdk.registry)
    assert ledger.looks == 4


def test_a_part_of_a_collection_is_not_kept(sdk: Sdk, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric that is read long after the others is read anew."""
    exporter = sdk.start(ledger)
    calls, eager = metrics.GRAPH_CALLS, metrics.EAGER_CALLS
    exporter.instruments._observed(calls)
    observe("decode", ledger=ledger).eager_call(3, "unknown")
    assert exporter.instruments._observed(eager) == []
    monkeypatch.setattr(instruments, "FRESH", -1.0)
    assert [seen.value for seen in exporter.instruments._observed(eager)] == [1]


def test_collections_of_two_threads(sdk: Sdk, ledger: Ledger) -> None:
    """A collection of one thread is of one moment, whatever another thread collects meanwhile."""
    exporter = sdk.start(ledger)
    watched = observe("decode", [1], ledger=ledger)

    def calls(metric: metrics.Metric) -> float:
        return sum(seen.value for seen in exporter.instruments._observed(metric))

    seen = [calls(metrics.GRAPH_CALLS)]
    watched.graph_call(1, 1)
    watched.eager_call(1, "unknown")
    with ThreadPoolExecutor(1) as other:
        seen += [other.submit(calls, metric).result() for metric in (metrics.GRAPH_CALLS, metrics.EAGER_CALLS)]
    assert [*seen, calls(metrics.EAGER_CALLS)] == [0, 1, 1, 0]


def test_readers_at_the_same_time(sdk: Sdk, ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """Two readers in threads of their own, beside threads that count and measure, see all of it in the end."""
    exporter = sdk.start(ledger, 0.001)
    watched = observe("decode", ledger=ledger)

    def count(start: int) -> None:
        for size in range(start, start + 1000):
            watched.eager_call(size, "unknown")
            watched.forward.time("eager", None, 0.001)

    def read(look: Callable[[], object]) -> None:
        while any(thread.is_alive() for thread in counting):
            look()

    counting = [threading.Thread(target=count, args=(1000 * n,)) for n in range(2)]
    looks: list[Callable[[], object]] = [sdk.collect, lambda: generate_latest(sdk.registry)]
    reading = [threading.Thread(target=read, args=(look,)) for look in looks]
    for thread in (*counting, *reading):
        thread.start()
    for thread in (*counting, *reading):
        thread.join()
    exporter.flush()
    assert (sdk.total("graphprobe.eager.calls"), sdk.durations()) == (2000, 2000)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def spoil(ledger: Ledger) -> None:
    ledger.forward("bad").times["a", "key", "of", 5, "parts"] = [1.0, 1.0]  # type: ignore[index]


def test_one_bad_forward(sdk: Sdk, ledger: Ledger, lenient: None) -> None:
    """A forward that cannot be read costs its own series only, and is counted once per collection."""
    exporter = sdk.start(ledger)
    busy(ledger)
    spoil(ledger)
    exporter.flush()
    assert sdk.total("graphprobe.graph.calls") == 2
    assert errors.internal_errors == {"export.otel": 1}
    assert lines(sdk.registry)[-1].startswith("graphprobe_verify_mismatches_total")


class Unreadable(Ledger):
    """A ledger that cannot be read the first time."""

    looks = 0

    def snapshot(self) -> Snapshot:
        self.looks += 1
        if self.looks == 1:
            raise ZeroDivisionError
        return super().snapshot()


class Slow(Ledger):
    """A ledger that takes long to read, as one of many forwards does beside a busy engine."""

    reads = 0

    def snapshot(self) -> Snapshot:
        self.reads += 1
        time.sleep(0.6)
        return super().snapshot()


def test_a_collection_reads_once_however_long_that_takes(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is how old a reading is, not how long it took: else each instrument would read again."""
    monkeypatch.setattr(instruments, "FRESH", 0.5)
    ledger = Slow()
    sdk.start(ledger)
    busy(ledger)
    sdk.collect()
    assert ledger.reads == 1


def test_one_bad_collection(sdk: Sdk, lenient: None, caplog: pytest.LogCaptureFixture) -> None:
    """A ledger that cannot be read is counted once, no callback raises, and the next collection has everything."""
    ledger = Unreadable()
    exporter = sdk.start(ledger)
    busy(ledger)
    exporter.flush()
    assert set(sdk.collect()) == {"graphprobe.forward.duration"}
    assert errors.internal_errors == {"export.otel": 1}
    assert "Callback failed" not in caplog.text
    assert lines(sdk.registry) == ours(ledger)


def test_strict(sdk: Sdk, ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """Under strict a callback raises, into the SDK's own hands."""
    sdk.start(ledger)
    spoil(ledger)
    sdk.collect()
    assert any("Callback failed" in record.getMessage() for record in caplog.records)


class Broken(NoOpMeterProvider, NoOpTracerProvider):
    """Providers of which one part raises."""

    def __init__(self, part: str) -> None:
        self.part = part

    def fail(self, part: str) -> None:
        if part == self.part:
            raise ZeroDivisionError(part)

    def get_meter(self, *args: Any, **kwargs: Any) -> Meter:
        self.fail("get_meter")
        return BrokenMeter(self)

    def get_tracer(self, *args: Any, **kwargs: Any) -> Tracer:
        self.fail("get_tracer")
        return BrokenTracer(self)


class BrokenMeter(NoOpMeter):
    def __init__(self, broken: Broken) -> None:
        super().__init__("broken")
        self.broken = broken

    def create_observable_gauge(self, *args: Any, **kwargs: Any) -> Any:
        self.broken.fail("create_observable_gauge")

    def create_histogram(self, *args: Any, **kwargs: Any) -> Histogram:
        self.broken.fail("create_histogram")
        return BrokenHistogram(self.broken)


class BrokenHistogram(NoOpHistogram):
    def __init__(self, broken: Broken) -> None:
        super().__init__("broken")
        self.broken = broken

    def record(self, *args: Any, **kwargs: Any) -> None:
        self.broken.fail("record")


class BrokenTracer(NoOpTracer):
    def __init__(self, broken: Broken) -> None:
        self.broken = broken

    def start_span(self, *args: Any, **kwargs: Any) -> Span:
        self.broken.fail("start_span")
        return super().start_span(*args, **kwargs)


GAUGES = sum(metric.kind in ("gauge", "info") for metric in metrics.CATALOGUE)
PARTS = {"get_meter": 1, "get_tracer": 1, "create_observable_gauge": GAUGES, "create_histogram": 1}
PARTS |= {"record": 3, "start_span": 2}
"""What can raise, and how often it does with a workload of three durations and two captures."""


@pytest.mark.parametrize("part", PARTS)
def test_broken_provider(part: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    """A provider that raises reaches nobody: it is counted, logged once, and started and closed like another one."""
    broken = Broken(part)
    with pytest.raises(ZeroDivisionError), start_otel(broken, broken, ledger=ledger, interval=NEVER) as exporter:
        busy(ledger)
    for running in list(otel._running):
        running.close()
    errors.internal_errors.clear()
    said()
    monkeypatch.setenv("GRAPHPROBE_STRICT", "0")
    broken = Broken(part)
    with start_otel(broken, broken, ledger=ledger, interval=NEVER) as exporter:
        busy(ledger)
        exporter.flush()
        assert start_otel(broken, broken, ledger=ledger) is exporter
    assert errors.internal_errors == {"export.otel": PARTS[part]}
    assert len([text for text in said() if "recorded less" in text]) == 1
    assert ledger.feeds == []


class OldMeter(NoOpMeter):
    """A meter as it was before bounds could be advised."""

    made = 0

    def create_histogram(self, name: str, unit: str = "", description: str = "") -> Histogram:  # type: ignore[override]
        self.made += 1
        return NoOpHistogram(name, unit, description)


class OldProvider(NoOpMeterProvider):
    def __init__(self) -> None:
        self.meter = OldMeter("old")

    def get_meter(self, *args: Any, **kwargs: Any) -> Meter:
        return self.meter


def test_old_api(ledger: Ledger, said: Callable[[], list[str]]) -> None:
    """Where no bounds can be given there is no histogram rather than a wrong one, and a line says what to do."""
    old = OldProvider()
    with start_otel(old, ledger=ledger, interval=NEVER) as exporter:
        busy(ledger)
        exporter.flush()
    assert (old.meter.made, exporter.instruments.histogram) == (0, None)
    (text,) = [text for text in said() if "opentelemetry-api 1.30" in text]
    assert text.startswith("graphprobe.forward.duration is left out")


def test_full_queue(sdk: Sdk, ledger: Ledger, said: Callable[[], list[str]]) -> None:
    """Events beyond the queue are dropped, counted and said once; no forward waits, and strict raises nothing."""
    exporter = sdk.start(ledger)
    forward = ledger.forward("decode")
    for dropped in (10, 25):
        with exporter.lock:
            for _ in range(SIZE + dropped):
                forward.time("graph", 4, 0.001)
        exporter.flush()
    assert sdk.durations() == 2 * SIZE
    assert errors.internal_errors == {QUEUE: 35}
    assert len([text for text in said() if "waited for OpenTelemetry" in text]) == 1


def in_child(do: Callable[[], object]) -> Any:
    """What ``do`` returns in a forked child, through JSON."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Else one that waits for ever would be waited for.
        signal.alarm(30)
        try:
            os.write(writing, json.dumps(do()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        found = file.read()
    os.waitpid(pid, 0)
    return json.loads(found)


def test_fork(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child has numbers of its own, and what waited in the parent is recorded by the parent alone."""
    monkeypatch.setattr(LEDGER, "forwards", {})
    exporter = sdk.start(LEDGER)
    watched = observe("decode", [1, 2], ledger=LEDGER)

    def numbers() -> list[float]:
        exporter.flush()
        return [sdk.total("graphprobe.graph.calls"), sdk.durations(), len(sdk.spans.get_finished_spans())]

    def child() -> list[float]:
        watched.graph_call(1, 1)
        watched.forward.time("graph", 1, 0.001)
        return numbers()

    wait_for(lambda: exporter._ticker._thread.is_alive())
    sdk.collect()
    for _ in range(3):
        watched.graph_call(1, 1)
        watched.forward.time("graph", 1, 0.001)
    watched.forward.captured(1, "ok", 0.1, None)
    assert in_child(child) == [1, 1, 0]
    assert numbers() == [3, 3, 1]


def test_fork_with_a_full_queue(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was dropped and what waits in the parent is not the child's, in a ledger that the child inherits, too."""
    ledger = Ledger()
    exporter = sdk.start(ledger)
    forward = ledger.forward("decode")

    def overflow(dropped: int) -> dict[str, int]:
        with exporter.lock:
            for _ in range(exporter._feed.size + dropped):
                forward.time("graph", 1, 0.001)
        exporter._count_dropped()
        return errors.internal_errors

    def child() -> list[object]:
        exporter.flush()
        return [sdk.durations(), overflow(2)]

    monkeypatch.setattr(exporter._feed, "size", 100)
    assert overflow(5) == {QUEUE: 5}
    assert in_child(child) == [0, {QUEUE: 2}]


def test_fork_while_another_thread_starts(sdk: Sdk, ledger: Ledger) -> None:
    """A child can close and start although somebody was about to in the parent."""
    exporter = sdk.start(ledger)

    def child() -> bool:
        exporter.close()
        return sdk.start(ledger) is not exporter

    with otel._lock:
        assert in_child(child) is True


def test_thread_of_a_forked_child(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child records without a flush, too, and can close."""
    monkeypatch.setattr(LEDGER, "forwards", {})
    exporter = sdk.start(LEDGER, 0.01)

    def child() -> bool:
        LEDGER.forward("decode").time("graph", 1, 0.001)
        wait_for(lambda: sdk.durations() == 1)
        exporter.close()
        return LEDGER.feeds == []

    assert in_child(child) is True
    assert sdk.durations() == 0


class SlowHistogram(NoOpHistogram):
    """Holds a lock while it records, until it is let go."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.lock, self.inside, self.go = threading.Lock(), threading.Event(), threading.Event()

    def record(self, *args: Any, **kwargs: Any) -> None:
        with self.lock:
            self.inside.set()
            self.go.wait(20)


def test_fork_while_a_provider_records(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork waits until no lock of the provider is held, as nobody would release it in the child."""
    monkeypatch.setattr(LEDGER, "forwards", {})
    exporter = sdk.start(LEDGER, 0.01)
    slow = exporter.instruments.histogram = SlowHistogram()
    LEDGER.forward("decode").time("graph", 1, 0.001)
    assert slow.inside.wait(20)
    threading.Timer(0.1, slow.go.set).start()
    assert in_child(lambda: slow.lock.acquire(blocking=False)) is True


def test_fork_while_a_provider_hangs(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that hangs keeps no process from forking, and the child can flush."""
    monkeypatch.setattr(LEDGER, "forwards", {})
    monkeypatch.setattr(otel, "FORK_WAIT", 0.01)
    exporter = sdk.start(LEDGER, 0.01)
    slow = exporter.instruments.histogram = SlowHistogram()
    LEDGER.forward("decode").time("graph", 1, 0.001)
    assert slow.inside.wait(20)

    def child() -> bool:
        exporter.flush()
        return exporter.lock.acquire(blocking=False)

    try:
        assert in_child(child) is True
        assert slow.lock.locked()
    finally:
        slow.go.set()


def run(code: str) -> str:
    """What a fresh interpreter prints; it must say nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, text=True, capture_output=True, cwd=Path(__file__).parent.parent
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_without_an_sdk() -> None:
    """With the API alone nothing happens; neither torch nor a metrics client nor an SDK is imported."""
    code = """
import sys, graphprobe
from graphprobe.errors import internal_errors
from graphprobe.export.otel import start_otel
exporter = start_otel(interval=0.01)
assert start_otel() is exporter
probe = graphprobe.observe("decode", [1, 2])
for _ in range(3):
    probe.graph_call(1, 1)
    probe.forward.time("graph", 1, 0.001)
    probe.forward.captured(1, "ok", 0.1, 1)
exporter.flush()
assert not list(exporter._feed.drain()) and not internal_errors
exporter.close()
print([name for name in ("torch", "prometheus_client", "opentelemetry.sdk") if name in sys.modules])
"""
    assert run(code) == "[]"


def test_provider_is_set_later() -> None:
    """An exporter that was started before the global providers were set serves them; it stays the one that runs."""
    code = """
import graphprobe
from graphprobe.export.otel import start_otel
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

def seen():
    exporter.flush()
    found = [m for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics]
    calls = [p.value for m in found if m.name == "graphprobe.graph.calls" for p in m.data.data_points if p.value]
    counts = [p.count for m in found if m.name == "graphprobe.forward.duration" for p in m.data.data_points]
    return calls, counts, len(spans.get_finished_spans())

def work():
    probe.graph_call(1, 1)
    probe.forward.time("graph", 1, 0.001)
    probe.forward.captured(1, "ok", 0.1, 1)

exporter = start_otel(metrics.get_meter_provider(), trace.get_tracer_provider(), interval=3600)
reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
meters, tracers = MeterProvider([reader]), TracerProvider()
tracers.add_span_processor(SimpleSpanProcessor(spans))
metrics.set_meter_provider(meters)
trace.set_tracer_provider(tracers)
probe = graphprobe.observe("decode", [1, 2])
work()
print(seen())
assert start_otel() is start_otel(meters) is start_otel(meters, tracers) is exporter
exporter.close()
exporter = start_otel(meters, tracers, interval=3600)
assert start_otel() is exporter
work()
print(seen())
"""
    assert run(code) == "([1], [1], 1)\n([2], [2], 2)"


def test_provider_becomes_the_global_one() -> None:
    """A provider that was passed, and is made the global one later, is not served a second time."""
    code = """
from graphprobe.export.otel import start_otel
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
meters = MeterProvider()
exporter = start_otel(meters)
metrics.set_meter_provider(meters)
print(start_otel() is start_otel(meters) is exporter)
"""
    assert run(code) == "True"


def test_end_of_the_process() -> None:
    """What was counted and measured last is in the last export of a process that just ends."""
    code = """
import graphprobe
from graphprobe.export.otel import start_otel
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
meters = MeterProvider([PeriodicExportingMetricReader(ConsoleMetricExporter(), export_interval_millis=3600_000)])
exporter = start_otel(meters, interval=3600)
exporter.flush()
probe = graphprobe.observe("decode", [1])
probe.graph_call(1, 1)
probe.forward.time("graph", 1, 0.001)
"""
    scope = json.loads(run(code))["resource_metrics"][0]["scope_metrics"][0]
    found = {metric["name"]: metric["data"]["data_points"][0] for metric in scope["metrics"]}
    assert found["graphprobe.graph.calls"]["value"] == 1
    assert found["graphprobe.forward.duration"]["count"] == 1


def test_broken_environment() -> None:
    """A global provider that cannot be loaded is our failure, counted; starting twice is starting once all the same."""
    code = """
import logging, os
logging.disable()
os.environ["OTEL_PYTHON_METER_PROVIDER"] = os.environ["OTEL_PYTHON_TRACER_PROVIDER"] = "no_such_provider"
import graphprobe
from graphprobe.errors import internal_errors
from graphprobe.export.otel import start_otel
os.environ["GRAPHPROBE_STRICT"] = "0"
exporter = start_otel(interval=3600)
assert start_otel() is exporter
graphprobe.observe("decode", [1]).forward.captured(1, "ok", 0.1, None)
exporter.close()
print(sorted(internal_errors))
"""
    assert run(code) == "['export.otel']"


def test_default_ledger_is_the_process(sdk: Sdk) -> None:
    """Without a ledger it is that of the process, as for graphprobe.snapshot()."""
    with start_otel(sdk.meters, interval=NEVER) as exporter:
        assert exporter.ledger is LEDGER
        assert exporter.tracer_provider is not sdk.tracers
