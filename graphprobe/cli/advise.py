"""``graphprobe advise``: the options of ``graphprobe.advise``, in the units of a command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json as jsons
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from graphprobe.cli import options, values
from graphprobe.errors import ConfigError
from graphprobe.tools import sources

if TYPE_CHECKING:
    from graphprobe.tools.advice import Advice
    from graphprobe.tools.rehearsal import Rehearsal

MIB = 2.0**20

NEEDS = {"until": "last", "match": "last", "speed": "simulate"}
"""Options that say something of another one."""

CHECKED = frozenset({"buckets", "max_seqs", "spec_tokens", "pad", "engine", "tensor_parallel", "largest", "json"})
"""What ``--check`` looks at."""

SPELT = {
    "graph_bytes": "--graph-mib",
    "max_bytes": "--max-mib",
    "pad=True": "--pad",
    "pad=False": "--no-pad",
    "buckets=[...]": "--buckets",
}
NAME = re.compile(
    r"\b(?:(?:graph_bytes|max_bytes|pad=True|pad=False|max_buckets|max_batch|max_seqs|spec_tokens|tensor_parallel"
    r"|capture_seconds|max_capture_seconds|calls_per_start|gib_worth)\b(?!=)|buckets=\[\.\.\.\])"
)
"""Words of ``graphprobe.advise`` in what it says, whose options are spelt otherwise; not ``max_batch=8`` of a line to
paste."""


def advise(
    ctx: typer.Context,
    source: options.Source = None,
    forward: options.Forward = None,
    phase: options.Phase = None,
    last: options.Last = None,
    until: options.Until = None,
    match: options.Match = "",
    timeout: options.Timeout = 5.0,
    buckets: options.Given = None,
    pad: options.Pad = None,
    engine: options.Engine = None,
    tensor_parallel: options.TensorParallel = 1,
    largest: options.Largest = None,
    max_batch: options.MaxBatch = None,
    max_seqs: options.MaxSeqs = None,
    spec_tokens: options.SpecTokens = 0,
    times: options.GraphTimes = None,
    eager_times: options.EagerTimes = None,
    steps: options.Steps = None,
    graph_mib: options.GraphMib = None,
    capture_seconds: options.CaptureSeconds = None,
    max_buckets: options.MaxBuckets = None,
    max_mib: options.MaxMib = None,
    max_capture_seconds: options.MaxCaptureSeconds = None,
    calls_per_start: options.CallsPerStart = None,
    gib_worth: options.GibWorth = None,
    threshold: options.Threshold = 2.0,
    plot: options.Plot = None,
    json: options.Json = False,
    simulate: options.Simulate = None,
    speed: options.Speed = 1.0,
    check: options.Check = False,
) -> None:
    """Say which buckets to capture, and whether that is worth it.

    The best list for the traffic that was seen, what it gains over today's, and the line to paste. --simulate replays a
    day of requests with both lists. --check needs no traffic: it takes --buckets (without them the engine's own list),
    --max-seqs, --spec-tokens, --engine, --pad, --tensor-parallel and --largest, and no SOURCE.

    Exit status 0: there is an answer, be it to keep what you have; 1: --check found steps without a graph; 2: what was
    given cannot be used, or there is nothing to judge.
    """
    _fit(ctx)
    known = _maybe(values.measured, steps) or {}
    asked: dict[str, Any] = {
        "forward": forward,
        "phase": phase,
        "buckets": _maybe(values.sizes, buckets),
        "pad": pad,
        "engine": engine,
        "tensor_parallel": tensor_parallel,
        "largest": largest,
        "max_batch": max_batch,
        "max_seqs": max_seqs,
        "spec_tokens": spec_tokens,
        "times": _first(_maybe(values.times, times, "--times"), known.get("graph")),
        "eager_times": _first(_maybe(values.times, eager_times, "--eager-times"), known.get("eager")),
        "graph_bytes": _first(_maybe(values.per_graph, graph_mib, "--graph-mib", MIB), known.get("bytes")),
        "capture_seconds": _first(
            _maybe(values.per_graph, capture_seconds, "--capture-seconds"), known.get("capture_seconds")
        ),
        "max_buckets": max_buckets,
        "max_bytes": None if max_mib is None else max_mib * MIB,
        "max_capture_seconds": max_capture_seconds,
        "calls_per_start": calls_per_start,
        "gib_worth": None if gib_worth is None else gib_worth / 100,
        "threshold": threshold / 100,
    }
    where = {
        "window": _maybe(values.duration, last, "--last"),
        "end": _maybe(values.instant, until, "--until"),
        "match": match,
        "timeout": timeout,
    }
    with _in_words_of_options():
        if check:
            _before_traffic(asked, json)
        else:
            _answer(_asked(source, simulate, speed, asked, where, known.get("prefill", {})), plot, json)


def _maybe(parse: Callable[..., Any], text: str | None, *about: Any) -> Any:
    return None if text is None else parse(text, *about)


def _first(given: Any, known: Any) -> Any:
    return known if given is None else given


def _fit(ctx: typer.Context) -> None:
    """ConfigError where options are given that say nothing together."""
    given = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    for name, other in NEEDS.items():
        if name in given and other not in given:
            raise ConfigError(f"{_option(name)} without {_option(other)} says nothing", f"add {_option(other)}")
    if "last" in given and "source" not in given:
        raise ConfigError("--last is a window of a Prometheus server", "graphprobe advise http://HOST:9090 --last 6h")
    if {ctx.params["source"], ctx.params["simulate"]} == {"-"}:
        raise ConfigError("SOURCE and TRACE cannot both come from standard input", "save one of them to a file")
    if ctx.params["check"]:
        if others := sorted(given - CHECKED - {"check", "timeout"}):
            raise ConfigError(f"--check does not look at {', '.join(map(_option, others))}", "leave one of them out")
        if "max_seqs" not in given:
            raise ConfigError("--check needs to know how many requests run at most", "add --max-seqs")


def _option(name: str) -> str:
    return "SOURCE" if name == "source" else "--" + name.replace("_", "-")


def spelt(text: str) -> str:
    """The same in words of options."""
    return NAME.sub(lambda found: SPELT.get(found[0], _option(found[0])), text)


@contextlib.contextmanager
def _in_words_of_options() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(spelt(error.what), spelt(error.hint)) from error


def _before_traffic(asked: dict[str, Any], json: bool) -> None:
    from graphprobe.tools.engines import defaults
    from graphprobe.tools.speculative import check

    kind, most, spec_tokens = _first(asked["engine"], "graphprobe"), asked["max_seqs"], asked["spec_tokens"]
    if asked["buckets"] is None and kind == "graphprobe":
        raise ConfigError("a decorated forward has no list of its own", "add --buckets, or --engine")
    buckets = asked["buckets"] or defaults(kind, most, spec_tokens=spec_tokens)
    found = check(buckets, most, spec_tokens, kind, asked["pad"], asked["tensor_parallel"], asked["largest"])
    told = {**dataclasses.asdict(found), "made": found.made, "ok": found.ok, "line": found.line}
    typer.echo(jsons.dumps(told) if json else found)
    if not found.ok:
        raise typer.Exit(1)


def _asked(
    source: str | None,
    trace: str | None,
    speed: float,
    asked: dict[str, Any],
    where: dict[str, Any],
    prefill: dict[int, float],
) -> Advice | Rehearsal:
    """The answer: on what was seen, and where there is a trace, tried on that."""
    from graphprobe.cli.simulate import simulated
    from graphprobe.tools.advisor import advise as answer

    seen = None
    if source is not None or trace is None:
        seen = sources.reading(sources.DEFAULT if source is None else source, **where)
    if trace is not None:
        return simulated(trace, speed, seen, asked, prefill, where["timeout"])
    return answer(seen, **asked)


def _answer(found: Advice | Rehearsal, plot: str | None, json: bool) -> None:
    from graphprobe.tools.plot import frontier
    from graphprobe.tools.rehearsal import Rehearsal

    played = found if isinstance(found, Rehearsal) else None
    advice = found.advice if isinstance(found, Rehearsal) else found
    if plot is not None:
        now, best = advice.marks
        title = f"{advice.forward}: expected time by number of graphs"
        frontier(advice.points, plot, now=now, chosen=best, title=title)
        typer.echo(f"drawn into {plot}", err=True)
    if json:
        told = jsons.loads(advice.to_json()) | ({"rehearsal": played.as_dict()} if played else {})
        typer.echo(jsons.dumps(told))
        return
    typer.echo("\n\n".join([spelt(str(advice)), *([str(played)] if played else [])]))
