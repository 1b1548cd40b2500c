"""The handlers around vLLM's steps: what is inside ``WorkerWrapperBase.execute_model`` with tokens is one call.

Dummy, warm-up, capture and idle-rank runs go other ways into the runners and are counted nowhere. A step is counted
once, when it has ended: some configurations ask the dispatcher twice, and only what ran is a call.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from graphprobe.errors import log
from graphprobe.ledger import LEDGER
from graphprobe.observe import Probe
from graphprobe.reasons import FallbackReason
from graphprobe_vllm import INTEGRATION
from graphprobe_vllm_answers import phase, reason_draft, reason_v1, reason_v2, why
from graphprobe_vllm_start import publish
from graphprobe_vllm_watch import KEY, Watch, watch_of

OUTSIDE = 1024
"""Decisions after the start without one step, after which there is a warning."""

Function = Callable[..., Any]

PATCHES = INTEGRATION.patches
failed = PATCHES.failed


class Step:
    """The step that a thread is in."""

    __slots__ = ("bucket", "drafts", "inside", "mode", "phase", "reason", "timing", "tokens", "watch")

    def __init__(self) -> None:
        self.watch: Watch | None = None
        """Whose step it is; stays until its tokens are sampled, for the drafter runs then."""
        self.inside = False
        self.phase = ""
        self.tokens = 0
        """What was decided: the tokens of the batch (0: nothing yet), the mode and the padded size of the graph."""
        self.mode = ""
        self.bucket: int | None = None
        self.reason: FallbackReason | None = None
        """Why it is eager, None where it is not."""
        self.timing = False
        self.drafts = 0

    def replays(self, tokens: int, mode: str, bucket: int) -> None:
        """The decision is a graph."""
        self.tokens, self.mode, self.bucket, self.reason = tokens, mode, bucket, None

    def runs_eagerly(self, tokens: int, reason: FallbackReason) -> None:
        """The decision is no graph."""
        self.tokens, self.mode, self.bucket, self.reason = tokens, "", None, reason


class Local(threading.local):
    """One step per thread."""

    def __init__(self) -> None:
        self.step = Step()


LOCAL = Local()
_outside = [0]


def step(original: Function) -> Function:
    """Around a worker's ``execute_model``: one call of the forward, where there are tokens."""

    def execute_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
        now = LOCAL.step
        if now.inside or not PATCHES.active or not _enter(now, worker, args, kwargs):
            return original(worker, *args, **kwargs)
        try:
            result = original(worker, *args, **kwargs)
        except BaseException:
            now.inside, now.watch = False, None
            raise
        now.inside = False
        _count(now)
        return result

    return execute_model


def _enter(now: Step, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    now.watch = None
    try:
        output = args[0] if args else kwargs["scheduler_output"]
        if isinstance(output, tuple):  # Ray's compiled graph hands on what the stage before has returned
            output = output[0]
        if not output.total_num_scheduled_tokens:
            return False
        runner = base.worker.model_runner
        watch = runner.__dict__.get(KEY)
        if watch is None or not watch.published:
            watch = watch_of(runner)
            publish(watch, base.worker, base)
        now.phase = phase(output)
        now.tokens, now.timing, now.drafts, now.watch, now.inside = 0, False, 0, watch, True
    except Exception as error:
        failed("step", error)
        return False
    return True


def _count(now: Step) -> None:
    watch = now.watch
    try:
        assert watch is not None
        if not now.tokens:
            watch.missed()
        else:
            _call(now, watch.probe, now.phase)
    except Exception as error:
        failed("count", error)


def _call(now: Step, probe: Probe, phase: str) -> None:
    if now.bucket is not None:
        probe.graph_call(now.tokens, now.bucket, now.mode, phase)
        return
    assert now.reason is not None
    probe.eager_call(now.tokens, now.reason, phase)
    if now.reason is FallbackReason.DISABLED:
        probe.forward.explain("disabled", "CUDA graphs are switched off in this engine (cudagraph_mode NONE)", 20)


def dispatch_v1(original: Function) -> Function:
    """Around the decision of the runner V1, whose return value is final, ranks included."""

    def determine(runner: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(runner, *args, **kwargs)
        now = LOCAL.step
        if now.inside and now.watch is not None:
            try:
                tokens = kwargs["num_tokens"] if "num_tokens" in kwargs else args[0]
                mode = now.watch.modes.get(answer[0].name)
                if mode is not None:
                    now.replays(tokens, mode, answer[1].num_tokens)
                else:
                    asked = _named(original, (runner, *args), kwargs)
                    now.runs_eagerly(tokens, why(reason_v1, runner, asked, now.phase))
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
        if now.inside and now.watch is not None:
            try:
                _decided_v2(now, now.watch, answer[0], original, args, kwargs, now.phase)
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
        now.replays(tokens, mode, found.num_tokens)
    else:
        now.runs_eagerly(tokens, why(reason_v2, _named(original, args, kwargs), phase))


def _seen_outside() -> None:
    """Warm-ups decide outside a step, too, and idle ranks; an engine that does nothing else is one we do not see."""
    _outside[0] += 1
    if _outside[0] == OUTSIDE and not any(f.graph or f.eager for f in LEDGER.forwards.copy().values()):
        log(30, "vllm: instrumented, but never called: %d decisions and no step (an idle rank has none)", OUTSIDE)


def forward(original: Function) -> Function:
    """Around the forward itself: some are timed."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        now = LOCAL.step
        mark = _begin(now) if now.inside else None
        if mark is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            _end(now, mark, ran=False)
            raise
        _end(now, mark)
        return result

    return timed


def context(original: Function) -> Function:
    """Around V2's forward context, in which piecewise and eager forwards run: some are timed."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        inner = original(*args, **kwargs)
        now = LOCAL.step
        return Timed(inner, now) if now.inside and not now.timing else inner

    return timed


class Timed:
    """A context manager of vLLM with a clock around its inside."""

    def __init__(self, inner: Any, now: Step) -> None:
        self._inner = inner
        self._now = now
        self._mark: Any = None

    def __enter__(self) -> Any:
        entered = self._inner.__enter__()
        self._mark = _begin(self._now)
        return entered

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        if self._mark is not None:
            _end(self._now, self._mark, ran=kind is None)
        return self._inner.__exit__(kind, error, trace)


def _begin(now: Step) -> Any:
    watch = now.watch
    if not now.tokens or watch is None or now.timing:
        return None
    try:
        mark = watch.begin((now.phase, now.mode, now.bucket))
        now.timing = mark is not None
        return mark
    except Exception as error:
        failed("time", error)
        return None


def _end(now: Step, mark: Any, ran: bool = True) -> None:
    now.timing = False
    try:
        assert now.watch is not None
        if ran:
            now.watch.end(mark, "graph" if now.mode else "eager", now.bucket, now.phase, now.mode)
        else:
            now.watch.cancel(mark)
    except Exception as error:
        failed("time", error)


def sample(original: Function) -> Function:
    """Around ``sample_tokens``, in which a drafter runs: with its end the step is over."""

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            LOCAL.step.watch = None

    return sample_tokens


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
                    now.replays(tokens, mode, answer[1])
                else:
                    now.runs_eagerly(tokens, why(reason_draft, proposer, tokens))
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
                _decided_v2(now, now.watch, answer[0], original, args, kwargs, "decode")
                _draft(now, now.watch)
            except Exception as error:
                failed("draft_v2", error)
        return answer

    return dispatch


def _draft(now: Step, watch: Watch) -> None:
    """The first decision of a step is about the tokens of the target, the second about all further passes."""
    now.drafts += 1
    _call(now, watch.drafter, "draft_extend" if now.drafts == 1 else "draft")


def _named(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name: each release adds some, and moves those that it passes by position."""
    return {**dict(zip(_names(function), args, strict=False)), **kwargs}


@lru_cache(maxsize=64)
def _names(function: Function) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
