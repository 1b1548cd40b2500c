"""Where the gain of CUDA graphs comes from, on one CUDA GPU, beside probes of its own.

    python benchmarks/account.py [--models 8b 8b-10 0.6b smollm2] [--ladder 0.6b] [--out FOLDER]

For each model an account of decode steps of 1 to 16 rows (``graphprobe.account``), the timelines of both paths at one
row, and what a probe that shares no code with it sees: eager and graph time by events, device time of a step queued
behind a spin, and the bytes that the allocator reserved meanwhile. ``8b-10`` is the first ten layers of the 8B shape:
few enough kernels for one queue. The ladder is one model from an eager step to a compiled one in a graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import torch
from qwen3 import BUCKETS, SHAPES, Decoder, build
from transformers import DynamicCache

from graphprobe.backends.cuda import CudaBackend
from graphprobe.tools.account import Measured, measure
from graphprobe.tools.balance import Prefill
from graphprobe.tools.timeline import Timeline, Work

LENGTH, PROMPT, TOKENS = 512, 16, 64
PREFILL = 256
"""Tokens of the prompt that is prefilled."""
SPIN = 200_000_000


class Step:
    """A decode step that leaves the cache as it was, so that it may run any number of times."""

    def __init__(self, model: Any) -> None:
        self.decoder = Decoder(model, length=LENGTH, prompt=PROMPT)
        self.vocabulary = model.config.vocab_size
        self.saved = {batch: [t.clone() for t in self.decoder.state(batch)] for batch in BUCKETS}

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, 1] -> logits."""
        logits = self.decoder.eager(ids)
        torch._foreach_copy_(self.decoder.state(ids.shape[0]), self.saved[ids.shape[0]])
        return logits

    def inputs(self, batch: int) -> tuple[torch.Tensor]:
        """Tokens of one step."""
        return (torch.randint(0, self.vocabulary, (batch, 1), device="cuda"),)


def model_of(name: str) -> Any:
    """A Qwen3 shape with random weights, all of its layers or the first ones; SmolLM2 with its own."""
    if name == "smollm2":
        return smollm2()
    shape, _, layers = name.partition("-")
    if layers:
        SHAPES[name] = {**SHAPES[shape], "num_hidden_layers": int(layers)}
    return build(name, "cuda", torch.bfloat16)


def smollm2() -> Any:
    """SmolLM2-135M-Instruct through transformers, its weights out of the package's GGUF file."""
    from graphprobe.demo.models import source

    return source()[1].to("cuda", torch.bfloat16).eval()


def events(run: Callable[[], Any], count: int) -> float:
    """Seconds per run between two events around a loop."""
    found = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3 / count)
    return statistics.median(found)


def behind_a_spin(run: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of one run that was queued as a whole, where it fits into the queue."""
    found, fits = [], True
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN)
        begin.record()
        run()
        end.record()
        fits = fits and not begin.query()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3)
    return {"seconds": statistics.median(found), "fits": fits}


def probe(step: Step, batch: int) -> dict[str, Any]:
    """The same figures without any code of graphprobe."""
    ids = step.inputs(batch)
    for _ in range(3):
        step(*ids)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*ids)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*ids)
    grown = torch.cuda.memory_reserved() - reserved
    begin = time.perf_counter()
    step(*ids)
    host = time.perf_counter() - begin
    return {
        "eager": events(lambda: step(*ids), 5),
        "graph": events(graph.replay, 20),
        "filled": behind_a_spin(lambda: step(*ids)),
        "host": host,
        "reserved": grown,
    }


def one(name: str, out: Path) -> dict[str, Any]:
    """The account of one model and its probes: before and after, as the host is not always as fast."""
    step = Step(model_of(name))
    probes = [{batch: probe(step, batch) for batch in BUCKETS}]
    found: Measured = measure(step, step.inputs, batches=BUCKETS, name=name)
    probes.append({batch: probe(step, batch) for batch in BUCKETS})
    lines = {batch: [line.gaps().as_dict() for line in pair if line] for batch, pair in found.timelines.items()}
    eager, graph = found.timelines[1]
    if graph is not None:
        works = {path: [astuple(work) for work in line.works] for path, line in (("eager", eager), ("graph", graph))}
        (out / f"timelines_{name}.json").write_text(json.dumps(works))
    filling = prefill(step)
    account = replace(found.account, prefill=Prefill(PREFILL, filling.eager, filling.graph, None, filling.pool_bytes))
    (out / f"account_{name}.json").write_text(account.to_json())
    print(account, flush=True)
    return {"probes": probes, "gaps": lines, "prefill": asdict(filling), "pool": {b: pooled(step, b) for b in (1, 16)}}


def pooled(step: Step, batch: int) -> dict[str, Any]:
    """Bytes of the pool of one graph, and by how much all that the allocator has reserved grew meanwhile."""
    ids, backend = step.inputs(batch), CudaBackend(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph, _ = backend.capture(lambda: step(*ids))
    found = {"ours": backend.pool_bytes(), "reserved": torch.cuda.memory_reserved() - before}
    graph.reset()
    backend.release()
    return found


def prefill(step: Step) -> Any:
    """The account's step of one prompt. Its mask is given: transformers would ask the host what it looks like."""
    prompt = torch.randint(0, step.vocabulary, (1, PREFILL), device="cuda")
    seen = torch.arange(LENGTH, device="cuda") <= torch.arange(PREFILL, device="cuda")[:, None] + PROMPT
    mask = seen[None, None]

    def fill(ids: torch.Tensor) -> torch.Tensor:
        cache = step.decoder.caches[1]
        logits = step.decoder.model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        torch._foreach_copy_(step.decoder.state(1), step.saved[1])
        return logits

    return measure(fill, (prompt,), name="prefill", timelines=False).account.steps[0]


def draw(path: Path) -> None:
    """The picture of both timelines that a file holds, beside it."""
    from graphprobe.tools.gapplot import timelines

    works = json.loads(path.read_text())
    drawn = {name: Timeline(tuple(Work(*work) for work in works[name])) for name in works}
    name = path.stem.removeprefix("timelines_")
    timelines(drawn, path.with_name(f"gaps_{name}.png"), title=f"{name}, one row, NVIDIA H200")


def ladder(name: str) -> dict[str, Any]:
    """Seconds per token of one model, from an eager step with a growing cache to a compiled one in a graph."""
    model = model_of(name)
    step = Step(model)
    ids = step.inputs(1)
    plain = measure(step, lambda batch: ids, batches=[1], name=name, timelines=False).account.steps[0]
    compiled = measure(step, lambda batch: ids, batches=[1], name=name, compile=True, timelines=False).account.steps[0]
    return {
        "eager, growing cache": growing(model),
        "eager, static cache": plain.eager,
        "compiled": compiled.eager,
        "graph": plain.graph,
        "compiled, graph": compiled.graph,
        "capture": [asdict(plain), asdict(compiled)],
    }


def growing(model: Any) -> float:
    """Seconds per token where each one makes the cache longer."""
    found = []
    for _ in range(3):
        cache = DynamicCache(config=model.config)
        ids = torch.randint(0, model.config.vocab_size, (1, PROMPT), device="cuda")
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(TOKENS):
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / TOKENS)
    return statistics.median(found)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["8b", "8b-10", "0.6b", "smollm2"])
    parser.add_argument("--ladder", default="")
    parser.add_argument("--out", type=Path, default=Path("docs/account"))
    parser.add_argument("--draw", type=Path, nargs="*", help="draw FILEs that an earlier run has written, and end")
    options = parser.parse_args()
    if options.draw:
        for path in options.draw:
            draw(path)
        return
    if not torch.cuda.is_available():
        parser.exit(1, "needs a CUDA GPU: torch.cuda.is_available() is False\n")
    options.out.mkdir(parents=True, exist_ok=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    found: dict[str, Any] = dict(about)
    with torch.no_grad():
        for name in options.models:
            try:
                found[name] = one(name, options.out)
            except Exception as error:
                found[name] = {"failed": repr(error)}
                print(name, repr(error), flush=True)
            torch.cuda.empty_cache()
        if options.ladder:
            rungs = {**about, "model": options.ladder, **ladder(options.ladder)}
            print(rungs)
            (options.out / "ladder.json").write_text(json.dumps(rungs, indent=1))
    if options.models:
        (options.out / "probes.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
