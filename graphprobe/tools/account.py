"""Where the gain of CUDA graphs comes from, measured on the forward itself.

A step is run eagerly, as a graph, and eagerly with its launches queued ahead. What the first takes more than the third
the GPU waited for the host; what the third takes more than the second is work per kernel that only a graph removes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from graphprobe.attributes import modules_behind
from graphprobe.buckets import Buckets
from graphprobe.errors import ConfigError
from graphprobe.graphed import unfinished
from graphprobe.tools import stepping
from graphprobe.tools.balance import Account
from graphprobe.tools.cards import datasheet
from graphprobe.tools.stepping import Call
from graphprobe.tools.timeline import Timeline

Make = Callable[[int], tuple[Any, ...]]
VERSIONS = {"torch": torch.__version__, "cuda": str(torch.version.cuda or "none")}


@dataclass
class Measured:
    """One account, and the timelines of its steps by batch size: eager and graph."""

    account: Account
    timelines: dict[int, tuple[Timeline, Timeline | None]] = field(default_factory=dict)


def account(
    fn: Callable[..., Any],
    args: tuple[Any, ...] | Make = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batches: Iterable[int] | None = None,
    name: str = "",
    compile: bool = False,
) -> Account:
    """Where the time of ``fn(*args, **kwargs)`` goes, per batch size, and what graphs would save of it.

    ``args`` are the arguments, whose first tensor has the batch in dimension 0 unless ``batches`` names the size;
    or a function that makes them for each of ``batches``. The forward runs for a second or two per size, a few
    dozen to some ten thousand times, without gradients, and nothing is counted: give it inputs that it may write
    again and again (a cache of a fixed length, not one that grows), and a model in eval mode. Streams of its own
    are not followed. ``compile`` measures the forward as ``torch.compile`` makes it, and how long that takes of a
    capture.

    On a CPU there is no launch and no graph: operators and the host's time between them are all that is measured.
    ConfigError for sizes and arguments that do not fit together; a forward that cannot be captured is measured eagerly,
    and told to be one.
    """
    return measure(fn, args, kwargs, batches=batches, name=name, compile=compile, timelines=False).account


def measure(
    fn: Callable[..., Any],
    args: tuple[Any, ...] | Make = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batches: Iterable[int] | None = None,
    name: str = "",
    compile: bool = False,
    timelines: bool = True,
) -> Measured:
    """``account``, with the timelines of each step where they are asked for."""
    calls = _calls(fn, args, dict(kwargs or {}), batches)
    device = _device(calls[0])
    label = name or getattr(fn, "__qualname__", type(fn).__name__)
    calls = [call.compiled() for call in calls] if compile else calls
    # The caller's random numbers go on where they were; a GPU's own generator moves with the runs.
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if device.type != "cuda":
            return _on_host(label, device, calls)
        with torch.cuda.device(device):
            return _on_device(label, device, calls, compile, timelines)


def _on_host(name: str, device: torch.device, calls: list[Call]) -> Measured:
    steps = tuple(stepping.on_host(call) for call in calls)
    note = f"on {device.type} there are no launches, no graphs and no floor: the step and the host's part are measured"
    return Measured(
        Account(name, device.type, steps, weight_bytes=weight_bytes(calls[0]), versions=VERSIONS, notes=(note,))
    )


def _on_device(name: str, device: torch.device, calls: list[Call], compile: bool, timelines: bool) -> Measured:
    card = torch.cuda.get_device_name(device)
    rate = stepping.bandwidth(device)
    measured, residual = stepping.on_device(device, calls, compile, timelines)
    found = Account(
        name,
        card,
        tuple(one.step for one in measured),
        bandwidth=rate,
        datasheet=datasheet(card),
        weight_bytes=weight_bytes(calls[0]),
        residual_bytes=residual,
        versions=VERSIONS,
    )
    lines = {one.step.batch: (one.eager, one.graph) for one in measured if one.eager is not None}
    return Measured(found, lines)


def _calls(fn: Any, args: Any, kwargs: dict[str, Any], batches: Iterable[int] | None) -> list[Call]:
    if not callable(fn):
        raise ConfigError(f"account needs a forward to call, got {type(fn).__name__}")
    if kind := unfinished(fn) or unfinished(type(fn).__call__):
        raise ConfigError(f"a forward that is a {kind} has not run when it returns", "give the function inside")
    sizes = None if batches is None else Buckets(batches).sizes
    if callable(args):
        if sizes is None:
            raise ConfigError("args makes arguments, and batches does not say for which", "batches=[1, 2, 4, 8, 16]")
        return [Call(size, fn, _tuple(args(size)), kwargs) for size in sizes]
    if sizes is not None and len(sizes) > 1:
        raise ConfigError("several batches, and the arguments of one", "give args=lambda batch: (...)")
    given = _tuple(args)
    return [Call(sizes[0] if sizes else _batch(given, kwargs), fn, given, kwargs)]


def _tuple(args: Any) -> tuple[Any, ...]:
    return tuple(args) if isinstance(args, (tuple, list)) else (args,)


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among arguments, in lists, dicts and dataclasses, too."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if leaf is not None]
    held = [vars(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and hasattr(leaf, "__dict__")]
    return [leaf for leaf in [*leaves, *tree_leaves(held)] if isinstance(leaf, torch.Tensor)]


def _batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Dimension 0 of the first tensor; 1 where the forward takes none, as one that keeps its inputs itself."""
    tensors = _tensors(args, kwargs)
    if not tensors:
        return 1
    sizes = [int(tensor.shape[0]) for tensor in tensors if tensor.dim()]
    if not sizes or not sizes[0]:
        raise ConfigError("no argument is a tensor with a batch in dimension 0", "name its size: batches=[8]")
    return sizes[0]


def _device(call: Call) -> torch.device:
    """Where a GPU's tensor is: an argument, or a parameter of the modules behind the forward; else the host."""
    held = [*_tensors(call.args, call.kwargs), *(p for module in _modules(call) for p in module.parameters())]
    found = next((tensor.device for tensor in held if tensor.is_cuda), None)
    if found is None and not held and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found or torch.device("cpu")


def _modules(call: Call) -> list[torch.nn.Module]:
    return modules_behind(getattr(call.fn, "__self__", call.fn), call.fn)


def weight_bytes(call: Call) -> int | None:
    """Bytes of the parameters of the modules behind a forward; None where there is none."""
    parameters = [parameter for module in _modules(call) for parameter in module.parameters()]
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    return sum(held.values()) or None
