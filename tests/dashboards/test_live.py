"""The whole chain: real exporters, Prometheus with our rules, Alertmanager, and a webhook that is told."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("torch")
yaml = pytest.importorskip("yaml")

from tests.dashboards import alert_page  # noqa: E402
from tests.dashboards.incident import ABSENT, LOW, RULES, Incident, play, shortened  # noqa: E402
from tests.dashboards.stack import ROOT  # noqa: E402


def rules() -> dict[str, Any]:
    """rules.yaml, read anew."""
    return yaml.safe_load(RULES.read_text())  # type: ignore[no-any-return]


RULE = next(rule for group in rules()["groups"] for rule in group["rules"] if rule.get("alert") == LOW)
PAGE = (ROOT / "docs" / "alert.md").read_text()
NUMBERS = re.compile(
    r"decode on (127\.0\.0\.1:\d+), rank 0: ([\d.]+)% of the calls in 5m were graph calls, 80% are expected\. "
    r"Most misses: batch size (\d+), (\w+), ([\d.]+) calls/s\."
)


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Incident:
    """One run of the story; every test reads what was seen. Skipped where a program is missing."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "GRAPHPROBE_LABELS", "GRAPHPROBE_BACKEND", "PROMETHEUS_MULTIPROC_DIR"):
            patch.delenv(name, raising=False)
        return play(tmp_path_factory.mktemp("incident"))


def test_the_alert_arrives_with_labels_texts_and_runbook(incident: Incident) -> None:
    """Everything that a person on call is given reaches the webhook, each alert in a notification of its own."""
    (alert,) = incident.alerts(alertname=LOW, status="firing")
    labels = dict(alert["labels"])
    address = labels.pop("instance")
    assert {"alertname": LOW, "job": "demo", "forward": "decode", "rank": "0", "severity": "warning"} == labels
    text = dict(alert["annotations"])
    found = NUMBERS.fullmatch(text.pop("description"))
    assert found is not None
    assert address == found[1]
    assert {key: RULE["annotations"][key] for key in ("summary", "runbook_url")} == text
    assert {1} == {len(payload["alerts"]) for payload in incident.payloads}


def test_its_numbers_are_those_that_the_engine_counted(incident: Incident) -> None:
    """The hit rate, and the batch size and reason of most misses, agree with the demo's own snapshot."""
    (alert,) = incident.alerts(alertname=LOW, status="firing")
    found = NUMBERS.fullmatch(alert["annotations"]["description"])
    assert found is not None
    counted = incident.counted.forwards["decode"]
    assert counted.hit_rate == pytest.approx(float(found[2]) / 100, abs=0.1)
    most = max((row for row in counted.rows if row.path == "eager"), key=lambda row: row.calls)
    assert (str(most.batch_size), str(most.reason)) == (found[3], found[4])


def test_it_resolves_when_padding_serves_the_sizes(incident: Incident) -> None:
    """The same alert ends once enough calls hit; until then it goes on, over a restart and a reset of the counters."""
    (fired,) = incident.alerts(alertname=LOW, status="firing")
    (resolved,) = incident.alerts(alertname=LOW, status="resolved")
    assert fired["labels"] == resolved["labels"]
    assert fired["startsAt"] == resolved["startsAt"] < resolved["endsAt"]
    firing, rates = incident.history["firing"], incident.history["hit rate"]
    began = min(firing)
    ended = min(second for second, rate in rates.items() if second > began and rate > 0.8)
    assert set(range(began, ended)) <= set(firing)


def test_only_the_engine_that_misses_is_named(incident: Incident) -> None:
    """A hit rate of 90 % beside it is known and raises nothing; a low one raises no alert about something else."""
    assert {"demo", "engine", "ranks"} == incident.rates.keys()
    assert 0.9 == pytest.approx(incident.rates["engine"], abs=0.02)
    names = {job: {a["labels"]["alertname"] for a in incident.alerts(job=job)} for job in incident.up}
    told = {"demo": {LOW, ABSENT, "GraphprobeHitRateBudgetBurn"}, "ranks": {ABSENT}}
    assert told == {job: found for job, found in names.items() if found}


@pytest.mark.parametrize(("job", "rank"), [("demo", "0"), ("ranks", "1")])
def test_a_process_that_is_gone_is_missed_until_it_is_back(incident: Incident, job: str, rank: str) -> None:
    """A killed one fires, rank and forward named, and resolves when it reports again.

    So does one of two that share an endpoint, on which its counters stay.
    """
    (fired,) = incident.alerts(alertname=ABSENT, job=job, status="firing")
    (resolved,) = incident.alerts(alertname=ABSENT, job=job, status="resolved")
    assert fired["fingerprint"] == resolved["fingerprint"]
    assert ("decode", rank, "info") == tuple(fired["labels"][key] for key in ("forward", "rank", "severity"))
    told = fired["annotations"]["description"]
    assert re.match(rf"decode on 127\.0\.0\.1:\d+, rank {rank}: has not reported for \S+s, but did within 1d\.", told)
    assert {1.0} == set(incident.up["ranks"])


def test_every_alert_ends(incident: Incident) -> None:
    """Of each that fired, the end arrived, that of the longest windows last."""
    fired, resolved = ([a["fingerprint"] for a in incident.alerts(status=s)] for s in ("firing", "resolved"))
    assert sorted(fired) == sorted(resolved)
    assert {"6h", "1d"} <= {a["labels"].get("long") for a in incident.alerts(status="resolved")}
    assert "1d" == incident.payloads[-1]["alerts"][0]["labels"].get("long")


def test_a_job_that_never_had_our_series_is_not_missed(incident: Incident) -> None:
    """Prometheus saw strangers, one that stays and one that was stopped with the demo; no alert is about them."""
    assert {"alertmanager", "stranger"} == {job for job, up in incident.up.items() if 1.0 in up} - {
        "demo",
        "engine",
        "ranks",
    }
    assert 0.0 == incident.up["stranger"][-1]
    assert [] == [*incident.alerts(job="alertmanager"), *incident.alerts(job="stranger")]


def test_every_rule_was_evaluated_without_an_error(incident: Incident) -> None:
    """Each look at the rules found them healthy, no evaluation failed, and every text could be filled in."""
    groups = rules()["groups"]
    names = [rule.get("record") or rule["alert"] for group in groups for rule in group["rules"]]
    assert sorted(names) == sorted(name.split()[1] for name in incident.health)
    assert {("ok", "")} == set().union(*incident.health.values())
    assert len(groups) == len(incident.failures)
    assert {0.0} == set(incident.failures.values())
    assert "<error" not in json.dumps(incident.payloads)


def test_what_runs_here_is_what_operators_get() -> None:
    """Only waits and intervals differ from rules.yaml."""

    def without_times(some: dict[str, Any]) -> list[dict[str, Any]]:
        times = ("for", "keep_firing_for")
        return [{k: v for k, v in r.items() if k not in times} for group in some["groups"] for r in group["rules"]]

    assert without_times(rules()) == without_times(shortened(rules()))


def test_the_page_is_what_its_script_says(incident: Incident) -> None:
    """docs/alert.md differs from what the script prints today in nothing but what was measured."""
    assert sentences(alert_page.page(incident)) == sentences(PAGE)


def test_the_page_shows_the_alert_as_the_rules_word_it() -> None:
    """The payload in docs/alert.md is one of today's rule."""
    (payload,) = (json.loads(block) for block in re.findall(r"^```json\n(.*?)^```$", PAGE, re.M | re.S))
    (alert,) = payload["alerts"]
    assert "firing" == payload["status"] == alert["status"]
    assert NUMBERS.fullmatch(alert["annotations"]["description"])
    assert RULE["annotations"]["summary"] == alert["annotations"]["summary"]
    assert RULE["annotations"]["runbook_url"] == alert["annotations"]["runbook_url"]
    assert RULE["labels"].items() <= alert["labels"].items()


def test_the_page_shows_the_end_of_every_alert() -> None:
    """Each line of its log that says firing has a later one that says resolved, of the same process."""
    found = re.findall(r"^ *([\d.]+)  (firing|resolved) (.*? on \S+, rank \d+):", PAGE, re.M)
    fired = {who: float(at) for at, status, who in found if status == "firing"}
    resolved = {who: float(at) for at, status, who in found if status == "resolved"}
    assert len(found) == 2 * len(fired) > 6
    assert fired.keys() == resolved.keys()
    assert all(fired[who] < resolved[who] for who in fired)


def sentences(text: str) -> list[str]:
    """A page without what was measured: its blocks, its tables and its numbers."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return [re.sub(r"\d[\d.]*\S*", "N", line) for line in prose.splitlines() if not line.startswith("|")]
