"""Static inputs: the memory that a graph reads its arguments from, and the copies that fill it.

A graph has one buffer per staged tensor, at its bucket's size. What a call has to copy is worked out once per
batch size; a call then copies with one launch per dtype.
"""

from __future__ import annotations

import copy
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

    def copier(self, rows: int) -> Copier:
        """What a call with ``rows`` rows has to copy."""
        return Copier(self, rows)

    def views(self, rows: int) -> list[torch.Tensor]:
        """The part of each buffer that the caller's rows fill, ``[rows, ...]`` along each batch dimension."""
        return [
            buffer if item.dim is None or rows == self.rows else item.part(buffer, 0, rows)
            for item, buffer in zip(self.inputs, self.buffers, strict=True)
        ]

    def fill_once(self, rows: int, tails: list[tuple[torch.Tensor, Fill, int]]) -> None:
        """Write the constant pad rows above ``rows`` where an earlier call left its own rows there."""
        if self._padded_from > rows or self.drifting:
            for tail, fill, _ in tails:
                tail.fill_(fill)
        self._padded_from = rows


class Copier:
    """Copies of one batch size: ``ones`` are single tensors (index, buffer), ``groups`` go with a launch each.

    ``extra`` is work beside the plain copies (narrow inputs, pad rows), None where there is none.
    """

    __slots__ = ("extra", "groups", "ones")

    def __init__(self, staging: Staging, rows: int) -> None:
        views = staging.views(rows)
        own = [(staging.inputs[place], views[place]) for place in staging.own]
        plain = [(item.index, view) for item, view in own if item.narrow is None]
        kinds = _by_dtype(plain)
        self.ones = tuple(members[0] for members in kinds if len(members) == 1)
        self.groups = tuple(([v for _, v in m], itemgetter(*(i for i, _ in m))) for m in kinds if len(m) > 1)
        works = [_narrowed(item, view) for item, view in own if item.narrow is not None]
        works += _padding(staging, rows)
        self.extra = _all(works)

    def split(self) -> tuple[int | None, Any, torch.Tensor | None, Work | None]:
        """For the hot path: the first single copy as (index, copy, buffer), and all other work; None: there is none."""
        if not self.ones:
            return None, None, None, self
        index, buffer = self.ones[0]
        rest = copy.copy(self)
        rest.ones = self.ones[1:]
        more = rest if rest.ones or rest.groups or rest.extra is not None else None
        return index, buffer.copy_, buffer, more

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy a call's tensors into the static inputs, on the current stream."""
        for index, buffer in self.ones:
            if tensors[index] is not buffer:
                buffer.copy_(tensors[index])
        for buffers, pick in self.groups:
            torch._foreach_copy_(buffers, pick(tensors))
        if self.extra is not None:
            self.extra(tensors)


def _by_dtype(plain: list[tuple[int, torch.Tensor]]) -> list[list[tuple[int, torch.Tensor]]]:
    # One launch covers all tensors of a dtype; mixed dtypes in one call would fall back to a launch each.
    kinds: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
    for index, view in plain:
        kinds.setdefault(view.dtype, []).append((index, view))
    return list(kinds.values())


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
        works.append(lambda _: staging.fill_once(rows, constant))
    return works


def _copied(item: Input, tail: torch.Tensor, last: torch.Tensor) -> Work:
    if item.fill == "repeat":
        return lambda _: _discard(tail.copy_(last.expand_as(tail)))
    return lambda tensors: _discard(item.fill(tail, tensors[item.index]))


def _discard(_: object) -> None:
    return None


def _all(works: list[Work]) -> Work | None:
    if len(works) < 2:
        return works[0] if works else None

    def work(tensors: Sequence[torch.Tensor]) -> None:
        for each in works:
            each(tensors)

    return work
