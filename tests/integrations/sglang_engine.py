"""One scheduler process of the fake SGLang in `fake/`: a target, a drafter where asked for, and its passes."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

DEFAULTS: dict[str, Any] = dict.fromkeys(
    (
        # What makes graphs of decode say no, and then those of prefill.
        *("ranks", "encoder", "tbo", "ragged"),
        *("companion", "pinned", "lora", "unmixed", "context", "veto", "metadata", "fa4", "qwen"),
        *("exact", "speculative", "enable_metrics", "enable_dp_attention"),
    )
) | {
    "device": "cuda",
    "sizes": (1, 2, 4, 8),
    "most": 8,
    "width": 1,
    "hidden": "NULL",
    "decode_backend": "full",
    "prefill": (),
    "prefill_backend": "breakable",
    "slots": 2,
    "dp_size": 1,
    "tp_size": 1,
    "pp_size": 1,
}
"""Settings of an engine: of its graphs, and of each thing that makes a predicate say no."""


class Engine:
    """``patch`` is the release, 0.5.PATCH; the keywords are those of ``DEFAULTS``."""

    def __init__(self, patch: int = 23, *, drafter: bool = False, **settings: Any) -> None:
        package = importlib.import_module("sglang")
        if hasattr(package, "PATCH"):
            package.PATCH, package.__version__ = patch, f"0.5.{patch}"
        self.settings = SimpleNamespace(**DEFAULTS | settings)
        runners = importlib.import_module("sglang.srt.model_executor.model_runner")
        self.batches = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardBatch
        self.runner = runners.ModelRunner(self.settings)
        getattr(self.runner, "init_cuda_graphs", getattr(self.runner, "initialize", None))()
        self.scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler(self.runner)
        self.drafter: Any = None
        if drafter:
            self.drafter = importlib.import_module("sglang.srt.speculative.eagle_worker_v2").EagleDraftWorker(
                self.settings
            )

    def run(self, mode: str, requests: int, tokens: int | None = None, **more: Any) -> Any:
        """One batch of the scheduler."""
        return self.scheduler.run_batch(self.batches(mode, requests, tokens, **more))

    def decode(self, *sizes: int) -> None:
        """Passes of decode."""
        for size in sizes:
            self.run("DECODE", size)

    def prefill(self, *sizes: int, **more: Any) -> None:
        """Passes of prefill."""
        for size in sizes:
            self.run("EXTEND", 1, size, **more)

    def draft(self, *sizes: int, **more: Any) -> None:
        """Rounds of drafting."""
        for size in sizes:
            self.drafter.draft(self.batches("DECODE", size, **more))
