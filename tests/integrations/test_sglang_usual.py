"""Passes of SGLang that are like earlier ones are counted by a short way; what is unlike them goes the long one."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import graphprobe
from graphprobe import errors, stopwatch
from graphprobe.ledger import LEDGER
from graphprobe.sentinel import SENTINEL
from tests.integrations.engine import forward, rows

Make = Callable[..., Any]
DECODE = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
KEY = ("decode", 2, "full", 2)


@pytest.fixture
def launching(sglang: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Engines whose graphs are launched as torch's are, and seen."""
    launch = SENTINEL._counting(lambda graph: None)

    def make(**settings: Any) -> Any:
        found = sglang(**settings)
        kind = importlib.import_module(DECODE).DecodeCudaGraphRunner
        execute = kind.execute

        def launched(runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            launch(None)
            return execute(runner, batch, *args, **kwargs)

        monkeypatch.setattr(kind, "execute", launched)
        return found

    monkeypatch.setattr(SENTINEL, "bound", True)
    monkeypatch.setattr(LEDGER, "replays_seen", [0])
    yield make


def usual(engine: Any) -> list[int]:
    return [size for _, size in engine.runner.__dict__["_graphprobe"].usual]


def test_each_pass_is_counted_once_by_either_way(launching: Make) -> None:
    """Ten times 2, of which the second one makes the short way, and other sizes in between."""
    engine = launching()
    engine.decode(*[2, 3] * 10, 9)
    assert sorted(usual(engine)) == [2, 3]
    assert {KEY: 10, ("decode", 3, "full", 4): 10, ("decode", 9, "batch_too_large"): 1} == rows("sglang")
    assert {"graph": 0, "eager": 0} == forward("sglang").unmatched


def test_a_usual_size_that_is_padded_further_is_counted_in_that_bucket(
    launching: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data parallelism the largest rank decides."""
    engine = launching()
    engine.decode(2, 2, 2)
    kind = type(engine.runner.decode_cuda_graph_runner)
    execute = kind.execute

    def further(runner: Any, *args: Any, **kwargs: Any) -> Any:
        found = execute(runner, *args, **kwargs)
        runner.bs = 8
        return found

    monkeypatch.setattr(kind, "execute", further)
    engine.decode(2, 2)
    assert {KEY: 3, ("decode", 2, "full", 8): 2} == rows("sglang")


def test_another_thread_that_serves_is_no_mismatch(launching: Make) -> None:
    """What it launches is counted in its own name."""
    engine = launching()
    engine.decode(*[2] * 5)
    thread = threading.Thread(target=engine.decode, args=[2] * 50)
    thread.start()
    thread.join()
    assert {KEY: 55} == rows("sglang")
    assert {"graph": 0, "eager": 0} == forward("sglang").unmatched


def test_passes_that_nothing_confirms_never_take_the_short_way(sglang: Make) -> None:
    """Where torch is not what launches, both ways would be gone."""
    engine = sglang()
    engine.decode(*[2] * 20)
    assert [] == usual(engine)
    assert {KEY: 20} == rows("sglang")


def test_what_is_ignored_is_neither_counted_nor_timed(launching: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHPROBE_TIMING", "1")
    engine = launching(device="cpu")
    with graphprobe.ignore():
        engine.decode(*[2] * 10)
    engine.decode(2)
    assert 1 == sum(times.count for times in forward("sglang").times.values())
    assert 1 == sum(rows("sglang").values())


def test_a_device_without_events_is_counted_all_the_same(sglang: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first failure ends the timing, and nothing else."""
    monkeypatch.delenv("GRAPHPROBE_STRICT")
    monkeypatch.setenv("GRAPHPROBE_TIMING", "64")
    monkeypatch.setattr(stopwatch, "timer", lambda device: 1 / 0)
    engine = sglang(device="mps")
    engine.decode(*[2] * 640)
    assert 640 == sum(rows("sglang").values())
    assert {"sglang.time": 1} == errors.internal_errors


def test_a_prefill_in_parts_of_layers_is_one_call(sglang: Make) -> None:
    """The first part of it."""
    engine = sglang(prefill=(16,))
    batch = engine.batches("SPLIT_PREFILL", 1, 100)
    for layer in range(8):
        batch.split_index = layer
        engine.scheduler.run_batch(batch)
    assert {("prefill", 100, "wrong_phase"): 1} == rows("sglang.prefill")


def test_a_round_of_one_step_is_no_call(sglang: Make) -> None:
    """It samples from what the pass before it returned."""
    engine = sglang(speculative="eagle", drafter=True, sizes=())
    handler = importlib.import_module("graphprobe_sglang_drafts").rounds
    handler(lambda worker, batch: None)(engine.drafter, engine.batches("DECODE", 2))
    assert {} == rows("sglang.drafter")


def test_more_sizes_than_are_told_cost_no_metric(sglang: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 1,024 are."""
    engine = sglang(sizes=tuple(range(1, 1101)), most=1100)
    engine.decode(2, 1090)
    found = forward("sglang")
    assert 1024 == len(found.buckets)
    assert {KEY: 1, ("decode", 1090, "full", 1090): 1} == rows("sglang")


def test_batches_whose_pass_another_server_has_run_are_no_reason_to_warn(
    sglang: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A decode node of disaggregated serving has them first."""
    engine = sglang()
    for _ in range(20):
        engine.run("PREBUILT", 1)
    engine.decode(2)
    assert "never called" not in caplog.text
    assert LEDGER.hooks.get(("sglang", "dispatch")) is not False
