from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphprobe import turn
from graphprobe.graphed import capture

pytestmark = pytest.mark.usefixtures("own_forwards")

recorded = functools.partial(capture, backend="recorder")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def full(value: float, rows: int = 2) -> torch.Tensor:
    return torch.full((rows, 3), value)


def counts(forward: Any) -> dict[str, int]:
    """Calls by reason; those that a graph served under ``graph``."""
    return {str(row.reason or "graph"): row.calls for row in forward.snapshot().rows if row.calls}


def thread_of(work: Callable[[], Any]) -> threading.Thread:
    """A thread that works under no_grad, as this one does."""

    def run() -> None:
        with torch.no_grad():
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def ended(work: Callable[[], Any]) -> None:
    """Work in a thread of its own: one that waits for itself must not hang the tests."""
    done: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            done.append(None)
        except BaseException as error:
            done.append(error)

    thread_of(run).join(30)
    assert done, "it hangs"
    if done[0] is not None:
        raise done[0]


class Engine:
    """An engine whose callback, of either kind, may do something to its own forward while a call is under way."""

    def __init__(self, kind: str, step: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.act: Callable[[float], None] = lambda value: None
        if kind == "prepare":
            self.sizes = (2, 2, 2)
            self.forward = recorded(step, buckets=[2], prepare=lambda bucket, x: self.act(float(x[0, 0])))
        else:
            self.sizes = (4, 3, 4, 3)
            self.forward = recorded(step, buckets=[4], pad={"x": self.fill})

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.zero_()
        self.act(float(source[0, 0]))

    def serve(self, value: float) -> torch.Tensor:
        result: torch.Tensor = self.forward(full(value, self.sizes[-1]))
        return result


@pytest.mark.parametrize("shared", [False, True], ids=["one thread", "two threads"])
@pytest.mark.parametrize("kind", ["prepare", "pad"])
def test_a_callback_may_reset_its_own_forward(kind: str, shared: bool) -> None:
    """The call neither hangs nor hands out an earlier call's result: it is eager, and on the way to a new graph."""
    engine, results = Engine(kind, lambda x: x * 2), []

    def work() -> None:
        for value, n in enumerate(engine.sizes):
            engine.forward(full(float(value), n))
        if shared:
            ended(lambda: engine.serve(1.0))
        before = counts(engine.forward)["graph"]
        engine.act = lambda value: engine.forward.reset()
        results.append(engine.serve(50.0)[0, 0].item())
        engine.act = lambda value: None
        assert before == counts(engine.forward)["graph"]
        for value, n in enumerate(engine.sizes):
            engine.forward(full(float(value), n))
        results.append(engine.serve(7.0)[0, 0].item())
        assert before < counts(engine.forward)["graph"]

    ended(work)
    assert [100.0, 14.0] == results
    assert {"graph", "warmup"} == set(counts(engine.forward))


def test_a_graph_that_is_reset_between_its_capture_and_its_replay_has_not_moved() -> None:
    """A reset is nothing that the graph reads: the call that meets it is counted as one before the next capture."""
    asked = [0]

    def prepare(bucket: int, x: torch.Tensor) -> None:
        asked[0] += 1
        if asked[0] == 2:
            # The first time is the capture's, the second that of the replay behind it.
            forward.reset()

    forward = recorded(lambda x: x * 2, buckets=[2], prepare=prepare)
    for value in range(5):
        assert torch.equal(full(2.0 * value), forward(full(float(value))))
    assert {"warmup": 3, "graph": 2} == counts(forward)
    assert 1.0 == forward.snapshot().hit_rate


@pytest.mark.parametrize("kind", ["prepare", "pad"])
def test_a_callback_may_replace_what_the_graph_reads(kind: str) -> None:
    """A plan that is made anew for a call is what this call reads, though the graph was about to read the old one."""
    plans = [full(0.0, 1)]
    engine = Engine(kind, lambda x: x + plans[0])

    def replan(value: float) -> None:
        if value != plans[0][0, 0]:
            plans[0] = full(value, 1)

    engine.act = replan
    for n in (*engine.sizes, *engine.sizes):
        engine.forward(full(0.0, n))
    for value in (5.0, 5.0, 5.0, 7.0, 7.0, 7.0):
        assert [2 * value] * 3 == engine.serve(value)[0].tolist()
    assert {"graph", "warmup", "static_moved"} == set(counts(engine.forward))
    assert 2 == counts(engine.forward)["static_moved"]


def test_an_interrupt_while_a_reset_waits_leaves_the_forward_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the thread that waits for the one inside: the next calls are served by graph again, not busy."""
    inside, leave = threading.Event(), threading.Event()
    slow = [False]

    def prepare(bucket: int, x: torch.Tensor) -> None:
        if slow[0]:
            inside.set()
            assert leave.wait(30)

    forward = recorded(lambda x: x * 2, buckets=[2], prepare=prepare)

    def work() -> None:
        for _ in range(3):
            forward(full(1.0))
        slow[0] = True
        forward(full(1.0))

    class Clock:
        """Interrupts whoever waits."""

        @staticmethod
        def sleep(seconds: float) -> None:
            raise KeyboardInterrupt

    thread = thread_of(work)
    assert inside.wait(30)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(turn, "time", Clock)
        forward.reset()
    slow[0] = False
    leave.set()
    thread.join(30)
    for _ in range(5):
        assert torch.equal(full(4.0), forward(full(2.0)))
    assert {"graph": 8, "warmup": 1} == counts(forward)


@pytest.mark.parametrize("one", [True, False], ids=["one pool", "pools of their own"])
def test_wrappers_with_one_pool_have_one_turn(one: bool) -> None:
    """Graphs of one pool may share memory, so none of them replays in the middle of another one's call."""
    nested = [False]

    def prepare(bucket: int, x: torch.Tensor) -> None:
        if nested[0]:
            assert torch.equal(x * 3, inner(x))

    pool = (0, 1)
    inner = recorded(lambda x: x * 3, buckets=[2], pool=pool if one else None, name="inner")
    outer = recorded(lambda x: x * 2, buckets=[2], pool=pool if one else None, name="outer", prepare=prepare)
    for _ in range(3):
        inner(full(1.0)), outer(full(1.0))
    nested[0] = True
    assert torch.equal(full(10.0), outer(full(5.0)))
    assert ({"graph": 2, "warmup": 1, "busy": 1} if one else {"graph": 3, "warmup": 1}) == counts(inner)
    assert {"graph": 3, "warmup": 1} == counts(outer)
    nested[0] = False
    assert torch.equal(full(15.0), inner(full(5.0)))
