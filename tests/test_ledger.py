from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import threading

import pytest

from graphprobe import errors
from graphprobe.buckets import Buckets
from graphprobe.ledger import BOUNDS, CAUSES, EXACT_SIZES, LEDGER, Ledger, add, ignore, ignored
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import Row

MISS = FallbackReason.NO_EXACT_BUCKET


def test_cell_is_shared(ledger: Ledger) -> None:
    """The same combination gives the same cell, so increments of any holder reach the snapshot."""
    forward = ledger.forward("decode", Buckets([4]))
    one, other = forward.graph_cell(3, 4), ledger.forward("decode").graph_cell(3, 4)
    one[0] += 1
    other[0] += 1
    assert forward.snapshot().rows == (Row(3, "graph", 4, None, 2, padding=2, mode="full"),)


def test_rows(ledger: Ledger) -> None:
    """Rows are sorted by phase, size and path, carry their padding, and none is kept for a cell that never counted."""
    forward = ledger.forward("decode")
    add(forward.eager_cell(9, MISS), 2)
    add(forward.graph_cell(3, 4, "prefill", "piecewise"), 5)
    add(forward.graph_cell(3, 8), 1)
    forward.graph_cell(1, 1)
    assert forward.snapshot().rows == (
        Row(3, "graph", 8, None, 1, padding=5, mode="full"),
        Row(9, "eager", None, MISS, 2),
        Row(3, "graph", 4, None, 5, padding=5, phase="prefill", mode="piecewise"),
    )


def test_exact_sizes_are_bounded(ledger: Ledger) -> None:
    """Beyond the exact sizes a new one counts under the next power of two; known ones stay exact, no call is lost."""
    forward = ledger.forward("prefill")
    for size in range(EXACT_SIZES + 1000):
        forward.eager_cell(size, MISS)[0] += 1
    forward.eager_cell(77, MISS)[0] += 1
    counts = {row.batch_size: row.calls for row in forward.snapshot().rows}
    assert counts[77] == 2
    assert counts[2 * EXACT_SIZES] == 999
    assert sum(counts.values()) == EXACT_SIZES + 1001


def test_threads_lose_nothing(ledger: Ledger) -> None:
    """Eight threads that count into one cell end at the exact sum."""
    cell = ledger.forward("decode").graph_cell(4, 4)

    def count() -> None:
        for _ in range(50_000):
            add(cell)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.snapshot().forwards["decode"].graph_calls == 400_000


def test_times(ledger: Ledger) -> None:
    """A sample falls into the first bound that is not below it; what is above all bounds is the overflow."""
    forward = ledger.forward("decode")
    for seconds in (BOUNDS[0], BOUNDS[0] * 1.01, 5.0):
        forward.time("graph", 4, seconds, mode="full")
    times = forward.snapshot().times["decode", "graph", "full", 4]
    assert (times.count, times.bounds[:2], times.bounds[-1]) == (3, (1, 1), 1)
    assert len(times.bounds) == len(BOUNDS) + 1
    assert times.mean == pytest.approx((BOUNDS[0] * 2.01 + 5.0) / 3)


def test_captures(ledger: Ledger) -> None:
    """Only a capture that succeeded counts as one, makes its bucket live and states seconds and growth."""
    forward = ledger.forward("decode")
    forward.captured(4, "oom", 0.5, None)
    forward.captured(4, "ok", 0.25, 1024)
    forward.captured(8, "error", 0.5, 7)
    shot = forward.snapshot()
    assert dict(shot.capture_outcomes) == {(4, "oom"): 1, (4, "ok"): 1, (8, "error"): 1}
    assert (shot.captures[4], shot.captures[8]) == (1, 0)
    assert (shot.capture_seconds, shot.live, shot.pool_growth) == ({4: 0.25}, {4: True}, {4: 1024})
    assert shot.pool_bytes is None


def test_first_buckets_win(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """A second bucket list for the same name is said once and changes nothing; the same list is no difference."""
    first = ledger.forward("decode", Buckets([1, 2]))
    ledger.forward("decode", Buckets([2, 1]))
    assert caplog.records == []
    for _ in range(2):
        assert ledger.forward("decode", Buckets([1, 4])) is first
    assert first.buckets == Buckets([1, 2])
    assert len(caplog.records) == 1
    assert "[1, 4] differ" in caplog.text


def test_explain(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """A cause is logged once per key, its latest text is kept, and the number of causes is bounded."""
    forward = ledger.forward("decode")
    with caplog.at_level(logging.WARNING):
        for number in range(CAUSES + 10):
            forward.explain(f"k{number}", "first")
        forward.explain("k0", "second")
    assert len(caplog.records) == CAUSES
    causes = forward.snapshot().causes
    assert (len(causes), causes["k0"], causes["k1"]) == (CAUSES, "second", "first")


def test_ignore_is_per_thread() -> None:
    """Inside ``ignore()`` this thread is not counted, other threads are; blocks nest and end with an exception."""
    seen: list[bool] = []
    with pytest.raises(KeyError), ignore():
        with ignore():
            pass
        assert ignored()
        thread = threading.Thread(target=lambda: seen.append(ignored()))
        thread.start()
        thread.join()
        raise KeyError
    assert seen == [False]
    assert not ignored()


def test_snapshot_waits_for_no_forward(ledger: Ledger) -> None:
    """A snapshot is taken while every lock of the ledger is held by someone else."""
    forward = ledger.forward("decode")
    add(forward.graph_cell(4, 4))
    done: list[int] = []
    with ledger._lock, forward._lock:
        reader = threading.Thread(
            target=lambda: done.append(ledger.snapshot().forwards["decode"].graph_calls), daemon=True
        )
        reader.start()
        reader.join(5)
    assert done == [1]


def test_fork_counts_from_zero() -> None:
    """A forked child starts at zero with the cells it inherited; the parent keeps its counts."""
    forward = LEDGER.forward("test_fork", Buckets([4]))
    cell = forward.graph_cell(4, 4)
    add(cell, 7)
    forward.captured(4, "ok", 0.1, 5)
    forward.time("graph", 4, 0.1)
    errors.internal_errors["somewhere"] = 1
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with ignore():
            pass
        cell[0] += 1
        shot = LEDGER.snapshot()
        mine = shot.forwards["test_fork"]
        told = [mine.graph_calls, len(mine.times), mine.captures, dict(mine.live), dict(shot.internal_errors)]
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert json.loads(os.read(reading, 65_536)) == [1, 0, {}, {"4": False}, {}]
    assert forward.snapshot().graph_calls == 7
    del LEDGER.forwards["test_fork"]


def test_a_snapshot_bears_new_rows_in_the_middle_of_it(ledger: Ledger) -> None:
    """A garbage collection that the snapshot itself starts may run other code, which counts a new size."""
    forward, sizes = ledger.forward("decode"), itertools.count(1)

    def count(phase: str, info: dict[str, int]) -> None:
        add(forward.eager_cell(next(sizes), FallbackReason.UNKNOWN))
        add(forward.graph_cell(next(sizes), 1 << 20))

    before = gc.get_threshold()
    gc.callbacks.append(count)
    try:
        gc.set_threshold(1)
        for _ in range(5):
            ledger.snapshot()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(count)
    assert 10 < next(sizes)


def test_forget_keeps_who_is_judged(ledger: Ledger) -> None:
    """In a forked child mismatches start from 0, and are told on as such."""
    forward = ledger.forward("sglang")
    assert [forward.unmatch("graph"), forward.unmatch("graph")] == [1, 2]
    forward.forget()
    assert forward.snapshot().unmatched == {"graph": 0}
