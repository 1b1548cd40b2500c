"""The memory bill: what a token takes, what bytes buy, and whether a larger batch is worth it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphprobe.errors import ConfigError
from graphprobe.tools.balance import Account, Step
from graphprobe.tools.memory import Bill, kv_bytes_per_token, mib, tokens
from graphprobe.tools.throughput import compare_steps, fills, load_line

MIB = 2**20


# -- a token of KV cache ---------------------------------------------------------------------------------------------


def test_a_token_takes_keys_and_values_on_each_layer() -> None:
    """Qwen3-8B: 36 layers, 8 KV heads of 128."""
    assert kv_bytes_per_token(36, 8, 128) == 2 * 36 * 8 * 128 * 2 == 147_456


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("torch.bfloat16", 2), ("FP16", 2), ("fp8", 1), ("float8_e4m3fn", 1), (0.5, 0.5), (2, 2)],
)
def test_a_token_takes_what_its_dtype_takes(dtype: str | float, size: float) -> None:
    assert kv_bytes_per_token(36, 8, 128, dtype) == 73_728 * size


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((0, 8, 128), "layers must be at least 1, got 0"),
        ((36, 8.0, 128), "kv_heads must be a whole number"),
        ((36, 8, None), "head_size must be a whole number"),
        ((36, 8, 128, "auto"), "unknown dtype 'auto'"),
        ((36, 8, 128, 0), "bytes of an element must be a number above 0"),
        ((36, 8, 128, math.nan), "bytes of an element"),
        ((10**200, 10**200, 128), "check layers"),
    ],
)
def test_a_token_of_no_model_is_refused(given: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kv_bytes_per_token(*given)


def test_bytes_buy_whole_tokens() -> None:
    assert tokens(147_456 * 3, 147_456) == 3
    assert tokens(147_456 * 3 - 1, 147_456) == 2
    assert tokens(0, 147_456) == 0


@pytest.mark.parametrize("given", [(-1, 1.0), (math.nan, 1.0), (1, 0), (1, 1e-300), (1, "2"), (10**400, 1)])
def test_no_bytes_buy_no_tokens(given: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a number from"):
        tokens(*given)


# -- whether a larger batch is worth it ------------------------------------------------------------------------------


def test_a_larger_batch_can_lose() -> None:
    """80 requests at 10 ms against 100 at 14."""
    found = compare_steps(before=(80, 10e-3), after=(100, 14e-3))
    assert found.before_tokens_per_second == pytest.approx(8000)
    assert found.after_tokens_per_second == pytest.approx(7142.857, abs=1e-3)
    assert found.worth_it is False
    assert str(found).splitlines() == [
        "before  80 x 10 ms = 8,000 token/s",
        "after   100 x 14 ms = 7,143 token/s",
        "not worth it: 10.7 % less throughput; each request waits 14 ms for a token instead of 10",
    ]


def test_a_larger_batch_can_win() -> None:
    found = compare_steps((80, 10e-3), (100, 11e-3))
    assert found.worth_it is True
    assert "worth it: 13.6 % more throughput" in str(found)


def test_a_gain_below_the_threshold_is_none() -> None:
    """80 to 81 requests at the same time are 1.25 % more."""
    assert compare_steps((80, 10e-3), (81, 10e-3)).worth_it is False
    assert compare_steps((80, 10e-3), (81, 10e-3), threshold=0.01).worth_it is True


def test_a_load_that_never_fills_the_pool_buys_nothing() -> None:
    """20 concurrent requests against room for 120, however much faster a larger batch would be."""
    found = compare_steps((80, 10e-3), (160, 10e-3), concurrent=20, room=120)
    assert (found.gain, found.worth_it, found.filled) == (pytest.approx(1.0), False, False)
    assert str(found).endswith("room for 120: the pool never fills, so saved memory buys nothing")


def test_a_load_that_fills_the_pool_lets_the_throughput_decide() -> None:
    better, worse = (compare_steps((80, 1e-2), after, concurrent=200, room=120) for after in ((160, 1e-2), (100, 2e-2)))
    assert (better.worth_it, worse.worth_it) == (True, False)
    assert "80 of them wait" in str(better)


def test_a_load_as_large_as_the_room_fits() -> None:
    assert [fills(n, 120) for n in (20, 120, 121)] == [False, False, True]
    assert "never fills" in load_line(120, 120)


def test_json_has_what_is_printed() -> None:
    told = json.loads(json.dumps(compare_steps((80, 10e-3), (100, 14e-3)).as_dict()))
    assert (told["worth_it"], round(told["after_tokens_per_second"])) == (False, 7143)
    assert told["gain"] == pytest.approx(-0.10714, abs=1e-5)


@settings(deadline=None)
@given(st.integers(1, 5000), st.floats(1e-4, 10), st.integers(1, 5000), st.floats(1e-4, 10))
def test_swapping_both_sides_turns_the_answer(batch: int, time: float, other: int, later: float) -> None:
    """What is worth a change in one direction is not in the other."""
    there, back = compare_steps((batch, time), (other, later)), compare_steps((other, later), (batch, time))
    assert not (there.worth_it and back.worth_it)
    assert (1 + there.gain) * (1 + back.gain) == pytest.approx(1)


@pytest.mark.parametrize(
    ("given", "more", "says"),
    [
        (((80, 10e-3), 100), {}, r"after must be \(batch, seconds of a step\), got 100"),
        (((80,), (100, 1e-2)), {}, "before must be"),
        (((0, 1e-2), (100, 1e-2)), {}, "batch of before must be at least 1"),
        (((80, 0), (100, 1e-2)), {}, "before must have the seconds of a step, got 0"),
        (((80, 1e-2), (100, -1)), {}, "after must have the seconds"),
        (((80, 1e-2), (100, math.nan)), {}, "after must have the seconds"),
        (((80, 1e-2), (100, "14ms")), {}, "after must have the seconds"),
        (((80, 1e-300), (100, 1e-2)), {}, "before must have the seconds"),
        (((10**400, 1e-2), (100, 1e-2)), {}, "batch of before is above"),
        (((80, 1e-2), (100, 1e-2)), {"concurrent": 20}, "concurrent and room"),
        (((80, 1e-2), (100, 1e-2)), {"room": 20}, "concurrent and room"),
        (((80, 1e-2), (100, 1e-2)), {"concurrent": -1, "room": 20}, "concurrent must be at least 0"),
        (((80, 1e-2), (100, 1e-2)), {"concurrent": 1, "room": 2.5}, "room must be a whole number"),
        (((80, 1e-2), (100, 1e-2)), {"threshold": 2}, "threshold must be a share"),
    ],
)
def test_what_is_no_step_is_refused(given: tuple[Any, Any], more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compare_steps(*given, **more)


# -- the bill --------------------------------------------------------------------------------------------------------

GROWN = {1: 2 * MIB, 8: 4 * MIB, 16: 100 * MIB}


def test_the_bill_adds_up_with_what_the_driver_takes() -> None:
    bill = Bill(GROWN, residual=30 * MIB)
    assert (bill.pool, bill.total) == (106 * MIB, 136 * MIB)


def test_one_more_bucket_costs_what_the_smaller_ones_did() -> None:
    """The largest filled the pool; the driver takes its part for each."""
    assert Bill(GROWN).one_more == 3 * MIB
    assert Bill(GROWN, residual=30 * MIB).one_more == 13 * MIB
    assert Bill({16: 100 * MIB}).one_more == 100 * MIB
    assert Bill().one_more is None


def test_a_pool_that_shrank_costs_nothing() -> None:
    bill = Bill({1: -5 * MIB, 2: 3 * MIB}, residual=-MIB)
    assert (bill.pool, bill.total, bill.one_more) == (0, 0, 0)


def test_the_bill_is_told_in_tokens_beside_what_the_engine_reports() -> None:
    bill = Bill(GROWN, 30 * MIB, kv_bytes_per_token(36, 8, 128), 96_700)
    assert bill.tokens == 136 * MIB // 147_456 == 967
    assert str(bill).splitlines() == [
        "pool: 106.0 MiB (by bucket 1: 2.0 MiB, 8: 4.0 MiB, 16: 100.0 MiB)",
        "driver: 30.0 MiB beside the pool",
        "one more bucket below the largest: about 13.0 MiB",
        "136.0 MiB would hold 967 tokens of KV cache, 147,456 bytes each; the engine reports room for 96,700 tokens: "
        "1 % more",
    ]


def test_what_is_not_known_is_not_told() -> None:
    assert str(Bill()) == "pool: not measured"
    assert Bill(GROWN).tokens is None
    assert "KV cache" not in str(Bill(GROWN))
    assert str(Bill(GROWN, kv_capacity=5)).endswith("the engine reports room for 5 tokens")
    assert Bill(GROWN, kv_token_bytes=1e5, kv_capacity=0).tokens == 1111


def test_an_account_has_the_bill_of_its_steps() -> None:
    steps = (Step(1, pool_bytes=2 * MIB), Step(2), Step(16, pool_bytes=100 * MIB))
    found = Account("m", "NVIDIA H200", steps, residual_bytes=4 * MIB, kv_token_bytes=147_456.0, kv_capacity=1000)
    assert found.bill == Bill({1: 2 * MIB, 16: 100 * MIB}, 4 * MIB, 147_456.0, 1000)
    assert "106.0 MiB would hold 753 tokens of KV cache" in str(found)


def test_sizes_are_told_in_mib_and_large_ones_in_gib() -> None:
    assert [mib(n) for n in (1.5 * MIB, -MIB, 20 * 2**30)] == ["1.5 MiB", "-1.0 MiB", "20.00 GiB"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"grown": {0: 1}}, "a bucket of the bill must be at least 1"),
        ({"grown": {1: math.nan}}, "bytes of bucket 1 must be a number"),
        ({"grown": {1: None}}, "bytes of bucket 1"),
        ({"residual": math.inf}, "residual"),
        ({"kv_token_bytes": 0}, "kv_token_bytes must be a number from 1 on"),
        ({"kv_capacity": 1.5}, "kv_capacity must be a whole number"),
    ],
)
def test_a_bill_of_no_figures_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Bill(**given)


def test_a_batch_that_the_load_never_has_is_no_gain() -> None:
    """81 requests at a time fill room for 80, and a batch of 100 never comes."""
    found = compare_steps((80, 10e-3), (100, 11e-3), concurrent=81, room=80)
    assert not found.worth_it
    assert "a batch of 100 never occurs: there are 81 requests at a time" in str(found)
    assert compare_steps((80, 10e-3), (100, 11e-3), concurrent=120, room=80).worth_it


def test_a_faster_step_of_the_same_batch_needs_no_room() -> None:
    found = compare_steps((80, 10e-3), (80, 8e-3), concurrent=20, room=120)
    assert found.worth_it
    assert "buys nothing" not in str(found)
