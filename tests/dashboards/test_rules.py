"""Rules and alerts: they are valid, speak of metrics that exist, and each alert was seen firing and silent."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from graphprobe import options
from graphprobe.metrics import BUILD_INFO, EAGER_CALLS, FORWARD_INFO, GRAPH_CALLS
from graphprobe.reasons import FallbackReason

yaml = pytest.importorskip("yaml")
promql = pytest.importorskip("promql_parser")

from tests.dashboards.alerts import (  # noqa: E402
    ALERTS,
    RUNBOOK,
    anchors,
    annotation_queries,
    expressions,
    identity,
    minutes,
    reads,
    selectors,
)
from tests.dashboards.labels import DASHBOARDS, ENGINES, RECORDED, RULES, known, labels_of, matches  # noqa: E402

CASES = yaml.safe_load((DASHBOARDS / "rules_test.yaml").read_text())["tests"]

LEVEL = ["job", "instance", "rank", "forward"]
PHASES = (*options.PHASES, "all")
GUARDED = "job_instance_rank_forward:graphprobe_hit_rate_in_traffic:ratio_rate5m"

each_alert = pytest.mark.parametrize("alert", ALERTS, ids=identity)
each_miss = pytest.mark.parametrize(
    "alert", [a for a in ALERTS if re.search("HitRate|NeverUsed", a["alert"])], ids=identity
)


def run(promtool: str, *arguments: str) -> None:
    ran = subprocess.run([promtool, *arguments], capture_output=True, text=True, cwd=DASHBOARDS, timeout=300)
    assert 0 == ran.returncode, ran.stdout + ran.stderr


def test_rules_are_valid(promtool: str) -> None:
    """promtool finds no fault, with all its lints."""
    run(promtool, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml")


def test_rules_do_what_their_unit_tests_say(promtool: str) -> None:
    """Each history of rules_test.yaml raises the alerts that it names, with these words, and no others."""
    run(promtool, "test", "rules", "rules_test.yaml")


@pytest.mark.parametrize("where", expressions())
def test_metrics_and_labels_exist(where: str) -> None:
    """Each metric is in the catalogue or recorded; each matcher and each grouping names a label that is there."""
    labels_of(promql.parse(expressions()[where]), known())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("record") or identity(rule))
def test_ranks_never_sum_up_silently(rule: dict[str, Any]) -> None:
    """Every expression keeps forward, instance and rank, save what is recorded per job for panels."""
    level = rule.get("record", "").partition(":")[0]
    kept = labels_of(promql.parse(rule["expr"]), known()).kept
    assert kept == {"job", "forward"} if level == "job_forward" else kept >= set(LEVEL)


@pytest.mark.parametrize("rule", RECORDED, ids=lambda rule: str(rule["record"]))
def test_a_recorded_name_says_its_labels(rule: dict[str, Any]) -> None:
    """The level before the first colon is the list of labels."""
    level = rule["record"].partition(":")[0]
    labels = [label for label in LEVEL if label in level.split("_")]
    assert "_".join(labels) == level
    assert set(labels) == known()[rule["record"]].may


def rated(metric: str) -> Iterator[tuple[str, Any]]:
    """The selectors of a metric whose rate is taken, in rules, in texts of alerts and in the runbook.

    Save where all steps are held against what an engine counts itself.
    """
    for where, text in expressions().items():
        if not ENGINES.keys() & reads(text):
            yield from ((where, s) for s, ranged in selectors(text) if ranged and s.name == metric)


def test_the_hit_rate_counts_the_reasons_that_count() -> None:
    """Every rate of eager calls takes exactly the reasons that graphprobe.reasons counts."""
    found = list(rated(EAGER_CALLS.name))
    assert found
    counted = {reason.value for reason in FallbackReason if reason.counted}
    for where, selector in found:
        assert counted == {r.value for r in FallbackReason if matches(selector, "reason", r.value)}, where


@pytest.mark.parametrize("metric", [GRAPH_CALLS, EAGER_CALLS], ids=lambda metric: str(metric.name))
def test_the_hit_rate_speaks_of_every_phase_but_prefill(metric: Any) -> None:
    """Calls of both paths are taken from the same phases, those of a folded forward included."""
    for where, selector in rated(metric.name):
        assert ["prefill"] == [phase for phase in PHASES if not matches(selector, "phase", phase)], where


def test_there_is_one_traffic_guard() -> None:
    """More than 0.01 calls/s is written once, and every alert that depends on traffic reads the hit rate through it."""
    assert [GUARDED] == [where for where, text in expressions().items() if re.search(r"\b0\.01\b", text)]
    dependent = {identity(alert) for alert in ALERTS if EAGER_CALLS.name in reads(alert["expr"])}
    guarded = {identity(alert) for alert in ALERTS if GUARDED in reads(alert["expr"])}
    # Whether an instance has lost its series is asked of idle ones too.
    assert dependent - guarded == {"GraphprobeMetricsAbsent"}
    assert len(guarded) == 6


def test_no_alert_reads_a_sum_of_the_job() -> None:
    """A sum over ranks or replicas hides the one that is ill."""
    assert not [identity(a) for a in ALERTS if any(name.startswith("job_forward:") for name in reads(a["expr"]))]


def test_burn_factors_can_be_reached() -> None:
    """At an objective of 80 % a burn is 5 at most; three tiers, each with its two windows."""
    tiers = {
        alert["labels"]["long"]: {float(f) for f in re.findall(r"> ([\d.]+) \* 0\.2\b", alert["expr"])}
        for alert in ALERTS
        if alert["alert"] == "GraphprobeHitRateBudgetBurn"
    }
    assert {"1h": {3.36}, "6h": {1.4}, "1d": {1.0}} == tiers


def test_foreign_jobs_have_lost_nothing() -> None:
    """The alert on absent metrics starts from series of ours, never from `up` alone."""
    (alert,) = (a for a in ALERTS if a["alert"] == "GraphprobeMetricsAbsent")
    ours = {GRAPH_CALLS.name, EAGER_CALLS.name, BUILD_INFO.name, FORWARD_INFO.name}
    assert {*ours, "up"} <= reads(alert["expr"])
    assert "forward" in labels_of(promql.parse(alert["expr"]), known()).may


@each_alert
def test_an_alert_says_what_where_and_what_to_do(alert: dict[str, Any]) -> None:
    """Summary, a description with the numbers, a link to its own section, and a severity."""
    told = alert["annotations"]
    assert {"summary", "description", "runbook_url"} == set(told)
    assert "{{" not in told["summary"] and told["summary"].endswith(".")
    assert "$value" in told["description"]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    page, _, anchor = told["runbook_url"].partition("#")
    assert (DASHBOARDS / page).samefile(DASHBOARDS / "runbook.md")
    assert anchor == alert["alert"].lower()
    assert anchor in anchors(RUNBOOK)


@each_miss
def test_an_alert_about_misses_names_the_most_frequent(alert: dict[str, Any]) -> None:
    """With batch size and reason, of the same job, instance, rank and forward, in the shortest window of the alert."""
    (query,) = (q for q in annotation_queries(alert) if q.startswith("topk(1, sum by (batch_size, reason)"))
    (selector,) = (selector for selector, ranged in selectors(query) if ranged)
    assert set(LEVEL) == {matcher.name for matcher in selector.matchers.matchers if matcher.value == "x"}
    assert f"[{alert['labels'].get('short', '5m')}]" in query


@pytest.mark.parametrize("alert", [a for a in ALERTS if "long" in a["labels"]], ids=identity)
def test_a_burn_says_how_little_was_seen(alert: dict[str, Any]) -> None:
    """A window of which there is less than nine tenths."""
    long = alert["labels"]["long"]
    (query,) = (q for q in annotation_queries(alert) if q.startswith("time() - min_over_time("))
    assert query.endswith(f"[{long}]) < 0.9 * {minutes(long) * 60}")


def test_two_numbers_of_one_alert_are_of_one_moment() -> None:
    """GraphNeverUsed tells its calls and its misses, which are the same: neither is of an earlier evaluation."""
    (alert,) = (a for a in ALERTS if a["alert"] == "GraphprobeGraphNeverUsed")
    counted = [s.name for s, ranged in selectors(str(promql.parse(alert["expr"]).lhs)) if ranged]
    told = [s.name for query in annotation_queries(alert) for s, ranged in selectors(query) if ranged]
    assert [EAGER_CALLS.name] == counted == told


@each_alert
def test_an_alert_names_labels_that_it_has(alert: dict[str, Any]) -> None:
    """A label that the expression drops would be told as nothing."""
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(alert["annotations"].values())))
    assert {"instance", "rank", "forward"} <= named
    assert named <= labels_of(promql.parse(alert["expr"]), known()).kept | {"forward"}


def histories(alert: dict[str, Any]) -> Iterator[tuple[int, bool]]:
    """When rules_test.yaml looks for this alert, in minutes, and whether it expects it."""
    static = alert["labels"].items()
    for case in CASES:
        for look in case.get("alert_rule_test", ()):
            if look["alertname"] == alert["alert"]:
                expected = [found["exp_labels"].items() for found in look.get("exp_alerts", ())]
                yield minutes(look["eval_time"]), any(static <= labels for labels in expected)


@each_alert
def test_an_alert_has_a_firing_and_a_silent_case(alert: dict[str, Any]) -> None:
    """Both after the time that it waits, so that silence is not mere patience."""
    seen = {fires for at, fires in histories(alert) if at > minutes(alert.get("for", "0m"))}
    assert {True, False} == seen


def test_unit_tests_use_series_of_the_contract() -> None:
    """A history with a metric or a label that nobody exports proves nothing."""
    for case in CASES:
        for text in (entry["series"] for entry in case["input_series"]):
            selector = promql.parse(text)
            labels_of(selector, known())
            present = {matcher.name for matcher in selector.matchers.matchers}
            needed = known()[selector.name].may - {"rank"} if selector.name != BUILD_INFO.name else {"instance"}
            assert needed <= present, text
