"""The start of an SGLang engine: the plugin, the captures, what they cover, and the way of the metrics out."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

import graphprobe
from graphprobe import stopwatch
from graphprobe.export import directory as running
from graphprobe.ledger import LEDGER
from tests.integrations.conftest import FAKE
from tests.integrations.engine import Device, forward, rows
from tests.integrations.sglang_engine import Engine

Make = Callable[..., Engine]
Said = Callable[[], list[str]]
ROOT = Path(__file__).parents[2]

STATE = """
import json, os, sys, threading
import graphprobe_sglang
graphprobe_sglang.load()
{then}
from graphprobe.ledger import LEDGER
loaded = [n for n in ("wrapt", "torch", "sglang", "prometheus_client", "graphprobe.export") if n in sys.modules]
print(json.dumps([loaded, threading.active_count(), sorted(h for _, h in LEDGER.hooks), list(LEDGER.forwards)]))
"""

RUN = "import tests.integrations.sglang_engine as e; e.Engine().decode(1, 2)"


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No exporter after a test."""
    yield
    for exporter in list(running._running.values()):
        exporter.close()


def process(then: str = "", **environment: str) -> list[Any]:
    """What a fresh process has loaded, its threads, hooks and forwards, after ``load()`` and ``then``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRAPHPROBE", "PROMETHEUS"))}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "integrations", FAKE)))
    command, env = [sys.executable, "-c", STATE.format(then=then)], {**kept, "PYTHONPATH": path, **environment}
    done = subprocess.run(command, env=env, check=True, text=True, capture_output=True)
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("environment", [{}, {"GRAPHPROBE": "0"}])
def test_without_graphprobe_1_the_plugin_does_nothing(environment: dict[str, str]) -> None:
    """No hook is placed, and nothing is imported for one."""
    assert process(**environment) == [[], 1, [], []]
    assert process(RUN, **environment)[2:] == [[], []]


def test_a_process_that_runs_no_pass_pays_for_the_hooks_alone() -> None:
    """A launcher that imports the metrics client too early loses series of SGLang's own page."""
    assert process(GRAPHPROBE="1", GRAPHPROBE_PORT="9464") == [["wrapt"], 1, [], []]


def test_a_scheduler_is_observed_without_a_line_of_code() -> None:
    """The hooks are bound as SGLang imports its modules, and no client is loaded that SGLang did not load."""
    loaded, threads, hooks, forwards = process(RUN, GRAPHPROBE="1", GRAPHPROBE_TIMING="0")
    assert {"batch", "pass", "prefill", "start", "capture_decode", "bucket_full"} <= set(hooks)
    assert ("prometheus_client" in loaded, threads, forwards) == (False, 1, ["sglang"])


def test_the_entry_point_is_that_of_sglangs_own_group() -> None:
    """A distribution is found by it."""
    group = '[project.entry-points."sglang.srt.plugins"]\ngraphprobe = "graphprobe_sglang:load"\n'
    assert group in (ROOT / "pyproject.toml").read_text()


def test_every_hook_of_an_imported_module_is_bound(sglang: Make) -> None:
    """Of what a release has."""
    sglang(prefill=(16,), speculative="eagle", drafter=True)
    bound = {name for (_, name), found in LEDGER.hooks.items() if found}
    assert {"pass", "prefill", "capture_prefill", "draft_eagle", "draft_eagle_extend", "round"} <= bound
    assert [] == [name for (_, name), found in LEDGER.hooks.items() if not found]


@pytest.mark.parametrize("breaks", ["absent", "wrapt", "ancient"])
def test_load_never_raises(fresh: None, monkeypatch: pytest.MonkeyPatch, said: Said, breaks: str) -> None:
    """Whatever is wrong with the environment is one message."""
    monkeypatch.setenv("GRAPHPROBE", "1")
    if breaks == "ancient":
        monkeypatch.setattr(importlib.import_module("sglang"), "__version__", "0.5.9")
    else:
        monkeypatch.setitem(sys.modules, {"absent": "sglang", "wrapt": "wrapt"}[breaks], None)
    importlib.import_module("graphprobe_sglang").load()
    (text,) = said()
    assert "without graphprobe" in text
    assert LEDGER.hooks == {}


@pytest.fixture
def device(sglang: Make, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device from whose free memory each graph of the fake takes ten times its size."""
    found = Device("cuda")
    captures = importlib.import_module("graphprobe_sglang_captures")
    base = importlib.import_module("sglang.srt.model_executor.runner_backend.base").Base
    original = base._capture

    def capture(backend: Any, key: Any, forward_fn: Callable[[], Any]) -> None:
        original(backend, key, forward_fn)
        found.capture(key.size)

    monkeypatch.setattr(base, "_capture", capture)
    monkeypatch.setattr(captures, "free_bytes", lambda: found.free)
    return found


def test_each_graph_has_its_seconds_and_bytes(sglang: Make, device: Device) -> None:
    """Of decode and of prefill apart; what all take together is the pool."""
    sglang(prefill=(16, 32))
    found = forward("sglang")
    assert found.capture_outcomes == {(size, "ok"): 1 for size in (1, 2, 4, 8)}
    assert set(found.capture_seconds) == {1, 2, 4, 8}
    assert found.pool_growth == {1: 10, 2: 20, 4: 40, 8: 80}
    assert found.pool_bytes == 150
    assert forward("sglang.prefill").pool_growth == {16: 160, 32: 320}


def test_a_size_with_several_graphs_has_their_sum(
    sglang: Make, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with adapters and one without, for example."""
    runners = importlib.import_module("sglang.srt.model_executor.runner.decode_cuda_graph_runner")
    once = runners.DecodeCudaGraphRunner.capture_one_shape
    monkeypatch.setattr(
        runners.DecodeCudaGraphRunner, "capture_one_shape", lambda *args: [once(*args) for _ in range(2)]
    )
    sglang(sizes=(4,))
    assert forward("sglang").pool_growth == {4: 80}
    assert forward("sglang").capture_outcomes == {(4, "ok"): 2}


def test_a_capture_that_raises_passes_through_and_is_recorded(sglang: Make, device: Device) -> None:
    """SGLang ends then, and the log has the size."""
    device.fails[4] = error = RuntimeError("no memory of the engine's own")
    with pytest.raises(RuntimeError) as caught:
        sglang()
    assert caught.value is error
    assert forward("sglang").capture_outcomes == {(8, "ok"): 1, (4, "error"): 1}


def test_the_tokens_of_the_kv_cache_are_sglangs_number(sglang: Make) -> None:
    """Known when the graphs are made."""
    sglang()
    assert forward("sglang").kv_capacity_tokens == 4096


def test_a_drafters_graphs_are_its_own(sglang: Make, device: Device) -> None:
    """And so is what they take: those of a round, and those that extend it."""
    sglang(speculative="eagle", drafter=True, sizes=(1, 2))
    assert forward("sglang.drafter").capture_outcomes == {(1, "ok"): 2, (2, "ok"): 2}
    assert (forward("sglang.drafter").pool_bytes, forward("sglang").pool_bytes) == (60, 30)


def test_decode_batches_without_a_graph_are_one_warning_and_a_gauge(sglang: Make, said: Said) -> None:
    """As many as may be admitted; with the option that captures them, too."""
    sglang(most=20).decode(1, 1)
    assert forward("sglang").uncovered == {"decode": 12}
    (text,) = [text for text in said() if "have no CUDA graph" in text]
    assert "12 of the batches up to 20 requests" in text and "9-20" in text
    assert "--max-running-requests 8" in text


def test_without_padding_the_gaps_between_are_named(sglang: Make, said: Said) -> None:
    """Only exact sizes have a graph then."""
    sglang(exact=True)
    assert forward("sglang").uncovered == {"decode": 4}
    (text,) = [text for text in said() if "have no CUDA graph" in text]
    assert "3, 5-7" in text and "--disable-cuda-graph-padding" in text


def test_nothing_is_said_where_all_are_covered(sglang: Make, said: Said) -> None:
    """The gauge is 0 then."""
    sglang()
    assert (forward("sglang").uncovered, said()) == ({"decode": 0}, [])


class Clock:
    """A timer of a device that tells times at once: each call takes a second. It has marks, which come back."""

    out = 0

    def start(self) -> str:
        self.out += 1
        return "mark"

    def stop(self, mark: str, sink: Callable[[float], None]) -> None:
        self.out -= 1
        sink(1.0)

    def cancel(self, mark: str) -> None:
        self.out -= 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The timer of all devices."""
    found = Clock()
    monkeypatch.setattr(stopwatch, "timer", lambda device: found)
    return found


@pytest.fixture
def timed(sglang: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Engines on a fake device, of whose passes some are timed."""
    monkeypatch.delenv("GRAPHPROBE_TIMING")
    return sglang


def samples(name: str) -> dict[Any, int]:
    return {key: times.count for key, times in forward(name).times.items()}


def test_the_second_pass_of_a_size_is_timed_and_then_one_in_64(timed: Make) -> None:
    """The first may compile."""
    engine, seen = timed(), []
    for _ in range(131):
        engine.decode(2)
        seen.append(sum(samples("sglang").values()))
    assert [n + 1 for n in range(1, 131) if seen[n] > seen[n - 1]] == [2, 66, 130]
    assert samples("sglang") == {("decode", "graph", "full", 2): 3}
    assert rows("sglang") == {("decode", 2, "full", 2): 131}


def test_each_kind_of_pass_is_timed(timed: Make) -> None:
    """Prefill of about a size, eager ones, and rounds of a drafter."""
    engine = timed(prefill=(16, 32), speculative="eagle", drafter=True)
    for _ in range(2):
        engine.prefill(10, 20)
        engine.decode(3, 9)
        engine.draft(2)
    assert samples("sglang") == {("decode", "graph", "full", 4): 1, ("decode", "eager", "", None): 1}
    assert samples("sglang.prefill") == {
        ("prefill", "graph", "breakable", 16): 1,
        ("prefill", "graph", "breakable", 32): 1,
    }
    assert samples("sglang.drafter") == {("draft", "graph", "full", 2): 1}


def test_a_timed_pass_that_raises_leaves_no_sample(timed: Make, clock: Clock) -> None:
    """And gives its mark back; so does a round of a drafter, with a graph and without."""
    engine = timed(speculative="eagle", drafter=True)
    engine.decode(2)
    engine.draft(2, 9)
    engine.runner.fails = engine.drafter.draft_runner.fails = RuntimeError("the engine's own")
    for run, size in ((engine.decode, 2), (engine.draft, 2), (engine.draft, 9)):
        with pytest.raises(RuntimeError):
            run(size)
    assert ({}, {}, 0) == (samples("sglang"), samples("sglang.drafter"), clock.out)


def page(folder: Path) -> str:
    """What SGLang's own /metrics has of such a directory."""
    for exporter in list(running._running.values()):
        exporter.flush()
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()


def test_with_sglangs_metrics_the_counts_are_on_its_page(
    sglang: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the directory that it has made for its processes; the targets, and drafters beside it."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    engine = sglang(enable_metrics=True, prefill=(16,), speculative="eagle", drafter=True)
    engine.decode(3)
    engine.prefill(10)
    engine.draft(1)
    text = page(tmp_path)
    assert 'graphprobe_graph_calls_total{batch_size="3",bucket="4",forward="sglang",mode="full",phase="decode"' in text
    for name in ("sglang.prefill", "sglang.drafter"):
        assert f'forward="{name}"' in text
    (exporter,) = running._running.values()
    assert exporter.url == ""


def test_with_neither_page_nor_port_there_is_one_warning(sglang: Make, said: Said) -> None:
    """Once per engine, not with every pass."""
    engine = sglang()
    engine.decode(1, 1)
    engine.prefill(20)
    (text,) = [text for text in said() if "observes" not in text]
    assert "--enable-metrics" in text and "GRAPHPROBE_PORT=9464" in text
    assert running._running == {}


def test_replicas_are_told_apart(sglang: Make, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """Each counts its ranks from 0, and only the first of all says where the metrics are."""
    engine = sglang(dp_size=2, tp_size=2)
    engine.runner.ps = SimpleNamespace(dp_rank=1)
    engine.decode(1)
    assert "rank=2" in os.environ["GRAPHPROBE_LABELS"]
    assert said() == []


def test_that_it_is_on_is_one_line(sglang: Make, caplog: pytest.LogCaptureFixture) -> None:
    """With the graphs, the hooks and the way of the metrics."""
    caplog.set_level("INFO", "graphprobe")
    sglang(prefill=(16, 32)).decode(1, 1)
    (text,) = [r.getMessage() for r in caplog.records if "observes SGLang" in r.getMessage()]
    assert "SGLang 0.5.23: decode graphs up to 8 requests, prefill graphs up to 32 tokens (breakable)" in text
    bound = len(LEDGER.hooks)
    assert f"{bound} of {bound} hooks in place, metrics: nowhere" in text


def test_the_snapshot_may_be_taken_at_any_time(sglang: Make) -> None:
    """Before the first pass there are graphs and no calls."""
    sglang()
    assert graphprobe.snapshot().forwards["sglang"].rows == ()
