"""Graphs of decode on a CPU: what torch.compile has made, by size."""

from bisect import bisect_left


class CPUGraphRunner:
    """It notes the sizes of a pass only where it pads it."""

    def __init__(self, model_runner):
        self.model_runner = model_runner
        self.capture_bs = list(model_runner.settings.sizes)
        self.max_bs = max(self.capture_bs)
        self.disable_padding = model_runner.settings.exact
        self.graphs = {}
        self.capture()

    def capture(self):
        for size in self.capture_bs:
            self.graphs[size] = self.model_runner.model
            self.model_runner.model(None)

    def can_run_graph(self, forward_batch):
        size = forward_batch.batch_size
        return size in self.graphs if self.disable_padding else size <= self.max_bs

    def execute(self, forward_batch, pp_proxy_tensors=None):
        size = forward_batch.batch_size
        if size not in self.graphs:
            self.raw_bs = size
            self.bs = size = self.capture_bs[bisect_left(self.capture_bs, size)]
        return self.graphs[size](forward_batch)
