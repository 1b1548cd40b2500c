"""The example that replaces nano-vllm's own capture: the same answers, more hits, and its source as it was."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.runners import forward, nano_runner, requests, rows

EXAMPLES = str(Path(__file__).parents[2] / "docs" / "examples")
NAME = "nanovllm.decode"


@pytest.fixture
def replaced(clean: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes runners of the fake nano-vllm whose capture is the example's."""
    monkeypatch.setenv("GRAPHPROBE_BACKEND", "recorder")
    monkeypatch.syspath_prepend(EXAMPLES)
    kind = importlib.import_module("nanovllm.engine.model_runner").ModelRunner
    own = kind.capture_cudagraph
    importlib.import_module("nanovllm_capture")
    yield nano_runner
    kind.capture_cudagraph = own


def steps(runner: Any, most: int) -> list[torch.Tensor]:
    """A prefill, then decodes of falling size, the first of which with longer tables."""
    sizes = [most, *range(most, 0, -1)]
    found = [runner.run(requests(most), True)]
    return found + [runner.run(requests(n, tokens=3 + 2 * (n % 2)), False) for n in sizes]


@pytest.mark.parametrize("most", [1, 3, 16])
def test_answers_are_those_of_the_engines_own_graphs(clean: None, request: pytest.FixtureRequest, most: int) -> None:
    """Of each size, to the bit."""
    own = steps(nano_runner(most), most)
    ours = steps(request.getfixturevalue("replaced")(most), most)
    assert all(torch.equal(a, b) for a, b in zip(own, ours, strict=True))


def test_each_decode_is_a_graph_call_but_the_first_with_a_narrow_table(replaced: Any) -> None:
    """That one is where it is seen what follows the width. A prefill is another phase."""
    runner = replaced(16)
    steps(runner, 16)
    steps(runner, 16)
    found = forward(NAME)
    eager = {key: calls for key, calls in rows(NAME).items() if isinstance(key[2], str)}
    assert eager == {("prefill", 48, "wrong_phase"): 2, ("decode", 16, "warmup"): 1}
    assert (found.hit_rate, found.graph_calls, found.unit) == (1.0, 33, "requests")


@pytest.mark.parametrize("most", [12, 20])
def test_there_is_no_hole(replaced: Any, most: int) -> None:
    """The limit itself is a bucket, so that no size is without one."""
    runner = replaced(most)
    for count in range(1, 17 if most > 16 else most + 1):
        runner.run(requests(count), False)
    found = forward(NAME)
    assert most in found.buckets and found.uncovered == {"decode": 0}
    assert found.hit_rate == 1.0


def test_the_example_has_as_many_lines_as_the_page_says() -> None:
    """Without its imports."""
    text = Path(EXAMPLES, "nanovllm_capture.py").read_text().split("import graphprobe\n")[1]
    count = len([line for line in text.splitlines() if line.strip()])
    assert f"| 48 | {count} |" in Path(EXAMPLES).with_name("migrate.md").read_text()
    assert count < 40
