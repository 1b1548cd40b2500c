"""Fake engines that are not imported yet, integrations that have never been placed, and releases of the engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

import graphprobe
from graphprobe.ledger import LEDGER
from tests.integrations import releases, sglang_engine
from tests.integrations.engine import Engine
from tests.integrations.runners import clean, mini, nano  # noqa: F401
from tests.wheels import Unavailable

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``release``: each release of the engine that a module is about."""
    engine = getattr(metafunc.module, "ENGINE", "")
    if engine and "release" in metafunc.fixturenames:
        try:
            metafunc.parametrize("release", releases.chosen(engine), indirect=True)
        except Unavailable as error:
            pytest.fail(f"the newest release of {engine} is not known: {error}", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which releases are the newest, where they are asked for."""
    if releases.NEWEST:
        for engine in releases.RELEASES:
            try:
                terminalreporter.write_line(releases.told(engine))
            except Unavailable as error:
                terminalreporter.write_line(f"{engine}: {error}")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """A test whose release cannot be read skips; one about the newest must not pass without it."""
    try:
        return (yield)
    except Unavailable as error:
        (pytest.fail if releases.NEWEST else pytest.skip)(str(error))


@pytest.fixture
def release(request: pytest.FixtureRequest) -> releases.Release:
    """One release, of which nothing has been read."""
    return releases.opened(request.module.ENGINE, request.param)


@pytest.fixture
def every_release(request: pytest.FixtureRequest) -> list[releases.Release]:
    """All releases that the integration is tested with."""
    engine = request.module.ENGINE
    return [releases.opened(engine, version) for version in releases.RELEASES[engine]]


ENGINES = ("vllm", "sglang")


def ours(name: str) -> bool:
    return name.partition(".")[0] in ENGINES or name.startswith(tuple(f"graphprobe_{engine}" for engine in ENGINES))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of another test: no module of an engine or of an integration, no count, no setting; strict is off."""
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
    for engine in ENGINES:
        graphprobe.uninstrument(engine)
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


@pytest.fixture
def sglang(strict: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., sglang_engine.Engine]:
    """Makes engines of the fake SGLang that are observed. None of their passes is timed: there is no CUDA device."""
    monkeypatch.setenv("GRAPHPROBE_TIMING", "0")
    graphprobe.instrument("sglang")
    return sglang_engine.Engine


@pytest.fixture(params=["v1", "v2"])
def runner(request: pytest.FixtureRequest) -> str:
    """Each of the two model runners."""
    return str(request.param)
