"""Graphs of prefill: a size is a number of tokens."""


class PiecewiseCudaGraphRunner:
    def __init__(self, model_runner):
        self.model_runner = model_runner
        self.capture_num_tokens = sorted(model_runner.settings.prefill)
        self.max_num_tokens = max(self.capture_num_tokens)

    def can_run(self, forward_batch):
        return not forward_batch.forward_mode.is_target_verify() and len(forward_batch.input_ids) <= self.max_num_tokens

    def replay(self, forward_batch, **kwargs):
        self.raw_num_tokens = len(forward_batch.input_ids)
        return "logits"
