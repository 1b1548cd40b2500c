"""The model runner, which chooses how a pass runs."""

from dataclasses import dataclass
from types import SimpleNamespace

from sglang.srt.model_executor.cpu_graph_runner import CPUGraphRunner
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.eager_runner import EagerRunner
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner


@dataclass
class ModelRunnerOutput:
    logits_output: object
    can_run_graph: bool


class ModelRunner:
    def __init__(self, settings, is_draft_worker=False):
        self.settings = settings
        self.device = settings.device
        self.is_draft_worker = is_draft_worker
        self.server_args = settings
        self.max_total_num_tokens = 4096
        self.max_running_requests = settings.most
        algorithm = settings.speculative
        self.spec_algorithm = SimpleNamespace(is_none=lambda: not algorithm, is_ngram=lambda: algorithm == "ngram")
        self.lora_manager = SimpleNamespace(can_use_prefill_cuda_graph=lambda batch: False)
        self.fails = None
        self.model_forwards = 0

    def init_cuda_graphs(self, capture_decode_cuda_graph=True):
        self.eager_runner = EagerRunner(self)
        self.prefill_cuda_graph_runner = PrefillCudaGraphRunner(self) if self.settings.prefill else self.eager_runner
        self.decode_cuda_graph_runner = None if capture_decode_cuda_graph else self.eager_runner
        if capture_decode_cuda_graph and self.settings.sizes:
            kind = CPUGraphRunner if self.device == "cpu" else DecodeCudaGraphRunner
            self.decode_cuda_graph_runner = kind(self)

    def model(self, batch):
        """The forward of the model itself, of which warm-ups and captures run many."""
        self.model_forwards += 1
        if self.fails:
            raise self.fails
        return "logits"

    def forward(self, forward_batch, skip_attn_backend_init=None, pp_proxy_tensors=None):
        return self._forward_raw(forward_batch)

    def _forward_raw(self, forward_batch):
        mode = forward_batch.forward_mode
        decode, prefill = self.decode_cuda_graph_runner, self.prefill_cuda_graph_runner
        asked = mode is ForwardMode.DECODE if self.device == "cpu" else mode.is_cuda_graph()
        if asked and decode is not None and decode.can_run_graph(forward_batch):
            return ModelRunnerOutput(decode.execute(forward_batch), True)
        self._prepare_eager_forward_batch(forward_batch)
        asked = mode is not ForwardMode.SPLIT_PREFILL and mode.is_extend() and not isinstance(prefill, EagerRunner)
        if asked and prefill.can_run_graph(forward_batch) and forward_batch.token_indices_to_pool is None:
            return ModelRunnerOutput(prefill.execute(forward_batch), True)
        return ModelRunnerOutput(self.eager_runner.execute(forward_batch), False)

    def _prepare_eager_forward_batch(self, batch):
        """With other ranks, a batch is padded in place to the largest of them."""
        if batch.global_num_tokens_cpu:
            most = max(batch.global_num_tokens_cpu)
            batch.input_ids = [0] * most
            if batch.forward_mode.is_extend():
                batch.extend_num_tokens = most
            else:
                batch.batch_size = most
