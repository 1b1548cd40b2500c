"""How a graph is made and replayed: one backend per device type, chosen by :func:`for_device`."""

from __future__ import annotations

import os
from typing import Any

import torch

from graphprobe.backends.base import Backend

NAMES = ("auto", "cuda", "recorder")


def for_device(wanted: str, device: torch.device, pool: Any = None) -> Backend | None:
    """The backend for tensors on ``device``, or None where they can only run eagerly.

    ``pool`` is a graph memory pool to use instead of an own one. ``wanted`` is one of NAMES; ``auto`` gives way to the
    environment variable GRAPHPROBE_BACKEND.
    """
    name = os.environ.get("GRAPHPROBE_BACKEND", "auto") if wanted == "auto" else wanted
    if name == "recorder" and device.type == "cpu":
        from graphprobe.backends.recorder import RecorderBackend

        return RecorderBackend(device)
    if device.type == "cuda" and name in ("auto", "cuda", "recorder"):
        from graphprobe.backends.cuda import CudaBackend

        return CudaBackend(device, pool)
    return None
