"""nano-vllm and mini-sglang themselves, from a checkout of each, on a CPU whose graphs are recordings (cpu_cuda.py)."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NANOVLLM = os.environ.get("GRAPHPROBE_NANOVLLM", "")
MINISGL = os.environ.get("GRAPHPROBE_MINISGL", "")
MIB = 1 << 20

nanovllm = pytest.mark.skipif(
    not NANOVLLM, reason="needs xxhash and nano-vllm (bb823b3): GRAPHPROBE_NANOVLLM=its checkout"
)
minisgl = pytest.mark.skipif(not MINISGL, reason="needs mini-sglang (20fcd7f): GRAPHPROBE_MINISGL=its checkout")


def printed(*command: str) -> dict[str, Any]:
    """The JSON in the last line that a command prints."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")])
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GRAPHPROBE", "PROMETHEUS"))}
    env = {**clean, "PYTHONPATH": path, "GRAPHPROBE_STRICT": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model."""
    from tests.engines import model

    return str(model.write(tmp_path_factory.mktemp("small") / "model"))


@cache
def scenario(name: str, folder: str) -> dict[str, Any]:
    """What a scenario of benchmarks/nanovllm_engine.py finds."""
    script = str(ROOT / "benchmarks" / "nanovllm_engine.py")
    return printed(script, NANOVLLM, "--one", name, "--folder", folder, "--cpu", "--quick")


@nanovllm
@pytest.mark.parametrize(
    ("name", "graph", "eager", "raised", "prefill"),
    [("16", 585, 0, 0, 13), ("20", 143, 0, 5, 8), ("12", 13, 0, 7, 15), ("20 eager", 0, 524, 0, 8)],
)
def test_the_calls_of_nanovllm_are_counted_to_the_last(
    folder: str, name: str, graph: int, eager: int, raised: int, prefill: int
) -> None:
    """As a GPU has shown them (docs/gpu.md, "nano-vllm"), and as many replays as graph calls."""
    found = scenario(name, folder)
    calls = collections.Counter(found["calls"])
    have = (calls["decode graph"], calls["decode eager"], found["raised"], calls["prefill eager"])
    assert have == (graph, eager, raised, prefill)
    assert (found["replays"], found["internal_errors"]) == (graph, {})
    assert all(found["hooks"].values()) and len(found["hooks"]) == 5


@nanovllm
def test_each_size_of_nanovllm_is_in_the_next_bucket(folder: str) -> None:
    """The graph that was looked up, of each call."""
    buckets = [1, 2, 4, 8, 16]
    for phase, path, size, bucket, _, _ in scenario("16", folder)["rows"]:
        assert phase == "prefill" or (path, bucket) == ("graph", next(b for b in buckets if b >= size))
    reasons = {(row[0], row[4]) for row in scenario("20 eager", folder)["rows"]}
    assert reasons == {("decode", "disabled"), ("prefill", "disabled")}


@nanovllm
def test_what_the_graphs_of_nanovllm_took_is_known(folder: str) -> None:
    """Each by itself, from a device that gives 1 MiB to each."""
    found = scenario("16", folder)
    assert set(found["capture_seconds"]) == set(found["pool_growth"]) == {"1", "2", "4", "8", "16"}
    assert set(found["pool_growth"].values()) == {MIB} and found["pool_bytes"] == 5 * MIB
    assert found["kv_capacity_tokens"] > 0 and found["kv_capacity_tokens"] % 256 == 0
    assert {key.split()[1] for key in found["ms"]} == {"graph", "eager"}


@nanovllm
@pytest.mark.parametrize(("name", "hole", "count"), [("20", "17-20", 4), ("12", "9-12", 4)])
def test_the_hole_of_nanovllm_is_named_before_the_first_request(folder: str, name: str, hole: str, count: int) -> None:
    """In one warning."""
    found = scenario(name, folder)
    assert found["uncovered"] == {"decode": count}
    assert len([text for text in found["said"] if f"decodes of {hole} requests without a graph" in text]) == 1


@nanovllm
def test_the_answers_of_nanovllm_are_the_same_without_us(folder: str) -> None:
    """To the token."""
    plain = scenario("16 plain", folder)
    assert plain["said"] == [] and plain["digests"] == scenario("16", folder)["digests"]


@nanovllm
def test_nanovllm_with_its_capture_replaced_answers_the_same(folder: str) -> None:
    """All but one decode are graph calls: that one shows what follows the width of its tables."""
    found = scenario("16 captured", folder)
    assert found["digests"] == scenario("16 plain", folder)["digests"]
    assert found["calls"] == {"decode graph": 584, "decode eager": 1, "prefill eager": 13}
    assert found["hit_rate"] == 1.0


@nanovllm
def test_nanovllm_with_its_capture_replaced_has_no_hole(folder: str) -> None:
    """Where its own raises StopIteration five times."""
    found = scenario("20 captured", folder)
    assert (found["raised"], found["hit_rate"], found["uncovered"]) == (0, 1.0, {"decode": 0})
    assert found["calls"]["decode graph"] == 523


@cache
def driven() -> dict[str, Any]:
    """mini-sglang's own engine and scheduler, with graphs of 1, 2, 4 and 8 requests, for 12."""
    return printed("-m", "tests.engines.minisgl_drive", MINISGL)


@minisgl
def test_the_batches_of_minisgl_are_counted_to_the_last() -> None:
    """In the bucket to which they were padded, or with the reason; as many replays as graph calls."""
    assert driven()["rows"] == [
        ["decode", 1, 1, 1],
        ["decode", 3, 4, 2],
        ["decode", 4, 4, 1],
        ["decode", 8, 8, 1],
        ["decode", 9, "batch_too_large", 1],
        ["prefill", 2, "wrong_phase", 1],
    ]
    assert driven()["launched"] == 5


@minisgl
def test_the_answers_of_minisgl_are_right_on_each_path() -> None:
    """The next number of each."""
    for n, answer in zip((1, 3, 4, 8, 9, 3), driven()["answers"], strict=False):
        assert answer == [(n * 3 + i + 1) % 32 for i in range(n)]


@minisgl
def test_the_start_of_minisgl_is_known() -> None:
    """Hooks, captures, memory, and the sizes that have no graph."""
    found = driven()
    assert len(found["hooks"]) == 6 and all(found["hooks"].values())
    assert (found["captured"], found["growth"], found["pool_bytes"]) == ([1, 2, 4, 8], [MIB] * 4, 4 * MIB)
    assert (found["kv_capacity_tokens"], found["uncovered"]) == (160, {"decode": 4})
    assert len([text for text in found["said"] if "decodes of 9-12 requests have no graph" in text]) == 1
