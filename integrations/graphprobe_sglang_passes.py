"""The handlers around SGLang's passes: each call of a model runner outside of captures is one, but for idle ranks."""

from __future__ import annotations

import threading
from typing import Any

from graphprobe.instrument import KEY, Function
from graphprobe.ledger import FREE_THREADED, LEDGER, ignore_active, ignored
from graphprobe.observe import Probe
from graphprobe.reasons import FallbackReason
from graphprobe.sentinel import SENTINEL
from graphprobe_sglang import PATCHES
from graphprobe_sglang_captures import capturing
from graphprobe_sglang_reasons import reason_decode, reason_draft, reason_prefill
from graphprobe_sglang_watch import Graphs, Usual, Watch, graph_runners, missed, watch_of

UNSEEN = 16
"""Batches without a pass, after which there is a warning."""

SIZED = "prefill"
"""The family of passes whose size is a number of tokens."""

KINDS = {
    "DECODE": ("decode", "decode"),
    "DLLM_EXTEND": ("decode", "decode"),
    "TARGET_VERIFY": ("decode", "verify"),
    "DRAFT_EXTEND": ("decode", "draft_extend"),
    "DRAFT_EXTEND_V2": ("decode", "draft_extend"),
    "EXTEND": (SIZED, "prefill"),
    "SPLIT_PREFILL": (SIZED, "prefill"),
    "MIXED": (SIZED, "mixed"),
}
"""SGLang's modes of a pass in our words: which graphs are for it, and the phase. An idle rank's is none."""

USUAL = ("DECODE", "TARGET_VERIFY")
"""Modes of which each graph call is one of decode graphs: those of prefill are never asked, or always refuse."""

failed = PATCHES.failed


class Local(threading.local):
    """What this thread is in."""

    refused: FallbackReason | None = None
    """Why the graphs of prefill have just been refused."""
    allowed = False
    """Whether they have just been allowed."""
    round: int | None = None
    """The passes of an eager round of drafting so far; None outside of one."""


LOCAL = Local()
BATCHES = [0]
"""Batches of this process before its first pass; negative from then on."""


class Pass:
    """One pass before it runs: what is known of it then. The batch is padded in place on the way."""

    __slots__ = ("before", "family", "mark", "mode", "phase", "size", "watch")

    def __init__(self, watch: Watch, mode: str, family: str, phase: str, size: int) -> None:
        self.watch, self.mode, self.family, self.phase, self.size = watch, mode, family, phase, size
        self.mark: Any = None
        self.before = SENTINEL.launches()

    def time(self, *, now: bool = False) -> None:
        """Time it where it is its turn, or ``now``."""
        watch = self.watch
        if ignore_active[0] and ignored():
            return
        # What a pass will be is not known yet; of prefill there are too many sizes to wait for a second one of each.
        if now or watch.stopwatch.due("", self.size.bit_length() if self.family == SIZED else self.size, self.phase):
            try:
                self.mark = watch.stopwatch.begin(watch.probe.forward)
            except Exception as error:
                # A device without events, say: what is counted does not hang on it.
                watch.stopwatch.stop()
                failed("time", error)

    def ended(self, probe: Probe, bucket: int | None, mode: str, reason: FallbackReason | None) -> None:
        """It has run: in the graph of a bucket, or eagerly for a reason."""
        if bucket is not None:
            probe.graph_call(self.size, bucket, mode, self.phase)
        else:
            assert reason is not None
            probe.eager_call(self.size, reason, self.phase)
        mark, self.mark = self.mark, None
        if mark is not None:
            self.watch.stopwatch.end(mark, probe.forward, mode, bucket, self.phase)
        if self.watch.on_gpu:
            SENTINEL.judge(probe.forward, "eager" if bucket is None else "graph", self.before)

    def cancel(self) -> None:
        """It has raised, and is no call."""
        try:
            if self.mark is not None:
                self.watch.stopwatch.cancel(self.mark)
        except Exception as error:
            failed("time", error)


def forward(original: Function) -> Function:
    """Around ``ModelRunner.forward``, whose result says whether a graph was replayed.

    A pass like an earlier one is counted here, in one function: in an engine, where nothing is in a cache, each call of
    ours takes a microsecond.
    """

    def forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            usual = runner.__dict__[KEY].usual[forward_batch.forward_mode, forward_batch.batch_size]
        except Exception:
            usual = None
        if usual is None or not PATCHES.active:
            return _first(original, runner, forward_batch, args, kwargs)
        usual.left -= 1
        if not usual.left:
            usual.left = usual.every
            return _first(original, runner, forward_batch, args, kwargs, usual)
        state = usual.state
        before = state.count
        output = original(runner, forward_batch, *args, **kwargs)
        try:
            if (
                output.can_run_graph
                and state.count != before
                and runner.decode_cuda_graph_runner.bs == usual.bucket
                and not ignore_active[0]
            ):
                usual.cell[0] += 1
            else:
                _unlike(runner, forward_batch, usual, output.can_run_graph, state.count != before)
        except Exception as error:
            failed("count", error)
        return output

    return forward


def _first(original: Function, runner: Any, batch: Any, args: Any, kwargs: Any, usual: Usual | None = None) -> Any:
    """A pass of which little is known yet, or one that is to be timed (``usual``)."""
    if LOCAL.round is not None:
        LOCAL.round += 1
        return original(runner, batch, *args, **kwargs)
    now = _begin(runner, batch, usual) if PATCHES.active else None
    if now is None:
        return original(runner, batch, *args, **kwargs)
    timed = now.mark is not None
    try:
        output = original(runner, batch, *args, **kwargs)
    except BaseException:
        now.cancel()
        raise
    try:
        _count(now, runner, batch, output.can_run_graph, timed)
    except Exception as error:
        now.cancel()
        failed("count", error)
    return output


def _begin(runner: Any, batch: Any, usual: Usual | None) -> Pass | None:
    try:
        if BATCHES[0] >= 0:
            BATCHES[0] = -1
            if LEDGER.hooks.get(("sglang", "dispatch")) is False:
                LEDGER.hooks["sglang", "dispatch"] = True
            # An idle rank launches graphs for ever, and none of them is a call.
            SENTINEL.called("sglang")
        kind = KINDS.get(batch.forward_mode._name_)
        if kind is None or capturing():
            return None
        watch = runner.__dict__.get(KEY) or watch_of(runner)
        if not watch.published:
            watch.publish(runner)
        LOCAL.refused, LOCAL.allowed = None, False
        now = _pass(watch, batch, *kind)
        if now is not None:
            now.time(now=usual is not None)
        return now
    except Exception as error:
        failed("pass", error)
        return None


def _pass(watch: Watch, batch: Any, family: str, phase: str) -> Pass | None:
    mode = batch.forward_mode._name_
    if family != SIZED:
        if watch.drafts and phase != "draft_extend":
            phase = "draft"
        return Pass(watch, mode, family, phase, batch.batch_size) if batch.batch_size else None
    if getattr(batch, "encoder_swa_replay", False) or (mode == "SPLIT_PREFILL" and getattr(batch, "split_index", 0)):
        # A repetition of an encoder's part, ahead of the pass itself; or further layers of a pass that was counted.
        return None
    tokens = batch.extend_num_tokens
    return Pass(watch, mode, family, phase, len(batch.input_ids) if tokens is None else tokens)


def _unlike(runner: Any, batch: Any, usual: Usual, replayed: bool, launched: bool) -> None:
    """A pass that looked as usual, and went another way: eagerly, in another bucket, or without a launch of torch's."""
    watch = watch_of(runner)
    now = Pass(watch, batch.forward_mode._name_, "decode", usual.phase, usual.size)
    if launched:
        now.before -= 1
    elif replayed:
        # By another thread, or past torch: from now on it is looked at as if seen first, which knows both.
        watch.usual.pop((batch.forward_mode, usual.size), None)
        now.before -= SENTINEL.state() is not usual.state
    LOCAL.allowed = False
    _count(now, runner, batch, replayed, False)


def _count(now: Pass, runner: Any, batch: Any, replayed: bool, timed: bool) -> None:
    watch, sized = now.watch, now.family == SIZED
    decode, prefill = graph_runners(runner)
    if replayed and not sized and LOCAL.allowed:
        # Graphs of prefill are asked where those of decode have refused.
        sized, now.size = True, prefill.raw_num_tokens
    owner = prefill if sized else decode
    graphs = watch.graphs(owner)
    if not replayed or graphs is None:
        now.ended(watch.prefill if sized else watch.probe, None, "", _reason(now, owner, graphs, batch))
        return
    bucket = graphs.bucket(owner, now.size)
    now.ended(watch.prefill if sized else watch.probe, bucket, graphs.mode, None)
    every = watch.stopwatch.every
    if FREE_THREADED:
        # An increment alone would lose some there.
        return
    if now.mode in USUAL and watch.on_gpu and graphs.tells and not watch.drafts and (timed or not every):
        key = batch.forward_mode, now.size
        if SENTINEL.launches() == now.before:
            # What cannot be confirmed is never like this.
            return
        if key not in watch.usual and hasattr(runner, "decode_cuda_graph_runner"):
            watch.usual[key] = Usual(watch.probe, now.size, bucket, graphs.mode, now.phase, every)


def _reason(now: Pass, runner: Any, graphs: Graphs | None, batch: Any) -> FallbackReason:
    if now.family == SIZED:
        if graphs is None or now.mode == "SPLIT_PREFILL":
            return FallbackReason.WRONG_PHASE
        return LOCAL.refused or FallbackReason.ENGINE_DECLINED
    if now.watch.drafts:
        return PATCHES.why(reason_draft, now.watch, now.phase, now.size, batch)
    if graphs is None or (not now.watch.on_gpu and now.mode != "DECODE"):
        return FallbackReason.DISABLED
    return PATCHES.why(reason_decode, now.watch.probe.forward, runner, graphs, now.size, batch)


def asked(original: Function) -> Function:
    """Around the question whether graphs of prefill may serve a pass: why not is known only here."""

    def can_run_graph(runner: Any, forward_batch: Any) -> Any:
        answer = original(runner, forward_batch)
        LOCAL.allowed = bool(answer)
        if not answer and PATCHES.active:
            LOCAL.refused = PATCHES.why(reason_prefill, runner, forward_batch)
        return answer

    return can_run_graph


def batch(original: Function) -> Function:
    """Around a batch of the scheduler: where batches run and no pass is seen, we are in the wrong place."""

    def run_batch(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if PATCHES.active:
            _ran(args)
        return result

    return run_batch


def _ran(args: tuple[Any, ...]) -> None:
    try:
        mode = getattr(args[1] if len(args) > 1 else None, "forward_mode", None)
        if getattr(mode, "_name_", "") == "PREBUILT":
            # Another server has run its pass.
            return
        if BATCHES[0] < 0:
            # It has served its purpose.
            PATCHES.done("batch")
            return
        BATCHES[0] += 1
        if BATCHES[0] == UNSEEN:
            missed(UNSEEN)
    except Exception as error:
        failed("batch", error)
