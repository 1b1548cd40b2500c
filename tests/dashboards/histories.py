"""Histories of engines, as Prometheus would have scraped them.

Each history is a job of its own, so one server holds them all. Every step adds the same, so a rate is what it looks
like. What graphprobe itself says of a window is in the snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable

from graphprobe.ledger import Ledger
from graphprobe.observe import Probe, observe
from tests.dashboards.backfill import STEP, Alert, Engine, Histories, Traffic

MINUTES = 70
BUCKETS = (1, 2, 4, 8, 16)
WIDE = (*BUCKETS, *range(24, 129, 8))
ONCE = 50
"""The step in which something happens once."""


def times(end: int) -> range:
    """When these histories are scraped."""
    return range(end - MINUTES * 60, end + 1, STEP)


def graph(probe: Probe, size: int, bucket: int, calls: int, seconds: float = 0.009, mode: str = "full") -> None:
    for _ in range(calls):
        probe.graph_call(size, bucket, mode)
        probe.forward.time("graph", bucket, seconds, mode=mode)


def eager(probe: Probe, size: int, reason: str, calls: int, seconds: float = 0.042, phase: str = "decode") -> None:
    for _ in range(calls):
        probe.eager_call(size, reason, phase)
        probe.forward.time("eager", None, seconds, phase)


def captured(probe: Probe, buckets: Iterable[int]) -> None:
    """A warm-up, the largest bucket first."""
    holder = probe.forward.holder()
    for bucket in sorted(buckets, reverse=True):
        grown = (30 + bucket) << 20 if holder.pool_bytes == 0 else bucket << 20
        probe.forward.captured(bucket, "ok", 0.2 + bucket / 100, grown)
        holder.pool_bytes = (holder.pool_bytes or 0) + grown
    probe.forward.kv_capacity_tokens = 120_000


def healthy(ledger: Ledger) -> Traffic:
    """Captured by graphprobe, padded; a batch above the largest bucket now and then, and prefill."""
    probe = observe("decode", BUCKETS, source="capture", max_batch=16, padded=True, backend="cuda", ledger=ledger)
    captured(probe, BUCKETS)

    def step(index: int) -> None:
        for size, bucket in ((1, 1), (2, 2), (3, 4), (4, 4), (7, 8), (16, 16)):
            graph(probe, size, bucket, 8, 0.009 + bucket / 4000)
        eager(probe, 20, "batch_too_large", 2)
        eager(probe, 4, "warmup", 1)
        eager(probe, 700, "engine_declined", 3, 0.2, "prefill")

    return step


def degraded(ledger: Ledger) -> Traffic:
    """Batch 3 has no bucket, and the capture of 16 failed in the middle. An engine whose graphs are observed."""
    probe = observe("decode", BUCKETS, source="capture", max_batch=16, ledger=ledger)
    captured(probe, (1, 2, 4, 8))

    def step(index: int) -> None:
        for size, calls in ((1, 5), (2, 9), (4, 12)):
            graph(probe, size, size, calls)
        eager(probe, 3, "no_exact_bucket", 15)
        eager(probe, 16, "capture_failed", 1)
        if index == ONCE:
            probe.forward.captured(16, "oom", 0.1, None)
            probe.forward.mismatch(4)

    return step


def eager_only(ledger: Ledger) -> Traffic:
    """An engine that never replays and says nothing of buckets: it has no series of graph calls at all."""
    probe = observe("decode", ledger=ledger)

    def step(index: int) -> None:
        eager(probe, 1, "unknown", 20)
        eager(probe, 5, "engine_declined", 4)

    return step


def idle(ledger: Ledger) -> Traffic:
    """Captured and waiting."""
    probe = observe("decode", BUCKETS, source="capture", max_batch=16, padded=True, ledger=ledger)
    captured(probe, BUCKETS)
    return lambda index: None


def switched_off(ledger: Ledger) -> Traffic:
    """Graphs are switched off: nothing counts, so there is no hit rate."""
    probe = observe("decode", BUCKETS, ledger=ledger)
    return lambda index: eager(probe, 3, "disabled", 20)


def rank(good: bool) -> Engine:
    """One rank of an engine that owns its graphs, with a drafter. Of the bad one half of the calls run eagerly."""

    def engine(ledger: Ledger) -> Traffic:
        target = observe("vllm", WIDE, unit="tokens", source="observe", padded=True, max_batch=128, ledger=ledger)
        draft = observe("vllm.drafter", BUCKETS, role="draft", source="observe", ledger=ledger)
        captured(target, WIDE)
        target.forward.kv_capacity_tokens, target.forward.pool_estimate_bytes = 400_000, 900 << 20
        ledger.hooks["vllm", "dispatch"], ledger.hooks["vllm", "drafter"] = True, False
        ledger.replays_seen = [0]
        target.forward.unmatched.update(graph=0, eager=0)

        def step(index: int) -> None:
            graph(target, 70, 72, 10, 0.02, "piecewise")
            graph(draft, 4, 4, 10, 0.002)
            if good:
                graph(target, 5, 8, 10, 0.012)
            else:
                eager(target, 5, "rank_vote", 10)
            eager(target, 300, "batch_too_large", 1)
            assert ledger.replays_seen is not None
            ledger.replays_seen[0] += 500
            if index == ONCE:
                # No zero was there before: an engine's own failures are not known ahead.
                target.forward.captured(128, "oom", 0.1, None)
                target.forward.mismatch(72)
                target.forward.unmatch("graph")

        return step

    return engine


HISTORIES: Histories = {
    "healthy": [(healthy, 9464, "")],
    "degraded": [(degraded, 9464, "")],
    "eager-only": [(eager_only, 9464, "")],
    "idle": [(idle, 9464, "")],
    "off": [(switched_off, 9464, "")],
    "replicas": [
        *((rank(good=True), 9464, "0"), (rank(good=False), 9465, "1")),
        *((rank(good=True), 9474, "0"), (rank(good=True), 9475, "1")),
    ],
}

ALERTS = {
    **{job: [] for job in ("healthy", "idle", "replicas")},
    "degraded": [Alert("GraphprobeHitRateLow", "warning")],
    "eager-only": [Alert("GraphprobeGraphNeverUsed", "critical")],
}
"""Jobs whose rules are evaluated, and what fires there, as rules_test.yaml shows. "off" has no rules."""
