"""``graphprobe advise``: the options of ``graphprobe.advise``, in the units of a command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json as jsons
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphprobe.cli import values
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

SPELT = {"graph_bytes": "--graph-mib", "max_bytes": "--max-mib", "pad=False": "--no-pad"}
NAME = re.compile(
    r"\b(graph_bytes|max_bytes|pad=False|max_buckets|max_batch|max_seqs|spec_tokens|tensor_parallel|capture_seconds"
    r"|max_capture_seconds|calls_per_start|gib_worth)\b"
)
"""Words of ``graphprobe.advise`` in its errors, whose options are spelt otherwise."""


def advise(
    ctx: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="As of `table`, or with --last a Prometheus server; by default the exporter of this machine.",
        ),
    ] = None,
    forward: Annotated[str | None, typer.Option(metavar="NAME", help="Forward that is meant.")] = None,
    phase: Annotated[
        str | None, typer.Option(metavar="NAME", help="Phase that is meant; by default all but prefill.")
    ] = None,
    last: Annotated[
        str | None, typer.Option(metavar="TIME", help="Window of a Prometheus server: 90s, 15m, 6h, 2d.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="End of the window, as 2026-11-30T12:00 (UTC); by default now.")
    ] = None,
    match: Annotated[str, typer.Option(metavar="LABELS", help="Series of the window, as 'job=\"vllm\"'.")] = "",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For each answer of a server.")] = 5.0,
    buckets: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="Today's list, where SOURCE does not tell it.")
    ] = None,
    pad: Annotated[
        bool | None,
        typer.Option("--pad/--no-pad", help="Whether a larger bucket may serve a batch; by default as seen."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="graphprobe, vllm, sglang, tensorrt-llm or lmdeploy.")
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(metavar="N", help="Ranks that share the rows of a step (vLLM's sequence parallelism).")
    ] = 1,
    largest: Annotated[
        int | None,
        typer.Option(metavar="N", help="Limit that the engine is told, as vLLM's max_cudagraph_capture_size."),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(metavar="N", help="Largest batch that is sent, which a graph must hold.")
    ] = None,
    max_seqs: Annotated[int | None, typer.Option(metavar="N", help="The same, as a number of requests.")] = None,
    spec_tokens: Annotated[int, typer.Option(metavar="N", help="Speculative tokens of a request.")] = 0,
    times: Annotated[
        str | None,
        typer.Option(metavar="1:9.1,16:13.3", help="Milliseconds of a graph call by size; by default as measured."),
    ] = None,
    eager_times: Annotated[
        str | None, typer.Option(metavar="1:42.9", help="Milliseconds of an eager call by size; or 42900us, 0.0429s.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Such times, and what graphs take, as benchmarks/steps.py writes them."),
    ] = None,
    graph_mib: Annotated[
        str | None, typer.Option(metavar="20", help="MiB that a graph takes; or by size, as 1:20,16:25.")
    ] = None,
    capture_seconds: Annotated[
        str | None, typer.Option(metavar="0.4", help="Seconds that a capture takes; or by size.")
    ] = None,
    max_buckets: Annotated[int | None, typer.Option(metavar="N", help="Most graphs of the proposal.")] = None,
    max_mib: Annotated[float | None, typer.Option(metavar="MIB", help="Most memory of its graphs.")] = None,
    max_capture_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Most time of its captures, together.")
    ] = None,
    calls_per_start: Annotated[
        float | None, typer.Option(metavar="N", help="Calls between two starts: the price of capture seconds.")
    ] = None,
    gib_worth: Annotated[
        float | None,
        typer.Option(metavar="PERCENT", help="Share of the time that a GiB is worth: the price of memory."),
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(metavar="PERCENT", min=0, max=99, help="Gain below which the answer is to keep what there is."),
    ] = 2.0,
    simulate: Annotated[
        str | None,
        typer.Option(metavar="TRACE", help="CSV of requests to try both lists on; without SOURCE it is the traffic."),
    ] = None,
    speed: Annotated[float, typer.Option(metavar="X", help="How much faster the requests of TRACE arrive.")] = 1.0,
    check: Annotated[
        bool, typer.Option("--check", help="Only tell whether --buckets cover --max-seqs, before any traffic.")
    ] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw time against graphs into a .png, .svg or .html file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
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


@contextlib.contextmanager
def _in_words_of_options() -> Iterator[None]:
    def spelt(text: str) -> str:
        return NAME.sub(lambda found: SPELT.get(found[0], _option(found[0])), text)

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
    told = {**dataclasses.asdict(found), "ok": found.ok, "line": found.line}
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
        return simulated(trace, speed, seen, asked, prefill)
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
    typer.echo("\n\n".join([str(advice), *([str(played)] if played else [])]))
