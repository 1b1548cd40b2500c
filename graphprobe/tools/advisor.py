"""The advisor: which buckets to capture, from the traffic that was really seen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from statistics import fmean

from graphprobe.buckets import Buckets, as_max_batch, as_size
from graphprobe.errors import ConfigError
from graphprobe.ledger import LEDGER
from graphprobe.tools import sources, speculative
from graphprobe.tools.advice import Advice
from graphprobe.tools.case import THRESHOLD, Question
from graphprobe.tools.engines import ENGINES, Rule, rule
from graphprobe.tools.judge import judge
from graphprobe.tools.steps import steps
from graphprobe.tools.traffic import traffic

PerGraph = float | Mapping[int, float] | None
"""What each graph takes: one figure, or one by size."""


def advise(
    source: sources.Source | sources.Reading = None,
    *,
    forward: str | None = None,
    phase: str | None = None,
    buckets: Iterable[int] | None = None,
    max_buckets: int | None = None,
    max_batch: int | None = None,
    max_seqs: int | None = None,
    spec_tokens: int = 0,
    pad: bool | None = None,
    engine: str | None = None,
    tensor_parallel: int = 1,
    largest: int | None = None,
    times: Mapping[int, float] | None = None,
    eager_times: Mapping[int, float] | None = None,
    threshold: float = THRESHOLD,
    graph_bytes: PerGraph = None,
    capture_seconds: PerGraph = None,
    max_bytes: float | None = None,
    max_capture_seconds: float | None = None,
    calls_per_start: float | None = None,
    gib_worth: float | None = None,
    window: float | None = None,
    end: float | None = None,
    match: str = "",
    timeout: float = 5.0,
) -> Advice:
    """Which buckets to capture for the traffic of ``source``, and whether that is worth a change.

    ``source``: None for this process, else what ``graphprobe advise`` reads (see ``tools.sources.reading``, which takes
    ``window``, ``end``, ``match`` and ``timeout``). ``forward`` and ``phase`` name what of it is meant.

    Today's list is read from the source, unless ``buckets`` gives it; ``pad`` is whether a larger bucket serves a batch
    (None: as seen, else as the engine does). ``times`` and ``eager_times`` are seconds by size, linear between sizes;
    None: as measured, else modelled, which ``notes`` say. ``graph_bytes`` and ``capture_seconds`` are what a graph
    takes, one figure or by size.

    The proposal has at most ``max_buckets`` graphs (None: the fewest within 0.5 % of the best of 64), ``max_bytes``
    bytes and ``max_capture_seconds``; it covers ``max_batch``, or ``max_seqs`` requests of ``1 + spec_tokens`` tokens,
    or else the largest size seen. ``calls_per_start`` prices capture seconds, as calls served between two starts;
    ``gib_worth`` prices memory, as the share of the time that a GiB is worth. ``engine``, ``tensor_parallel`` and
    ``largest`` are the rule of ``tools.engines.rule``.

    ConfigError for what contradicts itself, SourceError where there is nothing to judge.
    """
    reading = source if isinstance(source, sources.Reading) else _read(source, window, end, match, timeout)
    seen = traffic(reading, forward, phase)
    kind = engine or _engine(seen.forward)
    told = None if pad is None and seen.pads is None else (pad if pad is not None else seen.pads)
    limits = rule(kind, spec_tokens=spec_tokens, tensor_parallel=tensor_parallel, largest=largest, pad=told)
    question = Question(
        rule=limits,
        today=Buckets(buckets).sizes if buckets is not None else seen.buckets,
        bytes=_per_graph(graph_bytes, "graph_bytes", seen.graph_bytes),
        capture_seconds=_per_graph(capture_seconds, "capture_seconds", seen.capture_seconds),
        max_buckets=None if max_buckets is None else as_size(max_buckets, "max_buckets"),
        max_batch=_declared(limits, max_batch, max_seqs, spec_tokens),
        threshold=_share(threshold, "threshold"),
        max_bytes=_positive(max_bytes, "max_bytes"),
        max_capture_seconds=_positive(max_capture_seconds, "max_capture_seconds"),
        calls_per_start=_positive(calls_per_start, "calls_per_start"),
        gib_worth=_positive(gib_worth, "gib_worth"),
    )
    found = judge(seen, question, steps(seen.graph, seen.eager, times, eager_times))
    if max_seqs is None or not question.today:
        return found
    ahead = speculative.check(question.today, max_seqs, spec_tokens, kind, told, tensor_parallel, largest)
    return dataclasses.replace(found, warnings=(*ahead.warnings, *found.warnings))


def _read(
    source: sources.Source, window: float | None, end: float | None, match: str, timeout: float
) -> sources.Reading:
    if source is None and window is None:
        return sources.Reading(LEDGER.snapshot())
    return sources.reading(source, window=window, end=end, match=match, timeout=timeout)


def _engine(forward: str) -> str:
    first = forward.split(".")[0]
    return first if first in ENGINES else "graphprobe"


def _declared(limits: Rule, max_batch: int | None, max_seqs: int | None, spec_tokens: int) -> int | None:
    """The largest batch that was declared, in the unit of the buckets."""
    most = None if max_batch is None else as_max_batch(max_batch)
    if max_seqs is None:
        return most
    each = 1 if limits.unit == "requests" else 1 + spec_tokens
    widest = as_max_batch(as_size(max_seqs, "max_seqs") * each)
    if most is not None and most < widest:
        what = f"max_batch {most} is below {max_seqs} requests of {each} {limits.unit}, {widest}"
        raise ConfigError(what, "leave one of them out")
    return max(widest, most or 0)


def _share(value: float, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(f"{name} must be a share from 0 to 1, got {value!r}", "0.02 is two percent")
    return float(value)


def _positive(value: float | None, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def _per_graph(given: PerGraph, name: str, measured: Mapping[int, float]) -> Mapping[int, float]:
    """What a graph takes by size; under 0 what one of any other size does. Empty: nothing is known."""
    known = measured if given is None else given if isinstance(given, Mapping) else {0: given}
    for size, value in known.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be numbers from 0 on, got {value!r} for size {size}")
    if not known or 0 in known:
        return known
    # A shared pool grows with its first graph, the largest; one more graph takes what the others did.
    others = [value for size, value in known.items() if size < max(known)] or list(known.values())
    return {**known, 0: fmean(others)}
