"""What each engine may capture, as tables.

A size is in the unit of the engine's forward: tokens in vLLM, so that a step of n requests with k speculative tokens
has n * (1 + k) of them; requests in SGLang, TensorRT-LLM and LMDeploy, which capture the width of a request apart. Only
graphs of decode steps are meant; what vLLM captures piecewise for prefill is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from graphprobe.buckets import MAX_BUCKET, as_max_batch, as_size, decode_buckets
from graphprobe.errors import ConfigError

REFUSES = "it refuses to start"
Grid = tuple[tuple[int, int, int], ...]
"""Sizes as runs: first, last (inclusive) and step."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: what it does with sizes when told nothing else, and the release in which that was read ("": ours)."""

    read: str
    unit: str
    pads: bool
    may_choose: bool = True
    """Whether padding can be switched."""
    rounds: bool = False
    """Whether sizes are rounded up to whole requests."""
    aligned: str = ""
    """When sizes that the ranks do not divide are dropped."""
    above: str = "dropped"
    """Sizes above the limit: `dropped`, `joined` into one of it (`padded`: if it pads), which `always` exists."""
    grid: Grid = ()
    """Its own list."""
    ends: bool = True
    """Whether the limit is in its own list."""
    grid_spec: Grid = ()
    """The same under speculative decoding, where it is another one."""
    ceiling: int = MAX_BUCKET
    """The largest size that it captures when told nothing."""
    without: str = "all steps run eagerly"
    """What happens where nothing of a list is captured."""


# Read in: vLLM config/vllm.py, config/compilation.py, v1/worker/gpu/cudagraph_utils.py (ceiling 1024 on data-centre
# Blackwell); SGLang arg_groups/cuda_graph_hook.py, memory_hook.py (the ceiling is that of a card of 60 to 160 GB below
# 4-way tensor parallelism; others 8 to 512), model_executor/runner/base_cuda_graph_runner.py; TensorRT-LLM
# llmapi/llm_args.py, _torch/pyexecutor/model_engine.py; LMDeploy pytorch/config.py,
# pytorch/backends/cuda/graph_runner/runner.py.
ENGINE = {
    "graphprobe": Engine(read="", unit="rows", pads=False),
    "vllm": Engine(
        read="0.32.0",
        unit="tokens",
        pads=True,
        may_choose=False,
        rounds=True,
        aligned="sequence parallelism (before 0.32) drops sizes",
        grid=((1, 2, 1), (4, 4, 1), (8, 248, 8), (256, MAX_BUCKET, 16)),
        ceiling=512,
        without="all steps run eagerly, or it refuses to start (runner V1 with speculative tokens)",
    ),
    "sglang": Engine(
        read="0.5.23",
        unit="requests",
        pads=True,
        aligned="attention over several ranks with gathered buffers drops sizes",
        above="joined",
        grid=((1, 2, 1), (4, 12, 4), (16, 256, 8), (272, 496, 16), (512, MAX_BUCKET, 32)),
        grid_spec=((1, 8, 1), (10, 32, 2), (40, 64, 4), (72, 256, 8), (272, MAX_BUCKET, 16)),
        ceiling=256,
        without=REFUSES,
    ),
    "tensorrt-llm": Engine(
        read="1.4 (development)",
        unit="requests",
        pads=False,
        above="padded",
        grid=((1, 32, 1), (64, 128, 64)),
        ends=False,
        ceiling=128,
    ),
    "lmdeploy": Engine(
        read="0.18.0",
        unit="requests",
        pads=True,
        may_choose=False,
        above="always",
        grid=(*((1 << n, 1 << n, 1) for n in range(9)), (512, MAX_BUCKET, 256)),
        without=REFUSES,
    ),
}

ENGINES = tuple(ENGINE)
"""The names of the engines."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Which sizes an engine captures for decode steps, in its ``unit``, under one configuration.

    A size is used as it is if it is a multiple of ``multiple`` and at most ``largest`` (None: no limit). ``rounds`` is
    what the engine rounds sizes up to, ``divisor`` what must divide a size for it not to be dropped, ``above`` what
    becomes of sizes above the limit. ``why`` has a sentence for each restriction.
    """

    engine: str
    multiple: int = 1
    largest: int | None = None
    pads: bool = True
    unit: str = "rows"
    rounds: int = 1
    divisor: int = 1
    above: str = "dropped"
    why: tuple[str, ...] = ()

    def ceil(self, size: int) -> int | None:
        """The smallest allowed size that holds ``size``, or None above the limit."""
        found = _up(max(size, 1), self.multiple)
        return found if self.allows(found) else None

    def allows(self, size: int) -> bool:
        """Whether a graph of exactly this size is captured when asked for."""
        return size >= 1 and size % self.multiple == 0 and (self.largest is None or size <= self.largest)

    def resolve(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """What the engine makes of a list that it is given, ascending; empty where it captures nothing for decode."""
        given = {as_size(n, "a size") for n in sizes}
        kept = {n for n in given if n % self.divisor == 0}
        if self.rounds > 1:
            # The largest given size is the engine's limit, so one that rounding lifts above it is lost (where all are,
            # runner V1 takes one request).
            most = max(kept, default=0)
            kept = {n for n in (_up(n, self.rounds) for n in kept) if n <= most}
        if self.largest is None:
            return tuple(sorted(kept))
        within = {n for n in kept if n <= self.largest}
        if (self.above == "joined" and given and max(given) > self.largest) or (self.above == "always" and within):
            within |= {self.largest} if self.largest % self.divisor == 0 else set()
        return tuple(sorted(within))


def rule(
    engine: str,
    *,
    spec_tokens: int = 0,
    tensor_parallel: int = 1,
    largest: int | None = None,
    pad: bool | None = None,
) -> Rule:
    """The rule of ``engine``; ConfigError for one that is not known, and for padding that it cannot be told.

    ``largest`` is the engine's limit in its unit. ``tensor_parallel`` is the number of ranks that share the rows of a
    step (vLLM's sequence parallelism, SGLang's gathered buffers); plain tensor parallelism restricts nothing: leave 1.
    ``pad`` None is what the engine does when told nothing.
    """
    facts = _facts(engine)
    width = 1 + as_size(spec_tokens, "spec_tokens", least=0)
    ranks = as_size(tensor_parallel, "tensor_parallel")
    pads = _pads(engine, facts, pad)
    rounds, divisor = width if facts.rounds else 1, 1
    limit = None if largest is None else as_size(largest, "largest")
    if facts.aligned:
        divisor = ranks if facts.unit == "tokens" else ranks // math.gcd(ranks, width)
        limit = _up(limit, ranks) if limit is not None and facts.above == "joined" else limit
    why = {
        f"{engine} rounds sizes up to whole requests of {width} tokens, up to the largest": rounds > 1,
        f"{facts.aligned} that {ranks} ranks do not divide": divisor > 1,
        f"no decode graph has more than {limit} {facts.unit}": limit is not None,
    }
    reasons = tuple(text for text, holds in why.items() if holds)
    above = {"padded": "joined" if pads else "dropped"}.get(facts.above, facts.above)
    return Rule(engine, math.lcm(rounds, divisor), limit, pads, facts.unit, rounds, divisor, above, reasons)


def defaults(engine: str, max_batch: int, *, spec_tokens: int = 0) -> tuple[int, ...]:
    """The sizes of decode graphs that ``engine`` captures for up to ``max_batch`` requests when told nothing.

    graphprobe has no list of its own: what ``decode_buckets`` makes.
    """
    facts, requests = _facts(engine), as_max_batch(max_batch)
    width = 1 + as_size(spec_tokens, "spec_tokens", least=0)
    if not facts.grid:
        return tuple(decode_buckets(requests, spec_tokens))
    grid = facts.grid_spec if width > 1 and facts.grid_spec else facts.grid
    most = min(requests, facts.ceiling)
    own = {*_sizes(grid, most), *([most] if facts.ends else [])}
    if facts.unit == "tokens":
        # The same grid twice: counted in tokens, and in requests. What lies above, for prefill, is left out.
        top = min(requests * width, facts.ceiling)
        own = {*_sizes(grid, top), *(n * width for n in own if n * width <= top)}
    widest = requests * width if facts.unit == "tokens" else requests
    return rule(engine, spec_tokens=spec_tokens, largest=widest).resolve(own)


def _facts(engine: str) -> Engine:
    if not isinstance(engine, str) or engine not in ENGINE:
        raise ConfigError(f"unknown engine {engine!r}", f"use one of: {', '.join(ENGINES)}")
    return ENGINE[engine]


def _pads(engine: str, facts: Engine, pad: bool | None) -> bool:
    if pad is not None and not isinstance(pad, bool):
        raise ConfigError(f"pad must be True, False or None, got {pad!r}")
    if pad is False and not facts.may_choose:
        raise ConfigError(f"{engine} always pads, got pad=False", "leave pad out")
    return facts.pads if pad is None else pad


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _sizes(grid: Grid, most: int) -> list[int]:
    return [n for first, last, step in grid for n in range(first, min(last, most) + 1, step)]
