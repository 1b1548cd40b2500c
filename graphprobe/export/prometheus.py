"""Prometheus: a collector over the ledger.

A scrape copies the ledger in the exporter's thread. It takes no lock that a forward takes and touches no device.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping

import prometheus_client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import CollectorRegistry
from prometheus_client.utils import floatToGoString

from graphprobe import metrics
from graphprobe.errors import ConfigError
from graphprobe.export.harvest import Harvest
from graphprobe.ledger import BOUNDS, LEDGER, Ledger

logger = logging.getLogger("graphprobe")

LE: tuple[str, ...] = tuple(floatToGoString(b) for b in (*BOUNDS, float("inf")))  # type: ignore[no-untyped-call]
"""The ``le`` labels, as Prometheus itself writes floats."""


class Collector:
    """Exposes a ledger to a registry of prometheus_client."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._harvest = Harvest(ledger, "export.prometheus")
        self.ledger = self._harvest.ledger

    def describe(self) -> Iterator[Family]:
        """Every family of the contract without samples: makes a second registration and ``name[]`` work."""
        for metric in metrics.CATALOGUE:
            yield _family(metric, ())

    def collect(self) -> Iterator[Family]:
        """The families that have samples now."""
        found: dict[metrics.Metric, list[metrics.Sample]] = {}
        for sample in self._harvest.samples():
            found.setdefault(sample.metric, []).append(sample)
        constant = self._harvest.constant()
        for metric in metrics.CATALOGUE:
            if metric in found:
                # The client writes a family before it asks for the next one.
                time.sleep(0)
                yield _filled(metric, found[metric], constant)


def _filled(metric: metrics.Metric, found: list[metrics.Sample], constant: Mapping[str, str]) -> Family:
    family = _family(metric, (*metric.labels, *constant))
    for sample in found:
        _add(family, {**sample.labels, **constant}, sample.value)
    return family


def _family(metric: metrics.Metric, labels: tuple[str, ...]) -> Family:
    name, unit = metric.family, metrics.UNITS.get(metric.unit, "")
    if metric.kind == "counter":
        return CounterMetricFamily(name, metric.help, labels=labels, unit=unit)
    if metric.kind == "gauge":
        return GaugeMetricFamily(name, metric.help, labels=labels, unit=unit)
    if metric.kind == "histogram":
        return HistogramMetricFamily(name, metric.help, labels=labels, unit=unit)
    return InfoMetricFamily(name, metric.help)


def _add(family: Family, labels: dict[str, str], value: metrics.Value) -> None:
    if isinstance(family, InfoMetricFamily):
        family.add_metric([], labels)
    elif isinstance(family, HistogramMetricFamily):
        assert isinstance(value, metrics.Distribution)
        family.add_metric(list(labels.values()), _cumulative(value.counts), value.sum)
    elif isinstance(family, (CounterMetricFamily, GaugeMetricFamily)):
        assert not isinstance(value, metrics.Distribution)
        family.add_metric(list(labels.values()), value)


def _cumulative(counts: tuple[int, ...]) -> list[tuple[str, float]]:
    total, found = 0, []
    for le, count in zip(LE, counts, strict=True):
        total += count
        found.append((le, float(total)))
    return found


# Kept where this module is loaded again: the registries still have their collectors.
_registered: weakref.WeakKeyDictionary[CollectorRegistry, Collector] = globals().get(
    "_registered", weakref.WeakKeyDictionary()
)


def register(registry: CollectorRegistry | None = None, ledger: Ledger | None = None) -> Collector:
    """Expose a ledger in ``registry`` (default: prometheus_client's own). A second call for the same one does nothing.

    ConfigError where the registry already exposes another ledger or metrics of these names.
    """
    registry = prometheus_client.REGISTRY if registry is None else registry
    if not isinstance(registry, CollectorRegistry):
        raise ConfigError(f"registry must be a CollectorRegistry, got {registry!r}", "pass prometheus_client.REGISTRY")
    if registry is prometheus_client.REGISTRY and os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        hint = "what start_exporter(port=None, directory=...) writes there is shown"
        logger.warning("PROMETHEUS_MULTIPROC_DIR is set: a page made from it shows no collector; %s", hint)
    known = _registered.get(registry)
    if known is not None and known.ledger is not (LEDGER if ledger is None else ledger):
        raise ConfigError("this registry already exposes another ledger", "give each ledger a CollectorRegistry()")
    collector = known or Collector(ledger)
    try:
        registry.register(collector)
    except ValueError as error:
        # Names that are taken are expected of a collector that is still registered, and of no other.
        if known is None:
            raise ConfigError(f"the registry has metrics of these names: {error}", "pass another registry") from error
    _registered[registry] = collector
    return collector
