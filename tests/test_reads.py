"""What a step reads of memory that was there before, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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


def test_of_a_view_its_part_is_read() -> None:
    """Where several parts are, the largest one: a lower bound."""
    assert 5 * 16 == of(lambda: CACHE[:5].sum())
    assert 7 * 16 == of(lambda: CACHE[:5].sum() + CACHE[3:].sum())


def test_an_expanded_tensor_is_read_as_far_as_it_is_there() -> None:
    assert 2 * 16 == of(lambda: X[:, None].expand(2, 50, 4).sum())


def test_operators_are_counted_without_views() -> None:
    with torch.no_grad():
        assert 2 == reads(lambda: (X.view(4, 2) + 1).t().sum(), CPU).operators


def test_what_is_on_another_device_is_not_read_here() -> None:
    there = torch.ones(100, device="meta")
    assert 2 * 16 == of(lambda: (X.sum(), there.sum()))
