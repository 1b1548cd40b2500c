"""What is to be reached, held against the JSON files of the benchmarks.

A result lies in docs/performance, or in docs/gpu where another page shows it, too. What was not measured has no line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
FOLDERS = ("performance", "gpu")

Result = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One target: what was found, and whether that reaches it (None: there is nothing to reach)."""

    work: str
    reach: str
    found: str
    met: bool | None
    file: str = ""
    """Relative to docs/."""


def place(name: str) -> str | None:
    """Where the result of a benchmark lies, relative to docs/; None where it does not."""
    files = [f"{folder}/{name}.json" for folder in FOLDERS]
    return next((file for file in files if (DOCS / file).exists()), None)


def load(name: str) -> Result | None:
    """The result of a benchmark, None where there is none."""
    file = place(name)
    return None if file is None else json.loads((DOCS / file).read_text())


def lines() -> list[Line]:
    """All targets that were measured, each with its file."""
    found = []
    for name, make in TARGETS.items():
        result, file = load(name), place(name)
        if result is not None and file is not None:
            found += [Line(line.work, line.reach, line.found, line.met, file) for line in make(result)]
    return found


def span(values: Iterable[float], shape: str, unit: str = "") -> str:
    """The least and the most of some values, one number where they look the same."""
    found = sorted(values)
    texts = [shape.format(value) for value in (found[0], found[-1])]
    return " to ".join(dict.fromkeys(texts)) + unit


def most(work: str, limit: float, values: Iterable[float], shape: str, unit: str) -> Line:
    """None of the values may be above the limit."""
    found = list(values)
    return Line(work, f"<= {limit:g}{unit}", span(found, shape, unit), max(found) <= limit)


FORMS = ("", ", module.forward", ", engine.method")
"""How a captured forward is called in overhead.json, without what ``nn.Module.__call__`` takes in front of it."""


def overhead(result: Result) -> Iterator[Line]:
    """One call beside its peers; the ways to call it from the best to the worst."""

    def host(work: str, name: str) -> float:
        return float(result["work"][work][name]["host_us"])

    def ours(work: str, outputs: str) -> list[float]:
        names = [f"graphprobe {outputs}, timing on{form}" for form in FORMS]
        return [host(work, name) for name in names if name in result["work"][work]]

    work = "one input, 8 x Linear(256), batch 4, "
    alias = ours("linear", "alias")
    over = [us - host("linear", "raw") for us in alias]
    yield most(f'{work}`outputs="alias"`: host time over raw copy + replay', 2, over, "{:+.2f}", " us")
    over = [us - host("linear", "raw + clone") for us in ours("linear", "clone")]
    yield most(f'{work}`"clone"`: over raw copy + replay + clone', 2, over, "{:+.2f}", " us")
    for peer, limit in (("make_graphed_callables", 0.75), ("reduce-overhead", 0.35)):
        yield most(f"alias, against `{peer}`", limit, [us / host("linear", peer) for us in alias], "{:.2f}", "x")
    beside = [us / host("decode", "raw") for us in ours("decode", "alias")]
    yield most(
        "decode signature with five inputs, alias, against the hand-written copy loop", 0.6, beside, "{:.2f}", "x"
    )


def serving(result: Result) -> Iterator[Line]:
    """Tokens per second of whole engines."""
    for row in result.get("qwen3_8b", ()):
        work = f"Qwen3-8B shape decode, batch {row['batch']}, everything on, against hand-written replay"
        found = f"{row['ratio']:.2%} ({row['low']:.2%} to {row['high']:.2%})"
        yield Line(work, ">= 99.5 % of its token/s", found, row["ratio"] >= 0.995)
    if smol := result.get("smollm2"):
        tokens = "identical" if smol["identical"] else "different"
        found = f"{smol['ratio']:.2f}x, tokens {tokens}"
        work = "SmolLM2 real weights, Azure conv arrivals, padded buckets, against the exact-match engine"
        yield Line(work, "the ratio; tokens identical", found, bool(smol["identical"]))


def counting(result: Result) -> Iterator[Line]:
    """One count beside prometheus_client."""
    ratio = result["counting"]["observe().graph_call"]["ratio"]
    yield most("counting a call (`observe().graph_call`) against `labels().inc()`", 0.25, [ratio], "{:.3f}", "x")


def decorator(result: Result) -> Iterator[Line]:
    """The decorator beside the same work by hand, by number of inputs and form."""
    for inputs in dict.fromkeys(row["inputs"] for row in result["rows"]):
        over = [row["over_us"] for row in result["rows"] if row["inputs"] == inputs]
        work = (
            f"decorator on the CPU recorder over the same copies, tape and clones, {inputs} input{'s' * (inputs > 1)}"
        )
        yield most(work, 3, over, "{:+.2f}", " us")


def scraping(result: Result) -> Iterator[Line]:
    """A scrape of the size next to 500 series, and the forwards that it delays, by what reads them."""
    row = min(result["scrape"], key=lambda row: abs(row["label_sets"] - 500))
    yield most(
        f"scrape of {row['label_sets']} series, without and with HTTP", 10, [row["ms"], row["http_ms"]], "{:.1f}", " ms"
    )
    for served, ways in result["overlap"].items():
        more = [way[f"more_{name}"] for way in ways.values() for name in ("p50", "p90")]
        work = f"the slowest forward ({served}) that overlaps a scrape, over one that overlaps a sleep, p50 and p90"
        yield most(work, 1, more, "{:+.2f}", " ms")


def imports(result: Result) -> Iterator[Line]:
    """The import statement."""
    yield most("`import graphprobe`, without torch", 30, [result["statement_ms"]], "{:.1f}", " ms")


TARGETS: dict[str, Callable[[Result], Iterator[Line]]] = {
    "overhead": overhead,
    "serving": serving,
    "counting": counting,
    "decorator": decorator,
    "scraping": scraping,
    "imports": imports,
}
