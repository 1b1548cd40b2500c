from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import graphprobe
from graphprobe.backends.recorder import _Recording
from graphprobe.calls import Describer
from graphprobe.captures import MOVES, SETTLED
from graphprobe.errors import ConfigError
from graphprobe.graphed import capture
from graphprobe.snapshot import Row
from graphprobe.watch import CHECK, HostReads, Watch
from tests.helpers import counts, recorded, rows

pytestmark = pytest.mark.usefixtures("own_forwards", "both_modes")


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def serve(forward: Any, *sizes: int) -> None:
    for n in sizes:
        forward(rows(n))


# -- dispatch ------------------------------------------------------------------------------------------------------


def test_exact_buckets() -> None:
    """A bucket warms up once and replays from then on; other sizes are eager with their reason; all equal eager."""
    forward = recorded(double, buckets=[1, 2, 4])
    for _ in range(3):
        for n in (1, 2, 3, 4, 5):
            x = rows(n)
            assert torch.equal(double(x), forward(x))
    assert {"graph": 6, "warmup": 3, "no_exact_bucket": 3, "batch_too_large": 3} == counts(forward)
    assert {1: 1, 2: 1, 4: 1} == forward.snapshot().captures
    assert Row(2, "graph", 2, None, 2, 0, "decode", "full") in forward.snapshot().rows


@pytest.mark.parametrize("eager_first", [0, 1, 3])
def test_eager_first(eager_first: int) -> None:
    """So many calls of a bucket are eager before the call that captures, which is a graph call."""
    forward = recorded(double, buckets=[2], eager_first=eager_first)
    serve(forward, *[2] * 5)
    assert ({"warmup": eager_first} if eager_first else {}) | {"graph": 5 - eager_first} == counts(forward)


def test_the_hit_rate_leaves_warm_up_out() -> None:
    """graph / (graph + counted eager): warm-up does not count, a missing bucket does."""
    forward = recorded(double, buckets=[1, 2])
    assert None is forward.snapshot().hit_rate
    serve(forward, 2)
    assert None is forward.snapshot().hit_rate
    serve(forward, 2, 2, 2, 5)
    assert 0.75 == forward.snapshot().hit_rate


@pytest.mark.parametrize("pad", ["repeat", "zeros", {"x": 7}])
def test_padding(pad: Any) -> None:
    """A smaller batch takes the next bucket: equal to eager, cut to its rows, and the added rows are counted."""
    forward = recorded(double, buckets=[4, 8], pad=pad)
    serve(forward, 4, 8, 4, 8)
    for n in (3, 1, 5, 7, 4, 2):
        x = rows(n)
        assert torch.equal(double(x), forward(x))
    assert {"graph": 8, "warmup": 2} == counts(forward)
    assert 1 + 3 + 3 + 1 + 2 == forward.snapshot().padding
    assert {4: 1, 8: 1} == forward.snapshot().captures


def test_a_padded_call_waits_for_a_second_size() -> None:
    """With one size known the first padded call is eager, and teaches how the outputs follow the batch."""
    forward = recorded(double, buckets=[4], pad="zeros")
    serve(forward, 4, 4, 4)
    assert {"graph": 2, "warmup": 1} == counts(forward)
    serve(forward, 3)
    assert {"graph": 2, "warmup": 2} == counts(forward)
    for n in (3, 2, 1, 4):
        x = rows(n)
        assert torch.equal(double(x), forward(x))
    assert {"graph": 6, "warmup": 2} == counts(forward)


def test_a_padded_bucket_is_captured_by_a_smaller_batch() -> None:
    """A bucket need not be met exactly: batches of 3 and 2 alone capture bucket 4."""
    forward = recorded(double, buckets=[4], pad="repeat")
    for n in (3, 2, 3, 2, 1):
        x = rows(n)
        assert torch.equal(double(x), forward(x))
    assert {4: 1} == forward.snapshot().captures
    assert 5 == sum(counts(forward).values())


def test_pad_rows_never_reach_a_result() -> None:
    """Outputs that do not follow the batch are whole, those that do are cut along their own dimension."""

    def forward(x: torch.Tensor) -> Any:
        return x + 1, x.t() * 2, torch.ones(5), {"n": x[:, 0]}

    graphed = recorded(forward, buckets=[2, 4], pad={"x": 0})
    serve(graphed, 2, 2, 4, 4)
    x = rows(3)
    expected, actual = forward(x), graphed(x)
    assert 3 == counts(graphed)["graph"]
    assert [t.tolist() for t in expected[:3]] == [t.tolist() for t in actual[:3]]
    assert expected[3]["n"].tolist() == actual[3]["n"].tolist()


def test_an_argument_that_follows_without_a_rule_is_not_padded() -> None:
    """A dict names what may be padded: with another argument that follows the batch there is only exact match."""
    forward = recorded(lambda x, y: x + y, buckets=[4], pad={"x": 0})
    for n in (4, 4, 3, 4, 3):
        x, y = rows(n), rows(n)
        assert torch.equal(x + y, forward(x, y))
    assert {"graph": 2, "warmup": 1, "no_exact_bucket": 2} == counts(forward)
    assert "pad/missing" in forward.snapshot().causes


def test_one_word_is_refused_where_pad_rows_would_land_outside() -> None:
    """A forward that writes a cache is not padded by one word; a dict with a scratch slot may."""
    caches = [torch.zeros(5, 3), torch.zeros(5, 3)]

    def write(cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, slots, x)
        return x * 2

    word = recorded(functools.partial(write, caches[0]), buckets=[2, 4], pad="zeros", name="word")
    scratch = recorded(functools.partial(write, caches[1]), buckets=[2, 4], pad={"x": 0, "slots": 4}, name="dict")
    for n in (2, 2, 4, 4, 3, 1, 3):
        x, slots = rows(n), torch.arange(n)
        word(x, slots)
        scratch(x, slots)
        assert torch.equal(caches[0][:3], caches[1][:3])
    assert 2 == counts(word)["graph"]
    assert 5 == counts(scratch)["graph"]


def test_an_unclear_output_is_never_cut() -> None:
    """Outputs that change with the batch in no proportion keep such calls eager, and the cause is named."""
    forward = recorded(lambda x: (x + 1, x.shape[0]), buckets=[2, 4], pad="zeros")
    serve(forward, 2, 2, 4, 4)
    assert 3 == forward(rows(3))[1]
    assert {"graph": 2, "warmup": 2, "no_exact_bucket": 1} == counts(forward)
    assert "pad/outputs" in forward.snapshot().causes


def test_a_first_dimension_that_is_equal_by_chance() -> None:
    """A weight whose rows happen to equal a batch is never padded or cut with it."""
    w = rows(4, 4)
    forward = recorded(lambda x, w: x @ w, buckets=[2, 4], pad="zeros")
    for n in (4, 4, 4, 2, 2, 3, 3, 4, 1, 3):
        x = rows(n, 4)
        assert torch.allclose(x @ w, forward(x, w), atol=1e-6)


def test_every_spelling_is_one_graph() -> None:
    """Positional, keyword, default written out: one capture serves them all."""
    forward = recorded(lambda x, y, s=1: x * s - y, buckets=[2])
    for _ in range(3):
        x, y = rows(2), rows(2)
        for result in (forward(x, y), forward(x, y=y), forward(y=y, x=x), forward(x, y, 1), forward(s=1, y=y, x=x)):
            assert torch.equal(x - y, result)
    assert {2: 1} == forward.snapshot().captures
    assert {"graph": 14, "warmup": 1} == counts(forward)


def test_a_new_signature_is_captured_like_the_first() -> None:
    """Dtype, trailing size, scalar, structure: each has its own warm-up and graph, and none answers for another."""
    calls = [
        (rows(2), 1.0), (rows(2).double(), 1.0), (rows(2, 5), 1.0), (rows(2), 2.0), (rows(2), 1), (rows(2), True),
    ]  # fmt: skip
    forward = recorded(lambda x, s: x * s + (10 if s is True else 0), buckets=[2])
    for _ in range(3):
        for x, s in calls:
            expected = x * s + (10 if s is True else 0)
            assert torch.equal(expected, forward(x, s))
    assert {"graph": 12, "warmup": 6} == counts(forward)
    assert {2: 6} == forward.snapshot().captures


def test_arguments_in_containers() -> None:
    """Lists, dicts, dataclasses and None are looked into; what stands in them decides as an argument does."""

    @dataclasses.dataclass
    class Batch:
        ids: torch.Tensor
        mask: torch.Tensor | None = None
        scale: float = 1.0

    def forward(batch: Batch, more: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        y = batch.ids * batch.scale + more["a"][0]
        return y if batch.mask is None else y * batch.mask

    graphed = recorded(forward, buckets=[2])
    for mask, scale in [(None, 1.0), (rows(2), 1.0), (None, 3.0)] * 3:
        batch, more = Batch(rows(2), mask, scale), {"a": [rows(2)]}
        assert torch.equal(forward(batch, more), graphed(batch, more))
    assert {"graph": 6, "warmup": 3} == counts(graphed)


def test_dictionaries_in_another_order_are_another_call() -> None:
    """A forward may iterate over its dictionary: the order of the keys decides."""

    def join(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts.values()), 1)

    forward = recorded(join, buckets=[2])
    for names in ("ab", "ab", "ab", "ba", "ba", "ba", "ab"):
        parts = {name: rows(2) for name in names}
        assert torch.equal(join(parts), forward(parts))


def test_a_value_changed_inside_a_container_is_seen() -> None:
    """A dictionary that is passed again with another number is another call, as an argument and as a default."""
    config = {"k": 2.0}

    def scaled(x: torch.Tensor, config: dict[str, float] = config) -> torch.Tensor:
        return x * config["k"]

    forward = recorded(scaled, buckets=[2])
    for k in (2.0, 2.0, 2.0, 5.0, 5.0, 5.0, 2.0):
        config["k"] = k
        x = rows(2)
        assert torch.equal(x * k, forward(x, config))
        assert torch.equal(x * k, forward(x))


@pytest.mark.parametrize("where", ["dict", "dataclass"])
def test_an_attribute_beside_the_items_is_seen(where: str) -> None:
    """A value that a forward reads off its argument is compared, or keeps the call eager; it is never baked."""

    class Bag(dict):  # type: ignore[type-arg]
        pass

    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor

    forward = recorded(lambda b: (b["x"] if where == "dict" else b.x) * b.k, buckets=[2])
    for k in (2.0, 2.0, 2.0, 5.0, 5.0):
        x = rows(2)
        batch: Any = Bag(x=x) if where == "dict" else Batch(x)
        batch.k = k
        assert torch.equal(x * k, forward(batch))


def test_layouts() -> None:
    """Transposed, strided and expanded inputs give eager's values and strides."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    graphed = recorded(forward, buckets=[4])
    for _ in range(3):
        for x in (rows(4), rows(3, 4).t(), rows(4, 6)[:, ::2], rows(1).expand(4, 3)):
            expected, actual = forward(x), graphed(x)
            assert torch.equal(expected, actual)
        x = rows(3, 4).t()
        assert forward(x).stride() == graphed(x).stride()


# -- warm-up, limits, control --------------------------------------------------------------------------------------


def test_warmup_reports_and_closes_the_set() -> None:
    """Largest first, one entry per bucket; nothing is counted; afterwards nothing is captured in traffic."""
    forward = recorded(double, buckets=[1, 2, 4])
    report = forward.warmup(lambda n: ((rows(n),), {}))
    assert [4, 2, 1] == [entry.bucket for entry in report]
    assert ((1, 2, 4), ()) == (report.captured, report.missing)
    assert [True] * 3 == [(entry.bytes or 0) > 0 and entry.seconds > 0 for entry in report]
    assert {} == counts(forward)
    serve(forward, 1, 2, 4, 1)
    forward(rows(2).double())
    assert {"graph": 4, "signature": 1} == counts(forward)
    assert {1: 1, 2: 1, 4: 1} == forward.snapshot().captures


def test_lazy_leaves_the_set_open_or_closed() -> None:
    """lazy=True captures in traffic after warm-up, too; lazy=False never does."""
    opened, closed = recorded(double, buckets=[2], lazy=True), recorded(double, buckets=[2], lazy=False, name="closed")
    opened.warmup(lambda n: ((rows(n),), {}))
    for forward in (opened, closed):
        for _ in range(3):
            forward(rows(2).double())
    assert {"graph": 2, "warmup": 1} == counts(opened)
    assert {"not_captured": 3} == counts(closed)


def test_warmup_pads_from_the_first_call() -> None:
    """After warm-up the sizes are known: a padded call replays at once."""
    forward = recorded(double, buckets=[2, 4], pad="repeat")
    forward.warmup(lambda n: ((rows(n),), {}))
    x = rows(3)
    assert torch.equal(double(x), forward(x))
    assert {"graph": 1} == counts(forward)


def test_warmup_refuses_inputs_of_another_size() -> None:
    """make_inputs must make what was asked for, in the form that was asked for."""
    forward = recorded(double, buckets=[4])
    with pytest.raises(ConfigError, match=r"make_inputs\(4\) made 3 rows"):
        forward.warmup(lambda n: ((rows(3),), {}))
    with pytest.raises(ConfigError, match=r"must return \(args, kwargs\)"):
        forward.warmup(lambda n: rows(n))


def test_warmup_of_a_forward_that_cannot_be_captured() -> None:
    """Each bucket is reported with its outcome and error, and traffic runs eagerly."""
    forward = recorded(lambda x: x * float(x.sum()), buckets=[1, 2])
    report = forward.warmup(lambda n: ((rows(n),), {}))
    assert ((), (1, 2)) == (report.captured, report.missing)
    assert ["error", "error"] == [entry.outcome for entry in report]
    assert all("on the host" in entry.error for entry in report)
    x = rows(2)
    assert torch.equal(x * float(x.sum()), forward(x))


def test_warmup_puts_state_back() -> None:
    """Tensors declared as state are after warm-up what they were before."""
    cache = torch.ones(4, 3)

    def write(x: torch.Tensor) -> torch.Tensor:
        cache[: x.shape[0]].add_(x)
        return x + 1

    forward = recorded(write, buckets=[2, 4], state=[cache])
    forward.warmup(lambda n: ((rows(n),), {}))
    assert torch.equal(torch.ones(4, 3), cache)


def test_max_graphs() -> None:
    """Above the limit further buckets and signatures are eager with graph_limit; what is captured goes on."""
    forward = recorded(double, buckets=[1, 2, 4], max_graphs=2)
    serve(forward, 1, 1, 2, 2, 4, 4, 4, 1, 2)
    forward(rows(1).double())
    assert {"graph": 4, "warmup": 2, "graph_limit": 4} == counts(forward)
    assert {1: 1, 2: 1} == {b: n for b, n in forward.snapshot().captures.items() if n}


def test_disabled_and_enabled_again() -> None:
    """Off is eager with its reason, on finds the graphs as they were."""
    forward = recorded(double, buckets=[2])
    serve(forward, 2, 2, 2)
    forward.enabled = False
    serve(forward, 2, 2)
    forward.enabled = True
    serve(forward, 2)
    assert {"graph": 3, "warmup": 1, "disabled": 2} == counts(forward)
    assert {2: 1} == forward.snapshot().captures


def test_reset() -> None:
    """Graphs and pool are gone, counts stay, and traffic captures anew."""
    forward = recorded(double, buckets=[2])
    serve(forward, 2, 2, 2)
    assert 0 < forward.snapshot().pool_bytes
    assert {2: True} == forward.snapshot().live
    forward.reset()
    snapshot = forward.snapshot()
    assert (None, {2: False}, 2) == (snapshot.pool_bytes, snapshot.live, snapshot.graph_calls)
    x = rows(2)
    assert [True] * 3 == [torch.equal(double(x), forward(x)) for _ in range(3)]
    assert {"graph": 4, "warmup": 2} == counts(forward)


def test_ignore() -> None:
    """Calls inside are served and counted nowhere, in counts as in times, on either path; other threads count."""
    forward = recorded(double, buckets=[2], timing=1)
    serve(forward, 2, 2, 2, 5)
    before = forward.snapshot()
    with graphprobe.ignore():
        for n in (2, 5, 2, 3):
            x = rows(n)
            assert torch.equal(double(x), forward(x))
        inside = forward.snapshot()
        thread = threading.Thread(target=serve, args=(forward, 5))
        thread.start()
        thread.join()
    assert (before.rows, before.times) == (inside.rows, inside.times)
    assert before.eager_calls + 1 == forward.snapshot().eager_calls


def test_timing_samples() -> None:
    """One in N calls per path and bucket is timed; with one in one every settled call, with zero none."""
    every, never = recorded(double, buckets=[2], timing=1), recorded(double, buckets=[2], timing=0, name="never")
    for forward in (every, never):
        serve(forward, *[2] * 9, *[3] * 5)
    times = every.snapshot().times
    assert {} == never.snapshot().times
    assert {("decode", "graph", "full", 2), ("decode", "eager", "", None)} == set(times)
    assert 7 <= times["decode", "graph", "full", 2].count <= 8
    assert 4 <= times["decode", "eager", "", None].count <= 6


# -- what runs eagerly, and why ------------------------------------------------------------------------------------


def test_empty_batch() -> None:
    """No rows, no graph, and eager's result."""
    forward = recorded(double, buckets=[1])
    assert (0, 3) == tuple(forward(rows(0)).shape)
    assert {"empty_batch": 1} == counts(forward)
    assert None is forward.snapshot().hit_rate


def test_a_device_without_graphs() -> None:
    """CPU tensors without the recorder, meta tensors, and tensors of two devices run eagerly."""
    plain = capture(double, buckets=[2], name="plain")
    serve(plain, 2, 2, 2)
    assert {"unsupported_device": 3} == counts(plain)
    mixed = recorded(lambda x, y: x * 2, buckets=[2])
    for _ in range(3):
        mixed(rows(2), torch.zeros(2, device="meta"))
    assert {"unsupported_device": 3} == counts(mixed)


def test_an_opaque_argument() -> None:
    """An object that cannot be looked into keeps the call eager, and the cause names the argument."""

    class Cache:
        k = 2.0

    forward = recorded(lambda x, cache: x * cache.k, buckets=[2])
    for k in (2.0, 2.0, 2.0, 5.0):
        cache, x = Cache(), rows(2)
        cache.k = k
        assert torch.equal(x * k, forward(x, cache))
    assert {"signature": 4} == counts(forward)
    assert any("argument `cache` is a Cache" in text for text in forward.snapshot().causes.values())


def test_a_call_without_a_batch_dimension() -> None:
    """Scalars alone give no size."""
    forward = recorded(lambda x: x * 2, buckets=[1])
    assert 6.0 == float(forward(torch.tensor(3.0)))
    assert 8 == forward(4)
    assert {"signature": 2} == counts(forward)


@pytest.mark.parametrize("both_modes", ["no_grad"], indirect=True)
def test_grad_of_arguments() -> None:
    """In grad mode an input that requires grad is eager and gets its gradient; without grad mode it is a graph."""
    forward = recorded(double, buckets=[2])
    x = rows(2).requires_grad_()
    with torch.enable_grad():
        for _ in range(3):
            forward(x).sum().backward()
    assert [[6.0] * 3] * 2 == x.grad.tolist()
    assert {"grad": 3} == counts(forward)
    for _ in range(3):
        assert not forward(x).requires_grad
    assert {"grad": 3, "warmup": 1, "graph": 2} == counts(forward)


@pytest.mark.parametrize("both_modes", ["no_grad"], indirect=True)
def test_grad_of_what_the_forward_closes_over() -> None:
    """A weight outside the arguments that requires grad is seen by its result, before the first replay."""
    linear = torch.nn.Linear(3, 3)
    for eager_first in (0, 1):
        forward = recorded(lambda x: (x, linear(x)), buckets=[2], eager_first=eager_first, name=f"first {eager_first}")
        with torch.enable_grad():
            assert [True] * 4 == [forward(rows(2))[1].requires_grad for _ in range(4)]
        assert "graph" not in counts(forward)


def test_grad_that_is_asked_for_later() -> None:
    """Parameters that require grad from now on, with grad mode on, are noticed within the check; and the way back."""
    model = recorded(torch.nn.Linear(3, 3).eval().requires_grad_(False), buckets=[2])
    with torch.enable_grad():
        serve(model, 2, 2, 2)
        model.requires_grad_(True)
        serve(model, *[2] * CHECK, 2)
        graph = counts(model.forward)["graph"]
        serve(model, 2, 2)
        assert graph == counts(model.forward)["graph"]
        model.requires_grad_(False)
        serve(model, *[2] * CHECK, 2, 2, 2)
        assert graph < counts(model.forward)["graph"]


def test_training() -> None:
    """A module in training mode is eager, also after it had graphs, and again a graph in eval mode."""
    model = recorded(torch.nn.Linear(3, 3).eval(), buckets=[2])
    serve(model, 2, 2, 2)
    model.train()
    serve(model, 2, 2)
    model.eval()
    serve(model, 2)
    assert {"graph": 3, "warmup": 1, "training": 2} == counts(model.forward)


@pytest.mark.parametrize("both_modes", ["no_grad"], indirect=True)
def test_modes_have_their_own_graphs() -> None:
    """inference_mode and autocast are signatures: results have eager's dtype in each."""
    weight = rows(3)
    forward = recorded(lambda x: x @ weight, buckets=[2])
    modes = [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
    for mode in modes * 3:
        x = rows(2)
        with mode():
            expected, actual = x @ weight, forward(x)
        assert (expected.dtype, expected.tolist()) == (actual.dtype, actual.tolist())
    assert {"graph": 6, "warmup": 3} == counts(forward)


def test_an_outer_tool_sees_the_operators() -> None:
    """Inside somebody's dispatch mode the call is eager, so that the mode sees every operator."""
    from torch.utils.flop_counter import FlopCounterMode

    forward, w = recorded(lambda x: x @ w, buckets=[2]), rows(3)
    serve(forward, 2, 2, 2)
    with FlopCounterMode(display=False) as counter:
        forward(rows(2))
    assert 2 * 2 * 3 * 3 == counter.get_total_flops()
    assert {"graph": 2, "warmup": 1, "disabled": 1} == counts(forward)


def test_vmap_over_a_captured_forward() -> None:
    """Under a function transform the call is eager and right."""
    forward = recorded(lambda x: x.sin(), buckets=[2])
    serve(forward, 2, 2, 2)
    x = torch.randn(5, 2, 3)
    assert torch.equal(x.sin(), torch.func.vmap(forward)(x))


def test_phases() -> None:
    """A callable names the phase of each call; only captured phases take graphs, and each is counted under its own."""
    forward = recorded(
        lambda x, prefill: x + 1, buckets=[2], phase=lambda x, prefill: "prefill" if prefill else "decode"
    )
    for _ in range(3):
        forward(rows(2), False)
        forward(rows(2), True)
    assert {"graph": 2, "warmup": 1, "wrong_phase": 3} == counts(forward)
    assert {"decode", "prefill"} == {row.phase for row in forward.snapshot().rows}
    other = recorded(double, buckets=[2], phase="verify", capture_phases="verify", name="other")
    serve(other, 2, 2)
    assert {("verify", "graph"), ("verify", "eager")} == {(r.phase, r.path) for r in other.snapshot().rows}


def test_phase_and_agree_are_asked_once_per_call() -> None:
    """Ranks that agree by a collective must ask equally often, whatever path the call takes."""
    asked: collections.Counter[str] = collections.Counter()

    def ask(name: str, answer: Any) -> Any:
        asked[name] += 1
        return answer

    forward = recorded(double, buckets=[1, 2], agree=lambda n: ask("agree", n), phase=lambda x: ask("phase", "decode"))
    for calls, n in enumerate((1, 1, 1, 2, 2, 2, 1, 3, 3, 1, 2), 1):
        forward(rows(n))
        assert {"agree": calls, "phase": calls} == dict(asked)


def test_agree() -> None:
    """The size that the ranks agreed on chooses the bucket; None is a vote against a graph."""
    answer: list[int | None] = [4]
    forward = recorded(double, buckets=[2, 4], pad="zeros", agree=lambda n: answer[0])
    for agreed in (4, 4, 4, 4, None, 4, 2):
        answer[0] = agreed
        x = rows(2)
        assert torch.equal(double(x), forward(x))
    assert {"graph": 4, "warmup": 2, "rank_vote": 1} == counts(forward)


def test_tokens_and_requests() -> None:
    """Buckets in requests stand for several rows each; rows that are no whole request are ragged."""
    forward = recorded(double, buckets=[1, 2], unit="requests", tokens_per_request=4)
    for n in (4, 4, 8, 8, 8, 6, 12):
        x = rows(n)
        assert torch.equal(double(x), forward(x))
    assert {"graph": 3, "warmup": 2, "ragged": 1, "batch_too_large": 1} == counts(forward)
    assert {1, 2, 3} >= {row.batch_size for row in forward.snapshot().rows if row.path == "graph"}
    tokens = recorded(double, buckets=[4, 8], unit="tokens", tokens_per_request=4, name="tokens")
    serve(tokens, 4, 4, 8, 8, 6)
    assert {"graph": 2, "warmup": 2, "ragged": 1} == counts(tokens)


def test_padded_requests() -> None:
    """One request of four tokens in a bucket of two requests is padded by four rows and cut to four."""
    forward = recorded(double, buckets=[2], unit="requests", tokens_per_request=4, pad="zeros")
    serve(forward, 8, 8, 4)
    x = rows(4)
    assert torch.equal(double(x), forward(x))
    assert 2 == counts(forward)["graph"]


@pytest.mark.parametrize(
    ("batch", "n"),
    [("y", 4), (("y", 1), 3), (lambda x, y: 2, 2), (None, 2)],
    ids=["name", "pair", "callable", "default"],
)
def test_where_the_batch_size_is_read(batch: Any, n: int) -> None:
    """An argument's first dimension, another dimension, a callable's answer, or the first tensor."""
    forward = recorded(lambda x, y: x.sum() + y, buckets=[2, 3, 4], batch=batch)
    for _ in range(3):
        x, y = rows(2), rows(4)
        assert torch.equal(x.sum() + y, forward(x, y))
    assert {(n, "eager"), (n, "graph")} == {(row.batch_size, row.path) for row in forward.snapshot().rows}


def test_batch_dims() -> None:
    """Arguments that follow along another dimension are padded there."""
    forward = recorded(lambda x, y: x + y.t(), buckets=[4], batch_dims={"y": 1}, pad="zeros")
    for n in (4, 4, 3, 3, 2, 1):
        x, y = rows(n), rows(3, n)
        assert torch.equal(x + y.t(), forward(x, y))
    assert 4 <= counts(forward)["graph"]


# -- tensors outside the arguments ---------------------------------------------------------------------------------


def test_a_replaced_tensor_is_noticed_at_the_next_call() -> None:
    """The owner replaces a tensor that the graph reads: one eager call, then a graph on the new one."""
    holder = {"cache": torch.ones(2, 3)}
    forward = recorded(lambda x: x + holder["cache"], buckets=[2])
    serve(forward, 2, 2, 2)
    for value in (5.0, 7.0):
        holder["cache"] = torch.full((2, 3), value)
        for _ in range(3):
            x = rows(2)
            assert torch.equal(x + value, forward(x))
    assert {"graph": 6, "warmup": 1, "static_moved": 2} == counts(forward)


def test_a_tensor_that_is_replaced_again_and_again_leaves_its_bucket_eager() -> None:
    """After three moves the bucket is not captured any more, and the cause says what to declare."""
    holder = {"cache": torch.ones(2, 3)}
    forward = recorded(lambda x: x + holder["cache"], buckets=[2])
    for step in range(40):
        holder["cache"] = torch.full((2, 3), float(step))
        x = rows(2)
        assert torch.equal(x + step, forward(x))
    assert 4 >= sum(forward.snapshot().captures.values())
    assert any("context=" in text for text in forward.snapshot().causes.values())


@pytest.mark.parametrize("returned", ["whole", "view"])
def test_a_replaced_tensor_is_noticed_when_the_forward_returns_it(returned: str) -> None:
    """A graph does not keep alive what it hands back, so a new cache is seen as such."""
    holder = {"cache": torch.zeros(2, 3)}

    def write(x: torch.Tensor) -> Any:
        holder["cache"].add_(x)
        return x * 2, holder["cache"] if returned == "whole" else holder["cache"][:1]

    forward = recorded(write, buckets=[2])
    serve(forward, 2, 2, 2)
    holder["cache"] = torch.ones(2, 3)
    for _ in range(3):
        expected, x = holder["cache"].clone(), rows(2)
        _, cache = forward(x)
        assert torch.equal(expected + x, holder["cache"])
        assert torch.equal(holder["cache"][: len(cache)], cache)


def test_state_that_the_forward_rebinds_is_never_a_graph() -> None:
    """A forward that replaces what it has read would replay on the old value for ever: it stays eager."""
    holder, total = {"sum": torch.zeros(2, 3)}, torch.zeros(2, 3)

    def accumulate(x: torch.Tensor) -> torch.Tensor:
        holder["sum"] = holder["sum"] + x
        return holder["sum"] * 1

    forward = recorded(accumulate, buckets=[2])
    for _ in range(6):
        x = rows(2)
        total = total + x
        assert torch.allclose(total, forward(x))


def test_state_written_in_place_is_written_once_per_call() -> None:
    """A cache and a counter move exactly as in eager: no call runs twice, capturing ones included."""

    def make() -> tuple[torch.Tensor, torch.Tensor, Any]:
        cache, position = torch.zeros(16, 3), torch.zeros(1, dtype=torch.long)

        def step(x: torch.Tensor) -> torch.Tensor:
            cache.index_copy_(0, position + torch.arange(x.shape[0]), x)
            position.add_(1)
            return cache.sum(0) + x

        return cache, position, step

    cache, position, step = make()
    other, at, plain = make()
    forward = recorded(step, buckets=[1, 2])
    for n in (1, 1, 2, 2, 1, 2, 2, 1, 1):
        x = rows(n)
        assert torch.equal(plain(x), forward(x))
        assert (at.tolist(), other.tolist()) == (position.tolist(), cache.tolist())


def test_weights_that_moved_are_noticed_within_the_check() -> None:
    """Storage replaced under a living weight: after CHECK calls at most the graph is given up, with its reason."""
    weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    forward = recorded(lambda x: x * weight, buckets=[2])
    serve(forward, 2, 2, 2)
    weight.data = torch.full((3,), 5.0)
    serve(forward, *[2] * CHECK)
    for _ in range(3):
        x = rows(2)
        assert torch.equal(x * 5, forward(x))
    assert 1 == counts(forward)["weights_moved"]


@pytest.mark.parametrize("case", ["autocast", "alternating dtypes", "callable batch"])
def test_weights_that_moved_are_noticed_on_every_kind_of_call(case: str) -> None:
    """The check comes round where calls alternate between graphs of one size, and where no route can be kept."""
    weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    options: dict[str, Any] = {"batch": lambda x: x.shape[0]} if case == "callable batch" else {}
    forward = recorded(lambda x: x * weight, buckets=[2], **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        for step in range(2 * CHECK + 20):
            if step == 10:
                weight.data = torch.full((3,), 5.0)
            x = rows(2).double() if step % 2 and case == "alternating dtypes" else rows(2)
            result = forward(x)
        assert torch.equal(x * weight, result)
    assert 1 <= counts(forward)["weights_moved"]


def test_weights_loaded_in_place_are_seen_at_once() -> None:
    """load_state_dict writes where the graph reads."""
    model = recorded(torch.nn.Linear(3, 3).eval(), buckets=[2])
    serve(model, 2, 2, 2)
    other = torch.nn.Linear(3, 3)
    model.load_state_dict(other.state_dict())
    x = rows(2)
    assert torch.equal(other(x), model(x))
    assert 3 == counts(model.forward)["graph"]


def test_static_arguments() -> None:
    """A static tensor is read where it is, never copied; one that lies elsewhere is another graph."""

    def step(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[0].add_(x[0])
        return x + cache

    forward = recorded(step, buckets=[2], static="cache")
    one, other = torch.zeros(2, 3), torch.ones(2, 3)
    for cache in (one, one, one, other, other, other, one, other):
        x, twin = rows(2), cache.clone()
        assert torch.equal(step(x, twin), forward(x, cache))
        assert torch.equal(twin, cache)
    assert {"graph": 6, "warmup": 2} == counts(forward)


def test_static_views_made_anew_at_each_call() -> None:
    """A fresh view of the same memory is the same static tensor."""
    cache = rows(8)
    forward = recorded(lambda x, c: x + c[0], buckets=[2], static="c")
    for _ in range(8):
        x = rows(2)
        assert torch.equal(x + cache[0], forward(x, cache[:4]))
    assert {"graph": 7, "warmup": 1} == counts(forward)


def test_static_objects() -> None:
    """An object passed by reference is the same while it is the same object, and the graph does not keep it alive."""

    class Cache:
        def __init__(self, value: float) -> None:
            self.keys = torch.full((2, 3), value)

    forward = recorded(lambda x, cache: x + cache.keys, buckets=[2], static="cache")
    one, other = Cache(1.0), Cache(2.0)
    for cache in (one, one, one, other, other, other, one):
        x = rows(2)
        assert torch.equal(x + cache.keys, forward(x, cache))
    gone = weakref.ref(other)
    gc.collect()
    del other, cache
    assert None is gone()


def test_static_tables_are_compared_with_their_keys() -> None:
    """The same tensors under swapped names are another call."""
    a, b = rows(2), rows(2)
    forward = recorded(lambda x, table: x + table["a"], buckets=[2], static="table")
    for table in [{"a": a, "b": b}] * 3 + [{"b": a, "a": b}] * 3:
        x = rows(2)
        assert torch.equal(x + table["a"], forward(x, table))


# -- inputs, contexts, hooks ---------------------------------------------------------------------------------------


def test_inputs_written_in_place() -> None:
    """What the forward writes into its arguments reaches the caller's tensors, through views and when padded."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[:, :1].mul_(2)
        y.add_(x)
        return x.sum(1)

    forward = recorded(step, buckets=[2, 4], pad="zeros")
    for n in (2, 2, 4, 4, 3, 3, 2, 1):
        ours, theirs = [rows(n), rows(n)], []
        theirs = [t.clone() for t in ours]
        assert torch.equal(step(*theirs), forward(*ours))
        assert [t.tolist() for t in theirs] == [t.tolist() for t in ours]
    assert 6 == counts(forward)["graph"]


@pytest.mark.parametrize("shared", ["same", "overlapping"])
def test_arguments_that_share_memory_and_are_written(shared: str) -> None:
    """A write to one argument that shows in another gives eager's result, whichever call was captured."""

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + b

    def pair() -> tuple[torch.Tensor, torch.Tensor]:
        x = rows(3)
        return (x[:2], x[:2]) if shared == "same" else (x[:2], x[1:])

    for order in ("aaaa", "dddaaa", "aadda"):
        forward = recorded(step, buckets=[2], name=order)
        for kind in order:
            ours = pair() if kind == "a" else (rows(2), rows(2))
            theirs = copy.deepcopy(ours)
            assert torch.equal(step(*theirs), forward(*ours))
            assert [t.tolist() for t in theirs] == [t.tolist() for t in ours]


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_containers_that_the_forward_fills(kind: str) -> None:
    """A forward that appends to its list, or adds to its dictionary, does so at every call."""

    def step(x: torch.Tensor, out: Any) -> torch.Tensor:
        out.append(x * 2) if kind == "list" else out.update(y=x * 2)
        return x

    forward = recorded(step, buckets=[2])
    for _ in range(5):
        x = rows(2)
        out: Any = [] if kind == "list" else {}
        forward(x, out)
        assert [(x * 2).tolist()] == [t.tolist() for t in (out if kind == "list" else out.values())]


@pytest.mark.parametrize("kind", ["list", "dict", "dataclass"])
def test_items_that_the_forward_replaces(kind: str) -> None:
    """A forward that puts a new tensor in its argument's place, as a functional cache does, does so at every call."""

    @dataclasses.dataclass
    class Batch:
        kv: torch.Tensor

    def step(x: torch.Tensor, held: Any) -> torch.Tensor:
        if kind == "dataclass":
            held.kv = held.kv + x
            return held.kv * 1
        at = 0 if kind == "list" else "kv"
        held[at] = held[at] + x
        return held[at] * 1

    forward = recorded(step, buckets=[2])
    for _ in range(5):
        x, kv = rows(2), rows(2)
        held: Any = {"list": [kv], "dict": {"kv": kv}, "dataclass": Batch(kv)}[kind]
        assert torch.equal(kv + x, forward(x, held))
        after = held.kv if kind == "dataclass" else held[0 if kind == "list" else "kv"]
        assert torch.equal(kv + x, after)


def test_an_argument_whose_shape_the_forward_changes() -> None:
    """In-place changes of the form of an argument are no graph, and reach the caller."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze_(0) * 2

    forward = recorded(step, buckets=[2])
    for _ in range(4):
        x = rows(2)
        assert (1, 2, 3) == tuple(forward(x).shape)
        assert (1, 2, 3) == tuple(x.shape)


@dataclasses.dataclass
class Context:
    mask: torch.Tensor
    scale: float = 1.0


@pytest.mark.parametrize("form", ["object", "dict"])
def test_context(form: str) -> None:
    """Per-step tensors outside the arguments are staged, padded and put back; its numbers are part of the signature."""
    now: list[Any] = [None]

    def step(x: torch.Tensor) -> torch.Tensor:
        mask, scale = (now[0].mask, now[0].scale) if form == "object" else (now[0]["mask"], now[0]["scale"])
        return x * scale + mask[:, None]

    forward = recorded(
        step, buckets=[2, 4], context=lambda: now[0], pad={"x": 0, "context.mask": 0, "context[mask]": 0}
    )
    for n, scale in [
        (2, 1.0),
        (2, 1.0),
        (4, 1.0),
        (4, 1.0),
        (3, 1.0),
        (1, 1.0),
        (2, 3.0),
        (2, 3.0),
        (2, 3.0),
        (2, 1.0),
    ]:
        mask, x = torch.randn(n), rows(n)
        now[0] = Context(mask, scale) if form == "object" else {"mask": mask, "scale": scale}
        assert torch.equal(step(x), forward(x))
        assert mask is (now[0].mask if form == "object" else now[0]["mask"])
    assert 7 == counts(forward)["graph"]


def test_a_context_that_is_kept_and_changed() -> None:
    """One context object whose tensors are replaced at each step never moves a graph."""

    class Engine:
        positions: torch.Tensor

    engine = Engine()
    forward = recorded(lambda x: x + engine.positions[:, None], buckets=[2], context=lambda: engine)
    for _ in range(6):
        engine.positions = torch.randn(2)
        x = rows(2)
        assert torch.equal(x + engine.positions[:, None], forward(x))
    assert {"graph": 5, "warmup": 1} == counts(forward)


def test_narrow() -> None:
    """A table that is narrower than captured is filled up and is the same graph; a wider one is captured anew.

    The first narrower call of a graph is eager, and shows that the outputs do not follow the width.
    """

    def step(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x + table.clamp(min=0).sum(1, keepdim=True)

    forward = recorded(step, buckets=[2], narrow={"table": (1, -1)})
    for width in (4, 4, 4, 2, 1, 3, 4, 6, 6, 6, 5, 2):
        x, table = rows(2), torch.randint(0, 9, (2, width)).float()
        assert torch.equal(step(x, table), forward(x, table))
    assert {2: 2} == forward.snapshot().captures
    assert {"graph": 8, "warmup": 4} == counts(forward)


def test_narrow_written_in_place() -> None:
    """A write into a narrow argument reaches the caller's part of it."""

    def step(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        table.add_(1)
        return x * 2

    forward = recorded(step, buckets=[2], narrow={"table": (1, 0)})
    for width in (4, 4, 4, 2, 3):
        table = torch.zeros(2, width)
        forward(rows(2), table)
        assert torch.equal(torch.ones(2, width), table)


def test_prepare() -> None:
    """Called before a capture and before each replay with bucket and the caller's arguments, never before eager."""
    seen: list[tuple[int, int]] = []
    plan = torch.zeros(1)

    def prepare(bucket: int, x: torch.Tensor) -> None:
        seen.append((bucket, x.shape[0]))
        plan.fill_(float(x.shape[0]))

    forward = recorded(lambda x: x + plan, buckets=[2, 4], pad="zeros", prepare=prepare)
    plan.fill_(2.0)
    serve(forward, 2)
    assert [] == seen
    serve(forward, 2, 2)
    assert {(2, 2)} == set(seen)
    plan.fill_(4.0)
    serve(forward, 4, 4)
    seen.clear()
    x = rows(3)
    assert torch.equal(x + 3, forward(x))
    assert [(4, 3)] == seen


def test_what_prepare_raises_reaches_the_caller() -> None:
    """An exception of prepare= is the caller's own; the call is not counted and the next one is served."""
    fail = [False]

    def prepare(bucket: int, x: torch.Tensor) -> None:
        if fail[0]:
            raise KeyError("plan")

    forward = recorded(double, buckets=[2], prepare=prepare)
    serve(forward, 2, 2, 2)
    fail[0] = True
    with pytest.raises(KeyError, match="plan"):
        forward(rows(2))
    fail[0] = False
    serve(forward, 2)
    assert {"graph": 3, "warmup": 1} == counts(forward)


# -- results -------------------------------------------------------------------------------------------------------


def test_a_result_is_the_callers_own() -> None:
    """A result is not overwritten by the next call, and writing to it does not touch the graph."""
    forward = recorded(double, buckets=[2])
    serve(forward, 2, 2)
    x, y = rows(2), rows(2)
    first = forward(x)
    second = forward(y)
    assert torch.equal(double(x), first)
    second.zero_()
    assert torch.equal(double(x), forward(x))


def test_a_result_that_is_an_argument_is_not_the_static_input() -> None:
    """A forward that returns its argument gives a result that the next call leaves alone."""
    forward = recorded(lambda x: (x, x[:1]), buckets=[2])
    serve(forward, 2, 2)
    x = rows(2)
    whole, part = forward(x)
    serve(forward, 2)
    assert torch.equal(x, whole)
    assert torch.equal(x[:1], part)


def test_alias() -> None:
    """With outputs="alias" the result is the graph's memory, which the next replay overwrites."""
    forward = recorded(double, buckets=[2, 4], outputs="alias", pad="zeros")
    serve(forward, 2, 2, 4, 4)
    x, y = rows(2), rows(2)
    first = forward(x)
    assert torch.equal(double(x), first)
    assert first.data_ptr() == forward(y).data_ptr()
    assert torch.equal(double(y), first)
    assert (3, 3) == tuple(forward(rows(3)).shape)


def test_alias_fed_back() -> None:
    """A result that is the next call's argument, as in a decode loop, gives eager's numbers."""
    forward = recorded(lambda x: x * 1.5 + 1, buckets=[2], outputs="alias")
    ours = theirs = rows(2)
    for _ in range(8):
        ours, theirs = forward(ours), theirs * 1.5 + 1
        assert torch.equal(theirs, ours)


def test_results_in_containers() -> None:
    """Tuples, named tuples, dicts, dataclasses and ModelOutput come back as such, with their constants."""
    Pair = collections.namedtuple("Pair", "left right")

    @dataclasses.dataclass
    class Reply:
        logits: torch.Tensor
        hidden: list[torch.Tensor]
        note: str | None = None

    def step(x: torch.Tensor) -> Any:
        return {"pair": Pair(x + 1, 3), "reply": Reply(x * 2, [x - 1]), "t": (x.sum(), None)}

    forward = recorded(step, buckets=[2])
    for _ in range(4):
        x = rows(2)
        expected, actual = step(x), forward(x)
        assert (Pair, Reply, tuple) == (type(actual["pair"]), type(actual["reply"]), type(actual["t"]))
        assert torch.equal(expected["pair"].left, actual["pair"].left)
        assert torch.equal(expected["reply"].hidden[0], actual["reply"].hidden[0])
        assert (3, None, None) == (actual["pair"].right, actual["reply"].note, actual["t"][1])


def test_model_outputs() -> None:
    """A ModelOutput of a padded call is one, cut to the caller's rows."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    forward = recorded(lambda x: outputs.BaseModelOutput(last_hidden_state=x + 1), buckets=[2, 4], pad="zeros")
    serve(forward, 2, 2, 4, 4)
    x = rows(3)
    result = forward(x)
    assert 3 == counts(forward)["graph"]
    assert isinstance(result, outputs.BaseModelOutput)
    assert torch.equal(x + 1, result.last_hidden_state)
    assert torch.equal(x + 1, result[0])


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "attempts"),
    [(lambda x: x * float(x.sum()), 1), (lambda x: (x, object()), 2)],
    ids=["sync", "output"],
)
def test_a_failed_capture_goes_on_serving_and_is_bounded(broken: Any, attempts: int) -> None:
    """Eager results, at most two attempts per bucket (one where the eager run showed it), a cause, nobody disturbed."""
    forward = recorded(broken, buckets=[1, 2])
    for n in (1, 2) * 10:
        x = rows(n)
        assert torch.equal(broken(x)[0], forward(x)[0])
    assert {"warmup": 2, "capture_failed": 18} == counts(forward)
    assert {(1, "error"): attempts, (2, "error"): attempts} == forward.snapshot().capture_outcomes
    assert any("bucket 2" in text for text in forward.snapshot().causes.values())
    good = recorded(double, buckets=[2], name="good")
    serve(good, 2, 2)
    assert {"graph": 1, "warmup": 1} == counts(good)


def test_a_failed_capture_leaves_no_trace() -> None:
    """State, random numbers and arguments after a failed capture are those of one eager call."""

    def make() -> Any:
        cache = torch.zeros(2, 3)

        def step(x: torch.Tensor) -> torch.Tensor:
            cache.add_(x + torch.rand_like(x))
            x.mul_(2)
            return cache * (2 if float(cache.sum()) > 0 else 3)

        return step

    plain, forward = make(), recorded(make(), buckets=[2])
    for seed in range(5):
        x = rows(2)
        y = x.clone()
        torch.manual_seed(seed)
        expected = plain(x)
        torch.manual_seed(seed)
        assert torch.equal(expected, forward(y))
        assert torch.equal(x, y)


def test_an_exception_of_the_forward_passes_untouched() -> None:
    """The caller's own error, raised once, on eager and on the call that would capture; nothing is counted."""
    ran = [0]

    def step(x: torch.Tensor) -> torch.Tensor:
        ran[0] += 1
        raise LookupError(f"run {ran[0]}")

    forward = recorded(step, buckets=[2])
    for _ in range(4):
        with pytest.raises(LookupError, match="run"):
            forward(rows(2))
    assert {} == counts(forward)


def test_the_forward_runs_exactly_once_per_call() -> None:
    """The device work of each call happens once, on every path: eager, capturing, replayed, padded, failed."""
    work = torch.zeros(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        work.add_(1)
        return x + work

    forward = recorded(step, buckets=[2, 4], pad={"x": 0}, timing=1)
    for calls, n in enumerate((2, 2, 2, 3, 4, 4, 3, 5, 1, 3, 2), 1):
        x = rows(n)
        assert torch.equal(x + calls, forward(x))
        assert calls == int(work)


@pytest.mark.parametrize("own", [False, True])
def test_random_numbers_are_eagers(own: bool) -> None:
    """From one seed eager and graph draw the same numbers, call for call, of torch's generator or a named one."""
    generator = torch.Generator() if own else torch.default_generator

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=generator)

    forward = recorded(step, buckets=[2], generators=(generator,) if own else ())
    x = torch.zeros(2, 3)
    generator.manual_seed(3)
    expected = [step(x).tolist() for _ in range(6)]
    generator.manual_seed(3)
    assert expected == [forward(x).tolist() for _ in range(6)]
    assert 5 == counts(forward)["graph"]


def test_a_captured_forward_inside_another() -> None:
    """The inner one is part of the outer graph; both give eager's result."""
    inner = recorded(lambda x: x + 1, buckets=[2], name="inner")
    outer = recorded(lambda x: inner(x) * 2, buckets=[2], name="outer")
    for _ in range(5):
        x = rows(2)
        assert torch.equal((x + 1) * 2, outer(x))
    assert {"graph": 4, "warmup": 1} == counts(outer)


# -- threads and processes -----------------------------------------------------------------------------------------


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns fifty times as often as usual, so that a race shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("attempt", range(4))
def test_threads_get_their_own_results(switching: None, attempt: int) -> None:
    """Six threads on one wrapper: every result is eager's, no call is lost or raises, each bucket is captured once."""
    weight = rows(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ weight) + x

    forward, wrong = recorded(step, buckets=[1, 2, 4], pad="repeat"), []

    def go(k: int) -> None:
        generator = torch.Generator().manual_seed(k)
        with torch.no_grad():
            for i in range(100):
                x = torch.randn(1 + (i + k) % 5, 3, generator=generator)
                result: Any = forward(x)
                if type(result) is not torch.Tensor or not torch.allclose(step(x), result, atol=1e-6):
                    wrong.append((k, i, result))

    threads = [threading.Thread(target=go, args=(k,), daemon=True) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [False] * 6 == [thread.is_alive() for thread in threads]
    assert [] == wrong
    assert 600 == sum(counts(forward).values())
    assert {1: 1, 2: 1, 4: 1} == forward.snapshot().captures


@pytest.mark.parametrize("both_modes", ["no_grad"], indirect=True)
def test_a_call_during_a_capture_is_not_kept_waiting() -> None:
    """While one thread captures, another is served eagerly with reason busy."""
    entered, leave = threading.Event(), threading.Event()
    first = threading.get_ident()

    def step(x: torch.Tensor) -> torch.Tensor:
        if torch._C._len_torch_dispatch_stack() and threading.get_ident() != first:
            entered.set()
            assert leave.wait(30)
        return x * 2

    forward = recorded(step, buckets=[1, 2])
    serve(forward, 2, 1, 1)

    def other() -> None:
        with torch.no_grad():
            serve(forward, 2)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert entered.wait(30)
    x = rows(1)
    assert torch.equal(x * 2, forward(x))
    leave.set()
    thread.join(30)
    assert {"graph": 2, "warmup": 2, "busy": 1} == counts(forward)


FORK = """
import os, torch
torch.set_num_threads(1)
from graphprobe import capture
f = capture(lambda x: x * 2, buckets=[2], backend="recorder", name="f")
with torch.no_grad():
    for _ in range(3): f(torch.ones(2))
    child = os.fork()
    if not child:
        ok = torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
        rows = [(str(r.reason), r.calls) for r in f.snapshot().rows]
        os._exit(0 if ok and rows == [("forked", 1)] else 1)
    status = os.waitpid(child, 0)[1]
    f(torch.ones(2))
assert f.snapshot().graph_calls == 3, f.snapshot()
assert status == 0, status
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_runs_eagerly() -> None:
    """A child never touches the parent's graphs, counts from zero with reason forked, and the parent goes on."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False)
    assert (0, "") == (done.returncode, done.stderr if done.returncode else "")


def test_one_off_shapes_do_not_fill_the_table() -> None:
    """Hundreds of trailing sizes that come once push out no graph, and keep no tensor alive."""
    forward = recorded(double, buckets=[2], max_graphs=4)
    serve(forward, 2, 2, 2)
    seen = []
    for width in range(10, 300):
        x = rows(2, width)
        assert torch.equal(double(x), forward(x))
        seen.append(weakref.ref(x))
    del x
    serve(forward, 2)
    assert 0 == sum(ref() is not None for ref in seen)
    assert 3 == counts(forward)["graph"]


# -- what a newcomer stumbles over -----------------------------------------------------------------------------------

OUTER = torch.arange(24.0).reshape(3, 8)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :2] + 1,
        lambda x: x[:, None] * 2,
        lambda x: x.t() @ x,
        lambda x: OUTER[:, :3].sum() + x,
        lambda x: x.chunk(3, 1)[0] + x.view(-1)[:1],
        lambda x: (x + 1)[None][0],
    ],
    ids=["slice", "new axis", "transpose", "of a tensor outside", "chunk", "of a tensor inside"],
)
def test_views_are_captured_in_every_mode(view: Any) -> None:
    """Views of staged, outside and inside tensors are captured under no_grad and in inference mode alike."""
    forward = recorded(view, buckets=[2])
    for _ in range(4):
        x = rows(2)
        assert torch.equal(view(x), forward(x))
    assert {"warmup": 1, "graph": 3} == counts(forward)


def test_a_static_argument_that_is_new_at_each_call_is_said_to_move() -> None:
    """From the fourth object on ``static_moved`` with a cause, no endless warm-up; one that stays is captured."""
    forward, kept = recorded(lambda x, kv: x + kv[:2], buckets=[2], static=("kv",)), []
    for _ in range(8):
        kept.append(torch.ones(4, 3))
        forward(rows(2), kept[-1])
    assert {"warmup": 3, "static_moved": 5} == counts(forward)
    assert any("another object at each call" in text for text in forward.snapshot().causes.values())
    for _ in range(4):
        forward(rows(2), kept[-1])
    assert counts(forward)["graph"] > 0


def test_a_call_unlike_the_captured_ones_is_told_what_differs() -> None:
    """After warm-up the cause names the argument with both of its kinds, or the mode."""
    forward = recorded(double, buckets=[2])
    forward.warmup(lambda bucket: ((rows(bucket),), {}))
    forward(rows(2).double())
    assert any("`x` is torch.float64 [-1, 3]" in text for text in forward.snapshot().causes.values())
    other = recorded(double, buckets=[2], name="other")
    other.warmup(lambda bucket: ((rows(bucket),), {}))
    with torch.inference_mode(not torch.is_inference_mode_enabled()), torch.no_grad():
        other(rows(2))
    assert any("inference mode differs" in text for text in other.snapshot().causes.values())


def test_reasons_that_count_nowhere_have_a_cause_all_the_same() -> None:
    """Autograd and a device without graphs are said once, with what to do."""
    weights = torch.nn.Linear(3, 3)
    forward = recorded(lambda x: weights(x), buckets=[2])
    with torch.inference_mode(False), torch.enable_grad():
        serve(forward, 2, 2)
    assert any("inference_mode" in text for text in forward.snapshot().causes.values())
    plain = capture(double, buckets=[2], name="plain")
    serve(plain, 2)
    assert any("GRAPHPROBE_BACKEND" in text for text in plain.snapshot().causes.values())


def test_a_keyword_that_does_not_exist_is_corrected() -> None:
    """A typing mistake in a keyword gets the nearest one."""
    with pytest.raises(ConfigError, match="did you mean buckets"):
        recorded(double, bucket=[2])


def test_a_scalar_whose_storage_is_replaced_is_noticed_within_the_check() -> None:
    """A tensor without dimensions has an address, too."""
    scale = torch.tensor(2.0)
    forward = recorded(lambda x: x * scale, buckets=[2])
    serve(forward, 2, 2, 2)
    scale.data = torch.tensor(5.0)
    serve(forward, *[2] * (CHECK + 1))
    x = rows(2)
    assert torch.equal(x * 5, forward(x))
    assert 1 == counts(forward)["weights_moved"]


def test_moving_is_said_of_what_is_passed_by_reference_only() -> None:
    """Growing widths wait for their capture; a size without a bucket, or with one given up, keeps its reason."""
    wide = recorded(lambda x, t: x + t.sum(1, keepdim=True), buckets=[2], narrow={"t": (1, 0)}, name="wide")
    for width in range(1, 7):
        wide(rows(2), rows(2, width))
    assert {"warmup": 6} == counts(wide)
    caches = [torch.ones(4, 3) for _ in range(5)]
    hole = recorded(lambda x, kv: x + kv[: x.shape[0]], buckets=[2, 4], static=("kv",), name="hole")
    for cache in caches * 3:
        hole(rows(3), cache)
    assert {"no_exact_bucket": 15} == counts(hole)
    broken = recorded(lambda x, kv: x + float(kv.sum()), buckets=[2], static=("kv",), name="broken")
    for cache in caches * 3:
        broken(rows(2), cache)
    assert {"warmup": 5, "capture_failed": 10} == counts(broken)
    assert {(2, "error"): 5} == broken.snapshot().capture_outcomes


def test_another_static_tensor_after_warmup_is_called_that() -> None:
    """The cause does not show two equal shapes."""
    kv = torch.ones(4, 3)
    forward = recorded(lambda x, kv: x + kv[:2], buckets=[2], static=("kv",))
    forward.warmup(lambda bucket: ((rows(bucket), kv), {}))
    forward(rows(2), torch.ones(4, 3))
    assert any("`kv` is another tensor" in text for text in forward.snapshot().causes.values())


def test_a_refused_capture_without_rehearsal_leaves_the_callers_empty_list_alone() -> None:
    """With eager_first=0 the capture is the first to see that the forward fills its list: it fills a copy."""

    def step(x: torch.Tensor, out: list[torch.Tensor]) -> torch.Tensor:
        out.append(x * 2)
        return x

    forward = recorded(step, buckets=[2], eager_first=0)
    for _ in range(4):
        out: list[torch.Tensor] = []
        forward(rows(2), out)
        assert 1 == len(out)
    assert {"capture_failed": 4} == counts(forward)


def test_warmup_reports_the_failure_of_its_own_wrapper() -> None:
    """Two wrappers of one name: the outcome of one says nothing of the other."""
    for broken, outcome in ((lambda x: x * float(x.sum()), "error"), (double, "ok")):
        forward = recorded(broken, buckets=[2], name="shared")
        (entry,) = forward.warmup(lambda bucket: ((rows(bucket),), {}))
        assert outcome == entry.outcome
        assert bool(entry.error) == (outcome == "error")


# -- what a forward may ask of its arguments ------------------------------------------------------------------------


def same_or_not(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """As attention does, which has a shorter way where query and key are one tensor."""
    return q * 3 if q is k else q + k


@pytest.mark.parametrize("first", ["one", "two"])
@pytest.mark.parametrize("form", ["positions", "keywords", "list"])
def test_a_tensor_that_is_passed_twice_is_one_in_the_graph_too(form: str, first: str) -> None:
    """Calls with one tensor twice and calls with two have graphs of their own, whichever came first."""
    call = {
        "positions": lambda f, q, k: f(q, k),
        "keywords": lambda f, q, k: f(q=q, k=k),
        "list": lambda f, q, k: f([q, k]),
    }[form]

    def step(q: Any, k: Any = None) -> torch.Tensor:
        return same_or_not(*(q if k is None else (q, k)))

    forward, kinds = recorded(step, buckets=[2]), ["one", "two"] if first == "one" else ["two", "one"]
    for kind in kinds * 3 + [kinds[0]] * 3 + [kinds[1]] * 3:
        q = rows(2)
        k = q if kind == "one" else rows(2)
        assert torch.equal(same_or_not(q, k), call(forward, q, k))
    assert {"warmup": 2, "graph": 10} == counts(forward)


@pytest.mark.parametrize("before", [True, False], ids=["after another call", "from the start"])
def test_an_argument_that_is_a_static_one_is_never_another_tensor(before: bool) -> None:
    """What is passed by reference and as an argument at once cannot be staged: such calls stay eager."""
    forward, kept = recorded(same_or_not, buckets=[2], static=("k",)), rows(2)
    for _ in range(3 if before else 0):
        q = rows(2)
        assert torch.equal(q + kept, forward(q, kept))
    for _ in range(4):
        assert torch.equal(kept * 3, forward(kept, kept))
    assert {"graph": 2} if before else {} == {k: n for k, n in counts(forward).items() if k == "graph"}


@pytest.mark.parametrize("form", ["argument", "list"])
def test_what_is_hung_on_a_tensor_is_followed(form: str) -> None:
    """A static input has no attributes, so a tensor that bears one is not staged: eager, named."""

    def step(x: torch.Tensor, y: Any) -> torch.Tensor:
        y = y[0] if form == "list" else y
        return x + y * getattr(y, "scale", 1.0)

    forward = recorded(step, buckets=[2])
    for scale in (1.0, 2.0, 3.0, 4.0):
        x, y = rows(2), rows(2)
        y.scale = scale  # type: ignore[attr-defined]
        assert torch.equal(x + y * scale, forward(x, [y] if form == "list" else y))
    assert {"signature": 4} == counts(forward)
    assert any("whose content a graph cannot follow" in text for text in forward.snapshot().causes.values())


@pytest.mark.parametrize("keys", [(1, 1.0, True), (0.0, -0.0), (1.0, 1 + 0j)], ids=str)
def test_keys_that_python_takes_for_equal_are_told_apart(keys: tuple[Any, ...]) -> None:
    """A forward may compute with the key itself, and 1, 1.0 and True are different to a kernel."""

    def step(table: dict[Any, torch.Tensor]) -> torch.Tensor:
        ((key, value),) = table.items()
        return 1 / (value * key)

    forward = recorded(step, buckets=[2])
    for key in [k for k in keys for _ in range(4)] + list(keys):
        table = {key: torch.randint(1, 9, (2, 3))}
        expected, result = step(table), forward(table)
        assert (expected.dtype, expected.tolist()) == (result.dtype, result.tolist())
    assert len(keys) * 4 == counts(forward)["graph"]


@pytest.mark.parametrize("name", ["layer.0", "class", "1x", "a b", "None", "é"])
def test_an_attribute_of_the_context_may_have_any_name(name: str) -> None:
    """Engines put tensors on their context by setattr, under names that no code could spell."""

    class Step:
        pass

    step = Step()
    forward = recorded(lambda x: x + getattr(step, name)[:, None], buckets=[2], context=lambda: step)
    for _ in range(5):
        setattr(step, name, torch.randn(2))
        x = rows(2)
        assert torch.equal(x + getattr(step, name)[:, None], forward(x))
    assert {"warmup": 1, "graph": 4} == counts(forward)


@pytest.mark.parametrize("error", [KeyError, IndexError, AttributeError, TypeError, RuntimeError])
def test_what_context_raises_reaches_the_caller_and_it_is_asked_once(error: type[Exception]) -> None:
    """context= may hand out the step's metadata and forget it: one question per call, and its own exception."""
    steps: list[Any] = []

    def context() -> Any:
        asked.append(1)
        if not steps:
            raise error("no step is under way")
        return steps.pop()

    asked: list[int] = []

    class Step:
        def __init__(self) -> None:
            self.mask = torch.zeros(2, 1)

    forward = recorded(double, buckets=[2], context=context)
    for _ in range(4):
        steps.append(Step())
        serve(forward, 2)
    assert {"warmup": 1, "graph": 3} == counts(forward)
    asked.clear()
    with pytest.raises(error, match="no step is under way"):
        forward(rows(2))
    assert [1] == asked
    assert {"warmup": 1, "graph": 3} == counts(forward)
    steps.append(Step())
    serve(forward, 2)
    assert {"warmup": 1, "graph": 4} == counts(forward)


# -- what an outer tool or a stranger does --------------------------------------------------------------------------


class Doubled(torch.overrides.TorchFunctionMode):
    """Gives ``relu`` another meaning, as an emulation of a number format would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.relu else result


@pytest.mark.parametrize("first", [False, True], ids=["plain calls first", "the tool first"])
def test_a_mode_that_reinterprets_functions_is_obeyed(first: bool) -> None:
    """Under a tool's torch-function mode calls are eager, so that it sees them; nothing of it is left in a graph."""
    forward = recorded(lambda x: torch.relu(x), buckets=[2])
    for under in (True, True, True, False, False, False, True) if first else (False, False, False, True, True, False):
        x = rows(2)
        with Doubled() if under else torch.no_grad():
            assert torch.equal(torch.relu(x), forward(x))
    expected = {"graph": 2, "disabled": 4} if first else {"graph": 3, "disabled": 2}
    assert {"warmup": 1} | expected == counts(forward)


def test_a_default_device_hinders_no_graph() -> None:
    """``torch.device`` as a block is a function mode, too, and gives nothing another meaning."""
    forward = recorded(double, buckets=[2])
    with torch.device("cpu"):
        serve(forward, 2, 2, 2)
    serve(forward, 2, 2)
    assert 3 <= counts(forward)["graph"]


@pytest.mark.parametrize("captured", [False, True], ids=["before the capture", "after it"])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_trace_gets_the_forward_itself(captured: bool) -> None:
    """torch.jit.trace sees the operators, on the hot path, too; what it calls is counted like a call under any tool."""
    forward = recorded(double, buckets=[2])
    serve(forward, *[2] * (4 if captured else 1))
    before = counts(forward)
    traced = torch.jit.trace(forward, (rows(2),), check_trace=False)
    assert before | {"disabled": 1} == counts(forward)
    for n in (2, 5):
        x = rows(n)
        assert torch.equal(x * 2, traced(x))
    assert {int} == {type(row.batch_size) for row in forward.snapshot().rows}
    assert graphprobe.snapshot().to_json()


class Proxy:
    """Stands for something that is not there yet: what it is asked for it raises outside of a request."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("working outside of a request")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("working outside of a request")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("working outside of a request")

    __hash__ = None  # type: ignore[assignment]


PROXY = Proxy()


class Serving:
    """An engine with a proxy among its attributes, and a forward of its own."""

    def __init__(self) -> None:
        self.proxy, self.more = PROXY, {"proxy": PROXY, "list": [PROXY]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class ServingModule(torch.nn.Module):
    """A module that holds the same."""

    def __init__(self) -> None:
        super().__init__()
        self.proxy, self.more = PROXY, {"proxy": PROXY, "list": [PROXY]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("place", ["a global", "a closure", "an engine", "a module"])
def test_a_proxy_beside_the_forward_is_not_touched(place: str) -> None:
    """An object that raises where it is looked at never reaches the caller through us, and hinders no graph."""
    here = PROXY
    module, engine = ServingModule().eval(), Serving()
    forwards: dict[str, Any] = {
        "a global": lambda x: x * 2 if PROXY is not None else x,
        "a closure": lambda x: x * 2 if here is not None else x,
        "an engine": engine.forward,
        "a module": module,
    }
    forward = recorded(forwards[place], buckets=[2])
    for _ in range(2 * CHECK):
        x = rows(2)
        assert torch.equal(x * 2, forward(x))
    controls = forward.forward if place == "a module" else forward
    assert {"warmup": 1, "graph": 2 * CHECK - 1} == counts(controls)


class Hurried:
    """An item that is gone as soon as somebody looks at it: another thread takes it out of its container."""

    def __init__(self, container: Any) -> None:
        self.container = container

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        container = object.__getattribute__(self, "container")
        container.clear()
        return Hurried


@pytest.mark.parametrize("kind", [dict, set])
def test_a_container_of_the_module_may_change_while_it_is_looked_at(kind: Any) -> None:
    """An engine's other threads fill and empty the tables beside a forward; no call fails of that."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.jobs = kind()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = recorded(Model().eval(), buckets=[2])
    for _ in range(6):
        items = [Hurried(model.jobs) for _ in range(3)]
        model.jobs.update(dict.fromkeys(items) if kind is dict else items)
        x = rows(2)
        assert torch.equal(x * 2, model(x))
    assert {"warmup", "graph", "signature"} >= set(counts(model.forward))


@pytest.fixture
def depths() -> Iterator[Callable[[], tuple[int, int]]]:
    """How many modes stand on this thread's stacks; whatever a test leaves there is taken off."""

    def found() -> tuple[int, int]:
        return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()

    before = found()
    yield found
    while torch._C._len_torch_dispatch_stack() > before[0]:
        torch._C._pop_torch_dispatch_stack(None)
    while torch._C._len_torch_function_stack() > before[1]:
        torch._C._pop_torch_function_stack()


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
@pytest.mark.parametrize(
    ("kind", "run"),
    [
        (Watch, "rehearsal"),
        (HostReads, "rehearsal"),
        (Watch, "capture"),
        (HostReads, "capture"),
        (_Recording, "capture"),
    ],
)
def test_an_interrupt_leaves_no_mode_of_ours_behind(
    kind: Any, run: str, method: str, depths: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come between two lines of torch's own that put a mode on its stack, or take it off again.

    It reaches the caller, state is what it was before a capture, and later calls of the thread are served as ever.
    """
    total, original, before = torch.zeros(3), getattr(kind, method), depths()

    def step(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return x * 2

    def interrupted(self: Any, *args: Any) -> Any:
        if getattr(self, "lenient", False) is not (run == "rehearsal"):
            return original(self, *args)
        if method == "__enter__":
            original(self, *args)
        raise KeyboardInterrupt

    serve(recorded(double, buckets=[2], name="another"), 2, 2)
    forward = recorded(step, buckets=[2])
    serve(forward, *[2] * (run == "capture"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(kind, method, interrupted)
        serve(forward, 2)
    assert before == depths()
    assert (True, True) == (gc.isenabled(), torch.is_autocast_cache_enabled())
    # An interrupted eager run has run; an interrupted capture has not.
    ran = 0 if (run, method) == ("rehearsal", "__enter__") else 1
    assert [ran] * 3 == total.tolist()
    serve(forward, 2, 2, 2)
    assert [ran + 3] * 3 == total.tolist()
    assert {"warmup": 1, "graph": 2 + (run == "capture")} == counts(forward)


# -- what two sizes have shown, and what feeds back -----------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(8, 7, 8, 4, 4, 6), (8, 7, 8, 4, 6, 5), (7, 8, 8, 3, 6, 5, 6)], ids=str)
def test_an_output_that_contradicts_what_two_sizes_showed_is_never_cut(sizes: tuple[int, ...]) -> None:
    """Half of 7 and half of 8 rows are 4 rows, which seems not to follow the batch; a third size tells."""
    forward = recorded(lambda x: x[::2] * 1, buckets=[4, 8], pad={"x": 0})
    for n in sizes:
        x = rows(n)
        assert torch.equal(x[::2], forward(x))


@pytest.mark.parametrize("pad", ["zeros", "repeat", {"x": 0, "last": 0}], ids=str)
def test_an_input_with_one_row_per_request_is_padded_by_requests(pad: Any) -> None:
    """Beside two tokens per request stands one number per request: both grow to the bucket, and nothing fails."""

    def step(x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return x[1::2] + last[:, None]

    forward = recorded(step, buckets=[2, 4], unit="requests", tokens_per_request=2, pad=pad)
    for n in (4, 2, 4, 2, 3, 1, 3, 4, 1):
        x, last = rows(2 * n), torch.randn(n)
        assert torch.equal(step(x, last), forward(x, last))
    assert {"warmup", "graph"} == set(counts(forward))
    assert 6 <= counts(forward)["graph"]
    assert {4: 1, 2: 1} == forward.snapshot().captures


@pytest.mark.parametrize(
    "step",
    [lambda a, b: (a + b, a), lambda a, b: (b, a), lambda a, b: (b + 0, a[:]), lambda a, b: (a.view(2, 3), a + b)],
    ids=["fibonacci", "exchanged", "one copied", "a view in place"],
)
def test_aliased_results_may_come_back_in_other_places(step: Any) -> None:
    """A result that lies in an argument's buffer is no memory to hand out: the next call's copies would meet there."""
    forward = recorded(lambda a, b: step(a, b), buckets=[2], outputs="alias")
    ours = theirs = (rows(2), rows(2))
    for _ in range(8):
        ours, theirs = forward(*ours), step(*theirs)
        assert [t.tolist() for t in theirs] == [t.tolist() for t in ours]


def test_an_aliased_result_that_is_an_argument_may_come_back_as_another_one() -> None:
    """A forward that hands back the argument it has written to, as its only result."""
    forward = recorded(lambda a, b: a.add_(b), buckets=[2], outputs="alias")
    ours = theirs = rows(2)
    for _ in range(6):
        x = rows(2)
        theirs = x + theirs
        ours = forward(x, ours)
        assert torch.equal(theirs, ours)
        assert torch.equal(theirs, x)


def test_names_that_come_once_are_not_learnt_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may key its tensors by request: what is remembered per name has an end, and calls stay right."""
    monkeypatch.setattr("graphprobe.calls.MOST_PATHS", 8)
    forward = recorded(lambda x, table: x + sum(table.values()), buckets=[2, 4], pad="repeat", max_graphs=2)
    describers = [held for held in gc.get_objects() if type(held) is Describer and held.caller.parameters]
    for request in range(60):
        x, y = rows(2 + request % 3), rows(2 + request % 3)
        assert torch.equal(x + y, forward(x, {f"request {request}": y, f"length {request}": torch.zeros(1)}))
    sizes = [len(table) for held in describers for table in (held._followed, held._fixed)]
    assert 0 < max(sizes) <= 8


# -- attributes that the capture's own run sets ---------------------------------------------------------------------


class Remembering(torch.nn.Module):
    """Makes a tensor once per size and keeps it, from its input or from numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        if n not in self.kept:
            self.kept[n] = x * 2
        return x + self.kept[n]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({"eager_first": 0}, (4, 4, 4, 4)), ({"pad": "repeat"}, (3, 2, 4, 4, 4))],
    ids=["nothing rehearsed", "another size rehearsed"],
)
def test_an_attribute_that_the_captures_own_run_sets_is_eagers(options: Any, sizes: tuple[int, ...]) -> None:
    """What a first call of a size keeps is that call's: never the graph's memory, which each replay overwrites."""
    plain = Remembering().eval()
    model = recorded(Remembering().eval(), buckets=[4], **options)
    for n in sizes:
        x = rows(n)
        assert torch.equal(plain(x), model(x))
        assert {k: t.tolist() for k, t in plain.kept.items()} == {k: t.tolist() for k, t in model.kept.items()}


@pytest.mark.parametrize("eager_first", [0, 1])
def test_an_attribute_that_is_set_at_each_call_is_never_a_graph(eager_first: int) -> None:
    """With or without a rehearsal: after every call the attributes are those of one call more."""

    class Model(torch.nn.Module):
        last: Any = None
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last, self.calls = x * 2, self.calls + 1
            return self.last + self.calls

    model = recorded(Model().eval(), buckets=[2], eager_first=eager_first)
    for call in range(1, 7):
        x = rows(2)
        assert torch.equal(x * 2 + call, model(x))
        assert torch.equal(x * 2, model.last)
        assert call == model.calls
    assert "graph" not in counts(model.forward)


# -- weights that move ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", range(1, 6))
def test_a_model_that_moves_as_a_whole_is_right_at_the_next_call_whichever_address_is_looked_at(calls: int) -> None:
    """Every call looks at one weight's address, each time another's: where all have moved, the first look sees it."""
    weights = [torch.nn.Parameter(rows(3), requires_grad=False) for _ in range(3)]
    forward = recorded(lambda x: x @ weights[0] @ weights[1] @ weights[2], buckets=[2])
    serve(forward, *[2] * (1 + calls))
    with torch.inference_mode(False), torch.no_grad():
        for weight in weights:
            weight.data = rows(3)
    for _ in range(3):
        x = rows(2)
        assert torch.equal(x @ weights[0] @ weights[1] @ weights[2], forward(x))
    assert {"warmup": 1, "weights_moved": 1, "graph": calls + 2} == counts(forward)


@pytest.mark.parametrize("place", range(5))
def test_one_moved_weight_of_few_is_right_when_its_turn_comes(place: int) -> None:
    """Five weights are looked at within five calls, long before the look at all of them."""
    weights = [torch.nn.Parameter(torch.ones(3), requires_grad=False) for _ in range(5)]
    forward = recorded(lambda x: x * weights[0] * weights[1] * weights[2] * weights[3] * weights[4], buckets=[2])
    serve(forward, *[2] * 9)
    with torch.inference_mode(False), torch.no_grad():
        weights[place].data = torch.full((3,), 5.0)
    serve(forward, *[2] * 5)
    x = rows(2)
    assert torch.equal(x * 5, forward(x))
    assert 1 == counts(forward)["weights_moved"]


@pytest.mark.parametrize("swap", ["replaced", "moved"])
def test_a_weight_that_is_swapped_now_and_then_is_captured_again_each_time(swap: str) -> None:
    """A graph that has served for long has paid for its capture: the count of moves starts anew."""
    holder = {"w": torch.ones(3)}
    forward = recorded(lambda x: x * holder["w"], buckets=[2])
    serve(forward, 2, 2)
    for value in range(2, 3 + 2 * MOVES):
        serve(forward, *[2] * (CHECK * (SETTLED + 1)))
        with torch.inference_mode(False), torch.no_grad():
            if swap == "replaced":
                holder["w"] = torch.full((3,), float(value))
            else:
                holder["w"].data = torch.full((3,), float(value))
        for _ in range(3):
            x = rows(2)
            assert torch.equal(x * value, forward(x))
    assert 2 * MOVES + 2 == forward.snapshot().captures[2]
    assert {"warmup": 1, "graph": counts(forward)["graph"]} | {
        "static_moved" if swap == "replaced" else "weights_moved": 2 * MOVES + 1
    } == counts(forward)
    assert forward.snapshot().live[2]


@pytest.mark.parametrize("settled", [False, True], ids=["from the start", "after a graph that served for long"])
def test_a_weight_that_is_swapped_at_every_few_calls_is_left_eager(settled: bool) -> None:
    """After MOVES swaps in a row, counted from the last graph that served for long, nothing is captured any more."""
    holder = {"w": torch.ones(3)}
    forward = recorded(lambda x: x * holder["w"], buckets=[2])
    serve(forward, 2, 2)
    serve(forward, *[2] * (CHECK * (SETTLED + 1) * settled))
    for value in range(2, 12):
        holder["w"] = torch.full((3,), float(value))
        for _ in range(5):
            x = rows(2)
            assert torch.equal(x * value, forward(x))
    assert MOVES == forward.snapshot().captures[2]
    assert not forward.snapshot().live[2]
    served = counts(forward)["graph"]
    serve(forward, 2, 2, 2)
    assert served == counts(forward)["graph"]
