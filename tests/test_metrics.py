from __future__ import annotations

import dataclasses
import logging
import re
import subprocess
import sys
import types
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphprobe import metrics
from graphprobe.buckets import Buckets
from graphprobe.ledger import Ledger, add
from graphprobe.metrics import (
    GRAPH_CALLS,
    LIMIT,
    Distribution,
    Sample,
    constant_labels,
    forward_samples,
    limit,
    samples,
    size_label,
)
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot

CONTRACT = """
graphprobe_graph_calls_total counter forward phase mode batch_size bucket
graphprobe_eager_calls_total counter forward phase batch_size reason
graphprobe_padding_rows_total counter forward phase bucket
graphprobe_forward_duration_seconds histogram forward phase path mode
graphprobe_forward_seconds_total counter forward phase path bucket
graphprobe_forward_samples_total counter forward phase path bucket
graphprobe_timing_samples_dropped_total counter forward
graphprobe_captures_total counter forward bucket outcome
graphprobe_capture_duration_seconds gauge forward bucket
graphprobe_bucket_captured gauge forward bucket
graphprobe_graph_pool_bytes gauge forward
graphprobe_graph_pool_growth_bytes gauge forward bucket
graphprobe_graph_pool_estimate_bytes gauge forward
graphprobe_kv_capacity_tokens gauge forward
graphprobe_uncovered_sizes gauge forward phase
graphprobe_verify_mismatches_total counter forward bucket
graphprobe_replay_mismatches_total counter forward path
graphprobe_replays_seen_total counter
graphprobe_hook_bound gauge engine hook
graphprobe_internal_errors_total counter where
graphprobe_forward_info info forward unit buckets backend source role
graphprobe_build_info info version contract torch cuda device backend
"""


def series(found: list[Sample], name: str) -> dict[tuple[str, ...], Any]:
    """Label values -> value of one metric."""
    return {tuple(s.labels.values()): s.value for s in found if s.metric.name == name}


def total(found: list[Sample], name: str) -> int:
    return sum(series(found, name).values())


def test_contract() -> None:
    """Names, kinds and labels are those of the published contract, version 1."""
    lines = [" ".join((m.name, m.kind, *m.labels)) for m in metrics.CATALOGUE]
    assert lines == CONTRACT.strip().splitlines()
    assert metrics.CONTRACT == "1"


@pytest.mark.parametrize("metric", metrics.CATALOGUE, ids=lambda metric: metric.name)
def test_names(metric: metrics.Metric) -> None:
    """A counter ends in _total, an info in _info, a unit ends its name; help is a sentence."""
    suffix = {"counter": "_total", "info": "_info"}.get(metric.kind, "")
    assert metric.name == metric.family + suffix
    unit = metrics.UNITS.get(metric.unit)
    assert unit is None or metric.family.endswith(f"_{unit}")
    assert metric.help.endswith(".")
    assert re.fullmatch(r"(graphprobe)(\.[a-z]+)+", metric.otel_name)


def test_otel_names() -> None:
    """OpenTelemetry names are dotted, without the kind and the unit that its Prometheus exporter adds."""
    assert metrics.GRAPH_CALLS.otel_name == "graphprobe.graph.calls"
    assert metrics.FORWARD_DURATION.otel_name == "graphprobe.forward.duration"
    assert metrics.FORWARD_SECONDS.otel_name == "graphprobe.forward"
    assert metrics.POOL_GROWTH.otel_name == "graphprobe.graph.pool.growth"
    assert len({metric.otel_name for metric in metrics.CATALOGUE}) == len(metrics.CATALOGUE)


@pytest.mark.parametrize(
    ("size", "buckets", "expected"),
    [
        (0, (), "0"),
        (64, (), "64"),
        (65, (), "65-128"),
        (129, (), "129-256"),
        (65, (16, 64, 72, 80), "65-72"),
        (72, (16, 64, 72, 80), "65-72"),
        (73, (16, 64, 72, 80), "73-80"),
        (81, (16, 64, 72, 80), "81-128"),
        (129, (16, 64, 72, 80), "129-256"),
        (70, (32, 128), "65-128"),
        (65, (64, 65), "65"),
        (17, (16,), "17"),
        (100, (16,), "65-128"),
    ],
)
def test_size_label(size: int, buckets: tuple[int, ...], expected: str) -> None:
    """Sizes are exact up to 64, then one range per bucket, then powers of two above the largest bucket."""
    assert size_label(size, buckets) == expected


@given(st.lists(st.integers(1, 600), max_size=12, unique=True).map(sorted), st.integers(0, 3000))
def test_size_label_holds_its_size(buckets: list[int], size: int) -> None:
    """The range of a size contains it, and every size of the range has the same label."""
    label = size_label(size, buckets)
    low, _, high = label.partition("-")
    ends = int(low), int(high or low)
    assert ends[0] <= size <= ends[1]
    assert {size_label(ends[0], buckets), size_label(ends[1], buckets)} == {label}


def test_born_at_zero(ledger: Ledger) -> None:
    """Before any call there is a 0 for each bucket, each size without one, and the first range above all."""
    ledger.forward("decode", Buckets([1, 2, 4, 8, 72]), source="observe")
    found = samples(ledger.snapshot())
    graph = [(size, bucket) for _, _, _, size, bucket in series(found, "graphprobe_graph_calls_total")]
    assert graph == [("1", "1"), ("2", "2"), ("4", "4"), ("8", "8"), ("65-72", "72")]
    eager = [labels[2:] for labels in series(found, "graphprobe_eager_calls_total")]
    missing = [(str(n), "no_exact_bucket") for n in range(1, 65) if n not in (1, 2, 4, 8)]
    assert eager == [*missing, ("73-128", "batch_too_large")]
    assert total(found, "graphprobe_graph_calls_total") == total(found, "graphprobe_eager_calls_total") == 0


def test_born_sizes_end_at_the_largest_bucket(ledger: Ledger) -> None:
    """A size above the largest bucket is never born as one without an exact bucket."""
    ledger.forward("decode", Buckets([2, 4]))
    eager = series(samples(ledger.snapshot()), "graphprobe_eager_calls_total")
    assert {labels[2:] for labels in eager} == {
        ("1", "no_exact_bucket"),
        ("3", "no_exact_bucket"),
        ("5", "batch_too_large"),
    }


def test_counts(ledger: Ledger) -> None:
    """Calls, padding and reasons arrive as counted; sizes of one range are one series."""
    forward = ledger.forward("decode", Buckets([64, 72]))
    for size in (65, 70):
        add(forward.graph_cell(size, 72, mode="piecewise"), 10)
    add(forward.eager_cell(100, FallbackReason.BATCH_TOO_LARGE), 4)
    found = samples(ledger.snapshot())
    assert series(found, "graphprobe_graph_calls_total")["decode", "decode", "piecewise", "65-72", "72"] == 20
    assert series(found, "graphprobe_padding_rows_total")["decode", "decode", "72"] == 90
    assert series(found, "graphprobe_eager_calls_total")["decode", "decode", "73-128", "batch_too_large"] == 4


def test_times(ledger: Ledger) -> None:
    """The histogram sums over buckets, the seconds and samples keep them, and eager time has an empty bucket."""
    forward = ledger.forward("decode", Buckets([4, 8]))
    forward.time("graph", 4, 60e-6, mode="full")
    forward.time("graph", 8, 70e-6, mode="full")
    forward.time("eager", None, 10.0)
    found = samples(ledger.snapshot())
    histogram = series(found, "graphprobe_forward_duration_seconds")
    assert histogram["decode", "decode", "graph", "full"] == Distribution((0, 2, *[0] * 14), 60e-6 + 70e-6)
    assert histogram["decode", "decode", "eager", ""].counts[-1] == 1
    assert series(found, "graphprobe_forward_samples_total") == {
        ("decode", "decode", "graph", "4"): 1,
        ("decode", "decode", "graph", "8"): 1,
        ("decode", "decode", "eager", ""): 1,
    }


def test_absent_stays_absent(ledger: Ledger) -> None:
    """What is not known has no sample: no pool size, no KV capacity, no replay count, no captured flag."""
    ledger.forward("decode", Buckets([4]), source="engine")
    names = {s.metric.name for s in samples(ledger.snapshot())}
    assert names == {
        "graphprobe_graph_calls_total",
        "graphprobe_eager_calls_total",
        "graphprobe_padding_rows_total",
        "graphprobe_timing_samples_dropped_total",
        "graphprobe_internal_errors_total",
        "graphprobe_forward_info",
        "graphprobe_build_info",
    }


def test_known_gauges(ledger: Ledger) -> None:
    """Gauges are exported once they are known, a pool of 0 bytes among them."""
    forward = ledger.forward("decode", Buckets([4]))
    forward.holder().buckets = frozenset({4})
    forward.pool_estimate_bytes, forward.kv_capacity_tokens = 5, 6
    forward.uncovered["decode"] = 3
    ledger.hooks["vllm", "dispatch"] = False
    ledger.replays_seen = [9]
    forward.unmatched.update(graph=2, eager=0)
    found = samples(ledger.snapshot())
    assert series(found, "graphprobe_graph_pool_bytes") == {("decode",): 0}
    assert series(found, "graphprobe_graph_pool_estimate_bytes") == {("decode",): 5}
    assert series(found, "graphprobe_kv_capacity_tokens") == {("decode",): 6}
    assert series(found, "graphprobe_uncovered_sizes") == {("decode", "decode"): 3}
    assert series(found, "graphprobe_hook_bound") == {("vllm", "dispatch"): 0}
    assert series(found, "graphprobe_replays_seen_total") == {(): 9}
    assert series(found, "graphprobe_replay_mismatches_total") == {("decode", "graph"): 2, ("decode", "eager"): 0}


def test_captures(ledger: Ledger) -> None:
    """A capturing forward shows its buckets as not captured and its failures as 0 until they happen."""
    forward = ledger.forward("decode", Buckets([4, 8]))
    forward.captured(4, "ok", 0.5, -64)
    forward.captured(8, "oom", 0.5, None)
    found = samples(ledger.snapshot())
    outcomes = series(found, "graphprobe_captures_total")
    assert {key: n for key, n in outcomes.items() if n} == {("decode", "4", "ok"): 1, ("decode", "8", "oom"): 1}
    assert outcomes["decode", "4", "error"] == 0
    assert series(found, "graphprobe_bucket_captured") == {("decode", "4"): 1, ("decode", "8"): 0}
    assert series(found, "graphprobe_capture_duration_seconds") == {("decode", "4"): 0.5}
    assert series(found, "graphprobe_graph_pool_growth_bytes") == {("decode", "4"): -64}
    assert series(found, "graphprobe_verify_mismatches_total") == {("decode", "4"): 0, ("decode", "8"): 0}


def test_hit_rate_is_not_exported() -> None:
    """No metric is a rate or ratio: the hit rate is a rule over counters."""
    assert not [m.name for m in metrics.CATALOGUE if {"rate", "ratio", "percent"} & set(m.name.split("_"))]


def many(sizes: int, reasons: int, phases: int, buckets: tuple[int, ...] = (), each: int = 1) -> ForwardSnapshot:
    """A forward that ran eagerly with every combination."""
    rows = [
        Row(size, "eager", None, reason, each, phase=f"p{phase}")
        for size in range(1, sizes + 1)
        for reason in list(FallbackReason)[:reasons]
        for phase in range(phases)
    ]
    rows += [Row(b, "graph", b, None, each, mode="full") for b in buckets]
    return ForwardSnapshot("decode", buckets, rows=tuple(rows), source="observe")


@pytest.mark.parametrize(
    "forward",
    [
        many(64, 3, 1, (1, 2, 4)),
        many(64, 20, 2, (1, 2, 4)),
        many(200, 27, 6),
        many(10, 27, 100),
        many(3, 1, 1, tuple(range(1, 1025))),
        many(200, 27, 6, tuple(range(8, 1025, 8))),
    ],
    ids=["fits", "sizes", "wide", "phases", "buckets", "both"],
)
def test_limit(forward: ForwardSnapshot) -> None:
    """A forward never has more than 500 label sets, and whatever is folded for that loses no call."""
    found, folds = forward_samples(forward)
    assert len(found) <= LIMIT
    assert total(found, "graphprobe_eager_calls_total") == forward.eager_calls
    assert total(found, "graphprobe_graph_calls_total") == forward.graph_calls
    assert (folds > 0) == (
        len({(r.phase, size_label(r.batch_size, forward.buckets), r.reason) for r in forward.rows}) > 400
    )
    assert max(Counter((s.metric.name, *s.labels.values()) for s in found).values()) == 1


def test_folding_is_counted() -> None:
    """A fold shows as graphprobe_internal_errors_total{where="label_limit"}, which is 0 without one."""
    for forward, folded in ((many(64, 3, 1), False), (many(200, 27, 6), True)):
        errors = series(samples(Snapshot({"decode": forward})), "graphprobe_internal_errors_total")
        assert (errors["label_limit",] > 0) == folded


def test_no_counter_falls_while_labels_grow() -> None:
    """While combinations are added, folding only gets coarser and no series that stays goes down."""
    before: dict[tuple[str, ...], Any] = {}
    steps = [0]
    for sizes, reasons, phases in ((10, 4, 1), (90, 5, 1), (90, 9, 2), (300, 9, 2), (300, 20, 3), (300, 27, 6)):
        found, folds = forward_samples(many(sizes, reasons, phases, (1, 2, 4, 8, 16, 128), each=sizes * reasons))
        now = series(found, "graphprobe_eager_calls_total")
        assert not [key for key in now.keys() & before.keys() if now[key] < before[key]]
        steps.append(folds)
        before = now
    assert steps == sorted(steps)
    assert len(set(steps)) > 2


def test_folded_gauges() -> None:
    """Where buckets fold, growth is summed, the longest capture is kept, and captured means all of them."""
    buckets = tuple(range(1, 401))
    forward = ForwardSnapshot(
        "decode",
        buckets,
        live=dict.fromkeys(buckets, True) | {400: False},
        pool_growth=dict.fromkeys(buckets, 2),
        capture_seconds={b: float(b) for b in buckets},
    )
    found, folds = forward_samples(forward)
    assert folds > 0
    assert series(found, "graphprobe_graph_pool_growth_bytes")["decode", "129-256"] == 256
    assert series(found, "graphprobe_capture_duration_seconds")["decode", "129-256"] == 256.0
    captured = series(found, "graphprobe_bucket_captured")
    assert (captured["decode", "129-256"], captured["decode", "257-512"]) == (1, 0)


def test_zero_rows_go_before_anything_folds() -> None:
    """The zero rows of capture failures are given up before a label gets coarser, and that counts as no fold."""
    buckets = tuple(range(1, 100))
    found, folds = forward_samples(ForwardSnapshot("decode", buckets, source="capture"))
    assert folds == 0
    assert series(found, "graphprobe_captures_total") == {}
    assert len(series(found, "graphprobe_graph_calls_total")) == 99


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"RANK": "3"}, {"rank": "3"}),
        ({"RANK": " "}, {}),
        ({"GRAPHPROBE_LABELS": "model=llama, zone = a "}, {"model": "llama", "zone": "a"}),
        ({"RANK": "3", "GRAPHPROBE_LABELS": "rank=7"}, {"rank": "7"}),
        ({"GRAPHPROBE_LABELS": "url=a=b"}, {"url": "a=b"}),
        ({"GRAPHPROBE_LABELS": "empty="}, {"empty": ""}),
    ],
)
def test_constant_labels(environ: dict[str, str], expected: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """RANK and GRAPHPROBE_LABELS become labels of every series."""
    assert constant_labels(environ) == expected
    assert caplog.records == []


@pytest.mark.parametrize("text", ["novalue", "=x", "1a=x", "a b=x", "__name__=x", "le=1", "forward=x", "a-b=x", "ü=x"])
def test_malformed_labels(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """A malformed or taken label is left out and named in the log; the good ones beside it stay."""
    with caplog.at_level(logging.WARNING):
        assert constant_labels({"GRAPHPROBE_LABELS": f"good=1,{text},,also=2"}) == {"good": "1", "also": "2"}
    assert repr(text) in caplog.text


def test_text_that_is_no_utf8() -> None:
    """Text of an environment or a name that is no UTF-8 still makes labels that can be encoded."""
    found = samples(Snapshot({"\ud800": ForwardSnapshot("\ud800")}))
    texts = [*constant_labels({"RANK": "\udcff"}).values(), *(value for s in found for value in s.labels.values())]
    assert [text.encode() for text in texts]


class Torch(types.ModuleType):
    """Stands for an imported torch whose CUDA must not be touched."""

    __version__ = "9.9"
    version = types.SimpleNamespace(cuda="12.8", hip=None)

    @property
    def cuda(self) -> Any:
        raise AssertionError("CUDA was touched")


def test_build_info_leaves_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build info reads versions from an imported torch and never touches its CUDA."""
    monkeypatch.setitem(sys.modules, "torch", Torch("torch"))
    info = metrics.build_info()
    assert tuple(info) == metrics.BUILD_INFO.labels
    assert (info["torch"], info["cuda"], info["backend"], info["contract"]) == ("9.9", "12.8", "cuda", "1")
    monkeypatch.setenv("GRAPHPROBE_BACKEND", "recorder")
    assert metrics.build_info()["backend"] == "recorder"


def test_standard_library_only() -> None:
    """The catalogue loads neither torch nor any metrics client, and the build info still names an installed torch."""
    code = (
        "import sys; from graphprobe import metrics; info = metrics.build_info();"
        "print([m for m in ('torch', 'prometheus_client', 'opentelemetry', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_reader_remembers_changes_nothing(ledger: Ledger) -> None:
    """Samples with a memory are those without, while a forward grows from its first call into every folding step."""
    forward = ledger.forward("decode", Buckets([1, 2, 4, 300]))
    memory: metrics.Memory = {}
    steps = set()
    for number in range(40):
        for size in range(40):
            add(forward.eager_cell(size, FallbackReason.UNKNOWN, f"p{number}"))
            add(forward.eager_cell(8, FallbackReason.UNKNOWN, f"p{40 * number + size}"))
        found, folds = forward_samples(forward.snapshot(), memory)
        plain, plainly = forward_samples(forward.snapshot())
        assert [(s.metric, s.labels, s.value) for s in found] == [(s.metric, s.labels, s.value) for s in plain]
        assert folds == plainly
        steps.add(folds)
    assert len(steps) > 2


def test_an_engine_keeps_its_buckets() -> None:
    """vLLM's own list up to 1,024 tokens, decode, mixed and prefill steps in two modes: each bucket is a label."""
    buckets = (1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16))
    kinds = (("decode", "full"), ("mixed", "piecewise"), ("prefill", "piecewise"))
    rows = [Row(b - 1 or 1, "graph", b, None, 1, 1, phase, mode) for b in buckets for phase, mode in kinds]
    rows += [Row(n, "eager", None, FallbackReason.BATCH_TOO_LARGE, 1, 0, "mixed", "") for n in range(1025, 8192, 7)]
    forward = ForwardSnapshot("vllm", buckets, rows=tuple(rows), source="engine", captures=dict.fromkeys(buckets, 2))
    found, folds = forward_samples(forward)
    assert folds == 0
    seen = {sample.labels["bucket"] for sample in found if sample.metric is GRAPH_CALLS}
    assert seen == {str(bucket) for bucket in buckets}
    assert len(found) <= limit("engine")
    assert forward_samples(dataclasses.replace(forward, source="observe"))[1] > 0
