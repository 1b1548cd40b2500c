"""What a backend does, in the order in which it is asked.

1. ``capture(run)`` runs ``run`` once on the host and returns the graph and run's result, whose tensors are the
   graph's own memory. No device work of ``run`` happens before the first replay. On failure everything the
   capture touched is as before (stream, device, gc, grad and autocast state, state written in place) and
   CaptureError is raised, with the first cause as its ``__cause__``.
2. ``ready()`` says, before each replay, whether this thread may replay on its current stream now, and orders that
   stream after the last one. Inside ``scope()`` the current device is right.
3. ``graph.replay()`` enqueues the captured work on the current stream.
4. ``graph.reset()``, then ``release()``: the memory goes back once the outputs are gone, too.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from graphprobe.errors import CaptureError
from graphprobe.timers import Timer


class CaptureLock:
    """One capture at a time in a process: the rule of CUDA graphs in torch."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Free, as at the start."""
        self._lock = threading.RLock()
        self._collecting: tuple[int, bool] | None = None

    def acquire(self) -> bool:
        """Take the lock; False where another thread has it."""
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Give it back."""
        self._lock.release()

    @contextlib.contextmanager
    def uncollected(self) -> Iterator[None]:
        """No garbage collection inside."""
        before = gc.isenabled()
        gc.disable()
        self._collecting = (threading.get_ident(), before)
        try:
            yield
        finally:
            self._collecting = None
            if before:
                gc.enable()

    def after_fork(self) -> None:
        """In the child: a capture of a thread that is not here is over."""
        missing = self._collecting is not None and self._collecting[0] != threading.get_ident()
        if missing and self._collecting is not None and self._collecting[1]:
            gc.enable()
        if missing or self._collecting is None:
            self.renew()


CAPTURE_LOCK = CaptureLock()


def after_fork() -> None:
    """In a forked child."""
    CAPTURE_LOCK.after_fork()


class Graph(Protocol):
    """One captured graph."""

    def replay(self) -> None:
        """Enqueue the captured work on the current stream."""

    def reset(self) -> None:
        """Give up the graph; it cannot be replayed afterwards."""


class Backend(ABC):
    """Captures on one device for one wrapper; all of its graphs share one memory pool."""

    name: str

    stream_check: tuple[Callable[[int], int] | None, int, list[int]] = (None, 0, [0])
    """(function, its argument, one value): while the function returns the value, ``ready()`` need not be asked.
    Without a function it need never be asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def capture(self, run: Callable[[], Any], generators: tuple[torch.Generator, ...] = ()) -> tuple[Graph, Any]:
        """The graph of ``run()`` and its result. CaptureError on failure."""

    def ready(self) -> bool:
        """Whether a replay may start right now on the current stream; asked by whoever has the turn."""
        return True

    def capturing(self) -> bool:
        """Whether somebody captures on the current stream; a capture of ours would break theirs."""
        return False

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which this backend's device is the current one."""
        return contextlib.nullcontext()

    def loose(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory of a graph's as a tensor that does not keep it from the pool's other graphs."""
        return tensor

    def pool_bytes(self) -> int | None:
        """Bytes that the graphs' pool has reserved, None where that is unknown."""
        return None

    def release(self) -> None:
        """Forget the pool; its memory returns with the last graph and output."""

    def synchronize(self) -> None:
        """Wait for the device; used by warmup only, never while serving."""

    @abstractmethod
    def timer(self) -> Timer:
        """A timer for work on this device."""


@contextlib.contextmanager
def capture_state() -> Iterator[None]:
    """The process as a capture needs it, and as it was before on the way out, whatever happened inside.

    No garbage collection: collecting an old graph while another is captured ends the capture. No autocast cache:
    a cast made outside would be read by the graph for ever, one made inside would be read by others.
    """
    grad, caching = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    casting = {kind: torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")}
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        with CAPTURE_LOCK.uncollected():
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)
        for kind, on in casting.items():
            torch.set_autocast_enabled(kind, on)
        torch.set_grad_enabled(grad)


def explained(error: Exception) -> CaptureError:
    """The failure with its first cause in front: torch reports the end of a broken capture, not its beginning."""
    if isinstance(error, CaptureError):
        return error
    chain: list[BaseException] = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    oom = [e for e in chain if isinstance(e, torch.OutOfMemoryError) or "out of memory" in _text(e).lower()]
    first = oom[-1] if oom else chain[-1]
    text = _text(first) + _line(first)
    if first is not error and not oom:
        text += f", then {_text(error)}"
    return CaptureError(text, "oom" if oom else "error")


def _text(error: BaseException) -> str:
    """The first line of an exception, whose own text may fail."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []
    return lines[0] if isinstance(error, CaptureError) and lines else f"{type(error).__name__}: {(lines or ['?'])[0]}"


def _line(error: BaseException) -> str:
    """Where in the forward an exception was raised: the innermost line that is neither torch's nor ours."""
    ours, torchs = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    if isinstance(error, CaptureError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((ours, torchs, "<"))]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
