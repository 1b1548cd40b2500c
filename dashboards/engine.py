"""The row of the overview about engines that own their graphs: what a hit rate of 100 % does not say of them.

Ranks of one engine count the same steps. So shares are of sums, where that cancels out, memory and captures stand by
rank, and steps per second are those of the busiest rank.
"""

from __future__ import annotations

from dashboards import queries as q
from dashboards.colours import GOAL, NONE_IS_GOOD
from dashboards.layout import Row
from dashboards.panels import NO_TRAFFIC, UNKNOWN, Column, Query, bars, grid, lines, stat
from graphprobe.metrics import (
    BUCKET_CAPTURED,
    CAPTURE_DURATION,
    EAGER_CALLS,
    GRAPH_CALLS,
    HOOK_BOUND,
    KV_CAPACITY,
    POOL_BYTES,
    POOL_ESTIMATE,
    REPLAY_MISMATCHES,
    UNCOVERED_SIZES,
)

UNIFORM = 'phase=~"decode|verify|draft"'
"""Steps that a graph could hold whole: each request brings the same number of tokens."""


def engine() -> Row:
    """Whether decode steps have full graphs, what the start has made, and whether the hooks are in place."""
    full = lines(
        "Full graphs of decode steps",
        "Of the graph calls of decode, verify and draft steps, those whose graph covers the whole forward (vLLM: "
        "FULL, SGLang: full). The others are piecewise or breakable: hits, too, with a part that runs eagerly. Misses "
        "are left out here.",
        "percentunit",
        NO_TRAFFIC,
        [Query(full_share("job, forward"), "{{job}} {{forward}}")],
        limit=GOAL,
    ).max(1)
    sizes = bars(
        "Decode steps by size and mode",
        "Graph calls of decode, verify and draft steps in this range of time, by batch size (vLLM: tokens, so requests "
        "times 1 + speculative tokens; SGLang, nano-vllm and mini-sglang: requests). In vLLM a size that is not full "
        "lies between the sizes of full graphs. Choose one forward.",
        "short",
        steps_by_mode(),
        "batch_size",
        "mode",
    )
    labels = ("job", "instance", "rank", "forward")
    graphs = q.over(f"{q.SERIES}, bucket", q.select(BUCKET_CAPTURED), "max")
    start = grid(
        "What the start has made",
        "By rank. over: graph memory beyond the engine's own estimate, on which its KV cache was sized; what is far "
        "below 0 is memory that the cache could have; known of vLLM. uncovered: decode steps that have no full graph.",
        UNKNOWN,
        labels,
        (
            Column(q.over(q.SERIES, f"{graphs} == 1", "count"), "graphs"),
            Column(q.over(q.SERIES, q.select(CAPTURE_DURATION)), "capture", "s"),
            Column(q.over(q.SERIES, q.select(POOL_BYTES), "max"), "memory", "bytes"),
            Column(over_estimate(), "over", "bytes"),
            Column(q.over(q.SERIES, q.select(KV_CAPACITY), "max"), "KV tokens", "short"),
            Column(q.over(q.SERIES, q.select(UNCOVERED_SIZES), "max"), "uncovered"),
        ),
    )
    steps = lines(
        "Steps by phase",
        "Of the busiest rank, since ranks of one engine each count the same step; a drafter is a forward of its own. "
        "verify: decode with speculative tokens. mixed: a prompt among them.",
        "cps",
        NO_TRAFFIC,
        [Query(busiest_steps(), "{{forward}} {{phase}}")],
    )
    hooks = stat(
        "Hooks missing",
        "Places in an engine that graphprobe did not find, summed over ranks: what they would see is not counted. "
        "Which ones is in the last row.",
        "none",
        "no hooks",
        [Query(q.over("job, engine", f"1 - {q.select(HOOK_BOUND)}"), "{{job}} {{engine}}", now=True)],
        NONE_IS_GOOD,
    )
    unconfirmed = stat(
        "Unconfirmed calls",
        "Graph calls of this range of time in which no graph was launched: the count is wrong, or the engine launches "
        "by another way than torch. Told where launches are seen, which they are on a GPU.",
        "none",
        UNKNOWN,
        [Query(q.grown("job, forward", REPLAY_MISMATCHES, 'path="graph"'), "{{job}} {{forward}}", now=True)],
        NONE_IS_GOOD,
    )
    panels = [(9, full), (15, sizes), (12, start), (6, steps), (3, hooks), (3, unconfirmed)]
    return Row("Engines with graphs of their own", 8, panels, collapsed=True)


def full_share(by: str) -> str:
    """The part of the graph calls of uniform steps that a full graph served; 0 where none did."""
    everything = q.over(by, q.rate(GRAPH_CALLS, UNIFORM))
    full = q.over(by, q.rate(GRAPH_CALLS, UNIFORM, 'mode="full"'))
    return q.divide(q.either(full, f"0 * {everything}"), everything)


def steps_by_mode() -> str:
    """Graph calls of uniform steps in the range, by batch size and mode."""
    return f"{q.over('batch_size, mode', q.increase(GRAPH_CALLS, UNIFORM))} > 0"


def busiest_steps() -> str:
    """Calls per second by forward and phase, of the rank that has most."""
    ranks = q.over(f"{q.SERIES}, phase", q.either(q.rate(GRAPH_CALLS), q.rate(EAGER_CALLS)))
    return q.over("forward, phase", ranks, "max")


def over_estimate() -> str:
    """Bytes that graphs take beyond what the engine had estimated; negative below it."""
    taken, told = (q.over(q.SERIES, q.select(metric), "max") for metric in (POOL_BYTES, POOL_ESTIMATE))
    return f"{taken}\n-\n{told}"
