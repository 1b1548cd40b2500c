"""SGLang on one GPU, observed: its counts held against its own and its log of replays, and tokens/s with and without.

    python benchmarks/sglang_engine.py --json docs/gpu/sglang.json

Each scenario is an engine in a process of its own: a Llama of eight layers with made-up weights, so that the host is
the bottleneck, which is the worst case for an observer. Twenty requests, of which one after another ends, three times.
Needs SGLang and a GPU; GRAPHPROBE_CPU=1 tries what a CPU can of it, with tests/engines/sglang_stubs on PYTHONPATH.

One engine is first, since it compiles what all need, then come those that are only counted, beside each other, and
what is timed is alone. What an H200 gave is docs/gpu.md, "SGLang".
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE), str(HERE.parent), str(HERE.parent / "integrations")]
sys.path[:0] = PATHS

CPU = bool(os.environ.get("GRAPHPROBE_CPU"))
SIZES = [1, 2, 4, 8, 16]
GRAPHS: dict[str, Any] = {"cuda_graph_bs_decode": SIZES, "disable_prefill_cuda_graph": True}
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2, "speculative_eagle_topk": 1}
EAGLE |= {"speculative_num_draft_tokens": 3, "speculative_draft_model_path": "draft"}
PREFILL = {"cuda_graph_bs_decode": SIZES, "cuda_graph_bs_prefill": [16, 32, 64, 128]}

SCENARIOS: dict[str, dict[str, Any]] = {
    "cold": {"options": GRAPHS},
    "graphs": {"options": GRAPHS},
    "nopad": {"options": {**GRAPHS, "disable_cuda_graph_padding": True}},
    "off": {"options": {"disable_cuda_graph": True}},
    "breakable": {"options": PREFILL, "prompts": [3, 20, 50, 100, 200]},
    "without": {"options": GRAPHS, "env": {"GRAPHPROBE": "0"}},
    "breakable without": {"options": PREFILL, "prompts": [3, 20, 50, 100, 200], "env": {"GRAPHPROBE": "0"}},
    "dedup": {"options": GRAPHS, "env": {"SGLANG_ENABLE_CUDA_GRAPH_DEDUP": "1"}},
    "eagle": {"options": {**GRAPHS, **EAGLE}},
    "quiet": {"options": GRAPHS, "quiet": True},
}
FIRST, ALONE = "cold", "quiet"

EXPECTED = {
    "cold": (292, 78, 0, 4),
    "graphs": (292, 78, 0, 4),
    "nopad": (94, 276, 0, 4),
    "off": (0, 370, 0, 4),
    "breakable": (302, 78, 6, 3),
    "dedup": (292, 78, 0, 4),
    "quiet": (292, 78, 0, 4),
}
"""Decode passes by graph and eager, and prefills likewise, as an earlier observer found them on 0.5.17."""

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "head_dim": 64,
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
REPLAYED = re.compile(r"Decode graph replay: worker=target key_size=(\d+) .*raw_bs=(\d+)")
PAGE = ("sglang:cuda_graph_passes_total", "sglang:graph_memory_usage_gb", "sglang:startup_cuda_graph_time_seconds")


def models(root: Path) -> Path:
    """The target, and a drafter of one layer."""
    for name, more in (("tiny", {}), ("draft", {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1})):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({**MODEL, **more}))
    return root / "tiny"


def plugins(root: Path) -> Path:
    """A folder that looks like an installation, for what SGLang looks for."""
    for name, entry in (("graphprobe", "graphprobe_sglang:load"), ("bench", "sglang_inside:load")):
        info = root / "plugins" / f"{name}-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {entry}\n")
    return root / "plugins"


def engine(folder: Path, scenario: dict[str, Any]) -> Any:
    """The engine of a scenario. Several share the GPU, so each has a small cache."""
    from sglang.srt.entrypoints.engine import Engine

    options = dict(scenario["options"])
    if "speculative_draft_model_path" in options:
        options["speculative_draft_model_path"] = str(folder.parent / "draft")
    device: dict[str, Any] = {"attention_backend": "triton", "disable_flashinfer_autotune": True}
    if CPU:
        device = {"attention_backend": "torch_native", "device": "cpu"}
        device |= {"enable_torch_compile": not options.get("disable_cuda_graph"), "torch_compile_max_bs": 16}
    place = list(SCENARIOS).index(os.environ["SCENARIO"])
    return Engine(
        model_path=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        dtype="bfloat16",
        mem_fraction_static=0.3,
        max_total_tokens=32768,
        max_running_requests=20,
        disable_radix_cache=True,
        enable_metrics=not scenario.get("quiet"),
        random_seed=0,
        log_level="info",
        port=30000 + 1000 * place,
        **device,
        **options,
    )


def generate(llm: Any, lengths: list[int], limits: list[int]) -> list[list[int]]:
    """What the model adds to prompts of these lengths, greedily, always so many tokens."""
    # The engine, which is a pass ahead, still has a place taken by the request that has just ended.
    time.sleep(0.3)
    prompts = [[(7 * i + k) % 250 + 3 for k in range(n)] for i, n in enumerate(lengths)]
    wanted = [{"max_new_tokens": n, "temperature": 0, "ignore_eos": True} for n in limits]
    return [list(found["output_ids"]) for found in llm.generate(input_ids=prompts, sampling_params=wanted)]


def work(llm: Any, scenario: dict[str, Any]) -> str:
    """Three rounds in which the batch falls from 20 to 1, and single requests; a digest of the tokens."""
    tokens = [generate(llm, [4] * 20, [8 + 6 * i for i in range(20)]) for _ in range(3)]
    digest = hashlib.sha256(json.dumps([tokens, generate(llm, [3], [4])]).encode()).hexdigest()[:12]
    for length in scenario.get("prompts", ()):
        tokens.append(generate(llm, [length], [2]))
    return f"{digest} {hashlib.sha256(json.dumps(tokens[3:]).encode()).hexdigest()[:6]}"


def page() -> list[tuple[str, dict[str, str], float]]:
    """Samples of the engine's page of metrics; waits until everything is written."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    time.sleep(3)
    files = MultiProcessCollector(CollectorRegistry(), os.environ["PROMETHEUS_MULTIPROC_DIR"])  # type: ignore[no-untyped-call]
    return [(one.name, one.labels, one.value) for family in files.collect() for one in family.samples]


def counted(samples: list[tuple[str, dict[str, str], float]]) -> dict[str, Any]:
    """SGLang's own count, and ours as the page has it."""
    ours: collections.Counter[str] = collections.Counter()
    for name, labels, number in samples:
        if name in ("graphprobe_graph_calls_total", "graphprobe_eager_calls_total"):
            ours[f"{labels['forward']} {name.split('_')[1]}"] += int(number)
    own = {f"{name[7:]} {labels.get('mode') or labels.get('phase')}": n for name, labels, n in samples if name in PAGE}
    series = sum(name.startswith("sglang:") for name, _, _ in samples)
    return {"own": own, "served": dict(ours), "sglang series": series}


def measure(llm: Any, rounds: int, tokens: int) -> dict[str, Any]:
    """Tokens/s by turns with and without the hooks, and what each hook takes."""
    from sglang_inside import ask
    from sglang_speed import BATCH

    def generation(what: str) -> list[list[int]]:
        asked = ask(what)
        assert asked is None, asked
        return generate(llm, [8] * BATCH, [tokens] * BATCH)

    outputs = [generation("blocks") for _ in range(rounds)]
    found = {"throughput": ask("speed")}
    plain = generation("plain")
    found["throughput"]["identical"] = all(output == plain for output in outputs)
    generation("clocks")
    ours = ask("own")
    generation("empty_clocks")
    empty = ask("own")
    found["us per step of each hook"] = {name: ours[name] - empty.get(name, 0.0) for name in ours}
    return found


def run_one(name: str, folder: Path, rounds: int, tokens: int) -> dict[str, Any]:
    from sglang_inside import ask

    scenario = SCENARIOS[name]
    began = time.perf_counter()
    llm = engine(folder, scenario)
    found: dict[str, Any] = {"start_seconds": time.perf_counter() - began}
    if not CPU and name != ALONE:
        ask("watch_replays")
    began = time.perf_counter()
    found["digest"] = work(llm, scenario)
    found["work_seconds"] = time.perf_counter() - began
    found |= ask("snapshot")
    if not scenario.get("quiet"):
        found |= counted(page())
    if rounds and name == ALONE:
        found |= measure(llm, rounds, tokens)
    llm.shutdown()
    return found


def launch(name: str, root: Path, rounds: tuple[int, int]) -> subprocess.Popen[bytes]:
    folder = root / name.replace(" ", "-")
    (folder / "metrics").mkdir(parents=True)
    env = dict(os.environ, SCENARIO=name, BENCH=str(folder), GRAPHPROBE="1", HF_HUB_OFFLINE="1")
    env["PYTHONPATH"] = os.pathsep.join([*PATHS, str(root / "plugins"), os.environ.get("PYTHONPATH", "")])
    if not SCENARIOS[name].get("quiet"):
        env |= {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics"), "SGLANG_LOG_DECODE_GRAPH_KEY": "1"}
    if name != ALONE:
        # A scenario is short: more of its passes are timed than by default.
        env["GRAPHPROBE_TIMING"] = "4"
    env |= SCENARIOS[name].get("env", {})
    command = [sys.executable, __file__, "--one", "--scenario", name, "--rounds", *map(str, rounds)]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [*command, "--json", str(folder / "found.json"), "--model", str(root / "tiny")],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def result(name: str, process: subprocess.Popen[bytes], root: Path) -> Any:
    """What a scenario found, None where it failed; then the end of its log is printed."""
    folder = root / name.replace(" ", "-")
    try:
        status = process.wait(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        status = None
    log = (folder / "log").read_text(errors="replace")
    if status != 0 or not (folder / "found.json").exists():
        print(f"== {name} failed: {status}\n{log[-3000:]}")
        return None
    replayed = collections.Counter((int(raw), int(key)) for key, raw in REPLAYED.findall(log))
    said = [line.split("] ", 1)[-1] for line in log.splitlines() if "graphprobe" in line or "] sglang" in line]
    told = {"replayed": [[*key, n] for key, n in sorted(replayed.items())], "said": said}
    return {**json.loads((folder / "found.json").read_text()), **told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    parser.add_argument("--rounds", type=int, nargs=2, default=(24, 1000), metavar=("ROUNDS", "TOKENS"))
    parser.add_argument("--beside", type=int, default=8, help="engines at once")
    parser.add_argument("--one", action="store_true", help="in this process")
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    names = given.scenario or list(SCENARIOS)
    if given.one:
        given.json.write_text(json.dumps(run_one(names[0], given.model, *given.rounds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = all_of(names, Path(folder), given.rounds, given.beside)
    from sglang_tell import head, tell

    told = {**head(), "scenarios": results}
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    tell(results, EXPECTED)


def all_of(names: list[str], root: Path, rounds: tuple[int, int], beside: int) -> dict[str, Any]:
    """First the one that compiles, then so many at once, and the one that is timed by itself."""
    models(root)
    plugins(root)
    others = [name for name in names if name not in (FIRST, "eagle", ALONE)]
    groups = [[FIRST], *(others[at : at + beside] for at in range(0, len(others), beside)), ["eagle"], [ALONE]]
    found: dict[str, Any] = {}
    for group in groups:
        running = {name: launch(name, root, rounds) for name in group if name in names}
        found |= {name: result(name, process, root) for name, process in running.items()}
    return found


if __name__ == "__main__":
    main()
