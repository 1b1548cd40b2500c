"""What docs/gpu.md says of engines is what was found, also where that is not what was hoped for."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
Result = dict[str, Any]
Page = Callable[[str, Callable[[Result], None]], str]


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """The scripts import each other as a command does: from their own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module


@pytest.fixture
def page(scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Page:
    """The section of an engine, whose result is changed first."""
    monkeypatch.setattr(scripts("page_tables"), "DOCS", tmp_path)
    (tmp_path / "gpu").mkdir()

    def made(engine: str, change: Callable[[Result], None]) -> str:
        result = json.loads((ROOT / "docs" / "gpu" / f"{engine}.json").read_text())
        change(result)
        (tmp_path / "gpu" / f"{engine}.json").write_text(json.dumps(result))
        return str(getattr(scripts(f"{engine}_page"), engine)())

    return made


def row(page: str, name: str) -> list[str]:
    """The cells of the first row that begins with a name."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_scenario_of_sglang_that_failed_is_a_row_that_says_so(page: Page) -> None:
    """The benchmark leaves null for it."""

    def fail(result: Result) -> None:
        result["scenarios"]["nopad"] = None

    assert "failed" == row(page("sglang", fail), "nopad")[-1]


def test_a_count_that_is_not_sglangs_is_in_the_verdict(page: Page) -> None:
    """One pass more in the engine's own metric, and one more in its log."""

    def more(result: Result) -> None:
        result["scenarios"]["nopad"]["own"]["cuda_graph_passes_total decode_none"] += 1
        result["scenarios"]["off"]["replayed"].append([1, 1, 1])

    made = page("sglang", more)
    assert "as it should be" == row(made, "graphs")[-1]
    assert row(made, "nopad")[-1].startswith("the engine says (")
    assert "sizes differ from the log of replays" == row(made, "off")[-1]


def test_tokens_that_differ_are_named(page: Page) -> None:
    """In one scenario, and in the longer prompts of another."""

    def differ(result: Result) -> None:
        result["scenarios"]["nopad"]["digest"] = "0 0"
        result["scenarios"]["breakable"]["digest"] += "0"

    made = page("sglang", differ)
    assert "Tokens: different from `graphs` in `nopad`;" in made
    assert "in `breakable` are not the same with and without" in made


def test_an_engine_that_ended_early_is_a_row_that_says_so(page: Page) -> None:
    """nano-vllm by itself, and with our graphs."""

    def fail(result: Result) -> None:
        result["12"] = result["20 captured"] = {"error": "it ended"}

    made = page("nanovllm", fail)
    assert "failed" == row(made, "12")[1] == row(made, "20 captured")[1]


def test_answers_are_compared_in_the_rounds_that_ended(page: Page) -> None:
    """Of eight rounds five raised without our graphs; of the others one is changed."""

    def differ(result: Result) -> None:
        result["20 captured"]["digests"][0] = "other"

    assert "identical in 2 of 3 rounds (`20`)" in row(page("nanovllm", differ), "20 captured")[-1]


def test_what_was_raised_in_the_place_of_a_measurement_is_not_measured(page: Page) -> None:
    """The benchmark leaves the traceback."""

    def fail(result: Result) -> None:
        result["16"]["observed"] = result["16"]["captured"] = "Traceback ..."

    assert 2 == page("nanovllm", fail).count("Not measured.")


def test_the_machine_of_nanovllm_is_that_of_its_file(page: Page) -> None:
    """With its versions."""
    machine = {"nano-vllm": "abc1234", "torch": "9.9", "python": "3.99", "device": "a card", "date": "2027-01-02"}
    made = page("nanovllm", lambda result: result.update(machine=machine))
    assert "CHECKOUT`: nano-vllm abc1234, torch 9.9, Python 3.99, a card, 2027-01-02." in made
