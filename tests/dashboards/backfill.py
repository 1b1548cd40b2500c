"""What Prometheus would have scraped of engines, written into blocks: graphprobe counts, its collector exposes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest

from graphprobe.export.prometheus import Collector
from graphprobe.ledger import Ledger
from graphprobe.metrics import constant_labels
from graphprobe.snapshot import Snapshot

STEP = 60
"""Seconds between two scrapes."""

Traffic = Callable[[int], None]
"""What a process counts in a step."""

Engine = Callable[[Ledger], Traffic]

Histories = Mapping[str, Sequence[tuple[Engine, int, str]]]
"""Job -> its processes: what each does, its port, its rank."""

SEEN = "job_instance_rank_forward:graphprobe_seen:timestamp"


class Alert(NamedTuple):
    """What rules.yaml makes fire: of which rank, in which step its expression becomes true, after how many it fires."""

    name: str
    severity: str
    rank: str = ""
    begins: int = 0
    waits: int = 0


class Process:
    """One scraped process of a job, and what it had counted at each scrape."""

    def __init__(self, job: str, engine: Engine, port: int, rank: str) -> None:
        self.job, self.engine, self.rank = job, engine, rank
        self.instance = f"10.0.0.1:{port}"
        self.labels = {"job": job, "instance": self.instance, **constant_labels({"RANK": rank})}
        self.snapshots: dict[int, Snapshot] = {}

    def live(self, times: Iterable[int]) -> list[tuple[int, Metric]]:
        """Every family at each of these times."""
        ledger = Ledger()
        collector = Collector(ledger)
        step = self.engine(ledger)
        found = []
        for index, when in enumerate(times):
            step(index)
            self.snapshots[when] = ledger.snapshot()
            found += [(when, family) for family in collector.collect()]
        return found


class Page:
    """What was scraped, series by series: promtool wants the samples of one together."""

    def __init__(self) -> None:
        self.families: dict[str, Metric] = {}
        self.points: dict[str, dict[object, list[tuple[float, int]]]] = {}

    def add(self, when: int, family: Metric, labels: dict[str, str]) -> None:
        """One scrape of one family, from the process with these labels."""
        page = self.families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        known = self.points.setdefault(family.name, {})
        for sample in family.samples:
            key = (sample.name, *sample.labels.items(), *labels.items())
            if key not in known:
                page.add_sample(sample.name, {**sample.labels, **labels}, 0)
            known.setdefault(key, []).append((sample.value, when))

    def collect(self) -> Iterable[Metric]:
        """Each series once; so the client writes the labels, and the text of a series only once."""
        return self.families.values()

    def text(self) -> str:
        """OpenMetrics, every sample with its time."""
        series = (points for family in self.points.values() for points in family.values())
        found = []
        for line in generate_latest(self).decode().splitlines():
            # The client writes a colon in the name of a sample as an underscore.
            head = line.rpartition(" ")[0].replace(SEEN.replace(":", "_"), SEEN)
            more = [f"{head} {value} {when}" for value, when in next(series)] if line[0] != "#" else [line]
            found += more
        return "\n".join([*found, ""])


def evaluated(process: Process, times: Sequence[int], alerts: Iterable[Alert]) -> list[tuple[int, Metric]]:
    """What Prometheus writes of a process where it evaluates rules.yaml: what it recorded, and the alerts."""
    labels = {**process.labels, "forward": "decode"}
    found = [(when, series(SEEN, labels, when)) for when in times]
    for alert in alerts:
        about = {**labels, "alertname": alert.name, "severity": alert.severity}
        for index, when in enumerate(times[alert.begins :]):
            state = "firing" if index >= alert.waits else "pending"
            found.append((when, series("ALERTS", {**about, "alertstate": state}, 1)))
            found.append((when, series("ALERTS_FOR_STATE", about, times[alert.begins])))
    return found


def series(name: str, labels: dict[str, str], value: float) -> Metric:
    """A family of one sample."""
    family = Metric(name, "", "gauge")
    family.add_sample(name, labels, value)
    return family


@contextlib.contextmanager
def _nothing_of_this_machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        for name in ("RANK", "GRAPHPROBE_LABELS"):
            environment.delenv(name, raising=False)
        environment.setenv("GRAPHPROBE_STRICT", "1")
        yield


def backfill(
    promtool: str, data: Path, times: Sequence[int], histories: Histories, alerts: Mapping[str, Sequence[Alert]]
) -> list[Process]:
    """Write every history into blocks under ``data``, a scrape at each time; the processes have their snapshots.

    ``alerts`` has the jobs whose rules are evaluated.
    """
    found = [Process(job, *process) for job, processes in histories.items() for process in processes]
    page = Page()
    with _nothing_of_this_machine():
        for process in found:
            for when, family in process.live(times):
                page.add(when, family, process.labels)
    for process in found:
        if process.job in alerts:
            here = [alert for alert in alerts[process.job] if alert.rank == process.rank]
            for when, family in evaluated(process, times, here):
                page.add(when, family, {})
    file = data / "history.om"
    file.write_text(page.text())
    command = [promtool, "tsdb", "create-blocks-from", "openmetrics", str(file), str(data)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 0 == ran.returncode, ran.stdout + ran.stderr
    return found
