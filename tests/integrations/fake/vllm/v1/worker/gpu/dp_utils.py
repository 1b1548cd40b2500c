from __future__ import annotations

from typing import Any

from vllm.v1.worker.dp_utils import coordinate_batch_across_dp
from vllm.v1.worker.gpu.cudagraph_utils import NONE, BatchExecutionDescriptor


def dispatch_cg_and_sync_dp(
    cudagraph_manager: Any,
    num_reqs: int,
    num_tokens: int,
    uniform_token_count: int | None,
    dp_size: int,
    dp_rank: int,
    need_eager: bool = False,
    num_active_loras: int = 0,
) -> tuple[BatchExecutionDescriptor, Any]:
    found = BatchExecutionDescriptor(NONE, num_tokens, num_reqs)
    if cudagraph_manager is not None and not need_eager:
        found = cudagraph_manager.dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras)
    if dp_size > 1 and not coordinate_batch_across_dp(found.cg_mode):
        found = BatchExecutionDescriptor(NONE, num_tokens, num_reqs)
    return found, None
