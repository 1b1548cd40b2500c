"""The worker that drafts: with graphs where it can, else a pass per step."""

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner


class EagleDraftWorker:
    steps = 3

    def __init__(self, settings):
        self.draft_runner = ModelRunner(settings, is_draft_worker=True)
        self.draft_runner.init_cuda_graphs(capture_decode_cuda_graph=False)
        self.rounds = EAGLEDraftCudaGraphRunner(self) if settings.sizes else None
        self.extends = EAGLEDraftExtendCudaGraphRunner(self) if settings.sizes else None

    def draft(self, batch):
        if self.rounds and self.rounds.can_run_graph(batch):
            return self.rounds.execute(batch)
        return self.draft_forward(batch)

    def draft_forward(self, forward_batch):
        return [self.draft_runner.forward(forward_batch).logits_output for _ in range(self.steps)]

    def extend(self, requests):
        batch = ForwardBatch("DRAFT_EXTEND_V2", requests, requests * 2)
        if self.extends and self.extends.can_run_graph(batch):
            return self.extends.execute(batch, None)
        return self.draft_runner.forward(batch).logits_output
