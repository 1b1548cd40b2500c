"""Dashboards as files: they are what is generated, and keep the rules that Grafana does not check."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from graphprobe.metrics import CATALOGUE, EAGER_CALLS, GRAPH_CALLS, PADDING_ROWS
from graphprobe.reasons import FallbackReason
from tests.dashboards.pages import PANELS, TEXTS, each_page, each_panel, panels, selectors, variables

VARIABLES = {"job": ".+", "instance": ".+", "rank": ".*", "forward": ".+"}
"""With what All stands for: only a process of several ranks has a rank."""

EMPTY = {"no traffic", "no samples", "no misses", "no rules", "not reported", "none fires", "no hooks"}
EMPTY |= {"no ranks, or no traffic", "every bucket was used"}

NO_SDK = "grafana-foundation-sdk is not installed (it needs Python 3.11)"
CHARTS = ("stat", "timeseries", "barchart")

pytestmark = pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_committed_is_what_is_generated(name: str) -> None:
    """python -m dashboards.generate writes the same bytes."""
    pytest.importorskip("grafana_foundation_sdk", reason=NO_SDK)
    from dashboards.generate import PAGES as generated

    assert set(TEXTS) == set(generated)
    assert TEXTS[name] == generated[name]()


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Where ``after`` is not what ``before`` is; what it has beyond that are defaults of the models."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, value in enumerate(before):
            yield from lost(value, after[index], f"{path}[{index}]")
    elif before != after:
        yield path


@each_page
def test_grafana_knows_every_key(page: dict[str, Any]) -> None:
    """Read by the models of Grafana's schema and written again it is all there: a key that they do not know is lost."""
    pytest.importorskip("grafana_foundation_sdk", reason=NO_SDK)
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    assert not list(lost(page, json.loads(json.dumps(Dashboard.from_json(page), cls=JSONEncoder))))


@each_page
def test_a_dashboard_is_a_file_for_review(page: dict[str, Any]) -> None:
    """Stable names, not editable by hand, keys in order, nothing of an import from elsewhere or of a merge."""
    name = page["title"].removeprefix("graphprobe / ").lower()
    assert (f"graphprobe-{name}", ["graphprobe"], False) == (page["uid"], page["tags"], page["editable"])
    text = TEXTS[f"{name}.json"]
    assert json.dumps(page, sort_keys=True, indent=2) + "\n" == text
    assert page.get("id") is None and "__inputs" not in page
    assert not re.search(r"^(<{7}|={7}|>{7})", text, re.M)


@each_page
def test_dashboards_lead_to_each_other(page: dict[str, Any]) -> None:
    """By their tag, with the time and what is chosen."""
    (link,) = page["links"]
    assert ("dashboards", ["graphprobe"]) == (link["type"], link["tags"])
    assert link["keepTime"] and link["includeVars"]


@each_page
def test_variables(page: dict[str, Any]) -> None:
    """A data source, and four that offer what is there in the range of time; all is chosen at first."""
    (source,) = variables(page, "datasource")
    assert ("datasource", "Data source", "prometheus") == (source["name"], source["label"], source["query"])
    chosen = variables(page)
    assert VARIABLES == {variable["name"]: variable["allValue"] for variable in chosen}
    assert 1 + len(chosen) == len(page["templating"]["list"])
    for variable in chosen:
        assert variable["multi"] and variable["includeAll"]
        assert ["$__all"] == variable["current"]["value"]
        assert 2 == variable["refresh"]
        assert variable["definition"] == variable["query"]["query"]


@each_page
def test_variables_narrow_those_after_them(page: dict[str, Any]) -> None:
    """Each query takes what is chosen before it, and asks for a label of a metric that has it."""
    before: list[str] = []
    for variable in variables(page):
        query, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
        (selector,) = selectors(query)
        assert variable["name"] == label
        assert {name: f"${name}" for name in before} == {m.name: m.value for m in selector.matchers.matchers}
        before.append(label)


@each_page
def test_every_query_goes_to_the_chosen_data_source(page: dict[str, Any]) -> None:
    """No data source of somebody's Grafana is named."""
    parts = [*panels(page), *page["annotations"]["list"], *variables(page)]
    parts += [target for panel in panels(page) for target in panel["targets"]]
    assert [{"type": "prometheus", "uid": "${datasource}"}] * len(parts) == [part["datasource"] for part in parts]


@each_page
def test_panels_fit_and_are_told_apart(page: dict[str, Any]) -> None:
    """Unique ids and titles, within 24 columns, no two in one place; nothing is left free but what is closed."""
    rows = [panel for panel in page["panels"] if panel["type"] == "row"]
    everything = [*rows, *panels(page)]
    assert len(everything) == len({panel["id"] for panel in everything})
    assert len({panel["title"] for panel in panels(page)}) == len(list(panels(page)))
    closed = [[row, *row["panels"]] for row in rows if row["collapsed"]]
    for shown in (page["panels"], *closed):
        taken: set[tuple[int, int]] = set()
        for panel in shown:
            place = panel["gridPos"]
            assert place["w"] > 0 and place["h"] > 0 and place["x"] + place["w"] <= 24, panel["title"]
            across, down = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
            cells = {(x, y) for x in across for y in down}
            assert not cells & taken, panel["title"]
            taken |= cells
        first, last = min(y for _, y in taken), max(y for _, y in taken)
        assert len(taken) == 24 * (last - first + 1)
    assert [row["title"] for row in rows if row["collapsed"] != bool(row["panels"])] == []


@each_panel
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    """A title, a description that ends with its metrics, a unit, and a word for no data that is no number."""
    used = {s.name for target in panel["targets"] for s in selectors(target["expr"])}
    text, _, metrics = panel["description"].partition("\n\nMetrics: ")
    assert panel["title"] and len(text) > 40
    names = [metric.name for metric in CATALOGUE if any(re.match(rf"{metric.name}(_|$)", name) for name in used)]
    names += ["ALERTS"] if "ALERTS" in used else []
    assert names == re.findall(r"`(\w+)`", metrics)
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"] and defaults["noValue"] in EMPTY


@each_panel
def test_what_depends_on_traffic_says_no_traffic(panel: dict[str, Any]) -> None:
    """Every ratio, and every chart or number that calls alone make."""
    used = {selector.name for target in panel["targets"] for selector in selectors(target["expr"])}
    calls = used <= {GRAPH_CALLS.name, EAGER_CALLS.name, PADDING_ROWS.name} and panel["type"] in CHARTS
    if calls or panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
        assert "no traffic" in panel["fieldConfig"]["defaults"]["noValue"]


def test_units_are_those_of_grafana() -> None:
    """A unit that it does not know is printed behind the number as it is."""
    units = pytest.importorskip("grafana_foundation_sdk.models.units", reason=NO_SDK)
    known_units = {value for value in vars(units).values() if isinstance(value, str)}
    for name, panel in PANELS.items():
        used = {panel["fieldConfig"]["defaults"]["unit"]}
        looks = [look for override in panel["fieldConfig"]["overrides"] for look in override["properties"]]
        assert used | {look["value"] for look in looks if look["id"] == "unit"} <= known_units, name


def absent(mappings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Text and colour of what has no value."""
    special = [mapping["options"] for mapping in mappings if mapping["type"] == "special"]
    return [(m["result"]["text"], m["result"]["color"]) for m in special if m["match"] == "null+nan"]


def test_no_value_has_no_colour() -> None:
    """Grafana gives it that of the lowest value: no traffic would be red, and an unknown number of faults green."""
    for name, panel in PANELS.items():
        if panel["type"] == "stat":
            defaults = panel["fieldConfig"]["defaults"]
            assert [(defaults["noValue"], "text")] == absent(defaults["mappings"]), name
        for override in panel["fieldConfig"]["overrides"]:
            looks = {look["id"]: look["value"] for look in override["properties"]}
            if "custom.cellOptions" in looks:
                assert [("-", "text")] == absent(looks["mappings"]), name


def test_a_reason_that_counts_has_a_colour_of_its_own() -> None:
    """None is that of graph calls; those that do not count are grey."""
    overrides = PANELS["overview: Reasons of eager calls"]["fieldConfig"]["overrides"]
    colours = {o["matcher"]["options"]: o["properties"][0]["value"]["fixedColor"] for o in overrides}
    counted = [colours.pop(reason) for reason in FallbackReason if reason.counted]
    assert len(counted) == len(set(counted)) and "green" not in counted
    assert {reason.value for reason in FallbackReason if not reason.counted} == set(colours)
    assert {"#8e8e8e"} == set(colours.values())


def test_columns_fit() -> None:
    """A page of 1280 pixels shows all of a table: Grafana hides those at the right behind a scroll bar."""
    for name, panel in PANELS.items():
        if panel["type"] == "table":
            columns = len(panel["transformations"][-1]["options"]["indexByName"])
            narrowest = panel["fieldConfig"]["defaults"]["custom"]["minWidth"]
            assert columns * narrowest <= panel["gridPos"]["w"] / 24 * 1280, name


@each_page
def test_alerts_are_marked_in_charts(page: dict[str, Any]) -> None:
    """In those that are named, which are there."""
    (marks,) = page["annotations"]["list"]
    charts = {panel["id"] for panel in panels(page) if panel["type"] == "timeseries"}
    assert charts & set(marks["filter"]["ids"])
    assert set(marks["filter"]["ids"]) <= {panel["id"] for panel in panels(page)}


def test_a_path_has_one_colour_everywhere() -> None:
    """Graph and eager are told apart at a glance, whatever the panel."""
    colours: dict[str, set[str]] = {}
    for panel in PANELS.values():
        for override in panel["fieldConfig"]["overrides"]:
            for look in override["properties"]:
                if look["id"] == "color":
                    colours.setdefault(override["matcher"]["options"], set()).add(look["value"]["fixedColor"])
    assert {"green"} == colours["graph"] and {"orange"} == colours["eager"]
    assert not [name for name, found in colours.items() if len(found) > 1]
