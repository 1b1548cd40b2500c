"""The part of docs/gpu.md on nano-vllm, from docs/gpu/nanovllm.json."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from page_tables import Row, load, milliseconds, table

UNNAMED = {"device": "NVIDIA H200", "date": "2026-11-30"}
"""Where the run was whose file does not say it."""

OWN = ("16", "20", "12", "20 eager", "16 plain")
"""The engine as it is; the others have our graphs."""

RAISED = hashlib.sha256(repr("StopIteration").encode()).hexdigest()[:12]
"""What stands for the answers of such a round."""

PAIRS = {"16 captured": ("16 plain",), "20 captured": ("20", "20 eager")}
"""With our graphs; the engine by itself, which has the same requests."""


def nanovllm() -> str:
    """The whole section."""
    found = load("nanovllm")
    machine = found.get("machine") or UNNAMED
    known = {name: found[name] for name in OWN if name in found}
    return f"""## nano-vllm

`python benchmarks/nanovllm_engine.py CHECKOUT`: {where(machine)}.
A tiny Qwen3 with made-up weights, torch's attention for `flash_attn`; rounds of 16, 16, 17, 18, 19, 20, 20 and 3
requests that end one after another. `eager`: with `enforce_eager`. `plain`: without graphprobe. Replays: a count of
`torch.cuda.CUDAGraph.replay` below ours. A StopIteration ends the round, and its requests are lost.

{counts(known)}

Said before the first request:

{warnings(known)}

Time of a call in ms, mean (timed calls); one call of a kind in 64 is timed, the second one first:

{times(known)}

What captures take. nano-vllm compiles in the passes before them, which the time of each graph has not in it. The first
engine starts with an empty compile cache.

{starts(known)}

Speed, with 16 requests: blocks of steps by turns with and without the hooks, in one process; then each hook, measured
where it is.

{speed(found["16"])}

Its capture replaced by `graphprobe.capture` ([examples/nanovllm_capture.py](examples/nanovllm_capture.py)), answers
held against those of the engine by itself, round by round, without rounds that raised:

{migration(found)}

{turns(found["16"])}"""


def where(machine: dict[str, Any]) -> str:
    """The versions, the machine and the date, as far as the file has them."""
    named = [f"{name} {machine[name]}" for name in ("nano-vllm", "torch") if machine.get(name)]
    python = [f"Python {machine['python']}"] if machine.get("python") else []
    return ", ".join([*named, *python, machine["device"], machine["date"]])


def counts(known: dict[str, Any]) -> str:
    """What each engine did; one that failed is said."""
    body: list[Row] = []
    for name, found in known.items():
        if "error" in found:
            body.append([name, "failed", *["-"] * 5])
            continue
        calls = found.get("calls")
        captured = ", ".join(sorted(found.get("capture_seconds", {}), key=int)) or "none"
        body.append(
            [
                name,
                "-" if calls is None else captured,
                "-" if calls is None else calls.get("decode graph", 0),
                "-" if calls is None else calls.get("decode eager", 0),
                found["raised"],
                "-" if calls is None else calls.get("prefill eager", 0),
                found["replays"],
            ]
        )
    head = ["`max_num_seqs`", "captured", "decode graph", "decode eager", "StopIteration", "prefill eager", "replays"]
    return table(head, body)


def warnings(known: dict[str, Any]) -> str:
    """What was logged of sizes without a graph."""
    return "\n".join(
        f"```text\n{line}\n```"
        for found in known.values()
        for line in found.get("said", ())
        if line.removeprefix("nanovllm: ") == found.get("causes", {}).get("uncovered/decode")
    )


def times(known: dict[str, Any]) -> str:
    """By path and bucket, an engine in one line."""
    body: list[Row] = []
    for name, found in known.items():
        kinds: dict[str, list[str]] = {}
        for key, (count, ms) in found.get("ms", {}).items():
            phase, path, _, bucket = key.split(" ")
            size = "" if bucket == "None" else f"{bucket}: "
            kinds.setdefault(f"{phase} {path}", []).append(f"{size}{ms:.3f} ({count})")
        if kinds:
            paths = ("decode graph", "decode eager", "prefill eager")
            body.append([name, *("; ".join(kinds.get(path, ["-"])) for path in paths)])
    return table(["`max_num_seqs`", "decode graph, by bucket", "decode eager", "prefill eager"], body)


def starts(known: dict[str, Any]) -> str:
    """Bytes, seconds of each capture beside those of all that is done for graphs, and of the start."""
    body: list[Row] = []
    for name, found in known.items():
        if not found.get("capture_seconds"):
            continue
        # The engine's own seconds are in the words of the log only.
        whole = re.search(r"graphs in ([\d.]+) s", found["causes"].get("captures", ""))
        body.append(
            [
                name,
                f"{found['pool_bytes'] / 2**20:.0f}",
                milliseconds(found["capture_seconds"]),
                f"{sum(found['capture_seconds'].values()):.3f}",
                "-" if whole is None else whole[1],
                f"{found['start_seconds']:.0f}",
            ]
        )
    head = ["`max_num_seqs`", "graphs, MiB", "captures, ms by bucket", "all captures, s", "graphs by nano-vllm, s"]
    return table([*head, "start, s"], body)


def speed(found: dict[str, Any]) -> str:
    """Tokens/s with and without, and microseconds of each hook."""
    each = found.get("own_us")
    if not isinstance(each, dict):
        return "Not measured."
    body: list[Row] = [
        [f"`{name}`", f"{each['median'][name]:.1f}", f"{each['fmean'][name]:.1f}"] for name in each["median"]
    ]
    body.append(["all", *(f"{sum(each[how].values()):.1f}" for how in ("median", "fmean"))])
    hooks = table(["hook", "us per step, median", "mean"], body)
    return f"{ratio(found.get('observed'), 'without', 'with')}\n\n{hooks}"


def ratio(result: Any, before: str, after: str) -> str:
    """Two ways by turns; what was raised instead is no result."""
    if not isinstance(result, dict):
        return "Not measured."
    low, high = result["on / off, 95 % interval of the median"]
    least, most = result["us per step more, 95 % interval of the median"]
    row = [
        f"{result['tokens/s off']:,.0f}",
        f"{result['tokens/s on']:,.0f}",
        f"{result['on / off']:.4f} ({low:.4f} to {high:.4f})",
        2 * result["pairs of blocks"],
        result["steps per block"],
        f"{result['us per step more']:,.1f} ({least:,.1f} to {most:,.1f})",
        "identical" if result["identical"] else "different",
    ]
    head = [f"tokens/s {before}", after, "ratio of neighbours, median (95 %)", "blocks", "steps in each"]
    return table([*head, "us per step more (95 %)", "answers"], [row])


def migration(found: dict[str, Any]) -> str:
    """Counts with our graphs, and whether answers are those of the engine by itself; what was not captured, and why."""
    body: list[Row] = []
    said: list[str] = []
    for name, others in PAIRS.items():
        one = found.get(name, {"error": ""})
        if "error" in one:
            body.append([name, "failed", *["-"] * 5])
            continue
        calls = one["calls"]
        paths = ("decode graph", "decode eager", "prefill eager")
        counted = [calls.get(path, 0) for path in paths]
        told = "; ".join(answers(one, found.get(other, {})) + f" (`{other}`)" for other in others)
        body.append([name, *counted, one["replays"], one["raised"], told])
        said += [line for line in one["said"] if "capturing bucket" in line]
    head = ["`max_num_seqs`", "decode graph", "decode eager", "prefill eager", "replays", "StopIteration", "answers"]
    causes = "\n".join(f"```text\n{line}\n```" for line in dict.fromkeys(said))
    return table(head, body) + (f"\n\nNot captured:\n\n{causes}" if causes else "")


def answers(one: dict[str, Any], other: dict[str, Any]) -> str:
    """In how many rounds they are the same, of those that ended in both."""
    ended = [pair for pair in zip(one["digests"], other.get("digests", ()), strict=False) if RAISED not in pair]
    same = sum(ours == theirs for ours, theirs in ended)
    return f"identical in {same} of {len(ended)} rounds"


def turns(found: dict[str, Any]) -> str:
    """Our graphs and the engine's by turns, and the lines that either takes."""
    lines = found.get("lines")
    counted = ", ".join(f"{name} {n}" for name, n in lines.items()) if isinstance(lines, dict) else "not counted"
    failed = re.findall(r"capturing bucket (\d+) failed", "\n".join(found.get("said", ())))
    without = f".\nBuckets {', '.join(failed)} of ours were not captured here, and ran eagerly" if failed else ""
    return f"""Lines of code for capture and replay: {counted}.
Both kinds of graphs in one process, by turns, with 16 requests{without}:

{ratio(found.get("captured"), "by nano-vllm's graphs", "by ours")}"""
