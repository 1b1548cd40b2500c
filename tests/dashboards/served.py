"""The histories behind a server, and what the targets of the dashboards get from it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from graphprobe.snapshot import ForwardSnapshot
from tests.dashboards.backfill import STEP, Process
from tests.dashboards.pages import PAGES, TARGETS, variables
from tests.dashboards.stack import Prometheus

Values = dict[str, str]
"""What a variable of the dashboards is replaced by."""

Series = dict[tuple[tuple[str, str], ...], float]
"""Labels -> value."""


class Served(NamedTuple):
    """A server with histories, the processes that they are of, the time at which they end, and the range shown."""

    prometheus: Prometheus
    processes: list[Process]
    end: int
    seconds: int = 3600

    def forward(self, job: str, seconds: int, name: str = "decode") -> ForwardSnapshot:
        """What graphprobe itself says of the last ``seconds`` of the only process of a job."""
        (process,) = (process for process in self.processes if process.job == job)
        window = process.snapshots[self.end] - process.snapshots[self.end - seconds]
        return window.forwards[name]


def filled(served: Served, text: str, values: Values) -> str:
    """A query with its variables replaced."""
    for name, value in {"__rate_interval": "4m", "__range": f"{served.seconds}s", **values}.items():
        text = text.replace(f"${name}", value)
    return text


def options(served: Served, variable: dict[str, Any], values: Values) -> list[str]:
    """What a variable offers where those before it have these values."""
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", filled(served, variable["definition"], values))
    assert found is not None
    window = {"start": served.end - served.seconds, "end": served.end}
    offered = served.prometheus.get(f"/api/v1/label/{found[2]}/values", **{"match[]": found[1]}, **window)
    return [value for value in offered if value]


def everything(job: str) -> Values:
    """All of one history."""
    return {v["name"]: v["allValue"] for v in variables(PAGES["overview"])} | {"job": job}


def one(served: Served, job: str) -> Values:
    """One real value of each variable, escaped as Grafana does; All where there is none."""
    values = everything(job)
    for variable in variables(PAGES["overview"])[1:]:
        offered = options(served, variable, values)
        if offered:
            values[variable["name"]] = re.escape(offered[0]).replace("\\", "\\\\")
    return values


def answered(served: Served, target: dict[str, Any], values: Values) -> list[dict[str, Any]]:
    """What a target gets: for each series ``metric`` and ``values``, of which one of now has a single one."""
    expr = filled(served, target["expr"], values)
    if target.get("instant"):
        found = served.prometheus.query(expr, at=served.end)
        return [{"metric": series["metric"], "values": [series["value"]]} for series in found]
    return served.prometheus.query_range(expr, served.end - served.seconds, served.end, STEP)


def asked(served: Served, name: str, values: Values) -> Series:
    """The last value of each series that a target draws; a series that is never a number is none."""
    found = ((s["metric"], s["values"]) for s in answered(served, TARGETS[name], values))
    numbers = {tuple(sorted(m.items())): [float(v) for _, v in points if v != "NaN"] for m, points in found}
    return {labels: points[-1] for labels, points in numbers.items() if points}


def by(series: Series, *labels: str) -> dict[Any, float]:
    """The same, by the values of these labels."""
    found = {tuple(dict(key).get(label, "") for label in labels): value for key, value in series.items()}
    assert len(found) == len(series)
    return {key if len(labels) > 1 else key[0]: value for key, value in found.items()}


def only(series: Series) -> float:
    (value,) = series.values()
    return value
