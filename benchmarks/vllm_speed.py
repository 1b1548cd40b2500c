"""What observing a vLLM engine costs: tokens/s with the hooks and without, and what each hook takes where it is.

Used by vllm_engine.py, in the process of the engine.
"""

from __future__ import annotations

import collections
import statistics
import tempfile
import threading
import time
from typing import Any

from clocks import Clocks, interval

import graphprobe
from graphprobe_vllm import HOOKS

BATCH, BLOCK, UNTIMED = 16, 16, 4
"""Requests, steps per block, and steps before each, of the comparison with and without the hooks."""


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


def own_cost(llm: Any) -> dict[str, float]:
    """Microseconds per step that each hook takes in the engine, less what the clocks take of it by themselves."""
    found: list[collections.Counter[str]] = []
    for ours in (True, False):
        clocks = Clocks((hook.name, hook.module, hook.attribute) for hook in HOOKS)
        graphprobe.uninstrument("vllm")
        clocks.put(clocks.inside)
        if ours:
            graphprobe.instrument("vllm")
        clocks.put(clocks.outside)
        begin_batch(llm.llm_engine, f"own{ours}")
        steps = 0
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            steps += 1
        found.append(clocks.spent(steps))
        clocks.take_off()
        graphprobe.uninstrument("vllm")
        clocks.take_off()
    graphprobe.instrument("vllm")
    mine, clock = found
    return {name: (mine[name] - clock[name]) / 1e3 for name in mine}


def collect(outputs: Any, found: dict[int, list[int]]) -> None:
    for each in outputs:
        if each.finished:
            found[int(each.request_id.split("-")[1])] = list(each.outputs[0].token_ids)
