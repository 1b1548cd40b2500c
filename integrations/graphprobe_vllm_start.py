"""The start of a vLLM engine: what its captures cost, which sizes have no graph, and where the metrics go."""

from __future__ import annotations

import importlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from graphprobe import metrics
from graphprobe.buckets import decode_buckets
from graphprobe.errors import WARNING, log
from graphprobe.ledger import Forward
from graphprobe.observe import spans
from graphprobe_vllm import INTEGRATION
from graphprobe_vllm_watch import Watch, watch_of

SHELL = "export PROMETHEUS_MULTIPROC_DIR=$(mktemp -d)"
"""What has to be in the shell before `vllm serve`."""

Function = Callable[..., Any]

PATCHES = INTEGRATION.patches
failed = PATCHES.failed


class Capturing(threading.local):
    """The capture that this thread is in."""

    books: Books | None = None


class Books:
    """What the graphs of one forward have cost so far in this capture: a bucket may have one of each mode."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._seconds: dict[int, float] = {}
        self._bytes: dict[int, int] = {}
        self._open: tuple[Forward, int, float, int | None] | None = None

    def begin(self, forward: Forward, bucket: int) -> None:
        """A graph of ``bucket`` is about to be warmed up and captured; the one before it is done."""
        self.end()
        self._open = (forward, bucket, time.perf_counter(), free_bytes())

    def end(self, outcome: str = "ok") -> None:
        """The last one is done."""
        if self._open is None:
            return
        (forward, bucket, began, before), self._open = self._open, None
        after = free_bytes()
        seconds = self._seconds[bucket] = self._seconds.get(bucket, 0.0) + time.perf_counter() - began
        growth = None
        if before is not None and after is not None:
            growth = self._bytes[bucket] = self._bytes.get(bucket, 0) + before - after
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
            holder.pool_bytes = taken
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


def start(original: Function) -> Function:
    """Around a worker's ``compile_or_warm_up_model``, its last step before the first request."""

    def compile_or_warm_up_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(worker, *args, **kwargs)
        try:
            if PATCHES.active:
                publish(watch_of(worker.model_runner), worker, worker)
        except Exception as error:
            failed("start", error)
        return result

    return compile_or_warm_up_model


def check(watch: Watch) -> None:
    """Ask the engine's own dispatcher for each decode step that can occur, and warn of those without a full graph."""
    forward = watch.probe.forward
    most, width = watch.config.scheduler_config.max_num_seqs, watch.tokens_per_request
    wanted = watch.decode_mode()
    if not wanted:
        return
    missing = [n * width for n in range(1, most + 1) if watch.served(n, n * width) not in ("FULL", wanted)]
    forward.uncovered[forward.phases[0]] = len(missing)
    if not missing:
        return
    each = f" ({spans([n // width for n in missing])} requests of 1 + {width - 1} tokens)" if width > 1 else ""
    listed = watch.config.compilation_config.cudagraph_capture_sizes or ()
    more = {n for n in (*decode_buckets(most, width - 1), missing[-1]) if n in missing}
    line = f"""--compilation-config '{{"cudagraph_capture_sizes": {sorted({*listed, *more})}}}'"""
    text = (
        f"{len(missing)} of the decode steps up to {most * width} tokens have no full CUDA graph: "
        f"{spans(missing)} tokens{each}. Add their sizes: {line} (and leave max_cudagraph_capture_size out)"
    )
    forward.explain(f"uncovered/{forward.phases[0]}", text)


def publish(watch: Watch, worker: Any, base: Any) -> None:
    """What the engine knows of its memory, and the way of all metrics out of this process. Once per runner."""
    watch.published = True
    forward = watch.probe.forward
    estimate = getattr(worker, "cudagraph_memory_estimate", None)
    if isinstance(estimate, int) and estimate > 0:
        forward.pool_estimate_bytes = estimate
    forward.kv_capacity_tokens = kv_tokens(watch.config, getattr(worker, "model_runner", None))
    rank = _rank(watch.config.parallel_config, base)
    _route(forward, rank)


def kv_tokens(config: Any, runner: Any) -> int | None:
    """Tokens that the KV cache holds, by vLLM's own reckoning where that is to be had, else blocks times their size."""
    cache = config.cache_config
    told = getattr(cache, "kv_cache_size_tokens", None)
    if isinstance(told, int):
        return told
    layout = getattr(runner, "kv_cache_config", None)
    try:
        return int(importlib.import_module("vllm.v1.core.kv_cache_utils").get_kv_cache_capacity(config, layout)[0])
    except Exception:
        blocks = getattr(cache, "num_gpu_blocks", None)
        return int(blocks) * int(cache.block_size) if blocks else None


def free_bytes() -> int | None:
    """Free memory of the current device; None where there is none. Asks the driver, never synchronizes."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None


def _rank(parallel: Any, base: Any) -> int:
    """A number of this process among all of the server: engines of data parallelism count their ranks each from 0."""
    rank = int(getattr(base, "global_rank", getattr(base, "rank", 0)) or 0)
    engine = int(getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0)) or 0)
    rank += engine * int(getattr(parallel, "world_size", 1))
    labels = os.environ.get("GRAPHPROBE_LABELS", "")
    if engine and "rank" not in metrics.constant_labels():
        os.environ["GRAPHPROBE_LABELS"] = f"{labels},rank={rank}" if labels else f"rank={rank}"
    return rank


def _route(forward: Forward, rank: int) -> None:
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")
    port = os.environ.get("GRAPHPROBE_PORT", "")
    try:
        if directory:
            _started(directory, None)
        elif port:
            _started(os.path.join(tempfile.gettempdir(), f"graphprobe-{os.getuid()}-{port}"), int(port))
        elif rank == 0:
            text = "counted, but served nowhere: run %r in the shell that starts vLLM, or set GRAPHPROBE_PORT=9464"
            log(WARNING, "vllm: %s", text % SHELL)
    except Exception as error:
        # A folder that cannot be written to, a port that is taken or no number: the engine serves all the same.
        forward.explain("route", f"the metrics cannot be served: {error}")


def _started(directory: str, port: int | None) -> None:
    # Not above: a process that counts nothing starts nothing.
    from graphprobe.export.exporter import start_exporter

    start_exporter(port, os.environ.get("GRAPHPROBE_ADDR", "127.0.0.1"), directory=directory)
