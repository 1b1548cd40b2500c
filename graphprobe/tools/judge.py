"""The judgement on a case: the best list within all limits, and whether a change is worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphprobe.buckets import MAX_BUCKETS, Buckets
from graphprobe.errors import ConfigError
from graphprobe.tools.advice import Advice, Plan
from graphprobe.tools.budget import Limit, within
from graphprobe.tools.candidates import problem as problem_of
from graphprobe.tools.case import Case, Question, use_of
from graphprobe.tools.confidence import confidence
from graphprobe.tools.optimum import Choice, Problem, frontier
from graphprobe.tools.remarks import notes, warnings
from graphprobe.tools.steps import Steps
from graphprobe.tools.table import percent
from graphprobe.tools.traffic import Traffic

SURE = 0.9
"""Probability of the gain below which it is not believed."""

LEAST_CALLS = 1_000
"""Fewer calls than this are too thin: ten seconds of an engine whose step takes 10 ms."""

TOLERANCE = 0.005
"""Relative time that is given for fewer graphs where no price decides."""

MOST = 64
"""Most graphs of a proposal where no number is asked for."""


def judge(seen: Traffic, question: Question, steps: Steps) -> Advice:
    """The answer; ConfigError where what is asked contradicts itself or the traffic."""
    case = Case(seen, question, steps)
    _check_known(question)
    problem = problem_of(case)
    edge, best, gap = _best(case, problem)
    now = case.plan(question.today) if question.today else None
    gain = None if now is None else 1 - best.seconds / now.seconds
    sure = 0.0 if now is None else confidence(case, now, best)
    keep, why = _verdict(case, now, best, gain, sure)
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
        leaner=_leaner(now, edge) if keep else None,
        measured_hit_rate=seen.hit_rate,
        max_batch=question.max_batch,
        gap=gap,
        notes=(*seen.notes, *steps.notes, *notes(case, problem, now)),
        warnings=tuple(warnings(case, problem, now)),
    )


def _limits(question: Question) -> list[tuple[str, Mapping[int, float], float]]:
    """What a list may use: its name, the use of each graph, and how much."""
    known: list[tuple[str, Mapping[int, float], float | None]] = [
        ("graphs", {0: 1.0}, question.max_buckets),
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
    for name, (asked, known, given) in needs.items():
        if asked is not None and not known:
            raise ConfigError(f"{name} needs to know what a graph takes, and no capture was seen", f"give {given}")


def _best(case: Case, problem: Problem) -> tuple[tuple[Plan, ...], Plan, float]:
    """The frontier, the best list within all limits, and how far that may be from the best there is."""
    question = case.question
    most = min(question.max_buckets or MOST, MAX_BUCKETS)
    edge = _falling(frontier(problem, most) or frontier(problem.free(), most))
    plans = tuple(case.plan(choice.buckets) for choice in edge)
    if question.max_bytes is None and question.max_capture_seconds is None:
        return plans, case.plan(_fewest(edge, question.priced).buckets), 0.0
    limits = [
        Limit(name, {n: use_of(use, n) for n in problem.candidates}, most) for name, use, most in _limits(question)
    ]
    found = within(problem, limits) or within(problem.free(), limits)
    if found is None:
        raise ConfigError(_too_dear(problem, limits), "raise the limit, or declare a smaller max_batch")
    return plans, case.plan(found.choice.buckets), found.gap


def _falling(edge: list[Choice]) -> list[Choice]:
    """Up to the one with the fewest graphs of those that take the least time; more would change nothing."""
    least = min(choice.seconds for choice in edge)
    end = next(i for i, choice in enumerate(edge) if choice.seconds <= least * (1 + 1e-9))
    return edge[: end + 1]


def _fewest(edge: Sequence[Choice], priced: bool) -> Choice:
    best = min(edge, key=lambda choice: choice.total)
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


def _verdict(case: Case, now: Plan | None, best: Plan, gain: float | None, sure: float) -> tuple[bool, str]:
    """Whether to keep what there is, and why."""
    total, threshold = case.seen.total, case.question.threshold
    if total < LEAST_CALLS:
        return True, f"{total:,} calls are too few to judge by, {LEAST_CALLS:,} are the least"
    if now is None or gain is None:
        return False, f"today's list is not known; this one serves {percent(best.hit_rate)} of the calls by graphs"
    if broken := _broken(case, now):
        return False, broken
    if gain < threshold:
        saves = f"saves {100 * gain:.2g} % of the time" if gain > 0 else "saves nothing"
        return True, f"the best list {saves}, less than {100 * threshold:g} %"
    if sure < SURE:
        what = f"{100 * gain:.1f} % less time per call, but only {percent(sure)} sure of {100 * threshold:g} %"
        return True, f"{what}; look again after more traffic"
    return False, f"{100 * gain:.1f} % less time per call, {percent(sure)} sure of at least {100 * threshold:g} %"


def _broken(case: Case, now: Plan) -> str:
    """What today's list does not keep of what was declared."""
    most, rule = case.question.max_batch, case.question.rule
    reachable = most if most is None or rule.largest is None else min(most, rule.largest)
    if reachable is not None and case.server(Buckets(now.buckets), reachable) is None:
        return f"today's list has no graph for the declared maximum of {most}"
    for name, use, limit in _limits(case.question):
        spent = sum(use_of(use, n) for n in now.buckets)
        if spent > limit:
            return f"today's list takes {spent:,.6g} {name}, more than {limit:,.6g}"
    return ""


def _leaner(now: Plan | None, edge: Sequence[Plan]) -> Plan | None:
    """The list with the fewest graphs that takes no longer than today's."""
    if now is None:
        return None
    return next((plan for plan in edge if plan.graphs < now.graphs and plan.seconds <= now.seconds), None)
