"""One truth: after one workload every route has the same names, the same labels and the same numbers."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

import graphprobe
from graphprobe import metrics
from graphprobe.export.prometheus import register
from graphprobe.ledger import Ledger
from graphprobe.tools.check import findings

torch = pytest.importorskip("torch")
exporter_prometheus = pytest.importorskip("opentelemetry.exporter.prometheus")

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]

SCOPE = ("otel_scope_name", "otel_scope_version", "otel_scope_schema_url")
"""What OpenTelemetry's exporter puts on every series, beside our labels."""


def series(page: str) -> Series:
    """Our series of a page: name and labels -> value."""
    found: Series = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith("graphprobe_"):
                labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in SCOPE))
                assert (sample.name, labels) not in found, f"twice: {sample.name} {labels}"
                found[sample.name, labels] = sample.value
    return found


def fetched(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def work(ledger: Ledger) -> None:
    """An engine's day in small: hits, padding, misses, times, captures that fail, memory, phases, a mismatch."""
    probe = graphprobe.observe("decode", [1, 2, 4, 8], ledger=ledger, unit="tokens", backend="cuda")
    for size, bucket in [(1, 1), (3, 4), (3, 4), (8, 8)]:
        probe.graph_call(size, bucket)
    probe.graph_call(2, 2, mode="piecewise", phase="mixed")
    for size, reason in [(3, "no_exact_bucket"), (9, "batch_too_large"), (700, "batch_too_large"), (1, "warmup")]:
        probe.eager_call(size, reason)
    forward = probe.forward
    for seconds in (4e-5, 3e-4, 2.0):
        forward.time("graph", 4, seconds, mode="full")
        forward.time("eager", None, seconds * 3)
    forward.captured(4, "ok", 0.25, -4096)
    forward.captured(8, "oom", 0.5, None)
    forward.mismatch(4)
    forward.kv_capacity_tokens, forward.pool_estimate_bytes = 4096, 1 << 20
    forward.uncovered["decode"] = 3
    forward.dropped[0] += 2
    ledger.hooks["vllm", "execute_model"] = True
    ledger.replays_seen = [5]


@pytest.fixture
def routes(tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[[], str]]]:
    """Every route over one ledger, started before anything is counted."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("GRAPHPROBE_LABELS", "replica=a")
    registry, read = CollectorRegistry(), exporter_prometheus.PrometheusMetricReader()
    provider = MeterProvider([read])
    with (
        graphprobe.start_exporter(0, ledger=ledger) as http,
        graphprobe.start_exporter(0, directory=tmp_path, ledger=ledger, interval=100) as host,
        graphprobe.start_otel(provider, ledger=ledger, interval=100) as otel,
    ):
        register(registry, ledger)

        def merged() -> str:
            host.flush()
            engine = CollectorRegistry()
            MultiProcessCollector(engine, path=str(tmp_path))  # type: ignore[no-untyped-call]
            return generate_latest(engine).decode()

        def endpoint() -> str:
            host.flush()
            return fetched(host.url)

        def opened() -> str:
            otel.flush()
            return generate_latest(theirs).decode()

        theirs = CollectorRegistry()
        theirs.register(read._collector)
        yield {
            "registry": lambda: generate_latest(registry).decode(),
            "http": lambda: fetched(http.url),
            "directory": merged,
            "endpoint": endpoint,
            "otel": opened,
        }
    provider.shutdown()


def test_all_routes_have_the_same_names_labels_and_numbers(
    routes: dict[str, Callable[[], str]], ledger: Ledger
) -> None:
    """Registry, own server, multiprocess directory, the endpoint of a host and OpenTelemetry: series by series.

    (H74, metebalci/thur#93)
    """
    work(ledger)
    found = {name: series(route()) for name, route in routes.items()}
    expected = found.pop("registry")
    assert {s.metric.name for s in metrics.samples(ledger.snapshot())} <= {
        name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name, _ in expected
    }
    assert 70 < len(expected)
    for name, got in found.items():
        assert expected == got, f"{name}: {expected.items() ^ got.items()}"
    assert all(dict(labels)["rank"] == "3" for _, labels in expected)


def test_all_routes_go_on_together(routes: dict[str, Callable[[], str]], ledger: Ledger) -> None:
    """A second look, after more calls, a new bucket and a new phase, agrees too: no route lags or counts twice."""
    work(ledger)
    for route in routes.values():
        route()
    work(ledger)
    graphprobe.observe("vllm.drafter", [16], ledger=ledger).graph_call(16, 16, phase="draft")
    found = [series(route()) for route in routes.values()]
    assert all(found[0] == other for other in found[1:])
    labels = {"forward": "decode", "phase": "decode", "mode": "full", "batch_size": "3", "bucket": "4"}
    labels |= {"rank": "3", "replica": "a"}
    assert found[0]["graphprobe_graph_calls_total", tuple(sorted(labels.items()))] == 4


def test_a_captured_forward_is_on_all_routes(routes: dict[str, Callable[[], str]], ledger: Ledger) -> None:
    """The same of inlet 1: a forward that graphprobe captures itself, timed on every second call."""
    from graphprobe.ledger import LEDGER

    graphed = graphprobe.capture(
        lambda x: x * 2, buckets=[1, 2, 4], name="agreement", backend="recorder", timing=2, pad="zeros"
    )
    LEDGER.forwards["agreement"].feeds = ledger.feeds
    ledger.forwards["agreement"] = LEDGER.forwards["agreement"]
    with torch.inference_mode():
        for size in (1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 3, 9) * 4:
            graphed(torch.ones(size, 3))
    found = [series(route()) for route in routes.values()]
    assert all(found[0] == other for other in found[1:])
    calls = sum(value for (name, _), value in found[0].items() if name.endswith("_calls_total"))
    assert calls == 48
    samples = sum(value for (name, _), value in found[0].items() if name == "graphprobe_forward_duration_seconds_count")
    assert 8 < samples


def test_every_route_keeps_the_contract(routes: dict[str, Callable[[], str]], ledger: Ledger) -> None:
    """`graphprobe check` has nothing to say against any of the pages, and no counter falls between two looks."""
    work(ledger)
    before = {name: route() for name, route in routes.items()}
    work(ledger)
    for name, route in routes.items():
        errors = [str(found) for found in findings(route(), earlier=before[name]) if found.severity == "error"]
        assert not errors, f"{name}: {errors}"
