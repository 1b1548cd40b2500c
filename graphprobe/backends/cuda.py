"""CUDA graphs through torch (ROCm comes with it), one memory pool and one capture stream per wrapper."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from graphprobe.backends.base import Backend, Graph, capture_state, explained
from graphprobe.errors import CaptureError
from graphprobe.timers import EventTimer, Timer


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
        self._last: torch.cuda.Stream | None = None
        self._last_raw = -1
        self._raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._device_now: Callable[[], int] = torch._C._cuda_getDevice
        self._quick = [-1]
        self.stream_check = (self._raw_stream, self.index, self._quick)
        self._capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing

    def ready(self) -> bool:
        """Whether a replay may start on the current stream; orders it after the stream of the last one.

        False where another device is the current one, and inside a capture.
        """
        if self._device_now() != self.index or self._capturing():
            return False
        raw = self._raw_stream(self.index)
        if raw != self._last_raw:
            now = torch.cuda.current_stream(self.index)
            if self._last is not None:
                now.wait_stream(self._last)
            self._last, self._last_raw = now, raw
            # The default stream cannot be capturing; with one device the current one is ours.
            self._quick[0] = 0 if raw == 0 and torch.cuda.device_count() == 1 else -1
        return True

    def capturing(self) -> bool:
        """Whether the current stream is capturing."""
        return self._capturing()

    def _stream_now(self) -> torch.cuda.Stream:
        if self._last is not None and self._raw_stream(self.index) == self._last_raw:
            return self._last
        return torch.cuda.current_stream(self.index)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which this backend's device is the current one."""
        return torch.cuda.device(self.index)

    def capture(self, run: Callable[[], Any], generators: tuple[torch.Generator, ...] = ()) -> tuple[Graph, Any]:
        """The graph of ``run()``, captured on a side stream with the caller's stream and device restored."""
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

    def pool_bytes(self) -> int | None:
        """Bytes of the segments that the allocator reserved for this pool."""
        if self.pool is None:
            return 0
        try:
            segments = torch.cuda.memory_snapshot(self.pool)
        except Exception:
            return None
        return sum(
            int(s["total_size"]) for s in segments if tuple(s.get("segment_pool_id", self.pool)) == tuple(self.pool)
        )

    def release(self) -> None:
        """Forget the pool; a later capture starts a new one."""
        if self._keeper is not None:
            self._keeper.reset()
        self.pool, self._keeper = self._given_pool, None
        self._stream = None

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.index)

    def timer(self) -> Timer:
        """Event pairs on this device."""
        with self.scope():
            return EventTimer(lambda: torch.cuda.Event(enable_timing=True), self._stream_now)
