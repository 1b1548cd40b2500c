"""Silent fallbacks and hit rates that surprise: reports from public engines, each as a test (H01 to H11)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphprobe
from graphprobe.errors import ConfigError
from graphprobe.ledger import CAUSES
from graphprobe.observe import observe
from graphprobe.snapshot import Row, Snapshot
from tests.helpers import counts, recorded, rows

pytestmark = pytest.mark.usefixtures("own_forwards", "both_modes")


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def make_inputs(bucket: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (rows(bucket),), {}


def serve(forward: Any, *sizes: int) -> None:
    for n in sizes:
        x = rows(n)
        assert torch.equal(double(x), forward(x))


# -- H01, H02: a largest size without a bucket -----------------------------------------------------------------------


class Module(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Engine:
    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def as_function(**options: Any) -> tuple[Any, Any]:
    forward = recorded(double, **options)
    return forward, forward


def as_method(**options: Any) -> tuple[Any, Any]:
    engine = type("Engine", (), {"decode": recorded(lambda self, x: x * 2, **options)})()
    return engine.decode, engine.decode


def as_bound_method(**options: Any) -> tuple[Any, Any]:
    forward = recorded(Engine().decode, **options)
    return forward, forward


def as_instance(**options: Any) -> tuple[Any, Any]:
    module = recorded(Module().eval(), **options)
    return module, module.forward


def as_class(**options: Any) -> tuple[Any, Any]:
    module = recorded(type("Own", (Module,), {"forward": lambda self, x: x * 2}), **options)().eval()
    return module, module.forward


FORMS = [as_function, as_method, as_bound_method, as_instance, as_class]


@pytest.mark.parametrize("pad", [None, "repeat"], ids=["exact", "padded"])
@pytest.mark.parametrize("form", FORMS)
def test_a_declared_maximum_above_the_largest_bucket_is_said_once_and_counted(
    form: Any, pad: str | None, said: Callable[[], list[str]]
) -> None:
    """A declared maximum without a bucket is named at once, its first call once, every call is counted.

    Two lines instead of the one of the report: the declaration is said before traffic, the fallback when it is met
    (H01, vllm-project/vllm#40734).
    """
    call, forward = form(buckets=[1, 2, 4], max_batch=6, pad=pad, name="decode")
    declared = said()
    assert 1 == len(declared)
    assert "up to 6" in declared[0]
    assert ("5-6" if pad else "3, 5-6") in declared[0]
    assert {"decode": 2 if pad else 3} == forward.snapshot().uncovered
    forward.warmup(make_inputs)
    serve(call, *[5, 6] * 50)
    assert {"batch_too_large": 100} == counts(forward)
    assert 0.0 == forward.snapshot().hit_rate
    first = said()
    assert 1 == len(first)
    assert "5" in first[0]
    assert "4" in first[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_maximum_with_a_bucket_of_its_own_is_a_hit(form: Any, said: Callable[[], list[str]]) -> None:
    """With a bucket for the maximum nothing is eager and nothing is said (H01, vllm-project/vllm#40734)."""
    call, forward = form(buckets=[1, 2, 4, 6], max_batch=6, pad="repeat", name="decode")
    forward.warmup(make_inputs)
    serve(call, 5, 6)
    assert {"graph": 2} == counts(forward)
    assert Row(5, "graph", 6, None, 1, 1, "decode", "full") in forward.snapshot().rows
    assert {"decode": 0} == forward.snapshot().uncovered
    assert [] == said()


@pytest.mark.parametrize(
    ("buckets", "most", "missing"),
    [
        ([1, 2, 4, 8], 12, (9, 10, 11, 12)),
        ([1, 2, 4, 8, 12], 12, ()),
        ([1, 2, 4, 8, 16], 20, (17, 18, 19, 20)),
        ([16, 8, 4, 2, 1, 20], 20, ()),
        ([8], 8, ()),
        ([8], 3, ()),
    ],
)
def test_sizes_without_a_bucket_are_known_before_any_traffic(
    buckets: list[int], most: int, missing: tuple[int, ...], said: Callable[[], list[str]]
) -> None:
    """coverage, capture and observe name the sizes that no bucket can hold, before the first call.

    (H02, vllm-project/vllm-ascend#16049).
    """
    assert missing == graphprobe.coverage(buckets, most, padded=True)
    forward = recorded(double, buckets=buckets, max_batch=most, pad="repeat", name="captured")
    probe = observe("observed", buckets, max_batch=most, padded=True)
    assert len(missing) == forward.snapshot().uncovered["decode"] == probe.snapshot().uncovered["decode"]
    texts = said()
    assert (2 if missing else 0) == len(texts)
    assert all(f"{missing[0]}-{missing[-1]}" in text for text in texts)


def test_without_padding_the_sizes_in_between_are_missing_too() -> None:
    """Exact match only, the default, leaves every size between two buckets (H02, vllm-project/vllm-ascend#16049)."""
    assert (3, 5, 6, 7, 9, 10, 11) == graphprobe.coverage([1, 2, 4, 8, 12], max_batch=12)


@pytest.mark.parametrize("pad", [None, "repeat"], ids=["exact", "padded"])
def test_coverage_is_what_traffic_gets(pad: str | None) -> None:
    """A size is named as missing exactly when its call runs eagerly (H02, vllm-project/vllm-ascend#16049)."""
    forward = recorded(double, buckets=[1, 2, 4, 8], pad=pad, name="decode")
    forward.warmup(make_inputs)
    serve(forward, *range(1, 13))
    eager = tuple(row.batch_size for row in forward.snapshot().rows if row.path == "eager")
    assert graphprobe.coverage([1, 2, 4, 8], 12, padded=pad is not None) == eager


# -- H03: the window -------------------------------------------------------------------------------------------------


def test_a_window_shows_what_the_lifetime_hides() -> None:
    """After 10,000 hits 200 misses leave the lifetime rate at 98 %, and the window's is 0 %: both can be read.

    The alert that must follow the window is a rule over the exported counters, not tested here
    (H03, sgl-project/sglang#33483).
    """
    forward = recorded(double, buckets=[1, 2, 32], timing=0, name="decode")
    forward.warmup(make_inputs)
    x = rows(2)
    for _ in range(10_000):
        forward(x)
    before, own = graphprobe.snapshot(), forward.snapshot()
    serve(forward, *(33 + n % 70 for n in range(200)))
    after = graphprobe.snapshot()
    assert 10_000 / 10_200 == after.forwards["decode"].hit_rate
    window = (after - before).forwards["decode"]
    assert (0.0, 0, 200) == (window.hit_rate, window.graph_calls, window.eager_calls)
    assert 0.0 == (forward.snapshot() - own).hit_rate
    assert {"batch_too_large"} == {str(row.reason) for row in window.rows}


def test_a_window_of_an_observed_engine_survives_json() -> None:
    """The same for an engine with graphs of its own, read from its JSON (H03, sgl-project/sglang#33483)."""
    probe = observe("decode", [1, 2, 4, 8, 16, 32])
    for _ in range(10_000):
        probe.graph_call(batch_size=30, bucket=32)
    before = Snapshot.from_json(graphprobe.snapshot().to_json())
    for n in range(200):
        probe.eager_call(batch_size=33 + n % 70, reason="batch_too_large")
    after = Snapshot.from_json(graphprobe.snapshot().to_json())
    assert 10_000 / 10_200 == after.forwards["decode"].hit_rate
    assert 0.0 == (after - before).forwards["decode"].hit_rate


def test_a_window_without_traffic_has_no_rate() -> None:
    """Nothing in the window is None, neither all nor nothing (H03, sgl-project/sglang#33483)."""
    forward = recorded(double, buckets=[2], name="decode")
    forward.warmup(make_inputs)
    serve(forward, 2, 3)
    before = graphprobe.snapshot()
    window = (graphprobe.snapshot() - before).forwards["decode"]
    assert (None, ()) == (window.hit_rate, window.rows)


# -- H04: what is no call --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_warm_up_and_capture_are_no_calls(form: Any) -> None:
    """Three warm-up runs and a capture per bucket, then four calls: four are counted, captures on their own.

    (H04, vllm-project/vllm#52358).
    """
    call, forward = form(buckets=[1, 2, 4], eager_first=3, pad="repeat", timing=1, name="decode")
    forward.warmup(make_inputs)
    warm = forward.snapshot()
    assert (0, 0, None, {}) == (warm.graph_calls, warm.eager_calls, warm.hit_rate, warm.times)
    serve(call, 1, 2, 3, 4)
    after = forward.snapshot()
    assert (4, 0) == (after.graph_calls, after.eager_calls)
    assert {1: 1, 2: 1, 4: 1} == after.captures
    assert {(1, "ok"): 1, (2, "ok"): 1, (4, "ok"): 1} == after.capture_outcomes


@pytest.mark.parametrize("form", FORMS)
def test_an_ignored_call_counts_nowhere(form: Any) -> None:
    """Calls inside ``ignore()`` leave no row and no time, on either path (H04, vllm-project/vllm#52358)."""
    call, forward = form(buckets=[1, 2, 4], pad="repeat", timing=1, name="decode")
    forward.warmup(make_inputs)
    with graphprobe.ignore():
        serve(call, 1, 3, 4, 5, 0)
    assert ((), {}) == (forward.snapshot().rows, forward.snapshot().times)
    serve(call, 3)
    assert {"graph": 1} == counts(forward)


def test_an_ignored_dummy_run_may_warm_up_and_capture_and_still_counts_nowhere() -> None:
    """Lazy capture goes on under ``ignore()``: the captures are counted, the calls are not (H04, vllm#52358)."""
    forward = recorded(double, buckets=[2], name="decode")
    with graphprobe.ignore():
        serve(forward, 2, 2, 2)
    assert ({}, {2: 1}) == (counts(forward), forward.snapshot().captures)
    serve(forward, 2)
    assert {"graph": 1} == counts(forward)


def test_an_idle_rank_is_not_in_the_hit_rate() -> None:
    """A dummy step without rows is counted apart and leaves the hit rate alone (H04, vllm-project/vllm#52358)."""
    forward = recorded(double, buckets=[2], name="decode")
    forward.warmup(make_inputs)
    serve(forward, 2, 0, 0, 0)
    assert {"graph": 1, "empty_batch": 3} == counts(forward)
    assert 1.0 == forward.snapshot().hit_rate


def test_the_warm_up_of_one_forward_is_no_call_of_another() -> None:
    """A captured forward inside another one is not called by the other's warm-up (H04, vllm-project/vllm#52358)."""
    inner = recorded(double, buckets=[2], name="inner")
    outer = recorded(lambda x: inner(x) + 1, buckets=[2], name="outer")
    assert (2,) == outer.warmup(make_inputs).captured
    assert {} == counts(inner)
    x = rows(2)
    assert torch.equal(double(x) + 1, outer(x))
    assert ({}, {"graph": 1}) == (counts(inner), counts(outer))


# -- H05: captured once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [True, False], ids=["warmup", "lazy"])
def test_one_size_is_captured_once_and_used_again(warm: bool) -> None:
    """Five equal calls between two buckets: one capture, and every call after it replays (H05, vllm#43145)."""
    forward = recorded(double, buckets=[1, 2, 4], pad="repeat", name="decode")
    if warm:
        forward.warmup(make_inputs)
    serve(forward, 3, 3, 3, 3, 3)
    assert 1 == forward.snapshot().captures[4]
    assert ({"graph": 5} if warm else {"warmup": 1, "graph": 4}) == counts(forward)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_micro_batches_are_found_under_the_size_they_were_captured_for(parts: int) -> None:
    """A step of several micro-batches is captured once for all of them together (H05, vllm-project/vllm#43145)."""

    def step(micro: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(micro) * 2

    forward = recorded(step, buckets=[2, 10], batch=lambda micro: 2 * parts, name="decode")
    sized = recorded(step, buckets=[2 * parts], batch=lambda micro: sum(len(x) for x in micro), name="sized")
    for _ in range(5):
        micro = [rows(2) for _ in range(parts)]
        assert torch.equal(step(micro), sized(micro))
        assert torch.equal(step(micro), forward(micro))
    assert {2 * parts: 1} == sized.snapshot().captures
    assert {"warmup": 1, "graph": 4} == counts(sized)
    assert {2 * parts} == {row.batch_size for row in forward.snapshot().rows}


def test_other_splits_of_one_size_are_other_graphs() -> None:
    """Equal sums with unequal parts never share a graph, and each is captured once (H05, vllm-project/vllm#43145)."""

    def step(micro: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([x - x.mean(0) for x in micro])

    forward = recorded(step, buckets=[6], batch=lambda micro: sum(len(x) for x in micro), name="decode")
    for _ in range(3):
        for split in ((1, 2, 3), (3, 2, 1), (2, 2, 2), (6,), (3, 3)):
            micro = [rows(n) for n in split]
            assert torch.equal(step(micro), forward(micro))
    assert {"warmup": 5, "graph": 10} == counts(forward)
    assert {6: 5} == forward.snapshot().captures


def test_a_bucket_that_is_captured_again_is_counted_and_said(said: Callable[[], list[str]]) -> None:
    """The number of captures per bucket is public, and each further one is warned of (H05, vllm#43145)."""
    holder = {"cache": torch.ones(2, 3)}
    forward = recorded(lambda x: x + holder["cache"], buckets=[2], name="decode")
    for _ in range(2):
        x = rows(2)
        for _ in range(3):
            assert torch.equal(x + holder["cache"], forward(x))
        holder["cache"] = torch.full((2, 3), 5.0)
    assert 2 == forward.snapshot().captures[2]
    assert 1 == sum("bucket 2" in text and "replaced" in text for text in said())


# -- H06: the best bucket --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", list(itertools.permutations([3, 6, 9, 18]))[::5], ids=str)
def test_the_smallest_bucket_that_fits_is_taken(buckets: tuple[int, ...]) -> None:
    """A size between two buckets takes the next one, in whatever order they were given (H06, vllm#53407)."""
    forward = recorded(double, buckets=buckets, pad="repeat", name="decode")
    forward.warmup(make_inputs)
    serve(forward, 4)
    assert (Row(4, "graph", 6, None, 1, 2, "decode", "full"),) == forward.snapshot().rows
    serve(forward, *range(1, 19))
    assert {"graph": 19} == counts(forward)
    best = {n: min(b for b in buckets if b >= n) for n in range(1, 19)}
    assert best == {row.batch_size: row.bucket for row in forward.snapshot().rows}


# -- H07: ineligible calls cost nothing ------------------------------------------------------------------------------


class Switch(torch.nn.Module):
    """A module that is called in ways that no graph serves."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor, phase: str = "decode", extra: Any = None) -> torch.Tensor:
        return x * self.scale


def prefill(module: Switch) -> torch.Tensor:
    return module(rows(1), phase="prefill")


def too_large(module: Switch) -> torch.Tensor:
    return module(rows(9))


def training(module: Switch) -> torch.Tensor:
    try:
        return module.train()(rows(1))
    finally:
        module.eval()


def with_grad(module: Switch) -> torch.Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        return module(torch.randn(1, 3))


def empty(module: Switch) -> torch.Tensor:
    return module(rows(0))


def switched_off(module: Switch) -> torch.Tensor:
    module.forward.enabled = False
    try:
        return module(rows(1))
    finally:
        module.forward.enabled = True


def opaque(module: Switch) -> torch.Tensor:
    return module(rows(1), extra=object())


INELIGIBLE = [
    (prefill, "wrong_phase"),
    (too_large, "batch_too_large"),
    (training, "training"),
    (with_grad, "grad"),
    (empty, "empty_batch"),
    (switched_off, "disabled"),
    (opaque, "signature"),
]


@pytest.mark.parametrize("warm", [True, False], ids=["warmup", "lazy"])
@pytest.mark.parametrize(("ineligible", "reason"), INELIGIBLE, ids=[reason for _, reason in INELIGIBLE])
def test_ineligible_calls_use_up_no_failure_budget(ineligible: Any, reason: str, warm: bool) -> None:
    """Ten calls that no graph may serve leave the ten after them as they would have been.

    ``ineligible`` of the report is one reason here for each rule (H07, ggml-org/llama.cpp#7302).
    """
    module = recorded(
        Switch().eval(), buckets=[1, 2], phase=lambda x, phase="decode", extra=None: phase, name="decode", max_graphs=2
    )
    if warm:
        module.forward.warmup(make_inputs)
    for _ in range(10):
        ineligible(module)
    assert {reason: 10} == counts(module.forward)
    serve(module, *[1] * 10)
    settled = {"graph": 10} if warm else {"warmup": 1, "graph": 9}
    assert {reason: 10, **settled} == counts(module.forward)
    for _ in range(10):
        ineligible(module)
        serve(module, 1)
    assert settled["graph"] + 10 == counts(module.forward)["graph"]
    assert 1 == module.forward.snapshot().captures[1]


# -- H08: shapes that change, then settle ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: rows(2, 3), lambda: rows(2, 5)),
        (lambda: rows(2), lambda: rows(1)),
        (lambda: rows(2), lambda: rows(2).double()),
        (lambda: rows(2), lambda: torch.randn(3, 2).t()),
    ],
    ids=["width", "rows", "dtype", "layout"],
)
def test_shapes_that_change_and_then_settle_are_captured(first: Any, second: Any) -> None:
    """Two shapes in turn, then one of them: warming, never disabled, and the settled calls replay.

    Two eager calls of a kind, not two in a row, come before its capture (H08, ggml-org/llama.cpp#19754).
    """
    forward = recorded(double, buckets=[1, 2], eager_first=2, name="decode")
    for make in (first, second, first, second, first):
        forward(make())
    before = forward.snapshot()
    assert {"warmup": 4, "graph": 1} == counts(forward)
    for _ in range(20):
        x = first()
        assert torch.equal(double(x), forward(x))
    assert {"graph": 20} == {str(r.reason or "graph"): r.calls for r in (forward.snapshot() - before).rows}


def test_a_shape_that_comes_once_is_never_captured() -> None:
    """The first call of a kind pays for no capture (H08, ggml-org/llama.cpp#19754)."""
    forward = recorded(double, buckets=[1, 2], name="decode")
    for width in range(1, 9):
        forward(rows(2, width))
    assert ({"warmup": 8}, {}) == (counts(forward), forward.snapshot().captures)


@pytest.mark.parametrize("changes", [20, 100])
def test_many_changes_switch_nothing_off(changes: int) -> None:
    """Two shapes in turn for a long time are two graphs (H08, ggml-org/llama.cpp#19754)."""
    forward = recorded(double, buckets=[2], max_graphs=2, name="decode")
    for n in range(changes):
        x = rows(2, 3 + n % 2)
        assert torch.equal(double(x), forward(x))
    assert {"warmup": 2, "graph": changes - 2} == counts(forward)
    assert {2: 2} == forward.snapshot().captures


def test_shapes_that_settle_late_are_captured_all_the_same() -> None:
    """However many shapes came once before: one that stays gets its graph (H08, ggml-org/llama.cpp#19754)."""
    forward = recorded(double, buckets=[2], max_graphs=2, name="decode")
    for width in range(10, 40):
        forward(rows(2, width))
    before = forward.snapshot()
    serve(forward, *[2] * 20)
    assert 15 <= (forward.snapshot() - before).graph_calls
    assert "disabled" not in counts(forward)


# -- H09: whose rows are the batch -----------------------------------------------------------------------------------


def scaled(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x @ scale.t()


class Scaled(torch.nn.Module):
    def forward(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ scale.t()

    def decode(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ scale.t()


@pytest.mark.parametrize("batch", ["x", ("x", 0), lambda scale, x: x.shape[0]], ids=["name", "pair", "callable"])
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: recorded(scaled, **options),
        lambda **options: recorded(Scaled().eval().decode, **options),
        lambda **options: recorded(Scaled().eval(), **options),
    ],
    ids=["function", "method", "module"],
)
def test_the_batch_size_is_read_where_it_was_said_to_be(make: Any, batch: Any) -> None:
    """A first argument of seven rows beside the batch of one is never taken for the batch.

    However the call is spelt (H09, ggml-org/llama.cpp#14741).
    """
    forward = make(buckets=[1, 2, 7], batch=batch, name="decode")
    scale = rows(7)
    for _ in range(3):
        for n in (1, 2):
            x = rows(n)
            for result in (forward(scale, x), forward(scale, x=x), forward(x=x, scale=scale)):
                assert torch.equal(scaled(scale, x), result)
    found = graphprobe.snapshot().forwards["decode"]
    assert {1, 2} == {row.batch_size for row in found.rows}
    assert {1: 1, 2: 1} == {bucket: n for bucket, n in found.captures.items() if n}
    assert 16 == found.graph_calls


def test_without_a_word_the_first_tensor_is_the_batch_and_the_log_shows_it(said: Callable[[], list[str]]) -> None:
    """The default is documented, dimension 0 of the first tensor: a wrong guess shows as a size that nobody sent.

    The report asks for an error at the first call; the design has a default instead (H09, ggml-org/llama.cpp#14741).
    """
    forward = recorded(scaled, buckets=[1, 2, 4], name="decode")
    scale, x = rows(7), rows(1)
    for _ in range(3):
        assert torch.equal(scaled(scale, x), forward(scale, x))
    assert {"batch_too_large": 3} == counts(forward)
    assert {7} == {row.batch_size for row in forward.snapshot().rows}
    assert 1 == sum("batch of 7" in text for text in said())


def test_a_batch_argument_that_does_not_exist_is_an_error_at_once() -> None:
    """A misspelt batch argument is refused where it was written, never guessed (H09, ggml-org/llama.cpp#14741)."""
    with pytest.raises(ConfigError, match="'y'"):
        recorded(scaled, buckets=[1], batch="y", name="decode")


# -- H10: a bucket that has no graph ---------------------------------------------------------------------------------


def fails_at(*sizes: int) -> Any:
    """A forward that reads on the host at some sizes, so that these cannot be captured."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] in sizes and x.sum().item() == float("inf"):
            return x
        return x * 2

    return forward


@pytest.mark.parametrize("warm", [True, False], ids=["warmup", "lazy"])
def test_a_size_below_a_lost_largest_bucket_runs_eagerly(warm: bool, said: Callable[[], list[str]]) -> None:
    """Capturing 32 failed: a batch of 20 is eager for that reason and right, and nothing is raised (H10, vllm#7907)."""
    forward = recorded(fails_at(*range(17, 33)), buckets=[8, 16, 32], pad="repeat", name="decode")
    if warm:
        report = forward.warmup(make_inputs)
        assert ((8, 16), (32,)) == (report.captured, report.missing)
    serve(forward, *[20] * 5, 32, 31)
    assert ({"capture_failed": 7} if warm else {"warmup": 1, "capture_failed": 6}) == counts(forward)
    serve(forward, 12, 12, 12, 5, 5, 5)
    assert (6 if warm else 4) == counts(forward)["graph"]
    assert not forward.snapshot().live[32]
    assert 1 == sum("bucket 32" in text for text in said())


def test_a_size_below_a_lost_bucket_takes_the_next_one_that_has_a_graph() -> None:
    """Only a graph that exists is eligible, and any that holds the batch is (H10, vllm-project/vllm#7907)."""
    forward = recorded(fails_at(16), buckets=[8, 16, 32], pad="repeat", name="decode")
    assert (8, 32) == forward.warmup(make_inputs).captured
    serve(forward, 12, 16, 20)
    assert {12: 32, 16: 32, 20: 32} == {row.batch_size: row.bucket for row in forward.snapshot().rows}


def test_an_exact_size_of_a_lost_bucket_runs_eagerly() -> None:
    """Without padding the lost bucket's own size is eager, its neighbours have none (H10, vllm-project/vllm#7907)."""
    forward = recorded(fails_at(32), buckets=[8, 16, 32], name="decode")
    forward.warmup(make_inputs)
    serve(forward, 32, 20, 16)
    assert {"capture_failed": 1, "no_exact_bucket": 1, "graph": 1} == counts(forward)


# -- H11: said once, counted always ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "warm", "make", "reason", "numbers"),
    [
        ({"buckets": [1, 2, 4]}, True, lambda: rows(9), "batch_too_large", ("9", "4")),
        ({"buckets": [1, 2, 4]}, True, lambda: rows(3), "no_exact_bucket", ("3", "2, 4")),
        ({"buckets": [2]}, True, lambda: rows(2, 7), "signature", ("7", "3")),
        ({"buckets": [2], "tokens_per_request": 2}, True, lambda: rows(1), "ragged", ("1", "2")),
        ({"buckets": [2], "lazy": False}, False, lambda: rows(2), "not_captured", ("2",)),
        ({"buckets": [1, 2], "max_graphs": 1}, False, lambda: rows(2), "graph_limit", ("1",)),
        ({"buckets": [2], "agree": lambda n: None}, False, lambda: rows(2), "rank_vote", ("2",)),
    ],
    ids=["too_large", "no_bucket", "signature", "ragged", "not_captured", "graph_limit", "rank_vote"],
)
def test_the_first_fallback_of_each_reason_is_said_once(
    options: dict[str, Any], warm: bool, make: Any, reason: str, numbers: tuple[str, ...], said: Callable[[], list[str]]
) -> None:
    """The first eager call of a reason that counts is logged with its numbers, a thousand more are only counted.

    (H11, vllm-project/vllm-gaudi#1507).
    """
    forward = recorded(double, **options, name="decode")
    if warm:
        forward.warmup(make_inputs)
    if reason == "graph_limit":
        serve(forward, 1, 1)
    said()
    forward(make())
    first = said()
    assert 1 == len(first)
    assert all(number in first[0] for number in ("decode", *numbers))
    for _ in range(1000):
        forward(make())
    assert [] == said()
    assert 1001 == counts(forward)[reason]
    assert any(reason in text for text in forward.snapshot().causes.values())


@pytest.mark.parametrize("sizes", [range(5000, 5600), range(2, 602)], ids=["too_large", "no_bucket"])
def test_many_sizes_do_not_flood_the_log(sizes: range, said: Callable[[], list[str]]) -> None:
    """A prompt length per call: the log stays short, the counts are exact (H11, vllm-project/vllm-gaudi#1507)."""
    forward = recorded(double, buckets=[1, 4096], name="decode", timing=0)
    for n in sizes:
        forward(rows(n, 1))
    assert 1 <= len(said()) <= CAUSES
    assert len(sizes) == forward.snapshot().eager_calls
    assert set(sizes) == {row.batch_size for row in forward.snapshot().rows}


def test_a_fallback_is_visible_at_the_default_log_level(caplog: pytest.LogCaptureFixture) -> None:
    """The line is a warning: seen by who has set up no logging (H11, vllm-project/vllm-gaudi#1507)."""
    forward = recorded(double, buckets=[1, 2], name="decode")
    serve(forward, 9)
    assert [logging.WARNING] == [record.levelno for record in caplog.records if record.name == "graphprobe"]
