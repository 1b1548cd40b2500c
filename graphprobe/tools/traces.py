"""A saved trace to the timeline of a device: torch.profiler's Chrome trace, or an Nsight Systems SQLite export."""

from __future__ import annotations

import gzip
import os
import zlib
from dataclasses import replace
from pathlib import Path

from graphprobe.errors import SourceError
from graphprobe.tools import chrome, nsight
from graphprobe.tools.devices import Trace
from graphprobe.tools.findings import short
from graphprobe.tools.timeline import STEP, Timeline, marked

MAX_BYTES = 1 << 30
"""Longest Chrome trace that is read, unpacked: some million events, which take ten times that in memory."""

GZIP = b"\x1f\x8b"
PACKED = {b"PK\x03\x04": "unzip", b"\x28\xb5\x2f\xfd": "unzstd", b"\xfd7zXZ\0": "unxz", b"BZh": "bunzip2"}
READ = "what is read: torch.profiler's export_chrome_trace() (.json, .json.gz), and nsys export --type sqlite"


def read(source: str | os.PathLike[str], *, step: int | str | None = None) -> Timeline:
    """What the busiest device of the trace in the file ``source`` did; what the file is, its content tells.

    ``step`` selects what was launched in one range of the host: a step of torch.profiler by its number, or the last
    range of a name (``record_function``, NVTX); without it everything is taken. The timeline's notes say what a reader
    of its figures must know. Nothing is written, and no file is made.

    SourceError where the file cannot be read, is cut, or has no kernel; ConfigError where there is no such step.
    """
    path = Path(os.fsdecode(source))
    name = short(path)
    try:
        timeline = _trace(path, name).timeline(name)
    except SourceError:
        raise
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or short(error)
        raise SourceError(f"{name}: {what}. hint: {READ}") from error
    return _unselected(timeline) if step is None else timeline.within(step)


def _unselected(timeline: Timeline) -> Timeline:
    steps = {mark.name: mark for mark in timeline.marks if mark.name.startswith(STEP)}
    if len(steps) < 2:
        return timeline
    note = (
        f"{len(steps)} steps are marked ({marked(list(steps.values()))}): the figures are of all, select one with step"
    )
    return replace(timeline, notes=(*timeline.notes, note))


def _trace(path: Path, name: str) -> Trace:
    if not path.is_file() and path.exists():
        raise SourceError(f"{name}: not a file. hint: {READ}")
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(nsight.MAGIC):
        return nsight.trace(path, name)
    text = _unpacked(path, name) if head.startswith(GZIP) else _plain(path)
    if len(text) > MAX_BYTES:
        hint = "record fewer steps: torch.profiler.schedule(wait=1, warmup=1, active=3)"
        raise SourceError(f"{name}: more than {MAX_BYTES >> 20:,} MiB of trace. hint: {hint}")
    if refused := _strange(text, path):
        raise SourceError(f"{name}: {refused}")
    return chrome.trace(text, name)


def _plain(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _unpacked(path: Path, name: str) -> bytes:
    try:
        with gzip.open(path) as file:
            return file.read(MAX_BYTES + 1)
    except EOFError as error:
        hint = "was the disk full, or the copy stopped? save it anew"
        raise SourceError(f"{name}: compressed data that ends early. hint: {hint}") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"{name}: compressed data that is damaged ({short(error)}). hint: save it anew") from error


def _strange(text: bytes, path: Path) -> str:
    """What a text is that is no JSON, and what to do; nothing where it may be."""
    begin = text[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
    if begin.startswith((b"{", b"[")):
        return ""
    if not begin:
        return f"an empty file. hint: {READ}"
    if path.suffix in (".nsys-rep", ".qdrep"):
        return f"a report of Nsight Systems. hint: export it first: nsys export --type sqlite {short(path)}"
    if nsight.MAGIC.startswith(begin) or begin.startswith(nsight.MAGIC):
        return "a database in compressed or cut form. hint: give it unpacked, and whole"
    for magic, tool in PACKED.items():
        if begin.startswith(magic):
            return f"it is compressed. hint: unpack it first, with {tool}"
    return f"no trace. hint: {READ}"
