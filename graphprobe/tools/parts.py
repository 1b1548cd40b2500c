"""What was measured of a step of one batch size, and of a prefill; all times are seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from graphprobe.buckets import as_size
from graphprobe.errors import ConfigError
from graphprobe.tools.use import number

INSTANT = 1e-12
"""Seconds below which nothing lasts."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of ``batch`` rows.

    ``eager`` is the time of a step in a steady loop, ``graph`` that of a replay. ``filled`` is what the device takes
    for an eager step whose launches were all queued before it began, ``host`` what the host takes to enqueue one.
    ``bytes_read`` are weights and cache that a step reads, ``pool_bytes`` what the graph pool grew by (it may be
    negative), ``capture`` the time of the capture, of which torch.compile took ``compile``. ``refused`` says why no
    graph can hold the step; empty where one can, or none was tried.

    ConfigError for a figure that is none.
    """

    batch: int
    kernels: int | None = None
    eager: float | None = None
    graph: float | None = None
    filled: float | None = None
    host: float | None = None
    bytes_read: int | None = None
    pool_bytes: int | None = None
    capture: float | None = None
    compile: float | None = None
    notes: tuple[str, ...] = ()
    refused: str = ""

    def __post_init__(self) -> None:
        as_size(self.batch, "batch")
        if not isinstance(self.refused, str):
            raise ConfigError(f"refused must be a text, got {self.refused!r}")
        if self.kernels is not None:
            as_size(self.kernels, "kernels", least=0)
        check(self, ("eager", "graph", "filled", "capture"), above=INSTANT)
        check(self, ("bytes_read",), least=1.0)
        check(self, ("host", "compile"), least=0.0)
        check(self, ("batch", "kernels", "pool_bytes"))
        if self.compile is not None and self.capture is not None and self.compile > self.capture:
            raise ConfigError(f"compile must be a part of capture, got {self.compile!r} of {self.capture!r} seconds")

    @property
    def gain(self) -> float | None:
        """Seconds that a graph saves of an eager step; negative where it takes longer."""
        return _minus(self.eager, self.graph)

    @property
    def host_part(self) -> float | None:
        """Seconds of an eager step in which the device waited for launches."""
        waited = _minus(self.eager, self.filled)
        return None if waited is None else max(0.0, waited)

    @property
    def device_part(self) -> float | None:
        """Seconds that the device itself saves with a graph, however fast the host is; below 0 where it saves none."""
        # A step that takes longer with its launches queued ahead is one that the host does not hold up.
        ahead = self.filled if None in (self.filled, self.eager) else min(self.filled or 0.0, self.eager or 0.0)
        return _minus(ahead, self.graph)

    @property
    def device_per_kernel(self) -> float | None:
        """The same per kernel."""
        return over(self.device_part, self.kernels)

    @property
    def launch_per_kernel(self) -> float | None:
        """Seconds of the host per kernel that it launches."""
        return over(self.host, self.kernels)

    @property
    def compile_share(self) -> float | None:
        """Share of the capture that torch.compile takes."""
        return over(self.compile, self.capture)

    @property
    def repaid(self) -> int | None:
        """Replays after which the capture is repaid; None where a replay saves nothing."""
        if self.capture is None or self.gain is None or self.gain <= 0:
            return None
        return math.ceil(self.capture / self.gain)


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill of ``tokens`` tokens, eagerly and as a graph, in seconds, and the bytes that its graphs take.

    ``share`` is the part of the eager time that a graph saves, given only where the times themselves are not known.
    """

    tokens: int | None = None
    eager: float | None = None
    graph: float | None = None
    share: float | None = None
    pool_bytes: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens is not None:
            as_size(self.tokens, "tokens of a prefill")
        check(self, ("eager", "graph"), above=INSTANT)
        check(self, ("tokens", "pool_bytes", "share"))
        if self.share is not None and self.share >= 1:
            raise ConfigError(f"share must be below 1, got {self.share!r}", "1.3 % is 0.013")

    @property
    def saved(self) -> float | None:
        """Share of the eager time that a graph saves."""
        if self.eager is None or self.graph is None:
            return self.share
        return 1 - self.graph / self.eager


def check(holder: Any, names: tuple[str, ...], least: float = -math.inf, above: float = -math.inf) -> None:
    """ConfigError where one of these fields is no number, or none within its bounds; None passes."""
    for name in names:
        value = getattr(holder, name)
        if value is None or (number(value) >= least and number(value) > above):
            continue
        bound = f" above {above:g}" if above > -math.inf else f" from {least:g} on" if least > -math.inf else ""
        raise ConfigError(f"{name} must be a number{bound}, got {value!r}", "None stands for what was not measured")


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def over(part: float | None, whole: float | None) -> float | None:
    """A quotient of what is known; None of what is not."""
    return None if part is None or not whole else part / whole
