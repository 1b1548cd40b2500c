"""mini-sglang: which batches ran as CUDA graphs. Placed by ``instrument("minisgl")`` or ``graphprobe run``.

A call is one ``Engine.forward_batch`` that has returned, and its size the requests of the batch. Captures go past it.
The engine runs in the scheduler's process, which is spawned: ``instrument`` reaches it only where that is this process.
"""

from __future__ import annotations

import sys
from typing import Any

from graphprobe.instrument import KEY, Function, Hook, Integration, Patches
from graphprobe.observe import spans
from graphprobe.reasons import FallbackReason
from graphprobe_runner import UNSEEN, Books, Watch, captures, lost, stepped

NAME = "minisgl"
ENGINE = "minisgl.engine.engine"
OURS = "graphprobe_minisglang"
SHARED = "graphprobe_runner"

HOOKS = (
    Hook("step", "minisgl.scheduler.scheduler", "Scheduler._forward", f"{OURS}:step"),
    Hook("dispatch", ENGINE, "Engine.forward_batch", f"{OURS}:dispatch"),
    Hook("start", ENGINE, "Engine.__init__", f"{OURS}:start"),
    Hook("capture", "minisgl.engine.graph", "GraphRunner._capture_graphs", f"{OURS}:capture"),
    Hook("graph_begin", "torch.cuda.graphs", "graph.__enter__", f"{SHARED}:graph_begin", needed=False),
    Hook("graph_end", "torch.cuda.graphs", "graph.__exit__", f"{SHARED}:graph_end", needed=False),
)
"""Each place that is hooked: the last two tell the capture of a graph from the warm-up and compilation before it."""

PATCHES = Patches(NAME, HOOKS)

INTEGRATION = Integration(
    engine=NAME,
    patches=PATCHES,
    oldest=(0, 1),
    tested=("0.1.0, commit 20fcd7f", "0.1.0, commit 20fcd7f"),
    distributions=("minisgl",),
)

failed = PATCHES.failed


def dispatch(original: Function) -> Function:
    """Around ``forward_batch(batch, args)``: one call, where it does not raise."""

    def forward_batch(*args: Any, **kwargs: Any) -> Any:
        watch = (getattr(args[0], KEY, None) or _watching(args[0])) if PATCHES.active else None
        if watch is None:
            return original(*args, **kwargs)
        try:
            batch = args[1] if len(args) > 1 else kwargs["batch"]
            size, phase = batch.size, batch.phase
        except Exception as error:
            failed("dispatch", error)
            return original(*args, **kwargs)
        return watch.call(args[0].graph_runner, size, phase, reason, original, args, kwargs)

    return forward_batch


def reason(graphs: Any, size: int, phase: str) -> FallbackReason:
    """Why a batch ran eagerly, told by the engine's runner of graphs."""
    if not graphs.max_graph_bs:
        return FallbackReason.DISABLED
    if phase != "decode":
        return FallbackReason.WRONG_PHASE
    return FallbackReason.BATCH_TOO_LARGE if size > graphs.max_graph_bs else FallbackReason.UNKNOWN


def step(original: Function) -> Function:
    """Around the scheduler's ``_forward``, which runs one batch and keeps its tokens."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        engine = getattr(args[0], "engine", None)
        watch = getattr(engine, KEY, None)
        if (watch is None or watch.steps < UNSEEN) and PATCHES.active:
            stepped(PATCHES, engine, _watching)
        return result

    return forward


def capture(original: Function) -> Function:
    """Around ``_capture_graphs``; what the graphs took waits for the engine to be whole."""

    def capture_graphs(*args: Any, **kwargs: Any) -> Any:
        if not PATCHES.active:
            return original(*args, **kwargs)
        runner = args[0]
        try:
            result, books = captures(PATCHES, original, args, kwargs)
        except BaseException as error:
            lost(PATCHES, "requests", getattr(runner, "graph_bs_list", []), getattr(runner, "graph_map", {}), error)
            raise
        setattr(runner, KEY, books)
        return result

    return capture_graphs


def start(original: Function) -> Function:
    """Around ``Engine.__init__``, after which requests may come."""

    def init(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if PATCHES.active:
            _watching(args[0])

    return init


def _watching(engine: Any) -> Watch | None:
    """A new watch of an engine."""
    try:
        return _start(engine)
    except Exception as error:
        failed("start", error)
        return None


def _start(engine: Any) -> Watch:
    runner = engine.graph_runner
    watch = Watch(PATCHES, runner, "graph_map", unit="requests", device=engine.device.type)
    setattr(engine, KEY, watch)
    books: Books | None = getattr(runner, KEY, None)
    if books is not None and watch.sizes:
        watch.captured(runner, books)
    # One row of the page table is the dummy request's.
    _check(len(engine.page_table) - 1, watch)
    watch.publish(engine.num_pages * engine.ctx.page_size, _rank())
    return watch


def _rank() -> int:
    info = getattr(sys.modules.get("minisgl.distributed"), "get_tp_info", None)
    return int(info().rank) if info is not None else 0


def _check(most: int, watch: Watch) -> None:
    """Name the batch sizes that can occur and have no graph."""
    buckets = watch.forward.buckets
    if not watch.sizes or buckets is None:
        return
    missing = buckets.uncovered(most, True)
    watch.forward.uncovered["decode"] = len(missing)
    if missing:
        text = f"decodes of {spans(missing)} requests have no graph and run eagerly; cuda_graph_max_bs={most} adds them"
        watch.forward.explain("uncovered/decode", text)
