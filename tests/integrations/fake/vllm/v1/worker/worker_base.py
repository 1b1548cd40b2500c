from __future__ import annotations

from typing import Any


class WorkerWrapperBase:
    def __init__(self, rpc_rank: int = 0, global_rank: int | None = None) -> None:
        self.rpc_rank = rpc_rank
        self.global_rank = rpc_rank if global_rank is None else global_rank
        self.worker: Any = None

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step."""
        return self.worker.execute_model(scheduler_output)
