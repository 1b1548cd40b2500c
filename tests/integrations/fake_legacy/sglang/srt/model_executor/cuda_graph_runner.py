"""Graphs of decode: a size is a number of requests."""

from bisect import bisect_left

CAPTURING = [False]


def get_is_capture_mode():
    return CAPTURING[0]


class CudaGraphRunner:
    def __init__(self, model_runner):
        self.model_runner = model_runner
        self.capture_bs = list(model_runner.settings.sizes)
        self.max_bs = max(self.capture_bs)
        self.disable_padding = model_runner.settings.exact
        CAPTURING[0] = True
        self.capture()
        CAPTURING[0] = False

    def capture(self):
        for size in self.capture_bs:
            self.capture_one_batch_size(size)

    def capture_one_batch_size(self, size):
        self.model_runner.model(None)

    def can_run(self, forward_batch):
        size = forward_batch.batch_size
        return size in self.capture_bs if self.disable_padding else size <= self.max_bs

    def replay(self, forward_batch, skip_attn_backend_init=False, pp_proxy_tensors=None):
        self.raw_bs = forward_batch.batch_size
        self.bs = self.capture_bs[bisect_left(self.capture_bs, self.raw_bs)]
        return "logits"
