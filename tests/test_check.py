"""What `graphprobe check` says of pages that keep the metric contract, and of pages that break it in one place."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from graphprobe import metrics
from graphprobe.cli import app
from graphprobe.errors import ConfigError, SourceError
from graphprobe.export.prometheus import Exporter, start_exporter
from graphprobe.ledger import Ledger
from graphprobe.observe import observe
from graphprobe.tools import contract, exposition
from graphprobe.tools.check import Finding, check, findings, metrics_url
from tests.servers import Server

ROOT = Path(__file__).resolve().parent.parent
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def filled(ledger: Ledger, name: str = "decode") -> Ledger:
    """Every kind of metric has a sample; sizes on both sides of 64, and above the largest bucket."""
    watched = observe(name, [1, 2, 4, 72], ledger=ledger, source="capture", clock=None)
    watched.graph_call(3, 4)
    watched.graph_call(70, 72, mode="piecewise", phase="verify")
    watched.eager_call(100, "batch_too_large")
    watched.eager_call(0, "empty_batch")
    forward = watched.forward
    forward.time("graph", 4, 0.003, mode="full")
    forward.time("eager", None, 3.0)
    forward.captured(4, "ok", 0.5, -8)
    forward.captured(2, "oom", 0.5, None)
    forward.mismatch(4)
    forward.holders[0].pool_bytes = 1 << 20
    forward.uncovered["decode"] = 68
    forward.pool_estimate_bytes, forward.kv_capacity_tokens = 5, 6
    ledger.hooks["vllm", "dispatch"] = True
    ledger.replays_seen = [9]
    return ledger


def served(exporter: Exporter, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"{exporter.url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


with start_exporter(0, ledger=filled(Ledger())) as _running:
    PAGE, MODERN = served(_running), served(_running, OPENMETRICS)

GRAPH = 'graphprobe_graph_calls_total{batch_size="3",bucket="4",forward="decode",mode="full",phase="decode"} 1.0'
EAGER = 'graphprobe_eager_calls_total{batch_size="3",forward="decode",phase="decode",reason="no_exact_bucket"} 0.0'
LARGE = 'graphprobe_eager_calls_total{batch_size="73-128",forward="decode",phase="decode",reason="batch_too_large"} 1.0'
INFINITE = (
    'graphprobe_forward_duration_seconds_bucket{forward="decode",le="+Inf",mode="",path="eager",phase="decode"} 1.0'
)
COUNT = 'graphprobe_forward_duration_seconds_count{forward="decode",mode="",path="eager",phase="decode"} 1.0'


def changed(old: str, new: str, page: str = PAGE) -> str:
    assert old in page, f"no {old} on the page"
    return page.replace(old, new)


def without(pattern: str, page: str = PAGE) -> str:
    kept, dropped = re.subn(rf"^{pattern}.*\n", "", page, flags=re.M)
    assert dropped
    return kept


def told(page: str | bytes, content_type: str | None = TEXT, **options: Any) -> str:
    """The findings as text, one a line; all of them are what the command can print."""
    found = findings(page, content_type, **options)
    assert all(f.hint and f.what.isprintable() and f.metric.isprintable() for f in found)
    return "\n".join(f"{f.severity} {f.metric}: {f.what} ({f.hint})" for f in found)


def answer(handler: BaseHTTPRequestHandler, body: str | bytes, status: int = 200, kind: str | None = TEXT) -> None:
    handler.send_response(status)
    if kind is not None:
        handler.send_header("Content-Type", kind)
    handler.end_headers()
    handler.wfile.write(body.encode() if isinstance(body, str) else body)


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, ["check", *arguments], **options)


def test_the_exporter_keeps_the_contract(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a workload with every kind of metric both formats pass, with constant labels and hostile names too."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("GRAPHPROBE_LABELS", 'model=ll"ama')
    filled(filled(ledger), 'a"b\\c\nd {e="f"} # é')
    with start_exporter(0, ledger=ledger) as running:
        report = check(running.url, wait=0.05)
        assert (report.ok, report.findings, len(report.forwards)) == (True, (), 2)
        assert report.series > 200
        assert "" == told(served(running))
        assert "" == told(served(running, OPENMETRICS), OPENMETRICS)
    assert "keeps it (metric contract 1" in str(report)


@pytest.mark.usefixtures("own_forwards")
def test_a_captured_forward_keeps_the_contract() -> None:
    """What a real capture counts, padded and timed, passes, whichever phases are captured."""
    torch = pytest.importorskip("torch")
    from graphprobe.graphed import capture

    def double(x: Any) -> Any:
        return x * 2

    options: dict[str, Any] = {"backend": "recorder", "timing": 1, "buckets": [2, 4, 96]}
    forwards = [
        capture(double, name="decode", pad="repeat", **options),
        capture(double, name="any", phase=lambda x: "verify" if len(x) < 4 else "mixed", **options),
    ]
    with torch.inference_mode():
        for size in (2, 2, 3, 3, 4, 96, 90, 97, 200, 2, 0):
            for forward in forwards:
                forward(torch.zeros(size, 3))
    with start_exporter(0) as running:
        assert "" == "\n".join(map(str, check(running.url, wait=0.05).findings))
        assert "" == told(served(running))


def test_folded_labels_keep_the_contract(ledger: Ledger) -> None:
    """At every step of folding, which the process counts, the page passes but for its phases of its own."""
    steps = set()
    for phases in (10, 200, 700):
        wide = observe(f"wide{phases}", [8, 100, 1000], ledger=ledger)
        for number in range(1500 * 7):
            wide.eager_call(number % 1499, "unknown", phase=f"p{number % phases}")
        wide.graph_call(70, 100)
        steps.add(metrics.forward_samples(wide.snapshot())[1])
    assert {1, 3, 5} == steps
    with start_exporter(0, ledger=ledger) as running:
        report = check(running.url, wait=0)
    assert {f.severity for f in report.findings} == {"warning"}
    assert all("unknown phase 'p" in f.what or "more like these" in f.what for f in report.findings)


def test_a_page_without_a_fold_has_no_folded_labels() -> None:
    """Coarser ranges than the contract's are an error unless the process says that it had to fold."""
    page = changed(LARGE, LARGE.replace("73-128", "65-128"))
    assert "write 73-128" in told(page)
    folds = 'graphprobe_internal_errors_total{where="label_limit"} '
    assert "" == told(changed(f"{folds}0.0", f"{folds}1.0", page))


def test_folded_labels_have_a_form_too() -> None:
    """Where labels were folded a bucket is a size, a range or all, and nothing else."""
    folds = 'graphprobe_internal_errors_total{where="label_limit"} '
    page = changed(f"{folds}0.0", f"{folds}1.0")
    for bucket, fine in (("3-4", True), ("all", True), ("4-3", False), ("four", False), ("4-", False)):
        assert fine == ("" == told(changed(GRAPH, GRAPH.replace('bucket="4"', f'bucket="{bucket}"'), page))), bucket


def test_gauges_of_several_processes_may_have_a_pid() -> None:
    """prometheus_client's multiprocess mode tells gauges apart by pid; a counter is added up and has none."""
    page = re.sub(r"^(graphprobe_(?:bucket|hook|graph_pool)\w*\{)", r'\1pid="7",', PAGE, flags=re.M)
    assert page != PAGE
    assert "" == told(page)
    assert "unknown label pid" in told(changed(GRAPH, GRAPH.replace("{", '{pid="7",')))


def test_a_file_tells_its_format() -> None:
    """Without a content type a page that ends with # EOF is OpenMetrics, any other is the text format."""
    assert "" == told(MODERN, None)
    assert "" == told(PAGE, None)


def test_an_exporter_without_a_forward(ledger: Ledger) -> None:
    """Nothing is wrong with it, and that it counts nothing is said."""
    with start_exporter(0, ledger=ledger) as running:
        assert ["warning"] == [f.severity for f in check(running.url, wait=0).findings]


def test_a_page_written_by_hand() -> None:
    """Another language's way of writing: a page of the engine's own metrics around, empty labels left out, no .0."""
    page = re.sub(r"(\d)\.0$", r"\1", changed(',mode="",', ","), flags=re.M)
    page = re.sub(r"""(?<="),(?=\\w)""", ", ", page).replace(' role="",', "")
    own = (
        '# HELP my_seconds x\n# TYPE my_seconds summary\nmy_seconds{quantile="0.5"} NaN\nmy_seconds_sum 1\n\n# hello\n'
    )
    assert "" == told(f"{own}{page}{own.replace('my', 'other')}")


def test_a_finding_is_frozen() -> None:
    """Severity, metric, what and hint; nobody changes it later."""
    (found,) = findings(changed(EAGER, EAGER.replace("no_exact_bucket", "no_exact_buckets") + "\n" + EAGER))
    assert ("error", "graphprobe_eager_calls_total") == (found.severity, found.metric)
    assert ("unknown reason 'no_exact_buckets' of decode", "write no_exact_bucket") == (found.what, found.hint)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.what = "nothing"  # type: ignore[misc]


BROKEN = {
    # What must exist.
    "no build info": (without("graphprobe_build_info"), "error graphprobe_build_info: missing"),
    "another contract": (changed('contract="1"', 'contract="2"'), "contract '2', this graphprobe checks 1"),
    "no forward info": (
        without("graphprobe_forward_info"),
        "error graphprobe_forward_info: missing for forward decode",
    ),
    "second forward info": (
        PAGE + 'graphprobe_forward_info{forward="decode",unit="tokens",buckets="1",source="engine"} 1\n',
        "a second one of decode",
    ),
    "no eager calls": (without("graphprobe_eager_calls_total"), "missing for decode: no_exact_bucket at sizes 3, 5-64"),
    "no padding": (without("graphprobe_padding_rows_total"), "missing for decode: buckets 1, 2, 4, 72"),
    "durations by halves": (
        without("graphprobe_forward_seconds_total"),
        "error graphprobe_forward_seconds_total: missing for decode, decode, eager",
    ),
    # Types and metadata.
    "wrong type": (
        changed("# TYPE graphprobe_bucket_captured gauge", "# TYPE graphprobe_bucket_captured counter"),
        "error graphprobe_bucket_captured: type counter (write # TYPE graphprobe_bucket_captured gauge)",
    ),
    "no type": (without("# TYPE graphprobe_captures_total"), "error graphprobe_captures_total: no type"),
    "type of a name without _total": (
        changed("# TYPE graphprobe_graph_calls_total", "# TYPE graphprobe_graph_calls"),
        "error graphprobe_graph_calls_total: no type",
    ),
    "no such type": (changed("replays_seen_total counter", "replays_seen_total count"), "no type: count"),
    "type twice": (
        changed("# TYPE graphprobe_captures_total counter\n", "# TYPE graphprobe_captures_total counter\n" * 2),
        "a second TYPE",
    ),
    "type after samples": (
        changed(GRAPH, GRAPH + "\n# HELP graphprobe_graph_calls_total again"),
        "HELP after samples",
    ),
    "no help": (without("# HELP graphprobe_captures_total"), "warning graphprobe_captures_total: no help text"),
    "interrupted": (changed(GRAPH + "\n", "") + GRAPH + "\n", "interrupted by another metric"),
    # Names and labels.
    "unknown metric": (
        PAGE + "graphprobe_graph_call_total 1\n",
        "error graphprobe_graph_call_total: no metric of the contract (write graphprobe_graph_calls_total)",
    ),
    "unknown metric, quoted": (PAGE + '{"graphprobe.graph.calls"} 1\n', "error graphprobe.graph.calls: no metric"),
    "unknown family": (PAGE + "# TYPE graphprobe_zzz gauge\n", "error graphprobe_zzz: no metric of the contract"),
    "unknown label": (changed(GRAPH, GRAPH.replace("{", '{request="7",')), "unknown label request"),
    "rank on some": (re.sub(r"^(graphprobe_g.*\{)", r'\1rank="0",', PAGE, flags=re.M), "unknown label rank"),
    "missing label": (changed(GRAPH, GRAPH.replace('bucket="4",', "")), "no bucket on"),
    "empty label": (changed(EAGER, EAGER.replace("no_exact_bucket", "")), "no reason on"),
    "graph without mode": (changed('mode="full",path="graph"', 'mode="",path="graph"'), "no mode on"),
    # Words.
    "unknown reason": (changed('reason="empty_batch"', 'reason="Empty"'), "unknown reason 'Empty' of decode"),
    "unknown phase": (
        changed('phase="verify"', 'phase="Verify!"'),
        "error graphprobe_graph_calls_total: unknown phase",
    ),
    "own phase": (changed('phase="verify"', 'phase="encode"'), "warning graphprobe_graph_calls_total: unknown phase"),
    "unknown mode": (changed('mode="piecewise"', 'mode="partial"'), "unknown mode 'partial'"),
    "unknown outcome": (changed('outcome="oom"', 'outcome="failed"'), "unknown outcome 'failed'"),
    "unknown path": (changed('path="eager"', 'path="eagerly"'), "unknown path 'eagerly' of decode (write eager)"),
    "unknown source": (changed('source="capture"', 'source="rust"'), "unknown source 'rust'"),
    # Sizes.
    "exact above 64": (changed(LARGE, LARGE.replace("73-128", "100")), "batch_size '100' on"),
    "what to write instead": (changed(LARGE, LARGE.replace("73-128", "100")), "(write 73-128)"),
    "range below 64": (changed(EAGER, EAGER.replace('"3"', '"3-4"')), "batch_size '3-4' on"),
    "another range": (changed('batch_size="65-72"', 'batch_size="65-71"'), "(write 65-72)"),
    "leading zero": (changed(EAGER, EAGER.replace('"3"', '"03"')), "batch_size '03' on"),
    "no size": (changed(EAGER, EAGER.replace('"3"', '"three"')), "batch_size 'three' on"),
    "other digits": (changed(EAGER, EAGER.replace('"3"', '"\u0663"')), "batch_size '\u0663' on"),
    "all": (changed(EAGER, EAGER.replace('"3"', '"all"')), "batch_size 'all' on"),
    "bucket range": (changed(GRAPH, GRAPH.replace('bucket="4"', 'bucket="3-4"')), "bucket '3-4' on"),
    "bucket below the batch": (
        changed(GRAPH, GRAPH.replace('bucket="4"', 'bucket="2"')),
        "batch_size 3 above bucket 2",
    ),
    "bucket of no list": (
        changed(GRAPH, GRAPH.replace('bucket="4"', 'bucket="5"')),
        "bucket 5 of decode is not in its",
    ),
    "bucket list": (changed('buckets="1,2,4,72"', 'buckets="1,4,2,72"'), "buckets '1,4,2,72' of decode"),
    # Zeros.
    "bucket not born": (
        without(r'graphprobe_graph_calls_total\{batch_size="2"'),
        "error graphprobe_graph_calls_total: missing for decode: buckets 2 (export it at 0",
    ),
    "size not born": (
        without(r'graphprobe_eager_calls_total\{batch_size="(3|17|18)"'),
        "missing for decode: no_exact_bucket at sizes 3, 17-18",
    ),
    "first range not born": (
        without(r"graphprobe_eager_calls_total.*batch_too_large"),
        "missing for decode: batch_too_large at size 73",
    ),
    # Values.
    "negative counter": (changed(GRAPH, GRAPH[:-3] + "-1"), "value -1 on"),
    "NaN counter": (changed(GRAPH, GRAPH[:-3] + "NaN"), "value nan on"),
    "infinite counter": (changed(GRAPH, GRAPH[:-3] + "+Inf"), "value inf on"),
    "half a call": (changed(GRAPH, GRAPH[:-3] + "1.5"), "(it counts whole things)"),
    "negative gauge": (re.sub(r"^(graphprobe_kv\S+) .*", r"\1 -1", PAGE, flags=re.M), "(it is never negative)"),
    "NaN gauge": (re.sub(r"^(graphprobe_kv\S+) .*", r"\1 nan", PAGE, flags=re.M), "(leave a series out where"),
    "neither 0 nor 1": (re.sub(r"^(graphprobe_hook\S+) .*", r"\1 2", PAGE, flags=re.M), "(it is 0 or 1)"),
    "info of 0": (re.sub(r"^(graphprobe_forward_info\S+) .*", r"\1 0", PAGE, flags=re.M), "(an info is always 1)"),
    "twice": (changed(GRAPH, f"{GRAPH}\n{GRAPH}"), "twice on the page"),
    "twice, in another order": (
        changed(GRAPH, GRAPH + "\n" + GRAPH.replace('bucket="4",', "").replace("}", ',bucket="4",}')),
        "twice on the page",
    ),
    # Histograms.
    "no +Inf": (without(r"graphprobe_forward_duration_seconds_bucket.*\+Inf"), "no +Inf bound"),
    "not cumulative": (
        changed(
            'le="0.0032",mode="full",path="graph",phase="decode"} 1.0',
            'le="0.0032",mode="full",path="graph",phase="decode"} 2.0',
        ),
        "bounds are not cumulative",
    ),
    "count is another": (changed(COUNT, COUNT[:-3] + "7"), "count 7, +Inf 1"),
    "no count": (without("graphprobe_forward_duration_seconds_count"), "no _count"),
    "no sum": (without("graphprobe_forward_duration_seconds_sum"), "no _sum"),
    "no number": (changed('le="0.0032",mode="full"', 'le="low",mode="full"'), "a bound that is no number"),
    "no bound": (changed(INFINITE, INFINITE.replace('le="+Inf",', "")), "a bound that is no number"),
    "bound twice": (changed('le="0.0032",mode="full"', 'le="1.6e-3",mode="full"'), "a bound twice"),
    "twice, an empty label and none": (
        changed(INFINITE, INFINITE + "\n" + INFINITE.replace(',mode=""', "")),
        "twice on the page",
    ),
    # Text.
    "binary": (PAGE + 'x{a="\0"} 1\n', "binary: a NUL at character"),
    "unreadable line": (PAGE + "graphprobe_x{a=\n", "cannot be read: graphprobe_x{a="),
    "unreadable line of another": (PAGE + "vllm:x 1 2 3\n", "cannot be read: vllm:x 1 2 3"),
    "no value": (changed(GRAPH, GRAPH[:-4]), "cannot be read"),
    "words for a value": (changed(GRAPH, GRAPH[:-3] + "many"), "cannot be read"),
    "other digits for a value": (changed(GRAPH, GRAPH[:-3] + "\u0661"), "cannot be read"),
    "underscores in a value": (changed(GRAPH, GRAPH[:-3] + "1_0"), "cannot be read"),
    "time that is none": (changed(GRAPH, GRAPH + " soon"), "cannot be read"),
    "label twice": (changed(GRAPH, GRAPH.replace("{", '{bucket="4",')), "cannot be read"),
    "bare quote": (changed('torch="', 'torch=""'), "cannot be read"),
    "no type named": (PAGE + "# TYPE graphprobe_x\n", "cannot be read: # TYPE graphprobe_x"),
    "line feed in a value": (changed(EAGER, EAGER.replace("no_exact", "no\nexact")), "cannot be read"),
    "wrong escape": (changed('torch="', r'torch="\t'), r"no such escape: \t"),
    "carriage returns": (PAGE.replace("\n", "\r\n"), r"line 1 ends with \r\n"),
    "cut off": (PAGE[:-9], "ends within a line"),
    "exemplar in the text format": (changed(GRAPH, GRAPH + ' # {trace="x"} 1'), "cannot be read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_fault_is_named(case: str) -> None:
    """A page that breaks the contract in one place gets a finding that names the metric, the place and the change."""
    page, expected = BROKEN[case]
    assert page != PAGE
    assert expected in told(page)


@pytest.mark.parametrize("case", ["wrong escape", "unknown metric", "own phase", "exact above 64", "rank on some"])
def test_one_fault_hides_no_other(case: str) -> None:
    """Findings on a page with two faults are those of both."""
    page, expected = BROKEN[case]
    found = told(changed('outcome="oom"', 'outcome="failed"', page))
    assert expected in found
    assert "unknown outcome 'failed'" in found


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("# EOF\n", "", "not OpenMetrics: Missing # EOF"),
        ("# EOF\n", "# EOF\nx 1\n", "not OpenMetrics"),
        ("# TYPE graphprobe_graph_calls counter", "# TYPE graphprobe_graph_calls_total counter", "no type"),
        ("# TYPE graphprobe_build info", "# TYPE graphprobe_build untyped", "no type: untyped"),
        ("# TYPE graphprobe_graph_calls counter", "# TYPE graphprobe_graph_calls gauge", "type gauge"),
        ("# UNIT graphprobe_graph_pool_bytes bytes", "# UNIT graphprobe_graph_pool_bytes ms", "unit ms"),
        ("\n# HELP graphprobe_build", "\n\n# HELP graphprobe_build", "blank line"),
    ],
)
def test_openmetrics_is_held_to_its_own_rules(old: str, new: str, expected: str) -> None:
    """An OpenMetrics page is read strictly, and its metadata leaves suffixes out."""
    assert expected in told(changed(old, new, MODERN), OPENMETRICS)


def test_openmetrics_may_have_exemplars_and_births() -> None:
    """Exemplars, _created and an info that is written as a gauge are allowed."""
    page = changed(GRAPH, f'{GRAPH} # {{trace="}}x # {{"}} 1.0 1700000000.5', MODERN)
    ok = 'graphprobe_captures_total{bucket="4",forward="decode",outcome="ok"} 1.0\n'
    page = changed(ok, ok + ok.replace("_total", "_created"), page)
    page = changed("# TYPE graphprobe_build info", "# TYPE graphprobe_build_info gauge", page)
    page = changed("# HELP graphprobe_build ", "# HELP graphprobe_build_info ", page)
    assert "" == told(page, OPENMETRICS)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("", "content type 'missing'"),
        ("text/html; charset=utf-8", "content type 'text/html; charset=utf-8': Prometheus 3 refuses the page"),
        ("application/json", "content type"),
        ("text/plain; version=0.0.3", "no such version"),
        ("text/plain; charset=latin-1", "the page must be UTF-8"),
        ("text/plain", ""),
        ("TEXT/PLAIN;VERSION=0.0.4", ""),
        (None, ""),
    ],
)
def test_content_type(kind: str | None, expected: str) -> None:
    """Prometheus 3 takes no page of another type; a file has none."""
    found = told(PAGE, kind)
    assert expected in found if expected else found == ""


def test_content_type_of_a_server(server: Server) -> None:
    """A server that names no content type, or another one, is told."""
    for kind, expected in ((None, "content type 'missing'"), ("text/html", "content type 'text/html'"), (TEXT, "")):
        server.reply = lambda handler, kind=kind: answer(handler, PAGE, kind=kind)
        report = check(server.url, wait=0)
        assert expected in str(report)
        assert report.ok == (kind == TEXT)


def many(count: int) -> str:
    """The page with so many more label sets of its forward."""
    reasons = ("busy", "grad", "unknown", "ragged", "adapter", "signature", "not_captured")
    extra = [EAGER.replace('"3"', f'"{n}"').replace("no_exact_bucket", r) for n in range(1, 65) for r in reasons]
    return changed(EAGER, "\n".join([EAGER, *extra[:count]]))


def test_series_are_bounded() -> None:
    """More than 500 label sets of one forward are an error; a histogram counts as one."""
    assert "error : forward decode has" in told(many(448))
    first = re.search(r"decode has (\d+) label sets", told(many(448)))
    assert first
    assert "" == told(many(448 - (int(first[1]) - metrics.LIMIT)))
    assert "decode has 501 label sets" in told(many(449 - (int(first[1]) - metrics.LIMIT)))


def test_every_rank_has_its_own_bound() -> None:
    """Two ranks on one page are two processes: each may have 500, and each needs its infos."""
    ranks = [many(200).replace("{", f'{{rank="{rank}",') for rank in (0, 1)]
    ranks = [
        page.replace("replays_seen_total 9", f'replays_seen_total{{rank="{n}"}} 9') for n, page in enumerate(ranks)
    ]
    zero, one = (page.splitlines(keepends=True) for page in ranks)
    groups = [[first] if first == second else [first, second] for first, second in zip(zero, one, strict=True)]
    page = "".join(line for group in groups for line in group)
    assert page.count("rank=") > metrics.LIMIT
    assert "" == told(page)
    assert "missing for forward decode (rank=1)" in told(without(r'graphprobe_forward_info\{rank="1"', page))
    assert "missing (rank=1)" in told(without(r'graphprobe_build_info\{rank="1"', page))


def test_a_constant_label_is_no_request() -> None:
    """A label of every series may tell a host's ranks apart, not thousands of requests."""
    lines = [f'graphprobe_replays_seen_total{{request="{n}"}} 1' for n in range(1000)]
    page = "# HELP graphprobe_replays_seen_total x\n# TYPE graphprobe_replays_seen_total counter\n" + "\n".join(lines)
    assert "label request has 1,000 values" in told(page + "\n")


def test_forwards_are_bounded() -> None:
    """A forward per request is told."""
    infos = [f'graphprobe_forward_info{{forward="f{n}",unit="rows",source="engine"}} 1' for n in range(300)]
    last = re.search(r"^graphprobe_forward_info.*$", PAGE, flags=re.M)
    assert last
    assert "301 forwards in one process" in told(changed(last[0], "\n".join([last[0], *infos])))


def test_counters_that_fell() -> None:
    """Between two pages of a process a counter neither falls nor vanishes; gauges may."""
    more = changed(GRAPH, GRAPH[:-3] + "2")
    assert "" == told(more, earlier=PAGE)
    assert "fell from 2 to 1" in told(PAGE, earlier=more)
    assert "gone at the second read" in told(changed(LARGE + "\n", ""), earlier=PAGE)
    assert "fell from 1 to 0" in told(changed(COUNT, COUNT[:-3] + "0"), earlier=PAGE)
    assert "" == told(re.sub(r"^(graphprobe_kv\S+) .*", r"\1 1", PAGE, flags=re.M), earlier=PAGE)


def test_a_url_is_read_twice(server: Server) -> None:
    """By default there is a second read, after a pause, and what fell in between is told."""
    looks: list[float] = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        looks.append(time.monotonic())
        answer(handler, PAGE if len(looks) % 2 == 0 else changed(GRAPH, GRAPH[:-3] + "2"))

    server.reply = reply
    assert "fell from 2 to 1" in str(check(server.url))
    assert 0.9 < looks[1] - looks[0] < 5
    assert check(server.url, wait=0).ok
    assert 3 == len(looks)


def test_a_process_that_ends_between_two_reads(ledger: Ledger) -> None:
    """The second read fails: that is a finding beside those of the first."""
    running = start_exporter(0, ledger=filled(ledger))
    threading.Timer(0.2, running.close).start()
    assert "the second read failed" in str(check(running.url, wait=1).findings)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1", "http://h:1/metrics"),
        ("http://h:1/", "http://h:1/metrics"),
        ("http://h:1/metrics/", "http://h:1/metrics"),
        ("http://h:1/a/snapshot?x=1#y", "http://h:1/a/metrics?x=1"),
        ("https://h/prometheus", "https://h/prometheus"),
    ],
)
def test_metrics_url(url: str, expected: str) -> None:
    """An exporter, its snapshot and its metrics are one; another path is taken as it is."""
    assert expected == metrics_url(url)


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)) * 1000,
    "zeros": bytes(1 << 20),
    "compressed": b"\x1f\x8b\x08\x00" + random.Random(1).randbytes(5000),
    "utf-16": PAGE.encode("utf-16"),
    "html": b"<html><body>login</body></html>",
    "json": b'{"schema": 1, "forwards": {}}',
    "endless line": b"graphprobe_" + b"a" * (2 << 20),
    "endless label": b'graphprobe_graph_calls_total{forward="' + b"x" * (2 << 20) + b'"} 1\n',
    "a million quotes": b'graphprobe_x{a="' + b'\\"' * 1_000_000 + b'"} 1\n',
    "backslashes": b'graphprobe_x{a="' + b"\\" * 15_000 + b'"} 1\n',
    "open braces": (b"graphprobe_x{" + b'a="' * 5000 + b"\n") * 50,
    "long lines": (b'x{a="' + b'\\"' * 8000 + b'"} 1\n') * 40,
    "spaces": (b"# TYPE" + b" " * 16_000 + b"x\n") * 40,
    "huge number": b"graphprobe_replays_seen_total " + b"9" * 4000 + b"\n",
    "thousands of series": b"".join(b'graphprobe_replays_seen_total{r="%d"} 1\n' % n for n in range(4_000)),
    "thousands of names": b"".join(b"graphprobe_n%d_total 1\n" % n for n in range(4_000)),
    "thousands of reasons": b"".join(
        b'graphprobe_eager_calls_total{forward="f",phase="decode",batch_size="1",reason="r%d"} 1\n' % n
        for n in range(4_000)
    ),
    "thousands of forwards": b"".join(
        b'graphprobe_forward_info{forward="f%d",unit="rows",source="engine",buckets="1"} 1\n' % n for n in range(4_000)
    ),
    "surrogates": b'graphprobe_x{a="\xed\xa0\x80"} 1\n',
    "escapes of a terminal": b'graphprobe_x{a="\x1b[2J\x07"} 1\ngraphprobe_\x1b[2J 1\n',
    "type of everything": b"# TYPE graphprobe_graph_calls_total \x00counter\n# TYPE\n# HELP\n#\n# UNIT x\n",
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("kind", [TEXT, OPENMETRICS, None])
def test_a_hostile_body_is_a_finding(case: str, kind: str | None) -> None:
    """Whatever the bytes are: findings, few and short, soon, and no exception."""
    begun = time.monotonic()
    found = findings(HOSTILE[case], kind)
    assert time.monotonic() - begun < 15
    assert 0 < len(found) < 700
    assert any(f.severity == "error" for f in found)
    assert all(len(f"{f.metric}{f.what}") < 400 and f"{f.metric}{f.what}".isprintable() for f in found)


@pytest.mark.parametrize("limit", ["MAX_BYTES", "MAX_SAMPLES", "MAX_SECONDS"])
def test_limits(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a limit nothing is looked at, and that is said."""
    monkeypatch.setattr(exposition, limit, {"MAX_BYTES": 1 << 20, "MAX_SAMPLES": 10, "MAX_SECONDS": 0.0}[limit])
    assert re.search("the rest.* (was left|was not looked at)", told(PAGE * 100))


def page_of_pieces() -> st.SearchStrategy[str]:
    """Our page with lines dropped, repeated and spoilt."""
    lines = PAGE.splitlines(keepends=True)
    spoilt = st.builds(
        lambda line, at, text: line[: at % len(line)] + text + line[at % len(line) :],
        st.sampled_from(lines),
        st.integers(0, 200),
        st.text(st.sampled_from('{}"\\,= \n\t#1aé\r\0+-'), max_size=4),
    )
    return st.lists(st.sampled_from(lines) | spoilt | st.text(max_size=20), max_size=30).map("".join)


@settings(max_examples=100, deadline=None)
@given(page_of_pieces(), st.sampled_from([TEXT, OPENMETRICS, None]))
def test_no_page_raises(page: str, kind: str | None) -> None:
    """Any mixture of good and bad lines gives findings, each with a hint."""
    found = findings(page, kind, earlier=PAGE)
    assert found
    assert all(f.severity in ("error", "warning") and f.what and f.hint for f in found)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.text(max_size=60))
def test_no_bytes_raise(body: bytes, kind: str) -> None:
    """Any bytes under any content type give findings."""
    assert findings(body, kind)


def test_the_same_kind_of_finding_is_counted() -> None:
    """Five of one kind are told, the others counted, so that a broken page stays readable."""
    page = PAGE + "".join(f"bad line {n} here\n" for n in range(100))
    found = [f for f in findings(page) if "cannot be read" in f.what or "more like these" in f.what]
    assert exposition.MANY + 1 == len(found)
    assert "and 95 more like these" == found[-1].what


def test_exit_status_and_list(tmp_path: Path) -> None:
    """0 and one line where all is well; 1 and a list, errors first, where something is not; a file is read once."""
    good, bad = tmp_path / "good.prom", tmp_path / "bad.prom"
    good.write_text(PAGE)
    page = changed('phase="verify"', 'phase="encode"')
    bad.write_text(changed('outcome="oom"', 'outcome="failed"', page))
    fine = run(str(good))
    assert (0, 1) == (fine.exit_code, len(fine.stdout.splitlines()))
    assert "keeps it" in fine.stdout
    done = run(str(bad))
    lines = done.stdout.splitlines()
    assert 1 == done.exit_code
    assert re.fullmatch(r".*bad\.prom: 1 error, 2 warnings \(metric contract 1, \d+ samples of 1 forward\)", lines[0])
    assert ["error    graphprobe_captures_total", "         unknown outcome 'failed' of decode"] == lines[1:3]
    assert "         hint: one of ok, error, oom" == lines[3]
    assert lines[4].startswith("warning  graphprobe_graph_calls_total")


def test_standard_input() -> None:
    """``check -`` reads a page that was piped in, which cannot come a second time."""
    assert 0 == run("-", input=PAGE).exit_code
    again = run("-", "--wait", "1", input=PAGE)
    assert (2, "") == (again.exit_code, again.stdout)
    assert "comes once" in again.stderr


def test_a_file_may_be_read_again(tmp_path: Path) -> None:
    """With ``--wait`` a file that is written again and again is compared with itself."""
    path = tmp_path / "page.prom"
    path.write_text(changed(GRAPH, GRAPH[:-3] + "2"))
    threading.Timer(0.2, path.write_text, [PAGE]).start()
    assert "fell from 2 to 1" in run(str(path), "--wait", "1").stdout


def test_json(server: Server) -> None:
    """``--json`` gives the same findings to a program, with the same exit status."""
    server.reply = lambda handler: answer(handler, changed('outcome="oom"', 'outcome="failed"'))
    done = run(server.url, "--json", "--wait", "0")
    told = json.loads(done.stdout)
    assert 1 == done.exit_code
    assert (False, "1", ["decode"], server.url) == (told["ok"], told["contract"], told["forwards"], told["source"])
    assert [dataclasses.asdict(f) for f in findings(changed('outcome="oom"', 'outcome="failed"'))] == told["findings"]


def test_what_cannot_be_read(server: Server, tmp_path: Path) -> None:
    """No file, no server, no HTTP, an error and a redirect are one line on stderr and exit status 2."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
        for status in (404, 500, 302):
            server.reply = lambda handler, status=status: answer(handler, PAGE, status)
            for source in (server.url, closed, str(tmp_path), str(tmp_path / "none"), "ftp://h/x", "http://"):
                done = run(source)
                assert (2, "") == (done.exit_code, done.stdout), source
                assert re.fullmatch(r"graphprobe: .+ hint: .+\n", done.stderr)


def test_a_server_that_trickles_ends_in_time(server: Server) -> None:
    """A byte now and then, or silence, costs the timeout and no more; an endless body costs the longest page."""
    stop = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler, piece: bytes, pause: float) -> None:
        answer(handler, b"")
        try:
            while not stop.wait(pause):
                handler.wfile.write(piece)
        except OSError:
            pass

    try:
        for piece in (b"x", b""):
            server.reply = lambda handler, piece=piece: trickle(handler, piece, 0.05)
            begun = time.monotonic()
            with pytest.raises(SourceError, match=r"in time|timed out"):
                check(server.url, timeout=0.5, wait=0)
            assert time.monotonic() - begun < 4
        server.reply = lambda handler: trickle(handler, b"x" * (1 << 20), 0)
        report = check(server.url, timeout=30, wait=0)
        assert "longer than 16 MiB" in str(report)
    finally:
        stop.set()


def test_ambiguous_wait() -> None:
    """Standard input with a second read is refused before anything is read."""
    with pytest.raises(ConfigError, match="comes once"):
        check("-", wait=1)


def test_the_words_are_those_of_the_code() -> None:
    """What the contract knows for a label is what the package itself lets through."""
    pytest.importorskip("torch")
    from graphprobe import options

    assert (options.PHASES, options.UNITS) == (contract.WORDS["phase"], contract.WORDS["unit"])
    labels = {label for metric in metrics.CATALOGUE for label in metric.labels}
    assert set(contract.WORDS) <= labels


def test_it_works_without_torch() -> None:
    """Checking an engine loads no torch."""
    code = "import sys, graphprobe.tools.check; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert "False" == done.stdout.strip()


def test_a_finding_has_four_parts() -> None:
    """The names that a program may rely on."""
    assert ["severity", "metric", "what", "hint"] == [field.name for field in dataclasses.fields(Finding)]
