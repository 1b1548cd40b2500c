"""What else there is to know about a case: notes, and warnings."""

from __future__ import annotations

from collections.abc import Iterator

from graphprobe.buckets import Buckets
from graphprobe.tools.advice import Plan
from graphprobe.tools.candidates import pace
from graphprobe.tools.case import Case
from graphprobe.tools.optimum import Problem
from graphprobe.tools.speculative import spans
from graphprobe.tools.table import percent

APART = 0.02
"""Difference between the hit rate that was seen and the one that today's list should give, from which it is told."""


def notes(case: Case, problem: Problem, now: Plan | None) -> Iterator[str]:
    """What a reader of the answer should know."""
    seen = case.seen
    idle = [n for n in now.buckets if not seen.hits.get(n)] if now is not None and seen.hits else []
    if idle:
        yield f"captured and never replayed in {seen.total:,} calls: {spans(idle)}"
    if now is not None and seen.hit_rate is not None and abs(seen.hit_rate - now.hit_rate) > APART:
        yield f"the hit rate was {percent(seen.hit_rate)}; with all of today's list captured: {percent(now.hit_rate)}"
    if now is not None and not case.pads and case.question.rule.engine == "graphprobe":
        padded = case.padded().plan(now.buckets)
        gives = f"hit rate {percent(padded.hit_rate)}, {padded.seconds * 1e3:.4g} ms per call"
        yield f"the same list with padding (pad=...): {gives}"
    if case.question.max_batch is None:
        yield f"no largest batch was declared: one above {problem.candidates[-1]} would run eagerly"


def warnings(case: Case, problem: Problem, now: Plan | None) -> Iterator[str]:
    """What costs time whatever is captured, and where today's list is a trap."""
    seen, rule = case.seen, case.question.rule
    above = {n: c for n, c in seen.calls.items() if n > problem.candidates[-1]}
    if above:
        calls = sum(above.values())
        yield f"{calls:,} calls of {spans(sorted(above))} run eagerly with any list: {'; '.join(rule.why)}"
    if seen.stuck:
        named = sorted(seen.stuck_why.items(), key=lambda item: -item[1])
        why = ", ".join(f"{n:,} {reason}" for reason, n in named)
        share = percent(1 - seen.total / case.counted)
        yield f"{share} of the calls run eagerly whatever is captured: {why}"
    if now is not None and case.pads and (trap := _trap(case, now)):
        yield trap


def _trap(case: Case, now: Plan) -> str:
    """The first batch that today's list would serve slower than requests come in at the busiest."""
    keeps, held, graph = pace(case), Buckets(now.buckets), case.steps.graph
    for size in range(keeps.size + 1, held.largest + 1):
        bucket = held.select(size)
        if bucket is not None and graph(bucket) > keeps.longest(size) >= graph(size):
            slow = (
                f"a batch of {size} is padded to {bucket}, and then served slower than requests come in at the busiest"
            )
            return f"{slow}: it would grow, and stay large"
    return ""
