from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from graphprobe.errors import ConfigError
from graphprobe.graphed import capture
from graphprobe.options import Options


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def forward(x: Any, cache: Any = None, *, scale: float = 1.0) -> Any:
    return x


def test_normal_form() -> None:
    """What was written loosely is held strictly: buckets ascend, a lone name is a set, sizes are whole numbers."""
    options = Options([4, 1, 2], static="cache", capture_phases="verify", generators=[1])
    assert [1, 2, 4] == list(options.buckets)
    assert frozenset({"cache"}) == options.static
    assert ("verify",) == options.capture_phases
    assert (1,) == options.generators


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"buckets": []}, "buckets is empty"),
        ({"buckets": [1, 1]}, "duplicates [1]"),
        ({"buckets": [0]}, "at least 1, got 0"),
        ({"buckets": [1.5]}, "whole number, got 1.5"),
        ({"max_batch": 0}, "max_batch must be at least 1, got 0"),
        ({"unit": "bytes"}, "unit must be one of rows, tokens, requests, got 'bytes'"),
        ({"tokens_per_request": 0}, "tokens_per_request must be at least 1"),
        ({"phase": "decoding"}, "phase must be one of decode"),
        ({"backend": "tpu"}, "backend must be one of auto"),
        ({"outputs": "copy"}, "outputs must be one of clone, alias, got 'copy'"),
        ({"eager_first": -1}, "eager_first must be at least 0, got -1"),
        ({"max_graphs": 0}, "max_graphs must be at least 1, got 0"),
        ({"timing": True}, "timing must be a whole number, got True"),
        ({"verify": -1}, "verify must be at least 0, got -1"),
        ({"static": [3]}, "static holds 3, which is no name"),
        ({"batch": 3}, "batch must be an argument's name"),
        ({"batch": ("x", -1)}, "the dimension of batch must be at least 0"),
        ({"batch_dims": {"x": "first"}}, "batch_dims['x'] must be a whole number"),
        ({"narrow": {"x": 1}}, "narrow['x'] must be (dim, fill), got 1"),
        ({"pad": "last"}, "pad must be None, 'repeat', 'zeros' or a dict"),
        ({"pad": {"x": "last"}}, "pad['x'] must be a number"),
        ({"pad": {"x": True}}, "pad['x'] must be a number"),
        ({"pad": {"cache": 0}, "static": "cache"}, "pad names 'cache', which is static"),
        ({"state": "twice"}, "state must be 'rewrites'"),
    ],
)
def test_refusals(keywords: dict[str, Any], words: str) -> None:
    """A keyword outside the contract is refused with its name and value."""
    assert words in refusal(lambda: Options(**{"buckets": [1], **keywords}))


@pytest.mark.parametrize("keyword", ["static", "batch", "pad", "narrow", "batch_dims"])
def test_unknown_argument_names(keyword: str) -> None:
    """A keyword that names no argument of the forward is refused with the names that there are."""
    values = {"static": "kv", "batch": "kv", "pad": {"kv": 0}, "narrow": {"kv": (0, 0)}, "batch_dims": {"kv": 1}}
    text = refusal(lambda: capture(forward, buckets=[1], backend="recorder", **{keyword: values[keyword]}))
    assert f"{keyword} names 'kv', which is no argument of forward" in text
    assert "x, cache, scale" in text


def test_names_inside_arguments() -> None:
    """A path is known by its first part, any name passes where the forward takes ``**kwargs``, context is a root."""

    def opened(x: Any, **more: Any) -> Any:
        return x

    Options([1], pad={"x.ids": 0, "x[0]": 0}).check_names(_parameters(forward), "forward")
    Options([1], pad={"anything": 0}).check_names(_parameters(opened), "opened")
    Options([1], pad={"context.slots": 0}, context=dict).check_names(_parameters(forward), "forward")
    text = refusal(lambda: Options([1], pad={"context.slots": 0}).check_names(_parameters(forward), "forward"))
    assert "names 'context.slots'" in text


def test_a_forward_without_arguments() -> None:
    """A forward that takes nothing gives no size to choose a bucket by, unless context= does."""
    assert "takes no argument" in refusal(lambda: Options([1]).check_names([], "step"))
    Options([1], context=dict).check_names([], "step")


def test_capture_names_a_keyword_that_does_not_exist() -> None:
    """A misspelt keyword is named; buckets are asked for."""
    assert "capture has no keyword 'bucket_list'" in refusal(lambda: capture(forward, buckets=[1], bucket_list=[2]))
    assert "capture needs buckets" in refusal(lambda: capture(forward))


def test_fill_rules() -> None:
    """One word is the rule of every argument, a dict has the rule of some, None is exact match only."""
    assert ("repeat", True) == (Options([1], pad="repeat").fill("x"), Options([1], pad="repeat").padded)
    assert (7, None) == (Options([1], pad={"x": 7}).fill("x"), Options([1], pad={"x": 7}).fill("y"))
    assert (None, False) == (Options([1]).fill("x"), Options([1]).padded)


def test_rows_per_unit() -> None:
    """Buckets in requests stand for several rows each; in rows and in tokens for one."""
    assert 4 == Options([1], unit="requests", tokens_per_request=4).rows_per_unit
    assert 1 == Options([1], unit="tokens", tokens_per_request=4).rows_per_unit


def _parameters(function: Callable[..., Any]) -> list[Any]:
    import inspect

    return list(inspect.signature(function).parameters.values())
