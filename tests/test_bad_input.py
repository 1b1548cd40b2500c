"""Bad input: each is a clear error where it was written, or an eager call with its reason; never a wrong answer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import graphprobe  # noqa: E402 - after the check that torch is there

Wrap = Callable[..., Any]


def double(x: Any) -> Any:
    return x * 2


def weighted(x: Any, weight: Any = None, *, scale: float = 1.0) -> Any:
    return x * scale if weight is None else x * weight


def rows(n: int, width: int = 3) -> Any:
    return torch.arange(n * width, dtype=torch.float32).view(n, width)


@pytest.fixture
def wrap(request: pytest.FixtureRequest) -> Wrap:
    """``capture`` on the recorder with buckets 1, 2, 4, under a name of this test alone."""

    def make(forward: Any, **options: Any) -> Any:
        options = {"buckets": [1, 2, 4], "backend": "recorder", "name": request.node.name, **options}
        return graphprobe.capture(forward, **options)

    return make


def refusal(wrap: Wrap, forward: Any = weighted, **options: Any) -> str:
    """The message of the ConfigError that these options meet at decoration."""
    with pytest.raises(graphprobe.ConfigError) as caught:
        wrap(forward, **options)
    return str(caught.value)


def reasons(forward: Any) -> dict[str, int]:
    """How often each path was taken: ``graph``, or the reason of an eager call."""
    counts: Counter[str] = Counter()
    for row in forward.snapshot().rows:
        counts["graph" if row.reason is None else str(row.reason)] += row.calls
    return dict(counts)


def serve(graphed: Any, plain: Any, *calls: tuple[Any, ...], **keywords: Any) -> None:
    """Each call gives what the plain forward gives."""
    with torch.no_grad():
        for args in calls:
            expected, actual = plain(*args, **keywords), graphed(*args, **keywords)
            assert (expected.dtype, expected.shape) == (actual.dtype, actual.shape)
            assert expected.is_meta or torch.equal(expected, actual)


def test_buckets_left_out(wrap: Wrap) -> None:
    """A capture without buckets says what to write."""
    with pytest.raises(graphprobe.ConfigError) as caught:
        graphprobe.capture(double)
    assert "capture needs buckets. hint: write @graphprobe.capture(buckets=[1, 2, 4, 8])" == str(caught.value)


def test_empty_buckets(wrap: Wrap) -> None:
    """An empty bucket list is refused with an example of a good one."""
    text = refusal(wrap, buckets=[])
    assert text.startswith("buckets is empty. hint: write at least one batch size")


def test_unsorted_buckets(wrap: Wrap) -> None:
    """An unsorted bucket list is the sorted one."""
    graphed = wrap(double, buckets=[4, 1, 2])
    serve(graphed, double, *[(rows(n),) for n in (4, 1, 2)] * 2)
    assert (1, 2, 4) == graphed.snapshot().buckets
    assert {"warmup": 3, "graph": 3} == reasons(graphed)


def test_duplicate_buckets(wrap: Wrap) -> None:
    """Duplicates are named with the list that has none."""
    assert "buckets has duplicates [2] in [2, 1, 2]. hint: write buckets=[1, 2]" == refusal(wrap, buckets=[2, 1, 2])


@pytest.mark.parametrize(
    ("bucket", "words"),
    [
        (0, "bucket must be at least 1, got 0"),
        (-4, "bucket must be at least 1, got -4"),
        (2.0, "bucket must be a whole number, got 2.0 (float)"),
        (True, "bucket must be a whole number, got True (bool)"),
        ("4", "bucket must be a whole number, got '4' (str)"),
        (None, "bucket must be a whole number, got None (NoneType)"),
        (1 << 40, "bucket 1099511627776 is above 1048576"),
    ],
)
def test_bucket_that_is_no_batch_size(wrap: Wrap, bucket: Any, words: str) -> None:
    """Zero, a negative number, a float, a bool, text and an absurdly large number are no buckets."""
    assert words in refusal(wrap, buckets=[1, bucket])


@pytest.mark.parametrize("buckets", [None, 4, "1,2"])
def test_buckets_that_are_no_list(wrap: Wrap, buckets: Any) -> None:
    """Something else than a list of sizes is shown back with an example."""
    text = refusal(wrap, buckets=buckets)
    assert f"buckets must be a list of batch sizes, got {buckets!r}. hint: write buckets=[1, 2, 4, 8]" == text


def endless() -> Iterator[int]:
    """1, 2, 3, ...; fails where the reader has not had enough long before."""
    for n in itertools.count(1):
        assert n < 100_000, "the list is read without end"
        yield n


@pytest.mark.parametrize(
    "buckets", [range(1, 1026), [1, 1, *range(1, 60_000)], endless()], ids=["1025", "twice", "endless"]
)
def test_huge_bucket_list(wrap: Wrap, buckets: Any) -> None:
    """More than 1,024 buckets are refused at once, however long the list is and whatever else is wrong with it."""
    assert "more than 1024" in refusal(wrap, buckets=buckets)


def test_a_thousand_buckets(wrap: Wrap) -> None:
    """A long list within the limit works, and the right bucket of it serves."""
    graphed = wrap(double, buckets=range(1, 1001))
    serve(graphed, double, *[(rows(777),)] * 3)
    assert {"warmup": 1, "graph": 2} == reasons(graphed)


def test_batch_names_no_argument(wrap: Wrap) -> None:
    """A ``batch`` that is no argument is refused with the arguments that there are."""
    text = refusal(wrap, batch="tokens")
    assert "batch names 'tokens', which is no argument of" in text
    assert "arguments: x, weight, scale" in text


@pytest.mark.parametrize("batch", [3, ["x", 0], ("x", 0, 0), ("x", -1), ("x", 0.0)])
def test_batch_of_another_form(wrap: Wrap, batch: Any) -> None:
    """A ``batch`` is a name, (name, dim) or a callable; the refusal shows the part that is wrong."""
    text = refusal(wrap, batch=batch)
    wrong = repr(batch[1]) if isinstance(batch, tuple) and len(batch) == 2 else repr(batch)
    assert "batch" in text
    assert f"got {wrong}" in text


def test_batch_names_a_number(wrap: Wrap) -> None:
    """Where the named argument is no tensor in a call, the call is eager and the cause names it."""

    def forward(x: Any, n: int) -> Any:
        return x * n

    graphed = wrap(forward, batch="n")
    serve(graphed, forward, *[(rows(2), 2)] * 3)
    assert {"signature": 3} == reasons(graphed)
    assert any("tensor" in cause for cause in graphed.snapshot().causes.values())


def test_static_name_that_does_not_exist(wrap: Wrap) -> None:
    """A ``static`` that is no argument is refused with the arguments that there are."""
    text = refusal(wrap, static=("kv_cache",))
    assert "static names 'kv_cache', which is no argument of" in text
    assert "arguments: x, weight, scale" in text


@pytest.mark.parametrize("path", ["weight", "weight.k", "weight[0]"])
def test_padding_of_a_static_argument(wrap: Wrap, path: str) -> None:
    """A static argument, or a part of it, is read where it is and cannot be padded."""
    text = refusal(wrap, static=("weight",), pad={path: 0})
    assert f"pad names {path!r}, which is static" in text


@pytest.mark.parametrize("pad", ["mirror", 0, True, ["x"], {"x": "mirror"}, {"x": None}, {"x": True}])
def test_unknown_padding(wrap: Wrap, pad: Any) -> None:
    """A fill that is none is refused with its value."""
    fill = pad["x"] if isinstance(pad, dict) else pad
    text = refusal(wrap, pad=pad)
    assert "pad" in text
    assert f"got {fill!r}" in text


def test_padding_that_does_not_fit_the_dtype(wrap: Wrap) -> None:
    """A pad number that the dtype cannot hold never raises in a call: it runs eagerly, and the cause says why."""
    graphed = wrap(double, pad={"x": float("nan")})
    ids = [torch.ones(n, 3, dtype=torch.int32) for n in (2, 2, 4, 4, 3, 3, 3)]
    serve(graphed, double, *[(x,) for x in ids])
    assert {"signature": len(ids)} == reasons(graphed)
    assert any("pad['x'] is nan, which is no torch.int32" in cause for cause in graphed.snapshot().causes.values())


def test_misspelt_keyword(wrap: Wrap) -> None:
    """A keyword that ``capture`` does not have is named."""
    assert "capture has no keyword 'bukets'" in refusal(wrap, bukets=[1])


@pytest.mark.parametrize("keyword", ["context", "prepare", "agree"])
def test_hook_that_cannot_be_called(wrap: Wrap, keyword: str) -> None:
    """A hook that is no callable is refused at decoration, not at the first call."""
    text = refusal(wrap, **{keyword: 5})
    assert f"{keyword} must be" in text
    assert "got 5" in text


def test_forward_without_arguments(wrap: Wrap) -> None:
    """A forward that takes nothing has nothing to choose a bucket by."""
    text = refusal(wrap, lambda: 1)
    assert "takes no argument, so there is nothing to choose a bucket by" in text
    assert "context=" in text


@pytest.mark.parametrize("target", [5, "decode", int])
def test_target_that_is_no_forward(wrap: Wrap, target: Any) -> None:
    """A target that is neither a function nor a module is refused with what it is."""
    text = refusal(wrap, target)
    assert (target.__name__ if isinstance(target, type) else type(target).__name__) in text


def test_captured_twice(wrap: Wrap) -> None:
    """What is captured already is not captured again."""
    assert "is captured already" in refusal(wrap, wrap(double))


def test_call_without_a_tensor(wrap: Wrap) -> None:
    """A call without any tensor is served eagerly with the reason, and its result is the forward's own."""
    graphed = wrap(double)
    assert [6, 6, "abab"] == [graphed(3), graphed(3), graphed("ab")]
    assert {"signature": 3} == reasons(graphed)
    assert any("no tensor" in cause for cause in graphed.snapshot().causes.values())


def test_zero_rows(wrap: Wrap) -> None:
    """A batch of no rows is eager, has the shape that eager gives, and is left out of the hit rate."""
    graphed = wrap(double, pad="repeat")
    serve(graphed, double, (rows(0),), (rows(2),), (rows(2),), (rows(0),))
    assert {"empty_batch": 2, "warmup": 1, "graph": 1} == reasons(graphed)
    assert 1.0 == graphed.snapshot().hit_rate


def test_batch_above_the_largest_bucket(wrap: Wrap) -> None:
    """A batch above the largest bucket is eager, counted as a miss, and explained with both numbers."""
    graphed = wrap(double, pad="repeat")
    serve(graphed, double, (rows(4),), (rows(4),), (rows(5),))
    assert {"batch_too_large": 1, "warmup": 1, "graph": 1} == reasons(graphed)
    assert 0.5 == graphed.snapshot().hit_rate
    assert any("a batch of 5 is above the largest bucket, 4" in cause for cause in graphed.snapshot().causes.values())


def test_largest_size_that_will_be_sent(wrap: Wrap) -> None:
    """Sizes without a bucket are named at decoration; an absurd ``max_batch`` is refused instead of listed."""
    graphed = wrap(double, max_batch=6)
    assert any("3, 5-6" in cause for cause in graphed.snapshot().causes.values())
    assert "max_batch" in refusal(wrap, max_batch=10**12)


def test_another_dtype(wrap: Wrap) -> None:
    """Another dtype never meets the graph of the first: it is warmed up and captured for itself."""
    graphed = wrap(double)
    serve(graphed, double, *[(rows(2),)] * 3, *[(rows(2).long(),)] * 3, (rows(2),))
    assert {"warmup": 2, "graph": 5} == reasons(graphed)


def test_another_device(wrap: Wrap) -> None:
    """Tensors of a device without graphs are eager, and the graphs of the first device stay."""
    graphed = wrap(double)
    serve(graphed, double, *[(rows(2),)] * 3, (rows(2).to("meta"),), (rows(2),))
    assert {"warmup": 1, "graph": 3, "unsupported_device": 1} == reasons(graphed)


def test_two_devices_in_one_call(wrap: Wrap) -> None:
    """A call whose tensors lie on two devices is eager."""

    def forward(x: Any, other: Any) -> Any:
        return x * other.shape[0]

    graphed = wrap(forward)
    serve(graphed, forward, *[(rows(2), rows(2).to("meta"))] * 3)
    assert {"unsupported_device": 3} == reasons(graphed)


def test_another_rank(wrap: Wrap) -> None:
    """Another number of dimensions is another signature; without any dimension there is no batch."""
    graphed = wrap(double)
    serve(graphed, double, *[(rows(2),)] * 2, *[(torch.ones(2),)] * 2, *[(torch.tensor(3.0),)] * 2)
    assert {"warmup": 2, "graph": 2, "signature": 2} == reasons(graphed)


def test_another_spelling(wrap: Wrap) -> None:
    """Positional or by keyword, in any order, with a default left out or written: the same call, the same graph."""
    graphed = wrap(weighted)
    x, weight = rows(2), rows(2) + 1
    spellings: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, weight), {}),
        ((x,), {"weight": weight}),
        ((), {"x": x, "weight": weight}),
        ((), {"weight": weight, "x": x}),
        ((x, weight), {"scale": 1.0}),
    ]
    for args, keywords in spellings:
        serve(graphed, weighted, args, **keywords)
    assert {"warmup": 1, "graph": 4} == reasons(graphed)


def test_wrong_arguments(wrap: Wrap) -> None:
    """A call that the forward refuses is refused in the forward's own words and counted nowhere."""
    graphed = wrap(weighted)
    for args, keywords in (((), {}), ((1, 2, 3), {}), ((rows(2),), {"wieght": 1})):
        with pytest.raises(TypeError) as expected:
            weighted(*args, **keywords)
        with pytest.raises(TypeError) as actual:
            graphed(*args, **keywords)
        assert str(expected.value) == str(actual.value)
    assert {} == reasons(graphed)


def test_exception_of_the_forward(wrap: Wrap) -> None:
    """The forward's own exception passes through unchanged, in a warm-up, in a capture and eagerly; none is counted."""

    def forward(x: Any) -> Any:
        raise KeyError("mine")

    graphed = wrap(forward)
    for _ in range(5):
        with torch.no_grad(), pytest.raises(KeyError) as caught:
            graphed(rows(2))
        assert (("mine",), None) == (caught.value.args, caught.value.__cause__)
    assert {} == reasons(graphed)


@pytest.mark.parametrize("argument", [object(), {1, 2}, torch.Generator(), torch.eye(2).to_sparse()])
def test_argument_that_a_graph_cannot_follow(wrap: Wrap, argument: Any) -> None:
    """An object whose content nobody can watch makes the call eager; the cause names the argument and its type."""

    def forward(x: Any, other: Any) -> Any:
        return x * 2

    graphed = wrap(forward)
    serve(graphed, forward, *[(rows(2), argument)] * 3)
    assert {"signature": 3} == reasons(graphed)
    assert any(f"`other` is a {type(argument).__name__}" in cause for cause in graphed.snapshot().causes.values())


def test_argument_that_holds_itself(wrap: Wrap) -> None:
    """Arguments that refer back to each other end quickly, in an eager call."""
    ring: dict[str, Any] = {"x": rows(2)}
    ring |= {str(n): ring for n in range(30)}

    def forward(batch: dict[str, Any]) -> Any:
        return batch["x"] * 2

    graphed = wrap(forward)
    serve(graphed, forward, *[(ring,)] * 3)
    assert {"signature": 3} == reasons(graphed)


def test_number_named_static(wrap: Wrap) -> None:
    """A number under a static name stays a value: another number is another graph."""

    def forward(x: Any, scale: float) -> Any:
        return x * scale

    graphed = wrap(forward, static=("scale",))
    serve(graphed, forward, *[(rows(2), n / 2) for n in range(4) for _ in range(3)])
    assert {"warmup": 4, "graph": 8} == reasons(graphed)
