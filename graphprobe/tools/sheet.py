"""An account as text: a table of its steps, what stands below it, and the verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from graphprobe.tools.forecast import CREDIBLE
from graphprobe.tools.parts import Step
from graphprobe.tools.reckoning import on_prefill
from graphprobe.tools.table import WIDTH, literal, percent

if TYPE_CHECKING:
    from graphprobe.tools.balance import Account

Column = Callable[["Account", Step], float | None]


def _times(seconds: float | None, unit: float = 1e3) -> str:
    return (
        "-" if seconds is None else f"{seconds * unit:,.3g}" if abs(seconds * unit) < 1000 else f"{seconds * unit:,.0f}"
    )


def _micro(seconds: float | None) -> str:
    return _times(seconds, 1e6)


def _count(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def _part(share: float | None) -> str:
    return "-" if share is None else percent(share)


def _mib(much: float | None) -> str:
    return "-" if much is None else f"{much / 2**20:,.1f}"


COLUMNS: tuple[tuple[str, str, Column, Callable[[float | None], str]], ...] = (
    ("", "batch", lambda _, step: step.batch, _count),
    ("", "kernels", lambda _, step: step.kernels, _count),
    ("eager", "ms", lambda _, step: step.eager, _times),
    ("queued", "ms", lambda _, step: step.filled, _times),
    ("graph", "ms", lambda _, step: step.graph, _times),
    ("graph", "pred.", lambda account, step: account.predicted_graph(step), _times),
    ("saved", "ms", lambda _, step: step.gain, _times),
    ("host", "ms", lambda _, step: step.host_part, _times),
    ("device", "ms", lambda _, step: step.device_part, _times),
    ("device", "us each", lambda _, step: step.device_per_kernel, _micro),
    ("launch", "us each", lambda _, step: step.launch_per_kernel, _micro),
    ("floor", "ms", lambda account, step: account.floor(step), _times),
    ("floor", "share", lambda account, step: account.floor_share(step), _part),
    ("pool", "MiB", lambda _, step: step.pool_bytes, _mib),
    ("capt.", "s", lambda _, step: step.capture, lambda seconds: _times(seconds, 1.0)),
)
"""Two lines of heading, the figure, and how it is written. A column without any figure is left out."""


def text(account: Account) -> str:
    """All of an account, in plain ASCII."""
    paragraphs = [
        _told([" on ".join(filter(None, [account.name, account.device])), *_bandwidths(account)]),
        _grid(account),
        _told([*_shared(account), *_captured(account)]),
        _told(str(account.bill).splitlines()) if account.bill.grown else [],
        _told([f"verdict: {account.verdict}", *_prefill(account)]),
        _told(f"note: {note}" for note in _notes(account)),
    ]
    whole = "\n\n".join("\n".join(lines) for lines in paragraphs if lines)
    return whole.encode("ascii", "backslashreplace").decode("ascii")


def _bandwidths(account: Account) -> list[str]:
    known = {"measured by copying": account.bandwidth, "by the datasheet": account.datasheet}
    rates = [f"{rate / 1e9:,.0f} GB/s {how}" for how, rate in known.items() if rate is not None]
    weights = [] if account.weight_bytes is None else [f"{account.weight_bytes / 1e9:,.3g} GB of weights"]
    return [line] if (line := ", ".join([*rates, *weights])) else []


def _grid(account: Account) -> list[str]:
    columns = [column for column in COLUMNS if any(column[2](account, step) is not None for step in account.steps)]
    if not account.steps:
        return []
    cells = [[write(figure(account, step)) for _, _, figure, write in columns] for step in account.steps]
    rows = [[first for first, *_ in columns], [second for _, second, *_ in columns], *cells]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    return lines if lines[0] else lines[1:]


def _shared(account: Account) -> list[str]:
    """The hit rate, and what it makes of the gain."""
    return [] if account.hit_rate is None else [f"hit rate: {100 * account.hit_rate:.1f} %"]


def _captured(account: Account) -> list[str]:
    """What captures cost: how much of it torch.compile takes, and when they are repaid."""
    spent = [step.capture for step in account.steps if step.capture is not None]
    shares = [step.compile_share for step in account.steps if step.compile_share is not None]
    lines = []
    if shares:
        bounds = dict.fromkeys([percent(min(shares)), percent(max(shares))])
        lines.append(f"torch.compile takes {' to '.join(bounds)} of the capture")
    repaid = [(step.batch, step.repaid) for step in account.steps if step.repaid is not None]
    if repaid:
        each = ", ".join(f"{replays:,} at batch {batch}" for batch, replays in repaid)
        lines.append(f"captures took {_times(sum(spent), 1.0)} s; replays until each is repaid: {each}")
    return lines


def _prefill(account: Account) -> list[str]:
    """The verdict on prefill, where it is not the only one."""
    alone = not account.steps and account.hit_rate is None
    return [] if account.prefill is None or alone else [f"prefill: {on_prefill(account.prefill)}"]


def _notes(account: Account) -> list[str]:
    of_steps = [f"batch {step.batch}: {note}" for step in account.steps for note in step.notes]
    of_prefill = [f"prefill: {note}" for note in (account.prefill.notes if account.prefill else ())]
    versions = [", ".join(f"{name} {version}" for name, version in (account.versions or {}).items())]
    fast = [step.batch for step in account.steps if (account.floor_share(step) or 0.0) > CREDIBLE]
    told = (
        f"the floor at batch {', '.join(map(str, fast))} is above the step, so less is read from memory than reckoned"
    )
    return [*account.notes, *of_steps, *of_prefill, *([told] if fast else []), *filter(None, versions)]


def _told(sentences: Iterable[str]) -> list[str]:
    wrap = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [line for sentence in sentences for line in wrap.wrap(literal(sentence))]
