"""The table: per forward what ran on which path and why, the hit rate, and the one change that would raise it most."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphprobe.ledger import LEDGER
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot

WIDTH = 110
ROWS = 40
"""Rows shown per forward; the calls of all others are summed in one line."""

SIZES = 3
"""Batch sizes named in one advice."""

BY_SIZE = (FallbackReason.NO_EXACT_BUCKET, FallbackReason.BATCH_TOO_LARGE)

# Plain ASCII: the table is printed into logs and terminals of any encoding.
LINES = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def table(snapshot: Snapshot | None = None, *, width: int = WIDTH) -> str:
    """The tables of all forwards as plain text, no wider than ``width`` columns; None: of this process now.

    Times are means in milliseconds of what was sampled on that path and bucket, ``-`` where nothing was.
    """
    shown = LEDGER.snapshot() if snapshot is None else snapshot
    parts = [_rendered(forward, width) for forward in shown.forwards.values()]
    parts += [f"{literal(engine)}: {silence}\n" for engine, silence in silent(shown).items()]
    if not parts:
        parts = ["no forward yet: decorate one with @graphprobe.capture(...), or call graphprobe.observe(...)\n"]
    return "\n".join([*parts, *_warnings(shown)])


def silent(snapshot: Snapshot) -> dict[str, str]:
    """What to say of each engine that has hooks here and no forward: a share of nothing is neither 0 % nor 100 %."""
    found = {}
    for engine in dict.fromkeys(engine for engine, _ in snapshot.hooks):
        bound = [is_bound for (of, _), is_bound in snapshot.hooks.items() if of == engine]
        if not any(belongs(name, engine) for name in snapshot.forwards):
            found[engine] = f"no data: {sum(bound)} of {len(bound)} hooks are in place, and no call was counted"
    return found


def belongs(forward: str, engine: str) -> bool:
    """Whether a forward is one of an engine, after which it is named: ``sglang``, ``sglang.draft``."""
    return forward == engine or forward.startswith(f"{engine}.")


def literal(text: str) -> str:
    """``text`` on one line, control characters and lone surrogates written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def percent(share: float) -> str:
    """A share as ``61 %``; only exactly all is ``100 %`` and only nothing is ``0 %``."""
    if 0 < share < 0.01 or 0.99 < share < 1:
        return f"{min(max(share * 100, 0.1), 99.9):.1f} %"
    return f"{share * 100:.0f} %"


def hit_line(forward: ForwardSnapshot) -> str:
    """The hit rate in words, with the counts that it was made of."""
    graph, eager = forward.graph_calls, forward.eager_calls
    counted = sum(row.calls for row in forward.rows if row.reason is not None and row.reason.counted)
    rate = forward.hit_rate
    aside = f", {eager - counted:,} not counted" if eager > counted else ""
    if rate is None and not forward.rows and forward.source == "engine":
        return "hit rate: no data (no call was counted)"
    if rate is None:
        return "hit rate: no traffic" + (f" that counts ({eager:,} eager calls that do not)" if eager else "")
    return f"hit rate: {percent(rate)} ({graph:,} graph, {counted:,} eager{aside}){_without_prefill(forward)}"


def _without_prefill(forward: ForwardSnapshot) -> str:
    """The rate that rules and dashboards speak of, where it is another one: long prefills are eager by design."""
    rest = dataclasses.replace(forward, rows=tuple(row for row in forward.rows if row.phase != "prefill"))
    if rest.hit_rate == forward.hit_rate:
        return ""
    return f"; without prefill, as alerts have it: {'no traffic' if rest.hit_rate is None else percent(rest.hit_rate)}"


def advice(forward: ForwardSnapshot) -> str:
    """One line: the buckets whose addition raises the hit rate most, or else the reason that costs most, or ``""``."""
    reasons: Counter[FallbackReason] = Counter()
    sizes: Counter[int] = Counter()
    for row in forward.rows:
        if row.reason is not None and row.reason.counted:
            reasons[row.reason] += row.calls
            sizes[row.batch_size] += row.calls if row.reason in BY_SIZE else 0
    missed = reasons.total()
    # A size that would not move the hit rate by a hundredth of the misses is not worth a graph.
    chosen = sorted(size for size, calls in sizes.most_common(SIZES) if size > 0 and calls * 100 >= missed > 0)
    won = sum(sizes[size] for size in chosen)
    reason, calls = max(reasons.items(), key=lambda item: item[1], default=(None, 0))
    if chosen and (reason in BY_SIZE or won >= calls):
        return _add_buckets(chosen, forward.graph_calls, won, missed)
    return "" if reason is None else f"{calls:,} of {missed:,} counted eager calls are {reason}: {reason.meaning}"


def _add_buckets(sizes: list[int], graph: int, won: int, missed: int) -> str:
    rates = f"{percent(graph / (graph + missed))} -> {percent((graph + won) / (graph + missed))}"
    if len(sizes) == 1:
        return f"batch {sizes[0]} has no bucket: add {sizes[0]}, hit rate {rates}"
    named = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
    return f"batches {named} have no bucket: add them, hit rate {rates}"


def _rendered(forward: ForwardSnapshot, width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, markup=False, emoji=False, highlight=False)
    shown, rest = _chosen(forward.rows)
    console.print(Text(_title(forward)))
    if shown:
        console.print(_grid(forward, shown))
    if rest:
        console.print(Text(f"and {len(rest)} more rows with {sum(row.calls for row in rest):,} calls"))
    for line in filter(None, (hit_line(forward), advice(forward))):
        console.print(Text(line))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _title(forward: ForwardSnapshot) -> str:
    buckets = ", ".join(map(str, forward.buckets)) or ("none: graphs are switched off" if _off(forward) else "unknown")
    return f"{literal(forward.name)} (in {literal(forward.unit)}; buckets {buckets})"


def _off(forward: ForwardSnapshot) -> bool:
    """Whether each call says that graphs are switched off."""
    return bool(forward.rows) and all(row.reason is FallbackReason.DISABLED for row in forward.rows)


def _chosen(rows: tuple[Row, ...]) -> tuple[list[Row], list[Row]]:
    if len(rows) <= ROWS:
        return list(rows), []
    most = set(sorted(range(len(rows)), key=lambda i: -rows[i].calls)[:ROWS])
    return [r for i, r in enumerate(rows) if i in most], [r for i, r in enumerate(rows) if i not in most]


def _grid(forward: ForwardSnapshot, rows: Iterable[Row]) -> Table:
    rows = list(rows)
    columns = ["batch size", "bucket", "path", "reason", "calls", "padding", "ms"]
    if {row.phase for row in rows} != {"decode"}:
        columns.insert(0, "phase")
    if {row.mode for row in rows} - {"", "full"}:
        columns.insert(columns.index("path") + 1, "mode")
    grid = Table(box=LINES, pad_edge=False, show_edge=False)
    for column in columns:
        right = column in ("batch size", "bucket", "calls", "padding", "ms")
        grid.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        cells = _cells(forward, row)
        grid.add_row(*(Text(cells[column]) for column in columns))
    return grid


def _cells(forward: ForwardSnapshot, row: Row) -> dict[str, str]:
    seconds = _mean(forward, row)
    return {
        "phase": literal(row.phase),
        "batch size": str(row.batch_size),
        "bucket": "-" if row.bucket is None else str(row.bucket),
        "path": literal(row.path),
        "mode": literal(row.mode) or "-",
        "reason": "-" if row.reason is None else str(row.reason),
        "calls": f"{row.calls:,}",
        "padding": f"{row.padding:,}" if row.path == "graph" else "-",
        "ms": "-" if seconds is None else f"{seconds * 1e3:.3g}",
    }


def _mean(forward: ForwardSnapshot, row: Row) -> float | None:
    # An eager call may be timed under the bucket it would have used, or under none.
    for bucket in (row.bucket,) if row.path == "graph" else (row.batch_size, None):
        times = forward.times.get((row.phase, row.path, row.mode, bucket))
        if times is not None and times.mean is not None:
            return times.mean
    return None


def _warnings(snapshot: Snapshot) -> list[str]:
    lines = [f"graphprobe failed at {literal(where)}: {n:,} times" for where, n in snapshot.internal_errors.items()]
    lines += [
        f"{literal(engine)}: hook {literal(hook)} is not bound, its calls are not seen"
        for (engine, hook), bound in snapshot.hooks.items()
        if not bound
    ]
    lines += [
        f"{literal(forward.name)}: {n:,} {path} calls are not confirmed by the graph launches that were seen"
        for forward in snapshot.forwards.values()
        for path, n in forward.unmatched.items()
        if n
    ]
    return [line + "\n" for line in lines]
