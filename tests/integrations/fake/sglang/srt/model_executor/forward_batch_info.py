"""What a pass is about."""

from enum import IntEnum, auto


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()
    PREBUILT = auto()
    SPLIT_PREFILL = auto()
    DLLM_EXTEND = auto()

    def is_extend(self):
        others = (ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.PREBUILT)
        return self not in others

    def is_cuda_graph(self):
        return self.name in ("DECODE", "TARGET_VERIFY", "IDLE", "DLLM_EXTEND")

    def is_target_verify(self):
        return self is ForwardMode.TARGET_VERIFY


class CaptureHiddenMode(IntEnum):
    NULL = 0
    LAST = 1
    FULL = 2


class ForwardBatch:
    """A batch of requests; what is not given is as in a plain one."""

    def __init__(self, mode, batch_size, tokens=None, **more):
        self.forward_mode = ForwardMode[mode]
        self.batch_size = batch_size
        self.extend_num_tokens = tokens
        self.input_ids = [0] * (batch_size if tokens is None else tokens)
        self.spec_info = None
        self.replace_embeds = self.input_embeds = None
        self.capture_hidden_mode = CaptureHiddenMode.NULL
        self.return_logprob = False
        self.extend_logprob_start_lens_cpu, self.extend_seq_lens_cpu = [0], [len(self.input_ids)]
        self.extend_prefix_lens_cpu = [0]
        self.seq_lens_cpu = [len(self.input_ids)]
        self.global_num_tokens_cpu = self.original_global_num_tokens_cpu = None
        self.can_run_dp_cuda_graph = self.can_run_decode_cuda_graph = True
        self.can_run_dp_breakable_cuda_graph = self.can_run_dp_prefill_cuda_graph = True
        self.can_run_tbo = self.every_request_has_an_image = True
        self.token_indices_to_pool = None
        self.images = False
        vars(self).update(more)

    def contains_mm_inputs(self):
        return self.images
