"""What becomes of a call that no route serves: the path and the bucket, or the reason why it is eager.

The dispatcher knows sizes and buckets; here stands what else speaks against a graph, each with its reason, and each
said once with its cause.
"""

from __future__ import annotations

from typing import Any

import torch

from graphprobe.calls import Call, Describer
from graphprobe.captures import Captures
from graphprobe.dispatch import EAGER, Decision, Dispatcher
from graphprobe.ledger import Forward
from graphprobe.options import Options
from graphprobe.reasons import FallbackReason
from graphprobe.signature import traced
from graphprobe.signatures import Signature

CHANGES = 3
"""Eager calls in a row that change Python state, after which nothing is captured: one may set something up."""


SHARDED = ("FSDPModule", "FullyShardedDataParallel")
"""Classes of torch.distributed whose weights live during a call only."""

AUTOGRAD = "the result takes part in autograd, which a replay does not record; serve under torch.inference_mode()"


class Decider:
    """Decides the calls of one forward. ``enabled`` and ``forked`` are those of its owner."""

    def __init__(
        self, options: Options, entry: Forward, captures: Captures, describer: Describer, module: bool
    ) -> None:
        self.options = options
        self.entry = entry
        self.captures = captures
        self.enabled = True
        self.forked = False
        self._describer = describer
        self._dispatcher = Dispatcher(options.buckets, options.padded, options.capture_phases)
        self._module = module

    def decline(self, decision: Decision, reason: FallbackReason) -> Decision:
        """The eager decision for a graph decision that could not be obeyed."""
        return self._dispatcher.decline(decision, reason)

    def resolve(self, owner: Any, call: Call) -> tuple[Decision, Signature | None]:
        """The decision for a call, with its signature where it has one; captures what is due."""
        reason = self._ineligible(owner, call)
        if reason is not None:
            return Decision(EAGER, reason=reason), None
        early = self._dispatcher.decide(call.size, call.phase, padded=True)
        if not early.is_graph and early.reason is not FallbackReason.NO_EXACT_BUCKET:
            self._explain_size(call, early)
            return early, None
        call.inputs = self._describer.inputs(call)
        signature, reason = self.captures.signature(call)
        if signature is None:
            return Decision(EAGER, reason=reason), None
        decision = self._decide(signature, call)
        if self._due(signature, decision):
            assert decision.wants is not None
            failed = self.captures.capture(owner, call, signature, decision.wants)
            decision = self._dispatcher.decline(decision, failed) if failed else self._decide(signature, call)
        if decision.bucket is not None and signature.graphs[decision.bucket].shares(call.tensors):
            text = "two arguments share memory, and the forward writes to one of them"
            reason = self.because("signature/shared", FallbackReason.SIGNATURE, text)
            return self._dispatcher.decline(decision, reason), signature
        return decision, signature

    def wanted(self, owner: Any, call: Call) -> tuple[Signature | None, FallbackReason | None]:
        """The signature of a call that is to be captured, and why its bucket has no graph yet."""
        reason = self._ineligible(owner, call)
        if reason is not None:
            return None, reason
        call.inputs = self._describer.inputs(call)
        signature, reason = self.captures.signature(call)
        return signature, reason if signature is None else self.captures.blocked(signature, call.size)

    def say(self, decision: Decision, call: Call) -> None:
        """Say once why calls are eager, where the place that found it has not."""
        reason, options = decision.reason, self.options
        wanted = decision.wants or next(iter(options.buckets.holding(call.size)), call.size)
        texts = {
            FallbackReason.NOT_CAPTURED: f"bucket {wanted} has no graph; warm up, or capture in traffic (lazy=True)",
            FallbackReason.RAGGED: f"{call.rows} rows, and tokens_per_request is {options.tokens_per_request}",
            FallbackReason.RANK_VOTE: f"agree({call.size}) says that not all ranks can use a graph",
            FallbackReason.WRONG_PHASE: f"phase {call.phase} is not captured ({', '.join(options.capture_phases)} are)",
            FallbackReason.DISTRIBUTED: "torch.distributed is initialised: warm up on all ranks, or give agree=",
            FallbackReason.FORKED: "graphs do not survive a fork: this child runs eagerly",
        }
        if reason in texts:
            key = f"{reason}/{wanted}" if reason is FallbackReason.NOT_CAPTURED else str(reason)
            self.because(key, reason, texts[reason])

    def _ineligible(self, owner: Any, call: Call) -> FallbackReason | None:
        if self.forked:
            return FallbackReason.FORKED
        if not self.enabled or traced():
            return FallbackReason.DISABLED
        if call.batch is None:
            return self.because("signature/batch", FallbackReason.SIGNATURE, call.problem)
        if call.rows == 0:
            return FallbackReason.EMPTY_BATCH
        devices = {t.device for t in call.tensors}
        backend = self.captures.backend_for(devices.pop()) if len(devices) == 1 else None
        if backend is None:
            places = ", ".join(sorted({str(t.device) for t in call.tensors}))
            text = f"tensors on {places}; GRAPHPROBE_BACKEND=recorder tries graphs on a CPU"
            return self.because("unsupported_device", FallbackReason.UNSUPPORTED_DEVICE, text)
        if backend.capturing():
            return FallbackReason.DISABLED
        if self._module and owner.training:
            return FallbackReason.TRAINING
        if self._module and any(kind.__name__ in SHARDED for kind in type(owner).__mro__):
            text = f"the weights of a {type(owner).__name__} are gathered for each call and freed behind it"
            return self.because("signature/sharded", FallbackReason.SIGNATURE, text)
        if torch.is_grad_enabled() and self._needs_grad(owner, call):
            return self.because("grad", FallbackReason.GRAD, AUTOGRAD)
        if self._describer.ragged(call.rows):
            return FallbackReason.RAGGED
        if call.problem:
            return self.because(f"signature/{call.problem}", FallbackReason.SIGNATURE, call.problem)
        strange = call.opaque
        if strange is None:
            return None
        text = f"argument `{strange.path}` is a {strange.type.__name__}, whose content a graph cannot follow"
        text += "; if it is passed by reference, name it in static="
        return self.because(f"signature/{strange.path}", FallbackReason.SIGNATURE, text)

    def _needs_grad(self, owner: Any, call: Call) -> bool:
        if any(t.requires_grad for t in call.tensors):
            return True
        return self._module and any(p.requires_grad for p in owner.parameters())

    def because(self, key: str, reason: FallbackReason, text: str) -> FallbackReason:
        """``reason``, with its cause in the log and the snapshot, once per ``key``."""
        self.entry.explain(key, f"eager ({reason}): {text}")
        return reason

    def _explain_size(self, call: Call, decision: Decision) -> None:
        if decision.reason is FallbackReason.BATCH_TOO_LARGE:
            text = f"a batch of {call.size} is above the largest bucket, {self.options.buckets.largest}"
            self.because("batch_too_large", decision.reason, text)

    def _decide(self, signature: Signature, call: Call) -> Decision:
        if call.agreed is None:
            return Decision(EAGER, reason=FallbackReason.RANK_VOTE)
        size, padded = call.agreed, self._may_pad(signature, call)
        if size != call.size and not padded:
            return Decision(EAGER, reason=FallbackReason.NO_EXACT_BUCKET)
        decision = self._dispatcher.decide(size, call.phase, _Blocked(self.captures, signature), padded)
        if decision.is_graph and decision.bucket != call.size:
            reason = self._unpaddable(signature, call, decision)
            if reason is not None:
                return self._dispatcher.decline(decision, reason)
        if decision.is_graph and signature.widths != call.widths:
            reason = self._unnarrowable(signature)
            if reason is not None:
                return self._dispatcher.decline(decision, reason)
        if signature.changes >= CHANGES and decision.reason is FallbackReason.WARMUP:
            return self._dispatcher.decline(decision, self.unsteady(signature))
        if decision.reason is FallbackReason.NO_EXACT_BUCKET:
            text = f"a batch of {size} has no bucket ({', '.join(map(str, self.options.buckets))})"
            self.because(f"no_exact_bucket/{size}", decision.reason, text)
        return decision

    def unsteady(self, signature: Signature) -> FallbackReason:
        """The reason for a forward that leaves other Python state behind at each call."""
        text = (
            f"{signature.changed}, which a replay would not; keep it outside, or in a tensor that is written in place"
        )
        return self.because("signature/changed", FallbackReason.SIGNATURE, text)

    def _may_pad(self, signature: Signature, call: Call) -> bool:
        if not self.options.padded:
            return False
        missing = [i.path for i in call.inputs if i.dim is not None and i.fill is None]
        if missing:
            self.entry.explain("pad/missing", f"no padding: {missing} follow the batch and have no rule in pad=")
            return False
        landing = (signature.writes and f"a tensor outside ({signature.writes})") or signature.fills
        if landing and isinstance(self.options.pad, str):
            text = f"the forward writes to {landing}, so pad rows would land in it"
            self.entry.explain("pad/writes", f"no padding: {text}; give pad= as a dict with a scratch slot")
            return False
        return True

    def _unnarrowable(self, signature: Signature) -> FallbackReason | None:
        """Why a call with narrower inputs than captured must wait or cannot be: see ``Signature.narrows``."""
        if signature.narrows is None:
            return FallbackReason.WARMUP
        return None if signature.narrows else FallbackReason.SIGNATURE

    def _unpaddable(self, signature: Signature, call: Call, decision: Decision) -> FallbackReason | None:
        """Why a padded graph call must wait or cannot be: what follows the batch is known from two sizes only."""
        if self._describer.unsure(call) or not signature.shapes.known:
            return FallbackReason.WARMUP
        dims, outputs = self.dims(signature), signature.graphs[decision.bucket or 0].outputs
        why = ""
        if dims is None or outputs.unlike(dims, self.options.tokens_per_request):
            why = "how the outputs follow the batch is not clear"
        elif isinstance(self.options.pad, str) and outputs.fixed(dims):
            why = f"`{outputs.fixed(dims)}` does not follow the batch, so pad rows may be in it; give pad= as a dict"
        if not why:
            return None
        self.entry.explain("pad/outputs", f"no padding: {why}")
        return FallbackReason.NO_EXACT_BUCKET

    def dims(self, signature: Signature) -> list[int | None] | None:
        """The batch dimension of each output, as far as two sizes have shown it."""
        return signature.shapes.dims(self.options.tokens_per_request)

    def _due(self, signature: Signature, decision: Decision) -> bool:
        bucket = decision.wants
        if decision.reason is not FallbackReason.WARMUP or bucket is None or bucket in signature.graphs:
            return False
        return signature.served.get(bucket, 0) >= self.options.eager_first and not signature.changes


class _Blocked:
    """The mapping that a dispatcher asks: bucket -> reason, for one signature, found out when asked."""

    def __init__(self, captures: Captures, signature: Signature) -> None:
        self._captures, self._signature = captures, signature

    def get(self, bucket: int, /) -> FallbackReason | None:
        return self._captures.blocked(self._signature, bucket)
