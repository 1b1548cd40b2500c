"""Dashboards on a real Prometheus: in each history every panel has data, or says that there is none."""

from __future__ import annotations

import pytest

from tests.dashboards.pages import PAGES, PANELS, TARGETS, variables
from tests.dashboards.served import Served, asked, everything, one, options

ENGINE = "ranks", "hooks", "launches", "estimate"
CAPTURE = "captures", "captured and unused"
LACKS = {
    "healthy": {*ENGINE, "unused buckets", "captured and unused", "alerts"},
    "degraded": {*ENGINE, "prefill", "uncounted calls"},
    "eager-only": {
        *(*ENGINE, "prefill", "uncounted calls", "graph series", "graph calls"),
        *(*CAPTURE, "failures", "unused buckets", "max_batch", "KV capacity"),
    },
    "idle": {
        *(*ENGINE, "prefill", "uncounted calls", "alerts"),
        *("calls", "counted calls", "misses", "graph calls"),
    },
    "off": {
        *(*ENGINE, "prefill", "alerts", "rules"),
        *(*CAPTURE, "failures", "counted calls", "misses", "graph calls", "max_batch", "KV capacity"),
    },
    "replicas": {"prefill", "uncounted calls", "alerts"},
}
"""What each history does not have (see histories.py)."""

NEEDS = {
    "calls": (
        "overview: Graph and eager calls by batch size, A",
        "overview: Time of a forward, B",
        "overview: Time of a forward, D",
        "overview: Timing samples, A",
        "tuning: Largest bucket and largest batch, B",
        "tuning: Time by bucket, A",
    ),
    "counted calls": (
        "overview: Hit rate, A",
        "overview: Lowest hit rate, A",
        "overview: Hit rate by process and rank, A",
        "tuning: Batch sizes over buckets, A",
    ),
    "uncounted calls": ("overview: Calls by path, C",),
    "prefill": ("overview: Calls by path, D",),
    "misses": (
        "overview: Most misses, A",
        "tuning: What to add: misses by batch size, A",
        "tuning: What to add: misses by batch size, B",
    ),
    "graph series": (
        "overview: Calls by path, A",
        "overview: Graph calls by mode, A",
        "overview: Graph launches, B",
        "tuning: Largest bucket and largest batch, A",
        "tuning: Buckets, B",
    ),
    "graph calls": (
        "overview: Time by bucket, and the speed-up, A",
        "overview: Time by bucket, and the speed-up, B",
        "overview: Time by bucket, and the speed-up, C",
        "overview: Time of a forward, A",
        "overview: Time of a forward, C",
        "overview: Padding waste, A",
        "overview: Full graphs of decode steps, A",
        "overview: Decode steps by size and mode, A",
        "tuning: Padding by bucket, A",
        *(f"tuning: Buckets, {ref}" for ref in "CDEFG"),
    ),
    "failures": ("overview: Failed captures, A", "overview: Wrong results, A"),
    "captures": (
        "overview: Capture time by bucket, A",
        "overview: Graph pool, A",
        *(f"overview: What the start has made, {ref}" for ref in "ABC"),
        "tuning: Pool growth by bucket, A",
        *(f"tuning: Buckets, {ref}" for ref in "AHI"),
    ),
    "max_batch": ("overview: Uncovered sizes, A", "overview: What the start has made, F"),
    "KV capacity": ("overview: KV capacity, A", "overview: What the start has made, E"),
    "estimate": ("overview: Graph pool, B", "overview: What the start has made, D"),
    "unused buckets": ("tuning: What to drop: captured, never used, A",),
    "captured and unused": (
        "tuning: What to drop: captured, never used, B",
        "tuning: What to drop: captured, never used, C",
    ),
    "ranks": ("overview: Rank skew, A",),
    "hooks": ("overview: Hooks into engines, A", "overview: Hooks missing, A"),
    "launches": ("overview: Graph launches, A", "overview: Unconfirmed calls, A"),
    "rules": ("overview: Alerts firing, A",),
    "alerts": ("overview: Alerts that fire, A",),
}
"""What a target shows; one that is not here has something to show in every history."""


def test_what_panels_need_is_known() -> None:
    """The tables name targets that exist, each once, and every need is met in some history."""
    named = [name for names in NEEDS.values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) <= set(TARGETS)
    assert set().union(*LACKS.values()) <= set(NEEDS)
    assert not [need for need in NEEDS if all(need in lacks for lacks in LACKS.values())]


@pytest.mark.parametrize("narrow", [False, True], ids=["all", "one"])
@pytest.mark.parametrize("history", LACKS)
def test_every_panel_has_data(served: Served, history: str, narrow: bool) -> None:
    """With all of a history chosen, or one value of each variable: data, save where the history has none."""
    values = one(served, history) if narrow else everything(history)
    empty = {name for name in TARGETS if not asked(served, name, values)}
    assert {name for need in LACKS[history] for name in NEEDS[need]} == empty


@pytest.mark.parametrize("history", LACKS)
def test_variables_offer_what_is_there(served: Served, history: str) -> None:
    """Each offers the values of its history, after those before it; ranks only where processes have one."""
    for page in PAGES.values():
        job, *others = variables(page)
        values = everything(history)
        assert set(LACKS) == set(options(served, job, values))
        offered = {variable["name"]: options(served, variable, values) for variable in others}
        here = [process for process in served.processes if process.job == history]
        assert {process.instance for process in here} == set(offered["instance"])
        assert {process.rank for process in here} - {""} == set(offered["rank"])
        assert set(here[0].snapshots[served.end].forwards) == set(offered["forward"])


def test_idle_is_no_traffic(served: Served) -> None:
    """A ratio has no value, so the panel says so; a rate is 0."""
    values = everything("idle")
    for name, panel in PANELS.items():
        for target in panel["targets"]:
            found = asked(served, f"{name}, {target['refId']}", values)
            match panel["fieldConfig"]["defaults"]["unit"]:
                case "percentunit":
                    assert not found, name
                case "cps":
                    assert {0.0} >= set(found.values()), name
