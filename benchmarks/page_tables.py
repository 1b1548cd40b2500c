"""What the pages of results are made of: a result, a table, and what engines that have graphs of their own share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"

Row = Sequence[object]


def table(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def load(name: str) -> Any:
    """One result."""
    return json.loads((DOCS / "gpu" / f"{name}.json").read_text())


def steps(part: str, rows: Sequence[Sequence[Any]]) -> list[Row]:
    """The rows of one forward, those of a kind in one line."""
    lines: dict[tuple[str, str], list[str]] = {}
    for phase, path, mode, tokens, bucket, reason, calls in rows:
        size = str(tokens) if bucket is None else f"{tokens} -> {bucket}"
        lines.setdefault((f"{part}{phase}", f"{path}, {mode or reason}"), []).append(f"{size}: {calls}")
    return [[phase, kind, ", ".join(sizes)] for (phase, kind), sizes in lines.items()]


def cost(scenarios: Mapping[str, Any]) -> str:
    """Tokens/s with and without, and microseconds of all hooks, in the scenarios where they were measured."""
    timed = {name: found for name, found in scenarios.items() if "throughput" in found}
    body: list[Row] = []
    for name, found in timed.items():
        speed = found["throughput"]
        low, high = speed["on / off, 95 % interval of the median"]
        hooks = found["us per step of each hook"]
        body.append(
            [
                name,
                f"{speed['tokens/s off']:,.0f}",
                f"{speed['tokens/s on']:,.0f}",
                f"{speed['on / off']:.4f} ({low:.4f} to {high:.4f})",
                2 * speed["blocks"],
                f"{speed['us per step off']:,.0f}",
                f"{sum(hooks.values()):.1f}",
                "identical" if speed["identical"] else "different",
            ]
        )
    head = ["engine", "tokens/s without", "with", "ratio of neighbours, median (95 %)", "blocks", "us per step"]
    return table([*head, "of these ours", "tokens"], body)


def milliseconds(seconds: Mapping[Any, float]) -> str:
    """Of each bucket, the largest first."""
    return ", ".join(f"{n}: {1e3 * seconds[n]:.1f}" for n in sorted(seconds, key=int, reverse=True))
