"""A call like the last one: the way to a graph with nothing looked up that was looked up before.

Between two replays the host runs thousands of instructions of torch's and the driver's, so what a call costs is how
much of ours has to come back into the caches, more than how many steps it takes. So everything that such a call needs
is bound to one function, which is the wrapper's ``__call__`` until a call comes that is not like the last.

That function knows one outcome. Whatever stands in the way of it, the call is dispatched as if it had not been tried,
and nothing was launched.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from graphprobe.ledger import FREE_THREADED, ignore_active
from graphprobe.routes import GraphWork, Plan, Route
from graphprobe.signature import function_modes
from graphprobe.turn import Turn


def _present(graphs: Callable[[], Any]) -> Any:
    if (found := graphs()) is None:
        raise ReferenceError("the captured forward is gone: keep it, not its __call__")
    return found


def steps(route: Route, work: GraphWork) -> tuple[Any, ...]:
    """What leads to the graph of a route, for :func:`hit`."""
    captured, (first, copy, buffer, more) = work.captured, work.copier.split()
    make = None if work.fixed is not None else work.make
    # A route holds its hit.
    return (
        weakref.ref(route),
        route.strays,
        captured.life,
        work.beat,
        first,
        copy,
        buffer,
        more,
        captured.graph,
        make,
        work.fixed,
    )


def hit(
    route: Route,
    plan: Plan,
    spelling: Any,
    turn: Turn,
    module: Callable[[], Any] | None,
    graphs: Callable[[], Any],
) -> Callable[..., Any] | None:
    """The function ``(*args, **kwargs) -> result`` for calls of a graph route in one spelling, None where it has none.

    ``module`` returns the module whose training mode counts, None where there is none; ``graphs`` returns the
    :class:`~graphprobe.graphs.GraphSet`, which serves all other calls. What leads to the graph is in
    ``route.live`` alone, so that a caller who keeps the function keeps no graph alive.
    """
    work = route.work
    if work is None or work.prepare is not None or work.write_back is not None or FREE_THREADED:
        return None
    route.live[0] = steps(route, work)
    count, names = (spelling, ()) if isinstance(spelling, int) else (spelling[0], spelling[1:])
    guard, pick, cell, tick, live = route.guard, plan.pick, route.cell, route.tick, route.live
    grad, modes, training = route.grad, route.modes, route.training
    grad_now, modes_now, active = torch.is_grad_enabled, function_modes, ignore_active
    stream_of, device, quick = work.backend.stream_check
    thread, address_of, graphs = threading.get_ident, torch.Tensor.data_ptr, partial(_present, graphs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if (
            (way := live[0]) is None
            or len(args) != count
            or (tuple(kwargs) != names if names else kwargs)
            or (tensors := args if pick is None else pick(args, kwargs)) is None
            or not guard(*tensors)
            or (grad is not None and grad is not grad_now())
            or modes_now() != modes
            or (module is not None and getattr(module(), "training", None) is not training)
            or active[0]
        ):
            return graphs().dispatch(*args, **kwargs)
        itself, strays, life, beat, first, copy, buffer, more, graph, make, fixed = way
        me = thread()
        if (strays is not None and strays(tensors)) or turn.owner != me or turn.inside:
            return graphs().dispatch(*args, **kwargs)
        if tick[0] < 2:
            return graphs().sampled(itself(), args, kwargs, tensors)
        turn.inside = me
        try:
            if beat is not None and life.live:
                known, address = beat()
                one = known()
                if one is None or address_of(one) != address:
                    life.displaced()
                # What follows may replace it, and must then find it let go.
                one = None
            if life.live and turn.owner == me and (stream_of is None or stream_of(device) == quick[0]):
                if first is not None and tensors[first] is not buffer:
                    copy(tensors[first])
                if more is not None:
                    more(tensors)
                if life.live:
                    graph.replay()
                    result = fixed if make is None else make()
                    tick[0] -= 1
                    cell[0] += 1
                    return result
        finally:
            turn.inside = 0
        return graphs().dispatch(*args, **kwargs)

    return call
