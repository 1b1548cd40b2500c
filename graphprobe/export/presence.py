"""Who of several processes that share a directory is alive: each holds a lock on a file of its own.

A lock ends with its process, however that ends, and says so in another container too, where a process number would not.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 5.0
"""Most seconds that a start waits for another one, which may have been stopped in the middle of its own."""


_locks: set[int] = set()
_claiming = threading.RLock()


def claim(path: Path) -> int | None:
    """Lock a file, made with its folder where it is missing. What holds the lock, or None where another has it."""
    with _claiming:
        found = _opened(path)
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(found)
            return None
        except OSError:
            os.close(found)
            raise
        _locks.add(found)
        return found


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


def release(lock: int) -> None:
    """Let go of a lock. One that a fork has let go of in this child already is left alone."""
    if lock in _locks:
        _locks.discard(lock)
        os.close(lock)


def _after_fork() -> None:
    # A child's copy would hold the lock as long as the child lives.
    for lock in list(_locks):
        release(lock)
    _claiming.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_claiming.acquire, after_in_parent=_claiming.release, after_in_child=_after_fork)


def holds(lock: int, path: Path) -> bool:
    """Whether a lock is that of the file which is there now."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_ino == os.fstat(lock).st_ino
    return False


class Presence:
    """The own process in a directory: ``name`` is its own, ``place`` the lowest number that no living one has.

    Where no other process is alive this is a new start: what dead ones have counted is removed. ``name`` is one that
    this process had before.
    """

    def __init__(self, directory: Path, name: str = "") -> None:
        self.directory = directory
        self.name = name or _fresh()
        with self._alone(PATIENCE) as alone:
            if alone and not self._others():
                self._start_anew()
            self._arrive()

    @contextlib.contextmanager
    def _alone(self, patience: float) -> Iterator[bool]:
        """While no other process of the directory arrives or clears up; False where that took too long."""
        path, end = self.directory / "graphprobe.start", time.monotonic() + patience
        while (held := claim(path)) is None and time.monotonic() < end:
            time.sleep(0.01)
        try:
            yield held is not None
        finally:
            if held is not None:
                release(held)

    def _arrive(self) -> None:
        while (own := claim(self.directory / f"{self.name}.lock")) is None:
            self.name = _fresh()
        self._own = own
        self.place, held = 0, claim(self._place(0))
        while held is None:
            self.place += 1
            held = claim(self._place(self.place))
        self._held = [own, held]
        self._owned: dict[str, bool] = {}

    def _place(self, number: int) -> Path:
        return self.directory / f"graphprobe.{number}.place"

    def renew(self) -> bool:
        """Lock again what somebody has removed, as an engine does that clears its directory. Whether there was need."""
        if holds(self._own, self.directory / f"{self.name}.lock"):
            return False
        self.let_go()
        with self._alone(PATIENCE):
            self._arrive()
        return True

    def owns(self, labels: str) -> bool:
        """Whether no other living process of the directory has these labels: who asks first has them."""
        if labels not in self._owned:
            held = claim(self.directory / f"graphprobe.{hashlib.sha256(labels.encode()).hexdigest()[:16]}.labels")
            self._owned[labels] = held is not None
            self._held += [] if held is None else [held]
        return self._owned[labels]

    def clear_up(self) -> None:
        """Remove the gauges of dead processes: their counts stay, since a counter never goes down."""
        with self._alone(0) as alone:
            if alone:
                self._others()

    def _others(self) -> bool:
        """Whether another process is alive; the gauges and locks of those that are not are removed on the way."""
        alive = False
        for lock in self.directory.glob("graphprobe-*.lock"):
            if lock.stem == self.name:
                continue
            held = claim(lock)
            if held is None:
                alive = True
                continue
            self._remove(*_passing(lock.stem))
            lock.unlink(missing_ok=True)
            release(held)
        return alive

    def _start_anew(self) -> None:
        self._remove("*_graphprobe-*.db", *_passing("graphprobe-*"))

    def _remove(self, *patterns: str) -> None:
        for pattern in patterns:
            for file in self.directory.glob(pattern):
                file.unlink(missing_ok=True)

    def leave(self) -> None:
        """Take the gauges away and let go of the locks."""
        try:
            self._remove(*_passing(self.name))
            (self.directory / f"{self.name}.lock").unlink(missing_ok=True)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Let go of the locks."""
        held, self._held = self._held, []
        for lock in held:
            release(lock)


def _fresh() -> str:
    return f"graphprobe-{os.getpid()}-{time.time_ns()}"


def _passing(name: str) -> tuple[str, ...]:
    """What of a process's files ends with it: all but its counts."""
    return f"gauge_*_{name}.db", f"snapshot_{name}.json", f"*_{name}.new"
