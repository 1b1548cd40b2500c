"""Watching one capture: which tensors from outside it reads and writes, and what it must not contain.

A replay repeats launches on the addresses of the capture. So every tensor that is neither staged nor made inside
is watched by a weak reference: when its owner lets it go, the graph is dead before the next call.
What this cannot see: kernels that bypass the dispatcher, and two live tensors whose names are swapped.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphprobe.backends.cuda import in_use
from graphprobe.errors import CaptureError
from graphprobe.operators import (
    COLLECTIVES,
    CROSSINGS,
    caller,
    composed,
    draws,
    in_compiled_code,
    lasting,
    needs_host,
    tensors_in,
    writes_of,
)
from graphprobe.signature import compile_guard


def storage(tensor: torch.Tensor) -> int:
    """Identifies the memory a tensor lies in, for as long as that memory is alive."""
    return int(tensor.untyped_storage()._cdata)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of ``tensor`` as a tensor of its own, which keeps the memory and not the tensor it came from."""
    # A view of an inference tensor's memory cannot stand in for one of a normal tensor, nor the other way round.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    torch._C._set_conj(fresh, tensor.is_conj())
    torch._C._set_neg(fresh, tensor.is_neg())
    return fresh


SMALL = 1 << 16
"""Bytes of a written tensor up to which it may be a position or a length that moves, rather than a cache."""


class Watch(TorchDispatchMode):
    """Sees every operator of a capture. ``device`` is the one that the graph runs on.

    With ``lenient`` it watches an eager run ahead of a capture: what a capture must not contain is noted as
    ``problem`` instead of raised.
    """

    def __init__(self, staged: list[torch.Tensor], device: torch.device, lenient: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.lenient = lenient
        self.problem = ""
        self.operators = 0
        self.random = False
        self.compiled = False
        self.reads: dict[int, weakref.ref[torch.Tensor]] = {}
        self._lies: dict[int, tuple[int, int]] = {}
        self.written: set[int] = set()
        self.landed: list[tuple[str, int]] = []
        self.counters: dict[Any, torch.Tensor] = {}
        self._staged = {storage(t): i for i, t in enumerate(staged)}
        self._made: set[int] = set()
        self._outer: set[int] = set()
        self._views: dict[int, weakref.ref[torch.Tensor]] = {}
        self._used = in_use() if device.type == "cuda" and "torch._dynamo" in sys.modules else None
        """What memory was in use before, where compiled code may be in the forward; None where that is not known."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled region runs compiled, unseen: bit-equality with eager matters more than seeing its reads."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            self._look(self._higher, func, args)
            return func(*args, **named)
        if composed(func, self.device.type):
            with self:
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        self._look(self._before, func, args, named)
        result = func(*args, **named)
        self._look(self._after, func, args, result)
        return result

    def _look(self, step: Callable[..., None], *values: Any) -> None:
        """Run a step of ours inside the caller's forward, which must not see it fail (a tensor without storage)."""
        try:
            step(*values)
        except CaptureError:
            raise
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}")

    def _higher(self, func: Any, args: tuple[Any, ...]) -> None:
        """An operator of operators: attention that is made of Python launches kernels, the others ask the host."""
        self.operators += 1
        if not func.name().startswith("flex_attention") or self.device.type == "cpu":
            self._refuse(f"{func.name()} runs Python of its own, which a graph cannot ({caller()})")
        for tensor in tensors_in(args):
            self._read(tensor, func)

    def _before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.operators += 1
        if str(func).startswith("aten.lift"):
            # A constant that the forward's own Python makes (torch.tensor): it comes into being here.
            self._made.update(storage(t) for t in tensors_in(args))
        self.random = self.random or draws(func, args, kwargs)
        if self.device.type == "cpu" and func.namespace in COLLECTIVES:
            self._refuse(f"{func} runs on another thread, which a recording cannot repeat ({caller()})")
        if needs_host(func, args, kwargs, self.device.type):
            self._refuse(f"{func} needs a value on the host, which a graph cannot give ({caller()})")
        for tensor in tensors_in((*args, *kwargs.values())):
            self._read(tensor, func)
        for tensor in writes_of(func, args, kwargs):
            self._write(tensor, func)

    def _after(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        for tensor in tensors_in(result):
            self._result(tensor)
        if self.device.type != "cpu":
            self._check_place(func, args, result)

    def _check_place(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Refuse a copy between devices, which would wait or read what is not there yet, and work on a third one."""
        sources, places = ({str(t.device) for t in each} for each in (tensors_in(args), lasting(func, result)))
        if (sources and not places <= sources) or (len(sources) > 1 and func.name() in CROSSINGS):
            path = f"{', '.join(sorted(sources))} to {', '.join(sorted(places))}"
            self._refuse(f"{func} copies from {path}, which a graph cannot ({caller()})")
        elif places - {"cpu", str(self.device)}:
            self._refuse(f"{func} works on {', '.join(sorted(places))}, where nothing is captured ({caller()})")

    def _refuse(self, text: str) -> None:
        # Kept, too: the forward may catch what is raised inside it.
        self.problem = self.problem or text
        if not self.lenient:
            raise CaptureError(text)

    @property
    def writes_outside(self) -> list[str]:
        """The operators that wrote to a tensor outside, in order."""
        return [func for func, _ in self.landed]

    def outside(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory that is neither staged nor made inside the capture."""
        key = storage(tensor)
        return key not in self._staged and key not in self._made and not self._fresh(tensor, key)

    def _fresh(self, tensor: torch.Tensor, key: int) -> bool:
        """Whether compiled code made a tensor inside: its results come past the dispatcher, from memory not in use."""
        if self._used is None or key in self._outer or tensor.device.type != "cuda":
            return False
        address = tensor.untyped_storage().data_ptr()
        index = bisect_right(self._used, (address, math.inf))
        if not address or (index and address < self._used[index - 1][1]):
            return False
        self._made.add(key)
        self.compiled = True
        return True

    def staged(self, tensor: torch.Tensor) -> int | None:
        """The index of the static input that a tensor lies in, or None."""
        return self._staged.get(storage(tensor))

    def _read(self, tensor: torch.Tensor, func: Any) -> None:
        if not self.outside(tensor) or self.derived(tensor) or self._compilers(tensor):
            return
        self._outer.add(storage(tensor))
        if tensor.device != self.device and self.device.type != "cpu":
            text = f"{func} reads a {tensor.device} tensor of shape {tuple(tensor.shape)} from outside the forward"
            self._refuse(f"{text}; its value would be frozen in the graph: move it to {self.device}")
        if id(tensor) not in self.reads:
            self.reads[id(tensor)] = weakref.ref(tensor)
            self._lies[id(tensor)] = _place(tensor)

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
            self.landed.append((str(func), storage(tensor)))
            if not self.lenient and tensor.untyped_storage().nbytes() <= SMALL:
                self.counters[storage(tensor), tensor.storage_offset(), tensor.shape] = tensor

    def _result(self, tensor: torch.Tensor) -> None:
        key = storage(tensor)
        if key in self._outer or key in self._staged:
            self._views[id(tensor)] = weakref.ref(tensor)
        else:
            self._made.add(key)

    def living(self) -> list[torch.Tensor]:
        """The tensors that were read from outside. CaptureError where the forward itself let go of one."""
        found = {key: ref() for key, ref in self.reads.items()}
        if any(tensor is None for tensor in found.values()):
            self._refuse("the forward replaces a tensor that it reads; write to it in place instead")
        alive = {key: tensor for key, tensor in found.items() if tensor is not None}
        if any(_place(tensor) != self._lies[key] for key, tensor in alive.items()):
            self._refuse("the forward frees or moves the memory of a tensor that it reads (sharded weights do)")
        return list(alive.values())

    def derived(self, tensor: torch.Tensor) -> bool:
        """Whether an operator of the capture made this tensor (of outside memory, perhaps)."""
        known = self._views.get(id(tensor))
        return known is not None and known() is tensor

    def meets(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in outside memory that the capture uses."""
        return storage(tensor) in self._outer


class HostReads(TorchFunctionMode):
    """Sees what hands a CPU tensor's content to the host without an operator, as printing it does.

    ``refused`` is the first such place; with ``lenient`` it is noted and not raised.
    """

    NAMES = ("numpy", "tolist", "__array__", "__dlpack__", "item", "__contains__", "__repr__", "__format__")
    MAKERS = ("tensor", "as_tensor", "asarray")
    SHAPERS = ("tensor_split", "pack_padded_sequence")

    def __init__(self, lenient: bool = False) -> None:
        super().__init__()
        self.lenient = lenient
        self.refused = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        # Numbers are read out of the tensors in a list, sizes out of a tensor of sizes.
        made = (
            name in self.MAKERS
            and args
            and isinstance(args[0], (list, tuple))
            and any(True for _ in tensors_in(args[0]))
        )
        shaped = name in self.SHAPERS and any(True for _ in tensors_in((*args[1:], *(kwargs or {}).values())))
        if name in self.NAMES or made or shaped:
            text = f"{name}() needs a value on the host, which a graph cannot give ({caller()})"
            self.refused = self.refused or text
            if not self.lenient:
                raise CaptureError(text)
        return func(*args, **(kwargs or {}))


def mode_depths() -> tuple[int, int]:
    """How many modes stand on this thread's two stacks."""
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def unwind(depths: tuple[int, int]) -> None:
    """Take off what an exception out of nowhere (a signal's) left there."""
    while torch._C._len_torch_dispatch_stack() > depths[0]:
        torch._C._pop_torch_dispatch_stack(None)
    while torch._C._len_torch_function_stack() > depths[1]:
        torch._C._pop_torch_function_stack()


@functools.cache
def prime() -> None:
    """Let torch load what its first dispatch mode loads, before a capture would pay for it and be held by it."""
    depths = mode_depths()
    try:
        with Watch([], torch.device("cpu")):
            torch.zeros(1).add_(1)
    finally:
        unwind(depths)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor and the bytes of its memory."""
    return tensor.data_ptr(), tensor.untyped_storage().nbytes()


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


CHECK = 64
"""Calls of one route between two looks at all of its weights and at the attributes of modules."""


class Pointers:
    """The addresses of watched tensors, to find storage that was replaced under a living tensor (``.data =``)."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._known = [(weakref.ref(tensor), tensor.data_ptr()) for tensor in tensors]
        self._refs, self._addresses = [ref for ref, _ in self._known], [address for _, address in self._known]
        self._alike = compile_guard(tuple(tensors), {})
        self._layouts = [(tensor.shape, tensor.stride()) for tensor in tensors]
        self._plain = [weakref.ref(tensor) for tensor in tensors if not tensor.requires_grad]

    def beat(self) -> Callable[[], tuple[weakref.ref[torch.Tensor], int]] | None:
        """The next tensor and its address, round and round; None where there is none."""
        return itertools.cycle(self._known).__next__ if self._known else None

    def in_autograd(self) -> bool:
        """Whether a tensor requires grad now that did not at the capture."""
        if not torch.is_grad_enabled():
            return False
        return any(tensor is not None and tensor.requires_grad for tensor in (ref() for ref in self._plain))

    def _as_they_were(self, tensors: list[Any]) -> bool:
        """Whether nothing moved, at a fraction of the time that it takes to say what did."""
        try:
            return list(map(torch.Tensor.data_ptr, tensors)) == self._addresses and self._alike(*tensors)
        except TypeError:
            # One of them is gone.
            return False

    def moved(self) -> tuple[int, ...] | None:
        """The shape of a tensor whose storage or layout is another one now, or None."""
        if self._as_they_were([ref() for ref in self._refs]):
            return None
        for (ref, pointer), layout in zip(self._known, self._layouts, strict=True):
            tensor = ref()
            if tensor is not None and (tensor.data_ptr() != pointer or (tensor.shape, tensor.stride()) != layout):
                return tuple(tensor.shape)
        return None
