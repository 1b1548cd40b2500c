"""What a step of the fake knows beside its arguments: an object that is another one at each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Context:
    is_prefill: bool = False
    slot_mapping: Any = None
    context_lens: Any = None
    block_tables: Any = None


_now = Context()


def get_context() -> Context:
    return _now


def set_context(is_prefill: bool, slot_mapping: Any = None, context_lens: Any = None, block_tables: Any = None) -> None:
    global _now
    _now = Context(is_prefill, slot_mapping, context_lens, block_tables)


def reset_context() -> None:
    global _now
    _now = Context()
