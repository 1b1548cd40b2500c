"""An incident from beginning to end, on real programs.

The demo serves exact sizes only, so batches of 3 have no bucket, and its alert fires. It is stopped, which is an alert
of its own, and started again with padding: the alert resolves. With it one of two ranks that share an endpoint is
killed, and started again. Beside them are an engine that is well and an exporter of something else that is stopped with
the demo; no alert may name them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from graphprobe.snapshot import Snapshot
from graphprobe.tools import sources
from tests.dashboards.stack import OPENER, ROOT, Alertmanager, Prometheus, Webhook, free_port, until
from tests.dashboards.targets import command, demo, engine, rank, stranger

RULES = ROOT / "dashboards" / "rules.yaml"
LOW, ABSENT = "GraphprobeHitRateLow", "GraphprobeMetricsAbsent"
EVERY, FOR = "1s", "4s"
"""Between two scrapes or evaluations; how long an alert is pending, and is kept firing."""

HIT_RATE = "job_instance_rank_forward:graphprobe_hit_rate:ratio_rate5m"
HISTORY = {
    "graph calls": 'sum(graphprobe_graph_calls_total{job="demo"})',
    "eager calls": 'sum(graphprobe_eager_calls_total{job="demo",reason!="warmup"})',
    "hit rate": f'{HIT_RATE}{{job="demo"}}',
    "pending": f'ALERTS{{job="demo",alertname="{LOW}",alertstate="pending"}}',
    "firing": f'ALERTS{{job="demo",alertname="{LOW}",alertstate="firing"}}',
}
"""What is looked up for each second when all is over."""


def shortened(rules: dict[str, Any]) -> dict[str, Any]:
    """The same rules, evaluated every second, with short waits; what is evaluated stays as it is."""
    for group in rules["groups"]:
        group["interval"] = EVERY
        for rule in group["rules"]:
            rule |= {key: FOR for key in ("for", "keep_firing_for") if key in rule}
    return rules


def routing(webhook: str) -> str:
    """The configuration of Alertmanager: each alert at once, and by itself."""
    route = {"receiver": "hook", "group_by": ["..."], "group_wait": "0s", "group_interval": EVERY}
    return json.dumps({"route": route, "receivers": [{"name": "hook", "webhook_configs": [{"url": webhook}]}]})


def scraping(targets: dict[str, str], alertmanager: str, folder: Path) -> str:
    """The configuration of Prometheus: a job for each address, and for Alertmanager, which is one more stranger."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(shortened(yaml.safe_load(RULES.read_text()))))
    jobs = {job: [{"targets": [address]}] for job, address in {**targets, "alertmanager": alertmanager}.items()}
    return json.dumps(
        {
            "global": {"scrape_interval": EVERY, "scrape_timeout": EVERY, "evaluation_interval": EVERY},
            "rule_files": [str(folder / "rules.yaml")],
            "alerting": {"alertmanagers": [{"static_configs": jobs["alertmanager"]}]},
            "scrape_configs": [{"job_name": job, "static_configs": where} for job, where in jobs.items()],
        }
    )


@dataclass
class Incident:
    """What was seen; times are seconds since the start."""

    start: float = field(default_factory=time.time)
    versions: dict[str, str] = field(default_factory=dict)
    log: list[tuple[float, str]] = field(default_factory=list)
    payloads: list[dict[str, Any]] = field(default_factory=list)
    """The notifications as the webhook received them."""
    health: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    """By rule: each health and last error that Prometheus reported."""
    counted: Snapshot = field(default_factory=lambda: Snapshot({}))
    """What the demo itself had counted when its alert arrived."""
    rates: dict[str, float] = field(default_factory=dict)
    """The hit rates by job, as Prometheus had them then."""
    failures: dict[str, float] = field(default_factory=dict)
    """By group of rules: evaluations that failed, as Prometheus counts them itself."""
    up: dict[str, list[float]] = field(default_factory=dict)
    """By job: whether its target answered, second by second."""
    history: dict[str, dict[int, float]] = field(default_factory=dict)
    """The queries of HISTORY: the value in each second in which there is one."""

    def say(self, what: str, when: float | None = None) -> None:
        """Keep a line of the log."""
        self.log.append(((when or time.time()) - self.start, what))

    def alerts(self, **labels: str) -> list[dict[str, Any]]:
        """The alerts that arrived with these labels; ``status`` counts as one."""
        alerts = [alert for payload in self.payloads for alert in payload["alerts"]]
        return [a for a in alerts if labels.items() <= {**a["labels"], "status": a["status"]}.items()]


def play(folder: Path) -> Incident:
    """Everything described above; takes about 70 seconds."""
    return _Story(folder).tell()


class _Story:
    def __init__(self, folder: Path) -> None:
        self.seen, self.folder = Incident(), folder
        self.ports = {job: free_port() for job in ("demo", "ranks", "engine", "stranger")}
        self.targets = {job: f"127.0.0.1:{port}" for job, port in self.ports.items()}

    def tell(self) -> Incident:
        with contextlib.ExitStack() as stack:
            self.hook = stack.enter_context(Webhook())
            alertmanager = stack.enter_context(Alertmanager(routing(self.hook.url), self.folder / "alertmanager"))
            config = scraping(self.targets, alertmanager.address, self.folder)
            self.prometheus = stack.enter_context(Prometheus(config, self.folder / "prometheus"))
            self.seen.versions["Prometheus"] = self.prometheus.get("/api/v1/status/buildinfo")["version"]
            self.seen.versions["Alertmanager"] = alertmanager.get("/api/v2/status")["versionInfo"]["version"]
            stack.enter_context(engine(self.ports["engine"]))
            stack.enter_context(self.rank("0"))
            self.incident()
            self.look_back()
        return self.seen

    def incident(self) -> None:
        with stranger(self.ports["stranger"]), self.demo(), self.rank("1"):
            self.arrives("demo", LOW, "firing")
            self.seen.counted = sources.read(f"http://{self.targets['demo']}")
            found = self.prometheus.query(HIT_RATE)
            self.seen.rates = {series["metric"]["job"]: float(series["value"][1]) for series in found}
        self.seen.say("the demo is stopped, and rank 1 of the two that share an endpoint")
        self.arrives("demo", ABSENT, "firing")
        self.arrives("ranks", ABSENT, "firing")
        with self.rank("1"), self.demo("--pad"):
            self.all_end()

    @contextlib.contextmanager
    def demo(self, *options: str) -> Iterator[None]:
        port = self.ports["demo"]
        self.seen.say(f"graphprobe {' '.join(command(port, *options))}")
        with demo(port, self.folder, *options):
            self.seen.say(f"it serves http://{self.targets['demo']}/metrics")
            yield

    @contextlib.contextmanager
    def rank(self, number: str) -> Iterator[None]:
        with rank(number, self.ports["ranks"], self.folder):
            self.seen.say(f"rank {number} of two is on http://{self.targets['ranks']}/metrics")
            yield

    def arrives(self, job: str, alertname: str, status: str) -> None:
        """Wait until the webhook has this alert; the health of the rules is looked at meanwhile."""

        def arrived() -> bool:
            self.look()
            return bool(self.seen.alerts(alertname=alertname, job=job, status=status))

        until(arrived, 120, f"{alertname} of {job} {status}")

    def all_end(self) -> None:
        """Wait until every alert that fired has resolved; the windows of days forget the misses last."""

        def ended() -> bool:
            self.look()
            fired, resolved = (self.seen.alerts(status=status) for status in ("firing", "resolved"))
            return {alert["fingerprint"] for alert in fired} == {alert["fingerprint"] for alert in resolved}

        until(ended, 240, "the end of every alert")

    def look(self) -> None:
        self.look_at_rules()
        self.take_notifications()

    def look_at_rules(self) -> None:
        groups = self.prometheus.get("/api/v1/rules")["groups"]
        for number, rule in enumerate(rule for group in groups for rule in group["rules"]):
            state = (rule["health"], rule.get("lastError", ""))
            self.seen.health.setdefault(f"{number} {rule['name']}", set()).add(state)

    def take_notifications(self) -> None:
        for when, payload in self.hook.received[len(self.seen.payloads) :]:
            self.seen.payloads.append(payload)
            for alert in payload["alerts"]:
                labels, text = alert["labels"], alert["annotations"]["description"]
                which = f" ({labels['long']})" if "long" in labels else ""
                self.seen.say(f"{alert['status']} {labels['alertname']}{which}: {text}", when)

    def look_back(self) -> None:
        with OPENER.open(f"{self.prometheus.url}/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        failed = [s for f in families for s in f.samples if s.name == "prometheus_rule_evaluation_failures_total"]
        self.seen.failures = {sample.labels["rule_group"]: sample.value for sample in failed}
        for series in self.each_second("up"):
            self.seen.up[series["metric"]["job"]] = [float(value) for _, value in series["values"]]
        for name, query in HISTORY.items():
            samples = [sample for series in self.each_second(query) for sample in series["values"]]
            self.seen.history[name] = {round(at - self.seen.start): float(value) for at, value in samples}

    def each_second(self, query: str) -> list[dict[str, Any]]:
        return self.prometheus.query_range(query, self.seen.start, time.time(), 1)
