"""An independent count of graph launches, against which an engine's forwards are held.

What an integration counts is what an engine decided. Here it is seen what torch launched: the graphs of the engine, of
torch.compile and of our own decorator alike. A pass that was counted as a graph call and launched nothing, or the
other way round, is told. Standard library only; torch is waited for, never imported.
"""

from __future__ import annotations

import functools
import sys
import threading

from graphprobe.errors import WARNING, internal_error, log
from graphprobe.ledger import FREE_THREADED, LEDGER, Cell, Forward, Ledger, add, ignored

TYPE_CHECKING = False  # typing is a third of what `import graphprobe` took
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

MODULE = "torch.cuda.graphs"
"""The module of torch that defines the class of graphs, and since 2.14 has hooks for all of them."""

DEVICES = ("cuda", "hip")
"""Where a graph call is a launch. A graph on a CPU launches nothing."""

PATIENCE = 16
"""Passes of one kind that do not fit before it is said: a start has odd ones."""

LAYERS = 8
"""Most methods of other tools that are counted around, one upon the other."""

SILENT = 1024
"""Launches of a thread after which an engine must have counted a call."""

LIES = {
    "graph": "counted as graph calls, and no graph was launched: the count is wrong, or the engine launches by another "
    "way than torch's CUDAGraph.replay (SGLang with SGLANG_ENABLE_CUDA_GRAPH_DEDUP does); these hits are unconfirmed",
    "eager": "counted as eager, and a graph was launched in them: one of a part (a vision encoder, a sampler, "
    "torch.compile), or the count is wrong",
}


class State:
    """What one thread launched so far, and whether it is inside a launch now."""

    __slots__ = ("count", "inside")

    def __init__(self) -> None:
        self.count = 0
        self.inside = False


class Local(threading.local):
    """One state per thread."""

    def __init__(self) -> None:
        self.state = State()


class Sentinel:
    """Counts launches of this process while it is placed. Placed and removed as often as one likes."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = LEDGER if ledger is None else ledger
        self._local = Local()
        self._seen: Cell = [0]
        self._users: set[str] = set()
        self._called: set[str] = set()
        self._told = False
        self._lock = threading.Lock()
        self._module: ModuleType | None = None
        self._hook: Any = None
        self._layers: list[tuple[Any, Any, Any]] = []
        self._checked: Any = None
        self.bound = False
        """Whether launches are counted now."""

    def place(self, user: str = "") -> None:
        """Count launches from now on, or as soon as torch is there. ``user`` is the engine that is observed."""
        self._users.add(user)
        try:
            if self._module is not None:
                self._loaded(self._module)
            elif not self._told:
                # Not above: only this needs it.
                import wrapt

                self._told = True
                wrapt.register_post_import_hook(self._loaded, MODULE)
        except Exception as error:
            internal_error("sentinel.place", error)

    def remove(self, user: str = "") -> None:
        """Put back what was there, once the last user has gone. A layer that another tool has wrapped rests."""
        self._users.discard(user)
        if self._users:
            return
        with self._lock:
            self.bound = False
            self._ledger.replays_seen = None
            if self._hook is not None:
                self._hook.remove()
                self._hook = None
            # The last one first: it may lie upon another.
            self._layers = [layer for layer in reversed(self._layers) if not _lift(*layer)][::-1]
            self._checked = None

    def called(self, user: str) -> None:
        """A call of ``user`` came by the place where calls are counted, though it may be none: an idle rank's, say."""
        self._called.add(user)

    def launches(self) -> int:
        """Launches of this thread so far."""
        return self._local.state.count

    def state(self) -> State:
        """The count of this thread itself, for who keeps something per thread anyway: it saves the look-up."""
        return self._local.state

    def judges(self, forward: Forward) -> bool:
        """Whether passes of ``forward`` can be judged; its mismatches are told from then on, 0 of them."""
        can = self.bound and forward.backend in DEVICES
        if can:
            for path in LIES:
                forward.unmatched.setdefault(path, 0)
        return can

    def judge(self, forward: Forward, path: str, before: int) -> None:
        """Hold a pass that has ended against what this thread launched since ``before``; path is graph or eager."""
        if (self._local.state.count != before) is not (path == "graph"):
            self._differs(forward, path)

    def _differs(self, forward: Forward, path: str) -> None:
        try:
            if not self.bound or forward.backend not in DEVICES or ignored():
                return
            if path == "graph" and self._displaced():
                return  # Who had taken our place may have launched it: nobody knows.
            count = forward.unmatch(path)
            if count == PATIENCE:
                forward.explain(f"unmatched/{path}", f"{count} passes were {LIES[path]}")
        except Exception as error:
            internal_error("sentinel.judge", error)

    def _loaded(self, module: ModuleType) -> None:
        # Inside torch's own import, which must not fail for us.
        try:
            with self._lock:
                self._module = module
                version = sys.modules.get("torch.version")
                built = getattr(version, "cuda", None) or getattr(version, "hip", None)
                if self._users and built and not self.bound:
                    self._bind(module)
        except Exception as error:
            internal_error("sentinel.bind", error)

    def _bind(self, module: ModuleType) -> None:
        register = getattr(module, "register_graph_replay_end_hook", None)
        if register is not None:
            self._hook = register(self._counting(_nothing))
        else:
            self._lay_below(module.CUDAGraph)
        self.bound = True
        self._ledger.replays_seen = self._seen

    def _displaced(self) -> bool:
        """Whether another tool took the place of torch's class or method; then we are around that from now on."""
        kind = getattr(sys.modules.get("torch.cuda"), "CUDAGraph", None) or getattr(self._module, "CUDAGraph", None)
        method: Any = getattr(kind, "replay", None)
        if method is not None and method is self._checked:
            return False
        if self._knows(method):
            self._checked = method
            return False
        if len(self._layers) < LAYERS and _takes_nothing(method):
            self._lay(kind, self._around(method))
        return True

    def _knows(self, method: Any) -> bool:
        """Whether a call of ``method`` comes to us: it is ours, or torch's with our hook, or says that it wraps it."""
        while method is not None:
            if any(method is ours for _, ours, _ in self._layers):
                return True
            if self._hook is not None and getattr(method, "__globals__", None) is vars(self._module):
                return True
            method = getattr(method, "__wrapped__", None)
        return False

    def _lay_below(self, kind: Any) -> None:
        """The layer around torch's own; one of earlier that could not be lifted counts again, or lies below."""
        if not self._knows(kind.replay):
            self._lay(kind, (self._around if self._layers else self._counting)(kind.replay))

    def _lay(self, kind: Any, layer: Callable[[Any], Any]) -> None:
        original = vars(kind).get("replay")
        # A function and not wrapt's wrapper, which takes as long as all that is done in one.
        ours = functools.wraps(kind.replay)(layer)
        kind.replay = ours
        self._layers.append((kind, ours, original))

    def _counting(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``original`` and one launch. All in one function of one argument: piecewise steps have dozens of these."""
        local, seen, silent = self._local, self._seen, self._silent

        def replay(graph: Any) -> Any:
            result = original(graph)
            state = local.state
            if state.inside or not self.bound:
                return result
            state.count = count = state.count + 1
            if FREE_THREADED:
                add(seen)
            else:
                seen[0] += 1
            if count == SILENT:
                silent()
            return result

        return replay

    def _around(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``original`` of another tool, which may come to us or not: one launch, however many layers it passes."""
        local, count = self._local, self._counting(_nothing)

        def replay(graph: Any) -> Any:
            state = local.state
            if state.inside:
                return original(graph)
            state.inside = True
            try:
                result = original(graph)
            finally:
                state.inside = False
            count(graph)
            return result

        return replay

    def _silent(self) -> None:
        """Tell of an engine that launches and is never counted. Its hooks are in this process, else it is not here."""
        try:
            hooks = self._ledger.hooks.copy()
            here = sorted({engine for (engine, _), bound in hooks.items() if bound} & self._users - self._called)
            forwards = [found for found in self._ledger.forwards.copy().values() if found.source == "engine"]
            tables = [table.copy() for found in forwards for table in (found.graph, found.eager)]
            if not here or any(cell[0] for table in tables for cell in table.values()):
                return
            text = f"instrumented, but never called: {SILENT:,} graph launches were seen, and none was counted"
            why = "only warm-up, or an idle rank's dummy runs, so far; else the engine dispatches in another place"
            log(WARNING, "%s: %s (%s)", ", ".join(here), text, why)
            for forward in forwards:
                forward.causes.setdefault("unseen", f"{text} ({why})")
        except Exception as error:
            internal_error("sentinel.silent", error)


def _nothing(graph: Any) -> None:
    """What is left to do where torch has launched, and calls us."""


def _takes_nothing(method: Any) -> bool:
    """Whether a method takes nothing but its object, as torch's ``replay``."""
    code = getattr(method, "__code__", None)
    return code is not None and code.co_argcount == 1 and not code.co_kwonlyargcount and not code.co_flags & 0b1100


def _lift(kind: Any, ours: Any, original: Any) -> bool:
    """Take a layer away; False where another tool's lies upon it."""
    if vars(kind).get("replay") is not ours:
        return False
    if original is None:
        del kind.replay
    else:
        kind.replay = original
    return True


SENTINEL = Sentinel()
"""The count of this process."""
