"""The judgement on a case: the best list within all limits, and all that is told of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphprobe.buckets import MAX_BUCKETS
from graphprobe.errors import ConfigError
from graphprobe.tools.advice import EAGER, KEEP, SAME, Advice, Plan
from graphprobe.tools.budget import Limit, within
from graphprobe.tools.candidates import MOST
from graphprobe.tools.candidates import problem as problem_of
from graphprobe.tools.case import Case, Question
from graphprobe.tools.confidence import estimate
from graphprobe.tools.optimum import Choice, Problem, frontier
from graphprobe.tools.remarks import notes, warnings
from graphprobe.tools.steps import Steps
from graphprobe.tools.traffic import Traffic
from graphprobe.tools.verdict import amount, gain, leaner, limits, over, verdict

TOLERANCE = 0.005
"""Relative time that is given for fewer graphs where no price decides."""

EXACTLY = 0.001
"""The same for exact dispatch, where it is given in calls that run eagerly."""


def judge(seen: Traffic, question: Question, steps: Steps) -> Advice:
    """The answer; ConfigError where what is asked contradicts itself or the traffic."""
    case = Case(seen, question, steps)
    _check_known(question)
    problem = problem_of(case)
    edge, best, gap = _best(case, problem)
    now = case.plan(question.today) if question.today else None
    sure = 0.0 if now is None else estimate(case, now.buckets, best.buckets).reaches(question.threshold)
    do, why = verdict(case, now, best, sure, problem.candidates[-1])
    rule = question.rule
    return Advice(
        forward=seen.forward,
        engine=rule.engine,
        unit=seen.unit,
        pads=case.pads,
        calls=seen.total,
        now=now,
        best=best,
        do=do,
        why=why,
        gain=None if now is None else gain(case, now, best),
        confidence=sure,
        threshold=question.threshold,
        frontier=edge,
        leaner=leaner(case, now, edge) if do == KEEP else None,
        eager_seconds=None if steps.guessed else case.eagerly,
        measured_hit_rate=seen.hit_rate,
        max_batch=rule.largest if rule.above == "always" and rule.largest else question.max_batch,
        assumed=question.assumed,
        gap=gap,
        notes=(*seen.notes, *steps.notes, *notes(case, problem, now, best, gap)),
        warnings=(*_costs(case, problem, best, do), *warnings(case, problem, now, best)),
    )


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
    fitting = [choice for choice in edge if not over(question, choice.buckets)]
    chosen, gap = _fewest(case, edge), 0.0
    if chosen not in fitting:
        # Where all graphs take the same, a limit is one on their number.
        alike = fitting and all(use.alike(problem.candidates[:-1]) for _, use, _ in limits(question))
        found, gap = (min(fitting, key=_total), 0.0) if alike else _within(question, problem, most)
        chosen = _fewest(case, [*fitting, *_thinned(case, problem, found), found])
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
        if len(both) <= MAX_BUCKETS and not over(question, both):
            return both
    return chosen


def _within(question: Question, problem: Problem, most: int) -> tuple[Choice, float]:
    """The best list within limits, and how far it may be from the best there is."""
    uses = limits(replace(question, max_buckets=most))
    held = [Limit(name, use.each(problem.candidates), limit) for name, use, limit in uses]
    found = within(problem, held) or within(problem.free(), held)
    if found is None:
        raise ConfigError(_too_dear(problem, held), "raise the limit, or declare a smaller max_batch")
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


def _fewest(case: Case, edge: Sequence[Choice]) -> Choice:
    """The smallest of the lists that are as good as the best one; the best where graphs have a price."""
    best = min(edge, key=_total)
    if case.question.priced:
        return best
    return min((choice for choice in edge if choice.total <= _most(case, best)), key=lambda found: len(found.buckets))


def _most(case: Case, best: Choice) -> float:
    """Seconds that a list may take to be as good as ``best``."""
    return best.total * (1 + (TOLERANCE if case.pads else EXACTLY))


def _thinned(case: Case, problem: Problem, found: Choice) -> list[Choice]:
    """The list without a graph, without two and so on, each time the one that is missed least, as long as it is good.

    What is found within limits has as many graphs as they allow, however little the last ones save.
    """
    thinner, path = [found], [problem.candidates.index(n) for n in found.buckets]
    while len(path) > 1 and thinner[-1].total <= _most(case, found):
        around = zip([-1, *path], path, path[1:], strict=False)
        losses = [problem.step(a, c) - problem.step(a, b) - problem.step(b, c) for a, b, c in around]
        order = sorted(range(len(losses)), key=losses.__getitem__)
        less = next((rest for i in order if problem.allowed(rest := [*path[:i], *path[i + 1 :]])), None)
        if less is None:
            break
        path = less
        thinner.append(problem.choice(path))
    return thinner


def _too_dear(problem: Problem, held: Sequence[Limit]) -> str:
    last = problem.candidates[-1]
    dear = [
        f"{amount(limit.name, limit.of([last]))} of {amount(limit.name, limit.most)}"
        for limit in held
        if limit.of([last]) > limit.most
    ]
    return f"the bucket {last} must be there, and takes {' and '.join(dear) or 'more than the limits allow'}"


def _costs(case: Case, problem: Problem, best: Plan, do: str) -> Iterator[str]:
    """What must be known of the best list before it is taken, and what the limits cost."""
    question = case.question
    if best.seconds > case.eagerly and not case.steps.guessed and do != EAGER:
        yield f"without any graph a call would take {case.eagerly * 1e3:.4g} ms, less than with the best list"
    largest = question.rule.largest
    if question.rule.engine == "vllm" and largest not in (None, best.buckets[-1]) and do != EAGER:
        limit = f"max_cudagraph_capture_size {largest}"
        yield f"vLLM refuses to start with this list beside {limit}, which is not its largest size: leave that out"
    if question.priced or not limits(question):
        return
    free = case.plan(_fewest(case, frontier(problem, MOST) or frontier(problem.free(), MOST)).buckets)
    if best.seconds * (1 - question.threshold) > free.seconds:
        asked = " and ".join(amount(name, most) for name, _, most in limits(question))
        costs = f"{free.seconds * 1e3:.4g} ms per call, not {best.seconds * 1e3:.4g}"
        yield f"to take at most {asked} costs time: without that {amount('graphs', free.graphs)} would take {costs}"
