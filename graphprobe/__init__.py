"""graphprobe: which forwards ran as a CUDA graph, which fell back to eager, why, and what each path cost.

The public names. Importing this package imports the standard library only: torch comes with `capture`, a metrics
client with `start_exporter`, when they are first used.

`snapshot`, `observe` and `instrument` are functions, and also the names of the modules that define their types: take
those with ``from graphprobe.snapshot import Row``, since ``import graphprobe.snapshot as name`` yields the function.
"""

from __future__ import annotations

__version__ = "0.1.0"

import sys
from types import ModuleType

from graphprobe.buckets import coverage, decode_buckets
from graphprobe.errors import ConfigError, DidNotInstrument, GraphprobeError, SourceError
from graphprobe.ledger import LEDGER, ignore
from graphprobe.observe import observe
from graphprobe.reasons import FallbackReason

TYPE_CHECKING = False  # typing is a third of what `import graphprobe` took
if TYPE_CHECKING:
    from graphprobe.export.exporter import start_exporter
    from graphprobe.export.otel import start_otel
    from graphprobe.graphed import capture
    from graphprobe.instrument import instrument, uninstrument
    from graphprobe.snapshot import Snapshot
    from graphprobe.tools.account import account
    from graphprobe.tools.advisor import advise
    from graphprobe.tools.table import table
    from graphprobe.tools.throughput import compare_steps

__all__ = [
    "ConfigError",
    "DidNotInstrument",
    "FallbackReason",
    "GraphprobeError",
    "Snapshot",
    "SourceError",
    "account",
    "advise",
    "capture",
    "compare_steps",
    "coverage",
    "decode_buckets",
    "ignore",
    "instrument",
    "observe",
    "snapshot",
    "start_exporter",
    "start_otel",
    "table",
    "uninstrument",
]

_LAZY = {
    "Snapshot": "graphprobe.snapshot",
    "account": "graphprobe.tools.account",
    "advise": "graphprobe.tools.advisor",
    "capture": "graphprobe.graphed",
    "compare_steps": "graphprobe.tools.throughput",
    "instrument": "graphprobe.instrument",
    "start_exporter": "graphprobe.export.exporter",
    "start_otel": "graphprobe.export.otel",
    "table": "graphprobe.tools.table",
    "uninstrument": "graphprobe.instrument",
}


def snapshot() -> Snapshot:
    """A frozen copy of everything counted in this process; safe from any thread."""
    return LEDGER.snapshot()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    # An import of a submodule binds its name in the package: not over a function that has the same name.
    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("instrument", "observe", "snapshot") or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


# Hidden from type checkers, to which it would make every misspelt name valid.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value
