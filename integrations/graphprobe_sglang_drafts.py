"""The handlers around SGLang's drafters, whose graphs go past the model runner.

A drafter's graph covers a round of drafting; without one a round is a pass of the model runner for each step. Both are
counted as one call.
"""

from __future__ import annotations

from typing import Any

from graphprobe.instrument import Function
from graphprobe_sglang import PATCHES
from graphprobe_sglang_captures import capturing
from graphprobe_sglang_passes import LOCAL, Pass
from graphprobe_sglang_reasons import reason_draft
from graphprobe_sglang_watch import draft_phase, watch_of

failed = PATCHES.failed


def draft(original: Function) -> Function:
    """Around a drafter's graph, which covers a whole round or its first pass."""

    def execute(graph: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        runner, size = getattr(graph, "model_runner", None), getattr(forward_batch, "batch_size", 0)
        now = _drafting(runner, size, draft_phase(graph))
        if now is None:
            return original(graph, forward_batch, *args, **kwargs)
        try:
            result = original(graph, forward_batch, *args, **kwargs)
        except BaseException:
            now.cancel()
            raise
        _drafted(now, graph)
        return result

    return execute


def draft_step(original: Function) -> Function:
    """Around one step of a drafter that has a graph per layer. The first one stands for the round."""

    def replay(graph: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        runner = getattr(getattr(graph, "eagle_worker", None), "draft_runner", None)
        now = None if step else _drafting(runner, getattr(graph, "raw_bs", 0), "draft_extend")
        if now is None:
            return original(graph, step, *args, **kwargs)
        try:
            result = original(graph, step, *args, **kwargs)
        except BaseException:
            now.cancel()
            raise
        _drafted(now, graph)
        return result

    return replay


def _drafting(runner: Any, size: int, phase: str) -> Pass | None:
    try:
        if not PATCHES.active or runner is None or not size or capturing():
            return None
        watch = watch_of(runner)
        if not watch.published:
            watch.publish(runner)
        now = Pass(watch, "DRAFT", "decode", phase, size)
        now.time()
        return now
    except Exception as error:
        failed("draft", error)
        return None


def _drafted(now: Pass, graph: Any) -> None:
    try:
        graphs = now.watch.graphs(graph)
        if graphs is not None:
            # Of some drafters a batch has a row for each of several drafts.
            now.size = min(now.size, int(graph.raw_bs))
            now.ended(now.watch.probe, graphs.bucket(graph, now.size), graphs.mode, None)
    except Exception as error:
        failed("draft", error)


def rounds(original: Function) -> Function:
    """Around a round of drafting without a graph, which is a pass of the model runner per step."""

    def draft_forward(worker: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        idle = getattr(getattr(forward_batch, "forward_mode", None), "_name_", "IDLE") == "IDLE"
        size = 0 if idle else getattr(forward_batch, "batch_size", 0)
        now = _drafting(getattr(worker, "draft_runner", None), size, "draft")
        if now is None:
            return original(worker, forward_batch, *args, **kwargs)
        LOCAL.round = 0
        try:
            result = original(worker, forward_batch, *args, **kwargs)
        except BaseException:
            now.cancel()
            raise
        finally:
            passes, LOCAL.round = LOCAL.round, None
        if not passes:
            # Of one step a round is what is sampled from the pass before it.
            now.cancel()
            return result
        try:
            reason = PATCHES.why(reason_draft, now.watch, "draft", now.size, forward_batch)
            now.ended(now.watch.probe, None, "", reason)
        except Exception as error:
            failed("draft", error)
        return result

    return draft_forward
