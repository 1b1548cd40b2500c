"""One meaning per colour, in every panel of both dashboards: green is a graph call, orange a miss, red a fault."""

from __future__ import annotations

from collections.abc import Sequence

from graphprobe.reasons import FallbackReason

GRAPH, EAGER, NOT_COUNTED, FAULT = "green", "orange", "#8e8e8e", "red"

PATHS = {"graph": GRAPH, "eager": EAGER, "not counted": NOT_COUNTED}

MODES = {"full": GRAPH, "piecewise": "#b7d968", "breakable": "#56a64b"}

PADDING = {"padding": "purple"}

REASONS = {reason.value: NOT_COUNTED for reason in FallbackReason if not reason.counted} | {
    "no_exact_bucket": EAGER,
    "batch_too_large": "yellow",
    "not_captured": "blue",
    "signature": "light-blue",
    "graph_limit": "dark-blue",
    "capture_failed": FAULT,
    "verify_failed": "dark-red",
    "static_moved": "purple",
    "weights_moved": "light-purple",
    "busy": "super-light-red",
    "distributed": "dark-purple",
    "rank_vote": "super-light-purple",
    "adapter": "super-light-orange",
    "spec_width": "dark-orange",
    "ragged": "super-light-yellow",
    "multimodal": "dark-yellow",
    "mixed_batch": "super-light-blue",
    "engine_declined": "semi-dark-blue",
    "unknown": "text",
}

Steps = Sequence[tuple[float | None, str]]
"""From which value on a number has a colour; None is the lowest."""

PLAIN: Steps = ((None, "text"),)
GOAL: Steps = ((None, FAULT), (0.8, GRAPH))
"""Below 80 % every speed-up that is read is a mixture of two paths."""
NONE_IS_GOOD: Steps = ((None, GRAPH), (1e-9, FAULT))
SKEW: Steps = ((None, "transparent"), (0.1, FAULT))
"""As in rules.yaml."""
