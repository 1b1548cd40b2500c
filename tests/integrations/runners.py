"""Fixtures for the engines of a few hundred lines: their fakes, on a CPU that has graphs (tests/engines/cpu_cuda)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphprobe
from graphprobe.ledger import LEDGER
from tests.engines import cpu_cuda

FAKE = str(Path(__file__).with_name("fake"))
SETTINGS = ("", "_ADDR", "_LABELS", "_PORT", "_TIMING")

ENGINES = ("nanovllm", "minisgl")
OURS = ("graphprobe_nanovllm", "graphprobe_minisglang", "graphprobe_runner", "nanovllm_capture")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, own_forwards: None) -> Iterator[None]:
    """Nothing of another test, and a failure of graphprobe fails the test."""
    loaded = [name for name in sys.modules if name.partition(".")[0] in (*ENGINES, *OURS)]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    for name in SETTINGS:
        monkeypatch.delenv(f"GRAPHPROBE{name}", raising=False)
    monkeypatch.setenv("GRAPHPROBE_STRICT", "1")
    monkeypatch.setattr(LEDGER, "hooks", {})
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setattr(torch.cuda.graphs.graph, "default_capture_stream", None)
    monkeypatch.setattr(cpu_cuda, "FREE", [64 * cpu_cuda.MIB])
    cpu_cuda.install(lambda place, name, value: monkeypatch.setattr(place, name, value, raising=False))
    yield
    for engine in ENGINES:
        graphprobe.uninstrument(engine)
    for name in [name for name in sys.modules if name.partition(".")[0] in (*ENGINES, *OURS)]:
        del sys.modules[name]


@pytest.fixture
def nano(clean: None) -> Callable[..., Any]:
    """Makes runners of the fake nano-vllm, which are observed from the start on."""
    graphprobe.instrument("nanovllm")
    return nano_runner


def nano_runner(most: int = 16, *, eager: bool = False, kind: Any = None) -> Any:
    """A runner for so many requests."""
    config = SimpleNamespace(
        max_num_seqs=most, enforce_eager=eager, kvcache_block_size=4, max_model_len=8, num_kvcache_blocks=-1
    )
    return (kind or importlib.import_module("nanovllm.engine.model_runner").ModelRunner)(config)


@pytest.fixture
def mini(clean: None) -> Callable[..., Any]:
    """Makes schedulers of the fake mini-sglang, which are observed from the start on."""
    graphprobe.instrument("minisgl")
    return mini_scheduler


def mini_scheduler(most: int = 8, sizes: tuple[int, ...] = (1, 2, 4, 8)) -> Any:
    """A scheduler for so many requests."""
    config = SimpleNamespace(max_running_req=most, cuda_graph_bs=sizes, page_size=16)
    return importlib.import_module("minisgl.scheduler.scheduler").Scheduler(config)


def requests(count: int, tokens: int = 3) -> list[list[int]]:
    """So many requests, no two alike, and none that begins like a row of padding."""
    return [[(5 * i + k) % 60 + 1 for k in range(tokens)] for i in range(count)]


def rows(name: str) -> dict[tuple[Any, ...], int]:
    """Calls by (phase, size, bucket or reason)."""
    forward = LEDGER.forwards.get(name)
    found = () if forward is None else forward.snapshot().rows
    return {(row.phase, row.batch_size, row.bucket or str(row.reason)): row.calls for row in found}


def forward(name: str) -> Any:
    """The snapshot of a forward."""
    return graphprobe.snapshot().forwards[name]
