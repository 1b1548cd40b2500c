"""What one graph call costs beside its peers, in one run on one GPU.

    python benchmarks/overhead.py [--json FILE]

Two forwards: eight Linear(256) in bfloat16 at batch 4 with one input, and a decode signature with five inputs (ids,
positions, slot mapping, lengths, block table). Every variant is called with the inputs as its arguments. Host:
microseconds until the call returns, in ten bursts that the launch queue holds, one after the other. Total: microseconds
per call of a long run with the device waited for at its end. Every variant is measured in turn, round after round; the
table shows medians.
"written in place": the caller passes ``inputs(bucket)``, into which it has written. Parts: what the pieces of a hit
cost alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import graphprobe

BATCH, WIDTH, LAYERS, BLOCKS = 4, 256, 8, 16
BURST, BURSTS, LONG = 100, 10, 1000

Call = Callable[..., Any]


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


def calling(module: torch.nn.Module, count: int) -> Call:
    """A function that calls a module with ``count`` inputs."""
    if count == 1:
        return lambda x: module(x)
    return lambda ids, positions, slots, lengths, table: module(ids, positions, slots, lengths, table)


def method(module: torch.nn.Module, count: int, options: dict[str, Any]) -> Call:
    """The call of a decorated method, looked up at each call, as engines do."""

    class Engine:
        """Both signatures; only the one that is called has graphs."""

        @graphprobe.capture(**options)
        def one(self, x: torch.Tensor) -> torch.Tensor:
            return module(x)

        @graphprobe.capture(**options)
        def five(
            self,
            ids: torch.Tensor,
            positions: torch.Tensor,
            slots: torch.Tensor,
            lengths: torch.Tensor,
            table: torch.Tensor,
        ) -> torch.Tensor:
            return module(ids, positions, slots, lengths, table)

    engine = Engine()
    if count == 1:
        return lambda x: engine.one(x)
    return lambda ids, positions, slots, lengths, table: engine.five(ids, positions, slots, lengths, table)


def variants(make: Callable[[], torch.nn.Module], inputs: list[torch.Tensor], label: str) -> dict[str, Call]:
    """Every way to run one step on ``inputs``."""
    module = make()
    graph, static, out = by_hand(module, inputs)

    raw, raw_clone = written(graph, static, out)
    found: dict[str, Call] = {"eager": module, "raw": raw, "raw + clone": raw_clone}
    for outputs in ("alias", "clone"):
        for timing in (0, 64):
            options = {"buckets": [BATCH], "outputs": outputs, "timing": timing, "name": f"{label}/{outputs}/{timing}"}
            switch = "on" if timing else "off"
            found[f"graphprobe {outputs}, timing {switch}"] = graphprobe.capture(
                calling(make(), len(inputs)), **options
            )
            ours = graphprobe.capture(make(), **options)
            KEPT.append(ours)
            found[f"graphprobe {outputs}, timing {switch}, module.forward"] = ours.forward
            found[f"graphprobe {outputs}, timing {switch}, module()"] = ours
        options["name"] = f"{label}/{outputs}/method"
        found[f"graphprobe {outputs}, timing on, engine.method"] = method(make(), len(inputs), options)
    found["reduce-overhead"] = torch.compile(make(), mode="reduce-overhead")
    return found


KEPT: list[Any] = []
"""Modules that nothing else holds: a captured forward ends with its module."""


def written(graph: torch.cuda.CUDAGraph, static: list[torch.Tensor], out: Any) -> tuple[Call, Call]:
    """The hand-written loop, with its output as it is and cloned."""
    if len(static) == 1:
        (buffer,) = static

        def one(x: torch.Tensor) -> Any:
            buffer.copy_(x)
            graph.replay()
            return out

        return one, lambda x: one(x).clone()

    def raw(*inputs: torch.Tensor) -> Any:
        for buffer, tensor in zip(static, inputs, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        return out

    return raw, lambda *inputs: raw(*inputs).clone()


def in_place(make: Callable[[], torch.nn.Module], inputs: list[torch.Tensor], label: str) -> Call:
    """A call that passes the static inputs themselves."""
    ours = graphprobe.capture(
        calling(make(), len(inputs)), buckets=[BATCH], outputs="alias", name=f"{label}/in place", timing=64
    )
    for _ in range(3):
        ours(*inputs)
    own = tuple(ours.inputs(BATCH).values())
    for view, tensor in zip(own, inputs, strict=True):
        view.copy_(tensor)
    return lambda *_: ours(*own)


def graphed_callable(make: Callable[[], torch.nn.Module], inputs: list[torch.Tensor]) -> Call:
    """torch.cuda.make_graphed_callables, which wants no inference mode."""
    module = make().requires_grad_(False)
    for buffer in module.buffers():
        buffer.requires_grad_(False)
    return torch.cuda.make_graphed_callables(module, tuple(inputs))


def parts(inputs: list[torch.Tensor]) -> dict[str, Call]:
    """What a hit is made of, each piece alone, and what an engine's own loop is made of."""
    from graphprobe.signature import compile_guard

    x = inputs[0]
    buffers, sources = [torch.empty_like(t) for t in inputs], list(inputs)
    small = [torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(5)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        buffers[0].zero_()
    guard, stream = compile_guard(tuple(inputs), {}), torch._C._cuda_getCurrentRawStream
    return {
        "an empty call": lambda *_: None,
        "guard": lambda *_: guard(*inputs),
        "stream": lambda *_: stream(0),
        "thread": lambda *_: threading.get_ident(),
        "function modes": lambda *_: torch._C._len_torch_function_stack(),
        "address of a weight": lambda *_: x.data_ptr(),
        "copy_ of one": lambda *_: buffers[0].copy_(x),
        "_foreach_copy_ of two": lambda *_: torch._foreach_copy_(small[:2], small[2:4]),
        "_foreach_copy_ of five": lambda *_: torch._foreach_copy_(small, small),
        "view as another dtype": lambda *_: x.view(torch.int16),
        "replay": lambda *_: graph.replay(),
        "clone": lambda *_: sources[0].clone(),
    }


def measure(calls: dict[str, Call], inputs: list[torch.Tensor], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of host and total microseconds per call."""
    for call in calls.values():
        for _ in range(20):
            call(*inputs)
    torch.cuda.synchronize()
    host: dict[str, list[float]] = {name: [] for name in calls}
    total: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            host[name].append(statistics.fmean(_spent(call, inputs, BURST, wait=False) for _ in range(BURSTS)))
    for _ in range(max(3, rounds // 4)):
        for name, call in calls.items():
            total[name].append(_spent(call, inputs, LONG, wait=True))
    return {n: {"host_us": statistics.median(host[n]), "total_us": statistics.median(total[n])} for n in calls}


def _spent(call: Call, inputs: list[torch.Tensor], count: int, wait: bool) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call(*inputs)
    if wait:
        torch.cuda.synchronize()
    spent = (time.perf_counter() - began) / count * 1e6
    torch.cuda.synchronize()
    return spent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=20)
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
        "parts": {},
    }
    for label, (make, inputs) in works.items():
        with torch.no_grad():
            extra = {"make_graphed_callables": graphed_callable(make, inputs)}
        with torch.inference_mode():
            calls = {**variants(make, inputs, label), **extra}
            calls["graphprobe alias, timing on, written in place"] = in_place(make, inputs, label)
            results["work"][label] = measure(calls, inputs, options.rounds)
            results["parts"][label] = measure(parts(inputs), inputs, options.rounds)
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
    for label, rows in results["parts"].items():
        print(f"\n{label}, parts: " + ", ".join(f"{name} {row['host_us']:.2f}" for name, row in rows.items()))


if __name__ == "__main__":
    main()
