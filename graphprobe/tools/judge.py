"""The judgement on a case: the best list within all limits, and whether a change is worth it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from graphprobe.buckets import MAX_BUCKETS, Buckets
from graphprobe.errors import ConfigError
from graphprobe.tools.advice import Advice, Plan
from graphprobe.tools.budget import Limit, within
from graphprobe.tools.candidates import price
from graphprobe.tools.candidates import problem as problem_of
from graphprobe.tools.case import Case, Question
from graphprobe.tools.confidence import estimate
from graphprobe.tools.optimum import Choice, Problem, frontier
from graphprobe.tools.remarks import notes, warnings
from graphprobe.tools.steps import Steps
from graphprobe.tools.table import percent
from graphprobe.tools.traffic import Traffic
from graphprobe.tools.use import Use

SURE = 0.9
"""Probability of the gain below which it is not believed."""

LEAST_CALLS = 1_000
"""Fewer calls than this are too thin: ten seconds of an engine whose step takes 10 ms."""

TOLERANCE = 0.005
"""Relative time that is given for fewer graphs where no price decides."""

MOST = 64
"""Most graphs of a proposal where no number is asked for."""

SAME = 1e-9
"""Relative difference of two times that sums of the same numbers in another order may have."""


def judge(seen: Traffic, question: Question, steps: Steps) -> Advice:
    """The answer; ConfigError where what is asked contradicts itself or the traffic."""
    case = Case(seen, question, steps)
    _check_known(question)
    problem = problem_of(case)
    edge, best, gap = _best(case, problem)
    now = case.plan(question.today) if question.today else None
    gain = None if now is None else _gain(case, now, best)
    sure = 0.0 if now is None else estimate(case, now.buckets, best.buckets).reaches(question.threshold)
    broken = "" if now is None else _broken(case, now, problem.candidates[-1])
    keep, why = _verdict(case, best, gain, sure, broken)
    return Advice(
        forward=seen.forward,
        engine=question.rule.engine,
        unit=seen.unit,
        pads=case.pads,
        calls=seen.total,
        now=now,
        best=best,
        keep=keep,
        why=why,
        gain=gain,
        confidence=sure,
        threshold=question.threshold,
        frontier=edge,
        leaner=_leaner(case, now, edge) if keep else None,
        eager_seconds=None if steps.guessed else case.eagerly,
        measured_hit_rate=seen.hit_rate,
        max_batch=question.max_batch,
        gap=gap,
        notes=(*seen.notes, *steps.notes, *notes(case, problem, now, gap)),
        warnings=tuple(warnings(case, problem, now, best)),
    )


def _limits(question: Question) -> list[tuple[str, Use, float]]:
    """What a list may use: its name, the use of each graph, and how much."""
    known: list[tuple[str, Use, float | None]] = [
        ("graphs", Use(other=1.0), question.max_buckets),
        ("bytes", question.bytes, question.max_bytes),
        ("capture seconds", question.capture_seconds, question.max_capture_seconds),
    ]
    return [(name, use, most) for name, use, most in known if most is not None]


def _check_known(question: Question) -> None:
    needs = {
        "max_bytes": (question.max_bytes, question.bytes, "graph_bytes"),
        "gib_worth": (question.gib_worth, question.bytes, "graph_bytes"),
        "max_capture_seconds": (question.max_capture_seconds, question.capture_seconds, "capture_seconds"),
        "calls_per_start": (question.calls_per_start, question.capture_seconds, "capture_seconds"),
    }
    for name, (asked, use, given) in needs.items():
        if asked is not None and not use.known:
            raise ConfigError(f"{name} needs to know what a graph takes, and no capture was seen", f"give {given}")


def _best(case: Case, problem: Problem) -> tuple[tuple[Plan, ...], Plan, float]:
    """The frontier, the best list within all limits, and how far that may be from the best there is."""
    question = case.question
    most = min(question.max_buckets or MOST, MAX_BUCKETS)
    # With fewer graphs than the pace needs, it is given up, and a warning says so.
    edge = frontier(problem, most) or frontier(problem.free(), most)
    fitting = [choice for choice in edge if not _over(question, choice.buckets)]
    chosen, gap = _fewest(edge, question.priced), 0.0
    if chosen not in fitting:
        # Where all graphs take the same, a limit is one on their number.
        alike = fitting and all(use.alike(problem.candidates[:-1]) for _, use, _ in _limits(question))
        found, gap = (min(fitting, key=_total), 0.0) if alike else _within(question, problem, most)
        chosen = _fewest([*fitting, found], question.priced)
    best = case.plan(_completed(case, chosen.buckets))
    return _falling([case.plan(choice.buckets) for choice in edge]), best, gap


def _completed(case: Case, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """The list of exact dispatch with the largest size seen and, after a short look, with what today's has beside.

    A size that lost its own graph runs eagerly, and one that serves nothing yet costs no time.
    """
    if case.pads:
        return chosen
    question, largest = case.question, case.seen.largest
    for beside in ({largest, *(question.today if case.short and not question.priced else ())}, {largest}):
        both = tuple(sorted({*chosen, *(n for n in beside if n <= chosen[-1] and question.rule.allows(n))}))
        if len(both) <= MAX_BUCKETS and not _over(question, both):
            return both
    return chosen


def _within(question: Question, problem: Problem, most: int) -> tuple[Choice, float]:
    """The best list within limits, and how far it may be from the best there is."""
    uses = _limits(replace(question, max_buckets=most))
    limits = [Limit(name, use.each(problem.candidates), limit) for name, use, limit in uses]
    found = within(problem, limits) or within(problem.free(), limits)
    if found is None:
        raise ConfigError(_too_dear(problem, limits), "raise the limit, or declare a smaller max_batch")
    return found.choice, found.gap


def _falling(edge: Sequence[Plan]) -> tuple[Plan, ...]:
    """Those that take less time than all with fewer graphs."""
    kept: list[Plan] = []
    for plan in edge:
        if not kept or plan.seconds < kept[-1].seconds * (1 - SAME):
            kept.append(plan)
    return tuple(kept)


def _total(choice: Choice) -> float:
    return choice.total


def _fewest(edge: Sequence[Choice], priced: bool) -> Choice:
    best = min(edge, key=_total)
    if priced:
        return best
    return next(choice for choice in edge if choice.total <= best.total * (1 + TOLERANCE))


def _too_dear(problem: Problem, limits: Sequence[Limit]) -> str:
    last = problem.candidates[-1]
    over = [
        f"{limit.of([last]):,.6g} {limit.name} of {limit.most:,.6g}"
        for limit in limits
        if limit.of([last]) > limit.most
    ]
    return f"the bucket {last} must be there, and takes {' and '.join(over) or 'more than the limits allow'}"


def _gain(case: Case, now: Plan, best: Plan) -> float:
    """The share that the best list saves of what today's takes, prices included."""
    before, after = (plan.seconds * case.counted + sum(price(case, plan.buckets).values()) for plan in (now, best))
    return 0.0 if abs(before - after) <= SAME * before else 1 - after / before


def _verdict(case: Case, best: Plan, gain: float | None, sure: float, broken: str) -> tuple[bool, str]:
    """Whether to keep what there is, and why; ``broken`` is what today's list does not keep of what was asked."""
    total, threshold = case.seen.total, case.question.threshold
    few = f"{total:,} calls are too few to judge by, {LEAST_CALLS:,} are the least"
    if broken:
        change = (
            f"the best one that does takes {100 * abs(gain or 0):.1f} % {'less' if (gain or 0) > 0 else 'more'} time"
        )
        return False, "; ".join([broken, change, *([few] if total < LEAST_CALLS else [])])
    if total < LEAST_CALLS:
        return True, few
    if gain is None:
        return False, f"today's list is not known; this one serves {percent(best.hit_rate)} of the calls by graphs"
    time = "time per call, prices included" if case.question.priced else "time per call"
    if gain < threshold:
        saves = f"saves {100 * gain:.2g} % of the {time}" if gain > 0 else "saves nothing"
        return True, f"the best list {saves}, less than {100 * threshold:g} %"
    if sure < SURE:
        odds = f"only {math.floor(100 * sure)} % sure of {100 * threshold:g} %, not {100 * SURE:g}"
        return True, f"{100 * gain:.1f} % less {time}, but {odds}; look again after more traffic"
    return False, f"{100 * gain:.1f} % less {time}, {percent(sure)} sure of at least {100 * threshold:g} %"


def _broken(case: Case, now: Plan, top: int) -> str:
    """What today's list does not keep of what was declared; ``top`` is the bucket that must be there."""
    most = case.question.max_batch
    if most is not None and case.server(Buckets(now.buckets), min(most, top)) is None:
        return f"today's list does not hold the declared maximum of {most}"
    over = _over(case.question, now.buckets)
    return f"today's list does not keep the limits, as it takes {over}" if over else ""


def _over(question: Question, buckets: Sequence[int]) -> str:
    """The first limit that a list does not keep, in words; empty where it keeps all."""
    for name, use, most in _limits(question):
        if (spent := use.together(buckets)) > most * (1 + SAME):
            return f"{spent:,.6g} {name}, more than {most:,.6g}"
    return ""


def _leaner(case: Case, now: Plan | None, edge: Sequence[Plan]) -> Plan | None:
    """The list with the fewest graphs that takes no longer than today's; None after a short look."""
    if now is None or case.short:
        return None
    fast = [plan for plan in edge if plan.graphs < now.graphs and plan.seconds <= now.seconds * (1 + SAME)]
    return next((plan for plan in fast if not _over(case.question, plan.buckets)), None)
