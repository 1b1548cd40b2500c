"""Generated forwards, calls and sequences, and the run that compares each of them with eager.

A ``Scenario`` is a small program over tensors, the form in which it is wrapped, the keywords of ``capture``, a pool of
kinds of calls, and the events that use them. ``Run`` plays it on two equal worlds, one captured and one not, and
compares results, written inputs, caches and books after every event. Everything is data with a short ``repr``, so that
a shrunk counterexample can be read, and knows no device: the same scenario runs on a CPU and on a GPU.

All arithmetic is exact: small whole numbers, cut to [-8, 8] ahead of every sum. So one kernel rounds like another, and
results are compared bit by bit whatever path, bucket or device they come from. Without cross-row steps (``CROSS``)
every step works row by row, so that pad rows cannot change a row.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from graphprobe.graphed import capture
from graphprobe.ledger import LEDGER, ignore
from graphprobe.snapshot import ForwardSnapshot

WIDTH, SLOTS = 3, 16
SCRATCH = SLOTS - 1
"""The slot of the cache that pad rows write into."""

STALE = 64
"""Calls of one size during which storage replaced under a living tensor may go unseen."""

names = (f"generated {n}" for n in itertools.count())


# -- programs ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bag:
    """A batch as engines pass it: a dataclass of tensors and numbers."""

    t: Any
    factor: float


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Frame:
    """What a step of a program sees: ``h`` is the value so far, the rest are the arguments and the world outside."""

    world: Any
    x: torch.Tensor
    y: torch.Tensor
    scale: Any
    shift: Any
    extra: Any
    h: torch.Tensor
    cache: torch.Tensor

    @property
    def width(self) -> int:
        return int(self.h.shape[1])

    @property
    def small(self) -> torch.Tensor:
        """``h`` as real numbers whose sums are exact."""
        h = self.h if self.h.is_floating_point() else self.h.float()
        return h.clamp(-8, 8)

    def weight(self) -> torch.Tensor:
        return self.world.w[: self.width, : self.width].to(self.small.dtype)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, in its own order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in tensors(getattr(value, f.name))]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for item in items for t in tensors(item)]


def _extra(f: Frame) -> torch.Tensor:
    h = f.h * f.extra.factor if isinstance(f.extra, Bag) else f.h
    for place, tensor in enumerate(tensors(f.extra)):
        h = h + tensor * (place + 1)
    return h


def _store(f: Frame) -> torch.Tensor:
    f.cache[:, : f.width].index_copy_(0, f.y, f.h.to(f.cache.dtype))
    return f.h + f.cache[f.y, : f.width]


def _accumulate(f: Frame) -> torch.Tensor:
    f.cache[:, : f.width].index_add_(0, f.y, f.small.to(f.cache.dtype))
    return f.h


def _workspace(f: Frame) -> torch.Tensor:
    rows = f.world.space[: len(f.h), : f.width]
    rows.copy_(f.h)
    return rows * 1


def _part_of_a_copy(f: Frame) -> torch.Tensor:
    h = f.h.clone()
    h[:, :1] = 0
    h[:, -1].add_(1)
    return h


def _write_x(f: Frame) -> torch.Tensor:
    f.x.add_(1)
    return f.h


def _out(f: Frame) -> torch.Tensor:
    return torch.add(f.h, 1, out=torch.empty_like(f.h))


Step = Callable[[Frame], torch.Tensor]

PURE: dict[str, Step] = {
    "double": lambda f: f.h + f.h,
    "negate": lambda f: -f.h,
    "clamp": lambda f: f.h.clamp(-8, 8),
    "relu": lambda f: torch.relu(f.h) + 0,  # the sign of relu(-0.0) depends on the kernel
    "scale": lambda f: f.h * f.scale,
    "add y": lambda f: f.h + f.y.to(f.h.dtype)[:, None],
    "shift": lambda f: f.h if f.shift is None else f.h + f.shift,
    "extra": _extra,
    "matmul": lambda f: f.small @ f.weight() + 0.0,
    "linear": lambda f: torch.nn.functional.linear(f.small, f.weight()) + 0.0,
    "constant": lambda f: f.h + f.world.k[: f.width],
    "entry": lambda f: f.h + f.world.table["t"][: f.width],
    "number": lambda f: f.h * f.world.factor,
    "made inside": lambda f: f.h + torch.full((f.width,), 2.0, device=f.h.device),
    "columns": lambda f: torch.cat([f.h[:, 1:], f.h[:, :1]], 1),
    "split": lambda f: torch.cat(list(reversed(f.h.split(1, 1))), 1),
    "sort": lambda f: (f.h + 0.0).sort(1).values,
    "flip": lambda f: f.h.flip(1),
    "view": lambda f: f.h[:, None].squeeze(1),
    "layout": lambda f: f.h.t().contiguous().t(),
    "double precision": lambda f: f.h.double(),
    "half precision": lambda f: f.h.to(torch.bfloat16),
    "out": _out,
    "part of a copy": _part_of_a_copy,
}
WRITING: dict[str, Step] = {
    "write x": _write_x,
    "write h": lambda f: f.h.add_(1),
    "store": _store,
    "accumulate": _accumulate,
    "recall": lambda f: f.h + f.cache[f.y, : f.width],
    "workspace": _workspace,
}
CROSS: dict[str, Step] = {
    "less the sum": lambda f: f.small - f.small.sum(0),
    "rows reversed": lambda f: f.h.flip(0),
}
STEPS = {**PURE, **WRITING, **CROSS}

OUTPUTS: dict[str, Callable[[Frame], Any]] = {
    "tensor": lambda f: f.h,
    "input": lambda f: f.x,
    "view of an input": lambda f: f.x[:, :1],
    "with the input": lambda f: (f.h, f.x),
    "views of one another": lambda f: {"h": f.h, "same": f.h, "column": f.h[:, 0], "turned": f.h.t()},
    "dataclass": lambda f: Bag({"h": f.h}, 1.5),
    "named tuple": lambda f: Pair(f.h, [None, True, 1, "text"]),
    "first row": lambda f: Pair(f.h, f.h[:1]),
    "echo": lambda f: {"scale": f.scale, "h": [f.h], "none": (), "shift": f.shift},
    "extra": lambda f: (f.h, f.extra),
    "outside": lambda f: [f.h, f.world.k],
    "part of the cache": lambda f: [f.h, f.cache[:2]],
}
CROSS_OUTPUTS: dict[str, Callable[[Frame], Any]] = {"sum": lambda f: (f.h, f.small.sum(0))}


@dataclasses.dataclass(frozen=True)
class Program:
    """A forward: steps one after another on ``h``, which starts as ``x``, and the form of the result."""

    steps: tuple[str, ...]
    output: str

    @property
    def writes(self) -> bool:
        return any(step in WRITING for step in self.steps)

    @property
    def rewrites(self) -> bool:
        """Whether running twice writes the same values: a slot is stored before it is read, and nothing accumulates."""
        return not {"accumulate", "recall"} & set(self.steps) and self.output != "part of the cache"

    def __call__(self, world: Any, x: Any, y: Any, scale: Any, shift: Any, extra: Any, kv: Any) -> Any:
        frame = Frame(world, x, y, scale, shift, extra, x, world.cache if kv is None else kv)
        for step in self.steps:
            frame.h = STEPS[step](frame)
        return (OUTPUTS.get(self.output) or CROSS_OUTPUTS[self.output])(frame)


# -- kinds of calls ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of call: what its arguments are, how they are spelled, in which mode it comes."""

    n: int = 2
    width: int = WIDTH
    dtype: torch.dtype = torch.float32
    scale: Any = 1.0
    shift: Any = None
    extra: str | None = None
    shared: str = ""
    layout: str = "contiguous"
    spelling: str = "positional"
    mode: str = "no_grad"
    autocast: bool = False
    grad: bool = False
    born: str = "no_grad"


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


def laid_out(layout: str, n: int, width: int, ints: Callable[..., torch.Tensor]) -> torch.Tensor:
    """[n, width] small whole numbers in some layout."""
    if layout == "holes":
        return ints(n, 2 * width)[:, ::2]
    if layout == "transposed":
        return ints(width, n).t()
    if layout == "offset":
        return ints(n + 1, width)[1:]
    if layout == "every other row":
        return ints(2 * n, width)[::2]
    if layout == "expanded rows":
        return ints(1, width).expand(n, width)
    if layout == "expanded columns":
        return ints(n, 1).expand(n, width)
    return ints(n, width)


def contained(kind: str | None, parts: list[torch.Tensor]) -> Any:
    """Two tensors in a container of some kind."""
    a, b = parts
    forms: dict[str, Callable[[], Any]] = {
        "dict": lambda: {"a": a, "b": b},
        "dict the other way round": lambda: {"b": b, "a": a},
        "tuple": lambda: (a, None, b),
        "list": lambda: [a, b],
        "nested": lambda: {"a": [({"b": a}, 2)], "c": b},
        "named tuple": lambda: Pair(a, b),
        "dataclass": lambda: Bag(a, 2.0),
        "dataclass of a list": lambda: Bag([a, b], 1),
    }
    return None if kind is None else forms[kind]()


EXTRAS = [
    None, None, "dict", "dict the other way round", "tuple", "list", "nested", "named tuple", "dataclass",
    "dataclass of a list",
]  # fmt: skip


def arguments(kind: Kind, seed: int, device: str, rows: int | None = None) -> dict[str, Any]:
    """The arguments of one call by name, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    n = kind.n if rows is None else rows

    def ints(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=generator).to(kind.dtype).to(device)

    with torch.inference_mode(kind.born == "inference"), torch.no_grad():
        if kind.shared == "overlapping":
            memory = ints(n, kind.width + 1)
            x, other = memory[:, :-1], memory[:, 1:]
        else:
            x = laid_out(kind.layout, n, kind.width, ints)
            other = x if kind.shared == "same" else ints(n, kind.width)
        y = torch.randperm(SCRATCH, generator=generator)[:n].to(device)
        extra = contained(kind.extra or ("list" if kind.shared else None), [other, ints(n, kind.width)])
        shift = {"rows": lambda: ints(n, kind.width), "row": lambda: ints(kind.width), "cell": lambda: ints()[()]}.get(
            kind.shift, lambda: kind.shift
        )()
    if kind.grad and kind.dtype.is_floating_point and kind.born != "inference":
        x.requires_grad_()
    return {"x": x, "y": y, "scale": kind.scale, "shift": shift, "extra": extra}


def spelled(kind: Kind, given: dict[str, Any], more: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as (args, kwargs)."""
    x, y, scale = given["x"], given["y"], given["scale"]
    more = {**{name: given[name] for name in ("shift", "extra") if given[name] is not None}, **more}
    spellings: dict[str, Any] = {
        "positional": ((x, y, scale), more),
        "mixed": ((x,), {"scale": scale, "y": y, **more}),
        "keywords": ((), {**more, "scale": scale, "y": y, "x": x}),
        "default": ((x, y), more),
        "all": ((x, y, scale), {"shift": given["shift"], "extra": given["extra"], **more}),
        "missing": ((x,), more),
    }
    args, kwargs = spellings[kind.spelling]
    return args, kwargs


# -- scenarios -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is captured with which keywords, and the events: (what, index into ``pool``)."""

    program: Program
    form: str
    options: tuple[tuple[str, Any], ...]
    pool: tuple[Kind, ...]
    events: tuple[tuple[str, int], ...]
    static: bool = False
    weights_need_grad: bool = False

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)


FORMS = ("function", "method", "bound method", "module", "module class")
MODULES = ("module", "module class")

PADS: tuple[Any, ...] = (
    None, None, "zeros", "repeat",
    (("x", 0), ("y", SCRATCH), ("shift", 0), ("extra[a]", 1), ("extra[b]", "repeat"), ("extra[0]", 0),
     ("extra[1]", 0), ("extra[2]", "zeros"), ("extra.t", 3), ("extra.first", 0), ("extra.second", "repeat")),
)  # fmt: skip

FIELDS: dict[str, list[Any]] = {
    "n": [2, 2, 4, 4, 1, 3, 3, 5, 0, 6],
    "width": [WIDTH, WIDTH, 2],
    "dtype": [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64],
    "scale": [1.0, 0.0, -0.0, 1, True, 2.0, float("nan")],
    "shift": [None, None, 0, False, 2.0, "rows", "row", "cell"],
    "extra": EXTRAS,
    "shared": ["", "", "", "same", "overlapping"],
    "layout": [
        "contiguous", "contiguous", "contiguous", "holes", "transposed", "offset", "every other row", "expanded rows",
        "expanded columns",
    ],
    "spelling": ["positional"] * 4 + ["mixed", "keywords", "default", "all", "missing"],
    "mode": ["no_grad", "no_grad", "inference", "inference", "grad"],
    "autocast": [False, False, False, False, True],
    "grad": [False, False, False, False, False, True],
    "born": ["no_grad"] * 5 + ["inference"],
}  # fmt: skip
KINDS = st.builds(Kind, **{name: st.sampled_from(values) for name, values in FIELDS.items()})
PLAIN = st.builds(
    Kind,
    n=st.sampled_from([2, 1, 3, 4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scale=st.sampled_from([1.0, 2, 0.0]),
    shift=st.sampled_from([None, 2.0, "rows", "row"]),
    extra=st.sampled_from(EXTRAS),
    layout=st.sampled_from(["contiguous", "transposed", "holes"]),
    spelling=st.sampled_from(["positional", "mixed", "keywords", "default"]),
    mode=st.sampled_from(["no_grad", "inference"]),
)
"""Kinds of calls that nothing keeps from a graph."""


@st.composite
def pools(draw: Callable[..., Any]) -> tuple[Kind, ...]:
    """Up to four kinds, most of them alike but for one field: what a guard that does not look at it would mix up."""
    first = draw(st.one_of(PLAIN, KINDS))
    pool = [first]
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(["n"] * 6 + ["scale", "shared", "extra"] * 2 + list(FIELDS)))
        pool.append(dataclasses.replace(draw(st.sampled_from(pool)), **{name: draw(st.sampled_from(FIELDS[name]))}))
    return tuple(pool)


CALLS = ["call"] * 4 + ["burst"] * 4 + ["again", "ignored"]
CONTROL = [
    "warmup", "warmup", "reset", "disabled", "trained", "disable", "enable", "enable", "train", "eval", "eval",
    "replace w", "replace k", "retype k", "replace entry", "replace cache", "replace cache", "write w", "write cache",
]  # fmt: skip
BUCKETS = [(2, 4), (1, 2, 4), (2,), (1, 2, 3, 4, 5), (3, 4), (4,), (3,), (1, 5), (5, 2, 1)]


def programs(
    steps: Iterable[str], outputs: Iterable[str], launches: bool, first: tuple[str, ...] = ()
) -> st.SearchStrategy[Program]:
    """Programs of some of these steps after the ``first`` ones.

    ``launches``: the last one does something on the device in any case.
    """
    last = ["double"] * launches
    drawn = st.lists(st.sampled_from(list(steps)), min_size=not first, max_size=6).map(lambda s: (*first, *s, *last))
    return st.builds(Program, drawn, st.sampled_from(list(outputs)))


@st.composite
def scenarios(draw: Callable[..., Any], control: bool, launches: bool = False, most: int = 24) -> Scenario:
    """Any scenario; ``control`` mixes what changes the wrapper or the world into the calls.

    ``launches``: the forward does something on the device, whatever its arguments are.
    """
    pad = draw(st.sampled_from(PADS))
    steps, outputs = {**PURE, **WRITING}, dict(OUTPUTS)
    if pad is None:
        steps, outputs = steps | CROSS, outputs | CROSS_OUTPUTS
    program = draw(programs(steps, outputs, launches))
    options = {
        "buckets": draw(st.sampled_from(BUCKETS)),
        "pad": pad,
        "outputs": draw(st.sampled_from(["clone", "clone", "alias"])),
        "eager_first": draw(st.sampled_from([1, 1, 0, 2])),
        "timing": draw(st.sampled_from([64, 1, 2, 3, 0])),
        "verify": draw(st.sampled_from([0, 0, 1, 2, 3])),
        "max_graphs": draw(st.sampled_from([64, 64, 1, 2])),
        "lazy": draw(st.sampled_from([None, None, True] + [False] * control)),
        "state": draw(st.sampled_from([None, "tensors"] + ["rewrites"] * program.rewrites)),
    }
    events = st.tuples(st.sampled_from(CALLS + (CONTROL if control else [])), st.integers(0, 3))
    form = draw(st.sampled_from(FORMS))
    return Scenario(
        program=program,
        form=form,
        options=tuple(options.items()),
        pool=draw(pools()),
        events=tuple(draw(st.lists(events, min_size=min(6, most), max_size=most))),
        static=draw(st.booleans()),
        weights_need_grad=draw(st.sampled_from([False, False, True])) if form in MODULES else False,
    )


@st.composite
def padded(draw: Callable[..., Any], launches: bool = False) -> Scenario:
    """One kind of call at all sizes, served by larger buckets where that is allowed."""
    pad = draw(st.sampled_from([PADS[-1], "zeros", "repeat", PADS[-1]]))
    base = draw(PLAIN)
    first = (draw(st.sampled_from(["accumulate", *WRITING, "double", "extra"])),)
    options = {
        "buckets": draw(st.sampled_from([(2, 4), (4,), (5,), (3, 5)])),
        "pad": pad,
        "outputs": draw(st.sampled_from(["clone", "alias"])),
        "eager_first": draw(st.sampled_from([1, 0])),
        "timing": draw(st.sampled_from([1, 3])),
        "verify": draw(st.sampled_from([0, 2])),
        "state": None,
    }
    # One row is contiguous either way: what is a copy of two rows is the argument itself of one (docs/limits.md).
    steps = {name: step for name, step in {**PURE, **WRITING}.items() if name != "layout"}
    sizes = draw(st.lists(st.integers(1, 5), min_size=12, max_size=24))
    warm = draw(st.booleans())
    return Scenario(
        program=draw(programs(steps, OUTPUTS, launches, first)),
        form=draw(st.sampled_from(FORMS)),
        options=tuple(options.items()),
        pool=tuple(dataclasses.replace(base, n=n) for n in range(1, 6)),
        events=(*([("warmup", 0)] * warm), *(("call", n - 1) for n in sizes)),
        static=draw(st.booleans()),
    )


CONTRASTS: dict[str, tuple[tuple[str, ...], list[Any]]] = {
    "scale": (("scale",), [1.0, 1, True, 0.0, -0.0, float("nan"), 2.0]),
    "shift": (("shift",), [None, 0, False, 2.0, "rows", "row", "cell"]),
    "extra": (("extra",), EXTRAS),
    "shared": (("write x", "extra"), ["", "same", "overlapping"]),
    "layout": (("view", "write h"), ["contiguous", "holes", "transposed", "offset", "every other row"]),
    "dtype": (("matmul",), [torch.float32, torch.float64, torch.bfloat16, torch.int64]),
    "width": (("constant",), [WIDTH, 2]),
    "mode": (("matmul",), list(MODES)),
    "autocast": (("matmul",), [False, True]),
    "grad": (("linear",), [False, True]),
    "spelling": (("scale",), ["positional", "mixed", "keywords", "default", "all"]),
    "cache": (("store", "recall"), []),
}
"""What may differ between two calls, the steps in which it shows, and the values; the cache is replaced in between."""


@st.composite
def contrasts(draw: Callable[..., Any]) -> Scenario:
    """Kinds of calls that differ in one thing, on which the result depends."""
    name = draw(st.sampled_from(list(CONTRASTS)))
    first, values = CONTRASTS[name]
    base = dataclasses.replace(draw(PLAIN), n=draw(st.sampled_from([2, 4])))
    pool = [base]
    if values:
        chosen = draw(st.lists(st.sampled_from(values), min_size=2, max_size=4, unique_by=repr))
        pool = [dataclasses.replace(base, **{name: value}) for value in chosen]
    options = {
        "buckets": (2, 4),
        "pad": draw(st.sampled_from([None, "zeros"])),
        "outputs": draw(st.sampled_from(["clone", "alias"])),
        "eager_first": draw(st.sampled_from([1, 0])),
        "timing": draw(st.sampled_from([64, 2])),
        "verify": 0,
        "state": None,
    }
    what = st.sampled_from(["call", "burst", "burst"] + ["replace cache"] * (name == "cache"))
    return Scenario(
        program=draw(programs(PURE, OUTPUTS, False, first)),
        form=draw(st.sampled_from(FORMS)),
        options=tuple(options.items()),
        pool=tuple(pool),
        events=tuple(draw(st.lists(st.tuples(what, st.integers(0, 3)), min_size=6, max_size=16))),
        static=name == "cache" or draw(st.booleans()),
    )


@st.composite
def pure(draw: Callable[..., Any], launches: bool = False, alias: bool = True) -> Scenario:
    """A forward that writes nothing, in calls that nothing keeps from a graph; no events.

    ``alias``: results may be the graph's own memory, which a call of another thread overwrites.
    """
    options = {
        "buckets": (1, 2, 3, 4),
        "pad": None,
        "outputs": draw(st.sampled_from(["clone", "alias"] if alias else ["clone"])),
        "eager_first": draw(st.sampled_from([1, 0, 2])),
        "timing": draw(st.sampled_from([64, 1, 2, 3])),
        "verify": draw(st.sampled_from([0, 2])),
        "state": None,
    }
    return Scenario(
        program=draw(programs(PURE, OUTPUTS, launches)),
        form=draw(st.sampled_from(FORMS)),
        options=tuple(options.items()),
        pool=tuple(draw(st.lists(PLAIN, min_size=1, max_size=3, unique=True))),
        events=(),
    )


# -- a captured world and a plain one ------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """The world as a module, whose forward is the program."""

    program: Program

    def forward(self, x: Any, y: Any, scale: Any = 1.0, *, shift: Any = None, extra: Any = None, kv: Any = None) -> Any:
        return self.program(self, x, y, scale, shift, extra, kv)


class Side:
    """One world with the forward on it, captured where ``options`` are given.

    ``call`` is what is called, ``controls`` carries ``warmup``, ``reset`` and the like, ``state`` are the tensors that
    were declared as the forward's state.
    """

    def __init__(self, scenario: Scenario, device: str, options: dict[str, Any] | None) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(0)

        def ints(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=generator).float().to(device)

        cache, space = ints(SLOTS, WIDTH), torch.zeros(SLOTS, WIDTH, device=device)
        self.state = [cache, space] if scenario.option("state") == "tensors" else []
        if options is not None and self.state:
            options = {**options, "state": self.state}
        make = self._module if scenario.form in MODULES else self._function
        self.world, self.call, self.controls = make(scenario.program, scenario.form, options)
        self.world.w, self.world.k, self.world.table = ints(WIDTH, WIDTH), ints(WIDTH), {"t": ints(WIDTH)}
        self.world.factor, self.world.cache, self.world.space = 2, cache, space
        if scenario.form in MODULES:
            attributes = vars(self.world)
            self.world.w = torch.nn.Parameter(attributes.pop("w"), requires_grad=scenario.weights_need_grad)
            for name in ("k", "cache", "space"):
                self.world.register_buffer(name, attributes.pop(name))

    def _module(self, program: Program, form: str, options: dict[str, Any] | None) -> tuple[Any, Any, Any]:
        kind = type("Net", (Net,), {"program": program, "forward": Net.forward})
        if options is not None and form == "module class":
            kind = capture(kind, **options)
        net = kind().eval()
        if options is not None and form == "module":
            net = capture(net, **options)
        return net, net, net.forward

    def _function(self, program: Program, form: str, options: dict[str, Any] | None) -> tuple[Any, Any, Any]:
        world = types.SimpleNamespace()

        def forward(x: Any, y: Any, scale: Any = 1.0, *, shift: Any = None, extra: Any = None, kv: Any = None) -> Any:
            return program(world, x, y, scale, shift, extra, kv)

        def step(
            self: Any, x: Any, y: Any, scale: Any = 1.0, *, shift: Any = None, extra: Any = None, kv: Any = None
        ) -> Any:
            return program(self.world, x, y, scale, shift, extra, kv)

        if form == "function":
            call = forward if options is None else capture(forward, **options)
            return world, call, call
        decorated = options is not None and form == "method"
        engine: Any = type("Engine", (), {"step": capture(step, **(options or {})) if decorated else step})()
        engine.world = world
        call = engine.step
        if options is not None and form == "bound method":
            call = capture(call, **options)
        return world, call, call


# -- the run -------------------------------------------------------------------------------------------------------


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits; every NaN is one NaN.

    Whether they require grad is left out: a graph gives a clone of an input that it hands back, made without grad.
    """
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    a, b = a.detach(), b.detach()
    if not a.is_floating_point():
        return torch.equal(a, b)
    missing = a.isnan()
    if not torch.equal(missing, b.isnan()):
        return False
    a, b = a.masked_fill(missing, 0), b.masked_fill(missing, 0)
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree within the tolerance of their dtype."""
    try:
        torch.testing.assert_close(a, b, equal_nan=True)
    except AssertionError:
        return False
    return True


def difference(expected: Any, actual: Any, same: Callable[..., bool] = equal, path: str = "result") -> str:
    """Where ``actual`` is not what eager gave, as text; empty where it is."""
    if type(expected) is not type(actual):
        return f"{path} is a {type(actual).__name__}, in eager a {type(expected).__name__}"
    if isinstance(expected, torch.Tensor):
        return "" if same(expected, actual) else f"{path} is {actual}, in eager {expected}"
    if dataclasses.is_dataclass(expected):
        return difference(vars(expected), vars(actual), same, path)
    if isinstance(expected, dict):
        if list(expected) != list(actual):
            return f"{path} has the keys {list(actual)}, in eager {list(expected)}"
        return next(filter(None, (difference(v, actual[k], same, f"{path}[{k!r}]") for k, v in expected.items())), "")
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            return f"{path} has {len(actual)} items, in eager {len(expected)}"
        pairs = enumerate(zip(expected, actual, strict=True))
        return next(filter(None, (difference(a, b, same, f"{path}[{i}]") for i, (a, b) in pairs)), "")
    return "" if repr(expected) == repr(actual) else f"{path} is {actual!r}, in eager {expected!r}"


class Raised:
    """What a call raised, compared by its type."""

    def __init__(self, error: Exception) -> None:
        self.kind, self.text = type(error), str(error)

    def __repr__(self) -> str:
        return f"{self.kind.__name__}: {self.text[:200]}"


def attempt(call: Callable[[], Any]) -> Any:
    """The result of a call, or what it raised, without the frames that would keep tensors alive."""
    try:
        return call()
    except Exception as error:
        return Raised(error)


@contextlib.contextmanager
def modes(kind: Kind, device: str) -> Iterator[None]:
    """The modes in which calls of this kind come."""
    with MODES[kind.mode](), torch.autocast(device, torch.bfloat16, enabled=kind.autocast):
        yield


def check_books(snapshot: ForwardSnapshot, calls: int) -> None:
    """The sums that always hold: each call once, each eager one with a reason, padding and hit rate as they follow."""
    rows = snapshot.rows
    assert calls == snapshot.graph_calls + snapshot.eager_calls == sum(row.calls for row in rows), (calls, rows)
    counted = sum(row.calls for row in rows if row.reason is not None and row.reason.counted)
    total = snapshot.graph_calls + counted
    assert snapshot.hit_rate == (snapshot.graph_calls / total if total else None)
    for row in rows:
        assert (row.path == "graph") == (row.reason is None) == (row.bucket is not None), row
        assert row.bucket is None or row.bucket in snapshot.buckets, row
        assert row.padding == (0 if row.bucket is None else row.calls * (row.bucket - row.batch_size)), row
    assert snapshot.graph_calls == 0 or sum(snapshot.captures.values()) > 0, snapshot.captures


Served = tuple[int, str, "int | None", str]
"""How a call was served: batch size, path, bucket, reason."""


def served(snapshot: ForwardSnapshot) -> collections.Counter[Served]:
    """Calls by how they were served."""
    found: collections.Counter[Served] = collections.Counter()
    for row in snapshot.rows:
        found[row.batch_size, row.path, row.bucket, str(row.reason or "")] += row.calls
    return found


class Run:
    """Plays a scenario on a device. ``lenient``: padded results are compared within the tolerance of their dtype."""

    def __init__(
        self, scenario: Scenario, device: str = "cpu", backend: str = "recorder", lenient: bool = False
    ) -> None:
        self.scenario, self.device, self.lenient = scenario, device, lenient
        self.name = next(names)
        options = dict(scenario.options)
        if isinstance(options["pad"], tuple):
            options["pad"] = dict(options["pad"])
        if scenario.static:
            options["static"] = ("kv",)
        options |= {"name": self.name, "backend": backend}
        self.plain, self.graphed = Side(scenario, device, None), Side(scenario, device, options)
        self.sides = (self.plain, self.graphed)
        self.enabled, self.training = True, False
        self.calls = self.seed = 0
        self.counts: collections.Counter[Served] = collections.Counter()
        self.path: Served | None = None
        self._previous: tuple[Any, Any] | None = None
        self._last: dict[Kind, tuple[Any, ...]] = {}
        self._graveyard: list[torch.Tensor] = []

    def play(self) -> dict[tuple[Any, ...], int]:
        """All events, then the books; returns the rows of the snapshot as (what, calls)."""
        try:
            for what, index in self.scenario.events:
                self.event(what, self.scenario.pool[index % len(self.scenario.pool)])
            return self.books()
        finally:
            LEDGER.forwards.pop(self.name, None)

    def books(self) -> dict[tuple[Any, ...], int]:
        snapshot = self.graphed.controls.snapshot()
        check_books(snapshot, self.calls)
        return {(r.batch_size, r.path, r.bucket, str(r.reason or ""), r.padding): r.calls for r in snapshot.rows}

    def swap(self, what: str) -> None:
        """Replace storage under a living tensor between the calls of a forward that writes nothing.

        For so many calls of a size nobody looks at the results; then they are eager's again.
        """
        for kind in self.scenario.pool:
            self.event("burst", kind)
        self.event(what, self.scenario.pool[0])
        for kind in self.scenario.pool:
            values = arguments(kind, 0, self.device)
            with modes(kind, self.device):
                for _ in range(STALE):
                    self.bound(self.graphed, kind, values)()
            self.calls += STALE
            self.counts = served(self.graphed.controls.snapshot())
            self.event("burst", kind)

    def event(self, what: str, kind: Kind) -> None:
        if what == "call":
            self.serve(kind)
        elif what == "burst":
            for _ in range(3):
                self.serve(kind)
        elif what == "again":
            self.serve(kind, again=True)
        elif what == "ignored":
            with ignore():
                self.serve(kind, counted=False)
        elif what in ("disabled", "trained"):
            there, back = ("disable", "enable") if what == "disabled" else ("train", "eval")
            self.control(there, kind)
            self.serve(kind)
            self.control(back, kind)
        else:
            # A result may be a tensor that is to be replaced; its owner has to let go of it.
            self._previous = None
            self.control(what, kind)

    def serve(self, kind: Kind, again: bool = False, counted: bool = True) -> None:
        """One call on both sides, and everything that can be said about it."""
        if again and kind in self._last:
            self._previous = None
            given = self._last[kind]
        else:
            self.seed += 1
            given = tuple(arguments(kind, self.seed, self.device) for _ in self.sides)
            self._last[kind] = given
        results = []
        with modes(kind, self.device):
            for side, values in zip(self.sides, given, strict=True):
                results.append(attempt(self.bound(side, kind, values)))
        expected, actual = results
        raised = isinstance(expected, Raised)
        self._count(kind, given[0], counted and not raised)
        self._compare(kind, given, expected, actual)
        if self.scenario.option("outputs") == "clone" and not raised and not isinstance(actual, Raised):
            self._previous = (expected, actual)

    def bound(self, side: Side, kind: Kind, values: dict[str, Any]) -> Callable[[], Any]:
        args, kwargs = spelled(kind, values, {"kv": side.world.cache} if self.scenario.static else {})
        return lambda: side.call(*args, **kwargs)

    def _count(self, kind: Kind, given: dict[str, Any], counted: bool) -> None:
        """Exactly one row has grown by one call, and its path or reason is one that this call may have."""
        now = served(self.graphed.controls.snapshot())
        grown = now - self.counts
        self.counts = now
        assert sum(grown.values()) == int(counted), f"{kind} was counted as {dict(grown)}"
        self.calls += int(counted)
        self.path = next(iter(grown), None)
        if self.path is not None:
            self._judge(kind, given, *self.path)

    def _judge(self, kind: Kind, given: dict[str, Any], size: int, path: str, bucket: int | None, reason: str) -> None:
        buckets = self.scenario.option("buckets")
        assert size == kind.n, f"{kind} was counted with {size} rows"
        certain = self.certain(kind, given)
        assert certain in ("", reason), f"{kind} was served by {path} ({reason}), expected {certain}"
        never = {"disabled", "empty_batch", "training", "batch_too_large", "unknown", "unsupported_device", "forked"}
        assert certain or reason not in never, f"{kind}: {reason}"
        if path == "graph":
            assert bucket is not None and size <= bucket, (size, bucket)
            assert size == bucket or self.scenario.option("pad") is not None, f"{size} rows ran padded to {bucket}"
        elif reason == "no_exact_bucket" and self.scenario.option("pad") is None:
            assert size not in buckets, f"{size} has a bucket"

    def certain(self, kind: Kind, given: dict[str, Any]) -> str:
        """The one reason that this call can have, where that follows from the call and the wrapper's state alone."""
        if not self.enabled:
            return "disabled"
        if kind.n == 0:
            return "empty_batch"
        module = self.scenario.form in MODULES
        if module and self.training:
            return "training"
        needed = any(t.requires_grad for t in tensors(given)) or (module and self.scenario.weights_need_grad)
        if kind.mode == "grad" and needed:
            return "grad"
        return "batch_too_large" if kind.n > max(self.scenario.option("buckets")) else ""

    def _compare(self, kind: Kind, given: tuple[Any, ...], expected: Any, actual: Any) -> None:
        if isinstance(expected, Raised) or isinstance(actual, Raised):
            same = isinstance(expected, Raised) and isinstance(actual, Raised) and expected.kind is actual.kind
            assert same, f"{kind} ({self.path}): eager {expected!r}, captured {actual!r}"
            return
        padded = self.path is not None and self.path[2] not in (None, kind.n)
        found = difference(expected, actual, close if padded and self.lenient else equal)
        assert not found, f"{kind} ({self.path}): {found}"
        found = difference(given[0], given[1], path="arguments")
        assert not found, f"{kind} ({self.path}) after the call: {found}"
        self.check_caches(f"{kind} ({self.path})")
        if self._previous is not None:
            found = difference(*self._previous, path="an earlier result")
            assert not found, f"{kind} ({self.path}) changed {found}"

    def check_caches(self, when: str) -> None:
        """What the forward wrote outside is what eager wrote, the slot for pad rows apart."""
        plain, graphed = (side.world.cache[:SCRATCH] for side in self.sides)
        assert equal(plain, graphed), f"{when} left {graphed} in the cache, eager {plain}"

    def control(self, what: str, kind: Kind) -> None:
        if what == "warmup":
            self.warmup(kind)
        elif what == "reset":
            self.graphed.controls.reset()
        elif what in ("disable", "enable"):
            self.enabled = self.graphed.controls.enabled = what == "enable"
        elif what in ("train", "eval"):
            self.training = what == "train"
            if self.scenario.form in MODULES:
                for side in self.sides:
                    side.world.train(self.training)
        else:
            self.seed += 1
            for side in self.sides:
                self._change(side, what)
        self.counts = served(self.graphed.controls.snapshot())

    def warmup(self, kind: Kind) -> None:
        """Warm-up on calls of one kind; the plain world runs eagerly what a warm-up runs eagerly, once per bucket."""
        runs = max(1, self.scenario.option("eager_first"))
        order = sorted(self.scenario.option("buckets"), reverse=True)

        def inputs(side: Side, bucket: int) -> tuple[Any, Any]:
            more = {"kv": side.world.cache} if self.scenario.static else {}
            return spelled(kind, arguments(kind, 0, self.device, bucket), more)

        def eagerly() -> None:
            for bucket in order:
                for _ in range(runs):
                    args, kwargs = inputs(self.plain, bucket)
                    self.plain.call(*args, **kwargs)

        before = [t.clone() for t in self.plain.state]
        with modes(kind, self.device):
            expected = attempt(eagerly)
            actual = attempt(lambda: self.graphed.controls.warmup(lambda n: inputs(self.graphed, n), progress=False))
        for tensor, value in zip(self.plain.state, before, strict=True):
            tensor.copy_(value)
        same = isinstance(expected, Raised) == isinstance(actual, Raised)
        assert same, f"warmup of {kind}: eager {expected!r}, captured {actual!r}"
        self.check_caches(f"warmup of {kind}")

    def _change(self, side: Side, what: str) -> None:
        """Replace or write what the forward reads from outside."""
        action, _, target = what.partition(" ")
        world = side.world
        name = "t" if target == "entry" else target
        holders = [world.table, vars(world), *(vars(world).get(kind, {}) for kind in ("_parameters", "_buffers"))]
        holder = next(h for h in holders if name in h)
        old = holder[name]
        new = torch.full_like(old, float(self.seed % 5 - 2)).detach()
        if action == "write":
            with torch.no_grad():
                old.copy_(new)
        elif action == "swap":
            # The old memory stays alive, as it does where an optimizer keeps it: a graph that reads it is wrong.
            self._graveyard.append(old.data)
            old.data = new
        elif target != "cache" or not side.state:
            if target == "cache" and self.scenario.static:
                # The memory of a tensor that is passed must not be that of an earlier one by the allocator's chance.
                self._graveyard.append(old)
            fresh: Any = new.double() if action == "retype" else new.to(torch.float32)
            if isinstance(old, torch.nn.Parameter):
                fresh = torch.nn.Parameter(fresh, requires_grad=old.requires_grad)
            holder[name] = fresh
