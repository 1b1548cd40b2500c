"""The options of ``graphprobe advise``: what its help says, under which heading, and the examples at its end."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

SOURCE, TODAY, TIMES, LIMITS, OUTPUT, TRIED = (
    "Source",
    "Today and engine",
    "Times and costs",
    "Limits and prices",
    "Output",
    "Replay and check",
)
"""The headings, in their order; ``--help`` itself stands below ``Options``."""

EXAMPLES = """\b
Examples:
  graphprobe advise vllm.log --max-seqs 256      vLLM with --cudagraph-metrics
  graphprobe advise sizes.csv --buckets 1,2,4    CSV with a column batch_size
  graphprobe advise http://HOST:9090 --last 6h   Prometheus, six hours of it"""


class Grouped(TyperCommand):
    """A command that lists its options under their headings, as plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """A section for each heading, in the order of the first option below it."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                panels.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)


def option(*names: str, panel: str, help: str, **more: Any) -> Any:
    """An option that the help lists under ``panel``."""
    return typer.Option(*names, rich_help_panel=panel, help=help, **more)


Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[SOURCE]",
        rich_help_panel=SOURCE,
        help="URL of an exporter, of /metrics or (with --last) of Prometheus; file of a snapshot, metrics, sizes or a "
        "log; - is standard input; without it: this machine's exporter, port 9464.",
    ),
]
Forward = Annotated[str | None, option(panel=SOURCE, metavar="NAME", help="Forward that is meant.")]
Phase = Annotated[
    str | None, option(panel=SOURCE, metavar="NAME", help="Phase that is meant; by default all but prefill.")
]
Last = Annotated[
    str | None, option(panel=SOURCE, metavar="TIME", help="Window of a Prometheus server: 90s, 15m, 6h, 2d.")
]
Until = Annotated[
    str | None,
    option(panel=SOURCE, metavar="TIME", help="End of the window, as 2026-11-30T12:00 (UTC); by default now."),
]
Match = Annotated[str, option(panel=SOURCE, metavar="LABELS", help="Series of the window, as 'job=\"vllm\"'.")]
Timeout = Annotated[float, option(panel=SOURCE, metavar="SECONDS", help="For each answer of a server.")]

Given = Annotated[str | None, option(panel=TODAY, metavar="1,2,4", help="Today's list, where SOURCE does not tell it.")]
Pad = Annotated[
    bool | None,
    option("--pad/--no-pad", panel=TODAY, help="Whether a larger bucket may serve a batch; by default as seen."),
]
Engine = Annotated[
    str | None, option(panel=TODAY, metavar="NAME", help="graphprobe, vllm, sglang, tensorrt-llm or lmdeploy.")
]
TensorParallel = Annotated[
    int, option(panel=TODAY, metavar="N", help="Ranks that share the rows of a step (vLLM's sequence parallelism).")
]
Largest = Annotated[
    int | None,
    option(panel=TODAY, metavar="N", help="Limit that the engine is told, as vLLM's max_cudagraph_capture_size."),
]
MaxBatch = Annotated[
    int | None, option(panel=TODAY, metavar="N", help="Largest batch that is sent, which a graph must hold.")
]
MaxSeqs = Annotated[int | None, option(panel=TODAY, metavar="N", help="The same, as a number of requests.")]
SpecTokens = Annotated[int, option(panel=TODAY, metavar="N", help="Speculative tokens of a request.")]

GraphTimes = Annotated[
    str | None,
    option(panel=TIMES, metavar="1:9.1,16:13.3", help="Milliseconds of a graph call by size; by default as measured."),
]
EagerTimes = Annotated[
    str | None,
    option(panel=TIMES, metavar="1:42.9", help="Milliseconds of an eager call by size; or 42900us, 0.0429s."),
]
Steps = Annotated[
    str | None,
    option(panel=TIMES, metavar="FILE", help="Such times, and what graphs take, as benchmarks/steps.py writes them."),
]
GraphMib = Annotated[
    str | None, option(panel=TIMES, metavar="20", help="MiB that a graph takes; or by size, as 1:20,16:25.")
]
CaptureSeconds = Annotated[
    str | None, option(panel=TIMES, metavar="0.4", help="Seconds that a capture takes; or by size.")
]

MaxBuckets = Annotated[int | None, option(panel=LIMITS, metavar="N", help="Most graphs of the proposal.")]
MaxMib = Annotated[float | None, option(panel=LIMITS, metavar="MIB", help="Most memory of its graphs.")]
MaxCaptureSeconds = Annotated[
    float | None, option(panel=LIMITS, metavar="SECONDS", help="Most time of its captures, together.")
]
CallsPerStart = Annotated[
    float | None,
    option(panel=LIMITS, metavar="N", help="Calls between two starts: the price of capture seconds."),
]
GibWorth = Annotated[
    float | None,
    option(panel=LIMITS, metavar="PERCENT", help="Share of the time that a GiB is worth: the price of memory."),
]
Threshold = Annotated[
    float,
    option(
        panel=LIMITS, metavar="PERCENT", min=0, max=99, help="Gain below which the answer is to keep what there is."
    ),
]

Plot = Annotated[
    str | None,
    option(panel=OUTPUT, metavar="FILE", help="Draw time against graphs into a .png, .svg or .html file."),
]
Json = Annotated[bool, option("--json", panel=OUTPUT, help="Print the answer as JSON.")]

Simulate = Annotated[
    str | None,
    option(
        panel=TRIED, metavar="TRACE", help="CSV of requests to try both lists on; without SOURCE it is the traffic."
    ),
]
Speed = Annotated[float, option(panel=TRIED, metavar="X", help="How much faster the requests of TRACE arrive.")]
Check = Annotated[
    bool, option("--check", panel=TRIED, help="Only tell whether --buckets cover --max-seqs, before any traffic.")
]
