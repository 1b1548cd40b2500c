"""The worker that drafts: with graphs where it can, else a pass per step."""

from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner


class EagleDraftWorker:
    def __init__(self, settings):
        self.draft_runner = ModelRunner(settings, is_draft_worker=True)
        self.draft_runner.initialize()
        self.rounds = EAGLEDraftCudaGraphRunner(self)

    def draft(self, batch):
        return self.rounds.replay(batch) if self.rounds.can_run(batch) else self.draft_forward(batch)

    def draft_forward(self, forward_batch):
        return [self.draft_runner.forward(forward_batch).logits_output for _ in range(3)]
