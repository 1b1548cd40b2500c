from __future__ import annotations

from vllm.config.compilation import CUDAGraphMode

OTHERS: list[CUDAGraphMode] = []
"""What the other ranks can use in this step."""


def coordinate_batch_across_dp(mode: CUDAGraphMode) -> CUDAGraphMode:
    return min((mode, *OTHERS), key=lambda found: found.value)
