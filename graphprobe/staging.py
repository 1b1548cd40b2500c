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

from graphprobe.signature import order

Fill = Any
"""A number, ``"zeros"``, ``"repeat"`` (the last row again), or a callable ``(pad_rows, source) -> None``."""

Work = Callable[[Sequence[torch.Tensor]], None]


@dataclass(frozen=True, slots=True)
class Input:
    """One staged tensor of a signature. ``index`` is its place in the tensors of a call.

    ``dim`` is the batch dimension, None where the tensor does not follow the batch; ``narrow`` is the dimension
    that may be smaller than captured, with the number that fills the rest.
    """

    path: str
    index: int
    dim: int | None
    fill: Fill = None
    narrow: tuple[int, float] | None = None

    def buffer(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Memory for this input at ``rows`` rows, laid out like ``tensor``.

        Made outside inference mode: a buffer from inside could not be written outside of it.
        """
        shape = list(tensor.shape)
        if self.dim is not None:
            shape[self.dim] = rows
        dims = order(tensor) or tuple(range(len(shape)))
        inverse = [dims.index(d) for d in range(len(shape))]
        with torch.inference_mode(False), torch.no_grad():
            memory = torch.zeros([shape[d] for d in dims], dtype=tensor.dtype, device=tensor.device)
            return memory.permute(inverse)


class Staging:
    """The static inputs of one graph: ``rows`` rows of each input of ``inputs``."""

    def __init__(self, inputs: tuple[Input, ...], tensors: Sequence[torch.Tensor], rows: int) -> None:
        self.inputs = inputs
        self.rows = rows
        self.buffers = [item.buffer(tensors[item.index], rows) for item in inputs]
        self.drifting = False
        self._padded_from = rows

    def copier(self, rows: int) -> Copier:
        """What a call with ``rows`` rows has to copy."""
        return Copier(self, rows)

    def views(self, rows: int) -> list[torch.Tensor]:
        """The part of each buffer that the caller's rows fill, ``[rows, ...]`` along each batch dimension."""
        return [
            buffer if item.dim is None or rows == self.rows else buffer.narrow(item.dim, 0, rows)
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
        plain = [(i.index, v) for i, v in zip(staging.inputs, views, strict=True) if i.narrow is None]
        kinds = _by_dtype(plain)
        self.ones = tuple(members[0] for members in kinds if len(members) == 1)
        self.groups = tuple(([v for _, v in m], itemgetter(*(i for i, _ in m))) for m in kinds if len(m) > 1)
        works = [_narrowed(i, v) for i, v in zip(staging.inputs, views, strict=True) if i.narrow is not None]
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
    for item, buffer in zip(staging.inputs, staging.buffers, strict=True):
        if item.dim is None or item.fill is None:
            continue
        tail = buffer.narrow(item.dim, rows, staging.rows - rows)
        if item.fill == "repeat" or callable(item.fill):
            works += [] if rows == staging.rows else [_copied(item, tail, buffer.narrow(item.dim, rows - 1, 1))]
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
