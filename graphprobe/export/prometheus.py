"""Prometheus: a collector over the ledger, and an exporter that serves it.

A scrape copies the ledger in the exporter's thread. It takes no lock that a forward takes and touches no device.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIServer

import prometheus_client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import make_wsgi_app, start_http_server
from prometheus_client.registry import CollectorRegistry
from prometheus_client.utils import floatToGoString

from graphprobe import metrics
from graphprobe.buckets import as_size
from graphprobe.errors import ConfigError, GraphprobeError, internal_error
from graphprobe.ledger import BOUNDS, LEDGER, Ledger
from graphprobe.snapshot import Snapshot

logger = logging.getLogger("graphprobe")

LE: tuple[str, ...] = tuple(floatToGoString(b) for b in (*BOUNDS, float("inf")))  # type: ignore[no-untyped-call]
"""The ``le`` labels, as Prometheus itself writes floats."""

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class ExporterError(GraphprobeError, OSError):
    """The exporter cannot serve: port in use, address not available, certificate not readable. Has ``errno``."""


class Collector:
    """Exposes a ledger to a registry of prometheus_client. Constant labels are read once, when it is made."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = LEDGER if ledger is None else ledger
        self.constant = metrics.constant_labels()
        self._folds: dict[str, int] = {}

    def describe(self) -> Iterator[Family]:
        """Every family of the contract without samples: makes a second registration and ``name[]`` work."""
        for metric in metrics.CATALOGUE:
            yield _family(metric, ())

    def collect(self) -> Iterator[Family]:
        """The families that have samples now."""
        found: dict[metrics.Metric, list[metrics.Sample]] = {}
        for sample in self._samples(self.ledger.snapshot()):
            found.setdefault(sample.metric, []).append(sample)
        for metric in metrics.CATALOGUE:
            if metric in found:
                yield self._filled(metric, found[metric])

    def _samples(self, snapshot: Snapshot) -> Iterator[metrics.Sample]:
        folds = 0
        for name, forward in snapshot.forwards.items():
            try:
                found, folded = metrics.forward_samples(forward)
            except Exception as error:
                internal_error("export.prometheus", error)
                continue
            self._say(name, folded)
            folds += folded
            yield from found
        yield from metrics.process_samples(snapshot, folds)

    def _say(self, name: str, folds: int) -> None:
        if folds > self._folds.get(name, 0):
            self._folds[name] = folds
            text = "%s: more than %d label sets; its labels are folded, step %d (counts stay exact, see the snapshot)"
            logger.warning(text, name, metrics.LIMIT, folds)

    def _filled(self, metric: metrics.Metric, found: list[metrics.Sample]) -> Family:
        family = _family(metric, (*metric.labels, *self.constant))
        for sample in found:
            _add(family, {**sample.labels, **self.constant}, sample.value)
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


class Exporter:
    """A running exporter: ``/metrics`` for Prometheus, ``/snapshot`` for graphprobe's readers. ``close()`` stops it.

    A forked child inherits neither the thread nor the port.
    """

    def __init__(self, server: WSGIServer, thread: threading.Thread, addr: str, scheme: str) -> None:
        self._server: WSGIServer | None = server
        self._thread = thread
        self.addr = addr
        self.port: int = server.server_port
        self.url = f"{scheme}://{_host(addr)}:{self.port}"
        """Base address; ``/metrics`` and ``/snapshot`` are below it."""
        _open.add(self)

    def close(self) -> None:
        """Stop serving and free the port. May be called again."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()

    def _abandon(self) -> None:
        # In a forked child nobody serves: shutdown() would wait for ever, and an open socket would keep the port.
        server, self._server = self._server, None
        if server is not None:
            server.socket.close()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Exporter({self.url!r}{'' if self._server else ', closed'})"


_open: weakref.WeakSet[Exporter] = weakref.WeakSet()


def _after_fork() -> None:
    for exporter in list(_open):
        exporter._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def start_exporter(
    port: int = 9464,
    addr: str = "127.0.0.1",
    *,
    registry: CollectorRegistry | None = None,
    ledger: Ledger | None = None,
    certfile: str | None = None,
    keyfile: str | None = None,
    client_cafile: str | None = None,
    client_capath: str | None = None,
    **options: Any,
) -> Exporter:
    """Serve ``/metrics`` and ``/snapshot`` from a daemon thread, on this machine only unless ``addr`` says otherwise.

    ``port=0`` takes a free one (see ``.port``). ``registry`` is served whole beside our metrics; by default a new one
    is. With ``certfile`` and ``keyfile`` it speaks TLS, with ``client_cafile`` or ``client_capath`` clients must show a
    certificate too. ``options`` go to ``prometheus_client.start_http_server``. ConfigError for arguments that do not
    fit together; ExporterError (an OSError) where the port is in use or cannot be had.
    """
    _checked(port, certfile, keyfile, client_cafile or client_capath)
    served = CollectorRegistry() if registry is None else registry
    ledger = register(served, ledger).ledger
    # prometheus_client alone would accept clients without a certificate although a CA was named.
    options.setdefault("client_auth_required", bool(client_cafile or client_capath))
    options |= {"certfile": certfile, "keyfile": keyfile}
    options |= {"client_cafile": client_cafile, "client_capath": client_capath}
    with _explained(port, addr):
        server, thread = start_http_server(port, addr, served, **options)
    server.set_app(_routes(make_wsgi_app(served), ledger))
    return Exporter(server, thread, addr, "https" if certfile else "http")


def _checked(port: int, certfile: str | None, keyfile: str | None, client_ca: str | None) -> None:
    if as_size(port, "port", least=0) > 65535:
        raise ConfigError(f"port must be at most 65535, got {port}", "port=0 takes a free one")
    if bool(certfile) != bool(keyfile):
        raise ConfigError("TLS needs certfile and keyfile", "pass both, or neither for plain HTTP")
    if client_ca and not certfile:
        raise ConfigError("client certificates need TLS", "pass certfile and keyfile too")


@contextlib.contextmanager
def _explained(port: int, addr: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = HINTS.get(error.errno or 0, "check addr, and that the certificate files can be read")
        text = f"cannot serve metrics on {addr}:{port}: {error.strerror or error}. hint: {hint}"
        raise ExporterError(error.errno, text) from error


HINTS = {
    errno.EADDRINUSE: "another process (another rank?) has this port: pass port=0 for a free one, or base + rank",
    errno.EACCES: "a port below 1024 needs privileges: pass another port",
    errno.EADDRNOTAVAIL: "addr is no address of this machine: pass 127.0.0.1, or 0.0.0.0 for all",
}


def _routes(prometheus: Wsgi, ledger: Ledger) -> Wsgi:
    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "").rstrip("/")
        if path == "/metrics":
            return prometheus(environ, start_response)
        if path == "/snapshot" and environ["REQUEST_METHOD"] == "GET":
            return _answer(start_response, "200 OK", "application/json", ledger.snapshot().to_json())
        return _answer(start_response, "404 Not Found", "text/plain", "graphprobe serves /metrics and /snapshot\n")

    return app


def _answer(start_response: Callable[..., Any], status: str, kind: str, text: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", f"{kind}; charset=utf-8")])
    return [text.encode()]


def _host(addr: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(addr, addr)
    return f"[{host}]" if ":" in host else host
