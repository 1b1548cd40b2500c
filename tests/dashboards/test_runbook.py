"""The runbook: a section for each alert, complete, with panels that exist and queries that answer what is asked."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from graphprobe.metrics import EAGER_CALLS, GRAPH_CALLS
from graphprobe.options import Options
from graphprobe.reasons import FallbackReason
from graphprobe.tools.vllm import ITERATIONS

pytest.importorskip("yaml")
pytest.importorskip("promql_parser")

from tests.dashboards.alerts import ALERTS, QUERIES, RUNBOOK, anchors, selectors
from tests.dashboards.labels import DASHBOARDS, ENGINES, matches
from tests.dashboards.served import Served

ROOT = DASHBOARDS.parent
INTRODUCTION, *SECTIONS = re.split(r"^## ", RUNBOOK, flags=re.M)
TITLES = r"(Overview|Tuning), ((?:\"[^\"]+\"(?:, | and )?)+)"
"""Where panels are named: the dashboard, then their titles."""

each_section = pytest.mark.parametrize("section", SECTIONS, ids=lambda text: str(text.partition("\n")[0]))


def test_every_section_is_an_alert() -> None:
    """In the order of the rules; links within the page lead somewhere."""
    assert list(dict.fromkeys(alert["alert"] for alert in ALERTS)) == [text.partition("\n")[0] for text in SECTIONS]
    assert set(re.findall(r"\]\(#(.+?)\)", RUNBOOK)) <= set(anchors(RUNBOOK))


@each_section
def test_a_section_is_complete(section: str) -> None:
    """What it means, how urgent it is, what to look at, a panel first, and what to do."""
    parts = ["What it means", "How urgent", "What to look at", "What to do"]
    assert parts == re.findall(r"^\*\*([^*]+)\.\*\*", section, re.M)
    assert re.search(rf"^\*\*What to look at\.\*\* {TITLES}", section, re.M)


@each_section
def test_urgency_is_that_of_the_severity(section: str) -> None:
    """What is critical wakes someone; what is not waits until morning."""
    said = " ".join(section.partition("**How urgent.**")[2].partition("\n\n")[0].split()).lower()
    severities = {alert["labels"]["severity"] for alert in ALERTS if section.startswith(f"{alert['alert']}\n")}
    assert ("critical" in severities) == bool(re.match(r"(`critical` )?wakes someone", said))
    assert (severities != {"critical"}) == ("until morning" in said)


def test_panels_that_are_named_exist() -> None:
    """Each on the dashboard under whose name it stands; nothing else in the page's prose is in quotes."""
    prose = " ".join(re.sub(r"^```.*?^```$|`[^`]*`", "", RUNBOOK, flags=re.S | re.M).split())
    named = re.findall(TITLES, prose)
    for page, text in named:
        panels = json.loads((DASHBOARDS / f"{page.lower()}.json").read_text())["panels"]
        panels += [inner for panel in panels for inner in panel.get("panels", ())]
        assert set(re.findall(r'"([^"]+)"', text)) <= {panel["title"] for panel in panels}
    assert prose.count('"') == sum(text.count('"') for _, text in named)


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_about_what_the_alert_names(query: str) -> None:
    """Its job, and its rank wherever its forward and instance are; a list has its most frequent first, and no 0."""
    for selector, _ in selectors(query):
        named = {matcher.name for matcher in selector.matchers.matchers if matcher.value == "..."}
        assert "job" in named
        assert "rank" in named or not {"instance", "forward"} <= named
    assert query.startswith("sort_desc") or "eager_calls" not in query
    assert query.endswith("> 0)") or not query.startswith("sort_desc(sum")


def answer(served: Served, query: str, job: str) -> list[dict[str, str]]:
    """What a query gets whose dots are replaced as the page says, in its order."""
    (process, *_) = (process for process in served.processes if process.job == job)
    known = {**process.labels, "rank": process.rank, "forward": "decode"}
    for label, value in known.items():
        query = query.replace(f'{label}="..."', f'{label}="{value}"')
    return [series["metric"] for series in served.prometheus.query(query, at=served.end)]


def test_misses_are_listed_by_how_often_they_came(served: Served) -> None:
    """Those that count, without zeros; an engine whose graphs are switched off has none."""
    (query,) = (query for query in QUERIES if query.startswith("sort_desc(sum by (batch_size, reason)"))
    found = {job: [(m["batch_size"], m["reason"]) for m in answer(served, query, job)] for job in ("degraded", "off")}
    assert {"degraded": [("3", "no_exact_bucket"), ("16", "capture_failed")], "off": []} == found


@pytest.mark.parametrize(
    ("own", "counted"),
    [(ITERATIONS, {"vllm"}), ("sglang:cuda_graph_passes_total", {"sglang", "sglang.prefill"})],
)
def test_steps_are_held_against_what_the_engine_counts(own: str, counted: set[str]) -> None:
    """Of one query: each rank's steps on both paths, in every phase, over the iterations of all engines."""
    (query,) = (query for query in QUERIES if own in {selector.name for selector, _ in selectors(query)})
    assert own in ENGINES
    named = {selector.name: selector for selector, _ in selectors(query)}
    assert {GRAPH_CALLS.name, EAGER_CALLS.name, own} == set(named)
    forwards = ("vllm", "vllm.drafter", "sglang", "sglang.prefill", "sglang.drafter", "sglang.drafter.prefill")
    for name in (GRAPH_CALLS.name, EAGER_CALLS.name):
        assert {"job", "instance", "forward"} == {matcher.name for matcher in named[name].matchers.matchers}
        assert counted == {forward for forward in forwards if matches(named[name], "forward", forward)}


@pytest.mark.parametrize(
    ("title", "sources"),
    [("vLLM", ("vllm_answers",)), ("SGLang", ("sglang_reasons", "sglang_passes"))],
)
def test_reasons_that_an_engine_gives_have_advice_in_its_words(title: str, sources: tuple[str, ...]) -> None:
    """Each that its integration can give, save those that do not count and the one that is no reason."""
    (table,) = re.findall(rf"^In {title}:\n\n(.*?)\n\n", SECTIONS[0], re.M | re.S)
    texts = [(ROOT / "integrations" / f"graphprobe_{name}.py").read_text() for name in sources]
    given = {FallbackReason[name] for text in texts for name in re.findall(r"FallbackReason\.([A-Z_]+)", text)}
    told = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*\|", table, re.M))))
    assert {str(r) for r in given if r.counted} - {"unknown"} == told


def test_an_empty_answer_is_an_engine_that_does_not_say(served: Served) -> None:
    """Of an engine that captures through graphprobe there is one about each graph, of others none."""
    (query,) = (query for query in QUERIES if "graphprobe_bucket_captured" in query)
    assert 5 == len(answer(served, query, "degraded"))
    assert [] == answer(served, query, "eager-only")


def test_there_is_advice_for_every_reason_that_counts() -> None:
    """And those that do not count are listed."""
    for reason in FallbackReason:
        assert f"`{reason}`" in (SECTIONS[0] if reason.counted else INTRODUCTION), reason


def test_options_of_graphprobe_are_spelled_as_they_are() -> None:
    """Every keyword that the page names is one of capture."""
    named = set(re.findall(r"`(\w+)=(?!\")", RUNBOOK))
    assert {"buckets", "verify"} <= named <= {field.name for field in dataclasses.fields(Options)}
