"""graphprobe / Overview: is the engine on its graphs, where not, why, and what that costs."""

from __future__ import annotations

from dashboards import queries as q
from dashboards.colours import EAGER, GOAL, GRAPH, MODES, NONE_IS_GOOD, PATHS, REASONS, SKEW
from dashboards.engine import engine
from dashboards.itself import alerts, itself
from dashboards.layout import Row, build
from dashboards.panels import (
    NO_TRAFFIC,
    UNKNOWN,
    Column,
    Panel,
    Query,
    bars,
    goal_lines,
    grid,
    lines,
    ranking,
    stat,
)
from graphprobe.metrics import (
    CAPTURE_DURATION,
    CAPTURES,
    EAGER_CALLS,
    GRAPH_CALLS,
    KV_CAPACITY,
    POOL_BYTES,
    POOL_ESTIMATE,
    UNCOVERED_SIZES,
    VERIFY_MISMATCHES,
)

WHO = "{{forward}} {{instance}} {{rank}}"
PREFILL = "#8ab8ff"
RULE = "Everything but prefill, and reasons that count"


def overview() -> str:
    """Its JSON."""
    rows = (_glance(), _hit_rate(), _why(), _cost(), _capture(), engine(), alerts(), itself())
    text = "How many calls of each forward a CUDA graph served, which ran eagerly, why, and what each path cost."
    return build("graphprobe-overview", "graphprobe / Overview", text, rows)


def _glance() -> Row:
    lowest = f"bottomk(1, {q.hit_rate(q.SERIES, q.NOW)})"
    graph, eager = (f"sum({q.rate(metric, window=q.NOW)})" for metric in (GRAPH_CALLS, EAGER_CALLS))
    hit = stat(
        "Hit rate",
        f"Graph calls / (graph + eager calls) in the last 5 minutes, over all that is chosen. {RULE}. Below 80 % each "
        "speed-up that you read is a mixture of two paths.",
        "percentunit",
        NO_TRAFFIC,
        [Query(q.hit_rate("job, forward", q.NOW), "{{job}} {{forward}}", now=True)],
        GOAL,
    )
    worst = stat(
        "Lowest hit rate",
        "The same of the worst single process or rank, which a sum over many hides.",
        "percentunit",
        NO_TRAFFIC,
        [Query(lowest, WHO, now=True)],
        GOAL,
        named=True,
    )
    calls = stat(
        "Calls per second",
        "By path, in the last 5 minutes, every phase and reason. Ranks of one engine each count the same step.",
        "cps",
        NO_TRAFFIC,
        [
            Query(q.either(graph, f"0 * {eager}"), "graph", now=True),
            Query(q.either(eager, f"0 * {graph}"), "eager", now=True),
        ],
        colours=PATHS,
    )
    return Row("At a glance", 4, [(5, hit), (4, worst), (3, calls), *((3, panel) for panel in _faults())])


def _faults() -> list[Panel]:
    uncovered = q.over("job, forward, phase", q.select(UNCOVERED_SIZES), "max")
    firing = stat(
        "Alerts firing",
        "Of rules.yaml; see the last row. Without these rules in Prometheus there is no number.",
        "none",
        "no rules",
        [Query(q.alerts_firing(), now=True)],
        NONE_IS_GOOD,
    )
    failed = stat(
        "Failed captures",
        "Graphs that could not be captured in this range of time: their buckets run eagerly.",
        "none",
        UNKNOWN,
        [Query(q.grown("job, forward", CAPTURES, 'outcome!="ok"'), "{{job}} {{forward}}", now=True)],
        NONE_IS_GOOD,
    )
    wrong = stat(
        "Wrong results",
        "Results of a graph that differed from eager in this range of time, where verify= is on. Any is a fault.",
        "none",
        UNKNOWN,
        [Query(q.grown("job, forward", VERIFY_MISMATCHES), "{{job}} {{forward}}", now=True)],
        NONE_IS_GOOD,
    )
    missing = stat(
        "Uncovered sizes",
        "Batch sizes that the engine may send and no bucket serves. Known where max_batch= is given, and of vLLM, "
        "SGLang, nano-vllm and mini-sglang.",
        "none",
        UNKNOWN,
        [Query(uncovered, "{{job}} {{forward}} {{phase}}", now=True)],
        ((None, GRAPH), (1, EAGER)),
    )
    return [firing, failed, wrong, missing]


def _hit_rate() -> Row:
    by_time = goal_lines(
        "Hit rate by process and rank",
        f"Graph calls / (graph + eager calls). {RULE}. No line: no traffic. The dashed line is the goal, 80 %.",
        [Query(q.hit_rate(q.SERIES), WHO)],
    )
    by_size = bars(
        "Graph and eager calls by batch size",
        "Calls in this range of time. A bar that is all orange is a batch size that no graph serves; most often it has "
        "no bucket. Above 64 a bar is a range of sizes. Grey calls do not count: warm-up, graphs switched off and the "
        "like.",
        "short",
        q.calls_by_path("batch_size"),
        "batch_size",
        "path",
    )
    return Row("Hit rate", 10, [(10, by_time), (14, by_size)], alerts=True)


def _why() -> Row:
    aside = f"sum({q.rate(EAGER_CALLS, q.NO_PREFILL, q.ASIDE)})"
    prefill = q.either(q.rate(GRAPH_CALLS, 'phase="prefill"'), q.rate(EAGER_CALLS, 'phase="prefill"'))
    paths = lines(
        "Calls by path",
        "Each call once. Not counted in the hit rate: warm-up, graphs switched off and the like, and prefill, which is "
        "eager by design. Ranks of one engine each count the same step.",
        "cps",
        NO_TRAFFIC,
        [
            Query(f"sum({q.rate(GRAPH_CALLS, q.NO_PREFILL)})", "graph"),
            Query(f"sum({q.rate(EAGER_CALLS, q.NO_PREFILL, q.COUNTED)})", "eager"),
            Query(aside, "not counted"),
            Query(f"sum(\n{prefill}\n)", "prefill"),
        ],
        colours={**PATHS, "prefill": PREFILL},
        stacked=True,
    )
    reasons = lines(
        "Reasons of eager calls",
        "Each eager call has one. no_exact_bucket and batch_too_large: add a bucket or allow padding. warmup is short "
        "and does not count. unknown: the engine gave no cause. The runbook has advice for each.",
        "cps",
        NO_TRAFFIC,
        [Query(q.over("reason", q.rate(EAGER_CALLS, q.NO_PREFILL)), "{{reason}}")],
        colours=REASONS,
        stacked=True,
    )
    top = ranking(
        "Most misses",
        "Eager calls that count, in this range of time, by batch size and reason. The dashboard Tuning says what each "
        "is worth.",
        "short",
        "no misses",
        Query(f"sort_desc(topk(10, {q.misses('batch_size, reason')}))", "{{batch_size}}: {{reason}}", now=True),
        EAGER,
    )
    return Row("Why eager", 8, [(8, paths), (8, reasons), (8, top)], alerts=True)


def _cost() -> Row:
    speed = grid(
        "Time by bucket, and the speed-up",
        "Means of the sampled calls in this range of time. Where eager calls are not timed by bucket, their mean over "
        "all sizes stands in each row. Below 1 the graph is slower than eager.",
        "no samples",
        ("job", "forward", "bucket"),
        (
            Column(q.graph_seconds(), "graph", "s"),
            Column(q.eager_seconds(), "eager", "s"),
            Column(q.speed_up(), "speed-up", least=1),
        ),
        numbered=True,
    )
    paths = {path: f'path="{path}"' for path in ("graph", "eager")}
    means = [Query(q.mean_seconds("path", match, window=q.RATE), path) for path, match in paths.items()]
    slow = [Query(q.quantile_seconds(0.95, path), f"{path}, 95 %") for path in paths]
    times = lines(
        "Time of a forward",
        "Mean and 95 % quantile of the sampled calls by path: stream time on a GPU, wall time elsewhere. The paths "
        "serve different batch sizes, so compare them by bucket, not here.",
        "s",
        "no samples",
        [*means, *slow],
        colours={**PATHS, "graph, 95 %": "#b7d968", "eager, 95 %": "#ffcb7d"},
    )
    padding = lines(
        "Padding waste",
        "Padding rows / rows that graphs computed: work done for nobody. Smaller steps between buckets lower it.",
        "percentunit",
        NO_TRAFFIC,
        [Query(q.padding_share("job, forward"), "{{job}} {{forward}}")],
    )
    return Row("What it costs", 8, [(10, speed), (7, times), (7, padding)])


def _capture() -> Row:
    seconds = q.over(q.BUCKET, q.select(CAPTURE_DURATION), "max")
    capture = ranking(
        "Capture time by bucket",
        "Seconds of the last capture, of the slowest process; the longest first. All of them delay a start.",
        "s",
        UNKNOWN,
        Query(f"sort_desc({seconds})", "{{forward}} {{bucket}}", now=True),
        GRAPH,
    )
    pool = lines(
        "Graph pool",
        "Device memory that the graphs of a forward hold, and what the engine estimated for them.",
        "bytes",
        UNKNOWN,
        [
            Query(q.over(q.SERIES, q.select(POOL_BYTES)), WHO),
            Query(q.over(q.SERIES, q.select(POOL_ESTIMATE)), f"{WHO}, estimate"),
        ],
    )
    tokens = lines(
        "KV capacity",
        "Tokens that the KV cache holds. Memory that graphs do not need is no gain before it is seen here.",
        "short",
        UNKNOWN,
        [Query(q.over(q.SERIES, q.select(KV_CAPACITY)), WHO)],
    )
    skew = lines(
        "Rank skew",
        "How far the hit rate of a rank is behind that of the best rank of its job; above 10 % ranks do not take the "
        "same path. Replicas are compared too: choose one instance to compare its own ranks only.",
        "percentunit",
        "no ranks, or no traffic",
        [Query(q.skew(), WHO)],
        limit=SKEW,
    )
    modes = lines(
        "Graph calls by mode",
        "A piecewise or breakable graph runs partly eagerly, so 100 % of them is less than 100 % full.",
        "cps",
        NO_TRAFFIC,
        [Query(q.over("mode", q.rate(GRAPH_CALLS)), "{{mode}}")],
        colours=MODES,
        stacked=True,
    )
    return Row("Ranks, capture and memory", 8, [(12, skew), (12, modes), (8, capture), (8, pool), (8, tokens)])
