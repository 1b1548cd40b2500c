"""The words of the demo: what is printed, in this order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from graphprobe.buckets import Buckets
from graphprobe.demo.result import Answer
from graphprobe.demo.session import Session
from graphprobe.demo.watchers import Peek
from graphprobe.snapshot import ForwardSnapshot, Snapshot
from graphprobe.tools import table
from graphprobe.warmup import WarmupReport

SHOWN = 6
"""Answers printed; all of them are in the result."""


def introduction(session: Session, seconds: float) -> None:
    """Which model runs where, what stands in for what, and what has no bucket."""
    print(f"{session.chat.name} on {_named(session.device)}, loaded in {seconds:.1f} s")
    if session.backend == "recorder":
        print("on a CPU a recorder stands in for CUDA graphs: the counts are real, the times are not a GPU's")
    how = "padded to the next bucket" if session.pad else "exact sizes only"
    print(f"buckets {_listed(session.buckets)} ({how}); sizes without one: {_listed(session.uncovered) or 'none'}")


def warmed(report: WarmupReport) -> None:
    """What was captured ahead of traffic, and what could not be."""
    print(f"captured {len(report.captured)} graphs in {report.seconds:.1f} s")
    for bucket in report:
        if bucket.outcome != "ok":
            print(f"  bucket {bucket.bucket}: {bucket.outcome} {bucket.error}")


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def metrics(peek: Peek) -> None:
    """What the endpoint answered while requests were served."""
    print(f"\n{peek.url}, after {peek.answered} of {peek.total} answers:")
    for line in peek.lines:
        print(f"  {line}")


def answers(given: Sequence[Answer]) -> None:
    """The first few answers, as generated."""
    print(f"\n{min(SHOWN, len(given))} of {len(given)} answers:")
    for answer in given[:SHOWN]:
        print(f"  {answer.prompt}\n    {answer.text}{'' if answer.finished else ' ...'}")


def counts(forward: ForwardSnapshot, advised: str) -> None:
    """The table with hit rate and advice."""
    text = table.table(Snapshot({forward.name: forward}))
    # The table has its own advice, and none where no call fell back.
    print(f"\n{text}", end="" if advised in text else f"{advised}\n")
    exact, padded = (_hits(forward, pad) for pad in (False, True))
    print(f"the same steps with exact sizes only: {exact} graph calls; with --pad: {padded}")


def _hits(forward: ForwardSnapshot, pad: bool) -> str:
    buckets = Buckets(forward.buckets)
    fits = buckets.select if pad else buckets.exact
    calls = sum(row.calls for row in forward.rows)
    return table.percent(sum(row.calls for row in forward.rows if fits(row.batch_size)) / calls)


def advice(forward: ForwardSnapshot) -> str:
    """The table's advice or, where no call fell back, the bucket that would save most padding."""
    if found := table.advice(forward):
        return found
    if not forward.padding:
        return "every call found a graph of its size: nothing to change"
    sizes = {row.batch_size for row in forward.rows} - set(forward.buckets)
    best = min(sorted(sizes), key=lambda size: _padding(forward, (*forward.buckets, size))[0])
    now, then = (_share(*_padding(forward, buckets)) for buckets in (forward.buckets, (*forward.buckets, best)))
    return f"{now} of the rows that graphs computed were padding: a bucket of {best} would make that {then}"


def _padding(forward: ForwardSnapshot, sizes: Iterable[int]) -> tuple[int, int]:
    """Pad rows, and all rows, if the calls that graphs served had these buckets."""
    buckets = Buckets(sizes)
    served = [(row.calls, row.batch_size, buckets.select(row.batch_size) or 0) for row in forward.rows if row.bucket]
    return sum(n * (bucket - size) for n, size, bucket in served), sum(n * bucket for n, _, bucket in served)


def _share(part: int, whole: int) -> str:
    return table.percent(part / whole)


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))


def verdict(session: Session, different: str, seconds: dict[str, float]) -> None:
    """Whether the tokens are the same without graphs and, on a device with graphs, what those saved."""
    size = "the padded size" if session.pad else "the same batch size"
    tokens = sum(len(request.tokens) for request in session.requests)
    print(
        f"\nNOT IDENTICAL: {different}" if different else f"\nidentical: all {tokens} tokens, against eager at {size}"
    )
    if session.backend != "recorder":
        print(f"all decode steps: {seconds['graphs']:.2f} s with graphs, {seconds['eager']:.2f} s without")
