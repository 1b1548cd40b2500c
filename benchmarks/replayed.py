"""What the advisor predicts and what then happens, on one CUDA GPU.

    python benchmarks/replayed.py [--shape 0.6b] [--trace FILE.csv] [--speed 1] [--steps 3000] [--json FILE]

An engine loop decodes in one cache, its batch sizes those of a day: the simulator serves the trace (without one,
requests drawn at random) and the loop repeats pieces of it, step by step in their order. For exact and for padded
dispatch the steps run with buckets 1, 2, 4, 8, 16; then ``graphprobe.advise()`` is asked about the live counts, with
nothing but the times that were sampled in them; then the same steps run with the list that it proposes, whatever its
verdict.

``ms`` is wall time of the loop per step, from the first to the last, a wait for the tokens in each: that is what a
prediction has to meet. ``events`` is the mean by CUDA events of the calls that were timed. ``by_size`` has the calls of
each size and their mean wall ms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from days import pieces, sizes
from steps import KERNELS, NAMES, SHAPES, Engine
from torch.nn.attention import sdpa_kernel

import graphprobe
from graphprobe.tools.advice import Plan
from graphprobe.tools.arrivals import Request, arrivals
from graphprobe.tools.times import Curve

BUCKETS = (1, 2, 4, 8, 16)
PIECES = 10
WARM = 20
REACHED = 0.10
"""How far a prediction may be from what was measured."""

STEPS = {
    "8b": Curve({1: 8.9e-3, 16: 10.1e-3, 64: 12.0e-3, 128: 14.9e-3, 256: 21.6e-3}),
    "0.6b": Curve({1: 4.4e-3, 16: 4.8e-3, 64: 6.2e-3, 128: 8.0e-3, 256: 11.6e-3}),
}
"""Seconds of a step on an H200, by which the simulator makes batches; source: docs/advice/steps_*.json."""


class Loop:
    """Greedy decoding of random prompts: row i of a batch is row i of the cache, the last row is scratch."""

    def __init__(self, shape: str, device: str, rows: int, length: int) -> None:
        self.engine = Engine(shape, device)
        self.engine.allocate(rows + 1, length)
        self.rows, self.length = rows, length
        self.tokens = [0] * rows

    def decode(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """``ids`` and ``positions [rows, 1]``, ``slots [rows]`` -> next tokens ``[rows]``."""
        return self.engine.forward(ids, positions, slots)[:, -1].argmax(-1)

    def inputs(self, size: int, step: int = 0) -> tuple[torch.Tensor, ...]:
        """Those of one step, made from lists, as engines do."""
        position = step % self.length
        slots = [row * self.length + position for row in range(size)]
        ids, positions = [[token] for token in self.tokens[:size]], [[position]] * size
        return tuple(torch.tensor(made, device=self.engine.device) for made in (ids, positions, slots))

    def capture(self, name: str, buckets: Sequence[int], pad: bool, timing: int) -> Any:
        """The decode step with graphs of ``buckets``, captured ahead of traffic."""
        fills = {"ids": 0, "positions": 0, "slots": self.rows * self.length} if pad else None
        graphed = graphprobe.capture(
            self.decode, buckets=buckets, name=name, timing=timing, pad=fills, max_graphs=max(64, len(buckets))
        )
        report = graphed.warmup(lambda size: (self.inputs(size), {}), progress=False)
        if report.missing:
            raise RuntimeError(f"{name}: not captured: {report.missing}: {[b.error for b in report if b.error]}")
        return graphed

    def serve(self, graphed: Any, batches: Sequence[int]) -> dict[str, Any]:
        """Run the steps; what they took and what was counted."""
        with graphprobe.ignore():
            self._steps(graphed, batches[:WARM])
        self.engine.wait()
        spent = self._steps(graphed, batches)
        self.engine.wait()
        seen = graphed.snapshot()
        if seen.graph_calls + seen.eager_calls != len(batches):
            raise RuntimeError(f"{seen.graph_calls} + {seen.eager_calls} calls were counted, {len(batches)} made")
        by_size: dict[int, list[float]] = {}
        for size, seconds in zip(batches, spent, strict=True):
            by_size.setdefault(size, []).append(seconds)
        return {
            "ms": sum(spent) / len(spent) * 1e3,
            "events": _mean_by_events(seen),
            "hit_rate": seen.hit_rate,
            "padding": sum(row.padding for row in seen.rows) / len(batches),
            "capture_seconds": sum(seen.capture_seconds.values()),
            "pool_bytes": seen.pool_bytes,
            "by_size": {n: [len(found), sum(found) / len(found) * 1e3] for n, found in sorted(by_size.items())},
        }

    def _steps(self, graphed: Any, batches: Sequence[int]) -> list[float]:
        """Seconds of each step, up to the next one's beginning."""
        stamps = [time.perf_counter()]
        for step, size in enumerate(batches):
            self.tokens[:size] = graphed(*self.inputs(size, step)).tolist()
            stamps.append(time.perf_counter())
        return [after - before for before, after in pairwise(stamps)]


def _mean_by_events(seen: Any) -> float | None:
    """Milliseconds per call: the mean of each path and bucket, by how often it was taken."""
    calls: dict[tuple[str, int | None], int] = {}
    for row in seen.rows:
        calls[row.path, row.bucket] = calls.get((row.path, row.bucket), 0) + row.calls
    means = {key: seen.mean_seconds(*key) for key in calls}
    if any(mean is None for mean in means.values()):
        return None
    return sum(count * (means[key] or 0) for key, count in calls.items()) / sum(calls.values()) * 1e3


def told(plan: Plan) -> dict[str, Any]:
    """What the advisor expects of a list."""
    return {"ms": plan.seconds * 1e3, "hit_rate": plan.hit_rate, "padding": plan.padding}


def compared(loop: Loop, batches: Sequence[int], pad: bool, timing: int) -> dict[str, Any]:
    """Today's list, the advice, the proposal: predicted beside measured."""
    kind = "padded" if pad else "exact"
    today = loop.capture(f"{kind}.today", BUCKETS, pad, timing)
    before = loop.serve(today, batches)
    advice = graphprobe.advise(forward=f"{kind}.today")
    today.reset()
    print(advice, flush=True)
    proposed = loop.capture(f"{kind}.proposal", advice.best.buckets, pad, timing)
    after = loop.serve(proposed, batches)
    proposed.reset()
    assert advice.now is not None
    lists = {
        "today": {"buckets": list(BUCKETS), "predicted": told(advice.now), "measured": before},
        "proposal": {"buckets": list(advice.best.buckets), "predicted": told(advice.best), "measured": after},
    }
    for one in lists.values():
        one["off"] = one["predicted"]["ms"] / one["measured"]["ms"] - 1
        one["same_hits"] = abs(one["predicted"]["hit_rate"] - one["measured"]["hit_rate"]) < 1e-9
    return {
        "dispatch": kind, **lists, "keep": advice.keep, "why": advice.why, "confidence": advice.confidence,
        "predicted_gain": advice.gain, "measured_gain": 1 - after["ms"] / before["ms"],
        "notes": [*advice.notes], "warnings": [*advice.warnings],
        "reached": all(abs(one["off"]) <= REACHED and one["same_hits"] for one in lists.values()),
    }  # fmt: skip


def table(results: Sequence[dict[str, Any]]) -> str:
    """Predicted beside measured."""
    lines = [
        f"{'':<18}{'graphs':>7}{'hit rate':>10}{'measured':>10}{'ms':>9}{'measured':>10}{'off':>8}{'events':>9}"
        f"{'padding':>9}{'measured':>10}"
    ]
    for result in results:
        for name in ("today", "proposal"):
            one = result[name]
            said, seen = one["predicted"], one["measured"]
            events = "-" if seen["events"] is None else f"{seen['events']:.3f}"
            lines.append(
                f"{result['dispatch'] + ', ' + name:<18}{len(one['buckets']):>7}{said['hit_rate']:>10.2%}"
                f"{seen['hit_rate']:>10.2%}{said['ms']:>9.3f}{seen['ms']:>10.3f}{one['off']:>+8.1%}{events:>9}"
                f"{said['padding']:>9.3f}{seen['padding']:>10.3f}"
            )
        lines.append(
            f"  gain {result['predicted_gain']:.1%} predicted, {result['measured_gain']:.1%} measured;"
            f" {'keep' if result['keep'] else 'change'}: {result['why']};"
            f" reached: {'yes' if result['reached'] else 'NO'}"
        )
    return "\n".join(lines)


def day(trace: str | None, speed: float) -> list[Request]:
    """The requests of a trace, or an hour of random ones as dense as that of the conversations."""
    if trace:
        return arrivals(trace, speed=speed)
    rng, clock, found = random.Random(0), 0.0, []
    while clock < 3600:
        found.append(Request(clock, 1024, max(1, round(rng.expovariate(1 / 211)))))
        clock += rng.expovariate(5.4 * speed)
    return found


def main() -> int:
    """Serve, ask, serve again; print and write; 1 where a prediction was not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", choices=sorted(SHAPES))
    parser.add_argument("--trace", metavar="FILE", help="columns of AzurePublicDataset; else random requests")
    parser.add_argument("--speed", type=float, default=1.0, help="of arrivals")
    parser.add_argument("--steps", type=int, default=3000, help="decode steps that are served, four times")
    parser.add_argument("--rows", type=int, default=64, help="of the cache, and the largest batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row of the cache")
    parser.add_argument("--timing", type=int, default=4, help="one call in so many is timed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    cuda = options.device.startswith("cuda")
    if not cuda and (options.shape != "tiny" or os.environ.get("GRAPHPROBE_BACKEND") != "recorder"):
        parser.error("without a GPU the script can only be tried: --shape tiny, with GRAPHPROBE_BACKEND=recorder")
    if cuda and not torch.cuda.is_available():
        parser.exit(1, "needs a CUDA GPU: torch.cuda.is_available() is False\n")
    every = sizes(day(options.trace, options.speed), STEPS.get(options.shape, STEPS["0.6b"]), max_batch=options.rows)
    batches = pieces(every, options.steps, PIECES)
    result: dict[str, Any] = {
        "model": NAMES[options.shape], "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__, "transformers": transformers.__version__, "date": time.strftime("%Y-%m-%d"),
        "trace": Path(options.trace).name if options.trace else None, "speed": options.speed, "rows": options.rows,
        "length": options.length, "timing": options.timing, "steps": len(batches), "pieces": PIECES,
        "mean_batch": sum(batches) / len(batches), "largest_batch": max(batches), "results": [],
    }  # fmt: skip
    print(
        f"{result['model']} shape, {result['device']}, torch {result['torch']}: {len(batches):,} steps of"
        f" {result['trace'] or 'random requests'} at {options.speed:g}x, {result['mean_batch']:.1f} rows on average,"
        f" {result['largest_batch']} at most",
        flush=True,
    )
    with torch.inference_mode(), sdpa_kernel(KERNELS, set_priority=True):
        loop = Loop(options.shape, options.device, options.rows, options.length)
        for pad in (False, True):
            result["results"].append(compared(loop, batches, pad, options.timing))
            if options.json:
                Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["results"]), flush=True)
    return 0 if all(one["reached"] for one in result["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
