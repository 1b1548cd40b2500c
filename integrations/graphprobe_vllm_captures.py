"""vLLM's captures: what each graph cost, and, once they are made, which decode steps have none."""

from __future__ import annotations

import threading
import time
from typing import Any

from graphprobe.buckets import decode_buckets
from graphprobe.instrument import Function
from graphprobe.ledger import Forward
from graphprobe.stopwatch import free_bytes
from graphprobe.tools.paste import line
from graphprobe.tools.speculative import spans
from graphprobe_vllm import PATCHES
from graphprobe_vllm_watch import Watch, watch_of

failed = PATCHES.failed


class Capturing(threading.local):
    """The capture that this thread is in."""

    books: Books | None = None


class Books:
    """What the graphs of one forward have cost so far in this capture: a bucket may have one of each mode."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._seconds: dict[tuple[str, int], float] = {}
        self._bytes: dict[tuple[str, int], int] = {}
        self._open: tuple[Forward, int, float, int | None] | None = None

    def begin(self, forward: Forward, bucket: int) -> None:
        """A graph of ``bucket`` is about to be warmed up and captured; the one before it is done."""
        self.end()
        # The driver first: what it takes to answer is not the graph's.
        free = free_bytes()
        self._open = (forward, bucket, time.perf_counter(), free)

    def end(self, outcome: str = "ok") -> None:
        """The last one is done."""
        if self._open is None:
            return
        (forward, bucket, began, before), self._open = self._open, None
        key = forward.name, bucket
        seconds = self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - began
        after = free_bytes()
        growth = None
        if before is not None and after is not None:
            growth = self._bytes[key] = self._bytes.get(key, 0) + before - after
        forward.captured(bucket, outcome, seconds, growth)


CAPTURING = Capturing()


def capture(original: Function) -> Function:
    """Around a runner's ``capture_model``, which returns the bytes that all graphs took together."""

    def capture_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        books = None if kwargs.get("profile_only") or not PATCHES.active else _open(runner)
        if books is None:
            return original(runner, *args, **kwargs)
        CAPTURING.books = books
        try:
            taken = original(runner, *args, **kwargs)
        except BaseException as error:
            _close(books, "oom" if "OutOfMemory" in type(error).__name__ else "error")
            raise
        _close(books, "ok")
        _captured(books.watch, taken)
        return taken

    return capture_model


def _open(runner: Any) -> Books | None:
    try:
        manager = getattr(runner, "cudagraph_manager", None)
        # 0.29 measures the memory of graphs with captures of which it keeps none, and says so only here.
        if getattr(manager, "_max_full_descs_to_capture", None) is not None:
            return None
        return Books(watch_of(runner))
    except Exception as error:
        failed("capture", error)
        return None


def _close(books: Books, outcome: str) -> None:
    CAPTURING.books = None
    try:
        books.end(outcome)
    except Exception as error:
        failed("capture", error)


def _captured(watch: Watch, taken: Any) -> None:
    try:
        forward = watch.probe.forward
        if isinstance(taken, int) and forward.captures:
            holder = forward.holders[0] if forward.holders else forward.holder()
            # From the device's free memory: below 0 where another process gave some back meanwhile.
            holder.pool_bytes = taken if taken >= 0 else None
        check(watch)
    except Exception as error:
        failed("capture", error)


def bucket_v1(original: Function) -> Function:
    """Around the warm-up and the capture of one graph of the runner V1."""

    def warmup_and_capture(runner: Any, *args: Any, **kwargs: Any) -> Any:
        books = CAPTURING.books
        if books is None:
            return original(runner, *args, **kwargs)
        _begin(books, books.watch.probe.forward, args[0] if args else kwargs.get("desc"))
        result = original(runner, *args, **kwargs)
        _end(books)
        return result

    return warmup_and_capture


def buckets_v2(original: Function) -> Function:
    """Around the captures of a manager of Model Runner V2, which asks for the forward of each graph that it makes."""

    def capture(manager: Any, *args: Any, **kwargs: Any) -> Any:
        books = CAPTURING.books
        if books is None or not args:
            return original(manager, *args, **kwargs)
        watch = books.watch
        forward = watch.probe.forward if manager is watch.manager else watch.drafter.forward
        result = original(manager, _counting(args[0], books, forward), *args[1:], **kwargs)
        _end(books)
        return result

    return capture


def _counting(make: Function, books: Books, forward: Forward) -> Function:
    last: list[Any] = [None]

    def counting(desc: Any, *args: Any, **kwargs: Any) -> Any:
        # It is asked twice for most graphs: for the warm-up, and for the capture.
        if desc is not last[0]:
            last[0] = desc
            _begin(books, forward, desc)
        return make(desc, *args, **kwargs)

    return counting


def _begin(books: Books, forward: Forward, desc: Any) -> None:
    try:
        books.begin(forward, desc.num_tokens)
    except Exception as error:
        failed("bucket", error)


def _end(books: Books) -> None:
    try:
        books.end()
    except Exception as error:
        failed("bucket", error)


def check(watch: Watch) -> None:
    """Ask the engine's own dispatcher for each decode step that can occur, and warn of those without a full graph."""
    forward, wanted, steps = watch.probe.forward, watch.decode_mode(), watch.decode_steps()
    if not wanted or not steps:
        return
    missing = {n * width: n for n, width in steps if watch.served(n, n * width) not in ("FULL", wanted)}
    forward.uncovered[forward.phases[0]] = len(missing)
    if not missing:
        return
    sizes, widths = sorted(missing), {width for _, width in steps}
    width = max(widths)
    each = ""
    if width > 1 and len(widths) == 1:
        each = f" ({spans(sorted(missing.values()))} requests of 1 + {width - 1} tokens)"
    listed = watch.config.compilation_config.cudagraph_capture_sizes or ()
    more = {n * width for n in decode_buckets(steps[-1][0])} & set(sizes) | {sizes[-1]}
    option = line("vllm", sorted({*listed, *more})).splitlines()[0]
    text = (
        f"{len(missing)} of the decode steps up to {max(n * width for n, width in steps)} tokens have no full CUDA "
        f"graph: {spans(sizes)} tokens{each}. Add their sizes: {option} (and leave max_cudagraph_capture_size out)"
    )
    forward.explain(f"uncovered/{forward.phases[0]}", text)
