"""The command line: ``graphprobe COMMAND``. Readers take a SOURCE and print; nothing here counts anything."""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphprobe import metrics
from graphprobe.buckets import as_size, coverage
from graphprobe.errors import ConfigError, GraphprobeError, SourceError
from graphprobe.observe import spans
from graphprobe.snapshot import Snapshot
from graphprobe.tools import sources


class _Commands(TyperGroup):
    """Turns our errors into one line and an exit code: 2 for what the user gave, 1 for the rest."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GraphprobeError as error:
            _complain(error)
            raise typer.Exit(2 if isinstance(error, (SourceError, ConfigError)) else 1) from error
        except OSError as error:
            # A closed pipe is the reader's choice (`graphprobe table | head`), and click knows how to end then.
            if error.errno == errno.EPIPE:
                raise
            _complain(error)
            raise typer.Exit(1) from error


def _complain(error: Exception) -> None:
    typer.echo(f"graphprobe: {' '.join(str(error).split())}", err=True)


app = typer.Typer(
    name="graphprobe",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Which forwards ran as a CUDA graph, which fell back to eager, and why.",
)

Source = Annotated[
    str, typer.Argument(metavar="[SOURCE]", help="URL of an exporter, file with a snapshot, or - for standard input.")
]


@app.command()
def table(source: Source = sources.DEFAULT) -> None:
    """Print what ran on which path, why, and what would help most."""
    typer.echo(_table(sources.read(source)), nl=False)


@app.command()
def top(
    source: Source = sources.DEFAULT,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 2.0,
    count: Annotated[int, typer.Option(min=0, help="Looks after which it ends; 0: until Ctrl-C.")] = 0,
) -> None:
    """Watch an exporter: the table of the last seconds, live."""
    if source == "-":
        raise ConfigError("top looks again and again, standard input comes once", "give a URL or a file")
    before = sources.read(source)
    with contextlib.suppress(KeyboardInterrupt), _screen() as show:
        show(f"since the start\n\n{_table(before)}")
        looks = 1
        while looks != count:
            time.sleep(interval)
            looks += 1
            before = _look(source, before, interval, show)


def _look(source: str, before: Snapshot, interval: float, show: Callable[[str], None]) -> Snapshot:
    try:
        now = sources.read(source)
    except SourceError as error:
        show(f"{error}\n(looking again every {interval:g} s)\n")
        return before
    show(f"in the last {interval:g} s\n\n{_table(now - before)}")
    return now


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="smollm2: a real model, offline; tiny: random weights, torch alone.")] = (
        "smollm2"
    ),
    pad: Annotated[bool, typer.Option("--pad/--no-pad", help="Whether a larger bucket may serve a batch.")] = False,
    buckets: Annotated[str, typer.Option(help="Batch sizes to capture.")] = "1,2,4,8,16",
    requests: Annotated[int, typer.Option(help="Prompts to answer.")] = 24,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 32,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU where there is one.")] = None,
    port: Annotated[int, typer.Option(help="Port of /metrics; 0: a free one; 9464 is where `top` looks.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result there.")] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Serve all again eagerly and compare.")] = True,
) -> None:
    """Serve a small language model through captured forwards."""
    from graphprobe.demo import run

    run(
        model,
        pad=pad,
        buckets=_sizes(buckets),
        requests=requests,
        max_new_tokens=max_new_tokens,
        device=device,
        port=port,
        json=json,
        check=check,
    )


@app.command("coverage")
def cover(
    buckets: Annotated[str, typer.Argument(help="Batch sizes that are captured, as 1,2,4,8.")],
    max_batch: Annotated[int, typer.Argument(help="Largest batch that the engine sends.")],
    pad: Annotated[bool, typer.Option("--pad/--no-pad", help="Whether a larger bucket may serve a batch.")] = False,
) -> None:
    """Name the batch sizes without a bucket, before any traffic."""
    missing = coverage(_sizes(buckets), as_size(max_batch, "MAX_BATCH"), pad)
    typer.echo(f"{len(missing)} of {max_batch} sizes have no bucket{': ' if missing else ''}{spans(missing)}")


@app.command()
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


@app.command()
def dashboards(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder to write into; it is made where it is missing.")],
    target: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="Exporter to scrape; give it once for each.")
    ] = None,
    job: Annotated[str, typer.Option(metavar="NAME", help="Job under which they are scraped.")] = "graphprobe",
    runbook_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Where runbook.md is served; with a / at the end, its folder.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(metavar="NAME", help="Kubernetes: where the engines run.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Kubernetes: put on each object, as release=NAME.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write what was edited or removed, too; an edit is kept as NAME.bak.")
    ] = False,
) -> None:
    """Write dashboards, alert rules, and what runs them.

    That is a compose file for Prometheus, Alertmanager and Grafana, and objects for Kubernetes. Run it again for other
    options or another version: files that you have not touched follow, those that you edited are kept and listed.
    """
    from graphprobe.tools import dashboards as stack
    from graphprobe.tools.folder import write

    targets = tuple(target or (stack.TARGET,))
    installation = stack.Installation(targets, job, namespace, tuple(label or ()), runbook_url)
    outcome = write(folder, stack.contents(installation), force=force)
    typer.echo(stack.summary(folder, outcome, installation))


@app.command()
def version() -> None:
    """Print the versions of graphprobe, the contract and torch."""
    info = metrics.build_info()
    typer.echo(f"graphprobe {info['version']} (metric contract {info['contract']}, torch {info['torch'] or 'none'})")


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


def _table(snapshot: Snapshot) -> str:
    from graphprobe.tools.table import WIDTH
    from graphprobe.tools.table import table as render

    return render(snapshot, width=max(60, min(160, shutil.get_terminal_size((WIDTH, 24)).columns)))


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"buckets must be whole numbers, got {text!r}", "write 1,2,4,8") from None


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
