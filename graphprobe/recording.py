"""Making one graph from one call: staging its inputs, running the forward on them under a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphprobe.attributes import Before, Settings, compiled, modules_behind
from graphprobe.backends.base import Backend, Graph
from graphprobe.calls import Args, Call, Kwargs
from graphprobe.errors import CaptureError, internal_error
from graphprobe.options import Options
from graphprobe.outputs import Outputs, described
from graphprobe.routes import Captured
from graphprobe.signature import Node, describe, fingerprint, parts
from graphprobe.signatures import Signature
from graphprobe.staging import Staging
from graphprobe.watch import HostReads, Watch, mode_depths, prime, storage, unwind

Invoke = Callable[[Any, Args, Kwargs], Any]
"""(owner, args, kwargs) -> the forward's result."""


Loose = Callable[[torch.Tensor], torch.Tensor]


class Theirs(Exception):
    """An exception of the caller's own callback, on its way through to the caller."""


@contextlib.contextmanager
def theirs() -> Iterator[None]:
    """Marks what the caller's callbacks raise as theirs."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise Theirs from error


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What an eager run showed that no graph could do.

    ``problem`` is in the way for good. ``changed`` may be the setting up that a first call does: a state of Python's
    that the run left behind and that a replay would not.
    """

    problem: str = ""
    changed: str = ""


def rehearse(backend: Backend, options: Options, invoke: Invoke, owner: Any, call: Call) -> tuple[Any, Rehearsal]:
    """The forward's result from an eager run, and what in it no graph could do.

    Found here, it costs no capture: after one that fails the forward's host code would have run twice.
    """
    prime()
    staged = [call.tensors[item.index] for item in call.inputs]
    watch, reads = Watch(staged, backend.device, lenient=True), HostReads(lenient=True)
    held, before = [fingerprint(value) for value in call.held], _before(owner, invoke)
    # Elsewhere such a read is an operator, and a function mode would have compiled code compiled anew.
    depths = mode_depths()
    try:
        with reads if backend.device.type == "cpu" else contextlib.nullcontext(), watch:
            result = invoke(owner, call.args, call.kwargs)
    finally:
        unwind(depths)
    try:
        if problem := watch.problem or reads.refused:
            return result, Rehearsal(problem)
        if held != [fingerprint(value) for value in call.held]:
            return result, Rehearsal(changed="the forward changes an object passed by reference on the host")
        if before is not None and (name := before.changed()):
            return result, Rehearsal(changed=f"the forward sets the attribute {name} at each call")
        del before
        return result, Rehearsal(_problem(watch, call, options))
    except Exception as error:
        # The result is the caller's, whatever becomes of our look at it.
        internal_error("rehearse", error)
        return result, Rehearsal(f"{type(error).__name__}: {error}")


def _before(owner: Any, invoke: Invoke) -> Before | None:
    try:
        return Before(owner, invoke)
    except Exception as error:
        internal_error("rehearse", error)
        return None


def _problem(watch: Watch, call: Call, options: Options) -> str:
    watch.living()
    if watch.problem:
        return watch.problem
    for node, value, place in call.roots:
        if place is not None and describe(value, node.path, options.static).key != node.key:
            return f"the forward changes its argument `{node.path}`, which a replay would not"
    return ""


def record(
    backend: Backend,
    options: Options,
    invoke: Invoke,
    owner: Any,
    call: Call,
    signature: Signature,
    bucket: int,
    rows: int | None = None,
) -> Captured:
    """The graph of ``bucket`` (of ``rows`` rows, if given) for calls like ``call``.

    Raises CaptureError, or OutOfMemoryError from the staging.
    """
    rows = bucket * options.rows_per_unit if rows is None else rows
    _check_identities(call)
    prime()
    with backend.scope():
        staging = Staging(call.inputs, _widened(call, signature.widths), rows)
        with theirs():
            staging.copier(call.rows, call.tensors)(call.tensors)
            if options.prepare is not None:
                options.prepare(bucket, *call.args, **call.kwargs)
        watch = Watch(staging.buffers, backend.device)
        args, kwargs, rest = _on_buffers(call, staging)
        before = _layouts(staging)

        def run() -> Any:
            python = _before(owner, invoke)
            try:
                with watch:
                    result = invoke(owner, args, kwargs)
                if watch.problem:
                    raise CaptureError(watch.problem)
                if python is not None and (name := python.changed()):
                    raise CaptureError(f"the forward sets the attribute {name}, which a replay would not")
            except BaseException:
                if python is not None:
                    python.restore()
                raise
            _check_unchanged(call, args, kwargs, options, staging)
            return result

        depths = mode_depths()
        try:
            with _swapped(call.context, rest):
                graph, result = backend.capture(run, options.generators)
        finally:
            unwind(depths)
    loose = backend.loose if options.outputs == "clone" else None
    try:
        return _finished(owner, invoke, call, signature, bucket, graph, staging, result, watch, before, options, loose)
    except CaptureError:
        graph.reset()
        raise


def _finished(
    owner: Any,
    invoke: Invoke,
    call: Call,
    signature: Signature,
    bucket: int,
    graph: Graph,
    staging: Staging,
    result: Any,
    watch: Watch,
    before: list[Any],
    options: Options,
    loose: Loose | None,
) -> Captured:
    if before != _layouts(staging):
        raise CaptureError("the forward changes the shape or strides of an argument in place")
    _check_apart(call, watch)
    outside = watch.living()
    passed = [part for value in call.held for part in (value, *parts(value))]
    inside = [watch.staged(t) is not None for t in described(result)[1]]
    outputs = Outputs(result, staging.rows, watch.outside, frozenset(map(id, passed)), inside, loose)
    _, tensors = described(result)
    outside += [t for t in tensors if watch.outside(t) and not watch.derived(t)]
    # A tensor that is passed by reference is compared by its address at every call; its object may be a fresh view.
    static = {id(t) for t, leaf in zip(call.tensors, call.leaves, strict=True) if leaf.kind == "static"}
    staging.drifting = bool(watch.written)
    cache = next((i.path for k, i in enumerate(staging.inputs) if k in watch.written and i.dim is None), "")
    signature.fills = signature.fills or (cache and f"argument `{cache}`, which does not follow the batch")
    signature.writes = signature.writes or ", ".join(sorted(set(watch.writes_outside)))
    undeclared = _undeclared(watch, options)
    held = [part for value in call.held for part in parts(value)]
    modules = modules_behind(owner, invoke)
    if watch.compiled or compiled(modules, invoke):
        # Compiled code reads weights past the dispatcher: all of them are followed.
        watch.compiled = True
        outside += [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    outside = [t for t in outside if id(t) not in static] + held
    return Captured(bucket, graph, staging, outputs, watch, outside, Settings(modules, owner), undeclared)


def _undeclared(watch: Watch, options: Options) -> str:
    """Why running twice might change more than ``state=`` names; empty where it does not."""
    state = options.state
    if isinstance(state, str):
        return ""
    named = {storage(tensor) for tensor in state or ()}
    missed = sorted({func for func, place in watch.landed if place not in named})
    if missed:
        return f"the forward writes to a tensor outside ({', '.join(missed)}) that state= does not name"
    if watch.compiled and state is None:
        return "what compiled code writes is not seen; declare state= (an empty list where it writes nothing outside)"
    return ""


def _layouts(staging: Staging) -> list[Any]:
    return [(buffer.shape, buffer.stride()) for buffer in staging.buffers]


def _check_identities(call: Call) -> None:
    """Refuse a staged argument that is the same tensor as one passed by reference: in a graph it would be another."""
    static = {id(t): leaf for t, leaf in zip(call.tensors, call.leaves, strict=True) if leaf.kind == "static"}
    for item in call.inputs:
        if (found := static.get(id(call.tensors[item.index]))) is not None:
            raise CaptureError(f"`{item.path}` is the same tensor as `{found.path}`, which is passed by reference")


def _check_apart(call: Call, watch: Watch) -> None:
    """Refuse arguments that share memory with one another, or with what the forward uses, where that is written."""
    if not watch.written and not watch.writes_outside:
        return
    staged = [call.tensors[item.index] for item in call.inputs]
    places = [t.untyped_storage().data_ptr() for t in call.tensors]
    written = [staged[index].untyped_storage().data_ptr() for index in watch.written]
    if any(places.count(place) > 1 for place in written) or any(watch.meets(t) for t in staged):
        raise CaptureError("an argument shares memory with another tensor, and the forward writes to it")


def _check_unchanged(call: Call, args: Args, kwargs: Kwargs, options: Options, staging: Staging) -> None:
    """Refuse a forward that changes the containers it is given: a replay would not."""
    buffers = iter(staging.buffers)
    for node, _, place in call.roots:
        if place is None:
            continue
        value = args[place] if isinstance(place, int) else kwargs[place]
        same = describe(value, node.path, options.static).key == node.key
        if not same or any(tensor is not next(buffers) for tensor in node.pick(value)):
            raise CaptureError(f"the forward changes its argument `{node.path}`, which a replay would not")


def _widened(call: Call, widths: tuple[int, ...]) -> list[torch.Tensor]:
    """The call's tensors, the narrow ones at the width of the signature."""
    tensors, remaining = list(call.tensors), iter(widths)
    for item in call.inputs:
        if item.narrow is not None:
            shape = list(tensors[item.index].shape)
            shape[item.narrow[0]] = next(remaining)
            tensors[item.index] = tensors[item.index].new_empty(shape)
    return tensors


def _on_buffers(call: Call, staging: Staging) -> tuple[Args, Kwargs, Iterator[torch.Tensor]]:
    """The call's arguments with the static inputs in place of its tensors; the buffers left are the context's."""
    buffers = iter(staging.buffers)
    args, kwargs = list(call.args), dict(call.kwargs)
    for node, value, place in call.roots:
        if isinstance(place, int):
            args[place] = node.build(value, buffers)
        elif place is not None:
            kwargs[place] = node.build(value, buffers)
    return tuple(args), kwargs, buffers


@contextlib.contextmanager
def _swapped(context: tuple[Node, Any] | None, buffers: Iterator[torch.Tensor]) -> Iterator[None]:
    """The context's tensors are the static inputs inside, and the engine's own again afterwards."""
    if context is None:
        yield
        return
    node, holder = context
    put = partial(object.__setattr__, holder) if node.kind == "fields" else holder.__setitem__
    before = {n: node.child(holder, n) for n, child in node.branches if next(child.leaves("tensor"), None)}
    staged = {n: child.build(before[n], buffers) for n, child in node.branches if n in before}
    for name, value in staged.items():
        put(name, value)
    try:
        yield
        if any(node.child(holder, name) is not value for name, value in staged.items()):
            raise CaptureError("the forward replaces a tensor of its context; write to it in place instead")
    finally:
        for name, value in before.items():
            put(name, value)
