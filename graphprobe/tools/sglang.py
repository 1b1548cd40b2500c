"""SGLang's own count of passes beside ours on a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from graphprobe import metrics
from graphprobe.tools.grammar import Line

PASSES = "sglang:cuda_graph_passes_total"
NAMES = frozenset({PASSES})
"""What is read of it; in all releases from 0.5.10 on."""

MODES = {
    "decode_cuda_graph": ("sglang", metrics.GRAPH_CALLS),
    "decode_none": ("sglang", metrics.EAGER_CALLS),
    "prefill_cuda_graph": ("sglang.prefill", metrics.GRAPH_CALLS),
    "prefill_none": ("sglang.prefill", metrics.EAGER_CALLS),
}
"""Its label ``mode``, and which of our forwards and counters is about the same passes."""


def passes(lines: Iterable[Line]) -> Counter[str]:
    """SGLang's count by mode, over models and ranks."""
    found = Counter[str]()
    for line in lines:
        if line.name == PASSES:
            found[line.labels.get("mode", "")] += round(line.value)
    return found
