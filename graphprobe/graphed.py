"""Inlet 1: ``capture`` and what it returns. Wraps a function, a method, an nn.Module class or instance."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, overload

import torch

from graphprobe.buckets import as_size
from graphprobe.errors import ConfigError
from graphprobe.graphs import GraphSet
from graphprobe.ledger import LEDGER, Forward
from graphprobe.options import Options
from graphprobe.signature import Caller
from graphprobe.snapshot import ForwardSnapshot
from graphprobe.warmup import MakeInputs, WarmupReport, warm_up

Target = TypeVar("Target")


@overload
def capture(target: Target, /, **options: Any) -> Target: ...
@overload
def capture(target: None = None, /, **options: Any) -> Callable[[Target], Target]: ...


def capture(target: Any = None, /, **options: Any) -> Any:
    """Capture the forward ``target`` as one graph per bucket, and count how its calls were served.

    ``target`` is a function, a method, an ``nn.Module`` class or an ``nn.Module`` instance; without it a decorator
    is returned. A module stays what it is: same class, same ``state_dict``; the controls (``warmup``,
    ``snapshot``, ``reset``, ``enabled``) live on ``module.forward``.

    Keywords:

    - ``buckets``: batch sizes to capture, in any order. ``max_batch``: the largest size that will be sent; sizes
      up to it without a bucket are named at once.
    - ``name``: of the forward in every metric; default: the qualified name.
    - ``unit`` (``rows``, ``tokens``, ``requests``), ``tokens_per_request``: what a bucket counts.
    - ``phase``: ``decode``, ``prefill``, ... or a callable of the call; ``capture_phases``: those that are captured.
    - ``backend``: ``auto`` (CUDA graphs for CUDA tensors), ``recorder`` (the CPU stand-in).
    - ``batch``: where the batch size is read: an argument's name, (name, dim), or a callable of the call that
      returns it; default: dimension 0 of the first tensor. ``batch_dims``: {name: dim} where it is not 0.
    - ``static``: names passed by reference (caches, weights): read where they are, never copied.
    - ``context``: a callable that returns the object or dict in which the engine keeps per-step tensors; they are
      staged like arguments and put back after the capture.
    - ``narrow``: {name: (dim, fill)}: may be smaller than captured along dim; the rest is filled.
    - ``prepare``: host work before each capture and replay, called as ``prepare(bucket, *args, **kwargs)``.
    - ``pad``: None (exact match only), ``"repeat"``, ``"zeros"``, or {name: a number, ``"repeat"``, ``"zeros"`` or a
      callable ``(pad_rows, source) -> None``}. Cross-row work (a mean over rows) sees the pad rows: see docs/limits.md.
    - ``outputs``: ``clone`` (the default), or ``alias`` for callers that consume a result before the next call.
    - ``eager_first`` (1): eager calls per bucket and signature before its capture. ``lazy``: capture in traffic; by
      default until ``warmup`` was called. ``max_graphs`` (64): of all buckets and signatures together. ``pool``,
      ``generators``: torch's own objects.
    - ``agree``: a callable from the local size to the size that all ranks use, None where one of them cannot.
    - ``timing`` (64): one call in N per path and bucket is timed. ``verify`` (0): one graph call in N is compared with
      eager, within ``verify_tol``; ``state``: the tensors to save and restore around the second run, or ``"rewrites"``:
      what is written is written again with the same values, as a cache's rows are; small tensors (a position) are put
      back.
    - ``registry``: a prometheus_client registry that shows the metrics, too.

    Raises ConfigError for an argument outside the contract. The forward runs exactly once per call on the device;
    its host code runs again only after a capture that failed.
    """
    if target is None:
        return functools.partial(capture, **options)
    checked = _options(options)
    if isinstance(target, torch.nn.Module):
        return _capture_instance(target, checked)
    if isinstance(target, type):
        return _capture_class(target, checked)
    if isinstance(target, (GraphedCallable, GraphedMethod, BoundGraphed)):
        raise ConfigError(f"{target!r} is captured already")
    if isinstance(target, staticmethod):
        return staticmethod(capture(target.__func__, **options))
    if isinstance(target, classmethod):
        return GraphedMethod(target.__func__, checked, _label(target.__func__), of_class=True)
    if not callable(target):
        raise ConfigError(f"capture needs a function, a method or an nn.Module, got {type(target).__name__}")
    _refuse_unfinished(target)
    if inspect.ismethod(target):
        return GraphedCallable(target.__func__, checked, target.__self__, keep=True)
    return _Decorated(target, checked)


def _refuse_unfinished(function: Any) -> None:
    """A coroutine or a generator has not run when it returns."""
    if kind := unfinished(function):
        raise ConfigError(f"{_label(function)} is a {kind}", "capture the plain function that it calls")


def unfinished(function: Any) -> str:
    """What kind of function this is that has not run when it returns; empty for any other."""
    kinds = ("coroutinefunction", "generatorfunction", "asyncgenfunction")
    return next((kind[:-8] for kind in kinds if getattr(inspect, f"is{kind}")(function)), "")


def _options(given: Mapping[str, Any]) -> Options:
    if "buckets" not in given and set(given) <= set(Options.__dataclass_fields__):
        raise ConfigError("capture needs buckets", "write @graphprobe.capture(buckets=[1, 2, 4, 8])")
    try:
        return Options(**given)
    except TypeError as error:
        unknown = sorted(set(given) - set(Options.__dataclass_fields__))
        if not unknown:
            raise ConfigError(str(error)) from error
        near = difflib.get_close_matches(unknown[0], Options.__dataclass_fields__)
        hint = f"did you mean {near[0]}?" if near else f"keywords: {', '.join(Options.__dataclass_fields__)}"
        raise ConfigError(f"capture has no keyword {unknown[0]!r}", hint) from None


def _dress(wrapper: Any, function: Any) -> None:
    """What functools.update_wrapper does, but for ``__wrapped__``, which depends on the owner."""
    for name in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(function, name):
            setattr(wrapper, name, getattr(function, name))
    wrapper.__dict__.update(getattr(function, "__dict__", {}))


class GraphedCallable:
    """A forward with graphs. Call it as the forward itself: that runs it by graph where one serves the call."""

    # A slot, so that a call goes from C into the dispatch without a frame of ours in between.
    __slots__ = ("__call__", "__dict__", "__weakref__")

    __name__: str
    __qualname__: str

    def __init__(
        self,
        function: Callable[..., Any],
        options: Options,
        owner: Any = None,
        name: str | None = None,
        *,
        owned: bool = True,
        keep: bool = False,
    ) -> None:
        """``owned``: the function takes its owner first. ``keep``: hold the owner, as a bound method does."""
        _dress(self, function)
        self._function = function
        self._options = options
        self._owned = owned and owner is not None
        self._keep = keep
        self._owner = None if owner is None else _reference(owner, keep)
        self._module = isinstance(owner, torch.nn.Module)
        label = options.name or name or _label(function)
        caller = Caller(function, owned=self._owned)
        if owner is not None:
            self.__signature__ = caller.signature
        options.check_names(caller.parameters, label)
        self._entry = _entry(label, options)
        self._graphs = GraphSet(options, caller, self._entry, self._invoker(), self._module)
        self.__call__ = self._graphs.serves(self, self._owner)

    def _invoker(self) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
        function = self._function
        if self._owned:
            return lambda owner, args, kwargs: function(owner, *args, **kwargs)
        return lambda owner, args, kwargs: function(*args, **kwargs)

    @property
    def __self__(self) -> Any:
        """The object that the forward is bound to, where it is bound to one, as a bound method has it."""
        owner = self._owner() if self._owner is not None and self._owned else None
        if owner is None:
            raise AttributeError(f"{self!r} is bound to no object")
        return owner

    @property
    def __wrapped__(self) -> Any:
        """The forward itself, bound as it was."""
        owner = self._owner() if self._owner is not None and self._owned else None
        return self._function if owner is None else types.MethodType(self._function, owner)

    def warmup(self, make_inputs: MakeInputs, *, progress: bool | None = None) -> WarmupReport:
        """Capture all buckets ahead of traffic, largest first; afterwards nothing is captured unless ``lazy=True``.

        ``make_inputs(bucket)`` returns the (args, kwargs) of one call of that bucket; it is called twice per bucket.
        Call it in the same modes (inference mode, autocast) as traffic will come in. Returns one entry per bucket.
        """
        owner = None if self._owner is None else self._owner()
        return warm_up(self._graphs, owner, make_inputs, progress)

    def inputs(self, bucket: int, batch_size: int | None = None) -> dict[str, torch.Tensor]:
        """The static inputs of the graph of ``bucket``, by argument: write into them, pass them, and nothing is copied.

        Each is ``[batch_size, ...]`` along its batch dimension; the default is the whole bucket, less needs ``pad=``.
        They are the graph's memory until it is dropped, and plain tensors afterwards. ConfigError where no graph of the
        bucket is there (call ``warmup`` first), or where calls of several kinds have one.
        """
        bucket = as_size(bucket, "bucket")
        size = bucket if batch_size is None else as_size(batch_size, "batch_size")
        found = self._graphs.captures.signatures.of(bucket)
        if len(found) != 1:
            hint = "call warmup() first" if not found else "keep the tensors of one kind of call"
            raise ConfigError(f"{len(found)} graphs of bucket {bucket} have static inputs, it must be one", hint)
        if size > bucket or (size < bucket and not self._options.padded):
            raise ConfigError(f"batch_size {size} is not served by bucket {bucket}", "pass pad= for smaller ones")
        staging, rows = found[0].staging, size * self._options.rows_per_unit
        if rows not in staging.handed:
            # Routes copy as if nobody else could write there.
            self._graphs.plans.forget()
        views = staging.hand_out(rows)
        return {item.path: view for item, view in zip(staging.inputs, views, strict=True)}

    def snapshot(self) -> ForwardSnapshot:
        """A frozen copy of this forward's counts."""
        self._graphs.sampler.harvest()
        return self._entry.snapshot()

    def reset(self) -> None:
        """Drop the graphs and give their memory back. Counts stay."""
        self._graphs.captures.reset()

    @property
    def enabled(self) -> bool:
        """Whether graphs may serve calls; set it to False to run everything eagerly (reason ``disabled``)."""
        return self._graphs.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._graphs.enabled = value

    def __repr__(self) -> str:
        return f"<graphprobe.capture of {self._entry.name}, buckets {list(self._options.buckets)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Reached through the copy of a module: the copy's forward gets graphs of its own on its own weights.
        owner = None if self._owner is None else self._owner()
        if owner is None and inspect.isfunction(self._function):
            return self
        function = copy.deepcopy(self._function, memo)
        twin = None if owner is None else copy.deepcopy(owner, memo)
        options = copy.copy(self._options)
        # The tensors to save and restore are those of the copy.
        object.__setattr__(options, "state", copy.deepcopy(options.state, memo))
        return type(self)(function, options, twin, self._entry.name, owned=self._owned, keep=self._keep)

    def __reduce__(self) -> Any:
        owner = None if self._owner is None else self._owner()
        if owner is None and _found(self.__module__, getattr(self, "__qualname__", "")) is self:
            return self.__qualname__
        return _restored, (type(self), self._function, self._options, owner, self._entry.name, self._owned, self._keep)


class _Decorated(GraphedCallable):
    """A decorated function: itself where it is a function, a method where a class holds it."""

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, GraphedMethod(self._function, self._options, name))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # Reached only where the function was put on a class after the class was made.
        return (
            self if instance is None else GraphedMethod(self._function, self._options, self.__name__).__get__(instance)
        )


class GraphedMethod:
    """A decorated method on its class; each instance gets graphs of its own, kept in the instance's ``__dict__``."""

    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[..., Any], options: Options, name: str, *, of_class: bool = False) -> None:
        """``of_class``: a class method, whose graphs belong to the class."""
        functools.update_wrapper(self, function, updated=())
        _refuse_unfinished(function)
        self._function = function
        self._options = options
        self._of_class = of_class
        self._classes: weakref.WeakKeyDictionary[type, GraphedCallable] = weakref.WeakKeyDictionary()
        self._key = f"__graphprobe_{function.__module__}.{_label(function)}"
        options.check_names(Caller(function, owned=True).parameters, _label(function))
        _entry(options.name or _label(function), options)

    def __reduce__(self) -> Any:
        found = _found(self.__module__, self.__qualname__)
        if found is not self:
            raise pickle.PicklingError(f"{self.__module__}.{self.__qualname__} is not this captured method")
        return self.__qualname__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if self._of_class:
            return BoundGraphed(self, owner, self.graphed(owner))
        if instance is None:
            return self
        try:
            graphed = instance.__dict__[self._key].graphed
        except (AttributeError, KeyError):
            return BoundGraphed(self, instance, self.graphed(instance))
        if graphed._owner() is not instance:
            graphed = self.graphed(instance)
        return BoundGraphed(self, instance, graphed)

    def __call__(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        """``Class.method(instance, ...)``."""
        return self.graphed(instance)(*args, **kwargs)

    def graphed(self, instance: Any) -> GraphedCallable:
        """The graphs of one instance (or class), made at its first call."""
        if isinstance(instance, type):
            if instance not in self._classes:
                self._classes[instance] = GraphedCallable(self._function, self._options, instance)
            return self._classes[instance]
        kept = getattr(instance, "__dict__", None)
        if kept is None:
            raise _unkept(instance)
        found: _Kept | None = kept.get(self._key)
        if found is not None and found.belongs_to(instance):
            return found.graphed
        graphed = GraphedCallable(self._function, self._options, instance)
        kept[self._key] = _Kept(graphed)
        return graphed


def _unkept(instance: Any) -> ConfigError:
    text = f"instances of {type(instance).__name__} have no __dict__ or no __weakref__ to keep graphs by"
    return ConfigError(text, "leave room for both where the class has __slots__")


def _reference(owner: Any, keep: bool) -> Callable[[], Any]:
    if keep:
        return lambda: owner
    try:
        return weakref.ref(owner)
    except TypeError:
        raise _unkept(owner) from None


class _Kept:
    """Graphs in an instance's ``__dict__``: left behind by copies and pickles, which make their own."""

    __slots__ = ("graphed",)

    def __init__(self, graphed: GraphedCallable) -> None:
        self.graphed = graphed

    def belongs_to(self, instance: Any) -> bool:
        owner = self.graphed._owner
        return owner is not None and owner() is instance

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    return None


class BoundGraphed:  # noqa: D101 - it shows the method's docstring
    # ``instance.method``: keeps the instance alive as a bound method does. Made at each look-up, so it is made cheaply.
    __slots__ = ("__call__", "__func__", "__self__", "_graphed")

    def __init__(self, method: GraphedMethod, instance: Any, graphed: GraphedCallable) -> None:
        self.__func__ = method
        self.__self__ = instance
        self._graphed = graphed
        self.__call__ = graphed.__call__

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__func__.__doc__

    @property
    def __module__(self) -> str:  # type: ignore[override]
        return self.__func__.__module__

    @property
    def __wrapped__(self) -> Any:
        return self.__func__._function.__get__(self.__self__)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    @property
    def enabled(self) -> bool:
        """Whether graphs may serve calls."""
        return self._graphed.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._graphed.enabled = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graphed, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundGraphed) and (self._graphed, self.__self__) == (other._graphed, other.__self__)

    def __hash__(self) -> int:
        return hash((id(self.__self__), self.__func__))

    def __repr__(self) -> str:
        return repr(self._graphed)

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__func__.__name__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(copy.deepcopy(self.__self__, memo), self.__func__.__name__)


def _capture_class(target: type, options: Options) -> type:
    forward = target.__dict__.get("forward")
    if not issubclass(target, torch.nn.Module) or forward is None:
        text = f"{target.__qualname__} is no nn.Module class with a forward of its own"
        raise ConfigError(text, "decorate the method that is the forward")
    if isinstance(forward, (GraphedMethod, _Decorated)):
        raise ConfigError(f"{target.__qualname__}.forward is captured already")
    target.forward = GraphedMethod(forward, options, "forward")
    return target


def _capture_instance(module: torch.nn.Module, options: Options) -> torch.nn.Module:
    own = module.__dict__.get("forward")
    found = own if own is not None else inspect.getattr_static(type(module), "forward")
    if isinstance(found, (GraphedCallable, GraphedMethod)):
        raise ConfigError(f"the forward of this {type(module).__name__} is captured already")
    name = options.name or f"{type(module).__qualname__}.forward"
    # What stands in the instance's own __dict__ is called without the instance; accelerate puts a partial there.
    owned = own is None and not isinstance(found, staticmethod)
    function = found.__func__ if isinstance(found, staticmethod) else found
    module.__dict__["forward"] = GraphedCallable(function, options, module, name, owned=owned)
    return module


def _restored(
    kind: type[GraphedCallable],
    function: Callable[..., Any],
    options: Options,
    owner: Any,
    name: str,
    owned: bool,
    keep: bool,
) -> GraphedCallable:
    return kind(function, options, owner, name, owned=owned, keep=keep)


def _found(module: str, qualname: str) -> Any:
    """What a qualified name leads to, None where to nothing."""
    try:
        return functools.reduce(getattr, qualname.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _label(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _entry(label: str, options: Options) -> Forward:
    entry = LEDGER.forward(label, options.buckets, unit=options.unit)
    entry.phases = (options.phase,) if isinstance(options.phase, str) else options.capture_phases
    if options.max_batch is not None:
        missing = options.buckets.uncovered(options.max_batch, options.padded)
        phase = options.phase if isinstance(options.phase, str) else "decode"
        entry.uncovered[phase] = len(missing)
        if missing:
            entry.explain("uncovered", f"sizes without a bucket up to {options.max_batch}: {_ranges(missing)}")
    if options.registry is not None:
        from graphprobe.export.prometheus import register

        register(options.registry)
    return entry


def _ranges(sizes: Iterable[int]) -> str:
    """``[3, 5, 6, 7]`` as ``3, 5-7``."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][1] + 1:
            runs[-1][1] = size
        else:
            runs.append([size, size])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
