from __future__ import annotations

import threading

import pytest
import torch

from graphprobe.reasons import FallbackReason
from graphprobe.routes import Life, Schedule, Turn, strays


def test_a_turn_excludes() -> None:
    """Eight threads that add non-atomically under the turn lose nothing, and all of them end."""
    turn, total = Turn(), [0]

    def work(how: int) -> None:
        for _ in range(400):
            if how % 2:
                with turn:
                    bump()
            else:
                try:
                    turn.pop()
                except IndexError:
                    assert turn.wait()
                bump()
                turn.push(None)

    def bump() -> None:
        seen = total[0]
        for _ in range(20):
            pass
        total[0] = seen + 1

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [False] * 8 == [thread.is_alive() for thread in threads]
    assert 3200 == total[0]


def test_a_waiter_gets_the_turn_once_it_is_given_back() -> None:
    """Waiting ends with the turn held, and never before the holder has let go."""
    turn, order = Turn(), []
    turn.pop()

    def wait() -> None:
        order.append("waits")
        turn.wait()
        order.append("has it")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not order:
        pass
    order.append("let go")
    turn.push(None)
    thread.join(30)
    assert ["waits", "let go", "has it"] == order
    with pytest.raises(IndexError):
        turn.pop()


def test_a_turn_is_given_back_when_its_block_raises() -> None:
    """An exception inside leaves the turn free for the next one."""
    turn = Turn()
    with pytest.raises(ValueError, match="inside"), turn:
        raise ValueError("inside")
    turn.pop()


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
    """A static tensor that lies elsewhere and a narrow one that is too wide are seen; without either nothing is asked."""
    cache, table = torch.zeros(4), torch.zeros(2, 5)
    check = strays([(0, cache.data_ptr())], [(1, 1, 5)])
    assert check is not None
    assert not check((cache, table))
    assert not check((cache, table[:, :3]))
    assert check((cache.clone(), table))
    assert check((cache, torch.zeros(2, 6)))
    assert None is strays([], [])
