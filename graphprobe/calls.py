"""One call, described: its tree, its tensors, how many rows it has, and which of its inputs follow the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graphprobe.buckets import as_size
from graphprobe.options import PHASES, Options, one_of
from graphprobe.signature import Caller, Node, Picker, Place, compile_picker, describe, identity
from graphprobe.staging import Input

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

Asked = tuple[int, str, "int | None"]
"""What the caller's callables said of a call: rows, phase, and the size that all ranks use (None: one cannot)."""


@dataclass(slots=True)
class Call:
    """One call. ``batch`` is where the batch size stands, (tensor index, dimension), None where nowhere.

    ``rows`` is what the caller sent, ``size`` the same in the unit of the buckets, ``problem`` what speaks against a
    graph for such calls.
    """

    args: Args
    kwargs: Kwargs
    roots: list[tuple[Node, Any, Place]]
    context: tuple[Node, Any] | None
    leaves: list[Node]
    tensors: tuple[torch.Tensor, ...]
    batch: tuple[int, int] | None
    rows: int
    size: int
    asked: Asked
    inputs: tuple[Input, ...] = ()
    problem: str = ""

    def cut(self, rows: int) -> Call:
        """The same call with its first ``rows`` rows."""
        tensors = list(self.tensors)
        for item in self.inputs:
            if item.dim is not None:
                tensors[item.index] = tensors[item.index].narrow(item.dim, 0, min(rows, self.rows) // item.per)
        return dataclasses.replace(self, tensors=tuple(tensors), rows=min(rows, self.rows))

    @property
    def widths(self) -> tuple[int, ...]:
        """The sizes of the narrow inputs along their narrow dimension."""
        return tuple(self.tensors[i.index].shape[i.narrow[0]] for i in self.inputs if i.narrow is not None)

    @property
    def phase(self) -> str:
        """The phase of the call."""
        return self.asked[1]

    @property
    def agreed(self) -> int | None:
        """The size that all ranks use, None where one of them cannot."""
        return self.asked[2]

    @property
    def spelling(self) -> Any:
        """What a look-up can tell about a call without opening it."""
        return (len(self.args), *self.kwargs) if self.kwargs else len(self.args)

    @property
    def nodes(self) -> Iterator[Node]:
        """All roots, the context included."""
        yield from (node for node, _, _ in self.roots)
        if self.context is not None:
            yield self.context[0]

    @property
    def held(self) -> Iterator[Any]:
        """The values that are passed by reference and are no tensors."""
        for node, value, _ in self.roots:
            yield from node.pick(value, "held")

    @property
    def opaque(self) -> Node | None:
        """The first argument whose content a graph cannot follow."""
        return next((leaf for node in self.nodes for leaf in node.leaves("opaque")), None)


MOST_PATHS = 4096
"""Names of arguments about which something is remembered: an engine may key its tensors by request."""


class Describer:
    """Describes the calls of one forward, and learns from them which inputs follow the batch.

    A tensor follows the batch where it was declared, or where its size was the batch size at two batch sizes; one
    size could be a coincidence.
    """

    def __init__(self, options: Options, caller: Caller) -> None:
        self.options = options
        self.caller = caller
        self._followed: dict[str, set[int]] = {}
        self._fixed: set[str] = set()

    def described(self, args: Args, kwargs: Kwargs) -> Call:
        """The call. Raises TypeError as the forward itself would."""
        return self.describe(self.caller.bind(args, kwargs), args, kwargs)

    def describe(
        self, bound: list[tuple[str, Any, Place]], args: Args, kwargs: Kwargs, asked: Asked | None = None
    ) -> Call:
        """The call that was bound. ``asked`` is what the caller's callables said; they are asked here where it is None.

        Raises whatever they raise.
        """
        roots = [(self._root(name, value, place), value, place) for name, value, place in bound]
        context = None
        if self.options.context is not None:
            holder = self.options.context()
            context = (describe(holder, "context", self.options.static, root=True), holder)
        placed = [(node, value) for node, value, place in roots if place is not None] + ([context] if context else [])
        leaves = [leaf for node, _ in placed for leaf in node.leaves("tensor", "static")]
        tensors = tuple(t for node, value in placed for t in node.pick(value, "tensor", "static"))
        batch = self._place_of_batch(leaves, tensors)
        if asked is None:
            # As a number: under torch.jit.trace a size is a tensor.
            asked = self.ask(None if batch is None else int(tensors[batch[0]].shape[batch[1]]), args, kwargs)
        call = Call(args, kwargs, roots, context, leaves, tensors, batch, asked[0], self.units(asked[0]), asked)
        call.problem = self._problem(call)
        return call

    def _problem(self, call: Call) -> str:
        if call.batch is None:
            return self._no_batch()
        if call.context is not None and call.context[0].kind not in ("map", "fields"):
            return f"context() returned a {call.context[0].type.__name__}, not an object or a dict"
        for index, (leaf, tensor) in enumerate(zip(call.leaves, call.tensors, strict=True)):
            rule = self.options.narrow.get(leaf.path)
            own = call.batch[1] if call.batch and call.batch[0] == index else self.options.batch_dims.get(leaf.path, 0)
            if rule is not None and (rule[0] >= tensor.dim() or rule[0] == own):
                shape = tuple(tensor.shape)
                return f"narrow[{leaf.path!r}] names dimension {rule[0]} of {shape}, which is the batch's or none"
            fill = self.options.fill(leaf.path)
            for what, number in ((f"pad[{leaf.path!r}]", fill), (f"narrow[{leaf.path!r}]", rule[1] if rule else None)):
                if isinstance(number, (int, float)) and not _fits(number, tensor.dtype):
                    return f"{what} is {number}, which is no {tensor.dtype}"
        return ""

    def _root(self, name: str, value: Any, place: Place) -> Node:
        node = describe(value, name, self.options.static)
        if place is None and next(node.leaves("tensor", "static"), None) is not None:
            return Node("held", name, type(value), identity(value))
        return node

    @property
    def varies(self) -> bool:
        """Whether callables of the caller have a say in each call."""
        return callable(self.options.phase) or callable(self.options.batch) or self.options.agree is not None

    def ask(self, shown: int | None, args: Args, kwargs: Kwargs) -> Asked:
        """Ask the caller's callables, once per call. ``shown`` are the rows that the batch tensor has."""
        batch, phase, agree = self.options.batch, self.options.phase, self.options.agree
        rows = shown or 0
        if callable(batch) and shown is not None:
            rows = as_size(batch(*args, **kwargs), "batch", least=0)
        name = phase if isinstance(phase, str) else one_of("phase", phase(*args, **kwargs), PHASES)
        size = self.units(rows)
        if agree is None or shown is None:
            return rows, name, size
        agreed = agree(size)
        return rows, name, None if agreed is None else as_size(agreed, f"agree({size})", least=size)

    def units(self, rows: int) -> int:
        """Rows in the unit of the buckets."""
        return -(-rows // self.options.rows_per_unit)

    def ragged(self, rows: int) -> bool:
        """Whether the rows are no whole number of requests."""
        return rows % self.options.tokens_per_request != 0

    def _place_of_batch(self, leaves: list[Node], tensors: tuple[torch.Tensor, ...]) -> tuple[int, int] | None:
        wanted = self.options.batch
        name, dim = wanted if isinstance(wanted, tuple) else (wanted, None)
        for index, (leaf, tensor) in enumerate(zip(leaves, tensors, strict=True)):
            if leaf.path != name if isinstance(name, str) else leaf.kind != "tensor":
                continue
            own = self.options.batch_dims.get(leaf.path, 0) if dim is None else dim
            if tensor.dim() > own:
                return index, own
        return None

    def _no_batch(self) -> str:
        wanted = self.options.batch
        name = wanted[0] if isinstance(wanted, tuple) else wanted
        if isinstance(name, str):
            return f"batch= names `{name}`, which is no tensor with such a dimension in this call"
        return "the call has no tensor with a batch dimension"

    def inputs(self, call: Call) -> tuple[Input, ...]:
        """The staged tensors of a call, each with its batch dimension and its rules."""
        found = []
        for index, (leaf, tensor) in enumerate(zip(call.leaves, call.tensors, strict=True)):
            if leaf.kind == "tensor":
                dim, per = self._batch_dim(call, index, leaf.path, tensor)
                fill = self.options.fill(leaf.path) if dim is not None else None
                found.append(Input(leaf.path, index, dim, fill, self.options.narrow.get(leaf.path), per))
        return tuple(found)

    def _batch_dim(self, call: Call, index: int, path: str, tensor: torch.Tensor) -> tuple[int | None, int]:
        """The dimension along which an input follows the batch, and the rows that an element of it stands for."""
        assert call.batch is not None
        dim = call.batch[1] if index == call.batch[0] else self.options.batch_dims.get(path, 0)
        per = self._per(call.rows, tensor, dim)
        if per is None:
            if len(self._fixed) < MOST_PATHS:
                self._fixed.add(path)
            return None, 1
        if index != call.batch[0] and not self._declared(path):
            if path in self._fixed:
                return None, 1
            seen = self._followed.setdefault(path, set()) if len(self._followed) < MOST_PATHS else set()
            if len(seen) < 2:
                seen.add(call.rows)
        return dim, per

    def _per(self, rows: int, tensor: torch.Tensor, dim: int) -> int | None:
        """1 where an input has an element per row, the rows of a request where it has one per request, else None."""
        if tensor.dim() <= dim:
            return None
        width = self.options.tokens_per_request
        return next((per for per in (1, width) if tensor.shape[dim] * per == rows), None)

    def _declared(self, path: str) -> bool:
        pad = self.options.pad
        return path in self.options.batch_dims or (isinstance(pad, dict) and path in pad)

    def unsure(self, call: Call) -> list[str]:
        """The inputs of which one batch size alone says that they follow the batch."""
        assert call.batch is not None
        return [
            item.path
            for item in call.inputs
            if item.dim is not None and item.index != call.batch[0] and not self._declared(item.path)
            if len(self._followed.get(item.path, ())) < 2
        ]

    def picker(self, call: Call) -> Picker | None:
        """The function that picks the tensors of calls like this one, None where the arguments are the tensors."""
        context: tuple[Node, Callable[[], Any]] | None = None
        if call.context is not None and self.options.context is not None:
            context = (call.context[0], self.options.context)
        return compile_picker(call.roots, context)


def _fits(number: float, dtype: torch.dtype) -> bool:
    """Whether a tensor of ``dtype`` can hold ``number`` as it is."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype is torch.bool:
        return number in (0, 1)
    info = torch.iinfo(dtype)
    return number == number and info.min <= number <= info.max and number == int(number)
