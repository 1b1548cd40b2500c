"""A runner of nano-vllm's outline: the places that are hooked, its buckets, its way to choose, and a small model."""

from __future__ import annotations

from typing import Any

import torch
from nanovllm.utils.context import get_context, reset_context, set_context

WIDTH = 4


class Model(torch.nn.Module):
    """Keeps what it has seen of each request in slots, and adds up the slots of a request's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(64.0 * WIDTH).reshape(64, WIDTH) % 7)
        self.cache = torch.zeros(0, 1, WIDTH)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        now = get_context()
        rows = self.table[input_ids] + positions[:, None]
        if not self.cache.numel():
            return rows
        slots = now.slot_mapping.long()
        flat = self.cache.view(-1, WIDTH)
        # Rows without a slot go to the last one, which belongs to nobody.
        flat.index_copy_(0, torch.where(slots < 0, len(flat) - 1, slots), rows)
        if now.is_prefill:
            return rows
        seen = self.cache[now.block_tables.clamp(min=0).long()].flatten(1, 2)
        mask = torch.arange(seen.shape[1]) < now.context_lens[:, None]
        return rows + (seen * mask[:, :, None]).sum(1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2


class ModelRunner:
    """One rank."""

    def __init__(self, config: Any, rank: int = 0, event: Any = None) -> None:
        self.config, self.rank, self.block_size = config, rank, config.kvcache_block_size
        self.enforce_eager = config.enforce_eager
        self.model = Model()
        self.warmup_model()
        self.allocate_kv_cache()
        if not self.enforce_eager:
            self.capture_cudagraph()

    def warmup_model(self) -> None:
        self.run([[1, 2, 3]], True)

    def allocate_kv_cache(self) -> None:
        self.config.num_kvcache_blocks = 32
        self.kv_cache = self.model.cache = torch.zeros(32, self.block_size, WIDTH)

    def run(self, seqs: list[list[int]], is_prefill: bool) -> Any:
        """Requests are lists of tokens; the n-th has blocks 2 n and 2 n + 1."""
        lengths = [len(tokens) for tokens in seqs]
        if is_prefill:
            ids, positions = [t for tokens in seqs for t in tokens], [p for n in lengths for p in range(n)]
            slots = [2 * i * self.block_size + p for i, n in enumerate(lengths) for p in range(n)]
            set_context(True, slot_mapping=torch.tensor(slots, dtype=torch.int32))
        else:
            ids, positions = [tokens[-1] for tokens in seqs], [n - 1 for n in lengths]
            slots = [2 * i * self.block_size + n - 1 for i, n in enumerate(lengths)]
            wide = 1 + any(n > self.block_size for n in lengths)
            set_context(
                False,
                slot_mapping=torch.tensor(slots, dtype=torch.int32),
                context_lens=torch.tensor(lengths, dtype=torch.int32),
                block_tables=torch.tensor([[2 * i, 2 * i + 1][:wide] for i in range(len(seqs))], dtype=torch.int32),
            )
        logits = self.run_model(torch.tensor(ids), torch.tensor(positions), is_prefill)
        reset_context()
        return logits

    @torch.inference_mode()
    def run_model(self, input_ids: torch.Tensor, positions: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        if is_prefill or self.enforce_eager or input_ids.size(0) > 512:
            return self.model.compute_logits(self.model(input_ids, positions))
        rows, now, held = input_ids.size(0), get_context(), self.graph_vars
        graph = self.graphs[next(size for size in self.graph_bs if size >= rows)]
        for name, value in (("input_ids", input_ids), ("positions", positions), ("context_lens", now.context_lens)):
            held[name].zero_()
            held[name][:rows] = value
        held["slot_mapping"].fill_(-1)
        held["slot_mapping"][:rows] = now.slot_mapping
        held["block_tables"][:rows, : now.block_tables.size(1)] = now.block_tables
        graph.replay()
        return self.model.compute_logits(held["outputs"][:rows])

    @torch.inference_mode()
    def capture_cudagraph(self) -> None:
        most = min(self.config.max_num_seqs, 512)
        wide = -(-self.config.max_model_len // self.block_size)
        held = {name: torch.zeros(most, dtype=torch.int64) for name in ("input_ids", "positions")}
        held |= {name: torch.zeros(most, dtype=torch.int32) for name in ("slot_mapping", "context_lens")}
        held["block_tables"] = torch.zeros(most, wide, dtype=torch.int32)
        held["outputs"] = torch.zeros(most, WIDTH)
        self.graph_bs = [1, 2, 4, 8, *range(16, most + 1, 16)]
        self.graphs: dict[int, Any] = {}
        self.graph_vars, pool = held, None
        for size in reversed(self.graph_bs):
            graph = torch.cuda.CUDAGraph()
            now = {name: held[name][:size] for name in ("slot_mapping", "context_lens", "block_tables")}
            set_context(False, **now)
            held["outputs"][:size] = self.model(held["input_ids"][:size], held["positions"][:size])
            with torch.cuda.graph(graph, pool):
                held["outputs"][:size] = self.model(held["input_ids"][:size], held["positions"][:size])
            pool = pool or graph.pool()
            self.graphs[size] = graph
            reset_context()
