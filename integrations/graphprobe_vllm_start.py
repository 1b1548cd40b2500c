"""The start of a vLLM engine: what it knows of its memory, and the way of the metrics out of each process."""

from __future__ import annotations

import importlib
import logging
import math
from typing import Any

from graphprobe import __version__
from graphprobe.export.route import label_rank, route
from graphprobe.instrument import Function
from graphprobe.sentinel import SENTINEL
from graphprobe_vllm import INTEGRATION, PATCHES
from graphprobe_vllm_watch import OUTSIDE, Watch, watch_of

SHELL = "export PROMETHEUS_MULTIPROC_DIR=$(mktemp -d)"
"""What has to be in the shell before `vllm serve`."""

OWN = "(or, for an endpoint of graphprobe's own: export GRAPHPROBE_PORT=9464)"

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
    # Idle ranks of data parallelism decide for ever without a step of their own.
    if int(getattr(watch.config.parallel_config, "data_parallel_size", 1)) > 1:
        OUTSIDE[0] = -math.inf
        SENTINEL.called("vllm")
    else:
        OUTSIDE[0] = 0
    rank = _rank(watch.config.parallel_config, base)
    hint = f"vLLM's steps are counted, but served nowhere. In the shell that starts vLLM: {SHELL} {OWN}"
    found = route(forward, rank, "vLLM's own /metrics", hint)
    if rank == 0:
        _say(watch, found)


def _say(watch: Watch, served: str) -> None:
    """That it is on, in the log of vLLM, whose own logger shows more than warnings."""
    runner = "Model Runner V2" if watch.manager is not None else "model runner V1"
    buckets = watch.probe.forward.buckets
    graphs = f"sizes up to {buckets.largest} tokens" if buckets else "no CUDA graphs (cudagraph_mode NONE)"
    text = "graphprobe %s observes vLLM %s: %s, %s, %s, metrics: %s"
    values = (__version__, INTEGRATION.found(), runner, graphs, PATCHES.placed, served)
    logging.getLogger("vllm.graphprobe").info(text, *values)


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
    if engine:
        label_rank(rank)
    return rank
