"""Rules and alerts: they are valid, speak of metrics that exist, and each alert was seen firing and silent."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from graphprobe import options
from graphprobe.metrics import BUILD_INFO, CATALOGUE, EAGER_CALLS, GRAPH_CALLS
from graphprobe.reasons import FallbackReason

yaml = pytest.importorskip("yaml")
promql = pytest.importorskip("promql_parser")

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
RUNBOOK = (DASHBOARDS / "runbook.md").read_text()
GROUPS = yaml.safe_load((DASHBOARDS / "rules.yaml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = [rule for rule in RULES if "record" in rule]
CASES = yaml.safe_load((DASHBOARDS / "rules_test.yaml").read_text())["tests"]

SERIES = {"job", "instance", "rank"}
"""Labels that Prometheus, or the environment of a process, puts on every series."""

LEVEL = ["job", "instance", "rank", "forward"]
PHASES = (*options.PHASES, "all")
GUARDED = "job_instance_rank_forward:graphprobe_hit_rate_in_traffic:ratio_rate5m"


class Labels(NamedTuple):
    """What is known of a result: the labels that it may have, and those that none of its parts drops."""

    may: set[str]
    kept: set[str]


def identity(alert: dict[str, Any]) -> str:
    return "-".join([alert["alert"], *(alert["labels"][word] for word in ("long",) if word in alert["labels"])])


each_alert = pytest.mark.parametrize("alert", ALERTS, ids=identity)


def annotation_queries(alert: dict[str, Any]) -> list[str]:
    """The queries in the templates of an alert, with a value in each slot."""
    return [q.replace("%q", '"x"') for text in alert["annotations"].values() for q in re.findall(r"`(.+?)`", text)]


def expressions() -> dict[str, str]:
    """Everything that is evaluated, by where it stands."""
    found = {rule.get("record") or identity(rule): rule["expr"] for rule in RULES}
    found |= {f"{identity(a)} text {n}": q for a in ALERTS for n, q in enumerate(annotation_queries(a))}
    blocks = re.findall(r"^```\n(.*?)^```$", RUNBOOK, re.S | re.M)
    return found | {f"runbook: {line}": line for block in blocks for line in block.splitlines()}


def selectors(text: str) -> list[tuple[Any, bool]]:
    """The selectors of an expression, and whether each is one of a range."""
    found = []

    def visit(node: Any) -> None:
        if isinstance(node, promql.MatrixSelector):
            found.append((node.vector_selector, True))
        elif isinstance(node, promql.VectorSelector):
            found.append((node, False))

    promql.walk(promql.parse(text), visit)
    return found


@cache
def known() -> dict[str, Labels]:
    """Every series that an expression may name, with its labels: the catalogue's, recorded ones, and ``up``."""
    found = {"up": {"job", "instance"}}
    for metric in CATALOGUE:
        found[metric.name] = {*metric.labels, *SERIES}
        if metric.kind == "histogram":
            found |= {f"{metric.name}_{part}": {*found[metric.name], "le"} for part in ("bucket", "sum", "count")}
    result = {name: Labels(labels, labels) for name, labels in found.items()}
    for rule in RECORDED:
        result[rule["record"]] = labels_of(promql.parse(rule["expr"]), result)
    return result


def labels_of(node: Any, names: dict[str, Labels]) -> Labels:
    """The labels of a result; fails where a metric or a label is named that does not exist there."""
    match type(node).__name__:
        case "VectorSelector":
            assert node.name in names, f"no metric {node.name}"
            used = {matcher.name for matcher in node.matchers.matchers}
            assert used <= names[node.name].may, f"{node.name} has no label {used - names[node.name].may}"
            return names[node.name]
        case "MatrixSelector":
            return labels_of(node.vector_selector, names)
        case "Call":
            parts = [labels_of(arg, names) for arg in node.args]
            return parts[0] if parts else Labels(set(), set())
        case "AggregateExpr":
            inner = labels_of(node.expr, names)
            if node.modifier is None:
                return inner
            by = set(node.modifier.labels)
            assert by <= inner.may, f"nothing to group by {by - inner.may}"
            return Labels(by, by)
        case "BinaryExpr":
            return labels_of_two(node, labels_of(node.lhs, names), labels_of(node.rhs, names))
        case "NumberLiteral" | "StringLiteral":
            return Labels(set(), set())
    return labels_of(node.expr, names)  # parentheses, a sign, a subquery


def labels_of_two(node: Any, left: Labels, right: Labels) -> Labels:
    matching = node.modifier.matching if node.modifier else None
    on = set(matching.labels) if matching else None
    assert on is None or on <= left.may & right.may, f"{on} is not on both sides"
    match str(node.op):
        case "or":
            return Labels(left.may | right.may, left.kept & right.kept)
        case "and" | "unless":
            # Without on(), a label that one side alone has lets nothing match.
            assert on is not None or left.may == right.may
            return left
    if not left.may or not right.may:
        return left if left.may else right
    if node.modifier and str(node.modifier.card) == "VectorMatchCardinality.OneToMany":
        return right
    assert on is not None or left.may == right.may
    return left if on is None else Labels(on, on)


def reads(text: str) -> set[str]:
    """The series that an expression reads, directly or through recorded ones."""
    by_name = {rule["record"]: rule["expr"] for rule in RECORDED}
    direct = {selector.name for selector, _ in selectors(text)}
    return direct.union(*(reads(by_name[name]) for name in direct if name in by_name))


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


def matches(selector: Any, label: str, value: str) -> bool:
    """Whether a selector takes a series whose ``label`` has this value."""
    tests = {
        "MatchOp.Equal": lambda text: value == text,
        "MatchOp.NotEqual": lambda text: value != text,
        "MatchOp.Re": lambda text: bool(re.fullmatch(text, value)),
        "MatchOp.NotRe": lambda text: not re.fullmatch(text, value),
    }
    return all(tests[str(m.op)](m.value) for m in selector.matchers.matchers if m.name == label)


def rated(metric: str) -> Iterator[tuple[str, Any]]:
    """The selectors of a metric whose rate a rule takes, by where they stand; queries of the runbook are no rules."""
    for where, text in expressions().items():
        if not where.startswith("runbook"):
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
    assert {GRAPH_CALLS.name, EAGER_CALLS.name, BUILD_INFO.name, "up"} <= reads(alert["expr"])
    assert "forward" in labels_of(promql.parse(alert["expr"]), known()).may


def anchors(text: str) -> list[str]:
    """The anchors of the sections of a page, as they are derived from headings."""
    return [re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^## (.+)$", text, re.M)]


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


@each_alert
def test_an_alert_names_labels_that_it_has(alert: dict[str, Any]) -> None:
    """A label that the expression drops would be told as nothing."""
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(alert["annotations"].values())))
    assert {"instance", "rank", "forward"} <= named
    assert named <= labels_of(promql.parse(alert["expr"]), known()).kept | {"forward"}


def test_every_section_of_the_runbook_is_an_alert_and_is_complete() -> None:
    """Each says what it means, what to look at and what to do."""
    sections = re.split(r"^## ", RUNBOOK, flags=re.M)[1:]
    assert list(dict.fromkeys(alert["alert"] for alert in ALERTS)) == [text.split("\n", 1)[0] for text in sections]
    for text in sections:
        assert ["means", "look at", "do"] == re.findall(r"^\*\*What (?:it |to )([a-z ]+)\.\*\*", text, re.M)
    assert set(re.findall(r"\]\(#(.+?)\)", RUNBOOK)) <= set(anchors(RUNBOOK))


def test_the_runbook_has_advice_for_every_reason_that_counts() -> None:
    """And lists those that do not count."""
    introduction, _, rest = RUNBOOK.partition("\n## ")
    advice = rest.partition("\n## ")[0]
    for reason in FallbackReason:
        assert f"`{reason}`" in (advice if reason.counted else introduction), reason


def minutes(text: str) -> int:
    """A duration of the rules, in minutes."""
    number, unit = int(text[:-1]), text[-1]
    return number * {"m": 1, "h": 60, "d": 1440}[unit]


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
