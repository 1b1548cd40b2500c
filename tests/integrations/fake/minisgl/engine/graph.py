"""The graphs of the fake mini-sglang."""

from __future__ import annotations

from typing import Any

import torch


class GraphRunner:
    """Captures the sizes of a list, pads to the next one, and replays it."""

    def __init__(self, model: Any, sizes: list[int]) -> None:
        self.max_graph_bs = max(sizes, default=0)
        self.graph_bs_list = sorted(sizes)
        self._capture_graphs(64, 256, model)

    def _capture_graphs(self, max_seq_len: int, vocab_size: int, model: Any) -> None:
        self.graph_map: dict[int, Any] = {}
        self.given, self.logits = torch.zeros(self.max_graph_bs), torch.zeros(self.max_graph_bs)
        for size in sorted(self.graph_bs_list, reverse=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=None):
                self.logits[:size] = model(self.given[:size])
            self.graph_map[size] = graph

    def can_use_cuda_graph(self, batch: Any) -> bool:
        return bool(batch.phase == "decode" and batch.size <= self.max_graph_bs)

    def pad_batch(self, batch: Any) -> None:
        able = self.can_use_cuda_graph(batch)
        batch.padded_size = next(n for n in self.graph_bs_list if n >= batch.size) if able else batch.size

    def replay(self, batch: Any) -> torch.Tensor:
        self.given[: batch.size] = batch.values
        self.graph_map[batch.padded_size].replay()
        return self.logits[: batch.size]
