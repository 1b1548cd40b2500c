"""The scheduler, which runs a batch after the other."""


class Scheduler:
    def __init__(self, model_runner):
        self.model_runner = model_runner

    def run_batch(self, batch):
        return self.model_runner.forward(forward_batch=batch).logits_output
