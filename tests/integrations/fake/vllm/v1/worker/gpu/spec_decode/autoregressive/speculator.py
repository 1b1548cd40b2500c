from __future__ import annotations

from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp


class AutoRegressiveSpeculator:
    def __init__(self, vllm_config: Any, device: Any) -> None:
        self.cudagraph_manager = CudaGraphManager(vllm_config, device, CUDAGraphMode.FULL_DECODE_ONLY, 1)

    def capture(self) -> None:
        self.cudagraph_manager.capture(lambda desc, warmup: lambda mode: None)

    def propose(self, num_tokens: int, num_reqs: int) -> None:
        for tokens, width in ((num_tokens, None), (num_reqs, 1)):
            dispatch_cg_and_sync_dp(self.cudagraph_manager, num_reqs, tokens, width, 1, 0)
