"""prometheus_client's multiprocess directory: files of ours that an engine's own ``/metrics`` merges with its own.

Nothing is imported from prometheus_client: it decides at its import, by PROMETHEUS_MULTIPROC_DIR, how the engine's own
metrics are kept, so it must be the engine that imports it first. Files are replaced whole, so no reader sees half of
one, and a label set that is folded away is gone from them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from graphprobe import metrics
from graphprobe.export.harvest import Harvest
from graphprobe.export.presence import Presence
from graphprobe.ledger import BOUNDS, LEDGER, Ledger
from graphprobe.unhurried import unhurried

logger = logging.getLogger("graphprobe")

HEAD = struct.Struct("=i4x")
"""How many bytes are used, and padding."""

VALUE = struct.Struct("=dd")
"""A value and the time of it, which only a kind of gauge that is not used here needs."""

LE = tuple("+Inf" if math.isinf(bound) else repr(bound) for bound in (*BOUNDS, math.inf))


class Files:
    """The samples of a ledger as files in a directory, one per kind: their lifetime is that of this process.

    Every series has a rank. Where it is unknown (see Harvest) it is ``p0``, ``p1``, ...: a place in the directory, so
    that processes never sum up silently. A forked child writes files of its own once it has counted something.
    ``snapshots``: whether each process leaves its snapshot there, too, below a line with its labels.
    """

    def __init__(
        self, directory: str | os.PathLike[str], ledger: Ledger | None = None, snapshots: bool = False
    ) -> None:
        self.directory = Path(os.path.abspath(os.fsdecode(directory)))
        self._ledger = LEDGER if ledger is None else ledger
        self._keys: dict[tuple[str, tuple[str, ...], str, str], bytes] = {}
        self._said, self._snapshots = False, snapshots
        self._lock = threading.RLock()
        self._writing = False
        self._presence: Presence | None = self._enter()

    def _enter(self) -> Presence:
        # Started again in one process: it goes on in the files that have its counts already.
        names = _names.setdefault(self._ledger, {})
        pid, name = names.get(self.directory, (0, ""))
        presence = Presence(self.directory, name if pid == os.getpid() else "")
        names[self.directory] = os.getpid(), presence.name
        self._begin(presence)
        return presence

    def _begin(self, presence: Presence) -> None:
        self._written: dict[str, bytes] = {}
        self._harvest = Harvest(self._ledger, "export.multiprocess", rank=f"p{presence.place}")

    def flush(self, wait: bool = True) -> None:
        """Write what has changed. Without ``wait`` nothing is done where another thread is writing."""
        if not self._lock.acquire(blocking=wait):
            return
        try:
            # A signal's handler may ask for it in the middle of itself.
            if not self._writing:
                self._write_all()
        finally:
            self._lock.release()

    def _write_all(self) -> None:
        self._writing = True
        try:
            if self._presence is None:
                if not self._ledger.snapshot().counted:
                    return
                self._presence = self._enter()
            if self._presence.renew():
                self._begin(self._presence)
            self._flush(self._presence)
        finally:
            self._writing = False

    def forked(self) -> None:
        """In a forked child: it gets files, locks and labels of its own with its first count."""
        self._presence, self._lock, self._writing = None, threading.RLock(), False

    def _flush(self, presence: Presence) -> None:
        samples = self._harvest.samples()
        entries: dict[str, list[bytes]] = {}
        constant = self._constant(presence)
        known, self._keys = self._keys, {}
        for sample in unhurried(samples):
            page = entries.setdefault(_kind(sample.metric), [])
            labels = (*sample.labels.values(), *constant.values())
            for suffix, le, value in _parts(sample.value):
                identity = (sample.metric.name, labels, suffix, le)
                key = known.get(identity) or _key(sample.metric, {**sample.labels, **constant}, suffix, le)
                self._keys[identity] = key
                page += key, VALUE.pack(value, 0.0)
        for kind, page in entries.items():
            content = b"".join(page)
            self._write(kind, presence.name, HEAD.pack(HEAD.size + len(content)) + content)
        if self._snapshots:
            told = f"{json.dumps(constant)}\n{self._harvest.snapshot.to_json()}"
            self._write("snapshot", presence.name, told.encode())
        for kind in self._written.keys() - entries.keys() - {"snapshot"}:
            # The last gauge of its kind is unknown again.
            self._path(kind, presence.name).unlink(missing_ok=True)
            del self._written[kind]

    def _constant(self, presence: Presence) -> dict[str, str]:
        constant = self._harvest.constant()
        if presence.owns(json.dumps(constant, sort_keys=True)):
            return constant
        if not self._said:
            self._said = True
            text = "another process of %s has the labels %s, too; the rank of this one gets a suffix: set RANK"
            logger.warning(text, self.directory, constant)
        return {**constant, "rank": f"{constant['rank']}-p{presence.place}"}

    def _path(self, kind: str, name: str) -> Path:
        return self.directory / f"{kind}_{name}.{'json' if kind == 'snapshot' else 'db'}"

    def _write(self, kind: str, name: str, page: bytes) -> None:
        path = self._path(kind, name)
        if self._written.get(kind) == page and path.exists():
            return
        # Not .db: what is half written is no file of the directory yet.
        draft = path.with_suffix(".new")
        try:
            draft.write_bytes(page)
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        self._written[kind] = page

    def close(self) -> None:
        """Write the last counts, which stay, and take the gauges away."""
        try:
            self.flush()
        finally:
            self.leave()

    def leave(self) -> None:
        """Take the gauges away, and write nothing more."""
        if self._presence is not None:
            self._presence.leave()

    def clear_up(self) -> None:
        """Remove the gauges of processes that have died."""
        if self._presence is not None:
            self._presence.clear_up()


_names: weakref.WeakKeyDictionary[Ledger, dict[Path, tuple[int, str]]] = weakref.WeakKeyDictionary()


def _kind(metric: metrics.Metric) -> str:
    """How a file of this metric is named, by which its reader merges: those of living processes alone for a gauge."""
    if metric.kind in ("counter", "histogram"):
        return metric.kind
    return f"gauge_live{'max' if metric.kind == 'info' else metric.combine}"


def _parts(value: metrics.Value) -> Iterator[tuple[str, str, float]]:
    """Suffix of the name, ``le`` and number of each series of a sample. A reader makes the count from the bounds'."""
    if not isinstance(value, metrics.Distribution):
        yield "", "", float(value)
        return
    for le, count in zip(LE, value.counts, strict=True):
        yield "_bucket", le, float(count)
    yield "_sum", "", value.sum


def _key(metric: metrics.Metric, labels: dict[str, str], suffix: str, le: str) -> bytes:
    family = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
    named = {**labels, "le": le} if le else labels
    text = json.dumps([family, metric.name + suffix, named, metric.help], sort_keys=True).encode()
    return struct.pack("=i", len(text)) + text + b" " * (8 - (len(text) + 4) % 8)
