"""What observing nano-vllm costs, and what its capture by graphprobe.capture does: tokens/s by turns, in one process.

Used by nanovllm_engine.py, in the process of the engine.
"""

from __future__ import annotations

import collections
import functools
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from clocks import interval

import graphprobe

BATCH, BLOCK, UNTIMED = 16, 48, 16
"""Requests, steps per block, and steps before each.

After a class has got or lost a hook CPython looks its attributes up slowly for a while: that is what is not timed.
"""

Switch = dict[str, Callable[[], None]]


def measure(llm: Any, cpu: bool) -> dict[str, Any]:
    """The cost of the hooks, of all together and of each, and the engine's own graphs against ours."""
    steady = Steady(llm, *((1, 160) if cpu else (24, 496)))
    parts: dict[str, Callable[[], Any]] = {
        "observed": lambda: steady.turns({"on": on, "off": off}),
        "own_us": lambda: own_cost(steady),
        "captured": lambda: steady.turns(capturing(llm)),
        "lines": lines,
    }
    return {name: attempt(part) for name, part in parts.items()}


def attempt(part: Callable[[], Any]) -> Any:
    """What it returns; where it raises, that as text, so that the others are not lost."""
    try:
        return part()
    except Exception:
        return traceback.format_exc()[-3000:]


def on() -> None:
    graphprobe.instrument("nanovllm")


def off() -> None:
    graphprobe.uninstrument("nanovllm")


def capturing(llm: Any) -> Switch:
    """Both kinds of graphs in one engine: with ``enforce_eager`` it calls the model, which replays ours."""
    import nanovllm_capture

    runner, dtype = llm.model_runner, torch.get_default_dtype()
    # As nano-vllm captures while it starts.
    torch.set_default_dtype(runner.config.hf_config.dtype)
    torch.set_default_device("cuda")
    nanovllm_capture.capture_cudagraph(runner)
    torch.set_default_device("cpu")
    torch.set_default_dtype(dtype)

    def switch(ours: bool) -> None:
        runner.enforce_eager = ours

    return {"on": functools.partial(switch, True), "off": functools.partial(switch, False)}


class Steady:
    """A batch of constant size, which ends after ``limit`` tokens, again and again."""

    def __init__(self, llm: Any, rounds: int, limit: int) -> None:
        self.llm, self.rounds, self.limit = llm, rounds, limit
        self.answers: dict[int, Any] = {}

    def turns(self, switch: Switch) -> dict[str, Any]:
        """Tokens/s in blocks of steps, on and off by turns, so short that the host of two neighbours is the same."""
        seconds: dict[str, list[float]] = {"on": [], "off": []}
        answers = [self.switched(switch, seconds, turn) for turn in range(self.rounds)]
        switch["off"]()
        self.begin()
        while not self.llm.is_finished():
            self.step()
        pairs = list(zip(seconds["on"], seconds["off"], strict=False))
        ratios = sorted(before / after for after, before in pairs)
        more = sorted(1e6 * (after - before) / BLOCK for after, before in pairs)
        low, high = interval(len(pairs))
        return {
            "pairs of blocks": len(pairs),
            "steps per block": BLOCK,
            "tokens/s on": BATCH * BLOCK * len(pairs) / sum(after for after, _ in pairs),
            "tokens/s off": BATCH * BLOCK * len(pairs) / sum(before for _, before in pairs),
            "on / off": statistics.median(ratios),
            "on / off, 95 % interval of the median": [ratios[low], ratios[high]],
            "us per step more": statistics.median(more),
            "us per step more, 95 % interval of the median": [more[low], more[high]],
            "identical": all(answer == self.told() for answer in answers),
        }

    def switched(self, switch: Switch, seconds: dict[str, list[float]], turn: int) -> list[Any]:
        """One batch to its end, the answers; which blocks are on goes by turns (on, off, off, on)."""
        self.begin()
        for _ in range(20):
            self.step()
        blocks = (self.limit - 24) // (BLOCK + UNTIMED)
        for block in range(blocks - blocks % 2):
            which = "on" if (block + block // 2 + turn) % 2 == 0 else "off"
            switch[which]()
            for _ in range(UNTIMED):
                self.step()
            began = time.perf_counter()
            for _ in range(BLOCK):
                self.step()
            seconds[which].append(time.perf_counter() - began)
        while not self.llm.is_finished():
            self.step()
        return self.told()

    def begin(self) -> None:
        from nanovllm import SamplingParams

        torch.manual_seed(0)
        self.answers = {}
        for i in range(BATCH):
            params = SamplingParams(temperature=1e-4, max_tokens=self.limit, ignore_eos=True)
            self.llm.add_request([(7 * i + k) % 250 for k in range(4)], params)

    def step(self) -> None:
        self.answers.update(self.llm.step()[0])

    def told(self) -> list[Any]:
        """The answers in the order of their requests."""
        return [self.answers[name] for name in sorted(self.answers)]


def own_cost(steady: Steady) -> dict[str, dict[str, float]]:
    """Microseconds per step that each hook takes where it is, less what the clocks take by themselves.

    The mean has the steps that are timed in it, and those in which the host did something else.
    """
    from nanovllm.engine.model_runner import ModelRunner

    places = [(ModelRunner, "run"), (ModelRunner, "run_model"), (torch.cuda.CUDAGraph, "replay")]
    mine, clocks = (clocked(steady, places, ours) for ours in (True, False))
    return {
        how.__name__: {name: (how(mine[name]) - how(clocks[name])) / 1e3 for name in mine}
        for how in (statistics.median, statistics.fmean)
    }


def clocked(steady: Steady, places: list[tuple[Any, str]], ours: bool) -> dict[str, list[int]]:
    """Nanoseconds between the inner clock and the outer one, at each place in each step."""
    off()
    originals = [vars(parent)[name] for parent, name in places]
    inside, outside = (collections.defaultdict[str, list[int]](list) for _ in range(2))
    put(places, inside)
    if ours:
        on()
    observed = [vars(parent)[name] for parent, name in places]
    put(places, outside)
    steady.begin()
    while not steady.llm.is_finished():
        steady.step()
    # Layer by layer, as they were put on: what is not found in its place stays.
    restore(places, observed)
    off()
    restore(places, originals)
    return {name: [o - i for o, i in zip(outside[name], inside[name], strict=True)] for name in outside}


def put(places: list[tuple[Any, str]], spent: dict[str, list[int]]) -> None:
    """A clock around what is now at each place."""
    for parent, name in places:
        setattr(parent, name, clock(vars(parent)[name], name, spent))


def restore(places: list[tuple[Any, str]], functions: list[Any]) -> None:
    for (parent, name), function in zip(places, functions, strict=True):
        setattr(parent, name, function)


def clock(function: Any, name: str, spent: dict[str, list[int]]) -> Any:
    now = time.perf_counter_ns

    # As many arguments as torch's replay and nano-vllm's methods take: what lies upon it looks at them.
    if name == "replay":

        @functools.wraps(function)
        def replayed(graph: Any) -> Any:
            began = now()
            try:
                return function(graph)
            finally:
                spent[name].append(now() - began)

        return replayed

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = now()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name].append(now() - began)

    return timed


def lines() -> dict[str, int]:
    """Lines that are not blank, imports left out: nano-vllm's own capture and replay, and what stands for both."""
    import nanovllm_capture
    from nanovllm.engine import model_runner

    # Its two functions that have this decorator, of which the first one replays after its "else:".
    _, run, capture = Path(str(model_runner.__file__)).read_text().split("    @torch.inference_mode()\n")
    replay = run.split("        else:\n")[1].split("    def run(")[0]
    ours = Path(nanovllm_capture.__file__).read_text().split("import graphprobe\n")[1]
    counts = [sum(1 for line in text.splitlines() if line.strip()) for text in (capture, replay, ours)]
    return {"nano-vllm": counts[0] + counts[1] + 2, "captured": counts[2]}
