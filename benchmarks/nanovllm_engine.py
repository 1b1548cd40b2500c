"""nano-vllm on one GPU, observed: counts against its own replays, tokens/s with and without, and its capture replaced.

    python benchmarks/nanovllm_engine.py CHECKOUT --json docs/gpu/nanovllm.json

CHECKOUT is a clone of nano-vllm (tested: bb823b3). Each scenario is an engine in a process of its own, one after the
other, since nano-vllm's port is fixed; a tiny Qwen3 with made-up weights, so that the host is the bottleneck, which is
the worst case for an observer. torch's attention stands for ``flash_attn``. With ``--cpu`` no GPU is needed: then the
counts and the answers mean something, the times nothing. What an H200 gave is docs/gpu.md, "nano-vllm".
"""

from __future__ import annotations

import argparse
import collections
import hashlib
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
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / name) for name in ("", "integrations", "tests/engines", "docs/examples")]

import graphprobe  # noqa: E402

ROUNDS = (16, 16, 17, 18, 19, 20, 20, 3)
"""Requests of each round; request i ends after 6 + 4 i tokens, so the batch falls from all of them to one."""

SCENARIOS: dict[str, dict[str, Any]] = {
    "16": {"most": 16, "speed": True},
    "20": {"most": 20},
    "12": {"most": 12},
    "20 eager": {"most": 20, "eager": True},
    "16 plain": {"most": 16, "plain": True},
    "16 captured": {"most": 16, "migrated": True},
    "20 captured": {"most": 20, "migrated": True},
}

EXPECTED = {"16": (585, 0, 0, 13), "20": (143, 0, 5, 8), "12": (13, 0, 7, 15), "20 eager": (0, 524, 0, 8)}
"""Decodes by graph, eager decodes, StopIterations, prefills."""


class Said(logging.Handler):
    """What graphprobe logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def prepare(checkout: str, cpu: bool) -> None:
    """Make nano-vllm importable, with torch's attention for flash_attn's."""
    import flash_attn_sdpa

    sys.path.insert(0, checkout)
    sys.modules["flash_attn"] = flash_attn_sdpa
    if cpu:
        os.environ["GRAPHPROBE_BACKEND"] = "recorder"
        import cpu_cuda

        cpu_cuda.install()
        with cpu_cuda.standing_in("triton", "triton.language"):
            import nanovllm.layers.attention as attention
        attention.store_kvcache = cpu_cuda.store_kvcache


def launches() -> list[int]:
    """An independent count of replays, below ours."""
    import torch

    seen, replay = [0], torch.cuda.CUDAGraph.replay

    def replayed(graph: Any) -> Any:
        seen[0] += 1
        return replay(graph)

    torch.cuda.CUDAGraph.replay = replayed  # type: ignore[method-assign]
    return seen


def engine(folder: str, most: int, eager: bool, cpu: bool) -> Any:
    from nanovllm import LLM

    return LLM(
        folder,
        max_num_seqs=most,
        max_model_len=512,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.5 if cpu else 0.05,
        enforce_eager=eager,
    )


def generate(llm: Any, limits: list[int], seed: int) -> list[list[int]] | str:
    """Answers to as many requests as limits; the name of what was raised, after which the engine is made empty."""
    import torch
    from nanovllm import SamplingParams

    torch.manual_seed(seed)
    prompts = [[(7 * i + k) % 250 for k in range(4)] for i in range(len(limits))]
    params = [SamplingParams(temperature=1e-4, max_tokens=n, ignore_eos=True) for n in limits]
    try:
        return [list(found["token_ids"]) for found in llm.generate(prompts, params, use_tqdm=False)]
    except StopIteration as error:
        for sequence in llm.scheduler.running:
            llm.scheduler.block_manager.deallocate(sequence)
        llm.scheduler.running.clear()
        return type(error).__name__


def run_one(name: str, options: argparse.Namespace) -> dict[str, Any]:
    scenario, said, cpu = SCENARIOS[name], Said(), options.cpu
    logging.getLogger("graphprobe").addHandler(said)
    logging.getLogger("graphprobe").setLevel(logging.INFO)
    prepare(options.checkout, cpu)
    seen = launches()
    migrated, plain = scenario.get("migrated", False), scenario.get("plain", False)
    if migrated:
        import nanovllm_capture  # noqa: F401
    elif not plain:
        graphprobe.instrument("nanovllm")
    began = time.perf_counter()
    llm = engine(options.folder, scenario["most"], scenario.get("eager", False), cpu)
    start, before = time.perf_counter() - began, seen[0]
    answers = [generate(llm, [6 + 4 * i for i in range(n)], seed) for seed, n in enumerate(ROUNDS)]
    found: dict[str, Any] = {
        "start_seconds": start,
        "replays": seen[0] - before,
        "raised": sum(isinstance(answer, str) for answer in answers),
        "digests": [hashlib.sha256(repr(answer).encode()).hexdigest()[:12] for answer in answers],
        "said": said.lines,
        "machine": machine(options.checkout, cpu),
    }
    if not plain:
        found |= counted("nanovllm.decode" if migrated else "nanovllm")
    if scenario.get("speed") and not options.quick:
        import nanovllm_speed

        found |= nanovllm_speed.measure(llm, cpu)
    return found


def machine(checkout: str, cpu: bool) -> dict[str, str]:
    """Where and with what this runs; asked in the engine's process, which has the device anyway."""
    import torch

    asked = ["git", "-C", checkout, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    told = {"nano-vllm": commit, "torch": torch.__version__, "python": sys.version.split()[0]}
    return told | {"device": "cpu" if cpu else torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}


def counted(name: str) -> dict[str, Any]:
    """What graphprobe counted."""
    snapshot = graphprobe.snapshot()
    forward = snapshot.forwards[name]
    calls = collections.Counter[str]()
    for row in forward.rows:
        calls[f"{row.phase} {row.path}"] += row.calls
    fields = ("capture_seconds", "pool_growth", "pool_bytes", "kv_capacity_tokens", "uncovered", "buckets", "causes")
    return {
        "calls": dict(calls),
        "hit_rate": forward.hit_rate,
        "rows": [
            [row.phase, row.path, row.batch_size, row.bucket, str(row.reason or ""), row.calls] for row in forward.rows
        ],
        "ms": {
            " ".join(map(str, key)): [each.count, 1e3 * each.sum / each.count] for key, each in forward.times.items()
        },
        **{field: getattr(forward, field) for field in fields},
        "unmatched": getattr(forward, "unmatched", None),
        "hooks": {hook: bound for (_, hook), bound in snapshot.hooks.items()},
        "internal_errors": dict(snapshot.internal_errors),
        "replays_seen": snapshot.replays_seen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", choices=SCENARIOS, action="append")
    parser.add_argument("--quick", action="store_true", help="counts only, no tokens/s")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.one, options)))
        sys.stdout.flush()
        os._exit(0)  # nano-vllm's own end waits for a process group that we do not need
    results: dict[str, dict[str, Any]] = {"machine": {}}
    with tempfile.TemporaryDirectory() as folder:
        import model

        model.write(Path(folder))
        for name in options.only or SCENARIOS:
            results[name] = scenario(name, folder, options)
            results["machine"] = results[name].pop("machine", results["machine"])
            show(name, results[name])
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    judge(results)


def scenario(name: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, options.checkout, "--one", name, "--folder", folder]
    command += [f"--{name}" for name in ("cpu", "quick") if getattr(options, name)]
    limit = 600 if options.cpu else 120
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        return {"error": str(error)}
    last = ended.stdout.strip().splitlines()[-1:]
    if ended.returncode or not last:
        return {"error": ended.stderr[-3000:]}
    found: dict[str, Any] = json.loads(last[0])
    return found


def show(name: str, found: dict[str, Any]) -> None:
    print(f"== max_num_seqs {name}")
    for key in ("error", "calls", "replays", "raised", "hit_rate", "start_seconds", "capture_seconds", "pool_bytes"):
        if key in found:
            print(f"   {key}: {found[key]}")
    for key in ("uncovered", "ms", "unmatched", "internal_errors", "observed", "own_us", "captured", "lines", "said"):
        if key in found:
            print(f"   {key}: {found[key]}")


def judge(results: dict[str, dict[str, Any]]) -> None:
    """What must hold, or what does not."""
    for name, expected in EXPECTED.items():
        if name in results and "calls" in results[name]:
            found, calls = results[name], collections.Counter(results[name]["calls"])
            have = (calls["decode graph"], calls["decode eager"], found["raised"], calls["prefill eager"])
            print(f"{name}: counts {have}, expected {expected}: {'ok' if have == expected else 'WRONG'}")
            print(f"{name}: replays {found['replays']}: {'ok' if found['replays'] == have[0] else 'WRONG'}")
    for one, other in (("16", "16 plain"), ("16", "16 captured")):
        if "digests" in results.get(one, {}) and "digests" in results.get(other, {}):
            same = results[one]["digests"] == results[other]["digests"]
            print(f"answers of {one} and {other}: {'identical' if same else 'DIFFERENT'}")
    if "20 captured" in results:
        print(f"20 captured: raised {results['20 captured'].get('raised')}")


if __name__ == "__main__":
    main()
