"""``graphprobe run``: COMMAND in an environment in which Python processes observe the engines that they import."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import graphprobe
from graphprobe.errors import ConfigError

FOLDER = str(Path(graphprobe.__file__).resolve().parent / "armed")
"""Put first in PYTHONPATH: it has a ``sitecustomize`` and nothing else."""

PORT = 9464

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit statuses, as a shell has them."""

Port = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        help="Port of /metrics; by default GRAPHPROBE_PORT, else 9464; none where PROMETHEUS_MULTIPROC_DIR is set.",
    ),
]
Addr = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address of it; by default 127.0.0.1.")]
Shown = Annotated[
    bool, typer.Option("--table", help="Write the table of each process that counted something to stderr at its end.")
]
Command = Annotated[list[str], typer.Argument(metavar="COMMAND", help="What is started, with its arguments.")]


def run(command: Command, port: Port = None, addr: Addr = None, table: Shown = False) -> None:
    """Start COMMAND with the engines that it imports observed.

    They are SGLang, mini-sglang, nano-vllm and vLLM. Observed, too, are its children in Python, however they are
    started, as long as they keep the environment. This process becomes COMMAND: process id, signals, exit status,
    standard input and output are its own. Options after COMMAND are not ours. Exit status 127: COMMAND was not found;
    126: it cannot be executed.
    """
    environment = armed(os.environ, port, addr, table)
    if (option := isolated(command)) is not None:
        typer.echo(f"graphprobe: {command[0]} {option} ignores what `run` prepares: nothing is counted there", err=True)
    _become(command, environment)


def armed(environment: Mapping[str, str], port: int | None, addr: str | None, table: bool) -> dict[str, str]:
    """The environment in which a Python process observes the engines that it imports."""
    found = dict(environment)
    shared = found.get("PROMETHEUS_MULTIPROC_DIR", "")
    if port is not None and shared:
        hint = "leave --port out, or unset PROMETHEUS_MULTIPROC_DIR"
        raise ConfigError(f"--port says nothing beside PROMETHEUS_MULTIPROC_DIR={shared}", hint)
    if port is not None or not (shared or found.get("GRAPHPROBE_PORT")):
        found["GRAPHPROBE_PORT"] = str(port or PORT)
    if addr is not None:
        found["GRAPHPROBE_ADDR"] = addr
    if table:
        found["GRAPHPROBE_TABLE"] = "1"
    rest = [entry for entry in (found.get("PYTHONPATH") or FOLDER).split(os.pathsep) if entry != FOLDER]
    return found | {
        "GRAPHPROBE": "1",
        "GRAPHPROBE_RUN": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join([FOLDER, *rest]),
    }


def isolated(command: Sequence[str]) -> str | None:
    """The option with which a Python ignores PYTHONPATH, or imports no ``sitecustomize``; None where there is none."""
    if re.fullmatch(r"python[\d.]*", os.path.basename(command[0])):
        options = iter(command[1:])
        for option in options:
            if re.match(r"-[WX]", option):
                # With a value, in the same word or in the next.
                next(options, "") if len(option) == 2 else None
            elif not re.fullmatch(r"-[a-zA-Z]+", option) or option[1] in "cm":
                break
            elif set("EIS") & set(option):
                return option
    return None


def _become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    # Python ignores them, and a program that is executed would inherit that.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except (OSError, ValueError) as error:
        # A ValueError is that of an empty name.
        missing = not isinstance(error, OSError) or isinstance(error, (FileNotFoundError, NotADirectoryError))
        cause = error.strerror if isinstance(error, OSError) else "no name"
        typer.echo(f"graphprobe: cannot start {command[0]!r}: {cause}", err=True)
        raise typer.Exit(NOT_FOUND if missing else NOT_EXECUTABLE) from error
