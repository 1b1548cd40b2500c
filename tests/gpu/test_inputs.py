"""Static inputs on a GPU: several dtypes in one launch, and memory that the caller writes himself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from graphprobe.graphed import capture

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False"
)
KINDS = (torch.int64, torch.int32, torch.bfloat16, torch.float32, torch.bool, torch.float16)


def bits(rows: int, kind: torch.dtype) -> torch.Tensor:
    """``[rows, 6]`` of any bits, signalling NaNs among them."""
    size = torch.empty((), dtype=kind).element_size()
    high = 2 if kind is torch.bool else 256
    return torch.randint(high, (rows, 6 * size), dtype=torch.uint8, device="cuda").view(kind)


def launches(run: Any) -> int:
    """Kernels and copies of one run."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inputs_of_six_dtypes_arrive_bit_by_bit(mode: Any) -> None:
    """Seen as integers on the way, and copied in one launch, as the profiler counts."""

    def forward(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
        return tuple(x.view(torch.uint8).clone() for x in (a, b, c, d, e, f))

    graphed = capture(forward, buckets=[4], name=f"six dtypes, {mode.__name__}", timing=0)
    with mode():
        for _ in range(3):
            inputs = [bits(4, kind) for kind in KINDS]
            found = graphed(*inputs)
            for have, want in zip(found, inputs, strict=True):
                assert torch.equal(have, want.view(torch.uint8))
        assert 2 == graphed.snapshot().graph_calls
        # The clones: six in the graph, and six behind it.
        assert 1 + 6 + 6 == launches(lambda: graphed(*inputs))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_the_caller_wrote_in_place_is_not_copied(mode: Any) -> None:
    """The static inputs themselves as arguments: the graph alone runs, on what they hold now."""
    graphed = capture(lambda x, y: x * 2 + y, buckets=[2, 4], name=f"in place, {mode.__name__}", timing=0, pad="zeros")
    with mode():
        graphed.warmup(lambda n: ((torch.zeros(n, 3, device="cuda"), torch.zeros(n, 1, device="cuda")), {}))
        for bucket, size in ((4, 4), (4, 3), (2, 2)):
            x, y = graphed.inputs(bucket, size).values()
            for value in (3.0, 5.0):
                x.fill_(value)
                y.fill_(1.0)
                assert torch.equal(graphed(x, y), torch.full((size, 3), 2 * value + 1, device="cuda"))
            apart = x.clone(), y.clone()
            assert launches(partial(graphed, x, y)) < launches(partial(graphed, *apart))
        assert 0 == graphed.snapshot().eager_calls
