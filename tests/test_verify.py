from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
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
        self.scale: float = 2.0
        self.runs: list[int] = []
        self.forward = recorded(self.step, **options)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(1)
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
    before = len(scaled.runs)
    scaled.results(*[2] * (10 * every))
    assert 10 == len(scaled.runs) - before


def test_without_verify_nothing_is_run_twice() -> None:
    """Off is off."""
    scaled = Scaled(verify=0)
    scaled.results(*[2] * 50)
    assert 2 == len(scaled.runs)


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
    forward = recorded(lambda x: (x + 1,) * (2 if pair[0] else 1), verify=1)
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
    assert any("that state= does not name" in text for text in forward.snapshot().causes.values())


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


# -- what a second run would find, whoever serves ------------------------------------------------------------------


def in_another_thread(forward: Callable[..., Any], *args: Any) -> None:
    """One call of a thread that ends."""

    def work() -> None:
        with torch.no_grad():
            forward(*args)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_calls_are_compared_and_timed_although_a_second_thread_has_called() -> None:
    """One call of another thread makes the turn shared for good: verification and timing go on as before."""
    scaled = Scaled(verify=2, timing=2)
    scaled.results(*[2] * 6)
    in_another_thread(scaled.forward, torch.ones(2, 3))
    before = scaled.forward.snapshot().times["decode", "graph", "full", 2].count
    assert [True] * 20 == scaled.results(*[2] * 20)
    assert before + 8 <= scaled.forward.snapshot().times["decode", "graph", "full", 2].count
    scaled.scale = 7.0
    assert 1 >= scaled.results(*[2] * 20).count(False)
    assert {2: 1} == scaled.forward.snapshot().mismatches


@pytest.mark.parametrize("every", [1, 2, 16, 64])
def test_graph_calls_are_timed_whatever_the_two_periods_are(every: int) -> None:
    """Where a call is due for both, it is compared and its graph is timed."""
    forward = recorded(lambda x: x * 2, verify=every)
    for _ in range(200):
        forward(torch.ones(2, 3))
    assert 3 <= forward.snapshot().times["decode", "graph", "full", 2].count


class Slotted:
    """A forward that leaves its result in one of four rows, which a graph bakes: in an argument, or in a cache."""

    def __init__(self, kind: str) -> None:
        self.slot, self.cache = 0, torch.zeros(4, 3)
        options: dict[str, Any] = {
            "an argument": {},
            "a static argument": {"static": ("cache",), "state": [self.cache]},
            "declared state": {"state": [self.cache]},
            "a cache that is returned": {"state": "rewrites"},
        }[kind]
        self.takes, self.returns = "argument" in kind, "returned" in kind
        self.forward = recorded(self.given if self.takes else self.step, verify=1, **options)

    def given(self, x: torch.Tensor, cache: torch.Tensor) -> None:
        cache[self.slot] = x[0]

    def step(self, x: torch.Tensor) -> Any:
        self.cache[self.slot] = x[0]
        return self.cache if self.returns else None

    def left(self, value: float) -> list[float]:
        """What a call with ``value`` leaves behind in a cache of zeros."""
        self.cache.zero_()
        x = torch.full((2, 3), value)
        self.forward(x, self.cache) if self.takes else self.forward(x)
        return self.cache[:, 0].tolist()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("an argument", "`cache` is left different"),
        ("a static argument", "`state[0]` is left different"),
        ("declared state", "`state[0]` is left different"),
        ("a cache that is returned", "`output` differs"),
    ],
)
def test_what_the_forward_writes_is_compared(kind: str, text: str) -> None:
    """A result that is left in memory instead of handed out is found wrong, too, and eager's is what remains."""
    slotted = Slotted(kind)
    for value in (1.0, 2.0, 3.0):
        assert [value, 0.0, 0.0, 0.0] == slotted.left(value)
    assert {} == slotted.forward.snapshot().mismatches
    slotted.slot = 2
    found = [slotted.left(value) for value in (4.0, 5.0)]
    assert {2: 1} == slotted.forward.snapshot().mismatches
    # What a forward that rewrites has written besides (state="rewrites") is not put back.
    assert [4.0, 5.0] == [row[2] for row in found]
    assert [0.0, 0.0, 5.0, 0.0] == found[1]
    assert any(text in cause for cause in slotted.forward.snapshot().causes.values())


def test_state_that_is_a_parameter_is_restored_under_enabled_grad() -> None:
    """A weight that is updated in place may be named in state=: verified calls and warm-up put it back."""
    counter = torch.nn.Parameter(torch.zeros(2))

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            counter.add_(1)
            return x + counter[0]

    with torch.enable_grad():
        forward = recorded(step, verify=1, state=[counter])
        forward.warmup(lambda bucket: ((torch.ones(bucket, 3),), {}))
        assert [0.0, 0.0] == counter.tolist()
        for call in range(1, 5):
            assert [1.0 + call] * 3 == forward(torch.ones(2, 3))[0].tolist()
    assert (4, {}) == (forward.snapshot().graph_calls, forward.snapshot().mismatches)


def test_a_parameter_among_the_results_is_no_mismatch() -> None:
    """A graph hands out a tensor where eager hands out the Parameter itself; the values are what counts."""
    weight = torch.nn.Parameter(torch.randn(3, 3), requires_grad=False)
    forward = recorded(lambda x: (x @ weight, weight, {"again": [weight]}), verify=1)
    for _ in range(5):
        forward(torch.ones(2, 3))
    assert (4, {}) == (forward.snapshot().graph_calls, forward.snapshot().mismatches)


class Counter(torch.nn.Module):
    """A module that counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


def test_a_copy_of_a_module_restores_its_own_state() -> None:
    """state= names the buffers of the module; a deep copy's verification puts the copy's back, not the original's."""
    module = Counter().eval()
    recorded(module, verify=1, state=[module.calls])
    with torch.no_grad():
        twin = copy.deepcopy(module)
    for call in range(1, 7):
        assert [[1.0 + call] * 3] * 2 == twin(torch.ones(2, 3)).tolist()
    assert ([6.0], [0.0]) == (twin.calls.tolist(), module.calls.tolist())
    assert (5, {}) == (twin.forward.snapshot().graph_calls, twin.forward.snapshot().mismatches)


def test_state_that_names_one_of_two_caches_never_writes_the_other_twice() -> None:
    """A graph that writes outside of what state= names is not verified, and says so; the others are."""
    declared, other = torch.zeros(4, 3), torch.zeros(4, 3)

    def step(x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        kv.add_(x[0])
        return x * 2

    forward = recorded(step, static=("kv",), state=[declared], verify=1)
    for _ in range(6):
        forward(torch.ones(2, 3), declared)
        forward(torch.ones(2, 3), other)
    assert (6.0, 6.0) == (declared[0, 0].item(), other[0, 0].item())
    assert {} == forward.snapshot().mismatches
    assert "verify/off" in forward.snapshot().causes


def test_a_thread_that_comes_during_a_verification_waits_for_its_end() -> None:
    """Between a graph's run and eager's no other thread replays: its writes would look like a wrong graph."""
    cache, armed = torch.zeros(2), threading.Event()
    verifying, served = threading.Event(), threading.Event()

    def step(x: torch.Tensor) -> torch.Tensor:
        if armed.is_set():
            # The eager run of a verification: the other thread comes now, and is not served before this is over.
            armed.clear()
            verifying.set()
            assert not served.wait(0.2)
        cache.add_(1)
        return x + cache.sum()

    forward = recorded(step, verify=1, state=[cache])
    for _ in range(4):
        forward(torch.ones(2, 3))
    results: list[torch.Tensor] = []

    def other() -> None:
        assert verifying.wait(30)
        with torch.no_grad():
            results.append(forward(torch.ones(2, 3)))
        served.set()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    armed.set()
    results.insert(0, forward(torch.ones(2, 3)))
    thread.join(30)
    assert not thread.is_alive()
    assert [11.0, 13.0] == [float(result[0, 0]) for result in results]
    assert ([6.0, 6.0], {}) == (cache.tolist(), forward.snapshot().mismatches)


def test_a_mismatch_leaves_no_cycle_that_holds_the_module() -> None:
    """What a failed comparison raises inside goes with the call: a module that is dropped takes its graphs with it."""
    module = torch.nn.Linear(3, 3).eval()
    scale = [1.0]

    class Scaling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.linear(x) * scale[0]
            return result

    scaling = recorded(Scaling().eval(), verify=1)
    for _ in range(3):
        scaling(torch.ones(2, 3))
    scale[0] = 5.0
    gc.collect()
    gc.disable()
    try:
        scaling(torch.ones(2, 3))
        assert {2: 1} == scaling.forward.snapshot().mismatches
        gone = weakref.ref(scaling)
        del scaling
        assert None is gone()
    finally:
        gc.enable()


@pytest.mark.parametrize("every", [1, 3])
def test_a_position_beside_a_cache_that_rewrites_moves_once(every: int) -> None:
    """``state="rewrites"`` covers a cache; a length that the forward counts up is put back for the second run."""

    def make() -> tuple[torch.Tensor, torch.Tensor, Any]:
        cache, length = torch.zeros(64 << 10, 3), torch.zeros(1, dtype=torch.long)

        def step(x: torch.Tensor) -> torch.Tensor:
            cache.index_copy_(0, length + torch.arange(x.shape[0]), x)
            length.add_(x.shape[0])
            return x + cache[:32].sum(0)

        return cache, length, step

    cache, length, step = make()
    other, at, plain = make()
    forward = recorded(step, verify=every, state="rewrites")
    for _ in range(12):
        x = torch.randn(2, 3)
        assert torch.equal(plain(x), forward(x))
        assert at.tolist() == length.tolist()
    assert torch.equal(other, cache)
    assert {} == forward.snapshot().mismatches
