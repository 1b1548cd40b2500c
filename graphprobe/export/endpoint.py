"""One endpoint for all processes of a host that share a directory: who holds the lock serves.

When that process ends, another one takes over within an interval.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import CollectorRegistry

from graphprobe import metrics
from graphprobe.export.multiprocess import Files
from graphprobe.export.page import Samples
from graphprobe.export.presence import claim, holds, release
from graphprobe.export.server import Exporter, checked, serve
from graphprobe.snapshot import Snapshot

logger = logging.getLogger("graphprobe")


KINDS = ("counter", "gauge", "histogram", "summary")
"""What files of prometheus_client begin with."""


class _Merged:
    """Everything that the processes of a directory have written."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def describe(self) -> Iterator[Family]:
        for metric in metrics.CATALOGUE:
            kind = "gauge" if metric.kind == "info" else metric.kind
            yield Family(metric.name.removesuffix("_total"), metric.help, kind)

    def collect(self) -> Iterator[Family]:
        self._files.clear_up()
        for kind in KINDS:
            for family in self._merged(kind):
                family.samples = Samples(family.samples)
                yield family

    def _merged(self, kind: str, tries: int = 3) -> list[Family]:
        # The files by name: a folder with brackets in its own would be a pattern to the client.
        files = [str(path) for path in self._files.directory.glob(f"{kind}_*.db")]
        try:
            return list(MultiProcessCollector.merge(files))  # type: ignore[no-untyped-call]
        except FileNotFoundError:
            # An engine that clears its directory has just removed one.
            if tries <= 1:
                raise
        return self._merged(kind, tries - 1)


def _words(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in labels.items())


def together(found: Mapping[str, Snapshot]) -> Snapshot:
    """The snapshots of several processes as one, in which each forward says whose it is: nothing is summed."""
    if len(found) == 1:
        return next(iter(found.values()))
    return Snapshot(
        forwards={
            f"{name}, {whose}": dataclasses.replace(forward, name=f"{name}, {whose}")
            for whose, snapshot in sorted(found.items())
            for name, forward in snapshot.forwards.items()
        },
        internal_errors={
            f"{where}, {whose}": n for whose, s in found.items() for where, n in s.internal_errors.items()
        },
        hooks={(engine, f"{hook}, {whose}"): b for whose, s in found.items() for (engine, hook), b in s.hooks.items()},
    )


class Endpoint:
    """The one endpoint of a directory, served by this process or by another."""

    def __init__(self, files: Files, port: int, addr: str, options: dict[str, Any]) -> None:
        checked(port, addr, options)
        self._registry = CollectorRegistry()
        self._registry.register(_Merged(files))
        self._files = files
        self._arguments = (port, addr, options)
        self._path = files.directory / "graphprobe.endpoint"
        self._lock: int | None = None
        self.exporter: Exporter | None = None
        """The server, where this process has it."""

    def take(self) -> None:
        """Serve, unless this process or another one does. ExporterError where the port cannot be had."""
        if self._lock is not None and holds(self._lock, self._path):
            return
        if (lock := claim(self._path)) is None:
            return
        self._let_go()
        self._lock = lock
        try:
            # It may be serving already, without a lock: somebody has cleared the directory.
            self.exporter = self.exporter or serve(self._registry, self._snapshot, *self._arguments)
        except BaseException:
            self._let_go()
            raise
        os.truncate(lock, 0)
        os.pwrite(lock, self.exporter.url.encode(), 0)
        logger.info("%s serves the metrics of %s", self.exporter.url, self._files.directory)

    def _snapshot(self) -> str:
        self._files.clear_up()
        found: dict[str, Snapshot] = {}
        for path in sorted(self._files.directory.glob("snapshot_*.json")):
            with contextlib.suppress(FileNotFoundError):
                labels, _, snapshot = path.read_text().partition("\n")
                found[_words(json.loads(labels))] = Snapshot.from_json(snapshot)
        return together(found).to_json()

    @property
    def url(self) -> str:
        """Where the endpoint is, empty while nobody serves it."""
        if self.exporter is not None:
            return self.exporter.url
        with contextlib.suppress(OSError):
            return self._path.read_text()
        return ""

    def close(self) -> None:
        """Stop serving; another process takes over."""
        exporter, self.exporter = self.exporter, None
        try:
            if exporter is not None:
                exporter.close()
            if self._lock is not None:
                os.truncate(self._lock, 0)
        finally:
            self._let_go()

    def forked(self) -> None:
        """In a forked child: the lock and the server are its parent's."""
        self._lock = self.exporter = None

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            release(lock)
