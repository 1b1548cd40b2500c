"""Prometheus: a collector over the ledger.

A scrape copies the ledger in the exporter's thread. It takes no lock that a forward takes and touches no device.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Iterator, Sequence

import prometheus_client
from prometheus_client.registry import CollectorRegistry
from prometheus_client.utils import floatToGoString

from graphprobe import metrics
from graphprobe.errors import ConfigError
from graphprobe.export.harvest import Harvest
from graphprobe.export.page import Family, Line
from graphprobe.ledger import BOUNDS, LEDGER, Ledger
from graphprobe.unhurried import unhurried

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
            yield _family(metric)

    def collect(self) -> Iterator[Family]:
        """The families that have samples now."""
        samples, constant = self._harvest.samples(), self._harvest.constant()
        found: dict[metrics.Metric, Family] = {}
        for series, value in unhurried(samples):
            family = found.get(series.metric) or found.setdefault(series.metric, _family(series.metric))
            if series.kept is None:
                series.kept = _lines(series.metric, {**series.labels, **constant})
            family.add(series.kept, _values(value))
        for metric in metrics.CATALOGUE:
            if metric in found:
                yield found[metric]


def _lines(metric: metrics.Metric, labels: dict[str, str]) -> list[Line]:
    if metric.kind != "histogram":
        return [Line(metric.name, labels)]
    bounds = [Line(f"{metric.name}_bucket", {**labels, "le": le}) for le in LE]
    return [*bounds, Line(f"{metric.name}_count", labels), Line(f"{metric.name}_sum", labels)]


def _values(value: metrics.Value) -> Sequence[float]:
    if not isinstance(value, metrics.Distribution):
        return (value,)
    below = [float(count) for count in itertools.accumulate(value.counts)]
    return [*below, below[-1], value.sum]


def _family(metric: metrics.Metric) -> Family:
    return Family(metric.family, metric.help, metric.kind, metrics.UNITS.get(metric.unit, ""))


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
