"""What tests of captured forwards share; fixtures are in conftest.py."""

from __future__ import annotations

import collections
import functools
from typing import Any

import torch

from graphprobe.graphed import capture

recorded = functools.partial(capture, backend="recorder")


def rows(n: int, width: int = 3) -> torch.Tensor:
    return torch.randn(n, width)


def counts(forward: Any) -> dict[str, int]:
    """Calls by reason; those that a graph served under ``graph``."""
    found: collections.Counter[str] = collections.Counter()
    for row in forward.snapshot().rows:
        found[str(row.reason or "graph")] += row.calls
    return dict(found)


def causes(forward: Any) -> str:
    """The causes of eager calls as one text."""
    return " | ".join(forward.snapshot().causes.values())
