"""Drafters are counted apart, in the forward vllm.drafter, and only in a step of their target."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from graphprobe.ledger import LEDGER
from tests.integrations.engine import Engine, forward, output, rows

Make = Callable[..., Engine]

pytestmark = pytest.mark.usefixtures("fresh")


def drafting(engine: Make, runner: str, **more: object) -> Engine:
    found = engine(runner, k=1, sizes=[2, 4, 8], **more)
    found.draft()
    return found.start()


def test_a_drafter_is_a_forward_of_its_own(engine: Make, runner: str) -> None:
    """Its first pass is over the tokens of the target, all others over one token per request."""
    drafting(engine, runner).step(2, 2)
    assert rows() == {("verify", 4, "full", 4): 1}
    first, second = rows("vllm.drafter")
    assert {first[0], second[0]} == {"draft", "draft_extend"}
    assert {(phase, tokens) for phase, tokens, *_ in rows("vllm.drafter")} == {("draft_extend", 4), ("draft", 2)}
    assert (forward("vllm.drafter").role, forward("vllm.drafter").unit) == ("drafter", "tokens")


def test_its_graphs_are_counted_with_their_mode(engine: Make) -> None:
    """V1 has piecewise ones for all passes, V2 full ones for uniform passes."""
    drafting(engine, "v1").step(2, 2, 2)
    assert rows("vllm.drafter") == {("draft_extend", 6, "piecewise", 8): 1, ("draft", 3, "piecewise", 4): 1}
    LEDGER.forwards.clear()
    drafting(engine, "v2").step(2, 2, 2)
    assert rows("vllm.drafter")["draft", 3, "full", 4] == 1


def test_each_step_has_a_first_pass(engine: Make, runner: str) -> None:
    found = drafting(engine, runner)
    for _ in range(3):
        found.step(2, 2)
    calls = {phase: n for (phase, *_), n in rows("vllm.drafter").items()}
    assert calls == {"draft_extend": 3, "draft": 3}


def test_a_drafter_above_its_limit_is_too_large(engine: Make, runner: str) -> None:
    drafting(engine, runner, seqs=16, mode="FULL_AND_PIECEWISE").step(*[2] * 9)
    reasons = {key[0]: key[2] for key in rows("vllm.drafter")}
    assert reasons == {"draft_extend": "batch_too_large", "draft": "batch_too_large"}


@pytest.mark.parametrize(
    ("tokens", "more", "reason"),
    [([], {"new": [5]}, "wrong_phase"), ([2], {"new": [5]}, "mixed_batch"), ([2, 1], {}, "ragged")],
)
def test_the_first_pass_of_a_drafter_is_eager_for_what_its_target_had(
    engine: Make, tokens: list[int], more: dict[str, list[int]], reason: str
) -> None:
    """A prompt is no miss of the drafter, either."""
    drafting(engine, "v2").step(*tokens, **more)
    assert [key[2] for key in rows("vllm.drafter") if key[0] == "draft_extend"] == [reason]


def test_a_drafter_that_is_eager_for_a_cause_of_its_own_is_declined(engine: Make) -> None:
    """V1 asks it for a pass without graphs."""
    found = drafting(engine, "v1")
    found.runner.drafter.propose = lambda tokens, batch: found.runner.drafter.dummy_run(tokens)
    found.step(2, 2)
    assert rows("vllm.drafter") == {("draft_extend", 4, "engine_declined"): 1}


def test_a_drafter_without_graphs_is_disabled(engine: Make) -> None:
    found = drafting(engine, "v1")
    found.runner.drafter.cudagraph_dispatcher.keys_initialized = False
    found.step(2, 2)
    assert {reason for _, _, reason in rows("vllm.drafter")} == {"disabled"}


def test_what_a_drafter_does_outside_of_a_step_is_no_call(engine: Make, runner: str) -> None:
    """Before the first, after the tokens of one are sampled, and after one that had no tokens or raised."""
    found = drafting(engine, runner)
    drafter = found.runner.drafter
    drafter.propose(4, 2)
    found.step(2, 2)
    before = rows("vllm.drafter")
    drafter.propose(4, 2)
    found.runner._dummy_run(4)
    found.base.execute_model(output(2, 2))
    found.base.execute_model(output())
    drafter.propose(4, 2)
    assert rows("vllm.drafter") == before


def test_nothing_of_a_drafter_after_a_step_that_raised(engine: Make, runner: str) -> None:
    found = drafting(engine, runner, mode="NONE")
    found.runner.model = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        found.step(2, 2)
    found.runner.drafter.propose(4, 2)
    assert rows("vllm.drafter") == {}


def test_sampling_that_raises_ends_the_step_too(engine: Make, runner: str) -> None:
    """Its exception is handed on."""
    found = drafting(engine, runner)
    propose, found.runner.drafter.propose = found.runner.drafter.propose, lambda *tokens: 1 / 0
    with pytest.raises(ZeroDivisionError):
        found.step(2, 2)
    propose(4, 2)
    assert rows() == {("verify", 4, "full", 4): 1} and rows("vllm.drafter") == {}


def test_under_ray_where_tokens_are_sampled_inside_the_step_both_are_counted(engine: Make, runner: str) -> None:
    """The target's call is what it decided, and not what its drafter decided after it."""
    drafting(engine, runner).base.execute_model_ray((output(2, 2), "grammar"))
    assert rows() == {("verify", 4, "full", 4): 1}
    assert {(phase, tokens) for phase, tokens, *_ in rows("vllm.drafter")} == {("draft_extend", 4), ("draft", 2)}


def test_a_drafter_does_not_change_the_call_of_its_target(engine: Make, runner: str) -> None:
    """Nor the clock of the next step."""
    found = drafting(engine, runner)
    for _ in range(4):
        found.step(2, 2)
    assert rows() == {("verify", 4, "full", 4): 4}
    assert set(forward().times) == {("verify", "graph", "full", 4)}
