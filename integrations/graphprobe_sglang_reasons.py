"""Why a pass of SGLang's was eager: the conditions of its own predicates again, in their order.

The predicates answer yes or no. What they read is read again here, but for tensors of the device, whose value would
have to be waited for. Conditions that have no word of ours are ``engine_declined``, and the snapshot has SGLang's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphprobe.errors import INFO
from graphprobe.ledger import Forward
from graphprobe.reasons import FallbackReason
from graphprobe_sglang_watch import Graphs, Watch, watch_of

FACTOR = 2
"""More than so many times the tokens of a pass of prefill is no graph padded to, from 0.5.16 on."""


def reason_decode(forward: Forward, runner: Any, graphs: Graphs, size: int, batch: Any) -> FallbackReason:
    """Why graphs of decode refused ``size`` requests (``DecodeCudaGraphRunner.can_run_graph``)."""
    if getattr(batch, "replace_embeds", None) is not None:
        return declined(forward, "replace_embeds")
    if getattr(runner, "ragged_verify_mode", False) and batch.forward_mode.is_target_verify():
        return FallbackReason.RAGGED
    if _width(runner, batch):
        return FallbackReason.SPEC_WIDTH
    found = _size(runner, graphs, size, batch)
    if found is not None:
        return found
    if getattr(runner, "is_encoder_decoder", False):
        # Requests without an image beside others; how many of them is known on the device only.
        return FallbackReason.MULTIMODAL
    if getattr(runner, "enable_two_batch_overlap", False) and not getattr(batch, "can_run_tbo", True):
        return declined(forward, "two_batch_overlap")
    if _hidden(runner, batch):
        return declined(forward, "hidden_mode")
    spec = getattr(getattr(runner, "model_runner", None), "spec_algorithm", None)
    return FallbackReason.RAGGED if spec is not None and spec.is_ngram() else FallbackReason.UNKNOWN


def reason_draft(watch: Watch, phase: str, size: int, batch: Any) -> FallbackReason:
    """Why a drafter ran without a graph of its own."""
    graphs = watch.draft_graphs.get(phase)
    runner = None if graphs is None else graphs.runner()
    if graphs is None or runner is None:
        return FallbackReason.DISABLED
    if _width(runner, batch):
        return FallbackReason.SPEC_WIDTH
    return _size(runner, graphs, size, batch, True) or FallbackReason.ENGINE_DECLINED


def _width(runner: Any, batch: Any) -> bool:
    """Whether requests have another number of tokens than the graphs were captured for; asked from 0.5.16 on."""
    captured = getattr(runner, "captured_req_width", None)
    tokens = getattr(getattr(batch, "spec_info", None), "num_tokens_per_req", None)
    return isinstance(captured, int) and isinstance(tokens, int) and 0 < tokens != captured


def _size(runner: Any, graphs: Graphs, size: int, batch: Any, draft: bool = False) -> FallbackReason | None:
    if size > graphs.sizes[-1]:
        return FallbackReason.BATCH_TOO_LARGE
    if graphs.exact and size not in graphs.sizes:
        return FallbackReason.NO_EXACT_BUCKET
    if graphs.exact and not hasattr(runner, "captured_req_width"):
        # 0.5.14 and 0.5.15 find no graph at all without padding, although they have captured them.
        return FallbackReason.NOT_CAPTURED
    synced = getattr(runner, "require_mlp_tp_gather", False) or getattr(runner, "require_mlp_sync", False)
    if not synced:
        return None
    names = ("can_run_decode_cuda_graph", "can_run_dp_cuda_graph", "can_run_dp_draft_cuda_graph")
    may = all(getattr(batch, name, True) is not False for name in (names if draft else names[:2]))
    sizes = getattr(batch, "original_global_num_tokens_cpu", None) or [0]
    larger = getattr(runner, "require_mlp_tp_gather", False) and max(sizes) > graphs.sizes[-1]
    return FallbackReason.RANK_VOTE if larger or not may else None


def _hidden(runner: Any, batch: Any) -> bool:
    """Whether hidden states are wanted that were not captured; asked until 0.5.16."""
    if hasattr(runner, "_validate_capture_hidden_mode"):
        return False
    captured = getattr(runner, "capture_hidden_mode", None)
    asked = (getattr(found, "capture_hidden_mode", None) for found in (batch, getattr(batch, "spec_info", None)))
    return any(found is not None and found.name != "NULL" and found != captured for found in asked)


def reason_prefill(runner: Any, batch: Any) -> FallbackReason:
    """Why graphs of prefill refuse a pass (``PrefillCudaGraphRunner.can_run_graph``), asked while it is decided."""
    forward = watch_of(runner.model_runner).prefill.forward
    return next((found for found in _prefill(forward, runner, batch) if found is not None), FallbackReason.UNKNOWN)


def _prefill(forward: Forward, runner: Any, batch: Any) -> Iterator[FallbackReason | None]:
    # What is read for one condition is read only where none before it has refused.
    local = hasattr(runner, "can_replay_locally")
    if local:
        # Until 0.5.16 ranks are asked after all that concerns this one.
        yield _ranks(runner, batch)
    yield _images(runner, batch)
    yield _slots(runner, batch)
    yield _adapter(runner, batch)
    if _mixed(batch) and getattr(runner, "prefer_eager_mixed_prefill", False):
        yield FallbackReason.MIXED_BATCH
    yield _embeds(forward, batch)
    if _prefix(runner, batch):
        yield declined(forward, "prefix")
    if batch.forward_mode.is_target_verify():
        yield declined(forward, "target_verify")
    captured, asked = getattr(runner, "capture_hidden_mode", None), getattr(batch, "capture_hidden_mode", None)
    if captured is not None and asked is not None and (captured < asked or (captured != asked and not local)):
        yield declined(forward, "hidden_mode")
    if not local:
        yield _ranks(runner, batch)
    if getattr(batch, "return_logprob", False) and _needs_head(runner, batch):
        yield declined(forward, "return_logprob")
    yield _context(forward, runner, batch)
    yield _tokens(runner, len(batch.input_ids))
    if getattr(runner, "_backend_can_run_prefill_cuda_graph", None) is not None:
        yield declined(forward, "backend")
    if getattr(runner, "enable_cp_bcg_capture", getattr(runner, "enable_cp_v2_bcg_capture", False)):
        yield declined(forward, "context_parallel")


def _ranks(runner: Any, batch: Any) -> FallbackReason | None:
    if getattr(batch, "global_num_tokens_cpu", None) is None:
        return None
    may = getattr(batch, "can_run_dp_prefill_cuda_graph", getattr(batch, "can_run_dp_breakable_cuda_graph", True))
    return FallbackReason.RANK_VOTE if not may or runner._has_inactive_dp_rank(batch) else None


def _images(runner: Any, batch: Any) -> FallbackReason | None:
    full = getattr(runner, "_is_full_backend", False) and getattr(runner, "_fa4_prefill", False)
    other = getattr(runner, "_qwen_bcg_hc_sidechannel", False) or getattr(runner, "_qwen_bcg_mtp_draft", False)
    return FallbackReason.MULTIMODAL if (full or other) and batch.contains_mm_inputs() else None


def _slots(runner: Any, batch: Any) -> FallbackReason | None:
    limits = [getattr(runner, "_captured_attn_metadata_max_bs", None)]
    if getattr(runner, "_is_full_backend", False):
        limits.append(getattr(runner, "_capture_req_slots", None))
    over = any(limit is not None and batch.batch_size > limit for limit in limits)
    return FallbackReason.BATCH_TOO_LARGE if over else None


def _adapter(runner: Any, batch: Any) -> FallbackReason | None:
    if not getattr(runner, "enable_lora", False):
        return None
    manager = runner.model_runner.lora_manager
    may = getattr(runner, "_capture_lora", False) and manager.can_use_prefill_cuda_graph(batch)
    return None if may else FallbackReason.ADAPTER


def _mixed(batch: Any) -> bool:
    names = ("forward_mode", "global_forward_mode", "_original_forward_mode")
    return any(getattr(getattr(batch, name, None), "name", "") == "MIXED" for name in names)


def _embeds(forward: Forward, batch: Any) -> FallbackReason | None:
    for name in ("input_embeds", "replace_embeds"):
        if getattr(batch, name, None) is not None:
            return FallbackReason.MULTIMODAL if batch.contains_mm_inputs() else declined(forward, name)
    return None


def _prefix(runner: Any, batch: Any) -> bool:
    """Whether a cached prefix is one that the graphs cannot attend to."""
    lengths = getattr(batch, "extend_prefix_lens_cpu", None)
    if not any(lengths or ()):
        return False
    for name, asked in (("_has_uncapturable_chunked_prefix", lengths), ("_has_unsupported_mha_prefix", batch)):
        found = getattr(runner, name, None)
        if found is not None and found(asked):
            return True
    chunks = getattr(runner, "_has_prefix_hit", None)
    if chunks is not None and getattr(runner, "_capture_chunked_prefix", False) and chunks(batch):
        return runner._select_prefix_capture_chunks(batch) is None
    return _companion(runner)


def _companion(runner: Any) -> bool:
    """Whether attention of prefill goes another way where there is a prefix; on CUDA that was so in 0.5.17 only."""
    if not getattr(runner, "has_mha_companion_layers", False) or runner.prefill_backend_name != "breakable":
        return False
    if hasattr(runner, "mla_pinned_under_bcg"):
        return not runner.mla_pinned_under_bcg and not runner.dsa_sparse_prefill_forced
    return str(runner.device) != "cuda" and not getattr(runner, "_attn_backend_is_dsa", False)


def _needs_head(runner: Any, batch: Any) -> bool:
    """Whether probabilities of the prompt are wanted that a graph without an eager tail does not give."""
    tail = getattr(runner, "_uses_eager_prefill_tail", None)
    if tail is not None:
        return not tail()
    starts, lengths = batch.extend_logprob_start_lens_cpu, batch.extend_seq_lens_cpu
    return any(start is not None and start < length for start, length in zip(starts, lengths, strict=False))


def _context(forward: Forward, runner: Any, batch: Any) -> FallbackReason | None:
    limits = [n for n in (getattr(runner, "max_context_size", None), getattr(runner, "max_seq_len", None)) if n]
    if not limits or getattr(batch, "seq_lens_cpu", None) is None:
        # Without lengths on the host SGLang asks the device, and waits.
        return None
    longest = runner._batch_max_context_len(batch)
    over = any(longest is None or longest > limit for limit in limits)
    return declined(forward, "context_length") if over else None


def _tokens(runner: Any, tokens: int) -> FallbackReason | None:
    sizes = runner.capture_num_tokens
    if tokens > sizes[-1]:
        return FallbackReason.BATCH_TOO_LARGE
    padded = next(size for size in sizes if size >= tokens)
    return FallbackReason.NO_EXACT_BUCKET if padded > FACTOR * tokens else None


def declined(forward: Forward, word: str) -> FallbackReason:
    """A condition of SGLang's that has no word of ours: its own is kept in the snapshot, and logged once."""
    forward.explain(f"declined/{word}", f"some passes are eager since SGLang does not replay graphs with {word}", INFO)
    return FallbackReason.ENGINE_DECLINED
