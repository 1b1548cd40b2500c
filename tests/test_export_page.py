"""A page is what prometheus_client writes, byte for byte, whatever was kept of the last one."""

from __future__ import annotations

import gzip
import random
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import choose_encoder

from graphprobe import metrics
from graphprobe.export.exporter import start_exporter
from graphprobe.export.page import FORMATS, Writer
from graphprobe.export.prometheus import Collector, register
from graphprobe.ledger import Ledger
from graphprobe.observe import Probe, observe

ACCEPTED = (
    "",
    "text/plain; version=1.0.0; escaping=allow-utf-8",
    "application/openmetrics-text; version=1.0.0",
    "application/openmetrics-text; version=1.0.0; escaping=dots",
)

NAME = 'a"b\\c\nd {e="f"} \u2028 #\x0b é'


def more(probe: Probe, seed: int) -> None:
    """Counts, sizes and times that were not there before."""
    dice = random.Random(seed)
    for _ in range(20):
        bucket = dice.choice((1, 4, 72))
        probe.graph_call(dice.randint(1, bucket), bucket, dice.choice(("full", "piecewise")))
        probe.eager_call(dice.randint(1, 90), "unknown", f"p{seed}")
        probe.forward.time("graph", bucket, 10 ** dice.uniform(-6, 2), mode="full")
    probe.forward.captured(4, "ok", dice.random(), -dice.randrange(10**9))


@pytest.fixture
def registry(ledger: Ledger) -> CollectorRegistry:
    """Our metrics beside one of the engine's."""
    found = CollectorRegistry()
    Gauge("engine_load", "The engine's own.", ["core"], registry=found).labels("0").set(1e9)
    register(found, ledger)
    return found


@pytest.mark.parametrize("accepted", ACCEPTED)
def test_a_page_is_the_clients(ledger: Ledger, registry: CollectorRegistry, accepted: str) -> None:
    """The first time, with other values, with new series, and when labels begin to fold."""
    encoder, form = choose_encoder(accepted)
    writer = Writer(encoder, form)
    probe = observe(NAME, [1, 4, 72], ledger=ledger)
    for seed in range(40):
        assert writer.page(registry) == encoder(registry)
        probe.graph_call(1, 1)
        assert writer.page(registry) == encoder(registry)
        more(probe, seed)
    assert metrics.forward_samples(probe.snapshot())[1] > 0


def test_two_formats_at_once(ledger: Ledger, registry: CollectorRegistry) -> None:
    """What is kept of one format never shows in another."""
    more(observe(NAME, [1, 4, 72], ledger=ledger), 1)
    writers = [(encoder, Writer(encoder, form)) for encoder, form in map(choose_encoder, ACCEPTED)]
    for encoder, writer in writers * 2:
        assert writer.page(registry) == encoder(registry)


def test_what_a_reader_does_to_its_samples_shows_on_no_page(ledger: Ledger, registry: CollectorRegistry) -> None:
    """A collector that relabels ours on the way has labels of its own."""
    observe("decode", [1, 4], ledger=ledger).graph_call(1, 1)
    before = generate_latest(registry)
    for family in registry.collect():
        for sample in family.samples:
            sample.labels["mine"] = "x"
    assert generate_latest(registry) == before


def test_any_number_of_formats_is_served(ledger: Ledger) -> None:
    """Clients may ask for versions that do not exist: the text of a few formats is kept, and the others are served."""
    observe("decode", [1, 4], ledger=ledger).graph_call(1, 1)
    with start_exporter(0, ledger=ledger) as running:
        for minor in range(2 * FORMATS):
            headers = {"Accept": f"application/openmetrics-text; version=1.{minor}.0"}
            with urllib.request.urlopen(urllib.request.Request(f"{running.url}/metrics", headers=headers)) as answer:
                assert f"version=1.{minor}.0" in answer.headers["Content-Type"]
                assert answer.read().endswith(b"# EOF\n")


@pytest.mark.parametrize("query", ["", "?name[]=graphprobe_graph_calls_total"])
def test_a_page_may_be_compressed(ledger: Ledger, query: str) -> None:
    """gzip where the client takes it, with the same page inside."""
    observe("decode", [1, 4], ledger=ledger).graph_call(1, 1)
    with start_exporter(0, ledger=ledger) as running:
        url = f"{running.url}/metrics{query}"
        with urllib.request.urlopen(url) as plain:
            page = plain.read()
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})) as packed:
            assert packed.headers["Content-Encoding"] == "gzip"
            assert gzip.decompress(packed.read()) == page


def test_a_collector_may_put_other_samples_in_our_families(ledger: Ledger) -> None:
    """One that wraps ours, say: what it has made of a family is written, by the client."""
    observe("decode", [2], ledger=ledger).graph_call(2, 2)
    inner = Collector(ledger)

    class Wrapping:
        def collect(self) -> Iterator[Any]:
            for family in inner.collect():
                family.samples = [s._replace(labels={**s.labels, "zone": "a"}) for s in family.samples]
                family.add_sample(f"{family.name}_more", {"zone": "b"}, 1.0)
                yield family

    registry = CollectorRegistry()
    registry.register(Wrapping())
    encoder, form = choose_encoder("text/plain; version=0.0.4")
    for _ in range(2):
        page = Writer(encoder, form).page(registry)
        assert page == encoder(registry)
        assert b'zone="a"' in page
        assert b'zone="b"' in page
