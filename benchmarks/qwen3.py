"""A Qwen3-shaped transformers model with random weights, batches 1 to 16, through ``graphprobe.capture``.

    python benchmarks/qwen3.py [--shape 8b] [--json FILE]

For each bucket: outputs against eager, replays counted against an independent count of CUDAGraph.replay, eager and
graph milliseconds, capture seconds, pool megabytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, StaticCache

import graphprobe

BUCKETS = [1, 2, 4, 8, 16]
SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8},
}


def build(shape: str, device: str, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    """The model with random weights; no download."""
    config = Qwen3Config(
        vocab_size=1000 if shape == "tiny" else 151936,
        num_key_value_heads=8,
        head_dim=32 if shape == "tiny" else 128,
        tie_word_embeddings=shape == "0.6b",
        **SHAPES[shape],
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval()


class Decoder:
    """One decode step for each batch size, each with a cache of its own."""

    def __init__(self, model: Any, length: int, prompt: int) -> None:
        self.model = model
        self.caches: dict[int, Any] = {}
        config, device = model.config, next(model.parameters()).device
        for batch in BUCKETS:
            cache = StaticCache(config=config, max_cache_len=length)
            cache.early_initialization(
                batch_size=batch, num_heads=config.num_key_value_heads, head_dim=config.head_dim,
                dtype=model.dtype, device=device,
            )  # fmt: skip
            self.caches[batch] = cache
            ids = torch.randint(0, config.vocab_size, (batch, prompt), device=device)
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def state(self, batch: int) -> list[torch.Tensor]:
        """The tensors of a cache that a step advances, apart from the keys and values it overwrites."""
        layers = self.caches[batch].layers
        return [layer.cumulative_length for layer in layers if hasattr(layer, "cumulative_length")]

    def eager(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, 1] -> logits [batch, 1, vocab]; advances the cache of this batch size."""
        cache = self.caches[ids.shape[0]]
        return self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits


def milliseconds(step: Any, ids: torch.Tensor, count: int) -> float:
    """Median of ``count`` steps, from the host, the device waited for after each."""
    spent = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step(ids)
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - began) * 1e3)
    return statistics.median(spent)


def run(shape: str, steps: int) -> dict[str, Any]:
    """All batches of one model."""
    seen = [0]
    original = torch.cuda.CUDAGraph.replay

    def counting(self: Any) -> None:
        seen[0] += 1
        original(self)

    torch.cuda.CUDAGraph.replay = counting
    model = build(shape, "cuda", torch.bfloat16)
    decoder = Decoder(model, length=512, prompt=16)
    graphed = graphprobe.capture(decoder.eager, buckets=BUCKETS, name=f"qwen3-{shape}", timing=1)
    ids = {b: torch.randint(0, model.config.vocab_size, (b, 1), device="cuda") for b in BUCKETS}
    rows = []
    for batch in sorted(BUCKETS, reverse=True):
        saved = [t.clone() for t in decoder.state(batch)]
        want = [decoder.eager(ids[batch]).clone() for _ in range(4)]
        for tensor, before in zip(decoder.state(batch), saved, strict=True):
            tensor.copy_(before)
        have = [graphed(ids[batch]).clone() for _ in range(4)]
        equal = all(torch.equal(a, b) for a, b in zip(want, have, strict=True))
        worst = max(float((a.float() - b.float()).abs().max()) for a, b in zip(want, have, strict=True))
        rows.append(
            {
                "batch": batch, "equal": equal, "worst": worst,
                "eager_ms": milliseconds(decoder.eager, ids[batch], steps),
                "graph_ms": milliseconds(graphed, ids[batch], steps),
            }
        )  # fmt: skip
    for _ in range(2):
        for batch in BUCKETS:
            graphed(ids[batch])
    torch.cuda.synchronize()
    snapshot = graphed.snapshot()
    for row in rows:
        bucket = row["batch"]
        row["capture_s"] = snapshot.capture_seconds.get(bucket)
        row["pool_mb"] = snapshot.pool_growth.get(bucket, 0) / 2**20
        row["event_ms"] = 1e3 * (snapshot.mean_seconds("graph", bucket) or 0)
    return {
        "shape": shape, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"), "rows": rows,
        "graph_calls": snapshot.graph_calls, "replays_seen": seen[0], "pool_bytes": snapshot.pool_bytes,
        "causes": dict(snapshot.causes), "table": graphprobe.table(graphprobe.Snapshot({snapshot.name: snapshot})),
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "needs a CUDA GPU: torch.cuda.is_available() is False\n")
    with torch.inference_mode():
        result = run(options.shape, options.steps)
    print(f"{result['device']}, torch {result['torch']}, Qwen3 {result['shape']} shape, bfloat16, 512-token cache")
    print(
        f"{'rows':>4} {'equal':>6} {'eager ms':>8} {'graph ms':>8} {'events':>7} {'x':>4} {'capt s':>7} {'pool MB':>7}"
    )
    for row in sorted(result["rows"], key=lambda r: r["batch"]):
        ratio = row["eager_ms"] / row["graph_ms"]
        print(
            f"{row['batch']:4d} {row['equal']!s:>6} {row['eager_ms']:8.2f} {row['graph_ms']:8.2f}"
            f" {row['event_ms']:7.2f} "
            f"{ratio:4.1f} {row['capture_s'] or 0:7.2f} {row['pool_mb']:7.1f}"
        )
    print(
        f"graph calls {result['graph_calls']}, replays seen {result['replays_seen']}, pool {result['pool_bytes']} bytes"
    )
    print(result["causes"])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
