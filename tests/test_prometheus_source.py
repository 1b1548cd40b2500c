"""A window of time of a Prometheus server becomes snapshots: a real server with histories, and servers that fail."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

from graphprobe.errors import ConfigError, SourceError
from graphprobe.ledger import Ledger
from graphprobe.observe import observe
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot, Times
from graphprobe.tools.sources import Reading, reading
from tests.dashboards.backfill import Histories, Traffic, backfill
from tests.dashboards.histories import BUCKETS, captured, eager, graph, healthy, rank
from tests.dashboards.stack import Prometheus, binary
from tests.servers import Server

MINUTES = 120
RESTART, APPEARS, MOVES, ENDS = 90, 100, 95, 80
"""Scrapes, a minute apart, at which something happens."""


def restarting(ledger: Ledger) -> Traffic:
    """A process that restarts, and so counts from zero; in between it has counted less than before."""
    probe = observe("decode", BUCKETS, ledger=ledger)

    def step(index: int) -> None:
        if index == RESTART:
            ledger.forget()
        graph(probe, 3, 4, 50)
        eager(probe, 20, "batch_too_large", 7)

    return step


def appearing(ledger: Ledger) -> Traffic:
    """A reason for which nothing was counted before."""
    probe = observe("decode", BUCKETS, ledger=ledger)

    def step(index: int) -> None:
        graph(probe, 3, 4, 50)
        if index >= APPEARS:
            eager(probe, 3, "rank_vote", 10)

    return step


def moving(ledger: Ledger) -> Traffic:
    """A rollout in the window: other buckets afterwards."""
    probe = observe("decode", [4, 8], ledger=ledger)
    captured(probe, [4])

    def step(index: int) -> None:
        if index == MOVES:
            ledger.forwards.clear()
            observe("decode", [5, 8], ledger=ledger)
        graph(observe("decode", ledger=ledger), 3, 4 if index < MOVES else 5, 20)

    return step


def ending(ledger: Ledger) -> Traffic:
    """An engine that has stopped to serve."""
    probe = observe("decode", BUCKETS, ledger=ledger)
    return lambda index: graph(probe, 2, 2, 30 if index < ENDS else 0)


def relisted(ledger: Ledger) -> Traffic:
    """A restart five scrapes before the end, with another list."""
    observe("decode", [1, 2, 3], ledger=ledger)

    def step(index: int) -> None:
        if index == MINUTES - 5:
            ledger.forwards.clear()
            observe("decode", [1, 2, 4, 8], ledger=ledger)
        graph(observe("decode", ledger=ledger), 3, 4 if index >= MINUTES - 5 else 3, 20)

    return step


def listing(*buckets: int) -> Callable[[Ledger], Traffic]:
    """An engine with this list."""

    def traffic(ledger: Ledger) -> Traffic:
        probe = observe("decode", buckets, ledger=ledger)
        return lambda index: graph(probe, 3, 4, 20)

    return traffic


HISTORIES: Histories = {
    "relisted": [(relisted, 9464, "")],
    "vote": [(listing(1, 2, 3) if n == 3 else listing(1, 2, 4), 9464 + n, str(n)) for n in range(8)],
    "healthy": [(healthy, 9464, "")],
    "restarting": [(restarting, 9464, "")],
    "appearing": [(appearing, 9464, "")],
    "moving": [(moving, 9464, "")],
    "ending": [(ending, 9464, "")],
    "replicas": [(rank(good=True), 9464, "0"), (rank(good=False), 9465, "1")],
}


class Past(NamedTuple):
    """A server with these histories, and when they end."""

    url: str
    end: int
    snapshots: dict[str, list[dict[int, Snapshot]]]

    def read(self, job: str, minutes: float = 60, **options: Any) -> Reading:
        """The last minutes of a job."""
        options = {"end": self.end, "match": f'job="{job}"', "timeout": 30, **options}
        return reading(self.url, window=minutes * 60, **options)

    def counted(self, job: str, minutes: int = 60) -> ForwardSnapshot:
        """What the ledger of a job says of these minutes."""
        (shots,) = self.snapshots[job]
        return (shots[self.end] - shots[self.end - minutes * 60]).forwards["decode"]


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    data, end = tmp_path_factory.mktemp("past"), int(time.time()) // 60 * 60 - 120
    found = backfill(binary("promtool"), data, range(end - MINUTES * 60, end + 1, 60), HISTORIES, {})
    snapshots = {job: [p.snapshots for p in found if p.job == job] for job in HISTORIES}
    with Prometheus("{}", data) as prometheus:
        yield Past(prometheus.url, end, snapshots)


def by_range(forward: ForwardSnapshot) -> list[Row]:
    """The rows with the sizes that a series has: the prompts of 700 rows are in 513-1024."""
    return [dataclasses.replace(row, batch_size=1024) if row.batch_size == 700 else row for row in forward.rows]


def calls(snapshot: Snapshot, forward: str = "decode") -> dict[tuple[int, str], int]:
    """Calls by size and reason; ``graph`` where a graph served."""
    rows = snapshot.forwards[forward].rows if forward in snapshot.forwards else ()
    return {(row.batch_size, str(row.reason or "graph")): row.calls for row in rows}


# -- a real server -------------------------------------------------------------------------------------------------


def test_a_window_is_what_was_counted_in_it(past: Past) -> None:
    """Rows, padding, durations, captures and gauges: of the hour, not of the lifetime."""
    found = past.read("healthy", parts=6)
    forward, counted = found.snapshot.forwards["decode"], past.counted("healthy")
    assert "prometheus" == found.kind
    assert counted.buckets == forward.buckets
    assert by_range(counted) == list(forward.rows)
    assert counted.hit_rate == forward.hit_rate
    assert counted.padding == forward.padding
    assert counted.times.keys() == forward.times.keys()
    for key, times in counted.times.items():
        assert (times.count, pytest.approx(times.mean)) == (forward.times[key].count, forward.times[key].mean)
    assert counted.kv_capacity_tokens == forward.kv_capacity_tokens
    assert counted.pool_bytes == forward.pool_bytes
    assert counted.capture_seconds == forward.capture_seconds
    assert {1: True, 2: True, 4: True, 8: True, 16: True} == forward.live
    assert any(note.startswith("counts are increase() of 20") for note in found.notes)


def test_parts_are_the_window_in_the_order_of_time(past: Past) -> None:
    """Each has its own calls, and what the forward was then."""
    found = past.read("healthy", parts=6)
    assert 6 == len(found.windows)
    whole = calls(found.snapshot)
    for window in found.windows:
        assert {key: n // 6 for key, n in whole.items()} == calls(window)
        assert BUCKETS == window.forwards["decode"].buckets
    ended = past.read("ending", parts=6)
    assert [True, True, False, False, False, False] == [bool(calls(window)) for window in ended.windows]
    # Prometheus 3 leaves the scrape at the begin of a range out, so it sees an increase less.
    assert 30 * 18 <= calls(ended.snapshot)[2, "graph"] <= 30 * 19


def test_a_restart_inside_the_window(past: Past) -> None:
    """Costs nothing: neither is the fall negative, nor is what was counted before it lost."""
    found = past.read("restarting", parts=6)
    assert {(3, "graph"): 60 * 50, (20, "batch_too_large"): 60 * 7} == calls(found.snapshot)
    for window in found.windows:
        assert {(3, "graph"): 500, (20, "batch_too_large"): 70} == calls(window)


def test_a_series_that_appears_inside_the_window(past: Past) -> None:
    """Counts from then on; what it had at its first scrape cannot be told from what was before."""
    found = past.read("appearing", parts=6)
    late = calls(found.snapshot)[3, "rank_vote"]
    assert 200 <= late <= 210
    assert [False] * 4 + [True] * 2 == [(3, "rank_vote") in calls(window) for window in found.windows]
    assert 3000 == calls(found.snapshot)[3, "graph"]


def test_a_rollout_inside_the_window(past: Past) -> None:
    """The buckets are today's; each part has those of its time."""
    found = past.read("moving", parts=6)
    assert (5, 8) == found.snapshot.forwards["decode"].buckets
    assert [(4, 8), (4, 8)] == [window.forwards["decode"].buckets for window in found.windows[:2]]
    assert (5, 8) == found.windows[-1].forwards["decode"].buckets
    rows = {(row.batch_size, row.bucket) for row in found.snapshot.forwards["decode"].rows}
    assert {(3, 4), (3, 5)} == rows


def test_the_list_after_a_restart_is_todays_however_late_it_was(past: Past) -> None:
    """Both lists were there in the last part: what counts is which one is there at its end."""
    for parts in (4, 24):
        found = past.read("relisted", 60, parts=parts)
        assert (1, 2, 4, 8) == found.snapshot.forwards["decode"].buckets
        assert not any("different buckets" in note for note in found.notes)


def test_the_list_of_most_processes_is_todays(past: Past) -> None:
    """Of eight, one has another list."""
    found = past.read("vote")
    assert ({"decode": 8}, (1, 2, 4)) == (found.processes, found.snapshot.forwards["decode"].buckets)
    assert any("different buckets" in note for note in found.notes)


def test_processes_are_summed(past: Past) -> None:
    """Ranks with forwards of their own, a drafter, ranges of sizes, hooks and replays."""
    found = past.read("replicas", parts=6)
    assert {"vllm", "vllm.drafter"} == set(found.snapshot.forwards)
    assert {(72, "graph"): 1200, (5, "graph"): 600, (5, "rank_vote"): 600, (512, "batch_too_large"): 120} == calls(
        found.snapshot, "vllm"
    )
    (row,) = (row for row in found.snapshot.forwards["vllm"].rows if row.batch_size == 72)
    assert (2 * 1200, "piecewise") == (row.padding, row.mode)
    assert {("vllm", "dispatch"): True, ("vllm", "drafter"): False} == found.snapshot.hooks
    assert 2 * 60 * 500 == found.snapshot.replays_seen
    assert 400_000 == found.snapshot.forwards["vllm"].kv_capacity_tokens
    assert "2 processes are summed" in found.notes
    assert any("have a range for a size" in note for note in found.notes)
    alone = past.read("replicas", match='job="replicas",rank="1"')
    assert {(72, "graph"): 600, (5, "rank_vote"): 600, (512, "batch_too_large"): 60} == calls(alone.snapshot, "vllm")


@pytest.mark.parametrize("match", ['{job="healthy"}', ' job="healthy" , ', "job='healthy'", 'job=~"healt.+",rank=""'])
def test_ways_to_write_match(past: Past, match: str) -> None:
    """With braces and without, with any matcher of PromQL."""
    assert calls(past.read("healthy").snapshot) == calls(past.read("healthy", match=match).snapshot)


def test_nothing_selects_everything(past: Past) -> None:
    """Without match all that the server scrapes is read."""
    found = reading(past.url, window=3600, end=past.end, timeout=30)
    assert {"decode", "vllm", "vllm.drafter"} == set(found.snapshot.forwards)


def test_addresses(past: Past) -> None:
    """A slash at the end, the address of the graph in a browser, and a parameter that a proxy wants."""
    expected = past.read("healthy", parts=2)
    for tail in ("/", "/graph", "/graph?dedup=true"):
        assert expected == past._replace(url=past.url + tail).read("healthy", parts=2)


def test_parts_have_enough_scrapes(past: Past) -> None:
    """Ten minutes, scraped once a minute, are not 24 parts."""
    found = past.read("healthy", 10)
    assert 3 == len(found.windows)
    assert "3 parts, not 24: a part needs 4 scrapes" in found.notes
    assert by_range(past.counted("healthy", 10)) == list(found.snapshot.forwards["decode"].rows)
    assert 1 == len(past.read("healthy", 3).windows)


@pytest.mark.parametrize(
    ("job", "options", "told"),
    [
        ("none", {}, r"no series of graphprobe's calls that match \{job=\"none\"\} from 20.* UTC. hint: is the engine"),
        ("healthy", {"end": 10**9}, r"no series .* from 2001-09-09 00:46:40 to 2001-09-09 01:46:40 UTC. hint: is"),
        ("healthy", {"minutes": 0.5}, "only one scrape that match .* hint: take a longer window"),
        ("healthy", {"match": "job="}, "Prometheus says: .*parse error.* hint: write match as job="),
        ("healthy", {"match": 'x"} or vector(1) #'}, "Prometheus says: .*parse error"),
    ],
)
def test_what_a_real_server_refuses(past: Past, job: str, options: dict[str, Any], told: str) -> None:
    """No such series, another time, one scrape, and a match that is none."""
    with pytest.raises(SourceError, match=told):
        past.read(job, **options)


def test_an_idle_engine_has_no_calls(past: Past) -> None:
    """Which is an answer, and no error."""
    found = past.read("ending", 30)
    assert {} == calls(found.snapshot)
    assert BUCKETS == found.snapshot.forwards["decode"].buckets


# -- other servers -------------------------------------------------------------------------------------------------

LABELS = {"forward": "f", "phase": "decode", "batch_size": "3", "reason": "unknown", "path": "eager"}
POINT = {"metric": LABELS}


def answering(server: Server, answer: Callable[[dict[str, str]], Any], status: int = 200) -> list[str]:
    """The server answers each query with JSON (text as it is); the list has what it was asked."""
    asked: list[str] = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        query = {name: values[0] for name, values in parse_qs(urlsplit(handler.path).query).items()}
        told = answer(query)
        body = told if isinstance(told, bytes) else json.dumps(told).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    server.reply = reply
    return asked


def matrix(query: dict[str, str], value: str = "5", name: str = "eager_calls", **more: Any) -> Any:
    """One series, with this value in every part, where calls (or another name) are asked for; else none."""
    times = [float(query["start"])]
    while times[-1] + float(query["step"]) <= float(query["end"]) + 0.001:
        times.append(times[-1] + float(query["step"]))
    series = {"metric": LABELS, "values": [[at, value] for at in times]}
    return {"status": "success", "data": {"result": [series] if name in query["query"] else []}, **more}


def told(server: Server, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        reading(server.url, window=3600, **{"parts": 4, "timeout": 10, **options})
    message = str(caught.value)
    assert message.startswith(server.url) and message.isprintable() and " hint: " in message
    return message


def test_what_is_asked(server: Server) -> None:
    """Ranges that end at the end, each of the length of a part; and the whole window in one."""
    asked = answering(server, matrix)
    found = reading(server.url + "/prefix/", window=3600, end=1_000_000_000.5, parts=4, match='a="é b"')
    assert [{(3, "unknown"): 5}] * 4 == [calls(window, "f") for window in found.windows]
    queries = [{name: value[0] for name, value in parse_qs(urlsplit(path).query).items()} for path in asked]
    assert {"/prefix/api/v1/query_range"} == {urlsplit(path).path for path in asked}
    assert {"1000000000.500"} == {q["end"] for q in queries}
    wanted = {("900.000", "999997300.500"), ("3600.000", "1000000000.500")}
    assert wanted == {(q["step"], q["start"]) for q in queries}
    increase = 'increase(graphprobe_eager_calls_total{a="é b"}[900000ms])'
    wanted = f"sum by (forward, phase, batch_size, reason) ({increase} >= 0)"
    assert wanted in {q["query"] for q in queries}
    assert all('a="é b"' in q["query"] for q in queries)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            400,
            {"status": "error", "errorType": "bad_data", "error": "parse error at 7"},
            "says: parse error at 7. hint: write",
        ),
        (
            503,
            {"status": "error", "errorType": "timeout", "error": "query timed out"},
            "says: query timed out. hint: see its",
        ),
        (
            200,
            {"status": "error", "errorType": "execution", "error": "too\nmany"},
            r"says: too\nmany. hint: see its log",
        ),
        (422, b"<html>", "HTTP 422. hint: see the log of the server"),
        (500, b"", "HTTP 500. hint: see the log of the server"),
        (404, b"not here", "HTTP 404. hint: with a window of time, give the address of a Prometheus server"),
        (401, b"", "HTTP 401. hint: graphprobe sends no credentials"),
        (200, b"<html>", "no answer of Prometheus. hint: with a window of time, give the address"),
        (200, b"", "no answer of Prometheus"),
        (200, b"[]", "no answer of Prometheus"),
        (200, {"status": "success"}, "no answer of Prometheus"),
        (200, {"status": "success", "data": {"result": {"a": 1}}}, "no answer of Prometheus"),
        (200, {"status": "success", "data": {"result": [{**POINT, "values": [[1, 2, 3]]}]}}, "no answer of Prometheus"),
        (200, {"status": "success", "data": {"result": [{**POINT, "values": [[1, "x"]]}]}}, "no answer of Prometheus"),
        (200, {"status": "success", "data": {"result": [{**POINT, "values": [[1, "5"]]}]}}, "no answer of Prometheus"),
        (200, {"status": "success", "data": {"result": [{**POINT, "values": [[1e999, "5"]]}]}}, "no answer of Prom"),
        (200, {"status": "success", "warnings": None, "data": {"result": []}}, "no series of graphprobe's calls from"),
        (200, {"status": "success", "data": {"result": []}}, "no series of graphprobe's calls from"),
        (200, b"[" * 100_000, "no answer of Prometheus"),
    ],
)
def test_servers_that_fail(server: Server, status: int, body: Any, expected: str) -> None:
    """Prometheus's own words where there are any, else what it is not, and what to do."""
    answering(server, lambda query: body, status)
    assert expected in told(server)


def test_a_failure_halfway(server: Server) -> None:
    """A server that breaks down after a few answers is told as well."""
    asked: list[str] = []

    def answer(query: dict[str, str]) -> Any:
        asked.append(query["query"])
        return matrix(query) if len(asked) < 5 else {"status": "error", "errorType": "internal", "error": "disk"}

    answering(server, answer)
    assert "says: disk" in told(server)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_values_that_are_none(server: Server, value: str) -> None:
    """Are left out and told."""
    answering(server, lambda query: matrix(query, value if "increase" in query["query"] else "9"))
    found = reading(server.url, window=3600, parts=4)
    assert {} == calls(found.snapshot, "f")
    assert "1 values that are no numbers or negative are left out" in found.notes
    answering(server, lambda query: matrix(query, value))
    assert "no series of graphprobe's calls" in told(server)


def test_sizes_that_are_gone(server: Server) -> None:
    """An engine with more label sets than it may have folds its sizes away."""

    def folded(query: dict[str, str]) -> Any:
        return json.loads(json.dumps(matrix(query)).replace('"3"', '"all"'))

    answering(server, folded)
    assert "none of 5 calls has a size" in told(server)


def test_parts_of_samples(server: Server) -> None:
    """Prometheus has 2.4 samples where two or three were taken; their mean is what stays."""
    values = {"forward_seconds": "4.8", "forward_samples": "2.4"}

    def answer(query: dict[str, str]) -> Any:
        name = next((name for name in values if name in query["query"]), "eager_calls")
        return matrix(query, values.get(name, "5"), name)

    answering(server, answer)
    forward = reading(server.url, window=3600, parts=4).snapshot.forwards["f"]
    assert {("decode", "eager", "", None): Times(2, pytest.approx(4.0), ())} == forward.times


def test_warnings_are_told_once(server: Server) -> None:
    """As Thanos gives them where a store did not answer."""
    answering(server, lambda query: matrix(query, "9.4", warnings=["store gone"]))
    found = reading(server.url, window=3600, parts=4)
    assert 1 == found.notes.count("Prometheus warns: store gone")
    assert {(3, "unknown"): 9} == calls(found.snapshot, "f")


def test_an_answer_without_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is given up at the limit."""
    monkeypatch.setattr("graphprobe.tools.prometheus.MAX_BYTES", 1 << 20)
    answering(server, lambda query: b" " * (2 << 20))
    assert "an answer longer than 1 MiB. hint: take fewer parts" in told(server)


def test_nobody_answers(server: Server) -> None:
    """A refused connection, and a server that is silent for longer than the timeout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(SourceError, match=r"refused. hint: is it up, and is this the address of Prometheus"):
            reading(f"http://127.0.0.1:{free.getsockname()[1]}", window=60)
    server.reply = lambda handler: time.sleep(1)
    assert "no whole answer in 0.3 s" in told(server, timeout=0.3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"window": 0}, "a window is in seconds, at least 1 and at most ten years, got 0"),
        ({"window": -60.0}, "got -60.0"),
        ({"window": "1h"}, "got '1h'"),
        ({"window": True}, "got True"),
        ({"window": 60, "end": "now"}, "end must be a time of the past, in seconds of the epoch, got 'now'"),
        ({"window": float("nan")}, "got nan"),
        ({"window": float("inf")}, "got inf"),
        ({"window": 60, "end": float("nan")}, "end must be a time of the past, in seconds of the epoch, got nan"),
        ({"window": 60, "end": -5}, "end must be a time of the past"),
        ({"window": 3600, "end": 60}, "end must be a time of the past"),
        ({"window": 60, "end": 1e12}, "end must be a time of the past"),
        ({"window": 60, "parts": 0}, "parts must be at least 1, got 0"),
        ({"window": 60, "parts": 1.5}, "parts must be a whole number"),
        ({"window": 60, "parts": 1001}, "parts must be at most 1000"),
        ({"end": 1e9}, "end without a window of time. hint: window=3600"),
        ({"match": 'a="b"'}, "match without a window of time"),
        ({"parts": 0}, "parts must be at least 1"),
        ({"window": 60, "timeout": 0}, "timeout must be a time"),
    ],
)
def test_windows_that_are_none(options: dict[str, Any], expected: str) -> None:
    """Are refused where they were passed, before anybody is asked."""
    with pytest.raises(ConfigError) as caught:
        reading("http://127.0.0.1:1", **options)
    assert expected in str(caught.value)


@pytest.mark.parametrize("source", ["saved.json", "-", None, Snapshot()])
def test_a_window_of_something_else(source: Any) -> None:
    """A file, standard input, a snapshot or nothing has no history."""
    if source is None:
        with pytest.raises(SourceError):
            reading(source, window=60, timeout=0.5)
    else:
        with pytest.raises(ConfigError, match=r"only Prometheus has a window of time. hint: give its address"):
            reading(source, window=60)
