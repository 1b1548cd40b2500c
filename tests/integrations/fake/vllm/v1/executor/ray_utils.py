from __future__ import annotations

from typing import Any

from vllm.v1.worker.worker_base import WorkerWrapperBase


class RayWorkerWrapper(WorkerWrapperBase):
    def execute_model_ray(self, execute_model_input: tuple[Any, ...]) -> Any:
        result = self.worker.model_runner.execute_model(execute_model_input[0], None)
        return self.worker.model_runner.sample_tokens(execute_model_input[1]) if result is None else result
