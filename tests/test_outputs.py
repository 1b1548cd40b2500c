from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from graphprobe.errors import CaptureError
from graphprobe.outputs import Outputs, Shapes, described

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Reply:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    note: str = ""


class Cache:
    pass


def inside(tensor: torch.Tensor) -> bool:
    return False


def shapes(*seen: tuple[int, Any]) -> Shapes:
    found = Shapes()
    for rows, result in seen:
        found.observe(rows, *described(result))
    return found


def test_one_size_is_not_enough() -> None:
    """What follows the batch is known from two sizes; the same size again says nothing new."""
    found = shapes((2, torch.zeros(2, 4)), (2, torch.zeros(2, 4)))
    assert not found.known
    found.observe(3, *described(torch.zeros(3, 4)))
    assert found.known


class Meeting:
    """The tree of a result that two threads look at together, where they can be there at the same time."""

    def __init__(self, *results: Any) -> None:
        self.trees = [described(result) for result in results]
        self.barrier = threading.Barrier(len(results))

    @property
    def key(self) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait(0.5)
        return self.trees[0][0].key


def test_two_threads_that_see_a_second_size_at_once_note_one() -> None:
    """A third size noted beside it would be held against nothing, and what follows the batch could not be told."""
    found = shapes((2, torch.zeros(2, 4)))
    meeting: Any = Meeting(torch.zeros(3, 4), torch.zeros(5, 4))
    threads = [
        threading.Thread(target=found.observe, args=(rows, meeting, tree[1]))
        for rows, tree in zip((3, 5), meeting.trees, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [0] == found.dims()


def test_no_rows_teach_nothing() -> None:
    """An empty batch is no observation."""
    assert not shapes((0, torch.zeros(0, 4)), (2, torch.zeros(2, 4))).known


@pytest.mark.parametrize(
    ("two", "three", "expected"),
    [
        ((2, 4), (3, 4), [0]),
        ((4, 2), (4, 3), [1]),
        ((4, 4), (4, 4), [None]),
        ((8, 5), (12, 5), None),
        ((), (), [None]),
        ((2, 2), (3, 3), None),
        ((3, 4), (4, 4), None),
        ((3,), (4,), None),
        ((2, 4), (2, 4, 1), None),
    ],
)
def test_following(two: tuple[int, ...], three: tuple[int, ...], expected: list[int | None] | None) -> None:
    """A dimension follows where it is the rows at both sizes; anything else is unclear, never guessed."""
    assert expected == shapes((2, torch.zeros(two)), (3, torch.zeros(three))).dims()


def test_an_output_may_have_a_row_per_request() -> None:
    """With four rows per request, one output row per request follows, too."""
    found = shapes((4, (torch.zeros(4, 5), torch.zeros(1, 5))), (8, (torch.zeros(8, 5), torch.zeros(2, 5))))
    assert [[0, 0], None] == [found.dims(4), found.dims(1)]


def test_results_of_two_structures_are_unclear() -> None:
    """A forward whose result has another form at another size cannot be cut."""
    x = torch.zeros(2, 4)
    assert None is shapes((2, (x,)), (3, [torch.zeros(3, 4)])).dims()
    assert None is shapes((2, (x, 2)), (3, (torch.zeros(3, 4), 3))).dims()


@pytest.mark.parametrize(
    "result",
    [
        torch.arange(8.0).reshape(4, 2),
        (torch.ones(4, 2), torch.zeros(4)),
        [torch.ones(4, 2), 3, None],
        {"logits": torch.ones(4, 2), "rest": {"hidden": [torch.zeros(4)]}, "n": 1},
        Pair(torch.ones(4, 2), "text"),
        Reply(torch.ones(4, 2), None, "ok"),
        collections.OrderedDict(a=torch.ones(4, 2), b=torch.zeros(4)),
    ],
)
def test_a_result_keeps_its_form(result: Any) -> None:
    """Type, names, constants and values are those of the forward's result; the tensors are copies."""
    made = Outputs(result, 4, inside).maker(4, None, aliased=False)()
    node, tensors = described(result)
    other, copies = described(made)
    assert node.key == other.key
    assert [t.tolist() for t in tensors] == [t.tolist() for t in copies]
    assert not {id(t) for t in tensors} & {id(t) for t in copies}
    assert not {t.data_ptr() for t in tensors} & {t.data_ptr() for t in copies}


def test_a_result_is_cut_to_the_rows_of_the_caller() -> None:
    """Each tensor along its own dimension; one that does not follow is whole."""
    result = (torch.arange(8.0).reshape(4, 2), torch.ones(3, 4), torch.ones(5))
    made = Outputs(result, 4, inside).maker(3, [0, 1, None], aliased=False)()
    assert [(3, 2), (3, 3), (5,)] == [tuple(t.shape) for t in made]
    assert [[0, 1], [2, 3], [4, 5]] == made[0].tolist()


def test_alias_hands_out_the_memory_itself() -> None:
    """With alias a result is the graph's memory, with clone it survives what comes next."""
    x = torch.zeros(4)
    outputs = Outputs(x, 4, inside)
    aliased, cloned = outputs.maker(4, None, aliased=True)(), outputs.maker(4, None, aliased=False)()
    x.fill_(5)
    assert (20.0, 0.0) == (float(aliased.sum()), float(cloned.sum()))


def test_model_outputs() -> None:
    """transformers' ModelOutput comes back as one, readable by name, index and key."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    result = outputs.CausalLMOutputWithPast(logits=torch.ones(4, 2), past_key_values=None)
    made = Outputs(result, 4, inside).maker(2, [0], aliased=False)()
    assert type(result) is type(made)
    assert [(2, 2)] * 3 == [tuple(t.shape) for t in (made.logits, made[0], made["logits"])]
    assert ["logits"] == list(made)


def test_what_cannot_be_handed_out_is_refused() -> None:
    """An object that a replay could not renew is named with its path and type."""
    with pytest.raises(CaptureError, match=r"output\[1\] is a Cache"):
        Outputs((torch.ones(2), Cache()), 2, inside)


def test_the_caller_gets_its_own_object_back() -> None:
    """An object passed by reference may be part of the result, and the graph does not keep it alive."""
    cache = Cache()
    make = Outputs((torch.ones(2), cache), 2, inside, frozenset({id(cache)})).maker(2, None, aliased=False)
    assert cache is make()[1]
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert None is gone()
    finally:
        gc.enable()


def test_a_tensor_from_outside_is_handed_out_as_it_is() -> None:
    """A cache that the forward returns is the engine's own memory, not a copy of it."""
    cache, x = torch.zeros(4), torch.ones(4)
    made = Outputs((x, cache), 4, lambda t: t is cache).maker(4, None, aliased=False)()
    assert cache.data_ptr() == made[1].data_ptr()
    assert x.data_ptr() != made[0].data_ptr()


def test_autograd_is_seen() -> None:
    """A result that takes part in autograd says so."""
    w = torch.ones(2, requires_grad=True)
    assert Outputs((torch.ones(2), w * 2), 2, inside).in_autograd
    assert not Outputs((torch.ones(2), w.detach()), 2, inside).in_autograd
