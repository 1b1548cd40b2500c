"""Several processes, one directory: what each of them counted is served as it is, and never summed with another's."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from graphprobe import errors
from graphprobe.errors import ConfigError, ExporterError
from graphprobe.export import presence
from graphprobe.export.exporter import start_exporter
from graphprobe.export.multiprocess import Files
from graphprobe.ledger import Ledger
from graphprobe.observe import Probe, observe
from graphprobe.tools import sources
from graphprobe.tools.table import table

ROOT = Path(__file__).resolve().parents[1]
GRAPH, EAGER = "graphprobe_graph_calls_total", "graphprobe_eager_calls_total"

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def merged(directory: Path) -> CollectorRegistry:
    """What an engine's own /metrics has of the directory."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(directory))  # type: ignore[no-untyped-call]
    return registry


def by_rank(registry: CollectorRegistry, name: str = GRAPH) -> dict[str, float]:
    """The sum of a metric per rank."""
    found: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == name:
                rank = sample.labels["rank"]
                found[rank] = found.get(rank, 0) + sample.value
    return found


def page(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def ranks_of(text: str, name: str = GRAPH) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                rank = sample.labels["rank"]
                found[rank] = found.get(rank, 0) + sample.value
    return found


def soon(what: object, seconds: float = 20.0) -> None:
    """Wait until a condition holds, or fail."""
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def probe(ledger: Ledger, calls: int = 1) -> Probe:
    found = observe("decode", [1, 2, 4], ledger=ledger)
    for _ in range(calls):
        found.graph_call(3, 4)
    return found


WORKER = """
import os, sys, time, graphprobe
where, port, calls = sys.argv[1], sys.argv[2], int(sys.argv[3])
port = None if port == "-" else int(port)
running = graphprobe.start_exporter(port, directory=where, interval=0.05)
probe = graphprobe.observe("decode", [1, 2, 4])
for _ in range(calls):
    probe.graph_call(3, 4)
running.flush()
print("prometheus_client" in sys.modules, running.serving, flush=True)
for line in sys.stdin:
    if line == "count\\n":
        probe.graph_call(3, 4)
        running.flush()
    if line.endswith("fork\\n"):
        child = os.fork()
        if not child:
            if line == "fork\\n":
                probe.graph_call(3, 4)
            running.flush()
            print("child", flush=True)
            while line == "fork\\n":
                time.sleep(0.05)
            os._exit(0)
        if line != "fork\\n":
            os.waitpid(child, 0)
    print(running.serving, flush=True)
running.close()
"""


class Worker:
    """A process of an engine: it counts, writes, and serves if nobody else does."""

    def __init__(self, directory: Path, port: str = "-", calls: int = 1, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(directory), port, str(calls)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment},
            start_new_session=True,
        )  # fmt: skip
        self.imported, self.serving = (word == "True" for word in self.line().split())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, word: str = "") -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.line()

    def end(self, how: signal.Signals | None = None) -> None:
        if self.process.poll() is None:
            if how is None:
                assert self.process.stdin is not None
                self.process.stdin.close()
            else:
                self.process.send_signal(how)
            self.process.wait(20)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    found: list[Worker] = []
    yield found
    for worker in found:
        # A forked child may have outlived it, in the session that was its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait(20)


# -- the files -----------------------------------------------------------------------------------------------------


def test_an_engines_own_metrics_show_ours_beside_its_own(tmp_path: Path, ledger: Ledger) -> None:
    """A worker's counts are merged into the /metrics of an engine that uses the directory; nothing of it is lost.

    Where the worker writes nothing there, the page has none of our series, and an alert that asks for them would say so
    (H64, vllm-project/vllm#3938).
    """
    engine = """
import os, sys
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
from prometheus_client import Counter
Counter("engine_requests", "Requests.", ["kind"]).labels("a").inc(5)
"""
    subprocess.run([sys.executable, "-c", engine, str(tmp_path)], check=True)
    probe(ledger, 3)
    assert {"engine_requests"} == {family.name for family in merged(tmp_path).collect()}
    with start_exporter(None, directory=tmp_path, ledger=ledger):
        registry = merged(tmp_path)
        assert registry.get_sample_value("engine_requests_total", {"kind": "a"}) == 5
        labels = {"forward": "decode", "phase": "decode", "mode": "full", "batch_size": "3", "bucket": "4"}
        assert registry.get_sample_value(GRAPH, {**labels, "rank": "p0"}) == 3


def test_a_process_that_only_writes_does_not_import_the_client(tmp_path: Path, workers: list[Worker]) -> None:
    """prometheus_client decides at its import how the engine's own metrics are kept, so the engine imports it first."""
    workers += [Worker(tmp_path), Worker(tmp_path, "0")]
    assert [False, True] == [worker.imported for worker in workers]


def test_the_engine_that_sets_its_directory_late_keeps_its_metrics(tmp_path: Path) -> None:
    """The directory is set and the client imported after graphprobe has started, as servers do."""
    code = """
import os, sys, graphprobe
running = graphprobe.start_exporter(None, directory=sys.argv[1])
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
import prometheus_client
prometheus_client.Counter("engine_requests", "Requests.").inc(2)
graphprobe.observe("decode", [1]).graph_call(1, 1)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT)
    registry = merged(tmp_path)
    assert registry.get_sample_value("engine_requests_total") == 2
    assert by_rank(registry) == {"p0": 1}


def test_only_what_changed_is_written(tmp_path: Path, ledger: Ledger) -> None:
    """An idle engine's files stay as they are."""
    counted = probe(ledger)
    counted.forward.kv_capacity_tokens = 7
    files = Files(tmp_path, ledger)
    files.flush()
    before = {path.name: path.stat().st_ino for path in tmp_path.glob("*.db")}
    files.flush()
    assert before == {path.name: path.stat().st_ino for path in tmp_path.glob("*.db")}
    counted.graph_call(4, 4)
    files.flush()
    changed = {path.name.split("_")[0] for path in tmp_path.glob("*.db") if before[path.name] != path.stat().st_ino}
    assert {"counter"} == changed
    files.close()


def test_labels_that_are_folded_leave_the_files(tmp_path: Path, ledger: Ledger) -> None:
    """Once there are too many sizes, a call is counted under its range, and no longer under its size as well."""
    counted = observe("decode", list(range(1, 60)), ledger=ledger)
    files = Files(tmp_path, ledger)
    for size in range(1, 10_001):
        counted.eager_call(size, "unknown")
        if size % 2_500 == 100:
            files.flush()
            assert by_rank(merged(tmp_path), EAGER) == {"p0": size}
    files.flush()
    registry = merged(tmp_path)
    assert by_rank(registry, EAGER) == {"p0": 10_000}
    assert sum(len(f.samples) for f in registry.collect() if f.type != "histogram") < 600
    files.close()


def test_no_reader_sees_half_a_file(tmp_path: Path, ledger: Ledger) -> None:
    """A file that is being written is not one of the directory yet: only whole ones are found, with plausible sizes."""
    counted = probe(ledger)
    files = Files(tmp_path, ledger)
    for _ in range(50):
        counted.graph_call(3, 4)
        files.flush()
        for path in tmp_path.glob("*.db"):
            assert struct.unpack_from("=i", path.read_bytes())[0] == path.stat().st_size
    assert not list(tmp_path.glob("*.new"))
    files.close()


def test_gauges_leave_with_their_process_and_counts_stay(tmp_path: Path, ledger: Ledger) -> None:
    """A process that ends takes `captured` and the pool's bytes with it; what it counted stays, as counters must."""
    counted = probe(ledger, 2)
    counted.forward.kv_capacity_tokens = 4096
    running = start_exporter(None, directory=tmp_path, ledger=ledger)
    labels = {"forward": "decode", "rank": "p0"}
    assert merged(tmp_path).get_sample_value("graphprobe_kv_capacity_tokens", labels) == 4096
    counted.graph_call(3, 4)
    files = [str(path) for path in tmp_path.glob("gauge_*.db")]
    running.close()
    running.close()
    # A scrape that has listed the files just before does not fail over it.
    assert not list(MultiProcessCollector.merge(files))
    assert merged(tmp_path).get_sample_value("graphprobe_kv_capacity_tokens", labels) is None
    assert by_rank(merged(tmp_path)) == {"p0": 3}


def test_a_gauge_that_is_unknown_again_is_gone(tmp_path: Path, ledger: Ledger) -> None:
    """The capacity of a cache that was given up is not shown for ever."""
    counted, labels = probe(ledger), {"forward": "decode", "rank": "p0"}
    with start_exporter(None, directory=tmp_path, ledger=ledger) as running:
        for known in (4096, None, 512):
            counted.forward.kv_capacity_tokens = known
            running.flush()
            assert merged(tmp_path).get_sample_value("graphprobe_kv_capacity_tokens", labels) == known


# -- processes -----------------------------------------------------------------------------------------------------


def test_ranks_never_sum_up(tmp_path: Path, workers: list[Worker]) -> None:
    """Ranks that are known, two that are unknown, and two that claim the same one: six series, not three."""
    for calls, environment in enumerate([{"RANK": "0"}, {"RANK": "1"}, {}, {}, {"RANK": "1"}], 1):
        workers.append(Worker(tmp_path, calls=calls, **environment))
    assert by_rank(merged(tmp_path)) == {"0": 1, "1": 2, "p2": 3, "p3": 4, "1-p4": 5}


def test_gauges_have_a_rank_and_no_process_number(tmp_path: Path, workers: list[Worker]) -> None:
    """A restart adds no series: what is told apart is the rank (H66, prometheus/client_python#1033)."""
    workers += [Worker(tmp_path, RANK="0"), Worker(tmp_path, RANK="1")]
    before = {(s.name, *sorted(s.labels.items())) for f in merged(tmp_path).collect() for s in f.samples}
    workers[1].end(signal.SIGKILL)
    workers.append(Worker(tmp_path, RANK="1"))
    after = {(s.name, *sorted(s.labels.items())) for f in merged(tmp_path).collect() for s in f.samples}
    assert before == after
    assert not [labels for _, *labels in after if "pid" in dict(labels)]


def test_a_label_of_ones_own_keeps_equal_ranks_apart(tmp_path: Path, workers: list[Worker]) -> None:
    """Replicas whose ranks count from 0 each are told apart by GRAPHPROBE_LABELS; their rank stays what it is."""
    for replica in "ab":
        workers.append(Worker(tmp_path, RANK="0", GRAPHPROBE_LABELS=f"replica={replica}"))
    found = {(s.labels["rank"], s.labels["replica"]) for f in merged(tmp_path).collect() for s in f.samples}
    assert {("0", "a"), ("0", "b")} == found


def test_a_killed_process_leaves_its_counts_and_no_gauges(tmp_path: Path, workers: list[Worker]) -> None:
    """A rank that was killed is no longer `captured`; its successor has its rank, and the sum never goes down.

    (H65, prometheus/client_python#566)
    """
    workers += [Worker(tmp_path, RANK="0"), Worker(tmp_path, calls=5, RANK="1")]
    workers[1].end(signal.SIGKILL)
    gauge = "graphprobe_build_info"
    soon(lambda: by_rank(merged(tmp_path), gauge) == {"0": 1})
    assert by_rank(merged(tmp_path)) == {"0": 1, "1": 5}
    workers.append(Worker(tmp_path, calls=2, RANK="1"))
    assert by_rank(merged(tmp_path)) == {"0": 1, "1": 7}
    assert by_rank(merged(tmp_path), gauge) == {"0": 1, "1": 1}


def test_a_stale_directory_starts_from_zero(tmp_path: Path, workers: list[Worker]) -> None:
    """Where all who wrote there are dead, a new start does not show yesterday's counts; foreign files are not ours.

    (H65, prometheus/client_python#566)
    """
    workers.append(Worker(tmp_path, calls=100))
    workers[0].end(signal.SIGKILL)
    foreign = tmp_path / "counter_12345.db"
    foreign.write_bytes(b"\0" * 64)
    workers.append(Worker(tmp_path, calls=1))
    assert by_rank(merged(tmp_path)) == {"p0": 1}
    assert foreign.exists()


def test_a_forked_child_counts_for_itself(tmp_path: Path, workers: list[Worker]) -> None:
    """The child's counts start from zero under a rank of its own; the parent's are not repeated."""
    workers.append(Worker(tmp_path, calls=4))
    workers[0].tell("idle fork")
    workers[0].tell("fork")
    soon(lambda: by_rank(merged(tmp_path)) == {"p0": 4, "p1": 1})
    assert 2 == len(list(tmp_path.glob("counter_*.db"))), "a child that counted nothing wrote nothing"


def test_a_worker_of_multiprocessing_writes_its_last_counts(tmp_path: Path) -> None:
    """Such a process ends without atexit: however it was started, nothing that it counted is lost."""
    code = """
import multiprocessing, sys, graphprobe
def work(where, starts):
    if starts:
        graphprobe.start_exporter(None, directory=where, interval=100)
    for _ in range(7):
        graphprobe.observe("decode", [1]).graph_call(1, 1)
if __name__ == "__main__":
    graphprobe.start_exporter(None, directory=sys.argv[1], interval=100)
    for method in ("fork", "spawn", "forkserver"):
        worker = multiprocessing.get_context(method).Process(target=work, args=(sys.argv[1], method != "fork"))
        worker.start()
        worker.join()
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    where = tmp_path / "shared"
    where.mkdir()
    subprocess.run([sys.executable, str(script), str(where)], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert by_rank(merged(where)) == {"p1": 21}


@pytest.mark.parametrize("trial", range(5))
def test_ranks_that_start_at_once_start_from_zero_together(tmp_path: Path, trial: int) -> None:
    """A restart after a crash: of eight that find the directory stale one clears it, and removes nothing of another."""
    stale = Ledger()
    probe(stale, 1000)
    dead = Files(tmp_path, stale)
    dead.flush()
    assert dead._presence is not None
    dead._presence.let_go()
    barrier, started = threading.Barrier(8), []

    def start() -> None:
        ledger = Ledger()
        probe(ledger)
        barrier.wait()
        files = Files(tmp_path, ledger)
        files.flush()
        started.append(files)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert by_rank(merged(tmp_path)) == {f"p{n}": 1 for n in range(8)}
    for files in started:
        files.close()


def test_a_start_that_is_stopped_in_the_middle_does_not_stop_the_others(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that holds the lock of starters for good is waited for, but not for ever."""
    monkeypatch.setattr(presence, "PATIENCE", 0.05)
    held = presence.claim(tmp_path / "graphprobe.start")
    assert held is not None
    probe(ledger)
    with start_exporter(None, directory=tmp_path, ledger=ledger):
        assert by_rank(merged(tmp_path)) == {"p0": 1}
    presence.release(held)


@pytest.mark.parametrize("pattern", ["*.db", "*"])
def test_an_engine_that_clears_the_directory_loses_nothing(
    tmp_path: Path, workers: list[Worker], ledger: Ledger, pattern: str
) -> None:
    """Servers clear their directory when they start, perhaps after us: all is written again, idle gauges too."""
    workers += [Worker(tmp_path, "0", calls=4), Worker(tmp_path, calls=5)]
    before = {(s.name, *sorted(s.labels.items())) for f in merged(tmp_path).collect() for s in f.samples}
    for path in tmp_path.glob(pattern):
        path.unlink()
    soon(lambda: before == {(s.name, *sorted(s.labels.items())) for f in merged(tmp_path).collect() for s in f.samples})
    assert sorted(by_rank(merged(tmp_path)).values()) == [4, 5]
    workers.append(Worker(tmp_path, calls=6))
    soon(lambda: by_rank(merged(tmp_path)).keys() == {"p0", "p1", "p2"})
    assert sorted(by_rank(merged(tmp_path)).values()) == [4, 5, 6]
    url = (tmp_path / "graphprobe.endpoint").read_text()
    assert sorted(ranks_of(page(url)).values()) == [4, 5, 6]


def test_a_child_has_the_rank_that_it_sets_before_it_counts(tmp_path: Path) -> None:
    """Workers are told their rank after the fork: labels are read with the first count."""
    code = """
import multiprocessing, os, sys, time, graphprobe
from graphprobe.ledger import LEDGER, Ledger
mine = Ledger()
graphprobe.start_exporter(None, directory=sys.argv[1], interval=0.01)
graphprobe.start_exporter(None, directory=sys.argv[1] + "/mine", interval=0.01, ledger=mine)
graphprobe.observe("decode", [1], ledger=mine).graph_call(1, 1)
def work(rank):
    time.sleep(0.1)
    os.environ["RANK"] = str(rank)
    graphprobe.start_exporter(None, directory=sys.argv[1])
    for _ in range(rank):
        graphprobe.observe("decode", [1]).graph_call(1, 1)
        graphprobe.observe("decode", [1], ledger=mine).graph_call(1, 1)
for rank in (1, 2, 3):
    worker = multiprocessing.get_context("fork").Process(target=work, args=(rank,))
    worker.start()
    worker.join()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT)
    assert by_rank(merged(tmp_path)) == {"1": 1, "2": 2, "3": 3}
    assert by_rank(merged(tmp_path / "mine")) == {"p0": 1, "1": 1, "2": 2, "3": 3}


def test_labels_stay_once_something_is_counted(tmp_path: Path) -> None:
    """A rank that is known too late would end one series with its counts, and begin another above zero."""
    pytest.importorskip("torch")
    code = """
import sys, graphprobe, torch.distributed as dist
for counts_before in (False, True):
    ledger = graphprobe.ledger.Ledger()
    probe = graphprobe.observe("decode", [1], ledger=ledger)
    where = sys.argv[1] + ("/late" if counts_before else "/early")
    running = graphprobe.start_exporter(None, directory=where, ledger=ledger, interval=100)
    if counts_before:
        probe.graph_call(1, 1)
        running.flush()
    dist.init_process_group("gloo", init_method=f"file://{where}.store", rank=0, world_size=1)
    probe.graph_call(1, 1)
    running.flush()
    dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT)
    assert by_rank(merged(tmp_path / "early")) == {"0": 1}
    assert by_rank(merged(tmp_path / "late")) == {"p0": 2}


# -- one endpoint --------------------------------------------------------------------------------------------------


def test_the_snapshot_of_an_endpoint_says_whose_each_forward_is(tmp_path: Path, workers: list[Worker]) -> None:
    """`graphprobe table` and `top` show every living rank, summed with none; a single process needs no such word."""
    workers.append(Worker(tmp_path, "0", calls=2, RANK="0"))
    url = (tmp_path / "graphprobe.endpoint").read_text()
    assert ["decode"] == list(sources.read(url).forwards)
    workers.append(Worker(tmp_path, "0", calls=3, RANK="1"))
    found = sources.read(url)
    assert {"decode, rank 0": 2, "decode, rank 1": 3} == {n: f.graph_calls for n, f in found.forwards.items()}
    assert "decode, rank 1" in table(found)
    workers[1].end(signal.SIGKILL)
    soon(lambda: ["decode"] == list(sources.read(url).forwards))


def test_one_endpoint_has_all_ranks(tmp_path: Path, workers: list[Worker]) -> None:
    """Whoever comes first serves, at one address that all know; each rank has its own series there."""
    for rank in range(3):
        workers.append(Worker(tmp_path, "0", calls=rank + 1, RANK=str(rank)))
    assert [True, False, False] == [worker.serving for worker in workers]
    url = (tmp_path / "graphprobe.endpoint").read_text()
    assert ranks_of(page(url)) == {"0": 1, "1": 2, "2": 3}
    workers[2].tell("count")
    assert ranks_of(page(url)) == {"0": 1, "1": 2, "2": 4}
    assert "graphprobe_build_info" in page(f"{url}").replace("# HELP graphprobe_build_info", "")
    filtered = urllib.request.urlopen(f"{url}/metrics?name[]={GRAPH}", timeout=10).read().decode()
    assert {"0", "1", "2"} == set(ranks_of(filtered))
    assert EAGER not in filtered


@pytest.mark.parametrize("how", [None, signal.SIGKILL], ids=["ends", "is killed"])
def test_another_process_takes_over(tmp_path: Path, workers: list[Worker], how: signal.Signals | None) -> None:
    """When the process that serves ends, however it does, another one serves on the same port, its counts too."""
    workers.append(Worker(tmp_path, "0", RANK="0"))
    port = (tmp_path / "graphprobe.endpoint").read_text().rpartition(":")[2]
    workers.append(Worker(tmp_path, port, RANK="1"))
    workers[0].end(how)
    soon(lambda: workers[1].tell() == "True")
    url = f"http://127.0.0.1:{port}"
    assert ranks_of(page(url)) == {"0": 1, "1": 1}
    assert ranks_of(page(url), "graphprobe_build_info") == {"1": 1}


def test_a_forked_child_does_not_hold_its_parents_endpoint(tmp_path: Path, workers: list[Worker]) -> None:
    """A child that outlives its parent neither keeps the lock nor the port: it serves on."""
    workers.append(Worker(tmp_path, "0", calls=4))
    url = (tmp_path / "graphprobe.endpoint").read_text()
    workers[0].tell("fork")
    soon(lambda: ranks_of(page(url)) == {"p0": 4, "p1": 1})
    os.kill(workers[0].process.pid, signal.SIGKILL)
    soon(lambda: (tmp_path / "graphprobe.endpoint").read_text() not in ("", url))
    assert ranks_of(page((tmp_path / "graphprobe.endpoint").read_text())) == {"p0": 4, "p1": 1}


def test_a_port_of_someone_else_is_said_at_the_start(tmp_path: Path, ledger: Ledger) -> None:
    """A foreign server on the port is an error of the first process, which serves; later ones leave it at that."""
    with start_exporter(0) as foreign, pytest.raises(ExporterError, match=str(foreign.port)):
        start_exporter(foreign.port, directory=tmp_path, ledger=ledger)
    assert not list(tmp_path.glob("gauge_*.db"))
    with start_exporter(0, directory=tmp_path, ledger=ledger) as mine:
        assert mine.serving


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_FSIZE as Linux has it")
def test_a_disk_that_is_full_is_said_at_the_start_and_nothing_is_left(tmp_path: Path) -> None:
    """In one line with a hint, without a half-written file; later it costs counts, and is made up for."""
    code = """
import os, resource, signal, sys, graphprobe
from graphprobe.errors import ExporterError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
graphprobe.observe("decode", list(range(1, 9))).graph_call(1, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
try:
    graphprobe.start_exporter(None, directory=sys.argv[1])
except ExporterError as error:
    assert "hint" in str(error), error
    print("said")
assert not [name for name in os.listdir(sys.argv[1]) if ".db" in name or ".new" in name], os.listdir(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
graphprobe.start_exporter(None, directory=sys.argv[1])
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "said"
    assert by_rank(merged(tmp_path)) == {"p0": 1}


@pytest.mark.parametrize("first", ["flush", "close"])
@pytest.mark.parametrize("second", ["flush", "close"])
def test_a_signals_handler_may_flush_and_close(tmp_path: Path, first: str, second: str) -> None:
    """SIGTERM in the middle of a flush, whose handler closes the exporter, as engines do: nothing waits for itself."""
    code = """
import os, signal, sys, threading, time, graphprobe
probe = graphprobe.observe("decode", list(range(1, 60)))
for size in range(1, 60):
    probe.graph_call(size, size)
running = graphprobe.start_exporter(None, directory=sys.argv[1], interval=0.001)
signal.signal(signal.SIGALRM, lambda number, frame: getattr(running, sys.argv[3])())
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.003)
end = time.monotonic() + 1
while time.monotonic() < end:
    probe.graph_call(8, 8)
    getattr(running, sys.argv[2])()
signal.setitimer(signal.ITIMER_REAL, 0)
running.close()
"""
    command = [sys.executable, "-c", code, str(tmp_path), first, second]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)


def test_a_second_start_hands_out_the_first(tmp_path: Path, ledger: Ledger) -> None:
    """Two that write one ledger would count twice. Another port is refused until the first is closed."""
    probe(ledger)
    with start_exporter(None, directory=tmp_path, ledger=ledger) as first:
        assert first is start_exporter(None, directory=f"{tmp_path}/.", ledger=ledger)
        with pytest.raises(ConfigError, match="close"):
            start_exporter(0, directory=tmp_path, ledger=ledger)
        assert by_rank(merged(tmp_path)) == {"p0": 1}
    with start_exporter(None, directory=tmp_path, ledger=ledger) as second:
        assert second is not first
        assert by_rank(merged(tmp_path)) == {"p0": 1}


def test_a_registry_and_a_directory_do_not_go_together(tmp_path: Path, ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="directory"):
        start_exporter(0, directory=tmp_path, registry=CollectorRegistry(), ledger=ledger)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="directory"):
        start_exporter(None, ledger=ledger)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="interval"):
        start_exporter(None, directory=tmp_path, ledger=ledger, interval=0)


def test_workers_that_are_forked_at_once_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Start, then fork, as servers do: no child holds a lock that its parent had for a moment, and nothing is lost."""
    code = """
import os, sys, time, graphprobe
running = graphprobe.start_exporter(None, directory=sys.argv[1], interval=0.001)
children = []
for _ in range(20):
    child = os.fork()
    if not child:
        graphprobe.observe("decode", [1]).graph_call(1, 1)
        began = time.monotonic()
        running.flush()
        os._exit(time.monotonic() - began > 4.5)
    children.append(child)
sys.exit(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT, timeout=100)
    assert sum(by_rank(merged(tmp_path)).values()) == 20


def test_what_a_fork_has_let_go_of_is_let_go_of_once(tmp_path: Path, ledger: Ledger) -> None:
    """In a child with two exporters the second forgets its parent's locks, not those that the first has just taken."""
    files = Files(tmp_path / "parents", ledger)
    assert files._presence is not None
    # What the fork's own hook does, and then another exporter's thread, which gets descriptors of the same numbers.
    before = list(files._presence._held)
    for lock in before:
        presence.release(lock)
    paths = [tmp_path / "childs" / str(n) for n in range(20)]
    taken = [presence.claim(path) for path in paths]
    assert set(before) <= set(taken)
    files.forked()
    assert [None] * len(paths) == [presence.claim(path) for path in paths]
    for held in taken:
        assert held is not None
        presence.release(held)


def test_a_child_of_a_fork_in_the_middle_of_a_start_may_start(tmp_path: Path) -> None:
    """Another thread of the parent was starting an exporter, and is not there to finish."""
    code = """
import os, sys, graphprobe
from graphprobe.export import directory
directory._starting.acquire()
child = os.fork()
if not child:
    graphprobe.start_exporter(None, directory=sys.argv[1]).close()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT, timeout=60)


def test_no_name_is_no_directory(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable that is not set does not make the current folder one for metrics."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="directory"):
        start_exporter(None, directory="", ledger=ledger)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["file", "/sys/graphprobe", "/dev/null/x", "nul\0byte"])
def test_a_directory_that_cannot_be_written_is_said_at_the_start(tmp_path: Path, ledger: Ledger, place: str) -> None:
    """In one line, with a hint, and nothing keeps running."""
    (tmp_path / "file").write_text("")
    with pytest.raises((ExporterError, ConfigError), match="hint"):
        start_exporter(None, directory=tmp_path / place, ledger=ledger)


def test_a_directory_that_goes_away_is_made_again(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's clean-up under a running engine costs nothing: the endpoint goes on, the counts are there again."""
    # It may happen in the middle of a step, which is then counted as failed.
    monkeypatch.delenv("GRAPHPROBE_STRICT")
    where = tmp_path / "shared"
    counted = probe(ledger)
    with start_exporter(0, directory=where, ledger=ledger, interval=0.02) as running:
        soon(lambda: shutil.rmtree(where, ignore_errors=True) or not (where / "graphprobe.endpoint").exists())
        counted.graph_call(3, 4)
        soon(lambda: ranks_of(page(running.url)) == {"p0": 2})


def test_a_directory_that_cannot_be_made_again_is_counted_and_waited_for(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, said: object
) -> None:
    """A file in its place is said once; when it is gone, the counts are written."""
    monkeypatch.delenv("GRAPHPROBE_STRICT")
    where = tmp_path / "shared"
    counted = probe(ledger)
    with start_exporter(None, directory=where, ledger=ledger, interval=0.02):

        def in_its_place() -> bool:
            shutil.rmtree(where, ignore_errors=True)
            with contextlib.suppress(OSError):
                where.write_text("")
            return where.is_file()

        soon(in_its_place)
        counted.graph_call(3, 4)
        soon(lambda: any("export.multiprocess" in text for text in said()))  # type: ignore[operator]
        where.unlink()
        counted.graph_call(3, 4)
        soon(lambda: where.is_dir() and by_rank(merged(where)) == {"p0": 3})


@pytest.mark.parametrize("port", [None, 0])
def test_the_end_is_not_an_error_of_the_engine(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, port: int | None
) -> None:
    """Where nothing can be written any more when the engine ends, counts are lost; locks and ports are given back."""
    monkeypatch.delenv("GRAPHPROBE_STRICT")
    where = tmp_path / "shared"
    before = set(os.listdir("/proc/self/fd"))
    with start_exporter(port, directory=where, ledger=ledger, interval=100):
        soon(lambda: shutil.rmtree(where, ignore_errors=True) or not where.exists())
        where.write_text("")
        probe(ledger)
    assert 0 < errors.internal_errors["export.multiprocess"]
    assert before == set(os.listdir("/proc/self/fd"))


def test_starting_again_goes_on_where_it_ended(tmp_path: Path, workers: list[Worker], ledger: Ledger) -> None:
    """Closed and started three times beside another living process, a ledger is there once, and nothing is kept."""
    workers.append(Worker(tmp_path))
    counted = probe(ledger, 100)
    for _ in range(3):
        running = start_exporter(None, directory=tmp_path, ledger=ledger)
        counted.graph_call(3, 4)
        running.close()
        assert by_rank(merged(tmp_path))["p1"] == counted.forward.snapshot().graph_calls
    known = weakref.ref(running)
    del running
    gc.collect()
    assert known() is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"port": 99999}, "65535"),
        ({"port": 0, "host": "0.0.0.0"}, "addr="),
        ({"port": 0, "certfile": "x"}, "keyfile"),
        ({"port": 0, "addr": 5}, "addr"),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_arguments_are_checked_by_those_that_do_not_serve_too(
    tmp_path: Path, ledger: Ledger, arguments: dict[str, Any], words: str, shared: bool
) -> None:
    """What would fail only when a process takes over is said at its start."""
    directory = {"directory": tmp_path} if shared else {}
    with start_exporter(0, directory=tmp_path, ledger=Ledger()), pytest.raises(ConfigError, match=words):
        start_exporter(ledger=ledger, **directory, **arguments)


def test_a_path_is_taken_as_it_is_meant(tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, for a process that goes elsewhere; as bytes; and with brackets, which are no pattern."""
    monkeypatch.chdir(tmp_path)
    counted = probe(ledger)
    for directory in ("run[1]", os.fsencode("bytes")):
        monkeypatch.chdir(tmp_path)
        with start_exporter(0, directory=directory, ledger=ledger) as running:  # type: ignore[call-overload]
            monkeypatch.chdir("/")
            counted.graph_call(3, 4)
            running.flush()
            calls = ledger.snapshot().forwards["decode"].graph_calls
            assert ranks_of(page(running.url)) == {"p0": calls}


def test_counting_costs_one_increment_whoever_writes(tmp_path: Path, ledger: Ledger) -> None:
    """A count touches neither file nor lock: with the directory's lock held it goes on."""
    counted = probe(ledger)
    with start_exporter(None, directory=tmp_path, ledger=ledger, interval=100) as running:
        held, taken = running._files._lock, threading.Event()
        threading.Thread(target=lambda: (held.acquire(), taken.set()), daemon=True).start()
        assert taken.wait(20)
        counted.graph_call(3, 4)
        running._files._lock = threading.RLock()
    assert by_rank(merged(tmp_path)) == {"p0": 2}


def test_the_client_still_reads_what_we_write(tmp_path: Path, ledger: Ledger) -> None:
    """The format is prometheus_client's own: a file of theirs, rewritten by us, is read alike."""
    registry = CollectorRegistry()
    Counter("theirs", "Theirs.", registry=registry)
    counted = probe(ledger, 2)
    counted.forward.time("graph", 4, 3e-4)
    counted.forward.time("graph", 4, 99.0)
    files = Files(tmp_path, ledger)
    files.flush()
    registry = merged(tmp_path)
    labels = {"forward": "decode", "phase": "decode", "path": "graph", "mode": "", "rank": "p0"}
    name = "graphprobe_forward_duration_seconds"
    assert registry.get_sample_value(f"{name}_count", labels) == 2
    assert registry.get_sample_value(f"{name}_sum", labels) == pytest.approx(99.0003)
    assert registry.get_sample_value(f"{name}_bucket", {**labels, "le": "0.0004"}) == 1
    assert registry.get_sample_value(f"{name}_bucket", {**labels, "le": "+Inf"}) == 2
    files.close()
