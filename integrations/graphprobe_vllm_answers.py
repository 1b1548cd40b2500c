"""What a runner of vLLM decided for one step, and why it was eager: read off its own objects, in its own order.

vLLM gives no reason. Each is found by asking the dispatcher that has just answered, never by a rule of our own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from graphprobe.reasons import FallbackReason

NOT_UNIFORM = {
    "prefill": FallbackReason.WRONG_PHASE,
    "mixed": FallbackReason.MIXED_BATCH,
    "verify": FallbackReason.RAGGED,
    "decode": FallbackReason.SPEC_WIDTH,
}
"""Why a step that is no uniform decode is eager where only uniform decodes have graphs (FULL_DECODE_ONLY).

A decode step of one token per request under speculative decoding has not the width that was captured.
"""


def phase(output: Any) -> str:
    """What a step of vLLM's scheduler does: decode, verify (speculative tokens), prefill, or mixed with decode.

    One token per request is a decode, as for vLLM itself: a prompt of which all but one is cached is no other work.
    """
    requests = len(output.num_scheduled_tokens)
    if output.total_num_scheduled_tokens == requests:
        return "decode"
    cached = output.scheduled_cached_reqs
    # A request that was preempted computes again what it had.
    again = cached.resumed_req_ids if hasattr(cached, "resumed_req_ids") else ()
    outputs = zip(cached.req_ids, cached.num_output_tokens, strict=False)
    filling = len(output.scheduled_new_reqs) + sum(1 for name, done in outputs if not done or name in again)
    if not filling:
        return "verify"
    return "prefill" if filling >= requests else "mixed"


def modes(breakable: bool) -> dict[str, str]:
    """vLLM's modes of a step in our words."""
    return {"FULL": "full", "PIECEWISE": "breakable" if breakable else "piecewise"}


def breakable() -> bool:
    """Whether piecewise graphs are made without torch.compile, which vLLM decides by its environment."""
    found = getattr(sys.modules.get("vllm.compilation.breakable_cudagraph"), "is_breakable_cudagraph_enabled", None)
    return bool(found and found())


def reason_draft(proposer: Any, tokens: int) -> FallbackReason:
    """Why a drafter of the runner V1 ran eagerly."""
    return _closed(proposer.cudagraph_dispatcher, tokens, "decode") or FallbackReason.ENGINE_DECLINED


def reason_v1(runner: Any, asked: dict[str, Any], phase: str) -> FallbackReason:
    """Why V1 ran eagerly."""
    dispatcher, tokens = runner.cudagraph_dispatcher, asked["num_tokens"]
    padded = padding(runner)(tokens)
    closed = _closed(dispatcher, padded, phase)
    if closed is not None:
        return closed
    if runner.model_config.is_encoder_decoder and asked.get("num_encoder_reqs"):
        return FallbackReason.MULTIMODAL
    widest, width = asked["max_num_scheduled_tokens"], runner.uniform_decode_query_len
    uniform = tokens == widest * asked["num_reqs"]
    config = runner.vllm_config
    active = len(runner.input_batch.lora_id_to_lora_request)

    def served(loras: int) -> bool:
        decode = uniform and widest == width
        answer = dispatcher.dispatch(
            num_tokens=padded, uniform_decode=decode, has_lora=loras > 0, num_active_loras=loras
        )
        return bool(answer[0].name != "NONE")

    if config.parallel_config.data_parallel_size > 1 and served(active):
        return FallbackReason.RANK_VOTE
    if config.lora_config is not None and served(0 if active else config.lora_config.max_loras):
        return FallbackReason.ADAPTER
    if uniform:
        return FallbackReason.NO_EXACT_BUCKET if widest == width else FallbackReason.SPEC_WIDTH
    return NOT_UNIFORM[phase]


def padding(runner: Any) -> Callable[[int], int]:
    """How V1 rounds a number of tokens before it looks for a graph: to a multiple of sequence parallelism's ranks."""
    found: Callable[[int], int] = getattr(runner, "_pad_for_sequence_parallelism", int)
    return found


def _closed(dispatcher: Any, tokens: int, phase: str) -> FallbackReason | None:
    """What V1's dispatcher looks at before anything else."""
    largest = dispatcher.compilation_config.max_cudagraph_capture_size
    if not dispatcher.keys_initialized or off(dispatcher.cudagraph_mode) or largest is None:
        return FallbackReason.DISABLED
    return _beyond(dispatcher.cudagraph_mode, tokens, largest, phase)


def _beyond(mode: Any, tokens: int, largest: int, phase: str) -> FallbackReason | None:
    """A step with prefill where only decode has graphs, which no size would help, and then what is above the limit."""
    if phase in ("prefill", "mixed") and off(mode.mixed_mode()):
        return NOT_UNIFORM[phase]
    return FallbackReason.BATCH_TOO_LARGE if tokens > largest else None


def off(mode: Any) -> bool:
    """Whether a mode of vLLM's is NONE."""
    return mode is None or bool(mode.name == "NONE")


def reason_v2(asked: dict[str, Any], phase: str) -> FallbackReason:
    """Why Model Runner V2 ran eagerly."""
    manager, tokens, requests = asked["cudagraph_manager"], asked["num_tokens"], asked["num_reqs"]
    if manager is None or off(manager.cudagraph_mode) or not manager._graphs_captured:
        return FallbackReason.DISABLED
    if asked.get("need_eager"):
        return FallbackReason.MULTIMODAL
    largest = manager.compilation_config.max_cudagraph_capture_size
    beyond = _beyond(manager.cudagraph_mode, tokens, largest, phase)
    if beyond is not None:
        return beyond
    loras = manager._resolve_effective_loras(asked.get("num_active_loras") or 0)
    candidates = manager._candidates.get((tokens, loras))
    if candidates is None:
        others = any((tokens, case) in manager._candidates for case in manager.lora_capture_cases)
        return FallbackReason.ADAPTER if others else FallbackReason.BATCH_TOO_LARGE
    if asked["dp_size"] > 1 and not off(ask_v2(manager, requests, tokens, asked).cg_mode):
        return FallbackReason.RANK_VOTE
    widths, width = {found.uniform_token_count for found in candidates}, asked["uniform_token_count"]
    if None in widths or width in widths:
        return FallbackReason.NO_EXACT_BUCKET
    return FallbackReason.SPEC_WIDTH if width is not None else NOT_UNIFORM[phase]


def ask_v2(manager: Any, requests: int, tokens: int, asked: dict[str, Any]) -> Any:
    """What V2's dispatcher alone says of a batch; the arguments of later releases are handed on where they exist."""
    code = manager.dispatch.__code__
    names = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    given = {"num_active_loras": asked.get("num_active_loras") or 0, "max_query_len": asked.get("max_query_len")}
    extra = {name: value for name, value in given.items() if name in names}
    return manager.dispatch(requests, tokens, asked["uniform_token_count"], **extra)
