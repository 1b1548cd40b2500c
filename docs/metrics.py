"""Prints docs/metrics.md: the metric contract for engines of any language, and a page that conforms.

python docs/metrics.py > docs/metrics.md
"""

from __future__ import annotations

import re
import sys

from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from graphprobe import metrics
from graphprobe.export.prometheus import Collector
from graphprobe.ledger import BOUNDS, Ledger
from graphprobe.metrics import Metric
from graphprobe.observe import observe
from graphprobe.reasons import FallbackReason
from graphprobe.tools.contract import WORDS
from graphprobe.tools.findings import RULES as RULES_OF_CHECK

GROUPS: dict[str, tuple[Metric, ...]] = {
    "Calls": (metrics.GRAPH_CALLS, metrics.EAGER_CALLS, metrics.PADDING_ROWS, metrics.UNCOVERED_SIZES),
    "Durations": (
        metrics.FORWARD_DURATION,
        metrics.FORWARD_SECONDS,
        metrics.FORWARD_SAMPLES,
        metrics.SAMPLES_DROPPED,
    ),
    "Captures": (metrics.CAPTURES, metrics.CAPTURE_DURATION, metrics.BUCKET_CAPTURED, metrics.VERIFY_MISMATCHES),
    "Memory": (metrics.POOL_BYTES, metrics.POOL_GROWTH, metrics.POOL_ESTIMATE, metrics.KV_CAPACITY),
    "Health": (metrics.REPLAYS_SEEN, metrics.REPLAY_MISMATCHES, metrics.HOOK_BOUND, metrics.INTERNAL_ERRORS),
    "Who it is": (metrics.FORWARD_INFO, metrics.BUILD_INFO),
}

MEANINGS: dict[str, dict[str, str]] = {
    "phase": {
        "decode": "one token per sequence, or the step that a graph is meant for; the default",
        "prefill": "prompts; not part of the hit-rate alert, since long ones are eager by design",
        "mixed": "prompts and decoding in one batch",
        "verify": "the target model looks at proposed tokens",
        "draft": "the draft model proposes",
        "draft_extend": "the draft model takes up accepted tokens",
    },
    "mode": {
        "full": "the whole forward is one graph",
        "piecewise": "graphs with eager parts (attention) between them",
        "breakable": "one graph that may be left at marked places",
    },
    "path": {"graph": "the result came from a graph", "eager": "it did not; `mode` is empty then"},
    "outcome": {
        "ok": "a graph was made",
        "error": "the capture failed",
        "oom": "it failed for want of device memory",
    },
    "unit": {
        "rows": "what a batch size and a bucket count",
        "tokens": "likewise, with speculative decoding or prefill",
        "requests": "likewise, where each request has a fixed number of rows",
    },
    "source": {
        "capture": "graphprobe captured the forward itself",
        "observe": "a Python engine reports its own graphs through graphprobe",
        "engine": "the engine exports these metrics itself",
    },
}
"""What the words of a label mean; those of ``reason`` are in graphprobe.reasons."""

BUILD = {
    "version": "0.1.0",
    "contract": metrics.CONTRACT,
    "torch": "2.13.0",
    "cuda": "13.0",
    "device": "NVIDIA H200",
    "backend": "cuda",
}
"""The build of the example, so that the page is the same on every machine."""

SHOWN = ("0.0016", "0.0064", "0.0256", "+Inf")
"""The bounds of the example: all of graphprobe's would be most of the page."""


def table(group: tuple[Metric, ...]) -> str:
    """One table of metrics."""
    lines = ["| name | kind | unit | labels | help |", "| --- | --- | --- | --- | --- |"]
    for metric in group:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
        unit = metrics.UNITS.get(metric.unit) or metric.unit.strip("{}") or "-"
        lines.append(f"| `{metric.name}` | {metric.kind} | {unit} | {labels} | {metric.help} |")
    return "\n".join(lines)


def words() -> str:
    """The values of every label that has a closed list."""
    parts = []
    for label, known in WORDS.items():
        if label == "reason":
            rows = [f"| `{r}` | {r.meaning} | {'yes' if r.counted else 'no'} |" for r in map(FallbackReason, known)]
            head = "| `reason` | meaning | counts in the hit rate |\n| --- | --- | --- |"
        else:
            rows = [f"| `{word}` | {MEANINGS[label][word]} |" for word in known]
            head = f"| `{label}` | meaning |\n| --- | --- |"
        parts.append("\n".join([head, *rows]))
    return "\n\n".join(parts)


def checks() -> str:
    """What `graphprobe check` may find, by name."""
    rows = [f"| `{name}` | {rule.severity} | {rule.meaning} |" for name, rule in RULES_OF_CHECK.items()]
    return "\n".join(["| finding | severity | it says |", "| --- | --- | --- |", *rows])


def example() -> str:
    """A page with every metric of the catalogue, as the exporter serves it in the text format, with fewer bounds."""
    ledger = Ledger()
    probe = observe("decode", [1, 2, 4], ledger=ledger, source="capture", backend="cuda", clock=None)
    forward = probe.forward
    for bucket in (4, 2, 1):
        forward.captured(bucket, "ok", 0.25 * bucket, 1 << 20)
    for size, bucket, calls in ((1, 1, 40), (2, 2, 25), (3, 4, 9), (4, 4, 120)):
        for _ in range(calls):
            probe.graph_call(size, bucket)
    probe.eager_call(5, "batch_too_large")
    probe.eager_call(100, "batch_too_large")
    for bucket in (1, 2, 4):
        probe.eager_call(bucket, "warmup")
        forward.time("graph", bucket, 2**-8, mode="full")
    forward.time("eager", None, 2**-6)
    forward.holders[0].pool_bytes = 3 << 20
    forward.pool_estimate_bytes, forward.kv_capacity_tokens = 4 << 20, 131_072
    forward.uncovered["decode"] = 4
    forward.unmatched.update(graph=0, eager=0)
    ledger.hooks["vllm", "dispatch"] = True
    ledger.replays_seen = [194]
    registry = CollectorRegistry()
    registry.register(Collector(ledger))
    build = ",".join(f'{label}="{value}"' for label, value in sorted(BUILD.items()))
    page = generate_latest(registry).decode()
    shown = "|".join(map(re.escape, SHOWN))
    page = re.sub(rf'^graphprobe_\w+_bucket\{{(?!.*le="(?:{shown})").*\n', "", page, flags=re.MULTILINE)
    return re.sub(r"^graphprobe_build_info\{.*\}", f"graphprobe_build_info{{{build}}}", page, flags=re.MULTILINE)


INTRO = f"""# Metrics

The contract, version {metrics.CONTRACT}: names, labels and meanings on which the dashboards, the rules, the alerts and
`graphprobe check` rely, whoever exports them.
Made by `docs/metrics.py` from the catalogue in `graphprobe/metrics.py`.

An engine in any language that exports these metrics gets the same dashboards and alerts.
`graphprobe check http://HOST:PORT/metrics` tells whether a page conforms, and what to change where it does not
([findings](#what-check-finds)). It needs no GPU and no torch. Redirects are followed within the server, as from
`/metrics` to `/metrics/`.

| exit status | |
| --- | --- |
| 0 | the page conforms; there may be warnings |
| 1 | it does not: there is an error |
| 2 | there is no page, or the command line is wrong |"""

RULES = f"""## Rules

**Format.** Prometheus' text format (`text/plain; version=0.0.4`) or OpenMetrics (`application/openmetrics-text;
version=1.0.0`), in UTF-8, with `# HELP` and `# TYPE`, uncompressed where the request asks for that. In the text
format an info is a gauge of value 1, which it may be in OpenMetrics too. In OpenMetrics the metadata of a counter and
of an info leaves out `_total` and `_info`. A label that is empty may be left out. A sample has no time of its own.
`_created`, exemplars and any metric without the prefix `graphprobe_` are allowed.

**Must exist.** `graphprobe_build_info` in every process, `graphprobe_forward_info` for every forward, the zeros
below for every forward whose buckets are known, and the three metrics of durations together or not at all.
Everything else is left out where it is unknown: never 0, NaN or -1 instead.

**Processes that have ended.** Where several processes share a page, one that has ended may keep its counters and
histograms, so that no sum falls; never its gauges and infos, which would say that it lives. `check` warns of it, and
asks for nothing else of it.

**Calls.** A call is one dispatched forward. It is counted once, on the path whose result was returned, under the
batch size that the caller sent. Warm-up, captures, dummy and profiling runs of the engine are no calls. An eager
call has one reason; where the engine gives no cause it is `unknown`. The hit rate is graph calls / (graph calls +
eager calls whose reason counts). It is not exported: a recording rule has it. Counters are whole numbers, start at 0
and never go down while the process lives; a series that was there stays.

**Batch sizes.** `batch_size` is exact up to {metrics.EXACT_LABELS}. Above, it is one range per bucket, from the
bucket below (or {metrics.EXACT_LABELS}) to it, as `65-72`; above the largest bucket powers of two, as
`{metrics.size_label(100, [72])}` and `{metrics.size_label(200, [72])}` where the largest is 72. `bucket` is one
captured size (vLLM's capture size), the padded one: never below `batch_size`. On durations it is empty where none
applies. `buckets` of `graphprobe_forward_info` lists all, ascending, as `1,2,4,8`; it is empty only where they are
unknown, and then no series can be born at 0 (a warning where the forward has graph calls).

**Padding.** `graphprobe_padding_rows_total` grows by `bucket - batch_size` at each graph call: it is the rows added,
not the padded total.

**At most {metrics.LIMIT} label sets per forward**, a histogram counting as one, and {metrics.ENGINE_LIMIT:,} where
`graphprobe_forward_info` has `source="engine"`: an engine has few forwards, and many sizes, modes and phases of each.
Nothing that belongs to a request becomes a label.
Above that graphprobe merges label sets into coarser ones, never drops a call, and counts each step in
`graphprobe_internal_errors_total{{where="label_limit"}}`: only then `batch_size` and `bucket` may be coarser ranges
or `all`, `phase` and `mode` may be `all`.

**Born at 0.** A counter whose first sample is above 0 shows no increase to Prometheus. From the start, in each phase
that is captured, a forward with buckets has:

- `graphprobe_graph_calls_total` and `graphprobe_padding_rows_total` once for each bucket, `batch_size` as the
  bucket's;
- `graphprobe_eager_calls_total` with `reason="no_exact_bucket"` for each size up to {metrics.EXACT_LABELS} (and the
  largest bucket) that is no bucket, whether or not the engine pads;
- `graphprobe_eager_calls_total` with `reason="batch_too_large"` for the first range above the largest bucket.

**Histograms.** They have `_bucket`, `_sum` and `_count`; a summary is none. Buckets are cumulative, and their bounds
the same on every series of the page: at least one number, and `le="+Inf"`, which equals `_count`. Which bounds is your
choice: dashboards read quantiles, sums and counts, and no bound by its name.
graphprobe's are {BOUNDS[0]:g} s, doubling, up to {BOUNDS[-1]:g} s; a quantile over several engines is right only
where theirs are the same. Sparse (native) histograms do not replace them.

**Labels of your own.** `rank`, and any other that distinguishes processes or is added on the way (`model_name`,
`otel_scope_name`), is on every series or on none, and has no name that a label above has. graphprobe takes `rank`
from `RANK` and more from `GRAPHPROBE_LABELS=key=value,...`. Series that differ in such a label are of several
processes: each needs what must exist, and each may have so many label sets per forward. A gauge or an info,
and nothing else, may have `pid`, by which prometheus_client's multiprocess mode tells processes apart whose counters
it adds up.

**OpenTelemetry** has the same instruments with dots, as `{metrics.GRAPH_CALLS.otel_name}`; its Prometheus exporter
makes the names above of them, and a gauge of each info.

**Change.** `contract` of `graphprobe_build_info` is the version of this page. Names, labels and meanings change only
with it."""

CHECKS = """## What check finds

An error breaks the contract. A warning is allowed, and most likely not intended."""

EXAMPLE = f"""## Example

A whole page, in the text format: one forward with the buckets 1, 2 and 4, where batches of 3 are padded. It passes
`graphprobe check`. Its histogram has {len(SHOWN) - 1} bounds, graphprobe's own has {len(BOUNDS)}."""


def page() -> str:
    """The whole page."""
    tables = [f"### {name}\n\n{table(group)}" for name, group in GROUPS.items()]
    parts = [INTRO, "## Catalogue", *tables, "## Words", words(), RULES, CHECKS, checks(), EXAMPLE]
    return "\n\n".join([*parts, f"```text\n{example()}```"]) + "\n"


def main() -> None:
    """Print the page."""
    sys.stdout.write(page())


if __name__ == "__main__":
    main()
