"""Outputs: from a graph's own memory to what the caller gets.

The next replay overwrites a graph's outputs, so callers get clones, cut to their rows, unless they ask for the
memory itself. Which outputs follow the batch is learnt from two sizes, never guessed from one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphprobe.errors import CaptureError
from graphprobe.signature import Node, describe
from graphprobe.watch import alias

Make = Callable[[], Any]


def described(result: Any) -> tuple[Node, list[torch.Tensor]]:
    """The tree of a forward's result and its tensors."""
    node = describe(result, "output")
    return node, list(node.pick(result))


class Shapes:
    """How the outputs of a signature follow the batch, from the results seen at two sizes."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[tuple[Any, ...], list[torch.Size]]] = {}
        self._unclear = False
        self._lock = threading.Lock()

    @property
    def known(self) -> bool:
        """Whether two sizes were seen."""
        return len(self._seen) > 1

    def observe(self, rows: int, node: Node, tensors: list[torch.Tensor], width: int = 1) -> bool:
        """Note the shapes of a result of ``rows`` rows. True where they contradict what two sizes had shown."""
        if not rows or self._unclear:
            return False
        # Two threads may see a second size at once; a third size would have to be held against the first two.
        with self._lock:
            if not self.known:
                self._seen.setdefault(rows, (node.key, [t.shape for t in tensors]))
                return False
        expected = self._seen.get(rows) or self._expected(rows, width)
        self._unclear = expected is not None and expected != (node.key, [t.shape for t in tensors])
        return self._unclear

    def _expected(self, rows: int, width: int) -> tuple[tuple[Any, ...], list[torch.Size]] | None:
        """What a result of ``rows`` rows is like by what two sizes have shown, None where that is not clear."""
        dims = self.dims(width)
        if dims is None:
            return None
        n, (key, shapes) = next(iter(self._seen.items()))
        return key, [
            shape if dim is None else torch.Size([k * rows // n if d == dim else k for d, k in enumerate(shape)])
            for shape, dim in zip(shapes, dims, strict=True)
        ]

    def agree(self, rows: int, node: Node, tensors: list[torch.Tensor], width: int) -> bool | None:
        """Whether a result has the shapes that its rows let expect; None where too little was seen to say."""
        shapes = [t.shape for t in tensors]
        if rows in self._seen:
            return self._seen[rows] == (node.key, shapes)
        dims = self.dims(width) if self.known else None
        if dims is None:
            return False if self.known else None
        key, seen = next(iter(self._seen.values()))
        others = [[n for d, n in enumerate(shape) if d != dim] for shape, dim in zip(seen, dims, strict=True)]
        mine = [[n for d, n in enumerate(shape) if d != dim] for shape, dim in zip(shapes, dims, strict=False)]
        return key == node.key and mine == others

    def dims(self, width: int = 1) -> list[int | None] | None:
        """The batch dimension of each output, None for one that does not follow; None in all if that is not clear.

        An output follows where it has a row per row, or a row per request of ``width`` rows.
        """
        (n, (key, shapes)), (m, (other_key, others)) = self._seen.items()
        if self._unclear:
            return None
        if key != other_key or len(shapes) != len(others):
            return None
        found = [_following(a, b, n, m, width) for a, b in zip(shapes, others, strict=True)]
        return None if any(d == UNCLEAR for d in found) else [None if d == FIXED else d for d in found]


FIXED, UNCLEAR = -1, -2


def _following(a: torch.Size, b: torch.Size, n: int, m: int, width: int) -> int:
    if len(a) != len(b):
        return UNCLEAR
    changed = [d for d in range(len(a)) if a[d] != b[d]]
    if not changed:
        return FIXED
    only = changed[0]
    follows = any((a[only] * k, b[only] * k) == (n, m) for k in {1, width})
    return only if len(changed) == 1 and follows else UNCLEAR


class Outputs:
    """The result of one capture of ``rows`` rows.

    ``lives`` says of each tensor whether it lies outside the graph; ``passed`` are the ids of the objects that the
    caller passed by reference (a cache, say), which a result may hand back; ``inside`` says of each tensor whether it
    lies in a static input, which the next call overwrites before it reads it. ``loose`` lets go of a result of the
    graph's own without losing its address, where each is cloned behind its replay.
    """

    def __init__(
        self,
        result: Any,
        rows: int,
        lives: Callable[[torch.Tensor], bool],
        passed: frozenset[int] = frozenset(),
        inside: Sequence[bool] = (),
        loose: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.rows = rows
        self.node, self.tensors = described(result)
        for leaf in self.node.leaves("opaque"):
            if leaf.value not in passed:
                what = f"{leaf.path} is a {leaf.type.__name__}"
                raise CaptureError(f"{what}: return tensors, numbers, tuples, lists, dicts or dataclasses of them")
        self.outside = [lives(tensor) for tensor in self.tensors]
        self.inside = list(inside) or [False] * len(self.tensors)
        # What the caller passed by reference is handed back as the very object.
        self.passed = [weakref.ref(t) if id(t) in passed else None for t in self.tensors]
        # An alias of outside memory: the caller's own tensor must stay free to go, which is how we notice.
        # Whether a result takes part in autograd, which a replay could not record.
        self.in_autograd = any(tensor.requires_grad for tensor in self.tensors)
        self.tensors = [alias(t) if out else t for t, out in zip(self.tensors, self.outside, strict=True)]
        if loose is not None:
            kept = [out or within for out, within in zip(self.outside, self.inside, strict=True)]
            self.tensors = [t if keep else loose(t) for t, keep in zip(self.tensors, kept, strict=True)]
        self.result = _loosened(self.node, result, iter(self.tensors))

    @property
    def only(self) -> torch.Tensor | None:
        """The result where it is a single tensor of the graph's own."""
        own = self.node.kind == "tensor" and not self.outside[0] and not self.inside[0]
        return self.tensors[0] if own else None

    def unlike(self, dims: list[int | None], width: int) -> str:
        """What speaks against cutting the outputs along ``dims``: the output's path, or nothing."""
        for leaf, tensor, dim in zip(self.node.leaves("tensor"), self.tensors, dims, strict=True):
            if dim is not None and tensor.shape[dim] not in (self.rows, self.rows // width):
                return leaf.path
        return ""

    def fixed(self, dims: list[int | None]) -> str:
        """The path of an output that is made inside and does not follow the batch: pad rows may be in its value."""
        leaves = zip(self.node.leaves("tensor"), self.outside, dims, strict=True)
        return next((leaf.path for leaf, outside, dim in leaves if not outside and dim is None), "")

    def maker(self, rows: int, dims: list[int | None] | None, aliased: bool) -> Make:
        """A function that hands out the result of the replay that was just enqueued, cut to ``rows``."""
        makers: list[Make] = []
        for i, tensor in enumerate(self.tensors):
            view = tensor if rows == self.rows or dims is None else self._cut(tensor, dims[i], rows)
            passed = self.passed[i]
            if passed is not None:
                makers.append(passed)
                continue
            # Memory of the caller's is handed out as a tensor of its own each time: its shape may be changed in place.
            kept = aliased and not self.inside[i]
            makers.append(view.detach if self.outside[i] else _same(view) if kept else view.clone)
        return _assembler(self.node, self.result, makers)

    def _cut(self, tensor: torch.Tensor, dim: int | None, rows: int) -> torch.Tensor:
        if dim is None:
            return tensor
        return tensor.narrow(dim, 0, rows * tensor.shape[dim] // self.rows)


def _loosened(node: Node, value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """``value`` with the objects that belong to the caller held weakly: a graph must not keep a cache alive."""
    if node.kind == "tensor":
        return next(tensors)
    if node.kind == "opaque":
        try:
            return weakref.ref(value)
        except TypeError:
            return _same(value)
    if not node.children:
        return value
    return node.assemble(value, [_loosened(c, node.child(value, n), tensors) for n, c in node.branches])


def _same(value: Any) -> Make:
    return lambda: value


def _assembler(node: Node, result: Any, makers: list[Make]) -> Make:
    """``makers`` put together in the shape of ``result``, as one generated expression."""
    if node.kind == "tensor":
        return makers[0]
    names: dict[str, Any] = {}
    remaining = iter(makers)

    def bind(value: Any) -> str:
        names[f"k{len(names)}"] = value
        return f"k{len(names) - 1}"

    def expression(node: Node, value: Any) -> str:
        if node.kind == "tensor":
            return bind(next(remaining)) + "()"
        if node.kind == "opaque":
            return bind(value) + "()"
        if node.kind not in ("items", "map", "fields"):
            return bind(value)
        parts = [expression(c, node.child(value, n)) for n, c in node.branches]
        if node.type in (tuple, list):
            inner = "".join(f"{part}, " for part in parts)
            return f"({inner})" if node.type is tuple else f"[{inner}]"
        if node.type is dict:
            return "{" + ", ".join(f"{bind(n)}: {p}" for n, p in zip(node.names, parts, strict=True)) + "}"
        return f"{bind(node.assemble)}({bind(value)}, [{', '.join(parts)}])"

    source = f"lambda: {expression(node, result)}"
    make: Make = eval(compile(source, "<graphprobe outputs>", "eval"), names)  # noqa: S307 - the source is made above
    return make
