"""What the memory of graphs costs and would buy: the bill, and tokens of KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from graphprobe.buckets import as_size
from graphprobe.errors import ConfigError
from graphprobe.tools.use import MOST, number, of_memory

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
