"""The engine of the fake mini-sglang: the model doubles a number per request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from minisgl.engine.graph import GraphRunner


def double(values: torch.Tensor) -> torch.Tensor:
    return values * 2


class Engine:
    """One rank, with its cache and its graphs."""

    def __init__(self, config: Any) -> None:
        self.device = torch.device("cpu")
        self.ctx = SimpleNamespace(page_size=config.page_size)
        self.num_pages = 100
        self.page_table = torch.zeros(config.max_running_req + 1, 8)
        self.model = double
        self.graph_runner = GraphRunner(self.model, list(config.cuda_graph_bs))

    def forward_batch(self, batch: Any, args: Any) -> torch.Tensor:
        if self.graph_runner.can_use_cuda_graph(batch):
            return self.graph_runner.replay(batch)
        return self.model(batch.values)
