"""What every test gets: graphprobe's own failures are raised, and each test counts into a ledger of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from graphprobe import errors
from graphprobe.ledger import Ledger
from tests.dashboards.stack import binary
from tests.servers import Handler, Server

os.environ["GRAPHPROBE_STRICT"] = "1"


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No label, backend or proxy of the machine reaches a test, and no failure of one test the next."""
    for name in ("RANK", "GRAPHPROBE_LABELS", "GRAPHPROBE_BACKEND", "PROMETHEUS_MULTIPROC_DIR"):
        monkeypatch.delenv(name, raising=False)
    errors.internal_errors.clear()
    yield
    errors.internal_errors.clear()


@pytest.fixture
def ledger() -> Ledger:
    """A ledger of this test alone."""
    return Ledger()


@pytest.fixture
def promtool() -> str:
    """The path of promtool; without one the test is skipped."""
    return binary("promtool")


@pytest.fixture
def own_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's ledger starts empty, as every capture of this test writes to it; torch has one thread."""
    import torch

    from graphprobe import attributes
    from graphprobe.ledger import LEDGER

    torch.set_num_threads(1)
    monkeypatch.setattr(LEDGER, "forwards", {})
    # Modules are looked at whenever their turn comes, however fast the test serves.
    monkeypatch.setattr(attributes, "PAUSE", 0.0)


@pytest.fixture(params=["no_grad", "inference_mode"])
def both_modes(request: pytest.FixtureRequest) -> Iterator[None]:
    """The two modes in which engines serve; random numbers are the same in each test."""
    import torch

    torch.manual_seed(0)
    with getattr(torch, request.param)():
        yield


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What graphprobe has logged since it was asked last."""
    caplog.set_level(logging.INFO, logger="graphprobe")

    def since() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if record.name == "graphprobe"]
        caplog.clear()
        return texts

    return since


@pytest.fixture
def server() -> Iterator[Server]:
    """A running server; a test sets its ``reply``."""
    running = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
