"""Why a step was eager: each reason of both runners, found by asking the dispatcher that has just answered."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import graphprobe
from graphprobe import errors
from tests.integrations.engine import RUNNERS, Engine, forward, rows

Make = Callable[..., Engine]

pytestmark = pytest.mark.usefixtures("fresh")


def reasons(name: str = "vllm") -> list[str]:
    return [str(key[2]) for key in rows(name)]


def others(mode: str) -> None:
    """What the other ranks of data parallelism can use from now on."""
    modes = importlib.import_module("vllm.config.compilation").CUDAGraphMode
    importlib.import_module("vllm.v1.worker.dp_utils").OTHERS[:] = [modes[mode]]


@pytest.mark.parametrize(("tokens", "more"), [([1], {}), ([1] * 40, {}), ([], {"new": [100]}), ([1], {"new": [3]})])
def test_disabled_whatever_was_sent(engine: Make, runner: str, tokens: list[int], more: dict[str, Any]) -> None:
    """With graphs switched off there is no other reason, and no gauge of the sizes without a graph."""
    engine(runner, mode="NONE", seqs=40).start().step(*tokens, **more)
    assert reasons() == ["disabled"]
    assert (forward().hit_rate, forward().buckets, forward().uncovered) == (None, (), {})


def test_disabled_is_said_once_and_is_no_warning(
    engine: Make, runner: str, said: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    found = engine(runner, mode="NONE").start()
    said()
    found.step(1)
    found.step(1)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert said() == ["vllm: CUDA graphs are switched off in this engine (cudagraph_mode NONE)"]


def test_disabled_where_nothing_is_captured(engine: Make, runner: str) -> None:
    """An engine that has not captured, or has released its graphs, has none."""
    found = engine(runner)
    if runner == "v1":
        found.runner.cudagraph_dispatcher.keys_initialized = False
    found.step(1)
    assert reasons() == ["disabled"]


def test_disabled_where_there_is_no_manager(engine: Make) -> None:
    found = engine("v2")
    found.runner.cudagraph_manager = None
    found.step(1)
    assert reasons() == ["disabled"]


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE", "FULL"])
def test_a_decode_above_the_limit_is_too_large(engine: Make, runner: str, mode: str) -> None:
    engine(runner, mode=mode, seqs=16).start().step(*[1] * 9)
    assert rows() == {("decode", 9, "batch_too_large"): 1}


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE", "FULL"])
def test_so_is_a_prefill_where_prefills_have_graphs(engine: Make, runner: str, mode: str) -> None:
    found = engine(runner, mode=mode).start()
    found.step(new=[9])
    found.step(1, new=[8])
    assert rows() == {("prefill", 9, "batch_too_large"): 1, ("mixed", 9, "batch_too_large"): 1}


@pytest.mark.parametrize("prompt", [3, 900])
def test_where_only_decodes_have_graphs_a_prefill_is_no_miss(engine: Make, runner: str, prompt: int) -> None:
    """Of whatever size: no bucket would help it."""
    found = engine(runner).start()
    found.step(new=[prompt])
    found.step(1, new=[prompt])
    assert rows() == {("prefill", prompt, "wrong_phase"): 1, ("mixed", prompt + 1, "mixed_batch"): 1}
    assert forward().hit_rate == 0


def test_tokens_of_unequal_requests_are_ragged(engine: Make, runner: str) -> None:
    """An n-gram drafter proposes more for one request than for another."""
    engine(runner, k=3, sizes=[4, 8]).start().step(4, 2)
    assert rows() == {("verify", 6, "ragged"): 1}


@pytest.mark.parametrize("width", [1, 3])
def test_a_uniform_step_of_another_width_is_spec_width(engine: Make, runner: str, width: int) -> None:
    """Graphs are of 1 + 3 tokens per request, this step has fewer."""
    engine(runner, k=3, sizes=[4, 8]).start().step(width, width)
    assert [reason for _, _, reason in rows()] == ["spec_width"]


def test_a_step_with_encoder_inputs_is_multimodal(engine: Make) -> None:
    """V1 has no full graph for encoder-decoder models then; V2 compiles nothing for such a step."""
    engine("v1", encoder=True).start().step(1, images=1)
    engine("v2").start().step(1, images=1)
    assert rows() == {("decode", 1, "multimodal"): 2}


def test_images_alone_do_not_matter_to_v1(engine: Make) -> None:
    """A decoder takes them as embeddings: what is eager with them would be so without."""
    found = engine("v1", k=1, sizes=[2, 4]).start()
    found.step(2, images=1)
    found.step(2, 1, images=1)
    assert rows() == {("verify", 2, "full", 2): 1, ("verify", 3, "ragged"): 1}


def test_where_another_rank_has_no_graph_it_is_the_vote(engine: Make, runner: str) -> None:
    """This rank alone would have had one."""
    found = engine(runner, dp=2).start()
    others("NONE")
    found.step(1, 1)
    assert rows() == {("decode", 2, "rank_vote"): 1}


def test_where_no_rank_has_a_graph_it_is_the_reason_of_this_one(engine: Make, runner: str) -> None:
    found = engine(runner, dp=2, seqs=16).start()
    others("NONE")
    found.step(*[1] * 9)
    found.step(new=[3])
    found.step(2, 1)
    assert sorted(reasons()) == ["batch_too_large", "ragged", "wrong_phase"]


def lend(found: Engine, loras: int) -> None:
    """Adapters are active from now on."""
    if found.kind == "v1":
        found.runner.input_batch.lora_id_to_lora_request = dict.fromkeys(range(1, loras + 1), "request")
    else:
        found.runner.active_loras = loras


def test_a_batch_without_an_adapter_where_all_graphs_have_one_is_adapter(engine: Make) -> None:
    """V1 with cudagraph_specialize_lora=False: silently eager until the first adapter comes."""
    found = engine("v1", loras=2, specialize=False).start()
    found.step(1, 1)
    lend(found, 1)
    found.step(1, 1)
    assert rows() == {("decode", 2, "adapter"): 1, ("decode", 2, "full", 2): 1}


def test_an_adapter_where_no_graph_has_one_is_adapter(engine: Make) -> None:
    """Within the limit; above it, there is no graph without one either."""
    found = engine("v2", seqs=16).start()
    lend(found, 1)
    found.step(1, 1)
    found.step(*[1] * 9)
    assert rows() == {("decode", 2, "adapter"): 1, ("decode", 9, "batch_too_large"): 1}


def test_with_graphs_of_both_kinds_adapters_are_no_reason(engine: Make, runner: str) -> None:
    found = engine(runner, loras=2, seqs=16).start()
    for loras in (0, 1):
        lend(found, loras)
        found.step(1, 1)
        found.step(*[1] * 9)
    assert rows() == {("decode", 2, "full", 2): 2, ("decode", 9, "batch_too_large"): 2}


def test_a_decode_within_the_limit_without_a_graph_has_no_bucket(engine: Make) -> None:
    """V1 captures decodes up to max_num_seqs only: 5 would be padded to 8, which 6 requests never need."""
    engine("v1", sizes=[4, 8], seqs=6).start().step(*[1] * 5)
    assert rows() == {("decode", 5, "no_exact_bucket"): 1}


def test_more_requests_than_any_graph_has_are_no_bucket(engine: Make) -> None:
    """V2's graphs are of so many requests, too."""
    found = engine("v2", sizes=[4]).start()
    manager = found.runner.cudagraph_manager
    manager._candidates[3, 0] = [desc._replace(num_reqs=2) for desc in manager._candidates[3, 0]]
    found.step(1, 1, 1)
    assert rows() == {("decode", 3, "no_exact_bucket"): 1}


def test_a_size_without_any_candidate_is_too_large(engine: Make) -> None:
    """V2 knows no graph above its largest one, which may be below the limit: 6 requests never need 8."""
    engine("v2", sizes=[4, 8], seqs=6).start().step(*[1] * 5)
    assert rows() == {("decode", 5, "batch_too_large"): 1}


def test_v1_pads_for_sequence_parallelism_before_it_looks(engine: Make) -> None:
    """Older releases do, to a multiple of the ranks: 3 become 4, and 5 become 6, which is above the limit."""
    found = engine("v1", sizes=[1, 2, 4, 5])
    type(found.runner)._pad_for_sequence_parallelism = lambda self, n: n + n % 2
    found.start()
    found.step(*[1] * 3)
    found.step(*[1] * 5)
    assert rows() == {("decode", 3, "full", 4): 1, ("decode", 5, "batch_too_large"): 1}
    assert forward().uncovered == {"decode": 4}


def decline(kind: str) -> None:
    """A release whose runner decides by other means than those that we read: each step is eager."""
    none = importlib.import_module("vllm.config.compilation").CUDAGraphMode.NONE
    module = importlib.import_module(RUNNERS[kind])

    def determine(
        runner: Any,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: Any,
        max_num_scheduled_tokens: int,
        *rest: Any,
        **more: Any,
    ) -> Any:
        return none, SimpleNamespace(num_tokens=num_tokens), False, None, None

    def dispatch(
        cudagraph_manager: Any,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: Any,
        dp_size: int,
        *rest: Any,
        **more: Any,
    ) -> Any:
        return SimpleNamespace(cg_mode=none, num_tokens=num_tokens), None

    module.GPUModelRunner._determine_batch_execution_and_padding = determine
    module.dispatch_cg_and_sync_dp = dispatch


@pytest.mark.parametrize(
    ("kind", "owner", "name"),
    [
        ("v1", "cudagraph_dispatcher", "keys_initialized"),
        ("v1", "", "uniform_decode_query_len"),
        ("v1", "", "input_batch"),
        ("v2", "cudagraph_manager", "_candidates"),
        ("v2", "cudagraph_manager", "_graphs_captured"),
    ],
)
def test_a_reason_that_cannot_be_read_is_unknown_and_the_call_counts(kind: str, owner: str, name: str) -> None:
    """What a reason needs is private to vLLM: where it is gone, that is a failure of ours and no other."""
    decline(kind)
    graphprobe.instrument("vllm")
    found = Engine(kind).start()
    delattr(getattr(found.runner, owner) if owner else found.runner, name)
    assert found.step(1, 1, 1) == "tokens"
    assert rows() == {("decode", 3, "unknown"): 1}
    assert errors.internal_errors == {"vllm.reason": 1}


def test_with_nothing_missing_the_same_release_has_a_reason(engine: Make, runner: str) -> None:
    """A graph that its dispatcher would have given, and no other rank that voted against it."""
    graphprobe.uninstrument("vllm")
    decline(runner)
    graphprobe.instrument("vllm")
    engine(runner).start().step(1, 1, 1)
    assert reasons() == ["no_exact_bucket"]
