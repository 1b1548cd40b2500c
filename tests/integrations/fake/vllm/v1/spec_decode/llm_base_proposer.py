from __future__ import annotations

from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher


class SpecDecodeBaseProposer:
    def __init__(self, vllm_config: Any) -> None:
        self.cudagraph_dispatcher = CudagraphDispatcher(vllm_config)
        self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE)

    def propose(self, num_tokens: int, batch_size: int) -> None:
        self._determine_batch_execution_and_padding(num_tokens)
        self._determine_batch_execution_and_padding(batch_size)

    def dummy_run(self, num_tokens: int) -> None:
        self._determine_batch_execution_and_padding(num_tokens, use_cudagraphs=False)

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, use_cudagraphs: bool = True
    ) -> tuple[CUDAGraphMode, int, Any]:
        valid = None if use_cudagraphs else {CUDAGraphMode.NONE}
        mode, found = self.cudagraph_dispatcher.dispatch(num_tokens, valid_modes=valid)
        return mode, found.num_tokens, None
