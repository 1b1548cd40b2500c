from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import graphprobe
from graphprobe.errors import ConfigError
from graphprobe.ledger import LEDGER, Ledger, ignore
from graphprobe.observe import CACHED, Probe, observe, spans
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import Row
from graphprobe.timers import ClockTimer


def probe(ledger: Ledger, **options: Any) -> Probe:
    return observe("decode", [1, 2, 4, 8, 16], ledger=ledger, **options)


def test_counts(ledger: Ledger) -> None:
    """A graph call counts with its size, bucket, mode and phase, an eager one with its reason."""
    watched = probe(ledger)
    for _ in range(3):
        watched.graph_call(batch_size=3, bucket=4)
    watched.graph_call(batch_size=8, bucket=8, mode="piecewise", phase="verify")
    watched.eager_call(batch_size=17, reason="batch_too_large")
    watched.eager_call(17, FallbackReason.BATCH_TOO_LARGE)
    assert watched.snapshot().rows == (
        Row(3, "graph", 4, None, 3, padding=3, mode="full"),
        Row(17, "eager", None, FallbackReason.BATCH_TOO_LARGE, 2),
        Row(8, "graph", 8, None, 1, phase="verify", mode="piecewise"),
    )
    assert watched.snapshot().hit_rate == 4 / 6


def test_default_ledger() -> None:
    """Without a ledger the probe counts into that of the process, which graphprobe.snapshot() reads."""
    try:
        graphprobe.observe("test_default_ledger").eager_call(3, "unknown")
        assert graphprobe.snapshot().forwards["test_default_ledger"].eager_calls == 1
    finally:
        del LEDGER.forwards["test_default_ledger"]


def test_equal_names(ledger: Ledger) -> None:
    """Two probes of one name count into the same rows."""
    for watched in (probe(ledger), probe(ledger)):
        watched.graph_call(4, 4)
    assert ledger.snapshot().forwards["decode"].graph_calls == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.graph_call(-1, 4),
        lambda p: p.graph_call(5, 4),
        lambda p: p.graph_call(True, 4),
        lambda p: p.graph_call(3.0, 4),
        lambda p: p.graph_call("3", 4),
        lambda p: p.graph_call([3], 4),
        lambda p: p.graph_call(3, None),
        lambda p: p.graph_call(3, 0),
        lambda p: p.graph_call(3, 4, mode="half"),
        lambda p: p.graph_call(3, 4, phase="Prefill 1"),
        lambda p: p.graph_call(3, 4, phase=None),
        lambda p: p.eager_call(-1, "busy"),
        lambda p: p.eager_call(2.5, "busy"),
        lambda p: p.eager_call(3, "because"),
        lambda p: p.eager_call(3, None),
        lambda p: p.eager_call(3, ["busy"]),
        lambda p: p.eager_call(3, "busy", phase="request-17"),
        lambda p: p.timed("fast"),
        lambda p: p.timed("graph", bucket=True),
        lambda p: p.timed("graph", mode="half"),
    ],
)
def test_refused(ledger: Ledger, call: Callable[[Probe], None]) -> None:
    """An argument outside the contract raises in the caller, every time, and counts nothing."""
    watched = probe(ledger)
    for _ in range(2):
        with pytest.raises(ConfigError):
            call(watched)
    assert watched.snapshot().rows == ()


def test_index_types(ledger: Ledger) -> None:
    """A size of another index type counts as the number it is."""

    class Three:
        def __index__(self) -> int:
            return 3

    watched = probe(ledger)
    watched.graph_call(Three(), 4)  # type: ignore[arg-type]
    watched.graph_call(3, 4)
    assert watched.snapshot().rows == (Row(3, "graph", 4, None, 2, padding=2, mode="full"),)


def test_ignore(ledger: Ledger) -> None:
    """Inside ``ignore()`` nothing is counted or timed, on a fresh combination as on a known one."""
    watched = probe(ledger)
    watched.graph_call(4, 4)
    with ignore():
        watched.graph_call(4, 4)
        watched.graph_call(8, 8)
        watched.eager_call(3, "busy")
        with watched.timed("graph", bucket=4):
            pass
    shot = watched.snapshot()
    assert (shot.graph_calls, shot.eager_calls, dict(shot.times)) == (1, 0, {})


def test_threads_lose_nothing(ledger: Ledger) -> None:
    """Eight threads with 50,000 calls each end at the exact sum."""
    watched = probe(ledger)

    def run() -> None:
        for _ in range(50_000):
            watched.graph_call(3, 4)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watched.snapshot().graph_calls == 400_000


def test_no_lock_on_a_hit(ledger: Ledger) -> None:
    """A known combination is counted while somebody holds every lock of the ledger."""
    watched = probe(ledger)
    watched.graph_call(3, 4)
    watched.eager_call(3, "busy")

    def run() -> None:
        watched.graph_call(3, 4)
        watched.eager_call(3, "busy")

    with ledger._lock, watched.forward._lock:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(5)
    assert (watched.snapshot().graph_calls, watched.snapshot().eager_calls) == (2, 2)


def test_look_ups_are_bounded(ledger: Ledger) -> None:
    """Sizes without end do not grow the look-ups without end, and are all counted."""
    watched = probe(ledger)
    for size in range(CACHED + 50):
        watched.eager_call(size, "busy")
    watched.eager_call(CACHED + 1, "busy")
    assert len(watched._eager) == CACHED
    assert watched.snapshot().eager_calls == CACHED + 51


def test_timed(ledger: Ledger) -> None:
    """A timed block is one sample under its path, bucket, phase and mode, and no call."""
    watched = probe(ledger)
    with watched.timed("graph", bucket=4):
        pass
    with watched.timed("eager", phase="prefill", mode="piecewise"):
        pass
    shot = watched.snapshot()
    assert set(shot.times) == {("decode", "graph", "full", 4), ("prefill", "eager", "", None)}
    assert shot.rows == ()


def test_timed_block_that_raises(ledger: Ledger) -> None:
    """The caller's exception passes through, and its block is no sample."""
    watched = probe(ledger)
    with pytest.raises(KeyError), watched.timed("graph", bucket=4):
        raise KeyError
    assert watched.snapshot().times == {}


class Late:
    """A timer whose samples are known only at the next harvest; every third is dropped."""

    def __init__(self) -> None:
        self.pending: list[Callable[[float], None]] = []
        self.started = 0

    def start(self) -> int | None:
        self.started += 1
        return None if self.started % 3 == 0 else 0

    def stop(self, token: int, sink: Callable[[float], None]) -> None:
        self.pending.append(sink)

    def harvest(self) -> None:
        while self.pending:
            self.pending.pop()(0.5)


def test_injected_clock(ledger: Ledger) -> None:
    """A clock of the engine gives the seconds, later too; token 0 is a token, and what it drops is counted."""
    watched = probe(ledger, clock=Late())
    for _ in range(4):
        with watched.timed("graph", bucket=4):
            pass
    shot = watched.snapshot()
    assert shot.times["decode", "graph", "full", 4].sum == 1.0
    assert shot.dropped == 1


class Broken(ClockTimer):
    def stop(self, token: float, sink: Callable[[float], None]) -> None:
        raise RuntimeError("no events")


def test_broken_clock(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that fails is counted as our failure and never reaches the engine, unless under strict."""
    watched = probe(ledger, clock=Broken())
    with pytest.raises(RuntimeError), watched.timed("graph"):
        pass
    monkeypatch.setenv("GRAPHPROBE_STRICT", "0")
    with watched.timed("graph"):
        pass
    assert ledger.snapshot().internal_errors == {"observe.timed": 2}


def test_uncovered(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """Sizes that the engine may send and no bucket serves are named once, and counted in the snapshot."""
    for _ in range(2):
        probe(ledger, max_batch=10)
    assert ledger.snapshot().forwards["decode"].uncovered == {"decode": 6}
    assert [record.getMessage() for record in caplog.records] == [
        "decode: 6 of the batch sizes up to 10 have no bucket and run eagerly: 3, 5-7, 9-10"
    ]


def test_uncovered_when_padded(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that pads has only the sizes above its largest bucket uncovered."""
    assert probe(ledger, max_batch=16, padded=True).snapshot().uncovered == {"decode": 0}
    assert caplog.records == []
    assert probe(ledger, max_batch=18, padded=True).snapshot().uncovered == {"decode": 2}


def test_description(ledger: Ledger) -> None:
    """What a forward is told to be is in its snapshot; a later probe that does not say it leaves it."""
    observe("vllm", [8], unit="tokens", source="engine", role="drafter", backend="cuda", ledger=ledger)
    shot = observe("vllm", ledger=ledger).snapshot()
    assert (shot.unit, shot.source, shot.role, shot.backend, shot.buckets) == (
        "tokens",
        "engine",
        "drafter",
        "cuda",
        (8,),
    )


@pytest.mark.parametrize("name", ["", None, 3])
def test_name(ledger: Ledger, name: Any) -> None:
    """A forward needs a name."""
    with pytest.raises(ConfigError, match="name"):
        observe(name, ledger=ledger)


def test_spans() -> None:
    """Neighbours are written as a range."""
    assert spans([3, 5, 6, 7, 9, 11, 12]) == "3, 5-7, 9, 11-12"
    assert spans([]) == ""
