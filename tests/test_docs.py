"""The documents say what the code does now."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphprobe.cli import app
from graphprobe.metrics import CATALOGUE
from graphprobe.reasons import FallbackReason
from graphprobe.tools.check import check
from graphprobe.tools.contract import WORDS
from graphprobe.tools.steps import REFERENCE, REFERENCE_EAGER

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M)
    return [text for kind, text in fenced if kind == language]


def load(path: Path) -> Any:
    """A script of the repository, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name.
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module


HAZARDS = load(ROOT / "docs" / "hazards.py")


def without_times(text: str) -> list[str]:
    """The lines of a table without its last column, which is measured, and without the width it gives."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    bare = [re.sub(r"\s+(ms|[\d.]+(e-\d+)?)$", "", line) if "   " in line else line for line in lines]
    return [re.sub("-{9,}", "---", line) for line in bare]


def test_the_first_example_of_the_readme_prints_the_table_below_it() -> None:
    """Run as a newcomer would, with the recorder where there is no GPU: the same rows, counts and advice."""
    pytest.importorskip("torch")
    code = f"import os\nos.environ['GRAPHPROBE_BACKEND'] = 'recorder'\n{blocks('python')[0]}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert 0 == run.returncode, run.stderr
    shown = next(block for block in blocks("") if block.startswith("decode (in rows"))
    assert without_times(shown) == without_times(run.stdout)


def test_metrics_in_the_readme_are_in_the_catalogue() -> None:
    """Every sample shown has a name and labels of the contract."""
    known = {metric.name: set(metric.labels) for metric in CATALOGUE}
    shown = re.findall(r"^(graphprobe_\w+)\{(.*?)\} ", README, re.M)
    assert len(shown) > 2
    for name, labels in shown:
        assert set(re.findall(r"(\w+)=", labels)) == known[name]


def test_commands_in_the_readme_exist() -> None:
    """The table of commands is the list of commands."""
    shown = set(re.findall(r"^\| `graphprobe (\w+)", README, re.M))
    assert {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    } == shown


def test_the_gpu_page_is_made_from_its_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/gpu.md is what benchmarks/pages.py makes of docs/gpu/*.json."""
    # The scripts import each other as a command does: from their own folder.
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pages = load(ROOT / "benchmarks" / "pages.py")
    assert pages.page() == (ROOT / "docs" / "gpu.md").read_text()
    assert pages.sentence() in README


def test_links_between_documents_lead_somewhere() -> None:
    """Every relative link of a document names a file that exists."""
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_no_slot_is_left_empty() -> None:
    """Placeholders for output were filled from a run."""
    assert [] == re.findall("<!--.*?-->", README)


def test_the_page_of_hazards_is_made_from_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/hazards.md is what docs/hazards.py prints."""
    HAZARDS.main()
    assert (ROOT / "docs" / "hazards.md").read_text() == capsys.readouterr().out


def test_every_hazard_has_one_row() -> None:
    """Numbers 1 to 44, each once, in order; no hazard under two of them."""
    assert list(range(1, 45)) == [row.number for row in HAZARDS.HAZARDS]
    assert 44 == len({row.hazard for row in HAZARDS.HAZARDS})


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", HAZARDS.HAZARDS, ids=lambda row: str(row.number))
def test_a_row_says_what_is_true_today(row: Any) -> None:
    """Its reasons are in the enum, its tests exist, and what is not seen has a word about verify=."""
    named = re.findall(r"`([a-z]+(?:_[a-z]+)+)`", row.does)
    known = set(FallbackReason) | {"max_graphs", "eager_first", "pool_bytes", "max_batch", "device_map"}
    assert row.reason is None or row.reason in set(FallbackReason)
    assert set(named) <= known
    assert row.tests
    for test in row.tests:
        file, name = test.split("::")
        assert name in functions(ROOT / file), test
    assert row.detected in ("yes", "late", "no")
    assert bool(row.bound) == (row.detected == "late")
    assert bool(row.verify) == (row.detected == "no")
    assert "|" not in row.hazard + row.does + row.bound + row.verify


ADVISE = load(ROOT / "docs" / "advise.py")


def test_the_page_of_the_advisor_is_made_from_its_json() -> None:
    """docs/advise.md is what docs/advise.py prints."""
    assert ADVISE.page() == (ROOT / "docs" / "advise.md").read_text()


def test_no_default_list_was_better_than_the_advised_at_its_own_number_of_graphs() -> None:
    """Of the engines that pad: neither for the same calls, nor each on its own day."""
    found = [check for name in ADVISE.PADDED for _, _, check in ADVISE.checks(name)]
    assert 12 <= len(found)
    for one in found:
        assert one["as many"]["graphs"] <= one["graphs"]
        assert max(one["as many"][key] for key in ("expected", "own")) <= 1e-9


def test_half_the_graphs_of_a_default_list_are_as_fast_or_cost_half_a_percent_at_the_ceiling() -> None:
    """The lists of 35 and 36 graphs, on both traces at both speeds."""
    for name in ("vLLM", "SGLang"):
        for _, day, one in ADVISE.checks(name):
            if day["ceiling"]:
                assert max(one["half as many"][key] for key in ("expected", "own")) <= 0.005
            else:
                assert 2 * one["as fast"]["graphs"] <= one["graphs"]


def test_no_padded_list_that_was_advised_is_a_trap() -> None:
    """With the maximum declared its own day takes little more than was expected; without a pace one is lost."""
    assert ADVISE.worst() <= 1.1
    assert max(max(day["pace"]["without the pace"].values()) for _, day in ADVISE.results()) > 2


def test_predictions_were_met_on_a_gpu() -> None:
    """Hit rates exactly, milliseconds per call within a tenth."""
    lists = [result[name] for data in ADVISE.REPLAYED for result in data["results"] for name in ("today", "proposal")]
    assert lists
    for one in lists:
        assert one["predicted"]["hit_rate"] == pytest.approx(one["measured"]["hit_rate"], abs=1e-9)
        assert one["predicted"]["ms"] == pytest.approx(one["measured"]["ms"], rel=0.1)


def test_the_times_that_advice_is_modelled_on_are_those_measured() -> None:
    """Where nothing is known of an engine: the Qwen3-8B shape, at the sizes of its file."""
    for part, curve in (("graph", REFERENCE), ("eager", REFERENCE_EAGER)):
        measured = ADVISE.STEPS["qwen3_8b"][part]
        for size, seconds in curve.points.items():
            assert seconds == pytest.approx(measured[str(size)], rel=0.01)


METRICS = load(ROOT / "docs" / "metrics.py")


def test_the_page_of_metrics_is_made_from_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/metrics.md is what docs/metrics.py prints."""
    METRICS.main()
    assert (ROOT / "docs" / "metrics.md").read_text() == capsys.readouterr().out


def test_every_metric_has_one_row() -> None:
    """Each metric of the catalogue is in one table, with its kind, its labels and its help."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    for metric in CATALOGUE:
        rows = re.findall(rf"^\| `{metric.name}` \| (.*?) \| .*? \| (.*?) \| (.*?) \|$", page, re.M)
        assert [(metric.kind, ", ".join(f"`{label}`" for label in metric.labels) or "none", metric.help)] == rows


def test_every_word_of_a_label_is_explained() -> None:
    """The page has each word that a label may have, and says which reasons count."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    for label, words in WORDS.items():
        table = re.search(rf"^\| `{label}` \| meaning .*?\n\n", page, re.M | re.S)
        assert table is not None
        assert list(words) == re.findall(r"^\| `(\w+)` \| \S", table[0], re.M)[1:]
    for reason in FallbackReason:
        assert f"| `{reason}` | {reason.meaning} | {'yes' if reason.counted else 'no'} |" in page


def test_the_example_page_has_every_metric_and_keeps_the_contract(tmp_path: Path) -> None:
    """What is printed as an example passes `graphprobe check`, and leaves no metric out."""
    example = re.search(r"^```text\n(.*?)^```$", (ROOT / "docs" / "metrics.md").read_text(), re.M | re.S)
    assert example is not None
    path = tmp_path / "example.prom"
    path.write_text(example[1])
    report = check(path)
    assert report.ok, report
    assert ("decode",) == report.forwards
    assert [metric.name for metric in CATALOGUE] == re.findall(r"^# TYPE (\S+) ", example[1], re.M)


FAILURES = load(ROOT / "docs" / "failures.py")


def test_the_page_of_failures_is_made_from_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/failures.md is what docs/failures.py makes of the docstrings."""
    FAILURES.main()
    assert (ROOT / "docs" / "failures.md").read_text() == capsys.readouterr().out


def test_every_published_failure_has_a_test_or_waits_for_a_part() -> None:
    """Numbers 1 to 91: each is in a docstring, or is one of those that a part to come owns."""
    assert set(range(1, 92)) == set(FAILURES.covered()) | set(FAILURES.LATER)
    assert not set(FAILURES.covered()) & set(FAILURES.LATER)
