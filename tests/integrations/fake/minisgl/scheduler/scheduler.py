"""The scheduler of the fake mini-sglang, which sends batches to its engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from minisgl.engine.engine import Engine


class Scheduler:
    """One process."""

    def __init__(self, config: Any) -> None:
        self.engine = Engine(config)

    def step(self, values: list[float], phase: str = "decode") -> list[float]:
        batch = SimpleNamespace(values=torch.tensor(values), size=len(values), phase=phase)
        self.engine.graph_runner.pad_batch(batch)
        return [float(value) for value in self._forward(batch)]

    def _forward(self, batch: Any) -> torch.Tensor:
        return self.engine.forward_batch(batch, None)
