"""Servers as processes: started with an environment of their own, stopped whatever happens, and all they said.

Those of vLLM; ``sglang_serving`` has what is different of SGLang's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards.stack import OPENER, free_port

STARTED = 400.0
"""Most seconds until a server answers, on a machine that is busy with others."""

STOPPED = 60.0
"""Most seconds that a server may take for its end before it is killed; it gives its own workers several."""

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

ARGUMENTS = ("--enforce-eager", "--max-model-len=512", "--max-num-seqs=8", "--host=127.0.0.1")


def needed(variable: str = "GRAPHPROBE_ENGINES", engine: str = "vLLM") -> None:
    """Skip the module that asks where no Python with the engine is named."""
    if not os.environ.get(variable):
        reason = f"needs {engine}: make test-engines, or the Python of its environment in {variable}"
        pytest.skip(reason, allow_module_level=True)


def environment(*folders: Path, **settings: str) -> dict[str, str]:
    """That of the tests without what is ours or the engine's, and ``settings``; modules of ``folders`` come first."""
    others = ("GRAPHPROBE", "VLLM_", "SGLANG_", "PROMETHEUS_", "PYTHONPATH", "RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return kept | SETTINGS | {"PYTHONPATH": os.pathsep.join(map(str, folders))} | settings


def distribution(
    folder: Path, name: str, version: str = "1", plugin: str = "", group: str = "vllm.general_plugins"
) -> Path:
    """A folder that looks installed to what reads metadata.

    ``plugin`` is the text of a module whose ``register`` the engine, which looks for ``group``, calls in each of its
    processes.
    """
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if plugin:
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:register\n")
        (folder / f"{name}.py").write_text(plugin)
    return folder


def fetch(url: str) -> str:
    with OPENER.open(url, timeout=30) as reply:
        return str(reply.read().decode())


class Engine:
    """A server that is starting, running or at its end."""

    ready = "/health"
    """What answers when it serves, and runs no forward."""
    worker = "VLLM::Worker"
    """How the titles of the processes begin that run forwards."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as out:
            # A session of its own, so that all its processes can be ended at once.
            self.process = subprocess.Popen(
                [*command, f"--port={port}"],
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=log.parent,
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def said(self) -> str:
        """All that its processes have printed."""
        return self._log.read_text(errors="replace")

    def wait(self) -> Engine:
        """Until it answers."""
        end = time.monotonic() + STARTED
        while self.alive and time.monotonic() < end:
            with contextlib.suppress(OSError):
                fetch(f"{self.url}{self.ready}")
                return self
            time.sleep(0.25)
        state = "has not answered" if self.alive else f"ended with {self.process.returncode}"
        raise AssertionError(f"the server {state}:\n{self.said[-6000:]}")

    def page(self) -> str:
        """Its own page of metrics."""
        return fetch(f"{self.url}/metrics")

    def complete(self, *prompts: str, tokens: int = 8) -> list[list[int]]:
        """What the model adds to each prompt, greedily, always so many tokens."""
        asked = {"prompt": list(prompts), "max_tokens": tokens, "temperature": 0}
        asked |= {"ignore_eos": True, "return_token_ids": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(asked).encode(), headers)
        with OPENER.open(request, timeout=120) as reply:
            return [choice["token_ids"] for choice in json.load(reply)["choices"]]

    def status(self, *prompts: str) -> int:
        """The HTTP status of a completion; 0 where there was no answer."""
        try:
            self.complete(*prompts)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0
        return 200

    def workers(self) -> list[int]:
        """The processes that run forwards."""
        titles = ["ps", "--no-headers", "-o", "pid,args", "-s", str(self.process.pid)]
        told = subprocess.run(titles, capture_output=True, text=True, check=True).stdout
        rows = (line.split(None, 1) for line in told.splitlines())
        return [int(pid) for pid, title in rows if title.startswith(self.worker)]

    def stop(self) -> None:
        """Ask it to end, and end what is left of it."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOPPED)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Site:
    """Where an engine is installed: its Python, a model, folders that are searched first, and a folder for logs."""

    engine = Engine

    def __init__(self, python: str, model: Path, folders: Sequence[Path], scratch: Path) -> None:
        self.python, self.model, self.folders, self.scratch = python, model, tuple(folders), scratch
        self._started = 0

    def start(self, *arguments: str, plugin: Path | None = None, **settings: str) -> Engine:
        """A server that is starting, with ``settings`` in its environment."""
        self._started += 1
        command = [*self.command(), *arguments]
        return self.engine(command, self.environment(plugin, **settings), self.scratch / f"{self._started}.log")

    def command(self) -> list[str]:
        """What starts a server."""
        return [self.python, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model), *ARGUMENTS]

    def environment(self, plugin: Path | None = None, **settings: str) -> dict[str, str]:
        return environment(*self.folders, *([] if plugin is None else [plugin]), **settings)

    def offline(self, *arguments: str, **settings: str) -> tuple[dict[str, Any], str]:
        """What offline.py has told, and all else that was printed."""
        command = [self.python, str(Path(__file__).with_name("offline.py")), str(self.model), *arguments]
        env = self.environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", **settings)
        done = subprocess.run(command, env=env, cwd=self.scratch, capture_output=True, text=True, timeout=STARTED)
        assert done.returncode == 0, done.stdout + done.stderr
        *printed, told = done.stdout.splitlines()
        return json.loads(told), "\n".join((*printed, done.stderr))

    @contextlib.contextmanager
    def serving(self, *arguments: str, plugin: Path | None = None, **settings: str) -> Iterator[Engine]:
        """A server that answers, until the end of the block."""
        engine = self.start(*arguments, plugin=plugin, **settings)
        try:
            yield engine.wait()
        finally:
            engine.stop()
