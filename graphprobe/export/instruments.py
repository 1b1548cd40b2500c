"""Our instruments of one OpenTelemetry meter provider: what is observed when a reader collects, and the histogram."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator

from opentelemetry.metrics import Histogram, Meter, MeterProvider, Observation, get_meter_provider

from graphprobe import __version__, metrics
from graphprobe.errors import internal_error
from graphprobe.export.harvest import Harvest
from graphprobe.ledger import BOUNDS
from graphprobe.unhurried import unhurried

logger = logging.getLogger("graphprobe")

SCOPE = "graphprobe"
"""Name of the meter and of the tracer."""

WHERE = "export.otel"

FRESH = 10.0
"""Seconds after which a collection that was given up half way does not count any more."""


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """What a provider raises is a failure of ours, and never the host's."""
    try:
        yield
    except Exception as error:
        internal_error(WHERE, error)


class _Collection(threading.local):
    """One collection of one thread: what it has read, and which metrics have been asked for since."""

    def __init__(self) -> None:
        self.read = -math.inf
        self.asked: set[metrics.Metric] = set()
        self.found: dict[metrics.Metric, list[Observation]] = {}

    def of(self, metric: metrics.Metric, harvest: Harvest) -> list[Observation]:
        """The observations of a metric. Each is asked for once per collection: the second time is the next one."""
        if metric in self.asked or time.monotonic() - self.read > FRESH:
            self.asked, self.found = {metric}, {}
            try:
                self._read(harvest)
            finally:
                # Of its end: with many forwards, and a busy engine beside it, one reading may take long.
                self.read = time.monotonic()
        self.asked.add(metric)
        return self.found.get(metric, [])

    def _read(self, harvest: Harvest) -> None:
        samples, constant = harvest.samples(), harvest.constant()
        for sample in unhurried(samples):
            if not isinstance(sample.value, metrics.Distribution):
                observed = Observation(sample.value, {**sample.labels, **constant})
                self.found.setdefault(sample.metric, []).append(observed)


class Instruments:
    """Our instruments of one meter provider, made once: OpenTelemetry takes none back, so they outlive an exporter.

    ``given`` is None for the global provider, whichever that comes to be.
    """

    def __init__(self, given: MeterProvider | None) -> None:
        self.given = given
        self.harvest: Harvest | None = None
        """What is observed; None while no exporter runs."""
        self.histogram: Histogram | None = None
        self._collection = _Collection()
        with guarded():
            meter = self.provider.get_meter(SCOPE, __version__)
            for metric in metrics.CATALOGUE:
                with guarded():
                    self._make(meter, metric)

    @property
    def provider(self) -> MeterProvider:
        """The provider itself."""
        return get_meter_provider() if self.given is None else self.given

    def _make(self, meter: Meter, metric: metrics.Metric) -> None:
        if metric.kind == "histogram":
            self.histogram = _histogram(meter, metric)
        else:
            create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
            create(metric.otel_name, [lambda options: self._observed(metric)], metric.unit, metric.help)

    def _observed(self, metric: metrics.Metric) -> list[Observation]:
        found: list[Observation] = []
        harvest = self.harvest
        if harvest is not None:
            with guarded():
                found = self._collection.of(metric, harvest)
        return found


def _histogram(meter: Meter, metric: metrics.Metric) -> Histogram | None:
    name, unit, text = metric.otel_name, metric.unit, metric.help
    try:
        return meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=BOUNDS)
    except TypeError as error:
        # With the SDK's own bounds, of which the first above 0 is 5 s, every quantile would be wrong.
        logger.warning("%s is left out, its bounds need opentelemetry-api 1.30 or newer (%s)", name, error)
        return None


_known: weakref.WeakSet[Instruments] = weakref.WeakSet()


def instruments_of(given: MeterProvider | None) -> Instruments:
    """The instruments of a provider (None: the global one), made at its first use. Not for two threads at a time."""
    for known in _known:
        with guarded():
            if known.given is given or known.provider is (get_meter_provider() if given is None else given):
                return known
    made = Instruments(given)
    _known.add(made)
    return made
