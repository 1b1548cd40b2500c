"""Reports about decorators and modules: copies that run the original, hidden signatures, hooks that stay silent."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prometheus_client.registry import CollectorRegistry

from graphprobe.graphed import capture
from graphprobe.ledger import LEDGER
from graphprobe.watch import CHECK

pytestmark = pytest.mark.usefixtures("own_forwards", "both_modes")

recorded = functools.partial(capture, buckets=[2, 4], backend="recorder")


def rows(n: int = 2) -> torch.Tensor:
    return torch.randn(n, 3)


class Head(torch.nn.Module):
    """A linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Rows [batch, 3] in and out."""
        return self.linear(x) * scale + self.shift


@recorded
class GraphedHead(torch.nn.Module):
    """A linear head, captured for all of its instances."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Rows [batch, 3] in and out."""
        return self.linear(x) * scale + self.shift


class Model(torch.nn.Module):
    """A model around a captured head."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def new_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a library puts in the place of a forward, as a partial over the module."""
    return type(module).forward(module, *args, **kwargs)


def frozen(module: torch.nn.Module) -> torch.nn.Module:
    """As it is served: a graph made under no_grad may not read parameters that change for autograd."""
    return module.eval().requires_grad_(False)


def instance() -> torch.nn.Module:
    return recorded(frozen(Head()))


def of_a_class() -> torch.nn.Module:
    return frozen(GraphedHead())


def nested() -> torch.nn.Module:
    return frozen(Model(instance()))


def patched() -> torch.nn.Module:
    head = frozen(Head())
    head.forward = functools.partial(new_forward, head)
    return recorded(head)


MODULES = [instance, of_a_class, nested, patched]


def head_of(module: torch.nn.Module) -> Any:
    return module.head if isinstance(module, Model) else module


def plain(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    head = head_of(module)
    return torch.nn.functional.linear(x, head.linear.weight, head.linear.bias) + head.shift


def zeroed(module: torch.nn.Module) -> torch.nn.Module:
    for tensor in module.state_dict().values():
        tensor.zero_()
    return module


def counts(forward: Any) -> tuple[int, int]:
    snapshot = forward.snapshot()
    return snapshot.graph_calls, snapshot.eager_calls


# -- copies ----------------------------------------------------------------------------------------------------------


def by_pickle(module: torch.nn.Module) -> torch.nn.Module:
    return pickle.loads(pickle.dumps(module))


def by_torch_save(module: torch.nn.Module) -> torch.nn.Module:
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def in_a_list(module: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(torch.nn.ModuleList([module]))[0]


def averaged(module: torch.nn.Module) -> torch.nn.Module:
    return torch.optim.swa_utils.AveragedModel(module).module


@pytest.mark.parametrize("served", [False, True], ids=["fresh", "captured"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save, in_a_list, averaged])
@pytest.mark.parametrize("make", MODULES)
def test_a_copy_runs_its_own_weights(
    make: Callable[[], torch.nn.Module], duplicate: Callable[..., Any], served: bool
) -> None:
    """A copy with zeroed weights answers zero, the original is unchanged, and the copy makes graphs of its own.

    Counts are by name, so a copy's calls go to the series of the original.
    (H75, huggingface/accelerate#1835)
    """
    module = make()
    for _ in range(3 * served):
        module(rows())
    twin = zeroed(duplicate(module))
    before = head_of(module).forward.snapshot()
    for _ in range(4):
        x = rows()
        assert torch.equal(torch.zeros(2, 3), twin(x))
        assert torch.equal(plain(module, x), module(x))
    # Each makes its one graph, unless the original has one already.
    window = head_of(module).forward.snapshot() - before
    assert 2 - served == window.captures[2]
    assert head_of(twin).forward is not head_of(module).forward


@pytest.mark.parametrize("make", MODULES)
def test_a_copy_outlives_the_original(make: Callable[[], torch.nn.Module]) -> None:
    """The copy needs nothing of the module that it was copied from (H75, huggingface/accelerate#1835)."""
    module = make()
    for _ in range(3):
        module(rows())
    twin = copy.deepcopy(module)
    del module
    for _ in range(4):
        x = rows()
        assert torch.equal(plain(twin, x), twin(x))


def test_a_shallow_copy_of_a_captured_class_runs_its_own_weights() -> None:
    """copy.copy, too, does not take over the graphs that stand in the copied ``__dict__``.

    (H75, huggingface/accelerate#1835)
    """
    module = of_a_class()
    for _ in range(3):
        module(rows())
    twin: Any = copy.copy(module)
    twin._modules = {"linear": frozen(torch.nn.Linear(3, 3))}
    for _ in range(4):
        x = rows()
        assert torch.equal(plain(twin, x), twin(x))
        assert torch.equal(plain(module, x), module(x))


@pytest.mark.parametrize("make", [instance, of_a_class])
def test_controls_of_a_copy_are_its_own(make: Callable[[], torch.nn.Module]) -> None:
    """Switching the copy off, or resetting it, leaves the original's graphs (H75, huggingface/accelerate#1835)."""
    module = make()
    for _ in range(3):
        module(rows())
    twin: Any = copy.deepcopy(module)
    twin.forward.enabled = False
    twin.forward.reset()
    before = module.forward.snapshot()
    module(rows())
    assert (1, 0) == counts_since(module.forward, before)
    twin(rows())
    assert (1, 1) == counts_since(module.forward, before)


def counts_since(forward: Any, before: Any) -> tuple[int, int]:
    window = forward.snapshot() - before
    return window.graph_calls, window.eager_calls


def test_a_model_that_accelerate_patched_is_copied_with_its_hooks() -> None:
    """A forward that accelerate replaced by a partial is captured, and a copy of it runs its own weights.

    (H75, huggingface/accelerate#1835; H80, openvinotoolkit/nncf#3362)
    """
    hooks = pytest.importorskip("accelerate.hooks")
    head = frozen(Head())
    hooks.add_hook_to_module(head, hooks.ModelHook())
    assert isinstance(head.forward, functools.partial)
    recorded(head)
    for _ in range(3):
        x = rows()
        assert torch.equal(plain(head, x), head(x))
    assert (2, 1) == counts(head.forward)
    assert "Head.forward" in LEDGER.forwards
    twin = zeroed(copy.deepcopy(head))
    for _ in range(3):
        x = rows()
        assert torch.equal(torch.zeros(2, 3), twin(x))
        assert torch.equal(plain(head, x), head(x))


# -- what a wrapper shows --------------------------------------------------------------------------------------------


class Engine:
    """Holds the forwards that are no modules."""

    def step(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Rows [batch, 3] in and out."""
        return x * scale

    @staticmethod
    def pure(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Rows [batch, 3] in and out."""
        return x * scale


class GraphedEngine(Engine):
    step = recorded(Engine.step)
    pure = staticmethod(recorded(Engine.pure))


def pure(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Rows [batch, 3] in and out."""
    return x * scale


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "function": lambda: (pure, recorded(pure)),
    "method": lambda: (Engine().step, GraphedEngine().step),
    "method of a class": lambda: (Engine.step, GraphedEngine.step),
    "static method": lambda: (Engine.pure, GraphedEngine.pure),
    "bound method": lambda: (engine.step, recorded(engine.step)),
    "module": lambda: (heads[0].forward, heads[1].forward),
    "module's class": lambda: (Head.forward, type(heads[1]).forward),
    "captured class": lambda: (Head.forward, GraphedHead.forward),
    "its instance": lambda: (heads[0].forward, heads[2].forward),
}


engine = Engine()
heads: list[Any] = []


@pytest.fixture(autouse=True)
def living() -> None:
    heads[:] = [frozen(Head()), instance(), of_a_class()]


SHOWN: dict[str, Callable[[Any], Any]] = {
    "signature": inspect.signature,
    "parameters": lambda forward: list(inspect.signature(forward).parameters),
    "docstring": inspect.getdoc,
    "name": lambda forward: forward.__name__,
    "last part of the qualified name": lambda forward: forward.__qualname__.split(".")[-1],
    "module": lambda forward: forward.__module__,
    "coroutine": inspect.iscoroutinefunction,
    "generator": inspect.isgeneratorfunction,
    "asynchronous generator": inspect.isasyncgenfunction,
    "callable": callable,
    "hints": typing.get_type_hints,
    "annotations": lambda forward: dict(forward.__annotations__),
    "source": lambda forward: inspect.getsource(forward).strip(),
    "owner": lambda forward: type(getattr(forward, "__self__", None)).__name__.removeprefix("Graphed"),
}


@pytest.mark.parametrize("what", SHOWN)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_captured_forward_shows_what_the_plain_one_does(pair: str, what: str) -> None:
    """Signature, names, docstring, hints and kind are those of the forward that was captured.

    (H76, huggingface/transformers#48156)
    """
    before, after = PAIRS[pair]()
    assert SHOWN[what](before) == SHOWN[what](after)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair != "module's class"])
def test_what_is_wrapped_takes_the_same_arguments(pair: str) -> None:
    """``__wrapped__`` is called as the forward is: bound where that is bound (H76, unslothai/unsloth-zoo#590)."""
    before, after = PAIRS[pair]()
    assert inspect.signature(before) == inspect.signature(after.__wrapped__)


@pytest.mark.parametrize("make", [instance, of_a_class])
def test_keywords_are_checked_as_before(make: Callable[[], torch.nn.Module]) -> None:
    """A valid keyword passes, an unknown one is the forward's own TypeError (H76, huggingface/transformers#48156)."""
    module = make()
    for _ in range(3):
        x = rows()
        assert torch.equal(plain(module, x) * 1.0, module(x, scale=1.0))
        with pytest.raises(TypeError, match="unexpected keyword argument 'attention_mask'"):
            module(x, attention_mask=None)
    assert (2, 1) == counts(module.forward)


# -- pickles ---------------------------------------------------------------------------------------------------------


@recorded
def decode(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Runner:
    """An engine with captured methods."""

    def __init__(self) -> None:
        self.factor = torch.ones(3)

    @recorded
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    @staticmethod
    @recorded
    def pure(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @classmethod
    @recorded
    def shared(cls, x: torch.Tensor) -> torch.Tensor:
        return x * 2


runner = Runner()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ["decode", "runner.step", "Runner.step", "Runner.pure", "Runner.shared"])
def test_a_decorated_function_is_pickled_by_its_name(name: str, protocol: int) -> None:
    """Functions and methods go through a pickle and come back serving (H77, GrahamDumpleton/wrapt#158)."""
    owner, _, rest = name.partition(".")
    forward = getattr(globals()[owner], rest) if rest else globals()[owner]
    args = (runner,) if name == "Runner.step" else ()
    for _ in range(3):
        forward(*args, rows())
    data = pickle.dumps(forward, protocol)
    again = pickle.loads(data)
    assert 2_000 > len(data)
    if name not in ("runner.step", "Runner.shared"):
        assert forward is again
    for _ in range(3):
        x = rows()
        assert torch.equal(x * (runner.factor if "step" in name else 2), again(*args, x))


@pytest.mark.parametrize("make", MODULES)
def test_graphs_are_dropped_from_a_pickle(make: Callable[[], torch.nn.Module]) -> None:
    """A model that has served weighs in a pickle what it weighed before (H77, GrahamDumpleton/wrapt#86)."""
    module = make()
    fresh = len(pickle.dumps(module))
    for n in (2, 2, 4, 4, 2):
        module(rows(n))
    assert 256 > len(pickle.dumps(module)) - fresh


@pytest.mark.parametrize("make", MODULES)
def test_a_saved_state_dict_is_unchanged(make: Callable[[], torch.nn.Module]) -> None:
    """torch.save of the state_dict writes the same bytes as for a module that was never captured.

    (H77, GrahamDumpleton/wrapt#102)
    """

    def saved(module: torch.nn.Module) -> bytes:
        torch.save(module.state_dict(), file := io.BytesIO())
        return file.getvalue()

    module = make()
    twin = Model(Head()) if isinstance(module, Model) else Head()
    twin.load_state_dict(module.state_dict())
    for _ in range(3):
        module(rows())
    assert saved(twin) == saved(module)


def test_a_captured_instance_with_a_registry_is_pickled() -> None:
    """What belongs to this process alone, a registry, does not stop a model from being sent to a worker.

    (H77, GrahamDumpleton/wrapt#158)
    """
    head = recorded(frozen(Head()), registry=CollectorRegistry())
    head(rows())
    twin = by_pickle(head)
    for _ in range(3):
        x = rows()
        assert torch.equal(plain(head, x), twin(x))


# -- hooks -----------------------------------------------------------------------------------------------------------


def said(forward: Any) -> list[str]:
    return [text for text in forward.snapshot().causes.values() if "hook" in text]


HOOKS: dict[str, Callable[[torch.nn.Module, Callable[..., None]], Any]] = {
    "forward": lambda module, hook: module.register_forward_hook(hook),
    "pre": lambda module, hook: module.register_forward_pre_hook(hook),
    "with keywords": lambda module, hook: module.register_forward_hook(hook, with_kwargs=True),
    "always": lambda module, hook: module.register_forward_hook(hook, always_call=True),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("make", [instance, of_a_class])
def test_hooks_inside_a_graph_are_named_and_those_outside_fire(
    make: Callable[[], torch.nn.Module], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A child's hook that replays bypass is named once; a hook of the module itself fires at each call.

    (H78, sgl-project/sglang#38439)
    """
    module, inner, outer = make(), [], []
    HOOKS[kind](module.linear, lambda *args: inner.append(1))
    HOOKS[kind](module, lambda *args: outer.append(1))
    for _ in range(4):
        module(rows())
    assert (3, 1) == counts(module.forward)
    assert 4 == len(outer)
    assert 4 > len(inner)
    assert ["linear (linear)"] == [text.split(": ")[-1].lower() for text in said(module.forward)]
    assert 1 == sum("hooks" in record.getMessage() for record in caplog.records)


def test_without_hooks_nothing_is_said() -> None:
    """A model without hooks hears nothing of them; nor does one whose only hook is its own.

    (H78, sgl-project/sglang#38439)
    """
    module = instance()
    module.register_forward_hook(lambda *args: None)
    for _ in range(4):
        module(rows())
    assert [] == said(module.forward)


def held_by_an_engine(head: torch.nn.Module) -> Any:
    class Runs:
        def __init__(self) -> None:
            self.model = head

        @recorded
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    return Runs().step


def held_by_a_closure(head: torch.nn.Module) -> Any:
    return recorded(lambda x: head(x))


def held_by_a_partial(head: torch.nn.Module) -> Any:
    return recorded(functools.partial(new_forward, head))


@pytest.mark.parametrize("hold", [held_by_an_engine, held_by_a_closure, held_by_a_partial])
def test_hooks_under_a_forward_that_is_no_module_are_named(hold: Callable[[torch.nn.Module], Any]) -> None:
    """A model that a captured function or method calls has hooks that replays bypass, too: they are named.

    (H78, sgl-project/sglang#38439)
    """
    head, seen = frozen(Head()), []
    head.linear.register_forward_hook(lambda *args: seen.append(1))
    forward = hold(head)
    for _ in range(4):
        forward(rows())
    assert len(seen) == 4 or said(forward)


def test_hooks_for_all_modules_are_named() -> None:
    """A hook that torch calls for every module is bypassed like one of a child (H78, sgl-project/sglang#38439)."""
    module, seen = instance(), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: seen.append(1))
    try:
        for _ in range(4):
            module(rows())
    finally:
        handle.remove()
    assert len(seen) == 8 or said(module.forward)


@pytest.mark.parametrize("make", [instance, of_a_class])
def test_a_hook_that_comes_after_the_capture_is_noticed(make: Callable[[], torch.nn.Module]) -> None:
    """A hook that is put on a child of a captured module, and changes its output, is obeyed or named before long.

    (H78, sgl-project/sglang#38439)
    """
    module = make()
    for _ in range(4):
        module(rows())
    module.linear.register_forward_hook(lambda child, args, output: output + 1)
    for _ in range(CHECK + 2):
        module(rows())
    x = rows()
    assert torch.equal(plain(module, x) + 1, module(x)) or said(module.forward)


# -- a module stays a module -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [instance, of_a_class])
def test_a_captured_module_is_the_module_it_was(make: Callable[[], torch.nn.Module]) -> None:
    """Keys, parameters, children, class, repr and flags are those of a plain one (H79, pytorch/pytorch#185752)."""
    module, twin = make(), frozen(Head())
    for _ in range(3):
        module(rows())
    looks: list[Callable[[Any], Any]] = [
        lambda m: list(m.state_dict()),
        lambda m: [name for name, _ in m.named_parameters()],
        lambda m: [name for name, _ in m.named_buffers()],
        lambda m: [name for name, _ in m.named_modules()],
        lambda m: [name for name, _ in m.named_children()],
        lambda m: m.training,
        lambda m: repr(m).split("(", 1)[1],
        lambda m: {name for name in dir(m) if not name.startswith("_")},
    ]
    assert [look(twin) for look in looks] == [look(module) for look in looks]
    assert type(module) is (Head if make is instance else GraphedHead)
    assert not isinstance(module, (torch.nn.ModuleList, Model))
    module.load_state_dict(twin.state_dict(), strict=True)
    x = rows()
    assert torch.equal(twin(x), module(x))


@pytest.mark.parametrize("make", [instance, of_a_class])
def test_training_and_eval_are_obeyed(make: Callable[[], torch.nn.Module]) -> None:
    """In training mode calls are eager; back in eval the graphs serve again (H79, pytorch/pytorch#185752)."""
    module = make()
    for _ in range(3):
        module(rows())
    assert module.train() is module
    assert module.linear.training
    module(rows())
    assert {"training", "warmup"} == {str(r.reason) for r in module.forward.snapshot().rows if r.path == "eager"}
    module.eval()(rows())
    assert (3, 2) == counts(module.forward)


@pytest.mark.parametrize(
    "change", [lambda m: m.to(torch.float64), lambda m: m.double(), lambda m: m.to("cpu").double()]
)
@pytest.mark.parametrize("make", [instance, of_a_class, nested])
def test_to_moves_what_is_served(make: Callable[[], torch.nn.Module], change: Callable[..., Any]) -> None:
    """After .to(dtype) calls of the new type are right at once (H79, pytorch/pytorch#185752)."""
    module = make()
    for _ in range(3):
        module(rows())
    assert change(module) is module
    for _ in range(4):
        x = rows().double()
        assert torch.equal(plain(module, x), module(x))
        assert torch.float64 == module(x).dtype


@pytest.mark.parametrize("make", [instance, of_a_class])
def test_attributes_are_set_read_and_deleted_as_before(make: Callable[[], torch.nn.Module]) -> None:
    """A new attribute, a new child and a new parameter are the module's own, and what is served follows.

    (H79, pytorch/pytorch#185752)
    """
    module: Any = make()
    for _ in range(3):
        module(rows())
    module.note = "kept"
    assert "kept" == module.note
    del module.note
    assert not hasattr(module, "note")
    module.linear = frozen(torch.nn.Linear(3, 3))
    module.shift = torch.ones(3)
    for _ in range(4):
        x = rows()
        assert torch.equal(plain(module, x), module(x))
    assert {"linear.weight", "linear.bias", "shift"} == set(module.state_dict())
    module.linear.weight = torch.nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    for _ in range(4):
        x = rows()
        assert torch.equal(plain(module, x), module(x))


@pytest.mark.parametrize("make", [instance, of_a_class])
def test_a_forward_that_is_put_on_later_is_the_one_that_runs(make: Callable[[], torch.nn.Module]) -> None:
    """Whoever replaces the forward of a captured module gets theirs, and ours back when it is taken away.

    (H79, pytorch/pytorch#185752)
    """
    module: Any = make()
    for _ in range(3):
        module(rows())
    ours = module.__dict__.get("forward")
    module.forward = lambda x: x * 10
    x = rows()
    assert torch.equal(x * 10, module(x))
    del module.forward
    if ours is not None:
        module.forward = ours
    assert torch.equal(plain(module, x), module(x))


def test_a_module_without_its_capture_is_plain_again() -> None:
    """Deleting the instance's forward takes the capture away (H79, pytorch/pytorch#185752)."""
    module: Any = instance()
    for _ in range(3):
        module(rows())
    before = counts(module.forward)
    forward = module.forward
    del module.forward
    x = rows()
    assert torch.equal(plain(module, x), module(x))
    assert before == counts(forward)
    assert "forward" not in vars(module)


def test_a_captured_module_inside_a_model_changes_no_key() -> None:
    """A captured child keeps the keys of the model around it, and is found by its class.

    (H79, pytorch/pytorch#185752)
    """
    model = nested()
    assert ["head.shift", "head.linear.weight", "head.linear.bias"] == list(model.state_dict())
    assert [model.head] == [child for child in model.modules() if isinstance(child, Head)]


# -- anything that can be called -------------------------------------------------------------------------------------


class Callable_:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def run(self, x: torch.Tensor, by: int = 2) -> torch.Tensor:
        return x * by


class Named(Callable_):
    """A callable object with a name that is no text."""

    __name__ = 7


def twice(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(x)


@functools.lru_cache
def cached(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@functools.singledispatch
def dispatched(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def outer(forward: Any) -> Any:
    @functools.wraps(forward)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return inner


TARGETS: dict[str, tuple[Callable[[], Any], str]] = {
    "partial": (lambda: functools.partial(twice, Callable_()), "twice"),
    "partial of a partial": (lambda: functools.partial(functools.partial(twice), Callable_()), "twice"),
    "partial of a method": (lambda: functools.partial(Callable_().run, by=2), "Callable_.run"),
    "partial of an object": (lambda: functools.partial(Callable_()), "Callable_"),
    "bound method": (lambda: Callable_().run, "Callable_.run"),
    "static method": (lambda: Engine.__dict__["pure"], "Engine.pure"),
    "callable object": (Callable_, "Callable_"),
    "object with a strange name": (Named, "Named"),
    "lambda": (lambda: lambda x: x * 2, "<lambda>"),
    "wrapped": (lambda: outer(Callable_().run), "Callable_.run"),
    "cached": (lambda: cached, "cached"),
    "single dispatch": (lambda: dispatched, "dispatched"),
    "builtin": (lambda: torch.relu, "relu"),
    "function of torch": (lambda: torch.nn.functional.relu, "relu"),
    "operator": (lambda: torch.ops.aten.relu.default, "relu"),
    "slot": (lambda: torch.Tensor.abs, "abs"),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_whatever_can_be_called_is_captured_and_named(kind: str) -> None:
    """Each is called rightly, counted, and has a name to be exported under (H80, openvinotoolkit/nncf#3362)."""
    make, name = TARGETS[kind]
    target = make()
    eager = target.__func__ if isinstance(target, staticmethod) else target
    graphed = recorded(target)
    called = graphed.__func__ if isinstance(graphed, staticmethod) else graphed
    for _ in range(4):
        x = rows()
        assert torch.equal(eager(x), called(x))
    assert (3, 1) == counts(called)
    (shown,) = LEDGER.forwards
    assert name in shown
    assert shown in repr(called)


@pytest.mark.parametrize("kind", ["partial", "callable object", "lambda"])
def test_a_given_name_wins(kind: str) -> None:
    """The fall-back name is only used where none is given (H80, openvinotoolkit/nncf#3362)."""
    graphed = recorded(TARGETS[kind][0](), name="mine")
    for _ in range(3):
        graphed(rows())
    assert ["mine"] == [name for name, entry in LEDGER.forwards.items() if entry.snapshot().rows]


def test_partials_of_one_function_are_forwards_of_their_own() -> None:
    """Two partials share a name, and with it the counts, but never a graph (H80, openvinotoolkit/nncf#3362)."""
    one, other = (recorded(functools.partial(scaled, by)) for by in (2, 5))
    for _ in range(3):
        x = rows()
        assert torch.equal(x * 2, one(x))
        assert torch.equal(x * 5, other(x))
    assert (4, 2) == counts(one) == counts(other)


def scaled(by: int, x: torch.Tensor) -> torch.Tensor:
    return x * by


def test_a_partial_on_a_module_follows_its_weights() -> None:
    """new_forward(m) captured as a partial sees weights that are replaced (H80, openvinotoolkit/nncf#3362)."""
    head: Any = frozen(Head())
    graphed = recorded(functools.partial(new_forward, head))
    for _ in range(3):
        graphed(rows())
    head.linear.weight = torch.nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    for _ in range(4):
        x = rows()
        assert torch.equal(plain(head, x), graphed(x))
