"""What a pass is about."""

from enum import IntEnum, auto


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()
    DRAFT_EXTEND_V2 = auto()

    def is_target_verify(self):
        return self is ForwardMode.TARGET_VERIFY


class ForwardBatch:
    def __init__(self, mode, batch_size, tokens=None, **more):
        self.forward_mode = ForwardMode[mode]
        self.batch_size = batch_size
        self.extend_num_tokens = tokens
        self.input_ids = [0] * (batch_size if tokens is None else tokens)
        self.spec_info = self.replace_embeds = self.input_embeds = None
        self.can_run_dp_cuda_graph = True
        vars(self).update(more)

    def contains_mm_inputs(self):
        return False
