"""The way of the metrics out of a worker: a directory, an own port, or one warning. The engine serves in any case."""

from __future__ import annotations

import socket
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

import graphprobe
from graphprobe.export import directory as running
from graphprobe.ledger import LEDGER
from tests.integrations.engine import Engine, forward, rows

Make = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("fresh")

LINE = "export PROMETHEUS_MULTIPROC_DIR=$(mktemp -d)"


@pytest.fixture(autouse=True)
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary folders of this test, and no exporter after it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    for exporter in list(running._running.values()):
        exporter.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that vLLM serves."""
    found = tmp_path / "multiproc"
    found.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(found))
    return found


def page(folder: Path) -> str:
    """What vLLM's own /metrics has of such a directory."""
    for exporter in list(running._running.values()):
        exporter.flush()
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def test_in_vllms_directory_the_counts_are_on_vllms_page(engine: Make, runner: str, folder: Path) -> None:
    """Files of the kind that it merges; no port is opened."""
    found = engine(runner).start()
    assert list(folder.glob("counter_*.db"))
    found.step(1, 1)
    assert 'graphprobe_graph_calls_total{batch_size="2",bucket="2",forward="vllm",mode="full",phase="decode"' in page(
        folder
    )
    assert "graphprobe_kv_capacity_tokens" in page(folder)
    (exporter,) = running._running.values()
    assert exporter.url == ""


def test_the_directory_goes_before_the_port(
    engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    monkeypatch.setenv("GRAPHPROBE_PORT", str(free_port()))
    engine().start()
    (exporter,) = running._running.values()
    assert (exporter.url, said()) == ("", [])


def test_with_a_port_of_ours_the_counts_are_served_there(
    engine: Make, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine only, for all workers of it together."""
    port = free_port()
    monkeypatch.setenv("GRAPHPROBE_PORT", str(port))
    engine(runner).start().step(1, 1)
    for exporter in running._running.values():
        exporter.flush()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert 'forward="vllm"' in answer.read().decode()


def test_with_neither_there_is_one_warning_with_the_line(
    engine: Make, runner: str, said: Callable[[], list[str]]
) -> None:
    """Once per engine, not with every step."""
    found = engine(runner).start()
    found.step(1)
    found.step(1)
    (text,) = said()
    assert LINE in text and "GRAPHPROBE_PORT=9464" in text
    assert running._running == {}


def test_other_ranks_do_not_repeat_it(engine: Make, runner: str, said: Callable[[], list[str]]) -> None:
    engine(runner, rank=1).start().step(1)
    found = engine(runner)
    found.config.parallel_config.data_parallel_index = 1
    found.start()
    assert said() == []


@pytest.mark.parametrize(
    ("rank", "mode", "lines"),
    [
        (0, "FULL", ["sizes up to 8 tokens, {} of {} hooks in place, metrics: nowhere"]),
        (0, "NONE", ["no CUDA graphs (cudagraph_mode NONE), {} of {} hooks in place, metrics: nowhere"]),
        (1, "FULL", []),
    ],
)
def test_that_it_is_on_is_one_line_in_vllms_own_log(
    engine: Make, runner: str, caplog: pytest.LogCaptureFixture, rank: int, mode: str, lines: list[str]
) -> None:
    """Of the first rank: its version and vLLM's, which runner, which sizes, hooks, and where the metrics are."""
    caplog.set_level("INFO", logger="vllm")
    engine(runner, rank=rank, mode=mode).start().step(1)
    told = [record.getMessage() for record in caplog.records if record.name == "vllm.graphprobe"]
    bound = len(LEDGER.hooks)
    words = "model runner V1" if runner == "v1" else "Model Runner V2"
    begin = f"graphprobe {graphprobe.__version__} observes vLLM 0.33.0: {words}, "
    assert told == [begin + line.format(bound, bound) for line in lines]


def not_writable(patch: pytest.MonkeyPatch, path: Path) -> None:
    (path / "file").write_text("")
    patch.setenv("PROMETHEUS_MULTIPROC_DIR", str(path / "file" / "folder"))


def no_number(patch: pytest.MonkeyPatch, path: Path) -> None:
    patch.setenv("GRAPHPROBE_PORT", "metrics")


def no_port(patch: pytest.MonkeyPatch, path: Path) -> None:
    patch.setenv("GRAPHPROBE_PORT", "123456")


def no_address(patch: pytest.MonkeyPatch, path: Path) -> None:
    patch.setenv("GRAPHPROBE_PORT", "0")
    patch.setenv("GRAPHPROBE_ADDR", "no address")


@pytest.mark.parametrize("wrong", [not_writable, no_number, no_port, no_address])
def test_metrics_that_cannot_be_served_are_a_warning(
    engine: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[], list[str]],
    wrong: Callable[..., None],
) -> None:
    """The engine starts, and its steps are counted."""
    wrong(monkeypatch, tmp_path)
    assert engine().start().step(1, 1) == "tokens"
    (text,) = said()
    assert text.startswith("vllm: its steps are counted, but served nowhere: ")
    assert forward().causes["route"] in text
    assert rows() == {("decode", 2, "full", 2): 1}


def test_so_is_a_port_that_is_taken(
    engine: Make, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("GRAPHPROBE_PORT", str(taken.getsockname()[1]))
        assert engine().start().step(1, 1) == "tokens"
    (text,) = said()
    assert "served nowhere" in text
    assert rows() == {("decode", 2, "full", 2): 1}


@pytest.mark.parametrize(
    ("labels", "index", "expected"),
    [
        ("", 0, []),
        ("", 2, ['rank="5"']),
        ("team=a", 2, ['rank="5"', 'team="a"']),
        ("rank=7", 2, ['rank="7"']),
    ],
)
def test_the_ranks_of_data_parallel_engines_are_numbers_of_the_whole_server(
    engine: Make, folder: Path, monkeypatch: pytest.MonkeyPatch, labels: str, index: int, expected: list[str]
) -> None:
    """Each engine counts its two workers from 0; whoever has named the rank of a process keeps it."""
    if labels:
        monkeypatch.setenv("GRAPHPROBE_LABELS", labels)
    found = engine(rank=1)
    found.config.parallel_config.data_parallel_index = index
    found.config.parallel_config.world_size = 2
    found.start().step(1)
    lines = [line for line in page(folder).splitlines() if line.startswith("graphprobe_graph_calls_total{")]
    (series,) = [line for line in lines if line.endswith(" 1.0")]
    assert all(label in series for label in expected)
    assert ('rank="5"' in series) == ('rank="5"' in expected)
