"""SGLang: which of its passes ran as CUDA graphs, of the target and of drafters. A plugin, inert unless GRAPHPROBE=1.

SGLang loads it first thing in each of its processes. Only hooks are placed here, which are bound where the module is
imported that they are for, that is in schedulers; no thread is started, and no metric made, before the first pass.

This module is the table of hooks. Their handlers: ``graphprobe_sglang_passes`` counts and times, ``_drafts`` does so
for drafters, ``_reasons`` tells why a pass was eager, ``_captures`` is about the start; ``_watch`` is one model runner.
"""

from __future__ import annotations

from graphprobe.instrument import Hook, Integration, Patches

EXECUTOR = "sglang.srt.model_executor"
RUNNER = f"{EXECUTOR}.model_runner"
DECODE = f"{EXECUTOR}.runner.decode_cuda_graph_runner"
PREFILL = f"{EXECUTOR}.runner.prefill_cuda_graph_runner"
CPU = f"{EXECUTOR}.cpu_graph_runner"
BACKEND = f"{EXECUTOR}.runner_backend"
SPECULATIVE = "sglang.srt.speculative"
STEPS = "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner"
LAYERS = f"{SPECULATIVE}.multi_layer_eagle_draft_extend_cuda_graph_runner"
PASSES = "graphprobe_sglang_passes"
DRAFTS = "graphprobe_sglang_drafts"
CAPTURES = "graphprobe_sglang_captures"

HOOKS = (
    Hook("batch", "sglang.srt.managers.scheduler", "Scheduler.run_batch", f"{PASSES}:batch", needed=False),
    Hook("pass", RUNNER, "ModelRunner.forward", f"{PASSES}:forward"),
    Hook("prefill", PREFILL, "PrefillCudaGraphRunner.can_run_graph", f"{PASSES}:asked"),
    Hook("start", RUNNER, "ModelRunner.init_cuda_graphs", f"{CAPTURES}:start", needed=False),
    Hook("start_legacy", RUNNER, "ModelRunner.init_device_graphs", f"{CAPTURES}:start", needed=False),
    Hook("capture_decode", DECODE, "DecodeCudaGraphRunner.capture", f"{CAPTURES}:capture"),
    Hook("capture_prefill", PREFILL, "PrefillCudaGraphRunner.capture", f"{CAPTURES}:capture"),
    Hook("capture_cpu", CPU, "CPUGraphRunner.capture", f"{CAPTURES}:capture", needed=False),
    *(
        Hook(f"bucket_{name}", f"{BACKEND}.{name}_cuda_graph_backend", f"{kind}.capture_one", f"{CAPTURES}:bucket")
        for name, kind in (
            ("full", "FullCudaGraphBackend"),
            ("breakable", "BreakableCudaGraphBackend"),
            ("tc_piecewise", "TcPiecewiseCudaGraphBackend"),
        )
    ),
    *(
        Hook(f"draft_{name}", f"{SPECULATIVE}.{module}_cuda_graph_runner", place, f"{DRAFTS}:draft", needed=False)
        for name, module, place in (
            ("eagle", "eagle_draft", "EAGLEDraftCudaGraphRunner.execute"),
            ("eagle_extend", "eagle_draft_extend", "EAGLEDraftExtendCudaGraphRunner.execute"),
            ("frozen_kv", "frozen_kv_mtp", "FrozenKVMTPCudaGraphRunner.execute"),
            ("eagle_legacy", "eagle_draft", "EAGLEDraftCudaGraphRunner.replay"),
            ("eagle_extend_legacy", "eagle_draft_extend", "EAGLEDraftExtendCudaGraphRunner.replay"),
        )
    ),
    *(
        Hook(f"draft_layers{kind and '_one'}", LAYERS, f"{kind}{STEPS}.replay", f"{DRAFTS}:draft_step", needed=False)
        for kind in ("", "OneGraph")
    ),
    *(
        Hook(name, f"{SPECULATIVE}.{module}_worker_v2", f"{kind}.draft_forward", f"{DRAFTS}:rounds", needed=False)
        for name, module, kind in (
            ("round", "eagle", "EagleDraftWorker"),
            ("round_frozen_kv", "frozen_kv_mtp", "FrozenKVMTPDraftWorker"),
        )
    ),
)
"""Each place in SGLang that is hooked. Parts that a release does not have are never imported, and have no gauge."""

PATCHES = Patches("sglang", HOOKS)

INTEGRATION = Integration(
    engine="sglang",
    patches=PATCHES,
    oldest=(0, 5, 11),
    tested=("0.5.14", "0.5.23"),
    distributions=("sglang",),
)


def load() -> None:
    """What SGLang calls (entry point ``sglang.srt.plugins``)."""
    INTEGRATION.plugin()
