"""The alerts of rules.yaml and their runbook, taken apart."""

from __future__ import annotations

import re
from typing import Any

import promql_parser as promql

from tests.dashboards.labels import DASHBOARDS, RECORDED, RULES

ALERTS = [rule for rule in RULES if "alert" in rule]
RUNBOOK = (DASHBOARDS / "runbook.md").read_text()
QUERIES = [line for block in re.findall(r"^```\n(.*?)^```$", RUNBOOK, re.S | re.M) for line in block.splitlines()]
"""The queries of the runbook, each in a line."""


def identity(alert: dict[str, Any]) -> str:
    """Its name, with its window where others have the same name."""
    return "-".join([alert["alert"], *(alert["labels"][word] for word in ("long",) if word in alert["labels"])])


def annotation_queries(alert: dict[str, Any]) -> list[str]:
    """The queries in the templates of an alert, with a value in each slot."""
    return [q.replace("%q", '"x"') for text in alert["annotations"].values() for q in re.findall(r"`(.+?)`", text)]


def expressions() -> dict[str, str]:
    """Everything that is evaluated, by where it stands."""
    found = {rule.get("record") or identity(rule): rule["expr"] for rule in RULES}
    found |= {f"{identity(a)} text {n}": q for a in ALERTS for n, q in enumerate(annotation_queries(a))}
    return found | {f"runbook: {query}": query for query in QUERIES}


def selectors(text: str) -> list[tuple[Any, bool]]:
    """The selectors of an expression, and whether each is one of a range."""
    found: list[tuple[Any, bool]] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql.MatrixSelector):
            found.append((node.vector_selector, True))
        elif isinstance(node, promql.VectorSelector):
            found.append((node, False))

    promql.walk(promql.parse(text), visit)
    return found


def reads(text: str) -> set[str]:
    """The series that an expression reads, directly or through recorded ones."""
    by_name = {rule["record"]: rule["expr"] for rule in RECORDED}
    direct = {selector.name for selector, _ in selectors(text)}
    return direct.union(*(reads(by_name[name]) for name in direct if name in by_name))


def minutes(text: str) -> int:
    """A duration of the rules, in minutes."""
    number, unit = int(text[:-1]), text[-1]
    return number * {"m": 1, "h": 60, "d": 1440}[unit]


def anchors(text: str) -> list[str]:
    """The anchors of the sections of a page, as they are derived from headings."""
    return [re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^## (.+)$", text, re.M)]
