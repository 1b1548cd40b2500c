"""Captures that fail, and how that shows: reports from public engines, each as a test (H30 to H32)."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphprobe
from graphprobe.backends import recorder
from tests.helpers import counts, recorded, rows

pytestmark = pytest.mark.usefixtures("own_forwards", "both_modes")


def make_inputs(bucket: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (rows(bucket),), {}


class Refusal(Exception):
    """An error of the engine's own."""


class Untold(Exception):
    """An error that cannot be put into words."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Flaky:
    """A forward whose host code raises at some of its runs: a capture is a run that eager does not have."""

    def __init__(self, error: Callable[[], BaseException], *runs: int) -> None:
        self.error = error
        self.runs = runs
        self.ran = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.ran += 1
        if self.ran in self.runs:
            raise self.error()
        return x * 2


def not_permitted() -> RuntimeError:
    return RuntimeError("operation not permitted when stream is capturing")


# -- H30: the call that hits a failed capture is served ------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [not_permitted, Refusal, StopIteration, AssertionError, NotImplementedError, lambda: KeyError("x")],
    ids=["capturing", "own", "stop", "assertion", "unimplemented", "key"],
)
def test_the_call_whose_capture_fails_is_served_eagerly(error: Any) -> None:
    """A capture that raises: the call returns eager's result, is counted as such, and the next ones go on.

    ``strict`` of the report is not for this: GRAPHPROBE_STRICT raises failures of graphprobe itself, and a forward
    that cannot be captured is none (H30, InternLM/lmdeploy#2544).
    """
    forward = recorded(Flaky(error, 2), buckets=[2], name="decode")
    for served in ({"warmup": 1}, {"warmup": 1, "capture_failed": 1}, {"warmup": 1, "capture_failed": 1, "graph": 1}):
        x = rows(2)
        assert torch.equal(x * 2, forward(x))
        assert served == counts(forward)
    assert {(2, "error"): 1, (2, "ok"): 1} == forward.snapshot().capture_outcomes
    assert 0.5 == forward.snapshot().hit_rate


def test_a_bucket_is_not_tried_again_at_every_call() -> None:
    """After the second failed capture the bucket is given up; its calls run once each (H30, InternLM/lmdeploy#2544)."""
    step = Flaky(not_permitted, 2, 4)
    forward = recorded(step, buckets=[2], name="decode")
    for _ in range(50):
        x = rows(2)
        assert torch.equal(x * 2, forward(x))
    assert {"warmup": 1, "capture_failed": 49} == counts(forward)
    assert {(2, "error"): 2} == forward.snapshot().capture_outcomes
    assert 1 + 2 * 2 + 47 == step.ran


def test_an_out_of_memory_is_not_tried_again() -> None:
    """Memory that was short once is not asked for at each call; buckets with a graph go on (H30, lmdeploy#2544)."""
    ran: collections.Counter[int] = collections.Counter()

    def step(x: torch.Tensor) -> torch.Tensor:
        ran[x.shape[0]] += 1
        if x.shape[0] == 2 and ran[2] == 2:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")
        return x * 2

    forward = recorded(step, buckets=[1, 2], name="decode")
    for n in (1, 1, 2, 2, 2, 2, 1):
        x = rows(n)
        assert torch.equal(x * 2, forward(x))
    assert {"warmup": 2, "graph": 2, "capture_failed": 3} == counts(forward)
    assert 1 == forward.snapshot().capture_outcomes[2, "oom"]
    assert any("2.00 GiB" in text for text in forward.snapshot().causes.values())


def test_an_engine_loop_survives_a_failed_capture() -> None:
    """An asynchronous engine goes on through a failed capture, and so do its other forwards (H30, lmdeploy#2544)."""
    broken = recorded(Flaky(not_permitted, 2, 4), buckets=[2], name="broken")
    sound = recorded(lambda x: x + 1, buckets=[2], name="sound")

    async def loop(forward: Any, add: bool) -> None:
        for _ in range(10):
            x = rows(2)
            assert torch.equal(x + 1 if add else x * 2, forward(x))
            await asyncio.sleep(0)

    async def engine() -> None:
        await asyncio.gather(loop(broken, False), loop(sound, True))

    asyncio.run(engine())
    assert {"warmup": 1, "capture_failed": 9} == counts(broken)
    assert {"warmup": 1, "graph": 9} == counts(sound)


def test_an_interrupt_during_a_capture_reaches_the_caller_and_leaves_nothing_locked() -> None:
    """Ctrl-C is no failed capture; the next call is served, and the next one captured (H30, InternLM/lmdeploy#2544)."""
    forward = recorded(Flaky(KeyboardInterrupt, 2), buckets=[2], name="decode")
    forward(rows(2))
    with pytest.raises(KeyboardInterrupt):
        forward(rows(2))
    other = recorded(lambda x: x * 2, buckets=[2], name="other")
    inference = torch.is_inference_mode_enabled()

    def elsewhere() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            for _ in range(3):
                other(rows(2))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(60)
    assert {"warmup": 1, "graph": 2} == counts(other)
    x = rows(2)
    assert torch.equal(x * 2, forward(x))
    assert {"warmup": 1, "graph": 1} == counts(forward)


def test_an_exception_without_a_text_is_a_failed_capture() -> None:
    """Where the error cannot even be printed the bucket is given up all the same (H30, InternLM/lmdeploy#2544)."""
    forward = recorded(Flaky(Untold, 2, 4), buckets=[2], name="decode")
    for _ in range(10):
        x = rows(2)
        assert torch.equal(x * 2, forward(x))
    assert {"warmup": 1, "capture_failed": 9} == counts(forward)
    assert any("Untold" in text for text in forward.snapshot().causes.values())


class BrokenBackend(recorder.RecorderBackend):
    """A backend that fails as none should: not with a CaptureError."""

    tries = 0

    def capture(self, run: Any, generators: Any = ()) -> Any:
        type(self).tries += 1
        raise LookupError("the backend is broken")


def test_a_backend_that_breaks_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of graphprobe's own leaves the call eager and is counted; the bucket is not tried for ever.

    (H30, InternLM/lmdeploy#2544).
    """
    monkeypatch.setenv("GRAPHPROBE_STRICT", "0")
    monkeypatch.setattr(recorder, "RecorderBackend", BrokenBackend)
    monkeypatch.setattr(BrokenBackend, "tries", 0)
    forward = recorded(lambda x: x * 2, buckets=[2], name="decode")
    for _ in range(20):
        x = rows(2)
        assert torch.equal(x * 2, forward(x))
    assert 20 == forward.snapshot().eager_calls
    assert 1 <= sum(graphprobe.snapshot().internal_errors.values())
    assert 2 >= BrokenBackend.tries
    assert "unknown" not in counts(forward)


def test_strict_raises_what_a_broken_backend_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """GRAPHPROBE_STRICT=1, the report's ``strict``, raises graphprobe's own failure (H30, InternLM/lmdeploy#2544)."""
    monkeypatch.setattr(recorder, "RecorderBackend", BrokenBackend)
    forward = recorded(lambda x: x * 2, buckets=[2], name="decode")
    forward(rows(2))
    with pytest.raises(LookupError, match="broken"):
        forward(rows(2))


# -- H31: the line that reads on the host --------------------------------------------------------------------------
# Each of these reads in the first line of its body.


def prints_a_number(x: torch.Tensor) -> torch.Tensor:
    print(x.sum().item())
    return x * 2


def prints_a_tensor(x: torch.Tensor) -> torch.Tensor:
    print(x)
    return x * 2


def text(x: torch.Tensor) -> torch.Tensor:
    str(x.sum())
    return x * 2


def formatted(x: torch.Tensor) -> torch.Tensor:
    assert f"{x.sum():.3f}"
    return x * 2


def formatted_whole(x: torch.Tensor) -> torch.Tensor:
    assert f"{x}"
    return x * 2


def logged(x: torch.Tensor) -> torch.Tensor:
    logging.getLogger("engine").warning("sum %.3f", x.sum())
    return x * 2


def branches(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 1e9:
        return x
    return x * 2


def asserts(x: torch.Tensor) -> torch.Tensor:
    assert not x.isnan().any()
    return x * 2


def listed(x: torch.Tensor) -> torch.Tensor:
    x.tolist()
    return x * 2


def to_numpy(x: torch.Tensor) -> torch.Tensor:
    x.numpy()
    return x * 2


def as_integer(x: torch.Tensor) -> torch.Tensor:
    int(x.sum())
    return x * 2


def masked(x: torch.Tensor) -> torch.Tensor:
    x[x > 0].sum()
    return x * 2


def nonzero(x: torch.Tensor) -> torch.Tensor:
    x.nonzero()
    return x * 2


def compares(x: torch.Tensor) -> torch.Tensor:
    torch.equal(x, x + 1)
    return x * 2


def repeated(x: torch.Tensor) -> torch.Tensor:
    x.repeat_interleave(torch.ones(x.shape[0], dtype=torch.int64), 0)
    return x * 2


READS = [
    prints_a_number, prints_a_tensor, text, formatted, formatted_whole, logged, branches, asserts, listed, to_numpy,
    as_integer, masked, nonzero, compares, repeated,
]  # fmt: skip


@pytest.mark.parametrize("warm", [True, False], ids=["warmup", "lazy"])
@pytest.mark.parametrize("reads", READS)
def test_the_cause_names_the_line_that_reads_on_the_host(reads: Any, warm: bool, said: Callable[[], list[str]]) -> None:
    """A print, a branch, an assertion on a tensor: the failed capture names the user's file and line.

    (H31, vllm-project/vllm#7817).
    """
    where = f"{__file__}:{reads.__code__.co_firstlineno + 1}"
    forward = recorded(reads, buckets=[2], name="decode")
    if warm:
        report = forward.warmup(make_inputs)
        assert (2,) == report.missing
        assert where in next(iter(report)).error
    for _ in range(5):
        x = rows(2)
        assert torch.equal(x * 2, forward(x))
    assert (5 if warm else 4) == counts(forward)["capture_failed"]
    assert "graph" not in counts(forward)
    assert 1 == sum(where in line for line in said())
    assert any(where in cause for cause in forward.snapshot().causes.values())


def helper(x: torch.Tensor) -> float:
    return float(x.sum())


class Debugged(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        helper(x)
        return x * 2

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        helper(x)
        return x * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: recorded(Debugged().eval(), buckets=[2], name="decode"),
        lambda: recorded(Debugged().eval().decode, buckets=[2], name="decode"),
        lambda: recorded(type("Own", (Debugged,), {"forward": Debugged.decode}), buckets=[2], name="decode")().eval(),
        lambda: recorded(torch.nn.Sequential(Debugged()).eval(), buckets=[2], name="decode"),
    ],
    ids=["instance", "method", "class", "inner"],
)
def test_the_line_is_the_innermost_one_of_the_users(make: Any) -> None:
    """In a helper, inside a module, inside torch's containers: the line that reads is named (H31, vllm#7817)."""
    call = make()
    for _ in range(3):
        x = rows(2)
        assert torch.equal(x * 2, call(x))
    causes = graphprobe.snapshot().forwards["decode"].causes
    assert any(f"{__file__}:{helper.__code__.co_firstlineno + 1}" in cause for cause in causes.values())


def test_the_first_cause_comes_first() -> None:
    """Where one error led to another the report begins with the first (H31, vllm-project/vllm#7817)."""

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            x.tolist()
        except Exception as error:
            raise RuntimeError("capture ended with an error") from error
        return x * 2

    forward = recorded(step, buckets=[2], name="decode")
    for _ in range(3):
        x = rows(2)
        assert torch.equal(x * 2, forward(x))
    cause = next(cause for cause in forward.snapshot().causes.values() if "bucket 2" in cause)
    assert "tolist()" in cause
    ended = cause.find("capture ended")
    assert ended == -1 or cause.index("tolist()") < ended


def tries(x: torch.Tensor) -> torch.Tensor:
    try:
        scale = x.sum().item()
    except Exception:
        scale = 0.0
    return x * scale


def tries_a_list(x: torch.Tensor) -> torch.Tensor:
    try:
        scale = max(x.tolist()[0])
    except Exception:
        scale = 0.0
    return x * scale


def tries_numpy(x: torch.Tensor) -> torch.Tensor:
    scale = 0.0
    with contextlib.suppress(Exception):
        scale = float(x.numpy().max())
    return x * scale


def tries_a_mask(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * x[x > 0].sum()
    except BaseException:
        return x


def tries_a_generator(x: torch.Tensor) -> torch.Tensor:
    try:
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    except RuntimeError:
        return x


@pytest.mark.parametrize("eager_first", [0, 1])
@pytest.mark.parametrize("forward", [tries, tries_a_list, tries_numpy, tries_a_mask, tries_a_generator])
def test_a_refusal_that_the_forward_catches_is_a_failed_capture_all_the_same(forward: Any, eager_first: int) -> None:
    """A forward with a fallback of its own never gets a graph with the fallback baked in (H31, vllm#7817)."""
    graphed = recorded(forward, buckets=[2], eager_first=eager_first, name="decode")
    for _ in range(5):
        x = rows(2).abs() + 1
        assert torch.equal(forward(x), graphed(x))
    assert "graph" not in counts(graphed)


# -- H32: who asked for graphs is not fooled ------------------------------------------------------------------------


def host_read(x: torch.Tensor) -> torch.Tensor:
    return x * (1.0 if x.shape[0] != 8 else x.sum().item() * 0 + 1)


@pytest.mark.parametrize("warm", [True, False], ids=["warmup", "lazy"])
def test_a_failed_bucket_is_said_once_shown_as_failed_and_counted_as_misses(
    warm: bool, said: Callable[[], list[str]]
) -> None:
    """One warning; the snapshot shows bucket 8 as not live, with outcome and cause; its calls lower the hit rate.

    ``on_capture_error="raise"`` of the report is a check of ``warmup(...).missing`` (H32, roboflow/rf-detr#1468).
    """
    forward = recorded(host_read, buckets=[4, 8], name="decode")
    if warm:
        report = forward.warmup(make_inputs)
        assert ((4,), (8,)) == (report.captured, report.missing)
        failed = next(entry for entry in report if entry.bucket == 8)
        assert "error" == failed.outcome
        assert "on the host" in failed.error
    for n in 10 * [4, 8]:
        x = rows(n)
        assert torch.equal(x, forward(x))
    found = forward.snapshot()
    assert {4: True, 8: False} == found.live
    assert (1, 0) == (found.captures[4], found.captures[8])
    assert 1 == found.capture_outcomes[8, "error"]
    assert "on the host" in found.causes["capture_failed/8"]
    assert (0.5 if warm else 9 / 18) == found.hit_rate
    assert {"capture_failed": 10 if warm else 9} == {k: n for k, n in counts(forward).items() if k == "capture_failed"}
    assert 1 == sum("bucket 8" in line for line in said())


def test_a_forward_that_no_bucket_can_capture_has_a_hit_rate_of_zero() -> None:
    """Graphs were asked for and none exists: 0 %, not "no traffic" and not 100 % (H32, roboflow/rf-detr#1468)."""
    forward = recorded(lambda x: x * float(x.sum()), buckets=[1, 2], name="decode")
    assert (1, 2) == forward.warmup(make_inputs).missing
    for n in (1, 2, 1, 2):
        forward(rows(n))
    assert (0.0, 4) == (forward.snapshot().hit_rate, forward.snapshot().eager_calls)
    assert "capture_failed" in graphprobe.table()


def test_a_failed_signature_does_not_hide_behind_a_good_one() -> None:
    """Two kinds of calls share a bucket, one cannot be captured: its calls are misses (H32, roboflow/rf-detr#1468)."""

    def step(x: torch.Tensor, debug: bool = False) -> torch.Tensor:
        return x * (float(x.sum()) * 0 + 2) if debug else x * 2

    forward = recorded(step, buckets=[2], name="decode")
    for n in range(10):
        x = rows(2)
        assert torch.equal(x * 2, forward(x, debug=n % 2 == 1))
    assert {"warmup": 2, "graph": 4, "capture_failed": 4} == counts(forward)
    assert 0.5 == forward.snapshot().hit_rate
    assert {(2, "ok"): 1, (2, "error"): 1} == forward.snapshot().capture_outcomes


def test_a_failed_bucket_may_be_tried_again_after_a_reset() -> None:
    """``reset`` forgets failures as it drops graphs, so a mended forward is captured (H32, roboflow/rf-detr#1468)."""
    broken = [True]

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum() * 0 + 2) if broken[0] else x * 2

    forward = recorded(step, buckets=[2], name="decode")
    assert (2,) == forward.warmup(make_inputs).missing
    broken[0] = False
    forward.reset()
    assert (2,) == forward.warmup(make_inputs).captured
    x = rows(2)
    assert torch.equal(x * 2, forward(x))
    assert ({"graph": 1}, {2: True}) == (counts(forward), forward.snapshot().live)
