"""The part of docs/gpu.md on vLLM, from docs/gpu/vllm.json and docs/gpu/vllm_memory.json."""

from __future__ import annotations

from page_tables import Row, cost, load, steps, table


def vllm() -> str:
    """The whole section."""
    found = load("vllm")
    return f"""## vLLM

`python benchmarks/vllm_engine.py`: vLLM {found["vllm"]}, torch {found["torch"]}, {found["date"]}.
Both model runners, a Qwen3 (with eagle: a Llama) of two layers with made-up weights, capture sizes 1, 2, 4, 8, 16; 16
requests that end one after another, 8 with 3 speculative tokens; two rounds.
Held against what vLLM's scheduler gave out (sizes), and against a count of `torch.cuda.CUDAGraph.replay`: one for a
step in a full graph, and more for pieces and drafters. Served: calls as prometheus_client reads them in the directory.
Speed: a steady batch of 16 in blocks of 16 steps, by turns with and without the hooks. With two layers the host is all
that counts, which is the worst case. What is ours per step is measured around each hook, inside the engine.
The engines started beside each other, so that bytes of graphs, which vLLM takes from the device's free memory, say
nothing there; in [gpu/vllm_memory.json](gpu/vllm_memory.json) each was alone.

{counted()}

{memory()}"""


def counted() -> str:
    """What vLLM did in each scenario, as counted, and what counting it costs."""
    scenarios = load("vllm")["scenarios"]
    body: list[Row] = [
        [name, *line]
        for name, found in scenarios.items()
        for line in [*steps("", found["rows"]), *steps("drafter ", found["drafter"])]
    ]
    counted = table(["engine", "phase", "path", "tokens (-> bucket): calls"], body)
    checks: list[Row] = [
        [
            name,
            found["steps"],
            "equal" if found["sizes as scheduled"] else "different",
            found["full graph calls"],
            found["replays"],
            "-" if found["served"] is None else f"{sum(found['served'].values()):.0f}",
            next(iter(found["uncovered"].values()), "-"),
        ]
        for name, found in scenarios.items()
    ]
    head = ["engine", "steps", "sizes", "in full graphs", "replays", "served", "uncovered sizes"]
    said = sorted(
        {line for found in scenarios.values() for line in found["said at the start"] if "decode steps" in line}
    )
    warned = "\n".join(f"```text\n{line}\n```" for line in said)
    return f"{counted}\n\n{table(head, checks)}\n\nSaid before the first request:\n\n{warned}\n\n{cost(scenarios)}"


def memory() -> str:
    """What captures cost each runner, by the engine itself and by bucket."""
    body: list[Row] = []
    for name, found in load("vllm_memory")["scenarios"].items():
        estimate = found["pool_estimate_bytes"]
        buckets = sorted(found["pool_growth"], key=int, reverse=True)
        parts = [
            f"{n}: {found['capture_seconds'][n]:.2f} s, {found['pool_growth'][n] / 2**20:.0f} MiB" for n in buckets
        ]
        told = f"{estimate / 2**20:.0f}" if estimate else "none"
        body.append(
            [name, f"{found['pool_bytes'] / 2**20:.0f}", told, f"{found['kv_capacity_tokens']:,}", "; ".join(parts)]
        )
    head = [
        "engine",
        "graphs, MiB",
        "its estimate, MiB",
        "KV capacity, tokens",
        "by bucket (both modes, warm-up included)",
    ]
    return table(head, body)
