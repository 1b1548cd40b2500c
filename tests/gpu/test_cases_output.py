"""Published failure reports, right output: what graphs on a GPU made wrong elsewhere is right here, or eager."""

from __future__ import annotations

import collections
import gc
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphprobe.graphed import capture


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """Engines serve in inference mode."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def rows(n: int, width: int = 64) -> torch.Tensor:
    return torch.randn(n, width, device="cuda")


def linear(width: int = 64, layers: int = 2, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, dtype=dtype) for _ in range(layers)]).cuda().eval()


def counts(forward: Any) -> dict[str, int]:
    """Calls by reason; those that a graph served under ``graph``."""
    found: collections.Counter[str] = collections.Counter()
    for row in forward.snapshot().rows:
        found[str(row.reason or "graph")] += row.calls
    return dict(found)


def seconds(run: Callable[[], Any], calls: int) -> float:
    """Seconds for ``calls`` calls, all work of the device included."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(calls):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e-3


# -- the copy of a result (H14) ------------------------------------------------------------------------------------


def test_the_copy_of_a_result_never_leaves_the_device() -> None:
    """500 results are copied without a host sync, on the caller's stream (H14, sgl-project/sglang#8003)."""
    module = linear(4096, dtype=torch.float16)
    graphed = capture(lambda x: module(x), buckets=[1], name="H14 no sync")
    x, side = rows(1, 4096).half(), torch.cuda.Stream()
    for _ in range(3):
        graphed(x)
    total = torch.zeros(1, 4096, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError):
                total.sum().item()
            for _ in range(500):
                # A copy on another stream would be read here before it is written.
                total += graphed(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    assert torch.equal(module(x), graphed(x))
    torch.testing.assert_close(total, 500 * module(x).float(), rtol=1e-4, atol=1e-2)
    assert {"graph": 503, "warmup": 1} == counts(graphed)


def test_the_copy_of_a_result_costs_little_beside_the_replay() -> None:
    """500 replays that hand out copies take at most a tenth longer than without (H14, sgl-project/sglang#8003)."""
    module, x = linear(4096, layers=16, dtype=torch.float16), rows(1, 4096).half()
    forwards = [
        capture(lambda x: module(x), buckets=[1], outputs=kind, name=f"H14 {kind}") for kind in ("clone", "alias")
    ]
    for forward in forwards:
        for _ in range(20):
            forward(x)
    ratios = [seconds(lambda: forwards[0](x), 500) / seconds(lambda: forwards[1](x), 500) for _ in range(5)]
    print("seconds with copies over seconds without:", [f"{ratio:.3f}" for ratio in ratios])
    assert 1.1 >= statistics.median(ratios)


# -- random numbers (H19) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True], ids=["default generator", "own generator"])
def test_a_seed_gives_a_graph_the_numbers_that_it_gives_eager(own: bool) -> None:
    """Replays draw anew, and after a seed as eager does after it (H19, pytorch/pytorch#84614)."""
    device = torch.cuda.current_device()
    generator = torch.Generator("cuda") if own else torch.cuda.default_generators[device]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, device="cuda", generator=generator)

    given = (generator,) if own else ()
    graphed = capture(forward, buckets=[4], generators=given, name=f"H19 {own}")
    x = rows(4)
    for _ in range(2):
        graphed(x)
    assert not torch.equal(graphed(x), graphed(x))

    def pair(run: Callable[[torch.Tensor], torch.Tensor], seed: int) -> list[torch.Tensor]:
        generator.manual_seed(seed)
        return [run(x), run(x)]

    first, other, again, eager = pair(graphed, 7), pair(graphed, 8), pair(graphed, 7), pair(forward, 7)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, eager, strict=True))
    assert not torch.equal(first[0], other[0])
    assert {"graph": 9, "warmup": 1} == counts(graphed)


def test_a_generator_that_was_not_given_is_not_frozen() -> None:
    """Random numbers of a generator that the graph does not know stay eager's (H19, pytorch/pytorch#84614)."""
    generator = torch.Generator("cuda")
    graphed = capture(lambda x: x + torch.rand(x.shape, device="cuda", generator=generator), buckets=[4], name="H19 no")
    x, results = rows(4), []
    for _ in range(6):
        results.append(graphed(x))
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(results))
    generator.manual_seed(7)
    first = graphed(x)
    generator.manual_seed(7)
    assert torch.equal(first, graphed(x))


# -- autocast (H22) ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inferring", [True, False], ids=["inference", "no_grad"])
def test_a_graph_under_autocast_reads_the_weights_of_today(inferring: bool) -> None:
    """No cast weight is frozen; outside autocast, or with another dtype, another graph (H22, pytorch/pytorch#71631)."""
    with torch.inference_mode(False), torch.enable_grad():
        module = linear()
    assert all(p.requires_grad for p in module.parameters())

    def under(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with torch.autocast("cuda", dtype):
            return run(x)

    graphed = capture(lambda x: module(x), buckets=[4], name=f"H22 {inferring}")
    with torch.inference_mode(inferring), torch.no_grad():
        for _ in range(3):
            x = rows(4)
            assert torch.equal(under(module, x, torch.bfloat16), under(graphed, x, torch.bfloat16))
        for parameter in module.parameters():
            parameter.mul_(1.5)
        x = rows(4)
        result = under(graphed, x, torch.bfloat16)
        assert torch.bfloat16 == result.dtype
        assert torch.equal(under(module, x, torch.bfloat16), result)
        for _ in range(3):
            result = graphed(x)
            assert torch.float32 == result.dtype
            assert torch.equal(module(x), result)
            result = under(graphed, x, torch.float16)
            assert torch.float16 == result.dtype
            assert torch.equal(under(module, x, torch.float16), result)
    assert {"graph": 7, "warmup": 3} == counts(graphed)
    assert {4: 3} == graphed.snapshot().captures


def test_a_capture_inside_an_autocast_block_leaves_its_cache_usable() -> None:
    """One block around everything: a cast made in the capture is not read outside (H22, pytorch/pytorch#71631)."""
    with torch.inference_mode(False), torch.enable_grad():
        module = linear()
    graphed = capture(lambda x: module(x), buckets=[4], name="H22 one block")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for _ in range(3):
            x = rows(4)
            assert torch.equal(module(x), graphed(x))
        graphed.reset()
        gc.collect()
        torch.cuda.empty_cache()
        # Takes what the graph's memory was.
        junk = [torch.full((64, 64), float("nan"), device="cuda") for _ in range(64)]
        assert torch.isfinite(module(x)).all()
    del junk


# -- nothing to replay (H23) ---------------------------------------------------------------------------------------


def made_on_the_cpu(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[0], 3) * 3


def given_back(x: torch.Tensor) -> torch.Tensor:
    return x


TABLE = torch.arange(12.0).reshape(4, 3)


@pytest.mark.parametrize("forward", [made_on_the_cpu, lambda x: TABLE[: x.shape[0]] * 2], ids=["made", "outside"])
def test_a_forward_that_works_on_the_cpu_is_refused(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A graph without a node would hand out old values: it is no graph (H23, pytorch/pytorch#88754)."""
    graphed = capture(forward, buckets=[4], name=f"H23 {forward.__name__}")
    before = TABLE.clone()
    try:
        for step in range(5):
            TABLE.add_(step)
            x = rows(4)
            result = graphed(x)
            assert torch.equal(forward(x), result)
            assert "cpu" == result.device.type
    finally:
        TABLE.copy_(before)
    assert 0 == graphed.snapshot().graph_calls
    assert 0 < counts(graphed)["capture_failed"]
    assert {(4, "error")} == set(graphed.snapshot().capture_outcomes)
    assert graphed.snapshot().causes


def test_arguments_on_the_cpu_are_no_case_for_a_gpu_graph() -> None:
    """On a machine with a GPU, CPU tensors run eagerly and are counted so (H23, pytorch/pytorch#88754)."""
    graphed = capture(lambda x: x * 2, buckets=[4], name="H23 arguments")
    for _ in range(4):
        x = torch.randn(4, 3)
        assert torch.equal(x * 2, graphed(x))
    assert {"unsupported_device": 4} == counts(graphed)


def test_a_forward_that_launches_nothing_is_right_each_time() -> None:
    """A forward that hands its argument back gives today's values, graph or not (H23, pytorch/pytorch#88754)."""
    graphed = capture(given_back, buckets=[4], name="H23 given back")
    for _ in range(5):
        x = rows(4)
        assert torch.equal(x, graphed(x))


# -- a workspace that grows (H24) ----------------------------------------------------------------------------------


RUNS: list[tuple[int, bool, int]] = []
"""Host runs of a workspace's forward: size, whether in a capture, where the workspace was."""


class Workspace:
    """A forward with scratch memory of its own, which the smallest batch needs most of."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        need = (1 << 20) if x.shape[0] == 1 else x.numel()
        if self.memory is None or self.memory.numel() < need:
            self.memory = torch.zeros(need, device="cuda")
        RUNS.append((x.shape[0], torch.cuda.is_current_stream_capturing(), self.memory.data_ptr()))
        part = self.memory[: x.numel()]
        part.copy_(x.reshape(-1))
        return part.view(x.shape) * 2 + 1


def test_a_workspace_has_grown_before_anything_is_captured() -> None:
    """Warm-up runs every size, then captures every size, so all graphs read living memory (H24, vllm#55341)."""
    engine = Workspace()
    RUNS.clear()
    graphed = capture(engine.forward, buckets=[1, 8], name="H24 warm-up")
    report = graphed.warmup(lambda bucket: ((rows(bucket),), {}))
    assert (1, 8) == report.captured
    assert engine.memory is not None
    assert [False] * (len(RUNS) - 2) + [True] * 2 == [capturing for _, capturing, _ in RUNS]
    last = engine.memory.data_ptr()
    assert [(8, True, last), (1, True, last)] == RUNS[-2:]
    junk = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(16)]
    for n in (8, 1) * 4:
        x = rows(n)
        assert torch.equal(x * 2 + 1, graphed(x))
    assert {"graph": 8} == counts(graphed)
    del junk


def test_a_workspace_that_grows_in_traffic_ends_the_graphs_that_read_it() -> None:
    """A graph whose scratch memory was replaced is not replayed again (H24, vllm-project/vllm#55341)."""
    engine = Workspace()
    graphed = capture(engine.forward, buckets=[1, 8], name="H24 traffic")
    junk = []
    for n in (8, 8, 8, 8, 1, 8, 8, 8, 1, 1, 1, 8, 1):
        x = rows(n)
        assert torch.equal(x * 2 + 1, graphed(x))
        junk.append(torch.full((x.numel(),), float("nan"), device="cuda"))
    assert 1 == counts(graphed)["static_moved"]
    assert {"graph", "warmup", "static_moved"} == set(counts(graphed))
    assert {1: 1, 8: 2} == graphed.snapshot().captures


# -- pinned memory (H25) -------------------------------------------------------------------------------------------


def busy() -> None:
    """About a tenth of a millisecond of work on the current stream."""
    torch.cuda._sleep(200_000)


def test_pinned_memory_may_be_refilled_once_the_callers_own_copy_is_done() -> None:
    """A graph reads device memory only, so the caller's event is enough (H25, NVIDIA/Megatron-LM#5715)."""
    graphed = capture(lambda x: x * 2, buckets=[4], name="H25 event")
    pinned, device = torch.empty(4, 64, pin_memory=True), torch.empty(4, 64, device="cuda")
    copied, results = torch.cuda.Event(), []
    for step in range(1000):
        pinned.fill_(step)
        device.copy_(pinned, non_blocking=True)
        copied.record()
        busy()
        results.append(graphed(device))
        # The replay is still behind that work.
        copied.synchronize()
    wrong = [step for step, result in enumerate(results) if not torch.equal(result, torch.full_like(result, 2 * step))]
    assert [] == wrong
    assert {"graph": 999, "warmup": 1} == counts(graphed)


def test_a_forward_that_reads_pinned_memory_is_not_captured() -> None:
    """A captured copy would read the host's buffer when it is replayed, so it is refused (H25, Megatron-LM#5715)."""
    pinned = torch.empty(4, 64, pin_memory=True)
    graphed = capture(lambda x: x + pinned.to("cuda", non_blocking=True), buckets=[4], name="H25 inside")
    for step in range(6):
        pinned.fill_(step)
        x = rows(4)
        result = graphed(x)
        torch.cuda.synchronize()
        assert torch.equal(x + step, result)
    assert 0 == graphed.snapshot().graph_calls
    assert 0 < counts(graphed)["capture_failed"]
    assert graphed.snapshot().causes


def test_a_pinned_argument_is_not_staged() -> None:
    """Beside CUDA arguments, or alone, a pinned tensor is read by the forward itself (H25, NVIDIA/Megatron-LM#5715).

    So the caller may refill it exactly when eager lets it.
    """
    pinned, x = torch.empty(4, 64, pin_memory=True), rows(4)
    alone = capture(lambda p: p.to("cuda", non_blocking=True) * 2, buckets=[4], name="H25 alone")
    beside = capture(lambda x, p: x + p.to("cuda", non_blocking=True), buckets=[4], name="H25 beside")
    for step in range(4):
        pinned.fill_(step)
        results = alone(pinned), beside(x, pinned)
        torch.cuda.synchronize()
        assert torch.equal(torch.full_like(x, 2 * step), results[0])
        assert torch.equal(x + step, results[1])
    assert {"unsupported_device": 4} == counts(alone) == counts(beside)


# -- adapters, sleep (H58, H60) ------------------------------------------------------------------------------------


def test_work_sized_by_a_number_of_the_capture_is_found_by_verification() -> None:
    """More adapter segments than captured: at most N calls later all is right (H58, sgl-project/sglang#28371).

    DESIGN's words: ``verify=N``, ``mismatches``, reason ``verify_failed``.
    """
    segments, weights = [1], rows(4)

    def adapted(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for k in range(segments[0]):
            out = out + weights[k] * x * (ids == k).unsqueeze(1)
        return out

    graphed = capture(adapted, buckets=[4], verify=4, name="H58")
    one, four = torch.zeros(4, dtype=torch.int64, device="cuda"), torch.arange(4, device="cuda")
    for _ in range(5):
        x = rows(4)
        assert torch.equal(adapted(x, one), graphed(x, one))
    segments[0], right = 4, []
    for _ in range(16):
        x = rows(4)
        right.append(torch.equal(adapted(x, four), graphed(x, four)))
    assert all(right[right.index(True) :])
    assert 4 > right.index(True)
    snapshot = graphed.snapshot()
    assert {4: 1} == dict(snapshot.mismatches)
    assert 0 < counts(graphed)["verify_failed"]
    assert 21 == snapshot.graph_calls + snapshot.eager_calls


def test_work_sized_by_an_argument_has_a_graph_per_number() -> None:
    """The number of segments as an argument is part of the signature (H58, sgl-project/sglang#28371)."""
    weights = rows(4)

    def adapted(x: torch.Tensor, ids: torch.Tensor, segments: int) -> torch.Tensor:
        out = torch.zeros_like(x)
        for k in range(segments):
            out = out + weights[k] * x * (ids == k).unsqueeze(1)
        return out

    graphed = capture(adapted, buckets=[4], name="H58 argument")
    ids = torch.arange(4, device="cuda")
    for segments in (1, 4, 1, 4, 4, 1, 2):
        x = rows(4)
        assert torch.equal(adapted(x, ids, segments), graphed(x, ids, segments))
    assert {"graph": 4, "warmup": 3} == counts(graphed)


def test_sleep_and_wake() -> None:
    """Reset, sleep, wake: eager until the next warm-up, memory given back, counts kept (H60, vllm-project/vllm#55013).

    DESIGN's words: ``reset()``, reason ``not_captured`` (the set is closed), ``warmup()``.
    """
    module = linear(256)

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = module(x).repeat(1, 1 << 15)
        return wide.view(x.shape[0], -1, 256).amax(1)

    def make_inputs(bucket: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (rows(bucket, 256),), {}

    graphed = capture(forward, buckets=[2, 4], name="H60")
    graphed.warmup(make_inputs)
    x = rows(4, 256)
    for _ in range(3):
        assert torch.equal(forward(x), graphed(x))
    expected, pool = forward(x), graphed.snapshot().pool_bytes
    assert pool is not None
    assert (128 << 20) <= pool
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    graphed.reset()
    # Sleep, level 2: the weights' memory goes, their tensors stay.
    saved = [p.cpu() for p in module.parameters()]
    for parameter in module.parameters():
        parameter.untyped_storage().resize_(0)
    gc.collect()
    torch.cuda.empty_cache()
    assert None is graphed.snapshot().pool_bytes
    # cuBLAS keeps the workspace of the capture stream, 32 MiB.
    assert held - (120 << 20) >= torch.cuda.memory_reserved()
    junk = [torch.full((256, 256), float("nan"), device="cuda") for _ in range(64)]
    for parameter, value in zip(module.parameters(), saved, strict=True):
        parameter.untyped_storage().resize_(value.numel() * value.element_size())
        parameter.copy_(value)
    del junk
    for _ in range(3):
        assert torch.equal(expected, graphed(x))
    assert {"graph": 3, "not_captured": 3} == counts(graphed)
    assert (2, 4) == graphed.warmup(make_inputs).captured
    for _ in range(3):
        assert torch.equal(expected, graphed(x))
    assert {"graph": 6, "not_captured": 3} == counts(graphed)
    assert {2: 2, 4: 2} == graphed.snapshot().captures
