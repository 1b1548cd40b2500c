"""nano-vllm's decode through graphprobe.capture: import this before LLM(...) is made. Its source stays as it is.

In the place of its own capture of graphs its model is captured by ``graphprobe.capture``, which stages, pads, replays
and counts. Nothing is left to do for ``run_model``: its eager branch calls the model, and the model replays.
"""

import torch
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.utils.context import get_context, set_context

import graphprobe

PAD = {"input_ids": 0, "positions": 0, "context.slot_mapping": -1, "context.context_lens": 0, "context.block_tables": 0}


@torch.inference_mode()
def capture_cudagraph(runner):
    """Capture the model's decode, and let ``run_model`` call the model."""
    config, most = runner.config, min(runner.config.max_num_seqs, 512)
    blocks = -(-config.max_model_len // runner.block_size)

    def make_inputs(rows):
        long, short = (torch.zeros(rows, dtype=kind) for kind in (torch.int64, torch.int32))
        tables = torch.zeros(rows, blocks, dtype=torch.int32)
        set_context(False, slot_mapping=short - 1, context_lens=short, block_tables=tables)
        return (long, long.clone()), {}

    graphprobe.capture(
        runner.model.eval(),  # nano-vllm never says so, and a model in training is not captured
        name="nanovllm.decode",
        unit="requests",
        buckets={1, 2, 4, 8, *range(16, most, 16), most},
        max_batch=config.max_num_seqs,
        phase=lambda *args: "prefill" if get_context().is_prefill else "decode",
        context=get_context,  # the object of this step, in which attention finds its tensors
        narrow={"context.block_tables": (1, 0)},  # as wide as this step's longest sequence
        pad=PAD,
        agree=int,  # torch.distributed is always on here, and all ranks run the same batch
        outputs="alias",  # read before the next step
    )
    runner.model.forward.warmup(make_inputs)
    runner.enforce_eager = True


ModelRunner.capture_cudagraph = capture_cudagraph
