"""Routes: what a call whose decision is cached has left to do. The hot path of inlet 1 is in this file.

A graph call: take the lock, look whether the graph lives, copy, replay, count, hand out. An eager call: run, count.
Every Nth call of a route is a sampled one: it is timed, and what is too dear for every call is looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from graphprobe.attributes import Settings
from graphprobe.backends.base import Backend, Graph
from graphprobe.calls import Call
from graphprobe.dispatch import Decision
from graphprobe.ledger import COUNT_LOCK, FREE_THREADED, Cell
from graphprobe.options import Options
from graphprobe.outputs import Make, Outputs
from graphprobe.reasons import FallbackReason
from graphprobe.signature import Guard, Picker, dispatch_modes
from graphprobe.staging import Copier, Input, Staging
from graphprobe.turn import MISS, WAIT, Turn
from graphprobe.watch import Pointers, Watch, alias, follow, storage

Tensors = tuple[torch.Tensor, ...]

Serve = Callable[[Any, tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...], Cell], Any]
"""(owner, args, kwargs, tensors, cell) -> the forward's result, or MISS."""

Strays = Callable[[tuple[torch.Tensor, ...]], bool]
"""Whether a call is not the route's although its guard passes."""

Sampled = Callable[[list[str], Serve, tuple[Any, ...]], Any]
"""(what is due, serve, serve's arguments) -> the result of serving, or MISS."""


class Life:
    """Whether a graph may be replayed. Plain fields: a weak reference's callback may run anywhere."""

    __slots__ = ("live", "reason", "text")

    def __init__(self) -> None:
        self.live = True
        self.reason = FallbackReason.STATIC_MOVED
        self.text = ""

    def over(self) -> bool:
        """Whether it has been lost, perhaps just now."""
        return not self.live

    def displaced(self) -> None:
        """A tensor that the graph reads has other memory."""
        self.lose(FallbackReason.WEIGHTS_MOVED, "its storage was replaced")

    def lose(self, reason: FallbackReason = FallbackReason.STATIC_MOVED, text: str = "") -> None:
        """The next call must not replay, for ``reason``; ``text`` says more."""
        self.reason = reason
        self.text = text
        self.live = False


class Captured:
    """One graph of one bucket with the memory it reads and writes."""

    __slots__ = (
        "_refs",
        "bucket",
        "checks",
        "counters",
        "graph",
        "life",
        "outputs",
        "pointers",
        "random",
        "rows",
        "schedules",
        "settings",
        "staging",
        "undeclared",
        "written",
    )

    def __init__(
        self,
        bucket: int,
        graph: Graph,
        staging: Staging,
        outputs: Outputs,
        watch: Watch,
        outside: list[Any],
        settings: Settings,
        undeclared: str = "",
    ) -> None:
        self.bucket = bucket
        self.rows = staging.rows
        self.graph = graph
        self.staging = staging
        self.outputs = outputs
        self.schedules: dict[int, Schedule] = {}
        self.written = tuple(staging.inputs[i].index for i in watch.written)
        self.random = watch.random
        self.counters = [alias(tensor) for tensor in watch.counters.values()]
        self.life = Life()
        # The callback holds the life, not the graph: a cycle would keep the pool until the next collection.
        self._refs = follow(outside, self.life.lose)
        self.pointers = Pointers([value for value in outside if isinstance(value, torch.Tensor)])
        self.settings = settings
        self.undeclared = undeclared
        self.checks = 0

    def passes(self) -> bool:
        """Whether the graph still holds, looking at what is too dear for every call; if not, its life is over."""
        self.checks += 1
        if (shape := self.pointers.moved()) is not None:
            self.life.lose(FallbackReason.WEIGHTS_MOVED, f"a tensor of shape {list(shape)} has other memory")
        elif self.pointers.in_autograd():
            self.life.lose(FallbackReason.GRAD)
        elif name := self.settings.changed():
            self.life.lose(FallbackReason.STATIC_MOVED, f"{name} is not what it was at the capture")
        return self.life.live

    def shares(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether an input that the forward writes lies in the memory of another one: a graph copies them apart."""
        if not self.written:
            return False
        places = [storage(t) for t in tensors]
        return any(places.count(places[index]) > 1 for index in self.written)

    def drop(self) -> None:
        """Give up the graph and its memory."""
        if self.life.live:
            # Not for a fault of its own: a call that meets it now is one on the way to the next capture.
            self.life.lose(FallbackReason.WARMUP)
        self.graph.reset()


class Route:
    """A cached decision for one size, with the guards under which it holds.

    ``guard`` compares what the tensors are, ``strays`` (None where nothing else can differ) says whether something
    else does: see :func:`strays`. ``grad`` is the grad mode, None where it does not matter; ``modes`` is the number of
    function modes. ``sampled`` serves the calls that ``schedule`` picks, counted down in ``tick``. ``hit`` is the
    function for calls like the last one; ``live`` is what of it leads to the graph, nothing once the route is retired.
    """

    __slots__ = (
        "__weakref__",
        "cell",
        "decision",
        "grad",
        "guard",
        "hit",
        "live",
        "modes",
        "sampled",
        "schedule",
        "serve",
        "strays",
        "tick",
        "training",
        "work",
    )

    def __init__(
        self,
        decision: Decision,
        cell: Cell,
        guard: Guard,
        grad: bool | None,
        modes: int,
        training: bool,
        strays: Strays | None,
        serve: Serve,
        schedule: Schedule,
        sampled: Sampled,
        work: GraphWork | None = None,
    ) -> None:
        self.schedule = schedule
        self.tick = schedule.tick
        self.sampled = sampled
        self.decision = decision
        self.cell = cell
        self.guard = guard
        self.grad = grad
        self.modes = modes
        self.training = training
        self.strays = strays
        self.serve = serve
        self.work = work
        self.hit: Callable[..., Any] | None = None
        self.live: list[Any] = [None]

    def retire(self) -> None:
        """No call is served by it any more, not even by one that keeps its ``hit``."""
        self.live[0] = None


class Plan:
    """One structure of a call in one spelling: how to pick its tensors, where its rows are, the routes by size.

    ``pick`` is None where the positional arguments are the tensors.
    """

    __slots__ = ("dim", "index", "pick", "routes")

    def __init__(self, pick: Picker | None, batch: tuple[int, int]) -> None:
        self.pick = pick
        self.index, self.dim = batch
        self.routes: dict[Any, tuple[Route, ...]] = {}

    def size(self, tensors: tuple[Any, ...]) -> int | None:
        """The rows that the batch tensor shows, None where it is no tensor like that."""
        try:
            return int(tensors[self.index].shape[self.dim])
        except (AttributeError, IndexError, TypeError):
            return None

    def find(self, key: Any, tensors: tuple[torch.Tensor, ...]) -> Route | None:
        """The route for tensors like these under ``key``."""
        for route in self.routes.get(key, ()):
            if route.guard(*tensors) and (route.strays is None or not route.strays(tensors)):
                return route
        return None

    def put(self, key: Any, route: Route) -> None:
        """Serve calls of this key by ``route`` from now on; others of the key stay, the oldest gives way."""
        kept = (route, *self.routes.get(key, ()))
        self.routes[key] = kept[:VARIANTS]
        for old in kept[VARIANTS:]:
            old.retire()

    def forget(self) -> None:
        """No call is served by a route any more."""
        before, self.routes = self.routes, {}
        for routes in list(before.values()):
            for route in routes:
                route.retire()


VARIANTS = 4
"""Routes of one size: tensors of another dtype, another static buffer."""


class Schedule:
    """Countdowns to the calls of a route that are sampled. A period of 0 is never due.

    The first call of a route is left alone: it pays for what happens once.
    """

    def __init__(self, **periods: int) -> None:
        self._periods = {name: period for name, period in periods.items() if period}
        self._left = {name: min(2, period) for name, period in self._periods.items()}
        self.gap = min(self._left.values(), default=1 << 62)
        self.tick = [self.gap]
        self._steady: list[str] = []

    def due(self) -> list[str]:
        """What is due now, ``gap`` calls after the last time; sets the next gap."""
        if self._steady:
            self.tick[0] = self.gap
            return self._steady
        now, left, gap = [], self._left, self.gap
        for name in left:
            left[name] -= gap
            if left[name] <= 0:
                left[name] = self._periods[name]
                now.append(name)
        self.gap = self.tick[0] = min(left.values(), default=1 << 62)
        if left == self._periods and len(set(left.values())) == 1:
            self._steady = now
        return now


class GraphWork:
    """Everything a graph route needs, put together once."""

    def __init__(
        self,
        captured: Captured,
        backend: Backend,
        call: Call,
        dims: list[int | None] | None,
        options: Options,
    ) -> None:
        rows = call.rows
        self.captured = captured
        self.backend = backend
        self.size = call.size
        self.copier: Copier = captured.staging.copier(rows, call.tensors)
        self.make: Make = captured.outputs.maker(rows, dims, options.outputs == "alias")
        self.fixed = captured.outputs.only if options.outputs == "alias" and rows == captured.rows else None
        self.prepare = options.prepare
        self.beat = captured.pointers.beat()
        views = captured.staging.views(rows)
        inputs = captured.staging.inputs
        self.back = [(i, view) for i, view in zip(inputs, views, strict=True) if i.index in captured.written]
        self.write_back = partial(_write_back, self.back) if self.back else None


def _write_back(back: list[tuple[Input, torch.Tensor]], tensors: tuple[torch.Tensor, ...]) -> None:
    """Give the caller's tensors what the forward wrote into its inputs, as eager does."""
    for item, view in back:
        target = tensors[item.index]
        if item.narrow is not None:
            view = view.narrow(item.narrow[0], 0, target.shape[item.narrow[0]])
        if target is not view:
            target.copy_(view)


def strays(
    statics: list[tuple[int, int]],
    limits: list[tuple[int, int, int, int]],
    captured: Captured | None,
    modes: tuple[Any, ...] | None,
    twins: list[tuple[int, int, bool]] | None = None,
) -> Strays | None:
    """A check of what a guard does not see: True where a call is not the route's. None: there is nothing to check.

    Addresses of static tensors (tensor index, address), widths of narrow ones (tensor index, dimension, least, most),
    memory shared with an input that the forward writes, the modes where autocast was on, and which of the tensors that
    are alike are one object (tensor index, tensor index, whether).
    """
    written = captured is not None and bool(captured.written)
    if not statics and not limits and not written and modes is None:
        return _strangers(twins) if twins else None

    def check(tensors: tuple[torch.Tensor, ...]) -> bool:
        if twins and any((tensors[i] is tensors[j]) is not one for i, j, one in twins):
            return True
        for index, address in statics:
            if tensors[index].data_ptr() != address:
                return True
        if any(not least <= tensors[index].shape[dim] <= most for index, dim, least, most in limits):
            return True
        return (captured is not None and captured.shares(tensors)) or (modes is not None and modes != dispatch_modes())

    return check


FEW = 3
"""Pairs of tensors that are compared one by one in the time that all of a call take together."""


def _strangers(twins: list[tuple[int, int, bool]]) -> Strays:
    """:func:`strays` where nothing but the identity of tensors can differ."""
    if len(twins) > FEW and not any(one for _, _, one in twins):
        # No two were one object; in a call that passes the guard only tensors that are alike can be.
        return lambda tensors: len(set(map(id, tensors))) != len(tensors)

    def check(tensors: tuple[torch.Tensor, ...]) -> bool:
        for i, j, one in twins:  # noqa: SIM110 - a loop costs half of what a generator does
            if (tensors[i] is tensors[j]) is not one:
                return True
        return False

    return check


def twins(tensors: tuple[torch.Tensor, ...]) -> list[tuple[int, int, bool]]:
    """The pairs of tensors that could be one object, and whether they are: a forward may ask (``query is key``)."""
    kinds = [(t.dtype, t.shape, t.stride()) for t in tensors]
    pairs = [(i, j) for j in range(len(tensors)) for i in range(j) if kinds[i] == kinds[j]]
    return [(i, j, tensors[i] is tensors[j]) for i, j in pairs]


def graph_route(work: GraphWork, turn: Turn) -> Serve:
    """The serve function of a graph route."""
    life, graph, bucket = work.captured.life, work.captured.graph, work.captured.bucket
    ready, (stream_of, device, quick) = work.backend.ready, work.backend.stream_check
    first, copy, buffer, more = work.copier.split()
    make, prepare, back = work.make, work.prepare, work.write_back
    fixed, beat = work.fixed, work.beat
    thread, address_of = threading.get_ident, torch.Tensor.data_ptr

    def serve(
        owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: tuple[torch.Tensor, ...], cell: Cell
    ) -> Any:
        me = thread()
        if turn.owner != me or turn.inside:
            return WAIT
        turn.inside = me
        try:
            if not life.live or turn.owner != me:
                return MISS
            if beat is not None:
                # One address per call: a model that moves as a whole is seen before it gives a wrong answer.
                known, address = beat()
                tensor = known()
                if tensor is None or address_of(tensor) != address:
                    life.displaced()
                    return MISS
                # What follows may replace it, and must then find it let go.
                tensor = None
            if stream_of is not None and stream_of(device) != quick[0] and not ready():
                return MISS
            if prepare is not None:
                prepare(bucket, *args, **kwargs)
                if life.over():
                    # It has replaced what the graph reads, or dropped the graph.
                    return MISS
            if first is not None:
                source = tensors[first]
                if source is not buffer:
                    copy(source)
            if more is not None:
                more(tensors)
                if life.over():
                    return MISS
            graph.replay()
            if back is not None:
                back(tensors)
            result = make() if fixed is None else fixed
            cell[0] += 1
            return result
        finally:
            turn.inside = 0

    return serve


def eager_route(invoke: Callable[..., Any]) -> Serve:
    """The serve function of an eager route: the forward itself, counted once it has returned."""

    def serve(
        owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: tuple[torch.Tensor, ...], cell: Cell
    ) -> Any:
        result = invoke(owner, args, kwargs)
        if FREE_THREADED:
            with COUNT_LOCK:
                cell[0] += 1
        else:
            cell[0] += 1
        return result

    return serve
