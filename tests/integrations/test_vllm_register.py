"""The plugin as vLLM loads it: in each of its processes, most of which run no forward."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import graphprobe
from graphprobe.errors import DidNotInstrument
from graphprobe.ledger import LEDGER
from tests.integrations.conftest import FAKE
from tests.integrations.engine import RUNNERS, Engine

pytestmark = pytest.mark.usefixtures("fresh")

ROOT = Path(__file__).parents[2]

STATE = """
import json, os, sys, threading
import graphprobe_vllm
graphprobe_vllm.register()
{then}
from graphprobe.ledger import LEDGER
loaded = [n for n in ("wrapt", "torch", "vllm", "prometheus_client", "graphprobe.export") if n in sys.modules]
print(json.dumps([loaded, threading.active_count(), [h for _, h in LEDGER.hooks], list(LEDGER.forwards)]))
"""

RUN = "import tests.integrations.engine as e; e.Engine('v1', mode='NONE').start().step(1)"


def process(then: str = "", **environment: str) -> list[Any]:
    """What a fresh process has loaded, its threads, its hooks and its forwards, after ``register()`` and ``then``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRAPHPROBE", "PROMETHEUS"))}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "integrations", FAKE)))
    done = subprocess.run(
        [sys.executable, "-c", STATE.format(then=then)],
        env={**kept, "PYTHONPATH": path, **environment},
        check=True,
        text=True,
        capture_output=True,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("environment", [{}, {"GRAPHPROBE": "0"}, {"GRAPHPROBE": ""}])
def test_without_graphprobe_1_the_plugin_does_nothing(environment: dict[str, str]) -> None:
    """No hook is placed, and neither wrapt nor torch is imported."""
    assert process(**environment) == [[], 1, [], []]
    assert process(RUN, **environment)[2:] == [[], []]


def test_a_process_that_runs_no_forward_pays_for_the_hooks_alone() -> None:
    """No thread, no metric, no metrics client, neither the engine nor torch; and no port, which is the worker's."""
    assert process(GRAPHPROBE="1", GRAPHPROBE_PORT="9464") == [["wrapt"], 1, [], []]


def test_a_worker_is_observed_without_a_line_of_code() -> None:
    """The hooks are bound as vLLM imports its modules, and no client is loaded that vLLM did not load."""
    loaded, threads, hooks, forwards = process(RUN, GRAPHPROBE="1")
    assert {"step", "dispatch_v1", "forward_v1", "capture_v1", "start"} <= set(hooks)
    assert ("prometheus_client" in loaded, threads, forwards) == (False, 1, ["vllm"])


def test_every_hook_of_an_imported_module_is_bound(engine: Callable[..., Engine]) -> None:
    """Of both runners, and of the drafters of this release: the fakes have all that is hooked."""
    for kind in RUNNERS:
        engine(kind).draft()
    assert {hook for (_, hook), bound in LEDGER.hooks.items() if bound} == {
        *("step", "step_ray", "start", "draft_v1", "draft_v2_autoregressive", "replay_v2"),
        *(f"{name}_{kind}" for name in ("dispatch", "forward", "sample", "capture", "bucket") for kind in RUNNERS),
    }
    assert all(LEDGER.hooks.values())


class Unreadable:
    """A vLLM that cannot even be asked for its version."""

    @property
    def __version__(self) -> str:
        raise RuntimeError("half imported")


def broken_wrapt(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "wrapt", None)


def unreadable(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "vllm", Unreadable())


def absent(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "vllm", None)


def ancient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(importlib.import_module("vllm"), "__version__", "0.19.1")


@pytest.mark.parametrize("breaks", [broken_wrapt, unreadable, absent, ancient])
@pytest.mark.parametrize("strict", ["0", "1"])
def test_register_never_raises(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]], breaks: Callable[..., None], strict: str
) -> None:
    """Whatever is wrong with the environment is one message: an exception would end vLLM's process."""
    monkeypatch.setenv("GRAPHPROBE", "1")
    monkeypatch.setenv("GRAPHPROBE_STRICT", strict)
    breaks(monkeypatch)
    importlib.import_module("graphprobe_vllm").register()
    (text,) = said()
    assert "without graphprobe" in text
    assert LEDGER.hooks == {}


def test_instrumenting_by_hand_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as an exception, with the version that was found."""
    ancient(monkeypatch)
    with pytest.raises(
        DidNotInstrument, match=r"vllm: found 0\.19\.1, supported 0\.20 and newer \(tested with 0\.26 to"
    ):
        graphprobe.instrument("vllm")


def test_vllm_itself_is_untouched_by_a_release_whose_runner_is_another(
    said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that is gone is a gauge of 0 and one warning; what is left is counted."""
    module = importlib.import_module(RUNNERS["v1"])
    monkeypatch.delattr(module.GPUModelRunner, "_warmup_and_capture")
    before = set(vars(module.GPUModelRunner))
    graphprobe.instrument("vllm")
    assert set(vars(module.GPUModelRunner)) == before
    assert LEDGER.hooks["vllm", "bucket_v1"] is False
    assert LEDGER.hooks["vllm", "dispatch_v1"] is True
    assert ["_warmup_and_capture" in text for text in said()] == [True]


def test_uninstrument_leaves_vllm_as_it_was() -> None:
    """All of its classes and modules, object by object."""
    names = [*RUNNERS.values(), "vllm.v1.worker.worker_base", "vllm.v1.worker.gpu.cudagraph_utils"]
    modules = [importlib.import_module(name) for name in names]
    found = [
        each for module in modules for each in (module, *filter(lambda o: isinstance(o, type), vars(module).values()))
    ]
    before = [dict(vars(each)) for each in found]
    graphprobe.instrument("vllm")
    assert before != [dict(vars(each)) for each in found]
    graphprobe.uninstrument("vllm")
    assert before == [dict(vars(each)) for each in found]
