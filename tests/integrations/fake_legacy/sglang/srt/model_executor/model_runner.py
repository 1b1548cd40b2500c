"""The model runner, which chooses how a pass runs."""

from dataclasses import dataclass
from types import SimpleNamespace

from sglang.srt.model_executor.breakable_cuda_graph_runner import BreakableCudaGraphRunner
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner


@dataclass
class ModelRunnerOutput:
    logits_output: object
    can_run_graph: bool


class ModelRunner:
    def __init__(self, settings, is_draft_worker=False):
        self.settings = self.server_args = settings
        self.device = settings.device
        self.is_draft_worker = is_draft_worker
        self.max_total_num_tokens = 4096
        self.max_running_requests = settings.most
        self.spec_algorithm = SimpleNamespace(is_none=lambda: not settings.speculative, is_ngram=lambda: False)
        self.fails = None
        self.model_forwards = 0

    def initialize(self):
        self.init_device_graphs()
        self.init_piecewise_cuda_graphs()

    def init_device_graphs(self):
        self.graph_runner = CudaGraphRunner(self) if self.settings.sizes and not self.is_draft_worker else None

    def init_piecewise_cuda_graphs(self):
        breakable = self.settings.prefill_backend == "breakable"
        kind = BreakableCudaGraphRunner if breakable else PiecewiseCudaGraphRunner
        self.piecewise_cuda_graph_runner = kind(self) if self.settings.prefill else None

    def model(self, batch):
        self.model_forwards += 1
        return "logits"

    def forward(self, forward_batch, skip_attn_backend_init=None, pp_proxy_tensors=None):
        return self._forward_raw(forward_batch)

    def _forward_raw(self, batch):
        mode, prefill = batch.forward_mode.name, self.piecewise_cuda_graph_runner
        asked = mode in ("DECODE", "TARGET_VERIFY", "IDLE") and self.graph_runner is not None
        if asked and self.graph_runner.can_run(batch):
            return ModelRunnerOutput(self.graph_runner.replay(batch), True)
        if mode not in ("DECODE", "IDLE") and prefill is not None and prefill.can_run(batch):
            return ModelRunnerOutput(prefill.replay(batch), True)
        return ModelRunnerOutput(self.model(batch), False)
