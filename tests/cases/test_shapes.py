"""Reports of group f: shapes, keywords, dtypes and containers of the arguments."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers import causes, counts, recorded, rows

pytestmark = pytest.mark.usefixtures("own_forwards", "both_modes")


# -- H47: the batch size is never the whole key ----------------------------------------------------------------------


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


@pytest.mark.parametrize("pad", [None, "repeat"])
@pytest.mark.parametrize("width", [513, 511, 100, 1])
def test_another_width_is_eager_and_says_what_differs(width: int, pad: Any) -> None:
    """After warm-up a batch that fits with another second dimension runs eagerly; argument and dimension are named.

    (H47, vllm-project/vllm#8068)
    """
    forward = recorded(total, buckets=[2, 4], pad=pad)
    forward.warmup(lambda bucket: ((rows(bucket, 512),), {}))
    for n in (2, 2, 3 if pad else 4):
        x = rows(n, width)
        assert torch.equal(total(x), forward(x))
    assert {"signature": 3} == counts(forward)
    assert f"`x` is torch.float32 [-1, {width}]" in causes(forward)
    assert "512" in causes(forward)
    x = rows(2, 512)
    assert torch.equal(total(x), forward(x))
    assert 1 == counts(forward)["graph"]


@pytest.mark.parametrize(
    "shape", [(2, 513), (2, 4, 128), (2,), (2, 1, 512), (2, 512, 1)], ids=lambda shape: "x".join(map(str, shape))
)
def test_a_lazy_forward_gives_each_shape_its_own_graph(shape: tuple[int, ...]) -> None:
    """Before the set is closed another shape warms up and is captured like the first (H47, vllm-project/vllm#8068)."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1).sum(1) if x.dim() > 1 else x * 2

    forward = recorded(plain, buckets=[2])
    for _ in range(3):
        for x in (rows(2, 512), torch.randn(shape)):
            assert torch.equal(plain(x), forward(x))
    assert {"graph": 4, "warmup": 2} == counts(forward)
    assert {2: 2} == forward.snapshot().captures


@pytest.mark.parametrize("second", ["argument", "list", "context"])
def test_the_width_of_a_second_input_counts(second: str) -> None:
    """A table of blocks that is one column wider misses the graph, wherever it stands (H47, vllm-project/vllm#8068)."""
    steps = types.SimpleNamespace(table=None)

    def plain(x: torch.Tensor, table: Any) -> torch.Tensor:
        return x + table.sum(1, keepdim=True)

    def taken(x: torch.Tensor, table: Any = None) -> torch.Tensor:
        return plain(x, {"argument": table, "list": table and table[0]}.get(second, steps.table))

    def call(forward: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        steps.table = table
        return forward(x, *{"argument": [table], "list": [[table]]}.get(second, []))

    if second == "argument":
        taken = plain
    options = {"context": lambda: steps} if second == "context" else {}
    forward = recorded(taken, buckets=[2], name=second, **options)
    for width in (512, 512, 512, 513, 512, 511, 513, 513):
        x, table = rows(2), rows(2, width)
        assert torch.equal(plain(x, table), call(forward, x, table))
    assert {"graph": 5, "warmup": 3} == counts(forward)


def test_a_declared_dynamic_width_is_filled() -> None:
    """(2, 100) meets the graph of (2, 512) where ``narrow=`` says so; (2, 513) does not (H47, vllm#8068)."""
    forward = recorded(total, buckets=[2], narrow={"x": (1, 0.0)})
    forward.warmup(lambda bucket: ((rows(bucket, 512),), {}))
    forward(rows(2, 99))
    for width in (100, 512, 1, 100, 513):
        x = rows(2, width)
        torch.testing.assert_close(forward(x), total(x))
    assert {"graph": 4, "signature": 1, "warmup": 1} == counts(forward)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_another_dtype_keeps_its_own_result(dtype: torch.dtype) -> None:
    """A batch of the captured shape in another dtype is not cast into the graph (H47, vllm-project/vllm#8068)."""
    forward = recorded(lambda x: x + x, buckets=[2])
    forward.warmup(lambda bucket: ((rows(bucket),), {}))
    x = (rows(2) * 3).to(dtype)
    for _ in range(3):
        result = forward(x)
        assert dtype is result.dtype
        assert torch.equal(x + x, result)
    assert {"signature": 3} == counts(forward)
    assert str(dtype) in causes(forward)


# -- H48: containers are inputs --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slots:
    x: torch.Tensor
    y: torch.Tensor


class Table(dict[str, torch.Tensor]):
    pass


class Stack(list[torch.Tensor]):
    pass


class Plain:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


def by_name(made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return made.x, made.y


def by_key(made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return made["x"], made["y"]


def by_place(made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(made)


Make = Callable[[torch.Tensor, torch.Tensor], Any]
Open = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]

STAGED: dict[str, tuple[Make, Open]] = {
    "list": (lambda x, y: [x, y], by_place),
    "tuple": (lambda x, y: (x, y), by_place),
    "dict": (lambda x, y: {"x": x, "y": y}, by_key),
    "dict by number": (lambda x, y: {0: x, 1: y}, lambda made: (made[0], made[1])),
    "ordered dict": (lambda x, y: collections.OrderedDict(x=x, y=y), by_key),
    "default dict": (lambda x, y: collections.defaultdict(list, x=x, y=y), by_key),
    "subclass of dict": (lambda x, y: Table(x=x, y=y), by_key),
    "namedtuple": (Pair, by_name),
    "dataclass": (Batch, by_name),
    "frozen dataclass": (Frozen, by_name),
    "dataclass with slots": (Slots, by_name),
    "list of tuples": (lambda x, y: [(x, y)], lambda made: made[0]),
    "dict of lists of dataclasses": (lambda x, y: {"a": [Batch(x, y)]}, lambda made: by_name(made["a"][0])),
    "four deep": (lambda x, y: [{"a": (Pair(x, y),)}], lambda made: by_name(made[0]["a"][0])),
    "beside constants": (lambda x, y: [1, None, x, "text", {"y": y}], lambda made: (made[2], made[4]["y"])),
    "max": (lambda x, y: torch.return_types.max((x, y)), lambda made: (made.values, made.indices)),
}

OPAQUE: dict[str, tuple[Make, Open]] = {
    "subclass of list": (lambda x, y: Stack([x, y]), by_place),
    "deque": (lambda x, y: collections.deque([x, y]), by_place),
    "object": (Plain, by_name),
    "namespace": (lambda x, y: types.SimpleNamespace(x=x, y=y), by_name),
    "mapping proxy": (lambda x, y: types.MappingProxyType({"x": x, "y": y}), by_key),
    "partial": (lambda x, y: functools.partial(by_place, (x, y)), lambda made: made()),
    "closure": (lambda x, y: lambda: (x, y), lambda made: made()),
    "array of objects": (lambda x, y: iter([x, y]), by_place),
}


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("kind", STAGED)
def test_tensors_in_containers_are_inputs(kind: str, keyword: bool) -> None:
    """Tensors inside a container are copied in at every call: new values give new results (H48, torchtitan#4432)."""
    make, opened = STAGED[kind]

    def plain(x: torch.Tensor, extra: Any) -> torch.Tensor:
        a, b = opened(extra)
        return x * 2 + a - b

    forward = recorded(plain, buckets=[2], name=f"{kind} {keyword}")
    for _ in range(5):
        x, extra = rows(2), make(rows(2), rows(2))
        result = forward(x, extra=extra) if keyword else forward(x, extra)
        assert torch.equal(plain(x, extra), result)
    assert {"graph": 4, "warmup": 1} == counts(forward)


@pytest.mark.parametrize("static", [False, True], ids=["plain", "static"])
@pytest.mark.parametrize("kind", OPAQUE)
def test_what_cannot_be_opened_is_never_a_constant(kind: str, static: bool) -> None:
    """A container that graphs cannot look into keeps such calls eager, with its name; passed by reference, a new
    one never meets the graph of an old one (H48, pytorch/torchtitan#4432)."""
    make, opened = OPAQUE[kind]

    def plain(x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return x * 2 + pair[0] - pair[1]

    options: dict[str, Any] = {"static": ("extra",)} if static else {}
    forward = recorded(lambda x, extra: plain(x, opened(extra)), buckets=[2], name=f"{kind} {static}", **options)
    for _ in range(5):
        x, pair = rows(2), (rows(2), rows(2))
        assert torch.equal(plain(x, pair), forward(x, make(*pair)))
    assert 0 == counts(forward).get("graph", 0)
    if not static:
        assert {"signature": 5} == counts(forward)
        assert "`extra" in causes(forward)


def test_the_call_of_the_report() -> None:
    """``f([(x, y)], extra={"m": m})`` with other values gives the other result (H48, pytorch/torchtitan#4432)."""
    forward = recorded(lambda pairs, extra: pairs[0][0] * pairs[0][1] + extra["m"], buckets=[2, 4], pad="repeat")
    forward.warmup(lambda n: (([(rows(n), rows(n))],), {"extra": {"m": rows(n)}}))
    for n in (2, 2, 4, 3, 1, 4):
        x, y, m = rows(n), rows(n), rows(n)
        assert torch.equal(x * y + m, forward([(x, y)], extra={"m": m}))
    assert {"graph": 6} == counts(forward)


def test_a_container_that_is_kept_and_refilled() -> None:
    """The same list, dict and object with new tensors inside is read afresh at each call (H48, torchtitan#4432)."""
    forward = recorded(lambda x, a, b, c: x + a[0] + b["y"] + c.y, buckets=[2])
    a, b, c = [rows(2)], {"y": rows(2)}, Batch(rows(2), rows(2))
    for _ in range(5):
        a[0], b["y"], c.y, x = rows(2), rows(2), rows(2), rows(2)
        assert torch.equal(x + a[0] + b["y"] + c.y, forward(x, a, b, c))
    assert {"graph": 4, "warmup": 1} == counts(forward)


@pytest.mark.parametrize(
    "other",
    [lambda x: [x], lambda x: [x, x, x], lambda x: (x, x), lambda x: [x, None], lambda x: [x, [x]], lambda x: [x, 1.0]],
    ids=["shorter", "longer", "tuple", "None inside", "deeper", "number inside"],
)
def test_another_structure_is_another_graph(other: Callable[[torch.Tensor], Any]) -> None:
    """A list that grew, shrank or holds something else never meets the graph of the first (H48, torchtitan#4432)."""

    def plain(items: Any) -> torch.Tensor:
        result = torch.zeros(2, 3)
        for place, item in enumerate(items):
            inner = item[0] if isinstance(item, list) else item
            result = result + (place + 1) * (inner if isinstance(inner, (torch.Tensor, float)) else 100)
        return result

    forward = recorded(plain, buckets=[2])
    for _ in range(4):
        for items in ([rows(2), rows(2)], other(rows(2))):
            assert torch.equal(plain(items), forward(items))
    assert {"graph": 6, "warmup": 2} == counts(forward)


# -- H49: a batch that is not dimension 0 ----------------------------------------------------------------------------


def rotated(x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return x + pos.sum(0)[:, None]


@pytest.mark.parametrize("pad", ["repeat", "zeros", {"x": 0, "pos": 7}], ids=str)
def test_positions_of_three_rows_are_padded_along_their_tokens(pad: Any) -> None:
    """Positions [3, tokens] are padded and cut along dimension 1, the rest along dimension 0 (H49, xllm#885)."""
    forward = recorded(rotated, buckets=[4, 8], pad=pad, batch_dims={"pos": 1})
    forward.warmup(lambda n: ((rows(n, 8), torch.zeros(3, n)), {}))
    for n in (2, 4, 3, 1, 8, 5, 3):
        x, pos = rows(n, 8), torch.randn(3, n)
        result = forward(x, pos)
        assert (n, 8) == tuple(result.shape)
        assert torch.equal(rotated(x, pos), result)
    assert {"graph": 7} == counts(forward)
    assert 2 + 1 + 3 + 3 + 1 == forward.snapshot().padding


def test_as_many_tokens_as_rows() -> None:
    """Three tokens with positions [3, 3]: the square one is padded along the declared dimension (H49, xllm#885)."""
    forward = recorded(rotated, buckets=[3, 4], pad="repeat", batch_dims={"pos": 1})
    forward.warmup(lambda n: ((rows(n, 8), torch.zeros(3, n)), {}))
    for n in (3, 4, 3, 2):
        x, pos = rows(n, 8), torch.randn(3, n)
        assert torch.equal(rotated(x, pos), forward(x, pos))
    assert {"graph": 4} == counts(forward)


def test_the_batch_read_along_its_own_dimension() -> None:
    """The argument that says the batch size may have it elsewhere, and a result follows it there (H49, xllm#885)."""
    forward = recorded(lambda pos: (pos * 2, pos.sum(0)), buckets=[2, 4], pad="repeat", batch=("pos", 1))
    forward.warmup(lambda n: ((torch.zeros(3, n),), {}))
    for n in (2, 3, 1, 4, 3):
        pos = torch.randn(3, n)
        doubled, summed = forward(pos)
        assert torch.equal(pos * 2, doubled)
        assert torch.equal(pos.sum(0), summed)
    assert {"graph": 5} == counts(forward)


def test_undeclared_positions_are_never_cut_by_chance() -> None:
    """Without the declaration positions [3, tokens] are no batch: not padded, and the results right (H49, #885)."""
    forward = recorded(rotated, buckets=[3, 4], pad="repeat")
    for n in (3, 3, 3, 4, 4, 4, 2, 2, 3, 4, 1):
        x, pos = rows(n, 8), torch.randn(3, n)
        assert torch.equal(rotated(x, pos), forward(x, pos))


def test_positions_in_containers_follow_their_declaration() -> None:
    """``batch_dims`` names a tensor inside a dict or a dataclass by its path (H49, xLLM-AI/xllm#885)."""
    forward = recorded(
        lambda x, extra: rotated(x, extra["pos"]), buckets=[4], pad="repeat", batch_dims={"extra[pos]": 1}
    )
    forward.warmup(lambda n: ((rows(n, 8), {"pos": torch.zeros(3, n)}), {}))
    forward(rows(3, 8), {"pos": torch.zeros(3, 3)})
    for n in (2, 3, 4, 1):
        x, pos = rows(n, 8), torch.randn(3, n)
        assert torch.equal(rotated(x, pos), forward(x, {"pos": pos}))
    assert {"graph": 4, "warmup": 1} == counts(forward)


# -- H50: no rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True], ids=["lazy", "warmed up"])
@pytest.mark.parametrize("pad", [None, "repeat", "zeros", {"x": 0}], ids=str)
def test_an_idle_rank_sends_no_rows(pad: Any, warm: bool) -> None:
    """A batch of zero rows gives eager's empty result under ``empty_batch``, and does not touch the hit rate.

    (H50, sgl-project/sglang#39899)
    """
    forward = recorded(lambda x: (x * 2, x.sum(1)), buckets=[2, 4], pad=pad)
    if warm:
        forward.warmup(lambda n: ((rows(n),), {}))
    for n in (0, 2, 0, 2, 0, 4, 2, 0):
        doubled, summed = forward(rows(n))
        assert ((n, 3), (n,)) == (tuple(doubled.shape), tuple(summed.shape))
    found = counts(forward)
    assert 4 == found["empty_batch"]
    assert 1.0 == forward.snapshot().hit_rate
    assert 0 not in forward.snapshot().captures


@pytest.mark.parametrize("kind", ["list", "dict", "dataclass", "namedtuple"])
def test_no_rows_in_a_container(kind: str) -> None:
    """An empty batch is seen inside a container as well (H50, sgl-project/sglang#39899)."""
    make, opened = STAGED[kind]
    forward = recorded(lambda extra: opened(extra)[0] + opened(extra)[1], buckets=[2], pad="repeat", name=kind)
    for n in (2, 2, 0, 2, 0):
        x, y = rows(n), rows(n)
        assert torch.equal(x + y, forward(make(x, y)))
    assert {"graph": 2, "warmup": 1, "empty_batch": 2} == counts(forward)


def test_a_forward_that_takes_the_last_row_raises_its_own_error() -> None:
    """ "Last index" of an empty batch is the forward's own error, which passes untouched; graphs go on serving.

    (H50, sgl-project/sglang#39899)
    """
    forward = recorded(lambda x: x - x[-1], buckets=[2])
    forward.warmup(lambda n: ((rows(n),), {}))
    with pytest.raises(IndexError):
        forward(rows(0))
    x = rows(2)
    assert torch.equal(x - x[-1], forward(x))
    assert {"graph": 1} == counts(forward)


def test_no_rows_by_the_word_of_a_callable() -> None:
    """A batch that ``batch=`` counts as zero rows is empty, although its tensor is not (H50, sglang#39899)."""
    forward = recorded(lambda x, lens: x * 2, buckets=[2], batch=lambda x, lens: sum(lens))
    for lens in ((1, 1), (1, 1), (0, 0), (1, 1)):
        x = rows(2)
        assert torch.equal(x * 2, forward(x, lens))
    assert 1 == counts(forward)["empty_batch"]


@pytest.mark.parametrize("shape", [(2, 0), (2, 0, 3), (2, 3, 0)], ids=lambda shape: "x".join(map(str, shape)))
def test_rows_without_columns_are_no_empty_batch(shape: tuple[int, ...]) -> None:
    """Two rows of width zero are a batch of two: captured, replayed, equal to eager (H50, sgl-project/sglang#39899)."""
    forward = recorded(lambda x, y: (x * 2, y + x.flatten(1).sum(1, keepdim=True)), buckets=[2])
    for _ in range(4):
        x, y = torch.randn(shape), rows(2)
        empty, same = forward(x, y)
        assert shape == tuple(empty.shape)
        assert torch.equal(y, same)
    assert {"graph": 3, "warmup": 1} == counts(forward)


def test_a_second_input_without_rows() -> None:
    """An optional input that is empty this time is another signature, not a captured one read at its end.

    (H50, sgl-project/sglang#39899)
    """

    def plain(x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        return x + (extra[-1] if len(extra) else 0)

    forward = recorded(plain, buckets=[2])
    for n in (2, 2, 0, 2, 0, 0, 2):
        x, extra = rows(2), rows(n)
        assert torch.equal(plain(x, extra), forward(x, extra))
    assert 3 <= counts(forward)["graph"]


# -- H51: keywords ---------------------------------------------------------------------------------------------------


def masked(x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
    y = x * scale
    return y if mask is None else y.masked_fill(mask, -1.0)


class Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        return masked(x, mask, scale)


class Engine:
    @recorded(buckets=[2], name="engine")
    def step(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        return masked(x, mask, scale)


def forms() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Name -> (the captured forward, its controls), made afresh."""

    def module() -> tuple[Any, Any]:
        graphed = recorded(Masked().eval(), buckets=[2])
        return graphed, graphed.forward

    def of_class() -> tuple[Any, Any]:
        graphed = recorded(type("Graphed", (Masked,), {"forward": Masked.forward}), buckets=[2])().eval()
        return graphed, graphed.forward

    def function() -> tuple[Any, Any]:
        graphed = recorded(masked, buckets=[2])
        return graphed, graphed

    def method() -> tuple[Any, Any]:
        engine = Engine()
        # A bound method keeps its engine.
        return engine.step, engine.step

    return {"function": function, "method": method, "module": module, "class": of_class}


FORMS = forms()


def mask(n: int = 2) -> torch.Tensor:
    return torch.rand(n, 3) > 0.5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("closed", [False, True], ids=["lazy", "warmed up"])
def test_a_mask_never_meets_the_maskless_graph(form: str, closed: bool) -> None:
    """Captured without a mask, called with one, and back: each gets its own result (H51, TransformerEngine#945)."""
    forward, controls = FORMS[form]()
    if closed:
        controls.warmup(lambda n: ((rows(n),), {}))
    for with_mask in (False, False, True, True, False, True):
        x, m = rows(2), mask() if with_mask else None
        assert torch.equal(masked(x, m), forward(x, mask=m) if with_mask else forward(x))
    wanted = {"graph": 3, "signature": 3} if closed else {"graph": 4, "warmup": 2}
    assert wanted == counts(controls)


@pytest.mark.parametrize("form", FORMS)
def test_every_spelling_of_a_call_is_one_key(form: str) -> None:
    """Keyword order, position or keyword, a default left out or written: one graph (H51, TransformerEngine#945)."""
    forward, controls = FORMS[form]()
    x, m = rows(2), mask()
    for _ in range(3):
        x, m = rows(2), mask()
        for order in itertools.permutations(({"x": x}, {"mask": m}, {"scale": 1.0})):
            assert torch.equal(masked(x, m), forward(**{k: v for part in order for k, v in part.items()}))
        for result in (
            forward(x, m),
            forward(x, mask=m),
            forward(x, m, 1.0),
            forward(mask=m, x=x),
            forward(x, m, scale=1.0),
        ):
            assert torch.equal(masked(x, m), result)
    assert {2: 1} == controls.snapshot().captures
    assert {"graph": 32, "warmup": 1} == counts(controls)


def test_none_written_out_is_the_default() -> None:
    """``mask=None`` and no mask are one graph (H51, NVIDIA/TransformerEngine#945)."""
    forward = recorded(masked, buckets=[2])
    for _ in range(3):
        x = rows(2)
        for result in (forward(x), forward(x, None), forward(x, mask=None), forward(x, None, 1.0)):
            assert torch.equal(x, result)
    assert {"graph": 11, "warmup": 1} == counts(forward)


@pytest.mark.parametrize("value", [2.0, -1.0, 0.0, True])
def test_a_keyword_that_is_no_tensor_is_part_of_the_key(value: Any) -> None:
    """Another number by keyword never meets the graph of the default (H51, NVIDIA/TransformerEngine#945)."""
    forward = recorded(masked, buckets=[2])
    for scale in (1.0, 1.0, 1.0, value, 1.0, value, value):
        x = rows(2)
        assert torch.equal(masked(x, None, scale), forward(x, scale=scale))
    assert {"graph": 5, "warmup": 2} == counts(forward)


def test_open_keywords_and_positions() -> None:
    """``*args`` and ``**kwargs`` are inputs by place and by name, in any order (H51, NVIDIA/TransformerEngine#945)."""

    def plain(x: torch.Tensor, *more: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        result = x
        for place, item in enumerate(more):
            result = result + (place + 2) * item
        return result + named.get("a", 0) - named.get("b", 0)

    forward = recorded(plain, buckets=[2])
    for _ in range(3):
        x, y, a, b = (rows(2) for _ in range(4))
        for args, kwargs in (
            ((x,), {}), ((x, y), {}), ((y, x), {}), ((x,), {"a": a}), ((x,), {"b": a}), ((x,), {"a": a, "b": b}),
            ((x,), {"b": b, "a": a}), ((x, y), {"a": a}), ((), {"x": x}), ((x, y, a), {}),
        ):  # fmt: skip
            assert torch.equal(plain(*args, **kwargs), forward(*args, **kwargs))
    assert 0 == counts(forward).get("signature", 0)
    assert 20 <= counts(forward)["graph"]


@pytest.mark.parametrize("other", ["keyword", "order", "position", "none"])
def test_open_keywords_of_another_name_never_meet(other: str) -> None:
    """A tensor under another name of ``**kwargs`` is another call, before and after warm-up (H51, #945)."""

    def plain(x: torch.Tensor, *more: torch.Tensor, **named: torch.Tensor | None) -> torch.Tensor:
        a, b = named.get("a"), named.get("b")
        y = x + 2 * sum(more)
        y = y if a is None else y + 3 * a
        return y if b is None else y - b

    for closed in (False, True):
        forward = recorded(plain, buckets=[2], name=f"{other} {closed}")
        if closed:
            forward.warmup(lambda n: ((rows(n),), {"a": rows(n), "b": rows(n)} if other == "order" else {"a": rows(n)}))
        for _ in range(3):
            x, a, b = rows(2), rows(2), rows(2)
            first = {"a": a, "b": b} if other == "order" else {"a": a}
            assert torch.equal(plain(x, **first), forward(x, **first))
            args: tuple[torch.Tensor, ...] = (x, a) if other == "position" else (x,)
            second = {"order": {"b": b, "a": a}, "position": {}, "keyword": {"b": a}, "none": {"a": a, "b": None}}[
                other
            ]
            assert torch.equal(plain(*args, **second), forward(*args, **second))
        assert 2 <= counts(forward)["graph"]


def test_keyword_only_and_positional_only() -> None:
    """Parameters that can be spelled one way only are told apart from keywords of the same name (H51, #945)."""

    def plain(x: torch.Tensor, /, y: torch.Tensor, *, z: torch.Tensor, **rest: torch.Tensor) -> torch.Tensor:
        return x + 2 * y + 3 * z + 4 * rest.get("x", 0)

    forward = recorded(plain, buckets=[2])
    for _ in range(3):
        x, y, z, other = (rows(2) for _ in range(4))
        assert torch.equal(plain(x, y, z=z), forward(x, y, z=z))
        assert torch.equal(plain(x, y, z=z), forward(x, z=z, y=y))
        assert torch.equal(plain(x, y, z=z, x=other), forward(x, y, z=z, x=other))
    assert {"graph": 7, "warmup": 2} == counts(forward)


def test_a_mask_that_only_some_calls_have_is_padded_with_them() -> None:
    """Padding holds for the calls with a mask and for those without (H51, NVIDIA/TransformerEngine#945)."""
    forward = recorded(masked, buckets=[2, 4], pad="repeat")
    for n in (2, 2, 4, 4, 3, 1, 3):
        x, m = rows(n), mask(n)
        assert torch.equal(masked(x, m), forward(x, mask=m))
        assert torch.equal(x, forward(x))
    assert {"graph": 10, "warmup": 4} == counts(forward)


def test_a_default_that_is_a_tensor_is_read_where_it_is() -> None:
    """A tensor as a default is followed like any from outside: written in place, the next call sees it (H51, #945)."""
    default = torch.ones(3)

    def plain(x: torch.Tensor, bias: torch.Tensor = default) -> torch.Tensor:
        return x + bias

    forward = recorded(plain, buckets=[2])
    for step in range(5):
        default.fill_(step)
        x, other = rows(2), rows(1)[0]
        assert torch.equal(x + step, forward(x))
        assert torch.equal(x + other, forward(x, other))
    assert {"graph": 8, "warmup": 2} == counts(forward)
