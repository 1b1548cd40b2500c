"""Rows of panels on Grafana's grid of 24 columns, and what all dashboards share: variables, links, alerts in charts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import SOURCE, Panel
from dashboards.queries import ALERTS, chosen, over
from graphprobe.metrics import BUILD_INFO, FORWARD_INFO

COLUMNS = 24
TAG = "graphprobe"

ALL = {"job": ".+", "instance": ".+", "rank": ".*", "forward": ".+"}
"""Each variable, after those that narrow it, and what All means: a process without ranks has no label ``rank``."""


class Row(NamedTuple):
    """Panels under a heading, each with its width; a line is full at 24 columns, and its panels are ``height`` high.

    Into its charts ``alerts`` are drawn.
    """

    title: str
    height: int
    panels: Sequence[tuple[int, Panel]]
    collapsed: bool = False
    alerts: bool = False


def build(uid: str, title: str, text: str, rows: Sequence[Row]) -> str:
    """The JSON of a dashboard, as it is committed."""
    made = dashboard.Dashboard(title).uid(uid).description(text).tags([TAG]).readonly().timezone("browser")
    made.time("now-1h", "now").refresh("1m").tooltip(models.DashboardCursorSync.CROSSHAIR)
    parts = list(_placed(rows))
    made.link(_link()).annotation(
        _alerts([panel._internal.id_val for row in rows if row.alerts for _, panel in row.panels])
    )
    for variable in _variables():
        made.with_variable(variable)
    for part in parts:
        if isinstance(part, dashboard.Row):
            made.with_row(part)
        else:
            made.with_panel(part)
    return json.dumps(made.build(), cls=JSONEncoder, sort_keys=True, indent=2) + "\n"


def _placed(rows: Sequence[Row]) -> Iterator[Panel]:
    # The SDK's own layout lets a panel run over the right edge, and leaves ids unset.
    ids, y = count(1), 0
    for row in rows:
        heading = dashboard.Row(row.title).id(next(ids)).collapsed(row.collapsed)
        heading.grid_pos(models.GridPos(h=1, w=COLUMNS, x=0, y=y))
        x, y, inside = 0, y + 1, []
        for width, panel in row.panels:
            assert x + width <= COLUMNS, f"{row.title}: {panel._internal.title} runs over the edge"
            inside.append(panel.id(next(ids)).grid_pos(models.GridPos(h=row.height, w=width, x=x, y=y)))
            x, y = (0, y + row.height) if x + width == COLUMNS else (x + width, y)
        assert x == 0, f"{row.title}: the last line is not full"
        if row.collapsed:
            # As Grafana writes it: what comes next stands below the heading, and moves down when the row is opened.
            y = heading._internal.grid_pos.y + 1
            yield _filled(heading, inside)
        else:
            yield from (heading, *inside)


def _filled(heading: dashboard.Row, panels: Sequence[Panel]) -> dashboard.Row:
    for panel in panels:
        heading.with_panel(panel)
    return heading


def _variables() -> Iterator[Panel]:
    yield dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    names = list(ALL)
    for index, (name, everything) in enumerate(ALL.items()):
        metric = FORWARD_INFO if name == "forward" else BUILD_INFO
        series = f"{metric.name}{{{chosen(*names[:index])}}}" if index else metric.name
        yield _variable(name, f"label_values({series}, {name})", everything)


def _variable(name: str, query: str, everything: str) -> dashboard.QueryVariable:
    asked = {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"}
    variable = dashboard.QueryVariable(name).label(name.capitalize()).datasource(SOURCE).query(asked).definition(query)
    variable.multi(True).include_all(True).all_value(everything).sort(models.VariableSort.NATURAL_ASC)
    variable.current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    return variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)


def _link() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink(TAG).type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.keep_time(True).include_vars(True).placement(None)


def _alerts(panels: list[int]) -> dashboard.AnnotationQuery:
    # One mark for all ranks: each is a red area over the chart, and eight of them would hide what is under them.
    marks = dashboard.AnnotationQuery().name("Alerts").datasource(SOURCE).enable(True).icon_color("red")
    marks.expr(over("alertname, forward", ALERTS, "count")).filter(dashboard.AnnotationPanelFilter().ids(panels))
    return marks.title_format("{{alertname}}").text_format("{{forward}}")
