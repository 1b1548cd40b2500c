from __future__ import annotations

from typing import Any

from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


class CudagraphDispatcher:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.compilation_config = vllm_config.compilation_config
        self.piecewise_without_compiler = is_breakable_cudagraph_enabled()
        self.keys_initialized = False
        self.cudagraph_mode = NONE
        self.cudagraph_keys: dict[CUDAGraphMode, set[BatchDescriptor]] = {PIECEWISE: set(), FULL: set()}

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int = 1) -> None:
        self.keys_initialized, self.cudagraph_mode = True, cudagraph_mode
        sizes = self.compilation_config.cudagraph_capture_sizes
        most = uniform_decode_query_len * self.vllm_config.scheduler_config.max_num_seqs
        for loras in self._cases():
            if cudagraph_mode.mixed_mode():
                self._add(cudagraph_mode.mixed_mode(), sizes, False, loras)
            if cudagraph_mode.separate_routine():
                self._add(FULL, [n for n in sizes if uniform_decode_query_len <= n <= most], True, loras)

    def _add(self, mode: CUDAGraphMode, sizes: list[int], uniform: bool, loras: int) -> None:
        self.cudagraph_keys[mode] |= {BatchDescriptor(n, None, uniform, loras > 0, loras) for n in sizes}

    def _cases(self) -> list[int]:
        found = self.vllm_config.lora_config
        if found is None:
            return [0]
        most = found.max_loras + 1
        return [0, most] if self.compilation_config.cudagraph_specialize_lora else [most]

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        valid_modes: Any = None,
        invalid_modes: Any = None,
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        allowed = set(valid_modes or (NONE, PIECEWISE, FULL)) - set(invalid_modes or ())
        largest = self.compilation_config.max_cudagraph_capture_size
        if self.keys_initialized and self.cudagraph_mode and largest is not None and num_tokens <= largest:
            size = min(n for n in self.compilation_config.cudagraph_capture_sizes if n >= num_tokens)
            loras = self.vllm_config.lora_config.max_loras + 1 if has_lora else 0
            for mode, uniform in (
                (FULL, uniform_decode and self.cudagraph_mode.separate_routine()),
                (PIECEWISE, False),
            ):
                found = BatchDescriptor(size, None, uniform, has_lora, loras)
                if mode in allowed and found in self.cudagraph_keys[mode]:
                    return mode, found
        return NONE, BatchDescriptor(num_tokens)

    def get_capture_descs(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        return [(mode, sorted(found, reverse=True)) for mode, found in self.cudagraph_keys.items() if found]
