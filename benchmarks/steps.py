"""What the advisor must know of a model, on one CUDA GPU: seconds by size as graphs and eagerly, captures, memory.

    python benchmarks/steps.py [--shape 8b] [--rows 256] [--length 1024] [--json FILE]

A Qwen3 of transformers with random weights decodes as in an engine: one cache for all rows, one wrapper with all
buckets, one pool. Its attention is torch's over the whole cache: a decode step sees ``length`` tokens in each row.
``graph``: seconds between CUDA events around a call, median. ``eager`` and ``prefill``: wall seconds per call of a
loop that ends in a synchronize, median of three loops; by events they are ``eager_events`` and ``prefill_events``.
What fails is left out and said in ``notes``; the file is written anew after each step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from qwen3 import SHAPES, build
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import graphprobe

GRAPHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
EAGER = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = (128, 512, 1024, 2048, 4096)
WARM, LOOPS, CALLS = 3, 3, 8
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
NAMES = {"8b": "Qwen3-8B", "0.6b": "Qwen3-0.6B", "tiny": "tiny Qwen3"}
WHAT = (
    "random weights; the model of transformers as it is, norms and projections not fused, with torch's attention",
    "every row of a decode step stands at the end of a full cache: attention reads all of it, always",
    "a prefill is one eager call for one prompt, which attends to itself; logits of the last token alone",
    "graph: between events around a call, staging and the copy of its result within; graph_wall: from the host",
    "calls are queued one behind the other, with a wait after every eighth; a small eager step is bound by the host",
)

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Store:
    """Keys and values of all rows: per layer ``[rows, length, kv_heads, head_dim]``; a slot is row * length + token."""

    def __init__(self, config: Any, rows: int, length: int, like: torch.Tensor) -> None:
        size = (rows, length, config.num_key_value_heads, config.head_dim)
        # Random and not zero: what a multiplication draws, and so a GPU's clock, depends on the numbers.
        self.keys, self.values = (
            [like.new_empty(size).normal_() for _ in range(config.num_hidden_layers)] for _ in "kv"
        )
        self.rows, self.length = rows, length

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``[rows, kv_heads, steps, head_dim]`` at ``slots [rows * steps]``."""
        for held, new in ((self.keys[layer], key), (self.values[layer], value)):
            held.flatten(0, 1).index_copy_(0, slots, new.transpose(1, 2).flatten(0, 1))


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, /, *, scaling: float,
    store: Store, slots: torch.Tensor, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention ``[rows, heads, steps, head_dim] -> [rows, steps, heads, head_dim]``: a decode step, or one prompt."""
    layer, (rows, heads, steps, dim) = module.layer_idx, query.shape
    store.write(layer, slots, key, value)
    if steps > 1:
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return mixed.transpose(1, 2), None
    keys, values = store.keys[layer][:rows].transpose(1, 2), store.values[layer][:rows].transpose(1, 2)
    # The queries that share a key head become the steps of one, so that each key is read once.
    shared = query.reshape(rows, key.shape[1], -1, dim)
    return scaled_dot_product_attention(shared, keys, values, scale=scaling).reshape(rows, 1, heads, dim), None


transformers.AttentionInterface.register("one_store", attend)


class Engine:
    """A model and its store."""

    def __init__(self, shape: str, device: str) -> None:
        self.device = torch.device(device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = build(shape, device, dtype, "one_store")
        self.store: Store | None = None

    def allocate(self, rows: int, length: int) -> None:
        """Make the store."""
        self.store = Store(self.model.config, rows, length, self.model.lm_head.weight.detach())

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """``ids`` and ``positions [rows, steps]``, ``slots [rows * steps]`` -> logits ``[rows, 1, vocab]``."""
        # A dict is a mask that was prepared already: there is none.
        mask = {"full_attention": None}
        return self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, logits_to_keep=1,
            store=self.store, slots=slots,
        ).logits  # fmt: skip

    def decoding(self, rows: int) -> Inputs:
        """One step of ``rows`` rows, each at the last position of its part of the store."""
        assert self.store is not None
        last = self.store.length - 1
        slots = torch.arange(rows, device=self.device) * self.store.length + last
        return self._ids(rows, 1), torch.full((rows, 1), last, device=self.device), slots

    def prompt(self, tokens: int) -> Inputs:
        """One prompt; it may lie across several rows."""
        slots = torch.arange(tokens, device=self.device)
        return self._ids(1, tokens), slots[None], slots

    def _ids(self, rows: int, steps: int) -> torch.Tensor:
        return torch.randint(0, self.model.config.vocab_size, (rows, steps), device=self.device)

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def stamp(self) -> Any:
        """A point in the device's time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds between two stamps, once the device is past them."""
        return first.elapsed_time(second) / 1e3 if self.device.type == "cuda" else second - first

    def seconds(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Of one call: by events around it (median of all), and from the host (median of the loops)."""
        for _ in range(WARM):
            call()
        inner, outer = [], []
        for _ in range(LOOPS):
            self.wait()
            began, stamps = time.perf_counter(), []
            for _ in range(CALLS):
                before = self.stamp()
                call()
                stamps.append((before, self.stamp()))
            self.wait()
            outer.append((time.perf_counter() - began) / CALLS)
            inner += [self.between(*pair) for pair in stamps]
        return statistics.median(inner), statistics.median(outer)


class Report:
    """What is written. ``step`` keeps the failure of one step from the others; after ``limit`` seconds none begins."""

    BY_SIZE = ("graph", "graph_wall", "eager", "eager_events", "prefill", "prefill_events", "capture_seconds", "bytes")

    def __init__(self, file: str | None, limit: float, **about: Any) -> None:
        self.file, self.limit, self.began = file, limit, time.monotonic()
        self.data: dict[str, Any] = {**about, **{part: {} for part in self.BY_SIZE}}
        self.data |= {"pool_bytes": None, "equal": None, "largest_difference": {}, "elapsed": {}, "notes": [*WHAT]}

    def note(self, text: str) -> None:
        """Said in the file and, at once, on standard error."""
        print(text, file=sys.stderr, flush=True)
        self.data["notes"].append(text)

    def step(self, what: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """The result of one measurement; None where it failed, which becomes a note."""
        if time.monotonic() - self.began > self.limit:
            self.note(f"left out: {what}: {self.limit:.0f} s had passed")
            return None
        result, failed = None, False
        try:
            result = run(*arguments)
        except Exception as error:
            traceback.print_exc()
            self.note(f"left out: {what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            failed = True
        if failed and torch.cuda.is_available():
            # Not before the exception is gone, which holds the tensors.
            with contextlib.suppress(Exception):
                torch.cuda.empty_cache()
        self.data["elapsed"][what.split(" of ")[0]] = round(time.monotonic() - self.began, 1)
        self.save()
        return result

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.file:
            data = {**self.data, **{part: dict(sorted(self.data[part].items())) for part in self.BY_SIZE}}
            draft = Path(f"{self.file}.part")
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(data, indent=1) + "\n")
            draft.replace(self.file)


def within(report: Report, what: str, sizes: tuple[int, ...], most: int) -> list[int]:
    """The sizes that the cache can hold."""
    if max(sizes) > most:
        report.note(f"left out: {what} above {most}: the cache is smaller")
    return [size for size in sizes if size <= most]


def prepare(report: Report, engine: Engine, rows: int, length: int) -> list[int]:
    """Make the store, smaller where it does not fit, and run each size once: those that work, largest first."""
    while engine.store is None and rows:
        report.step(f"cache of {rows} rows", engine.allocate, rows, length)
        rows //= 2
    held = report.data["rows"] = engine.store.rows if engine.store else 0
    sizes = within(report, "decode steps", tuple(sorted({*GRAPHS, *EAGER})), held)
    return [size for size in reversed(sizes) if report.step(f"decode step of {size} rows", once, engine, size)]


def once(engine: Engine, size: int) -> bool:
    """Run a decode step; True where nothing is raised."""
    engine.forward(*engine.decoding(size))
    engine.wait()
    return True


def capture(report: Report, engine: Engine, sizes: list[int]) -> Any:
    """One wrapper with a graph of each size that could be captured."""
    graphed = graphprobe.capture(engine.forward, buckets=sizes, name="steps", timing=0)
    for bucket in graphed.warmup(lambda size: (engine.decoding(size), {}), progress=False):
        if bucket.outcome == "ok":
            report.data["capture_seconds"][bucket.bucket] = bucket.seconds
            report.data["bytes"][bucket.bucket] = bucket.bytes
        else:
            report.note(f"left out: graph of {bucket.bucket} rows: {bucket.outcome}: {bucket.error.split(' (')[0]}")
    report.data["pool_bytes"] = graphed.snapshot().pool_bytes
    return graphed


def replays(graphed: Any, size: int) -> int:
    """Calls that the graph of this size has served."""
    return sum(row.calls for row in graphed.snapshot().rows if row.path == "graph" and row.bucket == size)


def graph(report: Report, engine: Engine, graphed: Any, size: int) -> None:
    """One size: equal to eager on the same input, then timed; kept only where a graph served each call."""
    inputs, before = engine.decoding(size), replays(graphed, size)
    want, have = engine.forward(*inputs), graphed(*inputs)
    equal = torch.equal(want, have)
    if not equal:
        worst = float((want.float() - have.float()).abs().max())
        report.data["largest_difference"][size] = worst if math.isfinite(worst) else None
    report.data["equal"] = equal and report.data["equal"] is not False
    del want, have
    events, wall = engine.seconds(lambda: graphed(*inputs))
    served, calls = replays(graphed, size) - before, 1 + WARM + LOOPS * CALLS
    if served != calls:
        raise RuntimeError(f"the graph served {served} of {calls} calls: {dict(graphed.snapshot().causes)}")
    report.data["graph"][size], report.data["graph_wall"][size] = events, wall


def eagerly(report: Report, engine: Engine, part: str, size: int, make: Callable[[int], Inputs]) -> None:
    """One size of ``eager`` or ``prefill``."""
    inputs = make(size)
    events, wall = engine.seconds(lambda: engine.forward(*inputs))
    report.data[part][size], report.data[f"{part}_events"][size] = wall, events


def measure(report: Report, shape: str, device: str, rows: int, length: int) -> None:
    """Everything, the most wanted first."""
    engine = report.step("model", Engine, shape, device)
    if engine is None:
        return
    fit = prepare(report, engine, rows, length)
    graphed = report.step("captures", capture, report, engine, [size for size in fit if size in GRAPHS])
    for size in report.data["bytes"] if graphed else ():
        report.step(f"graph of {size} rows", graph, report, engine, graphed, size)
    for size in (size for size in fit if size in EAGER):
        report.step(f"eager step of {size} rows", eagerly, report, engine, "eager", size, engine.decoding)
    for tokens in within(report, "prompts", PROMPTS, report.data["rows"] * length):
        report.step(f"prefill of {tokens} tokens", eagerly, report, engine, "prefill", tokens, engine.prompt)


def table(data: dict[str, Any]) -> str:
    """The numbers, in milliseconds."""

    def cell(part: str, size: int, scale: float = 1e3) -> str:
        value = data[part].get(size)
        return f"{'-' if value is None else format(value * scale, '.2f'):>11}"

    parts = (("graph", 1e3), ("graph_wall", 1e3), ("eager", 1e3), ("eager_events", 1e3), ("capture_seconds", 1.0))
    lines = [f"{'rows':>6}" + "".join(f"{p[:11]:>11}" for p in ("graph", "wall", "eager", "events", "capture s", "MB"))]
    for size in sorted({*data["graph"], *data["eager"], *data["bytes"]}):
        cells = "".join(cell(part, size, scale) for part, scale in parts)
        lines.append(f"{size:6d}{cells}{cell('bytes', size, 2**-20)}")
    lines.append(f"{'tokens':>6}{'prefill':>11}{'events':>11}")
    lines += [f"{n:6d}{cell('prefill', n)}{cell('prefill_events', n)}" for n in sorted(data["prefill"])]
    return "\n".join([*lines, f"equal {data['equal']} {data['largest_difference']}, pool {data['pool_bytes']} bytes"])


def main() -> int:
    """Measure, write and print; 1 where no graph was timed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, default=256, help="of the cache")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row of the cache")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which no further step begins")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    cuda, name = options.device.startswith("cuda"), NAMES[options.shape]
    if not cuda and (options.shape != "tiny" or os.environ.get("GRAPHPROBE_BACKEND") != "recorder"):
        parser.error("without a GPU the script can only be tried: --shape tiny, with GRAPHPROBE_BACKEND=recorder")
    if cuda and not torch.cuda.is_available():
        parser.exit(1, "needs a CUDA GPU: torch.cuda.is_available() is False\n")
    report = Report(
        options.json, options.limit, model=name, device=torch.cuda.get_device_name() if cuda else "cpu",
        torch=torch.__version__, transformers=transformers.__version__, date=time.strftime("%Y-%m-%d"),
        dtype="bfloat16" if cuda else "float32", rows=options.rows, length=options.length,
    )  # fmt: skip
    if not cuda:
        report.note("a trial on a CPU, its graphs recorded operators: these times mean nothing")
    report.save()
    with torch.inference_mode(), sdpa_kernel(KERNELS, set_priority=True):
        measure(report, options.shape, options.device, options.rows, options.length)
    report.save()
    print(f"{name} shape, {report.data['device']}, torch {torch.__version__}, {options.length} tokens in each row")
    print("\n".join(f"- {note}" for note in report.data["notes"]))
    print(table(report.data), flush=True)
    return 0 if report.data["graph"] else 1


if __name__ == "__main__":
    sys.exit(main())
