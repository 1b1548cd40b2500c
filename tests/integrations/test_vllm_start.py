"""The start of an engine: what captures cost, which decode steps have no graph, and what the engine knows of memory."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import graphprobe
from graphprobe.ledger import LEDGER
from tests.integrations.engine import Device, Engine, OutOfMemoryError, forward, rows

Make = Callable[..., Engine]

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def device(engine: Make, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device whose memory and time are those that captures are measured with."""
    found = Device("cuda")
    captures = importlib.import_module("graphprobe_vllm_captures")
    monkeypatch.setattr(captures, "free_bytes", lambda: found.free)
    monkeypatch.setattr(captures, "time", SimpleNamespace(perf_counter=lambda: found.seconds))
    return found


# Captures


def test_each_graph_has_its_seconds_and_bytes(engine: Make, runner: str, device: Device) -> None:
    """And all of them together what the runner says that they took."""
    engine(runner, sizes=[2, 8], device=device).start()
    found = forward()
    assert found.captures == {2: 1, 8: 1}
    assert found.capture_seconds == pytest.approx({2: 0.002, 8: 0.008})
    assert found.pool_growth == {2: 20, 8: 80}
    assert found.pool_bytes == 100
    assert found.live == {2: True, 8: True}


def test_a_bucket_with_a_graph_of_each_mode_has_their_sum(engine: Make, runner: str, device: Device) -> None:
    engine(runner, sizes=[2, 8], mode="FULL_AND_PIECEWISE", device=device).start()
    assert forward().captures == {2: 2, 8: 2}
    assert forward().capture_seconds == pytest.approx({2: 0.004, 8: 0.016})
    assert forward().pool_growth == {2: 40, 8: 160}


def test_a_second_capture_at_run_time_starts_its_own_sums(engine: Make, runner: str, device: Device) -> None:
    """An elastic engine captures again when it grows."""
    found = engine(runner, sizes=[2, 8], device=device).start()
    found.runner.capture_model()
    assert forward().captures == {2: 2, 8: 2}
    assert forward().pool_growth == {2: 20, 8: 80}


def test_what_is_not_known_of_memory_is_not_told(engine: Make, runner: str) -> None:
    """There is no device here that could be asked."""
    engine(runner, sizes=[2]).start()
    assert (forward().captures, forward().pool_growth) == ({2: 1}, {})


@pytest.mark.parametrize(
    ("error", "outcome"), [(OutOfMemoryError("CUDA out of memory"), "oom"), (RuntimeError("no kernel"), "error")]
)
def test_a_capture_that_raises_passes_through_and_is_recorded(
    engine: Make, runner: str, device: Device, error: Exception, outcome: str
) -> None:
    """The engine ends with its own exception; what was captured before is known."""
    device.fails = {2: error}
    # The order of each runner: V1 begins with the largest graph of the sizes, V2 as they come.
    found = engine(runner, sizes=[2, 8], device=device)
    with pytest.raises(type(error)) as raised:
        found.start()
    assert raised.value is error and error.__cause__ is None
    assert forward().capture_outcomes == {(8, "ok"): 1, (2, outcome): 1}
    device.fails = {}
    found.start()
    assert forward().capture_outcomes == {(8, "ok"): 2, (2, outcome): 1, (2, "ok"): 1}


def test_dummy_runs_after_a_capture_that_raised_are_no_captures(engine: Make, device: Device) -> None:
    device.fails = {8: RuntimeError()}
    found = engine("v1", sizes=[2, 8], device=device)
    with pytest.raises(RuntimeError):
        found.start()
    modes = importlib.import_module("vllm.config.compilation").CUDAGraphMode
    found.runner._warmup_and_capture(SimpleNamespace(num_tokens=2), cudagraph_runtime_mode=modes.FULL)
    assert forward().capture_outcomes == {(8, "error"): 1}


def test_captures_that_only_measure_memory_are_none(engine: Make, device: Device) -> None:
    """Of them no graph is kept: said by an argument, or (0.29) by the manager alone."""
    found = engine("v2", sizes=[2, 8], device=device)
    found.runner.capture_model(profile_only=True)
    found.runner.cudagraph_manager._max_full_descs_to_capture = 1
    found.runner.capture_model()
    assert "vllm" not in LEDGER.forwards
    found.runner.cudagraph_manager._max_full_descs_to_capture = None
    found.start()
    assert forward().captures == {2: 1, 8: 1}


def test_the_graphs_of_a_drafter_are_its_own(engine: Make, device: Device) -> None:
    """V2 captures them right after those of the target; the bytes of both are one number."""
    found = engine("v2", k=1, sizes=[2, 4], device=device)
    found.draft()
    found.start()
    assert (forward().captures, forward("vllm.drafter").captures) == ({2: 1, 4: 1}, {2: 1, 4: 1})
    assert forward("vllm.drafter").pool_growth == {2: 20, 4: 40}
    assert forward().pool_bytes == 120


def test_an_engine_without_graphs_captures_nothing(engine: Make, runner: str, device: Device) -> None:
    engine(runner, mode="NONE", device=device).start()
    assert (forward().captures, forward().pool_bytes, forward().live) == ({}, None, {})


def test_the_graphs_are_the_engines_own(engine: Make, runner: str) -> None:
    """What the warm-up and the capture return is handed on, arguments are as they were."""
    found = engine(runner, sizes=[2, 4])
    assert found.worker.compile_or_warm_up_model() == 1.5
    assert found.device.free == 100_000 - 60
    assert found.runner.capture_model() == 60


def test_after_uninstrument_a_start_is_not_recorded(engine: Make, runner: str) -> None:
    found = engine(runner)
    graphprobe.uninstrument("vllm")
    found.start()
    assert LEDGER.forwards == {}


# Which decode steps have a graph


def pasted(text: str) -> list[int]:
    """The sizes of the line that a warning says to add."""
    line = re.search(r"--compilation-config '(\{.*\})'", text)
    assert line is not None
    sizes: list[int] = json.loads(line[1])["cudagraph_capture_sizes"]
    return sizes


@pytest.mark.parametrize(
    ("settings", "missing", "text"),
    [
        (
            {"k": 3, "sizes": [4, 8, 16]},
            4,
            "up to 32 tokens have no full CUDA graph: 20 to 32 by 4 tokens (5 to 8 requests",
        ),
        ({"k": 6, "seqs": 6, "sizes": [7, 14, 21, 28, 35]}, 1, "42 tokens (6 requests of 1 + 6 tokens)"),
        (
            {"sizes": [1, 2, 4, 8], "seqs": 12},
            4,
            "4 of the decode steps up to 12 tokens have no full CUDA graph: 9 to 12 tokens.",
        ),
        (
            {"sizes": [1, 2, 4, *range(8, 105, 8)], "seqs": 100, "mode": "FULL_AND_PIECEWISE"},
            4,
            "97 to 100 tokens",
        ),
    ],
)
def test_decode_steps_without_a_full_graph_are_one_warning_and_a_gauge(
    engine: Make, runner: str, said: Callable[[], list[str]], settings: dict[str, Any], missing: int, text: str
) -> None:
    """Before the first request; with the line that, pasted, covers them all."""
    engine(runner, **settings).start()
    (phase,) = forward().uncovered
    assert (phase, forward().uncovered[phase]) == ("verify" if settings.get("k") else "decode", missing)
    (warning,) = [found for found in said() if "full CUDA graph" in found]
    assert text in warning
    engine(runner, **{**settings, "sizes": pasted(warning)}).start()
    assert forward().uncovered == {phase: 0}
    assert not [found for found in said() if "full CUDA graph" in found]


def test_sizes_that_count_requests_leave_all_verify_steps_without_a_graph(
    engine: Make, said: Callable[[], list[str]]
) -> None:
    """V2 starts without a word: none of [1, 2] is a step of 1 + 3 tokens."""
    engine("v2", k=3, sizes=[1, 2]).start()
    assert forward().uncovered == {"verify": 8}
    assert [pasted(text)[-1] for text in said() if "full CUDA graph" in text] == [32]


@pytest.mark.parametrize(
    "settings", [{}, {"k": 3, "sizes": [4, 8, 16, 24, 32]}, {"mode": "PIECEWISE"}, {"mode": "FULL"}]
)
def test_nothing_is_said_where_all_are_covered(
    engine: Make, runner: str, said: Callable[[], list[str]], settings: dict[str, Any]
) -> None:
    """By full graphs, or by whatever vLLM gives decodes in this mode."""
    engine(runner, **settings).start()
    assert list(forward().uncovered.values()) == [0]
    assert not [text for text in said() if "full CUDA graph" in text]


def test_steps_of_more_tokens_than_may_be_batched_do_not_occur(
    engine: Make, runner: str, said: Callable[[], list[str]]
) -> None:
    """vLLM would take the advised sizes away again."""
    engine(runner, k=3, sizes=[4, 8, 16], batched=16).start()
    assert forward().uncovered == {"verify": 0}
    assert not [text for text in said() if "full CUDA graph" in text]


def test_nor_do_more_requests_than_may_be_active(engine: Make, runner: str) -> None:
    found = engine(runner, seqs=100)
    found.config.scheduler_config.max_num_active_seqs = 8
    found.start()
    assert forward().uncovered == {"decode": 0}


def test_larger_batches_with_fewer_drafts_are_asked_for_as_they_are(engine: Make) -> None:
    """V2's dynamic speculative decoding has graphs of each width."""
    settings = {"k": 3, "sizes": [4, 8, 16]}
    engine("v2", schedule=[(1, 4, 3), (5, 8, 1)], **settings).start()
    assert forward().uncovered == {"verify": 0}
    engine("v2", schedule=[(1, 6, 3), (7, 8, 1)], **settings).start()
    assert forward().uncovered == {"verify": 2}


@pytest.mark.parametrize("specialize", [True, False])
def test_adapters_do_not_change_what_is_covered(engine: Make, runner: str, specialize: bool) -> None:
    """With cudagraph_specialize_lora=False all graphs are those of batches with adapters."""
    engine(runner, loras=2, specialize=specialize).start()
    assert forward().uncovered == {"decode": 0}


def test_where_graphs_are_off_there_is_nothing_to_cover(
    engine: Make, runner: str, said: Callable[[], list[str]]
) -> None:
    engine(runner, mode="NONE", seqs=100).start()
    assert forward().uncovered == {}
    assert not [text for text in said() if "full CUDA graph" in text]


def test_asking_the_dispatcher_counts_nothing(engine: Make, runner: str) -> None:
    engine(runner, seqs=64).start()
    assert rows() == {}


# Memory


@pytest.mark.parametrize(("estimate", "told"), [(12_345, 12_345), (0, None), (None, None)])
def test_the_estimate_is_told_where_there_is_one(
    engine: Make, runner: str, estimate: int | None, told: int | None
) -> None:
    """Beside what the graphs took; 0 is vLLM's word for none."""
    found = engine(runner)
    if estimate is not None:
        found.worker.cudagraph_memory_estimate = estimate
    found.start()
    assert forward().pool_estimate_bytes == told


def test_the_tokens_of_the_kv_cache_are_vllms_number(engine: Make, runner: str) -> None:
    engine(runner).start()
    assert forward().kv_capacity_tokens == 4096


def test_or_what_vllm_reckons_from_the_layout(engine: Make, runner: str) -> None:
    """A release that does not keep the number has the function."""
    found = engine(runner)
    found.config.cache_config.kv_cache_size_tokens = None
    found.runner.kv_cache_config = SimpleNamespace(groups=3)
    found.start()
    assert forward().kv_capacity_tokens == 3000


@pytest.mark.parametrize(("blocks", "told"), [(10, 160), (None, None)])
def test_or_the_blocks_times_their_size(engine: Make, runner: str, blocks: int | None, told: int | None) -> None:
    """Where neither is to be had; None where there are no blocks."""
    found = engine(runner)
    del found.config.cache_config.kv_cache_size_tokens
    found.config.cache_config.num_gpu_blocks = blocks
    found.start()
    assert forward().kv_capacity_tokens == told


def test_an_engine_whose_start_was_not_seen_tells_all_that_with_its_first_step(engine: Make, runner: str) -> None:
    """Instrumented by hand, later: captures are past, the rest is known."""
    engine(runner).step(1)
    assert (forward().kv_capacity_tokens, forward().captures) == (4096, {})


def test_nor_is_that_lost_where_only_the_captures_were_seen(engine: Make, runner: str) -> None:
    """By an engine whose worker starts in another way."""
    found = engine(runner)
    found.runner.capture_model()
    assert forward().kv_capacity_tokens is None
    found.step(1)
    assert forward().kv_capacity_tokens == 4096
