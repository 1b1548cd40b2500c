"""Which decode steps have a graph, before any traffic."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphprobe.buckets import MAX_BUCKETS, coverage
from graphprobe.errors import ConfigError
from graphprobe.tools.engines import ENGINES, defaults, rule
from graphprobe.tools.speculative import SPANS, check, spans

lists = st.lists(st.integers(1, 200), min_size=1, max_size=12, unique=True)
engines = st.sampled_from(ENGINES)


def warned(found: Any) -> str:
    """All warnings as one text."""
    return "\n".join(found.warnings)


# -- known cases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "pad"), [("vllm", None), ("graphprobe", True)])
def test_a_list_that_counts_requests(engine: str, pad: bool | None) -> None:
    """Sizes up to 16 with 8 requests and 3 speculative tokens: 5 to 8 requests, 20 to 32 tokens, have no graph."""
    found = check([1, 2, 4, 8, 16], 8, 3, engine, pad)
    assert (20, 24, 28, 32) == found.uncovered
    assert (4, 8, 12, 16, 20, 24, 28, 32) == found.needed
    assert 32 == found.largest_needed
    assert not found.ok
    assert "5 to 8 requests (20 to 32 by 4 " in warned(found)
    assert (4, 8, 16, 24, 32) == found.proposal


def test_vllm_rounds_the_list() -> None:
    """Of [1, 2, 4, 8, 16] vLLM makes 4, 8 and 16 with three speculative tokens, so no entry is idle."""
    found = check([1, 2, 4, 8, 16], 8, 3, "vllm")
    assert ((4, 8, 16), ()) == (found.captured, found.never_hit)
    assert {1: 4, 2: 4, 4: 4, 8: 8, 16: 16} == found.made
    assert "captured: 4, 8, 16\nof the list: 1, 2 rounded up to 4\n" in str(found)


def test_where_the_sizes_of_a_list_went() -> None:
    """Those that are dropped, and graphs that the engine makes beside the list; nothing where all stand as given."""
    assert "of the list" not in str(check([1, 2, 4], 4, pad=True))
    dropped = check([2, 8, 16], 8, engine="vllm", tensor_parallel=8)
    assert {2: None, 8: 8, 16: None} == dropped.made
    assert "of the list: no decode graph of 2, 16\n" in str(dropped)
    assert "of the list: no decode graph of 16, 32; 8 captured beside it" in str(check([2, 16, 32], 8, 0, "sglang"))


def test_what_is_to_be_pasted_is_no_warning() -> None:
    """The line that captures what is missing has words of its own; where no list captures all, they say so."""
    found = check([1, 2, 4, 8, 16], 8, 3, "vllm")
    assert f"\ncaptures them: {found.line}" in str(found)
    assert "cudagraph_capture_sizes" not in warned(found)
    partly = check([1, 2, 4, 8], 100, engine="vllm", tensor_parallel=8)
    assert f"\ncaptures the others: {partly.line}" in str(partly)
    assert "captures" not in str(check([4], 4, pad=True))


def test_a_decorated_forward_takes_the_list_as_it_is() -> None:
    """A decorated forward captures 1 and 2 too, which no step of whole requests ever hits; exactly, 12 has no graph."""
    found = check([1, 2, 4, 8, 16], 8, 3)
    assert ((1, 2, 4, 8, 16), (1, 2)) == (found.captured, found.never_hit)
    assert (12, 20, 24, 28, 32) == found.uncovered
    assert "1, 2 can never be hit" in warned(found)
    assert (4, 8, 12, 16, 20, 24, 28, 32) == found.proposal
    assert (1, 2) == check([1, 2, 4, 8, 16], 8, 3, pad=True).never_hit


def test_a_maximum_that_vllm_cuts() -> None:
    """A maximum of 42 is cut to 40, so 6 requests with 6 speculative tokens run eagerly (vllm-project/vllm#54933)."""
    found = check([1, 2, 4, 8, 16, 24, 32, 40], 6, 6, "vllm", largest=42)
    assert ((7, 14, 21, 28, 35), (42,)) == (found.captured, found.uncovered)
    assert "max_cudagraph_capture_size 42 is not the largest size 40" in warned(found)
    assert "6 requests (42 tokens) run eagerly" in warned(found)
    assert (7, 14, 21, 28, 35, 42) == found.proposal
    assert check([*range(8, 41, 8), 42], 6, 6, "vllm").ok


def test_a_list_of_which_nothing_is_left() -> None:
    """Sizes 1 and 2 with requests of four tokens: vLLM captures nothing, and one of its runners refuses to start."""
    found = check([1, 2], 8, 3, "vllm")
    assert ((), (1, 2), found.needed) == (found.captured, found.never_hit, found.uncovered)
    assert "captures no decode graph of 1, 2 (vllm rounds sizes up to whole requests of 4 tokens" in warned(found)
    assert "V1" in warned(found)
    assert (4, 8, 12, 16, 24, 32) == found.proposal


def test_a_number_of_requests_off_the_stride() -> None:
    """100 requests and vLLM 0.26's list: 97 to 100 have no decode graph, but a piecewise one (vllm#57355)."""
    old = [1, 2, 4, *range(8, 201, 8)]
    found = check(old, 100, engine="vllm")
    assert (97, 98, 99, 100) == found.uncovered
    assert "97 to 100 requests run piecewise at best" in warned(found)
    assert (*old[: old.index(104)], 100) == found.proposal
    assert tuple(range(104, 201, 8)) == found.never_hit
    assert check(defaults("vllm", 100), 100, engine="vllm").ok


def test_sizes_for_prefill_stay_in_the_line() -> None:
    """vLLM's list serves prefill too, so what is pasted keeps the sizes above the largest decode step."""
    assert "96, 100, 104, 112]" in check([96, 104, 112], 100, engine="vllm").line


def test_two_limits_that_disagree() -> None:
    """vLLM refuses to start with a list that ends at 16 and a maximum of 32 or 8, even where all steps would fit."""
    for largest in (32, 8):
        found = check([1, 2, 4, 8, 16], 4, engine="vllm", largest=largest)
        assert (False, False, ()) == (found.ok, found.starts, found.uncovered)
        assert "refuses to start" in warned(found)
    assert check([1, 2, 4, 8, 16], 4, engine="vllm", largest=16).ok


@pytest.mark.parametrize(("requests", "hole"), [(20, (17, 18, 19, 20)), (12, (9, 10, 11, 12)), (16, ())])
def test_the_hole_of_nano_vllm(requests: int, hole: tuple[int, ...]) -> None:
    """nano-vllm's list, 1, 2, 4, 8 and every 16, leaves the sizes above its last step; they end its server."""
    found = check([1, 2, 4, 8, *range(16, requests + 1, 16)], requests, pad=True)
    assert hole == found.uncovered
    assert found.ok is (not hole)
    assert requests == found.proposal[-1]


def test_sglang_counts_requests() -> None:
    """SGLang captures the width of a request apart: 8 requests need sizes up to 8, whatever they speculate."""
    found = check([1, 2, 4, 8], 8, 3, "sglang")
    assert found.ok
    assert (8, 8) == (found.largest_needed, len(found.needed))
    mixed_up = check([4, 8, 16, 32], 8, 3, "sglang")
    assert (16, 32) == mixed_up.never_hit
    assert "sizes are requests here, and the 1 + 3 tokens of each are captured apart" in warned(mixed_up)


@pytest.mark.parametrize("engine", ["sglang", "lmdeploy"])
def test_an_engine_that_captures_its_maximum(engine: str) -> None:
    """A list above all requests: SGLang captures the largest number of them instead, LMDeploy does not start."""
    found = check([16, 32], 8, engine=engine)
    assert ((8,), True) == (found.captured, found.ok) if engine == "sglang" else ((), False)
    assert (engine == "sglang") is found.starts
    assert found.starts or "refuses to start" in warned(found)


def test_tensorrt_llm_is_exact_when_told_nothing() -> None:
    """TensorRT-LLM's own list leaves 33 to 63 eager until padding is switched on."""
    own = defaults("tensorrt-llm", 64)
    found = check(own, 64, engine="tensorrt-llm")
    assert tuple(range(33, 64)) == found.uncovered
    assert "with padding 12 cover all" in warned(found)
    assert check(own, 64, engine="tensorrt-llm", pad=True).ok


def test_ranks_that_do_not_divide_the_maximum() -> None:
    """8 ranks and 100 requests in vLLM: no list covers 97 to 100, and the proposal covers all others."""
    found = check([1, 2, 4, 8], 100, engine="vllm", tensor_parallel=8)
    assert ((8,), (1, 2, 4)) == (found.captured, found.never_hit)
    assert "no list covers 97 to 100: sequence parallelism" in warned(found)
    assert (97, 98, 99, 100) == check(found.proposal, 100, engine="vllm", tensor_parallel=8).uncovered
    assert 88 == check([8], 90, engine="vllm", tensor_parallel=8).proposal[-1]
    nothing = check([8, 16], 4, engine="vllm", tensor_parallel=8)
    assert ((), "", False) == (nothing.proposal, nothing.line, nothing.ok)
    assert "no list covers 1 to 4" in str(nothing)


def test_a_limit_below_the_largest_step() -> None:
    """A limit set by hand is named with its number, and the proposal goes beyond it."""
    found = check([1, 2, 4, 8, 16], 16, engine="tensorrt-llm", pad=True, largest=8)
    assert tuple(range(9, 17)) == found.uncovered
    assert "the limit of 8 requests is below the largest step, 16" in warned(found)
    assert 16 == found.proposal[-1]


def test_more_sizes_than_there_may_be_buckets() -> None:
    """Exact dispatch of 2,000 requests would need more graphs than may be asked for: what is proposed pads."""
    found = check([1, 2, 5], 2000)
    assert (1, 2, 5) == found.proposal[:3]
    assert len(found.proposal) < MAX_BUCKETS < len(found.uncovered)
    assert 'pad="repeat"' in found.line
    assert check(found.proposal, 2000, pad=True).ok
    assert "no list covers" not in warned(found)


def test_a_bucket_far_too_large() -> None:
    """One bucket above all steps serves them padded; the proposal ends at the largest step."""
    found = check([64], 8, pad=True)
    assert (True, (8,)) == (found.ok, found.proposal)


# -- in general ------------------------------------------------------------------------------------------------------


@given(engines, st.integers(1, 80), st.integers(0, 5), lists, st.booleans())
def test_uncovered_and_never_hit(engine: str, requests: int, spec: int, sizes: list[int], pad: bool) -> None:
    """Every step is served by the smallest captured size that holds it (exactly: by its own) or is uncovered."""
    choice = pad if engine in ("graphprobe", "sglang", "tensorrt-llm") else None
    found = check(sizes, requests, spec, engine, choice)
    width = 1 + spec if engine in ("graphprobe", "vllm") else 1
    assert tuple(n * width for n in range(1, requests + 1)) == found.needed
    fits = (lambda n, b: n <= b) if found.rule.pads else (lambda n, b: n == b)
    served = {n: min((b for b in found.captured if fits(n, b)), default=None) for n in found.needed}
    assert tuple(n for n in found.needed if served[n] is None) == found.uncovered
    hit = set(served.values())
    assert all(n not in hit for n in found.never_hit)
    made = {n: n if engine != "vllm" else -(-n // width) * width for n in sizes}
    assert {n for n in sizes if made[n] not in hit} == set(found.never_hit)


@given(engines, st.integers(1, 80), st.integers(0, 5), lists, st.booleans())
def test_the_proposal_covers_all(engine: str, requests: int, spec: int, sizes: list[int], pad: bool) -> None:
    """What is proposed covers every step, is within the rule, has no idle size, and ends with the maximum."""
    choice = pad if engine in ("graphprobe", "sglang", "tensorrt-llm") else None
    proposal = check(sizes, requests, spec, engine, choice).proposal
    again = check(proposal, requests, spec, engine, choice)
    assert again.ok
    assert ((), ()) == (again.never_hit, again.warnings)
    assert proposal == again.captured == again.proposal
    assert again.largest_needed == proposal[-1]


@given(engines, st.integers(1, 80), st.integers(0, 5), lists, st.integers(1, 8), st.none() | st.integers(1, 300))
def test_what_is_said(engine: str, requests: int, spec: int, sizes: list[int], ranks: int, largest: int | None) -> None:
    """Whatever is checked is told in plain ASCII, each warning on one line, and nothing uncovered without one."""
    found = check(sizes, requests, spec, engine, tensor_parallel=ranks, largest=largest)
    assert str(found).isascii()
    assert all(text and "\n" not in text and text in str(found) for text in found.warnings)
    assert found.ok or found.warnings
    if found.uncovered and found.proposal:
        assert found.line.splitlines()[0] in str(found)
        assert str(found).endswith(found.line)


@given(lists, st.integers(1, 250), st.booleans())
def test_agrees_with_coverage(sizes: list[int], requests: int, pad: bool) -> None:
    """Without speculative tokens a decorated forward has the holes that ``coverage`` names."""
    assert coverage(sizes, requests, padded=pad) == check(sizes, requests, pad=pad).uncovered


def test_the_line_is_that_of_the_proposal() -> None:
    """The line to paste has the proposal's sizes."""
    found = check([1, 2], 8, 3, "sglang")
    assert ["--cuda-graph-bs-decode", *map(str, found.proposal)] == shlex.split(found.line, comments=True)
    assert "max_batch=32" in check([4], 8, 3, pad=True).line
    assert "max_batch" not in check([4], 8, 3).line


def test_largest_lists() -> None:
    """A million requests are checked as well."""
    found = check([1 << 20], 1 << 20, pad=True)
    assert (True, 1 << 20) == (found.ok, found.largest_needed)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([], 8), "empty"),
        (([1, 1], 8), "duplicates"),
        (([1], 0), "max_seqs"),
        (([1], True), "max_seqs"),
        (([1], 1 << 21), "max_batch"),
        (([1], 1 << 19, 3), "max_batch 2097152"),
        (([1], 8, -1), "spec_tokens"),
        (([1], 8, 0, "vllm", False), "always pads"),
        (([1], 8, 0, "exllama"), "unknown engine 'exllama'"),
        (([1], 8, 0, "vllm", None, 0), "tensor_parallel"),
        (([1], 8, 0, "vllm", None, 1, 0), "largest"),
        (([1], 8, 0, "vllm", None, 1, "8"), "largest"),
    ],
)
def test_refused(arguments: tuple[Any, ...], named: str) -> None:
    """Bad arguments are refused with the one at fault."""
    with pytest.raises(ConfigError, match=named):
        check(*arguments)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2], "1, 2"),
        ([1, 2, 3], "1 to 3"),
        ([1, 2, 4, 8, 16, 24], "1, 2, 4, 8 to 24 by 8"),
        ([4, 8, 12], "4 to 12 by 4"),
        ([1, 2, 3, 10, 20, 30, 99], "1 to 3, 10 to 30 by 10, 99"),
        ([n * n for n in range(1, 21)], f"{', '.join(str(n * n) for n in range(1, SPANS + 1))} and {20 - SPANS} more"),
    ],
)
def test_spans(sizes: list[int], text: str) -> None:
    """Runs are shortened, and of many runs the first are named."""
    assert text == spans(sizes)


def test_the_rule_is_the_engines() -> None:
    """What was found says by which rule, with the limit that all requests set."""
    assert rule("vllm", spec_tokens=3, largest=32) == check([4], 8, 3, "vllm").rule
