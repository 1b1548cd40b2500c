from sglang.srt.model_executor.runner_backend.base import Base


class FullCudaGraphBackend(Base):
    def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
        self._capture(shape_key, forward_fn)
