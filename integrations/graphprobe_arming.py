"""What `graphprobe run` puts into each Python process below it: an eye on the imports, and a table at the end.

Most of these processes run no engine. So it is the standard library only, and little of it: the integration of an
engine, and all else of graphprobe, is imported when the engine has been. This module is found where graphprobe is
installed, and nowhere else; `graphprobe/armed/sitecustomize.py` calls `start`.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ENGINES = ("minisgl", "nanovllm", "sglang", "vllm")
"""The packages that are waited for: those of `graphprobe.instrument.INTEGRATIONS`."""

_shown: int | None = None
"""The process that has shown its table: a child that was forked since then has one of its own."""


class Watcher:
    """A finder of modules that finds none: it arms an engine when the import of its package has ended."""

    def __init__(self) -> None:
        self._waiting = set(ENGINES)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders say; an engine's loader then calls back."""
        if name not in self._waiting:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                self._attach(name, spec)
                return spec
        return None

    def _attach(self, name: str, spec: ModuleSpec) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)

        def exec_module(module: ModuleType) -> None:
            execute(module)  # type: ignore[misc]
            if module.__name__ == name:
                vars(loader).pop("exec_module", None)
                self._arm(name)

        try:
            if execute is not None:
                # On this one loader, which stays what it is.
                loader.exec_module = exec_module  # type: ignore[method-assign, union-attr]
                return
        except AttributeError:
            pass
        # A folder without __init__.py has no loader that runs: its modules come after this.
        self._arm(name)

    def _arm(self, name: str) -> None:
        if name in self._waiting:
            self._waiting.discard(name)
            arm(name)


def arm(engine: str) -> None:
    """Place the hooks of ``engine`` in this process; what is wrong is logged, never raised."""
    try:
        from importlib import import_module

        from graphprobe.errors import ERROR, log
    except Exception:
        return
    try:
        from graphprobe.instrument import INTEGRATIONS

        import_module(INTEGRATIONS[engine]).INTEGRATION.automatic()
    except Exception as error:
        log(ERROR, "%s is not observed, and runs as without graphprobe", engine, error=error)


def start() -> None:
    """Arm the engines that this process will import, where GRAPHPROBE is 1; with GRAPHPROBE_TABLE=1 show its table.

    May be called again. No thread is started and nothing is served here.
    """
    if os.environ.get("GRAPHPROBE") == "1" and not any(type(finder) is Watcher for finder in sys.meta_path):
        sys.meta_path.insert(0, Watcher())
        if os.environ.get("GRAPHPROBE_TABLE") == "1":
            import atexit

            atexit.register(show)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(before=_before_fork)


def start_below_run() -> None:
    """The same for a tool whose own `sitecustomize` comes in front of ours and hands nothing on (OpenTelemetry)."""
    if "GRAPHPROBE_RUN" in os.environ:
        start()


def show() -> None:
    """Write the table of this process to its stderr, where something was counted.

    Not where an exception has ended it, whose traceback stays the last that is read.
    """
    global _shown
    ended = getattr(sys, "last_type", None) or SystemExit
    if "graphprobe.ledger" not in sys.modules or issubclass(ended, Exception) or _shown == os.getpid():
        return
    _shown = os.getpid()
    try:
        _write()
    except Exception as error:
        from graphprobe.errors import internal_error

        internal_error("table", error)
    if ended is KeyboardInterrupt:
        from contextlib import suppress

        # Python would end by SIGINT, and forgets that whenever a text is executed, which happens in many an import.
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # noqa: S102


def _write() -> None:
    from graphprobe.ledger import LEDGER

    counted = LEDGER.snapshot()
    if sys.stderr and not sys.stderr.closed and any(forward.rows for forward in counted.forwards.values()):
        from graphprobe.tools.table import table

        # In one piece: other processes of the engine write theirs now, too.
        sys.stderr.write(f"\ngraphprobe: process {_name()}\n\n{table(counted)}")
        sys.stderr.flush()


def _name() -> str:
    processes = sys.modules.get("multiprocessing.process")
    return str(os.getpid()) if processes is None else f"{os.getpid()} ({processes.current_process().name})"


def _before_fork() -> None:
    # multiprocessing ends its children without atexit, and forgets what was to be done at the end of their parent.
    util = sys.modules.get("multiprocessing.util")
    register = getattr(util, "register_after_fork", None)
    if register is not None and getattr(util, "_graphprobe", None) is None:
        util._graphprobe = show  # type: ignore[union-attr]
        register(show, lambda _: util.Finalize(None, show, exitpriority=-1000))  # type: ignore[union-attr]
