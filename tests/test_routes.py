from __future__ import annotations

import threading

import pytest
import torch

from graphprobe.graphed import capture
from graphprobe.reasons import FallbackReason
from graphprobe.routes import Life, Schedule, strays
from graphprobe.signature import dispatch_modes


@pytest.mark.usefixtures("own_forwards")
def test_replays_exclude_one_another() -> None:
    """Eight threads that replay a graph which adds in place: no addition and no call is lost, and all of them end."""
    total, x = torch.zeros(3), torch.ones(2, 3)

    def add(x: torch.Tensor) -> torch.Tensor:
        total.add_(x[0])
        return x + 0

    forward = capture(add, buckets=[2], backend="recorder")

    def work() -> None:
        with torch.no_grad():
            for _ in range(200):
                forward(x)

    with torch.no_grad():
        forward(x), forward(x)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [False] * 8 == [thread.is_alive() for thread in threads]
    assert [1602.0] * 3 == total.tolist()
    assert (1601, 1) == (forward.snapshot().graph_calls, forward.snapshot().eager_calls)


@pytest.mark.usefixtures("own_forwards")
def test_a_callback_that_calls_the_wrapper_does_not_wait_for_itself() -> None:
    """prepare= may call the forward again: that call is served, and nothing hangs."""
    inner: list[torch.Tensor] = []

    def prepare(bucket: int, x: torch.Tensor) -> None:
        if len(inner) < 8:
            inner.append(x)
            inner.append(forward(x + 1))

    forward = capture(lambda x: x * 2, buckets=[2], backend="recorder", prepare=prepare)
    x, results = torch.ones(2, 3), []

    def work() -> None:
        with torch.no_grad():
            results.extend(forward(x) for _ in range(6))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert [[[2.0] * 3] * 2] * 6 == [r.tolist() for r in results]


def due_at(calls: int, **periods: int) -> dict[int, list[str]]:
    """Call number -> what a route that counts ``gap`` calls down is told."""
    schedule, found = Schedule(**periods), {}
    left = schedule.gap
    for call in range(1, calls + 1):
        left -= 1
        if not left:
            found[call] = schedule.due()
            left = schedule.gap
    return found


def test_each_period_comes_round_on_its_own() -> None:
    """From the second call on, a period of 4 is due at every fourth call and one of 6 at every sixth."""
    assert {2: ["time", "check"], 6: ["time"], 8: ["check"], 10: ["time"], 14: ["time", "check"]} == due_at(
        17, time=4, check=6
    )


def test_a_period_of_one_is_due_at_every_call() -> None:
    """One in one is every call, the first included."""
    assert {n: ["verify"] for n in range(1, 6)} == due_at(5, verify=1)


def test_a_period_of_zero_is_never_due() -> None:
    """Off is off, alone and beside others."""
    assert {} == due_at(1000, time=0)
    assert {2: ["check"], 5: ["check"], 8: ["check"]} == due_at(10, time=0, check=3)


def test_a_life_ends_with_its_reason() -> None:
    """A graph lives until something is lost, and then says what."""
    life = Life()
    assert life.live
    life.lose(FallbackReason.WEIGHTS_MOVED)
    assert (False, FallbackReason.WEIGHTS_MOVED) == (life.live, life.reason)


def test_strays() -> None:
    """A static tensor elsewhere and a narrow one of a width out of bounds are seen; without either nothing is asked."""
    cache, table = torch.zeros(4), torch.zeros(2, 5)
    check = strays([(0, cache.data_ptr())], [(1, 1, 2, 5)], None, None)
    assert check is not None
    assert not check((cache, table))
    assert not check((cache, table[:, :3]))
    assert check((cache.clone(), table))
    assert check((cache, torch.zeros(2, 6)))
    assert check((cache, torch.zeros(2, 1)))
    assert None is strays([], [], None, None)


def test_strays_under_autocast() -> None:
    """A guard sees that autocast is on, not its dtype: the modes are compared where it was on."""
    with torch.autocast("cpu", torch.bfloat16):
        check = strays([], [], None, dispatch_modes())
        assert check is not None
        assert not check(())
    with torch.autocast("cpu", torch.float16):
        assert check(())
