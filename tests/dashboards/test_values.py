"""Dashboards on a real Prometheus: the numbers in them are those that graphprobe itself says."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from graphprobe.snapshot import ForwardSnapshot, Row
from tests.dashboards.histories import HISTORIES
from tests.dashboards.pages import PAGES
from tests.dashboards.served import Served, asked, by, everything, filled, one, only


def test_one_value_of_each_variable_is_one_series(served: Served) -> None:
    """Of eight, four processes with two forwards each."""
    name = "overview: Hit rate by process and rank, A"
    assert 8 == len(asked(served, name, everything("replicas")))
    chosen = asked(served, name, one(served, "replicas"))
    assert {("10.0.0.1:9464", "0", "vllm"): 20 / 21} == pytest.approx(by(chosen, "instance", "rank", "forward"))


def rows(forward: ForwardSnapshot) -> list[Row]:
    """Those that the dashboards' hit rate is of."""
    return [row for row in forward.rows if row.phase != "prefill"]


@pytest.mark.parametrize(("history", "rate"), [("eager-only", 0.0), ("healthy", 48 / 50), ("degraded", 26 / 42)])
def test_the_hit_rate_is_that_of_the_snapshot(served: Served, history: str, rate: float) -> None:
    """In every panel of it; an engine that never replays reads 0 %."""
    forward = served.forward(history, 300)
    assert rate == pytest.approx(dataclasses.replace(forward, rows=tuple(rows(forward))).hit_rate)
    for panel in ("Hit rate", "Lowest hit rate", "Hit rate by process and rank"):
        assert rate == pytest.approx(only(asked(served, f"overview: {panel}, A", everything(history)))), panel


def test_replicas_are_weighted_and_the_worst_is_named(served: Served) -> None:
    """Calls are summed before the division; the rank that is half eager is the lowest, and behind the others."""
    values = everything("replicas")
    rates = by(asked(served, "overview: Hit rate, A", values), "forward")
    assert {"vllm": 70 / 84, "vllm.drafter": 1.0} == pytest.approx(rates)
    lowest = asked(served, "overview: Lowest hit rate, A", values)
    assert {("10.0.0.1:9465", "1", "vllm"): 10 / 21} == pytest.approx(by(lowest, "instance", "rank", "forward"))
    skew = by(asked(served, "overview: Rank skew, A", values), "instance", "forward")
    assert 10 / 21 == pytest.approx(skew.pop(("10.0.0.1:9465", "vllm")))
    assert {0.0} == set(skew.values())


@pytest.mark.parametrize("history", ["healthy", "degraded", "eager-only", "off"])
def test_calls_by_batch_size_are_those_of_the_snapshot(served: Served, history: str) -> None:
    """The picture: each size with its graph calls, its misses, and what does not count."""
    expected: Counter[tuple[str, str]] = Counter()
    for row in rows(served.forward(history, 3600)):
        path = "graph" if row.reason is None else "eager" if row.reason.counted else "not counted"
        expected[str(row.batch_size), path] += row.calls
    found = asked(served, "overview: Graph and eager calls by batch size, A", everything(history))
    assert expected == pytest.approx(by(found, "batch_size", "path"), rel=0.05)


def test_bars_stand_in_the_order_of_numbers(served: Served) -> None:
    """The charts sort text: the label that they sort by has leading zeros, that of a range is its lower end."""
    found = asked(served, "tuning: Batch sizes over buckets, A", everything("replicas"))
    pairs = sorted((dict(key)["order"], dict(key)["batch_size"]) for key in found)
    assert ["4", "5", "65-72", "257-512"] == list(dict.fromkeys(size for _, size in pairs))


def test_tables_are_sorted_by_forward_and_bucket(served: Served) -> None:
    """By all labels at once, the bucket as a number."""
    found = asked(served, "overview: Time by bucket, and the speed-up, A", everything("replicas"))
    rows = sorted((dict(key) for key in found), key=lambda labels: labels["order"])
    expected = [("vllm", "8"), ("vllm", "72"), ("vllm.drafter", "4")]
    assert expected == [(labels["forward"], labels["bucket"]) for labels in rows]


def test_padding_is_a_part_of_the_rows_computed(served: Served) -> None:
    """PromQL multiplies calls by the number that the label of their bucket says."""
    forward = served.forward("healthy", 300)
    graph = [row for row in rows(forward) if row.path == "graph"]
    computed = sum(row.calls * (row.bucket or 0) for row in graph)
    waste = only(asked(served, "overview: Padding waste, A", everything("healthy")))
    assert forward.padding / computed == pytest.approx(waste)
    by_bucket = by(asked(served, "tuning: Padding by bucket, A", everything("healthy")), "bucket")
    assert {"1": 0.0, "2": 0.0, "4": 1 / 8, "8": 1 / 8, "16": 0.0} == pytest.approx(by_bucket)


def test_times_are_those_of_the_snapshot(served: Served) -> None:
    """Means by bucket, and how often the graph's fits into that of the eager calls."""
    forward = served.forward("healthy", 3600)
    ((_, eager),) = ((key, times) for key, times in forward.times.items() if key[:2] == ("decode", "eager"))
    graph = {str(b): forward.mean_seconds("graph", b) for b in forward.buckets}
    name, values = "overview: Time by bucket, and the speed-up", everything("healthy")
    assert graph == pytest.approx(by(asked(served, f"{name}, A", values), "bucket"))
    assert dict.fromkeys(graph, eager.mean) == pytest.approx(by(asked(served, f"{name}, B", values), "bucket"))
    expected = {bucket: (eager.mean or 0) / (mean or 1) for bucket, mean in graph.items()}
    assert expected == pytest.approx(by(asked(served, f"{name}, C", values), "bucket"))


def test_what_to_change(served: Served) -> None:
    """Batch 3 is to be added and what it gains is said; 8 is to be dropped; 16 is not, since it is not captured."""
    values = everything("degraded")
    gains = by(asked(served, "tuning: What to add: misses by batch size, B", values), "batch_size", "reason")
    assert {("3", "no_exact_bucket"): 15 / 42, ("16", "capture_failed"): 1 / 42} == pytest.approx(gains)
    unused = by(asked(served, "tuning: What to drop: captured, never used, A", values), "bucket")
    assert {"8": 0.0} == unused
    cost = asked(served, "tuning: What to drop: captured, never used, C", values)
    assert {"8": 38 << 20} == by(cost, "bucket")


def test_the_largest_batch_is_a_number(served: Served) -> None:
    """So is the largest bucket, and both can be drawn; of a range the upper end."""
    for history, bucket, batch in (("healthy", [16], [20]), ("eager-only", [], [5]), ("replicas", [128, 16], [512, 4])):
        lines = [f"tuning: Largest bucket and largest batch, {ref}" for ref in "AB"]
        found = [[*asked(served, name, everything(history)).values()] for name in lines]
        assert [sorted(bucket), sorted(batch)] == [sorted(values) for values in found]


def test_faults_are_numbers(served: Served) -> None:
    """What failed once in the range counts once per process, also where no 0 was there before; what never did is 0."""
    for panel in ("Failed captures", "Wrong results"):
        name = f"overview: {panel}, A"
        found = {h: only(asked(served, name, everything(h))) for h in ("healthy", "degraded", "replicas")}
        assert {"healthy": 0, "degraded": 1, "replicas": 4} == pytest.approx(found, rel=0.05)


def test_a_downgrade_shows_behind_a_hit_rate(served: Served) -> None:
    """Half of the target's graph calls are piecewise on the good ranks, all on the bad one; its drafter's are full."""
    values = everything("replicas")
    share = by(asked(served, "overview: Full graphs of decode steps, A", values), "forward")
    assert {"vllm": 30 / 70, "vllm.drafter": 1.0} == pytest.approx(share)
    values["instance"] = "10.0.0.1:9465"
    share = by(asked(served, "overview: Full graphs of decode steps, A", values), "forward")
    assert {"vllm": 0.0, "vllm.drafter": 1.0} == pytest.approx(share)
    sizes = asked(served, "overview: Decode steps by size and mode, A", everything("replicas"))
    assert {("4", "full"), ("5", "full"), ("65-72", "piecewise")} == set(by(sizes, "batch_size", "mode"))


def test_a_step_of_several_ranks_is_one_step(served: Served) -> None:
    """Four processes count; what is shown are the steps of one, those of the drafter apart."""
    steps = by(asked(served, "overview: Steps by phase, A", everything("replicas")), "forward", "phase")
    assert {("vllm", "decode"): 21 / 60, ("vllm.drafter", "decode"): 10 / 60} == pytest.approx(steps)


def test_what_the_start_has_made_is_by_rank(served: Served) -> None:
    """Graphs are counted, seconds summed over them, memory held against the estimate; nothing is summed over ranks."""
    ledger = served.processes[-1].snapshots[served.end].forwards["vllm"]
    values, name = everything("replicas"), "overview: What the start has made"
    columns = {ref: by(asked(served, f"{name}, {ref}", values), "instance", "forward") for ref in "ABCDEF"}
    here = ("10.0.0.1:9475", "vllm")
    assert ledger.pool_bytes is not None and ledger.pool_estimate_bytes is not None
    expected = {
        "A": len(ledger.capture_seconds),
        "B": sum(ledger.capture_seconds.values()),
        "C": ledger.pool_bytes,
        "D": ledger.pool_bytes - ledger.pool_estimate_bytes,
        "E": 400_000,
        "F": 0,
    }
    assert expected == pytest.approx({ref: found[here] for ref, found in columns.items()})
    assert expected["D"] > 0 and 4 == len(columns["D"])


def test_missing_hooks_are_counted(served: Served) -> None:
    """One on each of four ranks."""
    assert {4.0} == set(asked(served, "overview: Hooks missing, A", everything("replicas")).values())


def test_no_alert_is_not_no_rules(served: Served) -> None:
    """The number of alerts is 0 only where rules are evaluated."""
    firing = {h: [*asked(served, "overview: Alerts firing, A", everything(h)).values()] for h in HISTORIES}
    assert {"healthy": [0], "degraded": [1], "eager-only": [1], "idle": [0], "off": [], "replicas": [0]} == firing


def test_alerts_are_drawn_into_the_charts(served: Served) -> None:
    """Every dashboard marks when an alert fired, once for all processes of a forward."""
    for page in PAGES.values():
        (marks,) = page["annotations"]["list"]
        found = served.prometheus.query(filled(served, marks["expr"], everything("degraded")), at=served.end)
        expected = {"alertname": "GraphprobeHitRateLow", "forward": "decode"}
        assert [expected] == [series["metric"] for series in found]
