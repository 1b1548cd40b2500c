"""Reports about data-parallel ranks that choose their graphs apart, on ranks that are simulated in one process."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphprobe.errors import ConfigError
from graphprobe.metrics import forward_samples
from graphprobe.snapshot import Row
from tests.helpers import recorded

pytestmark = pytest.mark.usefixtures("own_forwards", "both_modes")


def rows(n: int) -> torch.Tensor:
    return torch.randn(n, 3)


def make_inputs(n: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    return (rows(n),), {}


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def as_function(**options: Any) -> Any:
    return recorded(lambda x: x * 2, **options)


def as_method(**options: Any) -> Any:
    class Engine:
        @recorded(**options)
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    return Engine().step


class Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


kept: list[torch.nn.Module] = []


def as_instance(**options: Any) -> Any:
    # A module's forward does not keep the module alive.
    kept[:] = [*kept[-3:], recorded(Doubling().eval(), **options)]
    return kept[-1].forward


def as_class(**options: Any) -> Any:
    graphed = recorded(type("Own", (Doubling,), {"forward": Doubling.forward}), **options)
    return graphed().eval().forward


class Ranks:
    """Ranks that vote on each step: the largest local size, or None where one of them cannot."""

    def __init__(self, count: int = 2, make: Callable[..., Any] = as_function, **options: Any) -> None:
        self.sizes: list[int] = []
        self.able = True
        self.asked = [0] * count
        self.forwards = [make(agree=functools.partial(self.vote, n), name=f"rank {n}", **options) for n in range(count)]

    def vote(self, rank: int, size: int) -> int | None:
        self.asked[rank] += 1
        return max([size, *self.sizes]) if self.able else None

    def step(self, *sizes: int) -> list[str]:
        """The path of each rank, ``graph`` or the reason; each result is checked against eager."""
        self.sizes = list(sizes)
        before = [forward.snapshot() for forward in self.forwards]
        for forward, size in zip(self.forwards, sizes, strict=True):
            x = rows(size)
            assert torch.equal(double(x), forward(x))
        windows = [forward.snapshot() - old for forward, old in zip(self.forwards, before, strict=True)]
        return [str(row.reason or f"graph {row.bucket}") for window in windows for row in window.rows]

    def warmup(self) -> Ranks:
        for forward in self.forwards:
            self.sizes = []
            forward.warmup(make_inputs)
        return self


@pytest.mark.parametrize("make", [as_function, as_method, as_instance, as_class])
def test_ranks_replay_the_agreed_bucket(make: Callable[..., Any]) -> None:
    """Ranks with 3 and 5 rows both replay 8, and each counts the size it saw (H55, vllm-project/vllm#25906)."""
    ranks = Ranks(make=make, buckets=[1, 2, 4, 8], pad="repeat").warmup()
    assert ["graph 8", "graph 8"] == ranks.step(3, 5)
    assert (Row(3, "graph", 8, None, 1, 5, "decode", "full"),) == ranks.forwards[0].snapshot().rows
    assert (Row(5, "graph", 8, None, 1, 3, "decode", "full"),) == ranks.forwards[1].snapshot().rows


def test_a_local_count_never_chooses() -> None:
    """A rank whose rows fit a small bucket exactly takes the large one all the same (H55, sgl-project/sglang#6092)."""
    ranks = Ranks(buckets=[1, 2, 4, 8], pad="repeat").warmup()
    for sizes, bucket in (((4, 5), 8), ((1, 8), 8), ((2, 3), 4), ((2, 2), 2), ((1, 2), 2), ((8, 1), 8)):
        assert [f"graph {bucket}"] * 2 == ranks.step(*sizes)


@pytest.mark.parametrize("pad", ["repeat", "zeros", {"x": 7}])
def test_a_hook_may_name_a_bucket_of_its_own(pad: Any) -> None:
    """What agree returns is taken as it is, whatever larger bucket the ranks settle on.

    (H55, vllm-project/vllm#25906)
    """
    forward = recorded(double, buckets=[4, 8], pad=pad, agree=lambda n: 8, name="hook")
    forward.warmup(make_inputs)
    for n in (1, 3, 4, 8):
        x = rows(n)
        assert torch.equal(double(x), forward(x))
    assert {8} == {row.bucket for row in forward.snapshot().rows}
    assert [1, 3, 4, 8] == [row.batch_size for row in forward.snapshot().rows]


def test_series_of_agreed_calls_bear_the_local_size() -> None:
    """The exported labels are the size that was seen and the bucket that was replayed.

    (H55, vllm-project/vllm#25906)
    """
    ranks = Ranks(buckets=[4, 8], pad="repeat").warmup()
    ranks.step(3, 5)
    for forward, size in zip(ranks.forwards, ("3", "5"), strict=True):
        found, _ = forward_samples(forward.snapshot())
        hits = [s.labels for s in found if s.metric.name == "graphprobe_graph_calls_total" and s.value]
        assert [(size, "8")] == [(labels["batch_size"], labels["bucket"]) for labels in hits]


def test_one_rank_that_cannot_keeps_all_eager() -> None:
    """A vote against a graph makes every rank eager with rank_vote, for this step alone.

    (H55, vllm-project/vllm#25906)
    """
    ranks = Ranks(buckets=[4, 8], pad="repeat").warmup()
    assert ["graph 8"] * 2 == ranks.step(3, 5)
    ranks.able = False
    assert ["rank_vote"] * 2 == ranks.step(3, 5)
    assert ["rank_vote"] * 2 == ranks.step(8, 8)
    ranks.able = True
    assert ["graph 8"] * 2 == ranks.step(3, 5)
    # A miss by vote is a miss: the speed is lost all the same.
    assert 0.5 == ranks.forwards[0].snapshot().hit_rate


def test_an_agreed_size_above_the_largest_bucket_is_eager_everywhere() -> None:
    """The rank with few rows goes eager, too, and says why (H55, sgl-project/sglang#6092)."""
    ranks = Ranks(buckets=[4, 8], pad="repeat").warmup()
    assert ["batch_too_large"] * 2 == ranks.step(3, 9)
    assert [3, 9] == [forward.snapshot().rows[0].batch_size for forward in ranks.forwards]


def test_lazy_ranks_warm_up_and_capture_in_the_same_steps() -> None:
    """Without warmup() the ranks are eager, capture and replay together (H55, vllm-project/vllm#25906)."""
    ranks = Ranks(buckets=[2, 4, 8], pad="repeat")
    seen = [ranks.step(*sizes) for sizes in ((3, 5), (3, 5), (4, 8), (1, 7), (2, 4), (1, 3), (2, 2), (1, 2))]
    assert all(len(set(paths)) == 1 for paths in seen), seen
    assert ["graph 8"] * 2 == seen[1]


@pytest.mark.parametrize("warm", [True, False], ids=["warmup", "lazy"])
def test_ranks_take_one_path_although_their_sizes_were_never_equal(warm: bool) -> None:
    """A rank that meets its first padded call replays where the others do: one path per step, or collectives hang.

    (H55, vllm-project/vllm#25906)
    """
    ranks = Ranks(buckets=[8], pad="repeat")
    if warm:
        ranks.warmup()
    seen = [ranks.step(*sizes) for sizes in ((8, 3), (8, 3), (8, 5), (3, 8), (2, 8), (8, 8))]
    assert all(len(set(paths)) == 1 for paths in seen), seen


def test_an_idle_rank_is_asked_like_the_others() -> None:
    """A rank without rows answers eagerly, empty_batch, but takes part in the vote, so that nobody waits for it.

    (H55, vllm-project/vllm#25906)
    """
    ranks = Ranks(buckets=[4, 8], pad="repeat").warmup()
    asked = list(ranks.asked)
    for _ in range(3):
        assert ["empty_batch", "graph 4"] == ranks.step(0, 3)
    assert [n + 3 for n in asked] == ranks.asked
    assert None is ranks.forwards[0].snapshot().hit_rate


@pytest.mark.parametrize(
    "hinder",
    [
        lambda forward: setattr(forward, "enabled", False),
        lambda forward: forward.reset(),
        lambda forward: forward(rows(2).to(torch.float64)),
    ],
    ids=["disabled", "reset", "signature"],
)
def test_a_rank_is_asked_once_per_call_whatever_hinders_it(hinder: Callable[[Any], Any]) -> None:
    """A collective needs every rank equally often: also one that runs eagerly for a cause of its own.

    (H55, sgl-project/sglang#6092)
    """
    ranks = Ranks(buckets=[4, 8], pad="repeat").warmup()
    hinder(ranks.forwards[0])
    asked = list(ranks.asked)
    for steps in range(1, 5):
        ranks.step(3, 5)
        assert [n + steps for n in asked] == ranks.asked


def test_warm_up_asks_every_rank_equally_often() -> None:
    """warmup() in lock-step is safe: the same votes in the same order on every rank.

    (H55, vllm-project/vllm#25906)
    """
    asked: dict[int, list[int]] = collections.defaultdict(list)

    def vote(rank: int, size: int) -> int:
        asked[rank].append(size)
        return size

    for rank in range(2):
        forward = recorded(double, buckets=[1, 4], agree=functools.partial(vote, rank), name=f"lock-step {rank}")
        forward.warmup(make_inputs)
    assert asked[0] == asked[1]
    assert {1, 4} == set(asked[0])


def test_an_exception_of_the_vote_reaches_the_caller() -> None:
    """A collective that times out is the engine's to see; the call is not served behind its back.

    (H55, vllm-project/vllm#25906)
    """

    def vote(size: int) -> int:
        if not works[0]:
            raise TimeoutError("rank 1 did not answer")
        return size

    works = [True]
    forward = recorded(double, buckets=[2], agree=vote, name="time-out")
    for _ in range(3):
        forward(rows(2))
    works[0] = False
    with pytest.raises(TimeoutError, match="rank 1"):
        forward(rows(2))
    works[0] = True
    forward(rows(2))
    assert (3, 1) == (forward.snapshot().graph_calls, forward.snapshot().eager_calls)


@pytest.mark.parametrize("answer", [2, -1, True, "8", 8.5, torch.ones(2)], ids=str)
def test_an_answer_that_is_no_size_is_refused(answer: Any) -> None:
    """Fewer rows than a rank has, and what is no whole number, are named to the caller.

    (H55, vllm-project/vllm#25906)
    """
    forward = recorded(double, buckets=[4, 8], pad="repeat", agree=lambda n: answer, name="answer")
    with pytest.raises(ConfigError, match=r"agree\(3\)"):
        forward(rows(3))


def test_an_answer_in_requests() -> None:
    """With tokens per request the vote is in requests, as the buckets are (H55, sgl-project/sglang#6092)."""
    asked: list[int] = []

    def vote(size: int) -> int:
        asked.append(size)
        return 4

    options: dict[str, Any] = {"unit": "requests", "tokens_per_request": 2}
    forward = recorded(double, buckets=[2, 4], pad="repeat", agree=vote, name="requests", **options)
    for n in (8, 4, 6, 2, 6):
        x = rows(n)
        assert torch.equal(double(x), forward(x))
    assert [4, 2, 3, 1, 3] == asked
    assert {4} == {row.bucket for row in forward.snapshot().rows if row.path == "graph"}
    assert {1, 3} <= {row.batch_size for row in forward.snapshot().rows if row.path == "graph"}
