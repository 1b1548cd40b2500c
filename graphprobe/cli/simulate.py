"""``advise --simulate``: the day that a trace and the options describe, and the proposal tried on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphprobe.buckets import as_size
from graphprobe.errors import ConfigError
from graphprobe.tools.advice import Advice
from graphprobe.tools.advisor import advise
from graphprobe.tools.arrivals import arrivals
from graphprobe.tools.engines import Rule, defaults, rule
from graphprobe.tools.rehearsal import Day, Rehearsal, rehearse, tried_on
from graphprobe.tools.sources import Reading
from graphprobe.tools.steps import steps
from graphprobe.tools.times import Curve
from graphprobe.tools.traffic import traffic

MAX_BATCH = 256
"""Requests that run at a time where nothing is said: what vLLM and SGLang take on large cards at least."""


def simulated(
    trace: str,
    speed: float,
    reading: Reading | None,
    asked: Mapping[str, Any],
    prefill: Mapping[int, float],
    timeout: float = 5.0,
) -> Rehearsal:
    """Advice on ``reading``, or on the trace itself where that is None, tried on the trace.

    ``asked`` are the keywords of ``graphprobe.advise``, ``prefill`` seconds by tokens (empty: prefills take no time),
    ``timeout`` seconds for an answer where ``trace`` is an address.
    """
    requests = arrivals(trace, speed=speed, timeout=timeout)
    curve = Curve(prefill).rising() if prefill else None
    times, eager = asked["times"], asked["eager_times"]
    if reading is None:
        bound = _rule(asked)
        width, most = _widths(bound.engine, asked)
        today = bound.resolve(asked["buckets"] or _own(bound.engine, most, asked["spec_tokens"]))
        day = Day(requests, steps({}, {}, times, eager), bound.pads, most, width, curve)
        return _noted(rehearse(day, today, lambda seen: advise(seen, **asked)), day, asked)
    found: Advice = advise(reading, **asked)
    seen = traffic(reading, asked["forward"], asked["phase"])
    width, most = _widths(found.engine, asked)
    day = Day(requests, steps(seen.graph, seen.eager, times, eager), found.pads, most, width, curve)
    return _noted(tried_on(day, found), day, asked)


def _rule(asked: Mapping[str, Any]) -> Rule:
    names = ("spec_tokens", "tensor_parallel", "largest", "pad")
    return rule("graphprobe" if asked["engine"] is None else asked["engine"], **{name: asked[name] for name in names})


def _widths(kind: str, asked: Mapping[str, Any]) -> tuple[int, int]:
    """Rows that a request sends per step, and how many requests run at a time."""
    width = 1 if rule(kind).unit == "requests" else 1 + asked["spec_tokens"]
    if asked["max_seqs"] is not None:
        return width, as_size(asked["max_seqs"], "max_seqs")
    rows = MAX_BATCH * width if asked["max_batch"] is None else as_size(asked["max_batch"], "max_batch")
    if rows < width:
        raise ConfigError(f"max_batch {rows} is below one request of {width} tokens", "raise it, or leave it out")
    return width, rows // width


def _own(kind: str, most: int, spec_tokens: int) -> tuple[int, ...]:
    """What the engine captures when told nothing; a decorated forward captures nothing then."""
    return () if kind == "graphprobe" else defaults(kind, most, spec_tokens=spec_tokens)


def _noted(found: Rehearsal, day: Day, asked: Mapping[str, Any]) -> Rehearsal:
    told = {
        "prompts take no time here: --steps with a part prefill gives them theirs": day.prefill is None,
        "each step gives a request one token here, as if no speculative one was accepted": asked["spec_tokens"] > 0,
    }
    return replace(found, notes=tuple(text for text, holds in told.items() if holds))
