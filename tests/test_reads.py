"""What a step reads of memory that was there before, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphprobe.tools.reads import reads

CPU = torch.device("cpu")
WEIGHT, CACHE, TABLE = torch.ones(8, 4), torch.zeros(10, 4), torch.ones(100, 4)
X = torch.ones(2, 4)
IDS = torch.tensor([3, 7])


def of(run: Callable[[], Any]) -> int:
    with torch.no_grad():
        return reads(run, CPU).bytes


def test_weights_and_inputs_are_read_once_however_often_they_are_used() -> None:
    assert (8 + 2) * 16 == of(lambda: (X @ WEIGHT.T) + (X @ WEIGHT.T))


def test_what_the_step_made_itself_is_not_read() -> None:
    """Activations stay in the caches of a GPU, or are no floor of any step."""
    assert 2 * 16 == of(lambda: (X + 1) * (X + 2) * (X + 3))


@pytest.mark.parametrize(
    "look", [lambda: torch.nn.functional.embedding(IDS, TABLE), lambda: TABLE[IDS], lambda: TABLE.index_select(0, IDS)]
)
def test_of_a_table_the_rows_that_are_looked_up_are_read(look: Callable[[], Any]) -> None:
    assert 2 * 16 + 2 * 8 == of(look)


def test_a_write_is_no_read_and_what_is_written_can_be_read() -> None:
    """A step stores two rows of the cache, and attends to all of it."""
    assert 2 * 16 + 2 * 8 == of(lambda: CACHE.index_copy_(0, IDS, X))
    assert (10 + 2) * 16 + 2 * 8 == of(lambda: CACHE.index_copy_(0, IDS, X) @ X.T)


def test_of_views_all_bytes_are_read_once() -> None:
    """Layers whose weights are slices of one tensor; parts that overlap; columns."""
    assert 5 * 16 == of(lambda: CACHE[:5].sum())
    assert 7 * 16 == of(lambda: CACHE[:5].sum() + CACHE[3:7].sum())
    assert 10 * 8 == of(lambda: CACHE[:, :2].sum())
    stacked = torch.ones(8, 16, 16)

    def layers() -> torch.Tensor:
        x = torch.ones(1, 16)
        for n in range(8):
            x = x @ stacked[n]
        return x

    assert 8 * 16 * 16 * 4 == of(layers)


def test_an_operator_in_place_reads_what_it_changes_and_one_that_fills_does_not() -> None:
    state = torch.ones(100, 4)
    assert 1600 == of(lambda: state.mul_(0.9))
    assert 0 == of(lambda: state.fill_(1.0))
    assert 1600 == of(lambda: torch.add(state, 1.0, out=torch.zeros(100, 4)))


def test_a_tensor_that_only_lends_its_shape_is_not_read() -> None:
    assert 0 == of(lambda: (torch.zeros_like(TABLE), TABLE.new_empty(3), torch.randn_like(TABLE)))


def test_of_a_bag_the_rows_that_are_put_together_are_read() -> None:
    bag = torch.nn.EmbeddingBag(100, 4, mode="sum")
    assert 3 * 16 + 3 * 8 + 8 == of(lambda: bag(torch.tensor([1, 2, 3]), torch.tensor([0])))


def test_a_key_that_heads_share_is_read_once() -> None:
    """Expanded over the queries of a group and made whole: a copy that the step makes."""
    keys = torch.ones(1, 2, 8, 4)
    assert 2 * 5 * 16 == of(lambda: keys[:, :, :5][:, :, None].expand(1, 2, 4, 5, 4).reshape(1, 8, 5, 4).sum())


def test_memory_of_the_step_is_let_go() -> None:
    """Of fifty results of one size none outlives it, although a later one may have its address."""
    made: list[StorageWeakRef] = []

    def chain() -> None:
        x = torch.ones(1000)
        for _ in range(50):
            x = x + 1
            made.append(StorageWeakRef(x.untyped_storage()))

    found = reads(chain, CPU)
    assert (51, 0) == (found.operators, found.bytes)
    assert all(storage.expired() for storage in made)


def test_an_expanded_tensor_is_read_as_far_as_it_is_there() -> None:
    assert 2 * 16 == of(lambda: X[:, None].expand(2, 50, 4).sum())


def test_operators_are_counted_without_views() -> None:
    with torch.no_grad():
        assert 2 == reads(lambda: (X.view(4, 2) + 1).t().sum(), CPU).operators


def test_what_is_on_another_device_is_not_read_here() -> None:
    there = torch.ones(100, device="meta")
    assert 2 * 16 == of(lambda: (X.sum(), there.sum()))
