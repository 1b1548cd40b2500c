"""What the pictures show: two ranks that do well until batches of 3 come, an hour before the end; 3 has no bucket."""

from __future__ import annotations

import random
from collections.abc import Mapping

from graphprobe.ledger import Ledger
from graphprobe.observe import Probe, observe
from tests.dashboards.backfill import STEP, Alert, Engine, Histories, Traffic
from tests.dashboards.histories import captured, eager, graph

SHOWN = 3 * 3600
"""Seconds of the range of time that is shown."""

CHANGE = 64
"""How many steps before the end batches of 3 begin to come."""

DECODE, VISION = (1, 2, 4, 8, 16), (6, 12, 24, 48)
HOST = {1: 9.1, 2: 9.3, 4: 9.8, 8: 10.9, 16: 13.3, 6: 4.1, 12: 6.6, 24: 11.2, 48: 21.0}
"""Milliseconds of a graph call by bucket."""

END = 1_782_875_040
"""2026-07-01 03:04 UTC, so that two runs draw the same picture."""

TIMES = range(END - SHOWN - 600, END + 1, STEP)
BEFORE = len(TIMES) - CHANGE
LATER = {1: 260, 2: 250, 4: 230, 8: 130, 16: 60}
"""Decode calls in a step by batch size."""


def rank(threes: int) -> Engine:
    """A rank that from the change on gets ``threes`` batches of 3 in a step, in the place of others."""

    def engine(ledger: Ledger) -> Traffic:
        chance = random.Random(threes)
        decode = observe("decode", DECODE, source="capture", max_batch=24, backend="cuda", ledger=ledger)
        vision = observe("vision", VISION, source="observe", padded=True, backend="cuda", ledger=ledger)
        captured(decode, DECODE)
        captured(vision, VISION)

        def step(index: int) -> None:
            swing = 1 + 0.15 * chance.uniform(-1, 1)
            new = round(threes * swing) if index >= BEFORE else 0
            left = 1 - new / sum(LATER.values())
            for size, calls in LATER.items():
                replayed(decode, chance, size, size, round(calls * swing * left))
            missed(decode, chance, 3, "no_exact_bucket", new + 2)
            missed(decode, chance, 20, "batch_too_large", chance.randrange(12))
            eager(decode, 700, "engine_declined", 15, 0.21, "prefill")
            for size, bucket in ((5, 6), (7, 12), (10, 12), (20, 24)):
                replayed(vision, chance, size, bucket, round(12 * swing), "piecewise")

        return step

    return engine


def replayed(probe: Probe, chance: random.Random, size: int, bucket: int, calls: int, mode: str = "full") -> None:
    for _ in range(calls):
        graph(probe, size, bucket, 1, HOST[bucket] / 1e3 * chance.uniform(0.97, 1.05), mode)


def missed(probe: Probe, chance: random.Random, size: int, reason: str, calls: int) -> None:
    for _ in range(calls):
        eager(probe, size, reason, 1, 0.0429 * chance.uniform(0.95, 1.15))


JOB = "serving"

HISTORIES: Histories = {JOB: [(rank(110), 9464, "0"), (rank(390), 9465, "1")]}

ALERTS: Mapping[str, list[Alert]] = {
    JOB: [
        Alert("GraphprobeHitRateLow", "warning", "1", BEFORE + 2, 10),
        Alert("GraphprobeRankSkew", "warning", "1", BEFORE + 2, 10),
    ]
}
"""What rules.yaml makes fire here."""
