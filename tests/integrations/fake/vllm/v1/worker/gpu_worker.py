from __future__ import annotations

from typing import Any


class Worker:
    def __init__(self, vllm_config: Any, rank: int, model_runner: Any) -> None:
        self.vllm_config = vllm_config
        self.rank = rank
        self.model_runner = model_runner

    def compile_or_warm_up_model(self) -> float:
        self.model_runner._dummy_run(4)
        self.model_runner.capture_model()
        return 1.5

    def execute_model(self, scheduler_output: Any) -> Any:
        return self.model_runner.execute_model(scheduler_output, None)

    def execute_dummy_batch(self) -> None:
        self.model_runner._dummy_run(1)
