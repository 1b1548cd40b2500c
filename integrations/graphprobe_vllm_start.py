"""The start of a vLLM engine: what it knows of its memory, and the way of the metrics out of each process."""

from __future__ import annotations

import errno
import importlib
import logging
import math
import os
import stat
import tempfile
from typing import Any

from graphprobe import __version__, metrics
from graphprobe.errors import WARNING, ExporterError, log
from graphprobe.instrument import Function
from graphprobe.ledger import LEDGER, Forward
from graphprobe_vllm import INTEGRATION, PATCHES
from graphprobe_vllm_watch import OUTSIDE, Watch, watch_of

SHELL = "export PROMETHEUS_MULTIPROC_DIR=$(mktemp -d)"
"""What has to be in the shell before `vllm serve`."""

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
    OUTSIDE[0] = 0 if int(getattr(watch.config.parallel_config, "data_parallel_size", 1)) == 1 else -math.inf
    rank = _rank(watch.config.parallel_config, base)
    route = _route(forward, rank)
    if rank == 0:
        _say(watch, route)


def _say(watch: Watch, route: str) -> None:
    """That it is on, in the log of vLLM, whose own logger shows more than warnings."""
    hooks = [bound for (engine, _), bound in LEDGER.hooks.copy().items() if engine == "vllm"]
    runner = "Model Runner V2" if watch.manager is not None else "model runner V1"
    buckets = watch.probe.forward.buckets
    graphs = f"sizes up to {buckets.largest} tokens" if buckets else "no CUDA graphs (cudagraph_mode NONE)"
    text = "graphprobe %s observes vLLM %s: %s, %s, %d of %d hooks in place, metrics: %s"
    values = (__version__, INTEGRATION.found(), runner, graphs, sum(hooks), len(hooks), route)
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
    labels = os.environ.get("GRAPHPROBE_LABELS", "")
    if engine and "rank" not in metrics.constant_labels():
        os.environ["GRAPHPROBE_LABELS"] = f"{labels},rank={rank}" if labels else f"rank={rank}"
    return rank


def _route(forward: Forward, rank: int) -> str:
    """Start what serves the metrics; where they are to be found, in words."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")
    port = os.environ.get("GRAPHPROBE_PORT", "")
    try:
        if directory:
            # One that is missing ends vLLM's API server; made here, it would do so later and elsewhere.
            os.stat(directory)
            _started(directory, None)
            return f"on vLLM's own /metrics (through {directory})"
        if port:
            _started(_own_folder(int(port)), int(port))
            return f"on port {port}"
        if rank == 0:
            text = "vLLM's steps are counted, but served nowhere. In the shell that starts vLLM: %s"
            log(WARNING, f"{text} (or, for an endpoint of graphprobe's own: export GRAPHPROBE_PORT=9464)", SHELL)
    except Exception as error:
        # A folder that cannot be written to, a port that is taken or no number: the engine serves all the same.
        own = [f"{name}={value}" for name in ("GRAPHPROBE_PORT", "GRAPHPROBE_ADDR") if (value := os.environ.get(name))]
        setting = f"PROMETHEUS_MULTIPROC_DIR={directory}" if directory else " ".join(own)
        forward.explain("route", f"its steps are counted, but served nowhere: {setting}: {error}")
    return "nowhere"


def _own_folder(port: int) -> str:
    """The folder that the ranks of this user share for an endpoint of their own."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK)
    path = os.path.join(base if usable else tempfile.gettempdir(), f"graphprobe-{os.getuid()}-{port}")
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        # Its name can be guessed: what another user has put there would be served, and links in it followed.
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ExporterError(errno.EPERM, f"{path} is there and not this user's alone. hint: remove it") from None
    return path


def _started(directory: str, port: int | None) -> None:
    # Not above: a process that counts nothing starts nothing.
    from graphprobe.export.exporter import start_exporter

    start_exporter(port, os.environ.get("GRAPHPROBE_ADDR", "127.0.0.1"), directory=directory)
