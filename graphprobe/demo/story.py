"""The demo from beginning to end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from graphprobe.buckets import Buckets
from graphprobe.demo import page
from graphprobe.demo.engine import Moment, traffic
from graphprobe.demo.models import load
from graphprobe.demo.result import Answer, DemoError, DemoResult
from graphprobe.demo.session import FORWARD, Session, difference, pick_device
from graphprobe.demo.watchers import Peek, progress, waiting
from graphprobe.export.exporter import start_exporter
from graphprobe.snapshot import Snapshot

logger = logging.getLogger("graphprobe")


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for, validated; the words are those of ``graphprobe.demo.run``."""

    model: str
    pad: bool
    buckets: Buckets
    requests: int
    max_new_tokens: int
    slots: int
    device: str | None
    port: int
    addr: str
    check: bool


def tell(plan: Plan) -> DemoResult:
    """Run the demo and print it; DemoError, with the result, where graphs changed a token."""
    seconds: dict[str, float] = {}
    with _threads(), _undisturbed():
        session = _prepare(plan, seconds)
        peek = _serve(session, plan, seconds)
        page.metrics(peek)
        answers = tuple(_answers(session))
        page.answers(answers)
        forward = session.snapshot()
        advised = page.advice(forward)
        page.counts(forward, advised)
        different = _compare(session, seconds) if plan.check else None
    result = DemoResult(
        model=session.chat.name,
        device=str(session.device),
        backend=session.backend,
        pad=plan.pad,
        buckets=tuple(plan.buckets),
        answers=answers,
        batch_sizes=tuple(session.batch_sizes),
        snapshot=Snapshot({FORWARD: forward}),
        hit_rate=forward.hit_rate,
        identical=None if different is None else not different,
        advice=advised,
        metrics_url=peek.url,
        metrics=peek.lines,
        seconds=seconds,
    )
    if different:
        raise DemoError(different, result)
    return result


def _prepare(plan: Plan, seconds: dict[str, float]) -> Session:
    device = pick_device(plan.device)
    with _timed(seconds, "load"), waiting(f"loading {plan.model} ..."):
        chat = load(plan.model, device)
    requests = traffic(plan.requests, plan.max_new_tokens, chat.encode, natural=chat.stop is not None)
    session = Session(chat, requests, plan.buckets, plan.pad, plan.slots)
    page.introduction(session, seconds["load"])
    with _timed(seconds, "warmup"):
        report = session.warmup()
    page.warmed(report)
    return session


def _serve(session: Session, plan: Plan, seconds: dict[str, float]) -> Peek:
    total = len(session.requests)
    with start_exporter(port=plan.port, addr=plan.addr) as exporter:
        peek = Peek(f"{exporter.url}/metrics", total)
        print(f"serving {total} requests and {peek.url}", flush=True)
        with progress("with graphs", total) as shown:

            def watch(moment: Moment) -> None:
                shown(moment)
                peek(moment)

            seconds["graphs"] = session.with_graphs(watch)
    return peek


def _answers(session: Session) -> Iterator[Answer]:
    chat = session.chat
    for request in session.requests:
        finished = request.tokens[-1] == chat.stop
        yield Answer(request.prompt, chat.decode(request.tokens), tuple(request.tokens), finished)


def _compare(session: Session, seconds: dict[str, float]) -> str:
    print()
    with progress("the same eagerly", len(session.requests)) as shown:
        requests, seconds["eager"] = session.without_graphs(shown)
    different = difference(session.requests, requests)
    page.verdict(session, different, seconds)
    return different


@contextmanager
def _threads() -> Iterator[None]:
    # With a thread on every core each operator waits for whatever else the machine does; half of them are faster.
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, max(1, (os.cpu_count() or 1) // 2)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _undisturbed() -> Iterator[None]:
    # A size that falls back is logged when it first does; here that would cut through the progress bar, and the
    # page says it anyway.
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - start
