"""Graphs of decode: a size is a number of requests."""

from bisect import bisect_left

import sglang
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend.utils import BACKENDS


class DecodeCudaGraphRunner:
    """``refused`` holds the condition that said no to the last question, in words of this file."""

    def __init__(self, model_runner):
        settings = model_runner.settings
        self.model_runner, self.device = model_runner, model_runner.device
        self.capture_bs = list(settings.sizes)
        self.max_bs = max(self.capture_bs)
        self.disable_padding = settings.exact
        self.require_mlp_tp_gather = self.require_mlp_sync = settings.ranks
        self.is_encoder_decoder = settings.encoder
        self.enable_two_batch_overlap = settings.tbo
        self.capture_hidden_mode = CaptureHiddenMode[settings.hidden]
        self.width = settings.width
        if sglang.PATCH < 16:
            self.num_tokens_per_bs = self.width
        else:
            self.captured_req_width, self.ragged_verify_mode = self.width, settings.ragged
        if sglang.PATCH >= 17:
            self._validate_capture_hidden_mode = lambda forward_batch: None
        self.backend = BACKENDS[settings.decode_backend]()
        self.refused = None
        self.capture()

    def capture(self):
        for size in reversed(self.capture_bs):
            self.capture_one_shape(size)

    def capture_one_shape(self, size):
        self.backend.capture_one(ShapeKey(size), lambda: self.model_runner.model(None), post_warmup_hook=None)

    def can_run_graph(self, forward_batch):
        self.refused = next((word for word, no in self.conditions(forward_batch) if no), None)
        return self.refused is None

    def conditions(self, batch):
        """What may say no, in SGLang's order."""
        yield "replace_embeds", batch.replace_embeds is not None
        if sglang.PATCH >= 16:
            yield "ragged", self.ragged_verify_mode and batch.forward_mode.is_target_verify()
            yield "width", batch.spec_info is not None and 0 < batch.spec_info.num_tokens_per_req != self.width
        size = max(batch.original_global_num_tokens_cpu) if self.require_mlp_tp_gather else batch.batch_size
        found = size in self.capture_bs and sglang.PATCH >= 16 if self.disable_padding else size <= self.max_bs
        yield "size" if batch.batch_size > self.max_bs else "rank_size", not found
        may = batch.can_run_dp_cuda_graph if sglang.PATCH < 19 else batch.can_run_decode_cuda_graph
        yield "ranks", self.require_mlp_sync and not may
        yield "encoder", self.is_encoder_decoder and not batch.every_request_has_an_image
        yield "tbo", self.enable_two_batch_overlap and not batch.can_run_tbo
        if sglang.PATCH < 17:
            yield "hidden", batch.capture_hidden_mode not in (CaptureHiddenMode.NULL, self.capture_hidden_mode)
        ngram = self.model_runner.spec_algorithm.is_ngram()
        yield "ngram", ngram and batch.batch_size * self.width != len(batch.input_ids)

    def execute(self, forward_batch, pp_proxy_tensors=None):
        self.raw_bs = forward_batch.batch_size
        size = max(forward_batch.original_global_num_tokens_cpu) if self.require_mlp_tp_gather else self.raw_bs
        self.bs = self.capture_bs[bisect_left(self.capture_bs, size)]
        return self.backend.replay(ShapeKey(self.bs), self.model_runner)
