"""The start of a vLLM engine: what it knows of its memory, and the way of the metrics out of each process."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

from graphprobe import metrics
from graphprobe.errors import WARNING, log
from graphprobe.ledger import Forward
from graphprobe_vllm import INTEGRATION
from graphprobe_vllm_watch import Watch, watch_of

SHELL = "export PROMETHEUS_MULTIPROC_DIR=$(mktemp -d)"
"""What has to be in the shell before `vllm serve`."""

Function = Callable[..., Any]

PATCHES = INTEGRATION.patches
failed = PATCHES.failed


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
