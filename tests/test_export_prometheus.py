from __future__ import annotations

import gc
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import Counter, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as text_families
from prometheus_client.registry import CollectorRegistry

from graphprobe import errors, metrics
from graphprobe import ledger as ledger_module
from graphprobe.errors import ConfigError, ExporterError, GraphprobeError
from graphprobe.export import server
from graphprobe.export.exporter import start_exporter
from graphprobe.export.prometheus import LE, Collector, register
from graphprobe.export.server import Exporter
from graphprobe.ledger import Ledger
from graphprobe.observe import observe
from graphprobe.snapshot import Snapshot
from tests.servers import certificate

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


def get(url: str, **options: Any) -> str:
    headers = options.pop("headers", {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10, **options) as answer:
        return str(answer.read().decode())


def busy(ledger: Ledger, name: str = "decode") -> Ledger:
    """Every kind of metric has a sample."""
    watched = observe(name, [1, 2, 4, 8, 72], ledger=ledger, source="capture", max_batch=80, clock=None)
    watched.graph_call(3, 4)
    watched.graph_call(70, 72, mode="piecewise", phase="verify")
    watched.eager_call(100, "batch_too_large")
    forward = watched.forward
    forward.time("graph", 4, 0.003, mode="full")
    forward.time("eager", None, 3.0)
    forward.captured(4, "ok", 0.5, -8)
    forward.captured(8, "oom", 0.5, None)
    forward.mismatch(4)
    forward.unmatched.update(graph=2, eager=0)
    forward.holders[0].pool_bytes = 1 << 20
    forward.pool_estimate_bytes, forward.kv_capacity_tokens = 5, 6
    ledger.hooks["vllm", "dispatch"] = True
    ledger.replays_seen = [9]
    return ledger


@pytest.fixture
def exporter(ledger: Ledger) -> Iterator[Exporter]:
    with start_exporter(0, ledger=busy(ledger)) as running:
        yield running


@pytest.mark.parametrize("path", ["/metrics", "/metrics/"])
def test_serves_metrics(exporter: Exporter, path: str) -> None:
    """Both spellings of the path serve the counts as they are."""
    line = 'graphprobe_graph_calls_total{batch_size="3",bucket="4",forward="decode",mode="full",phase="decode"} 1.0'
    assert line in get(exporter.url + path).splitlines()


def test_serves_snapshot(exporter: Exporter, ledger: Ledger) -> None:
    """/snapshot is the JSON of the ledger's snapshot, with its content type."""
    with urllib.request.urlopen(exporter.url + "/snapshot?x=1", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("application/json")
        assert Snapshot.from_json(answer.read()) == ledger.snapshot()


@pytest.mark.parametrize("path", ["/", "/favicon.ico", "/metrics/x", "/snapshots"])
def test_other_paths(exporter: Exporter, path: str) -> None:
    """Anything else is a 404 that names what there is."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(exporter.url + path)
    assert caught.value.code == 404
    assert caught.value.read() == b"graphprobe serves /metrics and /snapshot\n"


def test_every_metric(exporter: Exporter) -> None:
    """A forward with everything known exposes every metric of the catalogue, with exactly its labels."""
    found = {
        family.name: family
        for family in text_string_to_metric_families(get(exporter.url + "/metrics", headers=OPENMETRICS))
    }
    assert list(found) == [metric.family for metric in metrics.CATALOGUE]
    for metric in metrics.CATALOGUE:
        family = found[metric.family]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert family.unit == metrics.UNITS.get(metric.unit, "")
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)


def test_both_formats_agree(exporter: Exporter) -> None:
    """The plain text and OpenMetrics say the same, and neither has a _created series."""
    plain, modern = get(exporter.url + "/metrics"), get(exporter.url + "/metrics", headers=OPENMETRICS)
    one = {(s.name, *sorted(s.labels.items())): s.value for f in text_families(plain) for s in f.samples}
    other = {
        (s.name, *sorted(s.labels.items())): s.value for f in text_string_to_metric_families(modern) for s in f.samples
    }
    assert one == other
    assert "_created" not in plain + modern


def test_histogram(exporter: Exporter) -> None:
    """Bounds are cumulative floats as Prometheus writes them; count and sum agree with the samples."""
    page = get(exporter.url + "/metrics")
    prefix = 'graphprobe_forward_duration_seconds_bucket{forward="decode",le="'
    rows = [
        line.removeprefix(prefix) for line in page.splitlines() if line.startswith(prefix) and 'path="graph"' in line
    ]
    assert tuple(row.split('"')[0] for row in rows) == LE
    assert LE[:3] == ("5e-05", "0.0001", "0.0002")
    assert [float(row.split()[-1]) for row in rows] == [0.0] * 6 + [1.0] * 10
    assert 'duration_seconds_count{forward="decode",mode="",path="eager",phase="decode"} 1.0' in page
    assert 'duration_seconds_sum{forward="decode",mode="",path="eager",phase="decode"} 3.0' in page


def test_promtool(promtool: str, ledger: Ledger) -> None:
    """promtool has nothing to say about our page, hostile names and folded labels among them."""
    busy(ledger)
    busy(ledger, 'a"b\\c\nd {e="f"} # é')
    wide = observe("wide", ledger=ledger)
    for number in range(6000):
        wide.eager_call(number % 600, "unknown", phase=f"p{number // 600}")
    registry = CollectorRegistry()
    register(registry, ledger)
    page = generate_latest(registry)
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert len(page) > 10_000


def test_hostile_name(ledger: Ledger) -> None:
    """Quotes, newlines, braces and broken text in a forward's name survive the page, which stays readable."""
    name = 'a"b\\c\nd {e="f"} é'
    observe(name, ledger=ledger).eager_call(3, "unknown")
    observe("\ud800", ledger=ledger).eager_call(3, "unknown")
    with start_exporter(0, ledger=ledger) as running:
        page = get(running.url + "/metrics")
    names = {s.labels["forward"] for f in text_families(page) for s in f.samples if "forward" in s.labels}
    assert names == {name, "?"}


def test_constant_labels(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK and GRAPHPROBE_LABELS are on every series; malformed text beside them breaks nothing."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("GRAPHPROBE_LABELS", 'model=ll"ama,forward=x,,=,a b=c,__x=y')
    with start_exporter(0, ledger=busy(ledger)) as running:
        page = get(running.url + "/metrics", headers=OPENMETRICS)
    found = [s.labels for family in text_string_to_metric_families(page) for s in family.samples]
    assert len(found) > 50
    assert {(labels.get("rank"), labels.get("model")) for labels in found} == {("3", 'll"ama')}
    assert "x" not in {labels.get("forward") for labels in found}


def test_limit_of_label_sets(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """A forward with too many label sets is folded below 500, said once, counted, and loses no call."""
    wide = observe("wide", ledger=ledger)
    for number in range(6000):
        wide.eager_call(number % 600, "unknown", phase=f"p{number // 600}")
    registry = CollectorRegistry()
    register(registry, ledger)
    for _ in range(2):
        samples = [s for f in registry.collect() for s in f.samples if s.labels.get("forward") == "wide"]
    assert len(samples) <= metrics.LIMIT
    assert sum(s.value for s in samples if s.name == "graphprobe_eager_calls_total") == 6000
    assert registry.get_sample_value("graphprobe_internal_errors_total", {"where": "label_limit"}) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_one_bad_forward(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that cannot be exposed costs its own series only and is counted; under strict it raises."""
    busy(ledger)
    ledger.forward("bad").times["a", "key", "of", 5, "parts"] = [1.0, 1.0]  # type: ignore[index]
    with pytest.raises(TypeError, match="takes 5"):
        list(Collector(ledger).collect())
    monkeypatch.setenv("GRAPHPROBE_STRICT", "0")
    names = {s.labels.get("forward") for family in Collector(ledger).collect() for s in family.samples}
    assert names == {"decode", None}
    assert errors.internal_errors == {"export.prometheus": 2}


def test_register_is_idempotent(ledger: Ledger) -> None:
    """Registering twice is registering once, and after an unregister it registers again."""
    registry = CollectorRegistry()
    one, other = register(registry, ledger), register(registry, ledger)
    assert one is other
    assert generate_latest(registry).count(b"# TYPE graphprobe_build_info") == 1
    registry.unregister(one)
    assert generate_latest(registry) == b""
    register(registry, ledger)
    assert generate_latest(registry).count(b"# TYPE graphprobe_build_info") == 1


def test_register_refuses(ledger: Ledger) -> None:
    """A registry that has another ledger or a metric of our name is refused with a hint."""
    registry, taken = CollectorRegistry(), CollectorRegistry()
    register(registry, ledger)
    with pytest.raises(ConfigError, match="another ledger"):
        register(registry, Ledger())
    Counter("graphprobe_captures", "mine", registry=taken)
    with pytest.raises(ConfigError, match="another registry"):
        register(taken, ledger)


def test_describe(ledger: Ledger) -> None:
    """An empty ledger claims all names, so a clash is found at registration; name[] picks single metrics."""
    described = {(family.name, family.type) for family in Collector(ledger).describe()}
    assert described == {(metric.family, metric.kind) for metric in metrics.CATALOGUE}
    with start_exporter(0, ledger=busy(ledger)) as running:
        page = get(running.url + "/metrics?name[]=graphprobe_replays_seen_total")
    assert [s.name for family in text_families(page) for s in family.samples] == ["graphprobe_replays_seen_total"]


def test_own_registry(ledger: Ledger) -> None:
    """A registry that is passed is served whole; by default nothing of the process's registry is."""
    registry = CollectorRegistry()
    Counter("mine", "mine", registry=registry).inc()
    with start_exporter(0, registry=registry, ledger=ledger) as running:
        assert "mine_total 1.0" in get(running.url + "/metrics")
    with start_exporter(0, ledger=ledger) as running:
        assert "python_info" not in get(running.url + "/metrics")


def test_port_in_use(exporter: Exporter) -> None:
    """A taken port is an OSError that names the address and says what to do."""
    with pytest.raises(ExporterError, match=r"port=0") as caught:
        start_exporter(exporter.port)
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, GraphprobeError)
    assert f"127.0.0.1:{exporter.port}" in str(caught.value)
    assert caught.value.errno == 98


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 65536},
        {"port": "9464"},
        {"port": True},
        {"certfile": "x"},
        {"keyfile": "x"},
        {"client_cafile": "x"},
    ],
)
def test_refused(options: dict[str, Any]) -> None:
    """A port that is none, and half a TLS configuration, are refused instead of served in the clear."""
    with pytest.raises(ConfigError):
        start_exporter(**{"port": 0, **options})


@pytest.mark.parametrize("options", [{"addr": "no.such.host.invalid"}, {"certfile": "/no/cert", "keyfile": "/no/key"}])
def test_cannot_serve(options: dict[str, Any]) -> None:
    """An address that is none and a certificate that is missing raise with a hint."""
    with pytest.raises(ExporterError, match="hint"):
        start_exporter(0, **options)


def test_close(ledger: Ledger) -> None:
    """close() frees the port, may be called again, and happens at the end of a with block."""
    with start_exporter(0, ledger=ledger) as running:
        assert (running.addr, running.url) == ("127.0.0.1", f"http://127.0.0.1:{running.port}")
    running.close()
    assert "closed" in repr(running)
    start_exporter(running.port, ledger=ledger).close()


def test_listens_on_this_machine_only(ledger: Ledger) -> None:
    """By default only the loopback address is bound; all addresses are reachable under it too."""
    with start_exporter(0, ledger=ledger) as running:
        assert running._server is not None
        assert running._server.server_address[0] == "127.0.0.1"
    with start_exporter(0, "0.0.0.0", ledger=ledger) as running:
        assert "graphprobe_build_info" in get(running.url + "/metrics")


def test_scrape_waits_for_no_forward(exporter: Exporter, ledger: Ledger) -> None:
    """A scrape is answered while every lock that a forward takes is held."""
    with ledger._lock, ledger.forwards["decode"]._lock, ledger_module.COUNT_LOCK:
        assert "graphprobe_graph_calls_total" in get(exporter.url + "/metrics")
        assert json.loads(get(exporter.url + "/snapshot"))["schema"] == 1


def test_scrapes_while_counting(ledger: Ledger) -> None:
    """Scrapes beside threads that make new rows succeed, and the last one has every call."""
    watched = observe("decode", ledger=ledger)

    def run(start: int) -> None:
        for size in range(start, start + 3000):
            watched.eager_call(size, "unknown")

    threads = [threading.Thread(target=run, args=(3000 * n,)) for n in range(2)]
    with start_exporter(0, ledger=ledger) as running:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            get(running.url + "/metrics")
        for thread in threads:
            thread.join()
        lines = get(running.url + "/metrics").splitlines()
    assert sum(float(line.split()[-1]) for line in lines if line.startswith("graphprobe_eager")) == 6000


def test_forked_child_holds_no_port(ledger: Ledger) -> None:
    """A forked child neither serves nor keeps the port; closing there returns, and the parent goes on serving."""
    with start_exporter(0, ledger=ledger) as running:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            running.close()
            os.write(writing, b"closed")
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reading, 10) == b"closed"
        assert "graphprobe_build_info" in get(running.url + "/metrics")


def test_port_is_free_though_a_child_lives(ledger: Ledger) -> None:
    """After close() the port can be bound again while a child that was forked in between is alive."""
    running = start_exporter(0, ledger=ledger)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        running.close()
        with socket.socket() as plain:
            plain.bind(("127.0.0.1", running.port))
            plain.listen()
    finally:
        os.write(writing, b"x")
        os.waitpid(pid, 0)


def test_tls(ledger: Ledger, tmp_path: Path) -> None:
    """With a certificate it speaks TLS; with a client CA named it refuses a client without a certificate."""
    cert, key = certificate(tmp_path)
    files = {"certfile": str(cert), "keyfile": str(key)}
    trusting = ssl.create_default_context(cafile=str(cert))
    with (
        start_exporter(0, ledger=ledger, **files) as running,
        # A client that shows no greeting holds up nobody else.
        socket.create_connection(("127.0.0.1", running.port)),
    ):
        assert running.url.startswith("https://")
        assert "graphprobe_build_info" in get(running.url + "/metrics", context=trusting)
    with start_exporter(0, ledger=ledger, client_cafile=str(cert), **files) as running:
        with pytest.raises(OSError):
            get(running.url + "/metrics", context=trusting)
        trusting.load_cert_chain(cert, key)
        assert "graphprobe_build_info" in get(running.url + "/metrics", context=trusting)


def test_registry_is_not_kept_alive(ledger: Ledger) -> None:
    """A registry that its owner drops is freed."""
    from graphprobe.export import prometheus

    gc.collect()
    before = len(prometheus._registered)
    register(CollectorRegistry(), ledger)
    gc.collect()
    assert len(prometheus._registered) == before


def test_imports_nothing_it_does_not_need() -> None:
    """Counting imports no metrics client, and serving a scrape imports no torch."""
    code = """
import sys, urllib.request, graphprobe
graphprobe.observe("decode", [1, 2]).graph_call(1, 1)
assert "prometheus_client" not in sys.modules
with graphprobe.start_exporter(0) as running:
    page = urllib.request.urlopen(running.url + "/metrics").read().decode()
assert "torch" not in sys.modules
assert 'graphprobe_graph_calls_total{batch_size="1"' in page
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_ledger_of_the_process_is_default() -> None:
    """Without a ledger the collector reads that of the process, as graphprobe.snapshot() does."""
    assert Collector().ledger is ledger_module.LEDGER


def test_the_rank_is_that_of_the_process_group_once_there_is_one(tmp_path: Path) -> None:
    """Without RANK every series gets the label with the group, keeps it when that ends, and no group is made for it."""
    pytest.importorskip("torch")
    code = """
import sys, graphprobe
from graphprobe.export.prometheus import Collector
from graphprobe.ledger import Ledger
graphprobe.observe("decode", [1, 2], ledger=(ledger := Ledger()))
collector = Collector(ledger)
def rank():
    (found,) = {sample.labels.get("rank") for family in collector.collect() for sample in family.samples}
    return found
found = [rank(), "torch" in sys.modules]
import torch.distributed as dist
found.append(rank())
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
found.append(rank())
dist.destroy_process_group()
found.append(rank())
print(found)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    assert done.stdout.strip() == "[None, False, None, '0', '0']"


def test_clients_that_reset_are_no_error_of_the_engine(ledger: Ledger, capfd: pytest.CaptureFixture[str]) -> None:
    """A probe that opens a connection and resets it prints nothing on the engine's stderr; scrapes go on."""
    with start_exporter(0, ledger=ledger) as running:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", running.port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert "graphprobe_build_info" in get(running.url + "/metrics")
    assert capfd.readouterr().err == ""


def test_a_client_that_says_nothing_is_let_go(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a thread and a descriptor of the engine for a while, and not for ever."""
    monkeypatch.setattr(server, "PATIENCE", 0.1)
    with start_exporter(0, ledger=ledger) as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=20) as client:
            assert client.recv(1) == b""
        assert "graphprobe_build_info" in get(running.url + "/metrics")


def test_a_hundred_scrapers_at_once_are_served(ledger: Ledger) -> None:
    """They may wait, none is sent away."""
    with start_exporter(0, ledger=ledger) as running:
        clients = [socket.create_connection(("127.0.0.1", running.port), timeout=60) for _ in range(100)]
        for client in clients:
            client.sendall(b"GET /snapshot HTTP/1.0\r\n\r\n")
        assert all(client.recv(12) == b"HTTP/1.0 200" for client in clients)
        for client in clients:
            client.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_NOFILE as Linux has it")
def test_an_engine_without_descriptors_is_not_kept_busy() -> None:
    """Where no connection can be accepted any more, the exporter waits a little, and does not ask without end."""
    code = """
import os, resource, socket, time, graphprobe
running = graphprobe.start_exporter(0)
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, used + 4))
waiting = []
for _ in range(3):
    waiting.append(socket.create_connection(("127.0.0.1", running.port)))
time.sleep(0.3)
before, began = time.process_time(), time.monotonic()
time.sleep(1.0)
print((time.process_time() - before) / (time.monotonic() - began))
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert float(done.stdout) < 0.3, done.stderr


def test_a_registry_that_no_page_of_several_processes_shows_is_said(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """Under PROMETHEUS_MULTIPROC_DIR the client shows no collector, and what it shows is in the line."""
    register(CollectorRegistry(), ledger)
    assert said() == []
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(prometheus_client, "REGISTRY", CollectorRegistry())
    register(None, ledger)
    assert "start_exporter(port=None, directory=" in said()[0]
    with pytest.raises(ConfigError, match="CollectorRegistry"):
        register("x", ledger)  # type: ignore[arg-type]


def test_a_slow_scraper_holds_up_nobody(ledger: Ledger) -> None:
    """One that takes its page byte by byte waits alone: others are served, counting goes on, the exporter closes."""
    watched = observe("decode", list(range(1, 65)), ledger=ledger)
    with start_exporter(0, ledger=ledger) as running:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect(("127.0.0.1", running.port))
        slow.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        for calls in range(1, 4):
            assert slow.recv(1)
            watched.graph_call(8, 8)
            assert f'batch_size="8",bucket="8",forward="decode",mode="full",phase="decode"}} {calls}.0' in get(
                running.url + "/metrics"
            )
    slow.close()
