"""Which labels an expression has, by what graphprobe exports and rules.yaml records."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import yaml

from graphprobe.metrics import CATALOGUE

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
GROUPS = yaml.safe_load((DASHBOARDS / "rules.yaml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
RECORDED = [rule for rule in RULES if "record" in rule]

SERIES = {"job", "instance", "rank"}
"""Labels that Prometheus, or the environment of a process, puts on every series."""


ENGINES = {
    "vllm:iteration_tokens_total_count": {"job", "instance", "engine", "model_name"},
    "sglang:cuda_graph_passes_total": {"job", "instance", "model_name", "mode"},
}
"""Series of engines themselves that the runbook holds ours against."""


class Labels(NamedTuple):
    """What is known of a result: the labels that it may have, and those that none of its parts drops."""

    may: set[str]
    kept: set[str]


@cache
def known() -> dict[str, Labels]:
    """Every series that an expression may name, with its labels: the catalogue's, recorded ones, and others."""
    found = {"up": {"job", "instance"}, **ENGINES}
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
            return parts[0] if parts and node.func.name != "scalar" else Labels(set(), set())
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


def matches(selector: Any, label: str, value: str) -> bool:
    """Whether a selector takes a series whose ``label`` has this value."""
    tests = {
        "MatchOp.Equal": lambda text: value == text,
        "MatchOp.NotEqual": lambda text: value != text,
        "MatchOp.Re": lambda text: bool(re.fullmatch(text, value)),
        "MatchOp.NotRe": lambda text: not re.fullmatch(text, value),
    }
    return all(tests[str(m.op)](m.value) for m in selector.matchers.matchers if m.name == label)
