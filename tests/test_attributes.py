from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch

from graphprobe import attributes
from graphprobe.attributes import Before, Settings, compiled, frozen, hooked, modules_behind, plain


class Layer(torch.nn.Module):
    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.scale = 1.0
        self.scaling = {"a": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Engine:
    def __init__(self) -> None:
        self.model, self.step, self.queue = Layer(), 0, [1]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "PAUSE", 0.0)


def nothing(engine: Any) -> None:
    return None


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (True, 1), (0.0, -0.0), ([1], (1,)), ({"a": 1}, {"a": 2})])
def test_values_that_python_takes_for_alike_are_told_apart(one: Any, other: Any) -> None:
    """By type and value, in containers, too."""
    assert frozen(one) != frozen(other)


def test_values_are_equal_while_they_are_the_same() -> None:
    """Numbers by value, NaN with itself, objects by identity."""
    thing = object()
    for make in (lambda: 1000.5, lambda: float("nan"), lambda: [1, "a"], lambda: thing, lambda: [thing]):
        assert frozen(make()) == frozen(make())
    assert frozen([object()]) != frozen([object()])


def test_plain_is_what_can_be_compared() -> None:
    """Small containers of numbers and texts; no tensor, no object, nothing large."""
    assert all(map(plain, (1, "a", None, [1, 2], {"a": (1, 2)}, torch.float32)))
    assert not any(map(plain, (torch.ones(1), object(), [object()], list(range(100)))))


def test_the_modules_behind_a_forward_are_found() -> None:
    """The owner's, those of its attributes, of a closure, of a partial, of a function it calls, and those below."""
    engine, layer = Engine(), Layer()

    def inner(x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    for owner, function, expected in (
        (engine, nothing, engine.model),
        (layer, nothing, layer),
        (None, outer, layer),
        (None, functools.partial(nothing, layer), layer),
        (None, types.MethodType(nothing, layer), layer),
    ):
        found = modules_behind(owner, function)
        assert expected in found and expected.linear in found


@pytest.mark.parametrize(
    "change",
    [
        lambda e: setattr(e, "step", 1),
        lambda e: setattr(e, "seen", 1),
        lambda e: setattr(e, "queue", [1]),
        lambda e: setattr(e.model, "scale", 2.0),
        lambda e: e.model.scaling.update(a=2.0),
        lambda e: delattr(e.model, "scale"),
    ],
)
def test_what_a_run_sets_is_named_and_can_be_put_back(change: Any) -> None:
    """An attribute that a run sets, adds or removes is named; after ``restore`` it never happened."""
    engine = Engine()
    queue, before = engine.queue, Before(engine, nothing)
    assert "" == before.changed()
    change(engine)
    assert before.changed().startswith(("Engine.", "Layer."))
    before.restore()
    assert "" == before.changed()
    assert (0, 1.0, {"a": 1.0}, True) == (engine.step, engine.model.scale, engine.model.scaling, engine.queue is queue)


def test_what_other_threads_do_to_an_engines_containers_is_no_change() -> None:
    """Requests come and go while a forward runs."""
    engine = Engine()
    before = Before(engine, nothing)
    engine.queue.append(2)
    assert "" == before.changed()


class Proxy:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("outside of a request")


def test_an_object_that_must_not_be_touched_is_left_alone() -> None:
    """A proxy raises where it is looked at; a forward may well stand beside one."""
    proxy = Proxy()
    assert [] == modules_behind(proxy, lambda: proxy)
    assert "" == Before(proxy, lambda: proxy).changed()


CHANGES: dict[str, Any] = {
    "a number": lambda m: setattr(m, "scale", 2.0),
    "a number of the class": lambda m: setattr(m, "rate", 2.0),
    "inside a dict": lambda m: m.scaling.update(a=2.0),
    "training of a child": lambda m: m.linear.train(),
    "a child": lambda m: setattr(m, "linear", torch.nn.Linear(3, 3)),
    "a parameter": lambda m: setattr(m.linear, "weight", torch.nn.Parameter(torch.ones(3, 3))),
    "a function": lambda m: setattr(m, "forward", nothing),
    "a hook of a child": lambda m: m.linear.register_forward_hook(nothing),
    "a parametrization": lambda m: torch.nn.utils.parametrize.register_parametrization(
        m.linear, "weight", torch.nn.Identity()
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_set_behind_a_graph_is_noticed(change: str) -> None:
    """And stays noticed at no later look, unless it is set anew."""
    layer = Layer().eval()
    kept, settings = [layer.linear, layer.linear.weight], Settings([layer, layer.linear], layer)
    assert "" == settings.changed()
    CHANGES[change](layer)
    assert any(part in settings.changed() for part in ("Layer", "Linear"))
    assert kept


def test_what_a_graph_does_not_bake_in_may_change() -> None:
    """Tensors are watched elsewhere; an object of the engine's own says nothing; the owner's hooks run outside."""
    layer = Layer()
    settings = Settings([layer, layer.linear], layer)
    layer.register_forward_hook(nothing)
    layer.metadata, layer.cache = object(), torch.ones(1)
    layer.metadata = object()
    assert "" == settings.changed()
    layer.scale = 3.0
    assert "Layer.scale" == settings.changed()


def test_a_look_that_takes_long_puts_off_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion: of a large model the attributes are compared less often, for the same part of the time."""
    monkeypatch.setattr(attributes, "PAUSE", 1e-6)
    for quick, seen in ((3600.0, True), (1e-12, False)):
        monkeypatch.setattr(attributes, "QUICK", quick)
        module = torch.nn.Linear(2, 2)
        known = Settings([module])
        for _ in range(100):
            known.changed()
        module.in_features += 1
        assert seen is any(known.changed() for _ in range(100))


def test_nothing_is_looked_at_more_often_than_it_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that comes within PAUSE of the last one is left out."""
    monkeypatch.setattr(attributes, "PAUSE", 3600.0)
    layer = Layer()
    settings = Settings([layer])
    layer.scale = 2.0
    assert "" == settings.changed()
    monkeypatch.setattr(attributes, "PAUSE", 0.0)
    assert "Layer.scale" == settings.changed()


def test_settings_keep_nothing_alive() -> None:
    """A module that is gone is a change, and was free to go."""
    layer = Layer()
    settings = Settings([layer.linear])
    del layer.linear
    assert "a Linear" == settings.changed()


def test_hooks_that_a_replay_bypasses_are_named() -> None:
    """Those below the owner with their path, those of all modules as such."""
    layer = Layer()
    layer.register_forward_hook(nothing)
    assert [] == hooked(layer, nothing)
    layer.linear.register_forward_pre_hook(nothing)
    assert ["linear (Linear)"] == hooked(layer, nothing)
    handle = torch.nn.modules.module.register_module_forward_hook(nothing)
    try:
        assert 2 == len(hooked(layer, nothing))
    finally:
        handle.remove()


def test_compiled_code_is_recognised() -> None:
    """A compiled module, and one that was compiled in place; a plain one is not."""
    layer = Layer()
    assert not compiled(modules_behind(layer, nothing), nothing)
    whole = functools.partial(nothing, torch.compile(layer))
    assert compiled(modules_behind(None, whole), whole)
    layer.linear.compile()
    assert compiled(modules_behind(layer, nothing), nothing)
