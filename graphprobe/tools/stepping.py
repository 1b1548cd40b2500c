"""One step, measured in each way: eagerly, as a graph, queued ahead, and by what it reads."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _profiler_enabled

from graphprobe.backends.cuda import CudaBackend
from graphprobe.errors import CaptureError, SourceError
from graphprobe.tools.balance import Step
from graphprobe.tools.filled import filled
from graphprobe.tools.gaps import recorded
from graphprobe.tools.reads import reads
from graphprobe.tools.timeline import Timeline
from graphprobe.watch import Watch

WARM = 3
"""Calls before anything is measured: libraries set themselves up, and choose kernels."""

LOOPS, LEAST = 5, 0.15
"""Loops of which the median is taken, and the seconds that each takes at least."""

COPIED = 1 << 30
"""Bytes of the tensor whose copy measures the bandwidth: many times any cache of a GPU."""

PROFILED = 10
"""Calls under the profiler of a step on the host."""

LEAST_COPIED = 256 << 20
"""Bytes below which a copy says more of the cache than of the memory."""

QUEUE = 900
"""Launches that a queue takes before the host waits, with some room."""


@dataclass(frozen=True)
class Call:
    """The forward with the arguments of one batch size."""

    batch: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        """Run it."""
        return self.fn(*self.args, **self.kwargs)

    def compiled(self) -> Call:
        """The same, compiled by torch at its first run."""
        return replace(self, fn=torch.compile(self.fn))


class Measured(NamedTuple):
    """A step, and what the device did in an eager run and in a replay."""

    step: Step
    eager: Timeline | None = None
    graph: Timeline | None = None


@dataclass
class _Captured:
    """What the graphs of one account hold."""

    backend: CudaBackend
    graphs: list[Any] = field(default_factory=list)
    residual: int = 0
    """Bytes that the driver took for them beside what the allocator reserved."""


def on_device(
    device: torch.device, calls: list[Call], compile: bool, timelines: bool
) -> tuple[list[Measured], int | None]:
    """All steps, ascending in size, and the bytes that the driver took for their graphs beside the allocator's.

    Their graphs share one pool, and the largest is captured first. The bytes are None where there is no graph.
    """
    held = _Captured(CudaBackend(device))
    try:
        found = [_measured(call, device, held, compile, timelines) for call in reversed(calls)]
    finally:
        for graph in held.graphs:
            graph.reset()
        held.backend.release()
    return found[::-1], max(0, held.residual) if held.graphs else None


def _beside(device: torch.device) -> int:
    """Bytes of the device that nobody has, or the allocator."""
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def _measured(call: Call, device: torch.device, held: _Captured, compile: bool, timelines: bool) -> Measured:
    compiling = _first(call, device) if compile else None
    for _ in range(WARM):
        call()
    read, problem = _read(call, device), _problem(call, device)
    eager, ahead = _wall(call, device), filled(call, device)
    host: float | None = _enqueued(call, device)
    lines, kernels, notes = _recorded(call, device)
    if ahead is None:
        notes.append("its launches could not all be queued ahead: it waits for the device, or an operator has too many")
    if kernels is not None and kernels > QUEUE and ahead is not None and ahead > 0.9 * eager:
        # The queue was full, so the host waited for the device, not the device for the host.
        host = None
        notes.append("the device is slower than the host, so launch time could not be told from waiting")
    step = Step(call.batch, kernels, eager, None, ahead, host, read, None, None, compiling, tuple(notes))
    replayed = _replayed(step, call, device, held, problem)
    graph = None
    if replayed.graph is not None and timelines:
        graph = _recorded(held.graphs[-1].replay, device)[0]
    return Measured(replayed, lines if timelines else None, graph)


def _replayed(step: Step, call: Call, device: torch.device, held: _Captured, problem: str) -> Step:
    """The step with what its graph takes, or with the reason why there is none."""
    if problem:
        return replace(step, refused=problem)
    beside, before, begin = _beside(device), held.backend.pool_bytes(), time.perf_counter()
    try:
        graph, result = held.backend.capture(call)
    except CaptureError as error:
        return replace(step, refused=f"its capture failed: {error}")
    seconds, after = time.perf_counter() - begin, held.backend.pool_bytes()
    held.graphs.append(graph)
    del result
    # The driver takes some of it at the first launch only.
    graph.replay()
    held.residual += beside - _beside(device)
    return replace(
        step,
        graph=_wall(graph.replay, device),
        capture=seconds + (step.compile or 0.0),
        pool_bytes=None if before is None or after is None else after - before,
    )


def _read(call: Call, device: torch.device) -> int | None:
    """Bytes that a step reads; None where some of its operators cannot be looked at."""
    try:
        return reads(call, device).bytes or None
    except NotImplementedError:
        return None


def _problem(call: Call, device: torch.device) -> str:
    """What is in the way of a capture; empty where nothing is seen."""
    watch = Watch([], device, lenient=True)
    with watch:
        call()
    return watch.problem


def on_host(call: Call) -> Step:
    """What can be measured without a device: the step, its operators, and the host's time between them."""
    for _ in range(WARM):
        call()
    device = torch.device("cpu")
    read, eager, between, counted = _read(call, device), _wall(call, device), None, "its"
    if not _profiler_enabled():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(PROFILED):
                call()
        seen = [event for event in profiler.key_averages() if event.key.startswith("aten::")]
        between = eager - sum(event.self_cpu_time_total for event in seen) * 1e-6 / PROFILED
        counted = f"{sum(event.count for event in seen) // PROFILED}"
    between = between if between is not None and between > 0 else None
    host = "is not known" if between is None else f"takes {between * 1e3:.3g} ms"
    note = f"between {counted} operators the host {host}; kernels, graphs and the floor need a CUDA GPU"
    return Step(call.batch, eager=eager, host=between, bytes_read=read, notes=(note,))


def bandwidth(device: torch.device) -> float | None:
    """Bytes per second that a copy within the device reads and writes; None where it has no room for one."""
    size = min(COPIED, torch.cuda.mem_get_info(device)[0] // 4)
    if size < LEAST_COPIED:
        return None
    found = _copied(size, device)
    # Else these two would be the allocator's for good.
    torch.cuda.empty_cache()
    return found


def _copied(size: int, device: torch.device) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _wall(lambda: target.copy_(source), device)


def _wall(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds per run of a loop that ends in a wait: the median of some loops."""
    count = max(3, math.ceil(LEAST / _once(run, device, 1)))
    return statistics.median(_once(run, device, count) for _ in range(LOOPS))


def _once(run: Callable[[], Any], device: torch.device, count: int) -> float:
    _wait(device)
    begin = time.perf_counter()
    for _ in range(count):
        run()
    _wait(device)
    return max(time.perf_counter() - begin, 1e-9) / count


def _enqueued(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds until the host has launched a step, on a device that has nothing else to do."""
    found = []
    for _ in range(5):
        _wait(device)
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def _first(call: Call, device: torch.device) -> float:
    """Seconds of the first run of a compiled forward beyond those of the second; none where it was compiled before."""
    return max(0.0, _once(call, device, 1) - _once(call, device, 1))


def _recorded(run: Callable[[], Any], device: torch.device) -> tuple[Timeline | None, int | None, list[str]]:
    try:
        found = recorded(run, device)
    except SourceError as error:
        return None, None, [f"kernels were not counted: {error}"]
    return found, found.kernels, []


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
