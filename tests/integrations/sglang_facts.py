"""What the SGLang integration relies on, release by release: attributes, arguments, and the order of conditions.

A word may have a span behind a colon, and a line of ``PREDICATES`` one behind a bar: ``16-`` is from 0.5.16 on, ``-15``
up to 0.5.15. What has no span is in every release from that of its class on.
"""

from __future__ import annotations

from graphprobe_sglang import CPU, DECODE, EXECUTOR, LAYERS, PREFILL, RUNNER, SPECULATIVE
from tests.integrations.releases import Release

LEGACY = f"{EXECUTOR}.cuda_graph_runner"
PIECEWISE = f"{EXECUTOR}.piecewise_cuda_graph_runner"
BREAKABLE = f"{EXECUTOR}.breakable_cuda_graph_runner"
BATCH = f"{EXECUTOR}.forward_batch_info"
EAGLE = f"{SPECULATIVE}.eagle_draft_cuda_graph_runner"
EXTEND = f"{SPECULATIVE}.eagle_draft_extend_cuda_graph_runner"
FROZEN = f"{SPECULATIVE}.frozen_kv_mtp_cuda_graph_runner"
WORKER = f"{SPECULATIVE}.eagle_worker_v2"
CONTEXT = "sglang.srt.runtime_context"
FIELDS = "sglang.srt.arg_groups.fields"
"""Where the arguments of a server are defined from 0.5.20 on."""

READ = {
    (RUNNER, "ModelRunner", ""): "device is_draft_worker spec_algorithm server_args max_total_num_tokens "
    "max_running_requests graph_runner:-13 piecewise_cuda_graph_runner:-13 decode_cuda_graph_runner:14- "
    "prefill_cuda_graph_runner:14- dp_rank:13-15 ps:16-20 dp_rank:21-21 lora_manager",
    (RUNNER, "ModelRunnerOutput", ""): "can_run_graph",
    ("sglang.srt.server_args", "ServerArgs", "-18"): "enable_metrics dp_size tp_size pp_size enable_dp_attention",
    (f"{FIELDS}.observability", "Observability", "20-"): "enable_metrics",
    (f"{FIELDS}.parallel", "Parallel", "20-"): "dp_size tp_size pp_size enable_dp_attention dp_rank:21-",
    (DECODE, "DecodeCudaGraphRunner", "14-"): "model_runner capture_bs bs disable_padding backend require_mlp_sync "
    "require_mlp_tp_gather is_encoder_decoder enable_two_batch_overlap capture_hidden_mode captured_req_width:16- "
    "ragged_verify_mode:16- _validate_capture_hidden_mode:17-",
    (PREFILL, "PrefillCudaGraphRunner", "14-"): "model_runner capture_num_tokens raw_num_tokens backend "
    "capture_hidden_mode _has_inactive_dp_rank _is_full_backend:15- _capture_req_slots:15- "
    "_uses_eager_prefill_tail:16- enable_lora:17- _capture_lora:17- _capture_chunked_prefix:17- "
    "has_mha_companion_layers:16- enable_cp_v2_bcg_capture:17-18 enable_cp_bcg_capture:20- max_context_size:21- "
    "_batch_max_context_len:21- prefer_eager_mixed_prefill:21- _backend_can_run_prefill_cuda_graph:21- "
    "_captured_attn_metadata_max_bs:22- max_seq_len:23- device prefill_backend_name:15- can_replay_locally:17- "
    "_has_unsupported_mha_prefix:16-16 _has_uncapturable_chunked_prefix:20- _has_prefix_hit:17-18 "
    "_select_prefix_capture_chunks:17-18 mla_pinned_under_bcg:17-17 dsa_sparse_prefill_forced:17-17 "
    "_attn_backend_is_dsa:23- _fa4_prefill:22- _qwen_bcg_hc_sidechannel:22- _qwen_bcg_mtp_draft:22-",
    (CPU, "CPUGraphRunner", ""): "model_runner capture_bs disable_padding",
    (LEGACY, "CudaGraphRunner", "-13"): "model_runner capture_bs bs disable_padding",
    (PIECEWISE, "PiecewiseCudaGraphRunner", "-13"): "model_runner capture_num_tokens raw_num_tokens",
    (BREAKABLE, "BreakableCudaGraphRunner", "-13"): "model_runner capture_num_tokens raw_num_tokens",
    (EAGLE, "EAGLEDraftCudaGraphRunner", ""): "model_runner capture_bs bs raw_bs",
    (EXTEND, "EAGLEDraftExtendCudaGraphRunner", ""): "model_runner capture_bs bs raw_bs",
    (FROZEN, "FrozenKVMTPCudaGraphRunner", "13-"): "model_runner capture_bs bs raw_bs",
    (LAYERS, "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner", "15-"): "capture_bs bs raw_bs eagle_worker",
    (f"{SPECULATIVE}.multi_layer_eagle_worker_v2", "MultiLayerEagleDraftWorker", "15-"): "draft_runner",
    (WORKER, "EagleDraftWorker", ""): "draft_runner",
    (f"{SPECULATIVE}.frozen_kv_mtp_worker_v2", "FrozenKVMTPDraftWorker", "14-"): "draft_runner",
    (BATCH, "ForwardBatch", ""): "forward_mode batch_size input_ids extend_num_tokens replace_embeds input_embeds "
    "spec_info capture_hidden_mode return_logprob extend_prefix_lens_cpu global_num_tokens_cpu can_run_tbo "
    "original_global_num_tokens_cpu contains_mm_inputs global_forward_mode _original_forward_mode:14- "
    "can_run_dp_cuda_graph:-18 can_run_decode_cuda_graph:20- can_run_dp_breakable_cuda_graph:13-18 "
    "can_run_dp_prefill_cuda_graph:20- can_run_dp_draft_cuda_graph:21- extend_logprob_start_lens_cpu "
    "extend_seq_lens_cpu",
    (BATCH, "ForwardMode", ""): "is_target_verify",
    ("sglang.srt.speculative.spec_info", "SpecInput", "16-"): "num_tokens_per_req",
    ("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm", ""): "is_none is_ngram",
}
"""What is read off SGLang's own objects, by module, class, and the releases that have the class."""

FUNCTIONS = {
    (PREFILL, "PrefillCudaGraphRunner._has_inactive_dp_rank", "14-"): "forward_batch",
    (PREFILL, "PrefillCudaGraphRunner._uses_eager_prefill_tail", "16-"): "",
    (PREFILL, "PrefillCudaGraphRunner._has_unsupported_mha_prefix", "16-16"): "forward_batch",
    (PREFILL, "PrefillCudaGraphRunner._has_uncapturable_chunked_prefix", "20-"): "prefix_lens",
    (PREFILL, "PrefillCudaGraphRunner._has_prefix_hit", "17-18"): "forward_batch",
    (PREFILL, "PrefillCudaGraphRunner._select_prefix_capture_chunks", "17-18"): "forward_batch",
    (PREFILL, "PrefillCudaGraphRunner._batch_max_context_len", "21-"): "forward_batch",
    ("sglang.srt.lora.lora_manager", "LoRAManager.can_use_prefill_cuda_graph", "17-"): "forward_batch",
    (BATCH, "ForwardBatch.contains_mm_inputs", ""): "",
    (CONTEXT, "get_parallel", "14-"): "",
    (LEGACY, "get_is_capture_mode", "-13"): "",
}
"""What is called, and its arguments."""

USED = {
    "pass": "forward_batch",
    "prefill": "forward_batch",
    "bucket_full": "shape_key forward_fn",
    "bucket_breakable": "shape_key forward_fn",
    "bucket_tc_piecewise": "shape_key forward_fn",
    "draft_eagle": "forward_batch",
    "draft_eagle_extend": "forward_batch",
    "draft_frozen_kv": "forward_batch",
    "draft_eagle_legacy": "forward_batch",
    "draft_eagle_extend_legacy": "forward_batch",
    "draft_layers": "step",
    "draft_layers_one": "step",
    "round": "forward_batch",
    "round_frozen_kv": "forward_batch",
}
"""The arguments that handlers take by position or name: they are the first."""

KEYS = {"_make_graph_key", "_resolve_attention_variant", "_resolve_lora_variant", "_sampling_variant"} | {
    *("enable_pdmux", "get_current_stream_idx", "numel", "all", "_")
}
"""Names in conditions that are about the key of a graph, or about none."""

SIZE = (
    "backend can_run disable_padding max_bs require_mlp_sync require_mlp_tp_gather "
    "can_run_dp_cuda_graph:-18 can_run_decode_cuda_graph:20- "
    "global_num_tokens_cpu:-15 num_tokens_per_bs:-15 model_runner:-15 spec_algorithm:-15 is_eagle:-15 "
)
DRAFT = f"{SIZE} original_global_num_tokens_cpu:16-"
WIDTH = "captured_req_width num_tokens_per_req spec_info | 16-"
ENCODER = "encoder_lens is_encoder_decoder"
PADDING = "_pad_to_bucket capture_num_tokens"

PREDICATES = {
    (DECODE, "DecodeCudaGraphRunner.can_run_graph", "14-"): f"""
        replace_embeds
        ragged_verify_mode resolve_ragged_verify_layout | 16-
        _can_run_ragged_verify_graph ragged_verify_mode resolve_ragged_verify_layout | 16-
        forward_mode is_target_verify ragged_verify_mode | 16-
        {WIDTH}
        {SIZE} batch_size is_dflash:-15 is_standalone:-15 original_global_num_tokens_cpu:16-17 _max_dp_batch_size:18-
        {ENCODER}
        can_run_tbo enable_two_batch_overlap
        NULL capture_hidden_mode spec_info | -16
        batch_size num_tokens_per_bs:-15 captured_req_width:16- input_ids is_ngram model_runner spec_algorithm""",
    (DECODE, "DecodeCudaGraphRunner._can_run_ragged_verify_graph", "16-"): f"""
        attn_backend supports_ragged_verify_graph
        _ragged_capture_slots batch_size capture_num_tokens graph_num_tokens ragged_layout
        can_run_dp_cuda_graph:-18 can_run_decode_cuda_graph:20- require_mlp_sync
        {ENCODER}
        NULL:-16 spec_info:-16 capture_hidden_mode""",
    (PREFILL, "PrefillCudaGraphRunner.can_run_graph", "14-16"): f"""
        _capture_req_slots _is_full_backend batch_size | 15-
        input_embeds
        replace_embeds
        _has_unsupported_mha_prefix | 16-
        forward_mode is_target_verify
        capture_hidden_mode
        _has_inactive_dp_rank
        can_run_dp_breakable_cuda_graph global_num_tokens_cpu
        return_logprob | -15
        extend_logprob_start_lens_cpu extend_seq_lens_cpu | -15
        extend_logprob_start_lens_cpu extend_seq_lens_cpu | -15
        _uses_eager_prefill_tail return_logprob | 16-
        input_ids max_num_tokens
        {PADDING} input_ids | 16-""",
    (PREFILL, "PrefillCudaGraphRunner.can_run_graph", "17-"): """
        can_run_dp_breakable_cuda_graph:-18 can_run_dp_prefill_cuda_graph:20- global_num_tokens_cpu
        _has_inactive_dp_rank
        enable_cp_bcg_capture is_cp_active | 22-
        can_replay_locally batch_size input_ids input_embeds replace_embeds extend_prefix_lens_cpu forward_mode
            is_target_verify capture_hidden_mode return_logprob enable_lora _capture_lora model_runner lora_manager
            can_use_prefill_cuda_graph _capture_chunked_prefix:-18 _has_prefix_hit:-18 _select_prefix_capture_chunks:-18
            MIXED:21- global_forward_mode:21- _original_forward_mode:21- _batch_max_context_len:21-
            max_context_size:21- max_seq_len:23- contains_mm_inputs:22-
        enable_cp_v2_bcg_capture is_cp_v2_active | 18-18
        enable_cp_bcg_capture is_cp_active | 20-21
        enable_cp_bcg_capture | 22-
        is_cp_active | 22-
        prefill_cp_bcg_input select_replay_bucket_for_batch capture_num_tokens extend_seq_lens_cpu input_ids | 18-
        _backend_can_run_prefill_cuda_graph | 21-""",
    (PREFILL, "PrefillCudaGraphRunner.can_replay_locally", "17-"): f"""
        enable_cp_bcg_capture prefill_cp_bcg_input allows_replay batch_size num_tokens prefix_lens
            contains_mm_inputs | 23-
        _qwen_bcg_hc_sidechannel _qwen_bcg_mtp_draft contains_mm_inputs | 22-
        _fa4_prefill _is_full_backend contains_mm_inputs | 22-
        _capture_req_slots _is_full_backend batch_size
        _captured_attn_metadata_max_bs batch_size | 22-
        lora_ineligible
        is_mixed prefer_eager_mixed_prefill | 21-
        input_embeds
        replace_embeds
        BREAKABLE has_mha_companion_layers prefill_backend_name prefix_lens dsa_sparse_prefill_forced:-17
            mla_pinned_under_bcg:-17 is_cuda:18- _attn_backend_is_dsa:23-
        chunked_prefix_uncapturable | -18
        _has_uncapturable_chunked_prefix prefix_lens | 20-
        is_target_verify
        capture_hidden_mode
        _uses_eager_prefill_tail return_logprob
        max_context_size max_seq_len:23- | 21-
        batch_max_context_len max_context_size max_seq_len:23- | 21-
        max_num_tokens num_tokens
        {PADDING} num_tokens""",
    (CPU, "CPUGraphRunner.can_run_graph", "14-"): """
        batch_size disable_padding graphs max_bs
        NULL capture_hidden_mode spec_info | -16""",
    (EAGLE, "EAGLEDraftCudaGraphRunner.can_run_graph", "14-"): f"""
        {WIDTH}
        {DRAFT} batch_size is_standalone:-15 can_run_dp_draft_cuda_graph:21-""",
    (EXTEND, "EAGLEDraftExtendCudaGraphRunner.can_run_graph", "14-"): f"""
        {WIDTH}
        {DRAFT} is_standalone:-15 seq_lens""",
}
"""The conditions of SGLang's predicates in its order, each as the names that it reads. A line may go on, indented."""


def span_of(release: Release, span: str) -> bool:
    """Whether a release is in a span."""
    patch = int(release.version.split(".")[2])
    first, _, last = span.partition("-")
    return int(first or 0) <= patch <= int(last or patch)


def words(release: Release, text: str) -> list[str]:
    """Those words of a text that are about a release."""
    pairs = (word.partition(":") for word in text.split())
    return [word for word, _, span in pairs if span_of(release, span)]


def expected(release: Release, table: str) -> list[set[str]]:
    """The conditions of a table that are about a release."""
    whole = table.replace("\n            ", " ").strip().splitlines()
    lines = [line.partition("|") for line in whole]
    return [set(words(release, names)) for names, _, span in lines if span_of(release, span.strip())]
