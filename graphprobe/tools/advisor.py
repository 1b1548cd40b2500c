"""The advisor: which buckets to capture, from the traffic that was really seen."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from functools import partial

from graphprobe.buckets import MAX_BUCKETS, Buckets, as_max_batch, as_size
from graphprobe.errors import ConfigError
from graphprobe.ledger import LEDGER
from graphprobe.snapshot import Snapshot
from graphprobe.tools import sources, speculative, use
from graphprobe.tools.advice import Advice
from graphprobe.tools.case import THRESHOLD, Question
from graphprobe.tools.engines import ENGINE, Rule, rule
from graphprobe.tools.judge import judge
from graphprobe.tools.steps import steps
from graphprobe.tools.traffic import Traffic, traffic
from graphprobe.tools.use import PerGraph, number


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

    Today's list is read from the source, unless ``buckets`` gives what the engine was told; ``pad`` is whether a larger
    bucket serves a batch (None: as seen, else as the engine does). ``times`` and ``eager_times`` are seconds by size,
    linear between sizes; None: as measured, else modelled. ``graph_bytes`` and ``capture_seconds`` are what a graph
    takes, one figure or by size, where 0 stands for any other size; None: as measured. ``notes`` say which is which.

    The proposal has at most ``max_buckets`` graphs (None: the fewest within 0.5 % of the best of 64, and below 10,000
    calls of exact dispatch those of today's list), ``max_bytes`` bytes and ``max_capture_seconds``; it covers
    ``max_batch``, or ``max_seqs`` requests of ``1 + spec_tokens`` tokens, or else the largest size seen. Where an
    engine counts tokens, larger steps are left out, as they hold prompts, unless ``max_batch`` is given.
    ``spec_tokens`` 0 is what vLLM's own page says, where steps of phase verify were seen. ``calls_per_start`` prices
    capture seconds, as calls served between two starts; ``gib_worth`` prices memory, as the share of the time that a
    GiB is worth. ``engine``, ``tensor_parallel`` and ``largest`` are the rule of ``tools.engines.rule``.

    ConfigError for what contradicts itself, SourceError where there is nothing to judge.
    """
    reading = source if isinstance(source, sources.Reading) else _read(source, window, end, match, timeout)
    seen = traffic(reading, forward, phase)
    kind = _engine(seen.forward) if engine is None else engine
    spec_tokens, drafts = _drafts(seen, kind, spec_tokens, reading.spec_tokens)
    told = seen.pads if pad is None and _may_choose(kind) else pad
    bounded = partial(rule, kind, spec_tokens=spec_tokens, tensor_parallel=tensor_parallel, pad=told)
    limits = bounded(largest=largest)
    declared = _declared(limits, max_batch, max_seqs, spec_tokens)
    if limits.above == "always":
        limits = bounded(largest=_one_limit(kind, limits.largest, declared))
    given = None if buckets is None else Buckets(buckets).sizes
    today = _today(limits, given, seen.buckets)
    if max_batch is None and reading.kind != "simulated":
        seen = _decode_steps(seen, limits, today, declared)
    question = Question(
        rule=limits,
        today=today,
        bytes=use.of_memory(graph_bytes, seen.graph_bytes),
        capture_seconds=use.of_captures(capture_seconds, seen.capture_seconds),
        max_buckets=None if max_buckets is None else min(as_size(max_buckets, "max_buckets"), MAX_BUCKETS),
        max_batch=declared,
        threshold=_share(threshold),
        max_bytes=_limit(max_bytes, "max_bytes"),
        max_capture_seconds=_limit(max_capture_seconds, "max_capture_seconds"),
        calls_per_start=_limit(calls_per_start, "calls_per_start", least=1),
        gib_worth=_limit(gib_worth, "gib_worth"),
        assumed=told is None and _may_choose(kind),
    )
    found = judge(seen, question, steps(seen.graph, seen.eager, times, eager_times))
    ahead: list[str] = []
    if max_seqs is not None and (checked := given or today):
        ahead = _ahead(speculative.check(checked, max_seqs, spec_tokens, kind, told, tensor_parallel, largest))
    elif given is not None and given != today:
        ahead = [f"of today's list {kind} makes graphs of {speculative.spans(today)}: {'; '.join(limits.why)}"]
    return dataclasses.replace(found, notes=(*drafts, *found.notes), warnings=(*ahead, *found.warnings))


def _ahead(coverage: speculative.Coverage) -> list[str]:
    """What can be said before traffic, but for the line to paste, which traffic knows better."""
    own = coverage.line.splitlines()[:1]
    return [text for text in coverage.warnings if not own or own[0] not in text]


def _read(
    source: sources.Source, window: float | None, end: float | None, match: str, timeout: float
) -> sources.Reading:
    if source is not None and not isinstance(source, (str, os.PathLike, Snapshot)):
        raise ConfigError(f"source must be an address, a file or a snapshot, got {source!r}")
    if source is None and window is None and end is None and not match:
        return sources.Reading(LEDGER.snapshot())
    return sources.reading(source, window=window, end=end, match=match, timeout=timeout)


OWN_RULE = {
    "nanovllm": "its sizes follow max_num_seqs; engine='graphprobe' is about a capture in its place (docs/migrate.md)",
    "minisgl": "engine='sglang' pads as it does, and cuda_graph_bs=[...] of its configuration takes such a list",
}
"""Engines that are observed, and whose capture is not known here."""


def _engine(forward: str) -> str:
    first = forward.split(".")[0]
    if first in OWN_RULE:
        raise ConfigError(f"how {first} captures is not known here", OWN_RULE[first])
    return first if first in ENGINE else "graphprobe"


def _drafts(seen: Traffic, kind: str, given: int, told: int) -> tuple[int, list[str]]:
    """The speculative tokens of a request, and what there is to say of them where they were not given."""
    given_none = type(given) is int and given == 0
    if kind != "vllm" or not given_none or not any(row.phase == "verify" for row in seen.rows):
        return given, []
    if not told:
        return 0, ["there are steps with speculative tokens, and the source does not say how many: give spec_tokens"]
    return told, [f"vLLM drafts {told} tokens ahead, so sizes are multiples of 1 + {told}"]


def _may_choose(engine: str) -> bool:
    return not isinstance(engine, str) or engine not in ENGINE or ENGINE[engine].may_choose


def _today(limits: Rule, given: tuple[int, ...] | None, captured: tuple[int, ...]) -> tuple[int, ...]:
    """The graphs that the engine makes of the list it is given, or those that the source says it made."""
    if given is None:
        return limits.resolve(captured) or captured
    if not (made := limits.resolve(given)):
        raise ConfigError(f"{limits.engine} captures nothing of buckets {list(given)}", "; ".join(limits.why))
    return made


def _decode_steps(seen: Traffic, limits: Rule, today: tuple[int, ...], declared: int | None) -> Traffic:
    """Without what can be no decode step, where an engine counts tokens: those steps have prompts in them."""
    if limits.unit != "tokens":
        return seen
    if declared is not None:
        return seen.up_to(declared, f"no decode step has more than {declared:,}, so these hold prompts")
    most = max([ENGINE[limits.engine].ceiling, *today])
    return seen.up_to(most, "they are taken for steps with prompts; where they are none, declare max_seqs")


def _one_limit(kind: str, largest: int | None, declared: int | None) -> int | None:
    """The limit of an engine that captures it whatever it is told: its largest batch."""
    if largest is not None and declared is not None and largest != declared:
        what = f"{kind} captures its limit, the largest batch that it takes; {largest} and {declared} are two"
        raise ConfigError(what, "leave one of them out")
    return declared if largest is None else largest


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


def _share(threshold: float) -> float:
    share = number(threshold)
    if not 0 <= share < 1:
        raise ConfigError(f"threshold must be a share from 0 to 1, got {threshold!r}", "0.02 is two percent")
    return share


def _limit(value: float | None, name: str, least: float = 0.0) -> float | None:
    if value is None:
        return None
    found = number(value)
    if not found > 0 or found < least:
        raise ConfigError(f"{name} must be a number {f'from {least:g} on' if least else 'above 0'}, got {value!r}")
    return found
