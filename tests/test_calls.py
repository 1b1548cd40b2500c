from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphprobe.calls import Call, Describer
from graphprobe.errors import ConfigError
from graphprobe.options import Options
from graphprobe.signature import Caller


def forward(x: Any, y: Any = None, cache: Any = None, **more: Any) -> None: ...


def describer(function: Callable[..., Any] = forward, **options: Any) -> Describer:
    return Describer(Options([2, 4], **options), Caller(function, owned=False))


def rows(n: int, *shape: int) -> torch.Tensor:
    return torch.zeros(n, *(shape or (3,)))


def dims(made: Describer, *args: Any, **kwargs: Any) -> dict[str, int | None]:
    """The batch dimension of each input as known with this call."""
    call = made.described(args, kwargs)
    return {item.path: item.dim for item in made.inputs(call)}


def test_leaves_and_tensors_stand_in_the_order_of_the_parameters() -> None:
    """Whatever the spelling: parameter order, then ``**`` as written, since a forward may iterate; paths as in code."""
    x, y, b, a = rows(2), rows(2), rows(2), rows(2)
    call = describer().described((x,), {"b": [b], "a": {"k": a}, "y": y})
    assert ["x", "y", "b[0]", "a[k]"] == [leaf.path for leaf in call.leaves]
    assert [id(x), id(y), id(b), id(a)] == [id(t) for t in call.tensors]
    assert (1, "b", "a", "y") == call.spelling
    assert 2 == describer().described((x, y), {}).spelling


@pytest.mark.parametrize(
    ("options", "place", "size"),
    [
        ({}, (0, 0), 2),
        ({"batch": "y"}, (1, 0), 5),
        ({"batch": ("y", 1)}, (1, 1), 7),
        ({"batch": "y", "batch_dims": {"y": 1}}, (1, 1), 7),
        ({"batch_dims": {"x": 1}}, (0, 1), 3),
        ({"batch": lambda x, y: 4}, (0, 0), 4),
        ({"static": "x"}, (1, 0), 5),
    ],
)
def test_where_the_batch_size_stands(options: dict[str, Any], place: tuple[int, int], size: int) -> None:
    """The first tensor that is no static one, or what was declared."""
    call = describer(**options).described((rows(2), rows(5, 7)), {})
    assert (place, size) == (call.batch, call.rows)


def test_scalars_are_passed_over() -> None:
    """A tensor without the dimension is not the batch tensor; a call with none has no batch."""
    assert (1, 0) == describer().described((torch.tensor(1.0), rows(5)), {}).batch
    assert (None, 0) == (describer().described((torch.tensor(1.0), 3), {}).batch, describer().described((3,), {}).rows)


def test_units() -> None:
    """Requests are rows divided by their width, rounded up; a rest is ragged."""
    made = describer(unit="requests", tokens_per_request=4)
    assert [1, 1, 2, 2] == [made.units(n) for n in (1, 4, 5, 8)]
    assert [True, False, True, False] == [made.ragged(n) for n in (1, 4, 5, 8)]
    assert [5, False] == [describer(unit="tokens").units(5), describer().ragged(5)]


def test_what_follows_the_batch_is_learnt_from_two_sizes() -> None:
    """A tensor whose size was the batch's once is unsure, twice it follows; once it differed it never does."""
    made = describer()
    assert {"x": 0, "y": 0} == dims(made, rows(4), rows(4))
    call = made.described((rows(4), rows(4)), {})
    call.inputs = made.inputs(call)
    assert ["y"] == made.unsure(call)
    dims(made, rows(2), rows(2))
    assert [] == made.unsure(call)
    assert {"x": 0, "y": None} == dims(made, rows(3), rows(4))
    assert {"x": 0, "y": None} == dims(made, rows(4), rows(4))


def test_what_was_declared_is_sure() -> None:
    """batch_dims and a dict of pads say which tensors follow, and along which dimension."""
    made = describer(batch_dims={"y": 1}, pad={"x": 0, "cache": 0})
    call = made.described((rows(2), rows(3, 2), rows(2)), {})
    call.inputs = made.inputs(call)
    assert [("x", 0), ("y", 1), ("cache", 0)] == [(i.path, i.dim) for i in call.inputs]
    assert [] == made.unsure(call)


def test_rules_go_with_their_inputs() -> None:
    """Fill and narrow rules reach the input that they name; a tensor that does not follow is not filled."""
    made = describer(pad={"x": 9, "y": "repeat"}, narrow={"cache": (1, -1)})
    call = made.described((rows(2), rows(5), rows(6, 4)), {})
    found = {item.path: (item.fill, item.narrow) for item in made.inputs(call)}
    assert {"x": (9, None), "y": (None, None), "cache": (None, (1, -1))} == found
    call.inputs = made.inputs(call)
    assert (4,) == call.widths


def test_static_arguments_are_no_inputs() -> None:
    """What is passed by reference is not staged: a tensor is a leaf, another object is held."""
    held = object()
    made = describer(static=("y", "cache"))
    call = made.described((rows(2), rows(2), held), {})
    assert ["x"] == [item.path for item in made.inputs(call)]
    assert ["tensor", "static"] == [leaf.kind for leaf in call.leaves]
    assert [held] == list(call.held)


def test_opaque_arguments_are_found() -> None:
    """The first argument that cannot be looked into is named, None where there is none."""
    call = describer().described((rows(2), [object()]), {})
    assert "y[0]" == (call.opaque.path if call.opaque else None)
    assert None is describer().described((rows(2),), {}).opaque


def test_a_tensor_that_is_a_default() -> None:
    """A parameter left at a default that holds a tensor is held by reference, and is no input."""
    default = rows(3)

    def function(x: Any, table: Any = default) -> None: ...

    call = describer(function).described((rows(2),), {})
    assert (["x"], ["const" if k is None else k for k in ("tensor", "held")]) == (
        [leaf.path for leaf in call.leaves],
        [node.kind for node in call.nodes],
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"narrow": {"x": (0, 0)}}, "narrow['x'] names dimension 0"),
        ({"narrow": {"x": (5, 0)}}, "narrow['x'] names dimension 5"),
        ({"pad": {"y": 0.5}}, "pad['y'] is 0.5, which is no torch.int32"),
        ({"pad": {"y": 1 << 40}}, "which is no torch.int32"),
        ({"narrow": {"y": (1, float("nan"))}}, "narrow['y'] is nan"),
        ({"context": lambda: None}, "context() returned a NoneType"),
    ],
)
def test_rules_that_do_not_fit_the_tensors(options: dict[str, Any], words: str) -> None:
    """What speaks against a graph is said in words with the value."""
    call = describer(**options).described((rows(2), torch.zeros(2, 3, dtype=torch.int32)), {})
    assert words in call.problem


def asked(made: Describer) -> Call:
    return made.described((rows(2),), {})


def test_callables_are_asked_once() -> None:
    """phase, batch and agree are called once per description; answers that were given are not asked for again."""
    calls: list[str] = []

    def note(name: str, answer: Any) -> Any:
        calls.append(name)
        return answer

    made = describer(
        phase=lambda x: note("phase", "verify"), batch=lambda x: note("batch", 2), agree=lambda n: note("agree", n + 2)
    )
    assert made.varies
    call = asked(made)
    assert (2, "verify", 4) == (call.rows, call.phase, call.agreed)
    assert ["batch", "phase", "agree"] == calls
    made.describe(made.caller.bind((rows(2),), {}), (rows(2),), {}, call.asked)
    assert 3 == len(calls)
    assert not describer().varies


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"phase": lambda x: "decoding"}, "phase must be one of"),
        ({"batch": lambda x: -1}, "batch must be at least 0, got -1"),
        ({"batch": lambda x: 1.5}, "batch must be a whole number"),
        ({"agree": lambda n: n - 1}, "agree(2) must be at least 2, got 1"),
    ],
)
def test_answers_outside_the_contract_raise(options: dict[str, Any], words: str) -> None:
    """A wrong answer of a callable is refused where it was given."""
    with pytest.raises(ConfigError) as caught:
        asked(describer(**options))
    assert words in str(caught.value)


def test_a_vote_against_a_graph() -> None:
    """None is an answer of agree."""
    assert None is asked(describer(agree=lambda n: None)).agreed
