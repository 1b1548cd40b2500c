"""Commands that show what a source says: ``table``, ``top`` and ``check``."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from graphprobe.errors import ConfigError, SourceError
from graphprobe.snapshot import Snapshot
from graphprobe.tools import sources

Source = Annotated[
    str,
    typer.Argument(
        metavar="[SOURCE]",
        help="URL of an exporter or of a page of metrics; file with a snapshot, a page of metrics, sizes or a log; "
        "or -.",
    ),
]


def table(source: Source = sources.DEFAULT) -> None:
    """Print what ran on which path, why, and what would help most."""
    found = sources.reading(source)
    typer.echo(_page(found.snapshot, found.notes), nl=False)


def top(
    source: Source = sources.DEFAULT,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 2.0,
    count: Annotated[int, typer.Option(min=0, help="Looks after which it ends; 0: until Ctrl-C.")] = 0,
) -> None:
    """Watch an exporter: the table of the last seconds, live."""
    if source == "-":
        raise ConfigError("top looks again and again, standard input comes once", "give a URL or a file")
    first = sources.reading(source)
    with contextlib.suppress(KeyboardInterrupt), _screen() as show:
        show(f"since the start\n\n{_page(first.snapshot, first.notes)}")
        before, looks = first.snapshot, 1
        while looks != count:
            time.sleep(interval)
            looks += 1
            before = _look(source, before, interval, show)


def _look(source: str, before: Snapshot, interval: float, show: Callable[[str], None]) -> Snapshot:
    try:
        now = sources.reading(source)
    except SourceError as error:
        show(f"{error}\n(looking again every {interval:g} s)\n")
        return before
    show(f"in the last {interval:g} s\n\n{_page(now.snapshot - before, now.notes)}")
    return now.snapshot


def check(
    source: Annotated[
        str, typer.Argument(metavar="[SOURCE]", help="URL of an exporter or of a page of metrics, file, or -.")
    ] = sources.DEFAULT,
    wait: Annotated[
        float | None,
        typer.Option(min=0, max=3600, help="Seconds to a second read, for counters that fall; a URL: 1, a file: none."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Tell whether a page conforms to the metric contract.

    Exit status 0: it does, and there may be warnings; 1: it does not; 2: there is no page.
    """
    from graphprobe.tools.check import check as held_against_the_contract

    report = held_against_the_contract(source, wait=wait)
    typer.echo(report.to_json() if json else report)
    if not report.ok:
        raise typer.Exit(1)


@contextlib.contextmanager
def _screen() -> Iterator[Callable[[str], None]]:
    """Shows one text after the other: in place on a terminal, below each other elsewhere."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        yield typer.echo
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda text: live.update(Text(text), refresh=True)


def _page(snapshot: Snapshot, notes: tuple[str, ...]) -> str:
    """The tables, and below them what their reader must know."""
    from graphprobe.tools.table import WIDTH, literal
    from graphprobe.tools.table import table as render

    tables = render(snapshot, width=max(60, min(160, shutil.get_terminal_size((WIDTH, 24)).columns)))
    return tables + "".join(f"note: {literal(note)}\n" for note in notes)
