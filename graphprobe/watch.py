"""Watching one capture: which tensors from outside it reads and writes, and what it must not contain.

A replay repeats launches on the addresses of the capture. So every tensor that is neither staged nor made inside
is watched by a weak reference: when its owner lets it go, the graph is dead before the next call.
What this cannot see: kernels that bypass the dispatcher, and two live tensors whose names are swapped.
"""

from __future__ import annotations

import functools
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphprobe.errors import CaptureError

TORCH = str(Path(torch.__file__).parent)

SYNCS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero")
"""Operators whose result the host needs: a graph cannot contain them."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operator (lists one level deep, as schemas have them)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def storage(tensor: torch.Tensor) -> int:
    """Identifies the memory a tensor lies in, for as long as that memory is alive."""
    return int(tensor.untyped_storage()._cdata)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of ``tensor`` as a tensor of its own, which keeps the memory and not the tensor it came from."""
    # A view of an inference tensor's memory cannot stand in for one of a normal tensor, nor the other way round.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class Watch(TorchDispatchMode):
    """Sees every operator of a capture. ``device`` is the device type that the graph runs on.

    With ``lenient`` it watches an eager run ahead of a capture: what a capture must not contain is noted as
    ``problem`` instead of raised.
    """

    def __init__(self, staged: list[torch.Tensor], device: str, lenient: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.lenient = lenient
        self.problem = ""
        self.operators = 0
        self.random = False
        self.compiled = False
        self.reads: dict[int, weakref.ref[torch.Tensor]] = {}
        self.written: set[int] = set()
        self.writes_outside: list[str] = []
        self._staged = {storage(t): i for i, t in enumerate(staged)}
        self._made: set[int] = set()
        self._outer: set[int] = set()
        self._views: dict[int, weakref.ref[torch.Tensor]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled region runs compiled, unseen: bit-equality with eager matters more than seeing its reads."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        self._look(self._before, func, args, named)
        result = func(*args, **named)
        self._look(self._after, result)
        return result

    def _look(self, step: Callable[..., None], *values: Any) -> None:
        """Run a step of ours inside the caller's forward, which must not see it fail (a tensor without storage)."""
        try:
            step(*values)
        except CaptureError:
            raise
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}")

    def _before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.operators += 1
        if str(func).startswith("aten.lift"):
            # A constant that the forward's own Python makes (torch.tensor): it comes into being here.
            self._made.update(storage(t) for t in tensors_in(args))
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        if needs_host(func, args):
            self._refuse(f"{func} needs a value on the host, which a graph cannot give ({caller()})")
        for tensor in tensors_in((*args, *kwargs.values())):
            self._read(tensor, func)
        for tensor in writes_of(func, args, kwargs):
            self._write(tensor, func)

    def _after(self, result: Any) -> None:
        for tensor in tensors_in(result):
            self._result(tensor)

    def _refuse(self, text: str) -> None:
        if not self.lenient:
            raise CaptureError(text)
        self.problem = self.problem or text

    def outside(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory that is neither staged nor made inside the capture."""
        key = storage(tensor)
        return key not in self._staged and key not in self._made

    def staged(self, tensor: torch.Tensor) -> int | None:
        """The index of the static input that a tensor lies in, or None."""
        return self._staged.get(storage(tensor))

    def _read(self, tensor: torch.Tensor, func: Any) -> None:
        if not self.outside(tensor) or self.derived(tensor) or self._compilers(tensor):
            return
        self._outer.add(storage(tensor))
        if tensor.device.type != self.device and self.device != "cpu":
            text = f"{func} reads a {tensor.device.type} tensor of shape {tuple(tensor.shape)} from outside the forward"
            self._refuse(f"{text}; its value would be frozen in the graph: move it to {self.device}")
        if id(tensor) not in self.reads:
            self.reads[id(tensor)] = weakref.ref(tensor)

    def _compilers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a buffer or a view that compiled code made for itself, past the dispatcher."""
        if isinstance(tensor, torch.nn.Parameter) or storage(tensor) in self._outer:
            return False
        found = in_compiled_code()
        self.compiled = self.compiled or found
        return found

    def _write(self, tensor: torch.Tensor, func: Any) -> None:
        index = self.staged(tensor)
        if index is not None:
            self.written.add(index)
        elif self.outside(tensor) and not self._compilers(tensor):
            self.writes_outside.append(str(func))

    def _result(self, tensor: torch.Tensor) -> None:
        key = storage(tensor)
        if key in self._outer or key in self._staged:
            self._views[id(tensor)] = weakref.ref(tensor)
        else:
            self._made.add(key)

    def living(self) -> list[torch.Tensor]:
        """The tensors that were read from outside. CaptureError where the forward itself let go of one."""
        found = [ref() for ref in self.reads.values()]
        if any(tensor is None for tensor in found):
            self._refuse("the forward replaces a tensor that it reads; write to it in place instead")
        return [tensor for tensor in found if tensor is not None]

    def derived(self, tensor: torch.Tensor) -> bool:
        """Whether an operator of the capture made this tensor (of outside memory, perhaps)."""
        known = self._views.get(id(tensor))
        return known is not None and known() is tensor

    def meets(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in outside memory that the capture uses."""
        return storage(tensor) in self._outer


@functools.cache
def prime() -> None:
    """Let torch load what its first dispatch mode loads, before a capture would pay for it and be held by it."""
    with Watch([], "cpu"):
        torch.zeros(1).add_(1)


UNDECLARED = ("aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm")
"""Operators that write their running mean and variance (arguments 3 and 4) in training, unsaid by their schema."""


def writes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes."""
    if str(func).startswith(UNDECLARED) and len(args) > 5 and args[5]:
        yield from tensors_in(args[3:5])
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def needs_host(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator's result or its shape depends on data, which the host would have to read."""
    if func.name().split(".")[0].replace("::", ".") in SYNCS:
        return True
    if torch.Tag.dynamic_output_shape in func.tags:
        indices = [t for t in tensors_in(args[1:]) if t.dtype in (torch.bool, torch.uint8)]
        return not str(func).startswith("aten.index.") or bool(indices)
    return torch.Tag.data_dependent_output in func.tags


def in_compiled_code() -> bool:
    """Whether the operator at hand is called by code that inductor wrote."""
    frame = sys._getframe(1)
    for _ in range(24):
        file = frame.f_code.co_filename
        if "torchinductor" in file or (file.startswith(TORCH) and "_inductor" in file):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def caller() -> str:
    """File and line of the innermost code that is neither torch's nor ours."""
    ours = str(Path(__file__).parent)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((ours, TORCH, "<")):
            return f"{frame.filename}:{frame.lineno}"
    return "no line of the forward is known"


def follow(values: list[Any], lost: Callable[[], None]) -> list[Any]:
    """Weak references that call ``lost`` when one of ``values`` is let go; keep the list as long as it matters.

    A value that allows no weak reference is in the list itself.
    """
    return [_reference(value, lost) for value in values]


def _reference(value: Any, lost: Callable[[], None]) -> Any:
    try:
        return weakref.ref(value, lambda _: lost())
    except TypeError:
        return value


class Pointers:
    """The addresses of watched tensors, to find storage that was replaced under a living tensor (``.data =``)."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._known = [(weakref.ref(tensor), tensor.data_ptr()) for tensor in tensors]
        self._plain = [weakref.ref(tensor) for tensor in tensors if not tensor.requires_grad]

    def in_autograd(self) -> bool:
        """Whether a tensor requires grad now that did not at the capture."""
        if not torch.is_grad_enabled():
            return False
        return any(tensor is not None and tensor.requires_grad for tensor in (ref() for ref in self._plain))

    def moved(self) -> tuple[int, ...] | None:
        """The shape of a tensor whose storage is another one now, or None."""
        for ref, pointer in self._known:
            tensor = ref()
            if tensor is not None and tensor.data_ptr() != pointer:
                return tuple(tensor.shape)
        return None
