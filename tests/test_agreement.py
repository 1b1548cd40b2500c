"""`graphprobe check` on the page of vLLM: what it counted itself, and what we counted of its steps."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphprobe.ledger import Ledger
from graphprobe.observe import observe
from graphprobe.reasons import FallbackReason
from graphprobe.sentinel import PATIENCE, SILENT
from graphprobe.tools.agreement import FASTEST, LATE
from graphprobe.tools.check import check, findings
from tests.pages import exposed, ranks, replaced, rules

OURS = {"engine-silent", "engine-steps"}
SOON = int(LATE * FASTEST)
"""More iterations than one read can blame on what is not written yet."""


def page(decode: int, iterations: int, *, prefill: int = 0, finished: int = 0, engines: int = 1) -> str:
    """The page of an engine of which we saw so many steps, and that counted so many iterations."""
    ledger = Ledger()
    probe = observe("vllm", [1, 2, 4], unit="tokens", source="engine", ledger=ledger)
    probe.forward.graph_cell(3, 4)[0] += decode
    probe.forward.eager_cell(700, FallbackReason.BATCH_TOO_LARGE, "prefill")[0] += prefill
    ledger.hooks["vllm", "execute_model"] = True
    return exposed(ledger) + beside(iterations, finished, engines)


def beside(iterations: int, finished: int = 0, engines: int = 1) -> str:
    """What vLLM says of itself; of several engines each has a share of the iterations."""
    lines = ["# HELP vllm:iteration_tokens_total Tokens of a step.", "# TYPE vllm:iteration_tokens_total histogram"]
    for engine in range(engines):
        labels = f'engine="{engine}",model_name="m"'
        lines.append(f'vllm:iteration_tokens_total_bucket{{{labels},le="+Inf"}} {iterations // engines}')
        lines.append(f"vllm:iteration_tokens_total_sum{{{labels}}} 9")
        lines.append(f"vllm:iteration_tokens_total_count{{{labels}}} {iterations // engines}")
    ended = 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"}'
    return "\n".join([*lines, "# TYPE vllm:request_success_total counter", f"{ended} {finished}"]) + "\n"


def engine(body: str, **options: Any) -> set[str]:
    """Which of the two findings there are."""
    return rules(body, **options) & OURS


@pytest.mark.parametrize("steps", [1, 1_000, 5_000_000])
def test_equal_counts_agree(steps: int) -> None:
    """However many there are, on one read and on two."""
    assert set() == engine(page(steps, steps))
    assert set() == engine(page(steps, steps), earlier=page(steps, steps), pause=10.0)


def test_no_traffic_is_no_finding() -> None:
    """An engine that has just started counted nothing, and neither did we."""
    assert set() == engine(page(0, 0), earlier=page(0, 0), pause=10.0)


def test_an_engine_without_counts_of_its_own_is_not_judged() -> None:
    """--disable-log-stats, or a page that has only ours."""
    assert set() == engine(page(50_000, 0))
    assert set() == engine(exposed(Ledger()) + beside(90_000))


def test_a_page_that_is_read_while_serving_agrees() -> None:
    """Steps that are done and not written yet, for as long as writing takes, at any pace and whenever it is read.

    Counts of ours are those of up to two seconds ago; vLLM's are those of now, or of a moment ago where it is busy.
    """
    for pace, pause, lag, behind in itertools.product((5, 300, 1_900), (0.0, 1.0, 5.0), (0.0, 1.9), (0.0, 0.5)):
        for ran in (0.5, 2.0, 3.0, 60.0):
            reads = [
                page(int(pace * max(0.0, at - lag)), int(pace * max(0.0, at - behind))) for at in (ran, ran + pause)
            ]
            assert set() == engine(reads[1], earlier=reads[0], pause=pause), (pace, pause, lag, behind, ran)
            assert set() == engine(reads[1])


def test_traffic_that_stopped_before_the_first_read_agrees() -> None:
    """The last steps are written in between."""
    assert set() == engine(page(10_000, 10_000), earlier=page(6_500, 10_000), pause=1.0)


def test_parts_of_long_prompts_have_no_iteration() -> None:
    """vLLM counts where answers arrive: a prompt of many steps has one at its end."""
    assert set() == engine(page(40_000, 41_000, prefill=500_000))


def test_the_step_after_the_last_token_has_no_iteration() -> None:
    """It was on its way when the request ended; many short requests have many of them."""
    assert set() == engine(page(60_000, 40_000, finished=20_000), earlier=page(60_000, 40_000), pause=5.0)


def test_a_hook_that_is_never_called_is_told() -> None:
    """Its place is bound, the engine makes iterations, and there is no step."""
    (found,) = (one for one in findings(page(0, SOON * 2)) if one.rule in OURS)
    assert ("warning", "engine-silent") == (found.severity, found.rule)
    assert "0 steps, and vLLM had counted 12,000 iterations before" == found.what


def test_steps_that_are_missing_are_told_with_both_numbers() -> None:
    """A third of them; after a pause few steps are enough to see it."""
    assert {"engine-steps"} == engine(page(200_000, 300_000))
    (found,) = (one for one in findings(page(20, 33), earlier=page(20, 30), pause=LATE) if one.rule in OURS)
    assert "20 steps, and vLLM had counted 30 iterations before" == found.what
    assert "--api-server-count" in found.hint


def test_steps_that_are_counted_twice_are_told() -> None:
    """As a hook at a place would that is passed several times in a step."""
    assert {"engine-steps"} == engine(page(200_000, 100_000))
    assert {"engine-steps"} == engine(page(200, 100), earlier=page(200, 100), pause=LATE)


def test_what_came_between_the_reads_is_not_counted_twice() -> None:
    """vLLM may be behind our counts: only steps of the first read must be among its iterations by the second."""
    assert set() == engine(page(60, 40), earlier=page(30, 0), pause=LATE)
    assert {"engine-steps"} == engine(page(60, 40), earlier=page(50, 0), pause=LATE)


def test_an_engine_that_restarted_between_the_reads_is_not_judged() -> None:
    """Its iterations begin anew, and our counts of the earlier one belong to them no more."""
    assert set() == engine(page(80, 90), earlier=page(900_000, 900_000), pause=LATE)


def test_a_longer_wait_sees_fewer_steps_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time between two reads is what counts may be late by."""
    slept: list[float] = []
    monkeypatch.setattr("graphprobe.tools.check.time", SimpleNamespace(sleep=slept.append))
    path = tmp_path / "page.prom"
    path.write_text(page(20, 30))
    for wait, found in ((0.0, False), (1.0, False), (LATE, True)):
        assert found is any(one.rule in OURS for one in check(path, wait=wait).findings)
    assert [1.0, LATE] == slept


def test_each_rank_is_held_against_the_engine() -> None:
    """Ranks of tensor parallelism count the same steps: their sum is a multiple, and one that is behind is named."""
    both = ranks(exposed_only(90_000), "0", "1") + beside(90_000)
    assert set() == engine(both)
    behind = replaced(r'(^graphprobe_graph_calls_total\{rank="1",batch_size="3".*) 90000.0$', r"\1 100.0", both)
    (found,) = (one for one in findings(behind) if one.rule in OURS)
    assert "100 steps of rank 1, and vLLM had counted 90,000 iterations before" == found.what


def exposed_only(decode: int) -> str:
    """The same page without what vLLM says."""
    return page(decode, 0).partition("# HELP vllm:")[0]


def test_of_several_engines_ranks_have_shares() -> None:
    """Data parallelism: each rank has the steps of its engine, and each engine brings an API server."""
    assert set() == engine(ranks(exposed_only(50_000), "0", "1") + beside(100_000, engines=2))
    assert set() == engine(ranks(exposed_only(50_000), "0", "1") + beside(200_000, engines=2))
    assert {"engine-steps"} == engine(ranks(exposed_only(10_000), "0", "1") + beside(200_000, engines=2))


def test_a_hook_that_is_not_bound_is_a_warning_of_a_page_that_conforms(tmp_path: Path) -> None:
    """With its engine and name; so is a failure of our own, but for folded labels, which are none."""
    ledger = Ledger()
    observe("vllm", [1], source="engine", ledger=ledger)
    ledger.hooks["vllm", "dispatch"] = False
    path = tmp_path / "page.prom"
    path.write_text(exposed(ledger) + 'graphprobe_internal_errors_total{where="vllm.step"} 2\n')
    report = check(path)
    text = str(report)
    assert "vllm: dispatch is not bound" in text and "2 at vllm.step" in text
    severities = {finding.rule: finding.severity for finding in report.findings}
    assert severities["hook"] == severities["internal-error"] == "warning"


def test_what_agrees_is_told_too(tmp_path: Path) -> None:
    """A reader sees that both counts were there, and the hooks: nothing to find is not nothing looked at."""
    file = tmp_path / "page.prom"
    file.write_text(page(1_279, 1_279))
    report = check(str(file))
    assert not report.findings
    assert (
        "vllm: 1 of 1 hooks are in place",
        "vllm: 1,279 steps counted, 1,279 iterations counted by vLLM",
    ) == report.notes
    assert all(note in str(report) for note in report.notes)


def test_of_several_processes_the_least_and_the_most_are_told(tmp_path: Path) -> None:
    file = tmp_path / "page.prom"
    file.write_text(ranks(exposed_only(10), ["0"]) + ranks(exposed_only(12), ["1"]) + beside(12))
    assert (
        "vllm: 10 to 12 steps counted by each of 2 processes, 12 iterations counted by vLLM" in check(str(file)).notes
    )


def launching(launches: int | None, calls: int = 0, *, hooked: bool = True, forward: str = "sglang.draft") -> str:
    """The page of an engine that says nothing of itself, whose graphs were launched so many times."""
    ledger = Ledger()
    ledger.hooks["sglang", "forward"] = hooked
    ledger.replays_seen = None if launches is None else [launches]
    probe = observe(forward, [4], source="engine", backend="cuda", ledger=ledger)
    probe.forward.graph_cell(4, 4)[0] += calls
    return exposed(ledger)


def test_an_engine_that_launches_and_is_not_counted_is_told() -> None:
    """Any engine whose hooks are in place, with both numbers."""
    (found,) = (one for one in findings(launching(SILENT)) if one.rule == "engine-silent")
    assert ("warning", "no call of sglang, and 1,024 graph launches were seen") == (found.severity, found.what)


@pytest.mark.parametrize(
    "page",
    [
        launching(SILENT - 1),
        launching(None),
        launching(SILENT, 1),
        launching(SILENT, hooked=False),
    ],
    ids=["few launches", "launches not seen", "one call", "no hook in place"],
)
def test_an_engine_that_may_be_idle_is_not_told(page: str) -> None:
    """Few launches may be a warm-up; one call of one of its forwards, and it is counted."""
    assert "engine-silent" not in rules(page)


def test_an_engine_without_a_call_reads_no_data(tmp_path: Path) -> None:
    """That is neither 0 % nor 100 %; the note goes with the first call."""
    (tmp_path / "page").write_text(launching(5))
    assert "sglang: no data: its hooks are in place, and no call was counted" in check(tmp_path / "page").notes
    (tmp_path / "page").write_text(launching(5, 1))
    assert not [note for note in check(tmp_path / "page").notes if "no data" in note]


def mismatched(path: str, calls: int) -> str:
    ledger = Ledger()
    forward = observe("sglang", [4], source="engine", backend="cuda", ledger=ledger).forward
    forward.unmatched[path] = calls
    return exposed(ledger)


def test_graph_calls_that_launched_nothing_are_told() -> None:
    """From as many on as the log tells; eager calls with a graph inside may be right."""
    (found,) = (one for one in findings(mismatched("graph", PATIENCE)) if one.rule == "engine-launches")
    assert ("warning", "16 graph calls of sglang launched nothing") == (found.severity, found.what)
    for page in (mismatched("graph", PATIENCE - 1), mismatched("eager", 900)):
        assert "engine-launches" not in rules(page)


def test_the_passes_of_sglang_are_told_beside_its_own(tmp_path: Path) -> None:
    """By its modes; decode and verify are one of them."""
    ledger = Ledger()
    probe = observe("sglang", [1, 2, 4], unit="requests", source="engine", ledger=ledger)
    prompts = observe("sglang.prefill", unit="tokens", source="engine", ledger=ledger)
    probe.forward.graph_cell(3, 4)[0] += 20
    probe.forward.graph_cell(3, 4, "verify")[0] += 5
    probe.forward.eager_cell(9, FallbackReason.BATCH_TOO_LARGE)[0] += 7
    prompts.forward.eager_cell(700, FallbackReason.WRONG_PHASE, "prefill")[0] += 2
    theirs = {"decode_cuda_graph": 25, "decode_none": 7, "prefill_none": 2}
    lines = [f'sglang:cuda_graph_passes_total{{mode="{mode}",tp_rank="0"}} {n}' for mode, n in theirs.items()]
    path = tmp_path / "page.prom"
    path.write_text(exposed(ledger) + "# TYPE sglang:cuda_graph_passes_total counter\n" + "\n".join(lines) + "\n")
    assert (
        "sglang: passes counted here and by SGLang itself: decode_cuda_graph 25 and 25, decode_none 7 and 7, "
        "prefill_cuda_graph 0 and 0, prefill_none 2 and 2"
    ) in check(path).notes
