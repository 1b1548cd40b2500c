"""nano-vllm, observed: what is a call, on which path it ran and why, what its graphs took, and sizes that have none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphprobe
from graphprobe import errors
from graphprobe.ledger import LEDGER
from tests.engines import cpu_cuda
from tests.integrations.runners import forward, nano_runner, requests, rows

Make = Callable[..., Any]
Said = Callable[[], list[str]]
NAME = "nanovllm"
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
PADDED = ("decode", 3, 4)


def test_a_decode_is_a_call_of_its_requests_in_the_graph_that_was_replayed(nano: Make) -> None:
    """The padding is what the graph has more."""
    runner = nano()
    for count in (3, 3, 8, 9):
        runner.run(requests(count), False)
    assert rows(NAME) == {PADDED: 2, ("decode", 8, 8): 1, ("decode", 9, 16): 1}
    found = forward(NAME)
    assert (found.unit, found.source, found.role, found.backend) == ("rows", "engine", "target", "cpu")
    assert (found.buckets, found.padding, found.hit_rate) == ((1, 2, 4, 8, 16), 9, 1.0)


def test_a_prefill_is_a_call_of_its_tokens_and_does_not_count_in_the_hit_rate(nano: Make) -> None:
    """Its rows are tokens."""
    nano().run(requests(2, tokens=4), True)
    assert rows(NAME) == {("prefill", 8, "wrong_phase"): 1}
    assert forward(NAME).hit_rate is None


def test_answers_are_those_of_an_engine_that_is_not_observed(clean: None) -> None:
    """Of each path, to the bit."""
    answers = []
    for observed in (False, True):
        if observed:
            graphprobe.instrument(NAME)
        runner = nano_runner()
        answers.append([runner.run(requests(5), True), *(runner.run(requests(n), False) for n in (5, 3, 1, 16))])
    assert all(torch.equal(plain, ours) for plain, ours in zip(*answers, strict=True))
    assert len(rows(NAME)) == 5


def test_warm_up_and_captures_are_no_calls(nano: Make) -> None:
    """Warm-up runs the same function, with the model's graphs to come."""
    nano()
    assert rows(NAME) == {}


def test_a_call_counts_when_it_has_ended(nano: Make) -> None:
    """Not when it is decided."""
    runner, during = nano(), []
    logits = runner.model.compute_logits
    runner.model.compute_logits = lambda hidden: (during.append(rows(NAME)), logits(hidden))[1]
    runner.run(requests(3), False)
    assert during == [{}] and rows(NAME) == {PADDED: 1}


def test_a_size_without_a_graph_raises_as_without_us_and_is_no_call(
    nano: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often: what was begun for it is given back."""
    monkeypatch.setenv("GRAPHPROBE_TIMING", "1")
    runner = nano(20)
    for _ in range(40):
        with pytest.raises(StopIteration):
            runner.run(requests(17), False)
    assert rows(NAME) == {} and forward(NAME).times == {}
    runner.run(requests(16), False)
    assert rows(NAME) == {("decode", 16, 16): 1}
    assert forward(NAME).dropped == 0


def test_the_clock_of_a_call_that_raises_is_cancelled(nano: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are only so many pairs of events."""
    monkeypatch.setenv("GRAPHPROBE_TIMING", "1")
    open_marks: list[object] = []
    kind = importlib.import_module("graphprobe.stopwatch").Stopwatch
    monkeypatch.setattr(kind, "begin", lambda watch, forward: open_marks.append(mark := object()) or mark)
    monkeypatch.setattr(kind, "cancel", lambda watch, mark: open_marks.remove(mark))
    runner = nano(20)
    with pytest.raises(StopIteration):
        runner.run(requests(18), False)
    assert open_marks == []


@pytest.mark.parametrize(("prefill", "phase"), [(True, "prefill"), (False, "decode")])
def test_without_graphs_each_call_is_disabled(nano: Make, prefill: bool, phase: str) -> None:
    """enforce_eager is looked at before the phase: no phase would have a graph."""
    nano(eager=True).run([[7]] * 3, prefill)
    assert rows(NAME) == {(phase, 3, "disabled"): 1}
    assert forward(NAME).uncovered == {}


def test_a_batch_above_the_limit_is_too_large(nano: Make) -> None:
    """nano-vllm runs more than 512 requests eagerly."""
    runner = nano(600)
    context = importlib.import_module("nanovllm.utils.context")
    lots = torch.zeros(513, dtype=torch.int64)
    context.set_context(False, lots - 1, lots, lots[:, None])
    runner.run_model(lots, lots, False)
    assert rows(NAME) == {("decode", 513, "batch_too_large"): 1}


def test_an_engine_that_runs_eagerly_for_no_reason_we_know_is_unknown(
    clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is what it did, not what we would have expected of it."""
    kind = importlib.import_module("nanovllm.engine.model_runner").ModelRunner
    monkeypatch.setattr(kind, "run_model", lambda self, ids, positions, prefill: self.model(ids, positions))
    graphprobe.instrument(NAME)
    nano_runner().run(requests(3), False)
    assert rows(NAME) == {("decode", 3, "unknown"): 1}


def test_the_bucket_is_the_graph_that_the_engine_looked_up(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork that takes another one is counted as it is."""
    kind = importlib.import_module("nanovllm.engine.model_runner").ModelRunner
    largest = torch.inference_mode()(lambda self, *args: args[2] or self.graphs[16].replay())
    monkeypatch.setattr(kind, "run_model", largest)
    graphprobe.instrument(NAME)
    nano_runner().run(requests(3), False)
    assert rows(NAME) == {("decode", 3, 16): 1}


def test_a_runner_that_was_there_before_is_observed_too(clean: None) -> None:
    """What its captures took is not known."""
    runner = nano_runner()
    graphprobe.instrument(NAME)
    runner.run(requests(3), False)
    assert rows(NAME) == {PADDED: 1}
    found = forward(NAME)
    assert (found.buckets, found.capture_seconds, found.pool_bytes) == ((1, 2, 4, 8, 16), {}, None)


def test_graphs_that_are_captured_anew_are_seen(nano: Make) -> None:
    """The dict is another one then."""
    runner = nano()
    runner.graphs = dict(runner.graphs)
    runner.run(requests(3), False)
    assert rows(NAME) == {PADDED: 1}


def test_each_capture_is_timed_and_measured_by_itself_and_all_together(nano: Make, said: Said) -> None:
    """Its seconds are those of the capture alone; the warm-up before it, which compiles, is in the rest."""
    nano()
    found = forward(NAME)
    assert found.capture_outcomes == {(size, "ok"): 1 for size in (1, 2, 4, 8, 16)}
    assert all(0 < seconds < 60 for seconds in found.capture_seconds.values())
    assert found.pool_growth == dict.fromkeys((1, 2, 4, 8, 16), cpu_cuda.MIB)
    assert (found.pool_bytes, found.kv_capacity_tokens) == (5 * cpu_cuda.MIB, 128)
    assert found.live == dict.fromkeys((1, 2, 4, 8, 16), True)
    assert any(text.startswith("nanovllm: 5 graphs in ") for text in said())


def test_captures_of_others_are_not_ours(nano: Make) -> None:
    """What enters torch.cuda.graph outside of the engine's capture is not measured."""
    runner = nano()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(1)
    runner.run(requests(3), False)
    assert sum(forward(NAME).capture_outcomes.values()) == 5
    assert importlib.import_module("graphprobe_runner").CAPTURING.books is None


@pytest.mark.parametrize(("kind", "outcome"), [("OutOfMemoryError", "oom"), ("RuntimeError", "error")])
def test_a_capture_that_fails_is_told_and_raises_as_without_us(
    nano: Make, monkeypatch: pytest.MonkeyPatch, kind: str, outcome: str
) -> None:
    """The size is the largest that has no graph yet."""
    made: list[int] = []

    def end(graph: Any) -> None:
        made.append(1)
        graph._recording.__exit__(None, None, None)
        if len(made) == 3:
            raise type(kind, (RuntimeError,), {})("no more")

    monkeypatch.setattr(cpu_cuda.Graph, "capture_end", end)
    with pytest.raises(RuntimeError, match="no more"):
        nano()
    assert LEDGER.forwards[NAME].captures == {(4, outcome): 1}


@pytest.mark.parametrize(
    ("most", "count", "hole", "advice"),
    [
        (20, 4, "17-20", "max_num_seqs=16 or 32"),
        (12, 4, "9-12", "max_num_seqs=8 or 16"),
        (510, 14, "497-510", "max_num_seqs=496 or 512"),
    ],
)
def test_the_bucket_hole_is_named_before_a_request_falls_into_it(
    nano: Make, said: Said, most: int, count: int, hole: str, advice: str
) -> None:
    """Once, with the sizes, what happens there, and what to set."""
    runner = nano(most)
    warned = [text for text in said() if "max_num_seqs" in text]
    assert len(warned) == 1 and f"decodes of {hole} requests" in warned[0]
    assert "StopIteration" in warned[0] and advice in warned[0]
    assert most != 20 or warned[0] in PAGE.read_text()
    assert forward(NAME).uncovered == {"decode": count}
    runner.run(requests(3), False)
    assert not [text for text in said() if "max_num_seqs" in text]


@pytest.mark.parametrize("most", [1, 3, 5, 8, 16, 32, 512])
def test_where_there_is_no_hole_nothing_is_said(nano: Make, said: Said, most: int) -> None:
    """Multiples of 16, and up to 8, where the graph of 8 holds fewer rows."""
    runner = nano(most)
    runner.run(requests(min(most, 16)), False)
    assert forward(NAME).uncovered == {"decode": 0}
    assert not [text for text in said() if "max_num_seqs" in text]


def test_what_is_advised_has_no_hole(nano: Make) -> None:
    """For each limit that has one."""
    own = importlib.import_module("graphprobe_nanovllm")
    for most in range(1, 513):
        sizes = [1, 2, 4, 8, *range(16, most + 1, 16)]
        if most > sizes[-1]:
            for advised in own.advised(most):
                assert advised <= [1, 2, 4, 8, *range(16, advised + 1, 16)][-1]


def test_sizes_above_the_limit_are_eager_and_no_hole(nano: Make, said: Said) -> None:
    """They have another path."""
    nano(600)
    assert forward(NAME).uncovered == {"decode": 88}
    texts = [text for text in said() if "eagerly" in text]
    assert texts == ["nanovllm: decodes of more than 512 requests run eagerly"]


def test_an_engine_that_dispatches_elsewhere_is_noticed(nano: Make, said: Said) -> None:
    """Sixteen steps without one call: one warning, and a hook that is not in place."""
    kind = importlib.import_module("nanovllm.engine.model_runner").ModelRunner
    other = type("Other", (kind,), {"run_model": lambda self, ids, positions, prefill: self.model(ids, positions)})
    runner = nano(kind=other)
    said()
    for _ in range(15):
        runner.run(requests(3), False)
    assert LEDGER.hooks[NAME, "dispatch"] is True and said() == []
    for _ in range(40):
        runner.run(requests(3), False)
    assert LEDGER.hooks[NAME, "dispatch"] is False
    (text,) = said()
    assert "instrumented, but never called: 16 steps" in text


def test_an_engine_that_is_called_is_not_warned_of(nano: Make, said: Said) -> None:
    """However many steps."""
    runner = nano()
    said()
    for _ in range(20):
        runner.run(requests(2), False)
    assert said() == [] and LEDGER.hooks[NAME, "dispatch"] is True


@pytest.mark.parametrize(("setting", "expected"), [("", 2), ("1", 70), ("0", 0)])
def test_one_call_of_each_size_in_64_is_timed(
    nano: Make, monkeypatch: pytest.MonkeyPatch, setting: str, expected: int
) -> None:
    """The second one first, with the graph that served it."""
    monkeypatch.setenv("GRAPHPROBE_TIMING", setting)
    runner = nano()
    for _ in range(70):
        runner.run(requests(3), False)
    counts = {key: times.count for key, times in forward(NAME).times.items()}
    assert counts == ({("decode", "graph", "full", 4): expected} if expected else {})


def test_launches_are_held_against_calls(nano: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that looked a graph up and launched none does not fit; nor one that is eager and launched one."""
    monkeypatch.setenv("GRAPHPROBE_TIMING", "0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    graphprobe.uninstrument(NAME)
    graphprobe.instrument(NAME)
    kind = importlib.import_module("nanovllm.engine.model_runner").ModelRunner
    allocate = kind.allocate_kv_cache

    def on_device(runner: Any) -> None:
        allocate(runner)
        runner.kv_cache = SimpleNamespace(device=SimpleNamespace(type="cuda"))

    monkeypatch.setattr(kind, "allocate_kv_cache", on_device)
    runner = nano()
    runner.run(requests(3), True)
    runner.run(requests(3), False)
    entry = LEDGER.forwards[NAME]
    assert entry.unmatched == {"graph": 0, "eager": 0} and LEDGER.replays_seen == [1]
    runner.graphs[4] = SimpleNamespace(replay=lambda: None)
    runner.run(requests(3), False)
    assert entry.unmatched == {"graph": 1, "eager": 0}
    runner.model.register_forward_hook(lambda *args: runner.graph_16.replay())
    runner.graph_16 = dict(runner.graphs)[16]
    runner.run(requests(3), True)
    assert entry.unmatched == {"graph": 1, "eager": 1}


def test_what_is_ignored_is_counted_nowhere(nano: Make) -> None:
    """A profiling run of the user's."""
    runner = nano()
    with graphprobe.ignore():
        runner.run(requests(3), False)
    assert rows(NAME) == {}


def test_uninstrument_puts_everything_back(nano: Make) -> None:
    """What was counted stays; the engine goes on; it may be observed again."""
    runner = nano()
    kind = type(runner)
    placed = dict(vars(kind))
    graphprobe.uninstrument(NAME)
    assert {name for name in placed if placed[name] is not vars(kind)[name]} == {
        "run",
        "run_model",
        "capture_cudagraph",
    }
    assert not hasattr(torch.cuda.graphs.graph.__enter__, "__wrapped__")
    runner.run(requests(3), False)
    assert rows(NAME) == {}
    graphprobe.instrument(NAME)
    runner.run(requests(3), False)
    assert rows(NAME) == {PADDED: 1}


@pytest.mark.parametrize("broken", ["observe", "route", "Stopwatch"])
def test_a_failure_of_ours_does_not_reach_the_engine(clean: None, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """It is counted as ours, whatever part of ours it is, and after too many we rest."""
    monkeypatch.setenv("GRAPHPROBE_STRICT", "0")
    monkeypatch.setenv("GRAPHPROBE", "1")
    plain = [nano_runner(), nano_runner(eager=True)]
    graphprobe.instrument(NAME)
    monkeypatch.setattr(importlib.import_module("graphprobe_runner"), broken, None)
    ours = [nano_runner(), nano_runner(eager=True)]
    for _ in range(150):
        for without, observed in zip(plain, ours, strict=True):
            given = requests(3)
            assert torch.equal(without.run(given, False), observed.run(given, False))
    assert errors.internal_errors
    errors.internal_errors.clear()


def test_a_call_that_cannot_be_read_runs_all_the_same(nano: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork with other arguments."""
    monkeypatch.setenv("GRAPHPROBE_STRICT", "0")
    runner = nano()
    with pytest.raises(AttributeError, match="'str' object has no attribute 'size'"):
        runner.run_model("text", None, False)
    assert errors.internal_errors == {"nanovllm.dispatch": 1} and rows(NAME) == {}
    errors.internal_errors.clear()


def test_metrics_are_in_this_process_unless_the_environment_says_where(
    clean: None, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """nano-vllm has no page of its own; armed from outside, a process that serves nothing says what to set."""
    graphprobe.instrument(NAME)
    nano_runner()
    (text,) = [text for text in said() if "observes" in text]
    assert "observes nanovllm (tested: 0.2.0, commit bb823b3): graphs up to 16, 5 of 5 hooks in place" in text
    assert text.endswith("metrics: graphprobe.table() in this process")
    monkeypatch.setenv("GRAPHPROBE", "1")
    nano_runner()
    assert any("GRAPHPROBE_PORT=9464" in text for text in said())
