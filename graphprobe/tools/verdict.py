"""Whether a better list is worth a change, and what today's does not keep of what was asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from graphprobe.buckets import Buckets
from graphprobe.tools.advice import CAPTURE, CHANGE, EAGER, KEEP, REQUIRED, SAME, WAIT, Plan
from graphprobe.tools.candidates import price
from graphprobe.tools.case import Case, Question
from graphprobe.tools.table import percent
from graphprobe.tools.use import Use

SURE = 0.9
"""Probability of the gain below which it is not believed."""

LEAST_CALLS = 1_000
"""Fewer calls than this are too thin: ten seconds of an engine whose step takes 10 ms."""


class Verdict(NamedTuple):
    """What to do, a word of ``advice.DO``, and why, in a sentence."""

    do: str
    why: str


def verdict(case: Case, now: Plan | None, best: Plan, sure: float, top: int) -> Verdict:
    """What is to be done: ``sure`` is the probability of the gain, ``top`` the bucket that must be there."""
    thin = _thin(case)
    broken = _broken(case, now, top) if now else ""
    least = min(_priced(case, plan) for plan in (now if not broken else None, best) if plan is not None)
    if not thin and not case.steps.guessed and case.eagerly < least * (1 - max(case.question.threshold, SAME)):
        without, graphs = (f"{seconds * 1e3:.4g} ms" for seconds in (case.eagerly, least))
        return Verdict(EAGER, f"a call takes {without} without any graph, and {graphs} with the best list of them")
    if now is None:
        known = f"today's list is not known; this one serves {percent(best.hit_rate)} of the calls by graphs"
        return Verdict(WAIT, thin) if thin else Verdict(CAPTURE, known)
    saved = gain(case, now, best)
    if broken:
        change = f"the best one that does takes {_change(saved)}"
        return Verdict(REQUIRED, "; ".join(filter(None, [broken, change, thin])))
    return Verdict(KEEP, thin) if thin else _worth(case, saved, sure)


def gain(case: Case, now: Plan, best: Plan) -> float:
    """The share that the best list saves of what today's takes, prices included."""
    before, after = (_priced(case, plan) for plan in (now, best))
    return 0.0 if abs(before - after) <= SAME * before else 1 - after / before


def _priced(case: Case, plan: Plan) -> float:
    """Seconds per call, prices included."""
    return plan.seconds + sum(price(case, plan.buckets).values()) / case.counted


def limits(question: Question) -> list[tuple[str, Use, float]]:
    """What a list may use: its name, the use of each graph, and how much."""
    known: list[tuple[str, Use, float | None]] = [
        ("graphs", Use(other=1.0), question.max_buckets),
        ("bytes", question.bytes, question.max_bytes),
        ("capture seconds", question.capture_seconds, question.max_capture_seconds),
    ]
    return [(name, use, most) for name, use, most in known if most is not None]


def over(question: Question, buckets: Sequence[int]) -> str:
    """The first limit that a list does not keep, in words; empty where it keeps all."""
    for name, use, most in limits(question):
        if (spent := use.together(buckets)) > most * (1 + SAME):
            return f"{amount(name, spent)}, more than {amount(name, most)}"
    return ""


def amount(name: str, much: float) -> str:
    """So much of what a limit is about, in words."""
    if name == "bytes" and much >= 2**20:
        return f"{much / 2**20:,.6g} MiB"
    return f"{much:,.6g} {name.removesuffix('s') if much == 1 else name}"


def leaner(case: Case, now: Plan | None, edge: Sequence[Plan]) -> Plan | None:
    """The list with the fewest graphs that takes no longer than today's; None after a short look."""
    if now is None or case.short:
        return None
    fast = [plan for plan in edge if plan.graphs < now.graphs and plan.seconds <= now.seconds * (1 + SAME)]
    return next((plan for plan in fast if not over(case.question, plan.buckets)), None)


def _thin(case: Case) -> str:
    """Why the traffic is too thin to judge by; empty where it is not."""
    seen = case.seen
    judged = (seen.total - seen.warming) // seen.processes
    if judged >= LEAST_CALLS:
        return ""
    of = f" of each of {seen.processes} processes" if seen.processes > 1 else ""
    of += f" beside {seen.warming:,} of the warm-up" if seen.warming else ""
    return f"{judged:,} calls{of} are too few to judge by, {LEAST_CALLS:,} are the least"


def _worth(case: Case, saved: float, sure: float) -> Verdict:
    """Whether the gain is large and sure enough."""
    threshold = case.question.threshold
    time = "time per call, prices included" if case.question.priced else "time per call"
    if saved <= 0:
        less = f", less than {100 * threshold:g} %" if threshold else ""
        return Verdict(KEEP, f"the best list saves nothing{less}")
    if saved < threshold:
        return Verdict(KEEP, f"the best list saves {100 * saved:.2g} % of the {time}, less than {100 * threshold:g} %")
    if sure < SURE:
        odds = f"only {math.floor(100 * sure)} % sure of {100 * threshold:g} %, not {100 * SURE:g}"
        return Verdict(KEEP, f"{100 * saved:.1f} % less {time}, but {odds}; look again after more traffic")
    return Verdict(CHANGE, f"{100 * saved:.1f} % less {time}, {percent(sure)} sure of at least {100 * threshold:g} %")


def _change(saved: float) -> str:
    """What a list takes beside another one of which it saves a share, or none."""
    if abs(saved) < 0.0005:
        return "the same time"
    if saved < -1:
        return f"{1 - saved:.3g} times as long"
    return f"{100 * abs(saved):.1f} % {'less' if saved > 0 else 'more'} time"


def _broken(case: Case, now: Plan, top: int) -> str:
    """What today's list does not keep of what was declared; ``top`` is the bucket that must be there."""
    most = case.question.max_batch
    if most is not None and case.server(Buckets(now.buckets), min(most, top)) is None:
        return f"today's list does not hold the declared maximum of {most}"
    spent = over(case.question, now.buckets)
    return f"today's list does not keep the limits, as it takes {spent}" if spent else ""
