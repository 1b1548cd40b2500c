"""CUDA graphs on a GPU: right results, right counts, nothing left behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphprobe.graphed import capture


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """Engines serve in inference mode."""
    with torch.inference_mode():
        yield


def linear(width: int = 64) -> torch.nn.Module:
    torch.manual_seed(0)
    return (
        torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)).cuda().eval()
    )


def rows(n: int, width: int = 64) -> torch.Tensor:
    return torch.randn(n, width, device="cuda")


def test_an_exact_bucket_is_bit_equal_to_eager_and_every_call_is_counted_once() -> None:
    """Five rounds over buckets and holes: results equal eager bit by bit, one warm-up per bucket."""
    module = linear()
    graphed = capture(lambda x: module(x), buckets=[1, 2, 4, 8], name="exact")
    for _ in range(5):
        for n in (1, 2, 3, 4, 8, 9):
            x = rows(n)
            assert torch.equal(module(x), graphed(x))
    snapshot = graphed.snapshot()
    assert (16, 14) == (snapshot.graph_calls, snapshot.eager_calls)
    assert {1: 1, 2: 1, 4: 1, 8: 1} == dict(snapshot.captures)


def test_replays_counted_are_the_replays_of_the_class() -> None:
    """An independent count of CUDAGraph.replay agrees with the ledger."""
    seen, original = [0], torch.cuda.CUDAGraph.replay

    def counting(self: Any) -> None:
        seen[0] += 1
        original(self)

    torch.cuda.CUDAGraph.replay = counting  # type: ignore[method-assign]
    try:
        module = linear()
        graphed = capture(lambda x: module(x), buckets=[2], name="replays")
        for _ in range(10):
            graphed(rows(2))
        assert seen[0] == graphed.snapshot().graph_calls == 9
    finally:
        torch.cuda.CUDAGraph.replay = original  # type: ignore[method-assign]


def test_a_padded_call_is_equal_to_eager_at_the_padded_size() -> None:
    """Rows 3 in bucket 4: equal to eager on four rows, cut to three."""
    module = linear()
    graphed = capture(lambda x: module(x), buckets=[4, 8], pad="repeat", name="padded")
    for _ in range(4):
        for n in (3, 4, 5, 8):
            x = rows(n)
            bucket = 4 if n <= 4 else 8
            padded = torch.cat([x, x[-1:].expand(bucket - n, -1)])
            assert torch.allclose(module(padded)[:n], graphed(x), atol=1e-6)
    assert 0 < graphed.snapshot().padding


def test_a_result_is_not_overwritten_by_the_next_call() -> None:
    """The default hands out clones."""
    module = linear()
    graphed = capture(lambda x: module(x), buckets=[2], name="clones")
    for _ in range(2):
        graphed(rows(2))
    x, y = rows(2), rows(2)
    first = graphed(x)
    graphed(y)
    assert torch.equal(module(x), first)


def test_a_failed_capture_leaves_stream_allocator_and_later_captures_intact() -> None:
    """A forward that syncs is served eagerly, names its line, and the next capture works."""

    def bad(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if float(x.sum()) > 0 else 3)

    broken = capture(bad, buckets=[2], name="broken")
    before = torch.cuda.current_stream()
    for _ in range(6):
        x = rows(2)
        assert torch.equal(bad(x), broken(x))
    assert before == torch.cuda.current_stream()
    assert not torch.cuda.is_current_stream_capturing()
    assert "test_cuda.py" in str(dict(broken.snapshot().causes))
    module = linear()
    good = capture(lambda x: module(x), buckets=[2], name="after broken")
    for _ in range(3):
        x = rows(2)
        assert torch.equal(module(x), good(x))
    assert good.snapshot().graph_calls == 2


def test_a_capture_that_the_driver_refuses_is_survived() -> None:
    """A sync that the dispatcher does not show breaks the capture itself, and no more (H26, pytorch/pytorch#190348)."""

    def bad(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return x + 1

    broken = capture(bad, buckets=[2], name="driver refuses")
    for _ in range(5):
        x = rows(2)
        assert torch.equal(x + 1, broken(x))
    assert broken.snapshot().capture_outcomes == {(2, "error"): 2}
    torch.cuda.synchronize()


def test_twenty_failed_captures_reserve_no_more_than_one() -> None:
    """The pool is shared, so failures do not add up (H26, pytorch/pytorch#190348)."""

    def bad(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(4 << 20, device="cuda")
        torch.cuda.synchronize()
        return x + y[:1]

    reserved = []
    for i in range(20):
        broken = capture(bad, buckets=[2], name=f"leak {i % 2}")
        for _ in range(3):
            broken(rows(2))
        broken.reset()
        del broken
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= reserved[0] + (1 << 21), reserved


def test_reset_gives_the_pool_back() -> None:
    """Pool bytes are reported while graphs live and fall to zero after reset."""
    module = linear(512)
    graphed = capture(lambda x: module(x), buckets=[4, 8], name="pool")
    for _ in range(2):
        graphed(rows(4, 512))
        graphed(rows(8, 512))
    torch.cuda.synchronize()
    assert (graphed.snapshot().pool_bytes or 0) > 0
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    graphed.reset()
    gc.collect()
    torch.cuda.empty_cache()
    print("reserved before reset", held, "after", torch.cuda.memory_reserved())
    assert graphed.snapshot().pool_bytes is None
    assert torch.cuda.memory_reserved() <= held


def test_timed_calls_never_synchronize() -> None:
    """In torch's sync debug mode "error" a hundred timed calls pass, and samples arrive (H82, vllm#36542)."""
    module = linear()
    graphed = capture(lambda x: module(x), buckets=[2], timing=1, name="timed")
    x = rows(2)
    for _ in range(4):
        graphed(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            graphed(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    snapshot = graphed.snapshot()
    times = snapshot.times[("decode", "graph", "full", 2)]
    assert 90 <= times.count
    assert 1e-6 < (times.mean or 0) < 1e-2


def test_another_stream_and_another_thread_get_their_own_results() -> None:
    """Two threads on two streams share one wrapper; every result is eager's."""
    module = linear()
    graphed = capture(lambda x: module(x), buckets=[4], name="streams")
    for _ in range(2):
        graphed(rows(4))
    wrong = []

    def serve() -> None:
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(300):
                x = rows(4)
                if not torch.equal(module(x), graphed(x)):
                    wrong.append(x)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == wrong
    assert 601 == graphed.snapshot().graph_calls


def test_another_thread_that_uses_the_device_does_not_break_a_capture() -> None:
    """A thread that pins memory all the time is not disturbed, nor disturbs (H53, LibreYOLO/libreyolo#681).

    Captures run in thread-local mode.
    """
    module, stop, errors = linear(), threading.Event(), []

    def pin() -> None:
        while not stop.is_set():
            try:
                torch.empty(1024, pin_memory=True)
                torch.empty(1 << 20, device="cuda")
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        graphed = capture(lambda x: module(x), buckets=list(range(1, 11)), name="pinning")
        for n in range(1, 11):
            for _ in range(2):
                graphed(rows(n))
    finally:
        stop.set()
        thread.join()
    assert [] == errors
    assert 10 == sum(graphed.snapshot().captures.values())


def test_cpu_work_is_refused_with_a_reason() -> None:
    """A forward that reads a CPU tensor from outside would freeze its value: it is eager (H23, pytorch#88754)."""
    scale = torch.full((4, 64), 2.0)
    graphed = capture(lambda x: x * scale.cuda(), buckets=[4], name="cpu value")
    for _ in range(4):
        x = rows(4)
        assert torch.equal(x * 2, graphed(x))
    assert 0 == graphed.snapshot().graph_calls


def test_dropout_draws_anew_on_every_replay() -> None:
    """Random numbers advance with each replay, and a seed repeats them (H19, pytorch/pytorch#84614)."""
    graphed = capture(lambda x: x + torch.rand_like(x), buckets=[4], name="random")
    x = rows(4)
    for _ in range(2):
        graphed(x)
    assert not torch.equal(graphed(x), graphed(x))
    torch.manual_seed(7)
    first = [graphed(x), graphed(x)]
    torch.manual_seed(7)
    assert all(torch.equal(a, b) for a, b in zip(first, [graphed(x), graphed(x)], strict=True))


def test_a_cache_that_is_replaced_is_noticed_at_the_next_call() -> None:
    """The tensor the graph reads goes away: eager once, then captured anew."""
    holder = {"cache": torch.ones(4, 64, device="cuda")}
    graphed = capture(lambda x: x + holder["cache"][: x.shape[0]], buckets=[4], name="moved")
    for _ in range(3):
        graphed(rows(4))
    holder["cache"] = torch.full((4, 64), 5.0, device="cuda")
    for _ in range(3):
        x = rows(4)
        assert torch.equal(x + 5, graphed(x))
    reasons = {str(r.reason): r.calls for r in graphed.snapshot().rows if r.reason}
    assert {"warmup": 1, "static_moved": 1} == reasons


def test_a_compiled_forward_is_captured_compiled() -> None:
    """torch.compile inside the forward: the graph holds the compiled kernels, bit-equal to the compiled eager call."""
    module = torch.compile(linear())
    graphed = capture(lambda x: module(x), buckets=[4], name="compiled")
    for _ in range(4):
        x = rows(4)
        assert torch.equal(module(x), graphed(x))
    assert 3 == graphed.snapshot().graph_calls


def test_a_forward_of_which_parts_are_compiled_is_captured() -> None:
    """What a compiled part returns is made inside, past the dispatcher, and is read and written by eager operators."""
    weight = torch.full((64,), 2.0, device="cuda")
    first, last = linear(), linear()

    @torch.compile
    def norm(x: torch.Tensor) -> torch.Tensor:
        return x.float().mul(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).mul_(weight)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = norm(first(x))
        y.add_(1)
        return last(norm(y))

    graphed = capture(forward, buckets=[2, 4], pad="repeat", name="partly compiled")
    with torch.inference_mode():
        for size in (4, 4, 4, 2, 2, 2, 3, 3):
            x = rows(size)
            torch.testing.assert_close(forward(x), graphed(x))
        x = rows(4)
        assert torch.equal(forward(x), graphed(x))
    found = graphed.snapshot()
    assert found.graph_calls >= 5, found.causes


def test_a_buffer_from_outside_that_only_a_compiled_part_reads_is_still_watched() -> None:
    """An owner that replaces it ends the graph: in a module all weights are followed where parts are compiled."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((64,), 2.0, device="cuda"))
            self.inner = linear()
            self.part = torch.compile(lambda x, scale: x * scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.part(x, self.scale))

    module = Scaled().eval()
    plain = module.forward
    graphed = capture(module, buckets=[4], name="partly compiled, watched")
    with torch.inference_mode():
        for _ in range(3):
            x = rows(4)
            assert torch.equal(plain(x), graphed(x))
        module.scale = torch.full((64,), 5.0, device="cuda")
        for _ in range(3):
            x = rows(4)
            assert torch.equal(plain(x), graphed(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_memory_efficient_attention_gets_its_graph(dtype: torch.dtype) -> None:
    """It hands a seed back on the host when it is not captured, which is no reason to refuse."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.view(x.shape[0], 4, 16, 16)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    graphed = capture(attend, buckets=[2], name=f"efficient {dtype}")
    for _ in range(4):
        x = rows(2, 1024).to(dtype)
        assert torch.equal(attend(x), graphed(x))
    assert 3 == graphed.snapshot().graph_calls


def test_warmup_captures_largest_first_and_closes_the_set() -> None:
    """After warm-up nothing is captured in traffic: another dtype is eager with reason signature."""
    module = linear()
    graphed = capture(lambda x: module(x.float()), buckets=[1, 2, 4], name="warm")
    report = graphed.warmup(lambda bucket: ((rows(bucket),), {}))
    assert [4, 2, 1] == [b.bucket for b in report]
    assert (1, 2, 4) == report.captured, report
    for n in (1, 2, 4):
        x = rows(n)
        assert torch.equal(module(x), graphed(x))
    graphed(rows(2).half())
    counts = {str(r.reason): r.calls for r in graphed.snapshot().rows if r.reason}
    assert {"signature": 1} == counts


def test_buckets_of_one_pool_replay_in_any_order() -> None:
    """Three graphs, one pool: 200 replays in random order equal eager, results kept (H56, pytorch/pytorch#166975)."""
    module = linear()
    graphed = capture(lambda x: module(x), buckets=[2, 4, 8], name="one pool")
    for n in (8, 4, 2) * 2:
        graphed(rows(n))
    order = torch.randint(0, 3, (200,)).tolist()
    kept = []
    for index in order:
        x = rows((2, 4, 8)[index])
        kept.append((module(x), graphed(x)))
    assert all(torch.equal(a, b) for a, b in kept)


def test_a_cache_passed_by_reference_is_written_once_per_call() -> None:
    """A slot-indexed cache write under graphs leaves the cache as eager does, scratch slot apart."""
    caches = [torch.zeros(9, 64, device="cuda") for _ in range(2)]

    def step(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.index_add_(0, slots, x)
        return cache[slots] * 2

    graphed = capture(step, buckets=[4], static=("cache",), pad={"x": 0, "slots": 8}, name="cache")
    for n in (4, 4, 3, 3, 3, 4, 2):
        x, slots = rows(n), torch.randperm(8, device="cuda")[:n]
        assert torch.equal(step(x, slots, caches[0]), graphed(x, slots, caches[1]))
        assert torch.equal(caches[0][:8], caches[1][:8])
    assert graphed.snapshot().padding > 0


def test_a_wrapper_on_the_current_device_leaves_the_callers_stream_current() -> None:
    """After a capture and replays on a side stream, that stream is still the current one, and results are right."""
    module, stream = linear(), torch.cuda.Stream()
    graphed = capture(lambda x: module(x), buckets=[4], name="side stream")
    with torch.cuda.stream(stream):
        for _ in range(5):
            x = rows(4)
            assert torch.equal(module(x), graphed(x))
            assert stream == torch.cuda.current_stream()
    assert 4 == graphed.snapshot().graph_calls


def test_a_call_inside_a_foreign_capture_becomes_part_of_it() -> None:
    """Somebody else captures around a captured forward: theirs works, ours does not replay inside (H85, warp#556)."""
    module = linear()
    graphed = capture(lambda x: module(x), buckets=[4], name="foreign")
    x = rows(4)
    for _ in range(3):
        graphed(x)
    outer, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        module(x)
    torch.cuda.current_stream().wait_stream(side)
    fresh = capture(lambda x: module(x), buckets=[4], eager_first=0, name="foreign, not yet captured")
    with torch.cuda.graph(outer):
        result = graphed(x) + fresh(x)
    x.copy_(rows(4))
    outer.replay()
    assert torch.equal(module(x) + module(x), result)
    assert 0 == fresh.snapshot().graph_calls
    assert {"warmup": 1, "disabled": 1} == {str(r.reason): r.calls for r in graphed.snapshot().rows if r.reason}


def test_out_of_memory_keeps_the_buckets_that_fit() -> None:
    """A bucket whose forward does not fit is reported as oom; the others serve (H27, pytorch/pytorch#159594)."""

    def step(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 8 and torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        return x * 2

    graphed = capture(step, buckets=[2, 4, 8], name="oom")
    report = graphed.warmup(lambda bucket: ((rows(bucket),), {}))
    assert (2, 4) == report.captured
    assert {"oom"} == {b.outcome for b in report if b.bucket == 8}
    for n in (2, 4, 8):
        x = rows(n)
        assert torch.equal(x * 2, graphed(x))
    assert {"capture_failed": 1} == {str(r.reason): r.calls for r in graphed.snapshot().rows if r.reason}
