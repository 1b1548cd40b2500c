"""The start of an exporter: a server of this process, or a directory that several processes share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, overload

from graphprobe.errors import ConfigError
from graphprobe.export.directory import DirectoryExporter, start
from graphprobe.export.ticker import checked
from graphprobe.ledger import Ledger

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

    from graphprobe.export.server import Exporter


@overload
def start_exporter(
    port: int = ...,
    addr: str = ...,
    *,
    directory: None = None,
    registry: CollectorRegistry | None = ...,
    ledger: Ledger | None = ...,
    interval: float = ...,
    **options: Any,
) -> Exporter: ...


@overload
def start_exporter(
    port: int | None = ...,
    addr: str = ...,
    *,
    directory: str | os.PathLike[str],
    registry: None = None,
    ledger: Ledger | None = ...,
    interval: float = ...,
    **options: Any,
) -> DirectoryExporter: ...


def start_exporter(
    port: int | None = 9464,
    addr: str = "127.0.0.1",
    *,
    directory: str | os.PathLike[str] | None = None,
    registry: CollectorRegistry | None = None,
    ledger: Ledger | None = None,
    interval: float = 2.0,
    **options: Any,
) -> Exporter | DirectoryExporter:
    """Serve ``/metrics`` and ``/snapshot`` from a daemon thread, on this machine only unless ``addr`` says otherwise.

    ``port=0`` takes a free one (see ``.port``). ``registry`` is served whole beside our metrics; by default a new one
    is. With ``certfile`` and ``keyfile`` it speaks TLS, with ``client_cafile`` or ``client_capath`` clients must show a
    certificate too. ``options`` go to ``prometheus_client.start_http_server``.

    With ``directory``, which all processes of an engine share, each of them writes its counts there every ``interval``
    seconds, and one of them serves them all on ``port``, each with its own ``rank``. ``port=None`` writes only: in the
    directory that PROMETHEUS_MULTIPROC_DIR names they show up in the engine's own ``/metrics``.

    ConfigError for arguments that do not fit together; ExporterError (an OSError) where the port is in use or cannot be
    had, or the directory cannot be written to.
    """
    checked(interval)
    if directory is not None:
        if registry is not None:
            raise ConfigError("a registry has the metrics of one process, a directory those of all", "pass one of them")
        return start(directory, port, addr, ledger=ledger, interval=interval, options=options)
    if port is None:
        raise ConfigError("port=None needs a directory to write to", "pass directory=, or port=0 for a free port")
    # Not above: prometheus_client decides at its import how an engine's own metrics are kept.
    from prometheus_client import CollectorRegistry

    from graphprobe.export.prometheus import register
    from graphprobe.export.server import checked as arguments
    from graphprobe.export.server import serve

    arguments(port, addr, options)
    served = CollectorRegistry() if registry is None else registry
    counts = register(served, ledger).ledger
    return serve(served, lambda: counts.snapshot().to_json(), port, addr, options)
