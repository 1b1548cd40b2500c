"""The graph of the pass that extends the drafts of a round."""

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner


class EAGLEDraftExtendCudaGraphRunner(DecodeCudaGraphRunner):
    def __init__(self, eagle_worker):
        self.eagle_worker = eagle_worker
        super().__init__(eagle_worker.draft_runner)

    def execute(self, forward_batch, select_index):
        return super().execute(forward_batch)
