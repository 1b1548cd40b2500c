"""Text of batch sizes -> snapshots: one a line or in a column, in the order of time, or sizes and calls of each."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from itertools import islice
from typing import NamedTuple

from graphprobe.buckets import MAX_BUCKET
from graphprobe.errors import SourceError
from graphprobe.tools.findings import short
from graphprobe.tools.logs import Call, Told, told

SIZES = ("batch_size", "batch", "bs", "size", "n", "rows", "tokens", "requests", "num_tokens", "num_reqs", "num_seqs")
"""Headers of a column of sizes, the best first."""

CALLS = ("calls", "count", "counts", "times", "steps")
"""Headers of a column that says how many calls of a size there were."""

NAMED = 3
"""Bad lines that are told one by one."""

WHOLE = re.compile(r"\+?([0-9]{1,15})(?:\.0*)?")
APART = b" \t,;"
TO_LINES = bytes.maketrans(APART, b"\n" * len(APART))
HINT = "write whole numbers, one a line, in a column batch_size, or as size,calls"


class Columns(NamedTuple):
    """How a text of sizes is laid out.

    ``calls`` is None where each line is one call, ``width`` where a header says which column is which.
    """

    delimiter: str
    size: int
    calls: int | None
    width: int | None

    @property
    def timed(self) -> bool:
        """Whether the lines are in the order of time."""
        return self.calls is None


def read(body: bytes, name: str, parts: int) -> Told | None:
    """What a text of sizes says, in up to ``parts`` windows; None where the text is none.

    SourceError names ``name`` and the lines that are no sizes.
    """
    body = _a_line_each(body)
    begin = next((n for n, line in enumerate(io.BytesIO(body)) if not _blank(line)), 0)
    columns = _columns(_text(next(islice(io.BytesIO(body), begin, None), b"")))
    if columns is None:
        return None
    begin += columns.width is None
    # Line by line: a list of all would take many times what the text takes.
    stream = islice(io.BytesIO(body), begin, None)
    stretches = [Counter(islice(stream, n)) for n in _lengths(body.count(b"\n") - begin, parts if columns.timed else 1)]
    known = {line: _call(line, columns) for line in set().union(*stretches)}
    if None in known.values():
        raise SourceError(f"{name}: no batch size in {_bad(body, begin, known)}. hint: {HINT}")
    groups = [Counter[Call]() for _ in stretches]
    for calls, lines in zip(groups, stretches, strict=True):
        for line, times in lines.items():
            size, each = known[line] or (0, 0)
            calls[Call(size)] += times * each
    if not any(calls.total() for calls in groups):
        raise SourceError(f"{name}: no batch size in it. hint: {HINT}")
    found = told("sizes", groups, ["sizes alone do not tell what served them: all calls count as eager"])
    return found if columns.timed else found._replace(windows=())


def _a_line_each(body: bytes) -> bytes:
    """The text with a line feed after every line; where all sizes are on one, as ``[1, 2, 2, 4]``, a line for each."""
    if b"\r" in body:
        body = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    bare = body.strip(b" \t\n[]")
    # Two numbers are a size and its calls.
    if not bare.translate(None, b"0123456789" + APART) and len(bare.translate(TO_LINES).split(None, 2)) > 2:
        body = bare.translate(TO_LINES)
    return body if body.endswith(b"\n") else body + b"\n"


def _lengths(lines: int, parts: int) -> list[int]:
    """How many lines are in each of up to ``parts`` stretches of the same length."""
    count = min(parts, lines)
    return [(n + 1) * lines // count - n * lines // count for n in range(count)]


def _bad(body: bytes, begin: int, known: dict[bytes, tuple[int, int] | None]) -> str:
    """The lines that are no sizes: the first by number and text, and how many more there are."""
    lines = ((n, line) for n, line in enumerate(io.BytesIO(body), start=1) if n > begin and known[line] is None)
    first = ", ".join(f"line {n} ({short(_text(line), 40)})" for n, line in islice(lines, NAMED))
    more = sum(1 for _ in lines)
    return first + (f" and {more:,} more" if more else "")


def _columns(text: str) -> Columns | None:
    """The layout that the first line tells; None where that is no text of sizes."""
    delimiter = next((mark for mark in ",;\t" if mark in text), " ")
    cells = _cells(text, delimiter)
    if all(cell and cell[0] in "+-.0123456789" for cell in cells):
        return Columns(delimiter, 0, len(cells) - 1 or None, len(cells)) if 0 < len(cells) <= 2 else None
    names = [cell.lower().replace(" ", "_") for cell in cells]
    size, calls = (next((names.index(n) for n in known if n in names), None) for known in (SIZES, CALLS))
    return None if size is None else Columns(delimiter, size, calls, None)


def _call(line: bytes, columns: Columns) -> tuple[int, int] | None:
    """The size on a line and how many calls it stands for: none on an empty one. None where it is no size."""
    if _blank(line):
        return 0, 0
    cells = _cells(_text(line), columns.delimiter)
    if columns.width not in (None, len(cells)):
        return None
    size = _whole(cells, columns.size)
    calls = 1 if columns.calls is None else _whole(cells, columns.calls)
    return None if size is None or calls is None or size > MAX_BUCKET else (size, calls)


def _whole(cells: list[str], column: int) -> int | None:
    match = WHOLE.fullmatch(cells[column]) if column < len(cells) else None
    return int(match[1]) if match else None


def _blank(line: bytes) -> bool:
    return not line.strip() or line.lstrip().startswith(b"#")


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").strip()


def _cells(text: str, delimiter: str) -> list[str]:
    if delimiter == " ":
        return text.split()
    try:
        return [cell.strip() for cell in next(csv.reader([text], delimiter=delimiter), [])]
    except csv.Error:
        return []
