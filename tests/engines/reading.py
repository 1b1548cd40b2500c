"""What stands on an engine's page of metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.dashboards.stack import until
from tests.engines.serving import fetch

CALLS = ("graphprobe_graph_calls_total", "graphprobe_eager_calls_total")


def samples(page: str, *names: str) -> Iterator[Sample]:
    """Those of these names; all where none is given."""
    found = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return (sample for sample in found if not names or sample.name in names)


def series(page: str, prefix: str) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Names and labels, without the values."""
    return {(one.name, frozenset(one.labels.items())) for one in samples(page) if one.name.startswith(prefix)}


def value(page: str, name: str) -> float:
    """The sum over all series of a name, which must be there."""
    values = [one.value for one in samples(page, name)]
    assert values, f"no {name} on the page"
    return sum(values)


def calls(page: str, label: str, forward: str = "vllm") -> dict[str, int]:
    """Calls of a forward by one label; series that are still at 0 do not count."""
    found: Counter[str] = Counter()
    for one in samples(page, *CALLS):
        if one.labels["forward"] == forward and one.value:
            found[one.labels.get(label, "")] += int(one.value)
    return dict(found)


def settled(url: str, least: int = 1, forward: str = "vllm") -> str:
    """A server's page once so many ranks have counted, and nothing has changed for longer than our files wait."""
    seen: list[tuple[float, dict[str, int]]] = []

    def quiet() -> str:
        page = fetch(f"{url}/metrics")
        counted = calls(page, "rank", forward)
        if not seen or seen[-1][1] != counted:
            seen.append((time.monotonic(), counted))
        return page if len(counted) >= least and time.monotonic() - seen[-1][0] > 3 else ""

    return until(quiet, 30, f"calls of the forward {forward} that stay as they are")
