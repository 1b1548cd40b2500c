"""What a step reads of memory that was there before: weights and caches, each byte once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from graphprobe.operators import tensors_in, writes_of

LOOKUPS = ("aten::embedding", "aten::_embedding_bag", "aten::index_select", "aten::index", "aten::gather", "aten::take")
"""Operators that read of their first tensor only what they return, or as many rows as they are given indices."""

FILLS = ("copy_", "fill_", "zero_", "index_copy_", "index_put_", "_index_put_impl_", "scatter_", "normal_", "uniform_")
"""Operators that write their first argument and do not read it; others in place do both."""

SHAPES = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
"""How operators end that take nothing of a tensor but its kind."""

Range = tuple[int, int]


class Reads(TorchDispatchMode):
    """Notes, per storage that is older than the run, which of its bytes an operator was given to read.

    What an operator only writes, and the table of a look-up beyond the rows that it returns, is not read. A view with
    holes counts with its elements. Compiled code is not looked into.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.operators = 0
        """Operators that do work: views are none."""
        self._made: dict[int, StorageWeakRef] = {}
        self._dense: dict[int, list[Range]] = defaultdict(list)
        self._sparse: dict[int, dict[Any, int]] = defaultdict(dict)
        self._whole: dict[int, int] = {}
        self._kept: list[Any] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled; what it reads is not seen."""
        return True

    @property
    def bytes(self) -> int:
        """Of all storages together."""
        return sum(
            min(whole, _union(self._dense[key]) + sum(self._sparse[key].values())) for key, whole in self._whole.items()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and look at what it was given and what it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "is_view", False):
            return result
        self.operators += 1
        given, made = list(_plain((args, list(kwargs.values())))), list(_plain(result))
        name = func.name().split(".")[0]
        if not name.endswith(SHAPES):
            self._look(name, func, given, made, args, kwargs)
        older = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in made:
            # What comes back of an operator in place is no memory of this run.
            storage = tensor.untyped_storage()
            if storage._cdata not in older and storage._cdata not in self._whole:
                # A weak reference: its number is not given to another storage while it is held, and no memory is.
                self._made[storage._cdata] = StorageWeakRef(storage)
        return result

    def _look(self, name: str, func: Any, given: Any, made: Any, args: Any, kwargs: Any) -> None:
        written = {id(tensor) for tensor in writes_of(func, args, kwargs)}
        only = name.endswith(FILLS) or "out" in func._schema.overload_name
        table = given[0] if given and name in LOOKUPS else None
        for tensor in given:
            if tensor.device != self.device or (id(tensor) in written and only):
                continue
            if table is not None and tensor is table:
                self._rows(table, given[1:], made)
            else:
                self._note(tensor)

    def _rows(self, table: torch.Tensor, indices: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """What a look-up reads of its table: what comes out, or a row for each index where rows are put together."""
        out = sum(map(_bytes, made[:1]))
        each = math.prod(table.shape[1:]) * table.element_size()
        rows = max((tensor.numel() for tensor in indices if not tensor.is_floating_point()), default=0)
        self._note(table, max(out, rows * each if table.dim() > 1 else 0))

    def _note(self, tensor: torch.Tensor, most: int | None = None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._made:
            return
        if key not in self._whole:
            self._kept.append(storage)
        self._whole[key] = storage.nbytes()
        size, begin = _bytes(tensor), int(tensor.storage_offset()) * tensor.element_size()
        if most is not None or size != _span(tensor):
            view = (begin, tuple(tensor.shape), tensor.stride())
            self._sparse[key][view] = max(self._sparse[key].get(view, 0), size if most is None else min(size, most))
        else:
            self._dense[key].append((begin, begin + size))


def _plain(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value that have memory of their own: those inside one that wraps others, none that is sparse."""
    for tensor in tensors_in(value):
        if hasattr(type(tensor), "__tensor_flatten__"):
            inner: Any = tensor
            yield from _plain([getattr(tensor, name) for name in inner.__tensor_flatten__()[0]])
        elif tensor.layout is torch.strided:
            yield tensor


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of its elements, each once: an expanded dimension has one."""
    sizes = (size if stride else min(size, 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return math.prod(sizes) * tensor.element_size()


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last one."""
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size() if tensor.numel() else 0


def _union(ranges: list[Range]) -> int:
    total = last = 0
    for begin, end in sorted(ranges):
        total += max(0, end - max(begin, last))
        last = max(last, end)
    return total


def reads(run: Callable[[], Any], device: torch.device) -> Reads:
    """What one ``run`` reads."""
    found = Reads(device)
    with found:
        run()
    return found
