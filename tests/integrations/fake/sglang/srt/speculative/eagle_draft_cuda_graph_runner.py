"""The graph of a round of drafting."""

from bisect import bisect_left

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.shape_key import ShapeKey


class EAGLEDraftCudaGraphRunner(DecodeCudaGraphRunner):
    def __init__(self, eagle_worker):
        self.eagle_worker = eagle_worker
        super().__init__(eagle_worker.draft_runner)

    def capture_one_shape(self, size):
        batch = ForwardBatch("DECODE", size)
        self.backend.capture_one(ShapeKey(size), lambda: self.eagle_worker.draft_forward(batch))

    def execute(self, forward_batch):
        self.raw_bs = forward_batch.batch_size
        self.bs = self.capture_bs[bisect_left(self.capture_bs, self.raw_bs)]
        return self.backend.replay(ShapeKey(self.bs), self.model_runner)
