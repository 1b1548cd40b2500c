"""Which graphs exist and which may be made: backends, signatures, captures, and the end of graphs."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from graphprobe.attributes import hooked
from graphprobe.backends import for_device
from graphprobe.backends.base import CAPTURE_LOCK, Backend, explained
from graphprobe.calls import Call
from graphprobe.errors import CaptureError, internal_error
from graphprobe.ledger import Forward
from graphprobe.options import Options
from graphprobe.plans import Plans
from graphprobe.reasons import FallbackReason
from graphprobe.recording import Invoke, Theirs, record
from graphprobe.routes import Captured
from graphprobe.sampling import Sampler
from graphprobe.signatures import WAITING, Signature, Signatures
from graphprobe.turn import turn_of

FAILURES = 2
"""Failed captures of a bucket after which it is given up."""

MOVES = 3
"""Times in a row that a bucket is captured anew because what it reads was replaced, before it is left eager."""

SETTLED = 16
"""Checks (of CHECK calls each) after which a graph has paid for its capture: moves before it count no more."""

_thread = threading.local()


def capturing() -> bool:
    """Whether this thread is inside a capture of ours: what it calls is part of that graph, not a call."""
    return getattr(_thread, "capturing", False)


class Captures:
    """The graphs of one wrapper. ``turn`` is held over every replay, capture and reset."""

    def __init__(self, options: Options, entry: Forward, invoke: Invoke, plans: Plans, sampler: Sampler) -> None:
        self.options = options
        self.entry = entry
        self.signatures = Signatures(options.max_graphs)
        self.turn = turn_of(options.pool)
        self.closed = False
        self.backend: Backend | None = None
        self._invoke = invoke
        self._plans = plans
        self._sampler = sampler
        # A wrapper that goes takes its graphs with it, out of the books, too.
        self._held = entry.holder()
        weakref.finalize(self, entry.leave, self._held).atexit = False

    def backend_for(self, device: torch.device) -> Backend | None:
        """The backend for tensors on ``device``, None where they can only run eagerly."""
        if self.backend is not None and self.backend.device == device:
            return self.backend
        if self.backend is not None and self.signatures.graphs:
            # One wrapper, one pool: tensors on a second device run eagerly.
            return None
        backend = for_device(self.options.backend, device, self.options.pool)
        if backend is not None:
            self.backend = backend
            self.entry.backend = backend.name
            self._sampler.use(backend)
        return backend

    def signature(self, call: Call) -> tuple[Signature | None, FallbackReason | None]:
        """The signature of a call, or why it may not start one."""
        signature = self.signatures.find(call, self._bury_all)
        if signature is not None:
            return signature, None
        reason = self._closed_reason(call)
        if reason is None and self.signatures.restless(call):
            text = "what is passed by reference (static=) is another object at each call"
            self.entry.explain("static_moved/restless", f"eager (static_moved): {text}; keep one, or stage it")
            reason = FallbackReason.STATIC_MOVED
        return (None, reason) if reason is not None else (self.signatures.add(call), None)

    def _bury_all(self, signature: Signature) -> None:
        for bucket in list(signature.graphs):
            self.bury(signature, bucket)

    def _closed_reason(self, call: Call) -> FallbackReason | None:
        if self.may_capture():
            return FallbackReason.GRAPH_LIMIT if self._full() or self._scattered(call) else None
        if not self.signatures.graphs:
            return FallbackReason.NOT_CAPTURED
        text = self.signatures.difference(call)
        self.entry.explain("signature/closed", f"eager (signature): {text}; nothing is captured after warmup")
        return FallbackReason.SIGNATURE

    def _scattered(self, call: Call) -> bool:
        """Whether far more kinds of calls came than could be captured, and this one for the first time."""
        if self.signatures.evicted <= WAITING * self.options.max_graphs or self.signatures.familiar(call):
            return False
        text = "too many kinds of calls: an argument (a step counter, a length) changes from call to call"
        self.entry.explain("graph_limit/scattered", f"eager (graph_limit): {text}; pass it as a tensor")
        return True

    def _full(self) -> bool:
        if not self.signatures.full:
            return False
        text = (
            f"there are {self.signatures.graphs} graphs and max_graphs={self.options.max_graphs}; raise it or reset()"
        )
        self.entry.explain("graph_limit", f"eager (graph_limit): {text}")
        return True

    def may_capture(self) -> bool:
        """Whether this thread may capture now: during warm-up, or in traffic where that is allowed."""
        if self.warming:
            return True
        return not self.closed if self.options.lazy is None else self.options.lazy

    @property
    def warming(self) -> bool:
        """Whether this thread is warming up this wrapper."""
        return getattr(_thread, "warming", None) is self

    def elsewhere(self) -> bool:
        """Whether this thread is warming up another wrapper: what that one calls is no traffic."""
        warming = getattr(_thread, "warming", None)
        return warming is not None and warming is not self

    @contextlib.contextmanager
    def warm(self) -> Iterator[None]:
        """Inside, this thread may capture although traffic may not."""
        before, _thread.warming = getattr(_thread, "warming", None), self
        try:
            yield
        finally:
            _thread.warming = before

    def blocked(self, signature: Signature, bucket: int) -> FallbackReason | None:
        """Why ``bucket`` has no graph that can be replayed now; None where it has one."""
        captured = signature.graphs.get(bucket)
        if captured is not None:
            return None if captured.life.live else self.bury(signature, bucket)
        if bucket in signature.lost:
            return signature.lost[bucket]
        if signature.in_autograd:
            return FallbackReason.GRAD
        if not self.may_capture():
            return FallbackReason.CAPTURE_FAILED if bucket in signature.failed else FallbackReason.NOT_CAPTURED
        if self._full():
            return FallbackReason.GRAPH_LIMIT
        return FallbackReason.DISTRIBUTED if self._ranks_may_differ() else FallbackReason.WARMUP

    def _ranks_may_differ(self) -> bool:
        if self.options.agree is not None or self.options.lazy or self.warming:
            return False
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def bury(self, signature: Signature, bucket: int) -> FallbackReason:
        """Remove a graph that must not be replayed; the call that finds it is eager for the graph's reason."""
        captured = self.turn.alone(self._dropped, signature, bucket)
        if captured is None:
            return FallbackReason.STATIC_MOVED
        reason = captured.life.reason
        self._plans.forget()
        self._held.buckets = self.signatures.buckets
        before = 0 if captured.checks >= SETTLED else signature.moves.get(bucket, 0)
        moves = signature.moves[bucket] = before + 1
        text = f"bucket {bucket}: {captured.life.text or reason.meaning}"
        if reason is FallbackReason.VERIFY_FAILED or moves >= MOVES or not self.may_capture():
            signature.lost[bucket] = reason
            text += "; it stays eager"
            if reason is FallbackReason.STATIC_MOVED and not captured.life.text:
                text += " (per-step tensors outside the arguments need context=)"
        self.entry.explain(f"{reason}/{bucket}/{moves}", text)
        return reason

    def _dropped(self, signature: Signature, bucket: int) -> Captured | None:
        captured = signature.graphs.pop(bucket, None)
        if captured is not None:
            captured.drop()
        return captured

    def capture(self, owner: Any, call: Call, signature: Signature, bucket: int) -> FallbackReason | None:
        """Capture ``bucket`` from this call's arguments; the reason where that did not work."""
        if not CAPTURE_LOCK.acquire():
            return FallbackReason.BUSY
        try:
            return self.turn.alone(self._capture, owner, call, signature, bucket)
        finally:
            _thread.capturing = False
            CAPTURE_LOCK.release()

    def _capture(self, owner: Any, call: Call, signature: Signature, bucket: int) -> FallbackReason | None:
        if bucket in signature.graphs:
            # Another thread has made it since this call was decided.
            return None
        _thread.capturing = True
        assert self.backend is not None
        began, before = time.perf_counter(), self.backend.pool_bytes()
        try:
            captured = record(self.backend, self.options, self._invoke, owner, call, signature, bucket)
        except Theirs:
            raise
        except Exception as error:
            reason = self._failed(signature, bucket, error, time.perf_counter() - began)
            if not isinstance(error, (CaptureError, torch.OutOfMemoryError)):
                internal_error("capture", error)
            return reason
        seconds, after = time.perf_counter() - began, self.backend.pool_bytes()
        if torch.is_grad_enabled() and captured.outputs.in_autograd:
            captured.drop()
            signature.in_autograd = True
            return FallbackReason.GRAD
        signature.graphs[bucket] = captured
        self._observe(signature, captured)
        if self.options.agree is not None and self.options.padded and not signature.shapes.known:
            self._observe_less(owner, call, signature, bucket)
        self.entry.captured(bucket, "ok", seconds, None if before is None or after is None else after - before)
        self._held.buckets, self._held.pool_bytes = self.signatures.buckets, after
        self._plans.forget()
        self._mention_hooks(owner)
        return None

    def _observe(self, signature: Signature, captured: Captured) -> None:
        outputs = captured.outputs
        signature.shapes.observe(captured.rows, outputs.node, outputs.tensors, self.options.tokens_per_request)

    def _observe_less(self, owner: Any, call: Call, signature: Signature, bucket: int) -> None:
        """Learn the shapes of a smaller result from a capture that is thrown away.

        With ``agree`` all ranks must take one path, so a padded call cannot wait until this rank has seen two sizes.
        """
        assert self.backend is not None
        rows = (bucket - 1) * self.options.rows_per_unit
        if not rows:
            return
        with contextlib.suppress(CaptureError, torch.OutOfMemoryError):
            less = record(self.backend, self.options, self._invoke, owner, call.cut(rows), signature, bucket, rows)
            self._observe(signature, less)
            less.drop()

    def _mention_hooks(self, owner: Any) -> None:
        names = hooked(owner, self._invoke)
        if names:
            self.entry.explain("hooks", f"forward hooks are bypassed by replays: {', '.join(names[:5])}")

    def refuse(self, signature: Signature, bucket: int, text: str) -> None:
        """Give up a bucket because of what an eager run of its calls showed."""
        signature.lost[bucket] = FallbackReason.CAPTURE_FAILED
        signature.failed[bucket] = ("error", text)
        self.entry.captured(bucket, "error", 0.0, None)
        self.entry.explain(f"capture_failed/{bucket}", f"bucket {bucket} cannot be captured: {text}")

    def _failed(self, signature: Signature, bucket: int, error: Exception, seconds: float) -> FallbackReason:
        error = error if isinstance(error, CaptureError) else explained(error)
        outcome = error.outcome
        signature.failures[bucket] = signature.failures.get(bucket, 0) + 1
        signature.failed[bucket] = (outcome, str(error))
        if outcome == "oom" or signature.failures[bucket] >= FAILURES:
            signature.lost[bucket] = FallbackReason.CAPTURE_FAILED
        self.entry.captured(bucket, outcome, seconds, None)
        if signature.failures[bucket] == 1:
            # A second failure may be a consequence of the first.
            self.entry.explain(f"capture_failed/{bucket}", f"capturing bucket {bucket} failed: {error}")
        return FallbackReason.CAPTURE_FAILED

    def reset(self) -> None:
        """Drop every graph and give the pool back. Counts stay."""
        self.turn.alone(self._reset)

    def _reset(self) -> None:
        self._plans.clear()
        self.signatures.clear()
        self._held.buckets, self._held.pool_bytes = frozenset(), 0
        if self.backend is not None:
            self.backend.release()
