"""vLLM's own dispatchers and captures on a CPU: its real classes, without a model, a device, or compiled parts.

What decides is vLLM's; what computes is left out. Works with the Python files of its wheels alone.
"""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import torch
import vllm
import vllm.v1.worker.gpu.cudagraph_utils as graphs_v2
import vllm.v1.worker.gpu.model_runner as v2
import vllm.v1.worker.gpu_model_runner as v1
import vllm.v1.worker.worker_base as base
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu.lora_utils import get_lora_capture_cases

from tests.engines.vllm_device import CPU, inside, nothing
from tests.engines.vllm_setups import DECODE, PREFILL, VERIFY, Setup, Step

SPECULATOR: Any = importlib.import_module("vllm.v1.worker.gpu.spec_decode.dflash.speculator")
VERSION: str = vllm.__version__
PARTS = ("cache", "compilation", "load", "lora", "model", "observability", "parallel", "scheduler", "speculative")


def only_known(function: Any, **more: Any) -> dict[str, Any]:
    """Those arguments that this release has."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in more.items() if name in names}


def config_of(setup: Setup) -> Any:
    """A real configuration; vLLM itself finds the sizes that it will capture."""
    # The platform is the one that vLLM falls back to; it only has to name a device.
    type(current_platform).device_type = "cpu"
    config = VllmConfig()
    config.model_config = SimpleNamespace(enforce_eager=False, is_encoder_decoder=setup.encoder, use_mla=False)
    config.scheduler_config.max_num_seqs = setup.requests
    if setup.spec:
        config.speculative_config = SimpleNamespace(
            num_speculative_tokens=setup.spec,
            uses_dynamic_speculative_decoding=lambda: False,
            use_eagle=lambda: False,
            uses_draft_model=lambda: False,
            uses_extract_hidden_states=lambda: False,
        )
    if setup.adapters:
        config.lora_config = SimpleNamespace(max_loras=setup.adapters, specialize_active_lora=False)
    parallel = config.parallel_config
    parallel.data_parallel_size = 2 if setup.peer else 1
    parallel.disable_nccl_for_dp_synchronization = True
    compilation = config.compilation_config
    compilation.cudagraph_specialize_lora = setup.specialize
    compilation.cudagraph_mode = CUDAGraphMode[setup.mode]
    compilation.cudagraph_capture_sizes = list(setup.sizes) if setup.sizes else None
    compilation.max_cudagraph_capture_size = setup.limit
    config._set_cudagraph_sizes()
    return config


def _bare(kind: type, config: Any, setup: Setup) -> Any:
    runner = object.__new__(kind)
    runner.vllm_config = config
    for name in PARTS:
        setattr(runner, f"{name}_config", getattr(config, f"{name}_config"))
    runner.device, runner.max_num_reqs, runner.kv_cache_config = CPU, setup.requests, None
    return runner


class RunnerV1:
    """The runner V1 with its dispatcher."""

    def __init__(self, setup: Setup) -> None:
        self.config = config_of(setup)
        self.answers: list[list[Any]] = []
        self.runner = runner = _bare(v1.GPUModelRunner, self.config, setup)
        runner.uniform_decode_query_len = 1 + setup.spec
        runner.input_batch = SimpleNamespace(lora_id_to_lora_request={})
        runner.encoder_cudagraph_manager = None
        runner._maybe_init_encoder_cudagraph_manager = runner.maybe_remove_all_loras = nothing
        runner._dummy_run, runner.model = nothing, nothing
        runner.cudagraph_dispatcher = v1.CudagraphDispatcher(self.config)
        runner._check_and_update_cudagraph_mode([], [])

    def execute(self, output: Any, step: Step) -> None:
        """What its ``execute_model`` does with a step as far as the decision, and the forward."""
        widths = list(output.num_scheduled_tokens.values())
        if not widths:
            return
        self.runner.input_batch.lora_id_to_lora_request = dict.fromkeys(range(1, step.adapters + 1))
        mode, found, *_ = self.runner._determine_batch_execution_and_padding(
            num_tokens=sum(widths),
            num_reqs=len(widths),
            num_scheduled_tokens_np=None,
            max_num_scheduled_tokens=max(widths),
            use_cascade_attn=False,
            num_encoder_reqs=step.images,
            allow_microbatching=False,
        )
        self.answers.append([sum(widths), mode.name, found.num_tokens])
        self.runner._model_forward()

    def draft(self, requests: int, tokens: int) -> None:
        """What a drafter with weights decides after a step: about all of its tokens, then one for each request."""
        proposer = object.__new__(SpecDecodeBaseProposer)
        proposer.vllm_config, proposer.dp_rank = self.config, 0
        proposer.speculative_config = SimpleNamespace(enforce_eager=False)
        proposer.cudagraph_dispatcher = v1.CudagraphDispatcher(self.config)
        proposer.initialize_cudagraph_keys(self.config.compilation_config.cudagraph_mode)
        for batch in (tokens, requests):
            proposer._determine_batch_execution_and_padding(batch)


class RunnerV2:
    """Model Runner V2 with its graph manager."""

    def __init__(self, setup: Setup) -> None:
        self.config = config_of(setup)
        self.answers: list[list[Any]] = []
        self.setup = setup
        self.runner = runner = _bare(v2.GPUModelRunner, self.config, setup)
        runner.decode_query_len = 1 + setup.spec
        compilation = self.config.compilation_config
        resolve = compilation.resolve_cudagraph_mode_and_sizes
        known = only_known(resolve, use_v2_model_runner=True, tensor_parallel_size=1)
        mode = resolve(AttentionCGSupport.ALWAYS, None, runner.decode_query_len, **known)
        cases = get_lora_capture_cases(self.config.lora_config, compilation)
        runner.cudagraph_manager = manager = v2.ModelCudaGraphManager(
            self.config, CPU, mode, decode_query_len=runner.decode_query_len, lora_capture_cases=cases
        )
        # Its own fills buffers of a model first, and then comes to this one.
        manager.capture = lambda *args, **kwargs: graphs_v2.CudaGraphManager.capture(manager, lambda *a, **k: nothing)
        runner.maybe_setup_dummy_loras = inside
        manager.hidden_states = torch.zeros(1024, 1)
        runner.model_state = SimpleNamespace(supports_mm_inputs=False, capture_inner_cudagraphs=nothing)
        runner.kv_connector = SimpleNamespace(reset_capture_state=nothing)
        for name in ("model", "input_buffers", "intermediate_tensors", "block_tables", "attn_groups", "speculator"):
            setattr(runner, name, None)
        runner.pcp_manager = runner.adaptive_verification = None
        runner.is_encoder_only = False
        runner.use_aux_hidden_state_outputs = False

    def execute(self, output: Any, step: Step) -> None:
        """What its ``execute_model`` does with a step as far as the decision, and the forward."""
        widths = list(output.num_scheduled_tokens.values())
        if not widths:
            return
        tokens, requests, widest = sum(widths), len(widths), max(widths)
        dispatch = v2.dispatch_cg_and_sync_dp
        more = only_known(
            dispatch,
            max_query_len=widest,
            need_eager=bool(self.setup.encoder and step.images),
            num_active_loras=step.adapters,
            parallel_config=self.config.parallel_config,
            uniform_decode=False,
        )
        uniform = _uniform(requests, tokens, widest, bool(output.scheduled_new_reqs))
        size = self.config.parallel_config.data_parallel_size
        found = dispatch(self.runner.cudagraph_manager, requests, tokens, uniform, size, 0, **more)[0]
        self.answers.append([tokens, found.cg_mode.name, found.num_tokens])
        if found.cg_mode.name == "FULL":
            self.runner.cudagraph_manager.run_fullgraph(found)
        else:
            with v2.set_forward_context(None, self.config):
                pass

    def draft(self, requests: int, tokens: int) -> None:
        """What a drafter with weights decides after a step: about all of its tokens, then one for each request."""
        for batch, width in ((tokens, self.runner.decode_query_len), (requests, 1)):
            manager = graphs_v2.CudaGraphManager(self.config, CPU, self.runner.cudagraph_manager.cudagraph_mode, width)
            manager._graphs_captured = True
            SPECULATOR.dispatch_cg_and_sync_dp(
                manager, requests, batch, uniform_token_count=width, dp_size=1, dp_rank=0, need_eager=False
            )


def _uniform(requests: int, tokens: int, widest: int, prefills: bool) -> Any:
    old = getattr(v2, "get_uniform_token_count", None)
    if old is not None:
        return old(requests, tokens, widest)
    found = v2.get_uniform_decode_token_count
    return found(
        requests, tokens, widest, **only_known(found, has_prefill=prefills, decode_graph_eligible=not prefills)
    )


def output_of(step: Step) -> Any:
    """What vLLM's scheduler would hand on for a step."""
    output = SchedulerOutput.make_empty()
    cached = CachedRequestData.make_empty()
    for number, word in enumerate(step.batch):
        name, kind, tokens = f"request{number}", word[0], int(word[1:])
        output.num_scheduled_tokens[name] = tokens
        if kind == PREFILL:
            fields = dict.fromkeys(
                n for n, p in inspect.signature(NewRequestData).parameters.items() if p.default is p.empty
            )
            fields.update(req_id=name, prompt_token_ids=[0] * tokens, num_computed_tokens=0)
            output.scheduled_new_reqs.append(NewRequestData(**fields))
            continue
        assert kind in (DECODE, VERIFY), word
        if kind == VERIFY:
            output.scheduled_spec_decode_tokens[name] = [0] * (tokens - 1)
        cached.req_ids.append(name)
        cached.num_computed_tokens.append(100)
        cached.num_output_tokens.append(10)
    output.scheduled_cached_reqs = cached
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.scheduled_encoder_inputs = {f"request{n}": [0] for n in range(step.images)}
    return output


def worker_of(made: Any) -> Any:
    """A real ``WorkerWrapperBase`` around a worker whose runner is this one."""
    wrapper = base.WorkerWrapperBase(0, 0)
    wrapper.vllm_config, wrapper.mm_receiver_cache = made.config, None
    wrapper.worker = SimpleNamespace(
        model_runner=made.runner,
        step=None,
        execute_model=lambda output: made.execute(output, wrapper.worker.step),
    )
    return wrapper


def drive(worker: Any, step: Step) -> None:
    """One step through the worker."""
    worker.worker.step = step
    worker.execute_model(output_of(step))


RUNNERS = {"v1": RunnerV1, "v2": RunnerV2}
