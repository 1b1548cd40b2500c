"""vLLM on one GPU, observed: its counts held against its scheduler and its replays, and tokens/s with and without.

    python benchmarks/vllm_engine.py --json docs/gpu/vllm.json

Each scenario is an engine in a process of its own (in-process engine, tiny Qwen3 with made-up weights, so that the host
is the bottleneck, which is the worst case for an observer). Needs vLLM and a GPU.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "integrations"), str(HERE.parent / "tests" / "engines")]

from vllm_speed import own_cost, throughput  # noqa: E402

import graphprobe  # noqa: E402

SIZES = [1, 2, 4, 8, 16]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SCENARIOS: dict[str, dict[str, Any]] = {
    "v1": {"v2": 0, "requests": 16},
    "v2": {"v2": 1, "requests": 16},
    "v1 ngram": {"v2": 0, "requests": 8, "speculative_config": NGRAM},
    "v1 draft model": {"v2": 0, "requests": 8, "drafter": "draft_model"},
    "v1 eagle": {"v2": 0, "requests": 8, "drafter": "eagle"},
    "v2 eagle": {"v2": 1, "requests": 8, "drafter": "eagle"},
    "v1 decode only": {"v2": 0, "requests": 16, "mode": "FULL_DECODE_ONLY"},
    "v2 decode only": {"v2": 1, "requests": 16, "mode": "FULL_DECODE_ONLY"},
    "v1 eager": {"v2": 0, "requests": 16, "enforce_eager": True},
}
TIMED = ("v1", "v2")


class Oracle:
    """Counts of its own: what the scheduler gave out, and every replay of a graph."""

    def __init__(self) -> None:
        self.steps: collections.Counter[int] = collections.Counter()
        self.replays = 0

    def watch(self) -> None:
        import torch
        from vllm.v1.core.sched.scheduler import Scheduler

        schedule, replay = Scheduler.schedule, torch.cuda.CUDAGraph.replay

        def scheduled(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            output = schedule(scheduler, *args, **kwargs)
            if output.total_num_scheduled_tokens:
                self.steps[output.total_num_scheduled_tokens] += 1
            return output

        def replayed(graph: Any) -> Any:
            self.replays += 1
            return replay(graph)

        Scheduler.schedule, torch.cuda.CUDAGraph.replay = scheduled, replayed  # type: ignore[method-assign]


class Said(logging.Handler):
    """What graphprobe logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def engine(folder: str, scenario: dict[str, Any]) -> Any:
    """The engine of a scenario. Several share the GPU, so each has a small cache instead of measuring what is free."""
    from vllm import LLM

    compilation: dict[str, Any] = {"cudagraph_capture_sizes": SIZES}
    if "mode" in scenario:
        compilation |= {"cudagraph_mode": scenario["mode"]}
    more = {name: scenario[name] for name in ("enforce_eager", "speculative_config") if name in scenario}
    if "drafter" in scenario:
        draft = f"{folder}-draft" if scenario["drafter"] == "eagle" else folder
        more["speculative_config"] = {"method": scenario["drafter"], "model": draft, "num_speculative_tokens": 3}
    if scenario.get("drafter") == "eagle":
        folder = f"{folder}-llama"
    if not os.environ.get("GRAPHPROBE_CPU"):
        more["attention_backend"] = "TRITON_ATTN"
    more["kv_cache_memory_bytes"] = 64 << 20
    return LLM(
        folder,
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=scenario["requests"],
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        compilation_config=None if scenario.get("enforce_eager") else compilation,
        **more,
    )


def models(folder: Path) -> None:
    """A tiny Qwen3, a tiny Llama, and a drafter of one layer for that."""
    import model

    model.write(folder)
    for suffix, layers in (("-llama", 2), ("-draft", 1)):
        other = model.write(Path(f"{folder}{suffix}"))
        config = json.loads((other / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers}
        (other / "config.json").write_text(json.dumps(config))


def generate(llm: Any, lengths: list[int], limits: list[int]) -> list[list[int]]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * i + k) % 250 for k in range(n)]} for i, n in enumerate(lengths)]
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in limits]
    return [list(found.outputs[0].token_ids) for found in llm.generate(prompts, params, use_tqdm=False)]


def counts(llm: Any, requests: int, oracle: Oracle) -> dict[str, Any]:
    """Two rounds of requests that end one after another: the batch falls from all of them to one."""
    lengths = [150 * (i + 1) // 16 - 150 * i // 16 for i in range(16)] if requests == 16 else [9] * requests
    before = (sum(oracle.steps.values()), oracle.replays)
    for _ in range(2):
        generate(llm, lengths, [8 + 6 * i for i in range(requests)])
    found = graphprobe.snapshot()
    forward = found.forwards["vllm"]
    size = collections.Counter[int]()
    for row in forward.rows:
        size[row.batch_size] += row.calls
    drafter = found.forwards.get("vllm.drafter")
    return {
        "rows": [row_of(row) for row in forward.rows],
        "drafter": [] if drafter is None else [row_of(row) for row in drafter.rows],
        "drafter captures": {} if drafter is None else dict(drafter.captures),
        "served": served(),
        "steps": sum(oracle.steps.values()) - before[0],
        "sizes as scheduled": size == oracle.steps,
        "full graph calls": sum(row.calls for row in forward.rows if row.mode == "full"),
        "replays": oracle.replays - before[1],
        "hit_rate": forward.hit_rate,
        "times": {" ".join(map(str, key)): [each.count, each.sum] for key, each in forward.times.items()},
        "capture_seconds": dict(forward.capture_seconds),
        "pool_growth": dict(forward.pool_growth),
        "captures": {f"{bucket} {outcome}": n for (bucket, outcome), n in forward.capture_outcomes.items()},
        "pool_bytes": forward.pool_bytes,
        "pool_estimate_bytes": forward.pool_estimate_bytes,
        "kv_capacity_tokens": forward.kv_capacity_tokens,
        "uncovered": dict(forward.uncovered),
        "buckets": forward.buckets,
        "causes": dict(forward.causes),
        "hooks": {hook: bound for (_, hook), bound in found.hooks.items()},
        "internal_errors": dict(found.internal_errors),
    }


def served() -> dict[str, float] | None:
    """Calls by path, as prometheus_client's own reader finds them in the shared directory; None where there is none."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return None
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    time.sleep(2.5)
    found: dict[str, float] = collections.defaultdict(float)
    for family in MultiProcessCollector(CollectorRegistry(), folder).collect():  # type: ignore[no-untyped-call]
        for sample in family.samples:
            if sample.name in ("graphprobe_graph_calls_total", "graphprobe_eager_calls_total"):
                found[f"{sample.labels['forward']} {sample.name[11:].split('_')[0]}"] += sample.value
    return dict(found)


def row_of(row: Any) -> list[Any]:
    return [row.phase, row.path, row.mode, row.batch_size, row.bucket, str(row.reason or ""), row.calls]


def run_one(name: str, folder: str, rounds: int) -> dict[str, Any]:
    scenario = SCENARIOS[name]
    said = Said()
    logging.getLogger("graphprobe").addHandler(said)
    graphprobe.instrument("vllm")
    oracle = Oracle()
    began = time.perf_counter()
    llm = engine(folder, scenario)
    started = time.perf_counter() - began
    before = list(said.lines)
    oracle.watch()
    found = {"start_seconds": started, "said at the start": before, **counts(llm, scenario["requests"], oracle)}
    if rounds and name in TIMED:
        Path(os.environ["READY"]).touch()
        while not Path(os.environ["GO"]).exists():
            time.sleep(0.2)
        found["us per step of each hook"] = own_cost(llm)
        found["throughput"] = throughput(llm, rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--one", action="store_true", help="in this process")
    given = parser.parse_args()
    names = given.scenario or list(SCENARIOS)
    if given.one:
        given.json.write_text(json.dumps(run_one(names[0], os.environ["MODEL"], given.rounds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = side_by_side(names, Path(folder), given.rounds)
    import torch
    import vllm

    head = {"vllm": vllm.__version__, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    head["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({**head, "scenarios": results}, indent=1) + "\n")
    for name in names:
        tell(name, results.get(name))


def side_by_side(names: list[str], root: Path, rounds: int) -> dict[str, Any]:
    """All start beside each other, since that takes most of the time; what is timed waits until it is alone."""
    models(root / "tiny")
    running = {name: launch(name, root, rounds) for name in names}
    timed = [name for name in names if name in TIMED]
    results = {name: result(name, running[name], root) for name in names if name not in TIMED}
    for name in timed:
        while running[name].poll() is None and not (root / f"{name}.ready").exists():
            time.sleep(0.2)
    for name in timed:
        (root / f"{name}.go").touch()
        results[name] = result(name, running[name], root)
    return results


def result(name: str, process: subprocess.Popen[bytes], root: Path) -> Any:
    """What a scenario found, None where it failed; then the end of its log is printed."""
    if process.wait(timeout=400) == 0:
        return json.loads((root / f"{name}.json").read_text())
    print(f"== {name} failed\n{(root / f'{name}.log').read_text()[-3000:]}")
    return None


def launch(name: str, root: Path, rounds: int) -> subprocess.Popen[bytes]:
    env = dict(os.environ, MODEL=str(root / "tiny"), VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    env |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "GRAPHPROBE_STRICT": "1"}
    env |= {"VLLM_USE_V2_MODEL_RUNNER": str(SCENARIOS[name]["v2"])}
    env |= {"READY": str(root / f"{name}.ready"), "GO": str(root / f"{name}.go")}
    if name not in TIMED:
        env["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(dir=root)
    command = [sys.executable, __file__, "--one", "--scenario", name, "--rounds", str(rounds)]
    with (root / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [*command, "--json", str(root / f"{name}.json")], env=env, stdout=log, stderr=subprocess.STDOUT
        )


def tell(name: str, found: dict[str, Any] | None) -> None:
    if found is None:
        return
    print(f"== {name}: started in {found['start_seconds']:.0f} s, hit rate {found['hit_rate']}")
    for part in ("rows", "drafter"):
        for row in found[part]:
            print("  ", part, *row)
    for key, value in found.items():
        if key not in ("rows", "drafter", "hooks", "throughput", "start_seconds", "hit_rate"):
            print("  ", key, value)
    print("   not bound", [hook for hook, bound in found["hooks"].items() if not bound])
    print("  ", {key: value for key, value in found.get("throughput", {}).items() if key != "ratios"})


if __name__ == "__main__":
    main()
