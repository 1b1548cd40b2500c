"""vLLM on one GPU, observed: its counts held against its scheduler and its replays, and tokens/s with and without.

    python benchmarks/vllm_engine.py --json docs/gpu/vllm.json

Each scenario is an engine in a process of its own (in-process engine, tiny Qwen3 with made-up weights, so that the host
is the bottleneck, which is the worst case for an observer). Needs vLLM and a GPU.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "integrations"), str(HERE.parent / "tests" / "engines")]

import graphprobe  # noqa: E402
from graphprobe_vllm import HOOKS  # noqa: E402

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
BATCH, BLOCK, UNTIMED = 16, 16, 4
"""Requests, steps per block, and steps before each, of the comparison with and without the hooks."""


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


def engine(folder: str, scenario: dict[str, Any], alone: bool) -> Any:
    """The engine of a scenario; where several share the GPU, each takes a small cache instead of a share of memory."""
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
    if not alone:
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
        tokens = generate(llm, lengths, [8 + 6 * i for i in range(requests)])
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
        "tokens": tokens,
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


def throughput(llm: Any, rounds: int) -> dict[str, Any]:
    """Tokens/s of a steady batch in blocks of steps, by turns with the hooks and without them, in one generation.

    A block is so short that the host's speed is the same in its neighbour. The exporter writes every 2 s of time with
    the hooks, as it would by itself, and never without them.
    """
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        exporter = graphprobe.start_exporter(None, directory=folder, interval=86_400)
        writes = [0]
        outputs = [generation(llm, i, seconds, exporter, writes) for i in range(rounds)]
        exporter.close()
    graphprobe.uninstrument("vllm")
    plain = generation(llm, None, seconds, exporter, writes)
    graphprobe.instrument("vllm")
    pairs = list(zip(seconds["on"], seconds["off"], strict=True))
    ratios = sorted(off / on for on, off in pairs)
    more = sorted((on - off) / BLOCK for on, off in pairs)
    low, high = interval(len(pairs))
    return {
        "blocks": len(pairs),
        "writes of the exporter": writes[0],
        "steps per block": BLOCK,
        "batch": BATCH,
        "tokens/s on": BATCH * BLOCK * len(pairs) / sum(seconds["on"]),
        "tokens/s off": BATCH * BLOCK * len(pairs) / sum(seconds["off"]),
        "on / off": statistics.median(ratios),
        "on / off, 95 % interval of the median": [ratios[low], ratios[high]],
        "us per step more": 1e6 * statistics.median(more),
        "us per step more, 95 % interval of the median": [1e6 * more[low], 1e6 * more[high]],
        "us per step off": 1e6 * statistics.median(seconds["off"]) / BLOCK,
        "identical": all(found == plain for found in outputs),
    }


def generation(
    llm: Any, first: int | None, seconds: dict[str, list[float]], exporter: Any, writes: list[int]
) -> list[list[int]]:
    """One batch to its end; which blocks have the hooks goes by turns (on, off, off, on), None: none are toggled."""
    engine, found = llm.llm_engine, {}
    begin_batch(engine, str(first))
    steps, block = 0, 0
    while engine.has_unfinished_requests():
        if first is None or steps < 20 or steps + UNTIMED + BLOCK > 980:
            collect(engine.step(), found)
            steps += 1
            continue
        on = (block + block // 2 + first) % 2 == 0
        (graphprobe.instrument if on else graphprobe.uninstrument)("vllm")
        for _ in range(UNTIMED):
            collect(engine.step(), found)
        writers = [threading.Thread(target=exporter.flush)] if on and sum(seconds["on"]) >= 2 * writes[0] else []
        writes[0] += len(writers)
        began = time.perf_counter()
        for writer in writers:
            writer.start()
        for _ in range(BLOCK):
            collect(engine.step(), found)
        seconds["on" if on else "off"].append(time.perf_counter() - began)
        for writer in writers:
            writer.join()
        steps, block = steps + UNTIMED + BLOCK, block + 1
    return [found[i] for i in range(BATCH)]


def begin_batch(engine: Any, name: str) -> None:
    from vllm import SamplingParams

    for i in range(BATCH):
        prompt = {"prompt_token_ids": [(7 * i + k) % 250 for k in range(8)]}
        engine.add_request(f"{name}-{i}", prompt, SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True))


class Clocks:
    """Nanoseconds outside of each hook and inside, summed: the difference is what we take, where it is taken."""

    def __init__(self) -> None:
        self.outside: collections.Counter[str] = collections.Counter()
        self.inside: collections.Counter[str] = collections.Counter()
        self._put: list[tuple[Any, str, Any]] = []

    def put(self, sums: collections.Counter[str]) -> None:
        """A clock around what is now at the place of each hook."""
        for hook in HOOKS:
            parent = sys.modules.get(hook.module)
            *path, attribute = hook.attribute.split(".")
            for part in path:
                parent = getattr(parent, part, None)
            if parent is not None and attribute in vars(parent):
                self._put.append((parent, attribute, vars(parent)[attribute]))
                setattr(parent, attribute, clocked(vars(parent)[attribute], hook.name, sums))

    def take_off(self) -> None:
        while self._put:
            parent, attribute, original = self._put.pop()
            setattr(parent, attribute, original)


def clocked(function: Any, name: str, sums: collections.Counter[str]) -> Any:
    now = time.perf_counter_ns

    @functools.wraps(function)
    def clock(*args: Any, **kwargs: Any) -> Any:
        began = now()
        try:
            return function(*args, **kwargs)
        finally:
            sums[name] += now() - began

    return clock


def own_cost(llm: Any) -> dict[str, float]:
    """Microseconds per step that each hook takes in the engine, less what the clocks take of it by themselves."""
    found: list[collections.Counter[str]] = []
    for ours in (True, False):
        clocks = Clocks()
        graphprobe.uninstrument("vllm")
        clocks.put(clocks.inside)
        if ours:
            graphprobe.instrument("vllm")
        inner = list(clocks._put)
        clocks.put(clocks.outside)
        begin_batch(llm.llm_engine, f"own{ours}")
        steps = 0
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            steps += 1
        found.append(collections.Counter({n: (clocks.outside[n] - clocks.inside[n]) / steps for n in clocks.outside}))
        for parent, attribute, previous in reversed(clocks._put[len(inner) :]):
            setattr(parent, attribute, previous)
        graphprobe.uninstrument("vllm")
        clocks._put = inner
        clocks.take_off()
    graphprobe.instrument("vllm")
    mine, clock = found
    return {name: (mine[name] - clock[name]) / 1e3 for name in mine}


def collect(outputs: Any, found: dict[int, list[int]]) -> None:
    for each in outputs:
        if each.finished:
            found[int(each.request_id.split("-")[1])] = list(each.outputs[0].token_ids)


def interval(n: int) -> tuple[int, int]:
    """Which of n sorted values bound their median with at least 95 % (binomial order statistics)."""
    from math import comb

    low, mass = 0, 0.0
    while low < n // 2 and 2 * (mass + comb(n, low) / 2**n) <= 0.05:
        mass += comb(n, low) / 2**n
        low += 1
    low = max(0, low - 1)
    return low, n - 1 - low


def run_one(name: str, folder: str, rounds: int) -> dict[str, Any]:
    scenario = SCENARIOS[name]
    said = Said()
    logging.getLogger("graphprobe").addHandler(said)
    graphprobe.instrument("vllm")
    oracle = Oracle()
    began = time.perf_counter()
    llm = engine(folder, scenario, name in TIMED)
    started = time.perf_counter() - began
    before = list(said.lines)
    oracle.watch()
    found = {"start_seconds": started, "said at the start": before, **counts(llm, scenario["requests"], oracle)}
    if rounds and name in TIMED:
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
    """Scenarios that only count run beside each other; those whose speed is measured, alone and last."""
    models(root / "tiny")
    results: dict[str, Any] = {}
    groups = [[name for name in names if name not in TIMED], *([name] for name in names if name in TIMED)]
    for group in groups:
        running = {name: launch(name, root, rounds) for name in group}
        for name, process in running.items():
            if process.wait(timeout=400) == 0:
                results[name] = json.loads((root / f"{name}.json").read_text())
            else:
                print(f"== {name} failed\n{(root / f'{name}.log').read_text()[-3000:]}")
    return results


def launch(name: str, root: Path, rounds: int) -> subprocess.Popen[bytes]:
    env = dict(os.environ, MODEL=str(root / "tiny"), VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    env |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "GRAPHPROBE_STRICT": "1"}
    env |= {"VLLM_USE_V2_MODEL_RUNNER": str(SCENARIOS[name]["v2"])}
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
        if key not in ("rows", "drafter", "tokens", "hooks", "throughput", "start_seconds", "hit_rate"):
            print("  ", key, value)
    print("   not bound", [hook for hook, bound in found["hooks"].items() if not bound])
    print("  ", {key: value for key, value in found.get("throughput", {}).items() if key != "ratios"})


if __name__ == "__main__":
    main()
