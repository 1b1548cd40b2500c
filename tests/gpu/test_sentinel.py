"""The independent count of launches, with graphs of a device: of our own decorator, of a hand, of torch.compile."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from graphprobe.graphed import capture
from graphprobe.ledger import Forward, Ledger
from graphprobe.observe import observe
from graphprobe.sentinel import Sentinel


@pytest.fixture
def sentinel(ledger: Ledger) -> Iterator[Sentinel]:
    """Placed in the torch that is loaded."""
    placed = Sentinel(ledger)
    placed.place("toy")
    assert placed.bound
    yield placed
    placed.remove("toy")


@pytest.fixture
def forward(ledger: Ledger) -> Forward:
    """The forward of an engine on this device."""
    return observe("toy", [4], source="engine", backend="cuda", ledger=ledger).forward


def made() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that adds 1 to a tensor."""
    graph, total = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        total += 1
    return graph, total


def test_a_graph_of_a_hand(sentinel: Sentinel, ledger: Ledger) -> None:
    """A capture is no launch; each replay is one, and does what it did before."""
    graph, total = made()
    assert sentinel.launches() == 0
    for _ in range(3):
        graph.replay()
    assert (sentinel.launches(), ledger.snapshot().replays_seen) == (3, 3)
    assert total.tolist() == [3.0] * 4


@pytest.mark.usefixtures("own_forwards")
def test_a_decorated_forward(sentinel: Sentinel) -> None:
    """Each hit is one launch, on the way of a hit like the last one, too; an eager call is none."""

    @capture(buckets=[4])
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with torch.no_grad():
        for size in (4, 4, 4, 4, 4, 7):
            before, hits = sentinel.launches(), double.snapshot().graph_calls
            double(torch.ones(size, 2, device="cuda"))
            assert sentinel.launches() - before == double.snapshot().graph_calls - hits
    assert double.snapshot().graph_calls > 2


def test_an_engine_that_lies(sentinel: Sentinel, forward: Forward) -> None:
    """A graph call that ran eagerly, and an eager one that replayed, are mismatches; what is true is none."""
    graph, total = made()
    assert sentinel.judges(forward)
    for path, launches in (("graph", True), ("eager", False), ("graph", False), ("eager", True)):
        before = sentinel.launches()
        if launches:
            graph.replay()
        else:
            total += 1
        sentinel.judge(forward, path, before)
    assert forward.snapshot().unmatched == {"graph": 1, "eager": 1}


def test_threads(sentinel: Sentinel, ledger: Ledger) -> None:
    """Four threads that replay at the same time lose none."""
    graphs = [made()[0] for _ in range(4)]
    threads = [threading.Thread(target=lambda graph=graph: [graph.replay() for _ in range(500)]) for graph in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert (sentinel.launches(), ledger.snapshot().replays_seen) == (0, 2_000)


def test_graphs_of_torch_compile(sentinel: Sentinel) -> None:
    """The trees of torch.compile replay graphs of the same class."""
    pytest.importorskip("triton")
    compiled = torch.compile(lambda x: (x * 2).relu(), mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            before = sentinel.launches()
            compiled(torch.ones(64, 64, device="cuda"))
    assert sentinel.launches() - before == 1


def test_remove_gives_torch_back(ledger: Ledger) -> None:
    """Graphs that were made meanwhile replay on."""
    before = vars(torch.cuda.CUDAGraph)["replay"]
    sentinel = Sentinel(ledger)
    sentinel.place("toy")
    graph, total = made()
    sentinel.remove("toy")
    graph.replay()
    assert (vars(torch.cuda.CUDAGraph)["replay"], sentinel.launches(), total.tolist()) == (before, 0, [1.0] * 4)
