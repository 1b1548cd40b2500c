"""One worker process of the fake vLLM in `fake/`, and what its scheduler sends."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import graphprobe
from graphprobe.ledger import LEDGER

RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}


class OutOfMemoryError(RuntimeError):
    """Stands for torch's."""


class Device:
    """Memory from which each graph takes ten times its size, in a thousandth of the seconds."""

    def __init__(self, kind: str = "cpu") -> None:
        self.type = kind
        self.free = 100_000
        self.seconds = 0.0
        self.fails: dict[int, BaseException] = {}

    def capture(self, size: int) -> None:
        if size in self.fails:
            raise self.fails[size]
        self.free -= size * 10
        self.seconds += size / 1000


def output(
    *tokens: int, new: Iterable[int] = (), resumed: Iterable[int] = (), chunks: Iterable[int] = (), images: int = 0
) -> Any:
    """A scheduler's output: tokens of requests that generate, of new and resumed ones, and of the rests of prompts."""
    cached = [*(("decode", n) for n in tokens), *(("resumed", n) for n in resumed), *(("chunk", n) for n in chunks)]
    names = [f"{kind}-{index}" for index, (kind, _) in enumerate(cached)]
    started = [SimpleNamespace(req_id=f"new-{index}") for index, _ in enumerate(new)]
    scheduled = {f"new-{index}": n for index, n in enumerate(new)}
    scheduled |= {name: n for name, (_, n) in zip(names, cached, strict=True)}
    return SimpleNamespace(
        scheduled_new_reqs=started,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names,
            resumed_req_ids={name for name in names if name.startswith("resumed")},
            num_output_tokens=[0 if kind == "chunk" else 5 for kind, _ in cached],
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_encoder_inputs={f"image-{n}": [0] for n in range(images)},
    )


def config(
    *,
    sizes: Iterable[int] = (1, 2, 4, 8),
    mode: str = "FULL_DECODE_ONLY",
    k: int = 0,
    seqs: int = 8,
    dp: int = 1,
    loras: int = 0,
    specialize: bool = True,
    encoder: bool = False,
    batched: int = 2048,
    schedule: list[tuple[int, int, int]] | None = None,
) -> Any:
    """A VllmConfig: ``k`` speculative tokens, ``seqs`` requests at most, ``dp`` data-parallel ranks.

    ``schedule`` has the speculative tokens of ranges of requests: (first, last, k).
    """
    modes = importlib.import_module("vllm.config.compilation").CUDAGraphMode
    listed = list(sizes)
    return SimpleNamespace(
        num_speculative_tokens=k,
        compilation_config=SimpleNamespace(
            cudagraph_mode=modes[mode],
            cudagraph_capture_sizes=listed,
            max_cudagraph_capture_size=max(listed),
            cudagraph_specialize_lora=specialize,
        ),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=k,
            num_speculative_tokens_per_batch_size=schedule,
            uses_dynamic_speculative_decoding=lambda: schedule is not None,
        )
        if k
        else None,
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=batched),
        parallel_config=SimpleNamespace(data_parallel_size=dp, data_parallel_index=0, world_size=1),
        cache_config=SimpleNamespace(kv_cache_size_tokens=4096, num_gpu_blocks=None, block_size=16),
        model_config=SimpleNamespace(is_encoder_decoder=encoder),
        lora_config=SimpleNamespace(max_loras=loras) if loras else None,
        dummy=lambda tokens: output(new=[tokens]),
    )


class Engine:
    """A worker with one model runner of ``kind``; the keywords are those of ``config``."""

    def __init__(self, kind: str = "v1", *, device: Device | None = None, rank: int = 0, **settings: Any) -> None:
        self.kind = kind
        self.device = device or Device()
        self.config = config(**settings)
        self.runner = importlib.import_module(RUNNERS[kind]).GPUModelRunner(self.config, self.device)
        ray = importlib.import_module("vllm.v1.executor.ray_utils")
        self.base = ray.RayWorkerWrapper(0, rank)
        workers = importlib.import_module("vllm.v1.worker.gpu_worker")
        self.worker = self.base.worker = workers.Worker(self.config, rank, self.runner)

    def draft(self) -> None:
        """Let a drafter propose after each step."""
        if self.kind == "v1":
            made = importlib.import_module("vllm.v1.spec_decode.llm_base_proposer").SpecDecodeBaseProposer(self.config)
        else:
            name = "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator"
            made = importlib.import_module(name).AutoRegressiveSpeculator(self.config, self.device)
        self.runner.drafter = made

    def start(self) -> Engine:
        """Warm up and capture, as before the first request."""
        self.worker.compile_or_warm_up_model()
        return self

    def run(self, found: Any) -> Any:
        """One step, up to its sampled tokens."""
        result = self.base.execute_model(found)
        return self.runner.sample_tokens(None) if result is None else result

    def step(self, *tokens: int, **more: Any) -> Any:
        """One step of the requests that ``output`` describes."""
        return self.run(output(*tokens, **more))


def rows(name: str = "vllm") -> dict[tuple[Any, ...], int]:
    """Calls by (phase, tokens, mode and bucket, or reason)."""
    forward = LEDGER.forwards.get(name)
    found = () if forward is None else forward.snapshot().rows
    return {(r.phase, r.batch_size, *((r.mode, r.bucket) if r.bucket else (str(r.reason),))): r.calls for r in found}


def forward(name: str = "vllm") -> Any:
    """The snapshot of a forward."""
    return graphprobe.snapshot().forwards[name]
