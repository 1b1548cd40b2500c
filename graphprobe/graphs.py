"""The dispatch of one forward (of one owner): a cached route where there is one, else describe, decide, obey."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from graphprobe.calls import Args, Asked, Call, Describer, Kwargs
from graphprobe.captures import Captures, capturing
from graphprobe.dispatch import EAGER, Decision, Dispatcher
from graphprobe.errors import ConfigError, internal_error
from graphprobe.ledger import Cell, Forward, add, ignore_active, ignored
from graphprobe.options import Options
from graphprobe.outputs import described
from graphprobe.plans import MOST, Plans
from graphprobe.reasons import FallbackReason
from graphprobe.recording import CHANGED, Invoke, Theirs, rehearse
from graphprobe.routes import (
    GraphWork,
    Route,
    Schedule,
    Serve,
    eager_route,
    graph_route,
    strays,
)
from graphprobe.sampling import Sampler
from graphprobe.signature import Caller, compile_guard, dispatch_modes, traced
from graphprobe.signatures import Signature
from graphprobe.turn import MISS, WAIT
from graphprobe.verify import Verifier

is_grad_enabled = torch.is_grad_enabled

CHANGES = 3
"""Eager calls in a row that change an object passed by reference, after which nothing is captured: one may set up."""


AUTOGRAD = "the result takes part in autograd, which a replay does not record; serve under torch.inference_mode()"


class GraphSet:
    """Dispatches the calls of one forward of one owner (a module, an instance, or nobody for a function)."""

    def __init__(self, options: Options, caller: Caller, entry: Forward, invoke: Invoke, module: bool) -> None:
        self.options = options
        self.entry = entry
        self.sampler = Sampler(options, entry, Verifier(options, entry, invoke))
        self.plans = Plans()
        self.captures = Captures(options, entry, invoke, self.plans, self.sampler)
        self._describer = Describer(options, caller)
        self._dispatcher = Dispatcher(options.buckets, options.padded, options.capture_phases)
        self._invoke = invoke
        self._module = module
        self._enabled = True
        self._forked = False
        _LIVING.add(self)

    def hot_path(self) -> Callable[[Any, Args, Kwargs], Any]:
        """The function (owner, args, kwargs) -> result that serves a call; what it looks up is bound once."""
        if self._describer.varies:
            return self._varying
        plan_of, module, turn = self.plans.hot.get, self._module, self.captures.turn
        elsewhere, slow, grad_now, active = self._elsewhere, self._slow, torch.is_grad_enabled, ignore_active

        def dispatch(owner: Any, args: Args, kwargs: Kwargs) -> Any:
            plan = plan_of((len(args), *kwargs) if kwargs else len(args))
            if plan is None:
                return slow(owner, args, kwargs)
            pick = plan.pick
            tensors = args if pick is None else pick(args, kwargs)
            route = plan.last
            if tensors is None or route is None or not route.guard(*tensors):
                return elsewhere(owner, args, kwargs)
            if route.strays is not None and route.strays(tensors):
                return elsewhere(owner, args, kwargs)
            if (route.grad is not None and route.grad is not grad_now()) or (
                module and owner.training is not route.training
            ):
                return slow(owner, args, kwargs)
            cell = [0] if active[0] and ignored() else route.cell
            tick = route.tick
            tick[0] -= 1
            if tick[0]:
                result = route.serve(owner, args, kwargs, tensors, cell)
            else:
                result = route.sampled(route.schedule.due(), route.serve, (owner, args, kwargs, tensors, cell))
            if result is WAIT:
                result = turn.serve(route.serve, (owner, args, kwargs, tensors, cell))
            return slow(owner, args, kwargs) if result is MISS else result

        return dispatch

    def _elsewhere(self, owner: Any, args: Args, kwargs: Kwargs) -> Any:
        """Serve by another route or plan of the spelling, where the last one does not fit."""
        spelling = (len(args), *kwargs) if kwargs else len(args)
        for plan in self.plans.recent(spelling):
            tensors = args if plan.pick is None else plan.pick(args, kwargs)
            route = None if tensors is None else plan.find(plan.size(tensors), tensors)
            if tensors is None or route is None:
                continue
            self.plans.serve_by(spelling, plan)
            if not self._holds(route, owner):
                break
            result = self._serve(route, (owner, args, kwargs, tensors, [0] if ignored() else route.cell))
            return self._slow(owner, args, kwargs) if result is MISS else result
        return self._slow(owner, args, kwargs)

    def _varying(self, owner: Any, args: Args, kwargs: Kwargs) -> Any:
        """Serve where the caller's callables decide, too: each of them is asked once per call."""
        plan = self.plans.hot.get((len(args), *kwargs) if kwargs else len(args))
        tensors: tuple[Any, ...] | None = None
        if plan is not None and not capturing():
            tensors = args if plan.pick is None else plan.pick(args, kwargs)
        shown = None if plan is None or tensors is None else plan.size(tensors)
        if plan is None or tensors is None or shown is None:
            return self._slow(owner, args, kwargs)
        asked = self._describer.ask(shown, args, kwargs)
        route = plan.find((shown, *asked), tensors)
        if route is None or not self._holds(route, owner):
            return self._slow(owner, args, kwargs, asked)
        result = self._serve(route, (owner, args, kwargs, tensors, [0] if ignored() else route.cell))
        return self._slow(owner, args, kwargs, asked) if result is MISS else result

    def _holds(self, route: Route, owner: Any) -> bool:
        if route.grad is not None and route.grad is not is_grad_enabled():
            return False
        return not self._module or owner.training is route.training

    def _serve(self, route: Route, call: tuple[Any, ...]) -> Any:
        """Serve by a route off the hot path."""
        route.tick[0] -= 1
        result = route.serve(*call) if route.tick[0] else route.sampled(route.schedule.due(), route.serve, call)
        return self.captures.turn.serve(route.serve, call) if result is WAIT else result

    def _slow(self, owner: Any, args: Args, kwargs: Kwargs, asked: Asked | None = None) -> Any:
        if capturing():
            return self._invoke(owner, args, kwargs)
        generation = self.plans.generation
        try:
            bound = self._describer.caller.bind(args, kwargs)
        except TypeError:
            return self._invoke(owner, args, kwargs)
        call = self._describer.describe(bound, args, kwargs, asked)
        signature: Signature | None = None
        try:
            decision, signature = self._resolve(owner, call)
        except Theirs as error:
            raise error.__cause__ or error from None
        except Exception as error:
            internal_error("dispatch", error)
            decision = Decision(EAGER, reason=FallbackReason.UNKNOWN)
        if decision.is_graph and signature is not None:
            result, reason = self._obey(owner, call, decision, signature, generation)
            if result is not MISS:
                return result
            decision = self._dispatcher.decline(decision, reason)
        return self._run_eager(owner, call, decision, signature, generation)

    def _resolve(self, owner: Any, call: Call) -> tuple[Decision, Signature | None]:
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
            reason = self._because("signature/shared", FallbackReason.SIGNATURE, text)
            return self._dispatcher.decline(decision, reason), signature
        return decision, signature

    def _ineligible(self, owner: Any, call: Call) -> FallbackReason | None:
        if self._forked:
            return FallbackReason.FORKED
        if not self._enabled or traced():
            return FallbackReason.DISABLED
        if call.batch is None:
            return self._because("signature/batch", FallbackReason.SIGNATURE, call.problem)
        if call.rows == 0:
            return FallbackReason.EMPTY_BATCH
        devices = {t.device for t in call.tensors}
        backend = self.captures.backend_for(devices.pop()) if len(devices) == 1 else None
        if backend is None:
            places = ", ".join(sorted({str(t.device) for t in call.tensors}))
            text = f"tensors on {places}; GRAPHPROBE_BACKEND=recorder tries graphs on a CPU"
            return self._because("unsupported_device", FallbackReason.UNSUPPORTED_DEVICE, text)
        if backend.capturing():
            return FallbackReason.DISABLED
        if self._module and owner.training:
            return FallbackReason.TRAINING
        if is_grad_enabled() and self._needs_grad(owner, call):
            return self._because("grad", FallbackReason.GRAD, AUTOGRAD)
        if self._describer.ragged(call.rows):
            return FallbackReason.RAGGED
        if call.problem:
            return self._because(f"signature/{call.problem}", FallbackReason.SIGNATURE, call.problem)
        strange = call.opaque
        if strange is None:
            return None
        text = f"argument `{strange.path}` is a {strange.type.__name__}, whose content a graph cannot follow"
        text += "; if it is passed by reference, name it in static="
        return self._because(f"signature/{strange.path}", FallbackReason.SIGNATURE, text)

    def _needs_grad(self, owner: Any, call: Call) -> bool:
        if any(t.requires_grad for t in call.tensors):
            return True
        return self._module and any(p.requires_grad for p in owner.parameters())

    def _because(self, key: str, reason: FallbackReason, text: str) -> FallbackReason:
        self.entry.explain(key, f"eager ({reason}): {text}")
        return reason

    def _explain_size(self, call: Call, decision: Decision) -> None:
        if decision.reason is FallbackReason.BATCH_TOO_LARGE:
            text = f"a batch of {call.size} is above the largest bucket, {self.options.buckets.largest}"
            self._because("batch_too_large", decision.reason, text)

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
            reason = self._because("signature/changed", FallbackReason.SIGNATURE, CHANGED)
            return self._dispatcher.decline(decision, reason)
        if decision.reason is FallbackReason.NO_EXACT_BUCKET:
            text = f"a batch of {size} has no bucket ({', '.join(map(str, self.options.buckets))})"
            self._because(f"no_exact_bucket/{size}", decision.reason, text)
        return decision

    def _may_pad(self, signature: Signature, call: Call) -> bool:
        if not self.options.padded:
            return False
        missing = [i.path for i in call.inputs if i.dim is not None and i.fill is None]
        if missing:
            self.entry.explain("pad/missing", f"no padding: {missing} follow the batch and have no rule in pad=")
            return False
        if signature.writes and isinstance(self.options.pad, str):
            text = f"the forward writes to a tensor outside ({signature.writes}), so pad rows would land in it"
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
        dims, outputs = self._dims(signature), signature.graphs[decision.bucket or 0].outputs
        why = ""
        if dims is None or outputs.unlike(dims, self.options.tokens_per_request):
            why = "how the outputs follow the batch is not clear"
        elif isinstance(self.options.pad, str) and outputs.fixed(dims):
            why = f"`{outputs.fixed(dims)}` does not follow the batch, so pad rows may be in it; give pad= as a dict"
        if not why:
            return None
        self.entry.explain("pad/outputs", f"no padding: {why}")
        return FallbackReason.NO_EXACT_BUCKET

    def _dims(self, signature: Signature) -> list[int | None] | None:
        return signature.shapes.dims(self.options.tokens_per_request)

    def _due(self, signature: Signature, decision: Decision) -> bool:
        bucket = decision.wants
        if decision.reason is not FallbackReason.WARMUP or bucket is None or bucket in signature.graphs:
            return False
        return signature.served.get(bucket, 0) >= self.options.eager_first and not signature.changes

    def _obey(
        self, owner: Any, call: Call, decision: Decision, signature: Signature, generation: int
    ) -> tuple[Any, FallbackReason]:
        """The graph's result, or MISS and the reason."""
        backend, turn = self.captures.backend, self.captures.turn
        assert backend is not None and decision.bucket is not None
        captured = signature.graphs[decision.bucket]
        dims = self._dims(signature) if call.rows != captured.rows else None
        work = GraphWork(captured, backend, call.rows, call.size, dims, self.options)
        cell = self.entry.graph_cell(call.size, decision.bucket, call.phase)
        schedule = self.sampler.graph_schedule(captured, call.rows, signature.writes)
        route = self._made(owner, call, decision, cell, graph_route(work, turn), schedule, work, signature)
        turn.claim()
        with backend.scope():
            result = self._serve(route, (owner, call.args, call.kwargs, call.tensors, [0] if ignored() else cell))
        if result is not MISS:
            self._remember(call, route, generation)
            return result, FallbackReason.UNKNOWN
        if not captured.life.live:
            return MISS, captured.life.reason
        return MISS, FallbackReason.DISABLED if backend.capturing() else FallbackReason.BUSY

    def _run_eager(
        self, owner: Any, call: Call, decision: Decision, signature: Signature | None, generation: int
    ) -> Any:
        assert decision.reason is not None
        warming = decision.reason is FallbackReason.WARMUP
        if warming and signature is not None and decision.wants not in signature.graphs:
            result = self._rehearsed(owner, call, signature, decision)
        else:
            result = self._invoke(owner, call.args, call.kwargs)
        try:
            cell = self.entry.eager_cell(call.size, decision.reason, call.phase)
            if not ignored():
                add(cell)
            if signature is not None:
                self._learn(call, decision, signature, result)
            if self._settled(decision, signature):
                schedule = self.sampler.eager_schedule(call.phase, decision.reason)
                serve = eager_route(self._invoke)
                self._remember(call, self._made(owner, call, decision, cell, serve, schedule, None, None), generation)
        except Exception as error:
            internal_error("eager", error)
        return result

    def _rehearsed(self, owner: Any, call: Call, signature: Signature, decision: Decision) -> Any:
        """The result of an eager run on the way to a capture, watched for what no graph could do."""
        backend, bucket = self.captures.backend, decision.wants
        assert backend is not None and bucket is not None
        result, problem = rehearse(backend, self.options, self._invoke, owner, call)
        if problem == CHANGED:
            # The first call of an object may set it up; one that goes on changing is no cache for graphs.
            signature.changes += 1
        elif problem:
            self.captures.refuse(signature, bucket, problem)
        else:
            signature.changes = 0
        return result

    def _learn(self, call: Call, decision: Decision, signature: Signature, result: Any) -> None:
        if decision.wants is not None:
            signature.served[decision.wants] = signature.served.get(decision.wants, 0) + 1
        node, tensors = described(result)
        if call.widths == signature.widths:
            signature.shapes.observe(call.rows, node, tensors)
        elif signature.narrows is None:
            signature.narrows = signature.shapes.agree(call.rows, node, tensors, self.options.tokens_per_request)
            if signature.narrows is not None:
                self.plans.forget()
        if is_grad_enabled():
            signature.in_autograd = any(t.requires_grad for t in tensors)
            if signature.in_autograd:
                self._because("grad", FallbackReason.GRAD, AUTOGRAD)

    def _settled(self, decision: Decision, signature: Signature | None) -> bool:
        """Whether an eager decision holds as long as its guard and the graphs do."""
        if decision.reason is FallbackReason.DISABLED:
            return not self._enabled
        if signature is not None and signature.lost.get(decision.wants or 0) is decision.reason:
            return True
        return decision.reason not in PASSING and not (signature is not None and decision.wants in signature.graphs)

    def _made(
        self,
        owner: Any,
        call: Call,
        decision: Decision,
        cell: Cell,
        serve: Serve,
        schedule: Schedule,
        work: GraphWork | None,
        signature: Signature | None,
    ) -> Route:
        """The route of a decision, with the guards under which it holds."""
        narrow = {item.index: item.narrow[0] for item in call.inputs if item.narrow is not None and signature}
        widths = signature.widths if signature is not None else ()
        least = 0 if signature is not None and signature.narrows else 1 << 62
        limits = [(i, dim, min(least, most), most) for (i, dim), most in zip(narrow.items(), widths, strict=False)]
        statics = [(i, t.data_ptr()) for i, t in enumerate(call.tensors) if call.leaves[i].kind == "static"]
        modes = dispatch_modes()
        check = strays(statics, limits, None if work is None else work.captured, modes if modes[2] else None)
        training = bool(self._module and owner.training)
        guard = compile_guard(call.tensors, narrow)
        sampled = self.sampler.sampled(decision, call.phase, work)
        # Nothing takes part in autograd in inference mode, which the guard compares.
        grad = None if torch.is_inference_mode_enabled() else is_grad_enabled()
        return Route(decision, cell, guard, grad, training, check, serve, schedule, sampled)

    def _remember(self, call: Call, route: Route, generation: int) -> None:
        """Serve calls like this one by a route, unless graphs have changed since it was decided."""
        if call.batch is None or (generation != self.plans.generation and not route.decision.is_graph):
            return
        plan = self.plans.plan(call, self._describer)
        if len(plan.routes) < MOST:
            shown = plan.size(call.tensors)
            plan.put((shown, *call.asked) if self._describer.varies else shown, route)
            self.plans.serve_by(call.spelling, plan)

    @property
    def enabled(self) -> bool:
        """Whether graphs may serve calls; while False every call is eager with reason ``disabled``."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = bool(value)
        self.plans.forget()

    def forked(self) -> None:
        """In a forked child: never touch the parent's graphs again."""
        self._forked = True
        self.captures.turn.renew()
        self.plans.forget()

    def _wanted(self, owner: Any, call: Call) -> tuple[Signature | None, FallbackReason | None]:
        """The signature of a call that is to be captured, and why its bucket has no graph yet."""
        reason = self._ineligible(owner, call)
        if reason is not None:
            return None, reason
        call.inputs = self._describer.inputs(call)
        signature, reason = self.captures.signature(call)
        return signature, reason if signature is None else self.captures.blocked(signature, call.size)

    def rehearse(self, owner: Any, args: Args, kwargs: Kwargs) -> None:
        """Run the forward eagerly without counting it, and learn the shapes of its result."""
        call = self._describer.described(args, kwargs)
        signature, reason = self._wanted(owner, call)
        if signature is None or reason is not FallbackReason.WARMUP:
            self._invoke(owner, args, kwargs)
            return
        decision = Decision(EAGER, reason=reason, wants=call.size)
        self._learn(call, decision, signature, self._rehearsed(owner, call, signature, decision))

    def capture_now(
        self, owner: Any, args: Args, kwargs: Kwargs, bucket: int
    ) -> tuple[int, str, float, int | None, str]:
        """Capture ``bucket`` from these arguments: (bucket, outcome, seconds, bytes, error)."""
        call = self._describer.described(args, kwargs)
        if call.size != bucket:
            raise ConfigError(f"make_inputs({bucket}) made {call.size} {self.options.unit}, it must make {bucket}")
        began = time.perf_counter()
        signature, reason = self._wanted(owner, call)
        if signature is not None and reason is FallbackReason.WARMUP:
            reason = self.captures.capture(owner, call, signature, bucket)
        seconds = time.perf_counter() - began
        if reason is None:
            return bucket, "ok", seconds, self.entry.pool_growth.get(bucket), ""
        outcome, error = "skipped", reason.meaning
        if signature is not None and reason is FallbackReason.CAPTURE_FAILED:
            outcome, error = signature.failed[bucket]
        return bucket, outcome, seconds, None, error


PASSING = frozenset(
    {
        FallbackReason.WARMUP,
        FallbackReason.BUSY,
        FallbackReason.STATIC_MOVED,
        FallbackReason.WEIGHTS_MOVED,
        FallbackReason.VERIFY_FAILED,
        FallbackReason.CAPTURE_FAILED,
        FallbackReason.UNKNOWN,
    }
)
"""Reasons of one call, not of the next one like it."""


class _Blocked:
    """The mapping that a dispatcher asks: bucket -> reason, for one signature, found out when asked."""

    def __init__(self, captures: Captures, signature: Signature) -> None:
        self._captures, self._signature = captures, signature

    def get(self, bucket: int, /) -> FallbackReason | None:
        return self._captures.blocked(self._signature, bucket)


_LIVING: weakref.WeakSet[GraphSet] = weakref.WeakSet()


def _after_fork() -> None:
    for graphs in list(_LIVING):
        graphs.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
