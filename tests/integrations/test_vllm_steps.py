"""What is counted: a step inside a worker that has tokens, once, when it has ended. With both model runners."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import graphprobe
from graphprobe import errors
from graphprobe.ledger import LEDGER
from tests.integrations.engine import Engine, forward, output, rows

Make = Callable[..., Engine]

pytestmark = pytest.mark.usefixtures("fresh")


def test_a_step_is_one_call_with_the_padded_size_as_its_bucket(engine: Make, runner: str) -> None:
    """Its batch size is in tokens, and the padding is what the graph has more."""
    found = engine(runner).start()
    assert found.step(1, 1, 1) == "tokens"
    found.step(1, 1, 1)
    found.step(*[1] * 8)
    assert rows() == {("decode", 3, "full", 4): 2, ("decode", 8, "full", 8): 1}
    assert (forward().unit, forward().source, forward().backend, forward().role) == (
        "tokens",
        "engine",
        "cpu",
        "target",
    )
    assert (forward().buckets, forward().padding) == ((1, 2, 4, 8), 2)


def test_a_step_counts_when_it_has_ended(engine: Make, runner: str) -> None:
    """Not when it is decided."""
    found, during = engine(runner, sizes=[1], mode="FULL_AND_PIECEWISE").start(), []
    found.runner.model = lambda: during.append(rows())
    found.step(1, 1)
    assert during == [{}]
    assert sum(rows().values()) == 1


def test_steps_without_tokens_are_no_calls(engine: Make, runner: str, said: Callable[[], list[str]]) -> None:
    """The worker gets them while it waits for something; its answer is handed on, and nobody misses a decision."""
    found = engine(runner).start()
    said()
    assert {found.step() for _ in range(20)} == {"nothing to do"}
    assert (rows(), said()) == ({}, [])


def test_dummy_runs_warm_ups_and_captures_are_no_calls(engine: Make, runner: str) -> None:
    """Nor what an idle rank of data parallelism runs, which goes another way into the runner."""
    found = engine(runner).start()
    found.worker.execute_dummy_batch()
    found.runner._dummy_run(4)
    assert rows() == {}
    assert found.kind == "v1" or found.runner.cudagraph_manager.graphs


def test_a_warm_up_that_looks_real_is_none(engine: Make) -> None:
    """V2's kernel warm-up calls the runner, or the worker below the wrapper, with a real output."""
    found = engine("v2")
    found.worker.execute_model(output(1, 1))
    found.runner.execute_model(output(1, 1))
    assert rows() == {}


def test_a_step_whose_decision_is_made_twice_is_one_call(engine: Make, runner: str) -> None:
    """Of which the last decision counts."""
    found = engine(runner).start()
    found.runner.asks = 2
    found.step(1, 1)
    assert rows() == {("decode", 2, "full", 2): 1}


def test_a_step_of_two_data_parallel_ranks_is_one_call(engine: Make, runner: str) -> None:
    """The dispatcher is asked twice for it."""
    engine(runner, dp=2).start().step(1, 1)
    assert rows() == {("decode", 2, "full", 2): 1}


def test_a_forward_that_raises_is_no_call_and_its_exception_is_untouched(engine: Make, runner: str) -> None:
    """The step after it counts again."""
    found, error = engine(runner, mode="NONE").start(), KeyError("a broken kernel")

    def fail() -> None:
        raise error

    found.runner.model = fail
    with pytest.raises(KeyError) as raised:
        found.step(1, 1)
    assert raised.value is error and error.__cause__ is None and error.__context__ is None
    assert rows() == {}
    found.runner.model = lambda: None
    found.step(1, 1)
    assert rows() == {("decode", 2, "disabled"): 1}


def test_a_step_over_rays_tuple_is_a_call(engine: Make, runner: str) -> None:
    """Ray's compiled graph hands a pipeline stage the output of the one before."""
    found = engine(runner).start()
    found.base.execute_model_ray((output(1, 1), "grammar"))
    found.base.execute_model_ray((output(1, 1), "grammar", "tensors"))
    assert rows() == {("decode", 2, "full", 2): 2}


def test_a_worker_that_hands_its_step_to_another_one_is_one_call(engine: Make, runner: str) -> None:
    """The outer one counts."""
    found, outer = engine(runner).start(), engine(runner).start()
    outer.base.worker.execute_model = found.base.execute_model
    outer.step(1, 1)
    assert rows() == {("decode", 2, "full", 2): 1}


def test_the_output_may_be_passed_by_its_name(engine: Make, runner: str) -> None:
    engine(runner).start().base.execute_model(scheduler_output=output(1))
    assert rows() == {("decode", 1, "full", 1): 1}


@pytest.mark.parametrize(
    ("tokens", "more", "phase"),
    [
        ([1, 1, 1], {}, "decode"),
        ([4, 4], {}, "verify"),
        ([4, 1], {}, "verify"),
        ([], {"new": [5, 7]}, "prefill"),
        ([], {"chunks": [5]}, "prefill"),
        ([1, 1], {"new": [5]}, "mixed"),
        ([1], {"chunks": [5]}, "mixed"),
        ([4], {"new": [1]}, "mixed"),
        ([], {"resumed": [6, 3]}, "prefill"),
        ([1], {"resumed": [6]}, "mixed"),
        ([], {"new": [1]}, "decode"),
        ([1], {"chunks": [1]}, "decode"),
    ],
)
def test_the_phase_is_what_the_scheduler_sent(
    engine: Make, runner: str, tokens: list[int], more: dict[str, Any], phase: str
) -> None:
    """A request that was preempted computes its prompt again; a prompt of one token is a decode, as for vLLM."""
    engine(runner, sizes=[32], mode="FULL_AND_PIECEWISE", k=3).start().step(*tokens, **more)
    assert [found for found, *_ in rows()] == [phase]


def test_older_releases_do_not_name_resumed_requests(engine: Make) -> None:
    """They are told by their outputs alone."""
    sent = output(1, chunks=[5])
    del sent.scheduled_cached_reqs.resumed_req_ids
    engine().start().run(sent)
    assert [phase for phase, *_ in rows()] == ["mixed"]


@pytest.mark.parametrize(("breakable", "mode"), [("0", "piecewise"), ("1", "breakable")])
def test_the_mode_is_how_much_a_graph_covers(
    engine: Make, runner: str, monkeypatch: pytest.MonkeyPatch, breakable: str, mode: str
) -> None:
    """Full for a uniform decode, and piecewise for the rest, with torch.compile or without."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", breakable)
    found = engine(runner, mode="FULL_AND_PIECEWISE").start()
    found.step(1, 1)
    found.step(1, new=[2])
    assert rows() == {("decode", 2, "full", 2): 1, ("mixed", 3, mode, 4): 1}


def test_two_engines_in_two_threads_do_not_mix(engine: Make) -> None:
    """One is inside a step while the other runs several, and captures."""
    first, second = engine("v1", mode="FULL_AND_PIECEWISE").start(), engine("v2").start()
    inside, done = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert done.wait(10)

    first.runner.model = wait
    thread = threading.Thread(target=first.step, args=(1, 1, 1))
    thread.start()
    assert inside.wait(10)
    second.runner._dummy_run(4)
    second.step(1)
    second.step(1)
    assert rows() == {("decode", 1, "full", 1): 2}
    done.set()
    thread.join()
    assert rows() == {("decode", 1, "full", 1): 2, ("decode", 3, "full", 4): 1}


def test_a_runner_whose_decisions_nobody_sees_is_told_once(engine: Make, said: Callable[[], list[str]]) -> None:
    """Steps run and a hook is bound, and yet nothing is counted: no data must not look like no misses."""
    found = engine("v1").start()
    said()
    found.runner.asks = 0
    for _ in range(15):
        found.step(1)
    assert said() == [] and ("vllm", "dispatch") not in LEDGER.hooks
    for _ in range(15):
        found.step(1)
    (text,) = said()
    assert "instrumented, but never called: 16 steps ran" in text
    assert LEDGER.hooks["vllm", "dispatch"] is False
    assert rows() == {}


def test_steps_without_a_decision_among_others_are_no_calls_and_no_warning(
    engine: Make, said: Callable[[], list[str]]
) -> None:
    """Steps of an encoder alone have tokens, and no forward of the model."""
    found = engine("v1").start()
    found.step(1)
    said()
    found.runner.asks = 0
    for _ in range(20):
        found.step(1)
    assert said() == [] and ("vllm", "dispatch") not in LEDGER.hooks
    assert rows() == {("decode", 1, "full", 1): 1}


def test_an_engine_that_only_runs_outside_of_steps_is_told_once(
    engine: Make, runner: str, said: Callable[[], list[str]]
) -> None:
    """1024 decisions without a step: an idle rank, or an executor that we do not know."""
    found = engine(runner).start()
    said()
    for _ in range(1100):
        found.worker.execute_dummy_batch()
    (text,) = said()
    assert "never called" in text and "1024 decisions" in text


def test_nothing_is_said_of_idle_times_of_an_engine_that_has_served(
    engine: Make, said: Callable[[], list[str]]
) -> None:
    found = engine("v1").start()
    found.step(1)
    said()
    for _ in range(1100):
        found.worker.execute_dummy_batch()
    assert said() == []


def test_a_failure_of_our_own_does_not_reach_the_engine(runner: str) -> None:
    """An output of another shape than any that we know: the step runs, and the failure is counted."""
    graphprobe.instrument("vllm")
    found = Engine(runner).start()
    sent = output(1, new=[5])
    del sent.scheduled_cached_reqs
    assert found.run(sent) == "tokens"
    assert rows() == {} and errors.internal_errors == {"vllm.step": 1}
    found.step(1)
    assert rows() == {("decode", 1, "full", 1): 1}


def test_failures_do_not_go_on_for_ever(runner: str) -> None:
    """After a hundred of them nothing is counted any more, and the engine runs as without us."""
    graphprobe.instrument("vllm")
    found = Engine(runner).start()
    for _ in range(150):
        sent = output(1, new=[5])
        del sent.scheduled_cached_reqs
        assert found.run(sent) == "tokens"
    found.step(1)
    assert rows() == {} and errors.internal_errors == {"vllm.step": 100}
    before = forward().captures
    found.start()
    assert forward().captures == before != {}


def test_after_uninstrument_nothing_is_counted_and_before_stays(engine: Make, runner: str) -> None:
    found = engine(runner).start()
    found.step(1)
    graphprobe.uninstrument("vllm")
    found.step(1)
    assert rows() == {("decode", 1, "full", 1): 1}
    graphprobe.instrument("vllm")
    found.step(1)
    assert rows() == {("decode", 1, "full", 1): 2}
