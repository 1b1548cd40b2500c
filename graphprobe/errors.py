"""What graphprobe raises, and what it does with a failure of its own.

GraphprobeError
├── ConfigError        (ValueError)    an argument outside the contract; raised where it was passed
├── CaptureError       (RuntimeError)  a graph could not be made; ``outcome`` is ``error`` or ``oom``
├── DidNotInstrument   (RuntimeError)  an engine that was asked for cannot be observed
├── ExporterError      (OSError)       metrics cannot be served or written: a port, an address, a folder
└── SourceError        (ValueError)    a reader was given something that is no snapshot

A failure of graphprobe itself never reaches the host: it is counted under its place, logged once, and the
forward stays eager. ``GRAPHPROBE_STRICT=1`` raises it instead, which graphprobe's own tests do.
"""

from __future__ import annotations

import os


class GraphprobeError(Exception):
    """Base of everything graphprobe raises on purpose."""


class ConfigError(GraphprobeError, ValueError):
    """An argument is outside the contract; the message says which, its value and what to write."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"{what}. hint: {hint}" if hint else what)
        self.what = what
        self.hint = hint


class CaptureError(GraphprobeError, RuntimeError):
    """A graph could not be made; the first cause is ``__cause__``."""

    def __init__(self, what: str, outcome: str = "error") -> None:
        super().__init__(what)
        self.outcome = outcome


class DidNotInstrument(GraphprobeError, RuntimeError):
    """An engine that was asked for cannot be observed: not found, or not in a supported version."""

    def __init__(self, engine: str, found: str | None, supported: str, hint: str = "") -> None:
        have = f"found {found}" if found else "not found"
        text = f"{engine}: {have}, supported {supported}"
        super().__init__(f"{text}. hint: {hint}" if hint else text)
        self.engine = engine
        self.found = found
        self.supported = supported
        self.hint = hint


class ExporterError(GraphprobeError, OSError):
    """Metrics cannot be served or written: port in use, address not available, folder not writable. Has ``errno``."""


class SourceError(GraphprobeError, ValueError):
    """A reader was given text, a file or a URL that holds no snapshot."""


internal_errors: dict[str, int] = {}
"""Failures of graphprobe itself in this process, by place; read by the exporters."""


def log(level: int, message: str, *values: object, error: BaseException | None = None) -> None:
    """Log for what `import graphprobe` loads: logging itself comes with the first message."""
    try:
        import logging
    except ImportError:
        # The interpreter is ending, and nothing was logged before.
        return
    try:
        logging.getLogger("graphprobe").log(level, message, *values, exc_info=error)
    except Exception:
        # A handler or a filter of the host's, or another module of this name: nothing of ours may fail for it.
        if strict():
            raise


INFO, WARNING, ERROR = 20, 30, 40
"""Levels of logging."""


def strict() -> bool:
    """Whether graphprobe's own failures are raised (``GRAPHPROBE_STRICT=1``)."""
    return os.environ.get("GRAPHPROBE_STRICT", "") not in ("", "0")


def internal_error(where: str, error: BaseException) -> None:
    """Count a failure of graphprobe's own under ``where``; log the first one, or raise it under strict."""
    internal_errors[where] = internal_errors.get(where, 0) + 1
    if strict():
        raise error
    if internal_errors[where] == 1:
        log(ERROR, "graphprobe recorded less; your forward is unaffected (%s)", where, error=error)
