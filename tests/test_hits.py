"""A call like the last one takes the short way; every other call must not."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphprobe
from graphprobe import plans
from graphprobe.graphed import capture
from graphprobe.reasons import FallbackReason
from tests.helpers import counts

pytestmark = pytest.mark.usefixtures("own_forwards")


def recorded(function: Callable[..., Any], **options: Any) -> Any:
    return capture(function, **{"buckets": [2, 4], "backend": "recorder", **options})


def rows(size: int) -> torch.Tensor:
    return torch.randn(size, 3)


def short(forward: Any) -> bool:
    """Whether the next call like the last one takes the short way."""
    return forward.__call__.__qualname__.startswith("hit.")


def warm(forward: Any, *sizes: int) -> None:
    """Two calls of each size, the second of which captures, and a third one."""
    for size in sizes:
        for _ in range(3):
            forward(rows(size))


def test_a_call_like_the_last_takes_the_short_way() -> None:
    """From the second replay on; its results and counts are those of the long one."""
    forward = recorded(lambda x: x * 2)
    with torch.no_grad():
        warm(forward, 2)
        assert short(forward)
        for _ in range(200):
            x = rows(2)
            assert torch.equal(x * 2, forward(x))
    assert {"warmup": 1, "graph": 202} == counts(forward)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda f, x: f(torch.randn(3, 3)), "no_exact_bucket"),
        (lambda f, x: f(x.double()), "warmup"),
        (lambda f, x: f(x=x), None),
        (lambda f, x: f(x.t().contiguous().t()), "warmup"),
    ],
    ids=["another size", "another dtype", "by name", "another layout"],
)
def test_a_call_that_is_not_like_the_last_is_dispatched(change: Any, reason: str | None) -> None:
    """Each is served as if there were no short way, and the next plain call is right again."""
    forward = recorded(lambda x: x * 2)
    with torch.no_grad():
        warm(forward, 2)
        x = rows(2)
        assert torch.allclose(change(forward, x).float()[:2], x * 2) or reason == "no_exact_bucket"
        assert torch.equal(x * 2, forward(x))
    found = counts(forward)
    assert reason is None or 1 <= found[reason]


def test_the_short_way_ends_with_the_mode_it_was_found_in() -> None:
    """Grad mode, inference mode and a function mode are compared at each call."""
    forward = recorded(lambda x: x * 2)
    with torch.no_grad():
        warm(forward, 2)
    x = rows(2)
    assert torch.equal(x * 2, forward(x))
    with torch.inference_mode():
        assert torch.equal(x * 2, forward(x))
    with torch.no_grad(), torch.device("cpu"):
        assert torch.equal(x * 2, forward(x))
    assert 3 <= sum(n for name, n in counts(forward).items() if name != "graph")


def test_sizes_that_alternate_are_all_served_by_graphs() -> None:
    """Each change of size gives the short way to the other route."""
    forward = recorded(lambda x: x + 1)
    with torch.no_grad():
        warm(forward, 2, 4)
        for size in (2, 4, 4, 2, 2, 2, 4) * 20:
            x = rows(size)
            assert torch.equal(x + 1, forward(x))
    assert {"warmup": 2, "graph": 144} == counts(forward)


def test_what_was_kept_of_the_short_way_serves_nothing_after_a_reset() -> None:
    """A bound method, say: it goes to the forward as it is now, and keeps no graph alive."""

    class Engine:
        def __init__(self) -> None:
            self.weight = torch.ones(3)

        @capture(buckets=[2], backend="recorder")
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    engine = Engine()
    with torch.no_grad():
        for _ in range(4):
            engine.step(rows(2))
        kept = engine.step
        assert short(kept)
        (graph,) = [c.graph for s in kept._graphs.captures.signatures for c in s.graphs.values()]
        gone = weakref.ref(graph)
        del graph
        engine.step.reset()
        assert gone() is None
        x = rows(2)
        assert torch.equal(x, kept(x))
    assert {"graph": 3, "warmup": 2} == counts(kept)


@pytest.mark.parametrize("switch", ["enabled", "weight", "ignore"])
def test_the_short_way_obeys(switch: str) -> None:
    """Graphs that are switched off, a weight that is replaced, a call that is not to be counted."""
    held = [torch.ones(3)]
    forward = recorded(lambda x: x * held[0])
    with torch.no_grad():
        warm(forward, 2)
        before, x = counts(forward), rows(2)
        if switch == "enabled":
            forward.enabled = False
        elif switch == "weight":
            held[0] = torch.full((3,), 5.0)
        else:
            with graphprobe.ignore():
                assert torch.equal(x, forward(x))
            assert before == counts(forward)
            return
        assert torch.equal(x * held[0], forward(x))
    reason = FallbackReason.DISABLED if switch == "enabled" else FallbackReason.STATIC_MOVED
    assert 1 == counts(forward)[reason]


def test_a_module_that_trains_leaves_the_short_way() -> None:
    """Its mode is compared at each call."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).eval()
    recorded(module)
    with torch.no_grad():
        warm(module.forward, 2)
        assert short(module.forward)
        module.train()
        module(rows(2))
        module.eval()
    assert 1 == counts(module.forward)["training"]


def test_another_thread_may_take_the_short_way_too() -> None:
    """Calls of two threads exclude one another: every result is its own call's."""
    forward, wrong = recorded(lambda x: x * 2, outputs="clone"), []

    def work() -> None:
        with torch.no_grad():
            for _ in range(300):
                x = rows(2)
                if not torch.equal(x * 2, forward(x)):
                    wrong.append(x)

    with torch.no_grad():
        warm(forward, 2)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert {"warmup": 1, "graph": 1202} == counts(forward)


def test_wrapper_and_graphs_go_without_the_collector() -> None:
    """The short way leads to no cycle."""
    gc.collect()
    gc.disable()
    try:
        forward = recorded(lambda x: x * 2)
        with torch.no_grad():
            warm(forward, 2)
        assert short(forward)
        (graph,) = [c.graph for s in forward._graphs.captures.signatures for c in s.graphs.values()]
        gone = [weakref.ref(forward), weakref.ref(graph)]
        del forward, graph
        assert [None, None] == [ref() for ref in gone]
    finally:
        gc.enable()


def test_static_inputs_are_handed_out_and_what_is_written_there_is_read() -> None:
    """By argument, cut to the batch; passed as they are they are copied nowhere."""
    forward = recorded(lambda x, y: x * 2 + y, pad="zeros")
    with torch.no_grad():
        forward.warmup(lambda n: ((torch.zeros(n, 3), torch.zeros(n, 1)), {}))
        for bucket, size in ((4, 4), (4, 3), (2, 2)):
            given = forward.inputs(bucket, size)
            assert ["x", "y"] == list(given)
            assert (size, 3) == given["x"].shape
            assert all(given[name] is forward.inputs(bucket, size)[name] for name in given)
            for value in (1.0, 4.0):
                given["x"].fill_(value)
                given["y"].fill_(10.0)
                assert torch.equal(torch.full((size, 3), 2 * value + 10), forward(**given))
    assert {"graph": 6} == counts(forward)


def test_static_inputs_are_plain_tensors_once_their_graph_is_gone() -> None:
    """They may be passed on, and what they hold is copied."""
    forward = recorded(lambda x: x * 2)
    with torch.no_grad():
        warm(forward, 2)
        (x,) = forward.inputs(2).values()
        forward.reset()
        for value in (1.0, 2.0, 3.0):
            x.fill_(value)
            assert torch.equal(torch.full((2, 3), 2 * value), forward(x))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((4,), "0 graphs of bucket 4"),
        ((2, 1), "batch_size 1 is not served by bucket 2"),
        ((2, 3), "batch_size 3 is not served by bucket 2"),
        ((2, 0), "batch_size"),
        ((True,), "bucket"),
        (("2",), "bucket"),
    ],
    ids=str,
)
def test_static_inputs_that_there_are_not(given: tuple[Any, ...], text: str) -> None:
    """The message says what was asked for."""
    forward = recorded(lambda x: x * 2)
    with torch.no_grad():
        warm(forward, 2)
    with pytest.raises(graphprobe.ConfigError, match=text):
        forward.inputs(*given)


def test_static_inputs_of_two_kinds_of_calls_are_refused() -> None:
    """Which of the two is meant cannot be told."""
    forward = recorded(lambda x: x * 2)
    with torch.no_grad():
        warm(forward, 2)
        for _ in range(3):
            forward(rows(2).double())
    with pytest.raises(graphprobe.ConfigError, match="2 graphs of bucket 2"):
        forward.inputs(2)


def test_static_inputs_passed_for_one_another_are_read_before_they_are_overwritten() -> None:
    """Swapped, one for both, and one row further: each argument is what it was when the call was made."""
    forward = recorded(lambda x, y: x * 10 + y, buckets=[4], outputs="clone")
    with torch.no_grad():
        for _ in range(3):
            forward(rows(4), rows(4))
        x, y = forward.inputs(4).values()
        for given in (
            lambda: (y, x),
            lambda: (x, x),
            lambda: (rows(4), x),
            lambda: (y.flip(0), y),
            lambda: (y, y[0:4]),
        ):
            x.copy_(rows(4))
            y.copy_(rows(4))
            a, b = given()
            want = a * 10 + b
            assert torch.equal(want, forward(a, b))
    assert 6 <= counts(forward)["graph"]


def test_pad_rows_are_filled_where_the_caller_wrote() -> None:
    """Rows that were written into the whole bucket never show up behind a smaller batch."""
    seen = torch.zeros(4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen[: len(x)].copy_(x[:, 0])
        return x * 1

    graphed = recorded(forward, buckets=[4], pad={"x": 7})
    with torch.no_grad():
        graphed.warmup(lambda n: ((torch.zeros(n, 3),), {}))
        for _ in range(3):
            graphed(rows(2))
        graphed.inputs(4)["x"].fill_(99)
        graphed.inputs(4, 2)["x"].fill_(1)
        graphed(graphed.inputs(4, 2)["x"])
    assert [1.0, 1.0, 7.0, 7.0] == seen.tolist()


@pytest.mark.parametrize("change", ["moved", "turned"])
def test_what_becomes_of_a_handed_out_tensor_leaves_the_graph_alone(change: str) -> None:
    """It is an alias: given other memory or another layout it is an argument like any other."""
    forward = recorded(lambda x: x * 2, buckets=[3])
    with torch.no_grad():
        warm(forward, 3)
        (x,) = forward.inputs(3).values()
        if change == "moved":
            x.data = torch.full((3, 3), 5.0)
        else:
            x.copy_(rows(3))
            x.t_()
        assert torch.equal(x * 2, forward(x))
        fresh = rows(3)
        assert torch.equal(fresh * 2, forward(fresh))


def test_kinds_of_calls_beyond_the_limit_are_switched_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more structures than are kept the last one still has its graphs in reach."""
    monkeypatch.setattr(plans, "MOST", 1)
    forward = recorded(lambda x, scale: x * scale, buckets=[2])
    with torch.no_grad():
        for scale in (2.0, 3.0):
            for _ in range(4):
                forward(rows(2), scale)
        before = counts(forward)["graph"]
        forward.enabled = False
        for scale in (3.0, 2.0):
            forward(rows(2), scale)
    assert (before, 2) == (counts(forward)["graph"], counts(forward)["disabled"])


def test_a_call_slot_that_outlives_its_wrapper_says_so() -> None:
    """What the slot holds keeps no wrapper alive."""
    forward = recorded(lambda x: x * 2)
    with torch.no_grad():
        warm(forward, 2)
        kept = forward.__call__
        del forward
        with pytest.raises(ReferenceError, match="keep it, not its __call__"):
            kept(torch.zeros(3, 3))


def test_a_fill_that_calls_the_forward_again_leaves_the_call_around_it_alone() -> None:
    """The inner call is served elsewhere: the static inputs are the outer one's until it has replayed."""
    inner: list[bool] = []
    inside: list[bool] = []

    def fill(pad: torch.Tensor, source: torch.Tensor) -> None:
        pad.zero_()
        if not inside:
            inside.append(True)
            x = rows(3)
            inner.append(torch.equal(x * 2, forward(x)))
            inside.clear()

    forward = recorded(lambda x: x * 2, buckets=[4], pad={"x": fill})
    with torch.no_grad():
        forward.warmup(lambda n: ((torch.zeros(n, 3),), {}))
        for _ in range(12):
            x = rows(3)
            assert torch.equal(x * 2, forward(x))
    assert len(inner) > 5
    assert all(inner)


def test_a_fill_that_replaces_what_the_graph_reads_is_not_followed_by_a_replay() -> None:
    """The call that finds it is eager, on the new weight."""
    held = [torch.ones(3)]

    def fill(pad: torch.Tensor, source: torch.Tensor) -> None:
        pad.zero_()
        if float(source[0, 0]) == 5.0:
            held[0] = torch.full((3,), 7.0)

    forward = recorded(lambda x: x * held[0], buckets=[4], pad={"x": fill})
    with torch.no_grad():
        forward.warmup(lambda n: ((torch.zeros(n, 3),), {}))
        for _ in range(4):
            forward(rows(3))
        assert short(forward)
        x = torch.full((3, 3), 5.0)
        assert torch.equal(torch.full((3, 3), 35.0), forward(x))
    assert 1 == counts(forward)["static_moved"]
