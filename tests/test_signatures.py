from __future__ import annotations

import gc
from typing import Any

import torch

from graphprobe.calls import Call, Describer
from graphprobe.options import Options
from graphprobe.plans import MOST, Plans
from graphprobe.signature import Caller
from graphprobe.signatures import WAITING, Signature, Signatures


def forward(x: Any, cache: Any = None, table: Any = None) -> None: ...


DESCRIBER = Describer(Options([2, 4], static="cache", narrow={"table": (1, 0)}), Caller(forward, owned=False))


def call(*args: Any, **kwargs: Any) -> Call:
    made = DESCRIBER.described(args, kwargs)
    made.inputs = DESCRIBER.inputs(made)
    return made


def rows(n: int, width: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(n, width, dtype=dtype)


def never(signature: Signature) -> None:
    raise AssertionError("nothing is to be buried")


def test_calls_that_differ_in_their_batch_size_share_a_signature() -> None:
    """The batch dimension is open, everything else decides: dtype, width, a number, the modes."""
    table = Signatures(64)
    made = table.add(call(rows(2)))
    assert made is table.find(call(rows(4)), never)
    for other in (call(rows(2, 4)), call(rows(2, dtype=torch.float64)), call(rows(2), None, 5), call([rows(2)])):
        assert None is table.find(other, never)
    with torch.inference_mode():
        assert None is table.find(call(rows(2)), never)


def test_a_static_tensor_is_known_by_its_address() -> None:
    """The same memory is the same signature, a tensor elsewhere is another."""
    table, cache = Signatures(64), torch.zeros(8)
    made = table.add(call(rows(2), cache))
    assert made is table.find(call(rows(2), cache[:]), never)
    assert None is table.find(call(rows(2), cache[1:]), never)
    assert None is table.find(call(rows(2), cache.clone()), never)


def test_the_narrowest_signature_that_is_wide_enough() -> None:
    """A narrow input fits every captured width from its own on; the smallest is taken."""
    table = Signatures(64)
    wide, small = table.add(call(rows(2), None, rows(2, 8))), table.add(call(rows(2), None, rows(2, 4)))
    widths = [table.find(call(rows(2), None, rows(2, width)), never) for width in (3, 4, 5, 8, 9)]
    assert [small, small, wide, wide, None] == widths


def test_a_signature_dies_with_the_object_that_it_was_given() -> None:
    """When an object passed by reference is gone, the graphs that read it must not be replayed."""

    class Cache:
        pass

    table, cache = Signatures(64), Cache()
    made = table.add(call(rows(2), cache))
    assert made is table.find(call(rows(2), cache), never)
    gc.collect()
    del cache
    assert not made.life.live


def test_a_dead_signature_is_buried_when_it_is_found() -> None:
    """It is handed to bury, once, and is not found again."""
    table, buried = Signatures(64), []
    made = table.add(call(rows(2)))
    made.life.lose()
    assert [None, None] == [table.find(call(rows(2)), buried.append) for _ in range(2)]
    assert ([made], []) == (buried, list(table))


def test_one_off_signatures_are_bounded() -> None:
    """Beyond a bound the oldest signatures without a graph go; those with a graph stay."""
    table = Signatures(2)
    kept = table.add(call(rows(2)))
    graph: Any = object()
    kept.graphs[2] = graph
    for width in range(10, 60):
        table.add(call(rows(2, width)))
    assert 2 * WAITING + 2 >= len(list(table))
    assert kept is table.find(call(rows(2)), never)
    assert (1, False, True, False) == (table.graphs, table.full, 2 in table.buckets, 4 in table.buckets)
    kept.graphs[4] = graph
    assert table.full


def test_a_plan_belongs_to_a_structure_and_a_spelling() -> None:
    """The same spelling of another structure is another plan; a plan that was made is found again."""
    plans, x = Plans(), rows(2)
    made = plans.plan(call(x), DESCRIBER)
    assert made is plans.plan(call(rows(4)), DESCRIBER)
    assert made is not plans.plan(call(x, table=None), DESCRIBER)
    assert made is not plans.plan(call([x]), DESCRIBER)
    assert 2 == made.size((x,))
    assert [None, None] == [made.size((3,)), made.size(())]


def test_forgetting_is_a_new_generation() -> None:
    """After forget nothing is served from a look-up, and decisions made before can be told from later ones."""
    plans = Plans()
    made = plans.plan(call(rows(2)), DESCRIBER)
    plans.hot[1] = made
    plans.forget()
    assert (1, {}) == (plans.generation, plans.hot)
    assert made is plans.plan(call(rows(2)), DESCRIBER)
    plans.clear()
    assert made is not plans.plan(call(rows(2)), DESCRIBER)


def test_structures_are_bounded() -> None:
    """A constant that never repeats does not fill the table: beyond the bound a plan is made and not kept."""
    plans = Plans()
    plans._structures = dict.fromkeys(range(MOST), plans.plan(call(rows(2)), DESCRIBER))
    plans.plan(call(rows(2), None, 12345), DESCRIBER)
    assert MOST == len(plans._structures)
