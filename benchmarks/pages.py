"""Writes docs/gpu.md from the JSON files in docs/gpu, which the GPU runs left there.

python benchmarks/pages.py
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from nanovllm_page import nanovllm
from page_tables import DOCS, Row, load, table
from sglang_page import sglang
from vllm_page import vllm


def calls(rows: Mapping[str, Mapping[str, float]]) -> str:
    """The table of one forward of overhead.json: what each way to call it costs beside the one written by hand."""
    raw = rows["raw"]["host_us"]
    body = [
        [
            name,
            f"{r['host_us']:.2f}",
            f"{r['host_us'] - raw:+.2f}",
            f"{r['host_us'] / raw:.2f}",
            f"{r['total_us']:.2f}",
        ]
        for name, r in rows.items()
    ]
    return table(["variant", "host us", "over raw", "x raw", "total us"], body)


def overhead() -> str:
    """The cost of one call beside its peers."""
    result = load("overhead")
    titles = {
        "linear": "Eight Linear(256), bfloat16, batch 4, one input",
        "decode": "Decode signature, batch 4, five inputs",
    }
    parts = [f"### {title}\n\n{calls(result['work'][label])}" for label, title in titles.items()]
    return "\n\n".join(parts)


def sentence() -> str:
    """What README says of the cost of a call, timing on, in one line each for one input and for five."""
    said = []
    for label, count in (("linear", "one input"), ("decode", "five inputs")):
        rows = load("overhead")["work"][label]
        for outputs, base in (("alias", "raw"), ("clone", "raw + clone")):
            forms = (f"graphprobe {outputs}, timing on", f"graphprobe {outputs}, timing on, module.forward")
            over = [rows[form]["host_us"] - rows[base]["host_us"] for form in forms]
            said.append(f'- {count}, `outputs="{outputs}"`: {min(over):+.1f} to {max(over):+.1f} us beside `{base}`')
    return "\n".join(said)


def qwen() -> str:
    """A Qwen3-8B-shaped model."""
    result = load("qwen3_8b")
    body: list[Row] = [
        [
            row["batch"],
            "bit-equal" if row["equal"] else f"differs by {row['worst']}",
            f"{row['eager_ms']:.2f}",
            f"{row['graph_ms']:.2f}",
            f"{row['event_ms']:.2f}",
            f"{row['capture_s']:.2f}",
            f"{row['pool_mb']:.1f}",
        ]
        for row in sorted(result["rows"], key=lambda r: r["batch"])
    ]
    head = ["batch", "outputs", "eager ms", "graph ms", "graph ms, by events", "capture s", "pool MB added"]
    total = f"Graph calls counted: {result['graph_calls']}; an independent count of `torch.cuda.CUDAGraph.replay`: "
    return f"{table(head, body)}\n\n{total}{result['replays_seen']}. Pool: {result['pool_bytes'] / 2**20:.1f} MB."


def demo() -> str:
    """SmolLM2 answering, exact and padded."""
    body: list[Row] = []
    for name, label in (("demo", "exact sizes"), ("demo_pad", "`--pad`")):
        result = load(name)
        forward = next(iter(result["snapshot"]["forwards"].values()))
        seconds = result["seconds"]
        body.append(
            [
                label,
                forward["graph_calls"],
                forward["eager_calls"],
                f"{result['hit_rate']:.0%}",
                sum(row["padding"] for row in forward["rows"]),
                "identical" if result["identical"] else "different",
                f"{seconds['graphs']:.2f}",
                f"{seconds['eager']:.2f}",
            ]
        )
    head = [
        "run",
        "graph calls",
        "eager calls",
        "hit rate",
        "padding rows",
        "tokens",
        "all steps, s",
        "all steps eagerly, s",
    ]
    return table(head, body)


def exporting() -> str:
    """What each route costs the thread that serves, and what a scrape costs."""
    result, parts = load("exporting"), []
    for part, title in (("counting", "A count"), ("replaying", "A call of a captured forward, device included")):
        body: list[Row] = [
            [name, f"{r['ns']:,.0f}", f"{r['ratio']:.3f}", f"{r['mean_ratio']:.3f}", f"{r['p999_ns']:,.0f}"]
            for name, r in result[part].items()
        ]
        parts.append(table([title, "ns, median", "x nothing", "x nothing, mean", "ns, 99.9 %"], body))
    body = [
        [name, f"{r['label_sets']:,.0f}", f"{r['ms']:.1f}", f"{r['bytes']:,.0f}" if "bytes" in r else "-"]
        for name, r in result["scraping"].items()
    ]
    return "\n\n".join([*parts, table(["scrape", "label sets", "ms", "bytes"], body)])


def tests() -> str:
    """What ran of tests/gpu, on one GPU and on two."""
    parts = []
    for name, where in (("tests", "One GPU"), ("tests_two_gpus", "Two GPUs")):
        result = load(name)
        body: list[Row] = [
            [test.removeprefix("test_").replace("_", " "), outcome] for test, outcome in result["tests"].items()
        ]
        parts.append(f"### {where}, {result['date']}\n\n" + table(["test", "outcome"], body))
    return "\n\n".join(parts)


def page() -> str:
    """The whole page."""
    at = load("overhead")
    return f"""# On a GPU

Made by `benchmarks/pages.py` from the JSON files in [gpu/](gpu/), which the commands named below left there.
{at["device"]}, torch {at["torch"]}, {at["date"]}.
Host times belong to the host of that GPU as much as to the code: compare rows of one table only.

## What one call costs

`python benchmarks/overhead.py`.
Raw is what engines write by hand: a `copy_` per input, then `replay`.
Host: until the call returns. Total: per call of a long run, with the device waited for at its end.
`module()` goes through `nn.Module.__call__`, which is torch's own cost.

{overhead()}

## A Qwen3-8B shape

`python benchmarks/qwen3.py`: transformers, random weights, bfloat16, 36 layers, a 512-token static cache for each
batch size.
Buckets share one pool, captured largest first, so the first one pays for all.

{qwen()}

## SmolLM2-135M-Instruct answers

`graphprobe demo`: real weights in float32, 24 prompts, buckets 1, 2, 4, 8, 16.
Tokens are compared with the same steps run eagerly at the same (or the padded) batch size.

{demo()}

## Exporting

`python benchmarks/exporting.py`: one thread serves a forward with 463 label sets, while a route is read every second, a
directory every two. The median is the cost of a call; the mean has what the reader takes from the thread, the 99.9th
percentile of bursts (1,000 counts, 50 calls) that it comes in pauses of some milliseconds. A scrape is timed alone.
A count took 0.19 or 0.34 us on this host, by rounds and not by routes: a ratio below 1 is that noise.

{exporting()}

{vllm()}

{sglang()}

{nanovllm()}

## Tests

`GRAPHPROBE_GPU_JSON=docs/gpu/tests.json make gpu`, and `tests/gpu/test_two_gpus.py` where there are two.

{tests()}
"""


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    (DOCS / "gpu.md").write_text(page())
