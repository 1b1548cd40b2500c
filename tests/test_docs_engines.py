"""docs/engines.md says what the integrations do."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import graphprobe
import graphprobe_vllm
from graphprobe.ledger import LEDGER, Ledger
from graphprobe.observe import observe
from graphprobe.reasons import FallbackReason
from graphprobe.tools.contract import WORDS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "engines.md").read_text()
VLLM, OWN = PAGE.partition("\n## Your own engine\n")[::2]
SHARED = [ROOT / "graphprobe" / name for name in ("stopwatch.py", "export/route.py")]
SOURCES = {path.name: path.read_text() for path in [*(ROOT / "integrations").glob("graphprobe_vllm*.py"), *SHARED]}


def table(head: str) -> list[list[str]]:
    """The rows of the table whose first heading is ``head``."""
    found = re.search(rf"^\| {head} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", PAGE, re.M)
    assert found is not None, head
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def test_every_hook_has_a_row() -> None:
    """In the order of the code, with the place that is wrapped."""
    expected = [(f"`{hook.name}`", f"`{hook.attribute}`") for hook in graphprobe_vllm.HOOKS]
    assert expected == [(name, place) for name, place, _ in table("hook")]


def test_every_reason_that_the_integration_can_give_has_a_row() -> None:
    """And no other; the page says which of them do not count."""
    given = {
        FallbackReason[name] for text in SOURCES.values() for name in re.findall(r"FallbackReason\.([A-Z_]+)", text)
    }
    if any("PATCHES.why(" in text for text in SOURCES.values()):
        given.add(FallbackReason.UNKNOWN)
    assert {f"`{reason}`" for reason in given} == {row[0] for row in table("reason")}
    aside = " and ".join(f"`{reason}`" for reason in FallbackReason if reason in given and not reason.counted)
    assert {"`disabled`", "`wrong_phase`"} == set(aside.split(" and "))
    assert "`disabled` and `wrong_phase` do not count in the hit rate" in PAGE


def test_phases_and_modes_are_words_of_the_contract() -> None:
    """All of them: vLLM has every one."""
    for label in ("phase", "mode"):
        named = {word for row in table(label) for word in re.findall(r"`(\w+)`", row[0])}
        assert set(WORDS[label]) == named


def test_versions_are_those_of_the_integration() -> None:
    """The tested range, and what is tried."""
    integration = graphprobe_vllm.INTEGRATION
    oldest = ".".join(map(str, integration.oldest))
    tested = " to ".join(integration.tested)
    assert f"Tested with vLLM {tested}, both runners; tried from {oldest} on." in PAGE


def test_every_variable_of_the_integration_is_explained() -> None:
    """Those that it reads, and no others of ours."""
    read = {name for text in SOURCES.values() for name in re.findall(r'"((?:GRAPHPROBE|PROMETHEUS)[A-Z_]*)"', text)}
    assert read - {"GRAPHPROBE_LABELS"} == set(re.findall(r"\b(?:GRAPHPROBE|PROMETHEUS)[A-Z_]*\b", VLLM))


@pytest.mark.parametrize("width", [4])
def test_the_warning_of_the_page_is_the_one_that_is_logged(width: int) -> None:
    """Sizes up to 16, eight requests, three speculative tokens: a dispatcher that has graphs of 4, 8 and 16 tokens."""
    from graphprobe_vllm_captures import check

    (expected,) = re.findall(r"^```text\n(vllm: .*)\n^```$", PAGE, re.M)
    ledger, sizes = Ledger(), [4, 8, 16]
    probe = observe("vllm", sizes, unit="tokens", ledger=ledger)
    probe.forward.phases = ("verify",)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes),
    )
    watch: Any = SimpleNamespace(
        probe=probe,
        config=config,
        served=lambda requests, tokens: "FULL" if tokens <= sizes[-1] else "NONE",
        decode_mode=lambda: "FULL",
        decode_steps=lambda: [(n, width) for n in range(1, 9)],
    )
    check(watch)
    assert f"vllm: {probe.forward.causes['uncovered/verify']}" == expected
    assert {"verify": 4} == probe.forward.uncovered


@pytest.fixture
def example(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the example defines, run as it stands; its forward and endpoint are gone again at the end."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", OWN, re.M | re.S)
    (tmp_path / "engine.py").write_text(code)
    before = set(LEDGER.forwards)
    names = runpy.run_path(str(tmp_path / "engine.py"))
    yield names
    names["exporter"].close()
    for name in set(LEDGER.forwards) - before:
        del LEDGER.forwards[name]


def test_the_engine_of_the_page_counts_what_it_does(example: dict[str, Any]) -> None:
    """Hits, padding, sizes that are too large and prefill; a warm-up is no call, and results are the batch's."""
    seen: list[int] = []

    def double(batch: list[Any]) -> list[Any]:
        seen.append(len(batch))
        return [None if x is None else 2 * x for x in batch]

    runner = example["Runner"](double, {1: double, 4: double}, 6)
    runner.warm_up()
    assert [1, 4] == seen
    assert () == runner.probe.snapshot().rows
    assert [2] == runner.step([1])
    assert [2, 4, 6] == runner.step([1, 2, 3])
    assert [2] * 5 == runner.step([1] * 5)
    assert [2] * 9 == runner.step([1] * 9, "prefill")
    assert [1, 4, 1, 4, 5, 9] == seen
    found = graphprobe.snapshot().forwards["myengine"]
    assert (2, 2, 1, 2 / 3) == (found.graph_calls, found.eager_calls, found.padding, found.hit_rate)
    assert {"decode": 2} == found.uncovered
    reasons = {(row.batch_size, str(row.reason)) for row in found.rows if row.reason}
    assert {(5, "batch_too_large"), (9, "wrong_phase")} == reasons


def test_the_example_is_as_short_as_it_says() -> None:
    """Twenty lines of an engine that were not there without counting, and those of the engine itself."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", OWN, re.M | re.S)
    lines = [line for line in code.splitlines() if line.strip() and not line.strip().startswith('"""')]
    assert len(lines) <= 22
