"""Python attributes behind a forward: a graph repeats what they were at its capture and sets none of them.

A forward that sets one at each call is no graph. One that the engine sets between calls (an adapter's name, a scale,
a submodule's ``training``) is noticed by comparing them, now and then.
"""

from __future__ import annotations

import functools
import time
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from graphprobe.signature import canonical, constant

ITEMS = 16
"""Items up to which a container is compared by what it holds, beyond by its identity and length."""

PAUSE, QUICK = 0.1, 50e-6
"""Seconds between two looks at the modules of a graph at least, where a look takes ``QUICK`` seconds; where it takes
longer (2 to 4 us per module), so many times as long: 1/2000 of the time."""

DEPTH = 4
"""Containers in containers that are compared by what they hold; a dict counts twice."""

CONTAINERS = (list, tuple, set, dict)

CALLABLES = (types.FunctionType, types.MethodType, functools.partial)

REACH = 4
"""Functions that call functions: how far a model is looked for."""

OWN = frozenset(torch.nn.Module().__dict__) - {"training"}
"""What torch keeps in every module: tables of tensors, submodules and hooks."""


class _Same:
    """Stands for an object that is compared by identity, and keeps it, so that no other one gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def frozen(value: Any, depth: int = DEPTH) -> Any:
    """What a value is now: numbers and texts by value, small containers by their items, the rest by identity."""
    if constant(value):
        return type(value), canonical(value)
    if type(value) not in CONTAINERS or not depth:
        return _Same(value)
    if len(value) > ITEMS:
        return _Same(value), len(value)
    return type(value), [frozen(item, depth - 1) for item in _items(value)]


def plain(value: Any, depth: int = DEPTH) -> bool:
    """Whether a value consists of numbers and texts alone, few enough to be compared."""
    if constant(value):
        return True
    if type(value) not in CONTAINERS or not depth or len(value) > ITEMS:
        return False
    return all(plain(item, depth - 1) for item in _items(value))


def _items(value: Any) -> list[Any]:
    # Copied at once: another thread may be changing it.
    return list(value.items() if type(value) is dict else value)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of any object, which may be a proxy that raises where it is touched."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:
        return {}
    return dict(found) if isinstance(found, dict) else {}


def _is_module(value: Any) -> bool:
    # The type itself: a proxy answers for another class.
    return issubclass(type(value), torch.nn.Module)


def settings(owner: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object that its code may read: (name, value)."""
    skipped = OWN if _is_module(owner) else ()
    for name, value in _attributes(owner).items():
        if name not in skipped and not name.startswith("__graphprobe") and not _ours(value):
            yield name, value


def _ours(value: Any) -> bool:
    return type(value).__module__.startswith("graphprobe.")


def modules_behind(owner: Any, function: Any) -> list[torch.nn.Module]:
    """The modules a forward is made of, as far as they can be found.

    They are its owner, what the owner's attributes hold, what the function's closure and globals hold, and the
    submodules of all these.
    """
    found = {id(m): m for root in _roots(owner, function) for m in root.modules()}
    return list(found.values())


def _roots(owner: Any, function: Any) -> list[torch.nn.Module]:
    return [value for value in (owner, *_modules_in(owner), *_reached(function, set())) if _is_module(value)]


def _modules_in(value: Any) -> list[Any]:
    if _is_module(value) or issubclass(type(value), (type, types.ModuleType)):
        return []
    return [v for v in _attributes(value).values() if _is_module(v)]


def _reached(function: Any, seen: set[int], depth: int = 0) -> Iterator[Any]:
    if depth > REACH or id(function) in seen:
        return
    seen.add(id(function))
    for value in _named(function):
        yield value
        yield from _modules_in(value)
        if type(value) in CALLABLES:
            yield from _reached(value, seen, depth + 1)


def _named(function: Any) -> Iterable[Any]:
    """The values that a function's code can name."""
    if type(function) is types.MethodType:
        return (function.__self__, function.__func__)
    if type(function) is functools.partial:
        return (function.func, *function.args, *function.keywords.values())
    if type(function) is not types.FunctionType:
        return ()
    cells = [_content(cell) for cell in function.__closure__ or ()]
    names = function.__code__.co_names
    return [*cells, *(function.__globals__[name] for name in names if name in function.__globals__)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def compiled(modules: list[torch.nn.Module], function: Any) -> bool:
    """Whether a forward of these modules runs code that torch.compile wrote, which goes past the dispatcher."""
    if any(m._compiled_call_impl is not None or hasattr(m, "_torchdynamo_orig_callable") for m in modules):
        return True
    return any(
        type(v) is types.FunctionType and hasattr(v, "_torchdynamo_orig_callable") for v in _reached(function, set())
    )


def hooked(owner: Any, function: Any) -> list[str]:
    """The modules whose forward hooks a replay bypasses; the owner's own run outside the forward."""
    named = {id(m): (n, m) for root in _roots(owner, function) for n, m in root.named_modules()}
    hooks = [(n, type(m).__name__) for n, m in named.values() if m is not owner and any(_hooks(m))]
    names = [f"{name or kind} ({kind})" for name, kind in hooks]
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        names.append("all modules (global hooks)")
    return names


def _hooks(module: torch.nn.Module) -> tuple[list[int], list[int]]:
    return list(module._forward_pre_hooks), list(module._forward_hooks)


class Before:
    """The attributes behind a forward as they are before a run of it."""

    def __init__(self, owner: Any, function: Any) -> None:
        """Holds what the attributes hold: keep it for one run only."""
        self._objects = ([] if _is_module(owner) else [owner]) + modules_behind(owner, function)
        self._values = [self._look(thing) for thing in self._objects]
        self._raw = [{name: (value, _copied(value)) for name, value in settings(thing)} for thing in self._objects]

    def _look(self, thing: Any) -> dict[str, Any]:
        # An engine's queues and tables may be another thread's: of them, only that they are replaced says anything.
        depth = DEPTH if _is_module(thing) else 0
        return {name: frozen(value, depth) for name, value in settings(thing)}

    def changed(self) -> str:
        """The first attribute that the run has set to something else, as text; empty where there is none."""
        for thing, before in zip(self._objects, self._values, strict=True):
            now = self._look(thing)
            for name in dict.fromkeys((*before, *now)):
                if name not in now or name not in before or before[name] != now[name]:
                    return f"{type(thing).__name__}.{name}"
        return ""

    def restore(self) -> None:
        """Put the attributes back, where the run must not have happened."""
        for thing, before in zip(self._objects, self._raw, strict=True):
            for name in [name for name, _ in settings(thing) if name not in before]:
                del thing.__dict__[name]
            for name, (value, content) in before.items():
                thing.__dict__[name] = value
                if content is not None:
                    _refill(value, content)


def _copied(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, set, dict) else None


def _refill(value: Any, content: Any) -> None:
    if type(value) is list:
        value[:] = content
    else:
        value.clear()
        value.update(content)


def _settled(value: Any) -> bool:
    """Whether a plain value stays what it is as long as it is the same object."""
    return constant(value) or (type(value) is tuple and all(map(_settled, value)))


class _Known:
    """One module as a graph has baked it in: its class, plain attributes, functions, submodules and hooks."""

    __slots__ = ("_filled", "_held", "_kind", "_now", "_own", "_seen", "ref")

    def __init__(self, module: torch.nn.Module, own: bool) -> None:
        self.ref = weakref.ref(module)
        self._kind = type(module)
        self._own = own
        self._seen = self._look(module)
        self._now = _shown(module)
        # Kept, so that no other value gets their addresses.
        self._held = [value for name, value in settings(module) if name in self._now]
        self._filled = [(name, value) for name, value in settings(module) if plain(value) and not _settled(value)]

    def _look(self, module: torch.nn.Module) -> tuple[Any, ...]:
        """All that may matter, by identity: one look costs less than telling what does matter."""
        here = module.__dict__
        hooks = () if self._own else (*here["_forward_hooks"], *here["_forward_pre_hooks"])
        held = [*here["_modules"].values(), *here["_parameters"].values(), *here["_buffers"].values()]
        return type(module), hooks, [*map(id, held)], [*map(id, here.values())]

    def changed(self) -> str:
        """What is not as it was, as text; empty where nothing is."""
        module = self.ref()
        if module is None:
            return f"a {self._kind.__name__}"
        look = self._look(module)
        if look == self._seen and not self._filled:
            return ""
        return self._difference(module, look)

    def _difference(self, module: torch.nn.Module, look: tuple[Any, ...]) -> str:
        kind, hooks, parts, _ = self._seen
        if look[0] is not kind or look[2] != parts:
            return f"a module or a tensor of {self._kind.__name__}"
        if look[1] != hooks:
            return f"the hooks of {self._kind.__name__}"
        if any(frozen(value) != self._now[name] for name, value in self._filled):
            return f"an attribute of {self._kind.__name__}"
        if look == self._seen:
            return ""
        now = _shown(module)
        name = next((n for n in (*self._now, *now) if n not in now or self._now.get(n) != now[n]), "")
        if name:
            return f"{self._kind.__name__}.{name}"
        # Something was set that a graph does not bake in: compare with that from now on.
        self._seen = look
        return ""


def _shown(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a module that code may have read as they are now: numbers, texts, functions."""
    return {n: frozen(v) for n, v in settings(module) if plain(v) or type(v) in CALLABLES}


class Settings:
    """The modules of a forward as a graph has baked them in; holds none of them."""

    def __init__(self, modules: list[torch.nn.Module], owner: Any = None) -> None:
        self._known = [_Known(module, module is owner) for module in modules]
        self._looked, self._took = time.monotonic(), 0.0

    def changed(self) -> str:
        """What is not as it was, as text; empty where nothing is, or it was looked at just now."""
        began = time.monotonic()
        if began < self._looked + PAUSE * max(1.0, self._took / QUICK):
            return ""
        found = next((found for known in self._known if (found := known.changed())), "")
        self._looked = time.monotonic()
        self._took = self._looked - began
        return found
