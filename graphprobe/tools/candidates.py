"""What may be captured for a case, and at which price: the problem whose optimum is the advice."""

from __future__ import annotations

import math
from collections.abc import Sequence

from graphprobe.errors import ConfigError
from graphprobe.tools.case import Case
from graphprobe.tools.optimum import Pace, Problem

BUSIEST = 0.25
"""Share of the calls, those of the largest batches, whose pace larger ones must keep (see ``optimum.Pace``)."""

LADDER = 1.25
"""... from this much above their mean size on."""

MOST = 64
"""Most graphs of a proposal where no number is asked for."""

UNSEEN = 256
"""Most candidates above the largest size seen, beside it."""


def problem(case: Case) -> Problem:
    """The problem of a case; ConfigError where nothing may be captured, or a maximum is below what was seen."""
    keeps = pace(case) if case.pads else None
    sizes = candidates(case, keeps)
    prices = price(case, sizes) if case.question.priced else None
    steps = case.steps
    return Problem(
        case.seen.calls, sizes, steps.graph.along, steps.eager_along, pad=case.pads, price=prices, pace=keeps
    )


def required(case: Case) -> int:
    """The size that the largest bucket must hold: what was declared, else what was seen."""
    seen, declared = case.seen, case.question.max_batch
    if declared is not None:
        if declared < seen.largest:
            seen_at = f"size {seen.largest}, seen {seen.calls[seen.largest]:,} times"
            what = f"the declared largest batch of {declared} is below {seen_at}"
            raise ConfigError(what, "declare the largest batch that the engine sends, or leave it out")
        return declared
    # A bucket that long traffic never needed is not kept, as nobody declared it; after a short look it is.
    return max([seen.largest, *case.question.today[-1:]] if needs_top(case) else [seen.largest])


def needs_top(case: Case) -> bool:
    """Whether today's largest bucket was needed, or too little was seen to say that it is not."""
    seen, today = case.seen, case.question.today
    if not today or case.short:
        return True
    top = today[-1]
    below = max(today[:-1], default=0) if case.pads else top - 1
    return bool(seen.hits.get(top)) or any(below < size <= top for size in seen.calls)


def candidates(case: Case, keeps: Pace | None) -> list[int]:
    """Sizes that may be captured, ascending; the last is the one that must be."""
    rule, most = case.question.rule, required(case)
    top = rule.ceil(most) if case.pads else most
    if rule.above == "always" and rule.largest is not None:
        # The engine captures its limit whatever it is told.
        top = rule.largest
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
    sizes = case.sizes[::-1]
    for size, each in zip(sizes, case.steps.graph.along(sizes), strict=True):
        count = min(rest, case.seen.calls[size])
        rows, seconds, rest = rows + count * size, seconds + count * each, rest - count
        if rest <= 0:
            break
    return Pace(math.floor(LADDER * rows / left), rows / seconds)


def price(case: Case, buckets: Sequence[int]) -> dict[int, float]:
    """Seconds of all calls together that each graph of an ascending list must earn."""
    question, found = case.question, dict.fromkeys(buckets, 0.0)
    for worth, use in ((_start(case), question.capture_seconds), (_gib(case), question.bytes)):
        for bucket, taken in use.each(buckets).items() if worth else ():
            found[bucket] += taken * worth
    return found


def _start(case: Case) -> float:
    """What a second of captures is worth."""
    every = case.question.calls_per_start
    return 0.0 if every is None else case.seen.total / every


def _gib(case: Case) -> float:
    """What a byte is worth."""
    share = case.question.gib_worth
    if share is None:
        return 0.0
    sizes = list(case.seen.calls)
    spent = sum(case.seen.calls[n] * t for n, t in zip(sizes, case.steps.graph.along(sizes), strict=True))
    return share * spent / 2**30
