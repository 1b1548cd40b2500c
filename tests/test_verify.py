from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import graphprobe
from graphprobe.graphed import capture

pytestmark = pytest.mark.usefixtures("own_forwards")

recorded = functools.partial(capture, buckets=[2, 4], backend="recorder")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Scaled:
    """A forward whose number a graph bakes: changing it makes every replay wrong."""

    def __init__(self, **options: Any) -> None:
        self.scale, self.runs = 2.0, 0
        self.forward = recorded(self.step, **options)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x * self.scale

    def results(self, *sizes: int) -> list[bool]:
        """Whether each call gave eager's result of this moment."""
        found = []
        for n in sizes:
            x = torch.randn(n, 3)
            found.append(torch.equal(x * self.scale, self.forward(x)))
        return found


def reasons(forward: Any) -> dict[str, int]:
    return {str(row.reason): row.calls for row in forward.snapshot().rows if row.reason}


def test_agreement_changes_nothing() -> None:
    """Verified calls are graph calls with the graph's result; nothing is eager beside the warm-up."""
    scaled = Scaled(verify=2)
    assert [True] * 20 == scaled.results(*[2] * 20)
    snapshot = scaled.forward.snapshot()
    assert (19, 1, {}) == (snapshot.graph_calls, snapshot.eager_calls, snapshot.mismatches)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_one_in_n_calls_is_run_twice(every: int) -> None:
    """The host code runs once eagerly, once for the capture, and then once per verified call."""
    scaled = Scaled(verify=every)
    scaled.results(2, 2)
    before = scaled.runs
    scaled.results(*[2] * (10 * every))
    assert 10 == scaled.runs - before


def test_without_verify_nothing_is_run_twice() -> None:
    """Off is off."""
    scaled = Scaled(verify=0)
    scaled.results(*[2] * 50)
    assert 2 == scaled.runs


def test_a_mismatch_gives_the_eager_result_and_ends_the_graph() -> None:
    """The wrong graph never serves again: its call is eager's with verify_failed, later calls stay eager."""
    scaled = Scaled(verify=1)
    scaled.results(2, 2, 2)
    scaled.scale = 5.0
    assert [True] * 5 == scaled.results(*[2] * 5)
    snapshot = scaled.forward.snapshot()
    assert (2, {2: 1}, {"warmup": 1, "verify_failed": 5}) == (
        snapshot.graph_calls,
        snapshot.mismatches,
        reasons(scaled.forward),
    )
    assert {2: False, 4: False} == snapshot.live
    assert 2 / 7 == snapshot.hit_rate
    assert any("the graph is given up" in text for text in snapshot.causes.values())


def test_a_mismatch_is_of_one_bucket() -> None:
    """Other buckets go on."""
    scaled = Scaled(verify=1)
    scaled.results(2, 2)
    scaled.scale = 5.0
    assert [True] * 5 == scaled.results(2, 4, 4, 4, 2)
    snapshot = scaled.forward.snapshot()
    assert ({2: 1}, {2: False, 4: True}) == (snapshot.mismatches, snapshot.live)
    assert [2] == [row.calls for row in snapshot.rows if row.bucket == 4]


def test_alternating_signatures_are_verified() -> None:
    """Calls that alternate between two graphs of one size are compared as often as others."""
    scaled = Scaled(verify=3)
    for _ in range(4):
        scaled.forward(torch.randn(2, 3))
        scaled.forward(torch.randn(2, 3).double())
    scaled.scale = 5.0
    for _ in range(4):
        scaled.forward(torch.randn(2, 3))
        scaled.forward(torch.randn(2, 3).double())
    assert {2: 2} == scaled.forward.snapshot().mismatches


def test_tolerance() -> None:
    """A difference within verify_tol is agreement, one above is not; default: that of the dtype."""
    for tolerance, expected in ((0.1, {}), (0.01, {2: 1}), (None, {2: 1})):
        scaled = Scaled(verify=1, verify_tol=tolerance, name=f"tolerance {tolerance}")
        scaled.results(2, 2)
        scaled.scale = 2.1
        scaled.forward(torch.ones(2, 3))
        assert expected == scaled.forward.snapshot().mismatches


def test_nan_agrees_with_nan() -> None:
    """A forward whose result is NaN by design is no mismatch."""
    forward = recorded(lambda x: x / x, verify=1)
    for _ in range(4):
        forward(torch.zeros(2, 3))
    assert {} == forward.snapshot().mismatches


def test_another_structure_is_a_mismatch() -> None:
    """A result that has another form than eager's is reported, and eager's is handed out."""
    pair = [False]
    forward = recorded(lambda x: (x, x) if pair[0] else (x,), verify=1)
    for _ in range(3):
        forward(torch.zeros(2, 3))
    pair[0] = True
    assert 2 == len(forward(torch.zeros(2, 3)))
    assert {2: 1} == forward.snapshot().mismatches


def test_the_log_names_the_output() -> None:
    """The cause says which output differs, and how far."""
    forward_scale = [1.0]
    forward = recorded(lambda x: {"a": x, "b": [x * forward_scale[0]]}, verify=1)
    for _ in range(3):
        forward(torch.ones(2, 3))
    forward_scale[0] = 3.0
    forward(torch.ones(2, 3))
    assert any("`output[b][0]` differs from eager" in text for text in forward.snapshot().causes.values())


def test_random_forwards_are_not_verified() -> None:
    """Two runs of a forward that draws random numbers differ by right: verify is off, says so, and draws nothing."""
    forward = recorded(lambda x: x + torch.rand_like(x), verify=1)
    x = torch.zeros(2, 3)
    torch.manual_seed(3)
    expected = [torch.rand(2, 3).tolist() for _ in range(5)]
    torch.manual_seed(3)
    assert expected == [forward(x).tolist() for _ in range(5)]
    assert "verify/off" in forward.snapshot().causes
    assert {} == forward.snapshot().mismatches


def counting(cache: torch.Tensor) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        cache.add_(1)
        return x + cache

    return step


def test_state_that_is_not_declared_is_never_written_twice() -> None:
    """A forward that writes outside is not verified unless state= says how: the cause names it."""
    cache = torch.zeros(3)
    forward = recorded(counting(cache), verify=1)
    for _ in range(5):
        forward(torch.zeros(2, 3))
    assert [5.0] * 3 == cache.tolist()
    assert any("declare state=" in text for text in forward.snapshot().causes.values())


def test_declared_state_is_restored_for_the_second_run() -> None:
    """With the tensors named, verified calls move the state once and agree."""
    cache = torch.zeros(3)
    forward = recorded(counting(cache), verify=1, state=[cache])
    for call in range(1, 6):
        assert torch.equal(torch.full((2, 3), float(call)), forward(torch.zeros(2, 3)))
        assert [float(call)] * 3 == cache.tolist()
    snapshot = forward.snapshot()
    assert (4, {}, False) == (snapshot.graph_calls, snapshot.mismatches, "verify/off" in snapshot.causes)


def test_state_that_rewrites() -> None:
    """A slot-indexed write gives the same when run twice: verified without saving anything."""
    cache = torch.zeros(5, 3)

    def step(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, slots, x)
        return cache[slots] * 2

    forward = recorded(step, verify=1, state="rewrites")
    for start in (0, 1, 2, 3, 0):
        x, slots = torch.randn(2, 3), torch.tensor([start, start + 1])
        assert torch.equal(x * 2, forward(x, slots))
        assert torch.equal(x, cache[slots])
    assert (4, {}) == (forward.snapshot().graph_calls, forward.snapshot().mismatches)


def test_inputs_written_in_place_are_written_once() -> None:
    """Verified calls leave the caller's tensors as one run does, in agreement and in mismatch."""
    scale = [2.0]

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(scale[0]).sum(1)

    forward = recorded(step, verify=1)
    for value in (2.0, 2.0, 2.0, 5.0, 5.0):
        scale[0] = value
        x = torch.randn(2, 3)
        y = x.clone()
        assert torch.equal(step(x), forward(y))
        assert torch.equal(x, y)
    assert {2: 1} == forward.snapshot().mismatches


def test_padded_calls_are_verified() -> None:
    """A padded call is compared with eager at the caller's size: pad rows that leak into a result are found."""
    leaking = recorded(lambda x: x + x.sum(), pad="repeat", verify=1, name="leaking")
    clean = recorded(lambda x: x + 1, pad="repeat", verify=1, name="clean")
    for n in (2, 2, 4, 4, 3, 3):
        x = torch.ones(n, 3)
        assert torch.equal(x + 3 * n, leaking(x))
        assert torch.equal(x + 1, clean(x))
    assert ({4: 1}, {}) == (leaking.snapshot().mismatches, clean.snapshot().mismatches)


def test_ignored_calls_are_not_counted_on_a_mismatch() -> None:
    """Calls inside ignore() add nothing to the counts, whether they are compared or not."""
    scaled = Scaled(verify=1)
    scaled.results(2, 2, 2)
    before = scaled.forward.snapshot()
    scaled.scale = 5.0
    with graphprobe.ignore():
        scaled.results(2, 2)
    after = scaled.forward.snapshot()
    assert (before.graph_calls, before.eager_calls) == (after.graph_calls, after.eager_calls)


def test_alias_results_are_verified() -> None:
    """The graph's own memory is compared before anything overwrites it."""
    scaled = Scaled(verify=1, outputs="alias")
    assert [True] * 4 == scaled.results(*[2] * 4)
    scaled.scale = 5.0
    assert [True] * 2 == scaled.results(2, 2)
    assert {2: 1} == scaled.forward.snapshot().mismatches
