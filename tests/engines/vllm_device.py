"""A CPU in place of the device and of other ranks, for vLLM's own code: what asks them is answered here."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import vllm.v1.worker.dp_utils as ranks_v1
import vllm.v1.worker.gpu.cudagraph_utils as graphs_v2
import vllm.v1.worker.gpu.dp_utils as ranks_v2
import vllm.v1.worker.gpu.model_runner as v2
import vllm.v1.worker.gpu_model_runner as v1
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform

from tests.engines.vllm_setups import Setup

CPU = torch.device("cpu")


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for what needs a device."""


def inside(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    """Stands in for a context of the device."""
    return contextlib.nullcontext()


class Graph:
    """Stands in for a graph of the device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def replay(self) -> None:
        """Nothing was recorded."""


@contextlib.contextmanager
def no_device(setup: Setup) -> Iterator[None]:
    """What asks a device, or other ranks, is answered here."""
    left = itertools.count(2**40, -(2**20))
    first = SimpleNamespace(is_first_rank=True, is_last_rank=True, local_rank=0)
    with contextlib.ExitStack() as stack:
        for place, name, made in (
            (gc, "collect", nothing),  # a second each time, with all of vLLM loaded
            (torch.accelerator, "synchronize", nothing),
            (torch.accelerator, "empty_cache", nothing),
            (torch.accelerator, "get_memory_info", lambda: (next(left), 2**40)),
            (torch.cuda, "CUDAGraph", Graph),
            (torch.cuda, "graph", inside),
            (v1, "graph_capture", inside),
            (v1, "is_global_first_rank", lambda: False),
            (v1, "lock_workspace", nothing),
            (graphs_v2, "graph_capture", inside),
            (graphs_v2, "is_global_first_rank", lambda: False),
            (graphs_v2, "get_pp_group", lambda: first),
            (v2, "lock_workspace", nothing),
            (v2, "set_forward_context", inside),
            (graphs_v2, "capture_pool", inside),
            (graphs_v2, "current_stream", nothing),
            (graphs_v2, "set_graph_pool_id", nothing),
        ):
            if hasattr(place, name):
                stack.enter_context(patch.object(place, name, made))
        # The platform answers None for whatever it does not have.
        for name in ("get_global_graph_pool", "graph_pool_handle"):
            stack.enter_context(patch.object(type(current_platform), name, nothing, create=True))
        stack.enter_context(patch("vllm.distributed.parallel_state.get_world_group", lambda: first))
        if setup.breakable:
            stack.enter_context(patch.dict(os.environ, VLLM_USE_BREAKABLE_CUDAGRAPH="1"))
        if setup.peer:
            stack.enter_context(_peer(*setup.peer))
        yield


@contextlib.contextmanager
def _peer(tokens: int, mode: str) -> Iterator[None]:
    """Another rank that does what this one does, with so many tokens, in that mode."""

    def reduce(tensor: Any, group: Any = None) -> None:
        tensor[:, 1] = tensor[:, 0]
        # V1 sends tokens before and after padding, and the mode last; V2 tokens and the mode.
        rows, where = ((0, 1), 3) if group == "v1" else ((0,), 1)
        for row in rows:
            tensor[row, 1] = tokens
        tensor[where, 1] = CUDAGraphMode[mode].value
        if group != "v1" and mode == "PIECEWISE":
            tensor[2, 1] = 0  # no uniform decode

    def group(name: str) -> Any:
        return SimpleNamespace(device=CPU, cpu_group=name, device_group=name, cpu_all_reduce_=reduce)

    with (
        patch.object(ranks_v1, "get_dp_group", lambda: group("v1")),
        patch.object(ranks_v2, "get_dp_group", lambda: group("v2")),
        patch.object(torch.distributed, "all_reduce", reduce),
    ):
        yield
