"""``graphprobe.account`` on a GPU: what it measures agrees with what else is known, and what it cannot do it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphprobe.backends.cuda import CudaBackend
from graphprobe.errors import SourceError
from graphprobe.tools.account import measure
from graphprobe.tools.filled import filled
from graphprobe.tools.gaps import recorded
from graphprobe.tools.stepping import bandwidth

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False"
)
LAYERS = 60


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(LAYERS)]).cuda().half().eval()


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.zeros(batch, 1024, device="cuda", dtype=torch.half),)


@pytest.fixture(scope="module")
def found(model: Any) -> Any:
    return measure(model, rows, batches=[1, 8], name="linear")


def test_kernels_are_those_of_the_layers_on_both_paths(found: Any) -> None:
    """A replay is one launch of as many."""
    for batch, (eager, graph) in found.timelines.items():
        step = next(step for step in found.account.steps if step.batch == batch)
        assert LAYERS <= step.kernels <= 2 * LAYERS
        assert step.kernels == eager.gaps().kernels == graph.gaps().kernels
        assert (eager.gaps().launches >= LAYERS, graph.gaps().launches) == (True, 1)


def test_a_step_queued_ahead_lies_between_a_replay_and_an_eager_one(found: Any) -> None:
    for step in found.account.steps:
        assert 0 < step.graph <= step.filled * 1.02
        assert step.filled < step.eager
        assert 0 <= step.device_per_kernel < 5e-6


def test_the_gaps_of_a_replay_are_a_small_part_of_an_eager_steps(found: Any) -> None:
    eager, graph = found.timelines[1]
    assert graph.gaps().gap_us.p50 < 0.2 * eager.gaps().gap_us.p50


def test_what_is_read_are_the_weights_and_the_input(found: Any) -> None:
    weights = LAYERS * (1024 * 1024 + 1024) * 2
    assert [weights + batch * 2048 for batch in (1, 8)] == [step.bytes_read for step in found.account.steps]
    assert weights == found.account.weight_bytes
    for step in found.account.steps:
        assert found.account.floor(step) < step.graph


def test_the_bandwidth_is_below_the_datasheets_and_of_its_order() -> None:
    seen = bandwidth(torch.device("cuda"))
    assert 1e11 < seen < 1e13


def ordinary() -> int:
    """Bytes reserved outside of all pools of graphs."""
    segments = torch.cuda.memory_snapshot()
    return sum(int(each["total_size"]) for each in segments if tuple(each["segment_pool_id"]) == (0, 0))


def test_pool_bytes_are_what_the_allocator_reserved_meanwhile(model: Any) -> None:
    args, backend = rows(4), CudaBackend(torch.device("cuda", torch.cuda.current_device()))
    with torch.no_grad():
        model(*args)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before, outside = torch.cuda.memory_reserved(), ordinary()
        graph, _ = backend.capture(lambda: model(*args))
        # Of the capture's own stream, whose segments are nobody else's: the small tensor that keeps the pool.
        beside = ordinary() - outside
        assert 0 <= beside <= 2 << 20
        assert 0 < torch.cuda.memory_reserved() - before - beside == backend.pool_bytes()
    graph.reset()
    backend.release()


def test_a_step_longer_than_a_queue_is_cut_into_parts(model: Any) -> None:
    """Three thousand kernels take three times what a thousand take."""
    x = rows(1)[0]

    def many(times: int) -> Any:
        def run() -> torch.Tensor:
            y = x
            for _ in range(times):
                y = y + 1
            return y

        return run

    with torch.no_grad():
        one, three = (filled(many(times), torch.device("cuda")) for times in (1000, 3000))
    assert one is not None
    assert three is not None
    assert 2.7 < three / one < 3.3


def test_a_forward_that_waits_for_the_device_has_no_graph_and_says_why(model: Any) -> None:
    def waits(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        return y if float(y.sum()) < 1e9 else x

    found = measure(waits, rows(2), timelines=False).account
    (step,) = found.steps
    assert found.verdict.startswith("no graph can hold this step: at batch 2 aten._local_scalar_dense")
    assert (step.graph, step.filled) == (None, None)
    assert step.eager is not None
    told = " ".join(step.notes)
    assert "could not all be queued ahead: it waits for the device" in told
    assert "aten._local_scalar_dense" in step.refused


def test_a_capture_that_fails_leaves_the_next_size_to_be_measured(model: Any) -> None:
    """The cause is in the notes, and torch is as it was."""

    def fails(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and x.shape[0] == 8:
            raise RuntimeError("not this one")
        y: torch.Tensor = model(x)
        return y

    one, eight = measure(fails, rows, batches=[1, 8], timelines=False).account.steps
    assert one.graph is not None
    assert eight.graph is None
    assert "its capture failed: RuntimeError: not this one" in eight.refused


def test_inside_a_profiler_kernels_are_not_counted_and_that_profiler_goes_on(model: Any) -> None:
    """There is one profiler in a process, and it is the caller's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as theirs:
        step = measure(model, rows(1), timelines=False).account.steps[0]
    assert (step.kernels, any("a profiler is running already" in note for note in step.notes)) == (None, True)
    assert step.graph is not None
    assert sum(event.count for event in theirs.key_averages()) > LAYERS


def test_a_run_without_work_has_no_timeline() -> None:
    with pytest.raises(SourceError, match="saw no work"):
        recorded(lambda: None, torch.device("cuda"))
