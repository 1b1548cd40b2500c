"""Generated forwards, signatures and sequences of calls: whatever comes, the result is eager's and the books balance.

tests/generated.py makes the scenarios and plays them. GRAPHPROBE_EXAMPLES is the number of scenarios per property, 100
where it is not set, a part of it where a scenario is played twice, in threads or for hundreds of calls. A long run is

    GRAPHPROBE_EXAMPLES=10000 python -m pytest -q tests/test_property.py -k "sequence or padded"
    GRAPHPROBE_EXAMPLES=10000 python -m pytest -q tests/test_property.py -k "not sequence and not padded"

with OMP_NUM_THREADS=1, one command on each of two cores: about 25 minutes. A scenario that fails is printed shrunk, and
kept by hypothesis for the next run.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphprobe.graphed import capture
from graphprobe.ledger import ignore
from tests.generated import (
    STALE,
    Kind,
    Program,
    Run,
    Scenario,
    arguments,
    attempt,
    check_books,
    contrasts,
    difference,
    modes,
    names,
    padded,
    pure,
    scenarios,
)

torch.set_num_threads(1)
EXAMPLES = int(os.environ.get("GRAPHPROBE_EXAMPLES", "100"))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What graphprobe says of thousands of wrappers is no part of a failure."""
    caplog.set_level("CRITICAL", logger="graphprobe")


def bounded(share: float = 1.0) -> Any:
    """So many examples of a property; a scenario may take its time."""
    return settings(
        max_examples=max(20, round(share * EXAMPLES)), deadline=None, suppress_health_check=list(HealthCheck)
    )


@bounded()
@given(scenarios(control=False))
def test_any_sequence_of_calls_equals_eager(scenario: Scenario) -> None:
    """Whatever forward, sizes, dtypes, layouts, containers, spellings, numbers and modes come in whatever order: the
    result, the exceptions and the writes of eager, and each call counted once with a path or a reason it may have."""
    Run(scenario).play()


@bounded()
@given(scenarios(control=True))
def test_any_sequence_of_control_equals_eager(scenario: Scenario) -> None:
    """Warm-up, reset, switching off, training mode, replaced and rewritten tensors, between calls in any order, change
    no result and no sum."""
    Run(scenario).play()


@bounded()
@given(contrasts())
def test_calls_that_differ_in_one_thing_equal_eager(scenario: Scenario) -> None:
    """A number, its type or sign, an order, a layout, a mode, a replaced cache: no graph serves for another."""
    Run(scenario).play()


@bounded()
@given(padded())
def test_padded_calls_equal_eager(scenario: Scenario) -> None:
    """A larger bucket gives the caller's rows, writes the caller's slots and nothing else, in any order of sizes."""
    Run(scenario).play()


@bounded(0.5)
@given(scenarios(control=True, launches=True, most=12))
def test_a_sequence_is_decided_the_same_way_again(scenario: Scenario) -> None:
    """Path, bucket, reason, calls and padding follow from the sequence alone; tests/gpu/test_agreement.py asks the same
    of the recorder and a GPU."""
    assert Run(scenario).play() == Run(scenario).play()


@pytest.mark.parametrize("timing", [0, 1, 64])
def test_ignored_calls_in_a_row_are_counted_nowhere(timing: int) -> None:
    """Served by the route that served last, a graph call inside ``ignore()`` is no call; those around it are."""
    options = (("buckets", (2,)), ("pad", None), ("eager_first", 1), ("timing", timing), ("state", None))
    events = (("burst", 0), *[("ignored", 0)] * 3, ("call", 0))
    run = Run(Scenario(Program(("double",), "tensor"), "function", options, (Kind(n=2),), events))
    assert {(2, "eager", None, "warmup", 0): 1, (2, "graph", 2, "", 0): 3} == run.play()


@bounded(0.5)
@given(pure(launches=True))
def test_what_can_be_a_graph_becomes_one(scenario: Scenario) -> None:
    """So many calls of a kind are eager as were asked for, and all that follow are graph calls.

    What follows the batch is learnt from all kinds, which may start a kind's warm-up once more: hence two rounds.
    """
    run = Run(scenario)
    for kind in scenario.pool * 2:
        for _ in range(scenario.option("eager_first") + 1):
            run.serve(kind)
    for kind in scenario.pool * 2:
        run.serve(kind)
        assert run.path is not None and "graph" == run.path[1], (kind, run.path)
    run.books()


@bounded(0.2)
@given(pure(), st.sampled_from(["swap w", "swap k", "swap entry"]))
def test_replaced_storage_equals_eager_after_so_many_calls(scenario: Scenario, swap: str) -> None:
    """Storage that is replaced under a living tensor (``.data =``) is seen within 64 further calls of a size."""
    run = Run(scenario)
    run.swap(swap)
    run.books()


def test_replaced_storage_is_seen_though_the_calls_in_between_are_ignored() -> None:
    """``ignore()`` leaves counts alone, not the look at the addresses: 64 ignored calls later the result is eager's."""
    weights = [torch.ones(3) for _ in range(300)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x + weight
        return x

    graphed = capture(forward, buckets=[2], backend="recorder", name=next(names))
    x = torch.zeros(2, 3)
    with torch.no_grad():
        for _ in range(5):
            graphed(x)
        weights[250].data = torch.full((3,), 5.0)
        with ignore():
            for _ in range(STALE):
                graphed(x)
        assert torch.equal(forward(x), graphed(x))


@bounded(0.2)
@given(
    pure(alias=False),
    st.booleans(),
    st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=16), min_size=2, max_size=3),
)
def test_threads_get_results_that_equal_eager(scenario: Scenario, warm: bool, orders: list[list[int]]) -> None:
    """Threads that call one wrapper at once, each in its own modes, get their own results, and no count is lost."""
    run = Run(scenario)
    if warm:
        for kind in scenario.pool:
            run.event("burst", kind)
    found: list[str] = []

    def serve(order: list[int], start: threading.Barrier) -> None:
        start.wait(60)
        for seed, index in enumerate(order):
            kind = scenario.pool[index % len(scenario.pool)]
            with modes(kind, run.device):
                given = [arguments(kind, seed, run.device) for _ in run.sides]
                calls = [run.bound(side, kind, values) for side, values in zip(run.sides, given, strict=True)]
                found.append(difference(*map(attempt, calls)))

    start = threading.Barrier(len(orders))
    threads = [threading.Thread(target=serve, args=(order, start)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(map(len, orders)) == len(found)
    assert not any(found), next(filter(None, found))
    run.calls += len(found)
    run.books()


@bounded()
@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.booleans(), st.booleans())
def test_state_moves_as_in_eager(sizes: list[int], padded: bool, timed: bool) -> None:
    """A cache and a random stream after any sequence of sizes are those of eager."""

    def make() -> tuple[torch.Tensor, Any]:
        cache = torch.zeros(6, 2)

        def step(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            cache.index_add_(0, slots, x)
            return x + cache[slots] + torch.rand(2)

        return cache, step

    cache, step = make()
    other, plain = make()
    graphed = capture(
        step, buckets=[1, 2, 4], pad={"x": 0, "slots": 5} if padded else None, timing=int(timed), backend="recorder",
        name=next(names),
    )  # fmt: skip
    with torch.no_grad():
        for seed, n in enumerate(sizes):
            x, slots = torch.arange(2.0 * n).reshape(n, 2), torch.arange(n) % 5
            torch.manual_seed(seed)
            expected, after = plain(x, slots), torch.rand(1)
            torch.manual_seed(seed)
            assert torch.equal(expected, graphed(x, slots))
            assert torch.equal(after, torch.rand(1))
            assert torch.equal(other[:5], cache[:5])
    check_books(graphed.snapshot(), len(sizes))
