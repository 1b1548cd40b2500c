"""mini-sglang, observed: what is a call, which path it ran on and why, what graphs took, and sizes that have none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphprobe
from graphprobe import errors
from graphprobe.ledger import LEDGER
from tests.engines import cpu_cuda
from tests.integrations.runners import forward, mini_scheduler, rows

Make = Callable[..., Any]
Said = Callable[[], list[str]]
NAME = "minisgl"
THREE = [1.0, 2.0, 3.0]


def test_a_batch_is_a_call_of_its_requests(mini: Make) -> None:
    """A decode in the graph that was replayed; prefill has none, and does not count in the hit rate."""
    scheduler = mini()
    assert scheduler.step(THREE) == [2.0, 4.0, 6.0]
    scheduler.step([1.0])
    scheduler.step(THREE, "prefill")
    assert rows(NAME) == {("decode", 3, 4): 1, ("decode", 1, 1): 1, ("prefill", 3, "wrong_phase"): 1}
    found = forward(NAME)
    assert (found.unit, found.source, found.role, found.backend) == ("requests", "engine", "target", "cpu")
    assert (found.buckets, found.padding, found.hit_rate) == ((1, 2, 4, 8), 1, 1.0)


def test_a_batch_above_the_largest_graph_is_too_large(mini: Make) -> None:
    """mini-sglang runs it eagerly."""
    mini(12).step([1.0] * 9)
    assert rows(NAME) == {("decode", 9, "batch_too_large"): 1}


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_without_graphs_each_batch_is_disabled(mini: Make, phase: str) -> None:
    """cuda_graph_max_bs is 0."""
    mini(sizes=()).step(THREE, phase)
    assert rows(NAME) == {(phase, 3, "disabled"): 1}
    found = forward(NAME)
    assert (found.uncovered, found.capture_outcomes, found.pool_bytes) == ({}, {}, None)


def test_an_engine_that_runs_eagerly_for_no_reason_we_know_is_unknown(mini: Make) -> None:
    """The path is what it did, not what we would have expected of it."""
    scheduler = mini()
    scheduler.engine.graph_runner.can_use_cuda_graph = lambda batch: False
    scheduler.step(THREE)
    assert rows(NAME) == {("decode", 3, "unknown"): 1}


def test_a_batch_counts_when_it_has_ended_and_not_where_it_raises(mini: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it raises passes, and it is no sample."""
    monkeypatch.setenv("GRAPHPROBE_TIMING", "1")
    scheduler, during = mini(), []

    def model(values: torch.Tensor) -> torch.Tensor:
        during.append(rows(NAME))
        raise ZeroDivisionError

    scheduler.engine.model = model
    with pytest.raises(ZeroDivisionError):
        scheduler.step(THREE, "prefill")
    assert (during, rows(NAME), forward(NAME).times) == ([{}], {}, {})


def test_what_the_graphs_took_and_the_cache_holds_is_known_when_the_engine_is_made(mini: Make) -> None:
    """Each graph by itself, and all; pages times their size."""
    mini()
    found = forward(NAME)
    assert found.capture_outcomes == {(size, "ok"): 1 for size in (1, 2, 4, 8)}
    assert all(0 < seconds < 60 for seconds in found.capture_seconds.values())
    assert found.pool_growth == dict.fromkeys((1, 2, 4, 8), cpu_cuda.MIB)
    assert (found.pool_bytes, found.kv_capacity_tokens) == (4 * cpu_cuda.MIB, 1600)
    assert (found.rows, found.live) == ((), dict.fromkeys((1, 2, 4, 8), True))


def test_a_capture_that_fails_is_told_and_raises_as_without_us(mini: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is the largest that has no graph yet."""

    def begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(cpu_cuda.Graph, "capture_begin", begin)
    with pytest.raises(RuntimeError, match="no more"):
        mini()
    assert LEDGER.forwards[NAME].captures == {(8, "error"): 1}


def test_sizes_that_can_occur_and_have_no_graph_are_named_at_once(mini: Make, said: Said) -> None:
    """They run eagerly, without a word of the engine's."""
    mini(12)
    assert forward(NAME).uncovered == {"decode": 4}
    texts = [text for text in said() if "no graph" in text]
    assert texts == ["minisgl: decodes of 9-12 requests have no graph and run eagerly; cuda_graph_max_bs=12 adds them"]


def test_where_each_size_has_a_graph_nothing_is_said(mini: Make, said: Said) -> None:
    """As many as may run."""
    mini(8)
    assert forward(NAME).uncovered == {"decode": 0}
    assert not [text for text in said() if "no graph" in text]


def test_an_engine_that_was_there_before_is_observed_too(clean: None) -> None:
    """What its captures took is not known."""
    scheduler = mini_scheduler()
    graphprobe.instrument(NAME)
    scheduler.step(THREE)
    assert rows(NAME) == {("decode", 3, 4): 1}
    assert (forward(NAME).capture_seconds, forward(NAME).pool_bytes) == ({}, None)


def test_an_engine_that_dispatches_elsewhere_is_noticed(mini: Make, said: Said) -> None:
    """Sixteen steps without one call: one warning, and a hook that is not in place."""
    scheduler = mini()
    scheduler.engine.forward_batch = lambda batch, args: batch.values
    said()
    for _ in range(40):
        scheduler.step(THREE)
    assert LEDGER.hooks[NAME, "dispatch"] is False
    (text,) = said()
    assert "instrumented, but never called: 16 steps" in text


def test_one_batch_of_each_size_in_64_is_timed(mini: Make) -> None:
    """The second one first."""
    scheduler = mini()
    for _ in range(70):
        scheduler.step(THREE)
    assert {key: times.count for key, times in forward(NAME).times.items()} == {("decode", "graph", "full", 4): 2}


def test_uninstrument_puts_everything_back(mini: Make) -> None:
    """What was counted stays, and the engine goes on."""
    scheduler = mini()
    graphprobe.uninstrument(NAME)
    assert scheduler.step(THREE) == [2.0, 4.0, 6.0]
    assert rows(NAME) == {}
    graphprobe.instrument(NAME)
    scheduler.step(THREE)
    assert rows(NAME) == {("decode", 3, 4): 1}


def test_ranks_are_told_by_the_engine(clean: None, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """Only the first one speaks."""
    info = SimpleNamespace(get_tp_info=lambda: SimpleNamespace(rank=1))
    monkeypatch.setitem(importlib.import_module("sys").modules, "minisgl.distributed", info)
    graphprobe.instrument(NAME)
    mini_scheduler()
    assert not [text for text in said() if "observes" in text]


def test_a_failure_of_ours_does_not_reach_the_engine(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted as ours, and after too many we rest."""
    monkeypatch.setenv("GRAPHPROBE_STRICT", "0")
    graphprobe.instrument(NAME)
    monkeypatch.setattr(importlib.import_module("graphprobe_runner"), "observe", None)
    scheduler = mini_scheduler()
    for _ in range(150):
        assert scheduler.step(THREE) == [2.0, 4.0, 6.0]
    # Each step asks twice: around itself, and around its call.
    assert errors.internal_errors == {"minisgl.start": 100}
    errors.internal_errors.clear()
