"""docs/engines.md says what the integrations do."""

from __future__ import annotations

import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import graphprobe
from graphprobe.instrument import INTEGRATIONS
from graphprobe.ledger import LEDGER, Ledger
from graphprobe.observe import observe
from graphprobe.reasons import FallbackReason
from graphprobe.tools.contract import WORDS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "engines.md").read_text()
OWN = PAGE.partition("\n## Your own engine\n")[2]
SHARED = [ROOT / "graphprobe" / name for name in ("stopwatch.py", "export/route.py")]


class Section:
    """What the page says of an engine, and its integration."""

    def __init__(self, title: str, module: str) -> None:
        self.text = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        self.module = importlib.import_module(module)
        paths = [*(ROOT / "integrations").glob(f"{module}*.py"), *SHARED]
        self.sources = {path.name: path.read_text() for path in paths}

    def table(self, head: str) -> list[list[str]]:
        """The rows of the table whose first heading is ``head``."""
        found = re.search(rf"^\| {head} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", self.text, re.M)
        assert found is not None, head
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]

    @property
    def reasons(self) -> set[FallbackReason]:
        """Those that its sources name."""
        found = {name for text in self.sources.values() for name in re.findall(r"FallbackReason\.([A-Z_]+)", text)}
        unknown = {"UNKNOWN"} if any("PATCHES.why(" in text for text in self.sources.values()) else set()
        return {FallbackReason[name] for name in found | unknown}


ENGINES = {
    title: Section(title, module)
    for title, module in (
        ("vLLM", "graphprobe_vllm"),
        ("SGLang", "graphprobe_sglang"),
        ("nano-vllm", "graphprobe_nanovllm"),
        ("mini-sglang", "graphprobe_minisglang"),
    )
}


def test_links_within_the_page_lead_to_a_section() -> None:
    """Those of the list at the top, too."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", PAGE, flags=re.M | re.S), re.M)
    known = {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}
    links = re.findall(r"\]\(#([^)]+)\)", PAGE)
    assert len(links) > len(ENGINES)
    assert set(links) <= known


def test_every_engine_says_what_to_look_at_where_nothing_is_shown() -> None:
    """Those with a plugin, whose ways of being silent differ."""
    for title in ("vLLM", "SGLang"):
        (steps,) = re.findall(r"^### It shows nothing\n\n((?:.+\n)+)", ENGINES[title].text, re.M)
        assert {f"{title.upper()}_PLUGINS", "GRAPHPROBE"} <= set(re.findall(r"`(\w+)`", steps))
        assert f"observes {title}" in steps


@pytest.fixture(params=ENGINES)
def section(request: pytest.FixtureRequest) -> Section:
    """Each engine of the page."""
    return ENGINES[request.param]


def test_every_integration_has_a_section() -> None:
    """And none that is no integration."""
    assert set(INTEGRATIONS.values()) == {section.module.__name__ for section in ENGINES.values()}


def test_every_hook_has_a_row(section: Section) -> None:
    """In the order of the code, with the place that is wrapped."""
    expected = [(f"`{hook.name}`", f"`{hook.attribute}`") for hook in section.module.HOOKS]
    assert expected == [(name, place) for name, place, _ in section.table("hook")]


def test_every_reason_that_the_integration_can_give_has_a_row(section: Section) -> None:
    """And no other; the page says which of them do not count."""
    given = section.reasons
    assert {f"`{reason}`" for reason in given} == {row[0] for row in section.table("reason")}
    aside = {f"`{reason}`" for reason in given if not reason.counted}
    (told,) = re.findall(r"^(.*) do(?:es)? not count in the hit rate", section.text, re.M)
    assert aside == set(re.findall(r"`\w+`", told))


def test_phases_and_modes_are_words_of_the_contract(section: Section) -> None:
    """All of them are on the page of vLLM, which has every one."""
    for label in ("phase", "mode"):
        named = {word for row in section.table(label) for word in re.findall(r"`(\w+)`", row[0])}
        assert named <= set(WORDS[label])
        assert section is not ENGINES["vLLM"] or named == set(WORDS[label])


def test_versions_are_those_of_the_integration(section: Section) -> None:
    """The tested range, and what is tried."""
    integration = section.module.INTEGRATION
    assert f"Tested with {' to '.join(dict.fromkeys(integration.tested))}" in section.text
    assert ".".join(map(str, integration.oldest)) in section.text


def test_every_variable_of_the_integration_is_explained(section: Section) -> None:
    """Those that it reads, and no others of ours."""
    read = {
        name for text in section.sources.values() for name in re.findall(r'"((?:GRAPHPROBE|PROMETHEUS)[A-Z_]*)"', text)
    }
    assert read - {"GRAPHPROBE_LABELS"} <= {*re.findall(r"\b(?:GRAPHPROBE|PROMETHEUS)[A-Z_]*\b", PAGE)}


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


@pytest.mark.parametrize(("pad", "hits", "rate"), [(False, 2609, 0.614), (True, 4250, 1.0)])
def test_the_published_workload_on_exact_sizes_and_padded(
    example: dict[str, Any], pad: bool, hits: int, rate: float
) -> None:
    """2,609 calls of captured sizes and 1,641 of three requests, on an engine with {1, 2, 4, 8, 16}."""

    def model(batch: list[Any]) -> list[Any]:
        return batch

    traffic = {1: 1000, 2: 800, 4: 500, 8: 200, 16: 109, 3: 1641}
    assert (2609, 4250) == (sum(traffic.values()) - traffic[3], sum(traffic.values()))
    runner = example["Runner"](model, dict.fromkeys((1, 2, 4, 8, 16), model), 16, pad)
    for size, calls in traffic.items():
        for _ in range(calls):
            assert [*range(size)] == runner.step([*range(size)])
    found = runner.probe.snapshot()
    assert (hits, rate) == (found.graph_calls, round(found.hit_rate, 3))
    misses = {} if pad else {(3, "no_exact_bucket"): 1641}
    assert misses == {(row.batch_size, str(row.reason)): row.calls for row in found.rows if row.reason}
    assert (0 if pad else 11) == found.uncovered["decode"]


def test_the_example_is_as_short_as_it_says() -> None:
    """Twenty lines of an engine that were not there without counting, and those of the engine itself."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", OWN, re.M | re.S)
    lines = [line for line in code.splitlines() if line.strip() and not line.strip().startswith('"""')]
    assert len(lines) <= 22
