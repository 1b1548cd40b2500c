"""What one graph call costs beside its peers, in one run on one GPU.

    python benchmarks/overhead.py [--json FILE]

Two forwards: eight Linear(256) in bfloat16 at batch 4 with one input, and a decode signature with five inputs (ids,
positions, slot mapping, lengths, block table). Host: microseconds until the call returns, in bursts that the launch
queue holds. Total: microseconds per call of a long run with the device waited for at its end. Every variant is
measured in turn, round after round; the table shows medians.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import graphprobe

BATCH, WIDTH, LAYERS, BLOCKS = 4, 256, 8, 16
BURST, LONG = 100, 1000

Call = Callable[[], Any]


class Layers(torch.nn.Module):
    """Eight Linear(256)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 256] -> [batch, 256]."""
        return self.layers(x)


class Decode(torch.nn.Module):
    """A decode step in miniature: writes a slot, reads a block table, masks by length."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(1024, WIDTH)
        self.places = torch.nn.Embedding(1024, WIDTH)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.register_buffer("cache", torch.zeros(1024, WIDTH))

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
    ) -> torch.Tensor:
        """ids, positions, slots [batch] int64; lengths [batch], table [batch, 16] int32 -> [batch, 256]."""
        x = self.tokens(ids) + self.places(positions)
        self.cache.index_copy_(0, slots, x)
        seen = self.cache[table] * (torch.arange(BLOCKS, device=ids.device) < lengths[:, None])[:, :, None]
        return self.layers(x + seen.sum(1).to(x.dtype))


def decode_inputs(device: str) -> list[torch.Tensor]:
    """One step's five inputs."""
    ids = torch.randint(0, 1024, (BATCH,), device=device)
    return [
        ids,
        torch.arange(BATCH, device=device),
        torch.arange(BATCH, device=device) * 7,
        torch.full((BATCH,), 5, dtype=torch.int32, device=device),
        torch.randint(0, 1024, (BATCH, BLOCKS), dtype=torch.int32, device=device),
    ]


def by_hand(
    module: torch.nn.Module, inputs: list[torch.Tensor]
) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor], Any]:
    """Static inputs, a graph and its output, as engines write it."""
    static = [t.clone() for t in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            module(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    return graph, static, out


def calling(module: torch.nn.Module) -> Call:
    """A function that calls a module."""
    return lambda *inputs: module(*inputs)


def variants(make: Callable[[], torch.nn.Module], inputs: list[torch.Tensor], label: str) -> dict[str, Call]:
    """Every way to run one step on ``inputs``."""
    module = make()
    graph, static, out = by_hand(module, inputs)

    def raw() -> Any:
        for buffer, tensor in zip(static, inputs, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        return out

    def raw_clone() -> Any:
        raw()
        return out.clone()

    found: dict[str, Call] = {"eager": lambda: module(*inputs), "raw": raw, "raw + clone": raw_clone}
    for outputs in ("alias", "clone"):
        for timing in (0, 64):
            options = {"buckets": [BATCH], "outputs": outputs, "timing": timing, "name": f"{label}/{outputs}/{timing}"}
            switch = "on" if timing else "off"
            function = graphprobe.capture(calling(make()), **options)
            found[f"graphprobe {outputs}, timing {switch}"] = functools.partial(function, *inputs)
            ours = graphprobe.capture(make(), **options)
            found[f"graphprobe {outputs}, timing {switch}, module.forward"] = functools.partial(ours.forward, *inputs)
            found[f"graphprobe {outputs}, timing {switch}, module()"] = functools.partial(ours, *inputs)
    compiled = torch.compile(make(), mode="reduce-overhead")
    found["reduce-overhead"] = lambda: compiled(*inputs)
    return found


def graphed_callable(make: Callable[[], torch.nn.Module], inputs: list[torch.Tensor]) -> Call:
    """torch.cuda.make_graphed_callables, which wants no inference mode."""
    module = make().requires_grad_(False)
    for buffer in module.buffers():
        buffer.requires_grad_(False)
    graphed = torch.cuda.make_graphed_callables(module, tuple(inputs))
    return lambda: graphed(*inputs)


def measure(calls: dict[str, Call], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of host and total microseconds per call."""
    for call in calls.values():
        for _ in range(20):
            call()
    torch.cuda.synchronize()
    host: dict[str, list[float]] = {name: [] for name in calls}
    total: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            host[name].append(_spent(call, BURST, wait=False))
    for _ in range(max(3, rounds // 10)):
        for name, call in calls.items():
            total[name].append(_spent(call, LONG, wait=True))
    return {n: {"host_us": statistics.median(host[n]), "total_us": statistics.median(total[n])} for n in calls}


def _spent(call: Call, count: int, wait: bool) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    if wait:
        torch.cuda.synchronize()
    spent = (time.perf_counter() - began) / count * 1e6
    torch.cuda.synchronize()
    return spent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "needs a CUDA GPU: torch.cuda.is_available() is False\n")
    torch.manual_seed(0)
    works: dict[str, tuple[Callable[[], torch.nn.Module], list[torch.Tensor]]] = {
        "linear": (
            lambda: Layers().cuda().bfloat16().eval(),
            [torch.randn(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)],
        ),
        "decode": (lambda: Decode().cuda().bfloat16().eval(), decode_inputs("cuda")),
    }
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "work": {},
    }
    for label, (make, inputs) in works.items():
        with torch.no_grad():
            extra = {"make_graphed_callables": graphed_callable(make, inputs)}
        with torch.inference_mode():
            results["work"][label] = measure({**variants(make, inputs, label), **extra}, options.rounds)
    show(results)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


def show(results: dict[str, Any]) -> None:
    """The table."""
    print(f"{results['device']}, torch {results['torch']}; microseconds per call, medians")
    for label, rows in results["work"].items():
        print(f"\n{label:58s} {'host':>8s} {'over raw':>9s} {'x raw':>6s} {'total':>8s}")
        raw = rows["raw"]["host_us"]
        for name, row in rows.items():
            host = row["host_us"]
            print(f"  {name:56s} {host:8.2f} {host - raw:9.2f} {host / raw:6.2f} {row['total_us']:8.2f}")


if __name__ == "__main__":
    main()
