"""Who looks on while the demo works: the progress displays, and a reader of ``/metrics``."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from graphprobe.demo.engine import Moment
from graphprobe.demo.result import DemoError

TELLING = ("graphprobe_graph_calls_total", "graphprobe_eager_calls_total", "graphprobe_padding_rows_total")
"""The metrics of which one line each is shown."""


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Say on a terminal that something of unknown length goes on, elsewhere that it began."""
    console = Console()
    if not console.is_terminal:
        print(text, flush=True)
        yield
        return
    with console.status(text):
        yield


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[Moment], None]]:
    """A watcher that draws a bar on a terminal, and elsewhere prints a line at each quarter of ``total`` requests."""
    console = Console()
    if not console.is_terminal:
        yield _Quarters(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda moment: bar.update(
            task, completed=moment.answered, note=f"answered, step {moment.step}, batch {moment.batch}"
        )


class _Quarters:
    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.shown = title, total, 0

    def __call__(self, moment: Moment) -> None:
        if 4 * moment.answered // self.total > self.shown:
            self.shown = 4 * moment.answered // self.total
            where = f"step {moment.step}, batch {moment.batch}"
            print(f"{self.title}: {moment.answered}/{self.total} answered, {where}", flush=True)


class Peek:
    """Fetches ``url`` over HTTP when half of ``total`` requests are answered, and keeps the lines worth showing."""

    def __init__(self, url: str, total: int) -> None:
        self.url, self.total = url, total
        self.answered = 0
        self.lines: tuple[str, ...] = ()

    def __call__(self, moment: Moment) -> None:
        """Fetch when the time has come, once."""
        if not self.answered and 2 * moment.answered >= self.total:
            self.answered = moment.answered
            self.lines = telling(_fetch(self.url))


def _fetch(url: str) -> str:
    # Without a proxy, which would look for this address on its own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as response:
            return str(response.read(), "utf-8")
    except OSError as error:
        raise DemoError(f"{url} did not answer while requests were served: {error}") from error


def telling(text: str) -> tuple[str, ...]:
    """Of each metric in ``TELLING`` the sample with the largest value above 0, as it stands in ``text``."""
    lines = [line for line in text.splitlines() if line.partition("{")[0] in TELLING and _value(line) > 0]
    series = ([line for line in lines if line.startswith(name)] for name in TELLING)
    return tuple(max(of, key=_value) for of in series if of)


def _value(line: str) -> float:
    return float(line.rpartition(" ")[2])
