"""Two GPUs: another device than the current one, work on two devices, ranks that capture and replay together."""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphprobe.graphed import capture

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
SECONDS = 120
"""After so long the ranks are stopped: a hang is a failure."""


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """Engines serve in inference mode; the first GPU is the current one."""
    torch.manual_seed(0)
    before = torch.cuda.current_device()
    torch.cuda.set_device(0)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.cuda.set_device(before)


def rows(n: int, device: str) -> torch.Tensor:
    return torch.randn(n, 64, device=device)


def counts(forward: Any) -> dict[str, int]:
    """Calls by reason; those that a graph served under ``graph``."""
    found: collections.Counter[str] = collections.Counter()
    for row in forward.snapshot().rows:
        found[str(row.reason or "graph")] += row.calls
    return dict(found)


# -- another device than the current one (H54) ---------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [True, False], ids=["warm-up", "traffic"])
def test_the_device_is_that_of_the_inputs(ahead: bool) -> None:
    """Model and inputs on cuda:1, current device 0: captured, replayed and timed there (H54, pytorch/pytorch#87794)."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to("cuda:1").eval()
    graphed = capture(lambda x: module(x), buckets=[2, 4], timing=1, name=f"H54 {ahead}")
    if ahead:
        report = graphed.warmup(lambda bucket: ((rows(bucket, "cuda:1"),), {}))
        assert (2, 4) == report.captured
        assert 0 == torch.cuda.current_device()
    first = torch.cuda.memory_allocated(0)
    for _ in range(15):
        for n in (2, 4):
            x = rows(n, "cuda:1")
            result = graphed(x)
            assert 0 == torch.cuda.current_device()
            assert torch.device("cuda:1") == result.device
            assert torch.equal(module(x), result)
    assert first == torch.cuda.memory_allocated(0)
    assert ({"graph": 30} if ahead else {"graph": 28, "warmup": 2}) == counts(graphed)
    assert {2: 1, 4: 1} == graphed.snapshot().captures
    torch.cuda.synchronize(1)
    times = [t for key, t in graphed.snapshot().times.items() if key[1] == "graph"]
    assert 20 < sum(t.count for t in times)
    assert all(0 < (t.mean or 0) < 0.1 for t in times)
    # With its device as the current one, the same graphs serve.
    with torch.cuda.device(1):
        x = rows(4, "cuda:1")
        assert torch.equal(module(x), graphed(x))
        assert 1 == torch.cuda.current_device()
    assert {2: 1, 4: 1} == graphed.snapshot().captures


def test_a_wrapper_stays_on_its_first_device() -> None:
    """Inputs on a second device run eagerly there, with a reason (H54, pytorch/pytorch#87794)."""
    graphed = capture(lambda x: x * 2 + 1, buckets=[4], name="H54 two devices")
    for step in range(12):
        device = "cuda:0" if step % 3 else "cuda:1"
        x = rows(4, device)
        result = graphed(x)
        assert torch.device(device) == result.device
        assert torch.equal(x * 2 + 1, result)
        assert 0 == torch.cuda.current_device()
    assert 12 == sum(counts(graphed).values())
    assert 0 < counts(graphed)["graph"]
    assert 0 < counts(graphed)["unsupported_device"]


def read_there(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, other * 3


def made_there(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, torch.rand(4, 64, device="cuda:1")


def sent_there(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, (x.to("cuda:1") * other).to("cuda:0")


@pytest.mark.parametrize("forward", [read_there, made_there, sent_there])
def test_work_on_a_second_device_is_never_frozen(forward: Callable[..., Any]) -> None:
    """What a forward does on another GPU is no part of the graph, so it is eager (H23, pytorch/pytorch#88754)."""
    other = torch.ones(4, 64, device="cuda:1")
    graphed = capture(lambda x: forward(x, other), buckets=[4], name=f"H23 {forward.__name__}")
    results = []
    for step in range(6):
        other.fill_(step)
        x = rows(4, "cuda:0")
        results.append(graphed(x))
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        assert torch.equal(x * 2, results[-1][0])
        if forward is not made_there:
            assert torch.equal(forward(x, other)[1], results[-1][1])
    if forward is made_there:
        assert all(not torch.equal(results[0][1], later[1]) for later in results[1:])
        assert not torch.equal(results[-2][1], results[-1][1])
    assert 0 == graphed.snapshot().graph_calls
    # Nothing is left of it: both devices go on.
    fresh = capture(lambda x: x + 1, buckets=[4], name=f"H23 after {forward.__name__}")
    for device in ("cuda:0", "cuda:0", "cuda:0", "cuda:1"):
        x = rows(4, device)
        assert torch.equal(x + 1, fresh(x))
    assert 2 == fresh.snapshot().graph_calls


# -- ranks (H52, reason distributed) -------------------------------------------------------------------------------


class TwoLayers(torch.nn.Module):
    """Tensor parallel: the first layer split by columns, the second by rows, one sum over the ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        up, down = torch.randn(64, 256) / 8, torch.randn(256, 64) / 16
        part = slice(rank * 256 // RANKS, (rank + 1) * 256 // RANKS)
        self.up = torch.nn.Parameter(up[:, part].contiguous(), requires_grad=False)
        self.down = torch.nn.Parameter(down[part].contiguous(), requires_grad=False)
        self.whole = (up, down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.up).relu() @ self.down
        dist.all_reduce(y)
        return y


def largest(size: int) -> int:
    """The size that all ranks use: the largest of theirs."""
    agreed = torch.tensor([size], device="cuda")
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return int(agreed)


def inputs(bucket: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    """Equal on all ranks."""
    generator = torch.Generator().manual_seed(bucket)
    return (torch.randn(bucket, 64, generator=generator).cuda(),), {}


def tensor_parallel(rank: int) -> dict[str, Any]:
    """Warm-up, then 30 replays in random order."""
    model = TwoLayers(rank).cuda().eval()
    graphed = capture(lambda x: model(x), buckets=[1, 2, 4], agree=largest, name="tensor parallel")
    report = graphed.warmup(inputs)
    order, right, close = random.Random(3), [], []
    for _ in range(30):
        (x,), _ = inputs(order.choice((1, 2, 4)))
        result = graphed(x)
        right.append(torch.equal(model(x), result))
        up, down = (t.cuda() for t in model.whole)
        close.append(torch.allclose((x @ up).relu() @ down, result, atol=1e-2))
    return {"captured": report.captured, "right": sum(right), "close": sum(close), "counts": counts(graphed)}


def sizes_that_differ(rank: int) -> dict[str, Any]:
    """One rank has 3 rows, the other 1: both replay bucket 4, each counts its own size."""
    graphed = capture(lambda x: x * 2, buckets=[2, 4], pad="repeat", agree=largest, name="sizes that differ")
    graphed.warmup(inputs)
    right = []
    for _ in range(10):
        (x,), _ = inputs(1 if rank else 3)
        right.append(torch.equal(x * 2, graphed(x)))
    found = [[row.batch_size, row.bucket, row.calls] for row in graphed.snapshot().rows]
    return {"right": sum(right), "rows": found}


def nobody_agreed(rank: int) -> dict[str, Any]:
    """Without ``agree=`` and warm-up, nothing is captured in traffic."""
    model = TwoLayers(rank).cuda().eval()
    graphed, right = capture(lambda x: model(x), buckets=[2], name="nobody agreed"), []
    for _ in range(6):
        (x,), _ = inputs(2)
        result = graphed(x)
        right.append(torch.equal(model(x), result))
    return {"right": sum(right), "counts": counts(graphed)}


def captures_among_collectives(rank: int) -> dict[str, Any]:
    """Twenty captures, each with collectives on their way in front of it."""
    block, pending = torch.ones(16 << 20, device="cuda"), []
    model = TwoLayers(rank).cuda().eval()

    def make_inputs(bucket: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
        pending.append(dist.all_reduce(block, async_op=True))
        return inputs(bucket)

    graphed = capture(lambda x: model(x), buckets=list(range(1, 21)), name="among collectives")
    report = graphed.warmup(make_inputs)
    right = []
    for n in range(1, 21):
        (x,), _ = inputs(n)
        result = graphed(x)
        right.append(torch.equal(model(x), result))
    for work in pending:
        work.wait()
    torch.cuda.synchronize()
    return {"captured": len(report.captured), "right": sum(right), "counts": counts(graphed)}


def summed(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x + 1


def sums_of_arguments(rank: int) -> dict[str, Any]:
    """The forward sums its argument over the ranks, in place."""
    graphed, found = capture(summed, buckets=[2], agree=largest, name="sums of arguments"), []
    for step in range(6):
        x = torch.full((2, 64), rank + 1.0 + step, device="cuda")
        result = graphed(x)
        found.append([float(x[0, 0]), float(result[0, 0])])
    return {"found": found}


JOBS = (tensor_parallel, sizes_that_differ, nobody_agreed, captures_among_collectives, sums_of_arguments)


def one_rank(rank: int, store: str, job: str) -> None:
    """The main function of one process."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS, device_id=device)
    with torch.inference_mode():
        found = {function.__name__: function for function in JOBS}[job](rank)
    print("FOUND", json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def together(job: Callable[[int], dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What the ranks found, each in a process of its own; all are stopped after ``SECONDS``."""
    # No interface but the own machine's is needed, and no multicast.
    environment = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0", **os.environ}
    environment |= {"PYTHONPATH": str(ROOT), "GRAPHPROBE_STRICT": "1"}
    logs = [folder / f"rank{rank}.log" for rank in range(RANKS)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, __file__, str(rank), str(folder / "store"), job.__name__]
            with log.open("w") as file:
                ranks.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        end = time.monotonic() + SECONDS
        for process in ranks:
            process.wait(max(0.1, end - time.monotonic()))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    texts = [log.read_text() for log in logs]
    assert [0] * RANKS == [process.returncode for process in ranks], "\n".join(text[-3000:] for text in texts)
    lines = [next(line for line in text.splitlines() if line.startswith("FOUND ")) for text in texts]
    return [json.loads(line.removeprefix("FOUND ")) for line in lines]


needs_nccl = pytest.mark.skipif(not (dist.is_available() and dist.is_nccl_available()), reason="torch without NCCL")


@needs_nccl
def test_a_tensor_parallel_forward_is_replayed_by_all_ranks(tmp_path: Path) -> None:
    """Captured at warm-up with its collective inside, 30 replays per rank are bit-equal to eager (H52, H54)."""
    for found in together(tensor_parallel, tmp_path):
        assert {"captured": [1, 2, 4], "right": 30, "close": 30, "counts": {"graph": 30}} == found


@needs_nccl
def test_ranks_with_other_sizes_use_the_agreed_bucket(tmp_path: Path) -> None:
    """The largest size decides for all, and each rank counts what it saw (H52, vllm-project/vllm#25906)."""
    first, second = together(sizes_that_differ, tmp_path)
    assert {"right": 10, "rows": [[3, 4, 10]]} == first
    assert {"right": 10, "rows": [[1, 4, 10]]} == second


@needs_nccl
def test_no_rank_captures_in_traffic_unless_they_agree(tmp_path: Path) -> None:
    """A capture in traffic might come at another call on another rank: eager, reason ``distributed`` (H52)."""
    for found in together(nobody_agreed, tmp_path):
        assert {"right": 6, "counts": {"distributed": 6}} == found


@needs_nccl
def test_twenty_captures_among_pending_collectives(tmp_path: Path) -> None:
    """NCCL's watchdog, which asks for collectives on their way, ends no capture (H52, pytorch/pytorch#104555)."""
    for found in together(captures_among_collectives, tmp_path):
        assert {"captured": 20, "right": 20, "counts": {"graph": 20}} == found


@needs_nccl
def test_a_collective_on_an_argument_changes_the_callers_tensor(tmp_path: Path) -> None:
    """What a collective writes in place is the caller's again after a replay, as after eager (H52)."""
    for found in together(sums_of_arguments, tmp_path):
        assert [[3.0 + 2 * step, 4.0 + 2 * step] for step in range(6)] == found["found"]


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), sys.argv[2], sys.argv[3])
