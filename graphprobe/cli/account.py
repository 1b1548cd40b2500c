"""``graphprobe account``: where the gain comes from, measured, from a saved result or a trace; and the memory bill."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphprobe.cli import values
from graphprobe.cli.calculator import calculated, per_token, spelt
from graphprobe.cli.options import option
from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools.table import literal

if TYPE_CHECKING:
    from graphprobe.tools.account import Measured
    from graphprobe.tools.balance import Account

MEASURED, TRACED, MEMORY, OUTPUT = "A forward", "A trace", "Memory", "Output"

EXAMPLES = """\b
Examples:
  graphprobe account engine:decode --inputs engine:inputs --batches 1,2,4
  graphprobe account saved.json
  graphprobe account --trace step.json.gz --step 3
  graphprobe account --before 80:10ms --after 100:14ms
  graphprobe account --layers 36 --kv-heads 8 --head-size 128 --mib 1600"""

BATCHES = "1,2,4,8,16"
LIMIT = 64 << 20
"""Bytes of a saved result that are read; one with a thousand batch sizes has less than one MiB."""

NAMED = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")


Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[TARGET]",
        rich_help_panel=MEASURED,
        help="module:callable, which is measured; or a result that --json printed, a file or -.",
    ),
]
Inputs = Annotated[
    str | None,
    option(panel=MEASURED, metavar="MODULE:NAME", help="Function that makes the arguments of a batch size, a tuple."),
]
Batches = Annotated[str | None, option(panel=MEASURED, metavar="1,2,4", help=f"Batch sizes; by default {BATCHES}.")]
Compile = Annotated[
    bool, option("--compile", panel=MEASURED, help="Measure it compiled by torch, and what that takes of a capture.")
]
HitRate = Annotated[
    float | None,
    option(panel=MEASURED, metavar="PERCENT", help="Share of the calls that a graph serves."),
]
Trace = Annotated[
    str | None,
    option(panel=TRACED, metavar="FILE", help="Gaps of a Chrome trace of torch.profiler, or of Nsight's SQLite."),
]
Step = Annotated[
    str | None, option(panel=TRACED, metavar="N", help="Step of the profiler that is meant, or the name of a range.")
]
Before = Annotated[
    str | None, option(panel=MEMORY, metavar="80:10ms", help="Batch and step time today; with --after: worth it?")
]
After = Annotated[str | None, option(panel=MEMORY, metavar="100:14ms", help="The same after a change.")]
Concurrent = Annotated[int | None, option(panel=MEMORY, metavar="N", help="Requests at a time, with --room.")]
Room = Annotated[int | None, option(panel=MEMORY, metavar="N", help="Requests that the KV cache has room for.")]
Layers = Annotated[int | None, option(panel=MEMORY, metavar="N", help="Layers of the model.")]
KvHeads = Annotated[int | None, option(panel=MEMORY, metavar="N", help="KV heads of each layer.")]
HeadSize = Annotated[int | None, option(panel=MEMORY, metavar="N", help="Elements of a head.")]
KvDtype = Annotated[str, option(panel=MEMORY, metavar="DTYPE", help="Element of the KV cache: bfloat16, fp8, ...")]
KvCapacity = Annotated[
    int | None, option(panel=MEMORY, metavar="TOKENS", help="KV cache that the engine reports, in tokens.")
]
Mib = Annotated[float | None, option(panel=MEMORY, metavar="MIB", help="Memory, to be told in tokens of KV cache.")]
Plot = Annotated[
    str | None, option(panel=OUTPUT, metavar="FILE", help="Draw timelines and gaps into a .png, .svg or .html file.")
]
Json = Annotated[bool, option("--json", panel=OUTPUT, help="Print the result as JSON.")]


def account(
    target: Target = None,
    inputs: Inputs = None,
    batches: Batches = None,
    compile: Compile = False,
    hit_rate: HitRate = None,
    trace: Trace = None,
    step: Step = None,
    before: Before = None,
    after: After = None,
    concurrent: Concurrent = None,
    room: Room = None,
    layers: Layers = None,
    kv_heads: KvHeads = None,
    head_size: HeadSize = None,
    kv_dtype: KvDtype = "bfloat16",
    kv_capacity: KvCapacity = None,
    mib: Mib = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Say where the gain of graphs comes from, and what it is worth.

    TARGET is measured per batch size, or read again where it is saved: eager, graph and floor, and a verdict. --trace
    reads gaps between kernels from a file. Without either, the options below Memory are a calculator.
    """
    load = {"before": before, "after": after, "concurrent": concurrent, "room": room, "mib": mib}
    how = {"inputs": inputs, "batches": batches, "compile": compile or None}
    cache = {"layers": layers, "kv_heads": kv_heads, "head_size": head_size}
    if trace is not None:
        _alone("--trace", {"TARGET": target, "hit_rate": hit_rate} | how | load | cache | {"kv_capacity": kv_capacity})
        typer.echo(_traced(trace, step, plot, json))
        return
    _alone("TARGET" if target is not None else "the calculator", {"step": step})
    kv_token = per_token(cache, kv_dtype)
    if target is None:
        _alone("the calculator", how | {"plot": plot, "hit_rate": hit_rate})
        typer.echo(calculated(load, kv_token, kv_capacity, json))
        return
    _alone("TARGET", load)
    if _saved(target):
        _alone("a saved result", how | {"plot": plot})
        found, timelines = _read(target), {}
    else:
        measured = _measured(target, inputs, batches, compile, plot)
        found, timelines = measured.account, measured.timelines
    if hit_rate is not None:
        if not 0 <= hit_rate <= 100:
            raise ConfigError(f"--hit-rate must be percent from 0 to 100, got {hit_rate:g}")
        found = replace(found, hit_rate=hit_rate / 100)
    if kv_token is not None:
        found = replace(found, kv_token_bytes=kv_token)
    if kv_capacity is not None:
        found = replace(found, kv_capacity=kv_capacity)
    typer.echo(found.to_json() if json else found)
    if plot is not None:
        _drawn(timelines, plot, target)


def _alone(what: str, given: dict[str, Any]) -> None:
    """ConfigError where options are given that say nothing beside ``what``."""
    names = [spelt(name) for name, value in given.items() if value is not None]
    if names:
        said = f"{', '.join(names)} say{'s' if len(names) == 1 else ''} nothing beside {what}"
        raise ConfigError(said, "graphprobe account --help has the examples")


def _saved(target: str) -> bool:
    return target == "-" or "://" in target or target.endswith(".json") or os.path.isfile(target)


def _read(target: str) -> Account:
    from graphprobe.tools.balance import Account
    from graphprobe.tools.fetch import fetch
    from graphprobe.tools.web import Wanted

    wanted = Wanted("application/json", "a file of graphprobe account --json", "give the address of a result", "")
    body = fetch(target, wanted, LIMIT, 5.0, str).body
    if len(body) > LIMIT:
        raise SourceError(f"{target}: longer than {LIMIT >> 20} MiB. hint: give what graphprobe account --json printed")
    try:
        return Account.from_json(body)
    except SourceError as error:
        raise SourceError(f"{target}: {error}. hint: give what graphprobe account --json printed") from error


def _measured(target: str, inputs: str | None, batches: str | None, compile: bool, plot: str | None) -> Measured:
    if inputs is None and batches is not None:
        raise ConfigError("--batches needs to know what a batch of each size is", "add --inputs MODULE:NAME")
    # What the module prints is not the result, which may be JSON.
    with contextlib.redirect_stdout(sys.stderr):
        return _ran(target, inputs, batches, compile, plot)


def _ran(target: str, inputs: str | None, batches: str | None, compile: bool, plot: str | None) -> Measured:
    from graphprobe.tools.account import measure

    forward = _imported(target)
    given: dict[str, Any] = {}
    if inputs is None:
        _needs_nothing(forward, target)
    else:
        given = {"args": _imported(inputs), "batches": values.sizes(BATCHES if batches is None else batches)}
    return measure(forward, name=target, compile=compile, timelines=plot is not None, **given)


def _needs_nothing(forward: Any, name: str) -> None:
    """ConfigError for a forward that cannot be called without arguments."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # written in C: its call will tell
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ConfigError(f"{name} needs arguments: {error}", "add --inputs MODULE:NAME") from error


def _imported(name: str) -> Any:
    """What ``module:name`` stands for; the folder that the command runs in is looked at first, as Python does."""
    if not NAMED.fullmatch(name):
        raise ConfigError(f"{name!r} is neither a file nor module:callable", "write engine:decode, or saved.json")
    module, _, path = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Only its own absence: what it fails to import is its own fault, and its traceback says where.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"there is no module {module!r}", "run it where the module can be imported") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{module} has no {path!r}", "write module:callable")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{name} is no callable but {type(found).__name__}", "write module:callable")
    return found


def _drawn(timelines: dict[int, Any], plot: str, title: str) -> None:
    """The timelines of the smallest batch, where the host matters most."""
    from graphprobe.tools.gapplot import timelines as draw

    if not timelines:
        raise ConfigError("nothing to draw: no timeline was recorded", "on a CPU there are no kernels")
    batch = min(timelines)
    eager, graph = timelines[batch]
    draw({"eager": eager} | ({} if graph is None else {"graph": graph}), plot, title=f"{title}, batch {batch}")
    typer.echo(f"drawn into {plot}", err=True)


def _traced(trace: str, step: str | None, plot: str | None, json: bool) -> str:
    """The gaps of a trace."""
    from graphprobe.tools import traces

    timeline = traces.read(trace, step=step)
    gaps = timeline.gaps()
    if plot is not None:
        from graphprobe.tools.gapplot import timelines

        timelines({"trace": timeline}, plot, title=literal(os.path.basename(trace)))
        typer.echo(f"drawn into {plot}", err=True)
    return gaps.to_json() if json else str(gaps)
