"""Writes docs/performance.md from the JSON files that the benchmarks left in docs/performance (and docs/gpu).

python benchmarks/performance.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import groupby

from pages import calls, table
from targets import DOCS, Result, lines, load


def where(result: Result) -> str:
    """The machine, the versions and the date of one result."""
    said = [str(result["device"])] if result.get("device") else []
    said += [f"{result['cores']} cores"] if "cores" in result else []
    said += [f"Python {result['python']}"] if "python" in result else []
    packages = [key for key in result if key in ("torch", "prometheus_client", "opentelemetry-sdk")]
    return ", ".join([*said, *(f"{name} {result[name]}" for name in packages), str(result["date"])]) + "."


def targets() -> str:
    """What was to be reached, and what was found."""
    body = [
        [line.work, line.reach, line.found + (", missed" if line.met is False else ""), f"[{line.file}]({line.file})"]
        for line in lines()
    ]
    return table(["work", "to reach", "found", "where"], body)


def overhead(result: Result) -> str:
    """A call on a GPU."""
    titles = {"linear": "Eight Linear(256), batch 4, one input", "decode": "Decode signature, batch 4, five inputs"}
    parts = [
        f"""`python benchmarks/overhead.py`. {where(result)}
Host: microseconds until the call returns. Total: per call of a long run, with the device waited for at its end.
Raw is a `copy_` per input and a replay, as engines write it; `module()` includes `nn.Module.__call__`, which is torch's
own; "written in place" passes `inputs(4)`."""
    ]
    for label, rows in result["work"].items():
        parts += [f"### {titles.get(label, label)}", calls(rows)]
    if pieces := result.get("parts"):
        one, five = pieces["linear"], pieces["decode"]
        body = [[name, f"{one[name]['host_us']:.2f}", f"{five[name]['host_us']:.2f}"] for name in one]
        parts.append("### Parts\n\nPieces of a hit, each called alone in a loop, the call itself included.")
        parts.append(table(["piece", "one input, us", "five inputs, us"], body))
    return "\n\n".join(parts)


def serving(result: Result) -> str:
    """Engines on a GPU."""
    parts = [
        f"""`python benchmarks/serving.py`. {where(result)}
Token/s of whole engines, side by side; the two tables are of two runs. Everything on: the defaults of `capture`, and an
exporter that is scraped every second. The SmolLM2 engine by hand replays exact sizes only."""
    ]
    if rows := result.get("qwen3_8b"):
        body = [
            [
                row["batch"],
                f"{row['raw_tokens_s']:,.1f}",
                f"{row['ours_tokens_s']:,.1f}",
                f"{row['ratio']:.2%}",
                f"{row['low']:.2%} to {row['high']:.2%}",
                f"{row['raw_graph_ms']:.3f}, {row['ours_graph_ms']:.3f}" if "raw_graph_ms" in row else "-",
            ]
            for row in rows
        ]
        head = [
            "Qwen3-8B shape, batch",
            "by hand, token/s",
            "graphprobe, token/s",
            "ratio",
            "95 % interval",
            "a replay alone, ms",
        ]
        parts.append(table(head, body))
    if smol := result.get("smollm2"):
        body = [
            ["exact sizes only", f"{smol['exact_tokens_s']:,.1f}", f"{smol['exact_hit_rate']:.1%}"],
            ["padded buckets", f"{smol['padded_tokens_s']:,.1f}", f"{smol['padded_hit_rate']:.1%}"],
        ]
        parts.append(table(["SmolLM2-135M", "token/s", "hit rate"], body))
        tokens = "identical" if smol["identical"] else "different"
        parts.append(f"{smol['requests']:,} requests; ratio {smol['ratio']:.2f}, tokens {tokens}.")
    return "\n\n".join(parts)


def counting(result: Result) -> str:
    """A count."""
    body = [[name, f"{row['ns']:.0f}", f"{row['ratio']:.3f}"] for name, row in result["counting"].items()]
    skipped = "".join(f"\n{name} was skipped: {why}." for name, why in result["skipped"].items())
    return f"""`python benchmarks/counting.py`. {where(result)}
One thread counts one call, with the same labels everywhere, the loop around it included. A time is the one that a
tenth of the rounds undercut, a ratio the median of the rounds' own.{skipped}

{table(["count", "ns", f"x {result['beside']}"], body)}"""


def decorator(result: Result) -> str:
    """A call on the recorder."""
    body = [
        [
            row["inputs"],
            row["outputs"],
            row["form"],
            f"{row['copies_us']:.2f}",
            f"{row['same_us']:.2f}",
            f"{row['ours_us']:.2f}",
            f"{row['over_us']:+.2f}",
        ]
        for row in result["rows"]
    ]
    head = ["inputs", "outputs", "form", "a `copy_` per input", "the same work by hand", "graphprobe", "over that"]
    return f"""`python benchmarks/decorator.py`. {where(result)}
Microseconds per call. The loop by hand replays the very tape that was captured, with the same copies and the same
clone. A tape's operators push what a call needs out of the processor's caches, graphprobe's part as well as the copies:
behind a replay that does nothing (next section) both take a fraction of that.

{table(head, body)}"""


def scaling(result: Result) -> str:
    """What must not grow."""
    parts = [
        f"""`python benchmarks/scaling.py`. {where(result)}
In brackets the ratio to the first of the row. Results are clones, but for the rows by inputs (`alias`). Calls are of
the CPU recorder with a replay that does nothing: the host's part alone. The hand-written copies are one launch per
dtype, of inputs in two dtypes. All threads call one wrapper, count with one probe, and share one GIL, whose hand-over
differs much from run to run. Calls of one wrapper exclude one another, since they write the same static inputs, and
torch gives the GIL away in each copy, inside the lock. Memory is what the objects of a ledger take, whose calls have
300 sizes in turn; the last count is what fitted into 20 s."""
    ]
    for (against, ats), rows in groupby(result["rows"], lambda r: (r["against"], [p["at"] for p in r["points"]])):
        body = [
            [
                f"{r['name']}, {r['unit']}",
                *(f"{p['value']:,.{digits(p['value'])}f} ({p['ratio']:.2f})" for p in r["points"]),
            ]
            for r in rows
        ]
        parts.append(table([against, *(f"{at:,}" for at in ats)], body))
    return "\n\n".join(parts)


def digits(value: float) -> int:
    """How many decimals a figure has."""
    return 2 if abs(value) < 100 else 0


def scraping(result: Result) -> str:
    """A scrape, and what it does to the forwards beside it."""
    sizes = [
        [f"{row['label_sets']:,}", f"{row['bytes']:,}", f"{row['ms']:.2f}", f"{row['http_ms']:.2f}"]
        for row in result["scrape"]
    ]
    delays = [
        [
            served,
            way,
            row["windows"],
            *(f"{row[f'{of}_{p}']:.2f}" for p in ("p50", "p90") for of in ("scrape", "idle", "more")),
        ]
        for served, ways in result["overlap"].items()
        for way, row in ways.items()
    ]
    head = ["forwards", "read by", "scrapes", "p50, ms", "idle", "more", "p90, ms", "idle", "more"]
    return f"""`python benchmarks/scraping.py`. {where(result)}
Medians. The second table has the slowest forward that overlaps each scrape of 500 series, over scrapes, beside the
slowest that overlaps a sleep of the same length.

{table(["series", "bytes", "ms", "ms over HTTP"], sizes)}

{table(head, delays)}"""


def imports(result: Result) -> str:
    """The import."""
    body = [[f"`{name}`", f"{ms:.1f}"] for name, ms in result["process_ms"].items()]
    return f"""`python benchmarks/imports.py`. {where(result)}
The statement `import graphprobe`, which loads no torch, by the interpreter's own clock, in {result["rounds"]} fresh
interpreters: {result["statement_ms"]:.1f} ms (median; least {result["least_ms"]:.1f} ms).
Whole processes, started and ended:

{table(["a process with", "ms"], body)}"""


SECTIONS: dict[str, tuple[str, Callable[[Result], str]]] = {
    "overhead": ("A call on a GPU", overhead),
    "serving": ("Engines on a GPU", serving),
    "counting": ("Counting a call", counting),
    "decorator": ("The decorator on the CPU", decorator),
    "scaling": ("What must not grow", scaling),
    "scraping": ("A scrape", scraping),
    "imports": ("Import", imports),
}


LIMITS = """### What limits what is missed

- **A decorated method**: each look-up of `engine.decode` makes an object that keeps the engine alive, as a bound method
  does. It was four times as dear when its attributes were set through Python. Kept on the engine it would be a cycle;
  kept there weakly, `Engine().decode(x)` would lose its engine.
- **One call**: the same code takes two to three times as long between replays as in a loop of its own, since torch and
  the driver push it out of the caches. Fewer instructions gave nothing beyond noise (checks left out, one tuple for all
  closure cells); fewer frames and objects gave a third (one function instead of four), then events read eight at a time
  and all weights compared by two calls into torch.
- **Five inputs on the recorder**: the guard of five tensors, whether two of them are one, a function for each dtype.
  A set of identities instead of pairs, no generator, and groups called without a loop gave 0.3 us. On a GPU the dtypes
  share a launch, and a call is faster than the loop by hand.
- **A forward beside a scrape**: a slice of 250 us, and the time in which the operating system wakes a waiting thread. A
  pause of no length is over before that one is awake; shorter slices make a scrape longer. The request itself is parsed
  by Python's http.server, in pieces of 0.3 to 0.6 ms.
- **Threads**: those that share a wrapper take turns, as its static inputs are one memory.
"""


def page() -> str:
    """The whole page; a section whose file is missing is left out."""
    sections = [
        f"## {title}\n\n{make(result)}\n"
        for name, (title, make) in SECTIONS.items()
        if (result := load(name)) is not None
    ]
    return f"""# Performance

Made by `benchmarks/performance.py` from the JSON files in [performance/](performance/) and [gpu/](gpu/).
`make bench` runs the CPU part and writes this page again; the GPU part is named with its section.
Figures are of the machine that is named with them, and of other work on it: compare the rows of one table.
Variants of one table were measured in turn, in short bursts, in one run.

## To reach

Where there are several ways to call, from the best to the worst of them; what counts is the worst.

{targets()}

{LIMITS}
""" + "\n".join(sections)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    (DOCS / "performance.md").write_text(page())
