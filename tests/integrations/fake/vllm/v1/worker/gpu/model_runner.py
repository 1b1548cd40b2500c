from __future__ import annotations

from typing import Any

from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import FULL, ModelCudaGraphManager
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp


class GPUModelRunner:
    def __init__(self, vllm_config: Any, device: Any) -> None:
        self.vllm_config, self.device = vllm_config, device
        self.decode_query_len = 1 + vllm_config.num_speculative_tokens
        mode = vllm_config.compilation_config.cudagraph_mode
        self.cudagraph_manager = ModelCudaGraphManager(vllm_config, device, mode, self.decode_query_len)
        self.active_loras = 0
        self.drafter: Any = None
        self.model: Any = lambda: None
        self.asks = 1
        self._drafts: tuple[int, int] | None = None

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, dummy_run: bool = False, is_profile: bool = False
    ) -> Any:
        each = list(scheduler_output.num_scheduled_tokens.values())
        if not each:
            return "nothing to do"
        for _ in range(self.asks):
            found, _sync = dispatch_cg_and_sync_dp(
                self.cudagraph_manager,
                len(each),
                sum(each),
                each[0] if len(set(each)) == 1 and not scheduler_output.scheduled_new_reqs else None,
                self.vllm_config.parallel_config.data_parallel_size,
                0,
                need_eager=is_profile or bool(scheduler_output.scheduled_encoder_inputs),
                num_active_loras=self.active_loras,
            )
        if found.cg_mode is FULL:
            self.cudagraph_manager.run_fullgraph(found)
        else:
            with set_forward_context(None, self.vllm_config, num_tokens=found.num_tokens):
                self.model()
        self._drafts = (sum(each), len(each))
        return None

    def sample_tokens(self, grammar_output: Any) -> str:
        if self.drafter is not None:
            self.drafter.propose(*self._drafts)
        return "tokens"

    def _dummy_run(self, num_tokens: int) -> None:
        self.execute_model(self.vllm_config.dummy(num_tokens), dummy_run=True)

    def capture_model(self, *, profile_only: bool = False) -> int:
        before = self.device.free
        self.cudagraph_manager.capture(self.model)
        if self.drafter is not None:
            self.drafter.capture()
        return before - self.device.free
