"""What makes two calls the same graph: the structure of the arguments, compiled once to a flat look-up.

A call is described as a tree of :class:`Node` (containers, constants, tensors). The tree yields a hashable key,
and for one spelling of the call (number of positional arguments, keyword names) a generated function that
checks the structure and returns the tensors, without walking anything.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import keyword
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Exact types that can be staged; a subclass (DTensor, FakeTensor, quantised) may hide what it does."""

CONSTANT_TYPES = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range, type(Ellipsis),
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip

DEPTH = 16
"""Nesting beyond this is opaque."""

NODES = 10_000
"""Values of one argument beyond which the rest is opaque: a batch that refers to its requests, and they to it."""

Place: TypeAlias = "int | str | None"
"""Where a call has a value: its position, its keyword, or None for a parameter left at its default."""

Picker = Callable[[tuple[Any, ...], dict[str, Any]], "tuple[torch.Tensor, ...] | None"]


@dataclasses.dataclass(slots=True)
class Node:
    """One value of a call.

    ``kind`` is tensor, static (a tensor passed by reference), held (any other object passed by reference), const,
    items (list, tuple), map, fields or opaque. ``value`` is the constant, or what identifies a held or opaque one.
    """

    kind: str
    path: str
    type: type
    value: Any = None
    names: tuple[Any, ...] = ()
    children: tuple[Node, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable; equal for two values that give the same graph, tensors apart."""
        inner = tuple(child.key for child in self.children)
        value = canonical(self.value) if self.kind == "const" else self.value
        return (self.kind, self.type, value, told_apart(self.names) if self.kind == "map" else self.names, inner)

    def leaves(self, *kinds: str) -> Iterator[Node]:
        """The leaves of these kinds, in order."""
        if self.kind in kinds:
            yield self
        for child in self.children:
            yield from child.leaves(*kinds)

    @property
    def branches(self) -> Iterator[tuple[Any, Node]]:
        """The children with the name of each."""
        return zip(self.names, self.children, strict=True)

    def pick(self, value: Any, *kinds: str) -> Iterator[Any]:
        """The values in ``value``, described by this node, that stand at its leaves of these kinds (or tensor)."""
        if self.kind in (kinds or ("tensor",)):
            yield value
        for name, child in self.branches:
            yield from child.pick(self.child(value, name), *kinds)

    def child(self, value: Any, name: Any) -> Any:
        """The part of ``value`` under ``name``."""
        return getattr(value, name) if self.kind == "fields" else value[name]

    def build(self, value: Any, tensors: Iterator[Any]) -> Any:
        """A copy of ``value`` and its containers with the tensor leaves replaced by ``tensors``, in order."""
        if self.kind == "tensor":
            return next(tensors)
        if self.kind not in ("items", "map", "fields"):
            return value
        parts = [child.build(self.child(value, name), tensors) for name, child in self.branches]
        return self.assemble(value, parts)

    def assemble(self, value: Any, parts: list[Any]) -> Any:
        """A container like ``value`` with ``parts`` as its children."""
        if self.kind == "items":
            return self.type(*parts) if hasattr(self.type, "_fields") else self.type(parts)
        if self.type in (dict,):
            return dict(zip(self.names, parts, strict=True))
        if self.kind == "map" and dataclasses.is_dataclass(self.type):
            # transformers' ModelOutput: a dict and a dataclass at once, kept in step by its constructor.
            return self.type(**dict(zip(self.names, parts, strict=True)))
        twin = copy.copy(value)
        put = operator.setitem if self.kind == "map" else object.__setattr__
        for name, part in zip(self.names, parts, strict=True):
            put(twin, name, part)
        return twin


def describe(value: Any, path: str, static: frozenset[str] = frozenset(), root: bool = False) -> Node:
    """The tree of ``value``. ``static`` names paths that are passed by reference; ``root`` opens any object."""
    return _describe(value, path, static, root, (), [NODES])


def constant(value: Any) -> bool:
    """Whether a value is a number, a text and the like, with nothing hung on it."""
    if not isinstance(value, CONSTANT_TYPES):
        return False
    return isinstance(value, enum.Enum) or not getattr(value, "__dict__", None)


def _describe(
    value: Any, path: str, static: frozenset[str], root: bool, above: tuple[int, ...], left: list[int]
) -> Node:
    kind = type(value)
    left[0] -= 1
    if path in static and not constant(value):
        return Node("static", path, kind) if kind in TENSOR_TYPES else Node("held", path, kind, identity(value))
    if kind in TENSOR_TYPES:
        return Node("tensor" if _plain(value) else "opaque", path, kind)
    if constant(value):
        return Node("const", path, kind, value)
    if len(above) < DEPTH and left[0] > 0 and id(value) not in above:
        names = _children(value, kind, root)
        if names is not None:
            return _container(value, path, static, (*above, id(value)), left, *names)
    return Node("opaque", path, kind, id(value))


def _container(
    value: Any,
    path: str,
    static: frozenset[str],
    above: tuple[int, ...],
    left: list[int],
    form: str,
    names: tuple[Any, ...],
) -> Node:
    node = Node(form, path, type(value), names=names)
    template = "{}.{}" if form == "fields" else "{}[{}]"
    node.children = tuple(
        _describe(node.child(value, name), template.format(path, name), static, False, above, left) for name in names
    )
    return node


def _children(value: Any, kind: type, root: bool) -> tuple[str, tuple[Any, ...]] | None:
    if kind in (list, tuple) or (isinstance(value, tuple) and _named(kind) and not getattr(value, "__dict__", None)):
        return "items", tuple(range(len(value)))
    if isinstance(value, dict):
        # Attributes beside the items would be baked in unseen; ModelOutput's only mirror its items.
        mirrored = {f.name for f in dataclasses.fields(kind)} | set(value) if dataclasses.is_dataclass(kind) else set()
        hidden = set(_attributes(value, kind)) - mirrored if kind is not dict else set()
        return None if hidden else ("map", tuple(value))
    if dataclasses.is_dataclass(kind) or root:
        return "fields", _attributes(value, kind)
    return None


def _named(kind: type) -> bool:
    """A namedtuple, or one of torch.return_types."""
    return hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")


def _attributes(value: Any, kind: type) -> tuple[str, ...]:
    slots = [n for base in kind.__mro__ for n in _slots(base) if hasattr(value, n)]
    return tuple(dict.fromkeys((*getattr(value, "__dict__", {}), *slots)))


def _slots(base: type) -> tuple[str, ...]:
    slots = base.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    mangled = [f"_{base.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names]
    return tuple(n for n in mangled if n not in ("__dict__", "__weakref__"))


def parts(value: Any, depth: int = DEPTH) -> Iterator[Any]:
    """The objects that a value passed by reference consists of: itself, or what its lists and dicts hold."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)) and depth:
        for item in value:
            yield from parts(item, depth - 1)
    else:
        yield value


def identity(value: Any, depth: int = DEPTH) -> Any:
    """Equal while ``value`` consists of the very same objects; a fresh list of them is equal to the old one."""
    if constant(value):
        return (type(value), canonical(value))
    if isinstance(value, dict) and depth:
        return (type(value), told_apart(value), tuple(identity(v, depth - 1) for v in value.values()))
    if isinstance(value, (list, tuple)) and depth:
        return (type(value), tuple(identity(v, depth - 1) for v in value))
    return id(value)


def fingerprint(value: Any, depth: int = 5) -> Any:
    """What an object consists of, some levels deep: equal as long as nobody changes it on the host."""
    if constant(value):
        return canonical(value)
    if isinstance(value, torch.Tensor) or depth == 0:
        return id(value)
    if isinstance(value, dict):
        return tuple((repr(k), fingerprint(v, depth - 1)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(fingerprint(v, depth - 1) for v in value)
    return (id(value), fingerprint(getattr(value, "__dict__", {}), depth - 1))


def _plain(tensor: torch.Tensor) -> bool:
    # Attributes of one's own would be missing in the static input; torch's tools mark tensors, too.
    hung = tensor.__dict__ if type(tensor) is torch.Tensor and not torch.compiler.is_compiling() else {}
    own = [name for name in hung if not name.startswith("_")]
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested and not own


def told_apart(keys: Iterable[Any]) -> tuple[Any, ...]:
    """The keys of a dict, those apart that Python takes for equal: 1, 1.0 and True."""
    return tuple(key if isinstance(key, str) else (type(key), canonical(key)) for key in keys)


def canonical(value: Any) -> Any:
    """A constant as something that is equal where a kernel would see the same."""
    # 1, 1.0 and True are equal in Python and different to a kernel; NaN differs from itself and is one constant.
    if isinstance(value, float):
        return "nan" if value != value else value.hex()
    if isinstance(value, slice):
        return ("slice", *((type(part), canonical(part)) for part in (value.start, value.stop, value.step)))
    return repr(value) if isinstance(value, (complex, torch.memory_format)) else value


class Caller:
    """The parameters of a forward: binds a call to them, whatever its spelling."""

    def __init__(self, function: Callable[..., Any], owned: bool) -> None:
        self.signature = _signature(function, owned, follow=True)
        # A wrapper may take more than the function it shows: transformers' do.
        self._own = _signature(function, owned, follow=False)

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """The parameters, without the owner."""
        return list(self.signature.parameters.values())

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any, Place]]:
        """(name, value, place) in parameter order. Raises TypeError as the forward itself would."""
        try:
            return _bound(self.signature, args, kwargs)
        except TypeError:
            return _bound(self._own, args, kwargs)


def _signature(function: Callable[..., Any], owned: bool, follow: bool) -> inspect.Signature:
    returned: Any = inspect.Signature.empty
    try:
        found = inspect.signature(function, follow_wrapped=follow)
        parameters, returned = list(found.parameters.values()), found.return_annotation
    except (TypeError, ValueError):
        parameters = [
            inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
            inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
        ]
    if owned and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]
    return inspect.Signature(parameters, return_annotation=returned)


def _bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any, Place]]:
    bound = signature.bind(*args, **kwargs).arguments
    position = 0
    roots: list[tuple[str, Any, Place]] = []
    for p in signature.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            rest = bound.get(p.name, ())
            roots += [(f"{p.name}[{i}]", v, position + i) for i, v in enumerate(rest)]
        elif p.kind is p.VAR_KEYWORD:
            extra = bound.get(p.name, {})
            roots += [(n if n not in signature.parameters else f"{p.name}[{n}]", v, n) for n, v in extra.items()]
        elif p.name not in bound:
            roots.append((p.name, p.default, None))
        elif p.kind is p.POSITIONAL_ONLY or (position < len(args) and p.kind is not p.KEYWORD_ONLY):
            roots.append((p.name, bound[p.name], position))
            position += 1
        else:
            roots.append((p.name, bound[p.name], p.name))
    return roots


def compile_picker(
    roots: list[tuple[Node, Any, Place]], context: tuple[Node, Callable[[], Any]] | None = None
) -> Picker | None:
    """A function ``(args, kwargs) -> tensors`` that returns None where the structure is not this one.

    None instead of a function where the positional arguments are the tensors, and nothing else is to be checked.

    The tensors are those of the nodes of kind tensor and static, in order. Roots (node, value, place) without a place
    are defaults: only what they contain can differ. ``context`` is the node of the object that its function returns,
    which is read afresh at each call.
    """
    code = _Picker()
    for node, value, place in roots:
        if place is not None:
            code.visit(node, f"args[{place}]" if isinstance(place, int) else f"kwargs[{place!r}]")
        elif node.kind not in ("const", "opaque"):
            code.visit(node, code.bind(value))
    if context is not None:
        # Before the try: what it raises is the caller's.
        code.asked.append(f"ctx = {code.bind(context[1])}()")
        code.visit(context[0], "ctx")
    return None if code.trivial else code.compile()


class _Picker:
    """Writes the source of one picker."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.results: list[str] = []

    def bind(self, value: Any) -> str:
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def require(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return None")

    def visit(self, node: Node, expression: str) -> None:
        if node.kind in ("tensor", "static"):
            self.results.append(expression)
            return
        variable = f"v{len(self.lines)}"
        self.lines.append(f"{variable} = {expression}")
        if node.kind == "held":
            self.require(f"{self.bind(identity)}({variable}) == {self.bind(node.value)}")
            return
        if node.kind == "const":
            self._constant(variable, node.value)
            return
        self.require(f"{variable}.__class__ is {self.bind(node.type)}")
        if node.kind == "items":
            self.require(f"len({variable}) == {len(node.names)}")
        elif node.kind == "map":
            opened = f"{self.bind(_children)}({variable}, {variable}.__class__, False)"
            names = f"tuple({variable})" if node.type is dict else opened
            self.require(f"{names} == {self.bind(node.names if node.type is dict else ('map', node.names))}")
            if not all(isinstance(name, str) for name in node.names):
                self.require(f"{self.bind(told_apart)}({variable}) == {self.bind(told_apart(node.names))}")
        elif node.kind == "fields":
            self.require(f"{self.bind(_attributes)}({variable}, {variable}.__class__) == {self.bind(node.names)}")
        for name, child in node.branches:
            key = name if isinstance(name, int) else self.bind(name)
            if node.kind != "fields":
                self.visit(child, f"{variable}[{key}]")
            elif name.isidentifier() and not keyword.iskeyword(name):
                self.visit(child, f"{variable}.{name}")
            else:
                self.visit(child, f"getattr({variable}, {key})")

    def _constant(self, variable: str, value: Any) -> None:
        if value is None or isinstance(value, (bool, enum.Enum, torch.dtype)):
            self.require(f"{variable} is {self.bind(value)}")
        elif isinstance(value, float):
            test = f"{variable} != {variable}" if value != value else f"{variable}.hex() == {value.hex()!r}"
            self.require(f"{variable}.__class__ is {self.bind(type(value))} and {test}")
        elif isinstance(value, (complex, slice)):
            same = f"{self.bind(canonical)}({variable}) == {self.bind(canonical(value))}"
            self.require(f"{variable}.__class__ is {self.bind(type(value))} and {same}")
        else:
            self.require(f"{variable}.__class__ is {self.bind(type(value))} and {variable} == {self.bind(value)}")

    @property
    def trivial(self) -> bool:
        return not (self.lines or self.asked) and self.results == [f"args[{i}]" for i in range(len(self.results))]

    def compile(self) -> Picker:
        last = f"return ({''.join(f'{r}, ' for r in self.results)})"
        asked = "".join(f" {line}\n" for line in self.asked)
        source = f"def pick(args, kwargs):\n{asked} try:\n" + "".join(f"  {line}\n" for line in [*self.lines, last])
        source += " except (KeyError, IndexError, AttributeError, TypeError): return None\n"
        namespace: dict[str, Any] = dict(self.names)
        exec(compile(source, "<graphprobe picker>", "exec"), namespace)  # noqa: S102 - the source is made above
        picker: Picker = namespace["pick"]
        return picker


def order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from outermost to innermost in memory, None where contiguous or not dense.

    A dense layout (channels last, a transpose) is kept in the static input, since kernels and output strides
    follow it; for a view with holes see :func:`holes`.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    dims = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))
    return dims if tensor.permute(dims).is_contiguous() else None


SPREAD = 4
"""Times its own size that a view with holes may span to be staged with its holes."""


def holes(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """The strides of a view with holes (``x[:, ::2]``) that a static input can have too, None for any other layout.

    ``shape`` is that of the static input. None also where elements would share memory (an expanded tensor) or the
    holes are much larger than the view (one row of a large cache): those are staged densely.
    """
    if tensor.is_contiguous() or order(tensor) is not None:
        return None
    strides, sizes = tensor.stride(), tensor.shape if shape is None else shape
    span = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride < span:
            return None
        span += (size - 1) * stride
    return strides if span <= SPREAD * max(1, math.prod(sizes)) else None


def meta(tensor: torch.Tensor, free: frozenset[int] = frozenset()) -> tuple[Any, ...]:
    """What a graph is bound to in one tensor: type, dtype, device, layout and shape; ``free`` dims are left open."""
    shape = tuple(-1 if d in free else n for d, n in enumerate(tensor.shape))
    layout = order(tensor) or holes(tensor)
    return (type(tensor), tensor.dtype, tensor.device, tensor.requires_grad, shape, layout)


Guard = Callable[..., bool]


def compile_guard(tensors: tuple[torch.Tensor, ...], free: dict[int, int]) -> Guard:
    """A check that other tensors have exactly the types, dtypes, devices, shapes and strides of ``tensors``.

    ``free`` maps a tensor's index to a dimension that may differ. The check also compares what the dispatcher
    would do in this thread (inference mode, autocast on or off, an active dispatch mode), not the grad mode.
    """
    if len({id(t) for t in tensors}) < len(tensors):
        # torch's check refuses a tensor that is passed twice.
        return _slow_guard(tensors, free)
    sizes: list[Any] = [[None if free.get(i) == d else n for d, n in enumerate(t.shape)] for i, t in enumerate(tensors)]
    strides: list[Any] = [[None if i in free else n for n in t.stride()] for i, t in enumerate(tensors)]
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return _slow_guard(tensors, free)
    check: Guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def _slow_guard(tensors: tuple[torch.Tensor, ...], free: dict[int, int]) -> Guard:
    facts = [(type(t), t.dtype, t.device, t.requires_grad) for t in tensors]
    sizes: list[Any] = [[None if free.get(i) == d else n for d, n in enumerate(t.shape)] for i, t in enumerate(tensors)]
    strides: list[Any] = [[None if i in free else n for n in t.stride()] for i, t in enumerate(tensors)]
    modes = (dispatch_modes(), traced())

    def same(want: list[Any], have: tuple[int, ...]) -> bool:
        return len(want) == len(have) and all(w is None or w == h for w, h in zip(want, have, strict=True))

    def check(*given: torch.Tensor) -> bool:
        return (dispatch_modes(), traced()) == modes and all(
            type(t) is f[0]
            and (t.dtype, t.device, t.requires_grad) == f[1:]
            and same(size, t.shape)
            and same(stride, t.stride())
            for t, f, size, stride in zip(given, facts, sizes, strides, strict=True)
        )

    return check


def dispatch_modes() -> tuple[Any, ...]:
    """The thread's state that decides which kernels an operator runs: part of every signature."""
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu", "xpu") if torch.is_autocast_enabled(kind)
    )
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


def traced() -> bool:
    """Whether an outer tool watches this thread's operators: a replay would hide them from it."""
    transformed = torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
    watched = torch._C._len_torch_dispatch_stack() > 0 or _reinterpreted()
    return transformed or watched or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes of torch functions are active in this thread."""


def _reinterpreted() -> bool:
    """Whether a mode may give torch's functions another meaning; one that sets the default device does not."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
