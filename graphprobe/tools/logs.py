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
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from graphprobe.errors import SourceError
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot

VLLM = "vLLM logs sizes with --cudagraph-metrics, unless --disable-log-stats; Model Runner V2 logs none before 0.30"
SGLANG = "SGLang logs the size of one in 40 decode steps (--decode-log-interval), at the level info"

LONGEST = 1 << 14
"""Longest line that is looked at; an engine's arguments may be one of any length."""

TABLE = b"| Unpadded Tokens"
STEP = re.compile(
    rb"\|\s*([0-9]{1,9})\s*\|\s*([0-9]{1,9})\s*\|\s*-?[0-9]{1,9}\s*\|"
    rb"\s*(?:CUDAGraphMode\.)?(NONE|PIECEWISE|FULL)\s*\|\s*([0-9]{1,15})\s*\|"
)
CAPTURE_SIZES = re.compile(rb"- Capture sizes: \[([0-9, ]+)\]")
DECODE = b"Decode batch"
RUNNING = re.compile(rb"#running-req: ([0-9]{1,9})\b")
SERVED = re.compile(rb"\b[a-z]{2,8} graph: (True|False)\b")
RANK = re.compile(rb" (DP|PP)([0-9]{1,5})\b")
CAPTURED = re.compile(rb"Capture (?:[a-z]{2,8} graph bs |target (?:decode|verify) [^\[]{1,200}\bbs=)\[([0-9, ]+)\]")
INTERVAL = re.compile(rb"\bdecode_log_interval=([0-9]{1,9})\b")

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
    if TABLE in body:
        return "vllm"
    return "sglang" if DECODE in body and b"#running-req" in body else ""


def read(body: bytes, name: str, parts: int) -> Told:
    """What the log of an engine says, in up to ``parts`` windows; SourceError, with ``name``, where that is nothing."""
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


def _listed(text: bytes) -> list[int]:
    return sorted({int(part) for part in text.split(b",") if part.strip()})


def _vllm(body: bytes, name: str, parts: int) -> Told:
    tables: list[Calls] = [Counter()]
    listed: list[int] = []
    for line in io.BytesIO(body):
        if TABLE in line:
            tables.append(Counter())
        elif b"|" in line and len(line) <= LONGEST and (step := STEP.search(line)):
            graph = step[3] != b"NONE"
            call = Call(int(step[1]), int(step[2]), step[3].decode().lower()) if graph else Call(int(step[1]))
            tables[-1][call] += int(step[4])
        elif found := CAPTURE_SIZES.search(line, 0, LONGEST):
            listed = _listed(found[1])
    tables = [table for table in tables if table]
    if not tables:
        raise SourceError(f"{name}: a table of --cudagraph-metrics without a row. hint: was the log cut off?")
    notes = [f"{len(tables):,} tables of --cudagraph-metrics: sizes are tokens of a step, and prompts are among them"]
    notes += ["no line says which sizes are captured"] * (not listed)
    # The engine may round sizes after its front end has noted them.
    used = {call.bucket for table in tables for call in table if call.bucket is not None} if listed else set()
    groups = [_summed(group) for group in cut(tables, parts)]
    return told("vllm", groups, notes, buckets=sorted({*listed, *used}), unit="tokens")


class _Decoding:
    """What the lines of SGLang say: the decode steps of each pipeline stage, and how to read them."""

    def __init__(self) -> None:
        self.stages: defaultdict[int, list[Call]] = defaultdict(list)
        self.ranks: set[bytes] = set()
        self.buckets: list[int] = []
        self.silent = 0
        self.interval = 40

    def take(self, line: bytes) -> None:
        """One line of the log."""
        if DECODE in line and len(line) <= LONGEST and (running := RUNNING.search(line)):
            self._step(line, int(running[1]))
        elif found := CAPTURED.search(line, 0, LONGEST):
            self.buckets = _listed(found[1])
        elif b"decode_log_interval=" in line and (found := INTERVAL.search(line)):
            self.interval = int(found[1])

    def _step(self, line: bytes, size: int) -> None:
        ranks, served = dict(RANK.findall(line)), SERVED.search(line)
        self.ranks.add(ranks.get(b"DP", b""))
        self.silent += served is None
        bucket = None
        if served is not None and served[1] == b"True":
            bucket = next(iter(self.buckets[bisect_left(self.buckets, size) :]), size)
        self.stages[int(ranks.get(b"PP", 0))].append(Call(size, bucket, "full" if bucket else ""))

    def notes(self, lines: int) -> list[str]:
        """One sentence for each thing that its reader must know."""
        sampled = f"{lines:,} decode lines, one in {self.interval} steps: the share of graph calls is no hit rate"
        many = f"{len(self.ranks)} data-parallel ranks are summed: the largest batch decides on the bucket of all"
        told = (
            (True, sampled),
            (len(self.ranks) > 1, many),
            (not self.buckets, "no line says which sizes are captured: a graph call is taken to be of its own size"),
            (self.silent, f"{self.silent:,} lines do not say whether a graph served: they count as eager"),
        )
        return [note for happened, note in told if happened]


def _sglang(body: bytes, name: str, parts: int) -> Told:
    found = _Decoding()
    for line in io.BytesIO(body):
        found.take(line)
    # Each stage of a pipeline logs the same steps, and a rank without a request decodes along.
    calls = [call for call in found.stages[min(found.stages, default=0)] if call.size]
    if not calls:
        raise SourceError(f"{name}: no decode line with a running request. hint: {SGLANG}")
    groups = [Counter(group) for group in cut(calls, parts)]
    return told("sglang", groups, found.notes(len(calls)), buckets=found.buckets, unit="requests")
