"""Graphs of prefill: a size is a number of tokens."""

from bisect import bisect_left

import sglang
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend.utils import BACKENDS


class PrefillCudaGraphRunner:
    """``refused`` holds the condition that said no to the last question, in words of this file."""

    def __init__(self, model_runner):
        settings = model_runner.settings
        self.model_runner, self.device = model_runner, model_runner.device
        self.capture_num_tokens = sorted(settings.prefill)
        self.max_num_tokens = max(self.capture_num_tokens)
        self.prefill_backend_name = settings.prefill_backend
        self.backend = BACKENDS[settings.prefill_backend]()
        self.capture_hidden_mode = CaptureHiddenMode[settings.hidden]
        self._is_full_backend = settings.prefill_backend == "full"
        self._capture_req_slots = settings.slots
        self.has_mha_companion_layers = settings.companion
        if sglang.PATCH >= 16:
            self._uses_eager_prefill_tail = lambda: settings.prefill_backend != "tc_piecewise"
        if sglang.PATCH == 16:
            self._has_unsupported_mha_prefix = self._mha
        if sglang.PATCH >= 17:
            self.enable_lora, self._capture_lora = settings.lora, False
            self._capture_chunked_prefix = self._is_full_backend
            self.can_replay_locally = lambda **asked: True
        if sglang.PATCH == 17:
            self.dsa_sparse_prefill_forced, self.mla_pinned_under_bcg = False, settings.pinned
        if 17 <= sglang.PATCH < 19:
            self._has_prefix_hit = lambda batch: any(batch.extend_prefix_lens_cpu)
            self._select_prefix_capture_chunks = lambda batch: 1 if max(batch.extend_prefix_lens_cpu) <= 64 else None
        if sglang.PATCH >= 20:
            self._has_uncapturable_chunked_prefix = lambda lens: self._is_full_backend and max(lens) > 64
        if sglang.PATCH >= 21:
            self.prefer_eager_mixed_prefill, self.max_context_size = settings.unmixed, settings.context
            self._backend_can_run_prefill_cuda_graph = settings.veto
        if sglang.PATCH >= 22:
            self._captured_attn_metadata_max_bs = settings.metadata
            self._fa4_prefill = settings.fa4
            self._qwen_bcg_hc_sidechannel, self._qwen_bcg_mtp_draft = settings.qwen, False
        if sglang.PATCH >= 23:
            self.max_seq_len, self._attn_backend_is_dsa = None, False
        self.refused = None
        self.capture()
        self.raw_num_tokens = 0

    @staticmethod
    def _batch_max_context_len(forward_batch):
        return max(forward_batch.seq_lens_cpu)

    def capture(self):
        for size in self.capture_num_tokens:
            self.backend.capture_one(ShapeKey(size), lambda: self.model_runner.model(None))

    def can_run_graph(self, forward_batch):
        order = self._new if sglang.PATCH >= 17 else self._old
        self.refused = next((word for word, no in order(forward_batch) if no), None)
        return self.refused is None

    def _has_inactive_dp_rank(self, forward_batch):
        return 0 in (forward_batch.global_num_tokens_cpu or ())

    def _old(self, batch):
        """What may say no until 0.5.16, in SGLang's order."""
        tokens, ranks = len(batch.input_ids), batch.global_num_tokens_cpu is not None
        if sglang.PATCH >= 15:
            yield "slots", self._is_full_backend and batch.batch_size > self._capture_req_slots
        yield "input_embeds", batch.input_embeds is not None
        yield "replace_embeds", batch.replace_embeds is not None
        if sglang.PATCH == 16:
            yield "prefix", self._has_unsupported_mha_prefix(batch)
        yield "verify", batch.forward_mode.is_target_verify()
        yield "hidden", batch.capture_hidden_mode != self.capture_hidden_mode
        yield "inactive", self._has_inactive_dp_rank(batch)
        yield "ranks", ranks and not batch.can_run_dp_breakable_cuda_graph
        if sglang.PATCH < 16:
            starts = zip(batch.extend_logprob_start_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
            yield "logprob", batch.return_logprob and any(start < length for start, length in starts)
        else:
            yield "logprob", batch.return_logprob and not self._uses_eager_prefill_tail()
        yield "tokens", tokens > self.max_num_tokens
        if sglang.PATCH == 16:
            yield "factor", self._pad(tokens) > 2 * tokens

    def _new(self, batch):
        """The same from 0.5.17 on."""
        tokens, lens = len(batch.input_ids), batch.extend_prefix_lens_cpu
        may = batch.can_run_dp_breakable_cuda_graph if sglang.PATCH < 19 else batch.can_run_dp_prefill_cuda_graph
        yield "ranks", batch.global_num_tokens_cpu is not None and not may
        yield "inactive", self._has_inactive_dp_rank(batch)
        if sglang.PATCH >= 22:
            yield "qwen", batch.images and self._qwen_bcg_hc_sidechannel
            yield "fa4", batch.images and self._is_full_backend and self._fa4_prefill
        yield "slots", self._is_full_backend and batch.batch_size > self._capture_req_slots
        if sglang.PATCH >= 22:
            most = self._captured_attn_metadata_max_bs
            yield "metadata", most is not None and batch.batch_size > most
        yield "lora", self.enable_lora
        if sglang.PATCH >= 21:
            yield "mixed", batch.forward_mode is ForwardMode.MIXED and self.prefer_eager_mixed_prefill
        yield "input_embeds", batch.input_embeds is not None
        yield "replace_embeds", batch.replace_embeds is not None
        yield "prefix", self._mha(batch)
        if sglang.PATCH >= 20:
            yield "chunks", self._has_uncapturable_chunked_prefix(lens)
        else:
            none = self._select_prefix_capture_chunks(batch) is None
            yield "chunks", self._capture_chunked_prefix and self._has_prefix_hit(batch) and none
        yield "verify", batch.forward_mode.is_target_verify()
        yield "hidden", self.capture_hidden_mode < batch.capture_hidden_mode
        yield "logprob", batch.return_logprob and not self._uses_eager_prefill_tail()
        if sglang.PATCH >= 21:
            limit = self.max_context_size
            yield "context", limit is not None and self._batch_max_context_len(batch) > limit
        yield "tokens", tokens > self.max_num_tokens
        yield "factor", self._pad(tokens) > 2 * tokens
        if sglang.PATCH >= 21:
            veto = self._backend_can_run_prefill_cuda_graph
            yield "backend", veto is not None and not veto(batch)

    def _mha(self, batch):
        """Layers that a breakable graph cannot give a cached prefix: on CUDA of 0.5.16 and 0.5.17 alone."""
        if self.prefill_backend_name != "breakable" or not self.has_mha_companion_layers:
            return False
        here = sglang.PATCH < 18 and not getattr(self, "mla_pinned_under_bcg", False)
        return any(batch.extend_prefix_lens_cpu) and (here or self.model_runner.device != "cuda")

    def _pad(self, tokens):
        index = bisect_left(self.capture_num_tokens, tokens)
        return self.capture_num_tokens[index] if index < len(self.capture_num_tokens) else 0

    def execute(self, forward_batch, **kwargs):
        self.raw_num_tokens = len(forward_batch.input_ids)
        return self.backend.replay(ShapeKey(self._pad(self.raw_num_tokens)), self.model_runner)
