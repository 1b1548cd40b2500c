"""Static inputs: the memory that a graph reads its arguments from, and the copies that fill it.

A graph has one buffer per staged tensor, at its bucket's size. What a call has to copy is worked out once per
batch size; a call then copies with one launch per dtype or, on a GPU, one for several dtypes. A tensor that is the
buffer itself is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from graphprobe.errors import CaptureError
from graphprobe.signature import holes, order

Fill = Any
"""A number, ``"zeros"``, ``"repeat"`` (the last row again), or a callable ``(pad_rows, source) -> None``."""

Work = Callable[[Sequence[torch.Tensor]], None]

Sources = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Input:
    """One staged tensor of a signature. ``index`` is its place in the tensors of a call.

    ``dim`` is the batch dimension, None where the tensor does not follow the batch, with an element for ``per`` rows;
    ``narrow`` is the dimension that may be smaller than captured, with the number that fills the rest.
    """

    path: str
    index: int
    dim: int | None
    fill: Fill = None
    narrow: tuple[int, float] | None = None
    per: int = 1

    def part(self, memory: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        """What ``rows`` rows from row ``first`` on have in the memory of this input."""
        assert self.dim is not None
        return memory.narrow(self.dim, first // self.per, rows // self.per)

    def buffer(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Memory for this input at ``rows`` rows, laid out like ``tensor``.

        Made outside inference mode: a buffer from inside could not be written outside of it.
        """
        shape = list(tensor.shape)
        if self.dim is not None:
            shape[self.dim] = rows // self.per
        strides = holes(tensor, shape)
        with torch.inference_mode(False), torch.no_grad():
            if strides is not None:
                return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).zero_()
            dims = order(tensor) or tuple(range(len(shape)))
            memory = torch.zeros([shape[d] for d in dims], dtype=tensor.dtype, device=tensor.device)
            return memory.permute([dims.index(d) for d in range(len(shape))])


class Staging:
    """The static inputs of one graph: ``rows`` rows of each input of ``inputs``."""

    def __init__(self, inputs: tuple[Input, ...], tensors: Sequence[torch.Tensor], rows: int) -> None:
        self.inputs = inputs
        self.rows = rows
        self.buffers: list[torch.Tensor] = []
        self.own: list[int] = []
        """The places of the inputs that have a buffer of their own: one tensor passed twice is one buffer."""
        found: dict[int, int] = {}
        for place, item in enumerate(inputs):
            first = found.setdefault(id(tensors[item.index]), place)
            if first == place:
                self.own.append(place)
            elif (item.dim, item.fill, item.narrow) != (inputs[first].dim, inputs[first].fill, inputs[first].narrow):
                what = f"`{inputs[first].path}` and `{item.path}`"
                raise CaptureError(f"{what} are the same tensor with different rules")
            self.buffers.append(item.buffer(tensors[item.index], rows) if first == place else self.buffers[first])
        self.drifting = False
        self._padded_from = rows
        self.handed: dict[int, list[torch.Tensor]] = {}

    def copier(self, rows: int, tensors: Sequence[torch.Tensor]) -> Copier:
        """What a call with ``rows`` rows and tensors laid out like these has to copy."""
        return Copier(self, rows, tensors)

    def views(self, rows: int) -> list[torch.Tensor]:
        """The part of each buffer that the caller's rows fill, ``[rows, ...]`` along each batch dimension."""
        return [
            buffer if item.dim is None or rows == self.rows else item.part(buffer, 0, rows)
            for item, buffer in zip(self.inputs, self.buffers, strict=True)
        ]

    def hand_out(self, rows: int) -> list[torch.Tensor]:
        """The views of ``rows`` rows for a caller to write into, the same at each call; one for a tensor passed twice.

        Aliases, so that what becomes of them leaves the buffers alone. Copiers that were made before know none of them.
        """
        if rows not in self.handed:
            with torch.inference_mode(False), torch.no_grad():
                views = {id(buffer): view.detach() for buffer, view in zip(self.buffers, self.views(rows), strict=True)}
            self.handed[rows] = [views[id(buffer)] for buffer in self.buffers]
        # A caller writes where pad rows were.
        self.drifting = True
        return self.handed[rows]

    def unwritten(self, rows: int, views: list[torch.Tensor]) -> Sources | None:
        """A function that puts the view of a buffer in the place of the tensor that was handed out for it.

        Any other tensor in the memory of a buffer is cloned: it would be overwritten before it is read. None where
        nothing was handed out.
        """
        if not self.handed:
            return None
        memory = {buffer.untyped_storage().data_ptr() for buffer in self.buffers}
        own: Sequence[torch.Tensor | None] = self.handed.get(rows) or [None] * len(self.buffers)
        places = [(item.index, mine, view) for item, mine, view in zip(self.inputs, own, views, strict=True)]

        def sources(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            found = list(tensors)
            for index, mine, view in places:
                tensor = tensors[index]
                if tensor is mine and tensor.data_ptr() == view.data_ptr():
                    found[index] = view
                elif tensor.untyped_storage().data_ptr() in memory:
                    found[index] = tensor.clone()
            return found

        return sources

    def fill_once(self, rows: int, tails: list[tuple[torch.Tensor, Fill, int]]) -> None:
        """Write the constant pad rows above ``rows`` where an earlier call left its own rows there."""
        if self._padded_from > rows or self.drifting:
            for tail, fill, _ in tails:
                tail.fill_(fill)
        self._padded_from = rows


class Copier:
    """Copies of one batch size: ``ones`` are single tensors (index, buffer), ``groups`` go with a launch each.

    ``extra`` is work beside the plain copies (narrow inputs, pad rows), None where there is none. ``sources`` is
    :meth:`Staging.unwritten`.
    """

    __slots__ = ("extra", "groups", "ones", "sources")

    def __init__(self, staging: Staging, rows: int, tensors: Sequence[torch.Tensor]) -> None:
        views = staging.views(rows)
        self.sources = staging.unwritten(rows, views)
        own = [(staging.inputs[place], views[place]) for place in staging.own]
        plain = [(item.index, view) for item, view in own if item.narrow is None]
        launches = fewest(plain, tensors) if all(view.is_cuda for _, view in plain) else _by_dtype(plain)
        self.ones = tuple(members[0][:2] for members in launches if len(members) == 1)
        self.groups = tuple(_together(members) for members in launches if len(members) > 1)
        works = [_narrowed(item, view) for item, view in own if item.narrow is not None]
        works += _padding(staging, rows)
        self.extra = _all(works)

    def split(self) -> tuple[int | None, Any, torch.Tensor | None, Work | None]:
        """For the hot path: the first single copy as (index, copy, buffer), and all other work; None: there is none."""
        works = [*(_alone(*one) for one in self.ones), *self.groups]
        works += [] if self.extra is None else [self.extra]
        if self.sources is not None:
            return None, None, None, _on(self.sources, works)
        if not self.ones:
            return None, None, None, _all(works)
        index, buffer = self.ones[0]
        return index, buffer.copy_, buffer, _all(works[1:])

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy a call's tensors into the static inputs, on the current stream."""
        first, copy, buffer, more = self.split()
        if first is not None and tensors[first] is not buffer:
            copy(tensors[first])
        if more is not None:
            more(tensors)


Member = tuple[int, torch.Tensor, torch.dtype | None]
"""One copy of a launch: the tensor's index, its buffer, and the dtype as which both are seen, None for their own."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes. As integers bits are copied as they are: a float's may be changed on the way through a wider type."""

WORTH = 6
"""Tensors seen as another dtype that cost as much as a launch (on the host of an H200 0.7 us each, 5.5 us a launch)."""

LIGHT = 1 << 18
"""Bytes above which a tensor is not seen as another dtype: there the time of the device begins to count."""


def _by_dtype(plain: list[tuple[int, torch.Tensor]]) -> list[list[Member]]:
    # One launch covers all tensors of a dtype; mixed dtypes in one call would fall back to a launch each.
    kinds: dict[torch.dtype, list[Member]] = {}
    for index, view in plain:
        kinds.setdefault(view.dtype, []).append((index, view, None))
    return list(kinds.values())


def fewest(plain: list[tuple[int, torch.Tensor]], tensors: Sequence[torch.Tensor]) -> list[list[Member]]:
    """The copies (index, buffer) as launches: those of other dtypes join one where that is faster on a GPU.

    ``tensors`` are laid out as those of each call will be.
    """
    best = alone = _by_dtype(plain)
    for size, kind in INTEGERS.items():
        seen = [[_seen(member, tensors[member[0]], size, kind) for member in members] for members in alone]
        joined = [[member for member in members if member is not None] for members in seen if None not in members]
        rest = [members for members, found in zip(alone, seen, strict=True) if None in found]
        launches = [*rest, [member for members in joined for member in members]] if joined else rest
        best = min(best, launches, key=_price)
    return best


def _price(launches: list[list[Member]]) -> int:
    return sum(WORTH + sum(member[2] is not None for member in members) for members in launches)


def _seen(member: Member, source: torch.Tensor, size: int, kind: torch.dtype) -> Member | None:
    """A copy that joins those of ``kind``, None where it cannot: only a dense row splits into smaller items."""
    index, view, _ = member
    if view.dtype is kind:
        return member
    whole = view.element_size() == size
    splits = view.element_size() > size and view.dim() > 0 and view.stride(-1) == source.stride(-1) == 1
    plain = not (view.is_complex() or view.is_quantized or source.is_neg()) and view.nbytes <= LIGHT
    return (index, view, kind) if plain and (whole or splits) else None


def _alone(index: int, buffer: torch.Tensor) -> Work:
    def work(tensors: Sequence[torch.Tensor]) -> None:
        if tensors[index] is not buffer:
            buffer.copy_(tensors[index])

    return work


def _together(members: list[Member]) -> Work:
    """One launch for several copies, none where all of the tensors are the buffers themselves."""
    (first, home, _), *others = members
    copied = torch._foreach_copy_
    rest = [(index, buffer) for index, buffer, _ in others]
    kinds = [(index, kind) for index, _, kind in members]
    buffers = [buffer if kind is None else buffer.view(kind) for _, buffer, kind in members]
    pick: Callable[[Sequence[torch.Tensor]], Any] = itemgetter(*(index for index, _ in kinds))
    if any(kind is not None for _, kind in kinds):

        def pick(tensors: Sequence[torch.Tensor]) -> Any:
            return [tensors[i] if kind is None else tensors[i].view(kind) for i, kind in kinds]

    def work(tensors: Sequence[torch.Tensor]) -> None:
        if tensors[first] is not home or any(tensors[i] is not buffer for i, buffer in rest):
            copied(buffers, pick(tensors))

    return work


def _narrowed(item: Input, view: torch.Tensor) -> Work:
    assert item.narrow is not None
    dim, fill = item.narrow

    def work(tensors: Sequence[torch.Tensor]) -> None:
        source = tensors[item.index]
        width, whole = source.shape[dim], view.shape[dim]
        view.narrow(dim, 0, width).copy_(source)
        if width < whole:
            view.narrow(dim, width, whole - width).fill_(fill)

    return work


def _padding(staging: Staging, rows: int) -> list[Work]:
    constant: list[tuple[torch.Tensor, Fill, int]] = []
    works: list[Work] = []
    for item, buffer in ((staging.inputs[place], staging.buffers[place]) for place in staging.own):
        if item.dim is None or item.fill is None:
            continue
        tail = item.part(buffer, rows, staging.rows - rows)
        if item.fill == "repeat" or callable(item.fill):
            works += [] if rows == staging.rows else [_copied(item, tail, item.part(buffer, rows - item.per, item.per))]
        else:
            constant.append((tail, 0 if item.fill == "zeros" else item.fill, item.index))
    if constant:
        # First: a callable of the caller's may raise.
        works.insert(0, lambda _: staging.fill_once(rows, constant))
    return works


def _copied(item: Input, tail: torch.Tensor, last: torch.Tensor) -> Work:
    if item.fill == "repeat":
        return lambda _: _discard(tail.copy_(last.expand_as(tail)))
    return lambda tensors: _discard(item.fill(tail, tensors[item.index]))


def _discard(_: object) -> None:
    return None


def _on(sources: Sources, works: list[Work]) -> Work:
    def work(tensors: Sequence[torch.Tensor]) -> None:
        given = sources(tensors)
        for each in works:
            each(given)

    return work


def _all(works: list[Work]) -> Work | None:
    if len(works) < 2:
        return works[0] if works else None

    def work(tensors: Sequence[torch.Tensor]) -> None:
        for each in works:
            each(tensors)

    return work
