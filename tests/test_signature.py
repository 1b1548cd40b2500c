from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any

import pytest
import torch

from graphprobe.signature import (
    Caller,
    Node,
    compile_guard,
    compile_picker,
    describe,
    dispatch_modes,
    identity,
    meta,
    order,
    traced,
)

Pair = collections.namedtuple("Pair", "left right")
X, Y = torch.zeros(2, 3), torch.ones(2, 3)


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    ids: torch.Tensor


class Bag(dict):  # type: ignore[type-arg]
    pass


class Opaque:
    pass


def key(value: Any) -> Any:
    return describe(value, "x").key


def picked(value: Any, other: Any) -> Any:
    """What the picker that was made for ``value`` finds in ``other``: tensors, or None."""
    pick = compile_picker([(describe(value, "x"), value, 0)])
    assert pick is not None
    return pick((other,), {})


def test_kinds() -> None:
    """Tensors are staged, plain values compared, containers opened, and anything else is opaque."""
    kinds = [describe(v, "x").kind for v in (X, torch.nn.Parameter(X), 3, None, "a", [X], (X,), {"a": X}, Batch(X))]
    assert ["tensor", "tensor", "const", "const", "const", "items", "items", "map", "fields"] == kinds
    assert "opaque" == describe(Opaque(), "x").kind
    assert "opaque" == describe(X.to_sparse(), "x").kind


def test_paths() -> None:
    """A leaf is named as the caller would write it."""
    node = describe({"a": [X, Batch(Y)]}, "x")
    assert ["x[a][0]", "x[a][1].ids"] == [leaf.path for leaf in node.leaves("tensor")]


def test_a_cyclic_container_ends() -> None:
    """A list that holds itself becomes opaque at some depth."""
    loop: list[Any] = [X]
    loop.append(loop)
    assert any(leaf.kind == "opaque" for leaf in describe(loop, "x").leaves("opaque"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True), (1, 1.0), (0.0, -0.0), (1.0, 2.0), ("a", b"a"), (Mode.FAST, Mode.SLOW), ((X,), [X]), ([X], [X, X]),
        ({"a": X}, {"b": X}), ({"a": X, "b": Y}, {"b": Y, "a": X}), (Pair(X, 1), (X, 1)), (Batch(X), Batch(X, 2.0)),
        (Batch(X), Frozen(X)), (slice(1), slice(2)), (slice(1, 2), slice(True, 2)), (None, 0),
        (torch.float32, torch.int64),
        (complex(0.0, 1), complex(-0.0, 1)), (1j, 1.0), (range(2), range(3)), ([], ()), (Bag(a=X), {"a": X}),
    ],
)  # fmt: skip
def test_different_calls_are_told_apart(one: Any, other: Any) -> None:
    """Values that a forward could treat differently differ by key, and the picker of one refuses the other."""
    assert key(one) != key(other)
    assert [None, None] == [picked(one, other), picked(other, one)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1), (float("nan"), float("nan")), ("ab", "".join(["a", "b"])), ([X, 1], [Y, 1]), ({"a": X}, {"a": Y}),
        (Pair(X, None), Pair(Y, None)), (Batch(X), Batch(Y)), (Frozen(X), Frozen(Y)), (slice(1, 2), slice(1, 2)),
        (1j, 1j), (Mode.FAST, Mode.FAST), (torch.Size([1]), torch.Size([1])), ((), ()),
    ],
)  # fmt: skip
def test_equal_calls_share(one: Any, other: Any) -> None:
    """Values that differ in nothing but their tensors have one key, and the picker finds the other's tensors."""
    assert key(one) == key(other)
    assert tuple(describe(other, "x").pick(other)) == picked(one, other)


def test_a_container_with_more_than_its_items_is_told_apart() -> None:
    """An attribute that is no item and no field counts: a forward may read it."""
    for plain, more in ((Bag(a=X), Bag(a=X)), (Batch(X), Batch(X))):
        more.extra = 1  # type: ignore[attr-defined, union-attr]
        assert key(plain) != key(more)
        assert None is picked(plain, more)


@pytest.mark.parametrize("wrong", [None, 3, X, {}, [X], {"a": X, "b": [X]}, {"b": [Y, 1]}])
def test_a_picker_survives_any_structure(wrong: Any) -> None:
    """Whatever comes in the place of a known structure, the picker answers None and does not raise."""
    assert None is picked({"a": X, "b": [Y, 1]}, wrong)


def test_no_picker_is_needed_for_tensors_alone() -> None:
    """Where the positional arguments are the tensors there is nothing to pick or to check."""
    node = describe(X, "x")
    assert None is compile_picker([(node, X, 0), (node, X, 1)])
    assert None is not compile_picker([(node, X, 1), (node, X, 0)])
    assert None is not compile_picker([(node, X, "x")])


def test_a_picker_reads_keywords_and_the_context() -> None:
    """Keywords are picked by name; the context is asked anew at each pick."""
    holder = [Batch(X)]
    node = describe(holder[0], "context", root=True)
    pick = compile_picker([(describe(Y, "y"), Y, "y")], (node, lambda: holder[0]))
    assert pick is not None
    holder[0] = Batch(Y)
    assert (X, Y) == pick((), {"y": X})
    holder[0] = Batch(Y, scale=2.0)
    assert None is pick((), {"y": X})
    assert None is pick((), {})


def test_by_reference() -> None:
    """A static tensor is a leaf of its own; another static object is the same while it consists of the same objects."""
    static = frozenset({"x"})
    assert "static" == describe(X, "x", static).kind
    one, other = Opaque(), Opaque()
    assert describe(one, "x", static).key == describe(one, "x", static).key
    assert describe(one, "x", static).key != describe(other, "x", static).key
    assert describe([one, other], "x", static).key == describe([one, other], "x", static).key
    assert describe([one, other], "x", static).key != describe([other, one], "x", static).key
    assert "const" == describe(None, "x", static).kind


def test_identity_knows_the_keys() -> None:
    """The same objects under other names are another dictionary."""
    one, other = Opaque(), Opaque()
    assert identity({"a": one, "b": other}) == identity({"a": one, "b": other})
    assert identity({"a": one, "b": other}) != identity({"a": other, "b": one})


def test_build() -> None:
    """A copy holds other tensors in the same places, in containers of its own; the original is untouched."""
    value = {"a": [X, 1], "b": Pair(X, "s"), "c": Frozen(X), "d": ["same"]}
    node = describe(value, "x")
    copy = node.build(value, iter([Y, Y, Y]))
    assert [id(Y)] * 3 == [id(t) for t in node.pick(copy)]
    assert [id(X)] * 3 == [id(t) for t in node.pick(value)]
    assert (1, "s") == (copy["a"][1], copy["b"].right)
    assert (["same"], False) == (copy["d"], copy["d"] is value["d"])
    assert [list, Pair, Frozen] == [type(copy[k]) for k in "abc"]


def test_bind_is_the_same_for_every_spelling() -> None:
    """Positional, keyword, mixed: the same names and values in parameter order, with the place of each."""

    def forward(x: Any, y: Any, *rest: Any, k: Any = 5, **more: Any) -> None: ...

    caller = Caller(forward, owned=False)
    assert [("x", 1, 0), ("y", 2, 1), ("k", 5, None)] == caller.bind((1, 2), {})
    assert [("x", 1, 0), ("y", 2, "y"), ("k", 5, None)] == caller.bind((1,), {"y": 2})
    assert [("x", 1, "x"), ("y", 2, "y"), ("k", 3, "k")] == caller.bind((), {"k": 3, "y": 2, "x": 1})
    assert [("x", 1, 0), ("y", 2, 1), ("rest[0]", 3, 2), ("k", 5, None), ("b", 7, "b"), ("a", 8, "a")] == caller.bind(
        (1, 2, 3), {"b": 7, "a": 8}
    )
    with pytest.raises(TypeError):
        caller.bind((), {"x": 1})


def test_an_owned_function_has_no_self() -> None:
    """The instance is no argument of a method, and a function without a signature takes anything."""

    def method(self: Any, x: Any) -> None: ...

    assert ["x"] == [p.name for p in Caller(method, owned=True).parameters]
    assert ["self", "x"] == [p.name for p in Caller(method, owned=False).parameters]
    assert ["args", "kwargs"] == [p.name for p in Caller(torch.add, owned=False).parameters]


def test_layout() -> None:
    """A dense permuted layout is known by its order; contiguous memory needs none; a view with holes has none."""
    assert None is order(torch.zeros(2, 3))
    assert (1, 0) == order(torch.zeros(3, 2).t())
    assert (0, 2, 3, 1) == order(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert None is order(torch.zeros(2, 6)[:, ::2])


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 4), torch.zeros(2, 3, 1), torch.zeros(3, 2).t(),
        torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False), torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3, device="meta"),
    ],
)  # fmt: skip
def test_what_a_graph_is_bound_to(other: torch.Tensor) -> None:
    """Type, dtype, device, rank, shape, layout, requires_grad: a difference in one is seen by meta and guard."""
    assert meta(X, frozenset({0})) != meta(other, frozenset({0}))
    guard = compile_guard((X,), {})
    assert (True, False) == (guard(torch.ones(2, 3)), guard(other))


def test_free_dimensions() -> None:
    """A dimension that is left open may differ, the others may not."""
    assert meta(X, frozenset({0})) == meta(torch.zeros(7, 3), frozenset({0}))
    guard = compile_guard((X,), {0: 1})
    assert (True, False) == (guard(torch.zeros(2, 1)), guard(torch.zeros(1, 3)))


def test_the_guard_sees_the_modes_of_the_thread() -> None:
    """Inference mode and autocast make another call of the same tensors."""
    guard = compile_guard((X,), {})
    assert guard(X)
    with torch.inference_mode():
        assert not guard(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not guard(X)
    assert guard(X)


def test_modes() -> None:
    """Grad mode, inference mode and autocast with its dtype are part of a signature."""
    seen = {dispatch_modes()}
    for mode in (
        torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16),
    ):  # fmt: skip
        with mode:
            seen.add(dispatch_modes())
    assert 5 == len(seen)


def test_an_outer_tool_is_seen() -> None:
    """A dispatch mode of somebody else watches operators, which a replay would hide from it."""
    from torch.utils.flop_counter import FlopCounterMode

    assert not traced()
    with FlopCounterMode(display=False):
        assert traced()
    assert not traced()


def test_a_node_is_small() -> None:
    """Leaves and branches of a constant are empty."""
    node = Node("const", "x", int, 3)
    assert ([], [node]) == (list(node.branches), list(node.leaves("const")))
