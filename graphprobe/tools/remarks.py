"""What else there is to know about a case: notes, and warnings."""

from __future__ import annotations

from collections.abc import Iterator

from graphprobe.buckets import Buckets
from graphprobe.reasons import FallbackReason
from graphprobe.tools.advice import Plan
from graphprobe.tools.candidates import MOST, pace
from graphprobe.tools.case import Case
from graphprobe.tools.optimum import Problem
from graphprobe.tools.paste import ON
from graphprobe.tools.speculative import spans
from graphprobe.tools.table import percent
from graphprobe.tools.use import Use

PADS = {"graphprobe": "pad=...", "tensorrt-llm": "enable_padding", "sglang": "no --disable-cuda-graph-padding"}
"""How padding is switched on."""

APART = 0.02
"""Difference between the hit rate that was seen and the one that today's list should give, from which it is told."""


def notes(case: Case, problem: Problem, now: Plan | None, best: Plan, gap: float) -> Iterator[str]:
    """What a reader of the answer should know; ``gap`` is that of the advice."""
    seen, top = case.seen, problem.candidates[-1]
    if gap > 0:
        yield f"within these limits another list may take less time, by {100 * gap:.2g} % at most: not all were tried"
    yield from _uses(case)
    yield from _beyond(case, top)
    if now is not None:
        yield from _today(case, now)
    if not case.pads:
        yield from _exactly(case, now or best, best)
    if seen.partly:
        share = percent(seen.partly / sum(seen.hits.values()))
        yield f"{share} of the graph calls were piecewise or breakable: only a part of those is a graph"
    if case.question.max_batch is None:
        yield f"no largest batch was declared: one above {top} would run eagerly"


def _uses(case: Case) -> Iterator[str]:
    """Where it is from what a graph takes."""
    question = case.question
    for name, use in (("graph memory", question.bytes), ("capture seconds", question.capture_seconds)):
        if use.known:
            yield f"{name} as {_measured(use) if use.measured else 'given'}"


def _measured(use: Use) -> str:
    if use.largest is None:
        return "measured, the mean of them for sizes that were not captured"
    least = f"{use.largest / 2**20:,.1f} MiB"
    return f"measured, by which the pool grew: the largest graph of any list is taken to need {least}, as today's did"


def _beyond(case: Case, top: int) -> Iterator[str]:
    """Where sizes lie outside those with a known time."""
    known, least = case.steps.graph.sizes, case.sizes[0]
    if least < known[0]:
        yield f"no graph below {known[0]} has a known time: smaller ones are taken to be no faster, which may be wrong"
    if top > known[-1]:
        yield f"no graph above {known[-1]} has a known time: the times of larger ones are a prolonged line"


def _today(case: Case, now: Plan) -> Iterator[str]:
    """How today's list did."""
    seen = case.seen
    idle = [n for n in now.buckets if not seen.hits.get(n)] if seen.hits else []
    if idle:
        yield f"captured and never replayed in {seen.total:,} calls: {spans(idle)}{_holds(case, now, idle)}"
    if seen.hit_rate is not None and abs(seen.hit_rate - now.hit_rate) > APART:
        yield f"the hit rate was {percent(seen.hit_rate)}; with all of today's list captured: {percent(now.hit_rate)}"


def _exactly(case: Case, plan: Plan, best: Plan) -> Iterator[str]:
    """What exact dispatch leaves to eager calls: ``plan`` is today's list or, where it is not known, the best one."""
    left = [n for n in case.sizes if n not in best.buckets and case.question.rule.allows(n)]
    if best.graphs >= MOST and left and case.question.max_buckets is None:
        eagerly = f"{len(left):,} other sizes that were seen run eagerly"
        yield f"no more than {MOST} graphs are proposed where no number is asked for: {eagerly} (see max_buckets)"
    if plan.hit_rate < 1 and (name := PADS.get(case.question.rule.engine)):
        padded = case.padded().plan(plan.buckets)
        gives = f"hit rate {percent(padded.hit_rate)}, {padded.seconds * 1e3:.4g} ms per call"
        yield f"{'the same list' if plan.graphs > 1 else 'the same bucket'} with padding ({name}): {gives}"


def _holds(case: Case, now: Plan, idle: list[int]) -> str:
    """What today's list takes more than it would without these graphs."""
    rest = [n for n in now.buckets if n not in idle]
    memory, capture = case.question.bytes, case.question.capture_seconds
    found = []
    if memory.known:
        found.append(f"{(memory.together(now.buckets) - memory.together(rest)) / 2**20:,.1f} MiB")
    if capture.known:
        found.append(f"{capture.together(now.buckets) - capture.together(rest):,.1f} s of start-up")
    return f" ({' and '.join(found)})" if found else ""


def warnings(case: Case, problem: Problem, now: Plan | None, best: Plan) -> Iterator[str]:
    """What costs time whatever is captured, and where a list is a trap."""
    seen, rule, top = case.seen, case.question.rule, problem.candidates[-1]
    above = {n: c for n, c in seen.calls.items() if n > top}
    if above:
        calls = sum(above.values())
        yield f"{calls:,} calls of {spans(sorted(above))} run eagerly with any list: {'; '.join(rule.why)}"
    most = case.question.max_batch
    if most is not None and most > top and not above:
        yield f"above {top}, batches up to the declared {most} run eagerly with any list: {'; '.join(rule.why)}"
    if seen.stuck:
        named = sorted(seen.stuck_why.items(), key=lambda item: -item[1])
        why = ", ".join(f"{n:,} {reason}" for reason, n in named)
        share = percent(1 - seen.total / case.counted)
        yield f"{share} of the calls run eagerly whatever is captured: {why}"
    for reason, n in seen.off.items():
        how = ON.get(rule.engine) if reason is FallbackReason.DISABLED else None
        then = f"no list changes that: {how}; the figures are" if how else "the figures are"
        yield f"{n:,} calls ran eagerly as {reason.meaning}: {then} for when that is not so"
    if case.pads:
        lists = {"today's list": now, "the best list": best}
        yield from (trap for name, plan in lists.items() if plan and (trap := _trap(case, problem, name, plan)))


def _trap(case: Case, problem: Problem, name: str, plan: Plan) -> str:
    """The first batch that a list would serve slower than requests come in at the busiest."""
    keeps, held = pace(case), Buckets(plan.buckets)
    seconds = dict(zip(held.sizes, case.steps.graph.along(list(held.sizes)), strict=True))
    own = dict(zip(problem.candidates, problem.seconds, strict=True))
    for size in problem.candidates:
        bucket = held.select(size)
        if bucket is not None and size > keeps.size and seconds[bucket] > keeps.longest(size) >= own[size]:
            slow = f"with {name} a batch of {size} is padded to {bucket}, and served slower than requests come in"
            return f"{slow} at the busiest: it would grow, and stay large"
    return ""
