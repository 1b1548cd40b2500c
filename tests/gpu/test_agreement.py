"""The recorder stands in for a GPU: on the same sequence both take the same decisions, and both give eager's results.

tests/generated.py makes the sequences. Results on the GPU are compared with eager on the GPU, bit by bit where the
bucket is exact, within the tolerance of the dtype where rows were added.
"""

from __future__ import annotations

import collections
import os
from typing import Any

import pytest

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis, which generates the sequences, is not installed")

from tests.generated import Run, Scenario, padded, pure, scenarios  # noqa: E402

EXAMPLES = int(os.environ.get("GRAPHPROBE_EXAMPLES", "150"))
GPU, CPU = ("cuda", "cuda"), ("cpu", "recorder")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What graphprobe says of hundreds of wrappers is no part of a failure."""
    caplog.set_level("CRITICAL", logger="graphprobe")


def bounded(share: float = 1.0) -> Any:
    """The same examples in each run, so that two machines speak of the same ones."""
    return hypothesis.settings(
        max_examples=max(1, round(share * EXAMPLES)), deadline=None, derandomize=True, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip


def assert_agreement(scenario: Scenario) -> None:
    """Equal rows: batch size, path, bucket, reason, padding, calls. Each side compares its results with its eager."""
    on_gpu = collections.Counter(Run(scenario, *GPU, lenient=True).play())
    on_cpu = collections.Counter(Run(scenario, *CPU).play())
    assert on_gpu == on_cpu, f"the GPU alone has {dict(on_gpu - on_cpu)}, the recorder alone {dict(on_cpu - on_gpu)}"


@bounded()
@hypothesis.given(scenarios(control=True, launches=True))
def test_any_sequence_is_decided_alike(scenario: Scenario) -> None:
    """Calls of all kinds with warm-up, reset, training, replaced tensors and the like in between."""
    assert_agreement(scenario)


@bounded(0.5)
@hypothesis.given(padded(launches=True))
def test_padding_is_decided_alike(scenario: Scenario) -> None:
    """One kind of call at all sizes, served by larger buckets."""
    assert_agreement(scenario)


@bounded(0.2)
@hypothesis.given(pure(launches=True), hypothesis.strategies.sampled_from(["swap w", "swap k", "swap entry"]))
def test_replaced_storage_is_seen_alike(scenario: Scenario, swap: str) -> None:
    """Storage that is replaced under a living tensor is seen at the same call on both, and within 64 of a size."""
    rows = []
    for device, backend in (GPU, CPU):
        run = Run(scenario, device, backend)
        run.swap(swap)
        rows.append(run.books())
    on_gpu, on_cpu = rows
    assert on_gpu == on_cpu
