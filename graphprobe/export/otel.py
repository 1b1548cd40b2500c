"""OpenTelemetry: observable instruments over a ledger, a duration histogram, and a span for each capture.

Only the API is imported. Without an SDK nothing is recorded; one that is set up later is served from then on.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading

from opentelemetry import context, trace
from opentelemetry.metrics import MeterProvider, get_meter_provider

from graphprobe import __version__, metrics
from graphprobe.errors import ConfigError, internal_errors
from graphprobe.export.closing import Closing
from graphprobe.export.harvest import Harvest
from graphprobe.export.instruments import SCOPE, WHERE, Instruments, guarded, instruments_of
from graphprobe.export.ticker import Ticker, checked
from graphprobe.feed import Captured, Feed, Measured
from graphprobe.ledger import LEDGER, Ledger
from graphprobe.unhurried import give_way

logger = logging.getLogger("graphprobe")

QUEUE = f"{WHERE}.queue"
"""Where events are counted that found the queue full."""

FORK_WAIT = 1.0
"""Most seconds that a fork waits for a provider to be done with one event."""


class OtelExporter(Closing):
    """A ledger that OpenTelemetry reads; from `start_otel`. ``close()`` takes all series but the histogram's away.

    The histogram has what was measured since the start. In a forked child counts start from zero; what the SDK had
    recorded of the histogram before the fork, it keeps.
    """

    def __init__(
        self, instruments: Instruments, tracers: trace.TracerProvider | None, ledger: Ledger, interval: float
    ) -> None:
        self.ledger = ledger
        self._harvest = Harvest(ledger, WHERE)
        self.instruments = instruments
        self._tracers = tracers
        self._tracer: trace.Tracer | None = None
        with guarded():
            self._tracer = self.tracer_provider.get_tracer(SCOPE, __version__)
        self._feed = Feed()
        self._dropped = 0
        self.lock = threading.Lock()
        """Whoever has it speaks to the provider, or takes from the queue."""
        self._ticker = Ticker(self.flush, interval, WHERE, self._forked)
        ledger.feeds.append(self._feed)
        instruments.harvest = self._harvest
        atexit.register(self.flush)

    @property
    def tracer_provider(self) -> trace.TracerProvider:
        """Where the spans of captures go."""
        return trace.get_tracer_provider() if self._tracers is None else self._tracers

    def flush(self) -> None:
        """Record what was measured and captured until now. The exporter's thread does so every interval."""
        for _ in range(self._feed.size):
            with self.lock:
                event = next(self._feed.drain(), None)
                if event is None:
                    break
                with guarded():
                    self._record(event)
            give_way()
        with self.lock:
            self._count_dropped()

    def _record(self, event: Measured | Captured) -> None:
        if isinstance(event, Captured):
            self._trace(event)
        elif self.instruments.histogram is not None:
            labels = {name: metrics.text(getattr(event, name)) for name in metrics.FORWARD_DURATION.labels}
            self.instruments.histogram.record(event.seconds, {**labels, **self._harvest.constant()})

    def _trace(self, event: Captured) -> None:
        if self._tracer is None:
            return
        # A copy, since another exporter may be inside this context at the same time.
        parent = event.context.copy().run(context.get_current)
        began = event.ended - round(event.seconds * 1e9)
        span = self._tracer.start_span("graphprobe.capture", parent, attributes=_attributes(event), start_time=began)
        if event.outcome != "ok":
            span.set_status(trace.Status(trace.StatusCode.ERROR, event.outcome))
        span.end(event.ended)

    def _count_dropped(self) -> None:
        fresh = self._feed.dropped - self._dropped
        if fresh and not self._dropped:
            logger.warning("more than %d events waited for OpenTelemetry: some are not recorded", self._feed.size)
        if fresh:
            self._dropped += fresh
            internal_errors[QUEUE] = internal_errors.get(QUEUE, 0) + fresh

    def close(self) -> None:
        """Record the last events and take the series away. May be called again."""
        with _lock:
            if self not in _running:
                return
            _running.remove(self)
            self.instruments.harvest = None
            self.ledger.feeds.remove(self._feed)
        atexit.unregister(self.flush)
        self._ticker.close()
        self.flush()

    def _forked(self) -> None:
        # What waits is the parent's, as is the thread that may have the lock.
        self.lock = threading.Lock()
        self._feed.clear()
        self._dropped = 0

    def __repr__(self) -> str:
        return f"OtelExporter({'running' if self in _running else 'closed'})"


def _attributes(event: Captured) -> dict[str, str | int]:
    known: dict[str, str | int] = {
        "graphprobe.forward": metrics.text(event.forward),
        "graphprobe.bucket": event.bucket,
        "graphprobe.outcome": event.outcome,
    }
    return known if event.growth is None else {**known, "graphprobe.pool_growth_bytes": event.growth}


_lock = threading.Lock()
_running: list[OtelExporter] = []
_held: list[threading.Lock] = []


def _before_fork() -> None:
    # A provider that is recording holds locks of its own, which nobody would release in the child.
    for lock in [exporter.lock for exporter in _running]:
        if lock.acquire(timeout=FORK_WAIT):
            _held.append(lock)


def _after_fork() -> None:
    while _held:
        _held.pop().release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def start_otel(
    meter_provider: MeterProvider | None = None,
    tracer_provider: trace.TracerProvider | None = None,
    *,
    ledger: Ledger | None = None,
    interval: float = 1.0,
) -> OtelExporter:
    """Give a ledger to OpenTelemetry: by default that of the process, to the global providers, set now or later.

    Counts are read when a reader collects. Durations and captures are recorded by a daemon thread every ``interval``
    seconds, so that no forward waits for a provider. A second start returns the exporter that runs. ConfigError where
    the meter provider has another ledger, or its exporter another tracer provider. What a provider raises is counted
    (``graphprobe_internal_errors_total``) and logged once.
    """
    _checked(meter_provider, tracer_provider, interval)
    ledger = LEDGER if ledger is None else ledger
    with guarded():
        meter_provider = None if meter_provider is get_meter_provider() else meter_provider
        tracer_provider = None if tracer_provider is trace.get_tracer_provider() else tracer_provider
    with _lock:
        instruments = instruments_of(meter_provider)
        running = next((exporter for exporter in _running if exporter.instruments is instruments), None)
        if running is None:
            running = OtelExporter(instruments, tracer_provider, ledger, interval)
            _running.append(running)
        if running.ledger is not ledger:
            raise ConfigError("this meter provider already has another ledger", "give each ledger a MeterProvider()")
        if tracer_provider is not None and tracer_provider is not running.tracer_provider:
            raise ConfigError("the exporter that runs has another tracer provider", "close() it first")
        return running


def _checked(meters: object, tracers: object, interval: float) -> None:
    for name, provider, gives in (("meter", meters, "get_meter"), ("tracer", tracers, "get_tracer")):
        if provider is not None and not callable(getattr(provider, gives, None)):
            raise ConfigError(f"{name}_provider must have {gives}(), got {provider!r}", "pass the provider itself")
    checked(interval)
