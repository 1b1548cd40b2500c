"""Warm-up: capturing every bucket before traffic, on inputs that the caller provides."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graphprobe.errors import ConfigError
from graphprobe.graphs import GraphSet

MakeInputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
"""bucket -> (args, kwargs) of one call with that many rows."""


@dataclass(frozen=True, slots=True)
class BucketReport:
    """What warm-up did for one bucket: ``outcome`` is ok, error, oom or skipped; ``bytes`` may be unknown."""

    bucket: int
    outcome: str
    seconds: float
    bytes: int | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """One entry per bucket, largest first, and the seconds that all of it took."""

    buckets: tuple[BucketReport, ...]
    seconds: float

    @property
    def captured(self) -> tuple[int, ...]:
        """The buckets that have a graph now, ascending."""
        return tuple(sorted(b.bucket for b in self.buckets if b.outcome == "ok"))

    @property
    def missing(self) -> tuple[int, ...]:
        """The buckets that have none, ascending."""
        return tuple(sorted(b.bucket for b in self.buckets if b.outcome != "ok"))

    def __iter__(self) -> Iterator[BucketReport]:
        return iter(self.buckets)


def warm_up(graphs: GraphSet, owner: Any, make_inputs: MakeInputs, progress: bool | None) -> WarmupReport:
    """Run every bucket eagerly, then capture every bucket, largest first both times.

    All eager runs come first: a workspace that grows at one size must have grown before any graph reads it.
    """
    began = time.perf_counter()
    order = sorted(graphs.options.buckets, reverse=True)
    reports = []
    with _state_restored(graphs.options.state), graphs.captures.warm(), _bar(progress, 2 * len(order)) as step:
        for bucket in order:
            for _ in range(max(1, graphs.options.eager_first)):
                graphs.rehearse(owner, *_inputs(make_inputs, bucket))
            step(f"warm-up {bucket}")
        for bucket in order:
            reports.append(graphs.capture_now(owner, *_inputs(make_inputs, bucket), bucket))
            step(f"capture {bucket}")
    graphs.captures.closed = True
    return WarmupReport(tuple(BucketReport(*r) for r in reports), time.perf_counter() - began)


def _inputs(make_inputs: MakeInputs, bucket: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made = make_inputs(bucket)
    if not (
        isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict)
    ):
        raise ConfigError(f"make_inputs({bucket}) must return (args, kwargs), got {repr(made)[:80]}")
    return tuple(made[0]), made[1]


@contextlib.contextmanager
def _state_restored(state: Any) -> Iterator[None]:
    tensors: list[torch.Tensor] = [] if state is None or isinstance(state, str) else list(state)
    with torch.no_grad():
        saved = [t.clone() for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in zip(tensors, saved, strict=True):
                tensor.copy_(before)


@contextlib.contextmanager
def _bar(wanted: bool | None, total: int) -> Iterator[Callable[[str], None]]:
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warm-up", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)
