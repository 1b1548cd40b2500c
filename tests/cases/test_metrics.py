"""Reports about metrics: names that clash, series that vanish, rates that cannot be made from what is exported."""

from __future__ import annotations

import functools
import http.client
import importlib.util
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import prometheus_client
import pytest
import torch
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families as families
from prometheus_client.registry import CollectorRegistry

from graphprobe import metrics
from graphprobe.errors import ExporterError
from graphprobe.export.exporter import start_exporter
from graphprobe.export.prometheus import register
from graphprobe.graphed import capture
from graphprobe.ledger import Ledger
from graphprobe.observe import observe
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot, Times

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("own_forwards")

recorded = functools.partial(capture, backend="recorder")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def rows(n: int) -> torch.Tensor:
    return torch.randn(n, 3)


def page(ledger: Ledger | None = None) -> str:
    """The exposition of a ledger, by default the process's."""
    registry = CollectorRegistry()
    register(registry, ledger)
    return generate_latest(registry).decode()


def samples(text: str, name: str, **labels: str) -> dict[tuple[str, ...], float]:
    """Label values -> value of one metric, of the series with these labels."""
    return {
        tuple(s.labels.values()): s.value
        for family in families(text)
        for s in family.samples
        if s.name == name and labels.items() <= s.labels.items()
    }


def total(text: str, name: str, **labels: str) -> float:
    return sum(samples(text, name, **labels).values())


class Everything:
    """A ledger that stays as it is, in which every metric has a sample."""

    def snapshot(self) -> Snapshot:
        rows = (
            Row(3, "graph", 4, None, 7, 7, mode="full"),
            Row(9, "eager", None, FallbackReason.BATCH_TOO_LARGE, 2),
        )
        forward = ForwardSnapshot(
            "decode",
            (1, 2, 4),
            rows=rows,
            times={("decode", "graph", "full", 4): Times(1, 0.003, (0,) * 6 + (1,) + (0,) * 9)},
            capture_outcomes={(4, "ok"): 1},
            capture_seconds={4: 0.5},
            live={4: True},
            pool_bytes=1 << 20,
            pool_growth={4: -8},
            pool_estimate_bytes=5,
            kv_capacity_tokens=6,
            uncovered={"decode": 4},
            mismatches={4: 1},
            unmatched={"graph": 1, "eager": 0},
        )
        return Snapshot({"decode": forward}, {"somewhere": 1}, {("engine", "dispatch"): True}, 9)


@pytest.fixture
def everything() -> Any:
    return Everything()


# -- names -----------------------------------------------------------------------------------------------------------

SUFFIXES = ("_total", "_created", "_info", "_bucket", "_count", "_sum", "_gsum", "_gcount")


def stripped(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def test_no_two_names_are_equal_without_their_suffixes() -> None:
    """What a client strips at registration leaves different names (H61, prometheus/client_python#818)."""
    assert [] == [name for name, n in Counter(stripped(m.name) for m in metrics.CATALOGUE).items() if n > 1]
    assert not [m.family for m in metrics.CATALOGUE if m.family.endswith(SUFFIXES)]


def test_the_clients_own_metrics_take_every_name() -> None:
    """Registered one by one with the client's own classes, no name clashes with another.

    (H61, prometheus/client_python#818)
    """
    kinds = {
        "counter": prometheus_client.Counter,
        "gauge": prometheus_client.Gauge,
        "histogram": prometheus_client.Histogram,
        "info": prometheus_client.Info,
    }
    registry = CollectorRegistry()
    made = [kinds[m.kind](m.name.removesuffix("_info"), m.help, registry=registry) for m in metrics.CATALOGUE]
    assert len(metrics.CATALOGUE) == len(made)


def test_the_page_says_help_and_type_once_and_samples_bear_the_catalogues_names(everything: Any) -> None:
    """HELP and TYPE stand once per family; every sample's name is that of the contract, whole.

    (H61, prometheus/client_python#818)
    """
    text = page(everything)
    for metric in metrics.CATALOGUE:
        # The plain text format writes a family's own suffix, and has no kind for an info.
        kind = {"info": "gauge"}.get(metric.kind, metric.kind)
        assert 1 == text.count(f"# TYPE {metric.name} {kind}\n"), metric.name
        assert 1 == text.count(f"# HELP {metric.name} {metric.help}\n"), metric.name
    names = {s.name for family in families(text) for s in family.samples}
    histograms = {m.name + s for m in metrics.CATALOGUE if m.kind == "histogram" for s in SUFFIXES[3:6]}
    assert {m.name for m in metrics.CATALOGUE if m.kind != "histogram"} | histograms == names


# -- a second engine in one process ----------------------------------------------------------------------------------

ENGINE = """
import graphprobe

@graphprobe.capture(buckets=[1, 2], backend="recorder", name="reloaded")
def decode(x):
    return x * 2
"""


def loaded(at: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("reloaded_engine", at)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_forwards_are_two_label_values_of_one_family() -> None:
    """A second decorated function adds series, not a family (H62, vllm-project/vllm#2730)."""
    for name in ("one", "other"):
        forward = recorded(lambda x: x * 2, buckets=[2], name=name)
        for _ in range(3):
            forward(rows(2))
    text = page()
    assert 1 == text.count("# TYPE graphprobe_graph_calls_total counter")
    assert 2 == total(text, "graphprobe_graph_calls_total", forward="one")
    assert 2 == total(text, "graphprobe_graph_calls_total", forward="other")


def test_two_exporters_serve_one_process() -> None:
    """Two exporters, on a shared registry or on their own, start and show the same (H62, vllm-project/vllm#2730)."""
    observe("decode", [2]).graph_call(2, 2)
    shared = CollectorRegistry()
    for registries in ((None, None), (shared, shared), (CollectorRegistry(), None)):
        with start_exporter(0, registry=registries[0]) as one, start_exporter(0, registry=registries[1]) as other:
            assert answer(one.port, "/metrics")[2] == answer(other.port, "/metrics")[2]


def test_an_engine_that_is_loaded_again_goes_on_counting(tmp_path: Path) -> None:
    """Reloading the module that decorates raises nothing and counts on in the same series.

    (H62, vllm-project/vllm#2730)
    """
    at = tmp_path / "engine.py"
    at.write_text(ENGINE)
    register(registry := CollectorRegistry())
    for calls in (2, 4):
        module = loaded(at)
        for _ in range(3):
            module.decode(rows(2))
        register(registry)
        text = generate_latest(registry).decode()
        assert calls == total(text, "graphprobe_graph_calls_total", forward="reloaded")
        assert 1 == text.count("# TYPE graphprobe_graph_calls_total counter")


RELOADED = """
import importlib, prometheus_client, graphprobe, graphprobe.export.prometheus as prometheus
graphprobe.observe("decode", [2]).graph_call(2, 2)
prometheus.register()
prometheus = importlib.reload(prometheus)
prometheus.register()
with graphprobe.start_exporter(0, registry=prometheus_client.REGISTRY):
    page = prometheus_client.generate_latest(prometheus_client.REGISTRY).decode()
assert page.count("# TYPE graphprobe_graph_calls_total counter") == 1, page
"""


def test_the_exporters_module_may_be_loaded_again() -> None:
    """A reload of our own module, as a notebook does it, finds the registry as it left it.

    (H62, vllm-project/vllm#2730)
    """
    done = subprocess.run([sys.executable, "-c", RELOADED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)


def test_a_registry_of_the_callers_is_honoured() -> None:
    """capture(registry=) shows the metrics there, once, for all forwards that name it, and nowhere else.

    (H62, vllm-project/vllm#2730)
    """
    registry, bystander = CollectorRegistry(), CollectorRegistry()
    for name in ("one", "other"):
        recorded(lambda x: x * 2, buckets=[2], name=name, registry=registry)
    text = generate_latest(registry).decode()
    assert {"one", "other"} == {s.labels["forward"] for f in families(text) for s in f.samples if "forward" in s.labels}
    assert b"" == generate_latest(bystander)


# -- when the client is imported -------------------------------------------------------------------------------------

IMPORTS = """
import sys, {modules}
{code}
assert "prometheus_client" not in sys.modules
"""


@pytest.mark.parametrize(
    ("modules", "code"),
    [
        ("graphprobe", ""),
        ("graphprobe", "graphprobe.observe('decode', [2]).graph_call(2, 2); graphprobe.snapshot().to_json()"),
        ("graphprobe", "graphprobe.capture(lambda x: x, buckets=[2], name='f'); print(graphprobe.table())"),
        ("graphprobe.metrics, graphprobe.graphed, graphprobe.ledger, graphprobe.tools.sources", ""),
        ("graphprobe.cli", ""),
    ],
    ids=["import", "observe", "capture", "modules", "cli"],
)
def test_counting_never_imports_the_metrics_client(modules: str, code: str) -> None:
    """The multiprocess directory may be set after graphprobe was imported, since the client is imported later.

    (H63, lablup/backend.ai#11038)
    """
    script = IMPORTS.format(modules=modules, code=code)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)


# -- labels and kinds ------------------------------------------------------------------------------------------------


def test_no_series_bears_a_process_id(everything: Any) -> None:
    """No pid label, so a restart adds no series; the pool's bytes are a gauge without one.

    (H66, prometheus/client_python#1033)
    """
    labels = {label for f in families(page(everything)) for s in f.samples for label in s.labels}
    assert not {"pid", "process", "worker", "thread"} & labels
    assert {"forward": "decode"} == next(
        s.labels for f in families(page(everything)) for s in f.samples if s.name == "graphprobe_graph_pool_bytes"
    )


def test_the_hit_rate_is_no_metric(everything: Any) -> None:
    """No gauge says hit rate: it is derived from counters, which add up over processes.

    (H66, prometheus/client_python#1033)
    """
    assert not [m.name for m in metrics.CATALOGUE if {"rate", "ratio", "hit", "hits"} & set(m.name.split("_"))]
    text = page(everything)
    assert "hit" not in "".join(line.split("{")[0] for line in text.splitlines() if not line.startswith("#"))


# -- the port --------------------------------------------------------------------------------------------------------


def test_a_second_rank_on_the_port_is_refused_and_goes_on_serving() -> None:
    """A taken port is an OSError with what to do; forwards are served and counted all the same; port 0 is free.

    The report allows the next free port or a refusal: asked for by number, the design refuses loudly.
    (H67, prometheus/client_python#102)
    """
    forward = recorded(lambda x: x * 2, buckets=[2], name="rank")
    with start_exporter(0) as first:
        with pytest.raises(ExporterError, match=f"{first.port}.*port=0"):
            start_exporter(first.port)
        for _ in range(3):
            x = rows(2)
            assert torch.equal(x * 2, forward(x))
        with start_exporter(0) as second:
            assert 0 < second.port != first.port > 0
            for exporter in (first, second):
                assert 2 == total(answer(exporter.port, "/metrics")[2], "graphprobe_graph_calls_total")


@pytest.mark.parametrize("addr", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_a_stranger_has_is_refused(addr: str) -> None:
    """Whoever listens there, our exporter neither shares the port nor stays silent.

    (H67, prometheus/client_python#667)
    """
    with socket.socket() as stranger:
        stranger.bind((addr, 0))
        stranger.listen()
        with pytest.raises(ExporterError) as caught:
            start_exporter(stranger.getsockname()[1], addr)
    assert isinstance(caught.value, OSError)


def test_a_refused_port_can_be_had_later() -> None:
    """A refusal leaves nothing behind that keeps the port or the registry (H67, prometheus/client_python#667)."""
    registry = CollectorRegistry()
    with start_exporter(0) as first, pytest.raises(ExporterError):
        start_exporter(first.port, registry=registry)
    with start_exporter(first.port, registry=registry) as second:
        assert (first.port, 200) == (second.port, answer(second.port, "/metrics")[0])


# -- what a scrape gets ----------------------------------------------------------------------------------------------


def answer(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """(status, content type, body) of one request; a redirect is not followed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.headers["Content-Type"], reply.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("accept", ["", "text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0"])
def test_both_spellings_of_the_path_answer_themselves(everything: Any, accept: str) -> None:
    """/metrics and /metrics/ are 200 with the same type and body; neither redirects (H68, BerriAI/litellm#30079)."""
    with start_exporter(0, ledger=everything) as running:
        replies = {answer(running.port, path, Accept=accept) for path in ("/metrics", "/metrics/", "/metrics?")}
    ((status, kind, body),) = replies
    assert 200 == status
    assert kind.startswith("application/openmetrics-text" if "openmetrics" in accept else "text/plain; version=")
    assert "graphprobe_graph_calls_total{" in body


def test_every_other_path_says_no(everything: Any) -> None:
    """What is not served is a 404, never an empty 200 (H68, BerriAI/litellm#30079)."""
    with start_exporter(0, ledger=everything) as running:
        found = [answer(running.port, path)[::2] for path in ("/", "/metric", "/metrics/x")]
    assert [404] * 3 == [status for status, _ in found]
    assert all("/metrics" in body for _, body in found)


# -- the first increment ---------------------------------------------------------------------------------------------


def decorated_function(**options: Any) -> Any:
    return recorded(lambda x: x * 2, **options)


def decorated_method(**options: Any) -> Any:
    class Engine:
        @recorded(**options)
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    # The instance is made by the first call: series are born with the class.
    engine = functools.cache(Engine)
    return lambda x: engine().step(x)


class Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def captured_instance(**options: Any) -> Any:
    return recorded(Doubling().eval(), **options)


def captured_class(**options: Any) -> Any:
    return recorded(type("Own", (Doubling,), {"forward": Doubling.forward}), **options)().eval()


FORMS = [decorated_function, decorated_method, captured_instance, captured_class]


@pytest.mark.parametrize("make", FORMS)
def test_series_are_born_at_zero_with_the_decorator(make: Any) -> None:
    """Before any call each bucket has its graph counter, and each size that no bucket serves its eager one, at 0.

    Of the fallback reasons the design bears those that sizes alone explain.
    (H70, prometheus/prometheus#5355)
    """
    forward = make(buckets=[1, 2, 4], name="born")
    text = page()
    graph = samples(text, "graphprobe_graph_calls_total", forward="born")
    eager = samples(text, "graphprobe_eager_calls_total", forward="born")
    assert 3 == len(graph)
    assert {0.0} == {*graph.values(), *eager.values()}
    for n in (2, 2, 2, 3, 5):
        forward(rows(n))
    later = page()
    assert graph.keys() == samples(later, "graphprobe_graph_calls_total", forward="born").keys()
    grown = samples(later, "graphprobe_eager_calls_total", forward="born").keys() - eager.keys()
    assert {"warmup"} == {key[3] for key in grown}


@pytest.mark.parametrize("phase", ["verify", "draft"])
def test_series_are_born_in_the_forwards_own_phase(phase: str) -> None:
    """The zero of a forward that serves another phase than decode is the series that will count.

    (H70, prometheus/prometheus#5355)
    """
    forward = recorded(lambda x: x * 2, buckets=[2], name="own phase", phase=phase, capture_phases=phase)
    before = samples(page(), "graphprobe_graph_calls_total", forward="own phase")
    for _ in range(3):
        forward(rows(2))
    after = samples(page(), "graphprobe_graph_calls_total", forward="own phase", phase=phase)
    assert 2 == sum(after.values())
    assert after.keys() == before.keys()


@pytest.mark.parametrize(
    "options", [{"unit": "requests", "tokens_per_request": 2}, {"unit": "tokens"}], ids=["requests", "tokens"]
)
def test_series_are_born_in_the_forwards_own_unit(options: dict[str, Any]) -> None:
    """The zero row of a bucket is the one that an exact hit of it counts (H70, prometheus/prometheus#5355)."""
    forward = recorded(lambda x: x * 2, buckets=[2], name="own unit", **options)
    before = samples(page(), "graphprobe_graph_calls_total", forward="own unit")
    for _ in range(3):
        forward(rows(2 * options.get("tokens_per_request", 1)))
    after = samples(page(), "graphprobe_graph_calls_total", forward="own unit")
    assert ({*before}, [2.0]) == ({*after}, [*after.values()])


def test_captures_and_mismatches_are_born_at_zero() -> None:
    """The first failed capture is an increase, too (H70, prometheus/prometheus#5355)."""
    recorded(lambda x: x * 2, buckets=[1, 2], name="born failures")
    text = page()
    outcomes = samples(text, "graphprobe_captures_total", forward="born failures")
    assert {("1", "ok"), ("1", "error"), ("1", "oom"), ("2", "ok"), ("2", "error"), ("2", "oom")} == {
        key[:1] + key[2:] for key in outcomes
    }
    assert 2 == len(samples(text, "graphprobe_verify_mismatches_total", forward="born failures"))
    assert 0 == total(text, "graphprobe_captures_total", forward="born failures")


def test_an_observed_forward_is_born_at_zero(ledger: Ledger) -> None:
    """So is the forward of an engine with graphs of its own (H70, prometheus/prometheus#5355)."""
    observe("engine", [1, 2, 4], ledger=ledger)
    assert [0.0] * 3 == [*samples(page(ledger), "graphprobe_graph_calls_total", forward="engine").values()]


# -- durations -------------------------------------------------------------------------------------------------------


class Clock:
    """A timer that hands on the seconds it is told."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def start(self) -> float:
        return 0.0

    def stop(self, token: float, sink: Any) -> None:
        sink(self.seconds)

    def cancel(self, token: float) -> None:
        """Nothing is held."""

    def harvest(self) -> None:
        """Nothing is pending."""


def test_durations_of_a_forward_fall_into_different_bounds(ledger: Ledger) -> None:
    """50 us, 200 us, 3 ms and 40 ms are four bounds of a histogram in seconds (H71, PostHog/posthog#60414)."""
    clock = Clock()
    probe = observe("decode", [2], ledger=ledger, clock=clock)
    for clock.seconds in (50e-6, 200e-6, 3e-3, 40e-3):
        with probe.timed("graph", bucket=2):
            pass
    text = page(ledger)
    buckets = {
        float(s.labels["le"]): s.value
        for f in families(text)
        for s in f.samples
        if s.name == "graphprobe_forward_duration_seconds_bucket"
    }
    bounds = sorted(buckets)
    steps = [buckets[high] - buckets.get(low, 0) for low, high in zip([0.0, *bounds], bounds, strict=False)]
    assert [1.0] * 4 == [step for step in steps if step]
    assert 0 == steps[-1]
    assert pytest.approx(0.04325) == total(text, "graphprobe_forward_duration_seconds_sum")


def test_every_duration_is_in_seconds_and_says_so() -> None:
    """A metric in seconds has the unit in its name, and none is in milliseconds (H71, PostHog/posthog#51491)."""
    timed = [m for m in metrics.CATALOGUE if "duration" in m.name or "seconds" in m.name]
    assert {"s"} == {m.unit for m in timed}
    assert all(m.family.endswith("_seconds") for m in timed)
    assert not [m.name for m in metrics.CATALOGUE if {"ms", "milliseconds", "us"} & set(m.name.split("_"))]


# -- a rate from what is exported ------------------------------------------------------------------------------------


def test_the_hit_rate_of_any_window_comes_from_the_exported_series() -> None:
    """Hit and miss in turn, scraped every 7 calls: the rate over the scrapes is one half, not 0 or 1.

    (H73, sgl-project/sglang#15189)
    """
    forward = recorded(lambda x: x * 2, buckets=[2], name="alternating")
    for _ in range(3):
        forward(rows(2))
    scrapes = []
    for call in range(1000):
        forward(rows(2 + call % 2))
        if call % 7 == 0:
            text = page()
            hits = total(text, "graphprobe_graph_calls_total", forward="alternating")
            misses = total(text, "graphprobe_eager_calls_total", forward="alternating", reason="batch_too_large")
            scrapes.append((hits, misses))
    rates = []
    for early, late in zip(scrapes, scrapes[20:], strict=False):
        hits, misses = late[0] - early[0], late[1] - early[1]
        assert 140 == hits + misses
        rates.append(hits / (hits + misses))
    assert all(0.49 <= rate <= 0.51 for rate in rates)


def test_whether_a_graph_served_is_a_counter() -> None:
    """What happened per call is counted; a gauge speaks of what is there (H73, sgl-project/sglang#15189)."""
    assert {"counter"} == {m.kind for m in metrics.CATALOGUE if "calls" in m.name or "replays" in m.name}
    gauges = {m.name for m in metrics.CATALOGUE if m.kind == "gauge"}
    assert not [name for name in gauges if {"last", "used", "calls"} & set(name.split("_"))]
