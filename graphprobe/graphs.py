"""The dispatch of one forward (of one owner): a cached route where there is one, else describe, decide, obey."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from graphprobe.backends.base import after_fork
from graphprobe.calls import Args, Asked, Call, Describer, Kwargs
from graphprobe.captures import Captures, capturing
from graphprobe.decisions import AUTOGRAD, CHANGES, Decider
from graphprobe.dispatch import EAGER, Decision
from graphprobe.errors import ConfigError, internal_error
from graphprobe.hits import hit
from graphprobe.ledger import Cell, Forward, add, ignored
from graphprobe.options import Options
from graphprobe.outputs import described
from graphprobe.plans import MOST, Plans
from graphprobe.reasons import FallbackReason
from graphprobe.recording import Invoke, Theirs, rehearse
from graphprobe.routes import (
    GraphWork,
    Route,
    Schedule,
    Serve,
    Strays,
    Tensors,
    eager_route,
    graph_route,
    strays,
    twins,
)
from graphprobe.sampling import Sampler
from graphprobe.signature import Caller, compile_guard, dispatch_modes, function_modes
from graphprobe.signatures import Signature
from graphprobe.turn import MISS, WAIT
from graphprobe.verify import Verifier

is_grad_enabled = torch.is_grad_enabled


class GraphSet:
    """Dispatches the calls of one forward of one owner (a module, an instance, or nobody for a function)."""

    def __init__(self, options: Options, caller: Caller, entry: Forward, invoke: Invoke, module: bool) -> None:
        self.options = options
        self.entry = entry
        self.sampler = Sampler(options, entry, Verifier(options, entry, invoke))
        self.plans = Plans()
        self.captures = Captures(options, entry, invoke, self.plans, self.sampler)
        self._describer = Describer(options, caller)
        self.decider = Decider(options, entry, self.captures, self._describer, module)
        self._invoke = invoke
        self._module = module
        self._wrapper: Callable[[], Any] = _nobody
        self._whose: Callable[[], Any] | None = None
        _LIVING.add(self)

    def serves(self, wrapper: Any, whose: Callable[[], Any] | None) -> Callable[..., Any]:
        """Serve ``wrapper`` from now on, whose forward belongs to ``whose()``; returns its first ``__call__``."""
        self._wrapper, self._whose = weakref.ref(wrapper), whose
        return self.dispatch

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Serve a call of any kind. After one that a graph served, calls like it go by the hit of its route."""
        owner = self._owner()
        if self._describer.varies:
            return self._varying(owner, args, kwargs)
        plan = self.plans.hot.get((len(args), *kwargs) if kwargs else len(args))
        tensors = None if plan is None else args if plan.pick is None else plan.pick(args, kwargs)
        route = None if plan is None or tensors is None else plan.find(plan.size(tensors), tensors)
        if route is None or not self._holds(route, owner):
            return self._elsewhere(owner, args, kwargs)
        result = self._serve(route, (owner, args, kwargs, tensors, [0] if ignored() else route.cell))
        if result is MISS:
            return self._slow(owner, args, kwargs)
        if route.hit is not None and (wrapper := self._wrapper()) is not None:
            # Threads that share the turn wait for one another, which a hit does not.
            wrapper.__call__ = self.dispatch if self.captures.turn.shared else route.hit
        return result

    def sampled(self, route: Route, args: Args, kwargs: Kwargs, tensors: Tensors) -> Any:
        """Serve a call of a route whose guards hold and that is due to be sampled."""
        owner = self._owner()
        result = self._serve(route, (owner, args, kwargs, tensors, route.cell))
        return self._slow(owner, args, kwargs) if result is MISS else result

    def _owner(self) -> Any:
        owner = None if self._whose is None else self._whose()
        if owner is None and self._whose is not None:
            raise ReferenceError(f"the object that {self._wrapper()!r} belongs to is gone")
        return owner

    def _elsewhere(self, owner: Any, args: Args, kwargs: Kwargs) -> Any:
        """Serve by another plan of the spelling, where the last one does not fit."""
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
        if (route.grad is not None and route.grad is not is_grad_enabled()) or function_modes() != route.modes:
            return False
        return not self._module or owner.training is route.training

    def _serve(self, route: Route, call: tuple[Any, ...]) -> Any:
        """Serve by a route off the hot path."""
        route.tick[0] -= 1
        result = route.serve(*call) if route.tick[0] else self._sample(route, call)
        return self.captures.turn.serve(route.serve, call) if result is WAIT else result

    def _sample(self, route: Route, call: tuple[Any, ...]) -> Any:
        """Serve a sampled call; where the turn is shared, all of it in one turn."""
        due = route.schedule.due()
        if "verify" in due:
            return self.captures.turn.whole(route.sampled, (due, route.serve, call))
        result = route.sampled(due, route.serve, call)
        return self.captures.turn.serve(route.sampled, (due, route.serve, call)) if result is WAIT else result

    def _slow(self, owner: Any, args: Args, kwargs: Kwargs, asked: Asked | None = None) -> Any:
        if capturing() or self.captures.elsewhere():
            return self._invoke(owner, args, kwargs)
        generation = self.plans.generation
        try:
            bound = self._describer.caller.bind(args, kwargs)
        except TypeError:
            return self._invoke(owner, args, kwargs)
        call = self._describer.describe(bound, args, kwargs, asked)
        signature: Signature | None = None
        try:
            decision, signature = self.decider.resolve(owner, call)
        except Theirs as error:
            raise error.__cause__ or error from None
        except Exception as error:
            internal_error("dispatch", error)
            decision = Decision(EAGER, reason=FallbackReason.UNKNOWN)
        if decision.is_graph and signature is not None:
            # The generation of now: a capture has everything decided anew, this call is what it was made for.
            result, reason = self._obey(owner, call, decision, signature, self.plans.generation)
            if result is not MISS:
                return result
            decision = self.decider.decline(decision, reason)
        self.decider.say(decision, call)
        return self._run_eager(owner, call, decision, signature, generation)

    def _obey(
        self, owner: Any, call: Call, decision: Decision, signature: Signature, generation: int
    ) -> tuple[Any, FallbackReason]:
        """The graph's result, or MISS and the reason."""
        backend, turn = self.captures.backend, self.captures.turn
        assert backend is not None and decision.bucket is not None
        captured = signature.graphs[decision.bucket]
        dims = self.decider.dims(signature) if call.rows != captured.rows else None
        work = GraphWork(captured, backend, call, dims, self.options)
        cell = self.entry.graph_cell(call.size, decision.bucket, call.phase)
        schedule = self.sampler.graph_schedule(captured, call.rows)
        route = self._made(owner, call, decision, cell, graph_route(work, turn), schedule, work, signature)
        turn.claim()
        with backend.scope():
            result = self._serve(route, (owner, call.args, call.kwargs, call.tensors, [0] if ignored() else cell))
        if result is not MISS:
            try:
                self._remember(call, route, generation)
            except Exception as error:
                internal_error("remember", error)
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
        result, found = rehearse(backend, self.options, self._invoke, owner, call)
        if found.problem:
            self.captures.refuse(signature, bucket, found.problem)
        # A first call may set something up; what goes on changing cannot be replayed.
        signature.changes = signature.changes + 1 if found.changed else 0
        signature.changed = found.changed
        return result

    def _learn(self, call: Call, decision: Decision, signature: Signature, result: Any) -> None:
        if decision.wants is not None:
            signature.served[decision.wants] = signature.served.get(decision.wants, 0) + 1
        node, tensors = described(result)
        if call.widths == signature.widths:
            if signature.shapes.observe(call.rows, node, tensors, self.options.tokens_per_request):
                self.plans.forget()
        elif signature.narrows is None:
            signature.narrows = signature.shapes.agree(call.rows, node, tensors, self.options.tokens_per_request)
            if signature.narrows is not None:
                self.plans.forget()
        if is_grad_enabled():
            signature.in_autograd = any(t.requires_grad for t in tensors)
            if signature.in_autograd:
                self.decider.because("grad", FallbackReason.GRAD, AUTOGRAD)

    def _settled(self, decision: Decision, signature: Signature | None) -> bool:
        """Whether an eager decision holds as long as its guard and the graphs do."""
        if decision.reason is FallbackReason.DISABLED:
            return not self.decider.enabled
        if decision.reason is FallbackReason.GRAPH_LIMIT:
            return self.captures.signatures.full
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
        captured = None if work is None else work.captured
        check = strays(statics, limits, captured, modes if modes[2] else None, twins(call.tensors))
        if decision.reason is FallbackReason.DISTRIBUTED:
            check = _while_distributed(check)
        training = bool(self._module and owner.training)
        guard = compile_guard(call.tensors, narrow)
        sampled = self.sampler.sampled(decision, call.phase, work)
        # Nothing takes part in autograd in inference mode, which the guard compares.
        grad = None if torch.is_inference_mode_enabled() else is_grad_enabled()
        return Route(decision, cell, guard, grad, function_modes(), training, check, serve, schedule, sampled, work)

    def _remember(self, call: Call, route: Route, generation: int) -> None:
        """Serve calls like this one by a route, unless graphs have changed since it was decided."""
        if call.batch is None or generation != self.plans.generation:
            return
        plan = self.plans.plan(call, self._describer)
        if len(plan.routes) < MOST:
            shown = plan.size(call.tensors)
            plan.put((shown, *call.asked) if self._describer.varies else shown, route)
            self.plans.serve_by(call.spelling, plan)
            if route.hit is None and not self._describer.varies:
                # A weak reference: a cycle would keep the graphs until the next collection.
                module, graphs = self._whose if self._module else None, weakref.ref(self)
                route.hit = hit(route, plan, call.spelling, self.captures.turn, module, graphs)

    @property
    def enabled(self) -> bool:
        """Whether graphs may serve calls; while False every call is eager with reason ``disabled``."""
        return self.decider.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self.decider.enabled = bool(value)
        self.plans.forget()

    def forked(self) -> None:
        """In a forked child: never touch the parent's graphs again."""
        self.captures.turn.renew()
        self.sampler.forked()
        # One that has met no device yet starts in the child as it would have in the parent.
        self.decider.forked = self.captures.backend is not None
        self.plans.forget()

    def rehearse(self, owner: Any, args: Args, kwargs: Kwargs) -> None:
        """Run the forward eagerly without counting it, and learn the shapes of its result."""
        call = self._describer.described(args, kwargs)
        signature, reason = self.decider.wanted(owner, call)
        if signature is None or reason is not FallbackReason.WARMUP:
            self._invoke(owner, args, kwargs)
            return
        decision = Decision(EAGER, reason=reason, wants=call.size)
        for _ in range(CHANGES):
            self._learn(call, decision, signature, self._rehearsed(owner, call, signature, decision))
            if not signature.changes:
                break

    def capture_now(
        self, owner: Any, args: Args, kwargs: Kwargs, bucket: int
    ) -> tuple[int, str, float, int | None, str]:
        """Capture ``bucket`` from these arguments: (bucket, outcome, seconds, bytes, error)."""
        call = self._describer.described(args, kwargs)
        if call.size != bucket:
            raise ConfigError(f"make_inputs({bucket}) made {call.size} {self.options.unit}, it must make {bucket}")
        began = time.perf_counter()
        signature, reason = self.decider.wanted(owner, call)
        if signature is not None and reason is FallbackReason.WARMUP:
            if signature.changes >= CHANGES:
                reason = self.decider.unsteady(signature)
            else:
                reason = self.captures.capture(owner, call, signature, bucket)
        seconds = time.perf_counter() - began
        if reason is None:
            return bucket, "ok", seconds, self.entry.pool_growth.get(bucket), ""
        outcome, error = "skipped", reason.meaning
        if signature is not None and reason is FallbackReason.CAPTURE_FAILED:
            outcome, error = signature.failed[bucket]
        elif signature is not None and signature.changes >= CHANGES:
            error = signature.changed
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


def _nobody() -> None:
    return None


def _while_distributed(check: Strays | None) -> Strays:
    """``check``, for a decision that holds as long as there is a process group."""

    def gone(tensors: tuple[torch.Tensor, ...]) -> bool:
        return not torch.distributed.is_initialized() or (check is not None and check(tensors))

    return gone


_LIVING: weakref.WeakSet[GraphSet] = weakref.WeakSet()


def _after_fork() -> None:
    after_fork()
    for graphs in list(_LIVING):
        graphs.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
