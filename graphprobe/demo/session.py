"""One session: the same traffic through captured graphs and without them, on one model and one cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast

import torch

import graphprobe
from graphprobe.buckets import Buckets
from graphprobe.demo.engine import PAD, Engine, Moment, Request, decode_with
from graphprobe.demo.models import Chat
from graphprobe.demo.result import DemoError
from graphprobe.graphed import GraphedCallable
from graphprobe.snapshot import ForwardSnapshot
from graphprobe.warmup import WarmupReport

FORWARD = "decode"

Watch = Callable[[Moment], None]


def pick_device(asked: str | None) -> torch.device:
    """``asked``, or the accelerator of this machine, or the CPU; DemoError where ``asked`` cannot be used."""
    if asked is None:
        usable = [kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()]
        return torch.device(usable[0] if usable else "cpu")
    try:
        return torch.empty(0, device=asked).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DemoError(f"device {asked!r} cannot be used here: {str(error).splitlines()[0]}") from error


class Session:
    """A model with requests to answer, its decode step captured once and kept plain once."""

    def __init__(self, chat: Chat, requests: list[Request], buckets: Buckets, pad: bool, slots: int) -> None:
        longest = max(len(request.ids) + request.limit for request in requests)
        self.chat, self.requests, self.buckets, self.pad = chat, requests, buckets, pad
        self.uncovered = buckets.uncovered(slots, padded=pad)
        # A multiple of 16 keeps the rows of the mask aligned, as the GPU's attention kernels want them.
        self.cache = chat.model.allocate(slots, -(-longest // 16) * 16)
        self.device = self.cache.keys.device
        self.backend = "recorder" if self.device.type == "cpu" else "auto"
        self.batch_sizes: list[int] = []
        self.plain = decode_with(chat.model)
        fills = {**PAD, "slots": self.cache.scratch} if pad else None
        decorate = graphprobe.capture(
            buckets=buckets, max_batch=slots, pad=fills, backend=self.backend, name=FORWARD, timing=1
        )
        self.graphed = cast(GraphedCallable, decorate(self.plain))
        # The process may have served under this name before, and with other buckets.
        self._before = self.graphed.snapshot()

    def snapshot(self) -> ForwardSnapshot:
        """What this session has counted."""
        counted = self.graphed.snapshot() - self._before
        return replace(counted, buckets=tuple(self.buckets))

    def warmup(self) -> WarmupReport:
        """Capture every bucket ahead of traffic, on rows that touch nothing but the scratch slot."""
        return self.graphed.warmup(self._scratch_rows)

    def _scratch_rows(self, bucket: int) -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
        row = {**PAD, "slots": self.cache.scratch}
        return (), {name: torch.full((bucket,), value, device=self.device) for name, value in row.items()}

    def with_graphs(self, watch: Watch) -> float:
        """Serve the requests through the captured decode; returns the seconds of all decode steps.

        This engine knows nothing of graphs, buckets or padding.
        """
        engine = Engine(self.chat.model, self.graphed, self.chat.stop)
        engine.serve(self.requests, watch)
        self.batch_sizes = engine.batch_sizes
        return engine.seconds

    def without_graphs(self, watch: Watch) -> tuple[list[Request], float]:
        """Serve fresh copies eagerly, with padding at the padded sizes; returns them, and the decode steps' seconds."""
        self.cache.clear()
        again = [request.fresh() for request in self.requests]
        engine = Engine(self.chat.model, self.plain, self.chat.stop, self.buckets if self.pad else None)
        engine.serve(again, watch)
        return again, engine.seconds


def difference(graphs: Iterable[Request], eager: Iterable[Request]) -> str:
    """What differs between two runs of the same requests, in words; empty where every token is equal."""
    differ = [(a, b) for a, b in zip(graphs, eager, strict=True) if a.tokens != b.tokens]
    if not differ:
        return ""
    a, b = differ[0]
    pairs = list(zip(a.tokens, b.tokens, strict=False))
    at = next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs))
    many = "1 request" if len(differ) == 1 else f"{len(differ)} requests"
    return f"{many} got other tokens with graphs, the first is {a.prompt!r} at token {at}"
