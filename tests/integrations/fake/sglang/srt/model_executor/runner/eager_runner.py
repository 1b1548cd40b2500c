"""Passes without graphs."""


class EagerRunner:
    def __init__(self, model_runner):
        self.model_runner = model_runner
        model_runner.model(None)

    def can_run_graph(self, forward_batch):
        return False

    def execute(self, forward_batch, pp_proxy_tensors=None):
        return self.model_runner.model(forward_batch)
