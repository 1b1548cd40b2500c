from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphprobe.errors import SourceError
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import SCHEMA, ForwardSnapshot, Row, Snapshot, Times

counts = st.integers(0, 10**12)
sizes = st.integers(0, 5000)
words = st.text(max_size=8)
seconds = st.floats(0, 1e6)
graph_rows = st.builds(
    Row, sizes, st.just("graph"), sizes, st.none(), counts, counts, words, st.sampled_from(["full", "piecewise"])
)
eager_rows = st.builds(Row, sizes, st.just("eager"), st.none(), st.sampled_from(FallbackReason), counts, phase=words)
times = st.builds(Times, counts, seconds, st.lists(counts, max_size=4).map(tuple))
time_keys = st.tuples(words, words, words, st.none() | sizes)
forwards = st.builds(
    ForwardSnapshot,
    name=st.just("decode"),
    buckets=st.lists(sizes, max_size=4).map(tuple),
    unit=words,
    source=words,
    role=words,
    backend=words,
    rows=st.lists(graph_rows | eager_rows, max_size=6).map(tuple),
    times=st.dictionaries(time_keys, times, max_size=3),
    captures=st.dictionaries(sizes, counts, max_size=3),
    capture_outcomes=st.dictionaries(st.tuples(sizes, words), counts, max_size=3),
    capture_seconds=st.dictionaries(sizes, seconds, max_size=3),
    live=st.dictionaries(sizes, st.booleans(), max_size=3),
    pool_bytes=st.none() | counts,
    pool_growth=st.dictionaries(sizes, st.integers(-(10**9), 10**9), max_size=3),
    pool_estimate_bytes=st.none() | counts,
    kv_capacity_tokens=st.none() | counts,
    uncovered=st.dictionaries(words, counts, max_size=3),
    dropped=counts,
    mismatches=st.dictionaries(sizes, counts, max_size=3),
    unmatched=st.dictionaries(st.sampled_from(["graph", "eager"]), counts),
    causes=st.dictionaries(words, words, max_size=3),
)
snapshots = st.builds(
    Snapshot,
    forwards=st.dictionaries(words, forwards, max_size=2).map(
        lambda found: {name: dataclasses.replace(forward, name=name) for name, forward in found.items()}
    ),
    internal_errors=st.dictionaries(words, counts, max_size=2),
    hooks=st.dictionaries(st.tuples(words, words), st.booleans(), max_size=2),
    replays_seen=st.none() | counts,
)


def graph(size: int, bucket: int, calls: int) -> Row:
    return Row(size, "graph", bucket, None, calls, calls * (bucket - size), mode="full")


def eager(size: int, reason: FallbackReason, calls: int) -> Row:
    return Row(size, "eager", None, reason, calls)


@given(snapshots)
def test_round_trip(shot: Snapshot) -> None:
    """The JSON of a snapshot gives an equal snapshot."""
    assert Snapshot.from_json(shot.to_json()) == shot


def test_json_names() -> None:
    """The JSON has the schema, and per forward the names of the object with the derived numbers beside them."""
    shot = Snapshot(
        {"decode": ForwardSnapshot("decode", (4,), rows=(graph(3, 4, 3), eager(5, FallbackReason.BUSY, 1)))}
    )
    data = json.loads(shot.to_json())
    assert data["schema"] == SCHEMA == 1
    forward = data["forwards"]["decode"]
    assert (forward["graph_calls"], forward["eager_calls"], forward["hit_rate"]) == (3, 1, 0.75)
    assert forward["pool_bytes"] is None
    assert forward["rows"][0] == {
        "batch_size": 3,
        "path": "graph",
        "bucket": 4,
        "reason": None,
        "calls": 3,
        "padding": 3,
        "phase": "decode",
        "mode": "full",
    }
    assert forward["rows"][1]["reason"] == "busy"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((), None),
        ((eager(1, FallbackReason.WARMUP, 5),), None),
        ((eager(3, FallbackReason.UNKNOWN, 5),), 0.0),
        ((graph(4, 4, 5), eager(1, FallbackReason.WARMUP, 5)), 1.0),
        ((graph(4, 4, 2609), eager(3, FallbackReason.NO_EXACT_BUCKET, 1641)), 2609 / 4250),
    ],
)
def test_hit_rate(rows: tuple[Row, ...], expected: float | None) -> None:
    """The hit rate is graph calls over graph and counted eager calls, and None where no call counts."""
    assert ForwardSnapshot("decode", rows=rows).hit_rate == expected


def test_sums() -> None:
    """Eager calls are all of them, counted or not; padding is the rows added in total."""
    forward = ForwardSnapshot(
        "d", rows=(graph(3, 4, 5), eager(1, FallbackReason.WARMUP, 2), eager(9, FallbackReason.BUSY, 1))
    )
    assert (forward.graph_calls, forward.eager_calls, forward.padding) == (5, 3, 5)


def test_mean_seconds() -> None:
    """A mean is weighted by samples, can be that of one bucket, and is None without a sample."""
    known = {("decode", "graph", "full", 4): Times(1, 1.0, ()), ("decode", "graph", "full", 8): Times(3, 9.0, ())}
    forward = ForwardSnapshot("decode", times=known)
    assert forward.mean_seconds("graph") == 2.5
    assert forward.mean_seconds("graph", 8) == 3.0
    assert forward.mean_seconds("eager") is None
    assert Times(0, 0.0, ()).mean is None


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=5))
def test_window(pairs: list[tuple[int, int]]) -> None:
    """Later minus earlier is what was counted in between: row by row, padding with it, without idle rows."""
    earlier = ForwardSnapshot("d", rows=tuple(graph(3, n + 4, was) for n, (was, _) in enumerate(pairs)))
    later = ForwardSnapshot("d", rows=tuple(graph(3, n + 4, was + more) for n, (was, more) in enumerate(pairs)))
    expected = tuple(graph(3, n + 4, more) for n, (_, more) in enumerate(pairs) if more)
    assert (Snapshot({"d": later}) - Snapshot({"d": earlier})).forwards["d"].rows == expected


def test_window_after_restart() -> None:
    """A counter that fell belongs to a new process: its later value is what was counted."""
    earlier = ForwardSnapshot(
        "d", rows=(graph(3, 4, 100),), dropped=5, times={("d", "graph", "full", 4): Times(9, 9.0, (9,))}
    )
    later = ForwardSnapshot(
        "d", rows=(graph(3, 4, 2),), dropped=1, times={("d", "graph", "full", 4): Times(2, 0.5, (2,))}
    )
    window = Snapshot({"d": later}, replays_seen=3) - Snapshot({"d": earlier}, replays_seen=50)
    assert window == Snapshot({"d": later}, replays_seen=3)


def test_window_of_times_and_captures() -> None:
    """Sampled times and captures have a window too, while gauges show the later state."""
    key = ("decode", "graph", "full", 4)
    earlier = ForwardSnapshot(
        "d", times={key: Times(2, 1.0, (1, 1))}, captures={4: 1}, pool_bytes=10, mismatches={4: 1}
    )
    later = ForwardSnapshot(
        "d", times={key: Times(5, 4.0, (1, 4))}, captures={4: 1, 8: 1}, pool_bytes=30, mismatches={4: 3}
    )
    window = later - earlier
    assert window.times == {key: Times(3, 3.0, (0, 3))}
    assert (window.captures, window.pool_bytes, window.mismatches) == ({8: 1}, 30, {4: 2})


def test_window_of_new_forward() -> None:
    """A forward that was not there before counts whole, and the empty window has no traffic."""
    shot = Snapshot({"d": ForwardSnapshot("d", rows=(graph(4, 4, 3),))})
    assert (shot - Snapshot()).forwards["d"].graph_calls == 3
    assert (shot - shot).forwards["d"].hit_rate is None


def one_row(rest: str) -> str:
    return '{"schema": 1, "forwards": {"d": {"rows": [{"batch_size": 1, ' + rest + "}]}}}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# HELP x\n",
        "[]",
        "3",
        "{}",
        '{"schema": 2, "forwards": {}}',
        '{"schema": 1}',
        '{"schema": 1, "forwards": []}',
        '{"schema": 1, "forwards": {"d": 3}}',
        '{"schema": 1, "forwards": {"d": {"rows": [{"batch_size": 1}]}}}',
        '{"schema": 1, "forwards": {"d": {"captures": {"x": 1}}}}',
        b"\xff\xfe",
        "[" * 100_000,
        one_row('"path": "eager", "bucket": null, "reason": "no", "calls": 1'),
        one_row('"path": "graph", "bucket": 1, "reason": null, "calls": "7"'),
    ],
)
def test_from_json_refuses(text: str | bytes) -> None:
    """Whatever is no snapshot of this schema is a SourceError, never another exception."""
    with pytest.raises(SourceError):
        Snapshot.from_json(text)


def test_frozen() -> None:
    """A snapshot cannot be changed."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Snapshot().replays_seen = 3  # type: ignore[misc]


def test_window_of_unmatched_calls() -> None:
    """The zeros stay: where nobody looks there is no entry at all."""
    earlier = ForwardSnapshot("d", unmatched={"graph": 3, "eager": 2})
    window = ForwardSnapshot("d", unmatched={"graph": 5, "eager": 2}) - earlier
    assert window.unmatched == {"graph": 2, "eager": 0}
    assert (ForwardSnapshot("d") - earlier).unmatched == {}
