"""What nano-vllm and mini-sglang let go of is gone: their graphs hold memory, and resources of NCCL."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from graphprobe.instrument import Patches
from graphprobe.reasons import FallbackReason
from graphprobe_runner import Watch


class Graph:
    """Stands for a graph."""


def called(watch: Watch, owner: Any, size: int) -> None:
    watch.call(owner, size, "decode", lambda *known: FallbackReason.UNKNOWN, lambda: owner.graphs[size], (), {})


@pytest.mark.parametrize("calls", [0, 3])
def test_graphs_end_with_the_engine_that_owns_them(fresh: None, calls: int) -> None:
    """The dict in the place of the engine's is the engine's own."""
    owner = SimpleNamespace(graphs={1: Graph(), 2: Graph()})
    graphs = [weakref.ref(graph) for graph in owner.graphs.values()]
    watch = Watch(Patches("toy", ()), owner, "graphs", unit="rows", device="cpu")
    for _ in range(calls):
        called(watch, owner, 2)
    del owner.graphs
    gc.collect()
    assert [None, None] == [graph() for graph in graphs]
    assert calls == watch.forward.snapshot().graph_calls
