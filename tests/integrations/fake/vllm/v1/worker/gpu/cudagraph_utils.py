from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config.compilation import CUDAGraphMode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


class BatchExecutionDescriptor(NamedTuple):
    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None = None
    uniform_token_count: int | None = None
    num_active_loras: int = 0


class CudaGraphManager:
    def __init__(self, vllm_config: Any, device: Any, cudagraph_mode: CUDAGraphMode, decode_query_len: int) -> None:
        self.vllm_config, self.device = vllm_config, device
        self.compilation_config = vllm_config.compilation_config
        self.cudagraph_mode, self.decode_query_len = cudagraph_mode, decode_query_len
        adapters = vllm_config.lora_config
        self.lora_capture_cases = [0] if adapters is None else [0, adapters.max_loras + 1]
        self.use_breakable_cg = is_breakable_cudagraph_enabled()
        self.graphs: dict[BatchExecutionDescriptor, str] = {}
        self._graphs_captured = False
        self._max_full_descs_to_capture: int | None = None
        self._capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]] = {}
        self._candidates: dict[tuple[int, int], list[BatchExecutionDescriptor]] = {}
        for loras in self.lora_capture_cases:
            self._init_candidates(loras)

    def _init_candidates(self, loras: int) -> None:
        mode, most = self.cudagraph_mode, self.vllm_config.scheduler_config.max_num_seqs
        largest = self.compilation_config.max_cudagraph_capture_size
        for size in sorted(self.compilation_config.cudagraph_capture_sizes, reverse=True):
            for width in self._widths() if mode.separate_routine() else ():
                rounded = -(-size // width) * width
                if rounded <= min(most * width, largest):
                    self._add(BatchExecutionDescriptor(FULL, rounded, rounded // width, width, loras))
            if mode.mixed_mode():
                requests = min(size, most) if mode.mixed_mode() is FULL else None
                self._add(BatchExecutionDescriptor(mode.mixed_mode(), size, requests, None, loras))
        for kind in (FULL, PIECEWISE):
            found = [desc for desc in self._capture_descs.get(kind, ()) if desc.num_active_loras == loras]
            for tokens in range(1, max((desc.num_tokens for desc in found), default=0) + 1):
                nearest = min(desc.num_tokens for desc in found if desc.num_tokens >= tokens)
                fitting = [desc for desc in found if desc.num_tokens == nearest]
                self._candidates.setdefault((tokens, loras), []).extend(fitting)

    def _widths(self) -> list[int]:
        speculative = self.vllm_config.speculative_config
        if speculative is None or not speculative.uses_dynamic_speculative_decoding():
            return [self.decode_query_len]
        return sorted({1 + k for _, _, k in speculative.num_speculative_tokens_per_batch_size})

    def _add(self, found: BatchExecutionDescriptor) -> None:
        group = self._capture_descs.setdefault(found.cg_mode, [])
        if found not in group:
            group.append(found)

    def _resolve_effective_loras(self, num_active_loras: int) -> int:
        return max(self.lora_capture_cases) or num_active_loras if num_active_loras > 0 else 0

    def dispatch(
        self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, num_active_loras: int
    ) -> BatchExecutionDescriptor:
        loras = self._resolve_effective_loras(num_active_loras)
        for found in self._candidates.get((num_tokens, loras), ()) if self._graphs_captured else ():
            width = found.uniform_token_count in (None, uniform_token_count)
            if width and (found.num_reqs is None or found.num_reqs >= num_reqs):
                return found
        return BatchExecutionDescriptor(NONE, num_tokens, num_reqs, None, loras)

    def capture(self, create_forward_fn: Callable[..., Any], progress_bar_desc: str = "Capturing CUDA graphs") -> None:
        for mode in (PIECEWISE, FULL):
            for found in self._capture_descs.get(mode, [])[: self._max_full_descs_to_capture]:
                create_forward_fn(found, warmup=True)(NONE)
                create_forward_fn(found, warmup=False)(NONE)
                self.device.capture(found.num_tokens)
                self.graphs[found] = "graph"
        self._graphs_captured = True


class ModelCudaGraphManager(CudaGraphManager):
    def capture(self, model: Any, progress_bar_desc: str = "Capturing CUDA graphs") -> None:  # type: ignore[override]
        super().capture(lambda desc, warmup: lambda mode: model(), progress_bar_desc)

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        return self.graphs[desc]
