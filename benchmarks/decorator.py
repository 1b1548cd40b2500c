"""What the decorator adds on the CPU recorder, beside a loop written by hand over the same work.

    python benchmarks/decorator.py [--json FILE] [--rounds N]

The loop by hand replays the very tape that graphprobe captured and clones the very result, into which each replay
writes; in front of that it makes the copies that graphprobe makes, one `copy_` for a single input, one
`torch._foreach_copy_` per dtype for several. A `copy_` per input, as engines write it, is shown beside it. Host
microseconds per call; `over` is the difference of the two times, timing and checks of every 64th call included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from timeit import Timer
from types import SimpleNamespace
from typing import Any

import torch
from measuring import head, interleaved, low, options, timer, write
from tapes import captures

import graphprobe

BATCH, WIDTH, BLOCKS = 4, 8, 4

Call = Callable[..., torch.Tensor]
Inputs = tuple[torch.Tensor, ...]


class Layer(torch.nn.Module):
    """One input, two Linear(8)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 8] -> [batch, 8]."""
        return self.layers(x)

    @staticmethod
    def inputs() -> Inputs:
        """One call's."""
        return (torch.randn(BATCH, WIDTH),)


class Decode(torch.nn.Module):
    """Five inputs of two dtypes, those of a decode step; little work."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(64, WIDTH)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
    ) -> torch.Tensor:
        """ids, positions, slots [batch] int64; lengths [batch], table [batch, 4] int32 -> [batch, 8]."""
        return self.tokens(ids + positions + slots) * (lengths + table.sum(1))[:, None]

    @staticmethod
    def inputs() -> Inputs:
        """One call's."""
        ids = torch.arange(BATCH)
        return ids, ids + 1, ids + 2, torch.ones(BATCH, dtype=torch.int32), torch.ones(BATCH, BLOCKS, dtype=torch.int32)


def one_by_hand(tape: Any, out: torch.Tensor, like: Inputs, clone: bool) -> dict[str, Call]:
    """One input: copy, replay, hand out."""
    (buffer,) = (t.clone() for t in like)

    def same(x: torch.Tensor) -> torch.Tensor:
        buffer.copy_(x)
        tape.replay()
        return out.clone() if clone else out

    return {"same": same, "copies": same}


def five_by_hand(tape: Any, out: torch.Tensor, like: Inputs, clone: bool) -> dict[str, Call]:
    """Five inputs: with one launch per dtype, and with a `copy_` each."""
    buffers = [t.clone() for t in like]
    longs, ints = buffers[:3], buffers[3:]
    b_ids, b_positions, b_slots, b_lengths, b_table = buffers

    def same(
        ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        torch._foreach_copy_(longs, [ids, positions, slots])
        torch._foreach_copy_(ints, [lengths, table])
        tape.replay()
        return out.clone() if clone else out

    def copies(
        ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        b_ids.copy_(ids)
        b_positions.copy_(positions)
        b_slots.copy_(slots)
        b_lengths.copy_(lengths)
        b_table.copy_(table)
        tape.replay()
        return out.clone() if clone else out

    return {"same": same, "copies": copies}


def captured(form: str, module: torch.nn.Module, **given: Any) -> tuple[str, Any]:
    """The statement that calls ``target``, and the target: a captured forward of one of the forms."""
    if form == "module":
        return "target.forward(*inputs)", graphprobe.capture(module, **given)
    if form == "function":
        return "target(*inputs)", graphprobe.capture(lambda *inputs: module(*inputs), **given)

    class Engine:
        @graphprobe.capture(**given)
        def decode(self, *inputs: torch.Tensor) -> torch.Tensor:
            return module(*inputs)

    return "target.decode(*inputs)", Engine()


WORKS: dict[int, tuple[type[Any], Callable[..., dict[str, Call]]]] = {
    1: (Layer, one_by_hand),
    5: (Decode, five_by_hand),
}
FORMS = ("function", "module", "method")


def group(count: int, outputs: str, form: str) -> dict[str, Timer]:
    """One captured forward and the two loops over its tape, each called as the captured one is."""
    kind, by_hand = WORKS[count]
    inputs = kind.inputs()
    name = f"{form}/{count}/{outputs}"
    with captures() as made:
        call, target = captured(form, kind().eval(), buckets=[BATCH], outputs=outputs, backend="recorder", name=name)
        ours = timer(call, target=target, inputs=inputs)
        ours.timeit(3)
    ((tape, out),) = made
    loops = by_hand(tape, out, inputs, outputs == "clone")
    holders = {n: SimpleNamespace(forward=loop, decode=loop) if "." in call else loop for n, loop in loops.items()}
    return {"ours": ours} | {n: timer(call, target=holder, inputs=inputs) for n, holder in holders.items()}


def rows(rounds: int) -> list[dict[str, Any]]:
    """Microseconds of each captured forward and its loops, and what it takes over the same work by hand."""
    groups = list(itertools.product(WORKS, ("alias", "clone"), FORMS))
    variants = {(of, name): each for of in groups for name, each in group(*of).items()}
    spent = {key: low(values) * 1e6 for key, values in interleaved(variants, rounds).items()}
    return [
        dict(zip(("inputs", "outputs", "form"), of, strict=True))
        | {f"{name}_us": spent[of, name] for name in ("copies", "same", "ours")}
        | {"over_us": spent[of, "ours"] - spent[of, "same"]}
        for of in groups
    ]


def main() -> None:
    """Measure and print."""
    given = options(__doc__, 150)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = rows(given.rounds)
    print("inputs outputs  form         a copy_ each   same work   graphprobe    over   us")
    for r in found:
        print(
            f"{r['inputs']:6d} {r['outputs']:8s} {r['form']:10s} {r['copies_us']:14.2f} {r['same_us']:11.2f} "
            f"{r['ours_us']:12.2f} {r['over_us']:+7.2f}"
        )
    write(head("torch") | {"rows": found}, given.json)


if __name__ == "__main__":
    main()
