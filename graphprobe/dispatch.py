"""The decision: which path a call takes, and why. Pure; standard library only.

A :class:`Decision` is made once per (size, phase, graph state) and cached by the caller. Nothing downstream
decides again: a part that cannot obey hands the decision back through :meth:`Dispatcher.decline`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from graphprobe.buckets import Buckets
from graphprobe.reasons import FallbackReason

GRAPH = "graph"
EAGER = "eager"


@dataclass(frozen=True, slots=True)
class Decision:
    """A path, with the bucket of a graph call or the reason of an eager one; never both.

    ``wants`` is the bucket that an eager call would have used, so that its warm-up can be counted.
    """

    path: str
    bucket: int | None = None
    reason: FallbackReason | None = None
    wants: int | None = None

    @property
    def is_graph(self) -> bool:
        """Whether the call replays a graph."""
        return self.path == GRAPH


class Blocked(Protocol):
    """Bucket -> the reason why it has no usable graph: a dict, or something that finds out when asked."""

    def get(self, bucket: int, /) -> FallbackReason | None:
        """The reason, None where the bucket is ready."""


class Dispatcher:
    """Chooses the path for a size. Holds the rules, no state of any graph."""

    __slots__ = ("buckets", "padded", "phases")

    def __init__(self, buckets: Buckets, padded: bool = False, phases: tuple[str, ...] = ("decode",)) -> None:
        self.buckets = buckets
        self.padded = padded
        self.phases = phases

    def decide(
        self,
        size: int,
        phase: str = "decode",
        blocked: Blocked | None = None,
        padded: bool | None = None,
    ) -> Decision:
        """The decision for ``size`` units.

        ``blocked`` maps each bucket that has no usable graph to the reason (a bucket not in it is ready);
        ``padded`` overrides whether a larger bucket may serve this call.
        """
        if size == 0:
            return Decision(EAGER, reason=FallbackReason.EMPTY_BATCH)
        if phase not in self.phases:
            return Decision(EAGER, reason=FallbackReason.WRONG_PHASE)
        may_pad = self.padded if padded is None else padded
        return self._choose(size, may_pad, {} if blocked is None else blocked)

    def _choose(self, size: int, may_pad: bool, blocked: Blocked) -> Decision:
        if size > self.buckets.largest:
            return Decision(EAGER, reason=FallbackReason.BATCH_TOO_LARGE)
        exact = self.buckets.exact(size)
        candidates = self.buckets.holding(size) if may_pad else (() if exact is None else (exact,))
        first: Decision | None = None
        for bucket in candidates:
            reason = blocked.get(bucket)
            if reason is None:
                return Decision(GRAPH, bucket=bucket)
            first = first or Decision(EAGER, reason=reason, wants=bucket)
            # A bucket that is on its way to a capture is waited for; one that is lost is passed over.
            if reason in PENDING:
                return Decision(EAGER, reason=reason, wants=bucket)
        return first or Decision(EAGER, reason=FallbackReason.NO_EXACT_BUCKET)

    def decline(self, decision: Decision, reason: FallbackReason) -> Decision:
        """The eager decision for a graph decision that could not be obeyed."""
        return Decision(EAGER, reason=reason, wants=decision.bucket or decision.wants)


PENDING = frozenset({FallbackReason.WARMUP, FallbackReason.STATIC_MOVED, FallbackReason.WEIGHTS_MOVED})
"""Reasons after which the same bucket will be captured, so the call is not sent to a larger one."""
