"""The graph of a round of drafting."""

from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class EAGLEDraftCudaGraphRunner(CudaGraphRunner):
    def __init__(self, eagle_worker):
        self.eagle_worker = eagle_worker
        super().__init__(eagle_worker.draft_runner)

    def capture_one_batch_size(self, size):
        self.eagle_worker.draft_forward(ForwardBatch("DECODE", size))

    def replay(self, forward_batch):
        return super().replay(forward_batch)
