"""Lists of buckets on an hour of two services: those that engines capture when told nothing, and those advised.

    python benchmarks/advice.py [--steps FILE ...] [--traces FOLDER] [--max-batch 256] [--json FILE]

Step times are those of each FILE (benchmarks/steps.py makes one), without prefills and with them, and those of a
sketch: 9.0 ms + 0.27 ms per row by graph; eagerly the same, but never under the 42.9 ms that the host takes to launch
it. ``hit``, ``padding`` and ``expected`` (ms per call) are of one common traffic, that of an engine with a graph of
every size: the same calls for every list. All columns after it are of a replay in which each list makes a day of its
own: ``ms`` per call, tokens per second, mean time per output token, seconds of the hour in steps and prefills.
Advised is what ``graphprobe.advise`` answers about the common traffic: its proposal, and off its frontier the list with
as many graphs, the one with the fewest that is as fast, the one with half as many. ``its own day`` is its answer about
the day that the engine's own list made. ``!``: a day of its own of more than 1.1 times the expected time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from days import autocorrelation_time, sizes

import graphprobe
from graphprobe.tools import plot
from graphprobe.tools.advice import Advice, Plan
from graphprobe.tools.arrivals import Request, arrivals
from graphprobe.tools.engines import defaults
from graphprobe.tools.optimum import Problem, frontier
from graphprobe.tools.replays import Replay
from graphprobe.tools.simulate import replay
from graphprobe.tools.sources import Reading
from graphprobe.tools.speculative import spans
from graphprobe.tools.times import Curve

TRACES = os.environ.get("GRAPHPROBE_TRACES") or str(Path(__file__).parents[2] / "shared" / "data")
SPEEDS = (1, 4)
SMALL = (1, 2, 4, 8, 16)
PEERS = {"vllm": "vLLM", "sglang": "SGLang", "lmdeploy": "LMDeploy", "tensorrt-llm": "TensorRT-LLM"}
EXACT = ("tensorrt-llm",)
"""Peers that do not pad when told nothing."""

NUMBERS = (3, 5, 8, 12, 17, 24, 35)
"""Numbers of graphs at which the pace is held against lists without it."""

MOST = 64
CEILING = 0.5
"""An engine sits at the ceiling where requests are queued for a longer share of the time."""

SLACK = 0.005
"""At the ceiling half as many graphs may take this much longer."""

TRAP = 1.1
SAME = 1 + 1e-9
BY_SIZE = ("graph", "eager", "prefill", "capture_seconds", "bytes")
HEAD = ("graphs", "hit", "padding", "expected", "ms", "token/s", "TPOT ms", "busy s", "capture s", "MiB")


@dataclass(frozen=True)
class Steps:
    """Seconds by size, made non-decreasing; what a capture takes and holds, where it is known."""

    name: str
    graph: Curve
    eager: Curve
    prefill: Curve | None = None
    known: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    changed: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    """Measured and used seconds where making them non-decreasing changed one."""

    @cached_property
    def given(self) -> dict[str, Any]:
        """The same for ``advise``."""
        times = {"times": dict(self.graph.points), "eager_times": dict(self.eager.points)}
        return {**times, **{key: value for key, value in self.known.items() if value}}

    def without_prefill(self) -> Steps:
        """The same with prefills that take no time."""
        return Steps(self.name, self.graph, self.eager, None, self.known, self.changed)


def sketch(most: int) -> Steps:
    """The times of the sketch."""
    graph = Curve({1: 9.27e-3, 256: 9.0e-3 + 0.27e-3 * 256})
    return Steps("sketch", graph, Curve({n: max(42.9e-3, graph(n)) for n in range(1, max(most, 256) + 1)}))


def measured(file: str) -> Steps:
    """The times that benchmarks/steps.py wrote."""
    data = json.loads(Path(file).read_text())
    given = {key: {int(size): value for size, value in data.get(key, {}).items()} for key in BY_SIZE}
    curves = {key: Curve(given[key]).rising() for key in ("graph", "eager", "prefill") if given[key]}
    changed = {
        key: {size: (given[key][size], curve(size)) for size in curve.sizes if given[key][size] != curve(size)}
        for key, curve in curves.items()
    }
    known = {"capture_seconds": given["capture_seconds"], "graph_bytes": _growth(given["bytes"])}
    name = data.get("model", Path(file).name)
    return Steps(name, curves["graph"], curves["eager"], curves.get("prefill"), known, changed)


def _growth(held: Mapping[int, float]) -> dict[int, float]:
    """Bytes by size, and under 0 those of any other: the pool grew with the largest, into which the others fit."""
    others = [taken for size, taken in held.items() if size < max(held)]
    return {**held, 0: fmean(others)} if others else dict(held)


class Day:
    """The requests of a day, and what becomes of it with any list."""

    def __init__(self, name: str, requests: list[Request], steps: Steps, max_batch: int) -> None:
        self.name, self.requests, self.steps, self.max_batch = name, requests, steps, max_batch
        self._played: dict[tuple[tuple[int, ...], bool], Replay] = {}

    def play(self, buckets: Sequence[int], pad: bool) -> Replay:
        """The day with this list, replayed once."""
        key = tuple(buckets), pad
        if key not in self._played:
            steps, most = self.steps, self.max_batch
            options: dict[str, Any] = {"pad": pad, "max_batch": most, "prefill": steps.prefill}
            self._played[key] = replay(self.requests, buckets, steps.graph, steps.eager, **options)
        return self._played[key]

    @cached_property
    def every(self) -> Replay:
        """The common traffic: that of an engine with a graph of every size."""
        return self.play(range(1, self.max_batch + 1), True)

    def ask(self, seen: Replay, buckets: Sequence[int], pad: bool, **more: Any) -> Advice:
        """What ``advise`` says of this traffic to one who has this list and declares the maximum."""
        asked = {"buckets": buckets, "pad": pad, "max_batch": self.max_batch, **self.steps.given, **more}
        return graphprobe.advise(Reading(seen.snapshot()), **asked)

    def ms(self, buckets: Sequence[int], pad: bool) -> float:
        """Milliseconds per call of its own day."""
        return (self.play(buckets, pad).seconds_per_call or 0) * 1e3

    def row(self, name: str, plan: Plan, pad: bool) -> dict[str, Any]:
        """What a list does with the common traffic, and what becomes of the day with it."""
        own = self.play(plan.buckets, pad)
        return {
            "list": name,
            "buckets": spans(plan.buckets),
            "padded": pad,
            "graphs": plan.graphs,
            "hit": plan.hit_rate,
            "padding": plan.padding,
            "expected": plan.seconds * 1e3,
            "ms": self.ms(plan.buckets, pad),
            "token/s": own.tokens_per_second,
            "TPOT ms": own.tpot.mean * 1e3 if own.tpot else None,
            "busy s": own.busy_seconds,
            "capture s": plan.capture_seconds,
            "MiB": plan.bytes / 2**20 if plan.bytes is not None and self.max_batch in plan.buckets else None,
            "own hit": own.hit_rate,
            "waiting": own.waiting,
        }


def asked(day: Day, name: str, buckets: Sequence[int], pad: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of one list: itself and what is advised to one who has it; and how they compare."""
    advice = day.ask(day.every, buckets, pad)
    assert advice.now is not None
    rows = [day.row(name, advice.now, pad), day.row("  advised", advice.best, pad)]
    picks = picked(advice, len(buckets))
    rows += [day.row(f"  advised, {key}", plan, pad) for key, plan in picks.items() if plan]
    own = day.play(buckets, pad)
    answer = day.ask(own, buckets, pad).best
    rows.append(day.row("  advised, its own day", day.ask(day.every, answer.buckets, pad).now or answer, pad))
    if not pad:
        padded = day.ask(day.every, buckets, True)
        picks |= {"padded, as many": picked(padded, len(buckets))["as many"]}
        assert padded.now is not None
        rows += [day.row("  the same, padded", padded.now, True)]
        rows += [day.row("  advised, padded, as many", plan, True) for plan in [picks["padded, as many"]] if plan]
    return rows, checked(day, name, advice, picks, pad)


def picked(advice: Advice, graphs: int) -> dict[str, Plan | None]:
    """Off the frontier: the best list with so many graphs, the smallest that is as fast, and that with half of them."""
    edge, now = advice.frontier, advice.now
    assert now is not None
    return {
        "as many": max((p for p in edge if p.graphs <= graphs), key=lambda p: p.graphs, default=None),
        "as fast": next((p for p in edge if p.seconds <= now.seconds * SAME), None),
        "half as many": max((p for p in edge if p.graphs <= graphs // 2), key=lambda p: p.graphs, default=None),
    }


def checked(day: Day, name: str, advice: Advice, picks: Mapping[str, Plan | None], pad: bool) -> dict[str, Any]:
    """What is advised, relative to the list in use: expected, and each on its own day."""
    now = advice.now
    assert now is not None
    own = day.ms(now.buckets, pad)

    def against(key: str) -> dict[str, Any] | None:
        plan = picks.get(key)
        if plan is None:
            return None
        there = day.ms(plan.buckets, pad or key.startswith("padded"))
        return {"graphs": plan.graphs, "expected": plan.seconds / now.seconds - 1, "own": there / own - 1}

    found = {key: against(key) for key in ("as many", "as fast", "half as many", "padded, as many")}
    equal = next((p for p in advice.frontier if day.ms(p.buckets, pad) <= own * SAME), None) if pad else None
    return {"list": name, "graphs": now.graphs, "padded": pad, **found, "as fast, own": equal and equal.graphs}


def paced(day: Day) -> dict[str, dict[int, float]]:
    """Milliseconds of its own day by those expected, for some numbers of graphs: as advised, and else."""
    calls, most = day.every.sizes, day.max_batch
    total, steps = sum(calls.values()), day.steps
    free = frontier(Problem(calls, sorted({*calls, most}), steps.graph.along, steps.eager.along, pad=True), MOST)
    edges = {"as advised": {}, "the maximum not declared": {"max_batch": None}}
    lists = {
        name: {plan.graphs: (plan.buckets, plan.seconds) for plan in day.ask(day.every, SMALL, True, **asked).frontier}
        for name, asked in edges.items()
    }
    lists["without the pace"] = {len(best.buckets): (best.buckets, best.seconds / total) for best in free}
    return {
        key: {n: day.ms(found[n][0], True) / found[n][1] / 1e3 for n in NUMBERS if n in found}
        for key, found in lists.items()
    }


def compared(day: Day) -> dict[str, Any]:
    """All lists on one day."""
    most, every = day.max_batch, day.every
    whole = day.ask(every, range(1, most + 1), True)
    assert whole.now is not None
    rows, checks = [day.row("every size", whole.now, True)], []
    lists: list[tuple[str, Sequence[int], bool]] = [(f"exact {spans(SMALL)}", SMALL, False)]
    lists += [(f"padded {spans(SMALL)}", SMALL, True)]
    lists += [(PEERS[peer], defaults(peer, most), peer not in EXACT) for peer in PEERS]
    for name, buckets, pad in lists:
        found, check = asked(day, name, buckets, pad)
        rows += found
        checks.append(check)
    order = sizes(day.requests, day.steps.graph, max_batch=most, prefill=day.steps.prefill)
    return {
        "day": day.name,
        "calls": sum(every.sizes.values()),
        "mean": sum(n * count for n, count in every.sizes.items()) / sum(every.sizes.values()),
        "largest": max(every.sizes),
        "waiting": every.waiting,
        "ceiling": every.waiting > CEILING,
        "autocorrelation_time": autocorrelation_time(order),
        "pace": paced(day),
        "checks": checks,
        "rows": rows,
    }


def cell(row: Mapping[str, Any], column: str) -> str:
    """One figure of the table."""
    value = row[column]
    if value is None:
        return "-"
    if column == "hit":
        return f"{value:.1%}"
    digits = {"padding": 2, "expected": 3, "ms": 3, "TPOT ms": 2, "token/s": 1, "capture s": 1}.get(column, 0)
    return f"{value:,.{digits}f}"


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The tables of one set of step times."""
    yield f"\n{result['steps']}, {'with' if result['prefill'] else 'without'} prefills"
    for curve, moved in result["changed"].items():
        told = ", ".join(f"{n}: {was * 1e3:.3f} -> {now * 1e3:.3f}" for n, (was, now) in moved.items())
        yield f"made non-decreasing, {curve}: {told or 'nothing'} (ms)"
    for day in result["days"]:
        where = f"requests queued {day['waiting']:.0%} of the time" if day["ceiling"] else "below the ceiling"
        yield (
            f"\n{day['day']}: {day['calls']:,} calls, {day['mean']:.1f} rows on average, {day['largest']} at most;"
            f" {where}; {day['autocorrelation_time']:,.0f} calls are one independent observation"
        )
        yield f"{'list':<30}" + "".join(f"{name:>10}" for name in HEAD)
        for row in day["rows"]:
            mark = " !" if row["ms"] > TRAP * row["expected"] else ""
            yield f"{row['list']:<30}" + "".join(f"{cell(row, name):>10}" for name in HEAD) + mark
        for key, ratios in day["pace"].items():
            yield f"own day / expected, {key}: " + ", ".join(f"{n}: {x:.2f}" for n, x in ratios.items())


def example(steps: Steps, traces: Path, most: int) -> Advice:
    """What one is told who runs vLLM's own list on the conversations."""
    day = Day("conv 1x", arrivals(traces / "azure_llm_2023_conv.csv"), steps, most)
    buckets = defaults("vllm", most)
    return day.ask(day.play(buckets, True), buckets, True, engine="vllm")


def written(results: Sequence[Mapping[str, Any]], **about: Any) -> str:
    """JSON with one line for each row, and no digits that say nothing."""
    exact = json.dumps({**about, "results": results})
    text = json.dumps(json.loads(exact, parse_float=lambda digits: float(f"{float(digits):.6g}")))
    return text.replace('{"list"', '\n{"list"').replace('{"day"', '\n{"day"') + "\n"


def main() -> None:
    """Replay all days with all lists; print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", metavar="FILE", nargs="*", default=[])
    parser.add_argument("--traces", metavar="FOLDER", default=TRACES)
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw the frontier of the example in the JSON")
    options = parser.parse_args()
    found = [measured(file) for file in options.steps]
    every = [sketch(options.max_batch), *(kind for steps in found for kind in (steps.without_prefill(), steps))]
    results: list[dict[str, Any]] = []
    for steps in every:
        result: dict[str, Any] = {"steps": steps.name, "prefill": steps.prefill is not None, "changed": steps.changed}
        days = []
        for trace in ("conv", "code"):
            for speed in SPEEDS:
                requests = arrivals(Path(options.traces) / f"azure_llm_2023_{trace}.csv", speed=speed)
                days.append(compared(Day(f"{trace} {speed}x", requests, steps, options.max_batch)))
        results.append({**result, "days": days})
        print("\n".join(page(results[-1])), flush=True)
    shown = example(every[min(2, len(every) - 1)], Path(options.traces), options.max_batch)
    if options.json:
        about = {"date": time.strftime("%Y-%m-%d"), "max_batch": options.max_batch, "example": str(shown)}
        Path(options.json).write_text(written(results, **about))
    if options.plot:
        now, chosen = shown.marks
        plot.frontier(shown.points, options.plot, now=now, chosen=chosen, title="An hour of conversations")


if __name__ == "__main__":
    main()
