"""What graphprobe costs and gives an engine that serves tokens, on one CUDA GPU.

    python benchmarks/serving.py [--trace FILE.csv] [--requests N] [--blocks N] [--json FILE]

First a Qwen3-8B shape (random weights, bfloat16) that decodes greedily at batch 1 and 16: by hand (a static input, a
copy, a replay) and through ``graphprobe.capture`` with all of its defaults, while an exporter is scraped every second.
Blocks of steps take turns; the ratio of neighbours has a 95 % interval by bootstrap.

Then SmolLM2-135M-Instruct with its own weights, float32, serves the first requests of a trace, 16 at most at a time: a
request arrives in the step that its time gives at 200 steps a second, its prompt is one of the demo's, its answer as
long as the trace says, 128 tokens at most. Once an engine with hand-written graphs for 1, 2, 4, 8 and 16 that replays
exact sizes only, once one forward through ``graphprobe.capture(pad=...)``. Both meet the same batches.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from qwen3 import Decoder, build

import graphprobe
from graphprobe.demo import engine as demo
from graphprobe.demo.models import load
from graphprobe.tools.arrivals import arrivals

BUCKETS = [1, 2, 4, 8, 16]
PACE, LONGEST, SLOTS = 200, 128, 16

Decode = Callable[..., torch.Tensor]


class ByHand:
    """A graph per exact size, as engines write it; what has none runs eagerly."""

    def __init__(self, forward: Decode, inputs: Callable[[int], tuple[torch.Tensor, ...]], sizes: list[int]) -> None:
        self.forward = forward
        self.graphs: dict[int, tuple[Any, tuple[torch.Tensor, ...], torch.Tensor]] = {}
        self.calls = [0, 0]
        pool = None
        for size in sorted(sizes, reverse=True):
            static = tuple(tensor.clone() for tensor in inputs(size))
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    forward(*static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                out = forward(*static)
            pool = pool or graph.pool()
            self.graphs[size] = graph, static, out

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The forward's result; a graph's is overwritten by its next replay."""
        found = self.graphs.get(tensors[0].shape[0])
        self.calls[found is None] += 1
        if found is None:
            return self.forward(*tensors)
        graph, static, out = found
        for buffer, tensor in zip(static, tensors, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        return out


def scraped(stop: threading.Event, url: str) -> None:
    """Read the exporter once a second."""
    while not stop.wait(1.0):
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            answer.read()


def interval(ratios: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median, by bootstrap."""
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def device_ms(graph: Any) -> float:
    """Milliseconds of one replay on the device, by events around twenty."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(20):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20


def qwen(shape: str, blocks: int, steps: int) -> list[dict[str, Any]]:
    """Tokens per second at batch 1 and 16, by hand and through graphprobe."""
    decoder = Decoder(build(shape, "cuda", torch.bfloat16), length=512, prompt=16)
    saved = {batch: [t.clone() for t in decoder.state(batch)] for batch in BUCKETS}

    def inputs(batch: int) -> tuple[torch.Tensor]:
        return (torch.zeros(batch, 1, dtype=torch.long, device="cuda"),)

    ours = graphprobe.capture(decoder.eager, buckets=BUCKETS, name=f"qwen3-{shape}", state="rewrites")
    ours.warmup(lambda bucket: (inputs(bucket), {}), progress=False)
    hand = ByHand(decoder.eager, inputs, BUCKETS)

    def block(step: Decode, batch: int) -> float:
        for tensor, before in zip(decoder.state(batch), saved[batch], strict=True):
            tensor.copy_(before)
        (ids,) = inputs(batch)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            ids = step(ids)[:, -1].argmax(-1, keepdim=True)
            ids.tolist()
        return batch * steps / (time.perf_counter() - began)

    rows = []
    for batch in (1, 16):
        block(hand, batch), block(ours, batch)
        pairs = [(block(hand, batch), block(ours, batch)) for _ in range(blocks)]
        ratios = [mine / raw for raw, mine in pairs]
        low, high = interval(ratios)
        raw, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
        (captured,) = ours._graphs.captures.signatures.of(batch)
        rows.append(
            {
                "batch": batch, "raw_tokens_s": raw, "ours_tokens_s": mine, "blocks": blocks, "steps": steps,
                "ratio": statistics.median(ratios), "low": low, "high": high,
                "raw_graph_ms": device_ms(hand.graphs[batch][0]), "ours_graph_ms": device_ms(captured.graph),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    snapshot = ours.snapshot()
    print(f"graph calls {snapshot.graph_calls}, eager calls {snapshot.eager_calls}")
    assert not snapshot.eager_calls, "a call ran eagerly"
    return rows


def requests(trace: Path | None, count: int, encode: Callable[[str], list[int]]) -> list[demo.Request]:
    """The first ``count`` requests of a trace, at the demo's prompts; drawn at random without one."""
    drawn = random.Random(0)
    if trace is None:
        times = [drawn.expovariate(5.4) for _ in range(count)]
        day = [(sum(times[:i]), drawn.randint(1, LONGEST)) for i in range(count)]
    else:
        day = [(one.arrival, one.generate) for one in arrivals(str(trace))[:count]]
    found = []
    for number, (arrival, generate) in enumerate(day):
        prompt = demo.PROMPTS[number % len(demo.PROMPTS)]
        found.append(demo.Request(prompt, encode(prompt), int(arrival * PACE), max(2, min(LONGEST, generate))))
    return found


def smollm2(trace: Path | None, count: int, model: str, device: str) -> dict[str, Any]:
    """Tokens per second of the decode steps, with exact dispatch by hand and with padding by graphprobe."""
    chat = load(model, torch.device(device))
    traffic = requests(trace, count, chat.encode)
    longest = max(len(request.ids) + request.limit for request in traffic)
    cache = chat.model.allocate(SLOTS, -(-longest // 16) * 16)
    plain = demo.decode_with(chat.model)

    def rows(bucket: int) -> tuple[torch.Tensor, ...]:
        row = {**demo.PAD, "slots": cache.scratch}
        return tuple(torch.full((bucket,), value, device=device) for value in row.values())

    runs: dict[str, tuple[Any, float, list[demo.Request]]] = {}
    padded: Any = graphprobe.capture(
        plain, buckets=BUCKETS, max_batch=SLOTS, pad={**demo.PAD, "slots": cache.scratch}, name="smollm2",
        backend="auto" if device == "cuda" else "recorder",
    )  # fmt: skip
    padded.warmup(lambda bucket: (rows(bucket), {}), progress=False)
    exact: Any = ByHand(plain, rows, BUCKETS) if device == "cuda" else plain
    for name, decode in (("exact", exact), ("padded", padded), ("exact again", exact), ("padded again", padded)):
        cache.clear()
        mine = [request.fresh() for request in traffic]
        engine = demo.Engine(chat.model, decode, None)
        engine.serve(mine)
        runs[name] = decode, engine.seconds, mine
        print(f"{name:14s} {len(engine.batch_sizes)} steps, {engine.seconds:.1f} s", flush=True)
    tokens = sum(len(request.tokens) - 1 for request in traffic_of(runs, "exact"))
    rates = {name: tokens / seconds for name, (_, seconds, _) in runs.items()}
    ratios = [rates["padded"] / rates["exact"], rates["padded again"] / rates["exact again"]]
    first, second = traffic_of(runs, "exact"), traffic_of(runs, "padded")
    differ = sum(a.tokens != b.tokens for a, b in zip(first, second, strict=True))
    snapshot = padded.snapshot()
    replays, eager = exact.calls if device == "cuda" else (0, 1)
    return {
        "requests": len(traffic), "tokens": tokens,
        "exact_tokens_s": rates["exact"], "padded_tokens_s": rates["padded"],
        "ratio": statistics.fmean(ratios), "ratios": ratios,
        "identical": not differ, "different_requests": differ,
        "exact_hit_rate": replays / (replays + eager), "padded_hit_rate": snapshot.hit_rate,
    }  # fmt: skip


def traffic_of(runs: dict[str, tuple[Any, float, list[demo.Request]]], name: str) -> list[demo.Request]:
    """The requests of a run, with their answers."""
    return runs[name][2]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help="of the Qwen3 model, empty for none")
    parser.add_argument("--model", default="smollm2", help="of the demo, empty for none")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    stop = threading.Event()
    with graphprobe.start_exporter(0) as exporter, torch.inference_mode():
        threading.Thread(target=scraped, args=(stop, exporter.url), daemon=True).start()
        if options.shape and device == "cuda":
            found["qwen3_8b"] = qwen(options.shape, options.blocks, options.steps)
        if options.model:
            found["smollm2"] = smollm2(options.trace, options.requests, options.model, device)
        stop.set()
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
