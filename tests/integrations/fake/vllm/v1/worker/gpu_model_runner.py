from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.dp_utils import coordinate_batch_across_dp


class GPUModelRunner:
    def __init__(self, vllm_config: Any, device: Any) -> None:
        self.vllm_config, self.device = vllm_config, device
        self.model_config = vllm_config.model_config
        self.uniform_decode_query_len = 1 + vllm_config.num_speculative_tokens
        self.input_batch = SimpleNamespace(lora_id_to_lora_request={})
        self.cudagraph_dispatcher = CudagraphDispatcher(vllm_config)
        self.cudagraph_dispatcher.initialize_cudagraph_keys(
            vllm_config.compilation_config.cudagraph_mode, self.uniform_decode_query_len
        )
        self.drafter: Any = None
        self.model: Any = lambda: None
        self.asks = 1
        self._drafts: tuple[int, int] | None = None

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        each = list(scheduler_output.num_scheduled_tokens.values())
        if not each:
            return "nothing to do"
        for _ in range(self.asks):
            self._determine_batch_execution_and_padding(
                num_tokens=sum(each),
                num_reqs=len(each),
                num_scheduled_tokens_np=each,
                max_num_scheduled_tokens=max(each),
                use_cascade_attn=False,
                num_encoder_reqs=len(scheduler_output.scheduled_encoder_inputs),
            )
        self._model_forward()
        self._drafts = (sum(each), len(each))
        return None

    def _dummy_run(self, num_tokens: int) -> None:
        self._determine_batch_execution_and_padding(num_tokens, 1, [num_tokens], num_tokens, False)
        self._model_forward()
        if self.drafter is not None:
            self.drafter.dummy_run(num_tokens)

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: Any,
        max_num_scheduled_tokens: int,
        use_cascade_attn: bool = False,
        allow_microbatching: bool = True,
        force_eager: bool = False,
        force_uniform_decode: bool | None = None,
        force_has_lora: bool | None = None,
        force_num_active_loras: int | None = None,
        num_encoder_reqs: int = 0,
    ) -> tuple[CUDAGraphMode, BatchDescriptor, bool, Any, Any]:
        width, loras = max_num_scheduled_tokens, len(self.input_batch.lora_id_to_lora_request)
        asked = {
            "num_tokens": getattr(self, "_pad_for_sequence_parallelism", int)(num_tokens),
            "uniform_decode": width == self.uniform_decode_query_len and num_tokens == width * num_reqs,
            "has_lora": loras > 0,
            "num_active_loras": loras,
        }
        without = {CUDAGraphMode.FULL} if self.model_config.is_encoder_decoder and num_encoder_reqs else None
        mode, found = self.cudagraph_dispatcher.dispatch(**asked, invalid_modes=without)
        if self.vllm_config.parallel_config.data_parallel_size > 1:
            agreed = coordinate_batch_across_dp(mode)
            mode, found = self.cudagraph_dispatcher.dispatch(**asked, valid_modes={agreed})
        return mode, found, False, None, None

    def _model_forward(self, input_ids: Any = None, positions: Any = None, **model_kwargs: Any) -> Any:
        return self.model()

    def sample_tokens(self, grammar_output: Any) -> str:
        if self.drafter is not None:
            self.drafter.propose(*self._drafts)
        return "tokens"

    def capture_model(self) -> int:
        before = self.device.free
        for mode, group in self.cudagraph_dispatcher.get_capture_descs():
            for found in group:
                self._warmup_and_capture(found, cudagraph_runtime_mode=mode)
        return before - self.device.free

    def _warmup_and_capture(self, desc: BatchDescriptor, cudagraph_runtime_mode: CUDAGraphMode, **more: Any) -> None:
        self._dummy_run(desc.num_tokens)
        self.device.capture(desc.num_tokens)
