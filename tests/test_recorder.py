from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphprobe.backends import for_device
from graphprobe.backends.recorder import RecorderBackend
from graphprobe.errors import CaptureError, ConfigError
from graphprobe.graphed import capture
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
    x = torch.ones(2)

    def forward() -> torch.Tensor:
        during.append(gc.isenabled())
        return x * 2

    record(forward)
    assert [False] == during
    assert gc.isenabled()


def test_a_forward_without_an_operator_is_nothing_to_replay() -> None:
    """As on a device, where such a graph would be empty."""
    x = torch.ones(2)
    for forward in (lambda: x, lambda: x[:1], lambda: None):
        with pytest.raises(CaptureError, match="nothing to replay"):
            record(forward)


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


def complex_rows() -> torch.Tensor:
    return torch.randn(2, 3, dtype=torch.complex64)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.conj() * 2,
        lambda x: x.mH @ x,
        lambda x: x.conj().imag * 2,
        lambda x: x.conj().imag[:1] + x.real,
        lambda x: torch.view_as_real(x.conj().resolve_conj()),
    ],
    ids=["conjugate", "adjoint", "negated imaginary part", "a view of it", "resolved"],
)
def test_conjugates_and_negatives_keep_their_bits(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A conjugate is the same memory with a mark, and so is what the tape keeps of it."""
    x = complex_rows()
    graph, y = record(lambda: step(x))
    for _ in range(3):
        x.copy_(complex_rows())
        graph.replay()
        assert torch.equal(step(x), y)


@pytest.mark.usefixtures("own_forwards")
@pytest.mark.parametrize("view", [torch.conj, lambda t: t.conj().imag, lambda t: t.mH], ids=["conj", "imag", "mH"])
def test_a_marked_view_of_a_tensor_outside_is_handed_out_with_its_mark(view: Callable[..., torch.Tensor]) -> None:
    """What a forward returns of the engine's own memory is a conjugate where eager's is."""
    table = complex_rows()
    forward = capture(lambda x: (x + 0, view(table)), buckets=[2], backend="recorder")
    for _ in range(4):
        x = complex_rows()
        assert torch.equal(view(table), forward(x)[1])
        table.add_(complex_rows())
    assert 3 == forward.snapshot().graph_calls


@pytest.mark.parametrize("write", ["index_add_", "index_copy_", "index_put_", "a view"])
def test_what_another_thread_writes_meanwhile_stays(write: str) -> None:
    """Only what the run itself has changed is put back, although the operator was given the whole cache."""
    cache, x, slot = torch.zeros(4, 2), torch.ones(1, 2), torch.tensor([1])
    writes: dict[str, Callable[[], Any]] = {
        "index_add_": lambda: cache.index_add_(0, slot, x),
        "index_copy_": lambda: cache.index_copy_(0, slot, x),
        "index_put_": lambda: cache.index_put_((slot,), x),
        "a view": lambda: cache[1:2].add_(x),
    }

    def run() -> torch.Tensor:
        writes[write]()
        if recording:
            thread = threading.Thread(target=lambda: cache[3].fill_(7.0))
            thread.start()
            thread.join()
        return cache.sum(0)

    recording = True
    graph, y = record(run)
    recording = False
    assert [[0, 0], [0, 0], [0, 0], [7, 7]] == cache.tolist()
    graph.replay()
    assert [[0, 0], [1, 1], [0, 0], [7, 7]] == cache.tolist()
    assert [8.0, 8.0] == y.tolist()


@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught by the forward"])
def test_a_write_that_torch_refuses_leaves_no_trace(caught: bool) -> None:
    """Rows that share memory cannot be written; what the run wrote before that is undone all the same."""
    cache, row, x = torch.zeros(2, 3), torch.ones(1, 3), torch.ones(2, 3)

    def run() -> torch.Tensor:
        cache.add_(1)
        try:
            row.expand(2, 3).add_(1)
        except RuntimeError:
            if not caught:
                raise
        return cache + x

    if caught:
        graph, y = record(run)
        assert torch.equal(torch.zeros(2, 3), cache)
        graph.replay()
        assert torch.equal(torch.full((2, 3), 2.0), y)
    else:
        with pytest.raises(CaptureError, match="single memory location"):
            record(run)
        assert torch.equal(torch.zeros(2, 3), cache)
    assert torch.equal(torch.ones(1, 3), row)


@pytest.mark.usefixtures("own_forwards")
def test_a_bucket_that_torch_refuses_stays_eager_at_its_smaller_sizes() -> None:
    """One row may be written through an expanded view, two may not: the capture fails, the caller's call does not."""
    table = torch.randn(3, 4)
    other = table.clone()

    def step(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        row = table[:1].expand(x.shape[0], 4)
        doubled = row * 2
        row.add_(1)
        return x + doubled

    forward = capture(lambda x: step(x, table), buckets=[2], pad={"x": 0}, backend="recorder")
    for _ in range(5):
        x = torch.randn(1, 4)
        assert torch.equal(step(x, other), forward(x))
        assert torch.equal(other, table)
    assert 0 == forward.snapshot().graph_calls
