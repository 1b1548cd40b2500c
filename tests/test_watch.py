from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from graphprobe.errors import CaptureError
from graphprobe.operators import writes_of
from graphprobe.watch import Pointers, Watch, follow

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


def test_reads_from_outside() -> None:
    """A tensor that is neither staged nor made inside is remembered once; staged ones, results and views are not."""
    x, w = torch.ones(2, 3), torch.ones(3, 3)
    watch = Watch([x], torch.device("cpu"))
    with watch:
        y = x @ w
        (y + w[0]).sum()
        x @ w
    assert [id(w)] == [id(t) for t in watch.living()]


def test_where_a_tensor_lies() -> None:
    """Staged by its buffer, through views too; outside where it was before; inside where an operator made it."""
    x, other = torch.ones(2, 3), torch.ones(2)
    watch = Watch([other, x], torch.device("cpu"))
    w = torch.ones(3)
    with watch:
        made = x * w
        view = made[0]
    assert (1, 1, None) == (watch.staged(x), watch.staged(x[:1]), watch.staged(w))
    assert [False, True, False, False] == [watch.outside(t) for t in (x, w, made, view)]


def test_writes() -> None:
    """A write to an input is known by its index, one outside by its operator, one to a result is nobody's business."""
    x, y, cache = torch.zeros(2), torch.zeros(2), torch.zeros(4)
    watch = Watch([x, y], torch.device("cpu"))
    with watch:
        y[:1].add_(1)
        cache[2:].copy_(x)
        (x + 1).mul_(2)
    assert {1} == watch.written
    assert ["aten.copy_.default"] == watch.writes_outside


def test_a_write_through_out_is_a_write() -> None:
    """``out=`` and foreach operators write, too, says their schema."""
    x, out = torch.ones(2), torch.zeros(2)
    watch = Watch([x, out], torch.device("cpu"))
    with watch:
        torch.add(x, x, out=out)
        torch._foreach_add_([x], 1.0)
    assert {0, 1} == watch.written
    assert [id(out)] == [id(t) for t in writes_of(aten.add.out, (x, x), {"out": out})]


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.item(),
        lambda x: x * (2 if x.sum() > 0 else 3),
        lambda x: torch.nonzero(x),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x[x > 0],
        lambda x: torch.unique(x),
        lambda x: torch.equal(x, x),
        lambda x: int(x.argmax()),
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_what_the_host_would_have_to_read_is_refused(forward: Any) -> None:
    """A value or a shape that depends on data cannot be in a graph; the message has file and line of the forward."""
    x = torch.ones(1)
    with pytest.raises(CaptureError, match=r"on the host.*test_watch\.py:\d+"), Watch([x], torch.device("cpu")):
        forward(x)


def test_randomness_is_noted() -> None:
    """A forward that draws random numbers is known as such."""
    x = torch.ones(2)
    plain, random = Watch([x], torch.device("cpu")), Watch([x], torch.device("cpu"))
    with plain:
        x + 1
    with random:
        torch.rand_like(x)
    assert (False, True) == (plain.random, random.random)


def test_operators_are_counted() -> None:
    """One per operator that was dispatched."""
    x = torch.ones(2)
    watch = Watch([x], torch.device("cpu"))
    with watch:
        (x + 1).sin()
    assert 2 == watch.operators


def test_a_tensor_of_another_device_is_refused() -> None:
    """A CPU value that a graph of another device reads from outside would be frozen."""
    outside = torch.ones(2)
    with pytest.raises(CaptureError, match="its value would be frozen"), Watch([], torch.device("cuda")):
        outside.sin()


def test_a_tensor_that_is_let_go_is_noticed_at_once() -> None:
    """The weak reference calls back when the owner replaces the tensor, without garbage collection."""
    holder, lost = {"cache": torch.zeros(2), "table": torch.zeros(2)}, []
    refs = follow([holder["cache"], holder["table"]], lambda: lost.append("lost"))
    gc.disable()
    try:
        holder["table"].add_(1)
        assert [] == lost
        holder["cache"] = torch.zeros(2)
        assert ["lost"] == lost
    finally:
        gc.enable()
    assert 2 == len(refs)


def test_storage_that_was_replaced_is_found() -> None:
    """``data =`` leaves the tensor and changes its address; its shape is named. A dead tensor is not asked."""
    weight, head = torch.nn.Parameter(torch.zeros(2, 5)), torch.zeros(3)
    pointers = Pointers([weight, head])
    weight.add_(1)
    assert None is pointers.moved()
    del head
    assert None is pointers.moved()
    weight.data = torch.zeros(2, 5)
    assert (2, 5) == pointers.moved()


def test_lists_of_tensors_are_read() -> None:
    """Operators that take lists read each member."""
    x, a, b = torch.ones(2), torch.ones(2), torch.ones(2)
    watch = Watch([x], torch.device("cpu"))
    with watch:
        torch.cat([x, a, b])
    assert {id(a), id(b)} == {id(t) for t in watch.living()}
