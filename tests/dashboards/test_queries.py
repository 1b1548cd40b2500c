"""The PromQL of the dashboards: it is right by its form, and speaks of nothing that graphprobe does not export."""

from __future__ import annotations

import re
from typing import Any

import pytest

from graphprobe.metrics import CATALOGUE, EAGER_CALLS
from graphprobe.options import PHASES
from graphprobe.reasons import FallbackReason
from tests.dashboards.pages import (
    NOW,
    RANGE,
    RATE,
    each_page,
    each_panel,
    expressions,
    nodes,
    parsed,
    selectors,
    variables,
)

promql = pytest.importorskip("promql_parser")
pytest.importorskip("yaml")

from tests.dashboards.labels import known, matches  # noqa: E402

COUNTERS = {metric.name for metric in CATALOGUE if metric.kind == "counter"}
OF_ALERTS = {"job", "instance", "rank", "forward", "alertname", "alertstate", "severity", "long", "bucket", "outcome"}
"""Labels of what Prometheus writes of the alerts of rules.yaml."""


@each_panel
def test_targets_are_told_apart(panel: dict[str, Any]) -> None:
    """Each has an id of its own and is either a range or of now; what is drawn has a legend, or is alone."""
    targets = panel["targets"]
    assert targets and len(targets) == len({target["refId"] for target in targets})
    for target in targets:
        assert bool(target.get("instant")) != bool(target.get("range"))
        assert target["format"] == "table" or target.get("legendFormat") or len(targets) == 1
        for label in re.findall(r"{{(\w+)}}", target.get("legendFormat", "")):
            assert label in labels_in(parsed(target["expr"]))


@each_page
def test_every_selector_takes_what_is_chosen(page: dict[str, Any]) -> None:
    """Job, instance and rank, and forward where a metric has it; an alert may speak of a process without one."""
    for text in expressions(page):
        for selector in selectors(text):
            matched = {m.name: m.value for m in selector.matchers.matchers if str(m.op) == "MatchOp.Re"}
            assert {name: f"${name}" for name in ("job", "instance", "rank")}.items() <= matched.items(), text
            has_forward = selector.name in known() and "forward" in known()[selector.name].may
            if has_forward and ":" not in selector.name:
                assert "$forward" == matched["forward"], text


@each_panel
def test_a_window_holds_four_scrapes(panel: dict[str, Any]) -> None:
    """Also where Grafana was not told that Prometheus scrapes only each minute: $__rate_interval is four intervals."""
    assert {"1m"} >= {target["interval"] for target in panel["targets"] if target.get("range")}


@each_panel
def test_counters_are_read_as_rates(panel: dict[str, Any]) -> None:
    """Over the interval of a chart, the range shown, or the 5 minutes of the alerts, and of what is drawn once only.

    Raw counters stand where one that is new in the range counts whole.
    """
    for target in panel["targets"]:
        tree = list(nodes(parsed(target["expr"])))
        ranged = [node for node in tree if isinstance(node, promql.MatrixSelector)]
        windows = {node.range for node in ranged}
        assert windows <= ({RANGE, NOW} if target.get("instant") else {RATE}), target["expr"]
        inside = [node.vector_selector for node in ranged]
        raw = [n for n in tree if isinstance(n, promql.VectorSelector) and n not in inside and n.name in COUNTERS]
        assert bool(raw) == any(selector.offset == RANGE for selector in raw), target["expr"]


@each_panel
def test_ratios_are_of_sums(panel: dict[str, Any]) -> None:
    """No mean of ratios; what is divided by is more than 0, so no traffic is no value."""
    for target in panel["targets"]:
        for node in nodes(parsed(target["expr"])):
            assert "avg" not in str(getattr(node, "op", "")), target["expr"]
            if isinstance(node, promql.BinaryExpr) and str(node.op) == "/":
                assert guarded(node.rhs), target["expr"]


def guarded(node: Any) -> bool:
    """Whether this is a comparison with 0, or made of such alone."""
    if isinstance(node, promql.ParenExpr):
        return guarded(node.expr)
    assert isinstance(node, promql.BinaryExpr)
    return (str(node.op), str(node.rhs)) == (">", "0") or (str(node.op) == "/" and guarded(node.rhs))


def labels_in(node: Any) -> set[str]:
    """Every label that a part of an expression may speak of: those of its metrics, and those that it makes."""
    found: set[str] = set()
    for part in nodes(node):
        if isinstance(part, promql.VectorSelector):
            found |= OF_ALERTS if part.name.startswith("ALERTS") else known()[part.name].may
        elif isinstance(part, promql.Call) and part.func.name == "label_replace":
            found.add(part.args[1].val)
    return found


@each_page
def test_metrics_and_labels_exist(page: dict[str, Any]) -> None:
    """Each metric is in the catalogue or recorded by rules.yaml; so is each label that is matched or kept.

    That each panel shows something on a real Prometheus, test_panels.py says (H69, vllm-project/production-stack#989).
    """
    for text in expressions(page):
        for node in nodes(parsed(text)):
            if isinstance(node, promql.VectorSelector):
                assert {m.name for m in node.matchers.matchers} <= labels_in(node), text
            elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                assert set(node.modifier.labels) <= labels_in(node.expr), text
            elif isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching:
                assert set(node.modifier.matching.labels) <= labels_in(node), text
    for variable in variables(page):
        (selector,) = selectors(variable["definition"].removeprefix("label_values(").partition(", ")[0])
        assert {variable["name"], *(m.name for m in selector.matchers.matchers)} <= labels_in(selector)


@each_page
def test_the_hit_rate_counts_the_reasons_that_count(page: dict[str, Any]) -> None:
    """Who asks for reasons asks for exactly those that graphprobe.reasons counts, or those that it does not."""
    counted = {reason.value for reason in FallbackReason if reason.counted}
    rest = {reason.value for reason in FallbackReason} - counted
    asked = [s for text in expressions(page) for s in selectors(text) if s.name == EAGER_CALLS.name]
    by_reason = [s for s in asked if any(m.name == "reason" for m in s.matchers.matchers)]
    assert by_reason
    for selector in by_reason:
        assert {reason for reason in counted | rest if matches(selector, "reason", reason)} in (counted, rest)
        assert ["prefill"] == [phase for phase in PHASES if not matches(selector, "phase", phase)]
