"""Prints docs/alert.md: alerts from the first miss to the end of the last one, as they happened.

python -m tests.dashboards.alert_page > docs/alert.md
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.dashboards.incident import EVERY, FOR, LOW, Incident, play

ROWS = 3
"""Seconds between two rows of the table."""


def page(incident: Incident) -> str:
    """The page about one incident."""
    versions = " and ".join(f"{name} {version}" for name, version in incident.versions.items())
    log = "\n".join(f"{at:6.1f}  {what}" for at, what in sorted(incident.log))
    return f"""# An alert, from the first miss to its end

What a run of `python -m tests.dashboards.alert_page` saw, with {versions}.
Prometheus scrapes `graphprobe demo`, evaluates [rules.yaml](../dashboards/rules.yaml) and tells Alertmanager, which
posts to a webhook on the same machine. The expressions are those that operators get; so that nobody waits, there is a
scrape and an evaluation every {EVERY}, and `for` and `keep_firing_for` are {FOR}.
`tests/dashboards/test_live.py` plays the same and holds each step against the counts of the demo itself.

The demo serves batches of 2 to 8 with buckets 1, 2, 4, 8 and 16, exact sizes only. It is stopped and started again
with `--pad`, so that a larger bucket serves the sizes in between. Two ranks of another engine share one endpoint, and
one of them is killed with the demo.

Here each alert is sent at once and by itself. The `alertmanager.yml` that `graphprobe dashboards` writes collects for
30 seconds what begins together, and keeps back a warning about a hit rate while a critical alert about the same one
fires: of the three at the same second one would arrive.

## Log

Seconds since the start. Each line with `firing` or `resolved` is a notification at the moment at which it arrived.

```
{log}
```

What `resolved` says is what was true last: its numbers are of the last moment at which the condition held, just beyond
the threshold, and not of its end.

## What Prometheus had meanwhile

The hit rate is that of 5 minutes, so it goes on while nobody counts, takes a restart for what it is, and rises as hits
outweigh the misses. Those of longer windows follow, the longer the later, so the alert about a day ends last.

| second | graph calls | eager calls | hit rate | {LOW} |
| ---: | ---: | ---: | ---: | --- |
{table(incident)}

## The first notification

```json
{json.dumps(first(incident), indent=2)}
```
"""


def first(incident: Incident) -> dict[str, Any]:
    """The payload with which the alert about the hit rate began."""
    (alert,) = incident.alerts(alertname=LOW, status="firing")
    return next(payload for payload in incident.payloads if alert in payload["alerts"])


def table(incident: Incident) -> str:
    """A row every few seconds, from the first scrape of the demo on."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows(incident))


def rows(incident: Incident) -> Iterator[tuple[str, ...]]:
    history = incident.history
    graph, eager = history["graph calls"], history["eager calls"]
    seconds = sorted(set().union(*history.values()))
    for second in range(seconds[0], seconds[-1] + 1, ROWS):
        calls = [f"{counted[second]:,.0f}" if second in counted else "" for counted in (graph, eager)]
        rate = f"{history['hit rate'][second]:.1%}" if second in history["hit rate"] else ""
        state = next((name for name in ("pending", "firing") if second in history[name]), "")
        yield str(second), *calls, rate, state


def main() -> None:
    """Play an incident and print the page about it."""
    with tempfile.TemporaryDirectory() as folder:
        print(page(play(Path(folder))), end="")


if __name__ == "__main__":
    main()
