"""Published failure reports, timing: what is recorded is the device's time, and nobody waits for it."""

from __future__ import annotations

import collections
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphprobe.graphed import capture
from graphprobe.timers import PAIRS


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """Engines serve in inference mode."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def rows(n: int, width: int = 64) -> torch.Tensor:
    return torch.randn(n, width, device="cuda")


def counts(forward: Any) -> dict[str, int]:
    """Calls by reason; those that a graph served under ``graph``."""
    found: collections.Counter[str] = collections.Counter()
    for row in forward.snapshot().rows:
        found[str(row.reason or "graph")] += row.calls
    return dict(found)


def samples(forward: Any, path: str) -> int:
    """How many samples of a path were read."""
    return sum(times.count for key, times in forward.snapshot().times.items() if key[1] == path)


def elapsed(run: Callable[[], Any]) -> float:
    """Seconds that the device takes for what ``run`` enqueues."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e-3


def cycles_of(seconds: float) -> int:
    """Cycles that a kernel has to spin for so many seconds."""
    for _ in range(3):
        torch.cuda._sleep(20_000_000)
    taken = min(elapsed(lambda: torch.cuda._sleep(20_000_000)) for _ in range(3))
    return int(20_000_000 * seconds / taken)


def spinning(seconds: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward that keeps the device busy for so long, and the host for a moment."""
    cycles = cycles_of(seconds)

    def forward(x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(cycles)
        return x * 2

    return forward


# -- reading (H81) -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "size"), [("graph", 2), ("eager", 3)])
def test_a_sample_that_is_not_done_is_neither_read_nor_waited_for(path: str, size: int) -> None:
    """Reading right after a call raises nothing and waits for nothing (H81, pytorch/pytorch#85796).

    DESIGN's words: a later snapshot has it; the 33rd unread sample is dropped and counted as dropped.
    """
    graphed = capture(spinning(2e-3), buckets=[2], timing=1, name=f"H81 {path}")
    x = rows(size)
    for _ in range(4):
        graphed(x)
    torch.cuda.synchronize()
    before = samples(graphed, path)
    end = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            graphed(x)
        end.record()
        early, busy = samples(graphed, path), not end.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert busy
    assert 100 > early - before
    torch.cuda.synchronize()
    late, dropped = samples(graphed, path), graphed.snapshot().dropped
    print("read early", early - before, "late", late - before, "dropped", dropped)
    assert early < late
    assert 100 == late - before + dropped
    assert PAIRS <= late - before
    assert 0 < dropped
    # All pairs are free again.
    for _ in range(PAIRS):
        graphed(x)
    torch.cuda.synchronize()
    assert late + PAIRS == samples(graphed, path)
    assert dropped == graphed.snapshot().dropped


# -- what it costs (H82, H83) --------------------------------------------------------------------------------------


def test_timing_costs_no_throughput() -> None:
    """With the default sampling at least 97 % of the throughput are left (H82, vllm-project/vllm#36542)."""
    module = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, dtype=torch.float16) for _ in range(16)]).cuda().eval()
    x = rows(4, 2048).half()
    on = capture(lambda x: module(x), buckets=[4], outputs="alias", name="H82 on")
    off = capture(lambda x: module(x), buckets=[4], outputs="alias", timing=0, name="H82 off")

    def seconds(forward: Any) -> float:
        def run() -> None:
            for _ in range(400):
                forward(x)

        return elapsed(run)

    for forward in (on, off):
        seconds(forward)
    with_timing, without = zip(*[(seconds(on), seconds(off)) for _ in range(7)], strict=True)
    print("seconds with timing", min(with_timing), "without", min(without))
    assert min(without) >= 0.97 * min(with_timing)
    assert 10 < samples(on, "graph")
    assert 0 == samples(off, "graph")


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_events_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 000 timed calls use the events of the first ones and no more memory (H83, NVIDIA/TensorRT-LLM#19197)."""
    made, original = [0], torch.cuda.Event

    class Counted(original):  # type: ignore[valid-type,misc]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            made[0] += 1
            return super().__new__(cls, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "Event", Counted)
    graphed = capture(lambda x: x * 2, buckets=[4], timing=1, outputs="alias", name="H83")
    x = rows(4)
    for _ in range(20_000):
        graphed(x)
    torch.cuda.synchronize()
    gc.collect()
    early, events = resident(), made[0]
    for _ in range(80_000):
        graphed(x)
    torch.cuda.synchronize()
    gc.collect()
    snapshot = graphed.snapshot()
    print("events", made[0], "read", samples(graphed, "graph"), "dropped", snapshot.dropped, "RSS", resident() - early)
    assert 2 * PAIRS == events == made[0]
    assert (16 << 20) > resident() - early
    assert 99_999 == snapshot.graph_calls
    assert 99_999 == samples(graphed, "graph") + snapshot.dropped


def test_a_timed_call_costs_the_host_little() -> None:
    """The default sampling adds far less than 10 us to a call (H83, NVIDIA/TensorRT-LLM#19197)."""
    x = rows(4)
    on, all_of_them, off = (
        capture(lambda x: x * 2, buckets=[4], outputs="alias", timing=n, name=f"H83 host {n}") for n in (64, 1, 0)
    )

    def per_call(forward: Any) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5000):
            forward(x)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / 5000

    best = {forward: min(per_call(forward) for _ in range(5)) for forward in (on, all_of_them, off)}
    print("us per call, one in 64 timed, each, none:", [f"{best[f] * 1e6:.2f}" for f in (on, all_of_them, off)])
    assert 10e-6 > best[on] - best[off]


# -- what is measured (H84) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "size"), [("graph", 2), ("eager", 3)])
def test_what_is_recorded_is_the_time_of_the_device(path: str, size: int) -> None:
    """A forward of 20 ms is recorded as such, not as its launch (H84, sgl-project/sglang#16219).

    The snapshot says what measured: backend ``cuda`` is stream time, ``recorder`` a clock.
    """
    graphed = capture(spinning(20e-3), buckets=[2], timing=1, name=f"H84 {path}")
    x = rows(size)
    for _ in range(4):
        graphed(x)
    torch.cuda.synchronize()
    before = graphed.snapshot()
    launched, taken = [], []
    for _ in range(10):

        def call() -> None:
            began = time.perf_counter()
            graphed(x)
            launched.append(time.perf_counter() - began)

        taken.append(elapsed(call))
    window = graphed.snapshot() - before
    mean, own = window.mean_seconds(path), sum(taken) / len(taken)
    print("recorded", mean, "measured beside it", own, "launch", min(launched))
    assert mean is not None
    assert 10 == sum(t.count for t in window.times.values())
    assert abs(mean - own) < 0.05 * own
    assert 0.01 < mean
    assert 0.01 > min(launched)
    assert "cuda" == graphed.snapshot().backend


# -- inside a capture (H85) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3], ids=["a graph route", "an eager route"])
@pytest.mark.parametrize("unread", [True, False], ids=["samples unread", "samples read"])
def test_a_timed_forward_inside_somebody_elses_capture_is_not_timed(size: int, unread: bool) -> None:
    """The outer capture succeeds, no event of ours is in it, the sampling goes on later (H85, NVIDIA/warp#556).

    DESIGN's word for the calls inside: ``disabled``; a size without a bucket keeps its reason.
    """
    graphed = capture(lambda x: x * 2, buckets=[2], timing=1, name=f"H85 {size} {unread}")
    x = rows(size)
    for _ in range(5):
        graphed(x)
    torch.cuda.synchronize()
    if not unread:
        graphed.snapshot()
    outer = torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer):
        y = graphed(x)
        z = graphed(y) + 1
        calls = graphed.snapshot().graph_calls + graphed.snapshot().eager_calls
    assert 7 == calls
    for _ in range(3):
        x.copy_(rows(size))
        outer.replay()
        assert torch.equal(x * 4 + 1, z)
    path = "graph" if size == 2 else "eager"
    torch.cuda.synchronize()
    before = samples(graphed, path)
    for _ in range(10):
        assert torch.equal(x * 2, graphed(x))
    torch.cuda.synchronize()
    assert before + 10 == samples(graphed, path)
    assert 0 == graphed.snapshot().dropped


@pytest.mark.parametrize("size", [2, 3], ids=["a graph route", "an eager route"])
def test_a_timed_forward_inside_another_captured_forward(size: int) -> None:
    """A captured forward that calls a timed one: captured, right, and both are still timed (H85, NVIDIA/warp#556)."""
    inner = capture(lambda x: x * 2, buckets=[2], timing=1, name=f"H85 inner {size}")
    x = rows(size)
    for _ in range(5):
        inner(x)
    torch.cuda.synchronize()
    outer = capture(lambda x: inner(x) + 1, buckets=[2, 3], timing=1, name=f"H85 outer {size}")
    for _ in range(8):
        x = rows(size)
        assert torch.equal(x * 2 + 1, outer(x))
    assert {"graph": 7, "warmup": 1} == counts(outer)
    assert {(size, "ok"): 1} == outer.snapshot().capture_outcomes
    for _ in range(5):
        x = rows(size)
        assert torch.equal(x * 2, inner(x))
    torch.cuda.synchronize()
    assert 5 <= samples(inner, "graph" if size == 2 else "eager")
    assert 7 == samples(outer, "graph")
