from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphprobe.buckets import MAX_BUCKET, MAX_BUCKETS, Buckets, as_size, coverage, decode_buckets
from graphprobe.errors import ConfigError

lists = st.lists(st.integers(1, 200), min_size=1, max_size=20, unique=True)


@given(lists, st.integers(0, 250))
def test_selection(sizes: list[int], size: int) -> None:
    """Exact, smallest holding and all holding buckets are what a search through the whole list finds."""
    buckets = Buckets(sizes)
    holding = sorted(bucket for bucket in sizes if bucket >= size)
    assert buckets.holding(size) == tuple(holding)
    assert buckets.select(size) == (holding[0] if holding else None)
    assert buckets.exact(size) == (size if size in sizes else None)


@given(lists, st.integers(1, 250))
def test_uncovered(sizes: list[int], most: int) -> None:
    """Uncovered sizes are those that no bucket serves: exactly, or at all when padding is allowed."""
    assert Buckets(sizes).uncovered(most) == tuple(n for n in range(1, most + 1) if n not in sizes)
    assert coverage(sizes, most, padded=True) == tuple(n for n in range(1, most + 1) if n > max(sizes))


@given(lists)
def test_order(sizes: list[int]) -> None:
    """Buckets are ascending whatever the order given, and equal lists are equal and hash alike."""
    buckets = Buckets(sizes)
    assert list(buckets) == sorted(sizes)
    assert (len(buckets), buckets.largest) == (len(sizes), max(sizes))
    assert buckets == Buckets(reversed(sizes))
    assert hash(buckets) == hash(Buckets(reversed(sizes)))
    assert buckets != Buckets([*sizes, 999])


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ([], "empty"),
        ([1, 2, 2, 4, 4], "[2, 4]"),
        ([1, 0], "got 0"),
        ([-4], "got -4"),
        ([1, True], "True"),
        ([1, 2.0], "2.0"),
        (["4"], "'4'"),
        ([None], "None"),
        ("124", "'124'"),
        (8, "got 8"),
        ([MAX_BUCKET + 1], str(MAX_BUCKET + 1)),
        (range(1, MAX_BUCKETS + 2), str(MAX_BUCKETS + 1)),
    ],
)
def test_refused(sizes: Any, named: str) -> None:
    """A list that cannot be captured is refused with the value at fault in the message."""
    with pytest.raises(ConfigError, match="bucket") as caught:
        Buckets(sizes)
    assert named in str(caught.value)


def test_largest_list() -> None:
    """The limits themselves are allowed."""
    assert Buckets([MAX_BUCKET]).largest == MAX_BUCKET
    assert len(Buckets(range(1, MAX_BUCKETS + 1))) == MAX_BUCKETS


class Index:
    def __index__(self) -> int:
        return 3


def test_as_size() -> None:
    """Whatever is an index is a size, down to the least allowed one."""
    assert as_size(Index(), "size") == 3
    assert as_size(0, "size", least=0) == 0
    with pytest.raises(ConfigError, match="size must be at least 0, got -1"):
        as_size(-1, "size", least=0)


@pytest.mark.parametrize(
    ("seqs", "spec", "expected"),
    [
        (1, 0, [1]),
        (3, 0, [1, 2, 3]),
        (8, 0, [1, 2, 3, 4, 6, 8]),
        (8, 3, [4, 8, 12, 16, 24, 32]),
        (20, 0, [1, 2, 3, 4, 6, 8, 12, 16, 20]),
    ],
)
def test_decode_buckets(seqs: int, spec: int, expected: list[int]) -> None:
    """Decode buckets are counted in tokens: 8 sequences with 3 speculative tokens need 8 x (1 + 3) = 32."""
    assert decode_buckets(seqs, spec) == expected


@given(st.integers(1, 600), st.integers(0, 7))
def test_decode_buckets_cover(seqs: int, spec: int) -> None:
    """Every decode step fits a bucket, and at most a third of that bucket is padding."""
    width = 1 + spec
    buckets = Buckets(decode_buckets(seqs, spec))
    assert buckets.largest == seqs * width
    for requests in range(1, seqs + 1):
        bucket = buckets.select(requests * width)
        assert bucket is not None
        assert bucket * 2 <= requests * width * 3
