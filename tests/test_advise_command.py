"""``graphprobe advise``: what the options say, what is printed, and how it ends."""

from __future__ import annotations

import inspect
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import typer
from typer.testing import CliRunner, Result

import graphprobe
from graphprobe.cli import app, options, values
from graphprobe.cli.advise import advise, spelt
from graphprobe.errors import ConfigError, SourceError
from graphprobe.export.exporter import start_exporter
from graphprobe.ledger import Ledger
from graphprobe.observe import Probe, observe
from graphprobe.snapshot import Snapshot
from graphprobe.tools.arrivals import arrivals
from graphprobe.tools.engines import defaults
from graphprobe.tools.rehearsal import Day, rehearse
from graphprobe.tools.simulate import replay
from graphprobe.tools.speculative import check
from graphprobe.tools.steps import steps
from graphprobe.tools.times import Curve
from tests.servers import Server

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, ["advise", *arguments], env={"COLUMNS": "110"}, **options)


def refused(*arguments: str, **options: Any) -> str:
    """What is said of what cannot be used: one line, and nothing else."""
    done = run(*arguments, **options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.fullmatch(r"graphprobe: .+\n", done.stderr)
    return done.stderr


def answered(*arguments: str, **options: Any) -> dict[str, Any]:
    """The JSON of an answer, in which each number is one."""
    done = run(*arguments, "--json", **options)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(told, dict)
    return told


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of batch sizes from 1 to 30."""
    chance = random.Random(6)
    path = tmp_path_factory.mktemp("traffic") / "sizes.csv"
    drawn = (min(30, max(1, round(chance.gauss(9, 5)))) for _ in range(4000))
    path.write_text("\n".join(["batch_size", *map(str, drawn)]))
    return str(path)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A day of requests: 400 within 20 seconds, of 30 tokens each."""
    path = tmp_path_factory.mktemp("trace") / "day.csv"
    lines = [f"2026-11-30 10:00:{i // 20:02}.{i % 20 * 5:02},{100 + i},30" for i in range(400)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return str(path)


@pytest.fixture
def probe(ledger: Ledger) -> Probe:
    watched = observe("decode", [1, 2, 4], ledger=ledger)
    for _ in range(1500):
        watched.eager_call(3, "no_exact_bucket")
    return watched


# -- what the options say --------------------------------------------------------------------------------------------

TIMED = ["--times", "1:9.1,16:13.3", "--eager-times", "1:42.9,16:44.8"]
TIMES = {"times": {1: 9.1e-3, 16: 13.3e-3}, "eager_times": {1: 42.9e-3, 16: 44.8e-3}}
ASKED: list[tuple[list[str], dict[str, Any]]] = [
    ([], {}),
    (["--forward", "sizes", "--phase", "decode"], {"forward": "sizes", "phase": "decode"}),
    (["--buckets", "1,2,4,8,16"], {"buckets": [1, 2, 4, 8, 16]}),
    (["--buckets", "16,1", "--pad"], {"buckets": [1, 16], "pad": True}),
    (["--no-pad", "--engine", "sglang"], {"pad": False, "engine": "sglang"}),
    (["--engine", "vllm", "--max-seqs", "32", "--spec-tokens", "3"],
     {"engine": "vllm", "max_seqs": 32, "spec_tokens": 3}),
    (["--engine", "vllm", "--tensor-parallel", "4", "--largest", "24"],
     {"engine": "vllm", "tensor_parallel": 4, "largest": 24}),
    (["--max-buckets", "3", "--max-batch", "64"], {"max_buckets": 3, "max_batch": 64}),
    (TIMED, TIMES),
    (["--times", "1:9100us,16:0.0133s", "--eager-times", "1: 42.9ms,16:44.8"], TIMES),
    (["--buckets", "1,2", "--graph-mib", "20", "--max-mib", "100"],
     {"buckets": [1, 2], "graph_bytes": 20 * 2**20, "max_bytes": 100 * 2**20}),
    (["--graph-mib", "1:20,16:25.5"], {"graph_bytes": {1: 20 * 2**20, 16: 25.5 * 2**20}}),
    (["--capture-seconds", "0.5", "--max-capture-seconds", "4"], {"capture_seconds": 0.5, "max_capture_seconds": 4}),
    (["--capture-seconds", "1:.5,16:0.75", "--calls-per-start", "1e5"],
     {"capture_seconds": {1: 0.5, 16: 0.75}, "calls_per_start": 1e5}),
    (["--graph-mib", "20", "--gib-worth", "1.5"], {"graph_bytes": 20 * 2**20, "gib_worth": 0.015}),
    (["--buckets", "1,2,4,8,16,32", "--pad", "--threshold", "0.5"],
     {"buckets": [1, 2, 4, 8, 16, 32], "pad": True, "threshold": 0.005}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "keywords"), ASKED, ids=[" ".join(options) or "-" for options, _ in ASKED])
def test_the_answer_is_that_of_the_function(traffic: str, options: list[str], keywords: dict[str, Any]) -> None:
    """Each option is the keyword of its name, in the unit of its help; JSON and text say the same as there."""
    advice = graphprobe.advise(traffic, **keywords)
    assert answered(traffic, *options) == json.loads(advice.to_json())
    done = run(traffic, *options)
    assert (done.exit_code, done.stdout) == (0, spelt(f"{advice}\n"))
    assert done.stdout.isascii()


def test_the_answer_speaks_of_options() -> None:
    """What the function calls by its keywords is named as options are; the line to paste, a Python one, is not."""
    shown = run("-", "--max-batch", "8", "--pad", input="size,calls\n3,2000\n8,2000\n").stdout
    assert "max_batch=8)" in shown
    shown = run("-", input="size,calls\n3,2000\n").stdout
    assert "--pad is the other way" in shown
    assert "pad=True" not in shown
    line = "[x] Decode batch, #running-req: 3, cuda graph: True, gen throughput (token/s): 1.50\n"
    assert re.search(r"unless it\s+is\s+given\s+\(--buckets\)", run("-", input=line * 2000).stdout)


def test_help_groups_the_options() -> None:
    """Each has a heading, and each heading stands once; at the end are examples."""
    command = typer.main.get_command(app).commands["advise"]  # type: ignore[attr-defined]
    assert {param.rich_help_panel for param in command.params} == set(HEADINGS)
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    alone.command(cls=options.Grouped, epilog=options.EXAMPLES)(advise)
    shown = CliRunner().invoke(alone, ["--help"], env={"COLUMNS": "80"}).stdout
    assert re.findall(r"^(\w.*):$", shown, re.M) == [*HEADINGS, "Options"]
    for heading, names in HEADINGS.items():
        part = shown.split(f"\n{heading}:\n")[1].split("\n\n")[0]
        assert all(f"\n  {name}" in f"\n{part}" for name in names)
    assert all(example in shown.split("Examples:")[1] for example in (".log ", ".csv ", "http://HOST:9090 --last"))
    assert max(map(len, shown.splitlines())) <= 80


HEADINGS = {
    "Source": ["[SOURCE]", "--forward", "--last", "--timeout"],
    "Today and engine": ["--buckets", "--pad / --no-pad", "--engine", "--max-seqs"],
    "Times and costs": ["--times", "--steps", "--graph-mib"],
    "Limits and prices": ["--max-buckets", "--gib-worth", "--threshold"],
    "Output": ["--plot", "--json"],
    "Replay and check": ["--simulate", "--speed", "--check"],
}


def test_every_keyword_has_an_option() -> None:
    """What ``graphprobe.advise`` can be asked can be asked here, and is asked above or below."""
    elsewhere = {"source", "window", "end", "match", "timeout"}
    assert {name for _, keywords in ASKED for name in keywords} | elsewhere == set(
        inspect.signature(graphprobe.advise).parameters
    )


def test_a_list_to_keep_and_one_to_change_are_both_answers(traffic: str) -> None:
    kept, changed = (
        answered(traffic, "--buckets", given, "--pad") for given in (",".join(map(str, range(1, 31))), "1")
    )
    assert (kept["keep"], changed["keep"]) == (True, False)
    assert run(traffic, "--buckets", "1", "--pad").stdout.count("change it: ") == 1


def test_a_file_of_steps(traffic: str, tmp_path: Path) -> None:
    """Seconds and bytes by size, as ``benchmarks/steps.py`` writes them; an option beside it wins."""
    path = tmp_path / "steps.json"
    held, spent = {"1": -4096, "16": 2**20}, {"1": 0.25, "16": 0.5}
    measured = {"graph": {"1": 9.1e-3, "16": 13.3e-3}, "eager": {"1": 42.9e-3, "16": 44.8e-3}, "prefill": {}}
    path.write_text(json.dumps({"model": "M", "notes": ["a"], **measured, "bytes": held, "capture_seconds": spent}))
    keywords = {**TIMES, "graph_bytes": {0: 0, 1: 0, 16: 2**20}, "capture_seconds": {1: 0.25, 16: 0.5}}
    assert answered(traffic, "--steps", str(path)) == json.loads(graphprobe.advise(traffic, **keywords).to_json())
    keywords |= {"times": {1: 20e-3}, "graph_bytes": 0.0}
    found = answered(traffic, "--steps", str(path), "--times", "1:20", "--graph-mib", "0")
    assert found == json.loads(graphprobe.advise(traffic, **keywords).to_json())


def test_steps_without_what_graphs_take(ledger: Ledger, probe: Probe, tmp_path: Path) -> None:
    """What the file does not have is what was measured."""
    seen = replace(ledger.snapshot().forwards[probe.name], capture_seconds={4: 0.5})
    (tmp_path / "steps.json").write_text('{"graph": {"1": 9e-3}}')
    (tmp_path / "shot.json").write_text(Snapshot({probe.name: seen}).to_json())
    found = answered(str(tmp_path / "shot.json"), "--steps", str(tmp_path / "steps.json"))
    assert found["now"]["capture_seconds"] == 1.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1,2", "no JSON"),
        ("[]", "no times in it"),
        ("{}", "no times in it"),
        ('{"graph": {}}', "no times in it"),
        ('{"graph": [9.1]}', "graph must be numbers by size"),
        ('{"graph": {"one": 9.1}}', "graph must be numbers by size"),
        ('{"graph": {"1": null}}', "graph must be numbers by size"),
        ('{"graph": {"0": 1}}', "graph of size 0 is 1.0"),
        ('{"graph": {"1": NaN}}', "graph of size 1 is nan"),
        ('{"graph": {"1": -1}}', "graph of size 1 is -1.0"),
        ('{"graph": {"1": 0}}', "the time of size 1 must be seconds above 0"),
        ('{"graph": {"1": 1}, "bytes": {"1": Infinity}}', "bytes of size 1 is inf"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_file_that_has_no_steps(traffic: str, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(text)
    assert says in refused(traffic, "--steps", str(path))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("6h", 21_600), ("2d", 172_800), ("1w", 604_800), ("1.5h", 5400)]
)
def test_a_duration(text: str, seconds: float) -> None:
    assert values.duration(text, "--last") == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2023-11-16T18:00", 1_700_157_600),
        ("2023-11-16 18:00:00Z", 1_700_157_600),
        ("2023-11-16T20:00:00+02:00", 1_700_157_600),
        ("2023-11-16", 1_700_092_800),
    ],
)
def test_a_point_in_time(text: str, seconds: float) -> None:
    """Without a zone it is UTC, wherever the machine is."""
    assert values.instant(text, "--until") == seconds


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--times", "9.1"], "--times must be figures by size"),
        (["--times", ""], "--times must be figures by size"),
        (["--times", "1:9.1,"], "--times must be figures by size"),
        (["--times", "-1:9.1"], "--times must be figures by size"),
        (["--times", "1:9,01:9"], "--times names size 1 twice"),
        (["--times", "1:0"], "--times must be milliseconds above 0, got '0'"),
        (["--times", "1:-3"], "--times must be milliseconds above 0, got '-3'"),
        (["--times", "1:nan"], "--times must be milliseconds above 0, got 'nan'"),
        (["--times", "1:1e999"], "--times must be milliseconds above 0"),
        (["--times", "1:9.1min"], "--times must be milliseconds above 0"),
        (["--times", "0:9.1"], "a size of times must be at least 1"),
        (["--times", "1:0.0091"], "hint: write its unit: 0.0091ms, or 0.0091s"),
        (["--eager-times", "1:42900"], "hint: write its unit: 42900ms, or 42900us"),
        (["--graph-mib", "many"], "--graph-mib must be a number from 0 on, got 'many'. hint: write 20, or 1:20,16:25"),
        (["--graph-mib", "1:-5"], "--graph-mib must be a number from 0 on, got '-5'"),
        (["--capture-seconds", "5s"], "--capture-seconds must be a number from 0 on, got '5s'"),
        (["--buckets", "1;2"], "buckets must be whole numbers, got '1;2'"),
        (["--buckets", "1,1"], "buckets has duplicates [1]"),
        (["--engine", "tgi"], "unknown engine 'tgi'. hint: use one of: graphprobe, vllm, sglang"),
        (["--engine", "vllm", "--no-pad"], "vllm always pads, got --no-pad"),
        (["--largest", "0"], "largest must be at least 1"),
        (["--tensor-parallel", "0"], "--tensor-parallel must be at least 1"),
        (["--max-buckets", "0"], "--max-buckets must be at least 1"),
        (["--max-mib", "nan", "--graph-mib", "1"], "--max-mib must be a number above 0"),
        (["--spec-tokens", "-1"], "--spec-tokens must be at least 0"),
        (["--forward", "decoder"], "there is no forward 'decoder'. hint: there are: sizes"),
        (["--phase", "verify"], "no calls of phase verify yet"),
        (["--timeout", "0"], "timeout must be a time in seconds"),
        (["--plot", "frontier.pdf"], "cannot draw into 'frontier.pdf'. hint: end it in one of: .png, .svg, .html"),
        (["--steps", "/no/such/file"], "/no/such/file: No such file or directory"),
        (["--last", "6h"], "only Prometheus has a window of time"),
        (["--last", "6"], "--last must be a time with its unit, got '6'. hint: write 90s, 15m, 6h or 2d"),
        (["--last", "6h", "--until", "noon"], "--until must be a time, got 'noon'"),
        (["--last", "6h", "--until", "2999-01-01"], "--until must be past"),
        (["--until", "2023-11-16"], "--until without --last says nothing. hint: add --last"),
        (["--match", 'job="a"'], "--match without --last says nothing"),
        (["--speed", "4"], "--speed without --simulate says nothing"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(traffic: str, options: list[str], says: str) -> None:
    assert says in refused(traffic, *options)


# -- what contradicts itself or the traffic --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--max-batch", "8"],
            r"the declared largest batch of 8 is below size \d+, seen [\d,]+ times\. hint: declare the largest batch",
        ),
        (["--max-batch", "40", "--max-seqs", "32", "--spec-tokens", "1"], r"--max-batch 40 is below 32 requests"),
        (["--max-mib", "100"], r"--max-mib needs to know what a graph takes.*hint: give --graph-mib"),
        (["--max-capture-seconds", "9"], r"--max-capture-seconds needs to know .*hint: give --capture-seconds"),
        (["--gib-worth", "1"], r"--gib-worth needs to know .*hint: give --graph-mib"),
        (["--calls-per-start", "1000"], r"--calls-per-start needs to know .*hint: give --capture-seconds"),
        (["--max-mib", "10", "--graph-mib", "20"], r"the bucket \d+ must be there, and takes 20 MiB of 10 MiB"),
        (["--engine", "vllm", "--tensor-parallel", "16", "--largest", "8"], r"vllm can capture nothing here"),
    ],
)
def test_constraints_that_cannot_hold_together_are_named_by_their_options(
    traffic: str, options: list[str], says: str
) -> None:
    assert re.search(says, refused(traffic, *options))


def test_no_calls_yet(ledger: Ledger, tmp_path: Path) -> None:
    observe("decode", [1, 2, 4], ledger=ledger)
    (tmp_path / "shot.json").write_text(ledger.snapshot().to_json())
    assert "decode: no calls yet. hint: run it under load, then ask again" in refused(str(tmp_path / "shot.json"))
    assert "no forward is in the source" in refused("-", input='{"schema": 1, "forwards": {}}')


def test_several_forwards(ledger: Ledger) -> None:
    for name in ("vllm", "vllm.drafter", "vision"):
        observe(name, [1, 2], ledger=ledger).graph_call(1, 1)
    shot = ledger.snapshot().to_json()
    assert "3 forwards have calls. hint: name one of: vllm, vllm.drafter, vision" in refused("-", input=shot)
    assert answered("-", "--forward", "vllm.drafter", input=shot)["engine"] == "vllm"


def test_one_size_only() -> None:
    """It needs one graph more than today's, none of which is taken away after so few calls."""
    found = answered("-", "--buckets", "1,2,4", *TIMED, input="3\n" * 2000)
    assert (found["keep"], found["best"]["buckets"], found["best"]["hit_rate"]) == (False, [1, 2, 3, 4], 1.0)
    assert answered("-", input="7\n" * 2000)["best"]["buckets"] == [7]


def test_too_few_calls_change_nothing() -> None:
    found = answered("-", "--buckets", "1,2,4", input="3\n" * 200)
    assert (found["keep"], found["calls"]) == (True, 200)
    assert "too few to judge by" in found["why"]


def test_sizes_above_every_limit_are_eager_with_any_list() -> None:
    found = answered("-", "--engine", "vllm", "--largest", "256", "--buckets", "256", input="size,calls\n300,3000\n")
    assert (found["keep"], found["best"]["buckets"], found["best"]["hit_rate"]) == (True, [256], 0.0)
    assert any("3,000 calls of 300 run eagerly with any list" in text for text in found["warnings"])


@pytest.mark.parametrize("source", ["/no/such/file", "/", "ftp://x", "http://127.0.0.1:1", ""])
def test_a_source_that_cannot_be_read(source: str) -> None:
    refused(source)


def test_an_empty_name_is_not_the_default() -> None:
    """As of a variable of the shell that is not set."""
    assert "9464" not in refused("")


def test_text_that_is_no_source() -> None:
    refused("-", input="<html>busy</html>")
    refused("-", input="")


# -- an exporter, and Prometheus -------------------------------------------------------------------------------------


def test_an_exporter_and_its_page_of_metrics(ledger: Ledger, probe: Probe) -> None:
    """What is counted there is advised on, today's list included."""
    with start_exporter(0, ledger=ledger) as exporter:
        of_snapshot, of_page = answered(exporter.url), run(f"{exporter.url}/metrics")
    assert of_snapshot == json.loads(graphprobe.advise(ledger.snapshot()).to_json())
    assert (of_snapshot["calls"], of_snapshot["now"]["buckets"]) == (1500, [1, 2, 4])
    assert "3, 4" in of_page.stdout


def test_the_exporter_of_this_machine_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphprobe.tools.sources.DEFAULT", "http://127.0.0.1:1")
    assert "http://127.0.0.1:1/snapshot: Connection refused" in refused()


def prometheus(server: Server, status: int, body: str) -> list[dict[str, list[str]]]:
    """Makes ``server`` answer each query like that; what it was asked."""
    asked: list[dict[str, list[str]]] = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        asked.append(parse_qs(urlsplit(handler.path).query))
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(body.encode())

    server.reply = reply
    return asked


EMPTY = '{"status": "success", "data": {"resultType": "matrix", "result": []}}'


def test_a_window_is_asked_of_prometheus(server: Server) -> None:
    """It ends where it is said to, and is of the series that are named."""
    asked = prometheus(server, 200, EMPTY)
    window = ["--last", "6h", "--until", "2023-11-16T18:00", "--match", 'job="vllm"']
    says = refused(server.url, *window)
    assert "no series of graphprobe's calls" in says
    assert "from 2023-11-16 12:00:00 to 2023-11-16 18:00:00 UTC" in says
    assert float(asked[0]["end"][0]) == 1_700_157_600
    assert 'job="vllm"' in asked[0]["query"][0]


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (422, '{"status": "error", "errorType": "execution", "error": "too many samples"}', "too many samples"),
        (400, '{"status": "error", "errorType": "bad_data", "error": "parse error"}', "parse error. hint: write match"),
        (503, "busy", "HTTP 503"),
        (200, EMPTY, "no series of graphprobe's calls"),
        (200, "", "no answer of Prometheus"),
        (200, "<html>sign in</html>", "no answer of Prometheus"),
        (200, '{"status": "success", "data": {}}', "no answer of Prometheus"),
    ],
    ids=["error", "bad_query", "busy", "nothing", "empty", "html", "strange"],
)
def test_a_prometheus_that_has_no_answer(server: Server, status: int, body: str, says: str) -> None:
    prometheus(server, status, body)
    assert says in refused(server.url, "--last", "6h")


def test_a_prometheus_that_refuses_the_connection() -> None:
    assert "Connection refused" in refused("http://127.0.0.1:1", "--last", "90s")


def test_a_window_needs_the_address_of_a_server() -> None:
    says = refused("--last", "6h")
    assert "--last is a window of a Prometheus server. hint: graphprobe advise http://HOST:9090 --last 6h" in says


# -- before any traffic ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "status", "given"),
    [
        (["--max-seqs", "3", "--buckets", "1,2,3"], 0, ([1, 2, 3], 3)),
        (["--max-seqs", "3", "--buckets", "1,3"], 1, ([1, 3], 3)),
        (["--max-seqs", "3", "--buckets", "1,3", "--pad"], 0, ([1, 3], 3, 0, "graphprobe", True)),
        (["--max-seqs", "8", "--spec-tokens", "3", "--engine", "vllm", "--buckets", "1,2,4,8,16"], 1,
         ([1, 2, 4, 8, 16], 8, 3, "vllm")),
        (["--max-seqs", "8", "--spec-tokens", "3", "--engine", "vllm"], 0,
         (defaults("vllm", 8, spec_tokens=3), 8, 3, "vllm")),
        (["--max-seqs", "512", "--engine", "sglang"], 1, (defaults("sglang", 512), 512, 0, "sglang")),
        (["--max-seqs", "32", "--engine", "vllm", "--buckets", "3,8,32", "--tensor-parallel", "4", "--largest", "32"],
         0, ([3, 8, 32], 32, 0, "vllm", None, 4, 32)),
    ],
)  # fmt: skip
def test_a_list_is_checked_before_any_traffic(options: list[str], status: int, given: tuple[Any, ...]) -> None:
    """Exit code 1 where a step has no graph; what is said is what ``tools.speculative.check`` says."""
    found = check(*given)
    done = run("--check", *options)
    assert (done.exit_code, done.stdout) == (status, f"{found}\n")
    assert done.stdout.isascii()
    as_json = run("--check", *options, "--json")
    told = json.loads(as_json.stdout)
    assert told["made"] == {str(size): graph for size, graph in found.made.items()}
    assert (as_json.exit_code, told["ok"]) == (status, not status)
    assert (told["uncovered"], told["proposal"], told["line"]) == (
        list(found.uncovered), list(found.proposal), found.line,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--buckets", "1,2"], "--check needs to know how many requests run at most. hint: add --max-seqs"),
        (["--max-seqs", "8"], "a decorated forward has no list of its own. hint: add --buckets, or --engine"),
        (["http://x", "--max-seqs", "8", "--times", "1:9"], "--check does not look at SOURCE, --times"),
        (["--max-seqs", "8", "--buckets", "1", "--plot", "a.png"], "--check does not look at --plot"),
        (["--max-seqs", "0", "--buckets", "1"], "--max-seqs must be at least 1"),
        (["--max-seqs", "8", "--engine", "tgi", "--buckets", "1"], "unknown engine 'tgi'"),
        (["--max-seqs", "8", "--engine", "lmdeploy", "--no-pad"], "lmdeploy always pads, got --no-pad"),
    ],
)
def test_a_check_that_cannot_be_made(options: list[str], says: str) -> None:
    assert says in refused("--check", *options)


# -- a day of requests -----------------------------------------------------------------------------------------------


def test_a_trace_is_the_traffic_where_there_is_no_other(trace: str) -> None:
    """The day with today's list, the times and the limits given is advised on, and replayed with both lists."""
    options = ["--buckets", "1,2,4", "--pad", "--max-batch", "32", "--speed", "2", *TIMED]
    told = answered("--simulate", trace, *options)
    given = steps({}, {}, **TIMES)
    day = Day(arrivals(trace, speed=2), given, True, 32)
    keywords: dict[str, Any] = {"buckets": [1, 2, 4], "pad": True, "max_batch": 32, **TIMES}
    tried = rehearse(day, [1, 2, 4], lambda seen: graphprobe.advise(seen, **keywords))
    assert told.pop("rehearsal") == json.loads(json.dumps({**tried.as_dict(), "notes": [PROMPTS]}))
    assert told == json.loads(tried.advice.to_json())
    assert told["now"]["buckets"] == [1, 2, 4]
    assert "rehearsal" not in told


PROMPTS = "prompts take no time here: --steps with a part prefill gives them theirs"


def test_both_days_are_printed_below_the_advice(trace: str) -> None:
    done = run("--simulate", trace, "--buckets", "1,2,4", *TIMED)
    assert done.exit_code == 0
    assert done.stdout.isascii()
    advice, page = done.stdout.split("\n\nthe day replayed: ")
    assert advice.startswith("simulated: ")
    assert page.startswith("400 requests, 12,000 tokens\n")
    assert re.search(r"^now +\d.*\nproposal +\d", page, flags=re.M)
    assert page.endswith(f"note: {PROMPTS}\n")


def test_an_engine_without_a_list_captures_its_own(trace: str) -> None:
    told = answered("--simulate", trace, "--engine", "sglang")
    assert (told["pads"], told["rehearsal"]["now"]["buckets"]) == (True, list(defaults("sglang", 256)))


def test_the_list_of_the_day_is_what_the_engine_makes_of_it(trace: str) -> None:
    """Whole requests of 1 + 3 tokens, up to the limit that is set."""
    asked = ["--engine", "vllm", "--spec-tokens", "3", "--max-seqs", "8"]
    told = answered("--simulate", trace, *asked, "--buckets", "1,2,4,8,16")
    assert told["rehearsal"]["now"]["buckets"] == [4, 8, 16]
    told = answered("--simulate", trace, "--engine", "sglang", "--largest", "32")
    assert told["rehearsal"]["now"]["buckets"] == [1, 2, 4, 8, 12, 16, 24, 32]


def test_a_forward_without_a_list_captures_nothing(trace: str) -> None:
    told = answered("--simulate", trace)
    assert (told["now"], told["rehearsal"]["now"]["hit_rate"]) == (None, None)


def test_a_request_with_speculative_tokens_sends_as_many_rows(trace: str) -> None:
    """Where sizes count tokens; engines that count requests capture the width of a request apart."""
    for engine, sent in (("vllm", 4), ("sglang", 1)):
        asked = ["--engine", engine, "--spec-tokens", "3", "--max-seqs", "8"]
        told = answered("--simulate", trace, *asked)
        most = 8 * sent
        assert told["rehearsal"]["now"]["buckets"] == list(defaults(engine, 8, spec_tokens=3))
        assert (told["max_batch"], told["best"]["buckets"][-1]) == (most, most)
        assert {size % sent for size in told["best"]["buckets"]} == {0}
        assert any("as if no speculative one was accepted" in text for text in told["rehearsal"]["notes"])


def test_the_largest_batch_is_counted_as_buckets_are(trace: str) -> None:
    """32 tokens are 8 requests of 1 + 3, so both say the same."""
    asked = ["--simulate", trace, "--engine", "vllm", "--spec-tokens", "3", "--times", "1:60", "--eager-times", "1:80"]
    assert answered(*asked, "--max-batch", "32") == answered(*asked, "--max-seqs", "8")


def test_each_step_of_a_replay_is_a_decode_step(tmp_path: Path) -> None:
    """200 requests at once, of 1 + 3 tokens: nothing above vLLM's 512 is taken for a prompt."""
    path = tmp_path / "burst.csv"
    lines = [f"2024-05-10 00:00:00.{n:06d},10,60" for n in range(200)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines))
    told = answered("--simulate", str(path), "--engine", "vllm", "--spec-tokens", "3", *TIMED)
    assert not any("left out" in note for note in told["notes"])
    assert told["best"]["buckets"][-1] == 800
    assert told["now"]["hit_rate"] < 0.05
    assert told["now"]["hit_rate"] == pytest.approx(told["rehearsal"]["now"]["hit_rate"])


def test_prompts_take_what_the_steps_say(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text('{"graph": {"1": 0.009}, "eager": {"1": 0.04}, "prefill": {"100": 0.002, "499": 0.006}}')
    told = answered("--simulate", trace, "--steps", str(path), "--buckets", "1,2,4,8,16,32,64", "--pad")["rehearsal"]
    curve = Curve({100: 2e-3, 499: 6e-3})
    day = Day(arrivals(trace), steps({}, {}, {1: 9e-3}, {1: 40e-3}), True, 256, prefill=curve)
    played = day.replayed([1, 2, 4, 8, 16, 32, 64])
    assert played.prefill_seconds > 0
    assert (told["now"]["ttft"]["p50"], told["notes"]) == (played.ttft.p50, [])


@pytest.mark.parametrize("pad", [True, False])
def test_a_source_is_advised_on_and_the_trace_only_tried(trace: str, traffic: str, pad: bool) -> None:
    told = answered(traffic, "--simulate", trace, "--buckets", "1,2,4,8,16", "--pad" if pad else "--no-pad", *TIMED)
    tried = told.pop("rehearsal")
    advice = graphprobe.advise(traffic, buckets=[1, 2, 4, 8, 16], pad=pad, **TIMES)
    assert told == json.loads(advice.to_json())
    day = Day(arrivals(trace), steps({}, {}, **TIMES), pad, 256)
    assert tried["now"]["seconds_per_call"] == day.replayed([1, 2, 4, 8, 16]).seconds_per_call
    assert (tried["now"]["buckets"], tried["proposal"]["buckets"]) == ([1, 2, 4, 8, 16], list(advice.best.buckets))


def test_the_times_of_a_source_are_those_of_the_day(trace: str) -> None:
    """What the engine of SOURCE took per call, the replay takes."""
    seen = replay(arrivals(trace), [64], lambda _: 0.02, lambda _: 0.04, pad=True, max_batch=64).snapshot()
    told = answered("-", "--simulate", trace, input=seen.to_json())
    assert told["rehearsal"]["now"]["seconds_per_call"] == pytest.approx(0.02)


def test_a_proposal_that_is_slower_on_the_day_is_told_plainly(trace: str) -> None:
    sizes = "\n".join(["size,calls", "3,300000"])
    done = run("-", "--simulate", trace, "--buckets", "1,2,4,8,16,32,64", *TIMED, input=sizes)
    assert done.exit_code == 0
    assert re.search(r"the proposal is slower than today's list, by \d+\.\d % per call", done.stdout)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--simulate", "/no/such/trace"], "/no/such/trace: No such file or directory"),
        (["--simulate", "TRAFFIC"], "the columns are TIMESTAMP,ContextTokens,GeneratedTokens"),
        (["--simulate", "TRACE", "--speed", "0"], "speed must be a number above 0"),
        (["--simulate", "TRACE", "--speed", "nan"], "speed must be a number above 0"),
        (["--simulate", "TRACE", "--engine", "tgi"], "unknown engine 'tgi'"),
        (["--simulate", "TRACE", "--engine", "vllm", "--no-pad"], "vllm always pads, got --no-pad"),
        (["--simulate", "TRACE", "--max-seqs", "0"], "--max-seqs must be at least 1"),
        (["--simulate", "TRACE", "--max-batch", "0"], "--max-batch must be at least 1"),
        (["--simulate", "TRACE", "--max-batch", "3", "--spec-tokens", "3"], "--max-batch 3 is below one request of 4"),
        (["--simulate", "TRACE", "--spec-tokens", "-1"], "--spec-tokens must be at least 0"),
        (["--simulate", "TRACE", "--forward", "decode"], "there is no forward 'decode'. hint: there are: simulated"),
        (["-", "--simulate", "-"], "SOURCE and TRACE cannot both come from standard input"),
    ],
)
def test_a_day_that_cannot_be_replayed(traffic: str, trace: str, options: list[str], says: str) -> None:
    given = [{"TRACE": trace, "TRAFFIC": traffic}.get(option, option) for option in options]
    assert says in refused(*given)


# -- what else is written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["png", "svg", "html"])
def test_the_frontier_is_drawn_into_a_file(traffic: str, tmp_path: Path, kind: str) -> None:
    """Beside the answer, which is the same as without it."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"frontier.{kind}"
    plain, drawn = run(traffic, "--json"), run(traffic, "--json", "--plot", str(path))
    assert (drawn.exit_code, drawn.stdout, drawn.stderr) == (0, plain.stdout, f"drawn into {path}\n")
    assert path.read_bytes().lstrip().startswith({"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}[kind])


def test_a_picture_that_cannot_be_written_is_told(traffic: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "cannot write" in refused(traffic, "--plot", str(tmp_path / "no" / "frontier.svg"))


def test_the_answer_needs_neither_torch_nor_matplotlib(traffic: str) -> None:
    code = (
        "import sys; from graphprobe.cli import app\n"
        f"try: app(['advise', {traffic!r}])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'matplotlib', 'prometheus_client') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stderr.strip(), "hit rate" in done.stdout) == ("[]", True)


def test_words_of_the_function_in_errors_are_those_of_options() -> None:
    """Every option whose keyword has another name is known to what translates errors."""
    from graphprobe.cli.advise import NAME

    spelt_alike = {"window", "end", "eager_times"}  # named by no error, or checked before
    names = {name for name in inspect.signature(graphprobe.advise).parameters if "_" in name} - spelt_alike
    assert {name for name in names if NAME.fullmatch(name)} == names


def test_parsers_raise_what_is_caught() -> None:
    """No text of an option ends in a traceback."""
    chance = random.Random(0)
    alphabet = "0123456789.,:-+eEsmhd \u0661\x00nif"
    for _ in range(2000):
        text = "".join(chance.choice(alphabet) for _ in range(chance.randint(0, 12)))
        for parse in (values.times, values.per_graph, values.duration, values.instant):
            try:
                parse(text, "--option")
            except (ConfigError, SourceError):
                continue


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing between the tests and their servers."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield
