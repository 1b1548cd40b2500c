"""What engines make of sizes, held against what their own code does, and the lines to paste, read back."""

from __future__ import annotations

import json
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from graphprobe.buckets import decode_buckets
from graphprobe.errors import ConfigError
from graphprobe.tools.engines import ENGINE, ENGINES, defaults, rule
from graphprobe.tools.paste import line

lists = st.lists(st.integers(1, 200), min_size=1, max_size=12, unique=True)
engines = st.sampled_from(ENGINES)


# -- default lists ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "requests", "spec", "expected"),
    [
        ("vllm", 256, 0, (1, 2, 4, *range(8, 257, 8))),
        ("vllm", 512, 0, (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))),
        ("vllm", 3, 0, (1, 2, 3)),
        ("vllm", 8, 3, (4, 8, 16, 24, 32)),
        ("vllm", 6, 6, (7, 14, 21, 28, 35, 42)),
        ("sglang", 256, 0, (1, 2, 4, 8, 12, *range(16, 257, 8))),
        ("sglang", 20, 0, (1, 2, 4, 8, 12, 16, 20)),
        ("sglang", 64, 3, (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4))),
        ("tensorrt-llm", 100, 0, (*range(1, 33), 64)),
        ("tensorrt-llm", 1000, 0, (*range(1, 33), 64, 128)),
        ("lmdeploy", 100, 0, (1, 2, 4, 8, 16, 32, 64, 100)),
        ("lmdeploy", 1000, 3, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1000)),
    ],
)
def test_default_list(engine: str, requests: int, spec: int, expected: tuple[int, ...]) -> None:
    """Told nothing, each engine captures the list that its own code makes in the release that was read."""
    assert expected == defaults(engine, requests, spec_tokens=spec)


def test_numbers_of_default_graphs() -> None:
    """Up to 256 requests vLLM captures 35 decode graphs and SGLang 36."""
    assert (35, 36) == (len(defaults("vllm", 256)), len(defaults("sglang", 256)))


def test_a_maximum_off_the_stride_is_captured() -> None:
    """With 100 requests vLLM ends its list at 100, not at 96 (vllm-project/vllm#57355)."""
    assert (88, 96, 100) == defaults("vllm", 100)[-3:]


@pytest.mark.parametrize(
    ("engine", "requests", "spec", "largest"),
    [("vllm", 1024, 0, 512), ("vllm", 256, 3, 512), ("sglang", 512, 0, 256), ("tensorrt-llm", 512, 0, 128)],
)
def test_own_lists_end_at_a_ceiling(engine: str, requests: int, spec: int, largest: int) -> None:
    """More requests than an engine's ceiling do not make it capture more."""
    assert largest == defaults(engine, requests, spec_tokens=spec)[-1]


@given(st.integers(1, 600), st.integers(0, 7))
def test_graphprobe_has_no_list_of_its_own(requests: int, spec: int) -> None:
    """For a decorated forward the default is what ``decode_buckets`` makes."""
    assert tuple(decode_buckets(requests, spec)) == defaults("graphprobe", requests, spec_tokens=spec)


@given(engines, st.integers(1, 600), st.integers(0, 7))
def test_default_lists_obey_the_rule(engine: str, requests: int, spec: int) -> None:
    """Each default size is allowed, and the engine would take the list as it is."""
    found = defaults(engine, requests, spec_tokens=spec)
    own = rule(engine, spec_tokens=spec)
    assert found == own.resolve(found)
    assert all(own.allows(n) for n in found)


# -- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "largest", "given_", "expected"),
    [
        (3, None, [1, 2, 4, 8, 16], (4, 8, 16)),
        (3, None, [1, 2], ()),
        (3, None, [79], ()),
        (6, 42, [1, 2, 4, 8, 16, 24, 32, 40], (7, 14, 21, 28, 35)),
        (6, 42, [1, 2, 4, 8, 16, 24, 32, 40, 42], (7, 14, 21, 28, 35, 42)),
        (0, 100, [1, 96, 104], (1, 96)),
        (0, None, [5, 3, 1], (1, 3, 5)),
    ],
)
def test_vllm_rounds_to_whole_requests(spec: int, largest: int | None, given_: list[int], expected: Any) -> None:
    """vLLM rounds each size up to whole requests, and loses those that this lifts above the largest of the list."""
    assert expected == rule("vllm", spec_tokens=spec, largest=largest).resolve(given_)


@pytest.mark.parametrize(
    ("engine", "pad", "expected"),
    [
        ("vllm", None, (1, 8)),
        ("sglang", None, (1, 8, 20)),
        ("sglang", False, (1, 8, 20)),
        ("tensorrt-llm", None, (1, 8)),
        ("tensorrt-llm", True, (1, 8, 20)),
        ("lmdeploy", None, (1, 8, 20)),
        ("graphprobe", None, (1, 8)),
    ],
)
def test_sizes_above_the_limit(engine: str, pad: bool | None, expected: tuple[int, ...]) -> None:
    """Sizes above the limit of 20 are lost; SGLang, LMDeploy and a padding TensorRT-LLM capture the limit instead."""
    assert expected == rule(engine, pad=pad, largest=20).resolve([32, 8, 64, 1])


def test_lmdeploy_captures_its_limit_always() -> None:
    """LMDeploy adds its largest batch to any list, except to one without a size up to it, which it refuses."""
    assert (2, 20) == rule("lmdeploy", largest=20).resolve([2])
    assert () == rule("lmdeploy", largest=20).resolve([32])
    assert (2, 16) == rule("sglang", largest=20).resolve([2, 16])


@pytest.mark.parametrize(
    ("engine", "spec", "expected"),
    [
        ("vllm", 0, (8, 16)),
        ("vllm", 1, (8, 16)),
        ("sglang", 0, (8, 16)),
        ("sglang", 3, (2, 4, 6, 8, 16)),
        ("tensorrt-llm", 0, (1, 2, 4, 6, 8, 16)),
        ("lmdeploy", 0, (1, 2, 4, 6, 8, 16)),
    ],
)
def test_sizes_that_ranks_do_not_divide(engine: str, spec: int, expected: tuple[int, ...]) -> None:
    """Where eight ranks share the rows of a step, vLLM and SGLang drop sizes whose rows they do not divide."""
    assert expected == rule(engine, spec_tokens=spec, tensor_parallel=8).resolve([1, 2, 4, 6, 8, 16])


def test_sglang_lifts_its_limit_to_what_ranks_divide() -> None:
    """20 requests on 8 ranks are padded to 24, so that all of them have a graph."""
    assert (8, 24) == rule("sglang", tensor_parallel=8, largest=20).resolve([8, 64])


def test_both_restrictions() -> None:
    """Whole requests of three tokens on four ranks: multiples of twelve, each restriction with its sentence."""
    both = rule("vllm", spec_tokens=2, tensor_parallel=4, largest=36)
    assert (12, 24, 36, None) == tuple(both.ceil(n) for n in (1, 13, 25, 37))
    assert ["3 tokens", "4 ranks", "36 tokens"] == [
        part for part, text in zip(("3 tokens", "4 ranks", "36 tokens"), both.why, strict=True) if part in text
    ]


@given(engines, st.integers(0, 7), st.integers(1, 8), st.none() | st.integers(1, 300), st.integers(0, 320))
def test_ceil(engine: str, spec: int, ranks: int, largest: int | None, size: int) -> None:
    """``ceil`` is the smallest allowed size that a search finds, None where there is none."""
    own = rule(engine, spec_tokens=spec, tensor_parallel=ranks, largest=largest)
    found = next((n for n in range(max(1, size), 500) if own.allows(n)), None)
    assert found == own.ceil(size)


@given(engines, st.integers(0, 7), st.integers(1, 300), lists)
def test_resolved_lists(engine: str, spec: int, largest: int, sizes: list[int]) -> None:
    """What an engine makes of a list is ascending, allowed, and stays as it is when given again."""
    own = rule(engine, spec_tokens=spec, largest=largest)
    found = own.resolve(sizes)
    assert list(found) == sorted(set(found))
    assert all(own.allows(n) for n in found)
    assert found == own.resolve(found)


@given(st.integers(0, 7), st.integers(1, 8), lists)
def test_asked_for_is_captured(spec: int, ranks: int, sizes: list[int]) -> None:
    """Allowed sizes are captured as they were asked for, in every engine."""
    for engine in ENGINES:
        own = rule(engine, spec_tokens=spec, tensor_parallel=ranks)
        allowed = tuple(sorted(n for n in sizes if own.allows(n)))
        assert allowed == own.resolve(allowed)


def test_multiples() -> None:
    """Only vLLM counts tokens, so only there does the width of a request restrict sizes."""
    assert {"vllm": 4} == {n: m for n in ENGINES if (m := rule(n, spec_tokens=3).multiple) > 1}
    ranks = {engine: rule(engine, spec_tokens=11, tensor_parallel=8).multiple for engine in ENGINES}
    assert {"graphprobe": 1, "vllm": 24, "sglang": 2, "tensorrt-llm": 1, "lmdeploy": 1} == ranks


def test_padding() -> None:
    """Told nothing, graphprobe and TensorRT-LLM serve exact sizes only; the others pad."""
    assert {"graphprobe", "tensorrt-llm"} == {engine for engine in ENGINES if not rule(engine).pads}
    assert rule("tensorrt-llm", pad=True).pads
    assert not rule("sglang", pad=False).pads


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"engine": "vLLM"}, "'vLLM'.*graphprobe, vllm, sglang, tensorrt-llm, lmdeploy"),
        ({"engine": None}, "None"),
        ({"engine": ["vllm"]}, "vllm"),
        ({"engine": "vllm", "pad": False}, "vllm always pads"),
        ({"engine": "lmdeploy", "pad": False}, "lmdeploy always pads"),
        ({"engine": "sglang", "pad": "repeat"}, "pad must be"),
        ({"engine": "vllm", "spec_tokens": -1}, "spec_tokens"),
        ({"engine": "vllm", "spec_tokens": 1.5}, "spec_tokens"),
        ({"engine": "lmdeploy", "tensor_parallel": 0}, "tensor_parallel"),
        ({"engine": "vllm", "largest": 0}, "largest"),
    ],
)
def test_rule_refused(arguments: dict[str, Any], named: str) -> None:
    """What is no engine, or what it cannot be told, is refused with the value at fault."""
    with pytest.raises(ConfigError, match=named):
        rule(**arguments)


@pytest.mark.parametrize("sizes", [[0], [-4, 8], [2.0], [True], ["8"]])
def test_resolve_refused(sizes: list[Any]) -> None:
    """A list of anything but sizes is refused."""
    with pytest.raises(ConfigError, match="a size must be"):
        rule("vllm").resolve(sizes)


# -- lines -----------------------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """The words of a shell line, its comments left out."""
    return shlex.split(text, comments=True)


def numbers(flag: str) -> Callable[[str], list[int]]:
    def read(text: str) -> list[int]:
        after = words(text)[words(text).index(flag) + 1 :]
        return [int(word) for word in after[: next((i for i, w in enumerate(after) if w[0] == "-"), len(after))]]

    return read


READ: dict[str, Callable[[str], list[int]]] = {
    "vllm": lambda text: json.loads(words(text)[1])["cudagraph_capture_sizes"],
    "sglang": numbers("--cuda-graph-bs-decode"),
    "tensorrt-llm": lambda text: yaml.safe_load(text)["cuda_graph_config"]["batch_sizes"],
    "lmdeploy": numbers("--cudagraph-capture-batch-sizes"),
}


@pytest.mark.parametrize("engine", sorted(READ))
@given(lists)
def test_line_holds_the_list(engine: str, sizes: list[int]) -> None:
    """A shell, a JSON or a YAML parser reads the list back from the line, ascending; the rest of it is comments."""
    text = line(engine, sizes)
    assert sorted(sizes) == READ[engine](text)
    assert all(rest.startswith("#") for rest in text.splitlines()[1:])
    assert text.isascii()


def test_padding_in_lines() -> None:
    """Where padding can be chosen the line says so."""
    assert "--disable-cuda-graph-padding" in words(line("sglang", [1, 2], pad=False))
    assert "--disable-cuda-graph-padding" not in line("sglang", [1, 2])
    for pad in (True, False):
        assert pad is yaml.safe_load(line("tensorrt-llm", [1, 2], pad=pad))["cuda_graph_config"]["enable_padding"]
    with pytest.raises(ConfigError, match="always pads"):
        line("vllm", [1, 2], pad=False)


def test_older_spellings_are_named() -> None:
    """The line is the newest spelling; an older one is in the comment, complete."""
    comment = line("sglang", [1, 2], pad=False).splitlines()[1]
    assert "--cuda-graph-bs 1 2 --disable-cuda-graph-padding" in comment
    assert "--extra_llm_api_options" in line("tensorrt-llm", [1]).splitlines()[1]
    assert "TurboMind" in line("lmdeploy", [1]).splitlines()[1]


def test_lmdeploy_is_told_its_largest_batch() -> None:
    """LMDeploy captures its largest batch whatever the list, so the line sets it where it is known."""
    assert [8] == numbers("--max-batch-size")(line("lmdeploy", [1, 4], max_batch=8))
    assert "pytorch" in words(line("lmdeploy", [1, 4]))
    assert "--max-batch-size" not in words(line("lmdeploy", [1, 4]))


@pytest.mark.parametrize(
    "name", ["", "decode", 'it\'s "a" \\name\n', "d\N{LATIN SMALL LETTER E WITH ACUTE}code \U0001f600"]
)
@pytest.mark.parametrize("pad", [True, False])
def test_decorator_line(name: str, pad: bool, own_forwards: None, tmp_path: Path) -> None:
    """Above a function the line is a decorator that the package takes, with these buckets and this name."""
    text = line("graphprobe", [4, 1, 2], max_batch=4, pad=pad, name=name)
    source = tmp_path / "engine.py"
    source.write_text(f"import graphprobe\n{text}\ndef step(x):\n    return x\n", encoding="utf-8")
    found = runpy.run_path(str(source))["step"].snapshot()
    assert ((1, 2, 4), name or "step") == (found.buckets, found.name)
    assert pad == ('pad="repeat"' in text)


def test_many_buckets_raise_the_limit_of_graphs() -> None:
    """The decorator keeps 64 graphs by default, so a longer list brings its own limit."""
    assert "max_graphs" not in line("graphprobe", range(1, 65))
    assert "max_graphs=65" in line("graphprobe", range(1, 66))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("vllm", []), "empty"),
        (("vllm", [1, 1]), "duplicates"),
        (("vllm", [0, 1]), "got 0"),
        (("nano", [1]), "unknown engine 'nano'"),
    ],
)
def test_line_refused(arguments: tuple[str, list[int]], named: str) -> None:
    """No line is printed for a list that cannot be captured, nor for an engine that is not known."""
    with pytest.raises(ConfigError, match=named):
        line(*arguments)
    with pytest.raises(ConfigError, match="max_batch"):
        line("lmdeploy", [1], max_batch=0)


def test_each_fact_has_its_release() -> None:
    """Each row says in which release it was read."""
    assert ["graphprobe"] == [engine for engine, facts in ENGINE.items() if not facts.read]
