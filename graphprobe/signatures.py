"""The table of signatures: calls that differ in nothing but their batch size share one, and its graphs."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from graphprobe.calls import Call
from graphprobe.outputs import Shapes
from graphprobe.reasons import FallbackReason
from graphprobe.routes import Captured, Life
from graphprobe.signature import dispatch_modes, meta, parts
from graphprobe.watch import follow

WAITING = 4
"""Signatures without a graph that are kept, per allowed graph: one-off shapes must not fill the table."""


@dataclass(slots=True, eq=False)
class Signature:
    """The graphs of one kind of call, and what stands in the way of others.

    ``widths`` are the captured sizes of the narrow inputs. ``served`` counts eager calls per bucket, ``failed`` has the
    outcome and the cause of the last failed capture, ``lost`` the buckets that are given up. ``writes`` names operators
    that wrote to a tensor outside, ``fills`` an argument that is written and does not follow the batch (a cache).
    ``narrows`` says whether narrower inputs gave outputs of the same shape. ``changes`` counts the eager calls in a row
    that left Python state changed, ``changed`` says what.
    """

    key: tuple[Any, ...]
    widths: tuple[int, ...]
    life: Life = field(default_factory=Life)
    refs: list[Any] = field(default_factory=list)
    graphs: dict[int, Captured] = field(default_factory=dict)
    served: dict[int, int] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    failed: dict[int, tuple[str, str]] = field(default_factory=dict)
    moves: dict[int, int] = field(default_factory=dict)
    lost: dict[int, FallbackReason] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=Shapes)
    writes: str = ""
    fills: str = ""
    narrows: bool | None = None
    changes: int = 0
    changed: str = ""
    in_autograd: bool = False

    @property
    def waiting(self) -> bool:
        """Whether calls were served on the way to a first capture that nothing stands in the way of."""
        return bool(self.served) and not (self.graphs or self.lost or self.in_autograd)


class Signatures:
    """All signatures of one wrapper; ``max_graphs`` bounds their graphs."""

    def __init__(self, max_graphs: int) -> None:
        self.max_graphs = max_graphs
        self.evicted = 0
        self._strangers: collections.deque[int] = collections.deque(maxlen=WAITING * max_graphs)
        self._families: dict[Any, list[Signature]] = {}

    def __iter__(self) -> Iterator[Signature]:
        return (signature for family in list(self._families.values()) for signature in list(family))

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return sum(len(signature.graphs) for signature in self)

    @property
    def full(self) -> bool:
        """Whether no further graph may be made."""
        return self.graphs >= self.max_graphs

    @property
    def buckets(self) -> frozenset[int]:
        """The buckets of which some signature has a graph."""
        return frozenset(bucket for signature in self for bucket in signature.graphs)

    def of(self, bucket: int) -> list[Captured]:
        """The live graphs of a bucket, one for each signature that has one."""
        found = [signature.graphs.get(bucket) for signature in self]
        return [captured for captured in found if captured is not None and captured.life.live]

    def find(self, call: Call, bury: Callable[[Signature], None]) -> Signature | None:
        """The signature of a call; those whose objects are gone are handed to ``bury`` and forgotten."""
        key, widths = _key(call)
        family = self._families.get(key, [])
        for dead in [s for s in family if not s.life.live]:
            bury(dead)
            family.remove(dead)
        fitting = [s for s in family if all(have >= w for have, w in zip(s.widths, widths, strict=True))]
        return min(fitting, key=lambda s: s.widths, default=None)

    def restless(self, call: Call) -> bool:
        """Whether several signatures wait that differ from this call in nothing but what is passed by reference.

        The oldest of them gives way, so that an object that stays gets its turn.
        """
        if all(leaf.kind != "static" for leaf in call.leaves) and next(call.held, None) is None:
            return False
        loose = _loose(_key(call)[0])
        waiting = [s for s in self if s.waiting and _loose(s.key) == loose]
        if len(waiting) < RESTLESS:
            return False
        self._families[waiting[0].key].remove(waiting[0])
        # Served for another reason, it waits all the same.
        self.add(call).served[call.size] = 0
        return True

    def familiar(self, call: Call) -> bool:
        """Whether a call of this kind was turned away before: it comes again, so a graph of it would be used."""
        kind = hash(_key(call)[0])
        known = kind in self._strangers
        self._strangers.append(kind)
        return known

    def difference(self, call: Call) -> str:
        """How a call differs from the nearest one that has graphs."""
        nodes, metas, modes = _key(call)[0]
        texts = [(0, "the structure of the arguments, or a constant among them, differs")]
        for have_nodes, have_metas, have_modes in (s.key for s in self if s.graphs):
            if have_nodes != nodes:
                continue
            if have_metas[-1] != metas[-1]:
                texts.append((1, "which of the arguments are the same tensor differs"))
                continue
            if have_metas == metas and have_modes == modes:
                texts.append((1, self._wider(call)))
                continue
            if have_metas == metas:
                names = ("grad", "inference mode", "autocast")
                changed = [n for n, a, b in zip(names, have_modes, modes, strict=True) if a != b]
                texts.append((2, f"captured in another mode ({', '.join(changed)} differs): warm up as you serve"))
                continue
            leaf, old, new = next(
                (leaf, a, b) for leaf, a, b in zip(call.leaves, have_metas, metas, strict=False) if a != b
            )
            have, want = _shown(new), _shown(old)
            other = f"{have}, captured {want}" if have != want else "another tensor than the captured one"
            texts.append((1, f"`{leaf.path}` is {other}"))
        return max(texts)[1]

    def _wider(self, call: Call) -> str:
        """Which narrow input is wider than any that was captured."""
        key, widths = _key(call)
        most = [max(column) for column in zip(*(s.widths for s in self._families.get(key, ())), strict=True)]
        narrow = [item for item in call.inputs if item.narrow is not None]
        for item, have, want in zip(narrow, most, widths, strict=False):
            if want > have:
                return f"`{item.path}` is {want} wide along dimension {(item.narrow or (0,))[0]}, captured {have}"
        return "the narrow inputs are wider together than those of any graph"

    def add(self, call: Call) -> Signature:
        """A new signature for a call."""
        key, widths = _key(call)
        signature = Signature(key, widths)
        life = signature.life
        # An object that cannot be referenced weakly is kept, so that no other one gets its identity.
        signature.refs += follow([part for value in call.held for part in parts(value)], life.lose)
        self._evict()
        self._families.setdefault(key, []).append(signature)
        return signature

    def _evict(self) -> None:
        waiting = [s for s in self if not s.graphs]
        for signature in waiting[: max(0, len(waiting) - WAITING * self.max_graphs)]:
            self._families[signature.key].remove(signature)
            self.evicted += 1
        self._families = {key: family for key, family in self._families.items() if family}

    def clear(self) -> None:
        """Drop every graph and forget every signature."""
        for signature in self:
            for captured in signature.graphs.values():
                captured.drop()
        self._families, self.evicted = {}, 0


RESTLESS = 3
"""Waiting signatures of one kind after which what is passed by reference counts as moving from call to call."""


def _loose(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key without the identities of what is passed by reference."""
    nodes, metas, modes = key
    kinds = tuple((path, ("held",) if node[0] == "held" else node) for path, node in nodes)
    return kinds, tuple(m[:2] if m[:1] == ("static",) else m for m in metas), modes


def _shown(entry: tuple[Any, ...]) -> str:
    """The shape and dtype of one tensor of a key; -1 is the batch."""
    meta = entry[1] if entry[0] == "static" else entry[3]
    return f"{meta[1]} {list(meta[4])} on {meta[2]}"


def _key(call: Call) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    staged = {item.index: item for item in call.inputs}
    metas: list[Any] = []
    widths: list[int] = []
    for index, tensor in enumerate(call.tensors):
        item = staged.get(index)
        if item is None:
            metas.append(("static", meta(tensor), tensor.data_ptr(), tensor.stride()))
            continue
        free = {item.dim} if item.dim is not None else set()
        if item.narrow is not None:
            free.add(item.narrow[0])
            widths.append(tensor.shape[item.narrow[0]])
        metas.append(("staged", item.dim, item.per, meta(tensor, frozenset(free))))
    # With its name: open keywords of another name are another call.
    nodes = tuple((node.path, node.key) for node in call.nodes)
    return (nodes, (*metas, _repeats(call)), dispatch_modes()), tuple(widths)


def _repeats(call: Call) -> tuple[int, ...]:
    """Which tensors of a call are one object, as the place of the first of each; empty where none is."""
    places = [id(t) for t in call.tensors]
    return tuple(map(places.index, places)) if len(set(places)) < len(places) else ()
