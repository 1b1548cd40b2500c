"""CUDA graphs through torch (ROCm comes with it), one memory pool and one capture stream per wrapper."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from graphprobe.backends.base import Backend, Graph, capture_state, explained
from graphprobe.errors import CaptureError
from graphprobe.timers import EventTimer, Timer


class _Order:
    """The stream of the last replay among the wrappers of one pool: their graphs may use the same memory.

    ``quick`` is the stream on which nothing need be looked at, -1 where there is none.
    """

    def __init__(self) -> None:
        self.last: torch.cuda.Stream | None = None
        self.raw = -1
        self.quick = [-1]


_ORDERS: weakref.WeakValueDictionary[Any, _Order] = weakref.WeakValueDictionary()


def _caching() -> bool:
    """Whether torch's caching allocator is in use."""
    if any(f"PYTORCH_NO_{kind}_MEMORY_CACHING" in os.environ for kind in ("CUDA", "HIP")):
        return False
    known = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)
    return known is None or bool(known())


class CudaBackend(Backend):
    """Captures in thread-local error mode, so that other threads may go on using the device."""

    name = "cuda"

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        super().__init__(torch.device(device.type, index))
        self.index = index
        self._given_pool = pool
        self.pool = pool
        self._keeper: torch.cuda.CUDAGraph | None = None
        # A stream of its own per wrapper: cuBLAS keeps one workspace per capture stream, and two graphs that
        # share one must not run at the same time.
        self._stream: torch.cuda.Stream | None = None
        self._pools: list[Any] = []
        self._order = _ORDERS.setdefault(pool, _Order()) if pool is not None else _Order()
        self._raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._device_now: Callable[[], int] = torch._C._cuda_getDevice
        self.stream_check = (self._raw_stream, self.index, self._order.quick)
        self._capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing

    def ready(self) -> bool:
        """Whether a replay may start on the current stream; orders it after the stream of the last one.

        False where another device is the current one, and inside a capture.
        """
        if self._device_now() != self.index or self._capturing():
            return False
        raw, order = self._raw_stream(self.index), self._order
        if raw != order.raw:
            now = torch.cuda.current_stream(self.index)
            if order.last is not None:
                now.wait_stream(order.last)
            order.last, order.raw = now, raw
            # The default stream cannot be capturing; with one device the current one is ours.
            order.quick[0] = 0 if raw == 0 and torch.cuda.device_count() == 1 else -1
        return True

    def capturing(self) -> bool:
        """Whether the current stream is capturing."""
        return self._capturing()

    def _stream_now(self) -> torch.cuda.Stream:
        if self._order.last is not None and self._raw_stream(self.index) == self._order.raw:
            return self._order.last
        return torch.cuda.current_stream(self.index)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which this backend's device is the current one."""
        return torch.cuda.device(self.index)

    def capture(self, run: Callable[[], Any], generators: tuple[torch.Generator, ...] = ()) -> tuple[Graph, Any]:
        """The graph of ``run()``, captured on a side stream with the caller's stream and device restored."""
        if not _caching():
            raise CaptureError("torch's caching allocator is switched off: its memory cannot stay with a graph")
        with self.scope():
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.index)
            self._keep_pool()
            before = torch.cuda.current_stream(self.index)
            graph = self._new_graph(generators)
            # Work of other streams on the same tensors must be over before the capture's allocations reuse memory.
            torch.cuda.synchronize(self.index)
            self._stream.wait_stream(before)
            try:
                with capture_state(), torch.cuda.stream(self._stream):
                    result = self._record(graph, run)
            finally:
                torch.cuda.set_stream(before)
            before.wait_stream(self._stream)
        return graph, result

    def _keep_pool(self) -> None:
        """Have a pool with a graph in it that stays: torch refuses a pool once its last graph is gone."""
        if self._keeper is not None:
            return
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        cell = torch.zeros(1, device=self.device)
        keeper = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            keeper.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            cell.zero_()
            keeper.capture_end()
        self._keeper = keeper
        if self.pool not in self._pools:
            self._pools.append(self.pool)

    def _new_graph(self, generators: tuple[torch.Generator, ...]) -> Any:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        return graph

    def _record(self, graph: Any, run: Callable[[], Any]) -> Any:
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            result = run()
        except BaseException as error:
            self._abandon(graph)
            if not isinstance(error, Exception):
                raise
            raise explained(error) from error
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                graph.capture_end()
            except Exception as error:
                self._heal()
                self._give_up_pool()
                raise explained(error) from error
        if any("CUDA Graph is empty" in str(w.message) for w in caught):
            graph.reset()
            raise CaptureError("the forward launched nothing on the capture stream, so there is nothing to replay")
        return result

    def _abandon(self, graph: Any) -> None:
        """End a capture that an exception left open."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph.capture_end()
            graph.reset()
        except Exception:
            self._heal()
            self._give_up_pool()

    def _give_up_pool(self) -> None:
        """Capture into another pool from now on: torch takes no more captures into one whose capture broke.

        The graphs that are in it keep it. A pool of the caller's cannot be given up.
        """
        if self._given_pool is None:
            self.pool, self._keeper = None, None

    def _heal(self) -> None:
        """Undo what torch leaves behind where the end of a capture failed (seen in 2.11).

        The allocator goes on routing to the pool, and the generators stay in capture mode, so that the next random
        number anywhere would raise: a capture that succeeds puts them right.
        """
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(self.index, self.pool)
            torch._C._cuda_releasePool(self.index, self.pool)
        self._stream = torch.cuda.Stream(self.index)
        with contextlib.suppress(Exception), torch.cuda.stream(self._stream):
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self.device)
            empty.capture_end()
            empty.reset()

    def loose(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor at the same address: the results of all buckets would add up in the pool if each were kept."""
        if tensor.is_conj() or tensor.is_neg() or torch.cuda.get_allocator_backend() != "native":
            return tensor
        storage = tensor.untyped_storage()
        twin = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return fresh.set_(twin, tensor.storage_offset(), tensor.shape, tensor.stride())

    def pool_bytes(self) -> int | None:
        """Bytes of the segments that the allocator reserved for the pool (for several, after a capture that broke)."""
        pools = {tuple(pool) for pool in self._pools}
        try:
            # All segments: asked for one pool, torch 2.11 lets go of references to the numbers of its id that it does
            # not own, and those above 256 are freed while in use.
            segments = torch.cuda.memory_snapshot()
            return sum(int(s["total_size"]) for s in segments if tuple(s["segment_pool_id"]) in pools)
        except Exception:
            return None

    def release(self) -> None:
        """Forget the pool; a later capture starts a new one."""
        if self._keeper is not None:
            self._keeper.reset()
        self.pool, self._keeper, self._pools = self._given_pool, None, []
        self._stream = None
        # Else the pool's memory stays reserved, and a capture cannot have it.
        with self.scope():
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.index)

    def timer(self) -> Timer:
        """Event pairs on this device."""
        with self.scope():
            return EventTimer(lambda: torch.cuda.Event(enable_timing=True), self._stream_now)


def in_use() -> list[tuple[int, float]] | None:
    """Where torch's allocator has memory that is in use: first address and end of each block, ascending.

    None with an allocator that does not tell, and without a device.
    """
    if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native":
        return None
    blocks = (block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"])
    used = (block for block in blocks if block["state"].startswith("active"))
    return sorted((block["address"], block["address"] + block["size"]) for block in used)
