"""Whether a larger batch is worth it.

Saved memory becomes throughput only where it becomes KV cache, where the load fills that cache, and where a step of the
larger batch isn't slower by more than the batch is larger.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from graphprobe.buckets import MAX_BUCKET, as_size
from graphprobe.errors import ConfigError
from graphprobe.tools.use import number

WORTH = 0.02
"""Least gain that is one: the threshold of ``graphprobe.advise``, as less is the noise of two runs."""

SHORTEST, LONGEST = 1e-9, 86_400.0
"""Seconds of a step that are believed: what is out of them has another unit."""


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
    def reached(self) -> bool:
        """Whether the load has as many requests as the larger batch; True where it is not known."""
        return self.load is None or self.after[0] <= max(self.before[0], self.load[0])

    @property
    def worth_it(self) -> bool:
        """Whether the throughput rises by ``threshold`` at least, and the load is there to use a larger batch."""
        larger = self.after[0] > self.before[0]
        return self.gain >= self.threshold and not (larger and (self.filled is False or not self.reached))

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
        told = [load_line(*self.load)] if self.load and self.after[0] > self.before[0] else []
        if self.filled and not self.reached and self.load:
            told.append(f"a batch of {self.after[0]:,} never occurs: there are {self.load[0]:,} requests at a time")
        return "\n".join([*lines, answer, *told])


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


def _pair(value: object, name: str) -> tuple[int, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ConfigError(f"{name} must be (batch, seconds of a step), got {value!r}", "write (80, 10e-3)")
    batch, seconds = as_size(value[0], f"the batch of {name}"), number(value[1])
    if batch > MAX_BUCKET:
        raise ConfigError(f"the batch of {name} is above {MAX_BUCKET}, got {batch}", "write (80, 10e-3)")
    if not SHORTEST <= seconds <= LONGEST:
        raise ConfigError(f"{name} must have the seconds of a step, got {value[1]!r}", "10 ms are 10e-3")
    return batch, seconds
