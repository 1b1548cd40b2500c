"""Logs of engines -> snapshots.

vLLM: the tables of ``--cudagraph-metrics``. Each counts the steps since the one before (CUDAGraphLogging of
vllm/compilation/cuda_graph.py), and each engine of a server logs its own.
SGLang: the decode lines, one in ``--decode-log-interval`` steps (managers/scheduler_components/metrics_reporter.py),
and the line that says what was captured (model_runner_components/cuda_graph_setup.py; before 0.5.14
model_executor/cuda_graph_runner.py).
"""

from __future__ import annotations

import io
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from graphprobe.errors import SourceError
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot

VLLM = "vLLM logs sizes with --cudagraph-metrics, unless --disable-log-stats; Model Runner V2 logs none before 0.30"
SGLANG = "SGLang logs the size of one in 40 decode steps (--decode-log-interval), at the level info"

UNKNOWN = "no line says which sizes are captured"
UNLISTED = "advice cannot compare with today's list unless it is given (buckets=[...])"

LONGEST = 1 << 14
"""Longest line that is looked at; an engine's arguments may be one of any length."""

TABLE = b"| Unpadded Tokens"
STEP = re.compile(
    rb"\|\s*([0-9]{1,9})\s*\|\s*([0-9]{1,9})\s*\|\s*-?[0-9]{1,9}\s*\|"
    rb"\s*(?:CUDAGraphMode\.)?(NONE|PIECEWISE|FULL)\s*\|\s*([0-9]{1,15})\s*\|"
)
ROW = re.compile(rb"\|\s*[0-9]{1,9}\s*\||(?:\|[^|]*){5}\|")
"""What may have been meant as a row: a cell that is a number, or five cells."""
CAPTURE_SIZES = re.compile(rb"- Capture sizes: \[([0-9, ]+)\]")
DECODE = b"Decode batch"
RUNNING = re.compile(rb"#running-req: ([0-9]{1,9})\b")
SERVED = re.compile(rb"\b[a-z]{2,8} graph: (True|False)\b")
DECODES = re.compile(rb"Decode batch[^\n]{0,40}#running-req: [0-9]")
RANK = re.compile(rb" (DP|PP|TP)([0-9]{1,5})\b")
CAPTURED = re.compile(rb"Capture (?:[a-z]{2,8} graph bs |target (?:decode|verify) [^\[]{1,200}\bbs=)\[([0-9, ]+)\]")
INTERVAL = re.compile(rb"\bdecode_log_interval=([0-9]{1,9})\b")

COLOUR = re.compile(rb"(?:\x1b|\\u001b)\[[0-9;]{0,40}[A-Za-z]")
"""A code for terminals, as it is and as JSON has it."""

T = TypeVar("T")


class Told(NamedTuple):
    """What a text says: of which kind it is, all of it, the same by windows of time, and what its reader must know."""

    kind: str
    snapshot: Snapshot
    windows: tuple[Snapshot, ...]
    notes: tuple[str, ...]


class Call(NamedTuple):
    """A size and what served it: a bucket, or None for an eager forward."""

    size: int
    bucket: int | None = None
    mode: str = ""


Calls = Counter[Call]


def engine(body: bytes) -> str:
    """Whose log this is, ``vllm`` or ``sglang``; empty where no line of an engine is in it."""
    body = _plain(body)
    if TABLE in body:
        return "vllm"
    return "sglang" if DECODE in body and b"#running-req" in body else ""


def _plain(body: bytes) -> bytes:
    return COLOUR.sub(b"", body) if b"\x1b[" in body or b"\\u001b[" in body else body


def read(body: bytes, name: str, parts: int) -> Told:
    """What the log of an engine says, in up to ``parts`` windows; SourceError, with ``name``, where that is nothing."""
    body = _plain(body)
    return _vllm(body, name, parts) if engine(body) == "vllm" else _sglang(body, name, parts)


def told(
    kind: str, groups: Sequence[Calls], notes: Sequence[str], *, buckets: Sequence[int] = (), unit: str = "rows"
) -> Told:
    """A forward named as its kind, with the calls of each window."""
    windows = [_snapshot(kind, calls, buckets, unit) for calls in groups]
    return Told(kind, _snapshot(kind, _summed(groups), buckets, unit), tuple(windows), tuple(notes))


def cut(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """The items in up to ``parts`` stretches of the same length."""
    count = min(parts, len(items))
    return [items[i * len(items) // count : (i + 1) * len(items) // count] for i in range(count)]


def _snapshot(kind: str, calls: Calls, buckets: Sequence[int], unit: str) -> Snapshot:
    rows = sorted((_row(call, n) for call, n in calls.items() if n), key=Row.order)
    return Snapshot({kind: ForwardSnapshot(kind, tuple(buckets), unit, "engine", rows=tuple(rows))})


def _row(call: Call, n: int) -> Row:
    if call.bucket is None:
        return Row(call.size, "eager", None, FallbackReason.UNKNOWN if call.size else FallbackReason.EMPTY_BATCH, n)
    return Row(call.size, "graph", call.bucket, None, n, n * max(0, call.bucket - call.size), mode=call.mode)


def _summed(groups: Iterable[Calls]) -> Calls:
    whole: Calls = Counter()
    for calls in groups:
        whole.update(calls)
    return whole


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _listed(text: bytes) -> list[int]:
    return sorted({int(part) for part in text.split(b",") if part.strip()})


class _Tables:
    """What the lines of vLLM say: the calls of each table, what was captured, and the rows that cannot be read."""

    def __init__(self) -> None:
        self.tables: list[Calls] = [Counter()]
        self.listed: list[int] = []
        self.unread: list[int] = []
        self.inside = False

    def take(self, number: int, line: bytes) -> None:
        """One line of the log."""
        if TABLE in line:
            self.tables.append(Counter())
            self.inside = True
        elif b"|" in line and len(line) <= LONGEST:
            self._row(number, line)
        else:
            self.inside = False
            if found := CAPTURE_SIZES.search(line, 0, LONGEST):
                self.listed = _listed(found[1])

    def _row(self, number: int, line: bytes) -> None:
        if step := STEP.search(line):
            graph = step[3] != b"NONE"
            call = Call(int(step[1]), int(step[2]), step[3].decode().lower()) if graph else Call(int(step[1]))
            self.tables[-1][call] += int(step[4])
        elif found := CAPTURE_SIZES.search(line):
            self.listed = _listed(found[1])
        elif self.inside and b"|--" not in line:
            self.inside = ROW.search(line) is not None
            self.unread += [number] * self.inside

    def notes(self, tables: int) -> list[str]:
        """One sentence for each thing that its reader must know."""
        mixed = "sizes are tokens of a step, those of prompts and those of decode steps mixed"
        apart = "declare max_seqs to leave out what no decode step has"
        found = [f"{_many(tables, 'table')} of --cudagraph-metrics: {mixed}; {apart}"]
        found += [f"{self.lost()}: not counted"] if self.unread else []
        return found + [f"{UNKNOWN}: {UNLISTED}"] * (not self.listed)

    def lost(self) -> str:
        """The rows that cannot be read, in words."""
        return f"{_many(len(self.unread), 'row')} of the tables cannot be read, from line {self.unread[0]:,} on"


def _vllm(body: bytes, name: str, parts: int) -> Told:
    found = _Tables()
    for number, line in enumerate(io.BytesIO(body), start=1):
        found.take(number, line)
    tables = [table for table in found.tables if table]
    if not tables:
        what = found.lost() if found.unread else "a table of --cudagraph-metrics without a row"
        raise SourceError(f"{name}: {what}. hint: was the log cut off, or changed?")
    notes = found.notes(len(tables))
    notes += ["decode lines of SGLang are in it, too: only vLLM's tables are read"] * bool(DECODES.search(body))
    # The engine may round sizes after its front end has noted them.
    used = {call.bucket for table in tables for call in table if call.bucket is not None} if found.listed else set()
    groups = [_summed(group) for group in cut(tables, parts)]
    return told("vllm", groups, notes, buckets=sorted({*found.listed, *used}), unit="tokens")


class _Step(NamedTuple):
    """A decode line: of which data-parallel rank, of which (pipeline, tensor) rank in it, and what it says."""

    data: bytes
    rank: tuple[int, int]
    call: Call
    silent: bool


class _Decoding:
    """What the lines of SGLang say: the decode steps of each rank, in the order of time, and how to read them."""

    def __init__(self) -> None:
        self.lines: list[_Step] = []
        self.buckets: list[int] = []
        self.interval = 40

    def take(self, line: bytes) -> None:
        """One line of the log."""
        if DECODE in line and len(line) <= LONGEST and (running := RUNNING.search(line)):
            self.lines.append(self._step(line, int(running[1])))
        elif found := CAPTURED.search(line, 0, LONGEST):
            self.buckets = _listed(found[1])
        elif b"decode_log_interval=" in line and (found := INTERVAL.search(line)):
            self.interval = int(found[1])

    def _step(self, line: bytes, size: int) -> _Step:
        ranks, served = dict(RANK.findall(line, 0, line.index(DECODE))), SERVED.search(line)
        bucket = None
        if served is not None and served[1] == b"True":
            bucket = next(iter(self.buckets[bisect_left(self.buckets, size) :]), size)
        call = Call(size, bucket, "full" if bucket else "")
        return _Step(ranks.get(b"DP", b""), (int(ranks.get(b"PP", 0)), int(ranks.get(b"TP", 0))), call, served is None)

    def steps(self) -> list[_Step]:
        """Each step once: of a data-parallel rank, all ranks of tensors and stages may log the same ones."""
        # A rank without a request decodes along.
        busy = [step for step in self.lines if step.call.size]
        first: dict[bytes, tuple[int, int]] = {}
        for step in busy:
            first[step.data] = min(step.rank, first.get(step.data, step.rank))
        return [step for step in busy if step.rank == first[step.data]]

    def notes(self, steps: Sequence[_Step]) -> list[str]:
        """One sentence for each thing that its reader must know."""
        ranks, silent = len({step.data for step in self.lines}), sum(step.silent for step in steps)
        left = sum(1 for step in self.lines if step.call.size) - len(steps)
        lines, others = _many(len(steps), "decode line"), _many(left, "line")
        told = (
            (True, f"{lines}, one in {self.interval} steps: the share of graph calls is no hit rate"),
            (left, f"{others} of other tensor and pipeline ranks left out: they log the same steps"),
            (ranks > 1, f"{ranks} data-parallel ranks are summed: the largest batch decides on the bucket of all"),
            (not self.buckets, f"{UNKNOWN}: a graph call is taken to be of its own size, and {UNLISTED}"),
            (silent, f"{_many(silent, 'line')} without a word on whether a graph served: counted as eager"),
        )
        return [note for happened, note in told if happened]


def _sglang(body: bytes, name: str, parts: int) -> Told:
    found = _Decoding()
    for line in io.BytesIO(body):
        found.take(line)
    steps = found.steps()
    if not steps:
        raise SourceError(f"{name}: no decode line with a running request. hint: {SGLANG}")
    groups = [Counter(step.call for step in group) for group in cut(steps, parts)]
    return told("sglang", groups, found.notes(steps), buckets=found.buckets, unit="requests")
