"""Whether the steps that we counted of an engine are those that it counted itself, or launched.

vLLM's count and ours never agree to the last step. It counts an iteration where its answers arrive: none for a part of
a long prompt, none for the step after a request's last token, and one in each API server that has a request in it. We
count where the step runs, and write that down every two seconds. So only what none of this explains is told.

Of any engine the launches of graphs tell whether it runs and is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from graphprobe import metrics
from graphprobe.sentinel import PATIENCE
from graphprobe.sentinel import SILENT as LAUNCHES
from graphprobe.tools import sglang, vllm
from graphprobe.tools.exposition import Page
from graphprobe.tools.findings import Findings, short
from graphprobe.tools.series import Process, Series
from graphprobe.tools.table import belongs

LATE = 3.0
"""Seconds after which a count is on the page: those between two writings, and one more."""

FASTEST = 2_000.0
"""Steps per second that no engine exceeds."""

TOLERANCE = 0.1
"""Share of the iterations that may be explained by what is not known here."""

AHEAD = 2
"""Steps that are on their way when a request ends."""

EXPLAINED = (
    "with --api-server-count N each server counts the steps that have a request of its own, up to N times as many"
)
FEWER = f"{EXPLAINED}; else a hook misses steps: see graphprobe_hook_bound and the engine's log"
MORE = "steps are counted twice, or dummy steps are: see the engine's log, and tell graphprobe's authors the version"
UNCONFIRMED = "the count is wrong, or the engine launches by another way than torch's CUDAGraph.replay: see its log"
SILENT = "a hook is not called: is this version supported, and does its log say which runner it uses?"


class Counted(NamedTuple):
    """Steps as vLLM counted them, and as each process of ours did; ``sure`` are those that have an answer."""

    engines: int
    iterations: float
    finished: float
    ours: Counter[Process]
    sure: Counter[Process]
    passes: Counter[str]
    """What SGLang counted, by its mode."""


def counted(page: Page, series: list[Series]) -> Counted:
    """What is on one page."""
    ours, sure = Counter[Process](), Counter[Process]()
    for one in series:
        if one.labels.get("forward") == vllm.FORWARD or one.labels.get("engine") == vllm.FORWARD:
            ours[one.process] += 0
        if one.metric in (metrics.GRAPH_CALLS, metrics.EAGER_CALLS) and one.labels["forward"] == vllm.FORWARD:
            ours[one.process] += round(one.value)
            sure[one.process] += round(one.value) if one.labels["phase"] != "prefill" else 0
    iterations, finished = (vllm.total(page.beside, name) for name in (vllm.ITERATIONS, vllm.FINISHED))
    return Counted(vllm.engines(page.beside), iterations, finished, ours, sure, sglang.passes(page.beside))


def told(series: list[Series], now: Counted) -> Iterator[str]:
    """What a reader wants to see although nothing is wrong with it: the hooks, and both counts of steps."""
    hooks = [one for one in series if one.metric is metrics.HOOK_BOUND]
    for process, engine in sorted(_silent(series)):
        yield f"{engine}: no data{_of(process)}: its hooks are in place, and no call was counted"
    for engine in sorted({one.labels["engine"] for one in hooks}):
        names = {one.labels["hook"] for one in hooks if one.labels["engine"] == engine}
        missing = {one.labels["hook"] for one in hooks if one.labels["engine"] == engine and not one.value}
        yield f"{engine}: {len(names) - len(missing)} of {len(names)} hooks are in place"
    if now.ours and now.iterations:
        steps = sorted(set(now.ours.values()))
        span = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
        each = "" if len(now.ours) == 1 else f" by each of {len(now.ours)} processes"
        yield f"{vllm.FORWARD}: {span} steps counted{each}, {now.iterations:,.0f} iterations counted by vLLM"
    yield from _passes(series, now.passes)


def _passes(series: list[Series], theirs: Counter[str]) -> Iterator[str]:
    """Both counts, where one process of ours stands beside SGLang's: of more ranks only one tells SGLang."""
    if not theirs:
        return
    calls = [one for one in series if one.metric in (metrics.GRAPH_CALLS, metrics.EAGER_CALLS)]
    ours = Counter(dict.fromkeys(sglang.MODES, 0))
    for one in calls:
        for mode, (forward, metric) in sglang.MODES.items():
            ours[mode] += round(one.value) if (one.labels["forward"], one.metric) == (forward, metric) else 0
    if ours.total() and len({one.process for one in calls}) == 1:
        both = ", ".join(f"{mode} {ours[mode]:,} and {theirs[mode]:,}" for mode in sglang.MODES)
        yield f"sglang: passes counted here and by SGLang itself: {both}"


def look_at_launches(series: list[Series], found: Findings) -> None:
    """What the independent count of launches says of engines: that one is silent, or that its hits are none."""
    launches = {one.process: one.value for one in series if one.metric is metrics.REPLAYS_SEEN}
    for process, engine in sorted(_silent(series)):
        if launches.get(process, 0) >= LAUNCHES:
            what = f"no call of {short(engine)}{_of(process)}, and {launches[process]:,.0f} graph launches were seen"
            found.add("engine-silent", metrics.GRAPH_CALLS.name, what, SILENT)
    for one in series:
        if one.metric is metrics.REPLAY_MISMATCHES and one.of("path") == ("graph",) and one.value >= PATIENCE:
            what = f"{one.value:,.0f} graph calls of {short(one.labels['forward'])}{_of(one.process)} launched nothing"
            found.add("engine-launches", one.metric.name, what, UNCONFIRMED)


def _silent(series: list[Series]) -> set[tuple[Process, str]]:
    """Engines that have a hook in place in a process, and no call there."""
    hooked = {(o.process, o.labels["engine"]) for o in series if o.metric is metrics.HOOK_BOUND and o.value}
    calls = [one for one in series if one.metric in (metrics.GRAPH_CALLS, metrics.EAGER_CALLS) and one.value]
    called = {(one.process, one.labels["forward"]) for one in calls}
    return {
        (process, engine)
        for process, engine in hooked
        if not any(process == other and belongs(forward, engine) for other, forward in called)
    }


def look_at_steps(first: Counted, last: Counted, seconds: float, found: Findings) -> None:
    """What two reads, ``seconds`` apart, say; of one page only, it is both.

    Iterations of the first read must be counted by us in the last one, and steps of the first by vLLM in the last.
    """
    late = max(0.0, LATE - seconds) * FASTEST * last.engines
    restarted = last.iterations < first.iterations
    if not last.iterations or restarted or not last.ours:
        return
    _fewer(last, first.iterations, late, found)
    most = last.iterations * (1 + TOLERANCE) + AHEAD * last.finished + late
    for process, steps in first.sure.items():
        if steps > most:
            what = f"{steps:,} steps{_of(process)} without those of prefill, and vLLM counted {last.iterations:,.0f}"
            found.add("engine-steps", metrics.GRAPH_CALLS.name, what, MORE)


def _fewer(last: Counted, due: float, late: float, found: Findings) -> None:
    # Of several engines a process serves one, and nothing says which. Each brings an API server of its own by default.
    ours = dict(last.ours) if last.engines == 1 else {(): last.ours.total()}
    least = due * (1 - TOLERANCE) / last.engines - late
    for process, steps in ours.items():
        if steps < least:
            what = f"{steps:,} steps{_of(process)}, and vLLM had counted {due:,.0f} iterations before"
            rule, hint = ("engine-steps", FEWER) if steps else ("engine-silent", SILENT)
            found.add(rule, metrics.GRAPH_CALLS.name, what, hint)


def _of(process: Process) -> str:
    return " of " + ", ".join(f"{short(label)} {short(value)}" for label, value in process) if process else ""
