"""The bytes of a SOURCE: an http(s) URL, a file, or ``-`` for standard input; limited in size and in time.

What a source may do to its readers - silence, a byte now and then, no end, no HTTP - is a SourceError that says what to
do.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from collections.abc import Callable

from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools.findings import short
from graphprobe.tools.web import Answer, Wanted, ask, read_all

LONGEST = 86_400.0
"""Longest time that may be asked for, in seconds."""


def fetch(name: str, wanted: Wanted, limit: int, timeout: float, address: Callable[[str], str]) -> Answer:
    """The answer of ``name``, of which ``address`` makes the URL to ask; more than ``limit`` bytes are not read.

    ``timeout`` in seconds is for the whole answer, redirects included; to connect, each address of a host may take as
    long. Standard input may take what it needs. SourceError where there is nothing to read, ConfigError for a time that
    is none.
    """
    seconds(timeout, "timeout")
    if "://" in name:
        return ask(address(name), wanted, limit, timeout)
    try:
        return Answer(_standard_input(limit) if name == "-" else _file(name, limit, timeout))
    except SourceError:
        raise
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise SourceError(f"{short(name)}: {what}. hint: give an http:// URL, {wanted.file}, or -") from error


def seconds(value: float, name: str) -> float:
    """``value``, where it is a time that can be waited; ConfigError where it is not."""
    if not 0 < value <= LONGEST:
        raise ConfigError(f"{name} must be a time in seconds, above 0 and up to a day, got {value!r}")
    return value


def _standard_input(limit: int) -> bytes:
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise SourceError("-: no bytes come from standard input. hint: pipe something in, or give a URL or a file")
    return read_all(stream.read, limit)


def _file(name: str, limit: int, timeout: float) -> bytes:
    if stat.S_ISFIFO(os.stat(name).st_mode):
        return _pipe(name, limit, time.monotonic() + timeout)
    with open(name, "rb") as file:
        return read_all(file.read, limit)


def _pipe(name: str, limit: int, deadline: float) -> bytes:
    # To open a pipe that nobody writes to would wait for ever.
    pipe = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)

    def read(size: int) -> bytes:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise SourceError(f"{short(name)}: a pipe that did not end in time. hint: does anything write into it?")
        return os.read(pipe, size)

    try:
        return read_all(read, limit)
    finally:
        os.close(pipe)
