"""SGLang's captures: what each graph cost, the compilation before it apart, and what is said once all are made."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from graphprobe.errors import INFO
from graphprobe.instrument import Function
from graphprobe.ledger import Forward
from graphprobe.stopwatch import free_bytes
from graphprobe_sglang import PATCHES
from graphprobe_sglang_watch import Watch, by_tokens, draft_phase, watch_of

failed = PATCHES.failed

JIT = 5.0
"""Seconds of warm-up before captures from which on they are told: kernels were compiled in them."""


class Capturing(threading.local):
    """The captures that this thread is in."""

    depth = 0
    books: Books | None = None


CAPTURING = Capturing()


Costs = dict[int, tuple[float, int | None]]
"""Seconds and bytes, by size."""


class Books:
    """What the graphs of one runner of SGLang's have cost: a size may have several, for variants of a pass.

    ``costs`` are those of all runners of the forward, by kind: a drafter has two, with the same sizes.
    """

    def __init__(self, forward: Forward, costs: dict[str, Costs], graph: Any) -> None:
        kind = type(graph).__name__
        self.forward = forward
        # Graphs of ragged drafts are made by tokens, and pad to so many requests.
        ragged = getattr(graph, "ragged_verify_mode", False)
        self._slots = getattr(graph, "_ragged_capture_slots", int) if ragged else int
        self._costs = costs
        self._own = costs[kind] = {}
        self.warmup = 0.0
        self.began = time.perf_counter()
        self.free = free_bytes()

    def captured(self, size: int, outcome: str, seconds: float, growth: int | None) -> None:
        """One graph is made, or was tried."""
        bucket = int(self._slots(size))
        before, taken = self._own.get(bucket, (0.0, 0))
        self._own[bucket] = (before + seconds, None if growth is None or taken is None else taken + growth)
        known = [costs[bucket] for costs in self._costs.values() if bucket in costs]
        grown = [n for _, n in known if n is not None]
        whole = sum(grown) if len(grown) == len(known) else None
        self.forward.captured(bucket, outcome, sum(seconds for seconds, _ in known), whole)

    def close(self) -> None:
        """All of them are made."""
        free = free_bytes()
        if self._own and free is not None and self.free is not None:
            holder = self.forward.holders[0] if self.forward.holders else self.forward.holder()
            taken = self.free - free
            # From the device's free memory: below 0 where another process gave some back meanwhile.
            holder.pool_bytes = None if taken < 0 else taken + (holder.pool_bytes or 0)
        if self.warmup >= JIT:
            whole, captures = time.perf_counter() - self.began, sum(seconds for seconds, _ in self._own.values())
            text = (
                f"of {whole:.1f} s for {len(self._own)} sizes of graphs, captures took {captures:.1f} s and the "
                f"passes before them {self.warmup:.1f} s: kernels are compiled in them, and kept for the next start"
            )
            self.forward.explain(f"compiled/{self.forward.name}", text, INFO)


def capture(original: Function) -> Function:
    """Around the captures of a runner of SGLang's. Passes inside are no calls."""

    def capture(graph: Any, *args: Any, **kwargs: Any) -> Any:
        outer, CAPTURING.books = CAPTURING.books, _open(graph)
        CAPTURING.depth += 1
        try:
            result = original(graph, *args, **kwargs)
        finally:
            CAPTURING.depth -= 1
            books, CAPTURING.books = CAPTURING.books, outer
        _close(graph, books)
        return result

    return capture


def _open(graph: Any) -> Books | None:
    try:
        if not PATCHES.active:
            return None
        watch = watch_of(graph.model_runner)
        forward = (watch.prefill if by_tokens(graph) else watch.probe).forward
        return Books(forward, watch.costs.setdefault(forward.name, {}), graph)
    except Exception as error:
        failed("capture", error)
        return None


def _close(graph: Any, books: Books | None) -> None:
    try:
        if books is not None:
            books.close()
            watch = watch_of(graph.model_runner)
            watch.usual.clear()
            _keep(watch, graph)
    except Exception as error:
        failed("capture", error)


def _keep(watch: Watch, graph: Any) -> None:
    """A drafter's own graphs belong to its worker, where nobody else finds them."""
    if watch.drafts and not by_tokens(graph):
        watch.keep(draft_phase(graph), graph)


def capturing() -> bool:
    """Whether this thread is in captures or in what warms up for them; before 0.5.14 SGLang itself must be asked."""
    if CAPTURING.depth:
        return True
    asked = getattr(sys.modules.get("sglang.srt.model_executor.cuda_graph_runner"), "get_is_capture_mode", None)
    return bool(asked is not None and asked())


def bucket(original: Function) -> Function:
    """Around one capture: SGLang calls the forward twice to warm up, and once under capture."""

    def capture_one(backend: Any, shape_key: Any, forward_fn: Function, *args: Any, **kwargs: Any) -> Any:
        books = CAPTURING.books
        if books is None:
            return original(backend, shape_key, forward_fn, *args, **kwargs)
        began, free = time.perf_counter(), free_bytes()
        last = [began]

        def called(*given: Any, **named: Any) -> Any:
            last[0] = time.perf_counter()
            return forward_fn(*given, **named)

        try:
            result = original(backend, shape_key, called, *args, **kwargs)
        except BaseException as error:
            outcome = "oom" if "OutOfMemory" in type(error).__name__ else "error"
            _captured(books, shape_key, outcome, last[0], None)
            raise
        books.warmup += last[0] - began
        _captured(books, shape_key, "ok", last[0], free)
        return result

    return capture_one


def _captured(books: Books, key: Any, outcome: str, began: float, free: int | None) -> None:
    try:
        now = free_bytes()
        growth = None if free is None or now is None else free - now
        books.captured(_size(key), outcome, time.perf_counter() - began, growth)
    except Exception as error:
        failed("bucket", error)


def _size(key: Any) -> int:
    """The size in a key: until 0.5.14 a number, or text with a stream in front of it."""
    found = getattr(key, "size", key)
    return int(found.rpartition("_")[2]) if isinstance(found, str) else int(found)


def start(original: Function) -> Function:
    """Around the call that makes all graphs of a model runner."""

    def init_graphs(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        try:
            if PATCHES.active:
                watch_of(runner).captured()
        except Exception as error:
            failed("start", error)
        return result

    return init_graphs
