"""The panels that the dashboards are made of: one function per kind, so that equal things look equal everywhere."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import barchart, bargauge, common, prometheus, table, timeseries
from grafana_foundation_sdk.builders import stat as stats
from grafana_foundation_sdk.builders.dashboard import FieldColor, ThresholdsConfig
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.colours import EAGER, FAULT, GOAL, GRAPH, PADDING, PATHS, PLAIN, Steps
from dashboards.queries import ordered
from graphprobe.metrics import CATALOGUE

SOURCE = looks.DataSourceRef(type_val="prometheus", uid="${datasource}")

NO_COLOURS: Mapping[str, str] = {}

SCRAPE = "1m"
"""The longest time between two scrapes, as in rules.yaml."""

NO_TRAFFIC, UNKNOWN, ABSENT = "no traffic", "not reported", "-"
"""Instead of a number: for a panel, and for one cell of a table."""

NARROW = 60
"""Pixels of the narrowest column. Grafana's own least, 150, hides the last columns of a table behind a scroll bar."""

REFS = string.ascii_uppercase

Panel = Any
"""A builder of the SDK; the layout gives it a place and an id."""


class Query(NamedTuple):
    """One target: over the range of time, or ``now`` at its end; in ``rows``, a column per label."""

    expr: str
    legend: str = ""
    now: bool = False
    rows: bool = False


class Column(NamedTuple):
    """The values of a table that come from one query."""

    expr: str
    name: str
    unit: str = "none"
    words: tuple[str, ...] = ()
    """What 0, 1, ... are shown as; 0 is the bad one."""
    least: float | None = None
    """What is below is bad."""


def stat(
    title: str,
    text: str,
    unit: str,
    empty: str,
    queries: Sequence[Query],
    steps: Steps = PLAIN,
    colours: Mapping[str, str] = NO_COLOURS,
    *,
    named: bool = False,
) -> Panel:
    """Numbers of the moment, with their names where there are several or ``named`` says so."""
    panel = _told(stats.Panel(), title, text, unit, empty, queries)
    panel.color_mode(looks.BigValueColorMode.VALUE).graph_mode(looks.BigValueGraphMode.NONE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.text_mode(looks.BigValueTextMode.VALUE_AND_NAME if named else looks.BigValueTextMode.AUTO)
    panel.wide_layout(not named).mappings([_absent(empty)])
    return _coloured(panel.thresholds(_steps(steps)), colours)


def lines(
    title: str,
    text: str,
    unit: str,
    empty: str,
    queries: Sequence[Query],
    *,
    colours: Mapping[str, str] = NO_COLOURS,
    stacked: bool = False,
    limit: Steps = (),
) -> Panel:
    """Lines over time, or areas on top of each other; ``limit`` is drawn as a dashed line."""
    panel = _told(timeseries.Panel(), title, text, unit, empty, queries).min(0)
    panel.show_points(looks.VisibilityMode.AUTO).line_width(1).fill_opacity(60 if stacked else 0)
    if stacked:
        panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))
    panel.color_scheme(FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC)).legend(_legend())
    panel.tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING))
    if limit:
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(looks.GraphThresholdsStyleMode.DASHED))
        panel.thresholds(_steps(limit))
    return _coloured(panel, colours)


def goal_lines(title: str, text: str, queries: Sequence[Query]) -> Panel:
    """Hit rates over time against the 80 % line: what is below it is red, and the lowest is the first of the legend."""
    panel = lines(title, text, "percentunit", NO_TRAFFIC, queries, limit=GOAL).max(1)
    panel.color_scheme(FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    legend = _legend().display_mode(looks.LegendDisplayMode.TABLE).calcs(["lastNotNull", "min"])
    panel.line_width(2).gradient_mode(looks.GraphGradientMode.SCHEME)
    return panel.legend(legend.sort_by("Last *").sort_desc(False))


def bars(title: str, text: str, unit: str, expr: str, across: str, part: str, *, stacked: bool = True) -> Panel:
    """A bar for each value of the label ``across``, in its order as a number, with a piece for each of ``part``.

    What is neither a path nor padding is a shade of the colour of graphs.
    """
    panel = _told(barchart.Panel(), title, text, unit, NO_TRAFFIC, [Query(ordered(expr, across), now=True, rows=True)])
    panel.stacking(looks.StackingMode.NORMAL if stacked else looks.StackingMode.NONE)
    panel.fill_opacity(80).bar_width(0.8).min(0)
    panel.show_value(looks.VisibilityMode.NEVER).orientation(looks.VizOrientation.VERTICAL).x_tick_label_spacing(
        30
    ).legend(_legend())
    panel.tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI))
    panel.color_scheme(FieldColor().mode(models.FieldColorModeId.SHADES).fixed_color(GRAPH))
    _transform(panel, "sortBy", sort=[{"field": "order"}])
    _transform(panel, "groupingToMatrix", columnField=part, rowField=across, valueField="Value", emptyValue="null")
    corner = f"{across}\\{part}"
    _organize(panel, (corner, *PATHS), {corner: across.replace("_", " ")})
    return _coloured(panel, PATHS | PADDING)


def ranking(title: str, text: str, unit: str, empty: str, query: Query, colour: str) -> Panel:
    """Horizontal bars, in the order in which the query has them."""
    panel = _told(bargauge.Panel(), title, text, unit, empty, [query])
    panel.orientation(looks.VizOrientation.HORIZONTAL).display_mode(looks.BarGaugeDisplayMode.BASIC)
    panel.sizing(looks.BarGaugeSizing.MANUAL).min_viz_height(16).max_viz_height(32)
    panel.text(common.VizTextDisplayOptions().title_size(11).value_size(14))
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel.color_scheme(FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color(colour))


def grid(
    title: str,
    text: str,
    empty: str,
    labels: Sequence[str],
    columns: Sequence[Column],
    *,
    numbered: bool = False,
    dearest: str = "",
) -> Panel:
    """A table of labels and values, sorted by column ``dearest``, falling, or by labels, the last of them a number."""
    queries = [Query(ordered(c.expr, *labels) if numbered else c.expr, now=True, rows=True) for c in columns]
    panel = _told(table.Panel(), title, text, "none", empty, queries).min_width(NARROW)
    panel.override_by_regexp(".*", [models.DynamicConfigValue("noValue", ABSENT)])
    fields = {c.name: f"Value #{ref}" if len(columns) > 1 else "Value" for ref, c in zip(REFS, columns, strict=False)}
    if len(columns) > 1:
        _transform(panel, "merge")
    if numbered or dearest:
        _transform(panel, "sortBy", sort=[{"field": fields.get(dearest, "order"), "desc": bool(dearest)}])
    headings = {label: label.replace("_", " ") for label in labels}
    _organize(panel, (*labels, *fields.values()), headings | {field: name for name, field in fields.items()})
    for column in columns:
        panel.override_by_name(column.name, _column_look(column))
    return panel


def _told(panel: Panel, title: str, text: str, unit: str, empty: str, queries: Sequence[Query]) -> Panel:
    names = [metric.name for metric in CATALOGUE if any(re.search(rf"\b{metric.name}", q.expr) for q in queries)]
    names += ["ALERTS"] if any("ALERTS" in query.expr for query in queries) else []
    panel.title(title).description(f"{text}\n\nMetrics: {', '.join(f'`{name}`' for name in names)}")
    targets = [_target(query, ref) for query, ref in zip(queries, REFS, strict=False)]
    return panel.datasource(SOURCE).targets(targets).unit(unit).no_value(empty)


def _target(query: Query, ref: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref).datasource(SOURCE).expr(query.expr)
    target.format(PromQueryFormat.TABLE if query.rows else PromQueryFormat.TIME_SERIES)
    if query.legend:
        target.legend_format(query.legend)
    # Four of these make a window of rates. Grafana would take 15 s for the time between two scrapes, and where that is
    # a minute a window of four times 15 s holds no two of them.
    return target.instant() if query.now else target.range().interval(SCRAPE)


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True).placement(looks.LegendPlacement.BOTTOM)
    return legend.display_mode(looks.LegendDisplayMode.LIST).calcs([])


def _steps(steps: Steps) -> ThresholdsConfig:
    made = [models.Threshold(value=value, color=colour) for value, colour in steps]
    return ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


def _coloured(panel: Panel, colours: Mapping[str, str]) -> Panel:
    for name, colour in colours.items():
        panel.override_by_name(name, [models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})])
    return panel


def _absent(text: str) -> models.SpecialValueMap:
    # Grafana gives what has no value the colour of the lowest value.
    result = models.ValueMappingResult(text=text, color="text", index=0)
    return models.SpecialValueMap(models.DashboardSpecialValueMapOptions(models.SpecialValueMatch.NULL_AND_NAN, result))


def _column_look(column: Column) -> list[models.DynamicConfigValue]:
    look: dict[str, Any] = {"unit": column.unit}
    if column.words or column.least is not None:
        look["mappings"] = [_absent(ABSENT).to_json()]
        look["custom.cellOptions"] = {"type": "color-text"}
    if column.words:
        colours = [EAGER, *["text"] * len(column.words)]
        named = {str(n): {"text": w, "index": n + 1, "color": colours[n]} for n, w in enumerate(column.words)}
        look["mappings"].append({"type": "value", "options": named})
    if column.least is not None:
        look["decimals"] = 2
        look["thresholds"] = _steps(((None, FAULT), (column.least, "text"))).build().to_json()
    return [models.DynamicConfigValue(key, value) for key, value in look.items()]


def _transform(panel: Panel, kind: str, **options: Any) -> None:
    panel.with_transformation(models.DataTransformerConfig(kind, options=options))


def _organize(panel: Panel, order: Sequence[str], names: Mapping[str, str]) -> None:
    place = {name: index for index, name in enumerate(order)}
    hidden = {"Time": True, "order": True}
    _transform(panel, "organize", excludeByName=hidden, indexByName=place, renameByName=dict(names))
