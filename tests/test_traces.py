"""Saved traces to timelines: Chrome traces as torch writes them, and databases as Nsight Systems exports them."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools import traces
from graphprobe.tools.timeline import Timeline
from graphprobe.tools.traces import read

Event = dict[str, Any]

HOST, THREAD = 4242, 4250
BEGAN = 5171006813772.713
"""Microseconds: where torch 2.13 begins to count."""

KERNEL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
)


# -- Chrome ----------------------------------------------------------------------------------------------------------


def on_host(name: str, at: float, length: float, cat: str, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": THREAD, "ts": at, "dur": length, "args": args}


def on_device(
    at: float, length: float, correlation: int, cat: str = "kernel", stream: int = 7, device: int = 0
) -> Event:
    args = {
        "queued": 0,
        "device": device,
        "context": 1,
        "stream": stream,
        "correlation": correlation,
        "grid": [4, 1, 1],
    }
    name = KERNEL if cat == "kernel" else "Memcpy DtoD (Device -> Device)"
    return {"ph": "X", "cat": cat, "name": name, "pid": device, "tid": stream, "ts": at, "dur": length, "args": args}


def flow(at: float, correlation: int) -> list[Event]:
    one = {"id": correlation, "cat": "ac2g", "name": "ac2g", "ts": at}
    return [{"ph": "s", "pid": HOST, "tid": THREAD, **one}, {"ph": "f", "pid": 0, "tid": 7, "bp": "e", **one}]


def eager(count: int = 20, gap: float = 15.0, at: float = BEGAN) -> list[Event]:
    """Kernels of 5 us, each launched by the host 3 us before it starts."""
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "ts": at, "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}}
    ]
    for i in range(count):
        start = at + i * (5 + gap)
        events += [
            on_host("aten::add", start - 6, 8, "cpu_op", **{"External id": i}),
            on_host("cudaLaunchKernel", start - 3, 2.5, "cuda_runtime", cbid=211, correlation=i + 1),
            on_device(start, 5, i + 1),
            *flow(start - 3, i + 1),
        ]
    events.append(on_host("cudaDeviceSynchronize", at, 900, "cuda_runtime", cbid=165, correlation=9_000))
    return events


def replay(count: int = 50, gap: float = 0.4, at: float = BEGAN, correlation: int = 77) -> list[Event]:
    """One launch of many kernels that share its correlation."""
    launch = on_host("cudaGraphLaunch", at - 40, 15, "cuda_runtime", cbid=311, correlation=correlation)
    return [launch, *(on_device(at + i * (5 + gap), 5, correlation) for i in range(count))]


def step(number: int, at: float, length: float, cat: str = "user_annotation") -> Event:
    return on_host(f"ProfilerStep#{number}", at, length, cat)


def saved(tmp_path: Path, events: Iterable[Any], name: str = "trace.json", **more: Any) -> Path:
    header = {
        "schemaVersion": 1,
        "deviceProperties": [],
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1790857026000000000,
    }
    content = json.dumps({**header, "traceEvents": list(events), "traceName": "/tmp/t.json", **more}).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def median(timeline: Timeline) -> float:
    gap = timeline.gaps().gap_us
    assert gap is not None
    return round(gap.p50, 3)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "trace.gz", "no_suffix"])
def test_eager_against_graph(name: str, tmp_path: Path) -> None:
    """The picture that is expected: median 15 us falls to 0.4, and as many kernels come from one launch."""
    slow, fast = read(saved(tmp_path, eager(50), name)).gaps(), read(saved(tmp_path, replay(50), name)).gaps()
    assert (50, 50, 50, 1) == (slow.kernels, fast.kernels, slow.launches, fast.launches)
    assert slow.gap_us is not None and fast.gap_us is not None
    assert (15.0, 0.4) == (round(slow.gap_us.p50, 3), round(fast.gap_us.p50, 3))
    assert (250.0, 250.0) == (round(slow.busy_us, 2), round(fast.busy_us, 2))
    assert () == slow.notes == fast.notes


def test_launches_are_found_by_correlation(tmp_path: Path) -> None:
    """The host called 3 us before each eager start, so 12 of 15 us had passed; of a replay it waited for nothing."""
    host = read(saved(tmp_path, eager(11))).gaps().host_us
    assert 120.0 == round(host or 0.0, 2)
    assert 0.0 == read(saved(tmp_path, replay())).gaps().host_us


def test_a_kernel_of_the_driver_api_has_its_launch(tmp_path: Path) -> None:
    """Triton's kernels are launched by cuLaunchKernel."""
    events = [on_host("cuLaunchKernel", 90, 3, "cuda_driver", correlation=5), on_device(100, 5, 5)]
    assert [-10.0] == [work.launch_us for work in read(saved(tmp_path, events)).works]


def test_of_two_calls_with_one_correlation_the_outer_one_is_the_launch(tmp_path: Path) -> None:
    """In whichever order they stand."""
    calls = [on_host(name, at, 3, "cuda_runtime", correlation=5) for name, at in (("a", 90), ("b", 80), ("c", 85))]
    assert [-20.0] == [work.launch_us for work in read(saved(tmp_path, [*calls, on_device(100, 5, 5)])).works]


def test_times_are_microseconds_whatever_is_displayed(tmp_path: Path) -> None:
    assert 15.0 == median(read(saved(tmp_path, eager(), displayTimeUnit="ns")))


def test_nanoseconds_survive_a_clock_that_counts_from_1970(tmp_path: Path) -> None:
    """A float has a quarter of a microsecond there, which is more than half a gap."""
    begins = [1790857026000000000 + 1050 * i for i in range(20)]
    events = [json.dumps(on_device(0, 0.65, i + 1)) for i in range(20)]
    exact = [e.replace('"ts": 0,', f'"ts": {t // 1000}.{t % 1000:03},') for e, t in zip(events, begins, strict=True)]
    path = tmp_path / "trace.json"
    path.write_text(f'{{"traceEvents": [{", ".join(exact)}]}}')
    assert [0.4] * 19 == [round(gap, 6) for gap, _ in read(path).between()]


def test_other_events_are_no_work(tmp_path: Path) -> None:
    """Flows, counters, names, ranges on the device, synchronisation, and open beginnings."""
    strange = [
        {"ph": "B", "cat": "kernel", "name": "open", "pid": 0, "tid": 7, "ts": BEGAN + 1},
        {"ph": "C", "cat": "kernel", "name": "counter", "pid": 0, "ts": BEGAN + 1, "args": {"bytes": 3}},
        {"ph": "i", "s": "t", "cat": "kernel", "name": "instant", "pid": 0, "tid": 7, "ts": BEGAN},
        {**on_device(BEGAN, 10_000, 1), "cat": "gpu_user_annotation", "name": "ProfilerStep#1"},
        {**on_device(BEGAN, 10_000, 1), "cat": "cuda_sync", "name": "Stream Wait Event"},
        {**on_device(BEGAN, 10_000, 1), "cat": "overhead", "name": "Activity Buffer Request"},
        {"ph": "X"},
        "text",
        None,
        7,
    ]
    assert read(saved(tmp_path, eager())).gaps() == read(saved(tmp_path, [*strange, *eager()])).gaps()


def test_copies_and_fills_are_told_from_kernels(tmp_path: Path) -> None:
    """Under today's categories and under old ones."""
    events = [on_device(0.5, 1, 1), on_device(2, 1, 2, "gpu_memcpy"), on_device(4, 1, 3, "gpu_memset")]
    older = [on_device(6, 1, 4, "Kernel"), on_device(8, 1, 5, "Memcpy"), on_device(10, 1, 6, "Memset")]
    kinds = [work.kind for work in read(saved(tmp_path, [*events, *older])).works]
    assert ["kernel", "memcpy", "memset"] * 2 == kinds


def test_kernels_of_rocm(tmp_path: Path) -> None:
    """The categories are the same; a correlation of 0 is none, and then each kernel counts as a launch."""
    launch = on_host("hipGraphLaunch", 1.5, 5, "cuda_runtime", correlation=4)
    events = [launch, on_device(10, 5, 4), on_device(16, 5, 4), on_device(30, 5, 0), on_device(40, 5, 0)]
    result = read(saved(tmp_path, events)).gaps()
    assert (4, 3, None) == (result.kernels, result.launches, result.host_us)
    assert any(note.startswith("hipGraphLaunch: ROCm may report") for note in result.notes)


def test_kernels_without_arguments_are_work(tmp_path: Path) -> None:
    """No correlation, no stream and no device: process and thread stand in for them."""
    bare = [
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": "stream 7", "ts": t, "dur": 2.5} for t in (0, 10)
    ]
    timeline = read(saved(tmp_path, bare))
    assert [("stream 7", None, None)] * 2 == [(one.stream, one.correlation, one.launch_us) for one in timeline.works]
    assert 7.5 == median(timeline)


def test_the_device_with_most_kernels_is_shown_and_the_others_named(tmp_path: Path) -> None:
    """Work of two devices is no overlap."""
    other = [on_device(BEGAN + 3 + i, 0.5, 500 + i, device=1) for i in range(4)]
    timeline = read(saved(tmp_path, [*other, *eager()]))
    assert (20, 15.0) == (timeline.kernels, median(timeline))
    assert ("shown is device 0, with 20 kernels; others: device 1 (4)",) == timeline.notes


def test_streams_that_overlap(tmp_path: Path) -> None:
    """A long kernel on a second stream hides the gaps of the first."""
    events = [*eager(), on_device(BEGAN, 395.0, 900, stream=20)]
    result = read(saved(tmp_path, events)).gaps()
    assert (0, 20, 0.0) == (
        result.gap_us.count if result.gap_us else None,
        result.overlapping,
        round(result.idle_share, 6),
    )


def test_what_is_there_twice_counts_once(tmp_path: Path) -> None:
    """As where traces were merged; two short kernels that whole microseconds make equal are two."""
    timeline = read(saved(tmp_path, eager() + eager()))
    assert (20, ("work that was there twice counts once: 20",)) == (timeline.kernels, timeline.notes)
    assert 2 == read(saved(tmp_path, [on_device(3, 0, 77), on_device(3, 0, 77)])).kernels


def test_whole_microseconds_are_said_to_hide_gaps(tmp_path: Path) -> None:
    assert any("whole microseconds" in note for note in read(saved(tmp_path, [on_device(3, 2, 1)])).notes)


@pytest.mark.parametrize("time", [None, "12", True, [], float("nan"), float("inf"), 10**30, -1])
def test_records_without_times_are_left_out_and_counted(time: Any, tmp_path: Path) -> None:
    """A kernel of no known length must not move a figure."""
    broken = on_device(BEGAN, 3, 5) | {"dur": time}
    timeline = read(saved(tmp_path, [broken, *eager()]))
    assert (20, 15.0) == (timeline.kernels, median(timeline))
    assert ("records of the device without a time are left out: 1",) == timeline.notes


def steps(count: int = 3) -> list[Event]:
    """Steps of 4 kernels, 1 ms apart, whose device runs 300 us behind the host; in each a range ``decode``."""
    events: list[Event] = []
    for n in range(count):
        at = BEGAN + 1000 * n
        events += [step(n + 4, at, 1000), on_host("decode", at + 10, 200, "user_annotation")]
        for i in range(4):
            key = 10 * n + i + 1
            events.append(on_host("cudaLaunchKernel", at + 20 + 5 * i, 3, "cuda_runtime", correlation=key))
            events.append(on_device(at + 990 + 10.5 * i, 9, key))
    return events


def test_a_step_of_the_profiler_can_be_selected(tmp_path: Path) -> None:
    """By its number, as it was launched; else the gaps between steps are in it, and a note says that."""
    path = saved(tmp_path, steps())
    whole, one = read(path), read(path, step=5)
    assert (12, 4) == (whole.kernels, one.kernels)
    assert 968.5 - 9 == pytest.approx(max(gap for gap, _ in whole.between()), abs=1e-3)
    assert {1.5} == {round(gap, 3) for gap, _ in one.between()}
    assert 1 == len(whole.notes)
    assert "3 steps are marked (ProfilerStep#4, ProfilerStep#5, ProfilerStep#6)" in whole.notes[0]
    assert () == one.notes


def test_a_range_of_the_user_can_be_selected(tmp_path: Path) -> None:
    timeline = read(saved(tmp_path, steps()), step="decode")
    assert (4, ("3 ranges are named decode: this is the last",)) == (timeline.kernels, timeline.notes)


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'ProfilerStep#1'. hint: marked are: ProfilerStep#4, decode, ProfilerStep#5"
    ):
        read(saved(tmp_path, steps()), step=1)


def test_a_list_of_events_is_a_trace(tmp_path: Path) -> None:
    """The other form that Chrome takes."""
    path = tmp_path / "trace.json"
    path.write_text("\ufeff\n " + json.dumps(eager()), encoding="utf-8")
    assert 15.0 == median(read(path))


def test_names_may_have_any_bytes(tmp_path: Path) -> None:
    """torch writes the names of kernels and ranges as they are: control characters, and other encodings."""
    path = saved(tmp_path, [on_host("range", BEGAN, 900, "user_annotation"), *eager()])
    path.write_bytes(
        path.read_bytes().replace(b"vectorized", b"vector\xff\tized").replace(b'"range"', b'"ra\xe9\nnge"')
    )
    assert 15.0 == median(read(path))


def test_a_real_trace_of_a_cpu_has_no_device(tmp_path: Path) -> None:
    """torch.profiler without a GPU: its steps are there, work of a device is not."""
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, schedule

    of_all = schedule(wait=0, warmup=1, active=3, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=of_all) as profiler:
        for _ in range(4):
            torch.nn.functional.linear(torch.randn(2, 4), torch.randn(4, 4))
            profiler.step()
    path = tmp_path / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    with pytest.raises(SourceError, match=r"without work of a device. hint: .*ProfilerActivity.CUDA"):
        read(path)
    # The same file with a kernel in it: its header, its steps and its clock are read as they are.
    trace = json.loads(gzip.decompress(path.read_bytes()))
    steps = [event for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#")]
    trace["traceEvents"] += [on_device(event["ts"] + 1, 2.5, 10**6 + i) for i, event in enumerate(steps)]
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    assert (3, 1) == (read(path).kernels, read(path, step=steps[1]["name"]).kernels)


# -- Nsight Systems --------------------------------------------------------------------------------------------------

PROCESS = ((1 << 24) | HOST) << 24
"""A global process: of its machine and its number."""

NAMES = {1: KERNEL, 2: "cudaLaunchKernel_v7000", 3: "cudaGraphLaunch_v10000", 4: "forward"}
TIMES = "start INTEGER NOT NULL, end INTEGER NOT NULL"
WHERE = (
    "deviceId INTEGER NOT NULL, contextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER"
)
SCHEMA = f"""
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, busLocation TEXT);
CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER NOT NULL, pid INTEGER NOT NULL, uuid TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({TIMES}, {WHERE}, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL,
    gridX INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({TIMES}, {WHERE}, bytes INTEGER, copyKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET ({TIMES}, {WHERE}, value INTEGER, bytes INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME ({TIMES}, eventClass INTEGER, globalTid INTEGER, correlationId INTEGER,
    nameId INTEGER, returnValue INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({TIMES}, {WHERE}, graphId INTEGER, graphExecId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER,
    textId INTEGER);
"""


class Export:
    """A database as `nsys export --type sqlite` makes it; times are given in microseconds."""

    def __init__(self, path: Path, schema: str = SCHEMA) -> None:
        self.path = path
        self.database = sqlite3.connect(path)
        self.database.executescript(schema)
        self.database.executemany("INSERT INTO StringIds VALUES (?, ?)", NAMES.items())

    def add(self, table: str, at: float, length: float, **columns: Any) -> None:
        start = round(at * 1000)
        values = {"start": start, "end": start + round(length * 1000), **columns}
        names, marks = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
        self.database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))

    def work(self, at: float, length: float, correlation: int, table: str = "KERNEL", **columns: Any) -> None:
        where = {"deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": correlation, "globalPid": PROCESS}
        names = {"demangledName": 1, "shortName": 1} if table == "KERNEL" else {}
        self.add(f"CUPTI_ACTIVITY_KIND_{table}", at, length, **{**where, **names, **columns})

    def call(self, at: float, correlation: int, name: int = 2, process: int = PROCESS) -> None:
        where = {"globalTid": process | THREAD, "correlationId": correlation, "nameId": name, "eventClass": 0}
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", at, 2.5, **where)

    def eager(self, count: int = 20, gap: float = 15.0, at: float = 8_000.0, **columns: Any) -> Export:
        for i in range(count):
            start = at + i * (5 + gap)
            self.call(start - 3, i + 1, process=columns.get("globalPid", PROCESS))
            self.work(start, 5, i + 1, **columns)
        return self

    def saved(self) -> Path:
        self.database.commit()
        self.database.close()
        return self.path


@pytest.fixture
def export(tmp_path: Path) -> Export:
    return Export(tmp_path / "report.sqlite")


def test_a_database_says_what_the_trace_says(export: Export, tmp_path: Path) -> None:
    """Nanoseconds of the one are microseconds of the other; launches are found, and names."""
    timeline = read(export.eager(11).saved())
    assert read(saved(tmp_path, eager(11))).gaps().as_dict() == timeline.gaps().as_dict()
    assert {KERNEL} == {work.name for work in timeline.works}
    assert -3.0 == timeline.works[0].launch_us


def test_kernels_of_a_graph_recorded_one_by_one(export: Export) -> None:
    """They share the correlation of the launch, and a record of the whole beside them is not counted again."""
    export.call(960, 77, name=3)
    for i in range(50):
        export.work(1000 + 5.4 * i, 5, 77, graphNodeId=1000 + i)
    export.work(1000, 269.6, 77, "GRAPH_TRACE", graphId=3)
    result = read(export.saved()).gaps()
    assert (50, 50, 1, ()) == (result.kernels, result.works, result.launches, result.notes)
    assert 0.4 == round(result.gap_us.p50, 3) if result.gap_us else False


def test_graphs_recorded_as_a_whole_are_busy_and_noted(export: Export) -> None:
    """The device is not idle while a graph runs, and its kernels are not counted as none."""
    export.eager(3, at=1000)
    export.work(1046, 500, 70, "GRAPH_TRACE")
    result = read(export.saved()).gaps()
    assert (3, 4, 515.0) == (result.kernels, result.works, result.busy_us)
    assert "graph launches are recorded as a whole (1)" in result.notes[0]


def test_only_graphs_recorded_as_a_whole_are_no_figure(export: Export) -> None:
    for i in range(5):
        export.work(1000 + 100 * i, 90, i + 1, "GRAPH_TRACE")
    with pytest.raises(SourceError, match=r"recorded as a whole \(5\), and no kernel. hint: .*=node"):
        read(export.saved())


def test_copies_and_fills_are_work(export: Export) -> None:
    export.work(1000, 5, 1)
    export.work(1006, 4, 2, "MEMCPY", bytes=4096, copyKind=8)
    export.work(1011, 4, 3, "MEMSET")
    works = read(export.saved()).works
    assert ["kernel", "memcpy", "memset"] == [work.kind for work in works]
    assert "memcpy" == works[1].name


def test_two_processes_on_two_gpus_are_not_one_device(export: Export) -> None:
    """Both say device 0, and count their launches from 1; the table of devices tells them apart."""
    other = ((1 << 24) | 5000) << 24
    export.database.execute("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (2, 0, ?, 'a'), (5, 0, 5000, 'b')", (HOST,))
    export.eager(20).eager(3, at=8_002, globalPid=other)
    timeline = read(export.saved())
    assert (20, 15.0) == (timeline.kernels, median(timeline))
    assert ("shown is GPU 2, with 20 kernels; others: GPU 5 (3)",) == timeline.notes


def test_two_processes_on_one_gpu_are_one_device(export: Export) -> None:
    """Their launches are told apart although the numbers are equal."""
    other = ((1 << 24) | 5000) << 24
    export.database.execute("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (2, 0, ?, 'a'), (2, 0, 5000, 'a')", (HOST,))
    export.eager(20).eager(20, at=8_010, globalPid=other)
    result = read(export.saved()).gaps()
    assert (40, 40, 5.0) == (result.kernels, result.launches, result.gap_us.p50 if result.gap_us else None)
    assert 39 * 2.0 == result.host_us


def test_two_processes_of_unknown_gpus_are_not_mixed(export: Export) -> None:
    other = ((1 << 24) | 5000) << 24
    timeline = read(export.eager(20).eager(3, at=8_002, globalPid=other).saved())
    assert ("shown is device 0 of process 4242, with 20 kernels; others: device 0 of process 5000 (3)",) == (
        timeline.notes
    )


def test_a_range_of_nvtx_can_be_selected(export: Export) -> None:
    """Its text stands in the row, or among the strings."""
    export.eager(20)
    export.add("NVTX_EVENTS", 8_000 - 4, 42, text="ProfilerStep#2", eventType=59)
    export.add("NVTX_EVENTS", 8_100 - 4, 22, textId=4, eventType=59)
    export.database.execute("INSERT INTO NVTX_EVENTS (start, end, eventType, text) VALUES (5, NULL, 34, 'mark')")
    path = export.saved()
    assert (3, 2, 20) == tuple(read(path, step=step).kernels for step in (2, "forward", None))


OLDER = f"""
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({TIMES}, streamId INTEGER, shortName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME ({TIMES}, correlationId INTEGER, nameId INTEGER);
"""


def test_a_version_with_fewer_columns(tmp_path: Path) -> None:
    """No device, no correlation, no demangled names, no copies: what is there is read."""
    export = Export(tmp_path / "older.sqlite", OLDER)
    for i in range(4):
        export.add("CUPTI_ACTIVITY_KIND_KERNEL", 100 + 20 * i, 5, streamId=7, shortName=1)
    timeline = read(export.saved())
    assert (4, 15.0, KERNEL) == (timeline.kernels, median(timeline), timeline.works[0].name)
    assert (4, None) == (timeline.gaps().launches, timeline.gaps().host_us)


def test_calls_without_a_process_are_found_by_correlation(tmp_path: Path) -> None:
    schema = SCHEMA.replace(
        "globalTid INTEGER, correlationId INTEGER,\n    nameId", "correlationId INTEGER,\n    nameId"
    )
    export = Export(tmp_path / "report.sqlite", schema)
    export.work(1000, 5, 9)
    export.add("CUPTI_ACTIVITY_KIND_RUNTIME", 990, 3, correlationId=9, nameId=2)
    assert -10.0 == read(export.saved()).works[0].launch_us


def test_a_kernel_table_without_times_is_refused(tmp_path: Path) -> None:
    schema = OLDER.replace(f"CUPTI_ACTIVITY_KIND_KERNEL ({TIMES}, ", "CUPTI_ACTIVITY_KIND_KERNEL (")
    with pytest.raises(SourceError, match="CUPTI_ACTIVITY_KIND_KERNEL has no times"):
        read(Export(tmp_path / "report.sqlite", schema).saved())


def test_times_that_the_device_could_not_take_are_left_out(export: Export) -> None:
    """Both are 0 then, which would make a span of days."""
    export.eager(20).work(0, 0, 50)
    export.work(8_003, -1, 51)
    timeline = read(export.saved())
    assert (20, ("records of the device without a time are left out: 2",)) == (timeline.kernels, timeline.notes)


def test_reading_leaves_the_database_and_its_folder_alone(export: Export) -> None:
    """No journal and no new file; also in a folder that nobody may write to."""
    path = export.eager().saved()
    before = path.read_bytes()
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        assert 20 == read(path).kernels
    finally:
        path.parent.chmod(0o755)
    assert ([path], before) == (list(path.parent.iterdir()), path.read_bytes())


def test_a_database_that_another_program_has_locked_is_read(export: Export) -> None:
    path = export.eager().saved()
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    try:
        assert 20 == read(path).kernels
    finally:
        other.close()


@pytest.mark.parametrize("name", ["a b?mode=rwc#c%20.sqlite", "é.sqlite", "report.json"])
def test_a_database_of_any_name(name: str, tmp_path: Path) -> None:
    assert 20 == read(Export(tmp_path / name).eager().saved()).kernels


# -- bad input -------------------------------------------------------------------------------------------------------


def test_a_truncated_database_is_refused_wherever_it_was_cut(export: Export) -> None:
    """Also where the pages that are missing would never have been asked for: no figure of half a report."""
    content = export.eager(400).saved().read_bytes()
    for cut in (16, 50, 99, 100, 4095, 4096, len(content) // 2, len(content) - 4096, len(content) - 1):
        export.path.write_bytes(content[:cut])
        with pytest.raises(SourceError, match="a database that ends early"):
            read(export.path)


def test_a_damaged_database_is_refused(export: Export) -> None:
    content = bytearray(export.eager(400).saved().read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    export.path.write_bytes(content)
    with pytest.raises(SourceError, match="cannot be read"):
        read(export.path)


def test_a_database_that_is_still_written_is_refused(export: Export) -> None:
    path = export.eager().saved()
    Path(f"{path}-journal").write_bytes(b"unfinished")
    with pytest.raises(SourceError, match=r"report.sqlite-journal lies beside it"):
        read(path)


def test_a_database_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE users (name TEXT)")
    database.close()
    with pytest.raises(SourceError, match="not of Nsight Systems"):
        read(path)


def test_a_report_without_work_of_a_device(export: Export) -> None:
    export.call(10, 1)
    with pytest.raises(SourceError, match="without work of a device"):
        read(export.saved())


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.999])
def test_a_compressed_trace_that_ends_early(share: float, tmp_path: Path) -> None:
    path = saved(tmp_path, eager(500), "trace.json.gz")
    content = path.read_bytes()
    path.write_bytes(content[: max(20, int(len(content) * share))])
    with pytest.raises(SourceError, match="ends early"):
        read(path)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7, 0.999])
def test_a_trace_that_ends_early(share: float, tmp_path: Path) -> None:
    """Of which the events up to there would still be figures, and wrong ones."""
    path = saved(tmp_path, eager(500))
    content = path.read_bytes()[:-1]
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(SourceError, match=r"ends early|not JSON"):
        read(path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "an empty file"),
        (b" \n ", "an empty file"),
        (b"[]", "an empty trace"),
        (b'{"traceEvents": []}', "an empty trace"),
        (b'{"traceEvents": {}}', "no list traceEvents, its keys are: traceEvents"),
        (b'{"schema": 1, "forwards": {}}', "no list traceEvents, its keys are: schema, forwards"),
        (b"{}", "JSON, but no trace"),
        (b'{"traceEvents": [1, 2}', "not JSON"),
        (b'{"traceEvents": [{"ts": 1E+99999999999999999999}]}', "not JSON"),
        (b'{"traceEvents": [' + b"9" * 5000 + b"]}", "not JSON"),
        (b"[" * 200_000, "nested too deeply|ends early"),
        (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
        (b"# HELP graphprobe_graph_calls_total", "no trace. hint: what is read"),
        (b"\x28\xb5\x2f\xfd....", "compressed. hint: unpack it first, with unzstd"),
        (b"PK\x03\x04....", "compressed"),
        (b"\x1f\x8b", "compressed data that ends early"),
        (b"\x1f\x8b\x08\x00junkjunkjunkjunk", "damaged"),
        (b"SQLite for", "cut"),
        (gzip.compress(b""), "an empty file"),
        (gzip.compress(b"[]"), "an empty trace"),
        (gzip.compress(b"[]") + b"junk", "damaged"),
        (gzip.compress(b"SQLite format 3\0"), "unpacked"),
        (bytes(range(200)), "no trace"),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, named: str, tmp_path: Path) -> None:
    """Every message has the file's name, what it is, and what to do."""
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=named) as raised:
        read(path)
    assert "trace.json: " in str(raised.value)
    assert "hint: " in str(raised.value)


def test_a_trace_without_kernels(tmp_path: Path) -> None:
    """Copies alone are no step; records without times say why there is none."""
    with pytest.raises(SourceError, match=r"copies and fills of a device \(1\), but no kernel"):
        read(saved(tmp_path, [on_device(1, 2, 3, "gpu_memcpy")]))
    with pytest.raises(
        SourceError, match=r"without work of a device.*records of the device without a time are left out: 1"
    ):
        read(saved(tmp_path, [on_device(1, 2, 3) | {"ts": None}]))


def test_a_report_that_was_not_exported(tmp_path: Path) -> None:
    path = tmp_path / "report.nsys-rep"
    path.write_bytes(b"\x01\x02\x03binary")
    with pytest.raises(SourceError, match=r"nsys export --type sqlite .*report.nsys-rep"):
        read(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    """A folder, nothing, a pipe that nobody writes to: nothing waits, and nothing is made."""
    with pytest.raises(SourceError, match="not a file"):
        read(tmp_path)
    with pytest.raises(SourceError, match="No such file"):
        read(tmp_path / "missing.sqlite")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="not a file"):
        read(tmp_path / "pipe")
    with pytest.raises(SourceError, match="null byte"):
        read("a\0b")
    assert ["pipe"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_that_is_too_long(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unpacked, so that a small file cannot fill the memory."""
    monkeypatch.setattr(traces, "MAX_BYTES", 1 << 20)
    path = saved(tmp_path, eager(5), name, padding="x" * (1 << 20))
    with pytest.raises(SourceError, match=r"more than 1 MiB of trace. hint: record fewer steps"):
        read(path)
