"""Reports of group h: adapters, and weights that are written, replaced or moved after a capture."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.helpers import causes, counts, recorded, rows

pytestmark = pytest.mark.usefixtures("own_forwards")


BOUND = 64
"""Calls of one batch size within which a change that no weak reference tells of is noticed (docs/limits.md)."""


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def fresh(*shape: int) -> torch.Tensor:
    """A tensor as a checkpoint has it: from outside inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.randn(*shape)


def weight(*shape: int) -> torch.nn.Parameter:
    with torch.inference_mode(False):
        return torch.nn.Parameter(fresh(*shape), requires_grad=False)


# -- the model under test --------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A linear layer with adapters, switched as LoRA libraries do: by plain attributes."""

    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = weight(3, 3)
        self.register_buffer("shift", fresh(3))
        self.act = torch.nn.Tanh()
        self.down = torch.nn.ParameterDict({name: weight(3, 2) for name in "ab"})
        self.up = torch.nn.ParameterDict({name: weight(2, 3) for name in "ab"})
        self.active: str | None = None
        self.names: list[str] = []
        self.scale = 1.0
        self.scaling = {"a": 1.0, "b": 1.0}
        self.merged: set[str] = set()
        self.config = types.SimpleNamespace(factor=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3] in and out."""
        y = x.to(self.weight.dtype) @ self.weight + self.shift
        for name in [self.active] if self.active else self.names:
            if name not in self.merged:
                y = y + self.scaling[name] * (y @ self.down[name]) @ self.up[name]
        y = self.act(y * self.scale * self.rate * self.config.factor)
        return y * 2 if self.training else y


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])
        self.adapters = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3] in and out."""
        for layer in self.layers:
            x = layer(x)
        return x if self.adapters else x * 3


def model() -> Model:
    with torch.inference_mode(False):
        return Model().eval()


class Engine:
    def __init__(self, inner: Any) -> None:
        self.model = inner

    @recorded(buckets=[2, 4], name="engine")
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


SERVED: list[Any] = []
"""Models that a captured function reaches through a global."""


def through_a_global(x: torch.Tensor) -> torch.Tensor:
    return SERVED[0](x)


@dataclasses.dataclass
class Captured:
    """A captured forward: its call, its controls, the model behind it, and eager's answer of this moment."""

    call: Callable[[torch.Tensor], torch.Tensor]
    controls: Any
    model: Model
    closed: bool
    keep: Any = None

    def start(self, calls: int = 3) -> None:
        """Capture the model as it is now, and serve."""
        self.controls.reset()
        if self.closed:
            self.controls.warmup(lambda n: ((rows(n),), {}))
        self.serve(calls, 2, 4)

    def right(self, n: int = 2) -> bool:
        x = rows(n)
        expected = Model.forward(self.model, x)
        return torch.equal(expected, self.call(x))

    def serve(self, calls: int, *sizes: int) -> None:
        for _ in range(calls):
            for n in sizes or (2,):
                self.call(rows(n))


def captured(form: str, closed: bool = False, **options: Any) -> Captured:
    inner = model()
    if form == "module":
        graphed = recorded(inner, buckets=[2, 4], **options)
        made = Captured(graphed, graphed.forward, inner, closed)
    elif form == "class":
        kind = recorded(buckets=[2, 4], **options)(type("Graphed", (Model,), {"forward": Model.forward}))
        with torch.inference_mode(False):
            inner = kind().eval()
        made = Captured(inner, inner.forward, inner, closed)
    elif form == "method":
        engine = Engine(inner)
        made = Captured(engine.step, engine.step, inner, closed, engine)
    elif form == "bound":
        engine = Engine(inner)
        forward = recorded(engine.plain, buckets=[2, 4], **options)
        made = Captured(forward, forward, inner, closed, engine)
    else:
        forward = recorded(lambda x: inner(x), buckets=[2, 4], **options)
        made = Captured(forward, forward, inner, closed)
    made.start()
    assert 4 <= counts(made.controls)["graph"]
    return made


WAYS = [
    ("module", False, torch.no_grad),
    ("module", True, torch.inference_mode),
    ("class", False, torch.inference_mode),
    ("method", False, torch.inference_mode),
    ("bound", True, torch.no_grad),
    ("closure", False, torch.no_grad),
]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}-{'warmed up' if way[1] else 'lazy'}-{way[2].__name__}")
def made(request: pytest.FixtureRequest) -> Iterator[Captured]:
    """A captured forward that has served, in each form, with an open and with a closed set, in each mode."""
    form, closed, mode = request.param
    with torch.inference_mode(False), mode():
        yield captured(form, closed)


# -- H57: an adapter as an argument ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Adapter:
    down: torch.Tensor
    up: torch.Tensor
    scale: float = 1.0


class Opaque:
    def __init__(self) -> None:
        self.down, self.up, self.scale = rows(3, 2), rows(2, 3), 1.0


def parts(adapter: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    if isinstance(adapter, dict):
        return adapter["down"], adapter["up"], adapter.get("scale", 1.0)
    if isinstance(adapter, (list, tuple)):
        return adapter[0], adapter[1], 1.0
    return adapter.down, adapter.up, adapter.scale


TABLE = {name: (torch.full((3, 2), 0.5), torch.full((2, 3), factor)) for name, factor in (("a", 1.0), ("b", -1.0))}


def adapted(x: torch.Tensor, adapter: Any = None) -> torch.Tensor:
    if adapter is None:
        return x * 2
    found = TABLE["b" if adapter in ("b", 1, True) else "a"] if isinstance(adapter, (str, int)) else adapter
    down, up, scale = parts(found)
    return x * 2 + scale * (x @ down) @ up


ADAPTERS: dict[str, Callable[[], Any]] = {
    "a name": lambda: "a",
    "another name": lambda: "b",
    "a number": lambda: 0,
    "a flag": lambda: True,
    "a tuple of tensors": lambda: (rows(3, 2), rows(2, 3)),
    "a dict of tensors": lambda: {"down": rows(3, 2), "up": rows(2, 3), "scale": 0.5},
    "a dataclass of tensors": lambda: Adapter(rows(3, 2), rows(2, 3)),
    "an object": Opaque,
}


@pytest.mark.parametrize("closed", [False, True], ids=["lazy", "warmed up"])
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_never_meets_the_graph_without_one(kind: str, keyword: bool, closed: bool) -> None:
    """Captured without an adapter, called with one: its own graph, or eager with a reason, and never the base result.

    (H57, huggingface/text-generation-inference#2180)
    """
    forward = recorded(adapted, buckets=[2], name=f"{kind} {keyword} {closed}")
    if closed:
        forward.warmup(lambda n: ((rows(n),), {}))
    for with_adapter in (False, False, True, True, True, False, True):
        x, adapter = rows(2), ADAPTERS[kind]() if with_adapter else None
        expected = adapted(x, adapter)
        result = forward(x, adapter=adapter) if keyword else forward(x, adapter)
        assert torch.equal(expected, result)
        assert not with_adapter or not torch.equal(x * 2, result)
    found = counts(forward)
    if closed or kind == "an object":
        assert 4 == found["signature"]
    else:
        assert {"graph": 5, "warmup": 2} == found


def test_adapters_among_themselves() -> None:
    """Each adapter's name is a graph of its own, in any order (H57, huggingface/text-generation-inference#2180)."""
    forward = recorded(adapted, buckets=[2])
    for name in ("a", "b", None) * 4 + ("b", "b", "a"):
        x = rows(2)
        assert torch.equal(adapted(x, name), forward(x, name))
    assert {"graph": 12, "warmup": 3} == counts(forward)


@pytest.mark.parametrize("closed", [False, True], ids=["lazy", "warmed up"])
def test_an_adapter_passed_by_reference_is_told_from_another(closed: bool) -> None:
    """``static=`` passes the object itself: another one, and none, have graphs of their own (H57, #2180)."""
    first, second = Opaque(), Opaque()
    forward = recorded(adapted, buckets=[2], static=("adapter",), name=f"static {closed}")
    if closed:
        forward.warmup(lambda n: ((rows(n), first), {}))
    for adapter in (first, first, first, second, second, None, first, second, None):
        x = rows(2)
        assert torch.equal(adapted(x, adapter), forward(x, adapter))
    assert 3 <= counts(forward)["graph"]


@pytest.mark.parametrize("part", ["down", "scale"])
def test_an_adapter_passed_by_reference_that_changes_inside(part: str) -> None:
    """A tensor replaced inside a static adapter is seen at once, a number there by ``verify=`` (H57, #2180)."""
    adapter = Opaque()
    forward = recorded(adapted, buckets=[2], static=("adapter",), verify=1 if part == "scale" else 0)
    for _ in range(3):
        forward(rows(2), adapter)
    setattr(adapter, part, rows(3, 2) if part == "down" else 3.0)
    for _ in range(4):
        x = rows(2)
        assert torch.equal(adapted(x, adapter), forward(x, adapter))
    assert 1 <= counts(forward)["static_moved" if part == "down" else "verify_failed"]


# -- H57: an adapter as a state of the model -------------------------------------------------------------------------

Change = Callable[[Model], Any]


def put(path: str, make: Callable[[], Any]) -> Change:
    """Set one attribute of the middle layer, or of what it holds."""

    def change(found: Model) -> None:
        *way, name = path.split(".")
        setattr(functools.reduce(getattr, way, found.layers[1]), name, make())

    return change


SWITCHES: dict[str, Change] = {
    "the name": put("active", lambda: "a"),
    "the scale": put("scale", lambda: 2.0),
    "training": lambda found: found.layers[1].train(),
    "a flag of the model": lambda found: setattr(found, "adapters", False),
    "a number in a dict": lambda found: found.layers[0].scaling.update(a=5.0),
    "a name in a list": lambda found: found.layers[1].names.append("b"),
    "another list": put("names", lambda: ["a", "b"]),
    "a name in a set": lambda found: found.layers[0].merged.add("a"),
    "a number of the class, set on the layer": put("rate", lambda: 3.0),
    "another type": put("scale", lambda: False),
    "an activation": put("act", torch.nn.Sigmoid),
    "a submodule in between": lambda found: found.layers.append(torch.nn.Tanh()),
    "a submodule taken out": lambda found: found.layers.__delitem__(2),
    "the order of submodules": lambda found: found.layers.insert(0, found.layers.pop(2)),
    "a forward put on the instance": put("forward", lambda: lambda x: x - 1),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_of_the_model_is_noticed_within_the_bound(switch: str, made: Captured) -> None:
    """An adapter that is switched by an attribute is noticed within 64 calls of a size, as ``static_moved``.

    (H57, huggingface/text-generation-inference#2180)
    """
    # With an adapter active from the start, what it is made of has an effect.
    made.model.layers[0].active = "a"
    made.start()
    before = counts(made.controls).get("static_moved", 0)
    SWITCHES[switch](made.model)
    made.serve(BOUND)
    assert all(made.right() for _ in range(5))
    assert before < counts(made.controls)["static_moved"]


def test_the_cause_names_the_attribute_that_was_switched() -> None:
    """Who reads the log learns which attribute it was (H57, huggingface/text-generation-inference#2180)."""
    made = captured("module")
    made.model.layers[1].active = "a"
    made.serve(BOUND)
    assert "Layer.active" in causes(made.controls)


def test_a_switch_to_and_fro_ends_right() -> None:
    """Every switch is noticed within the bound, the way back as well (H57, text-generation-inference#2180)."""
    made = captured("module")
    for name in ("a", "b", None, "a", None, "b"):
        for layer in made.model.layers:
            layer.active = name
        made.serve(BOUND)
        assert all(made.right() for _ in range(3))


def test_a_switch_that_is_set_to_the_same_value_costs_nothing() -> None:
    """Setting an attribute to what it was, as serving loops do at each step, drops no graph (H57, #2180)."""
    made = captured("module")
    for _ in range(3 * BOUND):
        for layer in made.model.layers:
            layer.active, layer.scale, layer.names, layer.scaling = None, 1.0, [], {"a": 1.0, "b": 1.0}
            layer.eval()
        assert made.right()
    assert 0 == counts(made.controls).get("static_moved", 0)


def test_the_bound_holds_for_a_model_of_many_layers() -> None:
    """A model with thousands of attributes is compared as fast as a small one (H57, #2180)."""
    made = captured("module")
    made.model.spare = torch.nn.ModuleList([Layer().eval() for _ in range(150)])
    made.model.layers.append(made.model.spare[0])
    made.start()
    made.model.spare[0].scale = 2.0
    made.serve(BOUND)
    assert all(made.right() for _ in range(3))


def test_training_of_the_whole_model_is_seen_at_once() -> None:
    """``model.train()`` is looked at in every call of a module (H57, text-generation-inference#2180)."""
    made = captured("module")
    made.model.train()
    assert made.right()
    assert 1 == counts(made.controls)["training"]
    made.model.eval()
    assert made.right()


UNSEEN: dict[str, Change] = {
    "a number of a nested object": put("config.factor", lambda: 4.0),
    "a number of the class": lambda found: setattr(Layer, "rate", 4.0),
    "a hook that changes the result": lambda found: found.layers[1].register_forward_hook(lambda m, x, y: y * 2),
    "two live tensors swapped": lambda found: found.layers[1].down.update(
        {"a": found.layers[1].down["b"], "b": found.layers[1].down["a"]}
    ),
}


@pytest.mark.parametrize("change", UNSEEN)
def test_verify_finds_what_nothing_else_sees(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """State beyond the attributes of modules is found by comparing, and that call is right already (H57, #2180).

    docs/limits.md names these as not seen; ``verify=`` is the answer to them.
    """
    monkeypatch.setattr(Layer, "rate", 1.0)
    made = captured("module", verify=1)
    made.model.layers[1].active = "a"
    made.start()
    UNSEEN[change](made.model)
    assert all(made.right() for _ in range(5))


def test_verify_finds_a_model_that_is_kept_and_exchanged() -> None:
    """An engine that switches between two models it keeps is found by comparing (H57, #2180)."""
    made = captured("bound", verify=1)
    engine, other = made.keep, model()
    engine.kept = engine.model
    engine.model = made.model = other
    assert all(made.right() for _ in range(5))


# -- H59: weights written in place -----------------------------------------------------------------------------------


def written(change: Callable[[torch.nn.Parameter], Any]) -> Change:
    """A change of one weight of many."""
    return lambda found: change(found.layers[1].weight)


def merge_in_place(w: torch.nn.Parameter) -> None:
    w.data += fresh(3, 2) @ fresh(2, 3)


def loaded(found: Model) -> None:
    found.load_state_dict(model().state_dict())


def stepped(found: Model) -> None:
    with torch.inference_mode(False):
        optimizer = torch.optim.SGD([found.layers[1].weight], lr=1.0)
        found.layers[1].weight.grad = fresh(3, 3)
        optimizer.step()


IN_PLACE: dict[str, Change] = {
    "copy_": written(lambda w: w.copy_(fresh(3, 3))),
    "data.copy_": written(lambda w: w.data.copy_(fresh(3, 3))),
    "data +=": written(merge_in_place),
    "mul_": written(lambda w: w.mul_(2)),
    "a row": written(lambda w: w[1].zero_()),
    "a view kept from before": written(lambda w: w.detach().view(-1).neg_()),
    "init": written(torch.nn.init.ones_),
    "addmm_": written(lambda w: w.addmm_(fresh(3, 2), fresh(2, 3))),
    "numpy": written(lambda w: w.numpy().fill(0.5)),
    "load_state_dict": loaded,
    "an optimizer's step": stepped,
    "a buffer": lambda found: found.layers[1].shift.fill_(0.5),
    "all at once": lambda found: torch._foreach_mul_([layer.weight for layer in found.layers], 2.0),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_weights_written_in_place_are_right_at_the_next_call(change: str, made: Captured) -> None:
    """A weight that is written where it lies gives new numbers at once, from the same graph (H59, sglang#4961)."""
    graphs = counts(made.controls)["graph"]
    IN_PLACE[change](made.model)
    assert all(made.right(n) for n in (2, 4) * 3)
    assert graphs + 6 == counts(made.controls)["graph"]


# -- H59: objects replaced -------------------------------------------------------------------------------------------


def reassigned(found: Model) -> None:
    found.load_state_dict(model().state_dict(), assign=True)


def reregistered(found: Model) -> None:
    del found.layers[1].weight
    found.layers[1].register_parameter("weight", weight(3, 3))


def remade(compute: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(found: Model) -> None:
        found.layers[1].weight = torch.nn.Parameter(compute(found.layers[1].weight), requires_grad=False)

    return change


def parametrized(found: Model) -> None:
    class Twice(torch.nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w * 2

    torch.nn.utils.parametrize.register_parametrization(found.layers[1], "weight", Twice())


REPLACED: dict[str, Change] = {
    "a parameter": put("weight", lambda: weight(3, 3)),
    "a parameter made from the old one": remade(lambda w: w * 2),
    "a parameter registered anew": reregistered,
    "a buffer": put("shift", lambda: fresh(3)),
    "a submodule": lambda found: found.layers.__setitem__(1, Layer().eval()),
    "a list of submodules": lambda found: setattr(found, "layers", torch.nn.ModuleList([Layer().eval()])),
    "load_state_dict(assign=True)": reassigned,
    "a merge into a new parameter": remade(lambda w: w + fresh(3, 2) @ fresh(2, 3)),
}


@pytest.mark.parametrize("change", REPLACED)
def test_replaced_objects_are_right_at_the_next_call(change: str, made: Captured) -> None:
    """A parameter, buffer or submodule that gives way to another is noticed at once, as ``static_moved``.

    (H59, sgl-project/sglang#4961)
    """
    REPLACED[change](made.model)
    assert all(made.right(n) for n in (2, 4) * 3)
    moved = counts(made.controls)["static_moved"]
    assert 2 < moved if made.closed else 2 == moved


def test_a_parametrization_is_noticed_within_the_bound() -> None:
    """Weights that are computed from others from now on, as weight norm does, end right (H59, sglang#12060)."""
    made = captured("module")
    with torch.inference_mode(False):
        parametrized(made.model)
    made.serve(BOUND)
    assert all(made.right() for _ in range(3))


@dataclasses.dataclass
class Holder:
    w: Any
    inner: Any = None


class Slotted:
    __slots__ = ("__weakref__", "w")

    def __init__(self, w: torch.Tensor) -> None:
        self.w = w


HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "dict": (lambda w: {"w": w}, lambda h: h["w"], lambda h, w: h.update(w=w)),
    "list": (lambda w: [w], lambda h: h[0], lambda h, w: h.__setitem__(0, w)),
    "dataclass": (Holder, lambda h: h.w, lambda h, w: setattr(h, "w", w)),
    "slots": (Slotted, lambda h: h.w, lambda h, w: setattr(h, "w", w)),
    "namespace": (lambda w: types.SimpleNamespace(w=w), lambda h: h.w, lambda h, w: setattr(h, "w", w)),
    "dict of lists": (lambda w: {"w": [w]}, lambda h: h["w"][0], lambda h, w: h.update(w=[w])),
    "object in an object": (lambda w: Holder(0, Holder(w)), lambda h: h.inner.w, lambda h, w: setattr(h.inner, "w", w)),
    "attribute of a function": (lambda w: _with(lambda: None, w), lambda h: h.w, lambda h, w: setattr(h, "w", w)),
}


def _with(function: Any, w: torch.Tensor) -> Any:
    function.w = w
    return function


@pytest.mark.parametrize("closed", [False, True], ids=["lazy", "warmed up"])
@pytest.mark.parametrize("reach", ["closure", "static"])
@pytest.mark.parametrize("kind", HOLDERS)
def test_a_tensor_replaced_in_a_container_is_right_at_the_next_call(kind: str, reach: str, closed: bool) -> None:
    """Wherever the forward finds its tensor, the next call after a replacement is right (H59, sglang#12060)."""
    make, read, replace = HOLDERS[kind]
    holder = make(fresh(3))
    if reach == "closure":
        forward, rest = recorded(lambda x: x * read(holder), buckets=[2], name=f"{kind} closure {closed}"), ()
    else:
        rest = (holder,)
        options = {"static": ("held",), "name": f"{kind} static {closed}"}
        forward = recorded(lambda x, held: x * read(held), buckets=[2], **options)
    if closed:
        forward.warmup(lambda n: ((rows(n), *rest), {}))
    for _ in range(3):
        forward(rows(2), *rest)
    assert 2 <= counts(forward)["graph"]
    for _ in range(2):
        replace(holder, fresh(3))
        for _ in range(3):
            x = rows(2)
            assert torch.equal(x * read(holder), forward(x, *rest))


@pytest.mark.parametrize("kind", ["dict", "dataclass", "namespace"])
@pytest.mark.parametrize("how", ["replaced", "written", "data"])
def test_a_tensor_of_a_context_is_copied_at_each_call(kind: str, how: str) -> None:
    """What ``context=`` names is staged: replaced, written or moved, the next call is right (H59, sglang#4961)."""
    make, read, replace = HOLDERS[kind]
    holder = make(fresh(3))
    forward = recorded(lambda x: x * read(holder), buckets=[2], context=lambda: holder, name=f"{kind} {how}")
    for step in range(6):
        if how == "replaced":
            replace(holder, fresh(3))
        elif how == "written":
            read(holder).fill_(step)
        else:
            read(holder).data = fresh(3)
        x = rows(2)
        assert torch.equal(x * read(holder), forward(x))
    assert {"graph": 5, "warmup": 1} == counts(forward)


# -- H59: storage replaced under a living tensor ---------------------------------------------------------------------


def data_of(found: Model, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    w = found.layers[1].weight
    w.data = change(w.data)


def set_to(found: Model) -> None:
    found.layers[1].weight.set_(fresh(3, 3))


def vector(found: Model) -> None:
    torch.nn.utils.vector_to_parameters(fresh(9), [found.layers[1].weight])


def moved_then_written(found: Model) -> None:
    data_of(found, lambda w: w.clone())
    merge_in_place(found.layers[1].weight)


def swapped_data(found: Model) -> None:
    a, b = found.layers[0].weight, found.layers[1].weight
    a.data, b.data = b.data, a.data


MOVED: dict[str, Change] = {
    "data": lambda found: data_of(found, lambda _: fresh(3, 3)),
    "data of a buffer": lambda found: setattr(found.layers[1].shift, "data", fresh(3)),
    "a merge": lambda found: data_of(found, lambda w: w + fresh(3, 2) @ fresh(2, 3)),
    "an unmerge": lambda found: data_of(found, lambda w: w - fresh(3, 2) @ fresh(2, 3)),
    "the same numbers, then others": moved_then_written,
    "another layout": lambda found: data_of(found, lambda w: w.t()),
    "set_": set_to,
    "vector_to_parameters": vector,
    "two weights exchanged": swapped_data,
    "one layer of many": lambda found: found.layers[1].to(torch.float64),
    "one layer there and back": lambda found: data_of(found, lambda w: w.double().float() * 2),
}


@pytest.mark.parametrize("change", MOVED)
def test_replaced_storage_is_noticed_within_the_bound(change: str, made: Captured) -> None:
    """Memory exchanged under one living tensor of many is noticed within 64 calls of a size, as ``weights_moved``.

    (H59, sgl-project/sglang#4961)
    """
    with torch.inference_mode(False), torch.no_grad():
        MOVED[change](made.model)
    made.serve(BOUND)
    assert all(made.right() for _ in range(5))
    # Where a module is moved, torch replaces its buffers: that is seen at once, and said to be a replaced tensor.
    assert 1 <= counts(made.controls).get("static_moved" if change == "one layer of many" else "weights_moved", 0)


def test_every_size_has_the_bound_of_its_own() -> None:
    """Sizes that alternate end right after 64 calls of each, in switches as in moves (H59, sgl-project/sglang#4961)."""
    for change in (SWITCHES["the scale"], MOVED["a merge"]):
        made = captured("module")
        with torch.inference_mode(False), torch.no_grad():
            change(made.model)
        made.serve(BOUND, 2, 4)
        assert all(made.right(n) for n in (2, 4) * 5)


@pytest.mark.parametrize("place", [0, 57, 199])
def test_the_bound_holds_for_one_weight_of_hundreds(place: int) -> None:
    """One of 200 weights that moves is noticed as fast as one of a few, wherever it stands (H59, sglang#4961)."""
    weights = [weight(3) for _ in range(200)]
    forward = recorded(lambda x: x + torch.stack([w * 1 for w in weights]).sum(0), buckets=[2])
    for calls in (3, 40):
        for _ in range(calls):
            forward(rows(2))
        with torch.inference_mode(False), torch.no_grad():
            weights[place].data = fresh(3)
        for _ in range(BOUND):
            forward(rows(2))
        for _ in range(3):
            x = rows(2)
            assert torch.equal(x + torch.stack([w * 1 for w in weights]).sum(0), forward(x))
    assert 2 == counts(forward)["weights_moved"]


@pytest.mark.parametrize("calls", [1, 5, BOUND - 1, BOUND, BOUND + 7, 3 * BOUND])
def test_the_bound_counts_from_the_change(calls: int) -> None:
    """How many calls came before a change makes no difference to the bound (H59, sgl-project/sglang#4961)."""
    made = captured("module")
    made.serve(calls)
    with torch.inference_mode(False), torch.no_grad():
        MOVED["a merge"](made.model)
    made.serve(BOUND)
    assert all(made.right() for _ in range(3))


def test_merges_again_and_again_end_right() -> None:
    """Ten merges, each noticed within the bound (H59, sgl-project/sglang#4961)."""
    made = captured("module")
    for _ in range(10):
        with torch.inference_mode(False), torch.no_grad():
            MOVED["a merge"](made.model)
        made.serve(BOUND)
        assert all(made.right() for _ in range(3))


def move_to_shared_memory(found: Model) -> None:
    found.share_memory()


def move_layer_by_layer(found: Model) -> None:
    for w in found.parameters():
        w.data = w.data * 2
    for b in found.buffers():
        b.data = b.data * 2


WHOLE: dict[str, Change] = {
    "to(dtype)": lambda found: found.to(torch.float64),
    "half and back": lambda found: found.half().float(),
    "a clone of every tensor": lambda found: found._apply(lambda t: t.clone() * 2),
    "shared memory": move_to_shared_memory,
    "data of every tensor": move_layer_by_layer,
}


@pytest.mark.parametrize("change", WHOLE)
def test_a_module_that_moves_as_a_whole_is_right_at_the_next_call(change: str, made: Captured) -> None:
    """Where every weight has other memory, no call reads the old one (H59, sgl-project/sglang#12060)."""
    with torch.inference_mode(False), torch.no_grad():
        for layer in made.model.layers:
            # torch replaces buffers where it moves a module, which alone would be seen; parameters it keeps.
            del layer.shift
            layer.shift = weight(3)
    made.start()
    with torch.inference_mode(False), torch.no_grad():
        WHOLE[change](made.model)
    for layer in made.model.layers:
        # After a move to shared memory the numbers are the same: only new ones tell.
        layer.weight.mul_(2)
    assert all(made.right(n) for n in (2, 4) * 3)
    assert 2 <= counts(made.controls)["weights_moved"]


def test_two_forwards_of_one_model_notice_alike() -> None:
    """What one captured forward has noticed, another one of the same model notices for itself (H59, sglang#4961)."""
    inner = model()
    first, second = (recorded(lambda x: inner(x), buckets=[2], name=name) for name in ("first", "second"))
    for _ in range(3):
        first(rows(2)), second(rows(2))
    inner.to(torch.float64)
    REPLACED["a buffer"](inner)
    for forward in (first, second, first, second):
        x = rows(2)
        assert torch.equal(Model.forward(inner, x), forward(x))


def test_weights_loaded_between_warm_up_and_traffic() -> None:
    """A checkpoint that comes after ``warmup`` is what the first call computes with (H59, sgl-project/sglang#4961)."""
    for change in (loaded, reassigned, lambda found: found.to(torch.float64)):
        made = captured("module", closed=True)
        made.start(calls=0)
        with torch.inference_mode(False), torch.no_grad():
            change(made.model)
        assert all(made.right(n) for n in (2, 4) * 2)


def test_a_tensor_that_is_kept_elsewhere_is_found_by_verify() -> None:
    """A replaced weight that an average or an optimizer keeps alive is found by comparing (H59, sglang#4961).

    docs/limits.md names it as not seen otherwise.
    """
    made = captured("module", verify=1)
    kept = made.model.layers[1].weight
    made.model.layers[1].weight = weight(3, 3)
    assert all(made.right() for _ in range(5))
    assert (3, 3) == tuple(kept.shape)


def test_weights_can_be_swapped_after_a_reset() -> None:
    """``torch.utils.swap_tensors`` refuses what is referenced weakly; ``reset()`` lets go (H59, sglang#12060)."""
    made = captured("module")
    made.controls.reset()
    torch.utils.swap_tensors(made.model.layers[1].weight, weight(3, 3))
    assert all(made.right() for _ in range(6))
