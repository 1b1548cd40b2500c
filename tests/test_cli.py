from __future__ import annotations

import itertools
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import graphprobe
from graphprobe.cli import app
from graphprobe.export.exporter import start_exporter
from graphprobe.export.server import Exporter
from graphprobe.ledger import Ledger
from graphprobe.observe import Probe, observe
from graphprobe.snapshot import ForwardSnapshot, Snapshot
from graphprobe.tools.table import table
from tests.servers import Server

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def probe(ledger: Ledger) -> Probe:
    watched = observe("decode", [1, 2, 4], ledger=ledger)
    watched.graph_call(3, 4)
    watched.eager_call(9, "batch_too_large")
    return watched


@pytest.fixture
def exporter(ledger: Ledger, probe: Probe) -> Iterator[Exporter]:
    with start_exporter(0, ledger=ledger) as running:
        yield running


def run(*arguments: str, **options: object) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "110"}, **options)  # type: ignore[arg-type]


def test_table_of_url(exporter: Exporter, ledger: Ledger) -> None:
    """``table URL`` prints the table of that exporter."""
    done = run("table", exporter.url)
    assert (done.exit_code, done.stdout) == (0, table(ledger.snapshot()))


def test_table_of_file_and_input(ledger: Ledger, probe: Probe, tmp_path: Path) -> None:
    """``table FILE`` and ``table -`` print the same table."""
    text = ledger.snapshot().to_json()
    path = tmp_path / "shot.json"
    path.write_text(text)
    assert run("table", str(path)).stdout == run("table", "-", input=text).stdout == table(ledger.snapshot())


def test_notes_are_below_the_table(tmp_path: Path) -> None:
    """What a reader of the numbers must know is printed by ``table``, and by ``top`` at each look."""
    path = tmp_path / "sizes"
    path.write_text("3\n3\n17\n")
    note = "the hit rates of advice are what each list would give\n"
    assert run("table", str(path)).stdout.endswith(note)
    assert run("top", str(path), "--count", "2", "--interval", "0.05").stdout.count(note) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["table", "/no/such/file"],
        ["table", "http://127.0.0.1:1"],
        ["table", "ftp://x"],
        ["top", "http://127.0.0.1:1"],
        ["top", "-"],
        ["coverage", "1,x", "8"],
        ["coverage", "1,1", "8"],
        ["coverage", "1,2", "0"],
        ["demo", "--model", "nonsense"],
        ["demo", "--buckets", "4,0"],
    ],
)
def test_user_errors(arguments: list[str]) -> None:
    """What the user gave wrongly is one line on stderr and exit code 2, without a traceback."""
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert re.fullmatch(r"graphprobe: .+\n", done.stderr)


@pytest.mark.parametrize("arguments", [["nonsense"], ["table", "--nonsense"], ["top", "--interval", "0"], ["coverage"]])
def test_usage(arguments: list[str]) -> None:
    """A command that does not exist or does not fit exits with 2 and says so."""
    done = run(*arguments)
    assert done.exit_code == 2
    assert "Error" in done.stderr


def test_top(exporter: Exporter) -> None:
    """``top`` shows the totals first and then what happened between two looks."""
    done = run("top", exporter.url, "--count", "3", "--interval", "0.05")
    parts = re.split(r"^(since the start|in the last 0\.05 s)$", done.stdout, flags=re.M)
    assert done.exit_code == 0
    assert parts[1::2] == ["since the start", "in the last 0.05 s", "in the last 0.05 s"]
    assert "hit rate: 50 % (1 graph, 1 eager)" in parts[2]
    assert "hit rate: no traffic\n" in parts[4]


class Busy(Ledger):
    """A ledger in which one more call happens before each look."""

    def snapshot(self) -> Snapshot:
        observe("decode", ledger=self).graph_call(4, 4)
        return super().snapshot()


def test_top_window() -> None:
    """Every look but the first shows only the calls since the one before."""
    with start_exporter(0, ledger=Busy()) as running:
        done = run("top", running.url, "--count", "3", "--interval", "0.05")
    assert re.findall(r"(\d+) graph", done.stdout) == ["1", "1", "1"]


def test_top_survives_a_restart(server: Server) -> None:
    """An exporter that goes away while it is watched is waited for."""
    looks = itertools.count(1)

    def reply(handler: BaseHTTPRequestHandler) -> None:
        if next(looks) == 2:
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(Snapshot({"decode": ForwardSnapshot("decode")}).to_json().encode())

    server.reply = reply
    done = run("top", server.url, "--count", "3", "--interval", "0.05")
    assert done.exit_code == 0
    assert "looking again every 0.05 s" in done.stdout
    assert done.stdout.rindex("in the last 0.05 s") > done.stdout.index("looking again")


def test_coverage() -> None:
    """``coverage`` names the sizes without a bucket, with and without padding."""
    assert run("coverage", "1,2,4,8", "12").stdout == "8 of 12 sizes have no bucket: 3, 5-7, 9-12\n"
    assert run("coverage", "1,2,4,8", "12", "--pad").stdout == "4 of 12 sizes have no bucket: 9-12\n"
    assert run("coverage", "1,2", "2").stdout == "0 of 2 sizes have no bucket\n"


def test_version() -> None:
    """``version`` names graphprobe, the contract and torch."""
    assert re.fullmatch(
        rf"graphprobe {re.escape(graphprobe.__version__)} \(metric contract 1, torch \S+\)\n", run("version").stdout
    )


def test_demo(tmp_path: Path) -> None:
    """``demo`` hands its options on: the result file has the model, the buckets and the counts asked for."""
    pytest.importorskip("torch")
    path = tmp_path / "result.json"
    options = ["--model", "tiny", "--requests", "2", "--max-new-tokens", "3", "--buckets", "1,2", "--device", "cpu"]
    done = run("demo", *options, "--json", str(path), "--no-check")
    assert done.exit_code == 0, done.output
    told = json.loads(path.read_text())
    assert (told["model"], told["buckets"], told["pad"], len(told["answers"])) == ("tiny", [1, 2], False, 2)
    assert max(len(answer["tokens"]) for answer in told["answers"]) <= 3


def test_help_names_what_exists() -> None:
    """Every command listed by ``--help`` runs its own ``--help``; nothing is listed that is not there."""
    names = re.findall(r"^  ([a-z]+)  +[A-Z]", run("--help").stdout, flags=re.M)
    assert names == ["table", "top", "advise", "account", "run", "demo", "coverage", "check", "dashboards", "version"]
    assert all(run(name, "--help").exit_code == 0 for name in names)


def test_imports_are_lazy() -> None:
    """``--help`` loads neither torch nor a metrics client."""
    code = (
        "import sys; from graphprobe.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'prometheus_client', 'graphprobe.demo') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.strip() == "[]"


def test_main() -> None:
    """The module runs as a program, ends quietly when its reader does, and prints no traceback for an OSError."""
    command = f"{sys.executable} -m graphprobe.cli"
    done = subprocess.run(
        f"{command} coverage 1 9 | true; {command} table /; exit $?",
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
