from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphprobe.buckets import Buckets
from graphprobe.dispatch import EAGER, GRAPH, PENDING, Decision, Dispatcher
from graphprobe.reasons import FallbackReason

BUCKETS = Buckets([1, 2, 4, 8])
LOST = FallbackReason.CAPTURE_FAILED
WARMUP = FallbackReason.WARMUP

blocks = st.dictionaries(st.sampled_from(list(BUCKETS)), st.sampled_from([LOST, WARMUP, FallbackReason.STATIC_MOVED]))


@pytest.mark.parametrize(
    ("size", "padded", "expected"),
    [
        (0, True, Decision(EAGER, reason=FallbackReason.EMPTY_BATCH)),
        (1, False, Decision(GRAPH, bucket=1)),
        (3, False, Decision(EAGER, reason=FallbackReason.NO_EXACT_BUCKET)),
        (3, True, Decision(GRAPH, bucket=4)),
        (8, True, Decision(GRAPH, bucket=8)),
        (9, False, Decision(EAGER, reason=FallbackReason.BATCH_TOO_LARGE)),
        (9, True, Decision(EAGER, reason=FallbackReason.BATCH_TOO_LARGE)),
    ],
)
def test_sizes(size: int, padded: bool, expected: Decision) -> None:
    """A size takes its bucket, or the next one where padding is allowed, or says why not."""
    assert Dispatcher(BUCKETS, padded).decide(size) == expected


def test_phase() -> None:
    """Only captured phases take graphs, and an empty batch is empty in any phase."""
    dispatcher = Dispatcher(BUCKETS, phases=("decode", "draft"))
    assert dispatcher.decide(2, "draft") == Decision(GRAPH, bucket=2)
    assert dispatcher.decide(2, "prefill") == Decision(EAGER, reason=FallbackReason.WRONG_PHASE)
    assert dispatcher.decide(0, "prefill") == Decision(EAGER, reason=FallbackReason.EMPTY_BATCH)


def test_padding_per_call() -> None:
    """A call may allow or forbid padding whatever the dispatcher's default is."""
    assert Dispatcher(BUCKETS).decide(3, padded=True) == Decision(GRAPH, bucket=4)
    assert Dispatcher(BUCKETS, padded=True).decide(3, padded=False).reason is FallbackReason.NO_EXACT_BUCKET


def test_lost_bucket_is_passed_over() -> None:
    """With padding, a bucket whose capture failed sends the call to the next one; without, the call is eager."""
    assert Dispatcher(BUCKETS, padded=True).decide(2, blocked={2: LOST}) == Decision(GRAPH, bucket=4)
    assert Dispatcher(BUCKETS).decide(2, blocked={2: LOST}) == Decision(EAGER, reason=LOST, wants=2)


@pytest.mark.parametrize("reason", sorted(PENDING))
def test_pending_bucket_is_waited_for(reason: FallbackReason) -> None:
    """A bucket on its way to a capture gets its eager call although a larger one is ready."""
    decision = Dispatcher(BUCKETS, padded=True).decide(2, blocked={2: reason})
    assert decision == Decision(EAGER, reason=reason, wants=2)


def test_all_lost() -> None:
    """Where every bucket is lost the reason is that of the smallest one."""
    blocked = {2: LOST, 4: FallbackReason.VERIFY_FAILED, 8: FallbackReason.VERIFY_FAILED}
    assert Dispatcher(BUCKETS, padded=True).decide(2, blocked=blocked) == Decision(EAGER, reason=LOST, wants=2)


def test_decline() -> None:
    """A decision that cannot be obeyed becomes eager for the given reason and still names its bucket."""
    dispatcher = Dispatcher(BUCKETS)
    graph = dispatcher.decide(4)
    eager = Decision(EAGER, reason=FallbackReason.BUSY, wants=4)
    assert dispatcher.decline(graph, FallbackReason.BUSY) == eager
    assert dispatcher.decline(eager, LOST) == Decision(EAGER, reason=LOST, wants=4)


@given(st.integers(0, 12), st.booleans(), blocks)
def test_always_one_of_two(size: int, padded: bool, blocked: dict[int, FallbackReason]) -> None:
    """A decision has a ready bucket that holds the size, or a reason; never both and never neither."""
    decision = Dispatcher(BUCKETS, padded).decide(size, blocked=blocked)
    assert decision.is_graph == (decision.bucket is not None) == (decision.reason is None)
    if decision.bucket is not None:
        assert decision.bucket not in blocked
        assert decision.bucket == size or (padded and decision.bucket > size)


def test_frozen() -> None:
    """A decision cannot be changed after it was made."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Decision(GRAPH, bucket=1).bucket = 2  # type: ignore[misc]
