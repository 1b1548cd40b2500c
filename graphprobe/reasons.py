"""Why a call ran eagerly: the closed enum, and which reasons count in the hit rate.

The hit rate everywhere (snapshot, table, rule, alert) is graph calls / (graph calls + *counted* eager calls).
A reason is not counted where no graph was meant to serve the call, so that a miss always means lost speed.
"""

from __future__ import annotations

from enum import Enum

from graphprobe.errors import ConfigError


class FallbackReason(str, Enum):
    """Why a call ran eagerly. ``str()`` of a member is the label value."""

    NO_EXACT_BUCKET = "no_exact_bucket"
    BATCH_TOO_LARGE = "batch_too_large"
    NOT_CAPTURED = "not_captured"
    SIGNATURE = "signature"
    CAPTURE_FAILED = "capture_failed"
    VERIFY_FAILED = "verify_failed"
    STATIC_MOVED = "static_moved"
    WEIGHTS_MOVED = "weights_moved"
    BUSY = "busy"
    GRAPH_LIMIT = "graph_limit"
    DISTRIBUTED = "distributed"
    RANK_VOTE = "rank_vote"
    ADAPTER = "adapter"
    SPEC_WIDTH = "spec_width"
    RAGGED = "ragged"
    MULTIMODAL = "multimodal"
    MIXED_BATCH = "mixed_batch"
    ENGINE_DECLINED = "engine_declined"
    UNKNOWN = "unknown"
    WARMUP = "warmup"
    DISABLED = "disabled"
    UNSUPPORTED_DEVICE = "unsupported_device"
    EMPTY_BATCH = "empty_batch"
    TRAINING = "training"
    GRAD = "grad"
    WRONG_PHASE = "wrong_phase"
    FORKED = "forked"

    def __str__(self) -> str:
        return self.value

    @property
    def counted(self) -> bool:
        """Whether a call with this reason lowers the hit rate."""
        return self not in NOT_COUNTED

    @property
    def meaning(self) -> str:
        """One line for tables, dashboards and the runbook."""
        return MEANING[self]


NOT_COUNTED = frozenset(
    {
        FallbackReason.WARMUP,
        FallbackReason.DISABLED,
        FallbackReason.UNSUPPORTED_DEVICE,
        FallbackReason.EMPTY_BATCH,
        FallbackReason.TRAINING,
        FallbackReason.GRAD,
        FallbackReason.WRONG_PHASE,
        FallbackReason.FORKED,
    }
)

MEANING: dict[FallbackReason, str] = {
    FallbackReason.NO_EXACT_BUCKET: "no bucket has this size and padding to a larger one is not allowed",
    FallbackReason.BATCH_TOO_LARGE: "the batch is above the largest bucket",
    FallbackReason.NOT_CAPTURED: "the bucket exists, but its graph was not captured and may not be now",
    FallbackReason.SIGNATURE: "these arguments are not those of a captured graph and may not start one",
    FallbackReason.CAPTURE_FAILED: "capturing this bucket failed",
    FallbackReason.VERIFY_FAILED: "the graph's result differed from eager",
    FallbackReason.STATIC_MOVED: "a tensor that the graph reads was replaced",
    FallbackReason.WEIGHTS_MOVED: "a weight has new storage",
    FallbackReason.BUSY: "another thread was capturing",
    FallbackReason.GRAPH_LIMIT: "max_graphs is reached",
    FallbackReason.DISTRIBUTED: "torch.distributed is initialised and ranks did not agree to capture",
    FallbackReason.RANK_VOTE: "another rank cannot use a graph for this step",
    FallbackReason.ADAPTER: "an adapter (LoRA) is active that the graphs do not know",
    FallbackReason.SPEC_WIDTH: "the number of speculative tokens is not the captured one",
    FallbackReason.RAGGED: "the rows are not a multiple of the tokens per request",
    FallbackReason.MULTIMODAL: "the batch carries multimodal input",
    FallbackReason.MIXED_BATCH: "the batch mixes prefill and decode",
    FallbackReason.ENGINE_DECLINED: "the engine declined for a cause of its own",
    FallbackReason.UNKNOWN: "the engine gave no cause",
    FallbackReason.WARMUP: "the first calls of a bucket, before its capture",
    FallbackReason.DISABLED: "graphs are switched off, or an outer tool traces the call",
    FallbackReason.UNSUPPORTED_DEVICE: "the tensors are on a device without graphs, or on several",
    FallbackReason.EMPTY_BATCH: "the batch has no rows",
    FallbackReason.TRAINING: "the module is in training mode",
    FallbackReason.GRAD: "the result takes part in autograd",
    FallbackReason.WRONG_PHASE: "only decode has graphs (capture_phases; in vLLM FULL_DECODE_ONLY)",
    FallbackReason.FORKED: "the process was forked after graphs were made",
}


def as_reason(value: FallbackReason | str) -> FallbackReason:
    """The member for ``value``; ConfigError names the allowed ones."""
    try:
        return FallbackReason(value)
    except ValueError:
        allowed = ", ".join(sorted(FallbackReason))
        raise ConfigError(f"unknown fallback reason {value!r}", f"use one of: {allowed}") from None
