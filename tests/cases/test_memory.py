"""Reports about memory: graphs that pile up with the input, and buffers sized by the largest bucket."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import graphprobe
from graphprobe.metrics import forward_samples
from graphprobe.signatures import Signature
from tests.helpers import counts, recorded

pytestmark = pytest.mark.usefixtures("own_forwards")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def known_signatures() -> int:
    gc.collect()
    return sum(type(thing) is Signature for thing in gc.get_objects())


# -- every new input makes one more graph ----------------------------------------------------------------------------


def scaled(x: torch.Tensor, by: Any = 2) -> torch.Tensor:
    return x * (by["by"] if isinstance(by, dict) else len(by) if isinstance(by, str) else by)


CHANGING: dict[str, Any] = {
    "length": lambda n: (torch.randn(2, n + 1),),
    "step counter": lambda n: (torch.randn(2, 3), n),
    "fraction": lambda n: (torch.randn(2, 3), n / 7),
    "text": lambda n: (torch.randn(2, 3), "x" * n),
    "nested": lambda n: (torch.randn(2, 3), {"by": n}),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_a_thousand_kinds_of_calls_make_max_graphs_graphs(kind: str) -> None:
    """A length that never repeats makes no more than max_graphs graphs; the rest is eager, graph_limit, and right.

    (H40, pytorch/pytorch#128424)
    """
    before = known_signatures()
    forward = recorded(scaled, buckets=[2], max_graphs=8, name=f"thousand {kind}")
    for number in range(1000):
        args = CHANGING[kind](number)
        for _ in range(2):
            assert torch.equal(scaled(*args), forward(*args))
    assert {"warmup": 8, "graph": 8, "graph_limit": 1984} == counts(forward)
    assert {2: 8} == forward.snapshot().captures
    assert before + 8 >= known_signatures()


@pytest.mark.parametrize("kind", CHANGING)
def test_kinds_that_come_once_are_not_kept(kind: str) -> None:
    """A thousand signatures that come once make no graph, and what is remembered of them is bounded.

    (H40, pytorch/pytorch#188150)
    """
    before = known_signatures()
    forward = recorded(scaled, buckets=[2], max_graphs=8, name=f"once {kind}")
    for number in range(1000):
        args = CHANGING[kind](number)
        assert torch.equal(scaled(*args), forward(*args))
    assert {} == forward.snapshot().captures
    assert {"warmup", "graph_limit"} == set(counts(forward))
    assert before + 8 * 5 >= known_signatures()
    assert 256 >= len(forward.snapshot().causes)


def test_max_graphs_is_of_all_buckets_together() -> None:
    """Two buckets and one limit: the third kind of call finds it used up (H40, pytorch/pytorch#128424)."""
    forward = recorded(scaled, buckets=[1, 2], max_graphs=3, name="together")
    for width in (3, 4, 5):
        for rows in (1, 1, 2, 2):
            forward(torch.randn(rows, width))
    assert 3 == sum(forward.snapshot().captures.values())
    assert {"warmup": 3, "graph": 3, "graph_limit": 6} == counts(forward)


def test_graphs_that_were_made_are_served_beyond_the_limit() -> None:
    """The limit is on making graphs: those that exist go on replaying (H40, pytorch/pytorch#128424)."""
    forward = recorded(scaled, buckets=[2], max_graphs=2, name="beyond")
    for width in (3, 4, 5, 6, 3, 4):
        for _ in range(3):
            x = torch.randn(2, width)
            assert torch.equal(scaled(x), forward(x))
    assert {"warmup": 2, "graph": 4 + 6, "graph_limit": 6} == counts(forward)


def test_steady_calls_are_captured_among_changing_ones() -> None:
    """Between lengths that come once each, the one that stays gets its graph (H40, pytorch/pytorch#128424)."""
    forward = recorded(scaled, buckets=[2], max_graphs=2, name="steady")
    for width in range(2, 200):
        forward(torch.randn(2, width))
        forward(torch.randn(2, 1))
    assert {2: 1} == forward.snapshot().captures
    assert 197 == counts(forward)["graph"]


def test_each_instance_has_the_limit_to_itself_and_reset_gives_it_back() -> None:
    """The limit is of one wrapper: a second instance has its own, and reset() starts afresh.

    (H40, pytorch/pytorch#128424)
    """

    class Engine:
        @recorded(buckets=[2], max_graphs=2, name="limit of an instance")
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    one, other = Engine(), Engine()
    for engine, total in ((one, 2), (other, 4), (one, 4)):
        for width in (3, 4, 5):
            engine.step(torch.randn(2, width))
            engine.step(torch.randn(2, width))
        assert {2: total} == engine.step.snapshot().captures
    one.step.reset()
    one.step(torch.randn(2, 5))
    one.step(torch.randn(2, 5))
    assert {2: 5} == one.step.snapshot().captures


# -- buffers sized by the largest bucket, not by use -----------------------------------------------------------------


def wide(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x * 2], dim=1)


def bytes_alone(bucket: int) -> int:
    """What a graph of this one bucket holds."""
    forward = recorded(wide, buckets=[bucket], name=f"alone {bucket}")
    for _ in range(2):
        forward(torch.randn(bucket, 16))
    pool = forward.snapshot().pool_bytes
    assert pool
    return pool


def test_buckets_that_are_not_used_hold_no_memory() -> None:
    """In lazy mode a small run holds the bytes of the bucket it uses, not those of the largest.

    (H41, InternLM/lmdeploy#2603)
    """
    forward = recorded(wide, buckets=[1, 2, 256], pad="repeat", name="small")
    assert None is forward.snapshot().pool_bytes
    for _ in range(10):
        forward(torch.randn(1, 16))
    shot = forward.snapshot()
    assert bytes_alone(1) == shot.pool_bytes == shot.pool_growth[1]
    assert ({1: 1}, {1: True, 2: False, 256: False}) == (shot.captures, shot.live)


def test_warm_up_shows_what_each_bucket_holds_and_which_was_never_hit() -> None:
    """Captured ahead, the largest bucket's bytes are in the account, and that it served nothing can be read.

    The report wants a warning; the design leaves that to the advisor, which reads these numbers.
    (H41, InternLM/lmdeploy#2603)
    """
    forward = recorded(wide, buckets=[1, 2, 256], pad="repeat", name="eager capture")
    report = forward.warmup(lambda n: ((torch.randn(n, 16),), {}))
    for _ in range(10):
        forward(torch.randn(1, 16))
    shot = forward.snapshot()
    assert [256, 2, 1] == [entry.bucket for entry in report]
    assert {entry.bucket: entry.bytes for entry in report} == dict(shot.pool_growth)
    assert bytes_alone(256) == shot.pool_growth[256]
    assert shot.pool_bytes == sum(shot.pool_growth.values())
    assert {2, 256} == set(shot.captures) - {row.bucket for row in shot.rows}


def test_a_bucket_that_was_hit_once_counts_as_hit() -> None:
    """One call of the largest bucket is enough to see it used (H41, InternLM/lmdeploy#2603)."""
    forward = recorded(wide, buckets=[1, 256], name="once hit")
    forward.warmup(lambda n: ((torch.randn(n, 16),), {}))
    forward(torch.randn(256, 16))
    assert {256} == {row.bucket for row in forward.snapshot().rows}


def test_bytes_of_equal_names_add_up_and_go_with_the_graphs() -> None:
    """Two instances of one name hold twice the bytes; after both resets the account knows none.

    (H41, InternLM/lmdeploy#2603)
    """
    forwards = [recorded(wide, buckets=[4], name="twice") for _ in range(2)]
    for forward in forwards:
        for _ in range(2):
            forward(torch.randn(4, 16))
    one = bytes_alone(4)
    assert 2 * one == graphprobe.snapshot().forwards["twice"].pool_bytes
    forwards[0].reset()
    assert one == forwards[1].snapshot().pool_bytes
    forwards[1].reset()
    assert None is forwards[1].snapshot().pool_bytes


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "dropped"])
def test_bytes_of_a_wrapper_that_is_gone_are_not_counted(reset: bool) -> None:
    """A wrapper that its owner drops takes its bytes out of the account, with or without reset().

    (H41, InternLM/lmdeploy#2603)
    """
    forward = recorded(wide, buckets=[4], name="gone")
    for _ in range(2):
        forward(torch.randn(4, 16))
    if reset:
        forward.reset()
    del forward
    gc.collect()
    assert not graphprobe.snapshot().forwards["gone"].pool_bytes
    again = recorded(wide, buckets=[4], name="gone")
    for _ in range(2):
        again(torch.randn(4, 16))
    assert bytes_alone(4) == again.snapshot().pool_bytes


def test_a_bucket_is_not_shown_as_captured_once_its_wrapper_is_gone() -> None:
    """A graph that went with its wrapper is not one that is ready to replay (H41, InternLM/lmdeploy#2603)."""
    forward = recorded(wide, buckets=[4], name="not ready")
    for _ in range(2):
        forward(torch.randn(4, 16))
    del forward
    gc.collect()
    shot = graphprobe.snapshot().forwards["not ready"]
    shown = [sample.value for sample in forward_samples(shot)[0] if sample.metric.name == "graphprobe_bucket_captured"]
    assert ([0], False) == (shown, any(shot.live.values()))


def test_a_bucket_stays_captured_while_one_wrapper_of_the_name_has_it() -> None:
    """reset() of one of two wrappers of a name leaves the other's graphs in the account.

    (H41, InternLM/lmdeploy#2603)
    """
    forwards = [recorded(wide, buckets=[4], name="one of two") for _ in range(2)]
    for forward in forwards:
        for _ in range(2):
            forward(torch.randn(4, 16))
    forwards[0].reset()
    assert {4: True} == forwards[1].snapshot().live
