"""What an account comes to: a verdict in words, with the number behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from graphprobe.tools.forecast import CREDIBLE, expected, predicted_graph
from graphprobe.tools.parts import Prefill, Step
from graphprobe.tools.table import percent
from graphprobe.tools.throughput import WORTH

if TYPE_CHECKING:
    from graphprobe.tools.balance import Account

GRAPHS = "turn graphs on"
USELESS = "no use"
WEIGHTS = "the weights are the bottleneck"
KERNELS = "reduce kernels first"
HITS = "hit rate first"
REFUSED = "no graph can hold this step"
UNKNOWN = "not enough is measured"

SMALL = 0.10
"""Share below which a gain is small: it pays for switching graphs on, not for work on the engine."""

AT_FLOOR = 0.8
"""Share of a step that the floor is from which on the weights decide: a fifth of it at most is left to win."""

SERVED = 0.8
"""Hit rate below which a speed-up that is read is a mixture of two paths; the alert of the dashboards has the same."""

FEW = 1_000
"""Kernels per step below which an engine is fused: by any figure known a graph saves less than 1 ms on the device."""

SHORT = 10e-6
"""Seconds of a kernel from which on fewer of them do not help: it calculates or reads, and its start is little."""


class Verdict(NamedTuple):
    """What to do, one of the words above; why, with the number behind it; and what comes after it."""

    do: str
    why: str
    then: str = ""

    def __str__(self) -> str:
        return f"{self.do}: {self.why}{f'; {self.then}' if self.then else ''}"


def judged(account: Account) -> Verdict:
    """The verdict on all steps: that of the batch where graphs save most, and where others differ, theirs."""
    found = {step.batch: (_on(account, step), _share(account, step)) for step in account.steps}
    if not found:
        return _without_steps(account)
    main = max(found, key=lambda batch: (found[batch][0].do != UNKNOWN, found[batch][1]))
    verdict = _hits(account, next(s for s in account.steps if s.batch == main), found[main][0])
    others: dict[str, list[str]] = {}
    for batch, (other, _) in found.items():
        if other.do != found[main][0].do:
            others.setdefault(other.do, []).append(str(batch))
    told = [f"at batch {', '.join(batches)}: {do}" for do, batches in others.items()]
    return verdict._replace(then="; ".join(filter(None, [verdict.then, *told])))


def on_prefill(prefill: Prefill) -> Verdict:
    """The verdict on graphs for prefill."""
    if (saved := prefill.saved) is None:
        return Verdict(UNKNOWN, "neither the times of a prefill nor the share that a graph saves are known")
    price = "" if prefill.pool_bytes is None else f", for {prefill.pool_bytes / 1e9:,.3g} GB more memory"
    if saved < WORTH:
        below = f", below {percent(WORTH)}" if saved >= 0 else ""
        return Verdict(USELESS, f"{_change(saved)} per prefill{below}{price}")
    return Verdict(GRAPHS, f"{_change(saved)} per prefill{price}")


def _without_steps(account: Account) -> Verdict:
    if account.hit_rate is not None and account.hit_rate < SERVED:
        return Verdict(HITS, _missed(account.hit_rate))
    if account.prefill is not None:
        return on_prefill(account.prefill)
    return Verdict(UNKNOWN, f"a hit rate of {_rate(account.hit_rate or 0.0)}, and no time of a step")


def _on(account: Account, step: Step) -> Verdict:
    """The verdict on one step, whatever the hit rate is."""
    if step.refused:
        return Verdict(REFUSED, f"at batch {step.batch} {step.refused}", _would(account, step))
    saved, how = _saved(account, step)
    if saved is None:
        return _untimed(account, step)
    share = _share(account, step)
    why = _told(step, saved, share, how)
    if share < WORTH:
        return _useless(account, step, why)
    left = _above_floor(account, step)
    if share < SMALL and left is not None and left > saved and _many(account, step):
        return Verdict(KERNELS, f"{_left(account, step)}, more than the {_ms(saved)} that a graph saves", why)
    certain = "small but certain: " if share < SMALL and not how else ""
    return Verdict(GRAPHS, certain + why, _next(account, step))


def _would(account: Account, step: Step) -> str:
    """What a graph would save, where something tells."""
    graph = predicted_graph(account, step)
    if graph is not None and step.eager is not None and graph < step.eager:
        return f"one would save about {_ms(step.eager - graph)} of {_ms(step.eager)}"
    return f"one would save {_device(account, step)}" if step.kernels else ""


def _device(account: Account, step: Step) -> str:
    """What the kernels let expect."""
    gain = expected(step.kernels or 0, account.device, account.per_kernel)
    between = " to ".join(dict.fromkeys(map(_ms, (gain.least, gain.most))))
    return f"{between} of the device's time, by {step.kernels:,} kernels"


def _saved(account: Account, step: Step) -> tuple[float | None, str]:
    """Seconds that a graph saves of an eager step, and whether that is measured or predicted."""
    if step.gain is not None:
        return step.gain, ""
    graph = predicted_graph(account, step)
    return (None, "") if step.eager is None or graph is None else (step.eager - graph, ", as predicted")


def _share(account: Account, step: Step) -> float:
    """The same as a share of the eager step; 0 where it is not known."""
    return (_saved(account, step)[0] or 0.0) / (step.eager or 1.0)


def _told(step: Step, saved: float, share: float, how: str) -> str:
    eager = step.eager or 0.0
    if saved < 0:
        return f"at batch {step.batch} a replay takes {_ms(eager - saved)}, an eager step {_ms(eager)}"
    text = f"at batch {step.batch} a graph saves {_ms(saved)} of {_ms(eager)} ({_tenth(share)}){how}"
    host, device = step.host_part, step.device_part
    if host is None or device is None or device < 0:
        return text
    each = "" if step.device_per_kernel is None else f" ({step.device_per_kernel * 1e6:.2f} us per kernel)"
    return f"{text}: {_ms(host)} of waiting for the host, {_ms(device)} of the device's own{each}"


def _useless(account: Account, step: Step, why: str) -> Verdict:
    """Graphs save nothing: because the memory is the limit, or the number of kernels, or their work."""
    floor, share = _floor(account, step)
    none = f"graphs are no use: {why}"
    if floor is not None and share is not None and share >= AT_FLOOR:
        return Verdict(WEIGHTS, f"the floor of {_ms(floor)} is {percent(share)} of the step", none)
    if _many(account, step) and _above_floor(account, step) is not None:
        return Verdict(KERNELS, _left(account, step), none)
    return Verdict(USELESS, f"{why}, below {percent(WORTH)}", _next(account, step))


def _untimed(account: Account, step: Step) -> Verdict:
    """Without the time of a graph: what the floor leaves, or what the kernels let expect."""
    floor, share = _floor(account, step)
    if step.eager is None and step.graph is not None:
        return Verdict(UNKNOWN, f"at batch {step.batch} a replay takes {_ms(step.graph)}, and no eager step was timed")
    if step.eager is not None and floor is not None and share is not None and 1 - share < WORTH:
        return Verdict(WEIGHTS, f"the floor of {_ms(floor)} is {percent(share)} of an eager step of {_ms(step.eager)}")
    if account.device in ("", "cpu", "meta") and step.eager is not None:
        return Verdict(UNKNOWN, f"no graph was measured on {account.device or 'this device'}: that needs a GPU")
    if not step.kernels:
        return Verdict(UNKNOWN, f"batch {step.batch} has no time of a graph and no number of kernels")
    gain = expected(step.kernels, account.device, account.per_kernel)
    bounds = {gain.least: "", gain.most: ""}
    between = " to ".join(map(_ms, bounds))
    each = f"{' to '.join(f'{bound / step.kernels * 1e6:.3g}' for bound in bounds)} us each, {gain.source}"
    why = f"{step.kernels:,} kernels let expect {between} less per step on the device alone ({each})"
    if step.eager is not None and gain.least > step.eager:
        return Verdict(UNKNOWN, f"{step.kernels:,} kernels cannot run in an eager step of {_ms(step.eager)}")
    if step.eager is not None and gain.most < WORTH * step.eager:
        return Verdict(USELESS, f"{why}, below {percent(WORTH)} of an eager step of {_ms(step.eager)}, host aside")
    if step.kernels < FEW:
        return Verdict(GRAPHS, f"small but certain: {why}")
    return Verdict(GRAPHS, why, "the host's part comes on top; fewer kernels save both without a graph, too")


def _hits(account: Account, step: Step, verdict: Verdict) -> Verdict:
    """Graphs that are worth it are no use to calls that they do not serve."""
    rate = account.hit_rate
    if rate is None or rate >= SERVED or verdict.do not in (GRAPHS, UNKNOWN):
        return verdict
    why = _missed(rate)
    if step.eager is not None and step.graph is not None:
        mean = rate * step.graph + (1 - rate) * step.eager
        why += f", so a mean step takes {_ms(mean)} instead of {_ms(step.graph)}"
    return Verdict(HITS, why, f"then {verdict}" if verdict.do == GRAPHS else "")


def _next(account: Account, step: Step) -> str:
    """What decides once the graph is there."""
    floor, share = _floor(account, step)
    if step.graph is None:
        return f"no graph was measured: {', '.join(step.notes)}" if step.notes else "no graph was measured"
    if floor is None or share is None:
        return ""
    if share >= AT_FLOOR:
        return f"then {WEIGHTS}: the floor of {_ms(floor)} is {percent(share)} of a replay"
    if _short(step):
        return f"then the rest above the floor is kernels: {_left(account, step)}"
    return f"then the kernels' own work: a replay takes {_ms(step.graph)}, the floor is {_ms(floor)}"


def _floor(account: Account, step: Step) -> tuple[float | None, float | None]:
    """The floor and its share of the step; None where the step is faster, so that it is no floor."""
    share = account.floor_share(step)
    return (None, None) if share is None or share > CREDIBLE else (account.floor(step), share)


def _above_floor(account: Account, step: Step) -> float | None:
    floor, total = _floor(account, step)[0], step.graph or step.eager
    return None if floor is None or total is None else max(0.0, total - floor)


def _left(account: Account, step: Step) -> str:
    left, kernels = _above_floor(account, step) or 0.0, step.kernels or 1
    floor = _ms(account.floor(step) or 0.0)
    return f"{_ms(left)} above the floor of {floor} are {kernels:,} kernels, {left / kernels * 1e6:.1f} us each"


def _short(step: Step) -> bool:
    """Whether the kernels are so short that starting them is most of what they take."""
    total = step.graph or step.filled or step.eager
    return bool(step.kernels) and total is not None and total / (step.kernels or 1) < SHORT


def _many(account: Account, step: Step) -> bool:
    return step.kernels is not None and step.kernels >= FEW and _short(step)


def _missed(rate: float) -> str:
    return f"graphs serve {_rate(rate)} of the calls, below {percent(SERVED)}; the others take an eager step's time"


def _rate(share: float) -> str:
    return _tenth(share) if 0 < share < 1 else percent(share)


def _change(share: float) -> str:
    return f"{abs(100 * share):.1f} % {'less' if share >= 0 else 'more'} time"


def _tenth(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ms(seconds: float) -> str:
    """Milliseconds, three digits."""
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 1 else f"{seconds * 1e3:,.0f} ms"
