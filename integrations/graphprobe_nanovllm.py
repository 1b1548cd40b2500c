"""nano-vllm: which calls of its model ran as CUDA graphs. Placed by ``instrument("nanovllm")`` or ``graphprobe run``.

A call is one ``ModelRunner.run_model`` that has returned. Its rows are requests in a decode and tokens in a prefill.
Warm-up runs it, too, before there is a KV cache; captures go past it.
"""

from __future__ import annotations

from typing import Any

from graphprobe.instrument import KEY, Function, Hook, Integration, Patches
from graphprobe.observe import spans
from graphprobe.reasons import FallbackReason
from graphprobe_runner import UNSEEN, Books, Watch, captures, lost, stepped

ENGINE = "nanovllm"
RUNNER = "nanovllm.engine.model_runner"
OURS = "graphprobe_nanovllm"
SHARED = "graphprobe_runner"

HOOKS = (
    Hook("step", RUNNER, "ModelRunner.run", f"{OURS}:step"),
    Hook("dispatch", RUNNER, "ModelRunner.run_model", f"{OURS}:dispatch"),
    Hook("capture", RUNNER, "ModelRunner.capture_cudagraph", f"{OURS}:capture"),
    Hook("graph_begin", "torch.cuda.graphs", "graph.__enter__", f"{SHARED}:graph_begin", needed=False),
    Hook("graph_end", "torch.cuda.graphs", "graph.__exit__", f"{SHARED}:graph_end", needed=False),
)
"""Each place that is hooked: the last two tell the capture of a graph from the warm-up and compilation before it."""

PATCHES = Patches(ENGINE, HOOKS)

INTEGRATION = Integration(
    engine=ENGINE,
    patches=PATCHES,
    oldest=(0, 1),
    tested=("0.2.0, commit bb823b3", "0.2.0, commit bb823b3"),
    distributions=("nano-vllm",),
)

LIMIT = 512
"""Rows above which ``run_model`` never uses a graph: a number in its code."""

STEP = 16
"""Sizes above 8 are captured in steps of so many."""

failed = PATCHES.failed


def dispatch(original: Function) -> Function:
    """Around ``run_model(input_ids, positions, is_prefill)``: one call, where it does not raise."""

    def run_model(*args: Any, **kwargs: Any) -> Any:
        watch = (getattr(args[0], KEY, None) or _watching(args[0])) if PATCHES.active else None
        if watch is None:
            return original(*args, **kwargs)
        try:
            rows = (args[1] if len(args) > 1 else kwargs["input_ids"]).size(0)
            prefill = args[3] if len(args) > 3 else kwargs["is_prefill"]
        except Exception as error:
            failed("dispatch", error)
            return original(*args, **kwargs)
        return watch.call(args[0], rows, "prefill" if prefill else "decode", reason, original, args, kwargs)

    return run_model


def reason(runner: Any, rows: int, phase: str) -> FallbackReason:
    """Why a call ran eagerly."""
    if runner.enforce_eager or not getattr(runner, "graphs", None):
        return FallbackReason.DISABLED
    if phase == "prefill":
        return FallbackReason.WRONG_PHASE
    return FallbackReason.BATCH_TOO_LARGE if rows > LIMIT else FallbackReason.UNKNOWN


def step(original: Function) -> Function:
    """Around ``run``, which prepares the inputs, calls ``run_model`` and samples."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        watch = getattr(args[0], KEY, None)
        if (watch is None or watch.steps < UNSEEN) and PATCHES.active:
            stepped(PATCHES, args[0], _watching)
        return result

    return run


def capture(original: Function) -> Function:
    """Around ``capture_cudagraph``, the last step before the first request."""

    def capture_cudagraph(*args: Any, **kwargs: Any) -> Any:
        if not PATCHES.active:
            return original(*args, **kwargs)
        runner = args[0]
        try:
            result, books = captures(PATCHES, original, args, kwargs)
        except BaseException as error:
            lost(PATCHES, "rows", getattr(runner, "graph_bs", []), getattr(runner, "graphs", {}), error)
            raise
        try:
            _start(runner, books)
        except Exception as error:
            failed("capture", error)
        return result

    return capture_cudagraph


def _watching(runner: Any) -> Watch | None:
    """A new watch of a runner. None before there is a KV cache, when no call can be a request's."""
    if getattr(runner, "kv_cache", None) is None:
        return None
    try:
        return _start(runner, None)
    except Exception as error:
        failed("start", error)
        return None


def _start(runner: Any, books: Books | None) -> Watch:
    """Watch a runner that has its graphs, or has none. ``books`` are those of its captures, where these were seen."""
    watch = Watch(PATCHES, runner, "graphs", unit="rows", device=runner.kv_cache.device.type)
    setattr(runner, KEY, watch)
    if books is not None:
        watch.captured(runner, books)
    _check(runner.config.max_num_seqs, watch)
    watch.publish(runner.config.num_kvcache_blocks * runner.block_size, runner.rank)
    return watch


def advised(most: int) -> tuple[int, int]:
    """The limits next to one with a hole that have none."""
    return most // STEP * STEP or 8, -(-most // STEP) * STEP


def _check(most: int, watch: Watch) -> None:
    """Name the batch sizes that can occur and have no graph. Up to the limit they have no other path either."""
    buckets = watch.forward.buckets
    if not watch.sizes or buckets is None:
        return
    missing = buckets.uncovered(most, True)
    watch.forward.uncovered["decode"] = len(missing)
    if not missing:
        return
    hole = [size for size in missing if size <= LIMIT]
    if not hole:
        watch.forward.explain("uncovered/decode", f"decodes of more than {LIMIT} requests run eagerly")
        return
    below, above = advised(most)
    text = (
        f"max_num_seqs={most} leaves decodes of {spans(hole)} requests without a graph, and nano-vllm does not run "
        f"them eagerly: it raises StopIteration and loses the requests that run. Use max_num_seqs={below} or {above} "
        f"(any of 1 to 8, or a multiple of {STEP})"
    )
    watch.forward.explain("uncovered/decode", text)
