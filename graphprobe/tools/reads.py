"""What a step reads of memory that was there before: weights and caches, each byte once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphprobe.operators import tensors_in, writes_of

LOOKUPS = ("aten::embedding", "aten::index_select", "aten::index", "aten::gather", "aten::_index")
"""Operators that read of their first tensor only what they return."""


class Reads(TorchDispatchMode):
    """Notes, per storage that is older than the run, the largest part of it that an operator read.

    What an operator only writes, and the table of a look-up beyond the rows that it returns, is not read.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.operators = 0
        """Operators that do work: views are none."""
        self._made: dict[int, Any] = {}
        self._read: dict[int, int] = {}
        self._kept: list[Any] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled; what it reads is not seen."""
        return True

    @property
    def bytes(self) -> int:
        """Of all storages together."""
        return sum(self._read.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and look at what it was given and what it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "is_view", False):
            return result
        self.operators += 1
        given = list(tensors_in((args, kwargs)))
        written = {id(tensor) for tensor in writes_of(func, args, kwargs)}
        made = list(tensors_in(result))
        table = given[0] if given and func.name().split(".")[0] in LOOKUPS else None
        for tensor in given:
            if id(tensor) in written or tensor.device != self.device:
                continue
            size = min(_bytes(tensor), sum(map(_bytes, made))) if tensor is table else _bytes(tensor)
            self._note(tensor, size)
        older = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in made:
            # What comes back of an operator in place is no memory of this run.
            if tensor.untyped_storage()._cdata not in older:
                self._keep(tensor)
        return result

    def _note(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made:
            self._read[storage._cdata] = max(self._read.get(storage._cdata, 0), min(size, storage.nbytes()))
            self._kept.append(storage)

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._read:
            # Held, so that no later one is taken for it.
            self._made[storage._cdata] = storage


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def reads(run: Callable[[], Any], device: torch.device) -> Reads:
    """What one ``run`` reads."""
    found = Reads(device)
    with found:
        run()
    return found
