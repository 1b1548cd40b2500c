"""The last rows of the overview: the alerts that fire, and whether what the dashboards show can be trusted."""

from __future__ import annotations

from dashboards import queries as q
from dashboards.colours import EAGER, GRAPH, NOT_COUNTED
from dashboards.layout import Row
from dashboards.panels import UNKNOWN, Column, Query, grid, lines
from graphprobe.metrics import (
    BUILD_INFO,
    FORWARD_INFO,
    FORWARD_SAMPLES,
    GRAPH_CALLS,
    HOOK_BOUND,
    INTERNAL_ERRORS,
    REPLAYS_SEEN,
    SAMPLES_DROPPED,
)


def alerts() -> Row:
    """Which, where and for how long."""
    firing = grid(
        "Alerts that fire",
        "Of rules.yaml, with the time since the condition began. What each means and what to do is in runbook.md, "
        "under the same name.",
        "none fires",
        ("severity", "alertname", "job", "instance", "rank", "forward", "long", "bucket", "outcome"),
        [Column(q.alert_seconds(), "for", "dtdurations")],
        dearest="for",
    )
    return Row("Alerts", 6, [(24, firing)])


def itself() -> Row:
    """Who reports, whether hooks are in place, and what graphprobe failed at."""
    labels = ("job", "instance", "rank", *BUILD_INFO.labels)
    processes = grid(
        "Processes",
        "Those that report now. contract is the version of the metric names.",
        UNKNOWN,
        labels,
        [Column(q.over(", ".join(labels), q.select(BUILD_INFO), "max"), "reports", words=("no", "yes"))],
    )
    described = ("job", *FORWARD_INFO.labels)
    forwards = grid(
        "Forwards",
        "source: capture (graphprobe captured it), observe (an engine's own graphs), engine (it exports by itself).",
        UNKNOWN,
        described,
        [Column(q.over(", ".join(described), q.select(FORWARD_INFO), "count"), "processes")],
    )
    hooked = ("job", "instance", "rank", "engine", "hook")
    hooks = grid(
        "Hooks into engines",
        "One that is not bound found nothing to hook: what it would see is not counted.",
        "no hooks",
        hooked,
        [Column(q.over(", ".join(hooked), q.select(HOOK_BOUND), "min"), "bound", words=("no", "yes"))],
    )
    errors = lines(
        "Failures of graphprobe",
        "By place. The call ran eagerly; the log has the cause. label_limit: a forward had too many label sets, and "
        "its labels were folded.",
        "cps",
        UNKNOWN,
        [Query(q.over("where", q.rate(INTERNAL_ERRORS)), "{{where}}")],
    )
    samples = lines(
        "Timing samples",
        "Calls whose time was measured, and samples given up because too many were pending.",
        "cps",
        UNKNOWN,
        [
            Query(f"sum({q.rate(FORWARD_SAMPLES)})", "measured"),
            Query(f"sum({q.rate(SAMPLES_DROPPED)})", "dropped"),
        ],
        colours={"measured": GRAPH, "dropped": EAGER},
    )
    launches = lines(
        "Graph launches",
        "Seen by an independent count, beside the graph calls that were counted. A piecewise call launches many.",
        "cps",
        UNKNOWN,
        [Query(f"sum({q.rate(REPLAYS_SEEN)})", "seen"), Query(f"sum({q.rate(GRAPH_CALLS)})", "graph")],
        colours={"seen": NOT_COUNTED, "graph": GRAPH},
    )
    panels = [(12, processes), (12, forwards), (9, hooks), (5, errors), (5, samples), (5, launches)]
    return Row("graphprobe itself", 7, panels, collapsed=True)
