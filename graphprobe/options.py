"""The keywords of ``capture``, validated once, where they were written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from graphprobe.backends import NAMES
from graphprobe.buckets import Buckets, as_max_batch, as_size
from graphprobe.errors import ConfigError

UNITS = ("rows", "tokens", "requests")
PHASES = ("decode", "prefill", "mixed", "verify", "draft", "draft_extend")
FILLS = ("repeat", "zeros")


@dataclass(frozen=True)
class Options:
    """What ``capture`` was asked for; see there for the meaning of each keyword."""

    buckets: Any
    max_batch: int | None = None
    name: str | None = None
    unit: str = "rows"
    tokens_per_request: int = 1
    phase: str | Callable[..., str] = "decode"
    capture_phases: tuple[str, ...] = ("decode",)
    backend: str = "auto"
    batch: Any = None
    batch_dims: Mapping[str, int] = field(default_factory=dict)
    static: frozenset[str] = frozenset()
    context: Callable[[], Any] | None = None
    narrow: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    prepare: Callable[..., None] | None = None
    pad: Any = None
    outputs: str = "clone"
    eager_first: int = 1
    lazy: bool | None = None
    max_graphs: int = 64
    pool: Any = None
    generators: tuple[Any, ...] = ()
    agree: Callable[[int], int | None] | None = None
    timing: int = 64
    verify: int = 0
    verify_tol: float | None = None
    state: Any = None
    registry: Any = None

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("buckets", Buckets(self.buckets))
        put("static", frozenset(_names(self.static, "static")))
        put("capture_phases", tuple(_names(self.capture_phases, "capture_phases")))
        _check_kinds(self)
        put("generators", tuple(self.generators))
        for name, least in (("eager_first", 0), ("max_graphs", 1), ("timing", 0), ("verify", 0)):
            put(name, as_size(getattr(self, name), name, least))
        put("tokens_per_request", as_size(self.tokens_per_request, "tokens_per_request"))
        if self.max_batch is not None:
            put("max_batch", as_max_batch(self.max_batch))
        one_of("unit", self.unit, UNITS)
        one_of("backend", self.backend, NAMES)
        one_of("outputs", self.outputs, ("clone", "alias"))
        if not callable(self.phase):
            one_of("phase", self.phase, PHASES)
        _check_batch(self.batch)
        _check_pad(self.pad, self.static)
        _check_state(self.state)
        for name in self.capture_phases:
            one_of("capture_phases", name, PHASES)
        for name in ("context", "prepare", "agree"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ConfigError(f"{name} must be a callable, got {getattr(self, name)!r}")
        for keyword in ("batch_dims", "narrow"):
            for name in getattr(self, keyword):
                if _within(name, self.static):
                    raise ConfigError(f"{keyword} names {name!r}, which is static: a static tensor is read where it is")
        for name, dim in self.batch_dims.items():
            _dimension(dim, f"batch_dims[{name!r}]")
        for name, rule in self.narrow.items():
            if not (isinstance(rule, tuple) and len(rule) == 2):
                raise ConfigError(f"narrow[{name!r}] must be (dim, fill), got {rule!r}")
            _dimension(rule[0], f"the dimension of narrow[{name!r}]")
            if isinstance(rule[1], bool) or not isinstance(rule[1], (int, float)):
                raise ConfigError(f"the fill of narrow[{name!r}] must be a number, got {rule[1]!r}")

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: all but what belongs to this process."""
        return {**self.__dict__, "registry": None, "pool": None}

    @property
    def padded(self) -> bool:
        """Whether a larger bucket may serve a batch."""
        return self.pad is not None

    def fill(self, path: str) -> Any:
        """The pad rule of one argument, None where it is not padded."""
        return self.pad.get(path) if isinstance(self.pad, Mapping) else self.pad

    @property
    def rows_per_unit(self) -> int:
        """Rows that one unit of a bucket stands for."""
        return self.tokens_per_request if self.unit == "requests" else 1

    def check_names(self, parameters: list[inspect.Parameter], label: str) -> None:
        """Refuse a keyword that names no argument of the forward."""
        known = {p.name for p in parameters}
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if not parameters and self.context is None:
            raise ConfigError(f"{label} takes no argument, so there is nothing to choose a bucket by", "pass context=")
        for keyword, paths in self._named().items():
            for path in paths:
                root = path.replace("[", ".").split(".")[0]
                if root in known or open_ended or (root == "context" and self.context is not None):
                    continue
                names = ", ".join(p.name for p in parameters if p.name != "self") or "none"
                raise ConfigError(f"{keyword} names {path!r}, which is no argument of {label}", f"arguments: {names}")

    def _named(self) -> dict[str, list[str]]:
        batch = self.batch[0] if isinstance(self.batch, tuple) else self.batch
        return {
            "batch": [batch] if isinstance(batch, str) else [],
            "batch_dims": list(self.batch_dims),
            "static": list(self.static),
            "narrow": list(self.narrow),
            "pad": list(self.pad) if isinstance(self.pad, Mapping) else [],
        }


def _check_kinds(options: Options) -> None:
    """Refuse values of the wrong kind, by keyword."""
    for keyword in ("batch_dims", "narrow"):
        if not isinstance(getattr(options, keyword), Mapping):
            raise ConfigError(f"{keyword} must be a dict of argument -> rule, got {getattr(options, keyword)!r}")
    if not isinstance(options.generators, (list, tuple)):
        raise ConfigError(f"generators must be a list of torch.Generator, got {options.generators!r}")
    if not (options.name is None or (isinstance(options.name, str) and options.name)):
        raise ConfigError(f"name must be text, got {options.name!r}")
    if options.lazy not in (None, True, False):
        raise ConfigError(f"lazy must be True, False or None, got {options.lazy!r}")
    tol = options.verify_tol
    if tol is not None and (isinstance(tol, bool) or not isinstance(tol, (int, float)) or not tol >= 0):
        raise ConfigError(f"verify_tol must be a number of at least 0, got {tol!r}")
    if options.registry is not None and not hasattr(options.registry, "register"):
        raise ConfigError(f"registry must be a prometheus_client registry, got {options.registry!r}")


def _names(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, Iterable):
        raise ConfigError(f"{what} must be names, got {value!r}", f'write {what}=("name",)')
    names = (value,) if isinstance(value, str) else tuple(value)
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"{what} holds {name!r}, which is no name", f'write {what}=("name",)')
    return names


def one_of(what: str, value: Any, allowed: tuple[str, ...]) -> Any:
    """``value``, which must be one of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{what} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def _dimension(value: Any, what: str) -> None:
    as_size(value, what, least=0)


def _check_batch(batch: Any) -> None:
    pair = isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], str)
    if pair:
        _dimension(batch[1], "the dimension of batch")
    elif not (batch is None or isinstance(batch, str) or callable(batch)):
        raise ConfigError(f"batch must be an argument's name, (name, dim) or a callable, got {batch!r}")


def _within(path: Any, static: Iterable[str]) -> bool:
    """Whether a path is a static argument, or lies in one."""
    return any(path == name or str(path).startswith((f"{name}.", f"{name}[")) for name in static)


def _check_pad(pad: Any, static: Iterable[str]) -> None:
    if pad is None:
        return
    if isinstance(pad, Mapping):
        for name, fill in pad.items():
            if _within(name, static):
                raise ConfigError(f"pad names {name!r}, which is static: a static tensor is read where it is")
            _check_fill(fill, f"pad[{name!r}]")
        return
    if pad not in FILLS:
        raise ConfigError(f"pad must be None, 'repeat', 'zeros' or a dict of argument -> fill, got {pad!r}")


def _check_fill(fill: Any, what: str) -> None:
    number = isinstance(fill, (int, float)) and not isinstance(fill, bool)
    if not (number or fill in FILLS or callable(fill)):
        raise ConfigError(f"{what} must be a number, 'repeat', 'zeros' or a callable, got {fill!r}")


def _check_state(state: Any) -> None:
    tensors = isinstance(state, (list, tuple)) and all(hasattr(t, "clone") for t in state)
    if not (state is None or (isinstance(state, str) and state == "rewrites") or tensors):
        raise ConfigError(f"state must be 'rewrites' or a list of tensors to save and restore, got {state!r}")
