"""graphprobe / Tuning: which buckets to add, which to drop, and what each one costs and gains."""

from __future__ import annotations

from dashboards import queries as q
from dashboards.colours import GRAPH
from dashboards.layout import Row, build
from dashboards.panels import NO_TRAFFIC, UNKNOWN, Column, Query, bars, grid, lines, ranking
from graphprobe.metrics import BUCKET_CAPTURED, CAPTURE_DURATION, POOL_GROWTH

LABELS = ("job", "forward", "bucket")


def tuning() -> str:
    """Its JSON."""
    text = "Which batch sizes come, which buckets serve them, what to add, what to drop, and what a bucket costs."
    return build("graphprobe-tuning", "graphprobe / Tuning", text, (_sizes(), _change(), _buckets(), _all()))


def _sizes() -> Row:
    spread = bars(
        "Batch sizes over buckets",
        "Calls in this range of time by batch size; the colour is the bucket that served them, orange none. A "
        "bar whose bucket is far above its size is padded. Choose one forward.",
        "short",
        q.calls_by_bucket(),
        "batch_size",
        "bucket",
    )
    largest = lines(
        "Largest bucket and largest batch",
        "A batch above the largest bucket runs eagerly. Above 64 only the range of a batch size is known; its upper "
        "end is drawn.",
        "none",
        NO_TRAFFIC,
        [
            Query(q.largest_bucket(), "largest bucket, {{job}} {{forward}}"),
            Query(q.largest_batch(), "largest batch, {{job}} {{forward}}"),
        ],
    )
    return Row("Batch sizes", 10, [(14, spread), (10, largest)], alerts=True)


def _change() -> Row:
    by = "job, forward, batch_size, reason"
    add = grid(
        "What to add: misses by batch size",
        "Eager calls that count, in this range of time, the most first. hit rate + is what the hit rate gains if all "
        "of them become graph calls. no_exact_bucket and batch_too_large go away with a bucket of that size.",
        "no misses",
        ("job", "forward", "batch_size", "reason"),
        (Column(q.misses(by), "calls", "short"), Column(q.miss_share(by), "hit rate +", "percentunit")),
        dearest="calls",
    )
    drop = grid(
        "What to drop: captured, never used",
        "Buckets without a call in this range of time, with what they cost. Look at a range with a full day of traffic "
        "before you drop one.",
        "every bucket was used",
        LABELS,
        (
            Column(q.unused(), "calls"),
            Column(q.of_unused(CAPTURE_DURATION), "capture", "s"),
            Column(q.of_unused(POOL_GROWTH), "pool", "bytes"),
        ),
        numbered=True,
    )
    return Row("What to change", 7, [(12, add), (12, drop)])


def _buckets() -> Row:
    padding = bars(
        "Padding by bucket",
        "Padding rows / rows that the graphs of a bucket computed, in this range of time.",
        "percentunit",
        q.named(q.padding_share("bucket", q.RANGE), "part", "padding"),
        "bucket",
        "part",
    )
    times = bars(
        "Time by bucket",
        "Means of the sampled calls in this range of time. any size: eager calls that are not timed by bucket.",
        "s",
        q.seconds_by_path(),
        "bucket",
        "path",
        stacked=False,
    )
    growth = q.over(q.BUCKET, q.select(POOL_GROWTH), "max")
    pool = ranking(
        "Pool growth by bucket",
        "What the last capture of a bucket added to the graph pool, the most first. The largest is captured first and "
        "pays for what all share.",
        "bytes",
        UNKNOWN,
        Query(f"sort_desc({growth})", "{{forward}} {{bucket}}", now=True),
        GRAPH,
    )
    return Row("What a bucket costs", 9, [(8, padding), (8, times), (8, pool)])


def _all() -> Row:
    calls = q.bucket_calls()
    columns = (
        Column(q.over(q.BUCKET, q.select(BUCKET_CAPTURED), "max"), "captured", words=("no", "yes")),
        Column(calls, "calls", "short"),
        Column(q.share(calls, q.over("job, forward", calls)), "of graph calls", "percentunit"),
        Column(q.padding_share(q.BUCKET, q.RANGE), "padding", "percentunit"),
        Column(q.graph_seconds(), "graph", "s"),
        Column(q.eager_seconds(), "eager", "s"),
        Column(q.speed_up(), "speed-up", least=1),
        Column(q.over(q.BUCKET, q.select(CAPTURE_DURATION), "max"), "capture", "s"),
        Column(q.over(q.BUCKET, q.select(POOL_GROWTH), "max"), "pool", "bytes"),
    )
    buckets = grid(
        "Buckets",
        "All that is known of each bucket in this range of time. captured is - where an engine does not say. eager "
        "is the mean over all sizes where eager calls are not timed by bucket.",
        UNKNOWN,
        LABELS,
        columns,
        numbered=True,
    )
    return Row("All buckets", 12, [(24, buckets)])
