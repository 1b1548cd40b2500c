from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple


class BatchDescriptor(NamedTuple):
    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


@contextlib.contextmanager
def set_forward_context(
    attn_metadata: Any, vllm_config: Any, num_tokens: int | None = None, **more: Any
) -> Iterator[None]:
    yield
