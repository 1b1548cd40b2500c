"""Relatives of the reports about processes: fork, spawn, and ranks of torch.distributed."""

from __future__ import annotations

import collections
import datetime
import functools
import gc
import json
import multiprocessing
import os
import pickle
import select
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

import graphprobe
from graphprobe.backends.recorder import RecorderBackend
from graphprobe.graphed import capture
from graphprobe.timers import EventTimer

pytestmark = [
    pytest.mark.usefixtures("own_forwards"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform"),
]

recorded = functools.partial(capture, buckets=[2, 4, 8], backend="recorder")
LIMIT = 60
"""Seconds after which a child counts as stuck; none of them takes more than a few."""


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def rows(n: int = 2) -> torch.Tensor:
    return torch.randn(n, 3)


def serve(forward: Any, calls: int, n: int = 2) -> bool:
    """Whether all calls gave twice their input."""
    right = True
    for _ in range(calls):
        x = rows(n)
        right &= torch.equal(x * 2, forward(x))
    return right


def counts(snapshot: Any) -> dict[str, int]:
    """Calls by reason; those that a graph served under ``graph``."""
    found: collections.Counter[str] = collections.Counter()
    for row in snapshot.rows:
        found[str(row.reason or "graph")] += row.calls
    return dict(found)


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked child, through JSON."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = json.dumps({"answer": work()})
        except BaseException as error:
            told = json.dumps({"error": repr(error)})
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], LIMIT)[0]:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the child is stuck")
        told = os.read(reading, 65_536)
    finally:
        os.close(reading)
        status = os.waitpid(pid, 0)[1]
    assert told, f"the child died: {os.waitstatus_to_exitcode(status)}"
    heard = json.loads(told)
    assert "error" not in heard, heard
    return heard["answer"]


@recorded(name="a function")
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Engine:
    @recorded(name="a method")
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Doubling(torch.nn.Module):
    """Doubles by a weight, so that a copy that lost its weight shows."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((3,), 2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@recorded(name="a class")
class GraphedDoubling(Doubling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def a_function() -> tuple[Any, Any]:
    return None, recorded(lambda x: x * 2, name="a function")


def a_method() -> tuple[Any, Any]:
    return (engine := Engine()), engine.step


def an_instance() -> tuple[Any, Any]:
    return (module := recorded(Doubling().eval(), name="an instance")), module.forward


def a_class() -> tuple[Any, Any]:
    return (module := GraphedDoubling().eval()), module.forward


FORMS = [a_function, a_method, an_instance, a_class]
Make = Callable[[], tuple[Any, Any]]


# -- fork ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", FORMS)
def test_a_forked_child_counts_from_zero_and_runs_eagerly(make: Make) -> None:
    """After three calls and a fork the child's one call is one, not four, eager as forked; the sum is four.

    (H72, open-telemetry/opentelemetry-python#3885)
    """
    _owner, forward = make()
    assert serve(forward, 3)

    def child() -> Any:
        right = serve(forward, 1)
        shot = forward.snapshot()
        whole = {name: f.graph_calls + f.eager_calls for name, f in graphprobe.snapshot().forwards.items()}
        return right, counts(shot), shot.hit_rate, dict(shot.captures), shot.pool_bytes, whole

    right, told, rate, captures, pool, whole = in_child(child)
    assert (True, {"forked": 1}, None, {}, None) == (right, told, rate, captures, pool)
    assert {forward.snapshot().name: 1} == whole
    assert {"graph": 2, "warmup": 1} == counts(forward.snapshot())
    # The parent's graphs serve on.
    assert serve(forward, 1)
    assert 3 == forward.snapshot().graph_calls


@pytest.mark.parametrize("make", FORMS)
def test_a_forked_worker_of_multiprocessing_runs_eagerly(make: Make) -> None:
    """A worker that multiprocessing forks answers rightly and reports its own calls alone.

    (H72, open-telemetry/opentelemetry-python#2767)
    """
    _owner, forward = make()
    assert serve(forward, 3)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def work() -> None:
        queue.put((serve(forward, 2), counts(forward.snapshot())))

    workers = [context.Process(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(LIMIT)
    assert [0, 0] == [worker.exitcode for worker in workers]
    assert [(True, {"forked": 2})] * 2 == [queue.get() for _ in workers]
    assert {"graph": 2, "warmup": 1} == counts(forward.snapshot())


def test_a_grandchild_counts_from_zero() -> None:
    """A fork of a fork starts at zero again (H72, open-telemetry/opentelemetry-python#3402)."""
    _, forward = a_function()
    assert serve(forward, 3)

    def child() -> Any:
        serve(forward, 2)
        below = in_child(lambda: (serve(forward, 1), counts(forward.snapshot())))
        return below, counts(forward.snapshot())

    assert [[True, {"forked": 1}], {"forked": 2}] == in_child(child)


def test_counts_of_observed_forwards_start_at_zero_in_a_child() -> None:
    """An engine that owns its graphs goes on counting in the child, from zero.

    (H72, open-telemetry/opentelemetry-python#3885)
    """
    probe = graphprobe.observe("observed", [2, 4])
    for _ in range(3):
        probe.graph_call(2, 2)

    def child() -> Any:
        probe.graph_call(2, 2)
        with probe.timed("graph", bucket=2):
            pass
        shot = probe.snapshot()
        return counts(shot), sum(t.count for t in shot.times.values())

    assert [{"graph": 1}, 1] == in_child(child)
    assert {"graph": 3} == counts(probe.snapshot())


class OwnEvent:
    """A device event: what its process may use and a forked child may not."""

    def __init__(self) -> None:
        self.made = os.getpid()

    def record(self, stream: Any) -> None:
        if os.getpid() != self.made:
            raise RuntimeError("cannot re-initialise the device in a forked process")

    def query(self) -> bool:
        self.record(None)
        return False

    def elapsed_time(self, other: OwnEvent) -> float:
        self.record(None)
        return 1.0


def test_a_forked_child_leaves_the_parents_events_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that were pending at the fork are not read in the child, and its own calls start none.

    (H72, open-telemetry/opentelemetry-python#2767)
    """
    monkeypatch.setattr(RecorderBackend, "timer", lambda self: EventTimer(OwnEvent, lambda: None))
    forward = recorded(lambda x: x * 2, name="timed", timing=1)
    assert serve(forward, 6)

    def child() -> Any:
        first = counts(forward.snapshot())
        right = serve(forward, 130)
        return first, right, counts(forward.snapshot()), len(forward.snapshot().times)

    assert [{}, True, {"forked": 130}, 0] == in_child(child)


@pytest.mark.parametrize("make", FORMS)
def test_a_fork_before_the_first_graph_leaves_the_child_its_graphs(make: Make) -> None:
    """Where nothing was captured yet there is nothing to keep off: a worker forked at start captures its own.

    The reason says so: the process was forked after graphs were made.
    (H72, open-telemetry/opentelemetry-python#2767)
    """
    _owner, forward = make()

    def child() -> Any:
        return serve(forward, 4), counts(forward.snapshot())

    assert [True, {"warmup": 1, "graph": 3}] == in_child(child)


def test_what_is_captured_in_a_child_is_served_there() -> None:
    """A wrapper that the child makes itself has graphs (H72, open-telemetry/opentelemetry-python#3885)."""
    _, forward = a_function()
    assert serve(forward, 3)

    def child() -> Any:
        own = recorded(lambda x: x * 2, name="of the child")
        return serve(own, 4), counts(own.snapshot()), counts(forward.snapshot())

    assert [True, {"warmup": 1, "graph": 3}, {}] == in_child(child)


def test_warm_up_in_a_forked_child_says_that_it_cannot() -> None:
    """Every bucket of a forked forward is reported as skipped, and why; nothing is counted.

    (H72, open-telemetry/opentelemetry-python#3885)
    """
    _, forward = a_function()
    assert serve(forward, 3)

    def child() -> Any:
        report = forward.warmup(lambda n: ((rows(n),), {}))
        return [(b.bucket, b.outcome, b.error) for b in report], counts(forward.snapshot())

    report, told = in_child(child)
    assert [(8, "skipped"), (4, "skipped"), (2, "skipped")] == [(bucket, outcome) for bucket, outcome, _ in report]
    assert all("forked" in error for _, _, error in report)
    assert {} == told


def test_a_fork_in_the_middle_of_a_capture_leaves_no_lock_and_no_state_behind() -> None:
    """While another thread captures, a child is forked: what it makes itself is captured, and it collects garbage.

    (H72, open-telemetry/opentelemetry-python#3885)
    """
    entered, leave = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        if entering[0]:
            entered.set()
            leave.wait(LIMIT)
        return x * 2

    entering = [False]
    forward = recorded(slow, name="slow")

    def run() -> None:
        with torch.inference_mode():
            forward(rows())
            entering[0] = True
            forward(rows())

    def child() -> Any:
        own = recorded(lambda x: x * 2, name="of the child")
        return serve(own, 4), counts(own.snapshot()), gc.isenabled()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert entered.wait(LIMIT)
        told = in_child(child)
    finally:
        leave.set()
        thread.join(LIMIT)
    assert [True, {"warmup": 1, "graph": 3}, True] == told


def test_a_fork_while_another_thread_replays_leaves_no_turn_behind() -> None:
    """A child that is forked while threads serve answers at once (H72, open-telemetry/opentelemetry-python#3402)."""
    _, forward = a_function()
    # Made ahead: torch's generator has a lock of its own, which a fork may leave taken.
    x = rows()
    expected = x * 2
    for _ in range(3):
        forward(x)
    done = threading.Event()

    def run() -> None:
        with torch.inference_mode():
            while not done.is_set():
                forward(x)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        told = [in_child(lambda: (torch.equal(expected, forward(x)), counts(forward.snapshot()))) for _ in range(5)]
    finally:
        done.set()
        for thread in threads:
            thread.join(LIMIT)
    assert [[True, {"forked": 1}]] * 5 == told


def test_a_copy_and_a_reset_in_a_child_do_not_bring_the_parents_graphs_back() -> None:
    """reset() in the child neither fails nor ends the parent's graphs; the child stays eager.

    (H72, open-telemetry/opentelemetry-python#3885)
    """
    _owner, forward = an_instance()
    assert serve(forward, 3)

    def child() -> Any:
        forward.reset()
        return serve(forward, 3), counts(forward.snapshot())

    assert [True, {"forked": 3}] == in_child(child)
    assert serve(forward, 2)
    assert 4 == forward.snapshot().graph_calls


# -- spawn -----------------------------------------------------------------------------------------------------------


def served_elsewhere(thing: Any, name: str) -> tuple[bool, dict[str, int], dict[int, int]]:
    """In a spawned worker: serve what was sent, and say what was counted."""
    torch.set_num_threads(1)
    if thing is double:
        # Found by its name, it is one object for all that ask this worker.
        thing.reset()
    before = graphprobe.snapshot()
    with torch.inference_mode():
        right = serve(thing.step if isinstance(thing, Engine) else thing, 4)
    window = (graphprobe.snapshot() - before).forwards[name]
    return right, counts(window), dict(window.captures)


def used() -> list[tuple[str, Any]]:
    """What is sent, under the name that it counts as; all of it has graphs in this process."""
    engine, model = Engine(), recorded(Doubling().eval(), name="an instance")
    of_class = GraphedDoubling().eval()
    things = [("a function", double), ("a method", engine), ("a method", engine.step)]
    things += [("an instance", model), ("a class", of_class), ("an instance", torch.nn.Sequential(model))]
    for _, thing in things:
        assert serve(thing.step if isinstance(thing, Engine) else thing, 3)
    return things


@pytest.fixture(scope="module")
def spawned() -> Iterator[Any]:
    """Two spawned workers, started once: they import torch, which takes longer than all that they are asked."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        yield pool


def test_a_spawned_worker_gets_forwards_without_graphs_and_counts(spawned: Any) -> None:
    """Functions, engines and models are sent to a spawned worker; there they warm up and capture anew.

    (H77, GrahamDumpleton/wrapt#158)
    """
    for name, thing in used():
        told = spawned.apply_async(served_elsewhere, (thing, name)).get(LIMIT)
        assert (True, {"warmup": 1, "graph": 3}, {2: 1}) == told, name


def test_a_decorated_function_is_the_work_of_a_spawned_pool(spawned: Any) -> None:
    """The decorated function itself is what a pool maps (H77, GrahamDumpleton/wrapt#86)."""
    batches = [rows() for _ in range(4)]
    found = spawned.map(double, batches)
    assert all(torch.equal(x * 2, y) for x, y in zip(batches, found, strict=True))


def test_weights_go_with_the_module_to_a_spawned_worker(spawned: Any) -> None:
    """The worker's module has the weights that were sent, and its own from then on.

    (H77, GrahamDumpleton/wrapt#102)
    """
    model = recorded(Doubling().eval(), name="an instance")
    assert serve(model, 3)
    model.factor.fill_(5.0)
    data = pickle.dumps(model)
    assert [5.0] * 3 == spawned.apply_async(factors_after_a_change, (data,)).get(LIMIT)
    assert [5.0] * 3 == model.factor.tolist()


def factors_after_a_change(data: bytes) -> list[float]:
    module = pickle.loads(data)
    with torch.inference_mode():
        before = module.factor.tolist()
        for _ in range(3):
            module(rows())
        module.factor.fill_(0.0)
        assert torch.equal(torch.zeros(2, 3), module(rows()))
    return list(before)


# -- torch.distributed -----------------------------------------------------------------------------------------------


def join(path: str, rank: int, size: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=LIMIT)
    )


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    join(str(tmp_path / "store"), 0, 1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", FORMS)
def test_nothing_is_captured_in_traffic_where_ranks_may_differ(make: Make) -> None:
    """With a process group, calls are eager with reason distributed: one rank capturing alone would hang the others.

    (H55, vllm-project/vllm#25906)
    """
    _owner, forward = make()
    assert serve(forward, 4)
    assert {"distributed": 4} == counts(forward.snapshot())
    assert {} == forward.snapshot().captures
    assert 0.0 == forward.snapshot().hit_rate


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("options", [{"lazy": True}, {"agree": lambda n: n}], ids=["lazy", "agree"])
def test_who_asks_for_it_captures_in_traffic(options: dict[str, Any]) -> None:
    """lazy=True and agree= say that the ranks go together (H55, vllm-project/vllm#25906)."""
    forward = recorded(lambda x: x * 2, name="asked for", **options)
    assert serve(forward, 4)
    assert {"warmup": 1, "graph": 3} == counts(forward.snapshot())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", FORMS)
def test_warm_up_is_allowed_with_a_process_group(make: Make) -> None:
    """warmup() runs on all ranks alike, so it may capture; its graphs serve (H55, sgl-project/sglang#6092)."""
    _owner, forward = make()
    assert (2, 4, 8) == forward.warmup(lambda n: ((rows(n),), {})).captured
    assert serve(forward, 3)
    assert serve(forward, 1, 3)
    assert {"graph": 3, "no_exact_bucket": 1} == counts(forward.snapshot())


@pytest.mark.usefixtures("group")
def test_after_warm_up_a_new_signature_is_not_captured() -> None:
    """A kind of call that warmup() did not see stays eager on every rank (H55, vllm-project/vllm#25906)."""
    forward = recorded(lambda x: x * 2, name="new signature")
    forward.warmup(lambda n: ((rows(n),), {}))
    for _ in range(3):
        forward(rows().double())
    assert {"signature": 3} == counts(forward.snapshot())


def test_graphs_from_before_the_group_go_on_serving_and_no_new_ones_come(tmp_path: Path) -> None:
    """A group that is formed later stops captures, not replays (H55, vllm-project/vllm#25906)."""
    forward = recorded(lambda x: x * 2, name="formed later")
    assert serve(forward, 3)
    join(str(tmp_path / "store"), 0, 1)
    try:
        assert serve(forward, 2)
        assert serve(forward, 3, 4)
        assert {"warmup": 1, "graph": 4, "distributed": 3} == counts(forward.snapshot())
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_after_the_group_is_gone_captures_come_again() -> None:
    """A reason that has passed is not remembered: without the group the forward warms up and captures.

    (H55, vllm-project/vllm#25906)
    """
    forward = recorded(lambda x: x * 2, name="group is gone")
    assert serve(forward, 3)
    dist.destroy_process_group()
    assert serve(forward, 4)
    assert 3 <= forward.snapshot().graph_calls


SIZES = ((3, 5), (3, 5), (4, 8), (1, 2), (2, 1), (8, 9), (1, 1))


def a_rank(rank: int, path: str) -> list[Any]:
    """One of two ranks: a forward whose size is agreed by an all-reduce, and one that nobody agreed on."""
    torch.set_num_threads(1)
    join(path, rank, 2)
    step, able = [0], [True]

    def largest(size: int) -> int | None:
        # One number carries both: a rank that cannot asks for more than there is.
        vote = torch.tensor([size if able[0] else 1 << 30])
        dist.all_reduce(vote, dist.ReduceOp.MAX)
        return None if vote.item() == 1 << 30 else int(vote)

    forward = recorded(lambda x: x * 2, pad="repeat", agree=largest, name="agreed")
    refused = recorded(lambda x: x * 2, name="alone")
    right, paths = True, []
    with torch.inference_mode():
        for _ in range(2):
            right &= serve(refused, 2)
        forward.warmup(lambda n: ((rows(n),), {}))
        for step[0], sizes in enumerate(SIZES):
            # In the last step the second rank cannot.
            able[0] = not (rank == 1 and step[0] == len(SIZES) - 1)
            before = forward.snapshot()
            right &= serve(forward, 1, sizes[rank])
            (row,) = (forward.snapshot() - before).rows
            paths.append((row.batch_size, row.bucket, row.reason and str(row.reason)))
    dist.barrier()
    dist.destroy_process_group()
    return [right, counts(refused.snapshot()), paths]


def test_two_ranks_agree_by_an_all_reduce(spawned: Any, tmp_path: Path) -> None:
    """Two processes choose one bucket per step and keep their own sizes; one that cannot makes both eager.

    (H55, vllm-project/vllm#25906)
    """
    # Each waits for the other, so neither worker can take both.
    runs = [spawned.apply_async(a_rank, (rank, str(tmp_path / "store"))) for rank in range(2)]
    one, other = (run.get(LIMIT) for run in runs)
    served = [(8, None), (8, None), (8, None), (2, None), (2, None), (None, "batch_too_large"), (None, "rank_vote")]
    for rank, told in enumerate((one, other)):
        right, alone, paths = told
        assert right
        assert {"distributed": 4} == alone
        assert served == [tuple(path[1:]) for path in paths]
        assert [sizes[rank] for sizes in SIZES] == [path[0] for path in paths]


def reduced(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x * 2)
    return torch.cat(parts, dim=1)


def functional(x: torch.Tensor) -> torch.Tensor:
    return all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def collective(forward: Callable[..., Any], rank: int, path: str, size: int) -> tuple[bool, dict[str, int]]:
    """In a process of its own: whether a forward with a collective inside is right, and what served it."""
    join(path, rank, size)
    graphed = recorded(forward, agree=lambda n: n, name="collective")
    right = True
    with torch.no_grad():
        for _ in range(6):
            x = torch.full((2, 3), float(rank + 1))
            right &= torch.equal(forward(x), graphed(x))
    dist.barrier()
    return right, counts(graphed.snapshot())


@pytest.mark.parametrize("forward", [reduced, gathered, functional])
def test_a_collective_inside_a_forward_is_right_under_the_recorder(forward: Callable[..., Any], tmp_path: Path) -> None:
    """A collective works on another thread: it is repeated rightly, or its forward stays eager.

    (H55, vllm-project/vllm#25906)
    """
    right, told = in_child(lambda: collective(forward, 0, str(tmp_path / "store"), 1))
    assert right, told


def test_a_collective_between_two_ranks_is_right_under_the_recorder(tmp_path: Path) -> None:
    """Two ranks that add their tensors up get the sum at each call (H55, vllm-project/vllm#25906)."""
    at = str(tmp_path / "store")
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda rank: in_child(lambda: collective(reduced, rank, at, 2)), range(2)))
    assert [True, True] == [right for right, _ in found], found
