"""The handlers around vLLM's steps: what is inside ``WorkerWrapperBase.execute_model`` with tokens is one call.

Dummy, warm-up, capture and idle-rank runs go other ways into the runners and are counted nowhere. A step is counted
once, when it has ended: some configurations ask the dispatcher twice, and only what ran is a call.
"""

from __future__ import annotations

import threading
from typing import Any

from graphprobe.instrument import KEY, Function
from graphprobe.observe import Probe
from graphprobe.reasons import FallbackReason
from graphprobe.sentinel import SENTINEL
from graphprobe_vllm import PATCHES
from graphprobe_vllm_answers import phase
from graphprobe_vllm_start import publish
from graphprobe_vllm_watch import Watch, watch_of

failed = PATCHES.failed


class Step:
    """The step that a thread is in."""

    __slots__ = (
        *("before", "bucket", "drafts", "due", "inside", "launched", "mode", "phase", "reason", "tokens", "watch"),
    )

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
        self.due = False
        """Whether the forward of this step is to be timed."""
        self.drafts = 0
        self.launched = SENTINEL.state()
        self.before = 0
        """Graph launches of this thread before the forward, or before the step."""

    def decided(self, tokens: int, mode: str, bucket: int | None, reason: FallbackReason | None = None) -> None:
        """What the runner will do: replay the graph of a bucket, or run eagerly for a reason."""
        self.tokens, self.mode, self.bucket, self.reason = tokens, mode, bucket, reason


class Local(threading.local):
    """One step per thread."""

    def __init__(self) -> None:
        self.step = Step()


LOCAL = Local()


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
        _leave(now)
        if result is not None:
            # No sampling follows, and what is kept here would keep the engine.
            now.watch = None
        return result

    return execute_model


def _enter(now: Step, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    now.watch = None
    try:
        output = args[0] if args else kwargs["scheduler_output"]
        if isinstance(output, tuple):  # Ray's compiled graph hands on what the stage before has returned
            output = output[0]
        tokens = output.total_num_scheduled_tokens
        if not tokens:
            return False
        runner = base.worker.model_runner
        watch = runner.__dict__.get(KEY)
        if watch is None or not watch.published:
            watch = watch_of(runner)
            publish(watch, base.worker, base)
        now.phase = "decode" if tokens == len(output.num_scheduled_tokens) else phase(output)
        now.tokens, now.due, now.drafts, now.watch, now.inside = 0, False, 0, watch, True
        now.before = now.launched.count
    except Exception as error:
        failed("step", error)
        return False
    return True


def _leave(now: Step) -> None:
    """The forward has ended: count what was decided, once."""
    if not now.inside:
        return
    now.inside = False
    try:
        watch = now.watch
        assert watch is not None
        if not now.tokens:
            watch.missed()
            return
        if now.bucket is not None:
            watch.graph_call(now.tokens, now.bucket, now.mode, now.phase)
        else:
            call(now, watch.probe, now.phase)
        if watch.judged and (now.launched.count == now.before) is not (now.bucket is None):
            SENTINEL.judge(watch.probe.forward, "eager" if now.bucket is None else "graph", now.before)
    except Exception as error:
        failed("count", error)


def call(now: Step, probe: Probe, phase: str) -> None:
    """Count what was decided."""
    if now.bucket is not None:
        probe.graph_call(now.tokens, now.bucket, now.mode, phase)
        return
    assert now.reason is not None
    probe.eager_call(now.tokens, now.reason, phase)
    if now.reason is FallbackReason.DISABLED:
        probe.forward.explain("disabled", "CUDA graphs are switched off in this engine (cudagraph_mode NONE)", 20)


def forward(original: Function) -> Function:
    """Around the forward itself: some are timed."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        now = LOCAL.step
        # The graphs of an encoder, which runs before it, are not the forward's.
        now.before = now.launched.count
        if not now.due or not now.inside:
            return original(*args, **kwargs)
        with Timed(None, now):
            return original(*args, **kwargs)

    return timed


def context(original: Function) -> Function:
    """Around V2's forward context, in which piecewise and eager forwards run: some are timed."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        inner = original(*args, **kwargs)
        now = LOCAL.step
        return Timed(inner, now) if now.due and now.inside else inner

    return timed


class Timed:
    """A clock around a forward, inside a context manager of vLLM's where there is one. It never raises."""

    def __init__(self, inner: Any, now: Step) -> None:
        self._inner = inner
        self._now = now
        self._mark: Any = None
        now.due = False

    def __enter__(self) -> Any:
        entered = None if self._inner is None else self._inner.__enter__()
        try:
            if self._now.watch is not None:
                watch = self._now.watch
                self._mark = watch.stopwatch.begin(watch.probe.forward)
        except Exception as error:
            failed("time", error)
        return entered

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        now = self._now
        try:
            if self._mark is not None and now.watch is not None:
                if kind is None:
                    now.watch.stopwatch.end(self._mark, now.watch.probe.forward, now.mode, now.bucket, now.phase)
                else:
                    now.watch.stopwatch.cancel(self._mark)
        except Exception as failure:
            failed("time", failure)
        return None if self._inner is None else self._inner.__exit__(kind, error, trace)


def sample(original: Function) -> Function:
    """Around ``sample_tokens``, in which a drafter runs: with its end the step is over."""

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        now = LOCAL.step
        # Ray's worker samples inside its step, and there a drafter decides anew.
        _leave(now)
        try:
            return original(*args, **kwargs)
        finally:
            now.watch = None

    return sample_tokens
