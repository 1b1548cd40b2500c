"""An Nsight Systems report, exported as SQLite, to the work of its devices."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from graphprobe.errors import SourceError
from graphprobe.tools.devices import Trace
from graphprobe.tools.findings import short
from graphprobe.tools.timeline import Mark, Work

MAGIC = b"SQLite format 3\0"

ACTIVITY = "CUPTI_ACTIVITY_KIND_"
TABLES = {"kernel": "KERNEL", "memcpy": "MEMCPY", "memset": "MEMSET", "graph": "GRAPH_TRACE"}
CALLS = ("RUNTIME", "DRIVER")

COLUMNS = (
    *("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "globalTid"),
    *("demangledName", "shortName", "text", "textId"),
)
"""What is read where a table has it: versions differ, and leave out what a report does not hold."""

CUT = "a database that ends early. hint: was the disk full, or the export stopped? nsys export --type sqlite anew"


class Row(NamedTuple):
    """One row; times are in nanoseconds, and what its table does not have is None."""

    start: Any
    end: Any
    device: Any
    stream: Any
    correlation: Any
    pid: Any
    tid: Any
    name: Any
    short_name: Any
    text: Any
    text_id: Any

    @property
    def timed(self) -> bool:
        """Whether it has times; both are 0 where the device could not take them."""
        return isinstance(self.start, int) and isinstance(self.end, int) and 0 < self.end >= self.start

    @property
    def process(self) -> int:
        """The process, as the upper bits of both global identifiers have it; 0 where none is known."""
        key = self.tid if self.pid is None else self.pid
        return key >> 24 if isinstance(key, int) else 0


def trace(path: Path, name: str) -> Trace:
    """The report in the database at ``path``, which is only read; SourceError, with ``name``, where there is none."""
    _whole(path, name)
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            database.text_factory = lambda raw: raw.decode("utf-8", "replace")
            return Report(database, name).trace()
    except sqlite3.DatabaseError as error:
        raise SourceError(f"{name}: a database that cannot be read ({short(error)}). hint: export it anew") from error


def _whole(path: Path, name: str) -> None:
    """SourceError where pages are missing, which a query may never notice.

    Source: the header of the SQLite file format: size of a page at byte 16, pages at byte 28, which counts where the
    change counters at 24 and 92 agree.
    """
    with path.open("rb") as file:
        head = file.read(100)
    page = int.from_bytes(head[16:18], "big")
    pages = int.from_bytes(head[28:32], "big") if head[24:28] == head[92:96] else 0
    if len(head) < 100 or path.stat().st_size < pages * (65536 if page == 1 else page):
        raise SourceError(f"{name}: {CUT}")
    for suffix in ("-journal", "-wal"):
        beside = Path(f"{path}{suffix}")
        if beside.exists() and beside.stat().st_size:
            hint = "wait for the export, or make it anew"
            raise SourceError(
                f"{name}: {short(beside.name)} lies beside it: it is not written to its end. hint: {hint}"
            )


class Report:
    """An open database of a report."""

    def __init__(self, database: sqlite3.Connection, name: str) -> None:
        self.database = database
        self.name = name
        self.tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type != 'index'")}
        self.strings: dict[Any, str] = {}

    def trace(self) -> Trace:
        """All of it; times are microseconds since the first work."""
        if not any(table.startswith(("CUPTI_ACTIVITY", "NVTX_EVENTS", "TARGET_INFO")) for table in self.tables):
            hint = "nsys export --type sqlite REPORT.nsys-rep makes one"
            raise SourceError(f"{self.name}: a database, but not of Nsight Systems. hint: {hint}")
        if "StringIds" in self.tables:
            self.strings = dict(self.database.execute("SELECT id, value FROM StringIds"))
        rows = {kind: list(self.rows(ACTIVITY + table)) for kind, table in TABLES.items()}
        # Where the kernels of a graph are there, the record of the whole would count them again.
        seen = {(row.process, row.correlation) for row in rows["kernel"]}
        rows["graph"] = [row for row in rows["graph"] if (row.process, row.correlation) not in seen]
        works = [(kind, row) for kind, each in rows.items() for row in each]
        timed = [(kind, row) for kind, row in works if row.timed]
        found = Trace()
        if len(timed) < len(works):
            found.notes.append(f"records of the device without a time are left out: {len(works) - len(timed):,}")
        origin = min((row.start for _, row in timed), default=0)
        self._fill(found, timed, origin)
        found.marks += self._marks(origin)
        return found

    def rows(self, table: str) -> Iterator[Row]:
        """The rows of ``table``, none where there is no such table; SourceError where it has no times."""
        if table not in self.tables:
            return
        have = {row[1] for row in self.database.execute(f'PRAGMA table_info("{table}")')}
        if not {"start", "end"} <= have:
            raise SourceError(f"{self.name}: its table {table} has no times. hint: which version of nsys exported it?")
        columns = ", ".join(f'"{column}"' if column in have else "NULL" for column in COLUMNS)
        yield from map(Row._make, self.database.execute(f'SELECT {columns} FROM "{table}"'))

    def _fill(self, found: Trace, timed: list[tuple[str, Row]], origin: int) -> None:
        calls = self._calls()
        devices = self._devices([row for _, row in timed])
        processes = {process: i for i, process in enumerate(sorted({row.process for _, row in timed}))}
        for kind, row in timed:
            began = calls.get((row.process, row.correlation), calls.get((0, row.correlation)))
            known = isinstance(row.correlation, int) and row.correlation > 0
            work = Work(
                start_us=(row.start - origin) / 1e3,
                end_us=(row.end - origin) / 1e3,
                stream=row.stream if isinstance(row.stream, int) else str(row.stream),
                name=self._name(row, kind),
                kind=kind,
                # Each process counts its launches on its own.
                correlation=row.correlation + (processes[row.process] << 32) if known else None,
                launch_us=(began - origin) / 1e3 if known and began is not None else None,
            )
            found.devices.setdefault(devices[row.process, row.device], []).append(work)

    def _name(self, row: Row, kind: str) -> str:
        for key in (row.name, row.short_name):
            if key is not None:
                return self.strings.get(key, str(key))
        return kind

    def _calls(self) -> dict[tuple[int, Any], int]:
        """When the host began each call, by process and correlation, in nanoseconds."""
        found: dict[tuple[int, Any], int] = {}
        for table in CALLS:
            for row in self.rows(ACTIVITY + table):
                if row.timed:
                    key = row.process, row.correlation
                    found[key] = min(row.start, found.get(key, row.start))
        return found

    def _devices(self, rows: list[Row]) -> Mapping[tuple[int, Any], str]:
        """A name for each device of each process: number 0 of two processes may be two devices, or one."""
        gpus: dict[tuple[int, Any], Any] = {}
        if "TARGET_INFO_CUDA_DEVICE" in self.tables:
            table = self.database.execute("SELECT * FROM TARGET_INFO_CUDA_DEVICE")
            names = [column[0] for column in table.description]
            for values in table:
                row = dict(zip(names, values, strict=True))
                gpus[row.get("pid") or 0, row.get("cudaId")] = row.get("gpuId")
        pairs = {(row.process, row.device) for row in rows}
        many = len({process for process, _ in pairs}) > 1
        found = {}
        for process, device in pairs:
            # Above the process's own number there is that of its machine.
            gpu = gpus.get((process & 0xFFFFFF, device))
            own = f"device {device}{f' of process {process & 0xFFFFFF}' if many else ''}"
            found[process, device] = own if gpu is None else f"GPU {gpu}"
        return found

    def _marks(self, origin: int) -> Iterator[Mark]:
        for row in self.rows("NVTX_EVENTS"):
            text = row.text if row.text is not None else self.strings.get(row.text_id)
            if row.timed and text:
                yield Mark(str(text), (row.start - origin) / 1e3, (row.end - origin) / 1e3)
