"""What the device did in one run, read off torch's profiler in process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._autograd import DeviceType, _profiler_enabled

from graphprobe.errors import SourceError
from graphprobe.tools.timeline import Timeline, Work

COPIES = ("memcpy", "memset")
"""Kinds of work that are no kernels; their names begin so."""


def recorded(run: Callable[[], Any], device: torch.device) -> Timeline:
    """The work of one ``run`` on ``device``, between two waits; SourceError where the profiler saw none or may not run.

    Profiling slows the host down, so that gaps of an eager run are somewhat longer than without it.
    """
    if _profiler_enabled():
        # There is one profiler in a process: a second one would end the first.
        raise SourceError("a profiler is running already. hint: account outside it")
    with _profiler(device) as profiler:
        run()
        torch.cuda.synchronize(device)
    events = profiler.profiler.kineto_results.events()
    launches = {event.correlation_id(): event.start_ns() / 1e3 for event in events if _launch(event)}
    works = [
        Work(
            start_us=event.start_ns() / 1e3,
            end_us=(event.start_ns() + event.duration_ns()) / 1e3,
            stream=event.device_resource_id(),
            name=event.name(),
            kind=_kind(event.name()),
            correlation=event.correlation_id(),
            launch_us=launches.get(event.correlation_id()),
        )
        for event in events
        if event.device_type() == DeviceType.CUDA
        and event.device_index() == _index(device)
        and not event.is_user_annotation()
    ]
    if not works:
        hint = "is another profiler attached, or CUPTI not there?"
        raise SourceError(f"torch's profiler saw no work of {device}. hint: {hint}")
    return Timeline(tuple(works))


@contextlib.contextmanager
def _profiler(device: torch.device) -> Iterator[Any]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True):
        # The first one sets CUPTI up, and may miss what comes meanwhile.
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        yield profiler


def _launch(event: Any) -> bool:
    return event.device_type() == DeviceType.CPU and "Launch" in event.name()


def _kind(name: str) -> str:
    return next((kind for kind in COPIES if name.lower().startswith(kind)), "kernel")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
