"""The page of performance says what was measured, and whether it is enough."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "performance.md").read_text()


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """The scripts import each other as a command does: from their own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module


def test_the_page_is_made_from_its_json(scripts: Any) -> None:
    """docs/performance.md is what benchmarks/performance.py makes of the JSON files."""
    assert scripts("performance").page() == PAGE


def test_each_target_names_a_file_that_exists(scripts: Any) -> None:
    """Every row of the first table leads to the result that it was computed from."""
    found = scripts("targets").lines()
    rows = PAGE.split("## To reach")[1].split("\n## ")[0]
    assert found
    assert [line.file for line in found] == re.findall(r"\]\((.*?\.json)\) \|$", rows, re.M)
    assert all((ROOT / "docs" / line.file).is_file() for line in found)


def test_each_benchmark_of_make_bench_has_a_section(scripts: Any) -> None:
    """What `make bench` leaves as JSON is shown."""
    names = re.search(r"^BENCH := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert names is not None
    assert set(names[1].split()) <= set(scripts("performance").SECTIONS)


def count(ratio: float) -> dict[str, Any]:
    """A result of benchmarks/counting.py."""
    row = {"ns": 200.0, "ratio": ratio}
    return {
        "cores": 2,
        "python": "3.11",
        "date": "2026-01-01",
        "beside": "it",
        "counting": {"observe().graph_call": row},
        "skipped": {},
    }


@pytest.fixture
def page(scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The page of one result, written into an empty folder."""
    performance, targets = scripts("performance"), scripts("targets")
    monkeypatch.setattr(targets, "DOCS", tmp_path)

    def written(name: str, result: dict[str, Any]) -> str:
        (tmp_path / "performance").mkdir(exist_ok=True)
        (tmp_path / "performance" / f"{name}.json").write_text(json.dumps(result))
        return str(performance.page())

    return written


def test_a_target_that_is_not_reached_is_called_missed(page: Any) -> None:
    """At the limit it is reached, above it is not."""
    assert "| 0.250x | [performance/counting.json]" in page("counting", count(0.25))
    assert "| 0.251x, missed | [performance/counting.json]" in page("counting", count(0.251))


def test_what_was_not_measured_has_neither_a_section_nor_a_target(page: Any) -> None:
    """A machine without a GPU leaves its page without one."""
    made = page("counting", count(0.1))
    assert ["To reach", "Counting a call"] == re.findall(r"^## (.*)$", made, re.M)
    assert 1 == made.count(".json) |")


def test_of_several_ways_to_call_the_slowest_counts(page: Any) -> None:
    """One input in two forms, of which one takes too long."""
    forms = [
        {"inputs": 1, "outputs": "alias", "form": form, "copies_us": 9.0, "same_us": 9.0}
        | {"ours_us": 9.0 + over, "over_us": over}
        for form, over in (("function", 2.5), ("method", 3.5))
    ]
    made = page("decorator", count(0) | {"torch": "2", "rows": forms})
    assert "| <= 3 us | +2.50 to +3.50 us, missed |" in made


def test_an_engine_below_the_bound_is_missed_and_different_tokens_are_not_hidden(page: Any) -> None:
    """Token/s of a shape at two batch sizes, and answers that are not the same."""
    rows = [
        {"batch": batch, "raw_tokens_s": 100.0, "ours_tokens_s": 100.0 * ratio, "ratio": ratio, "low": 0.9, "high": 1.0}
        for batch, ratio in ((1, 0.995), (16, 0.99))
    ]
    smol = {"requests": 10, "exact_tokens_s": 50.0, "padded_tokens_s": 60.0, "ratio": 1.2, "identical": False}
    hits = {"exact_hit_rate": 0.6, "padded_hit_rate": 1.0}
    given = {"device": "one", "torch": "2", "date": "2026-01-01", "qwen3_8b": rows, "smollm2": smol | hits}
    made = page("serving", given)
    assert "| 99.50% (90.00% to 100.00%) |" in made
    assert "| 99.00% (90.00% to 100.00%), missed |" in made
    assert "| 1.20x, tokens different, missed |" in made


def test_the_longest_delay_of_a_forward_counts(page: Any) -> None:
    """By a reader in the process and one outside, in the middle and at the slow end."""
    size = {"label_sets": 502, "bytes": 46_000, "ms": 7.0, "http_ms": 11.0}
    ways = {
        way: {"windows": 9, "scrape_ms": 7.0}
        | {f"{of}_{p}": more if of == "more" else 1.0 for p in ("p50", "p90") for of in ("scrape", "idle", "more")}
        for way, more in (("thread", 0.5), ("http", 1.5))
    }
    given = {"python": "3.11", "date": "2026-01-01", "device": None, "scrape": [size], "overlap": {"counted": ways}}
    made = page("scraping", given)
    assert "| scrape of 502 series, without and with HTTP | <= 10 ms | 7.0 to 11.0 ms, missed |" in made
    assert "| <= 1 ms | +0.50 to +1.50 ms, missed |" in made
