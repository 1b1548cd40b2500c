"""The recorder: a graph for the CPU, made of the operators that one run dispatched.

It has what makes a CUDA graph dangerous, so that code can be tested without a GPU: outputs that the next replay
overwrites, fixed shapes, Python values frozen at capture, replaced storage that is not seen, no result for the
host. It is no model of a graph's speed.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphprobe.backends.base import Backend, capture_state, explained
from graphprobe.errors import CaptureError
from graphprobe.operators import caller, composed, draws, tensors_in, writes_of
from graphprobe.timers import ClockTimer, Timer
from graphprobe.watch import HostReads, alias, storage

Step = Callable[[], None]


class Tape:
    """The operators of one run, bound to the run's own tensors."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.views: list[torch.Tensor] = []
        self.made: list[torch.Tensor] = []

    def replay(self) -> None:
        """Run every step; the results land in the tensors of the recording run."""
        for step in self.steps:
            step()

    def reset(self) -> None:
        """Drop the steps and their tensors."""
        self.steps, self.views, self.made = [], [], []


class _Saved:
    """What a tensor held before the run, and which elements the run has changed; the rest is other threads'."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.before = tensor.clone()
        self.changed = torch.zeros(tensor.shape, dtype=torch.bool)

    def note(self) -> None:
        """Look at what an operator has just changed."""
        self.changed |= self.tensor != self.before

    def restore(self) -> None:
        """Put it back."""
        # Elements that share memory cannot have been written; memory that was freed since cannot be written any more.
        with contextlib.suppress(RuntimeError):
            if self.tensor.untyped_storage().nbytes() >= self.before.untyped_storage().nbytes():
                self.tensor.copy_(torch.where(self.changed, self.before, self.tensor))


class _Recording(TorchDispatchMode):
    """Runs each operator and writes it on a tape. ``undo`` holds what the run changed outside."""

    def __init__(self, tape: Tape, generators: tuple[torch.Generator, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.generators = generators
        self.refused = ""
        self.drew = False
        self.undo: dict[Any, _Saved] = {}
        # What the forward sees, by its id, with the twin that the tape has of it; and back, by the twin's id.
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            self._refuse(f"{func.name()} runs Python of its own, which a graph cannot ({caller()})")
        own = any(isinstance(value, torch.Generator) for value in (*args, *(kwargs or {}).values()))
        self.drew = self.drew or (not own and draws(func, args, kwargs or {}))
        if composed(func, "cpu"):
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        self._check(func, (*args, *(kwargs or {}).values()))
        held = self._hold(args)
        named = {name: self._hold(value) for name, value in (kwargs or {}).items()}
        written = list(writes_of(func, held, named))
        saved = [entry for tensor in written if (entry := self._saved(tensor)) is not None]
        result = func(*held, **named)
        for entry in saved:
            entry.note()
        self._record(func, held, named, result, bool(written))
        return self._give(result)

    def _check(self, func: Any, values: tuple[Any, ...]) -> None:
        if torch.Tag.inplace_view in func.tags and func.name() != "aten::detach_":
            self._refuse(f"{func} changes the shape of a tensor in place ({caller()})")
        for value in values:
            if isinstance(value, torch.Generator) and not any(_same(value, g) for g in self.generators):
                self._refuse(f"{func} uses a generator that is not named in generators= ({caller()})")

    def _refuse(self, text: str) -> None:
        self.refused = self.refused or text
        raise CaptureError(text)

    def _saved(self, tensor: torch.Tensor) -> _Saved | None:
        """What a tensor from outside is before it is first written."""
        place = (storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        if storage(tensor) in self._made:
            return None
        if place not in self.undo:
            self.undo[place] = _Saved(tensor)
        return self.undo[place]

    def _hold(self, value: Any) -> Any:
        """``value`` with a twin in place of every tensor: its present memory as a tensor of the tape's own.

        The twin keeps the storage, not the caller's tensor: a tensor whose ``.data`` is replaced later is read at
        its old address, as by a CUDA graph, and its owner can still let go of it.
        """
        if isinstance(value, torch.Tensor):
            known = self._twins.get(id(value))
            # The forward may have given a tensor other memory in between (``.data =``).
            return known[1] if known and storage(known[1]) == storage(value) else self._twin(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._hold(item) for item in value)
        return value

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        twin = alias(tensor)
        self._twins[id(tensor)] = self._seen[id(twin)] = (tensor, twin)
        return twin

    def _give(self, value: Any) -> Any:
        # An in-place operator returns its argument, and the forward may rely on that identity.
        if isinstance(value, torch.Tensor):
            return self._seen.get(id(value), (value, value))[0]
        if isinstance(value, (list, tuple)):
            return type(value)(self._give(item) for item in value)
        return value

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, writes: bool) -> None:
        outs = [out for out in tensors_in(result) if id(out) not in self._seen]
        inputs = {storage(t) for t in tensors_in((args, *kwargs.values()))}
        fresh = [i for i, out in enumerate(outs) if storage(out) not in inputs]
        # What the forward gets to see may be tied to outside tensors by autograd's views; the tape keeps twins.
        twins = [self._twin(out) for out in outs]
        self.tape.views += twins
        self.tape.made += [twins[i] for i in fresh]
        self._made.update(storage(outs[i]) for i in fresh)
        if fresh or writes:
            self.tape.steps.append(_step(func, args, kwargs, twins, fresh))

    def restore(self) -> None:
        """Put back what the recording run changed in place."""
        for saved in reversed(self.undo.values()):
            saved.restore()


def _same(a: torch.Generator, b: torch.Generator) -> bool:
    # An operator gets a wrapper of its own of the generator, so identity says nothing.
    return a is b or torch.equal(a.get_state(), b.get_state())


def _step(func: Any, args: Any, kwargs: dict[str, Any], outs: list[torch.Tensor], fresh: list[int]) -> Step:
    if not fresh:
        return lambda: func(*args, **kwargs)
    if len(outs) == 1:
        out = outs[0]

        def one() -> None:
            out.copy_(func(*args, **kwargs))

        return one

    def several() -> None:
        new = list(tensors_in(func(*args, **kwargs)))
        for i in fresh:
            outs[i].copy_(new[i])

    return several


MARK = 0x67726170
"""A seed that tells whether a forward sets one of its own."""


def _marked(generator: torch.Generator, seed: int) -> torch.Tensor:
    generator.manual_seed(seed)
    return generator.get_state()


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Compiled code runs uncompiled inside: left alone, it would give up compiling for good under our mode."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class RecorderBackend(Backend):
    """Records on the CPU."""

    name = "recorder"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()

    def capture(self, run: Callable[[], Any], generators: tuple[torch.Generator, ...] = ()) -> tuple[Tape, Any]:
        """The tape of ``run()``. In-place changes of the recording run are undone, so the first replay is the run."""
        allowed = (torch.default_generator, *generators)
        tape, states = Tape(), [(g, g.get_state()) for g in allowed]
        recording, reads = _Recording(tape, allowed), HostReads()
        marked = [_marked(generator, MARK + i) for i, generator in enumerate(allowed)]
        try:
            with capture_state(), _uncompiled(), reads, recording:
                result = run()
            if refused := recording.refused or reads.refused:
                # The forward has caught what was raised inside it.
                raise CaptureError(refused)
            if not tape.steps:
                raise CaptureError("the forward runs no operator, so there is nothing to replay")
            seeded = any(g.initial_seed() != MARK + i for i, g in enumerate(allowed))
            if seeded or (recording.drew and torch.equal(torch.default_generator.get_state(), marked[0])):
                raise CaptureError("the forward seeds a generator or puts its state back, which a replay would not")
        except BaseException as error:
            tape.reset()
            if isinstance(error, Exception):
                raise explained(error) from error
            raise
        finally:
            self._undo(recording, states)
        self._tapes.add(tape)
        return tape, result

    def _undo(self, recording: _Recording, states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
        recording.restore()
        for generator, state in states:
            generator.set_state(state)

    def pool_bytes(self) -> int | None:
        """Bytes of the tensors that the recorded operators made."""
        sizes = {storage(t): t.untyped_storage().nbytes() for tape in self._tapes for t in tape.made}
        return sum(sizes.values())

    def release(self) -> None:
        """Forget the tapes."""
        self._tapes = weakref.WeakSet()

    def timer(self) -> Timer:
        """A wall clock: the CPU runs what it is asked at once."""
        return ClockTimer()
