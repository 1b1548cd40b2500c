"""Seconds that the advisor's optimum takes on this host; needs no GPU.

python benchmarks/optimum.py [--sizes 8192] [--graphs 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

from graphprobe.tools.budget import Limit, within
from graphprobe.tools.optimum import Pace, Problem, frontier
from graphprobe.tools.times import Curve


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """The least of three runs, and what the last one gave."""
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        found = work()
        spent.append(time.perf_counter() - began)
    return min(spent), found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, default=8192, help="distinct batch sizes")
    parser.add_argument("--graphs", type=int, default=64, help="most graphs")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    draw = random.Random(1)
    last = options.sizes
    graph, eager = Curve({1: 9e-3, last: 9e-3 + 0.27e-3 * last}), Curve({1: 40e-3, last: 40e-3 + 0.27e-3 * last})
    calls = {n: draw.randint(1, 10**6) for n in range(1, last + 1)}
    rows = []
    for name, pad, pace in (
        ("padded", True, None),
        ("padded, with a pace", True, Pace(last * 7 // 8, 0.9 * last / graph(last))),
        ("exact", False, None),
    ):
        spent, found = seconds(
            lambda pad=pad, pace=pace: frontier(
                Problem(calls, sorted(calls), graph.along, eager.along, pad=pad, pace=pace), options.graphs
            )
        )
        rows.append({"what": name, "sizes": last, "seconds": spent, "lists": len(found), "gap": 0.0})
    for count in (64, 256, 512):
        some = {n: calls[n] for n in range(1, min(count, last) + 1)}
        limits = [
            Limit("bytes", {n: draw.randint(20, 60) + n / 10 for n in some}, 900),
            Limit("seconds", {n: draw.random() + 0.5 for n in some}, 20),
        ]
        for pad in (True, False):
            spent, best = seconds(
                lambda some=some, pad=pad, limits=limits: within(
                    Problem(some, sorted(some), graph.along, eager.along, pad=pad), limits
                )
            )
            name = f"within two limits, {'padded' if pad else 'exact'}"
            rows.append({"what": name, "sizes": count, "seconds": spent, "lists": 1, "gap": best.gap})
    print(f"{'':<30} {'sizes':>6} {'seconds':>8} {'lists':>6} {'gap':>8}")
    for row in rows:
        print(f"{row['what']:<30} {row['sizes']:6d} {row['seconds']:8.3f} {row['lists']:6d} {row['gap']:8.2%}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"date": time.strftime("%Y-%m-%d"), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
