"""Text of batch sizes -> snapshots: one a line or in a column, in the order of time, or sizes and calls of each."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from graphprobe.buckets import MAX_BUCKET
from graphprobe.errors import SourceError
from graphprobe.tools.findings import short
from graphprobe.tools.logs import Call, Told, told

SIZES = ("batch_size", "batch", "bs", "size", "n", "rows", "tokens", "requests", "num_tokens", "num_reqs", "num_seqs")
"""Headers of a column of sizes; the first wins."""

CALLS = ("calls", "count", "counts", "num_calls", "frequency", "freq")
"""Headers of a column that says how many calls of a size there were; the first wins."""

NAMED = 3
"""Bad lines that are told one by one."""

WHOLE = re.compile(r"\+?(0|[1-9][0-9]{0,14})(?:\.(?!000\Z)0*)?")
"""No leading zero, and no ``1.000``: thousands may be written so, as in ``1,024``."""

APART = b" \t,;"
TO_LINES = bytes.maketrans(APART, b"\n" * len(APART))
HINT = "write whole numbers without marks of thousands, one a line, in a column batch_size, or as size,calls"
UNCLEAR = "name the sizes `batch_size` and how often each was called `calls`, and leave out what is neither"
LIST = re.compile(rb"\s*\[[-+.0-9\s,;]+\]\s*")
TO_BLANKS = bytes.maketrans(b"[],;", b"    ")


IN_TIME = "one size a call, in the order of time"
UNSERVED = (
    "sizes alone do not tell what served them: a table counts all as eager, and the hit rates of advice are what each "
    "list would give"
)


class Columns(NamedTuple):
    """How a text of sizes is laid out, in words: ``said``.

    ``calls`` is None where each line is one call, ``width`` is the most cells of a line, and ``names`` are the columns
    of a header; none where there is no header.
    """

    delimiter: str
    size: int
    calls: int | None
    width: int
    said: str
    names: tuple[str, ...] = ()

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
    columns = _columns(_text(next(islice(io.BytesIO(body), begin, None), b"")), name)
    if columns is None:
        return None
    begin += bool(columns.names)
    # Line by line: a list of all would take many times what the text takes.
    stream = islice(io.BytesIO(body), begin, None)
    stretches = [Counter(islice(stream, n)) for n in _lengths(body.count(b"\n") - begin, parts if columns.timed else 1)]
    known = {line: _call(line, columns) for line in set().union(*stretches)}
    if None in known.values():
        raise SourceError(f"{name}: no batch size in {_bad(body, begin, known)}. hint: {HINT}")
    if len(columns.names) == 2 and columns.timed and _may_count(known, columns):
        raise _unclear(name, columns.names)
    groups = [Counter[Call]() for _ in stretches]
    for calls, lines in zip(groups, stretches, strict=True):
        for line, times in lines.items():
            size, each = known[line] or (0, 0)
            calls[Call(size)] += times * each
    if not any(calls.total() for calls in groups):
        raise SourceError(f"{name}: no batch size in it. hint: {HINT}")
    found = told("sizes", groups, [columns.said, UNSERVED])
    return found if columns.timed else found._replace(windows=())


def _a_line_each(body: bytes) -> bytes:
    """The text with a line feed after every line; where all sizes are on one, or in a ``[list]``, a line for each."""
    if b"\r" in body:
        body = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if LIST.fullmatch(body):
        # A line that has one size keeps its number.
        return b"".join(b"\n".join(line.split()) + b"\n" for line in body.translate(TO_BLANKS).split(b"\n"))
    bare = body.strip(b" \t\n")
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


def _columns(text: str, name: str) -> Columns | None:
    """The layout that the first line tells; None where that is no text of sizes, SourceError where it is unclear."""
    delimiter = next((mark for mark in ",;\t" if mark in text), " ")
    cells = _cells(text, delimiter)
    if all(cell and cell[0] in "+-.0123456789" for cell in cells):
        said = IN_TIME if len(cells) == 1 else "sizes from the first column, calls from the second"
        return Columns(delimiter, 0, len(cells) - 1 or None, len(cells), said) if 0 < len(cells) <= 2 else None
    if delimiter == " " and _name(text) in SIZES:
        cells = [text]
    names = tuple(map(_name, cells))
    sizes, calls = _taken(names, SIZES, name), _taken(names, CALLS, name)
    if not sizes:
        return None
    if "n" in sizes[1:]:
        raise _unclear(name, (sizes[0], "n"))
    said = f"{_from('sizes', sizes)}, {_from('calls', calls) if calls else IN_TIME}"
    counted = names.index(calls[0]) if calls else None
    return Columns(delimiter, names.index(sizes[0]), counted, len(names), said, names)


def _name(cell: str) -> str:
    return cell.strip('"').lower().replace(" ", "_")


def _taken(names: tuple[str, ...], known: tuple[str, ...], name: str) -> list[str]:
    """The columns that are known, the one to take first; SourceError where another might be meant as well."""
    found = sorted((n for n in names if n in known), key=known.index)
    if len(found) > 1 and (found[0] != known[0] or found[1] == known[0]):
        raise _unclear(name, found)
    return found


def _may_count(lines: Iterable[bytes], columns: Columns) -> bool:
    """Whether the other of two columns, whose name is not known, may be calls: whole numbers on all lines."""
    other = 1 - columns.size
    if columns.names[other] in SIZES:
        return False
    rows = [_cells(_text(line), columns.delimiter) for line in lines if not _blank(line)]
    return bool(rows) and all(_whole(cells, other) is not None for cells in rows)


def _unclear(name: str, names: Sequence[str]) -> SourceError:
    shown = " and ".join(short(column, 40) or "one without a name" for column in names)
    return SourceError(f"{name}: columns {shown}: unclear which has the sizes, or calls. hint: {UNCLEAR}")


def _from(what: str, names: list[str]) -> str:
    """Which column was taken, and which others might have been meant."""
    return f"{what} from column {names[0]}" + (f" (not {', '.join(names[1:])})" if names[1:] else "")


def _call(line: bytes, columns: Columns) -> tuple[int, int] | None:
    """The size on a line and how many calls it stands for: none on an empty one. None where it is no size."""
    if _blank(line):
        return 0, 0
    cells = _cells(_text(line), columns.delimiter)
    if len(cells) > columns.width:
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
    """The cells of a line, but for empty ones at its end."""
    try:
        row = next(csv.reader([text], delimiter=delimiter, skipinitialspace=True), [])
    except csv.Error:
        return []
    while row and not row[-1].strip():
        row.pop()
    return [cell.strip() for cell in row]
