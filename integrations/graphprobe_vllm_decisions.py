"""The handlers around vLLM's decisions: which graph serves a step of the target model, and of its drafter."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from graphprobe.errors import WARNING, log
from graphprobe.instrument import Function
from graphprobe.ledger import LEDGER
from graphprobe.reasons import FallbackReason
from graphprobe_vllm import PATCHES
from graphprobe_vllm_answers import reason_draft, reason_v1, reason_v2
from graphprobe_vllm_captures import CAPTURING
from graphprobe_vllm_steps import LOCAL, Step, call, failed
from graphprobe_vllm_watch import OUTSIDE, Watch

MANY = 1024
"""Decisions after the start without one step, after which there is a warning."""


def dispatch_v1(original: Function) -> Function:
    """Around the decision of the runner V1, whose return value is final, ranks included."""

    def determine(runner: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(runner, *args, **kwargs)
        now = LOCAL.step
        watch = now.watch
        if now.inside and watch is not None:
            try:
                # Pipeline stages may ask before the step's own decision.
                first = not now.tokens
                tokens = kwargs["num_tokens"] if "num_tokens" in kwargs else args[0]
                mode = watch.modes.get(answer[0].name)
                if mode is not None:
                    now.decided(tokens, mode, answer[1].num_tokens)
                elif watch.off:
                    now.decided(tokens, "", None, FallbackReason.DISABLED)
                else:
                    asked = _named(original, (runner, *args), kwargs)
                    now.decided(tokens, "", None, PATCHES.why(reason_v1, runner, asked, now.phase))
                if first:
                    now.due = watch.stopwatch.due(now.mode, now.bucket, now.phase)
            except Exception as error:
                failed("dispatch_v1", error)
        else:
            _seen_outside()
        return answer

    return determine


def dispatch_v2(original: Function) -> Function:
    """Around the decision of Model Runner V2, in the binding that only the target model uses."""

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        now = LOCAL.step
        watch = now.watch
        if now.inside and watch is not None:
            try:
                _decided_v2(now, watch, answer[0], original, args, kwargs, now.phase)
                now.due = watch.stopwatch.due(now.mode, now.bucket, now.phase)
            except Exception as error:
                failed("dispatch_v2", error)
        else:
            _seen_outside()
        return answer

    return dispatch


def _decided_v2(
    now: Step, watch: Watch, found: Any, original: Function, args: tuple[Any, ...], kwargs: dict[str, Any], phase: str
) -> None:
    """``found`` is the descriptor. The first six arguments are the same in all releases, the rest are named."""
    tokens = args[2] if len(args) > 2 else kwargs["num_tokens"]
    mode = watch.modes.get(found.cg_mode.name)
    if mode is not None:
        now.decided(tokens, mode, found.num_tokens)
    elif watch.off:
        now.decided(tokens, "", None, FallbackReason.DISABLED)
    else:
        now.decided(tokens, "", None, PATCHES.why(reason_v2, _named(original, args, kwargs), phase))


def _seen_outside() -> None:
    """Warm-ups decide outside a step, too; an engine that does nothing else is one that we do not see."""
    OUTSIDE[0] += 1
    if OUTSIDE[0] != MANY or not PATCHES.active or CAPTURING.books is not None:
        return
    if not any(found.graph or found.eager for found in LEDGER.forwards.copy().values()):
        text = "vllm: instrumented, but never called: %d decisions of %s, and no step of a worker was seen"
        log(WARNING, text, MANY, PATCHES.release)


def draft_v1(original: Function) -> Function:
    """Around the decision of a drafter of the runner V1: (mode, padded tokens, ...)."""

    def determine(proposer: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(proposer, *args, **kwargs)
        now = LOCAL.step
        if now.watch is not None:
            try:
                tokens = kwargs["num_tokens"] if "num_tokens" in kwargs else args[0]
                mode = now.watch.modes.get(answer[0].name)
                if mode is not None:
                    now.decided(tokens, mode, answer[1])
                else:
                    now.decided(tokens, "", None, PATCHES.why(reason_draft, proposer, tokens))
                _draft(now, now.watch)
            except Exception as error:
                failed("draft_v1", error)
        return answer

    return determine


def draft_v2(original: Function) -> Function:
    """Around the decision of a drafter of Model Runner V2."""

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        now = LOCAL.step
        if now.watch is not None:
            try:
                # The first pass of a drafter goes over what the target had, be it a prompt; all others are decodes.
                _decided_v2(now, now.watch, answer[0], original, args, kwargs, "decode" if now.drafts else now.phase)
                _draft(now, now.watch)
            except Exception as error:
                failed("draft_v2", error)
        return answer

    return dispatch


def _draft(now: Step, watch: Watch) -> None:
    """The first decision of a step is about the tokens of the target, the second about all further passes."""
    now.drafts += 1
    call(now, watch.drafter, "draft_extend" if now.drafts == 1 else "draft")


def _named(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name: each release adds some, and moves those that it passes by position."""
    return {**dict(zip(_names(function), args, strict=False)), **kwargs}


@lru_cache(maxsize=64)
def _names(function: Function) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
