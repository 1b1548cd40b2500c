"""A fake vLLM that is not imported yet, and an integration that has never been placed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import graphprobe
from graphprobe.ledger import LEDGER
from tests.integrations.engine import Engine

FAKE = str(Path(__file__).with_name("fake"))

SETTINGS = (
    *(
        "GRAPHPROBE",
        "GRAPHPROBE_ADDR",
        "GRAPHPROBE_LABELS",
        "GRAPHPROBE_PORT",
        "GRAPHPROBE_STRICT",
        "GRAPHPROBE_TIMING",
    ),
    *("PROMETHEUS_MULTIPROC_DIR", "VLLM_USE_BREAKABLE_CUDAGRAPH"),
)


def ours(name: str) -> bool:
    return name.partition(".")[0] == "vllm" or name.startswith("graphprobe_vllm")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of another test: no module of vLLM or of the integration, no count, no setting; strict is off."""
    for name in filter(ours, list(sys.modules)):
        monkeypatch.delitem(sys.modules, name)
    for name in SETTINGS:
        # Set first: what a test, or the code, sets is taken away again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(LEDGER, "forwards", {})
    monkeypatch.setattr(LEDGER, "hooks", {})
    monkeypatch.syspath_prepend(FAKE)
    yield
    graphprobe.uninstrument("vllm")
    for name in filter(ours, list(sys.modules)):
        del sys.modules[name]


@pytest.fixture
def strict(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of graphprobe fails the test."""
    monkeypatch.setenv("GRAPHPROBE_STRICT", "1")


@pytest.fixture
def engine(strict: None) -> Callable[..., Engine]:
    """Makes engines that are observed."""
    graphprobe.instrument("vllm")
    return Engine


@pytest.fixture(params=["v1", "v2"])
def runner(request: pytest.FixtureRequest) -> str:
    """Each of the two model runners."""
    return str(request.param)
