"""SGLang's passes: what is counted as which call, and what is none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import graphprobe
from graphprobe import errors
from graphprobe.ledger import LEDGER
from tests.integrations.engine import forward, rows
from tests.integrations.sglang_engine import Engine

Make = Callable[..., Engine]
VERIFY = SimpleNamespace(num_tokens_per_req=1)


@pytest.fixture(params=["cuda", "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Where decode has a runner of its own."""
    return str(request.param)


def test_a_decode_pass_is_one_call_with_the_padded_size_as_its_bucket(sglang: Make, device: str) -> None:
    """The sizes are numbers of requests; without a graph that large the pass is eager."""
    sglang(device=device).decode(3, 1, 3, 4, 8, 9)
    assert rows("sglang") == {
        ("decode", 1, "full", 1): 1,
        ("decode", 3, "full", 4): 2,
        ("decode", 4, "full", 4): 1,
        ("decode", 8, "full", 8): 1,
        ("decode", 9, "batch_too_large"): 1,
    }


def test_an_exact_size_after_a_padded_one_has_its_own_bucket(sglang: Make) -> None:
    """The CPU's runner still has the size of the padded pass then."""
    sglang(device="cpu").decode(3, 2, 1)
    assert {row[3] for row in rows("sglang")} == {4, 2, 1}


def test_many_passes_of_a_kind_are_counted_to_the_last(sglang: Make, device: str) -> None:
    """With one that goes another way among them."""
    engine = sglang(device=device)
    engine.decode(*[2, 3, 2, 8] * 50)
    graphs, engine.runner.decode_cuda_graph_runner = engine.runner.decode_cuda_graph_runner, None
    engine.decode(2)
    engine.runner.decode_cuda_graph_runner = graphs
    engine.decode(*[2] * 10)
    found = rows("sglang")
    assert found["decode", 2, "full", 2] == 110
    assert (found["decode", 3, "full", 4], found["decode", 8, "full", 8]) == (50, 50)
    assert found["decode", 2, "disabled"] == 1


@pytest.mark.parametrize(
    ("backend", "mode"), [("breakable", "breakable"), ("tc_piecewise", "piecewise"), ("full", "full")]
)
def test_prefill_is_counted_in_tokens_and_apart(sglang: Make, backend: str, mode: str) -> None:
    """Its mode tells how much of a pass the graph covers."""
    engine = sglang(prefill=(32, 16), prefill_backend=backend)
    engine.prefill(10, 16, 20)
    assert rows("sglang.prefill") == {
        ("prefill", 10, mode, 16): 1,
        ("prefill", 16, mode, 16): 1,
        ("prefill", 20, mode, 32): 1,
    }
    assert rows("sglang") == {}
    assert forward("sglang.prefill").unit == "tokens"
    assert forward("sglang.prefill").buckets == (16, 32)


def test_tokens_of_padding_are_none(sglang: Make) -> None:
    """A batch may come padded, and says how many it really has."""
    engine = sglang(prefill=(16, 32))
    engine.prefill(10, input_ids=[0] * 12)
    assert rows("sglang.prefill") == {("prefill", 10, "breakable", 16): 1}


def test_a_breakable_decode_shows(sglang: Make) -> None:
    """Parts of such a pass are eager by design."""
    sglang(decode_backend="breakable").decode(2)
    assert rows("sglang") == {("decode", 2, "breakable", 2): 1}


@pytest.mark.parametrize(
    ("mode", "tokens", "found"),
    [
        ("DECODE", None, ("sglang", "decode")),
        ("TARGET_VERIFY", None, ("sglang", "verify")),
        ("DLLM_EXTEND", None, ("sglang", "decode")),
        ("EXTEND", 2, ("sglang.prefill", "prefill")),
        ("MIXED", 2, ("sglang.prefill", "mixed")),
        ("SPLIT_PREFILL", 2, ("sglang.prefill", "prefill")),
    ],
)
def test_the_phase_is_the_mode_of_the_pass(sglang: Make, mode: str, tokens: int | None, found: tuple[str, str]) -> None:
    """And tells which graphs are for it."""
    engine = sglang(speculative="eagle")
    engine.run(mode, 2, tokens, spec_info=VERIFY)
    name, phase = found
    assert [phase] == [row[0] for row in rows(name)]
    assert sum(map(len, map(rows, ("sglang", "sglang.prefill")))) == 1


def test_an_idle_rank_has_no_calls(sglang: Make, said: Callable[[], list[str]]) -> None:
    """It runs empty passes so that others may; that is no reason to believe that nothing is seen."""
    engine = sglang()
    for _ in range(40):
        engine.run("IDLE", 0)
    assert rows("sglang") == {}
    assert not [text for text in said() if "never called" in text]
    assert ("sglang", "dispatch") not in LEDGER.hooks


def test_warm_ups_and_captures_are_no_calls(sglang: Make) -> None:
    """The model has run, and no pass was counted."""
    engine = sglang(prefill=(16,), speculative="eagle", drafter=True)
    assert engine.runner.model_forwards > 10 and engine.drafter.draft_runner.model_forwards > 10
    assert [{}] * 4 == [rows(name) for name in ("sglang", "sglang.prefill", "sglang.drafter", "sglang.drafter.prefill")]


def test_a_pass_that_other_ranks_pad_has_its_own_size(sglang: Make) -> None:
    """SGLang pads such a batch in place, and runs it eagerly."""
    engine = sglang(prefill=(16,), sizes=(1, 2))
    engine.prefill(40, global_num_tokens_cpu=[40, 90])
    engine.run("DECODE", 3, global_num_tokens_cpu=[3, 7])
    assert list(rows("sglang.prefill")) == [("prefill", 40, "batch_too_large")]
    assert list(rows("sglang")) == [("decode", 3, "batch_too_large")]


def test_the_bucket_is_that_of_the_largest_rank(sglang: Make) -> None:
    """All ranks replay the same graph."""
    engine = sglang(ranks=True)
    engine.run("DECODE", 1, original_global_num_tokens_cpu=[1, 3])
    assert rows("sglang") == {("decode", 1, "full", 4): 1}


def test_a_repetition_of_an_encoders_part_is_no_call(sglang: Make) -> None:
    """Ahead of the pass that it is for."""
    engine = sglang()
    engine.prefill(20, encoder_swa_replay=True)
    assert rows("sglang.prefill") == {}


def test_a_diffusion_pass_in_a_graph_of_prefill_is_counted_there(sglang: Make) -> None:
    """Such passes ask the graphs of decode first, and then those of prefill."""
    engine = sglang(prefill=(16, 32), sizes=(1,))
    engine.run("DLLM_EXTEND", 2, 20)
    assert rows("sglang.prefill") == {("decode", 20, "breakable", 32): 1}
    assert rows("sglang") == {}


def test_a_pass_that_raises_is_no_call_and_its_exception_is_untouched(sglang: Make, device: str) -> None:
    """In a graph, eagerly, and for a kind of pass that has been seen before."""
    engine = sglang(device=device, prefill=(16,))
    engine.decode(2, 2, 2)
    engine.runner.fails = error = RuntimeError("the engine's own")
    for size in (1, 2, 9):
        with pytest.raises(RuntimeError) as caught:
            engine.decode(size)
        assert caught.value is error
    with pytest.raises(RuntimeError):
        engine.prefill(10)
    assert rows("sglang") == {("decode", 2, "full", 2): 3}
    assert rows("sglang.prefill") == {}


def test_results_and_arguments_go_through(sglang: Make) -> None:
    """SGLang hands batches on by position and by name."""
    engine = sglang()
    batch = engine.batches("DECODE", 2)
    assert engine.runner.forward(batch, None).logits_output == "logits"
    assert engine.runner.forward(forward_batch=batch, pp_proxy_tensors=None).can_run_graph is True
    assert rows("sglang") == {("decode", 2, "full", 2): 2}


def test_rounds_of_a_drafter_are_calls_of_its_own(sglang: Make) -> None:
    """A round is one call, in one graph or eagerly in a pass per step; so is what extends the drafts."""
    engine = sglang(speculative="eagle", drafter=True, sizes=(1, 2))
    engine.draft(1, 2, 2, 3)
    engine.drafter.extend(2)
    engine.drafter.extend(4)
    assert rows("sglang.drafter") == {
        ("draft", 1, "full", 1): 1,
        ("draft", 2, "full", 2): 2,
        ("draft", 3, "batch_too_large"): 1,
        ("draft_extend", 2, "full", 2): 1,
        ("draft_extend", 4, "batch_too_large"): 1,
    }
    assert rows("sglang") == {}
    assert (forward("sglang.drafter").role, forward("sglang.drafter").phases) == ("drafter", ("draft",))


def test_a_drafters_single_passes_are_drafts(sglang: Make) -> None:
    """Some draft in one pass, whose mode is that of a verification."""
    engine = sglang(speculative="eagle", drafter=True)
    engine.drafter.draft_runner.forward(engine.batches("TARGET_VERIFY", 2))
    engine.drafter.draft_runner.forward(engine.batches("EXTEND", 1, 20))
    assert [row[0] for row in rows("sglang.drafter")] == ["draft"]
    assert [row[0] for row in rows("sglang.drafter.prefill")] == ["prefill"]


def test_a_drafter_without_graphs_has_them_disabled(sglang: Make) -> None:
    """An idle round is none."""
    engine = sglang(speculative="eagle", drafter=True, sizes=())
    engine.draft(2)
    engine.drafter.draft_forward(engine.batches("IDLE", 0))
    assert rows("sglang.drafter") == {("draft", 2, "disabled"): 1}


def test_a_round_that_raises_is_no_call(sglang: Make) -> None:
    """Its passes count again afterwards."""
    engine = sglang(speculative="eagle", drafter=True, sizes=(1, 2))
    engine.drafter.draft_runner.fails = RuntimeError("the engine's own")
    for size in (1, 5):
        with pytest.raises(RuntimeError):
            engine.draft(size)
    engine.drafter.draft_runner.fails = None
    engine.draft(1, 5)
    assert rows("sglang.drafter") == {("draft", 1, "full", 1): 1, ("draft", 5, "batch_too_large"): 1}


def unnamed(engine: Engine) -> Any:
    """A batch of another shape than any that we know."""
    batch = engine.batches("DECODE", 2)
    batch.forward_mode = SimpleNamespace(is_cuda_graph=lambda: True, is_target_verify=lambda: False)
    return batch


@pytest.fixture
def lenient(sglang: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Failures of graphprobe are counted, as in production, and raise nothing."""
    monkeypatch.delenv("GRAPHPROBE_STRICT")
    return sglang


def test_a_failure_of_our_own_does_not_reach_the_engine(lenient: Make) -> None:
    """The pass runs, and the failure is counted."""
    engine = lenient()
    assert engine.scheduler.run_batch(unnamed(engine)) == "logits"
    assert (rows("sglang"), errors.internal_errors) == ({}, {"sglang.pass": 1})
    engine.decode(1)
    assert rows("sglang") == {("decode", 1, "full", 1): 1}


def test_failures_do_not_go_on_for_ever(lenient: Make) -> None:
    """After a hundred of them nothing is counted any more, and the engine runs as without us."""
    engine = lenient(prefill=(16,))
    for _ in range(150):
        assert engine.scheduler.run_batch(unnamed(engine)) == "logits"
    engine.decode(1)
    engine.prefill(10)
    assert errors.internal_errors == {"sglang.pass": 100}
    assert (rows("sglang"), rows("sglang.prefill")) == ({}, {})


def test_a_scheduler_whose_passes_nobody_sees_is_told_once(sglang: Make, said: Callable[[], list[str]]) -> None:
    """Another class of model runner, for example."""
    scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    other = scheduler(SimpleNamespace(forward=lambda forward_batch: SimpleNamespace(logits_output="logits")))
    for _ in range(15):
        other.run_batch(None)
    assert said() == []
    for _ in range(40):
        other.run_batch(None)
    (text,) = said()
    assert "instrumented, but never called: 16 batches ran" in text
    assert LEDGER.hooks["sglang", "dispatch"] is False


def test_after_uninstrument_nothing_is_counted_and_before_stays(sglang: Make) -> None:
    """And with it again, counts go on."""
    engine = sglang()
    engine.decode(1)
    graphprobe.uninstrument("sglang")
    engine.decode(1)
    assert rows("sglang") == {("decode", 1, "full", 1): 1}
    graphprobe.instrument("sglang")
    engine.decode(1)
    assert rows("sglang") == {("decode", 1, "full", 1): 2}
