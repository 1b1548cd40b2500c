from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphprobe.backends import for_device
from graphprobe.backends.recorder import RecorderBackend
from graphprobe.errors import CaptureError, ConfigError
from graphprobe.options import Options
from graphprobe.timers import ClockTimer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


def record(run: Callable[[], Any]) -> tuple[Any, Any]:
    return RecorderBackend(CPU).capture(run)


def test_a_replay_computes_on_what_the_input_holds_now() -> None:
    """The static input is read anew at each replay, and the result lands in the captured output."""
    x = torch.ones(2, 3)
    graph, y = record(lambda: (x * 2).sin())
    for value in (1.0, 5.0, -3.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal((x * 2).sin(), y)


def test_the_next_replay_overwrites_the_output() -> None:
    """The memory of the output is the graph's own: a result that is kept changes."""
    x = torch.ones(2)
    graph, y = record(lambda: x + 1)
    graph.replay()
    kept = y
    x.fill_(7.0)
    graph.replay()
    assert [8.0, 8.0] == kept.tolist()


def test_a_python_value_is_baked() -> None:
    """A number that the forward closes over keeps the value it had at capture."""
    scale, x = [2.0], torch.ones(2)
    graph, y = record(lambda: x * scale[0])
    scale[0] = 9.0
    graph.replay()
    assert [2.0, 2.0] == y.tolist()


def test_replaced_storage_is_not_seen() -> None:
    """A weight whose ``data`` is replaced is read at its old address; an in-place change is seen."""
    w, x = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    graph, y = record(lambda: x * w)
    w.mul_(3)
    graph.replay()
    assert [3.0, 3.0] == y.tolist()
    w.data = torch.full((2,), 50.0)
    graph.replay()
    assert [3.0, 3.0] == y.tolist()


def test_what_the_recording_run_wrote_is_undone() -> None:
    """State written in place, through a view too, is as before the capture; the first replay writes it once."""
    cache, x = torch.zeros(4, 2), torch.ones(2)

    def run() -> torch.Tensor:
        cache[1:2].add_(x)
        cache.mul_(2)
        return cache.sum(0)

    graph, y = record(run)
    assert torch.equal(torch.zeros(4, 2), cache)
    graph.replay()
    assert [[0, 0], [2, 2], [0, 0], [0, 0]] == cache.tolist()
    assert [2.0, 2.0] == y.tolist()


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_what_a_failed_recording_wrote_is_undone(failure: type[BaseException]) -> None:
    """A run that raises, or is interrupted, half-way leaves state, random numbers and grad mode as they were."""
    cache = torch.zeros(2)
    torch.manual_seed(1)
    expected = torch.rand(1)

    def run() -> None:
        cache.add_(torch.rand(2))
        torch.set_grad_enabled(True)
        raise failure("half-way")

    torch.manual_seed(1)
    with pytest.raises((CaptureError, failure)):
        record(run)
    assert [0.0, 0.0] == cache.tolist()
    assert torch.equal(expected, torch.rand(1))
    assert not torch.is_grad_enabled()


def test_the_first_cause_is_kept() -> None:
    """A failed recording says what failed, and the failure is its cause."""

    def run() -> None:
        raise ValueError("no such head")

    with pytest.raises(CaptureError, match=r"ValueError.*no such head") as caught:
        record(run)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "error" == caught.value.outcome


def test_random_numbers_are_those_of_eager() -> None:
    """The recording run draws nothing; each replay draws the next numbers, as eager would."""
    x = torch.zeros(3)

    def run() -> torch.Tensor:
        return x + torch.rand_like(x)

    torch.manual_seed(5)
    expected = [run() for _ in range(3)]
    torch.manual_seed(5)
    graph, y = record(run)
    actual = []
    for _ in range(3):
        graph.replay()
        actual.append(y.clone())
    assert [t.tolist() for t in expected] == [t.tolist() for t in actual]


def test_a_declared_generator_is_put_back() -> None:
    """A generator named to the capture draws nothing while recording either."""
    generator, x = torch.Generator(), torch.zeros(3)
    generator.manual_seed(5)
    expected = torch.rand(3, generator=generator)
    generator.manual_seed(5)
    graph, y = RecorderBackend(CPU).capture(lambda: x + torch.rand(3, generator=generator), (generator,))
    graph.replay()
    assert torch.equal(expected, y)


def test_a_generator_that_was_not_declared_is_refused() -> None:
    """As on CUDA: drawing from a generator that the capture does not know is an error, not a silent repetition."""
    generator = torch.Generator()
    with pytest.raises(CaptureError):
        record(lambda: torch.rand(3, generator=generator))


def test_several_results_and_views() -> None:
    """Operators with several results, and views of results, are replayed into the same tensors."""
    x = torch.arange(6.0).reshape(2, 3)

    def run() -> tuple[Any, ...]:
        top = torch.topk(x, 2)
        left, right = (x + 1).split(1)
        return top.values, top.indices, left, right.view(-1)

    graph, result = record(run)
    x.copy_(torch.tensor([[3.0, 9.0, 1.0], [5.0, 4.0, 8.0]]))
    graph.replay()
    assert [t.tolist() for t in run()] == [t.tolist() for t in result]


def test_an_in_place_operator_hands_back_the_very_tensor() -> None:
    """A forward may rely on ``x.add_(1) is x``."""
    x = torch.zeros(2)
    same: list[bool] = []
    record(lambda: same.append(x.add_(1) is x))
    assert [True] == same


def test_the_owner_of_a_tensor_can_let_go_of_it() -> None:
    """A tape keeps the memory that it reads, not the tensor of its owner."""
    owner, x = {"w": torch.ones(2)}, torch.ones(2)
    graph, y = record(lambda: x + owner["w"])
    gone = weakref.ref(owner["w"])
    gc.disable()
    try:
        owner.clear()
        assert None is gone()
    finally:
        gc.enable()
    graph.replay()
    assert [2.0, 2.0] == y.tolist()


def test_reset_lets_go_of_the_memory() -> None:
    """After reset a tape holds nothing and replays nothing; the pool forgets it on release."""
    backend, x = RecorderBackend(CPU), torch.ones(4, 4)
    assert 0 == backend.pool_bytes()
    graph, y = backend.capture(lambda: x + 1)
    assert 64 == backend.pool_bytes()
    graph.reset()
    y.zero_()
    graph.replay()
    assert 0.0 == float(y.sum())
    backend.release()
    assert 0 == backend.pool_bytes()


def test_the_pool_counts_memory_once() -> None:
    """Views and in-place results lie in memory that is counted already; inputs are not the pool's."""
    backend, x = RecorderBackend(CPU), torch.ones(4, 4)
    graph, _ = backend.capture(lambda: (x + 1).view(-1).mul_(2)[:3])
    assert 64 == backend.pool_bytes()
    del graph
    assert 0 == backend.pool_bytes()


def test_garbage_collection_is_as_before() -> None:
    """A capture collects nothing while it records, and leaves collection switched as it was."""
    during: list[bool] = []
    record(lambda: during.append(gc.isenabled()))
    assert [False] == during
    assert gc.isenabled()


def test_who_gets_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors have a backend only where the recorder is asked for, by keyword or by environment."""
    assert None is for_device("auto", CPU)
    assert None is for_device("cuda", CPU)
    assert isinstance(for_device("recorder", CPU), RecorderBackend)
    monkeypatch.setenv("GRAPHPROBE_BACKEND", "recorder")
    assert isinstance(for_device("auto", CPU), RecorderBackend)
    assert None is for_device("cuda", CPU)
    with pytest.raises(ConfigError):
        Options([1], backend="metal")


def test_a_recorder_may_always_replay() -> None:
    """There is no stream to wait for on a CPU, and time is the wall clock's."""
    backend = RecorderBackend(CPU)
    assert backend.ready()
    assert isinstance(backend.timer(), ClockTimer)
