"""SGLang's server on a CPU, where its plain attention and what the folder ``sglang_stubs`` makes up are enough.

Its graphs of a CPU are compiled forwards; with the compiler off they are the forwards themselves, which it dispatches
to all the same: to the next size, or to none.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from tests.dashboards.stack import OPENER
from tests.engines.reading import samples
from tests.engines.serving import Engine, Site, environment

PYTHON = "GRAPHPROBE_SGLANG"
"""The variable that names the Python of its environment."""

STUBS = Path(__file__).with_name("sglang_stubs")

GROUP = "sglang.srt.plugins"
"""Where its plugins are found."""

SIZES = (1, 2, 4)
"""Requests for which it has graphs, of up to 8."""

SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",  # the graphs of 0.5.23 and newer want it
    "TORCHDYNAMO_DISABLE": "1",
}

ARGUMENTS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--max-total-tokens=4096",
    "--mem-fraction-static=0.1",
    "--max-running-requests=8",
    "--disable-radix-cache",
    "--skip-server-warmup",
    "--host=127.0.0.1",
)

GRAPHS = (
    "--enable-torch-compile",
    f"--torch-compile-max-bs={SIZES[-1]}",
    *("--cuda-graph-bs-decode", *map(str, SIZES)),
)


class Server(Engine):
    """A server of SGLang."""

    ready = "/model_info"
    worker = "sglang::scheduler"

    def complete(self, *prompts: str, tokens: int = 8) -> list[list[int]]:
        """What the model adds to each prompt, greedily, always so many tokens."""
        return self.generate(prompts, [tokens] * len(prompts))

    def generate(self, prompts: tuple[str, ...], tokens: list[int]) -> list[list[int]]:
        """The same for prompts that arrive at once and end one after another."""
        wanted = [{"max_new_tokens": count, "temperature": 0, "ignore_eos": True} for count in tokens]
        asked: dict[str, Any] = {"text": list(prompts), "sampling_params": wanted}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/generate", json.dumps(asked).encode(), headers)
        with OPENER.open(request, timeout=120) as reply:
            return [answer["output_ids"] for answer in json.load(reply)]


class Servers(Site):
    """Where SGLang is installed."""

    engine = Server
    graphs = GRAPHS

    def command(self) -> list[str]:
        return [self.python, "-m", "sglang.launch_server", f"--model-path={self.model}", *ARGUMENTS, *self.graphs]

    def environment(self, plugin: Path | None = None, **settings: str) -> dict[str, str]:
        folders = (*self.folders, STUBS, *([] if plugin is None else [plugin]))
        return environment(*folders, **SETTINGS | settings)


class Eager(Servers):
    """Where it has no graphs: those of a CPU can do less than it can without."""

    graphs = ()


def passes(page: str) -> dict[str, int]:
    """SGLang's own count, by its name of a mode."""
    return {one.labels["mode"]: int(one.value) for one in samples(page, "sglang:cuda_graph_passes_total") if one.value}


def python() -> str:
    return os.path.abspath(os.environ[PYTHON])
