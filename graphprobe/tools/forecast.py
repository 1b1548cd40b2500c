"""What graphs would bring, before anything is captured: by a count of kernels, and by what a step takes eagerly."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from graphprobe.buckets import as_size
from graphprobe.errors import ConfigError
from graphprobe.tools.parts import Step
from graphprobe.tools.use import MOST, number

if TYPE_CHECKING:
    from graphprobe.tools.balance import Account

STARVED = 0.9
"""Share of an eager step that the host may take while the device never waits for it; above, both are equally slow."""

CREDIBLE = 1.1
"""Share of a step up to which a floor is one: a copy reaches a little less than reads alone. Above, less is read from
memory than was reckoned, as of what stays in the cache of the GPU."""

PER_KERNEL = (
    ("GB300", 0.3e-6, 0.5e-6, "published for a GB300 with programmatic dependent launch; 1 us without it"),
    ("H200", 0.68e-6, 0.74e-6, "measured on an H200 with 676 and 716 kernels"),
)
"""Seconds per kernel that a graph saves of the device's time, by a word of its name: least, most, source."""

ELSEWHERE = (0.3e-6, 1.0e-6, "the least and the most published for any card")


class Expected(NamedTuple):
    """What the device saves with a graph of so many kernels, in seconds: the middle, least and most; and the source."""

    seconds: float
    least: float
    most: float
    source: str


def expected(kernels: int, device: str = "", per_kernel: float | None = None) -> Expected:
    """The device's part of the gain, from a count of kernels, before anything is captured.

    ``per_kernel`` is in seconds; None: what is known of ``device``. The host's part comes on top, where the device
    waits for launches. ConfigError for what is no count and no time.
    """
    count = as_size(kernels, "kernels", least=0)
    if count > MOST:
        raise ConfigError("so many kernels are not those of one step", f"give {MOST:g} at most")
    if per_kernel is None:
        named = ((least, most, source) for name, least, most, source in PER_KERNEL if _is(name, device))
        least, most, source = next(named, ELSEWHERE)
    elif number(per_kernel) > 0:
        least, most, source = per_kernel, per_kernel, "given"
    else:
        raise ConfigError(f"per_kernel must be seconds above 0, got {per_kernel!r}", "0.7e-6 on an H200")
    return Expected(count * (least + most) / 2, count * least, count * most, source)


def predicted_graph(account: Account, step: Step) -> float | None:
    """Seconds of a replay, from eager measurements alone; None where they do not tell.

    A replay is the same kernels without a wait for the host and with less work between two of them: what the device
    takes with its launches queued ahead, less what a graph saves per kernel, and never below the floor. Where nothing
    was queued ahead, the eager step stands for that if the host was done with it well before the device.
    """
    device = step.filled
    if device is None and step.eager is not None and step.host is not None and step.host <= STARVED * step.eager:
        device = step.eager
    if device is None or step.kernels is None:
        return None
    left, floor = device - account.expected(step.kernels).seconds, account.floor(step) or 0.0
    found = max(left, min(floor, device) if floor <= CREDIBLE * device else 0.0)
    return found if found > 0 else None


def _is(name: str, device: str) -> bool:
    return re.search(rf"\b{name}\b", device, re.IGNORECASE) is not None
