"""Prints docs/advise.md, with tables made from the JSON files in docs/advice.

python docs/advise.py > docs/advise.md
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FILES = Path(__file__).parent / "advice"
LISTS = json.loads((FILES / "lists.json").read_text())
STEPS = {name: json.loads((FILES / f"steps_{name}.json").read_text()) for name in ("qwen3_8b", "qwen3_0.6b")}
REPLAYED = [json.loads(file.read_text()) for file in sorted(FILES.glob("replayed*.json"))]

SHOWN = (("sketch", False), ("Qwen3-8B", True), ("Qwen3-0.6B", True))
"""Step times, and whether with prefills, of the tables."""

WHOLE = ("Qwen3-8B", True, "conv 1x")
"""The day that is shown with all figures."""

PADDED = ("vLLM", "SGLang", "LMDeploy")
EXACT = ("TensorRT-LLM",)
PACES = ("as advised", "without the pace", "the maximum not declared")

Row = Sequence[object]


def table(head: Sequence[str], rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def results(*names: tuple[str, bool]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Step times, in words, and each of their days; those that are named, or all."""
    for result in LISTS["results"]:
        if not names or (result["steps"], result["prefill"]) in names:
            kind = result["steps"] + (", prefills" if result["prefill"] else "")
            yield from ((kind, day) for day in result["days"])


def checks(name: str, *names: tuple[str, bool]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """What was advised to one who has this list: step times, day, comparison."""
    for kind, day in results(*names):
        yield from ((kind, day, check) for check in day["checks"] if check["list"] == name)


def own(day: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The row of a list on a day."""
    return next(row for row in day["rows"] if row["list"] == name)


def change(part: Mapping[str, Any] | None, key: str) -> str:
    """Time against that of the list in use."""
    return "-" if part is None else f"{100 * part[key]:+.2f} %".replace("-0.00", "0.00").replace("+0.00", "0.00")


def both(part: Mapping[str, Any] | None) -> str:
    """The same, expected and on its own day."""
    return "-" if part is None else f"{change(part, 'expected')}, {change(part, 'own')}"


def defaults() -> str:
    """The lists of vLLM and SGLang beside what is advised."""
    body: list[Row] = []
    for kind, day in results(*SHOWN):
        every = own(day, "every size")["ms"]
        for name in ("vLLM", "SGLang"):
            check = next(check for check in day["checks"] if check["list"] == name)
            row, fast = own(day, name), check["as fast"]
            body.append(
                [
                    kind,
                    day["day"] + (", at the ceiling" if day["ceiling"] else ""),
                    f"{name}, {check['graphs']}",
                    f"{row['ms']:.2f}",
                    f"{100 * (1 - every / row['ms']):.2f} %",
                    both(check["as many"]),
                    "-" if fast is None else f"{fast['graphs']}, {check['as fast, own'] or '-'}",
                    both(check["half as many"]),
                ]
            )
    head = ["step times", "day", "list, graphs", "ms", "at most", "as many", "as fast with", "half as many"]
    return table(head, body)


def exact() -> str:
    """TensorRT-LLM's list, which serves exact sizes only."""
    body: list[Row] = []
    for kind, day, check in checks("TensorRT-LLM", *SHOWN):
        row = own(day, "TensorRT-LLM")
        many, padded = check["as many"], check["padded, as many"]
        body.append(
            [
                kind,
                day["day"],
                day["largest"],
                f"{row['hit']:.1%}",
                f"{row['expected']:.2f}",
                f"{row['ms']:.2f}",
                both(many),
                both(padded),
            ]
        )
    head = ["step times", "day", "largest batch", "hit rate", "expected ms", "ms", "as many, exact", "as many, padded"]
    return table(head, body)


def whole() -> str:
    """All lists on one day."""
    day = next(day for kind, day in results(WHOLE[:2]) if day["day"] == WHOLE[2])
    body: list[Row] = [
        [
            row["list"].strip() if row["list"][0] != " " else f"- {row['list'].strip()}",
            row["graphs"],
            f"{row['hit']:.1%}",
            f"{row['padding']:.2f}",
            f"{row['expected']:.3f}",
            f"{row['ms']:.3f}",
            f"{row['token/s']:,.1f}",
            f"{row['TPOT ms']:.2f}",
            f"{row['busy s']:,.0f}",
            f"{row['capture s']:.1f}",
        ]
        for row in day["rows"][: next(i for i, row in enumerate(day["rows"]) if row["list"] == "LMDeploy")]
    ]
    head = ["list", "graphs", "hit rate", "padding", "expected ms", "ms", "token/s", "TPOT ms", "busy s", "capture s"]
    return table(head, body)


def pace() -> str:
    """How far own days are from what was expected, with the pace and without it."""
    body: list[Row] = []
    for kind, day in results():
        ratios = {name: max(found.values()) for name, found in day["pace"].items()}
        if max(ratios.values()) >= 1.05:
            body.append([kind, day["day"], *(f"{ratios[name]:.2f}" for name in PACES)])
    return table(["step times", "day", *PACES], body)


def worst() -> float:
    """The largest ratio of an own day's time to the expected one, of all padded lists that were advised."""
    days = [day for _, day in results()]
    rows = [row for day in days for row in day["rows"] if row["padded"] and row["list"].startswith("  advised")]
    return max(
        [row["ms"] / row["expected"] for row in rows] + [max(day["pace"]["as advised"].values()) for day in days]
    )


def alike() -> str:
    """How many calls are one independent observation."""
    kinds = list(dict.fromkeys(kind for kind, _ in results()))
    days = list(dict.fromkeys(day["day"] for _, day in results()))
    found = {(kind, day["day"]): day["autocorrelation_time"] for kind, day in results()}
    return table(["step times", *days], [[kind, *(f"{found[kind, day]:,.0f}" for day in days)] for kind in kinds])


def span(values: Sequence[float], form: str = ".2f") -> str:
    """Smallest to largest."""
    return f"{min(values):{form}} to {max(values):{form}}"


def better(key: str, names: Sequence[str] = PADDED, advised: str = "as many") -> str:
    """How often a default list was better at its own number of graphs: expected, or on its own day."""
    found = [check[advised][key] for name in names for _, _, check in checks(name) if check[advised]]
    worse = [each for each in found if each > 1e-9]
    return f"{len(worse)} of {len(found)}" + (f" (by up to {100 * max(worse):.2f} %)" if worse else "")


def halves() -> str:
    """With how many graphs lists are as fast, below the ceiling, and what half of them cost at the ceiling."""
    pairs = [found for name in ("vLLM", "SGLang") for found in checks(name)]
    below = [check for _, day, check in pairs if not day["ceiling"]]
    most = max(below, key=lambda check: check["as fast"]["graphs"])
    above = [(day, check) for _, day, check in pairs if day["ceiling"]]
    costs = [check["half as many"][key] for _, check in above for key in ("expected", "own")]
    fewest = [check["as fast"]["graphs"] for check in below]
    its = max(check["as fast, own"] for check in below)
    lists = " and ".join(sorted({str(check["graphs"]) for check in below}))
    return (
        f"Below the ceiling {span(fewest, 'd')} graphs are as fast as {lists}\n(at most {most['as fast']['graphs']} of"
        f" {most['graphs']}; on its own day, at most {its}). At the ceiling half as many graphs cost"
        f" {100 * max(costs):.2f} % of time at most."
    )


def tokens() -> str:
    """Mean time per output token of what is advised, beside the list in use."""
    found: dict[str, list[float]] = {"  advised": [], "  advised, as fast": []}
    for _, day in results():
        for place, row in enumerate(day["rows"]):
            if row["list"] in ("vLLM", "SGLang"):
                for other in day["rows"][place + 1 : place + 5]:
                    if other["list"] in found:
                        found[other["list"]].append(100 * (other["TPOT ms"] / row["TPOT ms"] - 1))
    said = [f"{min(each):+.1f} to {max(each):+.1f} %" for each in found.values()]
    return f"beside the lists of vLLM and SGLang it is {said[0]} with the proposal, {said[1]} with `as fast`"


def starting() -> str:
    """What a graph costs at the start, and what graphs hold."""
    said = []
    for data in STEPS.values():
        seconds, held = data["capture_seconds"].values(), data["bytes"]
        said.append(
            f"- {data['model']}: {sum(seconds) / len(seconds):.2f} s for each capture, {sum(seconds):.1f} s for"
            f" {len(held)}. One pool of {data['pool_bytes'] / 2**20:.0f} MiB holds all {len(held)};"
            f"\n  {max(held.values()) / 2**20:.0f} MiB came with the largest graph, captured first."
        )
    return "\n".join(said)


def replayed() -> str:
    """Predicted and measured on a GPU."""
    body: list[Row] = []
    for data in REPLAYED:
        for result in data["results"]:
            for name in ("today", "proposal"):
                one = result[name]
                said, seen = one["predicted"], one["measured"]
                body.append(
                    [
                        data["model"],
                        f"{result['dispatch']}, {name}, {len(one['buckets'])}",
                        f"{said['hit_rate']:.2%}, {seen['hit_rate']:.2%}",
                        f"{said['padding']:.2f}, {seen['padding']:.2f}",
                        f"{said['ms']:.3f}",
                        f"{seen['ms']:.3f}",
                        f"{100 * one['off']:+.1f} %",
                    ]
                )
    head = ["model", "list, graphs", "hit rate", "padding", "predicted ms", "measured ms", "off"]
    return table(head, body)


def reality() -> str:
    """The section of runs on a GPU, where there is one."""
    if not REPLAYED:
        return ""
    first = REPLAYED[0]
    steps = "\n".join(
        f"- {data['model']} shape: {data['steps']:,} decode steps of {data['trace'] or 'random requests'} at"
        f" {data['speed']:g}x, {data['mean_batch']:.1f} rows on average, {data['largest_batch']} at most"
        for data in REPLAYED
    )
    offs = [abs(result[name]["off"]) for d in REPLAYED for result in d["results"] for name in ("today", "proposal")]
    return f"""## Predicted and measured

`python benchmarks/replayed.py`, {first["device"]}, torch {first["torch"]}, {first["date"]}. An engine loop ran the same
steps, batch sizes in their order, with buckets 1, 2, 4, 8, 16; `graphprobe.advise()` was asked about the live counts
and the times sampled in them; then with its proposal, whatever its verdict.

{steps}

Measured is wall time per step, the wait for the tokens included. Predictions were off by {100 * max(offs):.1f} % at
most. Hit rate and padding: predicted, measured.

{replayed()}

"""


PAGE = """# Which buckets to capture

`graphprobe advise` takes the batch sizes that an engine really sent and says which to capture, what that gains, and
whether it is worth a change. Made by `docs/advise.py` from the JSON files in [advice/](advice/).

## Ask

```
graphprobe advise                                                   # the exporter of this machine
graphprobe advise http://HOST:9090 --last 6h --max-batch 256        # a window of a Prometheus server
graphprobe advise --simulate day.csv --engine vllm --max-batch 256 --steps docs/advice/steps_qwen3_8b.json
```

The last one needs no traffic: it runs a trace of requests through continuous batching, with step times that
`benchmarks/steps.py` measured. In Python it is `graphprobe.advise()`. Declare the largest batch that the engine may
send: it is never left out of a proposal.

## From where

```
graphprobe advise --max-batch 256                                                # this machine's exporter, port 9464
graphprobe advise shot.json --max-batch 256                                      # a file of Snapshot.to_json()
graphprobe advise http://HOST:8000/metrics --max-batch 256                       # the page of an engine, as of vLLM
graphprobe advise http://HOST:9090 --last 6h --match 'job="vllm"' --max-seqs 256 # a window, from Prometheus
graphprobe advise sizes.csv --engine sglang --buckets 1,2,4,8 --times 1:9.1,16:13.3 --eager-times 1:42.9
graphprobe advise vllm.log --max-seqs 256                                        # vllm serve ... --cudagraph-metrics
graphprobe advise sglang.log --max-seqs 256                                      # with the lines of its start
```

| source | sizes | today's list | rule of dispatch | times | windows of time |
| --- | --- | --- | --- | --- | --- |
| live process | exact | known | as seen | sampled | none |
| snapshot file | exact | known | as seen | sampled | none |
| `/metrics` | exact to 64, then ranges | known | as seen | sampled | none |
| Prometheus | the same, counts rounded | known | as seen | sampled | up to 24, of 4 scrapes at least |
| CSV of sizes | exact | unknown | unknown | unknown | up to 24, where a line is a call |
| log of vLLM | tokens, prompts mixed in | in the tables' settings | it pads | unknown | a table each, up to 24 |
| log of SGLang | of one step in 40 | in the lines of its start | as seen, else it pads | unknown | up to 24 |

- **Live process**: `graphprobe advise` reads the exporter that `graphprobe.start_exporter()` opens; in the process
  itself, `graphprobe.advise()` needs none. Of an exporter's `/metrics`, too, its snapshot is read, with exact sizes. Of
  a page alone, a range counts as its upper end.
- **Today's list** unknown: there is a proposal, and nothing that it is compared with. Give `--buckets`.
- **Rule of dispatch**: a call that was padded, or eager as `no_exact_bucket`, tells it. Where none does, it is that of
  `--engine`, and the answer says that it is assumed; `--pad` and `--no-pad` decide.
- **Times** unknown: they are modelled, and a note says on what. Give `--times` and `--eager-times`, or `--steps`. What
  graphs take of memory and of the start is known where times are; else give `--graph-mib`, `--capture-seconds`.
- **Page of vLLM** that [graphprobe observes](engines.md): nothing must be named. The forward is `vllm` (its drafter
  asks for `--forward vllm.drafter`), the list is the one captured, a request has as many tokens as vLLM's own series
  say that it drafts, and the answer is its `--compilation-config`. In a snapshot and in Prometheus these series are not
  there: with speculative decoding give `--spec-tokens`.
- **Log of vLLM**: a table, every 10 s, counts all steps, those with prompts among them; `--max-seqs` (and
  `--spec-tokens`) leaves out what is larger than any decode step. Model Runner V2 prints no table before 0.30.
- **Log of SGLang**: it has one decode step in `--decode-log-interval`, so it tells no hit rate; with 1 it has all. Of
  the ranks that log the same steps (`--enable-metrics-for-all-schedulers`) one is read; data-parallel ranks are summed.
- **Log of both**: vLLM's tables are read, and a note says so. Colours do not matter.

A **CSV of sizes** has commas, semicolons, tabs or blanks between columns; empty lines and those that begin with `#` do
not count. With a header, sizes are in the only column that there is of `batch_size`, `batch`, `bs`, `size`, `n`,
`rows`, `tokens`, `requests`, `num_tokens`, `num_reqs`, `num_seqs`, and the calls of each in the only one of `calls`,
`count`, `counts`, `num_calls`, `frequency`, `freq`; without such a column a line is a call, in the order of time.
Of several, `batch_size` and `calls` are taken. What stays unclear is refused: several others, `n` beside a column of
sizes, and two columns of which one is sizes and the other, of whole numbers, none of these names. With more columns,
those of other names are ignored. Without a header one number is a size, two are a size and its calls; sizes may all be
on one line, or in a JSON list. Numbers have no marks of thousands: `1,024` and `1.000` are refused. A note of the
answer says what was read.

## What it answers

One who runs vLLM's own list, on the day of the tables below that has all figures:

```
{example}
```

- **eager, now, best**: no graph, today's list and the proposal, for the same calls. `ms/call` is expected time, padding
  and misses included; padding is rows added, in all and per call.
- **change it** or **keep what you have**. It says keep where the gain is below 2 % (`--threshold`), where it is less
  than 90 % sure of that, and below 1,000 calls (of each process, where several are summed: ranks of one engine count
  the same steps; those of the warm-up are none). **run without graphs** is the answer where eager calls are faster than
  any list, and **to keep what is asked** where today's list breaks a limit or lacks the declared maximum.
- **or capture**: the smallest list that takes no longer than today's, for its start-up and its memory.
- The picture below the answer is the frontier: the best list of each number of graphs; a bar is its time above the best
  of them. `--plot FILE` draws it.

![Expected time against the number of graphs, falling steeply up to a dozen graphs](advice/frontier.png)

## The rule

- **Cost of a call**: padded, the time of the smallest bucket that holds it; exact, the time of its own bucket or else
  of an eager call. Times are those sampled in the traffic, or given; linear between sizes. First they are made
  non-decreasing in size, and where that changes a measured one the answer says so.
- **Best list**: dynamic programming over all sizes seen and all numbers of graphs. It is the optimum, not a search;
  the tests hold it against brute force. The proposal is the smallest list within 0.5 % of it (exact
  dispatch: 0.1 %), unless prices (`--calls-per-start`, `--gib-worth`) decide.
- **Pace**: sizes matter that the traffic did not have. A batch padded so far that it is served slower than requests
  come in grows, and stays large. So sizes above 1.25 times the busiest quarter's mean must be served at that
  quarter's rows per second. Below, time of its own day by expected time, the worst of 3 to 35 graphs, on the days
  where one is above 1.05: without the pace a day can be lost, and so it can where the largest batch is not declared.
  Of all padded lists that were advised with the maximum declared, on all days, none took more than {worst:.2f} times
  the expected time.

{pace}

- **Confidence**: a list looks best on the traffic that it was made for, so here the gain is that of lists with as many
  graphs, each made for one half of the calls and tried on the other: the share of its normal distribution above the
  threshold. Its width comes from windows of
  time, where the source has them; else every 1,000 calls count as one observation, since neighbouring calls are of
  the same requests. Measured integrated autocorrelation times of the batch size, in calls:

{alike}

  Windows of fewer than 4,000 calls are put together. 1,000 is in the middle of the table, not its end: at
  {longest:,.0f} the standard error is {wider:.1f} times what is assumed. And the next hours are assumed to be like
  those seen: confidence knows nothing of a Monday.

## Default lists on two public days

`python benchmarks/advice.py --steps docs/advice/steps_qwen3_8b.json docs/advice/steps_qwen3_0.6b.json`, {date}: the
hour of each of the Azure LLM traces of 2023 (conversations, code), as it was and four times as fast, at most
{max_batch} requests at a time. Step times: a sketch of 9.0 ms + 0.27 ms per row (eagerly 42.9 ms at least), and those
measured on one {device}, torch {torch}, {measured}, for the shapes of two models
([8B](advice/steps_qwen3_8b.json), [0.6B](advice/steps_qwen3_0.6b.json)), with an eager prefill before each request.
All lists, all step times with and without prefills: [advice/lists.json](advice/lists.json); the command also prints
tables of it.

Each list makes a day of its own, since slower steps make larger batches. Percentages are time per call beside the
engine's own list, first for the same calls (those of an engine with a graph of every size), then each on its own day.
At the ceiling requests are queued for more than half of the time. **ms**: of its own day. **at most**: what a
graph of every size would gain on that. **as many**: the best list with that many graphs. **as fast with**: the fewest
graphs that take no longer, for the same calls, and on its own day. **half as many**: the best list with half.

{defaults}

A default list of vLLM, SGLang or LMDeploy was better at its own number of graphs in {better_expected} cases for the
same calls, and in {better_own} on its own day. {halves}

**What finer lists gain is little where step times are flat.** On the {device} a step of the 8B shape takes
{first:.1f} ms with one row and {last:.1f} ms with {rows}: padding to the next multiple of eight costs next to nothing.
The column **at most** is all that there is to gain, {sketch_most} % with the sketch and {measured_most} % with measured
times. What fewer graphs save is the start:

{starting}

So fewer graphs save next to no memory where one pool is shared, largest first. What the driver holds for each graph
outside the pool was not measured.

### Exact sizes only

TensorRT-LLM does not pad unless told to: its list has 1 to 32, 64 and 128.

{exact}

Its expected time holds only where graphs serve nearly all sizes. A size without a graph draws the batch: there a step
is slow, the batch grows until a graph serves it, shrinks again, and so returns. Where batches stay among more sizes
than there are graphs, no exact list of that length is a cure, ours included. For the same calls TensorRT-LLM's list
was better than ours in {exact_expected} cases, on its own day in {exact_own}:
by more than 1 % only on days that both have lost, taking a multiple of what padding takes. Padding is the cure
(`enable_padding`): beside TensorRT-LLM's list as it is, the best padded one with as many graphs was slower on its own
day in {exact_padded} cases.

### One day, all figures

{whole_of}.
`advised`: the answer to one who has the list above it, judging by the traffic of an engine with a graph of every size
(hit rate, padding and expected ms are of it, too), and `its own day`: by the day that this list made.

{whole}

Time per call is no time per token: a list that is as fast per call may let the rare large batches pay, in which more
requests wait. TPOT, the mean of requests, shows it: over all days,
{tokens}.

{reality}## Limits

- **Sizes never seen** are served by the next larger bucket, or eagerly above the largest. Declare the maximum.
- **Feedback**: a new list makes other batches. The pace keeps the worst away; `--simulate` tries both lists on a day.
- **Exact dispatch** of more sizes than graphs: see above. The note `the same list with padding` has what padding gives.
- **Metrics above 64 rows** carry ranges, one per bucket. A page of metrics or a Prometheus server therefore knows
  large sizes only as far as today's buckets tell them apart; the live process and a snapshot have exact sizes.
- **Eager times have no size** in the counts: one mean stands at the mean size of what ran eagerly.
- **Expected time is of the forward**, not of the engine: scheduling, sampling and prefill are not in it.
"""


def page() -> str:
    """The whole page."""
    graph = STEPS["qwen3_8b"]["graph"]
    name, prefill, which = WHOLE
    day = next(day for _, day in results((name, prefill)) if day["day"] == which)
    longest = max(day["autocorrelation_time"] for _, day in results())
    gains = {
        wanted: [
            100 * (1 - own(day, "every size")["ms"] / own(day, name)["ms"])
            for kind, day in results()
            for name in ("vLLM", "SGLang")
            if (kind == "sketch") is (wanted == "sketch")
        ]
        for wanted in ("sketch", "measured")
    }
    return PAGE.format(
        example=LISTS["example"].rstrip(),
        date=LISTS["date"],
        max_batch=LISTS["max_batch"],
        device=STEPS["qwen3_8b"]["device"],
        torch=STEPS["qwen3_8b"]["torch"],
        measured=STEPS["qwen3_8b"]["date"],
        first=graph["1"] * 1e3,
        last=graph["256"] * 1e3,
        rows=256,
        pace=pace(),
        worst=worst(),
        alike=alike(),
        defaults=defaults(),
        better_expected=better("expected"),
        better_own=better("own"),
        halves=halves(),
        sketch_most=span(gains["sketch"]),
        measured_most=span(gains["measured"]),
        starting=starting(),
        tokens=tokens(),
        exact=exact(),
        exact_expected=better("expected", EXACT),
        exact_own=better("own", EXACT),
        exact_padded=better("own", EXACT, "padded, as many"),
        longest=longest,
        wider=math.sqrt(longest / 1000),
        whole=whole(),
        whole_of=f"{name}{' with prefills' if prefill else ''}, {which}, {day['calls']:,} calls",
        reality=reality(),
    )


def main() -> None:
    """Print the page."""
    sys.stdout.write(page())


if __name__ == "__main__":
    main()
