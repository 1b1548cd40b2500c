"""Steps are held against the graphs that torch launched in them; on a device that launches, and with both runners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphprobe
from graphprobe.sentinel import PATIENCE, SENTINEL
from tests.integrations.engine import Device, Engine, forward, rows

Make = Callable[..., Engine]

pytestmark = pytest.mark.usefixtures("fresh")


class Launching(dict[Any, Any]):
    """Graphs of V2's, of which each look-up is a launch."""

    def __getitem__(self, key: Any) -> Any:
        launch()
        return super().__getitem__(key)


def launch() -> None:
    """What replays a graph of torch's."""
    torch.cuda.CUDAGraph.replay("a graph")  # type: ignore[arg-type]


@pytest.fixture
def torch_with_cuda(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch as it is built for CUDA, with graphs that can be launched without a device."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    monkeypatch.setenv("GRAPHPROBE_TIMING", "0")


@pytest.fixture
def make(torch_with_cuda: None, engine: Make, runner: str) -> Make:
    """Makes started engines on a GPU whose graphs launch."""

    def made(**settings: Any) -> Engine:
        found = engine(runner, device=Device("cuda"), **settings).start()
        serve(found, True)
        return found

    return made


def serve(found: Engine, launches: bool) -> None:
    """Let its forward launch a graph, or not; on V2 the graphs themselves do it."""
    if found.kind == "v1":
        found.runner.model = launch if launches else lambda: None
        return
    manager = found.runner.cudagraph_manager
    manager.graphs = (Launching if launches else dict)(manager.graphs)


def test_graph_steps_that_launch(make: Make) -> None:
    """They are confirmed: no mismatch, and each launch is seen."""
    found = make()
    before = SENTINEL.launches()
    for _ in range(3):
        found.step(1, 1, 1)
    assert (SENTINEL.launches() - before, forward().graph_calls) == (3, 3)
    assert forward().unmatched == {"graph": 0, "eager": 0}
    assert graphprobe.snapshot().replays_seen is not None


def test_graph_steps_that_launch_nothing(make: Make, said: Callable[[], list[str]]) -> None:
    """Each is a mismatch, counted as a graph call all the same; a warning says so once."""
    found = make()
    serve(found, False)
    said()
    for _ in range(PATIENCE + 4):
        found.step(1, 1, 1)
    assert forward().unmatched == {"graph": PATIENCE + 4, "eager": 0}
    assert rows() == {("decode", 3, "full", 4): PATIENCE + 4}
    (warning,) = said()
    assert warning.startswith(f"vllm: {PATIENCE} passes were counted as graph calls, and no graph was launched")


def test_eager_steps_that_launch(make: Make) -> None:
    """A graph of a part in an eager step is a mismatch of the other kind; without one there is none."""
    found = make()
    found.runner.model = lambda: None
    found.step(new=[30])
    found.runner.model = launch
    found.step(new=[30])
    assert forward().unmatched == {"graph": 0, "eager": 1}


def test_graphs_before_the_forward(torch_with_cuda: None, engine: Make) -> None:
    """V1 runs the graphs of an encoder before the forward: an eager step is not held to be another for it."""
    found = engine("v1", device=Device("cuda")).start()
    decide = found.runner._determine_batch_execution_and_padding

    def encode(**asked: Any) -> Any:
        launch()
        return decide(**asked)

    found.runner._determine_batch_execution_and_padding = encode
    found.runner.model = lambda: None
    found.step(new=[30])
    assert forward().unmatched == {"graph": 0, "eager": 0}


def test_a_step_that_raises(make: Make) -> None:
    """It is no call, and no mismatch."""
    found = make()

    def fail() -> None:
        raise RuntimeError("out of memory")

    found.runner.model = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        found.step(new=[30])
    assert forward().unmatched == {"graph": 0, "eager": 0}


def test_on_a_cpu(torch_with_cuda: None, engine: Make, runner: str) -> None:
    """A graph of vLLM's on a CPU launches nothing: nothing is judged, and there is no metric of it."""
    found = engine(runner, device=Device("cpu")).start()
    for _ in range(PATIENCE):
        found.step(1, 1, 1)
    assert forward().unmatched == {}


def test_uninstrument_gives_torch_back(make: Make) -> None:
    """torch's method is as before."""
    make()
    assert torch.cuda.CUDAGraph.replay.__name__ == "<lambda>"
    ours = torch.cuda.CUDAGraph.replay
    graphprobe.uninstrument("vllm")
    assert torch.cuda.CUDAGraph.replay is not ours
    assert (graphprobe.snapshot().replays_seen, SENTINEL.bound) == (None, False)
