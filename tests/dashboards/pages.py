"""The committed dashboards, and the expressions in them taken apart."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TEXTS = {
    p.name: p.read_text(encoding="utf-8") for p in sorted((Path(__file__).parents[2] / "dashboards").glob("*.json"))
}
PAGES: dict[str, dict[str, Any]] = {name.removesuffix(".json"): json.loads(text) for name, text in TEXTS.items()}

NOW, RATE, RANGE = (datetime.timedelta(minutes=minutes) for minutes in (5, 7, 77))
"""What the windows of the dashboards become here: lengths that nobody writes, but for that of the alerts."""


def panels(page: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel that has queries, those of collapsed rows included."""
    for panel in page["panels"]:
        yield from panel["panels"] if panel["type"] == "row" else (panel,)


PANELS = {f"{name}: {panel['title']}": panel for name, page in PAGES.items() for panel in panels(page)}
TARGETS = {f"{name}, {target['refId']}": target for name, panel in PANELS.items() for target in panel["targets"]}

each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
each_panel = pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)


def expressions(page: dict[str, Any]) -> Iterator[str]:
    """Everything that a dashboard asks Prometheus."""
    yield from (target["expr"] for panel in panels(page) for target in panel["targets"])
    yield from (marks["expr"] for marks in page["annotations"]["list"])


def variables(page: dict[str, Any], kind: str = "query") -> list[dict[str, Any]]:
    """Those that are offered by a query, or of another kind."""
    return [variable for variable in page["templating"]["list"] if variable["type"] == kind]


def parsed(text: str) -> Any:
    """An expression with its windows filled in."""
    promql = pytest.importorskip("promql_parser")
    return promql.parse(text.replace("$__rate_interval", "7m").replace("$__range", "77m"))


def nodes(node: Any) -> Iterator[Any]:
    """This part of an expression and all parts below it."""
    yield node
    parts = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    for part in (*getattr(node, "args", ()), *parts):
        if part is not None:
            yield from nodes(part)


def selectors(text: str) -> list[Any]:
    """The selectors of an expression."""
    return [node for node in nodes(parsed(text)) if hasattr(node, "matchers")]
