"""Lists of buckets on an hour of two services: those that engines capture when told nothing, and those advised.

    python benchmarks/advice.py [--steps FILE] [--traces FOLDER] [--max-batch 256] [--json FILE]

The step times of FILE (benchmarks/steps.py makes one) or, without one, of a sketch: 9.0 ms + 0.27 ms per row by graph;
eagerly the same, but never under the 42.9 ms that the host takes to launch it. ``hit``, ``padding`` and ``expected ms``
are of one common traffic, that of an engine with a graph of every size: the same calls for every list. ``ms`` and
``token/s`` are of a replay in which each list makes its own traffic. Advised are the best lists for that common traffic
that end at the same maximum: with as many graphs, with the fewest that are as fast, with half as many. ``!`` marks a
list whose own day has steps of more than 1.1 times the expected time: slower steps make the batches larger, and those
may find no bucket near them, where the common traffic had none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphprobe.buckets import Buckets
from graphprobe.dispatch import Dispatcher
from graphprobe.tools.arrivals import Request, arrivals
from graphprobe.tools.engines import defaults
from graphprobe.tools.optimum import Choice, Problem, frontier
from graphprobe.tools.replays import Replay
from graphprobe.tools.simulate import replay
from graphprobe.tools.times import Curve

TRACES = os.environ.get("GRAPHPROBE_TRACES") or str(Path(__file__).parents[2] / "shared" / "data")
SPEEDS = (1, 4)
SMALL = (1, 2, 4, 8, 16)
MOST = 64
"""Most graphs that are looked at for a list that is as fast."""

CEILING = 0.5
"""An engine sits at the ceiling where requests are queued for a longer share of the time."""

SLACK = 0.005
"""At the ceiling half as many graphs may take this much longer."""

COLUMNS = (
    ("list", "<34"), ("graphs", ">6"), ("hit", ">7"), ("padding", ">8"), ("expected ms", ">12"), ("ms", ">8"),
    ("token/s", ">8"), ("capture s", ">10"), ("MiB", ">7"),
)  # fmt: skip


@dataclass(frozen=True)
class Steps:
    """Seconds by size, made non-decreasing; what a capture takes and holds, where it is known."""

    name: str
    graph: Curve
    eager: Curve
    prefill: Curve | None = None
    capture_seconds: Curve | None = None
    held: float | None = None
    """Mean bytes by which a capture made the pool grow: growth is no smooth function of the size."""
    changed: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    """Measured and used seconds where making them non-decreasing changed one."""


def sketch(most: int) -> Steps:
    graph = Curve({1: 9.27e-3, 256: 9.0e-3 + 0.27e-3 * 256})
    sizes = range(1, max(most, 256) + 1)
    return Steps("sketch", graph, Curve({n: max(42.9e-3, graph(n)) for n in sizes}))


def measured(file: str) -> Steps:
    data = json.loads(Path(file).read_text())
    given = {key: {int(size): value for size, value in data.get(key, {}).items()} for key in BY_SIZE}
    curves = {key: Curve(given[key]).rising() for key in ("graph", "eager", "prefill") if given[key]}
    changed = {
        key: {size: (given[key][size], curve(size)) for size in curve.sizes if given[key][size] != curve(size)}
        for key, curve in curves.items()
    }
    capture = Curve(given["capture_seconds"]) if given["capture_seconds"] else None
    held = statistics.fmean(given["bytes"].values()) if given["bytes"] else None
    name = data.get("model", Path(file).name)
    return Steps(name, curves["graph"], curves["eager"], curves.get("prefill"), capture, held, changed)


BY_SIZE = ("graph", "eager", "prefill", "capture_seconds", "bytes")


@dataclass(frozen=True)
class Day:
    """The requests of a day, and the calls that an engine with a graph of every size makes of them."""

    name: str
    requests: list[Request]
    steps: Steps
    max_batch: int

    def play(self, buckets: Sequence[int], pad: bool) -> Replay:
        steps = self.steps
        return replay(
            self.requests, buckets, steps.graph, steps.eager, pad=pad, max_batch=self.max_batch, prefill=steps.prefill
        )

    def best(self, calls: Mapping[int, int], pad: bool) -> list[Choice]:
        """The best list of 1, 2, ... graphs, each of which ends at the maximum."""
        candidates = sorted({*calls, self.max_batch})
        return frontier(Problem(calls, candidates, self.steps.graph.along, self.steps.eager.along, pad=pad), MOST)

    def row(self, name: str, buckets: Sequence[int], pad: bool, calls: Mapping[int, int]) -> dict[str, Any]:
        """What a list does with the common traffic, and what becomes of the day with it."""
        played = self.play(buckets, pad)
        capture, held = self.steps.capture_seconds, self.steps.held
        return {
            "list": name,
            "buckets": list(buckets),
            "padded": pad,
            "graphs": len(buckets),
            **common(calls, buckets, pad, self.steps),
            "ms": (played.seconds_per_call or 0) * 1e3,
            "token/s": played.tokens_per_second,
            "hit of its own": played.hit_rate,
            "waiting": played.waiting,
            "ttft ms": {"mean": played.ttft.mean * 1e3, "p99": played.ttft.p99 * 1e3},
            "capture s": sum(capture.along(list(buckets))) if capture else None,
            "MiB": held * len(buckets) / 2**20 if held is not None else None,
        }


def common(calls: Mapping[int, int], buckets: Sequence[int], pad: bool, steps: Steps) -> dict[str, float]:
    """The hit rate, rows of padding per call and expected milliseconds per call of ``calls``."""
    dispatcher = Dispatcher(Buckets(buckets), pad)
    hits, padding, seconds = 0, 0, 0.0
    for size, count in calls.items():
        bucket = dispatcher.decide(size).bucket
        hits += count if bucket else 0
        padding += (bucket - size) * count if bucket else 0
        seconds += count * (steps.graph(bucket) if bucket else steps.eager(size))
    total = sum(calls.values())
    return {"hit": hits / total, "padding": padding / total, "expected ms": seconds / total * 1e3}


def lists(most: int) -> Iterator[tuple[str, Sequence[int], bool, bool]]:
    """Name, buckets, whether they are padded to, whether this is what a peer captures when told nothing."""
    yield "exact 1 2 4 8 16", SMALL, False, False
    yield "padded 1 2 4 8 16", SMALL, True, False
    yield "vLLM's own", defaults("vllm", most), True, True
    yield "SGLang's own", defaults("sglang", most), True, True


def compared(day: Day) -> dict[str, Any]:
    every = day.play(range(1, day.max_batch + 1), True)
    calls = every.sizes
    frontiers = {pad: day.best(calls, pad) for pad in (True, False)}
    rows, checks = [day.row("every size", range(1, day.max_batch + 1), True, calls)], []
    ceiling = every.waiting > CEILING
    for name, buckets, pad, peer in lists(day.max_batch):
        own = day.row(name, buckets, pad, calls)
        rows.append(own)
        best = frontiers[pad]
        total = sum(calls.values())
        limit = own["expected ms"] * total / 1e3 * (1 + 1e-9)
        wanted = {
            "as many": best[min(len(buckets), len(best)) - 1],
            "as fast": next((choice for choice in best if choice.seconds <= limit), None),
            "half as many": best[min(len(buckets) // 2, len(best)) - 1] if peer else None,
        }
        advised = {
            key: day.row(f"  advised, {key}", choice.buckets, pad, calls) for key, choice in wanted.items() if choice
        }
        rows += advised.values()
        if peer:
            checks.append(checked(name, own, advised, ceiling))
    waiting = {"waiting": every.waiting, "ceiling": ceiling, "largest": max(calls), "calls": sum(calls.values())}
    return {"day": day.name, **waiting, "rows": rows, "checks": checks}


def checked(name: str, own: dict[str, Any], advised: dict[str, dict[str, Any]], ceiling: bool) -> dict[str, Any]:
    """What the issue of the advisor asks for, of one default list of a peer."""
    half = advised["half as many"]["expected ms"] / own["expected ms"] - 1
    fast = advised["as fast"]["graphs"] if "as fast" in advised else None
    return {
        "list": name,
        "not better at its own number": advised["as many"]["expected ms"] <= own["expected ms"] * (1 + 1e-9),
        "graphs": own["graphs"],
        "graphs for equal time": fast,
        "half the graphs cost": half,
        "at most half": half <= SLACK if ceiling else fast is not None and 2 * fast <= own["graphs"],
        "ms of its own day": own["ms"],
        "ms of the advised, as many": advised["as many"]["ms"],
        "ms of the advised, as fast": advised["as fast"]["ms"] if "as fast" in advised else None,
    }


def cell(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if value is None:
        return "-"
    if column == "hit":
        return f"{value:.1%}"
    digits = {"padding": 2, "expected ms": 3, "ms": 3, "token/s": 1, "capture s": 1, "MiB": 0}.get(column)
    return str(value) if digits is None else f"{value:,.{digits}f}"


def page(result: dict[str, Any]) -> Iterator[str]:
    for day in result["days"]:
        where = f"requests queued {day['waiting']:.0%} of the time" if day["ceiling"] else "below the ceiling"
        yield f"\n{day['day']}: {day['calls']:,} calls, up to {day['largest']} rows, {where}"
        yield "".join(f"{name:{form}}" for name, form in COLUMNS)
        for row in day["rows"]:
            mark = " !" if row["ms"] > 1.1 * row["expected ms"] else ""
            yield "".join(f"{cell(row, name):{form}}" for name, form in COLUMNS) + mark
        for check in day["checks"]:
            yield (
                f"{check['list']}: as good with as many graphs {said(check['not better at its own number'])};"
                f" equal time with {check['graphs for equal time']} of {check['graphs']}, half of them cost"
                f" {check['half the graphs cost']:+.2%}: reached {said(check['at most half'])}"
            )


def said(reached: bool) -> str:
    return "yes" if reached else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", metavar="FILE")
    parser.add_argument("--traces", metavar="FOLDER", default=TRACES)
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    steps = measured(options.steps) if options.steps else sketch(options.max_batch)
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "steps": steps.name, "max_batch": options.max_batch}
    result |= {"changed": steps.changed, "prefill": steps.prefill is not None, "days": []}
    print(
        f"steps: {steps.name}, {'with' if steps.prefill else 'without'} prefills; at most {options.max_batch} requests"
    )
    for curve, sizes in steps.changed.items():
        told = ", ".join(f"{n}: {was * 1e3:.3f} -> {now * 1e3:.3f}" for n, (was, now) in sizes.items())
        print(f"made non-decreasing, {curve}: {told or 'nothing'} (ms)")
    for trace in ("conv", "code"):
        for speed in SPEEDS:
            requests = arrivals(Path(options.traces) / f"azure_llm_2023_{trace}.csv", speed=speed)
            result["days"].append(compared(Day(f"{trace} {speed}x", requests, steps, options.max_batch)))
    print("\n".join(page(result)))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
