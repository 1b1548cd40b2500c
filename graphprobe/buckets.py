"""Buckets: the captured batch sizes, validated once; nobody else compares sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from graphprobe.errors import ConfigError

MAX_BUCKET = 1 << 20
"""Largest bucket accepted: a larger number is a unit mix-up (bytes, tokens of a whole corpus), not a batch."""

MAX_BUCKETS = 1024
"""Most buckets accepted: each one is a graph with memory and capture time of its own."""


class Buckets:
    """An ascending, duplicate-free list of batch sizes. Immutable."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = _validated(sizes)

    @property
    def largest(self) -> int:
        """The largest bucket."""
        return self.sizes[-1]

    def exact(self, size: int) -> int | None:
        """``size`` if it is a bucket, else None."""
        index = bisect_left(self.sizes, size)
        return size if index < len(self.sizes) and self.sizes[index] == size else None

    def select(self, size: int) -> int | None:
        """The smallest bucket that holds ``size`` rows, or None above the largest."""
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else None

    def holding(self, size: int) -> tuple[int, ...]:
        """All buckets that hold ``size`` rows, smallest first."""
        return self.sizes[bisect_left(self.sizes, size) :]

    def uncovered(self, max_batch: int, padded: bool = False) -> tuple[int, ...]:
        """The sizes 1..max_batch that no bucket serves (exactly, or padded)."""
        if padded:
            return tuple(range(self.largest + 1, max_batch + 1))
        return tuple(n for n in range(1, max_batch + 1) if self.exact(n) is None)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buckets) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __repr__(self) -> str:
        return f"Buckets({list(self.sizes)})"


def _validated(sizes: Iterable[int]) -> tuple[int, ...]:
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable):
        raise ConfigError(f"buckets must be a list of batch sizes, got {sizes!r}", "write buckets=[1, 2, 4, 8]")
    given = list(islice(sizes, MAX_BUCKETS + 1))
    if len(given) > MAX_BUCKETS:
        raise ConfigError(f"more than {MAX_BUCKETS} buckets ({len(given)} and perhaps more)", "each one is a graph")
    if not given:
        raise ConfigError("buckets is empty", "write at least one batch size, as in buckets=[1, 2, 4, 8]")
    checked = sorted(as_size(n, "bucket") for n in given)
    repeated = sorted(n for n, count in Counter(checked).items() if count > 1)
    if repeated:
        raise ConfigError(f"buckets has duplicates {repeated} in {given}", f"write buckets={sorted(set(checked))}")
    if checked[-1] > MAX_BUCKET:
        raise ConfigError(f"bucket {checked[-1]} is above {MAX_BUCKET}", "buckets are batch sizes, in rows")
    return tuple(checked)


def as_size(value: object, what: str, least: int = 1) -> int:
    """``value`` as a whole number >= ``least``; bool, float and text are refused with ConfigError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{what} must be a whole number, got {value!r} ({type(value).__name__})")
    try:
        number = int(value.__index__())
    except TypeError as error:
        raise ConfigError(f"{what} must be a whole number, got {value!r} ({error})") from None
    if number < least:
        raise ConfigError(f"{what} must be at least {least}, got {number}")
    return number


def decode_buckets(max_seqs: int, spec_tokens: int = 0) -> list[int]:
    """Buckets in tokens that cover every decode step of up to ``max_seqs`` sequences.

    With ``spec_tokens`` speculative tokens a request sends ``1 + spec_tokens`` rows, so the largest step has
    ``max_seqs * (1 + spec_tokens)`` rows (8 sequences and 3 tokens: 32). Small batches get a bucket each up to
    four, then every power of two and its half-way point, and always the maximum.
    """
    most = as_size(max_seqs, "max_seqs")
    width = 1 + as_size(spec_tokens, "spec_tokens", least=0)
    wanted = {1, 2, 3, 4, most}
    step = 4
    while step < most:
        wanted |= {step + step // 2, 2 * step}
        step *= 2
    return [n * width for n in sorted(wanted) if n <= most]


def as_max_batch(value: object) -> int:
    """``value`` as the largest batch that will be sent."""
    number = as_size(value, "max_batch")
    if number > MAX_BUCKET:
        raise ConfigError(f"max_batch {number} is above {MAX_BUCKET}", "it is a batch size, in the unit of the buckets")
    return number


def coverage(buckets: Iterable[int], max_batch: int, padded: bool = False) -> tuple[int, ...]:
    """The sizes 1..``max_batch`` that would run eagerly for want of a bucket, before any traffic."""
    return Buckets(buckets).uncovered(as_max_batch(max_batch), padded)
