"""vLLM's own series beside ours on a page: how many iterations it counted, and how many tokens it drafts ahead."""

from __future__ import annotations

from collections.abc import Iterable

from graphprobe.tools.grammar import Line

FORWARD = "vllm"
"""The forward under which its steps are counted; its drafters are ``vllm.drafter``."""

ITERATIONS = "vllm:iteration_tokens_total_count"
FINISHED = "vllm:request_success_total"
POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
NAMES = frozenset({ITERATIONS, FINISHED, POSITIONS})
"""What is read of them; all from 0.26 to 0.33."""


def total(lines: Iterable[Line], name: str) -> float:
    """The sum of the series of this name: over models, engines and causes."""
    return sum(line.value for line in lines if line.name == name)


def engines(lines: Iterable[Line]) -> int:
    """How many engines, which are data-parallel ranks, count iterations; at least one."""
    return max(1, len({line.labels.get("engine", "") for line in lines if line.name == ITERATIONS}))


def spec_tokens(lines: Iterable[Line]) -> int:
    """``num_speculative_tokens``: vLLM has a series for each position of a draft, from its start on; 0 without any."""
    positions = [line.labels.get("position", "") for line in lines if line.name == POSITIONS]
    return max((int(text) + 1 for text in positions if text.isdecimal() and len(text) < 4), default=0)
