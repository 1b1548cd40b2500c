"""vLLM's own dispatchers of both runners, in each release that is supported: what ran is what is counted, and why.

A process per release drives them through the hooks (vllm_drive.py), and these tests read what it printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_cases import CASES, COVERAGE
from tests.engines.vllm_setups import Case, Coverage
from tests.integrations.releases import RELEASES

ROOT = Path(__file__).parents[2]
TREES = os.environ.get("GRAPHPROBE_VLLM_TREES", "")
PYTHON = os.environ.get("GRAPHPROBE_ENGINES") or sys.executable

NEEDED = "needs vLLM's Python files: python -m tests.engines.vllm_trees FOLDER, and GRAPHPROBE_VLLM_TREES=FOLDER"

pytestmark = pytest.mark.skipif(not TREES, reason=NEEDED)


@cache
def process(release: str) -> subprocess.CompletedProcess[str]:
    """The process of a release, which has ended."""
    tree = Path(TREES, release)
    path = os.pathsep.join([str(tree), str(ROOT), str(ROOT / "integrations")])
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GRAPHPROBE", "PROMETHEUS"))}
    env = {**clean, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    command = [PYTHON, "-m", "tests.engines.vllm_drive"]
    return subprocess.run(command, env=env, cwd=tree, capture_output=True, text=True, timeout=600, check=False)


@cache
def printed(text: str) -> dict[str, Any]:
    """The last line of an output."""
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def driven(release: str) -> dict[str, Any]:
    """What was driven, counted and said in a release."""
    if not Path(TREES, release, "vllm").is_dir():
        pytest.skip(f"{TREES} has no {release}/vllm")
    run = process(release)
    assert run.returncode == 0, run.stderr[-4000:]
    found = printed(run.stdout)
    assert found["version"] == release
    return found


def words(row: dict[str, Any]) -> str:
    """A row as vllm_cases.py writes it."""
    times = f" x{row['calls']}" if row["calls"] > 1 else ""
    if row["path"] == "graph":
        return f"{row['phase']} {row['mode']} {row['batch_size']}->{row['bucket']}{times}"
    return f"{row['phase']} {row['reason']} {row['batch_size']}{times}"


def each(table: Iterable[Case | Coverage]) -> pytest.MarkDecorator:
    """Each row of a table, for each of its runners."""
    pairs = [(runner, case) for case in table for runner in case.runners]
    return pytest.mark.parametrize(("runner", "case"), pairs, ids=[f"{runner}: {case.name}" for runner, case in pairs])


cases = each(CASES)
releases = pytest.mark.parametrize("release", RELEASES["vllm"])


@releases
@cases
def test_each_step_is_counted_with_its_path_and_reason(release: str, runner: str, case: Case) -> None:
    """A step is one call, by phase, mode, tokens and bucket, or with the reason for which vLLM ran it eagerly."""
    found = driven(release)["cases"][f"{runner}: {case.name}"]
    assert case.expected(release) == sorted(map(words, found["rows"]))


@releases
@each(case for case in CASES if case.drafter)
def test_a_drafter_has_rows_of_its_own(release: str, runner: str, case: Case) -> None:
    """Its first decision of a step extends the drafts, the second is about all further tokens."""
    found = driven(release)["cases"][f"{runner}: {case.name}"]
    assert sorted(case.drafter) == sorted(map(words, found["drafter"]))


@releases
@cases
def test_what_is_counted_is_what_the_runner_was_told(release: str, runner: str, case: Case) -> None:
    """The runner ran what the dispatcher handed back, after padding and other ranks; no count says otherwise."""
    found = driven(release)["cases"][f"{runner}: {case.name}"]
    answers = [[sent, mode != "NONE", None if mode == "NONE" else padded] for sent, mode, padded in found["answers"]]
    counted = [[r["batch_size"], r["path"] == "graph", r["bucket"]] for r in found["rows"] for _ in range(r["calls"])]
    assert sorted(answers) == sorted(counted)


@releases
@each(COVERAGE)
def test_decode_steps_without_a_full_graph_are_named_at_the_start(release: str, runner: str, case: Coverage) -> None:
    """The engine's own dispatcher is asked for each number of requests; one warning names the sizes and what to add."""
    found = driven(release)["coverage"][f"{runner}: {case.name}"]
    if case.refused:
        assert case.refused in found["refused"]
        return
    uncovered = case.expected(release)
    assert uncovered == sum(found["uncovered"].values())
    warnings = [line for line in found["said"] if "no full CUDA graph" in line]
    assert bool(uncovered) == len(warnings)
    for text in case.says if uncovered else ():
        assert text in warnings[0]


@releases
@each(case for case in COVERAGE if case.says)
def test_the_line_of_the_warning_covers_all_decode_steps(release: str, runner: str, case: Coverage) -> None:
    """An engine that is started with it has a full graph for each of them."""
    found = driven(release)["coverage"][f"{runner}: {case.name}"]
    assert {"verify": 0} == found["after"]


@releases
@cases
def test_captures_are_counted_by_bucket(release: str, runner: str, case: Case) -> None:
    """Each captured size is there with its number of graphs and seconds; all together are as large as vLLM says."""
    found = driven(release)["cases"][f"{runner}: {case.name}"]
    expected = {"NONE": 0}.get(case.setup.mode, 1)
    assert bool(expected) == bool(found["captures"])
    assert set(found["captures"]) == set(found["capture_seconds"])
    assert found["pool_bytes"] == (found["taken"] or None)


@releases
def test_every_hook_finds_its_place(release: str) -> None:
    """No hook into a module that this release has is missing."""
    assert {} == {name: bound for name, bound in driven(release)["hooks"].items() if not bound}
