"""What a replay of a day found: calls by batch size and path, what requests waited for, and the snapshot of it all."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from graphprobe.dispatch import Decision
from graphprobe.ledger import BOUNDS
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot, TimeKey, Times

NAME = "simulated"
"""The forward of a snapshot of a replay."""


@dataclass(frozen=True, slots=True)
class Spread:
    """What requests saw, in seconds; a percentile is the time that one of them had (nearest rank)."""

    mean: float
    p50: float
    p99: float

    @staticmethod
    def of(seconds: Iterable[float]) -> Spread:
        """The spread of what each request saw; there must be one."""
        ranked = sorted(seconds)
        p50, p99 = (ranked[math.ceil(len(ranked) * percent / 100) - 1] for percent in (50, 99))
        return Spread(math.fsum(ranked) / len(ranked), p50, p99)


@dataclass(frozen=True, slots=True)
class Served:
    """The decode calls of one batch size: their path, what one takes in seconds, how many there were."""

    size: int
    decision: Decision
    seconds: float
    calls: int

    @property
    def padding(self) -> int:
        """Rows added in total to reach the bucket."""
        return ((self.decision.bucket or self.size) - self.size) * self.calls


@dataclass(frozen=True, slots=True)
class Replay:
    """What an engine would have done. Times are in seconds; batch sizes are rows: requests times ``width``.

    ``seconds`` is from the first arrival to the last token, ``busy_seconds`` the part of it in decode steps and
    prefills, ``waiting`` the share of it in steps that began with a full batch and a request queued. ``ttft`` is from
    arrival to first token, ``tpot`` from first to last token by tokens after the first, None without a second token.
    """

    buckets: tuple[int, ...]
    served: tuple[Served, ...]
    requests: int
    tokens: int
    seconds: float
    busy_seconds: float
    prefill_seconds: float
    waiting: float
    ttft: Spread
    tpot: Spread | None

    @property
    def sizes(self) -> Mapping[int, int]:
        """Decode calls by batch size."""
        return {row.size: row.calls for row in self.served}

    @property
    def graph_calls(self) -> int:
        """Decode calls that replayed a graph."""
        return sum(row.calls for row in self.served if row.decision.is_graph)

    @property
    def eager_calls(self) -> int:
        """Decode calls that ran eagerly."""
        return sum(row.calls for row in self.served if not row.decision.is_graph)

    @property
    def padding(self) -> int:
        """Rows added in total to reach a bucket."""
        return sum(row.padding for row in self.served)

    @property
    def hit_rate(self) -> float | None:
        """Graph calls / decode calls; None without buckets (graphs are off) and without a decode call."""
        calls = self.graph_calls + self.eager_calls
        return self.graph_calls / calls if calls and self.buckets else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens by the time from the first arrival to the last token."""
        return self.tokens / self.seconds

    @property
    def seconds_per_call(self) -> float | None:
        """Mean of a decode step, None where prefills gave all tokens."""
        calls = self.graph_calls + self.eager_calls
        return (self.busy_seconds - self.prefill_seconds) / calls if calls else None

    def snapshot(self) -> Snapshot:
        """What the ledger of this engine would hold: its decode calls, all of them timed."""
        times: dict[TimeKey, Times] = {}
        for row in self.served:
            key = ("decode", row.decision.path, "full" if row.decision.is_graph else "", row.decision.bucket)
            times[key] = _added(times.get(key), row)
        forward = ForwardSnapshot(
            NAME,
            buckets=self.buckets,
            source="observe",
            rows=tuple(_row(row) for row in self.served),
            times=times,
            captures=dict.fromkeys(self.buckets, 1),
            capture_outcomes={(bucket, "ok"): 1 for bucket in self.buckets},
            live=dict.fromkeys(self.buckets, True),
        )
        return Snapshot({NAME: forward})


def _row(served: Served) -> Row:
    decision = served.decision
    mode = "full" if decision.is_graph else ""
    return Row(
        served.size, decision.path, decision.bucket, decision.reason, served.calls, served.padding, "decode", mode
    )


def _added(before: Times | None, served: Served) -> Times:
    bounds = list(before.bounds if before else [0] * (len(BOUNDS) + 1))
    bounds[bisect_left(BOUNDS, served.seconds)] += served.calls
    count, total = (before.count, before.sum) if before else (0, 0.0)
    return Times(count + served.calls, total + served.seconds * served.calls, tuple(bounds))
