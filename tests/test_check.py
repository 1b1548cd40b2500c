"""`graphprobe check`: sources read once or twice, what is printed, and pages of other producers than ours."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from graphprobe import metrics
from graphprobe.cli import app
from graphprobe.errors import ConfigError, SourceError
from graphprobe.export.exporter import start_exporter
from graphprobe.export.server import Exporter
from graphprobe.ledger import Ledger
from graphprobe.observe import observe
from graphprobe.tools.check import Finding, check, findings, metrics_url
from graphprobe.tools.findings import RULES
from tests.pages import EAGER, GRAPH, OPENMETRICS, PAGE, TEXT, changed, filled, ranks, replaced, rules, told
from tests.servers import Server

ROOT = Path(__file__).resolve().parent.parent


def served(exporter: Exporter, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"{exporter.url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def answer(handler: BaseHTTPRequestHandler, body: str | bytes, status: int = 200, kind: str | None = TEXT) -> None:
    handler.send_response(status)
    if kind is not None:
        handler.send_header("Content-Type", kind)
    handler.end_headers()
    handler.wfile.write(body.encode() if isinstance(body, str) else body)


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, ["check", *arguments], **options)


def test_the_exporter_conforms(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "conforms (metric contract 1; 1 process, 2 forwards, " in str(report)


@pytest.mark.usefixtures("own_forwards")
def test_a_captured_forward_conforms() -> None:
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


def test_folded_labels_conform(ledger: Ledger) -> None:
    """At every step of folding, which the process counts, the page passes; its phases of its own are told."""
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
    assert report.ok
    assert {"own-word"} == {f.rule for f in report.findings}
    assert "conforms, " in str(report)


def test_an_exporter_without_a_forward(ledger: Ledger) -> None:
    """It conforms, and that it counts nothing is said."""
    with start_exporter(0, ledger=ledger) as running:
        report = check(running.url, wait=0)
    assert report.ok
    assert ["no-forward"] == [f.rule for f in report.findings]


MULTIPROCESS = """
import sys
from graphprobe import metrics
from graphprobe.ledger import BOUNDS, Ledger
from prometheus_client import Counter, Gauge, Histogram
from tests.pages import filled

mode, rank = sys.argv[1:]
kinds = {"counter": Counter, "gauge": Gauge, "info": Gauge, "histogram": Histogram}
made = {}
for one in metrics.samples(filled(Ledger()).snapshot()):
    labels = {**one.labels, **({"rank": rank} if rank else {})}
    if one.metric not in made:
        kind = kinds[one.metric.kind]
        options = {"multiprocess_mode": mode} if kind is Gauge else {"buckets": BOUNDS} if kind is Histogram else {}
        made[one.metric] = kind(one.metric.name, one.metric.help, list(labels), **options)
    child = made[one.metric].labels(**labels) if labels else made[one.metric]
    if one.metric.kind == "counter":
        child.inc(one.value)
    elif one.metric.kind == "histogram":
        for bound, count in zip((*BOUNDS, 10.0), one.value.counts):
            for _ in range(count):
                child.observe(bound)
    else:
        child.set(one.value)
"""

MERGED = """
import sys
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics import exposition

registry = CollectorRegistry()
MultiProcessCollector(registry)
write = exposition.generate_latest if sys.argv[1:] else generate_latest
sys.stdout.buffer.write(write(registry))
"""


def python(code: str, *arguments: str, **environment: str) -> str:
    """What a Python of its own prints: prometheus_client reads its environment at import, and has global state."""
    command = [sys.executable, "-c", code, *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=env, timeout=60).stdout


@pytest.mark.parametrize("mode", ["all", "livemax"])
@pytest.mark.parametrize("of", [("0", "1"), ("", "")])
def test_several_processes_in_one_directory(mode: str, of: tuple[str, str], tmp_path: Path) -> None:
    """prometheus_client's multiprocess mode: infos are gauges, and a gauge may have a pid while counters are summed."""
    for rank in of:
        python(MULTIPROCESS, mode, rank, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    page = python(MERGED, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert ("pid=" in page) == (mode == "all")
    assert "# TYPE graphprobe_build_info gauge" in page
    assert "" == told(page)
    modern = python(MERGED, "openmetrics", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert "" == told(modern, OPENMETRICS)


def test_a_counter_has_no_pid() -> None:
    """It is added up over processes; where it has one, it was not."""
    gauges = replaced(r"^(graphprobe_(?:bucket|hook|graph_pool|forward_info)\w*\{)", r'\1pid="7",')
    assert "" == told(gauges)
    assert "unknown label pid" in told(changed(GRAPH, GRAPH.replace("{", '{pid="7",')))


RANK = """
import sys, graphprobe
with graphprobe.start_exporter(0, directory=sys.argv[1], interval=0.05) as running:
    probe = graphprobe.observe("decode", [1, 2, 4, 65, 96])
    for size, bucket in ((3, 4), (65, 65), (70, 96)):
        probe.graph_call(size, bucket)
        probe.forward.time("graph", bucket, 0.001, mode="full")
    probe.eager_call(97, "batch_too_large")
    running.flush()
    print(running.url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[list[tuple[subprocess.Popen[str], str]]]:
    """Three ranks that share one directory and its endpoint, each with the address of that."""
    found = []
    for rank in "012":
        environment = {**os.environ, "RANK": rank}
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT, env=environment,
        )  # fmt: skip
        assert process.stdout is not None
        found.append((process, process.stdout.readline().strip()))
    yield found
    for process, _ in found:
        process.kill()
        process.communicate()


def test_a_rank_that_has_died_is_told_and_is_no_error(host: list[tuple[subprocess.Popen[str], str]]) -> None:
    """The counters of an ended process stay on our endpoint and its gauges go: a warning names it, exit status 0."""
    url = host[0][1]
    before = run(url, "--wait", "0.1")
    assert (0, 1) == (before.exit_code, len(before.stdout.splitlines())), before.stdout
    assert "conforms (metric contract 1; 3 processes, 1 forward, " in before.stdout
    host[2][0].kill()
    host[2][0].wait()
    after = run(url, "--wait", "0.1")
    assert 0 == after.exit_code, after.stdout
    verdict, *told = after.stdout.splitlines()
    assert "conforms, 1 warning (metric contract 1; 3 processes, " in verdict
    assert [
        "warning  page (ended)",
        "         rank 2 has ended: its counters stay, its gauges and infos are gone",
        "         hint: if that was not planned, see its log; if it lives, it has to export graphprobe_build_info",
    ] == told
    assert ["ended"] == [one["rule"] for one in json.loads(run(url, "--json", "--wait", "0").stdout)["findings"]]


def test_processes_are_counted(tmp_path: Path) -> None:
    """By the labels that tell them apart, or by the pid of their infos; a page of nothing has none."""
    assert 0 == check(os.devnull).processes
    counted = {
        1: PAGE,
        3: ranks(PAGE, "0", "1", "2"),
        2: replaced(
            r"^graphprobe_build_info\{(.*)$", 'graphprobe_build_info{pid="7",\\1\ngraphprobe_build_info{pid="8",\\1'
        ),
    }
    path = tmp_path / "page.prom"
    for number, page in counted.items():
        path.write_text(page)
        assert number == check(path).processes


OTEL = """
import sys
from graphprobe import metrics
from graphprobe.ledger import BOUNDS, Ledger
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.openmetrics import exposition
from tests.pages import filled

meter = MeterProvider(metric_readers=[PrometheusMetricReader()]).get_meter("graphprobe", "0.1.0")
found = {}
for one in metrics.samples(filled(Ledger()).snapshot()):
    found.setdefault(one.metric, []).append(one)
for metric, samples in found.items():
    options = {"unit": metric.unit, "description": metric.help}
    if metric.kind == "histogram":
        histogram = meter.create_histogram(
            metric.otel_name, explicit_bucket_boundaries_advisory=list(BOUNDS), **options
        )
        for one in samples:
            for bound, count in zip((*BOUNDS, 10.0), one.value.counts):
                for _ in range(count):
                    histogram.record(bound, {**one.labels, "rank": "0"})
    else:
        seen = [Observation(one.value, {**one.labels, "rank": "0"}) for one in samples]
        make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        make(metric.otel_name, callbacks=[lambda _, seen=seen: seen], **options)
sys.stdout.buffer.write((exposition.generate_latest if sys.argv[1:] else generate_latest)(REGISTRY))
"""


def test_opentelemetry() -> None:
    """Its Prometheus exporter: names and units put together anew, infos as gauges, the labels of its scope on all."""
    pytest.importorskip("opentelemetry.exporter.prometheus")
    page = python(OTEL)
    assert 'otel_scope_name="graphprobe"' in page
    assert "target_info{" in page
    assert "" == told(page)
    assert "" == told(python(OTEL, "openmetrics"), OPENMETRICS)


def by_hand(page: str = PAGE) -> str:
    """Our page as C++ or Rust code would write it by itself: sorted, no .0, other bounds, no empty labels."""
    page = replaced(r"(\d)\.0$", r"\1", page)
    page = replaced(r'le="5e-05"', 'le="0.00005"', page)
    page = replaced(r'^graphprobe_forward_duration_seconds_bucket\{[^}]*le="0\.(?:0032|0128|4096)".*\n', "", page)
    page = re.sub(r'(backend|role|cuda|torch|device|mode)="",?', "", page).replace(",}", "}")
    families = re.split(r"^(?=# HELP )", page, flags=re.MULTILINE)
    return "".join(sorted(families))


def test_a_page_of_an_engine_in_another_language() -> None:
    """The prometheus crate of Rust and prometheus-cpp print the text format so; it passes."""
    page = by_hand()
    assert page != PAGE
    assert 'le="0.0032"' not in page
    assert "" == told(page)
    assert "" == told(page, "text/plain")


def test_the_openmetrics_of_another_language() -> None:
    """The prometheus-client crate of Rust: sum and count before the bounds, a full stop after a help, ``unknown``."""
    pattern = r"((?:^graphprobe_forward_duration_seconds_bucket.*\n)+)(.*_count.*\n)(.*_sum.*\n)"
    page = replaced(pattern, r"\3\2\1", by_hand())
    page = replaced(r"^(# \w+ \w+)_total ", r"\1 ", replaced(r"^(# HELP .*?)\.?$", r"\1..", page))
    page = replaced(r"^# TYPE (\w+)_info gauge", r"# TYPE \1 info", replaced(r"^(# HELP \w+)_info ", r"\1 ", page))
    page += "# HELP queue Waiting.\n# TYPE queue unknown\nqueue 3\n# EOF\n"
    assert "" == told(page, OPENMETRICS)


def test_our_series_among_three_hundred_others() -> None:
    """An engine's own page: names with colons, summaries, infos, NaN, a label that is called as ours, long values."""
    others = [
        f"# HELP vllm:m{n} Something.\n# TYPE vllm:m{n} gauge\n"
        f'vllm:m{n}{{engine="0",model_name="org/model-{n}",forward="x",reason="length"}} {n}.5\n'
        for n in range(300)
    ]
    others[0] += 'vllm:lora_info{adapters="' + "a," * 2000 + '"} 1.7e+09\n'
    others[1] += "# HELP go_gc x\n# TYPE go_gc summary\n" + 'go_gc{quantile="0.5"} NaN\ngo_gc_sum 0\ngo_gc_count 0\n'
    others[2] += '# TYPE http histogram\nhttp_bucket{le="1"} 1\nhttp_bucket{le="+Inf"} 1\nhttp_sum 0.1\nhttp_count 1\n'
    page = "".join(others[:150]) + ranks(PAGE, "0", "1") + "".join(others[150:])
    assert "" == told(page)
    assert "unknown reason 'x'" in told(page.replace('reason="empty_batch"', 'reason="x"'))


def test_a_label_of_every_series_is_allowed() -> None:
    """What a collector or an engine adds to all of them: a model, a job, a host."""
    page = ranks(PAGE, "0").replace('rank="0"', 'model_name="org/model",instance="h:1"')
    assert "" == told(page)


def test_a_finding_is_frozen() -> None:
    """Severity, rule, metric, what and hint; nobody changes it later."""
    (found,) = findings(changed(EAGER, EAGER.replace("no_exact_bucket", "no_exact_buckets") + "\n" + EAGER))
    assert ("error", "unknown-word", "graphprobe_eager_calls_total") == (found.severity, found.rule, found.metric)
    assert ("unknown reason 'no_exact_buckets' of decode", "write no_exact_bucket") == (found.what, found.hint)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.what = "nothing"  # type: ignore[misc]


def test_a_finding_has_five_parts() -> None:
    """The names that a program may rely on."""
    assert ["severity", "rule", "metric", "what", "hint"] == [field.name for field in dataclasses.fields(Finding)]


def test_content_type_of_a_server(server: Server) -> None:
    """A server that names no content type, or another one, is told."""
    for kind, expected in ((None, "content type 'missing'"), ("text/html", "content type 'text/html'"), (TEXT, "")):
        server.reply = lambda handler, kind=kind: answer(handler, PAGE, kind=kind)
        report = check(server.url, wait=0)
        assert expected in str(report)
        assert report.ok == (kind == TEXT)


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
    (found,) = check(running.url, wait=1).findings
    assert "second-read" == found.rule
    assert "the second read failed: http://" in found.what


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1", "http://h:1/metrics"),
        ("http://h:1/", "http://h:1/metrics"),
        ("http://h:1/metrics/", "http://h:1/metrics/"),
        ("http://h:1/a/snapshot?x=1#y", "http://h:1/a/metrics?x=1"),
        ("https://h/prometheus", "https://h/prometheus"),
        ("https://h/prometheus/?name[]=x", "https://h/prometheus/?name[]=x"),
    ],
)
def test_metrics_url(url: str, expected: str) -> None:
    """An exporter, its snapshot and its metrics are one; another path is taken as it is, with the slash at its end."""
    assert expected == metrics_url(url)


def test_help_is_not_cut() -> None:
    """Each command is one whole sentence in the list of them, on a terminal of 80 columns."""
    told = CliRunner().invoke(app, ["--help"], terminal_width=80).stdout.partition("Commands:\n")[2]
    assert "Tell whether a page conforms to the metric contract." in told
    assert all(line.endswith(".") and not line.endswith("..") for line in told.splitlines())


def test_exit_status_and_list(tmp_path: Path) -> None:
    """0, and the hooks, where all is well; 1 and a list, errors first, where not; a file is read once."""
    good, bad = tmp_path / "good.prom", tmp_path / "bad.prom"
    good.write_text(PAGE)
    page = changed('phase="verify"', 'phase="encode"')
    bad.write_text(changed('outcome="oom"', 'outcome="failed"', page))
    fine = run(str(good))
    assert 0 == fine.exit_code
    verdict, silent, hooks = fine.stdout.splitlines()
    assert "conforms" in verdict
    assert "no data" in silent
    assert "hooks are in place" in hooks
    done = run(str(bad))
    lines = done.stdout.splitlines()
    assert 1 == done.exit_code
    assert re.fullmatch(
        r".*bad\.prom: 1 error, 2 warnings \(metric contract 1; 1 process, 1 forward, \d+ samples\)", lines[0]
    )
    assert "error    graphprobe_captures_total (unknown-word)" == lines[1]
    assert "         unknown outcome 'failed' of decode" == lines[2]
    assert "         hint: one of ok, error, oom" == lines[3]
    assert lines[4] == "warning  graphprobe_graph_calls_total (own-word)"


def test_a_warning_is_no_failure(tmp_path: Path) -> None:
    """What is allowed, and most likely not meant, is told with exit status 0."""
    page = tmp_path / "page.prom"
    page.write_text(changed('phase="verify"', 'phase="encode"'))
    done = run(str(page))
    assert 0 == done.exit_code
    assert "conforms, 2 warnings (metric contract 1" in done.stdout
    assert 0 == run(str(page), "--json").exit_code


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
    said = json.loads(done.stdout)
    assert 1 == done.exit_code
    assert (False, "1", ["decode"], server.url) == (said["ok"], said["contract"], said["forwards"], said["source"])
    assert [dataclasses.asdict(f) for f in findings(changed('outcome="oom"', 'outcome="failed"'))] == said["findings"]


def test_what_cannot_be_read_has_exit_status_2(server: Server, tmp_path: Path) -> None:
    """No file, no page and an error are one line on stderr."""
    server.reply = lambda handler: answer(handler, PAGE, 500)
    for source in (server.url, str(tmp_path), str(tmp_path / "none"), "ftp://h/x", "http://"):
        done = run(source)
        assert (2, "") == (done.exit_code, done.stdout), source
        assert re.fullmatch(r"graphprobe: .+ hint: .+\n", done.stderr)


def test_an_endless_page(server: Server) -> None:
    """It costs the longest page that is looked at, and that it is too long is the finding."""
    stop = threading.Event()

    def pour(handler: BaseHTTPRequestHandler) -> None:
        answer(handler, b"")
        try:
            while not stop.is_set():
                handler.wfile.write(b"x" * (1 << 20))
        except OSError:
            pass

    server.reply = pour
    try:
        assert "longer than 16 MiB" in str(check(server.url, timeout=60, wait=0))
    finally:
        stop.set()


@pytest.mark.parametrize("wait", [float("nan"), -1, float("inf"), 1e300])
def test_a_time_that_cannot_be_waited(wait: float, tmp_path: Path) -> None:
    """It is refused before anything is read."""
    with pytest.raises(ConfigError, match="wait must be a time"):
        check(tmp_path / "none", wait=wait)


def test_ambiguous_wait() -> None:
    """Standard input with a second read is refused before anything is read."""
    with pytest.raises(ConfigError, match="comes once"):
        check("-", wait=1)


def test_what_is_no_source(tmp_path: Path) -> None:
    """A path may be text, bytes or a Path; what is none is a SourceError."""
    page = tmp_path / "page.prom"
    page.write_text(PAGE)
    assert check(page).ok
    assert check(bytes(page)).ok  # type: ignore[arg-type]
    with pytest.raises(SourceError):
        check("")


def test_it_works_without_torch() -> None:
    """Checking an engine loads no torch."""
    assert "False\n" == python("import sys, graphprobe.tools.check; print('torch' in sys.modules)")


def test_every_finding_is_of_a_rule() -> None:
    """A rule has a severity and says what it means, in a row of a table."""
    assert {"error", "warning"} == {rule.severity for rule in RULES.values()}
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in RULES)
    assert all(rule.meaning and "|" not in rule.meaning for rule in RULES.values())
    assert rules(PAGE) == set()
