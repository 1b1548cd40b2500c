"""`graphprobe run`: COMMAND is started as without it, in an environment that arms Python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphprobe.cli.run import FOLDER, armed, isolated
from graphprobe.errors import ConfigError
from tests.armed import ENGINE, bare, below_run, python, write

RUN = (sys.executable, "-m", "graphprobe.cli", "run")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the toy engine and its integration."""
    return write(tmp_path / "site", ENGINE)


def run(*arguments: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """What becomes of `graphprobe run` with these arguments."""
    options = {"env": bare(), "capture_output": True, "timeout": 120, "check": False} | options
    return subprocess.run([*RUN, *arguments], **options)


def test_command_is_observed(site: Path) -> None:
    """The words of the command line are enough."""
    done = run("--", sys.executable, "-c", "import job; print(job.step()[1])", env=bare(site))
    assert (b"{'nanovllm': 1}\n", b"", 0) == (done.stdout, done.stderr, done.returncode)


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_arguments_reach_command_as_they_are(separator: list[str]) -> None:
    """Its options, a second `--`, empty ones and bytes that are no text, with and without the separator."""
    arguments = [b"--port", b"1", b"--", b"--help", b"", b"\xff \n*", b"--table"]
    code = "import os, sys; sys.stdout.buffer.write(b'|'.join(map(os.fsencode, sys.argv[1:])))"
    done = run(*separator, sys.executable, "-c", code, *arguments)
    assert (b"|".join(arguments), b"", 0) == (done.stdout, done.stderr, done.returncode)


def test_standard_input_and_output_are_those_of_command() -> None:
    """Byte for byte, to the last; nothing of ours is between them."""
    sent = bytes(range(256)) * 1000
    done = run("cat", "-", input=sent)
    assert (sent, b"", 0) == (done.stdout, done.stderr, done.returncode)


def test_an_open_file_is_inherited(tmp_path: Path) -> None:
    """As it is without us; and the folder in which it runs is the same."""
    with (tmp_path / "file").open("wb") as file:
        number = file.fileno()
        code = f"import os; os.write({number}, b'told'); print(os.getcwd())"
        done = run(sys.executable, "-c", code, pass_fds=[number], cwd=tmp_path)
    assert ("told", f"{tmp_path}\n") == ((tmp_path / "file").read_text(), done.stdout.decode())


@pytest.mark.parametrize("status", [0, 1, 2, 77, 255])
def test_the_exit_status_is_that_of_command(status: int) -> None:
    """Also where it is one that we have a meaning for."""
    assert status == run("sh", "-c", f"exit {status}").returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP])
def test_a_signal_reaches_command_which_is_this_process(number: int) -> None:
    """Its process id is that of `graphprobe run`, and it ends by the signal as a process of its own does."""

    def interruptible() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = [*RUN, "sh", "-c", "echo $$; exec sleep 60"]
    with subprocess.Popen(command, env=bare(), stdout=subprocess.PIPE, preexec_fn=interruptible) as process:
        assert process.stdout is not None
        assert process.pid == int(process.stdout.readline())
        process.send_signal(number)
        assert -number == process.wait(60)


def test_command_can_catch_a_signal(tmp_path: Path) -> None:
    """A server that ends in its own way does so."""
    script = "trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen([*RUN, "--", "sh", "-c", script], env=bare(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.terminate()
        assert ("caught\n", 3) == (process.stdout.read(), process.wait(60))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_no_signal_is_ignored_that_was_not() -> None:
    """Python ignores SIGPIPE, and a program would inherit it: `yes | head` would not end."""
    shown = ("grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status")

    def signals(told: bytes) -> list[int]:
        # Those above are the C library's own, and subprocess has its way with them.
        return [int(word, 16) & 0x7FFFFFFF for word in told.split()[1::2]]

    assert signals(subprocess.check_output(shown, env=bare())) == signals(run(*shown).stdout)


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("not-there-83", 127, "graphprobe: cannot start 'not-there-83': No such file or directory\n"),
        ("./not/there", 127, "graphprobe: cannot start './not/there': No such file or directory\n"),
        ("", 127, "graphprobe: cannot start '': no name\n"),
        (".", 126, "graphprobe: cannot start '.': Permission denied\n"),
        ("./plain", 126, "graphprobe: cannot start './plain': Permission denied\n"),
        ("./binary", 126, "graphprobe: cannot start './binary': Exec format error\n"),
    ],
)
def test_a_command_that_cannot_be_started_ends_as_in_a_shell(
    tmp_path: Path, command: str, status: int, said: str
) -> None:
    """One line, and the status that a shell has for it."""
    for name, mode in (("plain", 0o644), ("binary", 0o755)):
        (tmp_path / name).write_bytes(b"\0\1\2\3")
        (tmp_path / name).chmod(mode)
    done = run("--", command, cwd=tmp_path)
    assert (b"", said, status) == (done.stdout, done.stderr.decode(), done.returncode)


@pytest.mark.parametrize(
    "arguments", [(), ("--",), ("--port", "9465"), ("--no-such-option", "true"), ("--port=0", "true")]
)
def test_without_a_command_or_with_an_option_that_is_not_ours_nothing_is_started(arguments: tuple[str, ...]) -> None:
    """Exit status 2 and the usage."""
    done = run(*arguments)
    assert (b"", 2) == (done.stdout, done.returncode)
    assert b"Usage: " in done.stderr


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        ({}, {}, {"GRAPHPROBE_PORT": "9464"}),
        ({"GRAPHPROBE_PORT": ""}, {}, {"GRAPHPROBE_PORT": "9464"}),
        ({}, {"port": 9500, "addr": "0.0.0.0"}, {"GRAPHPROBE_PORT": "9500", "GRAPHPROBE_ADDR": "0.0.0.0"}),
        ({"GRAPHPROBE_PORT": "9501"}, {}, {"GRAPHPROBE_PORT": "9501"}),
        ({"GRAPHPROBE_PORT": "9501"}, {"port": 9500}, {"GRAPHPROBE_PORT": "9500"}),
        ({"PROMETHEUS_MULTIPROC_DIR": "/there"}, {}, {"PROMETHEUS_MULTIPROC_DIR": "/there"}),
        ({"GRAPHPROBE": "0"}, {"table": True}, {"GRAPHPROBE_PORT": "9464", "GRAPHPROBE_TABLE": "1"}),
        ({"PATH": "/bin"}, {}, {"GRAPHPROBE_PORT": "9464", "PATH": "/bin"}),
    ],
)
def test_metrics_go_where_the_environment_or_an_option_says(
    given: dict[str, str], options: dict[str, Any], expected: dict[str, str]
) -> None:
    """The way of the metrics is the one that the environment has already, or the one that is asked for here."""
    ours = {"GRAPHPROBE": "1", "GRAPHPROBE_RUN": str(os.getpid()), "PYTHONPATH": FOLDER}
    asked: dict[str, Any] = {"port": None, "addr": None, "table": False} | options
    assert expected | ours == armed(given, **asked)


def test_a_port_beside_a_directory_is_refused() -> None:
    """It would be used by nobody."""
    with pytest.raises(ConfigError, match="--port says nothing beside PROMETHEUS_MULTIPROC_DIR=/there"):
        armed({"PROMETHEUS_MULTIPROC_DIR": "/there"}, 9500, None, False)


@pytest.mark.parametrize(
    ("before", "after"),
    [("", []), ("/a:/b", ["/a", "/b"]), ("/a:", ["/a", ""]), (f"/a:{FOLDER}:/b", ["/a", "/b"]), (FOLDER, [])],
)
def test_pythonpath_is_kept(before: str, after: list[str]) -> None:
    """In its order, behind our folder, which stands there once."""
    assert [FOLDER, *after] == armed({"PYTHONPATH": before}, None, None, False)["PYTHONPATH"].split(":")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("python -I x.py", "-I"),
        ("/usr/bin/python3.11 -u -OE -m engine", "-OE"),
        ("python3 -S", "-S"),
        ("python -s x.py -I", None),
        ("python -m engine -E", None),
        ("python -c -I", None),
        ("vllm serve -E", None),
    ],
)
def test_a_python_that_will_not_read_our_folder_is_named(command: str, option: str | None) -> None:
    """By its own options, before those of what it runs."""
    assert option == isolated(command.split())


def test_a_python_that_will_not_read_our_folder_is_started_all_the_same(site: Path) -> None:
    """After one line."""
    done = run(sys.executable, "-E", "-c", "print(1)", env=bare(site))
    assert (b"1\n", 0) == (done.stdout, done.returncode)
    assert (
        f"graphprobe: {sys.executable} -E ignores what `run` prepares: nothing is counted there\n"
        == done.stderr.decode()
    )


def test_run_below_run_observes_once(site: Path) -> None:
    """Once is enough."""
    code = "import job, os; print(job.step()[1], os.environ['PYTHONPATH'].count('armed'))"
    done = run("--port=9470", "--", *RUN, "--", sys.executable, "-c", code, env=bare(site))
    assert (b"{'nanovllm': 1} 1\n", b"", 0) == (done.stdout, done.stderr, done.returncode)


def test_a_script_of_an_engine_is_observed(site: Path, tmp_path: Path) -> None:
    """A console script, by its name on PATH, and `python -m`."""
    write(site, {"cli.py": "import job\nprint(job.step()[1])\n"})
    path = tmp_path / "bin" / "serve"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\nimport cli\n")
    path.chmod(0o755)
    environment = bare(site)
    environment["PATH"] = f"{path.parent}:{environment['PATH']}"
    for command in (["serve"], [sys.executable, "-m", "cli"]):
        done = run(*command, env=environment)
        assert (b"{'nanovllm': 1}\n", b"", 0) == (done.stdout, done.stderr, done.returncode)


def tables(text: str) -> list[tuple[str, str]]:
    """Name of the process, and hit rate, of each table in ``text``."""
    names = re.findall(r"^graphprobe: process \d+(.*)$", text, re.M)
    return list(zip(names, re.findall(r"^hit rate: (\d+ %)", text, re.M), strict=True))


def test_a_table_is_shown_at_the_end_of_a_process_that_counted(site: Path) -> None:
    """Of a script that ends before anybody can ask, behind all that it has said; nothing where nothing was counted."""
    code = "import job, sys; job.step((1, 2)); print('last', file=sys.stderr)"
    out, err, status = python(code, below_run(site, table=True))
    assert ("", 0, [("", "100 %")]) == (out, status, tables(err))
    assert err.startswith("last\n\ngraphprobe: process ")
    assert "nanovllm (in rows; buckets 1, 2, 4)" in err
    assert ("", "", 0) == python("import nanovllm", below_run(site, table=True))
    assert ("", "last\n", 0) == python(code, below_run(site))


def test_the_table_shows_forwards_without_an_engine() -> None:
    """`graphprobe.observe` and `capture` need no engine for it."""
    code = "import graphprobe; graphprobe.observe('mine', [1]).eager_call(3, 'batch_too_large')"
    _, err, status = python(code, below_run(table=True))
    assert (0, [("", "0 %")]) == (status, tables(err))


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_each_child_shows_a_table_of_its_own(site: Path, method: str) -> None:
    """Each process has one of its own, with its name."""
    body = f"""
    import job, multiprocessing
    if __name__ == "__main__":
        job.step()
        child = multiprocessing.get_context({method!r}).Process(target=job.step, name="rank-1")
        child.start()
        child.join()
        raise SystemExit(child.exitcode)
    """
    path = write(site, {"script.py": body}) / "script.py"
    done = subprocess.run(
        [sys.executable, str(path)], env=below_run(site, table=True), text=True, capture_output=True, timeout=120
    )
    assert (0, [(" (rank-1)", "100 %"), (" (MainProcess)", "100 %")]) == (done.returncode, tables(done.stderr))


@pytest.mark.parametrize(
    ("ending", "status", "shown"),
    [
        ("raise RuntimeError('engine is broken')", 1, 0),
        ("raise KeyboardInterrupt", -2, 1),
        ("sys.exit('no more')", 1, 1),
        ("os._exit(5)", 5, 0),
        ("os.kill(os.getpid(), 15)", -15, 0),
        ("sys.stderr.close()", 0, 0),
        ("os.close(2)", 0, 0),
    ],
)
def test_the_end_of_a_process_is_as_without_a_table(site: Path, ending: str, status: int, shown: int) -> None:
    """Status and traceback; where an exception ends it, the traceback is the last that is read."""
    code = f"import job, os, sys; job.step(); {ending}"
    _, err, found = python(code, below_run(site, table=True))
    _, without, expected = python(code, below_run(site))
    assert (status, expected, shown) == (found, found, len(tables(err)))
    assert err.startswith(without)
    assert shown or err == without


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_crash_of_a_child_is_told_as_without_a_table(site: Path, method: str) -> None:
    """multiprocessing writes the traceback itself; the table is in front of it or behind it, never within."""
    body = f"""
    import job, multiprocessing

    def fails():
        job.step()
        raise RuntimeError("rank is broken")

    if __name__ == "__main__":
        child = multiprocessing.get_context({method!r}).Process(target=fails, name="rank-1")
        child.start()
        child.join()
        raise SystemExit(child.exitcode)
    """
    path = write(site, {"script.py": body}) / "script.py"
    found = []
    for table in (False, True):
        env = below_run(site, table=table)
        done = subprocess.run([sys.executable, str(path)], env=env, text=True, capture_output=True, check=False)
        found.append((done.returncode, done.stderr))
    (expected, without), (status, err) = found
    assert (1, 1, [(" (rank-1)", "100 %")]) == (expected, status, tables(err))
    assert without in err
    assert without.endswith("RuntimeError: rank is broken\n")
