"""What the vLLM integration hooks and reads is there in each release that is supported, with the arguments it uses.

The sources of the released wheels tell, file by file from the package index: vLLM itself is not installed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import graphprobe_vllm
from graphprobe_vllm import BASE, GRAPHS, HOOKS, INTEGRATION, V1, V2
from tests.integrations.releases import (
    RELEASES,
    Release,
    arguments,
    calls,
    find_all,
    kept,
    returned,
    there,
)

ENGINE = "vllm"
DISPATCHER = "vllm.v1.cudagraph_dispatcher"
WORKER = "vllm.v1.worker.gpu_worker"
OUTPUT = "vllm.v1.core.sched.output"
DECIDE = "_determine_batch_execution_and_padding"

USED = {
    "step": ["scheduler_output"],
    "dispatch_v1": ["num_tokens", "num_reqs", "max_num_scheduled_tokens", "num_encoder_reqs"],
    "dispatch_v2": ["cudagraph_manager", "num_reqs", "num_tokens", "uniform_token_count", "dp_size", "need_eager"],
    "bucket_v1": ["desc"],
    "draft_v1": ["num_tokens"],
}
"""The arguments that handlers use by their names."""

READ = {
    (V1, "GPUModelRunner"): "vllm_config device cudagraph_dispatcher uniform_decode_query_len model_config input_batch",
    (V2, "GPUModelRunner"): "vllm_config device cudagraph_manager",
    (GRAPHS, "ModelCudaGraphManager"): "cudagraph_mode lora_capture_cases use_breakable_cg dispatch "
    "_graphs_captured _candidates _capture_descs _resolve_effective_loras",
    (GRAPHS, "BatchExecutionDescriptor"): "cg_mode num_tokens uniform_token_count",
    (
        DISPATCHER,
        "CudagraphDispatcher",
    ): "cudagraph_mode keys_initialized compilation_config dispatch get_capture_descs",
    ("vllm.forward_context", "BatchDescriptor"): "num_tokens",
    ("vllm.v1.worker.gpu_input_batch", "InputBatch"): "lora_id_to_lora_request",
    (BASE, "WorkerWrapperBase"): "worker global_rank",
    (WORKER, "Worker"): "model_runner cudagraph_memory_estimate",
    (
        OUTPUT,
        "SchedulerOutput",
    ): "num_scheduled_tokens total_num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs",
    (OUTPUT, "CachedRequestData"): "req_ids num_output_tokens resumed_req_ids",
    ("vllm.config.vllm", "VllmConfig"): "compilation_config scheduler_config parallel_config cache_config lora_config "
    "num_speculative_tokens",
    ("vllm.config.compilation", "CompilationConfig"): "cudagraph_capture_sizes max_cudagraph_capture_size "
    "cudagraph_specialize_lora",
    ("vllm.config.compilation", "CUDAGraphMode"): "NONE PIECEWISE FULL decode_mode",
    ("vllm.config.scheduler", "SchedulerConfig"): "max_num_seqs",
    ("vllm.config.parallel", "ParallelConfig"): "data_parallel_size data_parallel_index world_size",
    ("vllm.config.lora", "LoRAConfig"): "max_loras",
    ("vllm.config.model", "ModelConfig"): "is_encoder_decoder",
    ("vllm.config.cache", "CacheConfig"): "block_size num_gpu_blocks kv_cache_size_tokens",
}
"""What is read off vLLM's own objects: their classes, and the attributes."""

GONE = {"draft_v2_autoregressive": "0.32.0", "step_ray": "0.33.0"}
"""Hooks that have had no place since a release: others have taken over, or nothing is left to hook."""

FUNCTIONS = (
    ("vllm.compilation.breakable_cudagraph", "is_breakable_cudagraph_enabled", []),
    ("vllm.v1.core.kv_cache_utils", "get_kv_cache_capacity", ["vllm_config", "kv_cache_config"]),
    (DISPATCHER, "CudagraphDispatcher.dispatch", ["num_tokens", "uniform_decode", "has_lora", "num_active_loras"]),
    (GRAPHS, "CudaGraphManager.dispatch", ["num_reqs", "num_tokens", "uniform_token_count", "num_active_loras"]),
)
"""What is called, and its first arguments."""


def test_the_releases_are_those_that_the_integration_claims() -> None:
    """First and last of the tested range are read here."""
    first, *_, last = RELEASES[ENGINE]
    assert INTEGRATION.tested == tuple(version.rpartition(".")[0] for version in (first, last))


def test_every_hook_has_its_place(release: Release) -> None:
    """Where a module is there, so is the class or function that is wrapped, of all that is needed."""
    find_all(release, [hook for hook in there(release, HOOKS) if hook.needed])


def test_nothing_is_gone_since_the_release_before(release: Release) -> None:
    """A hook that the release before has a place for has it here, too: a part that moves must not go unseen."""
    find_all(release, kept(release, HOOKS, GONE))


def test_every_hook_is_for_some_release(every_release: list[Release]) -> None:
    """None of them is about a place that no supported release has."""
    find = [(hook, [r for r in every_release if r.find(hook.module, hook.attribute)]) for hook in HOOKS]
    assert [] == [hook.name for hook, found in find if not found]


def test_a_part_that_is_gone_has_a_successor(release: Release) -> None:
    """A handler whose module a release does not have is bound elsewhere in it."""
    assert {hook.handler for hook in HOOKS} == {hook.handler for hook in there(release, HOOKS)}


def test_handlers_find_the_arguments_that_they_use(release: Release) -> None:
    """By the names under which vLLM takes them."""
    missing = {
        hook.name: sorted(set(USED[hook.name]) - set(arguments(release.function(hook.module, hook.attribute))))
        for hook in there(release, HOOKS)
        if hook.name in USED
    }
    assert {} == {name: names for name, names in missing.items() if names}


def test_the_batch_comes_first_and_by_position(release: Release) -> None:
    """Later arguments of the V2 decision move in each release; these six do not, nor does a step's only one."""
    first = ["cudagraph_manager", "num_reqs", "num_tokens", "uniform_token_count", "dp_size", "dp_rank"]
    assert first == arguments(release.function(V2, "dispatch_cg_and_sync_dp"))[:6]
    assert ["scheduler_output"] == arguments(release.function(BASE, "WorkerWrapperBase.execute_model"))
    assert "create_forward_fn" == arguments(release.function(GRAPHS, "CudaGraphManager.capture"))[0]
    assert "desc" == arguments(release.function(V1, "GPUModelRunner._warmup_and_capture"))[0]


def test_a_step_reaches_the_decision(release: Release) -> None:
    """The worker's wrapper calls the worker; both runners ask once in ``execute_model``, under the names hooked."""
    assert 1 == len(calls(release.function(BASE, "WorkerWrapperBase.execute_model"), "self.worker.execute_model"))
    for module, name in ((V1, f"self.{DECIDE}"), (V2, "dispatch_cg_and_sync_dp")):
        assert 1 == len(calls(release.function(module, "GPUModelRunner.execute_model"), name)), module


def test_drafters_run_while_tokens_are_sampled(release: Release) -> None:
    """After the step, whose decision they would take the place of: both runners draft in ``sample_tokens`` alone."""
    for module, name in ((V1, "self.propose_draft_token_ids"), (V2, "self.speculator.propose")):
        assert calls(release.function(module, "GPUModelRunner.sample_tokens"), name), module
        assert not calls(release.function(module, "GPUModelRunner.execute_model"), name), module


def test_the_maker_of_captures_is_handed_on_by_position(release: Release) -> None:
    """The target's manager gives it to the one that captures as the first argument."""
    (call,) = calls(release.function(GRAPHS, "ModelCudaGraphManager.capture"), "super().capture")
    assert "create_forward_fn" == call.args[0].id


def test_the_decision_is_called_with_arguments_that_it_has(release: Release) -> None:
    """What stands at the call is what the handler sees."""
    for module, name, target in (
        (V1, f"self.{DECIDE}", f"GPUModelRunner.{DECIDE}"),
        (V2, "dispatch_cg_and_sync_dp", "dispatch_cg_and_sync_dp"),
    ):
        (call,) = calls(release.function(module, "GPUModelRunner.execute_model"), name)
        given = [keyword.arg for keyword in call.keywords]
        assert set(given) <= set(arguments(release.function(module, target)))
        assert not {"num_tokens", "num_reqs"} - {*given, *arguments(release.function(module, target))[: len(call.args)]}


def test_the_answer_is_the_mode_and_the_descriptor(release: Release) -> None:
    """V1 answers with the mode first and the padded batch second, V2 with one descriptor first."""
    (answer,) = returned(release.function(V1, f"GPUModelRunner.{DECIDE}"))
    assert ["cudagraph_mode", "batch_descriptor"] == answer[:2]
    assert all("desc" in found[0] for found in returned(release.function(V2, "dispatch_cg_and_sync_dp")))
    drafter = graphprobe_vllm.PROPOSER
    (answer,) = returned(release.function(drafter, f"SpecDecodeBaseProposer.{DECIDE}"))
    assert "cudagraph_mode" == answer[0]
    assert "num_tokens" in answer[1]


@pytest.mark.parametrize("owner", READ, ids=lambda owner: owner[1])
def test_what_is_read_is_there(release: Release, owner: tuple[str, str]) -> None:
    """Each attribute of vLLM's objects that reasons, sizes and figures come from."""
    assert set() == set(READ[owner].split()) - release.attributes(*owner)


@pytest.mark.parametrize("place", FUNCTIONS, ids=lambda place: place[1])
def test_what_is_called_takes_these_arguments(release: Release, place: tuple[str, str, list[str]]) -> None:
    """The engine's own functions that are asked again for a reason, a size or a figure."""
    module, name, first = place
    assert first == arguments(release.function(module, name))[: len(first)]


def test_nothing_is_listed_here_that_the_integration_does_not_read() -> None:
    """The lists above follow the code."""
    folder = Path(graphprobe_vllm.__file__).parent
    text = "\n".join(path.read_text() for path in folder.glob("graphprobe_vllm*.py"))
    listed = {name for names in READ.values() for name in names.split()}
    listed |= {name.rpartition(".")[2] for _, name, _ in FUNCTIONS} | {
        name for names in USED.values() for name in names
    }
    assert set() == {name for name in listed if not re.search(rf"\b{name}\b", text)}
    assert set(USED) <= {hook.name for hook in HOOKS}
