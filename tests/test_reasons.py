from __future__ import annotations

import json

import pytest

from graphprobe.errors import ConfigError
from graphprobe.reasons import MEANING, NOT_COUNTED, FallbackReason, as_reason


@pytest.mark.parametrize("reason", FallbackReason)
def test_value(reason: FallbackReason) -> None:
    """A reason is its label value: as text, in a format string, as a dict key and in JSON."""
    assert str(reason) == reason.value == f"{reason}" == reason.name.lower()
    assert {reason: 1}[reason.value] == 1
    assert json.dumps(reason) == f'"{reason.value}"'


def test_not_counted() -> None:
    """Exactly the reasons where no graph was meant to serve the call are left out of the hit rate."""
    outside = {"warmup", "disabled", "unsupported_device", "empty_batch", "training", "grad", "wrong_phase", "forked"}
    assert {str(reason) for reason in FallbackReason if not reason.counted} == outside
    assert {str(reason) for reason in NOT_COUNTED} == outside


def test_meanings() -> None:
    """Every reason has a one-line meaning, and no two have the same."""
    assert set(MEANING) == set(FallbackReason)
    assert len({reason.meaning for reason in FallbackReason}) == len(FallbackReason)
    assert not any("\n" in reason.meaning for reason in FallbackReason)


def test_as_reason() -> None:
    """A member and its value both give the member."""
    assert as_reason("busy") is FallbackReason.BUSY
    assert as_reason(FallbackReason.BUSY) is FallbackReason.BUSY


@pytest.mark.parametrize("value", ["BUSY", "", "nonsense", None, 3])
def test_as_reason_refuses(value: object) -> None:
    """What is no reason is refused, with the value and all allowed ones in the message."""
    with pytest.raises(ConfigError) as caught:
        as_reason(value)  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)
    assert all(reason.value in str(caught.value) for reason in FallbackReason)
