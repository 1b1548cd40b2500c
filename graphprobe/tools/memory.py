"""What the memory of graphs costs and would buy: the bill, KV cache tokens, and whether a larger batch is worth it.

Saved memory becomes throughput only where it becomes KV cache, where the load fills that cache, and where a step of the
larger batch isn't slower by more than the batch is larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from graphprobe.buckets import MAX_BUCKET, as_size
from graphprobe.errors import ConfigError
from graphprobe.tools.use import MOST, number, of_memory

WORTH = 0.02
"""Least gain that is one: the threshold of ``graphprobe.advise``, as less is the noise of two runs."""

SHORTEST, LONGEST = 1e-9, 86_400.0
"""Seconds of a step that are believed: what is out of them has another unit."""

DTYPES = {
    **dict.fromkeys(("float32", "fp32"), 4.0),
    **dict.fromkeys(("float16", "fp16", "half", "bfloat16", "bf16"), 2.0),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"), 1.0),
}
"""Bytes of one element of a KV cache, by the names that torch and the engines use."""


def kv_bytes_per_token(layers: int, kv_heads: int, head_size: int, dtype: str | float = "bfloat16") -> float:
    """Bytes of KV cache that a token takes on all of its layers: keys and values.

    ``dtype`` is a name of ``DTYPES`` or the bytes of one element. Divide ``kv_heads`` by the number of ranks to get the
    bytes of one rank. ConfigError for what is no size or no dtype.
    """
    sizes = {"layers": layers, "kv_heads": kv_heads, "head_size": head_size}
    elements = 2 * math.prod(as_size(value, name) for name, value in sizes.items())
    if elements > MOST:
        raise ConfigError("a token of KV cache has no such number of elements", "check layers, kv_heads, head_size")
    return elements * _element(dtype)


def tokens(much: float, per_token: float) -> int:
    """Whole tokens whose KV cache fits into ``much`` bytes, ``per_token`` bytes each."""
    return math.floor(_least(much, "bytes", 0) / _least(per_token, "bytes per token", 1))


def fills(concurrent: int, room: int) -> bool:
    """Whether ``concurrent`` requests at a time need more than the ``room`` that the KV cache has, in requests.

    Where they do not, the pool never fills, and memory that is saved buys nothing.
    """
    return as_size(concurrent, "concurrent", least=0) > as_size(room, "room", least=0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two steps, before and after a change of the batch: requests per step, each of which gets one token, and seconds.

    ``filled`` says whether the load ever fills the KV cache, None where it is not known.
    """

    before: tuple[int, float]
    after: tuple[int, float]
    threshold: float = WORTH
    filled: bool | None = None
    load: tuple[int, int] | None = None

    @property
    def before_tokens_per_second(self) -> float:
        """Throughput before."""
        return self.before[0] / self.before[1]

    @property
    def after_tokens_per_second(self) -> float:
        """Throughput after."""
        return self.after[0] / self.after[1]

    @property
    def gain(self) -> float:
        """Share by which the throughput rises; negative where it falls."""
        return self.after_tokens_per_second / self.before_tokens_per_second - 1

    @property
    def worth_it(self) -> bool:
        """Whether the throughput rises by ``threshold`` at least, and the load is there to use it."""
        return self.gain >= self.threshold and self.filled is not False

    def as_dict(self) -> dict[str, Any]:
        """The fields and what follows of them, for JSON."""
        rates = {
            "before_tokens_per_second": self.before_tokens_per_second,
            "after_tokens_per_second": self.after_tokens_per_second,
        }
        return {**asdict(self), **rates, "gain": self.gain, "worth_it": self.worth_it}

    def __str__(self) -> str:
        """One line per side, and the answer."""
        sides = {"before": (self.before, self.before_tokens_per_second)}
        sides["after"] = (self.after, self.after_tokens_per_second)
        lines = [f"{name:<6}  {n:,} x {s * 1e3:.4g} ms = {rate:,.0f} token/s" for name, ((n, s), rate) in sides.items()]
        much = f"{100 * abs(self.gain):.1f} % {'more' if self.gain > 0 else 'less'} throughput"
        each = f"each request waits {self.after[1] * 1e3:.4g} ms for a token instead of {self.before[1] * 1e3:.4g}"
        answer = f"{'worth it' if self.worth_it else 'not worth it'}: {much}; {each}"
        return "\n".join([*lines, answer, *([load_line(*self.load)] if self.load else [])])


def compare_steps(
    before: tuple[int, float],
    after: tuple[int, float],
    *,
    concurrent: int | None = None,
    room: int | None = None,
    threshold: float = WORTH,
) -> Comparison:
    """Whether a larger batch is worth it, from (batch, seconds of a step) before and after.

    ``concurrent`` requests at a time against ``room`` for so many say whether the larger batch would ever be seen; give
    both or neither. ``threshold`` is the least gain in throughput, as a share. ConfigError for what is no such figure.
    """
    if (concurrent is None) != (room is None):
        raise ConfigError("concurrent and room say something together only", "give both, in requests")
    if not 0 <= (least := number(threshold)) < 1:
        raise ConfigError(f"threshold must be a share from 0 on, below 1, got {threshold!r}", "0.02 is 2 %")
    load = None if concurrent is None or room is None else (concurrent, room)
    full = None if load is None else fills(*load)
    return Comparison(_pair(before, "before"), _pair(after, "after"), least, full, load)


def load_line(concurrent: int, room: int) -> str:
    """What a load makes of a KV cache with room for so many requests, in words."""
    said = f"{concurrent:,} concurrent requests against room for {room:,}"
    if not fills(concurrent, room):
        return f"{said}: the pool never fills, so saved memory buys nothing"
    return f"{said}: {concurrent - room:,} of them wait, so more room is used"


@dataclass(frozen=True, slots=True)
class Bill:
    """What graphs take of the device's memory, in bytes, and the KV cache that they stand for.

    ``grown`` is what the pool grew by with each bucket, captured largest first into one pool; it may be negative.
    ``residual`` is what the driver took beside the pool. ``kv_token_bytes`` is what a token of KV cache takes, and
    ``kv_capacity`` how many tokens of it the engine reports. None: not known.
    """

    grown: Mapping[int, int] = field(default_factory=dict)
    residual: int | None = None
    kv_token_bytes: float | None = None
    kv_capacity: int | None = None

    def __post_init__(self) -> None:
        for size, much in self.grown.items():
            as_size(size, "a bucket of the bill")
            if math.isnan(number(much)):
                raise ConfigError(f"bytes of bucket {size} must be a number, got {much!r}")
        if self.residual is not None:
            _least(self.residual, "residual", -MOST)
        if self.kv_token_bytes is not None:
            _least(self.kv_token_bytes, "kv_token_bytes", 1)
        if self.kv_capacity is not None:
            as_size(self.kv_capacity, "kv_capacity", least=0)

    @property
    def pool(self) -> int:
        """Bytes of the pool, of all buckets together."""
        return max(0, sum(self.grown.values()))

    @property
    def total(self) -> int:
        """The same with what the driver took."""
        return self.pool + max(0, self.residual or 0)

    @property
    def one_more(self) -> float | None:
        """Bytes that a bucket below the largest would add, by the mean of those there are; None where there is none.

        A pool is as large as its largest graph needs, so the others say what one more takes; the driver takes its part
        for each.
        """
        if not self.grown:
            return None
        use = of_memory(None, {size: max(0, much) for size, much in self.grown.items()})
        return (use.other or 0.0) + max(0, self.residual or 0) / len(self.grown)

    @property
    def tokens(self) -> int | None:
        """Tokens of KV cache that the same bytes would hold; None where a token's size is not known."""
        return None if self.kv_token_bytes is None else tokens(self.total, self.kv_token_bytes)

    def as_dict(self) -> dict[str, Any]:
        """The fields and what follows of them, for JSON."""
        derived = {"pool": self.pool, "total": self.total, "one_more": self.one_more, "tokens": self.tokens}
        return {**asdict(self), **derived}

    def __str__(self) -> str:
        """Plain ASCII lines."""
        each = ", ".join(f"{size}: {mib(much)}" for size, much in sorted(self.grown.items()))
        lines = [f"pool: {mib(self.pool)} (by bucket {each})" if self.grown else "pool: not measured"]
        if self.residual is not None:
            lines.append(f"driver: {mib(self.residual)} beside the pool")
        if self.one_more is not None:
            lines.append(f"one more bucket below the largest: about {mib(self.one_more)}")
        return "\n".join(lines + self._bought())

    def _bought(self) -> list[str]:
        reported = "" if self.kv_capacity is None else f"the engine reports room for {self.kv_capacity:,} tokens"
        if self.tokens is None or self.kv_token_bytes is None:
            return [reported] if reported else []
        worth = (
            f"{mib(self.total)} would hold {self.tokens:,} tokens of KV cache, {self.kv_token_bytes:,.0f} bytes each"
        )
        if self.kv_capacity:
            reported += f": {100 * self.tokens / self.kv_capacity:.2g} % more"
        return ["; ".join(filter(None, [worth, reported]))]


def mib(much: float) -> str:
    """Bytes as MiB, or GiB where there are many."""
    return f"{much / 2**30:,.2f} GiB" if abs(much) >= 10 * 2**30 else f"{much / 2**20:,.1f} MiB"


def _pair(value: object, name: str) -> tuple[int, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ConfigError(f"{name} must be (batch, seconds of a step), got {value!r}", "write (80, 10e-3)")
    batch, seconds = as_size(value[0], f"the batch of {name}"), number(value[1])
    if batch > MAX_BUCKET:
        raise ConfigError(f"the batch of {name} is above {MAX_BUCKET}, got {batch}", "write (80, 10e-3)")
    if not SHORTEST <= seconds <= LONGEST:
        raise ConfigError(f"{name} must have the seconds of a step, got {value[1]!r}", "10 ms are 10e-3")
    return batch, seconds


def _element(dtype: str | float) -> float:
    if isinstance(dtype, str):
        found = DTYPES.get(dtype.strip().lower().removeprefix("torch."))
        if found is None:
            raise ConfigError(f"unknown dtype {dtype!r} of a KV cache", f"write one of {', '.join(DTYPES)}")
        return found
    return _above(dtype, "the bytes of an element")


def _above(value: float, name: str) -> float:
    if not (found := number(value)) > 0:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")
    return found


def _least(value: float, name: str, least: float) -> float:
    if not (found := number(value)) >= least:
        raise ConfigError(f"{name} must be a number from {least:g} on, got {value!r}")
    return found
