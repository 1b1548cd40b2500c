"""Enough of CUDA on a CPU for engines of a few hundred lines: "cuda" tensors lie in memory, and a graph is a recording.

A replay runs the recorded operators again, so that an engine's answers through graphs are answers, and a wrong graph
gives wrong ones. What is asked of memory is answered by a device of 64 MiB from which each graph takes 1 MiB.
To be installed before the engine is imported, in a process of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from graphprobe.backends.recorder import Tape, _Recording

MIB = 1 << 20
FREE = [64 * MIB]


class Stream:
    """All work is done when the call returns."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class Event:
    """Nothing is ever waited for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass


class Graph:
    """What was run between ``capture_begin`` and ``capture_end``."""

    launched = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._tape = Tape()
        self._recording = _Recording(self._tape, ())

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        self._recording.__enter__()

    def capture_end(self) -> None:
        self._recording.__exit__(None, None, None)
        self._recording.restore()
        FREE[0] -= MIB

    def replay(self) -> None:
        Graph.launched += 1
        self._tape.replay()

    def pool(self) -> tuple[int, int]:
        return (0, 1)


STREAM = Stream()


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on torch has a device that it calls cuda. ``put`` may be what a test takes back at its end."""
    plain, start, default = torch.tensor, dist.init_process_group, torch.set_default_device
    named = {
        "is_available": lambda: True,
        "mem_get_info": lambda *args: (FREE[0], 64 * MIB),
        "memory_stats": lambda *args: defaultdict(int),
        "current_stream": lambda *args: STREAM,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize", "set_stream"):
        named[name] = nothing()
    for name, value in named.items():
        put(torch.cuda, name, value)
    put(torch.cuda.graphs, "CUDAGraph", Graph)
    put(torch.cuda.nvtx, "range", lambda *args: contextlib.nullcontext())
    put(torch._C, "_host_emptyCache", nothing())
    # torch keeps a mode for it, which forwards run in.
    put(torch, "set_default_device", lambda device: default("cpu"))
    # Compiled, the engine would ask for a compiler for a device that is not there.
    put(torch, "compile", lambda function=None, **kwargs: function)
    put(torch, "tensor", lambda *args, pin_memory=False, **kwargs: plain(*args, **kwargs))
    put(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    alone = {"rank": 0, "world_size": 1}
    put(dist, "init_process_group", lambda *args, **kwargs: start("gloo", store=dist.HashStore(), **alone))


def nothing() -> Any:
    """A function that does nothing; a new one each time, since torch tells its functions apart by identity."""
    return lambda *args, **kwargs: None


class Anything(ModuleType):
    """A module that has every name, and is never really used: its kernels are not launched."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: args[0] if args else None


@contextlib.contextmanager
def standing_in(*names: str) -> Iterator[None]:
    """Such modules in the place of ``names``, while an engine is imported: later torch must not find a triton."""
    for name in names:
        found = sys.modules[name] = Anything(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, found)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def store_kvcache(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: Any) -> None:
    """nano-vllm's kernel: rows to their slots. One without a slot goes to the last one, which no test ever fills."""
    last = k_cache.shape[0] * k_cache.shape[1] - 1
    index = torch.where(slots < 0, last, slots).long()
    for rows, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, index, rows)
