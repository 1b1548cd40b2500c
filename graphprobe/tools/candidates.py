"""What may be captured for a case, and at which price: the problem whose optimum is the advice."""

from __future__ import annotations

import math

from graphprobe.errors import ConfigError
from graphprobe.tools.case import Case, use_of
from graphprobe.tools.optimum import Pace, Problem

DROPPED = 10_000
"""Calls after which the largest bucket, never hit, need not be kept for what may come."""

BUSIEST = 0.25
"""Share of the calls, those of the largest batches, whose pace larger ones must keep (see ``optimum.Pace``)."""

LADDER = 1.25
"""... from this much above their mean size on."""

UNSEEN = 256
"""Most candidates above the largest size seen, beside it."""


def problem(case: Case) -> Problem:
    """The problem of a case; ConfigError where nothing may be captured, or a maximum is below what was seen."""
    keeps = pace(case) if case.pads else None
    sizes = candidates(case, keeps)
    prices = {n: price(case, n) for n in sizes} if case.question.priced else None
    steps = case.steps
    return Problem(
        case.seen.calls, sizes, steps.graph.along, steps.eager_along, pad=case.pads, price=prices, pace=keeps
    )


def required(case: Case) -> int:
    """The size that the largest bucket must hold: what was declared, else what was seen."""
    seen, declared = case.seen, case.question.max_batch
    if declared is not None:
        if declared < seen.largest:
            what = f"max_batch {declared} is below size {seen.largest}, seen {seen.calls[seen.largest]:,} times"
            raise ConfigError(what, "declare the largest batch that the engine sends, or leave it out")
        return declared
    today = max(case.question.today, default=0)
    # A bucket that long traffic never reached is not needed, as nobody declared it; after a short look it may be.
    unused = seen.total >= DROPPED and not seen.hits.get(today)
    return seen.largest if unused else max(seen.largest, today)


def candidates(case: Case, keeps: Pace | None) -> list[int]:
    """Sizes that may be captured, ascending; the last is the one that must be."""
    rule, most = case.question.rule, required(case)
    top = rule.ceil(most) if case.pads else most
    if top is None or not rule.allows(top):
        # The limit of the engine is lower; what is above it stays eager.
        top = min(most, most if rule.largest is None else rule.largest) // rule.multiple * rule.multiple
    if top < 1:
        raise ConfigError(f"{rule.engine} can capture nothing here", "; ".join(rule.why))
    held = {rule.ceil(n) if case.pads else n for n in case.seen.calls} | {top}
    sizes = {n for n in held if n is not None and n <= top and rule.allows(n)}
    if keeps is not None:
        first = keeps.size + 1
        steps = range(first, top, max(1, -(-(top - first) // UNSEEN)))
        sizes |= {n for n in map(rule.ceil, steps) if n is not None and n <= top}
    return sorted(sizes)


def pace(case: Case) -> Pace:
    """What the busiest quarter of the calls needs, held for larger batches."""
    left = rest = BUSIEST * case.seen.total
    rows = seconds = 0.0
    for size in sorted(case.seen.calls, reverse=True):
        count = min(rest, case.seen.calls[size])
        rows, seconds, rest = rows + count * size, seconds + count * case.steps.graph(size), rest - count
        if rest <= 0:
            break
    return Pace(math.floor(LADDER * rows / left), rows / seconds)


def price(case: Case, bucket: int) -> float:
    """Seconds of all calls together that a graph of this size must earn."""
    question, seen = case.question, case.seen
    found = 0.0
    if question.calls_per_start is not None:
        found += use_of(question.capture_seconds, bucket) * seen.total / question.calls_per_start
    if question.gib_worth is not None:
        spent = sum(count * case.steps.graph(size) for size, count in seen.calls.items())
        found += use_of(question.bytes, bucket) / 2**30 * question.gib_worth * spent
    return found
