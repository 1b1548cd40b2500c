"""mini-sglang's own engine, graphs and scheduler on a CPU, driven through the hooks; prints what was counted.

    python -m tests.engines.minisgl_drive CHECKOUT

The model, its attention and its cache are of ours: one number per request, of which the next one is told. All that
dispatches, pads, captures, replays and samples is mini-sglang's.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import graphprobe
from tests.engines import cpu_cuda

VOCABULARY = 32
ABSENT = (
    "triton",
    "triton.language",
    "msgpack",
    "zmq",
    "zmq.asyncio",
    "modelscope",
    "flashinfer",
    "tvm_ffi",
    "sgl_kernel",
)
"""What mini-sglang imports and these parts of it never call."""


class Model:
    """Of each token the next one: logits that are 1 there."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass

    def forward(self) -> torch.Tensor:
        tokens = importlib.import_module("minisgl.core").get_global_ctx().batch.input_ids
        return torch.nn.functional.one_hot((tokens.long() + 1) % VOCABULARY, VOCABULARY).float()


class Attention:
    """Nothing to plan."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class OnCpu:
    """torch, where a device called cuda is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, name: str) -> torch.device:
        return torch.device("cpu" if name.startswith("cuda") else name)


def settings(most: int, sizes: list[int] | None, largest: int | None) -> Any:
    """An EngineConfig for so many requests."""
    info = importlib.import_module("minisgl.distributed").DistributedInfo(0, 1)
    model = SimpleNamespace(
        is_moe=False, head_dim=4, num_kv_heads=1, num_layers=1, vocab_size=VOCABULARY, hidden_size=4
    )
    return SimpleNamespace(
        tp_info=info, attention_backend="fa", page_size=16, model_config=model, dtype=torch.float32,
        max_running_req=most, cuda_graph_bs=sizes, cuda_graph_max_bs=largest, memory_ratio=0.5, num_page_override=10,
        distributed_addr="", use_pynccl=False, distributed_timeout=1, max_forward_len=8, use_dummy_weight=True,
        max_seq_len=64,
    )  # fmt: skip


def scheduler(config: Any) -> Any:
    """The scheduler's part that runs a batch, with an engine of its own."""
    module = importlib.import_module("minisgl.engine.engine")
    module.torch = OnCpu()
    module.create_model = lambda config: Model()
    module.create_attention_backend = lambda *args: Attention()
    module.create_kvcache_pool = lambda **kwargs: None
    module.enable_pynccl_distributed = lambda *args: None
    kind = importlib.import_module("minisgl.scheduler.scheduler").Scheduler
    found = object.__new__(kind)
    found.engine = module.Engine(config)
    found.decode_manager = SimpleNamespace(filter_reqs=lambda requests: None)
    found.token_pool = torch.zeros(config.max_running_req, 64, dtype=torch.int32)
    return found


def run(found: Any, tokens: list[int], phase: str) -> list[int]:
    """One batch of requests whose last tokens these are; the next ones."""
    core = importlib.import_module("minisgl.core")
    requests = [
        core.Req(
            input_ids=torch.tensor([token]), table_idx=i, cached_len=0, output_len=4, uid=i, sampling_params=None,
            cache_handle=None,
        )
        for i, token in enumerate(tokens)
    ]  # fmt: skip
    batch = core.Batch(reqs=requests, phase=phase)
    found.engine.graph_runner.pad_batch(batch)
    batch.positions = batch.out_loc = torch.zeros(batch.padded_size, dtype=torch.int32)
    found.token_pool[:] = 0
    found.token_pool[: len(tokens), 0] = torch.tensor(tokens)
    rows = torch.arange(batch.padded_size).clamp(max=len(found.token_pool) - 1)
    places = (rows, torch.zeros_like(rows))
    written = (torch.arange(len(tokens)), torch.ones(len(tokens), dtype=torch.int64))
    args = importlib.import_module("minisgl.engine.sample").BatchSamplingArgs(temperatures=None)
    output = found._forward(forward_input(batch, args, places, written))
    return [int(token) for token in output.next_tokens_cpu]


def forward_input(*fields: Any) -> Any:
    """What the scheduler hands to itself."""
    return importlib.import_module("minisgl.scheduler.scheduler").ForwardInput(*fields)


def main(checkout: str) -> None:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("graphprobe").addHandler(handler)
    logging.getLogger("graphprobe").setLevel(logging.INFO)
    sys.path.insert(0, str(Path(checkout) / "python"))
    torch.set_num_threads(1)
    cpu_cuda.install()
    graphprobe.instrument("minisgl")
    with cpu_cuda.standing_in(*ABSENT):
        importlib.import_module("minisgl.scheduler.scheduler")
    with torch.inference_mode():
        found = scheduler(settings(12, [1, 2, 4, 8], None))
        before = cpu_cuda.Graph.launched
        answers = [run(found, [n * 3 + i for i in range(n)], "decode") for n in (1, 3, 4, 8, 9, 3)]
        answers.append(run(found, [5, 6], "prefill"))
    forward = graphprobe.snapshot().forwards["minisgl"]
    result = {
        "answers": answers,
        "launched": cpu_cuda.Graph.launched - before,
        "rows": [[row.phase, row.batch_size, row.bucket or str(row.reason), row.calls] for row in forward.rows],
        "captured": sorted(forward.capture_seconds),
        "growth": sorted(forward.pool_growth.values()),
        "pool_bytes": forward.pool_bytes,
        "kv_capacity_tokens": forward.kv_capacity_tokens,
        "uncovered": dict(forward.uncovered),
        "hooks": {hook: bound for (_, hook), bound in graphprobe.snapshot().hooks.items()},
        "said": texts,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
