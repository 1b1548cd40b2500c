"""Engines that own their graphs: which module observes one, and the patches that it places.

An integration lies in a module of its own (``integrations/``) and meets the core at ``observe()``. What it patches is a
table of hooks. They are placed when the engine imports the module in question, so that a process which runs no
forward pays nothing; each is visible as ``graphprobe_hook_bound``, and all of them can be taken away again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from graphprobe.errors import ERROR, WARNING, ConfigError, DidNotInstrument, internal_error, log
from graphprobe.ledger import LEDGER, Ledger
from graphprobe.reasons import FallbackReason
from graphprobe.sentinel import SENTINEL

INTEGRATIONS = {
    "vllm": "graphprobe_vllm",
    "sglang": "graphprobe_sglang",
    "nanovllm": "graphprobe_nanovllm",
    "minisgl": "graphprobe_minisglang",
}
"""The engines, and the modules that observe them: each has an ``INTEGRATION``."""

KEY = "_graphprobe"
"""The attribute of an engine's object that holds what watches it."""

PATIENCE = 100
"""Failures of our own in one process after which an integration switches itself off."""

Function = Callable[..., Any]
Watching = TypeVar("Watching")
Handler = Callable[[Function], Function]
"""Makes what stands in the place of an engine's function, or of a method, of the original."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One place in an engine: ``attribute`` (dotted) of ``module``, and ``handler`` (``module:function``) around it.

    Where a hook is not ``needed`` (a part that not every release has), nothing is said of its absence.
    """

    name: str
    module: str
    attribute: str
    handler: str
    needed: bool = True


class Patches:
    """The hooks of one engine in this process. Placed and removed as often as one likes."""

    def __init__(self, engine: str, hooks: Iterable[Hook], ledger: Ledger | None = None) -> None:
        self.engine = engine
        self.active = False
        self.release = f"this {engine}"
        """Which release it is, in words, for what is logged."""
        self._hooks = tuple(hooks)
        self._ledger = LEDGER if ledger is None else ledger
        self._told: set[str] = set()
        self._bound: dict[str, tuple[Any, str, Any, Any]] = {}
        self._failures = 0

    def place(self) -> None:
        """Bind each hook now where its module is loaded, else as soon as it is. Nothing is imported for it."""
        # Not above: only this needs it, and a process that asks for a name of this module need not have it.
        import wrapt

        self.active = True
        self._failures = 0
        SENTINEL.place(self.engine)
        for module in dict.fromkeys(hook.module for hook in self._hooks):
            if module in self._told:
                if module in sys.modules:
                    self._loaded(sys.modules[module])
            else:
                self._told.add(module)
                wrapt.register_post_import_hook(self._loaded, module)

    def remove(self) -> None:
        """Put back what was there. A hook that another tool has wrapped since then stays, and does nothing."""
        self.active = False
        SENTINEL.remove(self.engine)
        for name in list(self._bound):
            self.done(name)
        for key in [key for key in self._ledger.hooks.copy() if key[0] == self.engine]:
            self._ledger.hooks.pop(key, None)

    def done(self, name: str) -> None:
        """Put back what was there before one hook, which has told what it is for; its gauge stays as it is."""
        parent, attribute, ours, original = self._bound.get(name, (None, "", None, None))
        if parent is not None and vars(parent).get(attribute) is ours:
            if original is None:
                delattr(parent, attribute)
            else:
                setattr(parent, attribute, original)
            del self._bound[name]

    def failed(self, where: str, error: BaseException) -> None:
        """A failure of a handler: counted and logged like each of ours, and after too many of them all handlers rest.

        The engine never sees it.
        """
        self._failures += 1
        if self._failures == PATIENCE:
            self.active = False
            log(ERROR, "%s: nothing more is counted here, after %d failures of graphprobe", self.engine, PATIENCE)
        internal_error(f"{self.engine}.{where}", error)

    @property
    def placed(self) -> str:
        """How many of the hooks whose modules are in use have their place, in words."""
        bound = [is_bound for (engine, _), is_bound in self._ledger.hooks.copy().items() if engine == self.engine]
        return f"{sum(bound)} of {len(bound)} hooks in place"

    def why(self, find: Callable[..., FallbackReason], *known: Any) -> FallbackReason:
        """The reason that ``find`` tells, or unknown: what it reads is private to the engine, and may have moved."""
        try:
            return find(*known)
        except Exception as error:
            internal_error(f"{self.engine}.reason", error)
            return FallbackReason.UNKNOWN

    def _loaded(self, module: ModuleType) -> None:
        # Inside the engine's own import, which must not fail for us.
        if self.active:
            for hook in self._hooks:
                if hook.module == module.__name__:
                    try:
                        self._bind(hook, module)
                    except Exception as error:
                        self._ledger.hooks[self.engine, hook.name] = False
                        self.failed(f"hook.{hook.name}", error)

    def _bind(self, hook: Hook, module: ModuleType) -> None:
        if hook.name in self._bound:
            holder, name, _, before = self._bound[hook.name]
            if vars(holder).get(name) is not before:
                self._ledger.hooks[self.engine, hook.name] = True
                return
            # Another tool that lay upon ours has put back what was there before both.
            del self._bound[hook.name]
        *path, attribute = hook.attribute.split(".")
        parent: Any = module
        for part in path:
            parent = getattr(parent, part, None)
        target: Any = None if parent is None else getattr(parent, attribute, None)
        if callable(target) or hook.needed:
            self._ledger.hooks[self.engine, hook.name] = callable(target)
        if not callable(target):
            if hook.needed:
                text = "%s: hook %s is not in place, and what it is for is not counted: %s has no %s in %s"
                log(WARNING, text, self.engine, hook.name, self.release, hook.attribute, hook.module)
            return
        # None where it is inherited: ours lies on the class that was named, in front of the parent's.
        original = vars(parent).get(attribute)
        # A function and not wrapt's wrapper, which takes as long as all that is done in one.
        ours = functools.wraps(target)(_handler(hook.handler)(target))
        setattr(parent, attribute, ours)
        self._bound[hook.name] = (parent, attribute, ours, original)


def kept(owner: Any, make: Callable[[Any], Watching]) -> Watching:
    """What watches an object of an engine's, made at the first call. It lies on that object, and ends with it."""
    found: Watching | None = vars(owner).get(KEY)
    if found is None:
        found = make(owner)
        setattr(owner, KEY, found)
    return found


@dataclass(frozen=True)
class Integration:
    """An engine: ``oldest`` is the first release that is tried, ``tested`` the first and last that tests cover."""

    engine: str
    patches: Patches
    oldest: tuple[int, ...]
    tested: tuple[str, str]
    distributions: tuple[str, ...]
    """Names under which it is installed."""

    @property
    def supported(self) -> str:
        """The range in words."""
        return f"{'.'.join(map(str, self.oldest))} and newer (tested with {self._tested})"

    @property
    def _tested(self) -> str:
        return " to ".join(dict.fromkeys(self.tested))

    def found(self) -> str | None:
        """The version of the engine in this environment, empty where it tells none; None where it is not installed."""
        loaded = sys.modules.get(self.engine)
        if loaded is None and importlib.util.find_spec(self.engine) is None:
            return None
        told = getattr(loaded, "__version__", None)
        return str(told) if told else next(filter(None, map(_installed, self.distributions)), "")

    def instrument(self) -> None:
        """Place the hooks; DidNotInstrument where the engine is not there, or too old."""
        found = self.found()
        if found is None:
            hint = f"graphprobe must be installed in the environment of {self.engine}, this is {sys.executable}"
            raise DidNotInstrument(self.engine, None, self.supported, hint)
        if _too_old(found, self.oldest):
            raise DidNotInstrument(self.engine, found, self.supported, f"update {self.engine}")
        self.patches.release = f"{' '.join((self.engine, found)).strip()} (tested: {self._tested})"
        self.patches.place()

    def plugin(self, prepare: Callable[[], None] | None = None) -> None:
        """What an engine's plugin system calls: nothing unless GRAPHPROBE=1. Never raises, which might end a process.

        ``prepare`` is run before the hooks are placed.
        """
        try:
            asked = os.environ.get("GRAPHPROBE", "")
            if asked == "1":
                if prepare is not None:
                    prepare()
                self.automatic()
            elif asked not in ("", "0"):
                log(WARNING, "GRAPHPROBE=%s is not 1: %s is not observed", asked, self.engine)
        except Exception as error:
            # A handler of the log may be what has failed.
            with contextlib.suppress(Exception):
                log(ERROR, "%s is not observed, and runs as without graphprobe", self.engine, error=error)

    def automatic(self) -> None:
        """The same for an engine that loads us by itself: what is wrong is logged, never raised."""
        try:
            self.instrument()
        except DidNotInstrument as error:
            log(WARNING, "%s; it runs as without graphprobe", error)
        except Exception as error:
            log(ERROR, "%s is not observed, and runs as without graphprobe", self.engine, error=error)


def instrument(engine: str) -> None:
    """Observe the graphs of ``engine`` in this process, and in processes that it forks: a key of ``INTEGRATIONS``.

    Engines that have plugins do this by themselves with GRAPHPROBE=1. May be called again. DidNotInstrument says which
    version was found and which are supported; ConfigError names the engines that are known.
    """
    _integration(engine).instrument()


def uninstrument(engine: str) -> None:
    """Take the hooks into ``engine`` away again; what was counted stays. Nothing happens where there are none."""
    _integration(engine).patches.remove()


def _integration(engine: str) -> Integration:
    if not isinstance(engine, str) or engine not in INTEGRATIONS:
        raise ConfigError(f"unknown engine {engine!r}", f"use one of: {', '.join(INTEGRATIONS)}")
    found = importlib.import_module(INTEGRATIONS[engine]).INTEGRATION
    assert isinstance(found, Integration)
    return found


def _handler(name: str) -> Handler:
    module, _, function = name.partition(":")
    handler: Handler = getattr(importlib.import_module(module), function)
    return handler


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _too_old(version: str, oldest: tuple[int, ...]) -> bool:
    # A build from a checkout may call itself 0.1.dev1: it is tried.
    numbers = re.match(r"\d+(\.\d+)+", version)
    return numbers is not None and "dev" not in version and tuple(map(int, numbers[0].split("."))) < oldest
