"""A Chrome trace, as torch.profiler writes it, to the work of its devices."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from graphprobe.errors import SourceError
from graphprobe.tools.devices import Trace
from graphprobe.tools.findings import short
from graphprobe.tools.timeline import Mark, Work

# Source: the categories in torch 2.13's libtorch (Kineto), the same on ROCm and XPU; old traces have "Kernel",
# "Memcpy" and "Memset".
KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset", "memcpy": "memcpy", "memset": "memset"}
CALLS = ("runtime", "driver")
"""How the categories of the host's calls end, whatever the device: cuda_runtime, cuda_driver, xpu_runtime."""

RANGE = "user_annotation"
"""Steps of the profiler and the user's ranges, on the host; a device's have another category."""

# Source: sglang issue 31545.
DEFERRED = "hipGraphLaunch"

LONGEST = 10**17
"""Microseconds, three thousand years: no time is above it."""


class Event(NamedTuple):
    """One event with a length: its category, and its times in microseconds of the trace."""

    kind: str
    start: Decimal
    end: Decimal
    body: Mapping[str, Any]


def trace(text: bytes, name: str) -> Trace:
    """The trace in ``text``; SourceError, with ``name``, where it is none.

    ``ts`` and ``dur`` are microseconds, whatever ``displayTimeUnit`` says.
    """
    events, untimed = _timed(_events(text, name))
    works = [event for event in events if event.kind in KINDS]
    origin = min((event.start for event in works), default=Decimal(0))
    launches = _launches(events, origin)
    found = Trace(notes=_notes(works, untimed, any(event.body.get("name") == DEFERRED for event in events)))
    for event in works:
        found.devices.setdefault(_device(event.body), []).append(_work(event, origin, launches))
    for event in events:
        if event.kind == RANGE:
            began, ended = float(event.start - origin), float(event.end - origin)
            found.marks.append(Mark(str(event.body.get("name", "")), began, ended))
    return found


def _events(text: bytes, name: str) -> list[Any]:
    try:
        # A float has no room for the nanoseconds of microseconds since 1970.
        read = json.loads(text.decode("utf-8-sig", "replace"), parse_float=Decimal, strict=False)
    except RecursionError as error:
        raise SourceError(f"{name}: JSON that is nested too deeply for a trace. hint: is it one?") from error
    except (ValueError, ArithmeticError) as error:
        raise SourceError(f"{name}: {_broken(text, error)}") from error
    events = read.get("traceEvents") if isinstance(read, dict) else read
    if not isinstance(events, list):
        keys = f", its keys are: {short(', '.join(map(str, read)))}" if isinstance(read, dict) else ""
        hint = "give the file of torch.profiler's export_chrome_trace()"
        raise SourceError(f"{name}: JSON, but no trace: it has no list traceEvents{keys}. hint: {hint}")
    if not events:
        raise SourceError(f"{name}: an empty trace: no event is in it. hint: did the profiler run when it was saved?")
    return events


def _broken(text: bytes, error: Exception) -> str:
    if not text.rstrip(b"\0 \t\r\n").endswith((b"}", b"]")):
        return "a trace that ends early. hint: was the disk full, or the process killed? save it anew"
    return f"not JSON: {short(error)}. hint: give the file as torch.profiler wrote it"


def _timed(events: Iterable[Any]) -> tuple[list[Event], int]:
    """What is read of the events, and how many of a device have no times."""
    found, untimed = [], 0
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        kind = str(event.get("cat", "")).lower()
        if not (kind in KINDS or kind == RANGE or kind.endswith(CALLS)):
            continue
        start, length = _number(event.get("ts")), _number(event.get("dur"))
        if start is not None and length is not None and length >= 0:
            found.append(Event(kind, start, start + length, event))
        else:
            untimed += kind in KINDS
    return found, untimed


def _number(value: object) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        return None
    return Decimal(value) if -LONGEST <= value <= LONGEST else None


def _launches(events: Iterable[Event], origin: Decimal) -> dict[int, float]:
    """When the host began each call, by its correlation."""
    found: dict[int, float] = {}
    for event in events:
        if event.kind.endswith(CALLS) and (key := _correlation(_args(event.body))) is not None:
            began = float(event.start - origin)
            found[key] = min(began, found.get(key, began))
    return found


def _work(event: Event, origin: Decimal, launches: Mapping[int, float]) -> Work:
    args = _args(event.body)
    stream = args.get("stream", event.body.get("tid"))
    key = _correlation(args)
    return Work(
        start_us=float(event.start - origin),
        end_us=float(event.end - origin),
        stream=stream if isinstance(stream, int) else str(stream),
        name=str(event.body.get("name", "")),
        kind=KINDS[event.kind],
        correlation=key,
        launch_us=None if key is None else launches.get(key),
    )


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _correlation(args: Mapping[str, Any]) -> int | None:
    """The number of the launch; 0 stands for none."""
    value = args.get("correlation")
    return value if isinstance(value, int) and not isinstance(value, bool) and value else None


def _device(event: Mapping[str, Any]) -> str:
    return f"device {_args(event).get('device', event.get('pid', '?'))}"


def _notes(works: list[Event], untimed: int, deferred: bool) -> list[str]:
    whole = bool(works) and all(event.start % 1 == 0 == event.end % 1 for event in works)
    told = (
        (untimed > 0, f"records of the device without a time are left out: {untimed:,}"),
        (whole, "times are whole microseconds, as older torch writes them: gaps below one are not seen"),
        (
            deferred,
            f"{DEFERRED}: ROCm may report the kernels of a graph in one late burst, so gaps in it are uncertain",
        ),
    )
    return [note for so, note in told if so]
