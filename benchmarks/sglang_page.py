"""The part of docs/gpu.md on SGLang, from docs/gpu/sglang.json."""

from __future__ import annotations

from typing import Any

from page_tables import Row, cost, load, milliseconds, steps, table
from sglang_engine import ALONE, EXPECTED, FIRST, SCENARIOS
from sglang_tell import PREFILL, TARGET, own, passes, snapshot, verdict

DRAFTER = "sglang.drafter"


def sglang() -> str:
    """The whole section."""
    found = load("sglang")
    known = {name: one for name, one in found["scenarios"].items() if one}
    quiet = known[ALONE]
    return f"""## SGLang

`python benchmarks/sglang_engine.py`: {where(found)}.
A Llama of eight layers with made-up weights, sizes of decode 1, 2, 4, 8, 16, no graphs of prefill but in `breakable`;
20 requests that end one after another, three times, then one. Each scenario is an engine in a process of its own:
`{FIRST}` is the first on its machine, `{ALONE}` is without SGLang's own metrics; they and `eagle` are alone on the
device, all others run beside each other. Held against SGLang's count of passes (`sglang:cuda_graph_passes_total`),
against its log of replays, size by size, against a count of `torch.cuda.CUDAGraph.replay` below ours, and against what
an earlier observer found.

{scenarios(found["scenarios"])}

{tokens(known)}

Graph calls by size and bucket, in `graphs`:

{table(["forward", "phase", "path", "size (-> bucket): calls"], sizes(known["graphs"], TARGET, PREFILL))}

Time of a call. In `{ALONE}` one call of a kind in 64 is timed, the second one first; in the others more are, and
`breakable` is not alone:

{times({name: known[name] for name in (ALONE, "eagle", "breakable")})}

What captures take. SGLang's seconds for graphs have the passes before each capture in them, and at a first start
kernels are compiled there. The time of each graph is that of its capture alone.

{starts({name: known[name] for name in (FIRST, ALONE)})}

{breakable(known["breakable"])}

{eagle(known["eagle"])}

Speed, in `{ALONE}`: {steady(quiet["throughput"])}, by turns with and without the hooks.
{hooks(quiet)}

{cost({ALONE: quiet})}"""


def where(found: dict[str, Any]) -> str:
    """The versions, the machine and the date."""
    versions = f"SGLang {found['sglang']}, torch {found['torch']}, Python {found['python']}"
    return f"{versions}, {found['device']}, {found['date']}"


def steady(speed: dict[str, Any]) -> str:
    """The work of the blocks."""
    return f"a steady batch of {speed['batch']} in blocks of {speed['steps per block']} steps"


def scenarios(results: dict[str, Any]) -> str:
    """Our counts beside those of others; a scenario that failed is said."""
    head = ["scenario", "decode, graph / eager", "prefill, graph / eager", "by SGLang", "lines in its log"]
    head += ["launches, ours", "replays", "verdict"]
    body: list[Row] = [line(name, found) if found else [name, *["-"] * 6, "failed"] for name, found in results.items()]
    return table(head, body)


def line(name: str, found: dict[str, Any]) -> Row:
    """One scenario; what was not asked, or is switched off, is a dash."""
    quiet, ours, theirs = SCENARIOS[name].get("quiet"), passes(found), own(found)
    observed = bool(snapshot(found).forwards)
    seen = snapshot(found).replays_seen
    return [
        name,
        "{} / {}".format(*ours[:2]) if observed else "-",
        "{} / {}".format(*ours[2:]) if observed else "-",
        "-" if theirs is None else "{} / {}, {} / {}".format(*theirs),
        "-" if quiet else sum(calls for *_, calls in found["replayed"]),
        "-" if seen is None else seen,
        "-" if quiet else found["replays"],
        "; ".join(verdict(name, found, EXPECTED)) or "as it should be",
    ]


def tokens(known: dict[str, Any]) -> str:
    """Whether observing changes an answer."""
    digests = {name: found["digest"].split()[0] for name, found in known.items()}
    others = [f"`{name}`" for name, digest in digests.items() if digest != digests["graphs"]]
    told = f"different from `graphs` in {', '.join(others)}" if others else f"identical in all {len(digests)} scenarios"
    pair = (known[name]["digest"] for name in ("breakable", "breakable without"))
    same = "the same" if len(set(pair)) == 1 else "not the same"
    return f"Tokens: {told}; those of the longer prompts in `breakable` are {same} with and without graphprobe."


def sizes(found: dict[str, Any], *names: str) -> list[Row]:
    """Rows of some forwards, those of a kind in one line."""
    forwards = snapshot(found).forwards
    return [
        [f"`{name}`", *kind]
        for name in names
        for kind in steps(
            "",
            [(r.phase, r.path, r.mode, r.batch_size, r.bucket, r.reason, r.calls) for r in forwards[name].rows],
        )
    ]


def times(known: dict[str, Any]) -> str:
    """Mean milliseconds of the timed calls, by path and bucket."""
    body: list[Row] = [
        [name, f"`{at}`", phase, f"{path}, {mode}" if mode else path, bucket or "-", each.count, f"{1e3 * mean:.3f}"]
        for name, found in known.items()
        for at, forward in snapshot(found).forwards.items()
        for (phase, path, mode, bucket), each in forward.times.items()
        if (mean := each.mean) is not None
    ]
    return table(["scenario", "forward", "phase", "path", "bucket", "timed calls", "ms, mean"], body)


def mebibytes(number: int | None) -> str:
    """Of graphs, where they are known."""
    return "-" if number is None else f"{number / 2**20:.0f}"


def starts(known: dict[str, Any]) -> str:
    """Seconds of each capture beside those of all that SGLang does for graphs, and of its start; bytes."""
    body: list[Row] = []
    said: list[str] = []
    for name, found in known.items():
        one = snapshot(found).forwards[TARGET]
        engine = found.get("own", {}).get("startup_cuda_graph_time_seconds decode")
        body.append(
            [
                name,
                mebibytes(one.pool_bytes),
                milliseconds(one.capture_seconds),
                f"{sum(one.capture_seconds.values()):.3f}",
                "-" if engine is None else f"{engine:.1f}",
                f"{found['start_seconds']:.0f}",
            ]
        )
        said += [f"sglang: {cause}" for key, cause in one.causes.items() if key.startswith("compiled/")]
    head = ["scenario", "graphs, MiB", "captures, ms by bucket", "all captures, s", "graphs by SGLang, s", "start, s"]
    warned = "".join(f"\n\n```text\n{text}\n```" for text in said)
    return table(head, body) + warned


def breakable(found: dict[str, Any]) -> str:
    """Graphs of prefill: one for each piece between two attentions."""
    seen, forwards = snapshot(found), snapshot(found).forwards
    one = forwards[PREFILL]
    modes = ", ".join(sorted({row.mode for row in one.rows if row.mode}))
    each = ((seen.replays_seen or 0) - forwards[TARGET].graph_calls) / max(one.graph_calls, 1)
    counted = table(["forward", "phase", "path", "size (-> bucket): calls"], sizes(found, PREFILL))
    return f"""Graphs of prefill, in `breakable`: their mode is {modes}, and each pass in a graph is {each:g} launches,
since attention is between the parts.

{counted}"""


def eagle(found: dict[str, Any]) -> str:
    """Calls of the target and of its drafter for each round of speculation."""
    forwards = snapshot(found).forwards
    rows = [row for name in (TARGET, DRAFTER) for row in forwards[name].rows]
    phases = list(dict.fromkeys(row.phase for row in rows))
    calls = {phase: [0, 0] for phase in phases}
    for row in rows:
        calls[row.phase][row.path != "graph"] += row.calls
    rounds = sum(calls["verify"])
    body: list[Row] = [[phase, *both, f"{sum(both) / rounds:g}"] for phase, both in calls.items()]
    seen = snapshot(found).replays_seen
    told = f"With speculative decoding, in `eagle`: {rounds:,} rounds, {seen:,} launches of graphs."
    pools = ", ".join(f"`{name}` {mebibytes(forwards[name].pool_bytes)}" for name in (TARGET, DRAFTER))
    return f"{told}\nMiB of graphs: {pools}.\n\n" + table(["phase", "graph", "eager", "per round"], body)


def hooks(found: dict[str, Any]) -> str:
    """What each hook takes, and what a step takes more by the clock."""
    each = ", ".join(f"`{name}` {us:.1f}" for name, us in found["us per step of each hook"].items())
    low, high = found["throughput"]["us per step more, 95 % interval of the median"]
    more = f"{found['throughput']['us per step more']:.1f} (95 %: {low:.1f} to {high:.1f})"
    return f"""Ours, us per step, measured around each hook inside the engine: {each}.
There `replay` is where launches are counted, and `batch` is gone after the first pass: its number is what the clocks
cannot tell. From block to block a step with the hooks takes {more} us more."""
