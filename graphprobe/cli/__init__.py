"""The command line: ``graphprobe COMMAND``. Readers take a SOURCE and print; nothing here counts anything."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphprobe import metrics
from graphprobe.buckets import as_size, coverage
from graphprobe.cli.account import EXAMPLES as ACCOUNTS
from graphprobe.cli.account import account
from graphprobe.cli.advise import advise
from graphprobe.cli.options import EXAMPLES, Grouped
from graphprobe.cli.readers import check, table, top
from graphprobe.cli.run import run as start
from graphprobe.cli.values import sizes
from graphprobe.errors import ConfigError, GraphprobeError, SourceError
from graphprobe.observe import spans


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
app.command()(table)
app.command()(top)
app.command(cls=Grouped, epilog=EXAMPLES)(advise)
app.command(cls=Grouped, epilog=ACCOUNTS)(account)


# Options after COMMAND are not ours.
app.command("run", context_settings={"allow_interspersed_args": False})(start)


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
        buckets=sizes(buckets),
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
    missing = coverage(sizes(buckets), as_size(max_batch, "MAX_BATCH"), pad)
    typer.echo(f"{len(missing)} of {max_batch} sizes have no bucket{': ' if missing else ''}{spans(missing)}")


app.command()(check)


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


def main() -> None:
    """Entry point of the console script."""
    app()
