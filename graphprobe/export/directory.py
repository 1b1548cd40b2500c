"""Several processes, one directory: each writes its files there, and one may serve them all.

Without a port nothing is imported from prometheus_client (see multiprocess.py).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import TYPE_CHECKING, Any

from graphprobe.errors import ConfigError, ExporterError, internal_error
from graphprobe.export.closing import Closing
from graphprobe.export.multiprocess import Files
from graphprobe.export.ticker import Ticker
from graphprobe.ledger import LEDGER, Ledger

if TYPE_CHECKING:
    from graphprobe.export.endpoint import Endpoint

logger = logging.getLogger("graphprobe")

WHERE = "export.multiprocess"


class DirectoryExporter(Closing):
    """The files of this process, and where a port is given the one endpoint of all processes of the directory.

    ``/metrics`` of the endpoint has every process, apart by ``rank``, ``/snapshot`` those that are alive.
    A forked child writes files of its own, and may take over.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        port: int | None,
        addr: str,
        *,
        ledger: Ledger | None = None,
        interval: float = 2.0,
        options: dict[str, Any] | None = None,
    ) -> None:
        with _explained(directory):
            self._files = Files(directory, ledger, snapshots=port is not None)
        self._endpoint: Endpoint | None = None
        try:
            if port is not None:
                self._endpoint = _endpoint(self._files, port, addr, options or {})
                self._endpoint.take()
            with _explained(directory):
                self._files.flush()
        except BaseException:
            self._files.leave()
            if self._endpoint is not None:
                self._endpoint.close()
            raise
        self._said = False
        self.open = True
        self.asked = (port, addr)
        self._ticker = Ticker(self._step, interval, WHERE, self._forked)
        atexit.register(self.close)
        self.finalizer: util.Finalize | None = None
        _at_end_of_worker(self)
        util.register_after_fork(self, _at_end_of_worker)

    def _step(self) -> None:
        try:
            if self._endpoint is None:
                self._files.clear_up()
            else:
                self._take_over(self._endpoint)
        finally:
            # Not waiting: who holds the lock may be waiting for the end of this thread.
            self._files.flush(wait=False)

    def _take_over(self, endpoint: Endpoint) -> None:
        try:
            endpoint.take()
        except ExporterError as error:
            if not self._said:
                self._said = True
                logger.warning("%s; tried again every interval", error)

    def _forked(self) -> None:
        self._files.forked()
        if self._endpoint is not None:
            self._endpoint.forked()

    @property
    def url(self) -> str:
        """Base address of the endpoint of this directory; empty where there is none, or nobody serves it yet."""
        return "" if self._endpoint is None else self._endpoint.url

    @property
    def port(self) -> int | None:
        """The port of the endpoint, None where there is none."""
        url = self.url
        return int(url.rpartition(":")[2]) if url else None

    @property
    def serving(self) -> bool:
        """Whether it is this process that serves the endpoint."""
        return self._endpoint is not None and self._endpoint.exporter is not None

    def flush(self) -> None:
        """Write what was counted since the last interval now."""
        self._files.flush()

    def close(self) -> None:
        """Write the last counts, stop, and let another process serve. May be called again."""
        if not self.open:
            return
        self.open = False
        atexit.unregister(self.close)
        if self.finalizer is not None:
            self.finalizer.cancel()
        for key in [key for key, running in _running.items() if running is self]:
            del _running[key]
        with contextlib.ExitStack() as steps:
            steps.callback(_counted, self._files.close)
            if self._endpoint is not None:
                steps.callback(_counted, self._endpoint.close)
            steps.callback(_counted, self._ticker.close)

    def __repr__(self) -> str:
        return f"DirectoryExporter({str(self._files.directory)!r}, {self.url!r}{'' if self.open else ', closed'})"


def _counted(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:
        internal_error(WHERE, error)


def _at_end_of_worker(exporter: DirectoryExporter) -> None:
    # A process of multiprocessing ends without atexit, and a forked one forgets its parent's finalizers.
    exporter.finalizer = util.Finalize(None, exporter.close, exitpriority=0)


@contextlib.contextmanager
def _explained(directory: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"cannot write metrics to {os.fsdecode(directory)}: {error.strerror or error}"
        hint = "it must be a folder of a local disk (or /dev/shm) that this process may write to"
        raise ExporterError(error.errno, f"{text}. hint: {hint}") from error


def _endpoint(files: Files, port: int, addr: str, options: dict[str, Any]) -> Endpoint:
    # Not above: prometheus_client must not be imported for a process that only writes.
    from graphprobe.export.endpoint import Endpoint

    return Endpoint(files, port, addr, options)


_running: dict[tuple[str, int], DirectoryExporter] = {}
_starting = threading.Lock()


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def start(
    directory: str | os.PathLike[str], port: int | None, addr: str, *, ledger: Ledger | None, **settings: Any
) -> DirectoryExporter:
    """Start, or hand out what runs: a ledger that was written twice would count twice. ConfigError where it differs."""
    try:
        directory = os.fsdecode(directory)
        if not directory:
            raise ValueError("it is empty")
        key = (os.path.realpath(directory), id(LEDGER if ledger is None else ledger))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"directory must be a path, got {directory!r}", "such as /dev/shm/engine") from error
    with _starting:
        known = _running.get(key)
        if known is None:
            known = _running[key] = DirectoryExporter(directory, port, addr, ledger=ledger, **settings)
        elif known.asked != (port, addr):
            raise ConfigError(f"{known.url or 'an exporter'} runs for this directory", "close() it first")
    return known
