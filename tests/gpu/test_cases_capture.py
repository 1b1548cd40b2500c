"""Published failure reports, capture: what made captures fail, linger or take long elsewhere is survived here."""

from __future__ import annotations

import collections
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphprobe import metrics
from graphprobe.backends.cuda import CudaBackend
from graphprobe.errors import CaptureError
from graphprobe.graphed import capture

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """Engines serve in inference mode."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def rows(n: int, width: int = 64) -> torch.Tensor:
    return torch.randn(n, width, device="cuda")


def inputs(bucket: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    return (rows(bucket),), {}


def linear(width: int = 64) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width)).cuda().eval()


def wide(x: torch.Tensor) -> torch.Tensor:
    """Needs 32 MiB per row of 64 numbers on its way."""
    return x.repeat(1, 1 << 17)[:, :64].clone()


def counts(forward: Any) -> dict[str, int]:
    """Calls by reason; those that a graph served under ``graph``."""
    found: collections.Counter[str] = collections.Counter()
    for row in forward.snapshot().rows:
        found[str(row.reason or "graph")] += row.calls
    return dict(found)


def reserved() -> int:
    """Bytes that the process holds and cannot give back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def fresh(code: str) -> Any:
    """What ``code`` prints as its last line, as JSON, in a process that has not used the device yet."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRAPHPROBE_STRICT": "1"}
    command = [sys.executable, "-c", "import gc, json, torch\nfrom graphprobe.graphed import capture\n" + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def still_works(name: str) -> None:
    """Nothing of a failed capture is left: a kernel runs, random numbers come, the next forward is captured."""
    assert not torch.cuda.is_current_stream_capturing()
    assert 6.0 == float(torch.ones(3, device="cuda").mul(2).sum())
    assert not torch.equal(rows(2), rows(2))
    module = linear()
    good = capture(lambda x: module(x), buckets=[2], name=f"{name}, afterwards")
    for _ in range(4):
        x = rows(2)
        assert torch.equal(module(x), good(x))
    assert {"graph": 3, "warmup": 1} == counts(good)


# -- failures (H26, H27) -------------------------------------------------------------------------------------------


def test_twenty_buckets_that_fail_hold_no_more_than_one() -> None:
    """A capture that raises keeps no memory of its own, and the next bucket captures (H26, pytorch/pytorch#190348)."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        big = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
        if torch.cuda.is_current_stream_capturing() and x.shape[0] <= 20:
            raise ValueError("not under a capture")
        return x + big[:1].mul(0)

    graphed, held = capture(forward, buckets=list(range(1, 22)), name="H26"), []
    for n in range(1, 21):
        for _ in range(4):
            x = rows(n)
            assert torch.equal(x, graphed(x))
        held.append(reserved())
    assert held[-1] <= held[0] + 4 * MIB, held
    for _ in range(4):
        x = rows(21)
        assert torch.equal(x, graphed(x))
    assert {"graph": 3, "warmup": 21, "capture_failed": 60} == counts(graphed)
    assert {(n, "error"): 2 for n in range(1, 21)} | {(21, "ok"): 1} == graphed.snapshot().capture_outcomes
    assert "ValueError: not under a capture" in graphed.snapshot().causes["capture_failed/7"]
    still_works("H26")


def raises(x: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"first cause, {x.shape[0]} rows")


def waits(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.current_stream().synchronize()
    return x + 1


@pytest.mark.parametrize(("forward", "text"), [(raises, "first cause, 2 rows"), (waits, "capturing")])
def test_the_first_cause_of_a_failed_capture_is_kept(forward: Any, text: str) -> None:
    """The error says what went wrong first, and has the original as its cause (H26, pytorch/pytorch#190348)."""
    backend, x = CudaBackend(torch.device("cuda")), rows(2)
    for _ in range(3):
        with pytest.raises(CaptureError, match=text) as caught:
            backend.capture(lambda: forward(x))
        assert isinstance(caught.value.__cause__, Exception)
        assert not isinstance(caught.value.__cause__, CaptureError)
        assert "error" == caught.value.outcome
    graph, result = backend.capture(lambda: x + 1)
    graph.replay()
    assert torch.equal(x + 1, result)
    still_works(f"H26 {forward.__name__}")


@pytest.mark.parametrize("ahead", [True, False], ids=["warm-up", "traffic"])
def test_a_bucket_that_does_not_fit_is_said_to_be_out_of_memory(ahead: bool) -> None:
    """The true cause is reported, smaller buckets serve, the large batch runs eagerly (H27, pytorch/pytorch#159594).

    DESIGN's words: outcome ``oom``, reason ``capture_failed``.
    """
    graphed = capture(wide, buckets=[2, 16], name=f"H27 {ahead}")
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    try:
        # Room for one time 512 MiB, which the eager run has: a capture cannot take it from there.
        torch.cuda.set_per_process_memory_fraction((reserved() + (512 + 256) * MIB) / total)
        if ahead:
            outcomes = {b.bucket: (b.outcome, b.error) for b in graphed.warmup(inputs)}
            assert ("ok", "") == outcomes[2]
            assert "oom" == outcomes[16][0]
            assert "out of memory" in outcomes[16][1].lower()
        for n in (16, 16, 2, 2, 2, 16, 16):
            x = rows(n)
            assert torch.equal(x, graphed(x))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    expected = {"graph": 3, "capture_failed": 4} if ahead else {"graph": 2, "warmup": 2, "capture_failed": 3}
    assert expected == counts(graphed)
    assert {(2, "ok"): 1, (16, "oom"): 1} == graphed.snapshot().capture_outcomes
    assert "out of memory" in graphed.snapshot().causes["capture_failed/16"].lower()
    # With room again, and after a reset, it is captured like any other.
    graphed.reset()
    reserved()
    assert (2, 16) == graphed.warmup(inputs).captured
    x = rows(16)
    assert torch.equal(x, graphed(x))
    still_works(f"H27 {ahead}")


# -- garbage (H28) -------------------------------------------------------------------------------------------------


def test_an_old_graph_is_not_collected_while_another_one_is_captured() -> None:
    """Garbage with a graph in it waits for the end of the capture (H28, pytorch/pytorch#161037)."""
    module, old = linear(), capture(lambda x: x * 3, buckets=[2], name="H28 old")
    for _ in range(3):
        old(rows(2))
    assert {"graph": 2, "warmup": 1} == counts(old)
    box, gone, seen = [old], weakref.ref(old), []
    del old

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = module(x)
        if torch.cuda.is_current_stream_capturing():
            # A cycle of this moment, and enough young objects to have any collector look.
            cycle: list[Any] = [box.pop()]
            cycle.append(cycle)
            del cycle
            junk = [[] for _ in range(10_000)]
            seen.append((len(junk), gone() is not None))
        return y + 1

    graphed, thresholds = capture(forward, buckets=[4], name="H28"), gc.get_threshold()
    gc.set_threshold(100, 2, 2)
    try:
        for _ in range(4):
            x = rows(4)
            assert torch.equal(module(x) + 1, graphed(x))
    finally:
        gc.set_threshold(*thresholds)
    assert [(10_000, True)] == seen
    assert {(4, "ok"): 1} == graphed.snapshot().capture_outcomes
    assert gc.isenabled()
    gc.collect()
    assert gone() is None
    x = rows(4)
    assert torch.equal(module(x) + 1, graphed(x))


def test_a_forward_that_collects_garbage_itself_is_survived() -> None:
    """An old graph dies in the middle of a capture: results stay right, and so do later ones (H28, pytorch#161037)."""
    found = fresh("""
box = []
def forward(x):
    if torch.cuda.is_current_stream_capturing() and box:
        cycle = [box.pop()]
        cycle.append(cycle)
        del cycle
        gc.collect()
    return x * 2 + 1

right = []
with torch.inference_mode():
    old = capture(lambda x: x * 3, buckets=[2], name="old")
    for _ in range(3):
        old(torch.randn(2, 8, device="cuda"))
    box.append(old)
    del old
    graphed = capture(forward, buckets=[2, 4], name="collects")
    for n in (4, 4, 4, 4, 2, 2, 2):
        x = torch.randn(n, 8, device="cuda")
        right.append(torch.equal(x * 2 + 1, graphed(x)))
torch.cuda.synchronize()
outcomes = {f"{b} {o}": n for (b, o), n in graphed.snapshot().capture_outcomes.items()}
print(json.dumps({"right": right, "left": len(box), "outcomes": outcomes, "graph": graphed.snapshot().graph_calls}))
""")
    print(found)
    assert [True] * 7 == found["right"]
    assert 0 == found["left"]
    assert 1 == found["outcomes"]["2 ok"]
    assert 1 == found["outcomes"]["4 ok"]
    assert 4 <= found["graph"]


# -- first use (H29) -----------------------------------------------------------------------------------------------

FIRST_USE = """
seen = []
with torch.inference_mode():
    weight = torch.randn(64, 64, device="cuda")
    def forward(x):
        seen.append((x.shape[0], torch.cuda.is_current_stream_capturing()))
        return (x @ weight).softmax(1)
    graphed = capture(forward, buckets=[2, 4, 8], eager_first=EAGER, name="first use")
    right = []
    if WARM:
        graphed.warmup(lambda n: ((torch.randn(n, 64, device="cuda"),), {}))
    warm = list(seen)
    for n in (8, 8, 8, 8, 4, 4, 4, 2):
        x = torch.randn(n, 64, device="cuda")
        result = graphed(x)
        right.append(torch.equal((x @ weight).softmax(1), result))
snapshot = graphed.snapshot()
outcomes = {f"{b} {o}": n for (b, o), n in snapshot.capture_outcomes.items()}
print(json.dumps({"right": right, "outcomes": outcomes, "causes": dict(snapshot.causes), "warm": warm,
                  "graph": snapshot.graph_calls}))
"""


def test_the_first_matrix_product_of_a_process_may_be_a_captured_forward() -> None:
    """Warm-up runs each size eagerly before its capture, so the first try succeeds (H29, pytorch/pytorch#99397)."""
    found = fresh(FIRST_USE.replace("EAGER", "1").replace("WARM", "True"))
    assert [True] * 8 == found["right"]
    assert {"8 ok": 1, "4 ok": 1, "2 ok": 1} == found["outcomes"]
    assert [[n, capturing] for capturing in (False, True) for n in (8, 4, 2)] == found["warm"]
    assert 8 == found["graph"]


def test_a_capture_without_an_eager_run_is_right_or_fails_with_its_cause() -> None:
    """With ``eager_first=0`` a first-use failure is said and survived (H29, pytorch/pytorch#99397).

    Whether the first product of a process may be captured depends on the library's version.
    """
    found = fresh(FIRST_USE.replace("EAGER", "0").replace("WARM", "False"))
    print(found)
    assert [True] * 8 == found["right"]
    failed = [outcome for outcome in found["outcomes"] if outcome.endswith("error")]
    causes = [text for key, text in found["causes"].items() if key.startswith("capture_failed")]
    assert len(failed) == len(causes)
    assert all(len("capturing bucket 8 failed: ") < len(text) for text in causes)
    assert {"8 ok", "4 ok", "2 ok"} <= set(found["outcomes"])


# -- streams (H33) -------------------------------------------------------------------------------------------------


def test_work_on_a_side_stream_that_is_not_joined_is_a_failed_capture() -> None:
    """The cause is named, the calls run eagerly, and nothing goes on capturing (H33, deepseek-ai/DeepEP#62).

    DESIGN's words: reason ``capture_failed``; the text says what is unjoined.
    """
    side, mark = torch.cuda.Stream(), torch.zeros(1, device="cuda")

    def forward(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            mark.add_(1)
        return x + 1

    graphed = capture(forward, buckets=[2], name="H33")
    for _ in range(6):
        x = rows(2)
        assert torch.equal(x + 1, graphed(x))
    side.synchronize()
    torch.cuda.synchronize()
    # A capture runs nothing, so the mark has one from each call, whoever served it.
    assert 6.0 == float(mark)
    assert {"warmup": 1, "capture_failed": 5} == counts(graphed)
    assert {(2, "error"): 2} == graphed.snapshot().capture_outcomes
    assert "unjoined" in graphed.snapshot().causes["capture_failed/2"]
    with torch.cuda.stream(side):
        assert not torch.cuda.is_current_stream_capturing()
    still_works("H33")


def test_work_on_a_side_stream_that_is_joined_is_captured() -> None:
    """Forked and joined again it is part of the graph (H33, deepseek-ai/DeepEP#62)."""
    side, module = torch.cuda.Stream(), linear()

    def forward(x: torch.Tensor) -> torch.Tensor:
        now = torch.cuda.current_stream()
        side.wait_stream(now)
        with torch.cuda.stream(side):
            left = module(x)
        right = x * 3
        now.wait_stream(side)
        return left + right

    graphed = capture(forward, buckets=[4], name="H33 joined")
    for _ in range(20):
        x = rows(4)
        result = graphed(x)
        assert torch.equal(module(x) + x * 3, result)
    assert {"graph": 19, "warmup": 1} == counts(graphed)


# -- start-up (H86, H88) -------------------------------------------------------------------------------------------


def test_fifty_captures_collect_garbage_twice_at_most() -> None:
    """No collection per graph; seconds are known per bucket and in total (H86, pytorch/pytorch#158193)."""
    module, collections_seen = linear(), []
    graphed = capture(lambda x: module(x), buckets=list(range(1, 51)), name="H86")

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections_seen.append(info["generation"])

    gc.collect()
    gc.disable()
    gc.callbacks.append(note)
    try:
        report = graphed.warmup(inputs)
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert 2 >= len(collections_seen)
    assert tuple(range(1, 51)) == report.captured
    taken = graphed.snapshot().capture_seconds
    assert set(range(1, 51)) == set(taken)
    assert 0 < min(taken.values())
    assert report.seconds >= sum(b.seconds for b in report) >= sum(taken.values()) * 0.99
    samples, _ = metrics.forward_samples(graphed.snapshot())
    shown = {s.labels["bucket"]: s.value for s in samples if "capture_duration" in s.metric.name}
    assert {str(bucket): seconds for bucket, seconds in taken.items()} == shown


def test_cheap_inputs_give_the_same_graphs() -> None:
    """The caller makes the inputs of warm-up, two per bucket; their values do not matter (H88, vllm#29275).

    What a sequence costs lies in its length, a value: length 1 and the longest give equal graphs.
    """
    cache = torch.randn(128, 64, device="cuda")
    places = torch.arange(128, device="cuda")

    def forward(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        seen = (places < lengths.unsqueeze(1)).unsqueeze(2)
        return x + (cache * seen).sum(1)

    graphs, made = {}, []
    for length in (1, 128):

        def make_inputs(bucket: int, length: int = length) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
            made.append(bucket)
            return (rows(bucket), torch.full((bucket,), length, device="cuda")), {}

        graphs[length] = capture(forward, buckets=[2, 4], name=f"H88 {length}")
        assert (2, 4) == graphs[length].warmup(make_inputs).captured
    assert [4, 2, 4, 2] * 2 == made
    for n in (2, 4) * 5:
        x, lengths = rows(n), torch.randint(1, 129, (n,), device="cuda")
        expected = forward(x, lengths)
        assert all(torch.equal(expected, graphed(x, lengths)) for graphed in graphs.values())
    assert {"graph": 10} == counts(graphs[1]) == counts(graphs[128])
