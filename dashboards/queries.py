"""The PromQL of the dashboards, in parts that keep three rules: rate before sum, sum before divide, no mean of ratios.

Everything but the alerts reads the metrics as they are exported, not what rules.yaml records, so the dashboards work
without rules. A ratio without traffic has no value: neither 0 nor 1.
"""

from __future__ import annotations

import textwrap

from graphprobe.metrics import (
    BUCKET_CAPTURED,
    EAGER_CALLS,
    FORWARD_DURATION,
    FORWARD_SAMPLES,
    FORWARD_SECONDS,
    GRAPH_CALLS,
    PADDING_ROWS,
    Metric,
)
from graphprobe.reasons import FallbackReason

RATE, RANGE, NOW = "$__rate_interval", "$__range", "5m"
"""Windows: of a point in a chart, of the time range shown, and of the alerts."""

PROCESS = ("job", "instance", "rank")
SERIES = "job, instance, rank, forward"
BUCKET = "job, forward, bucket"

UNCOUNTED = "|".join(reason for reason in FallbackReason if not reason.counted)
NO_PREFILL = 'phase!="prefill"'
COUNTED = f'reason!~"{UNCOUNTED}"'
ASIDE = f'reason=~"{UNCOUNTED}"'
NUMBERED = 'bucket=~"[0-9].*"'
"""Buckets that have a number; a forward with too many label sets has folded them into ``all``."""


def chosen(*names: str) -> str:
    """Matchers for what is chosen in these variables."""
    return ",".join(f'{name}=~"${name}"' for name in names)


ALERTS = f'ALERTS{{alertname=~"Graphprobe.*",alertstate="firing",{chosen(*PROCESS)},forward=~"$forward|"}}'
"""Alerts that fire. One that speaks of a whole process has no forward."""


def select(metric: Metric, *matchers: str, part: str = "") -> str:
    """The series of a metric that the variables choose; ``part`` is a suffix of a histogram's series."""
    variables = (*PROCESS, "forward") if "forward" in metric.labels else PROCESS
    return f"{metric.name}{part}{{{','.join((chosen(*variables), *matchers))}}}"


def rate(metric: Metric, *matchers: str, window: str = RATE, part: str = "") -> str:
    """Per second."""
    return f"rate({select(metric, *matchers, part=part)}[{window}])"


def increase(metric: Metric, *matchers: str, window: str = RANGE) -> str:
    """Over the window."""
    return f"increase({select(metric, *matchers)}[{window}])"


def braced(expression: str) -> str:
    """In parentheses, on lines of its own."""
    return f"(\n{textwrap.indent(expression, '  ')}\n)"


def over(by: str, expression: str, how: str = "sum") -> str:
    """An aggregation that keeps the labels ``by`` and no others."""
    return f"{how} by ({by}) {braced(expression)}"


def either(*expressions: str) -> str:
    """The series of the first, and those of the others that are not there."""
    return "\nor\n".join(expressions)


def divide(above: str, below: str) -> str:
    """A ratio; nothing where ``below``, an aggregation, is 0."""
    return f"{braced(above)}\n/\n({below} > 0)"


def share(above: str, of: str) -> str:
    """What part each series of ``above`` is of its forward; nothing where that has none."""
    return f"{braced(above)}\n/ on (job, forward) group_left ()\n({of} > 0)"


def named(expression: str, label: str, value: str) -> str:
    """The same series with one more label."""
    return f'label_replace({braced(expression)}, "{label}", "{value}", "", "")'


def number(expression: str, label: str) -> str:
    """For each series the number that a label says, a range's upper end.

    PromQL cannot turn a label into a number, but it reads the bounds of a histogram: quantile 1 of one that has
    everything below its only finite bound is that bound.
    """
    one = f"0 * ({expression}) + 1"
    finite = f'label_replace({one}, "le", "$1", "{label}", "(?:[0-9]+-)?([0-9]+)")'
    return f'histogram_quantile(1, {finite} or label_replace({one}, "le", "+Inf", "", ""))'


def ordered(expression: str, *labels: str) -> str:
    """The same series with the label ``order``, since tables and charts sort by one alone, as text.

    It joins ``labels``, the last with leading zeros.
    """
    *before, last = labels
    padded = f'label_replace({braced(expression)}, "order", "00000000$1", "{last}", "([0-9]+).*")'
    cut = f'label_replace({padded}, "order", "$1", "order", ".*(.{{9}})")'
    names = ", ".join(f'"{name}"' for name in (*before, "order"))
    return f'label_join({cut}, "order", " ", {names})' if before else cut


def counted(by: str, window: str, *matchers: str) -> str:
    """Calls per second that the hit rate is of: everything but prefill, and reasons that count."""
    graph = rate(GRAPH_CALLS, NO_PREFILL, *matchers, window=window)
    return over(by, either(graph, rate(EAGER_CALLS, NO_PREFILL, COUNTED, *matchers, window=window)))


def hit_rate(by: str, window: str = RATE, *matchers: str) -> str:
    """Graph calls / counted calls. An engine that never replays may have no graph series: that is 0."""
    everything = counted(by, window, *matchers)
    graph = over(by, rate(GRAPH_CALLS, NO_PREFILL, *matchers, window=window))
    return divide(either(graph, f"0 * {everything}"), everything)


def skew() -> str:
    """How far each rank is behind the best one of its job."""
    ranks = hit_rate(SERIES, RATE, 'rank!=""')
    return f"{over('job, forward', ranks, 'max')}\n- on (job, forward) group_right ()\n{braced(ranks)}"


def calls_by_path(label: str) -> str:
    """Calls in the range by ``label`` and ``path``: graph, eager, not counted."""
    parts = {
        "graph": increase(GRAPH_CALLS, NO_PREFILL),
        "eager": increase(EAGER_CALLS, NO_PREFILL, COUNTED),
        "not counted": increase(EAGER_CALLS, NO_PREFILL, ASIDE),
    }
    return either(*(named(f"{over(label, part)} > 0", "path", path) for path, part in parts.items()))


def calls_by_bucket() -> str:
    """Calls that count in the range, by batch size and the bucket that served them, ``eager`` where none did."""
    graph = over("batch_size, bucket", increase(GRAPH_CALLS, NO_PREFILL))
    eager = over("batch_size", increase(EAGER_CALLS, NO_PREFILL, COUNTED))
    return either(f"{graph} > 0", named(f"{eager} > 0", "bucket", "eager"))


def misses(by: str) -> str:
    """Eager calls in the range that count."""
    return f"{over(by, increase(EAGER_CALLS, NO_PREFILL, COUNTED))} > 0"


def miss_share(by: str) -> str:
    """The part of all counted calls that each miss is: what the hit rate gains where it becomes a graph call."""
    missed = over(by, rate(EAGER_CALLS, NO_PREFILL, COUNTED, window=RANGE))
    return share(f"{missed} > 0", counted("job, forward", RANGE))


def padding_share(by: str, window: str = RATE) -> str:
    """Padding rows / rows that graphs computed."""
    calls = over(BUCKET, rate(GRAPH_CALLS, NUMBERED, window=window))
    rows = f"{calls}\n*\n{number(calls, 'bucket')}"
    return divide(over(by, rate(PADDING_ROWS, NUMBERED, window=window)), over(by, rows))


def mean_seconds(by: str, *matchers: str, window: str = RANGE) -> str:
    """Mean duration of the sampled forwards."""
    parts = (over(by, rate(m, NO_PREFILL, *matchers, window=window)) for m in (FORWARD_SECONDS, FORWARD_SAMPLES))
    return divide(*parts)


def quantile_seconds(quantile: float, path: str) -> str:
    """A quantile of the sampled durations; nothing, rather than NaN, where nothing was sampled."""
    where = (NO_PREFILL, f'path="{path}"')
    bounds = over("le", rate(FORWARD_DURATION, *where, part="_bucket"))
    return f"histogram_quantile({quantile}, {bounds})\nand\nsum({rate(FORWARD_DURATION, *where, part='_count')}) > 0"


def graph_seconds() -> str:
    """Mean duration of a graph call by bucket."""
    return mean_seconds(BUCKET, 'path="graph"')


def eager_seconds() -> str:
    """Mean duration of an eager call by bucket; that of all sizes where eager calls are not timed by bucket."""
    own = mean_seconds(BUCKET, 'path="eager"', 'bucket!=""')
    any_size = mean_seconds("job, forward", 'path="eager"', 'bucket=""')
    return either(own, f"0 * {graph_seconds()}\n+ on (job, forward) group_left ()\n({any_size})")


def speed_up() -> str:
    """Eager / graph, by bucket."""
    return f"{braced(eager_seconds())}\n/\n{braced(graph_seconds())}"


def seconds_by_path() -> str:
    """Mean durations by bucket and path; an eager mean over all sizes has the bucket ``any size``."""
    graph = mean_seconds("bucket", 'path="graph"')
    eager = mean_seconds("bucket", 'path="eager"', 'bucket!=""')
    any_size = named(mean_seconds("path", 'path="eager"', 'bucket=""'), "bucket", "any size")
    return either(named(graph, "path", "graph"), named(eager, "path", "eager"), any_size)


def grown(by: str, metric: Metric, *matchers: str) -> str:
    """Increase over the range; a counter that was born above 0 within it counts whole, as in rules.yaml."""
    labels = ", ".join((*PROCESS, *metric.labels))
    here = select(metric, *matchers)
    more = over(labels, increase(metric, *matchers))
    new = over(labels, f"{here}\nunless\n{here} offset {RANGE}")
    return over(by, either(f"{more} > 0", f"{new} > 0", more))


def alerts_firing() -> str:
    """How many; 0 only where the rules are evaluated, which is seen by what they record."""
    seen = f"job_instance_rank_forward:graphprobe_seen:timestamp{{{chosen(*PROCESS)}}}"
    return either(f"count({ALERTS})", f"0 * count({seen})")


def alert_seconds() -> str:
    """For each alert that fires the seconds since its expression became true."""
    since = ALERTS.replace("ALERTS", "ALERTS_FOR_STATE").replace('alertstate="firing",', "")
    return f"time() - {since}\nand ignoring (alertstate)\n{ALERTS}"


def bucket_calls() -> str:
    """Calls in the range by the bucket that served them."""
    return over(BUCKET, increase(GRAPH_CALLS))


def unused() -> str:
    """Buckets without a call in the range, but for those that are known not to be captured."""
    return f"{bucket_calls()} == 0\nunless\n{over(BUCKET, select(BUCKET_CAPTURED), 'max')} == 0"


def of_unused(metric: Metric) -> str:
    """A gauge of these buckets."""
    return f"{over(BUCKET, select(metric), 'max')}\nand\n{braced(unused())}"


def largest_bucket() -> str:
    """The largest bucket of each forward."""
    known = over(BUCKET, rate(GRAPH_CALLS, NUMBERED))
    return over("job, forward", number(known, "bucket"), "max")


def largest_batch() -> str:
    """The largest batch size that was served in each moment, on either path."""
    where = (NO_PREFILL, 'batch_size=~"[0-9].*"')
    served = over("job, forward, batch_size", either(rate(GRAPH_CALLS, *where), rate(EAGER_CALLS, *where)))
    return over("job, forward", number(f"{served} > 0", "batch_size"), "max")
