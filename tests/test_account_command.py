"""``graphprobe account``: what the options say, what is printed, and how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from graphprobe.cli import app
from graphprobe.tools.balance import Account
from graphprobe.tools.throughput import compare_steps

ROOT = Path(__file__).resolve().parent.parent
SAVED = ROOT / "docs" / "account"
SERVER = str(SAVED / "server.json")
MODEL = ["--layers", "36", "--kv-heads", "8", "--head-size", "128"]
STEPS = ["--before", "80:10ms", "--after", "100:14ms"]


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, ["account", *arguments], env={"COLUMNS": "110"}, **options)


def refused(*arguments: str, **options: Any) -> str:
    """What is said of what cannot be used: one line, and nothing else."""
    done = run(*arguments, **options)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert re.fullmatch(r"graphprobe: .+\n", done.stderr)
    return done.stderr


def told(*arguments: str, **options: Any) -> dict[str, Any]:
    """The JSON of an answer, in which each number is one."""
    done = run(*arguments, "--json", **options)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(answer, dict)
    return answer


# -- a saved result --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(SAVED.glob("*.json")), ids=lambda file: file.stem)
def test_a_saved_result_is_printed_again(file: Path) -> None:
    done = run(str(file))
    assert (done.exit_code, done.stdout) == (0, f"{Account.from_json(file.read_text())}\n")
    assert run(str(file), "--json").stdout == file.read_text()


def test_a_result_comes_from_standard_input_too() -> None:
    assert run("-", input=Path(SERVER).read_text()).stdout == run(SERVER).stdout


def test_a_saved_result_is_told_what_the_model_and_the_engine_are() -> None:
    """The KV cache that the graphs' memory would be, and the hit rate that decides."""
    found = told(SERVER, *MODEL, "--kv-capacity", "600000", "--hit-rate", "61.4")
    assert (found["kv_token_bytes"], found["kv_capacity"], found["hit_rate"]) == (147_456, 600_000, 0.614)
    assert found["verdict"]["do"] == "hit rate first"
    assert told(SERVER)["verdict"]["do"] == "turn graphs on"


def test_a_saved_result_needs_neither_torch_nor_a_gpu() -> None:
    code = (
        "import sys; from graphprobe.cli import app\n"
        f"try: app(['account', {SERVER!r}])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'matplotlib', 'prometheus_client') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stderr.strip(), "turn graphs on" in done.stdout) == ("[]", True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not a graphprobe account"),
        ("{}", "not a graphprobe account: KeyError: 'schema'"),
        ('{"schema": 9}', "account schema 9, this version reads 1"),
        ("\x00\x01", "not a graphprobe account"),
    ],
)
def test_a_file_that_is_no_result(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "saved.json"
    path.write_text(content)
    assert says in refused(str(path))
    assert "give what graphprobe account --json printed" in refused(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in refused(str(tmp_path / "saved.json"))


# -- a forward -------------------------------------------------------------------------------------------------------

ENGINE = """
import torch

weight = torch.ones(64, 64)

def decode(x):
    return (x @ weight).relu()

def inputs(batch):
    return (torch.ones(batch, 64),)

class Model:
    step = staticmethod(decode)

number = 3
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the folder where the command runs."""
    pytest.importorskip("torch")
    name = f"engine_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(ENGINE)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_thing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


@pytest.mark.parametrize("path", ["decode", "Model.step"])
def test_a_forward_is_measured_at_each_batch(engine: str, path: str) -> None:
    """On a CPU: the host's part, and what it cannot tell."""
    found = told(f"{engine}:{path}", "--inputs", f"{engine}:inputs", "--batches", "4,1")
    assert [step["batch"] for step in found["steps"]] == [1, 4]
    assert all(step["eager"] > 0 and step["graph"] is None for step in found["steps"])
    assert found["name"] == f"{engine}:{path}"
    assert found["verdict"]["do"] == "not enough is measured"


def test_what_was_measured_can_be_saved_and_printed_again(engine: str, tmp_path: Path) -> None:
    done = run(f"{engine}:decode", "--inputs", f"{engine}:inputs", "--batches", "2", "--json")
    (tmp_path / "saved").write_text(done.stdout)
    assert run("saved").stdout.startswith(f"{engine}:decode on cpu\n")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["ENGINE:decode"], "needs arguments: missing a required argument: 'x'. hint: add --inputs MODULE:NAME"),
        (["ENGINE:decode", "--batches", "1"], "add --inputs MODULE:NAME"),
        (["ENGINE:decode", "--inputs", "ENGINE:inputs", "--batches", "0"], "bucket must be at least 1"),
        (["ENGINE:decode", "--inputs", "ENGINE:inputs", "--batches", "one"], "write 1,2,4,8"),
        (["ENGINE:code"], "has no 'code'"),
        (["ENGINE:number"], "is no callable but int"),
        (["no_such_module:decode"], "there is no module 'no_such_module'"),
        (["ENGINE.deeper:decode"], "there is no module"),
        (["decode"], "'decode' is neither a file nor module:callable"),
        (["../engine:decode"], "neither a file nor module:callable"),
        ([".engine:decode"], "neither a file nor module:callable"),
        (["engine.:decode"], "neither a file nor module:callable"),
    ],
)
def test_a_forward_that_cannot_be_found(engine: str, options: list[str], says: str) -> None:
    assert says in refused(*(option.replace("ENGINE", engine) for option in options))


def test_a_module_that_fails_says_so_itself(engine: str) -> None:
    """Its own exception passes through: its traceback is the message."""
    done = run(f"{engine}_broken:decode")
    assert isinstance(done.exception, ModuleNotFoundError)
    assert done.exception.name == "no_such_thing"


# -- a trace ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Three kernels of 10 us; 5 and 15 us between them."""
    starts = (0, 15, 40)
    events = [
        {"ph": "X", "cat": "kernel", "name": f"k{i}", "ts": at, "dur": 10, "pid": 0, "tid": 7,
         "args": {"device": 0, "stream": 7, "correlation": i}}
        for i, at in enumerate(starts, start=1)
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return str(path)


def test_a_trace_is_told_in_gaps(trace: str) -> None:
    found = told("--trace", trace)
    assert (found["kernels"], found["span_us"], found["busy_us"]) == (3, 50, 30)
    assert (found["gap_us"]["p50"], found["gap_us"]["max"]) == (10, 15)
    assert "3 kernels" in run("--trace", trace).stdout


def test_a_trace_is_drawn(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "gaps.png"
    done = run("--trace", trace, "--plot", str(path))
    assert (done.exit_code, done.stdout, done.stderr) == (0, run("--trace", trace).stdout, f"drawn into {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_trace_that_cannot_be_read(tmp_path: Path, trace: str) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert "empty file" in refused("--trace", str(tmp_path / "empty"))
    assert "No such file" in refused("--trace", str(tmp_path / "no"))
    assert "nothing is marked 'ProfilerStep#3'" in refused("--trace", trace, "--step", "3")


# -- the calculator --------------------------------------------------------------------------------------------------


def test_two_steps_are_compared() -> None:
    done = run(*STEPS)
    assert (done.exit_code, done.stdout) == (0, f"{compare_steps((80, 10e-3), (100, 14e-3))}\n")
    found = told(*STEPS)["comparison"]
    assert (found["before_tokens_per_second"], found["worth_it"]) == (pytest.approx(8000), False)


@pytest.mark.parametrize("after", ["100:14ms", "100:14", "100:0.014s", "100:14000us"])
def test_units_of_a_step_time(after: str) -> None:
    assert told("--before", "80:10", "--after", after)["comparison"]["after"] == [100, 0.014]


def test_a_load_that_never_fills_the_pool() -> None:
    alone = run("--concurrent", "20", "--room", "120")
    assert alone.stdout.endswith("the pool never fills, so saved memory buys nothing\n")
    assert told("--concurrent", "20", "--room", "120")["load"]["fills"] is False
    found = told("--before", "80:10ms", "--after", "160:10ms", "--concurrent", "20", "--room", "120")
    assert found["comparison"]["worth_it"] is False


def test_memory_is_told_in_tokens() -> None:
    done = run(*MODEL, "--mib", "1600", "--kv-capacity", "600000")
    assert done.stdout.splitlines() == [
        "a token of KV cache takes 147,456 bytes",
        "1,600.0 MiB hold 11,377 tokens",
        "the 600,000 tokens that the engine reports take 82.40 GiB",
    ]
    assert told(*MODEL, "--kv-dtype", "fp8", "--mib", "1600")["kv"] == {"bytes_per_token": 73_728, "tokens": 22_755}


def test_both_answers_stand_below_each_other() -> None:
    assert set(told(*STEPS, *MODEL)) == {"comparison", "kv"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "nothing to do: no TARGET, no --trace and nothing to calculate"),
        (["--before", "80:10ms"], "--before and --after say something together only"),
        (["--after", "80:10ms"], "--before and --after say something together only"),
        (["--before", "80:10ms,100:14ms", "--after", "100:14ms"], "--before is one batch and its step time"),
        (["--before", "80", "--after", "100:14ms"], "--before must be figures by size"),
        (["--before", "80:0.01", "--after", "100:14ms"], "write its unit"),
        (["--before", "0:10ms", "--after", "100:14ms"], "batch of before must be at least 1"),
        (["--concurrent", "20"], "--concurrent and --room say something together only"),
        (["--concurrent", "-1", "--room", "5"], "concurrent must be at least 0"),
        (["--layers", "36"], "without --kv-heads, --head-size"),
        ([*MODEL, "--kv-dtype", "auto"], "unknown dtype 'auto'"),
        (["--layers", "0", "--kv-heads", "8", "--head-size", "128"], "layers must be at least 1"),
        ([*MODEL, "--mib", "nan"], "bytes must be a number from 0 on"),
        ([*MODEL, "--mib", "-1"], "bytes must be a number from 0 on"),
        (["--mib", "10"], "how large a token of KV cache is"),
        (["--kv-capacity", "10"], "how large a token of KV cache is"),
        (["--batches", "1"], "--batches says nothing beside the calculator"),
        (["--step", "1", *STEPS], "--step says nothing beside the calculator"),
        ([SERVER, *STEPS], "--before, --after say nothing beside TARGET"),
        ([SERVER, "--batches", "1", "--compile"], "--batches, --compile say nothing beside a saved result"),
        ([SERVER, "--step", "1"], "--step says nothing beside TARGET"),
        ([SERVER, "--trace", "x"], "TARGET says nothing beside --trace"),
        (["--trace", "x", "--layers", "0"], "--layers says nothing beside --trace"),
        ([SERVER, "--kv-capacity", "-1"], "kv_capacity must be at least 0"),
        ([SERVER, "--hit-rate", "nan"], "--hit-rate must be percent from 0 to 100, got nan"),
        ([SERVER, "--hit-rate", "101"], "--hit-rate must be percent from 0 to 100, got 101"),
    ],
)
def test_options_that_say_nothing(options: list[str], says: str) -> None:
    assert says in refused(*options)


def test_help_has_each_option_below_its_heading() -> None:
    page = run("--help").stdout
    for heading in ("A forward:", "A trace:", "Memory:", "Output:", "Examples:"):
        assert f"\n{heading}" in page or f"\n  {heading}" in page
    assert max(map(len, page.splitlines())) <= 110


def test_what_was_measured_is_printed_before_a_picture_of_it_fails(engine: str) -> None:
    done = run(f"{engine}:decode", "--inputs", f"{engine}:inputs", "--batches", "1", "--json", "--plot", "p.png")
    assert 2 == done.exit_code
    assert [1] == [step["batch"] for step in json.loads(done.stdout)["steps"]]
    assert "nothing to draw" in done.stderr


def test_what_the_module_prints_is_not_the_result(engine: str, tmp_path: Path) -> None:
    """The result goes into a file, to be read again."""
    path = tmp_path / f"{engine}_loud.py"
    path.write_text(f"print('loading')\nfrom {engine} import decode, inputs")
    done = run(f"{engine}_loud:decode", "--inputs", f"{engine}_loud:inputs", "--batches", "1", "--json")
    assert "loading\n" == done.stderr
    assert json.loads(done.stdout)["schema"] == 1
