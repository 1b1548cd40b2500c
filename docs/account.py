"""Prints docs/account.md, with tables made from the JSON files in docs/account.

PYTHONPATH=. python docs/account.py > docs/account.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from graphprobe.tools.balance import Account, Step

FILES = Path(__file__).parent / "account"
MEASURED = FILES / "measured"
NAMES = {"8b": "Qwen3-8B", "8b-10": "Qwen3-8B, 10 layers", "0.6b": "Qwen3-0.6B", "smollm2": "SmolLM2-135M"}
ACCOUNTS = {name: Account.from_json((MEASURED / f"account_{name}.json").read_bytes()) for name in NAMES}
PROBES = json.loads((MEASURED / "probes.json").read_text())
LADDER = json.loads((MEASURED / "ladder.json").read_text())
READERS = {
    "server": "server GPU, slow host",
    "consumer": "consumer GPU",
    "own_engine": "own engine in Python, 4,000 kernels",
    "fused": "fused engine, 839 kernels",
    "missed": "engine that misses its buckets",
    "prefill": "graphs for prefill",
}
RUNGS = ("eager, growing cache", "eager, static cache", "compiled", "graph", "compiled, graph")

Row = Sequence[object]


def table(head: Sequence[str], rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def ms(seconds: float | None) -> str:
    """Milliseconds, or a dash."""
    return "-" if seconds is None else f"{seconds * 1e3:.4g}"


def steps() -> Iterator[tuple[str, Account, Step]]:
    """All measured steps with their model's name and account."""
    for name, account in ACCOUNTS.items():
        yield from ((name, account, step) for step in account.steps)


def measured() -> str:
    """The table of all steps."""
    head = ("model", "batch", "kernels", "eager ms", "queued ahead", "graph", "host part", "device part")
    rows = []
    for name, account, step in steps():
        each = "-" if step.device_per_kernel is None else f"{step.device_per_kernel * 1e6:.2f} us"
        floor, share = account.floor(step), account.floor_share(step)
        left = f"{ms(floor)} ({100 * (share or 0):.0f} %)"
        times = (ms(step.eager), ms(step.filled), ms(step.graph), ms(step.host_part), ms(step.device_part))
        rows.append((NAMES[name], step.batch, f"{step.kernels or 0:,}", *times, each, left))
    return table((*head, "per kernel", "floor (share of a replay)"), rows)


def probed(name: str, batch: int, key: str) -> list[float]:
    """What the probes before and after the account found."""
    found = [one[str(batch)][key] for one in PROBES[name]["probes"]]
    return [value["seconds"] if isinstance(value, dict) else value for value in found]


def fits(name: str, batch: int) -> bool:
    """Whether the probes' step was queued as a whole."""
    return all(one[str(batch)]["filled"]["fits"] for one in PROBES[name]["probes"])


def apart(have: float | None, want: Sequence[float]) -> str:
    """How far a figure is from the mean of two probes."""
    return "-" if have is None else f"{100 * (have / fmean(want) - 1):+.1f} %"


def beside() -> str:
    """Account against probes."""
    rows = []
    for name, _, step in steps():
        queued = apart(step.filled, probed(name, step.batch, "filled")) if fits(name, step.batch) else "too long"
        eager = probed(name, step.batch, "eager")
        spread = f"{apart(step.eager, eager)} ({ms(eager[0])}, {ms(eager[1])} ms)"
        rows.append((NAMES[name], step.batch, apart(step.graph, probed(name, step.batch, "graph")), queued, spread))
    return table(("model", "batch", "graph", "queued ahead", "eager (before, after)"), rows)


def predicted() -> tuple[str, float]:
    """The prediction of a replay against the measured one, and the largest error."""
    rows, worst = [], 0.0
    for name, account, step in steps():
        found = account.predicted_graph(step)
        if found is None or step.graph is None:
            continue
        worst = max(worst, abs(found / step.graph - 1))
        rows.append((NAMES[name], step.batch, ms(found), ms(step.graph), f"{100 * (found / step.graph - 1):+.1f} %"))
    return table(("model", "batch", "predicted ms", "measured ms", "error"), rows), worst


def gaps() -> str:
    """Gaps of both paths."""
    rows = []
    for name in NAMES:
        for batch, pair in PROBES[name]["gaps"].items():
            if len(pair) == 2 and batch in ("1", "16"):
                eager, graph = ((one["gap_us"]["p50"], one["gap_us"]["p90"]) for one in pair)
                idle = (f"{100 * one['idle_share']:.0f} %" for one in pair)
                rows.append((NAMES[name], batch, *eager, *graph, *idle))
    head = ("model", "batch", "eager median us", "90 %", "graph median us", "90 %", "idle, eager", "idle, graph")
    return table(head, rows)


def rungs() -> str:
    """The ladder: seconds per token, and what each rung gave."""
    first = LADDER[RUNGS[0]]
    rows = [(name, ms(LADDER[name]), f"{1 / LADDER[name]:.1f}", f"{first / LADDER[name]:.2f} x") for name in RUNGS]
    return table(("step", "ms per token", "token/s", "against the first"), rows)


def readers() -> str:
    """The verdicts on the published figures."""
    found = {kind: Account.from_json((FILES / f"{kind}.json").read_bytes()) for kind in READERS}
    return table(("reader", "verdict"), [(READERS[kind], account.verdict) for kind, account in found.items()])


def memory() -> str:
    """Pool bytes of all graphs, and of one beside what the allocator's reserve grew by."""
    rows = []
    for name, account in ACCOUNTS.items():
        total = sum(step.pool_bytes or 0 for step in account.steps)
        one = PROBES[name]["pool"]["16"]
        alone = f"{one['ours'] / 2**20:.1f}, {one['reserved'] / 2**20:.1f}"
        driver = "-" if account.residual_bytes is None else f"{account.residual_bytes / 2**20:.1f}"
        rows.append((NAMES[name], f"{total / 2**20:.1f}", driver, alone))
    return table(("model", "pool of 5 graphs, MiB", "driver", "one of 16 rows: pool, reserve grew by"), rows)


def prefills() -> str:
    """Prefill of one prompt."""
    rows = []
    for name in NAMES:
        step = Step(**{**PROBES[name]["prefill"], "notes": ()})
        saved = "-" if step.gain is None or not step.eager else f"{100 * step.gain / step.eager:.1f} %"
        rows.append((NAMES[name], f"{step.kernels or 0:,}", ms(step.eager), ms(step.filled), ms(step.graph), saved))
    return table(("model", "kernels", "eager ms", "queued ahead", "graph", "saved"), rows)


def main() -> None:
    """The page."""
    predictions, worst = predicted()
    compiled = LADDER["capture"][1]
    share = compiled["compile"] / compiled["capture"]
    parts: dict[str, Any] = {
        "measured": measured(),
        "beside": beside(),
        "predictions": predictions,
        "worst": f"{100 * worst:.1f}",
        "gaps": gaps(),
        "rungs": rungs(),
        "readers": readers(),
        "memory": memory(),
        "prefills": prefills(),
        "compile": f"{compiled['compile']:.1f} s of {compiled['capture']:.1f} s ({100 * share:.0f} %)",
        "date": PROBES["date"],
        "torch": PROBES["torch"],
        "bandwidth": f"{(ACCOUNTS['8b'].bandwidth or 0) / 1e12:.2f}",
        "datasheet": f"{(ACCOUNTS['8b'].datasheet or 0) / 1e12:.2f}",
        "example": str(ACCOUNTS["8b"]),
    }
    sys.stdout.write((FILES / "page.md").read_text().format(**parts))


if __name__ == "__main__":
    main()
