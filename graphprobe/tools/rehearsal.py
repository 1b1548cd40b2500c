"""The proposal, tried: a day is replayed with today's list and with the proposed one.

Batch sizes depend on step times, so a proposal changes the batches that it was made for. A round: advise on traffic, at
first that of the day with today's list, and replay the day with the proposal. Where that takes another time per call
than was expected (by more than ``SHIFT``), the batches have shifted: the next round advises on that day, up to
``ROUNDS`` in all. Kept is the proposal whose own day takes least per call; of those within ``judge.TOLERANCE`` of it,
one that suits its batches, with the fewest graphs. Where the first advice is to change nothing, one round is all.

The traffic of all days together made worse lists of two public traces: what it expects of a list holds on no day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphprobe.buckets import Buckets
from graphprobe.dispatch import EAGER, Decision, Dispatcher
from graphprobe.errors import SourceError
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import Snapshot
from graphprobe.tools.advice import EAGER as EAGER_STEPS
from graphprobe.tools.advice import Advice, Plan
from graphprobe.tools.arrivals import Request
from graphprobe.tools.judge import TOLERANCE
from graphprobe.tools.replays import NAME, Replay, Served, Spread
from graphprobe.tools.simulate import Seconds, replay
from graphprobe.tools.sources import Reading
from graphprobe.tools.steps import Steps
from graphprobe.tools.table import percent

ROUNDS = 3
"""Proposals that are tried."""

SHIFT = 0.01
"""Relative time per call that is no difference."""


@dataclass(frozen=True, slots=True)
class Day:
    """A day that can be replayed with any list; the fields are those of ``simulate.replay``."""

    requests: Sequence[Request]
    steps: Steps
    pad: bool
    max_batch: int
    width: int = 1
    prefill: Seconds | None = None

    def replayed(self, buckets: Sequence[int]) -> Replay:
        """What becomes of it; SourceError where it has no decode step."""
        graph, options = self.steps.graph, {"max_batch": self.max_batch, "width": self.width}
        found = replay(self.requests, buckets, graph, self._eager, pad=self.pad, prefill=self.prefill, **options)
        if not found.served:
            raise SourceError("the trace has no decode step. hint: prefills give the first token of each answer")
        return found

    def _eager(self, size: int) -> float:
        return self.steps.eager_along([size])[0]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A proposal, the day with today's list, and the day with the best list of ``advice``."""

    advice: Advice
    now: Replay
    proposal: Replay
    rounds: int = 1
    notes: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """Share of the seconds per call of today's day that the proposal's own day saves."""
        return 1 - _pace(self.proposal) / _pace(self.now)

    @property
    def slower(self) -> bool:
        """Whether the proposal's own day takes more per call than today's."""
        return self.gain < -SHIFT

    @property
    def shifted(self) -> bool:
        """Whether the proposal's own day takes another time per call than was expected of it."""
        return abs(_pace(self.proposal) / _proposed(self.advice).seconds - 1) > SHIFT

    @property
    def verdict(self) -> str:
        """What the day says of the proposal, in a sentence."""
        than, much = "today's list" if self.now.buckets else "eager steps", f"{100 * abs(self.gain):.1f} %"
        if self.slower:
            why = "the batches of its own day are not those it was made for"
            return f"the proposal is slower than {than}, by {much} per call: {why}"
        if self.gain < SHIFT:
            return f"on its own day the proposal takes as long per call as {than}"
        return f"on its own day the proposal takes {much} less time per call than {than}"

    def as_dict(self) -> dict[str, Any]:
        """The figures of both days, in seconds, for JSON."""
        days = {"now": _figures(self.now), "proposal": _figures(self.proposal)}
        told = {"gain": self.gain, "slower": self.slower, "shifted": self.shifted, "verdict": self.verdict}
        return {
            "requests": self.now.requests,
            "tokens": self.now.tokens,
            "rounds": self.rounds,
            **days,
            **told,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        """Plain ASCII lines: both days side by side, and the verdict."""
        lines = [f"the day replayed: {self.now.requests:,} requests, {self.now.tokens:,} tokens", *_grid(self)]
        if self.shifted:
            expected, own = _proposed(self.advice).seconds * 1e3, _pace(self.proposal) * 1e3
            after = f" after {self.rounds} rounds" if self.rounds > 1 else ""
            lines.append(f"the batches shift{after}: {expected:.4g} ms/call were expected, its own day has {own:.4g}")
        return "\n".join([*lines, self.verdict, *(f"note: {text}" for text in self.notes)])


def rehearse(day: Day, today: Sequence[int], ask: Callable[[Reading], Advice]) -> Rehearsal:
    """The best proposal for ``day``, where ``today`` is the list in use (empty: all runs eagerly).

    ``ask`` advises on the traffic of the day, which has no times: it must reckon with ``day.steps``. What comes back
    compares the day with today's list and the traffic that the kept proposal was made for.
    """
    now = day.replayed(today)
    first = tried_on(day, ask(_traffic(now, now.buckets, day.pad)), now)
    tried = [first]
    while tried[-1].shifted and not (first.advice.keep or first.advice.do == EAGER_STEPS) and len(tried) < ROUNDS:
        tried.append(tried_on(day, ask(_traffic(tried[-1].proposal, now.buckets, day.pad)), now))
    best = _best(tried)
    return replace(best, advice=_settled(best, first), rounds=len(tried))


def tried_on(day: Day, advice: Advice, now: Replay | None = None) -> Rehearsal:
    """Advice on any traffic, tried on ``day``; ``now`` is the day with today's list, where that is known already."""
    today = advice.now.buckets if advice.now is not None else ()
    return Rehearsal(advice, now or day.replayed(today), day.replayed(_proposed(advice).buckets))


def _proposed(advice: Advice) -> Plan:
    """What is tried: the best list, or none where that is the advice."""
    return advice.plan if advice.do == EAGER_STEPS else advice.best


def _best(tried: Sequence[Rehearsal]) -> Rehearsal:
    least = min(_pace(one.proposal) for one in tried)
    good = [one for one in tried if _pace(one.proposal) <= least * (1 + TOLERANCE)]
    return min(good, key=lambda one: (one.shifted, one.advice.best.graphs, _pace(one.proposal)))


def _settled(best: Rehearsal, first: Rehearsal) -> Advice:
    """The advice of the best round, held against the day with today's list; its gain is then of the time alone."""
    before = first.advice
    if best is first:
        return before
    eager = best.advice.do == EAGER_STEPS
    less = f"{100 * abs(best.gain):.1f} % {'less' if best.gain > 0 else 'more'}"
    return replace(
        best.advice,
        now=before.now,
        do=best.advice.do if eager else before.do,
        why=f"{best.advice.why if eager else before.why}; the proposal's own day takes {less}",
        gain=None if before.now is None else 1 - _proposed(best.advice).seconds / before.now.seconds,
        confidence=before.confidence,
        leaner=None,
        measured_hit_rate=before.measured_hit_rate,
    )


def _traffic(day: Replay, today: Sequence[int], pad: bool) -> Reading:
    """The calls of a day, as today's list serves them."""
    decide = _decide(today, pad)
    served = tuple(Served(size, decide(size), 0.0, count) for size, count in day.sizes.items())
    forward = replace(day, buckets=tuple(today), served=served).snapshot().forwards[NAME]
    whose = "today's list" if day.buckets == today else "the list proposed before"
    return Reading(
        Snapshot({NAME: replace(forward, times={})}),
        kind="simulated",
        notes=(f"the traffic is a replay of the day with {whose}",),
    )


def _decide(buckets: Sequence[int], pad: bool) -> Callable[[int], Decision]:
    if not buckets:
        return lambda size: Decision(EAGER, reason=FallbackReason.DISABLED)
    return Dispatcher(Buckets(buckets), pad).decide


def _pace(day: Replay) -> float:
    """Seconds per call; a day has a decode step (see ``Day.replayed``)."""
    return day.seconds_per_call or 0.0


def _figures(day: Replay) -> dict[str, Any]:
    names = ("buckets", "hit_rate", "seconds_per_call", "tokens_per_second", "waiting")
    return {name: getattr(day, name) for name in names} | {"ttft": _spread(day.ttft), "tpot": _spread(day.tpot)}


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else {"mean": spread.mean, "p50": spread.p50, "p99": spread.p99}


def _grid(tried: Rehearsal) -> Iterable[str]:
    head = ["", "hit rate", "ms/call", "token/s", "TTFT p50", "p99", "TPOT p50", "p99 ms", "waiting"]
    rows = [head, ["now" if tried.now.buckets else "eager", *_cells(tried.now)], ["proposal", *_cells(tried.proposal)]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join([f"{row[0]:<{widths[0]}}", *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _cells(day: Replay) -> list[str]:
    spreads = [f"{value * 1e3:,.1f}" for value in (day.ttft.p50, day.ttft.p99)]
    spreads += [f"{value * 1e3:,.1f}" for value in (day.tpot.p50, day.tpot.p99)] if day.tpot else ["-", "-"]
    hits = "-" if day.hit_rate is None else percent(day.hit_rate)
    return [hits, f"{_pace(day) * 1e3:.4g}", f"{day.tokens_per_second:,.1f}", *spreads, percent(day.waiting)]
