"""The way of an engine's metrics out of its processes: the engine's own page, an endpoint of ours, or none."""

from __future__ import annotations

import errno
import os
import stat
import tempfile

from graphprobe import metrics
from graphprobe.errors import WARNING, ExporterError, log
from graphprobe.ledger import Forward


def route(forward: Forward, rank: int, page: str, hint: str, *, shared: bool = True) -> str:
    """Start what serves the metrics of this process; where they are to be found, in words. Never raises.

    ``page`` is what serves the files of PROMETHEUS_MULTIPROC_DIR, where the engine does so (``shared``); an endpoint
    of ours is on GRAPHPROBE_PORT. ``hint`` says what to do where neither is set, once, from rank 0.
    """
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")
    port = os.environ.get("GRAPHPROBE_PORT", "")
    if port and not shared:
        directory = ""
    try:
        if directory:
            # One that is missing ends vLLM's API server; made here, it would do so later and elsewhere.
            os.stat(directory)
            _started(directory, None)
            beside = "; GRAPHPROBE_PORT is not used beside it" if port else ""
            return f"on {page} (through {directory}{beside})" if shared else f"files in {directory}{beside}"
        if port:
            _started(_own_folder(int(port)), int(port))
            return f"on port {port}"
        if rank == 0:
            log(WARNING, "%s", hint)
    except Exception as error:
        # A folder that cannot be written to, a port that is taken or no number: the engine serves all the same.
        own = [f"{name}={value}" for name in ("GRAPHPROBE_PORT", "GRAPHPROBE_ADDR") if (value := os.environ.get(name))]
        setting = f"PROMETHEUS_MULTIPROC_DIR={directory}" if directory else " ".join(own)
        forward.explain("route", f"its steps are counted, but served nowhere: {setting}: {error}")
    return "nowhere"


def label_rank(rank: int) -> None:
    """Have all series of this process say ``rank``, where torch.distributed numbers less than the whole server."""
    if "rank" not in metrics.constant_labels():
        labels = os.environ.get("GRAPHPROBE_LABELS", "")
        os.environ["GRAPHPROBE_LABELS"] = f"{labels},rank={rank}" if labels else f"rank={rank}"


def _own_folder(port: int) -> str:
    """The folder that the ranks of this user share for an endpoint of their own."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK)
    # Below `graphprobe run` the processes of one command, which have its number: another has not this port.
    name = "-".join(filter(None, ("graphprobe", str(os.getuid()), str(port), os.environ.get("GRAPHPROBE_RUN"))))
    path = os.path.join(base if usable else tempfile.gettempdir(), name)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        # Its name can be guessed: what another user has put there would be served, and links in it followed.
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ExporterError(errno.EPERM, f"{path} is there and not this user's alone. hint: remove it") from None
    return path


def _started(directory: str, port: int | None) -> None:
    # Not above: a process that counts nothing starts nothing.
    from graphprobe.export.exporter import start_exporter

    start_exporter(port, os.environ.get("GRAPHPROBE_ADDR", "127.0.0.1"), directory=directory)
