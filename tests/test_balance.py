"""The result of an account: its parts, its verdict, what it lets expect, and its two forms."""

from __future__ import annotations

import json
import math
import random
from dataclasses import fields, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools.balance import Account, Prefill, Step
from graphprobe.tools.cards import datasheet
from graphprobe.tools.forecast import expected
from graphprobe.tools.reckoning import GRAPHS, HITS, KERNELS, REFUSED, UNKNOWN, USELESS, WEIGHTS, judged, on_prefill

SAVED = Path(__file__).resolve().parent.parent / "docs" / "account"


def saved(name: str) -> Account:
    return Account.from_json((SAVED / f"{name}.json").read_bytes())


def account(*steps: Step, **more: Any) -> Account:
    """On an H200 with 4 TB/s, where 4 GB are a floor of 1 ms."""
    return Account(**{"name": "m", "device": "NVIDIA H200", "steps": steps, "bandwidth": 4e12, **more})


def step(**figures: Any) -> Step:
    """An ordinary one: 1,000 kernels in 20 ms of waiting for the host, 4 ms as a graph, 1 ms the floor."""
    usual = {"kernels": 1000, "eager": 20e-3, "graph": 4e-3, "filled": 4.7e-3, "host": 19e-3, "bytes_read": 4 * 10**9}
    return Step(1, **{**usual, **figures})


# -- the parts of a step ---------------------------------------------------------------------------------------------


def test_the_gain_is_the_host_part_and_the_device_part() -> None:
    one = step()
    assert one.gain == pytest.approx(16e-3)
    assert (one.host_part, one.device_part) == (pytest.approx(15.3e-3), pytest.approx(0.7e-3))
    assert one.device_per_kernel == pytest.approx(0.7e-6)
    assert one.launch_per_kernel == pytest.approx(19e-6)


def test_a_step_that_no_graph_can_hold_is_told_with_what_one_would_save() -> None:
    """By its launches queued ahead, or, where it waits for the device itself, by its kernels."""
    why = "reads a value on the host (engine.py:15)"
    ahead = account(step(graph=None, refused=why)).judged
    assert (REFUSED, "at batch 1 " + why) == (ahead.do, ahead.why)
    assert "one would save about 16 ms of 20 ms" == ahead.then
    waits = account(step(graph=None, filled=None, refused=why))
    assert "one would save 0.68 ms to 0.74 ms of the device's time, by 1,000 kernels" == waits.judged.then
    assert why in " ".join(str(waits).split())
    assert waits == Account.from_json(waits.to_json())


def test_a_host_that_is_ahead_has_no_part() -> None:
    assert step(eager=4.6e-3).host_part == 0.0


def test_what_was_not_measured_is_none_and_never_zero() -> None:
    bare = Step(4)
    derived = ("gain", "host_part", "device_part", "device_per_kernel", "launch_per_kernel", "compile_share", "repaid")
    assert {getattr(bare, name) for name in derived} == {None}
    told = json.loads(account(bare).to_json())["steps"][0]
    assert {name for name, value in told.items() if value not in (None, "")} == {"batch", "notes"}


def test_a_step_without_kernels_has_nothing_per_kernel() -> None:
    assert step(kernels=0).device_per_kernel is None


def test_a_capture_is_repaid_by_what_replays_save() -> None:
    assert step(capture=1.6).repaid == 100
    assert step(capture=1.6, graph=21e-3).repaid is None


def test_the_floor_is_what_a_step_reads_at_the_measured_bandwidth() -> None:
    held = account(step(), datasheet=4.8e12)
    assert held.floor(held.steps[0]) == pytest.approx(1e-3)
    assert held.floor_share(held.steps[0]) == pytest.approx(0.25)


def test_without_a_measured_bandwidth_the_datasheet_decides() -> None:
    held = account(step(), bandwidth=None, datasheet=8e12)
    assert held.floor(held.steps[0]) == pytest.approx(0.5e-3)


def test_a_step_reads_the_weights_at_least() -> None:
    held = account(step(bytes_read=None), weight_bytes=8 * 10**9)
    assert held.floor(held.steps[0]) == pytest.approx(2e-3)
    assert held.floor(step(bytes_read=12 * 10**9)) == pytest.approx(3e-3)


def test_without_a_graph_the_floor_is_a_share_of_the_eager_step() -> None:
    held = account(step(graph=None))
    assert held.floor_share(held.steps[0]) == pytest.approx(0.05)


# -- the verdict on what is published --------------------------------------------------------------------------------


def test_server_with_a_slow_host() -> None:
    """Graphs save most of the step, and what is left above the floor is kernels."""
    found = saved("server")
    assert found.judged.do == GRAPHS
    assert "33.8 ms of 42.9 ms (78.8 %)" in found.verdict
    assert (
        "above the floor is kernels: 5.3 ms above the floor of 3.8 ms are 2,511 kernels, 2.1 us each" in found.verdict
    )


def test_consumer_card() -> None:
    found = saved("consumer")
    assert found.judged.do == WEIGHTS
    assert "the floor of 22.3 ms is 99.9 %" in found.verdict
    assert "graphs are no use: at batch 1 a graph saves 0.4 ms of 22.7 ms (1.8 %)" in found.verdict


def test_own_engine_with_many_kernels() -> None:
    """Before anything is timed: their number alone lets expect milliseconds."""
    found = saved("own_engine")
    assert found.judged.do == GRAPHS
    assert "4,000 kernels let expect 1.2 ms to 4 ms less" in found.verdict
    assert "fewer kernels save both" in found.verdict


def test_fused_engine_with_few_kernels() -> None:
    found = saved("fused")
    assert found.judged.do == GRAPHS
    assert "small but certain: 839 kernels let expect 0.283 ms less" in found.verdict


def test_fused_engine_that_misses_its_buckets() -> None:
    found = replace(saved("fused"), hit_rate=0.7)
    assert found.judged.do == HITS
    assert "then turn graphs on: small but certain" in found.verdict
    assert replace(found, hit_rate=0.8).judged.do == GRAPHS


def test_engine_without_a_bucket_for_batch_3() -> None:
    found = saved("missed")
    assert found.judged.do == HITS
    assert "61.4 % of the calls, below 80 %" in found.verdict


def test_prefill_that_gains_a_percent_for_gigabytes() -> None:
    found = saved("prefill")
    assert found.judged.do == USELESS
    assert found.verdict == "no use: 1.3 % less time per prefill, below 2 %, for 1.6 GB more memory"


def test_capture_that_is_mostly_compiling() -> None:
    assert "torch.compile takes 78 % to 86 % of the capture" in str(saved("capture"))


def test_saved_results_are_what_the_script_makes_of_the_published_figures() -> None:
    spec = spec_from_file_location("published", SAVED / "published.py")
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    assert {file.stem for file in SAVED.glob("*.json")} == set(script.RESULTS)
    for name, result in script.RESULTS.items():
        assert (SAVED / f"{name}.json").read_text() == result.to_json() + "\n"
        assert result.notes


# -- the verdict at its thresholds -----------------------------------------------------------------------------------


def test_a_gain_below_two_percent_is_none() -> None:
    """All else equal, at the floor: 1.9 % of 10 ms, and 2.1 %."""
    at_floor = {"eager": 10e-3, "filled": None, "bytes_read": 39 * 10**9, "kernels": 100}
    assert account(step(**at_floor, graph=9.81e-3)).judged.do == WEIGHTS
    assert account(step(**at_floor, graph=9.79e-3)).judged.do == GRAPHS


def test_the_weights_decide_from_four_fifths_of_the_step() -> None:
    none = {"eager": 10.1e-3, "graph": 10e-3, "filled": None}
    assert account(step(**none, bytes_read=int(32.1e9))).judged.do == WEIGHTS
    assert account(step(**none, bytes_read=int(31.9e9))).judged.do != WEIGHTS


def test_many_short_kernels_above_the_floor_are_reduced_first() -> None:
    """4,000 kernels of an engine whose graph saves 1.3 %."""
    found = account(step(kernels=4000, eager=15e-3, graph=14.8e-3, filled=14.9e-3)).judged
    assert found.do == KERNELS
    assert "13.8 ms above the floor of 1 ms are 4,000 kernels, 3.5 us each" in found.why
    assert "graphs are no use" in found.then


def test_kernels_come_first_where_they_are_more_than_a_small_gain() -> None:
    """A graph saves 5 %, and 13 ms above the floor are left."""
    found = account(step(kernels=4000, eager=15e-3, graph=14.25e-3, filled=14.9e-3)).judged
    assert found.do == KERNELS
    assert "more than the 0.75 ms that a graph saves" in found.why


def test_many_kernels_whose_launches_the_device_waits_for_need_graphs() -> None:
    found = account(step(kernels=4000, eager=68e-3, graph=14e-3, filled=17e-3)).judged
    assert found.do == GRAPHS
    assert "51 ms of waiting for the host, 3 ms of the device's own (0.75 us per kernel)" in found.why
    assert "above the floor is kernels" in found.then


@pytest.mark.parametrize("kernels", [999, 1000])
def test_few_kernels_are_not_reduced_first(kernels: int) -> None:
    found = account(step(kernels=kernels, eager=8e-3, graph=7.6e-3, filled=7.8e-3)).judged
    assert found.do == (KERNELS if kernels == 1000 else GRAPHS)
    assert kernels == 1000 or found.why.startswith("small but certain")


def test_long_kernels_are_not_reduced_first() -> None:
    """2,000 kernels of 20 us each calculate: fewer of them do not help."""
    found = account(step(kernels=2000, eager=40.2e-3, graph=40e-3, filled=40.1e-3)).judged
    assert found.do == USELESS
    assert "the kernels' own work" in found.then


def test_a_replay_that_takes_longer_is_no_use() -> None:
    found = account(step(kernels=None, eager=4e-3, graph=4.4e-3, filled=None, bytes_read=None)).judged
    assert found.do == USELESS
    assert "a replay takes 4.4 ms, an eager step 4 ms" in found.why


def test_a_large_gain_near_the_floor_names_both() -> None:
    found = account(step(eager=20e-3, graph=5e-3, bytes_read=18 * 10**9)).judged
    assert found.do == GRAPHS
    assert found.then == "then the weights are the bottleneck: the floor of 4.5 ms is 90 % of a replay"


def test_a_low_hit_rate_comes_first_only_where_graphs_are_of_use() -> None:
    useful, useless = step(), step(eager=4.04e-3, filled=None, kernels=100, bytes_read=15 * 10**9)
    assert account(useful, hit_rate=0.6).judged.do == HITS
    assert account(useless, hit_rate=0.6).judged.do == WEIGHTS
    assert "a mean step takes 10.4 ms instead of 4 ms" in account(useful, hit_rate=0.6).verdict


def test_batches_that_differ_are_told_apart() -> None:
    """The verdict is that of the batch where graphs save most of the step."""
    large = Step(64, 1000, eager=40e-3, graph=39.6e-3, bytes_read=155 * 10**9)
    found = account(step(), large).judged
    assert found.do == GRAPHS
    assert found.then.endswith("at batch 64: the weights are the bottleneck")


def test_without_a_gpu_the_verdict_claims_nothing() -> None:
    found = Account("m", "cpu", (Step(1, eager=3e-3, host=1e-3),)).judged
    assert found.do == UNKNOWN
    assert "needs a GPU" in found.why


def test_a_replay_without_an_eager_step_is_not_enough() -> None:
    assert account(step(eager=None)).judged.do == UNKNOWN


def test_an_eager_step_at_the_floor_needs_no_graph_to_be_judged() -> None:
    held = account(step(graph=None, filled=None, kernels=None, host=None, eager=20e-3, bytes_read=79 * 10**9))
    assert held.judged.do == WEIGHTS


def test_a_forward_that_cannot_be_captured_says_so() -> None:
    found = account(step(graph=None, notes=("no graph can hold it: it reads a value",))).judged
    assert (found.do, found.then) == (GRAPHS, "no graph was measured: no graph can hold it: it reads a value")
    assert "as predicted" in found.why


def test_prefill_is_judged_beside_steps() -> None:
    page = str(account(step(), prefill=Prefill(512, eager=10e-3, graph=9e-3, pool_bytes=10**9)))
    assert "\nprefill: turn graphs on: 10.0 % less time per prefill, for 1 GB more memory" in page
    assert on_prefill(Prefill(512)).do == UNKNOWN
    assert on_prefill(Prefill(512, eager=1e-2, graph=2e-2)).why.startswith("100.0 % more time")


# -- what is expected before a capture -------------------------------------------------------------------------------


def test_more_kernels_let_expect_more() -> None:
    """The two published engines come in the right order, on any card."""
    for device in ("", "NVIDIA H200", "NVIDIA GB300"):
        few, many = expected(839, device), expected(4000, device)
        assert few.seconds < many.seconds
        assert few.least <= few.seconds <= few.most


def test_what_is_known_of_a_card_is_used() -> None:
    assert expected(1000, "NVIDIA H200")[:3] == pytest.approx((0.71e-3, 0.68e-3, 0.74e-3))
    low, high = expected(839, "NVIDIA GB300")[1:3]
    assert low < 283e-6 < high
    assert expected(1000, "NVIDIA GH200 480GB") == expected(1000, "")
    assert expected(1000, "NVIDIA H200", 0.5e-6)[:3] == pytest.approx((0.5e-3, 0.5e-3, 0.5e-3))


def test_account_expects_by_its_own_figure() -> None:
    assert saved("fused").expected(839).seconds == pytest.approx(283e-6)


def test_replay_is_predicted_from_eager_measurements() -> None:
    """The device's own time, less what a graph saves per kernel on this card."""
    held = account(step(graph=None))
    assert held.predicted_graph(held.steps[0]) == pytest.approx(4.7e-3 - 0.71e-3)


def test_prediction_does_not_look_at_the_graph() -> None:
    held = account(step(graph=1e-3))
    assert held.predicted_graph(held.steps[0]) == account(step()).predicted_graph(step())


def test_prediction_never_falls_below_the_floor() -> None:
    held = account(step(bytes_read=int(18.4e9)))
    assert held.predicted_graph(held.steps[0]) == pytest.approx(4.6e-3)


def test_prediction_never_exceeds_what_the_device_takes_eagerly() -> None:
    """A floor a little above is one of a copy that reads slower."""
    held = account(step(bytes_read=20 * 10**9))
    assert held.predicted_graph(held.steps[0]) == pytest.approx(4.7e-3)


def test_a_floor_far_above_the_step_is_none() -> None:
    """What stays in the cache is not read from memory: no verdict and no prediction rests on it."""
    held = account(step(graph=3.98e-3, eager=4e-3, kernels=100, filled=None, bytes_read=80 * 10**9))
    assert held.judged.do == USELESS
    assert "the floor at batch 1 is above the step, so less is read from memory than reckoned" in str(held)
    assert held.predicted_graph(step(bytes_read=80 * 10**9)) == pytest.approx(4.7e-3 - 0.71e-3)


def test_a_host_that_is_well_ahead_lets_the_eager_step_predict() -> None:
    """Without queued launches: the device never waited, so the step is its own time."""
    held = account(step(filled=None, eager=20e-3, host=10e-3))
    assert held.predicted_graph(held.steps[0]) == pytest.approx(20e-3 - 0.71e-3)
    assert held.predicted_graph(step(filled=None, eager=20e-3, host=19e-3)) is None
    assert held.predicted_graph(step(kernels=None)) is None


def test_more_to_save_than_there_is_predicts_nothing() -> None:
    held = account(step(kernels=10_000, bytes_read=None))
    assert held.predicted_graph(held.steps[0]) is None


def test_so_many_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match="not those of one step"):
        expected(10**400)
    with pytest.raises(ConfigError, match="kernels must be at least 0"):
        expected(-1)
    with pytest.raises(ConfigError, match="per_kernel must be seconds above 0"):
        expected(1, per_kernel=math.nan)


# -- the two forms ---------------------------------------------------------------------------------------------------

seconds = st.none() | st.floats(1e-9, 1e3)
steps = st.builds(
    Step,
    st.integers(1, 4096),
    kernels=st.none() | st.integers(0, 10**6),
    eager=seconds,
    graph=seconds,
    filled=seconds,
    host=seconds,
    bytes_read=st.none() | st.integers(1, 10**13),
    pool_bytes=st.none() | st.integers(-(10**9), 10**11),
    capture=seconds,
    notes=st.lists(st.text(max_size=9), max_size=2).map(tuple),
)
accounts = st.builds(
    Account,
    st.text(max_size=20),
    st.sampled_from(["cpu", "", "NVIDIA H200", "\u0000\ud800"]),
    st.lists(steps, min_size=1, max_size=4, unique_by=lambda s: s.batch).map(
        lambda found: tuple(sorted(found, key=lambda s: s.batch))
    ),
    bandwidth=st.none() | st.floats(1e9, 1e13),
    weight_bytes=st.none() | st.integers(1, 10**12),
    hit_rate=st.none() | st.floats(0, 1),
    prefill=st.none() | st.builds(Prefill, eager=seconds, graph=seconds),
    residual_bytes=st.none() | st.integers(-(10**9), 10**9),
    kv_token_bytes=st.none() | st.floats(1, 1e7),
    versions=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)


@settings(deadline=None)
@given(accounts)
def test_json_restores_an_equal_account(found: Account) -> None:
    text = found.to_json()
    assert Account.from_json(text) == found
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@settings(deadline=None)
@given(accounts)
def test_every_account_is_told_in_ascii_with_a_verdict(found: Account) -> None:
    page = str(found)
    assert page.isascii()
    assert f"verdict: {found.judged.do}" in page
    assert judged(found).do in (GRAPHS, USELESS, WEIGHTS, KERNELS, HITS, UNKNOWN)


def test_table_has_the_figures_of_each_batch_and_no_empty_column() -> None:
    page = str(account(step(), replace(step(pool_bytes=50 << 20), batch=2)))
    lines = page.split("\n\n")[1].splitlines()
    assert len(lines) == 4
    heading, first, second = lines[1:]
    assert first.split() == FIRST_ROW
    assert second.split()[-1] == "50.0"
    assert heading.split()[:4] == ["batch", "kernels", "ms", "ms"]
    assert "capt." not in page


FIRST_ROW = ["1", "1,000", "20", "4.7", "4", "3.99", "16", "15.3", "0.7", "0.7", "19", "1", "25", "%", "-"]


def test_all_columns_fit_a_line() -> None:
    whole = account(step(pool_bytes=500 << 20, capture=12.5, compile=9.0), datasheet=4.8e12, hit_rate=0.9)
    assert max(map(len, str(whole).splitlines())) <= 110


def test_json_tells_what_follows_of_the_figures() -> None:
    told = json.loads(account(step(pool_bytes=5)).to_json())
    assert told["schema"] == 1
    assert told["verdict"]["do"] == GRAPHS
    assert told["steps"][0]["floor_share"] == pytest.approx(0.25)
    assert told["bill"]["pool"] == 5


def test_a_later_field_is_passed_over() -> None:
    data = json.loads(saved("server").to_json())
    data["steps"][0]["colour"] = data["mood"] = "blue"
    assert Account.from_json(json.dumps(data)) == saved("server")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "null",
        "{}",
        '{"schema": 1}',
        '{"schema": 2, "name": "m", "device": "", "hit_rate": 0.5}',
        '{"schema": 1, "name": "m", "device": "", "steps": []}',
        '{"schema": 1, "name": 3, "device": "", "steps": [{"batch": 1}]}',
        '{"schema": 1, "name": "m", "device": "", "steps": 3}',
        '{"schema": 1, "name": "m", "device": "", "steps": [3]}',
        '{"schema": 1, "name": "m", "device": "", "steps": [{}]}',
        '{"schema": 1, "name": "m", "device": "", "steps": [{"batch": 1.5}]}',
        '{"schema": 1, "name": "m", "device": "", "steps": [{"batch": 1, "eager": NaN}]}',
        '{"schema": 1, "name": "m", "device": "", "steps": [{"batch": 1, "eager": "fast"}]}',
        '{"schema": 1, "name": "m", "device": "", "steps": [{"batch": 1, "notes": "one"}]}',
        '{"schema": 1, "name": "m", "device": "", "steps": [{"batch": 1}, {"batch": 1}]}',
        '{"schema": 1, "name": "m", "device": "", "hit_rate": 61.4}',
        '{"schema": 1, "name": "m", "device": "", "hit_rate": 0.5, "versions": ["torch"]}',
        "[" * 100_000,
    ],
)
def test_what_is_no_account_is_refused(text: str) -> None:
    with pytest.raises(SourceError):
        Account.from_json(text)


def test_damaged_results_are_refused_or_told() -> None:
    """No change of a byte ends in a traceback of ours."""
    chance, whole = random.Random(5), (SAVED / "server.json").read_bytes()
    for _ in range(1500):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(damaged))] = chance.choice(b'0123456789e-+."{}[],:nul')
        try:
            str(Account.from_json(bytes(damaged)))
        except SourceError:
            continue


FIGURES = [field.name for field in fields(Step) if field.name not in ("batch", "notes", "refused")]


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("value", [math.nan, math.inf, "9", True, [], 10**400])
def test_a_figure_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Step(1, **{name: value})


@pytest.mark.parametrize("name", sorted({*FIGURES} - {"pool_bytes"}))
def test_only_a_pool_may_have_shrunk(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Step(1, **{name: -1})
    assert Step(1, pool_bytes=-1).pool_bytes == -1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": ()}, "without a step, a prefill or a hit rate"),
        ({"steps": (Step(2), Step(1))}, r"ascend by batch, each once, got \[2, 1\]"),
        ({"bandwidth": 0}, "bandwidth must be a number from 1 on, got 0"),
        ({"hit_rate": 61.4}, "hit_rate must be a share from 0 to 1, got 61.4. hint: 61.4 % is 0.614"),
        ({"per_kernel": 0}, "per_kernel must be a number above 0"),
        ({"kv_token_bytes": 0}, "kv_token_bytes"),
        ({"device": None}, "device must be text"),
    ],
)
def test_an_account_that_contradicts_itself_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(account(step()), **wrong)


def test_compile_is_a_part_of_the_capture() -> None:
    with pytest.raises(ConfigError, match="compile must be a part of capture"):
        Step(1, capture=1.0, compile=1.5)


def test_prefill_share_in_percent_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1.3 % is 0.013"):
        Prefill(share=1.3)


# -- cards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "rate"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA H100 PCIe", 2.0e12),
        ("NVIDIA H100 NVL", 3.9e12),
        ("NVIDIA H20", 4.0e12),
        ("NVIDIA GH200 480GB", 4.0e12),
        ("NVIDIA B200", 8.0e12),
        ("NVIDIA GB300", 8.0e12),
        ("NVIDIA GB10", 273e9),
        ("NVIDIA A100-SXM4-40GB", 1.555e12),
        ("NVIDIA A100-SXM4-80GB", 2.039e12),
        ("NVIDIA A100 80GB PCIe", 1.935e12),
        ("A100-PCIE-40GB", 1.555e12),
        ("NVIDIA A10", 600e9),
        ("NVIDIA A10G", 600e9),
        ("NVIDIA L4", 300e9),
        ("NVIDIA L40S", 864e9),
        ("Tesla T4", 320e9),
        ("Tesla V100-SXM2-16GB", 900e9),
        ("Tesla V100S-PCIE-32GB", 1.134e12),
        ("NVIDIA GeForce RTX 3090", 936e9),
        ("NVIDIA GeForce RTX 3090 Ti", 1.008e12),
        ("NVIDIA GeForce RTX 4080", 716.8e9),
        ("NVIDIA GeForce RTX 4080 SUPER", 736e9),
        ("NVIDIA GeForce RTX 4090", 1.008e12),
        ("NVIDIA GeForce RTX 5070 Ti", 896e9),
        ("NVIDIA GeForce RTX 5090", 1.792e12),
        ("NVIDIA RTX 6000 Ada Generation", 960e9),
    ],
)
def test_card_is_known_by_the_name_that_the_driver_gives(device: str, rate: float) -> None:
    assert datasheet(device) == rate


@pytest.mark.parametrize(
    "device",
    [
        "",
        "cpu",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3080",
        "NVIDIA GeForce RTX 5090 D v2",
        "NVIDIA H20-3e",
        "NVIDIA A1000",
        "NVIDIA L400",
        "AMD Instinct MI300X",
    ],
)
def test_card_that_is_not_surely_known_has_no_figure(device: str) -> None:
    """A slice, a laptop, a name that two cards share, and what is no card of the table."""
    assert datasheet(device) is None


def test_card_is_named_by_text() -> None:
    with pytest.raises(ConfigError, match="named by text"):
        datasheet(None)  # type: ignore[arg-type]


# -- what does not fit together ---------------------------------------------------------------------------------------


def test_what_kernels_let_expect_is_held_against_the_eager_step() -> None:
    """Three kernels in a second are no reason for a graph, and a hundred thousand do not fit into ten milliseconds."""
    few = account(Step(1, kernels=3, eager=1.0)).judged
    assert (USELESS, True) == (few.do, "below 2 % of an eager step of 1,000 ms" in few.why)
    many = account(Step(1, kernels=100_000, eager=10e-3)).judged
    assert (UNKNOWN, True) == (many.do, "100,000 kernels cannot run in an eager step of 10 ms" in many.why)


def test_parts_add_up_to_what_is_saved() -> None:
    """A step that takes longer queued ahead than in a loop: all of the gain is the device's."""
    odd = step(eager=10e-3, filled=11e-3, graph=9e-3)
    assert (0.0, pytest.approx(1e-3), pytest.approx(1e-3)) == (odd.host_part, odd.device_part, odd.gain)
    slower = account(step(eager=20e-3, filled=4e-3, graph=5e-3)).judged
    assert "us per kernel" not in slower.why


def test_a_prefill_that_graphs_slow_down_is_not_told_to_be_below_a_threshold() -> None:
    assert "50.0 % more time per prefill" == on_prefill(Prefill(eager=1.0, graph=1.5)).why
