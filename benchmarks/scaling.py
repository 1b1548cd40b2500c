"""What must not grow: the cost of a call and of the books, against what an engine has more and more of.

    python benchmarks/scaling.py [--json FILE] [--rounds N]

Calls are timed on the CPU recorder with a replay that does nothing (`tapes.NoWork`): what is left is the host's part,
graphprobe's and the copies'. Start-up has the recorder's own captures. Each figure is shown with its ratio to the first
of its row. Threads count and serve under one GIL, so a total that stays is the best that there is.
"""

from __future__ import annotations

import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from timeit import Timer
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from measuring import head, interleaved, low, options, timer, write
from tapes import NoWork, captures

import graphprobe
from graphprobe.ledger import Ledger
from graphprobe.observe import Probe, observe

BUCKETS = (1, 4, 16, 64, 256)
INPUTS = (1, 2, 4, 8, 16, 32)
THREADS = (1, 2, 4, 8)
WARMED = (1, 16, 64, 256)
COUNTS = (10**4, 10**5, 10**6, 10**7, 10**8)
WIDTH, TURNS, SIZES = 8, 256, 300
SECONDS, PATIENCE = 0.2, 20.0
"""Of one run of threads, and of counting for the memory of the ledger."""

Row = dict[str, Any]


def row(name: str, unit: str, against: str, points: Mapping[int, float]) -> Row:
    """One line of results, each point with its ratio to the first."""
    first = next(iter(points.values()))
    return {
        "name": name,
        "unit": unit,
        "against": against,
        "points": [{"at": at, "value": value, "ratio": value / first} for at, value in points.items()],
    }


def timed(
    variants: Mapping[tuple[str, int], Timer], rounds: int, calls: int, burst: int
) -> dict[tuple[str, int], float]:
    """Microseconds per call; a statement makes ``calls`` of them."""
    return {at: low(values) / calls * 1e6 for at, values in interleaved(variants, rounds, burst).items()}


def rows_of(size: int) -> torch.Tensor:
    """Very little to copy, so that a larger size is not slower: [size, 1]."""
    return torch.ones(size, 1)


def served(buckets: int, name: str) -> Callable[..., Any]:
    """A forward with graphs of the sizes 1 to ``buckets``, all of them captured."""
    decode = graphprobe.capture(
        lambda x: x + 1, buckets=range(1, buckets + 1), max_graphs=buckets, backend="recorder", name=name
    )
    decode.warmup(lambda size: ((rows_of(size),), {}))
    return decode


def by_buckets(rounds: int) -> Iterator[Row]:
    """A call of one size, and of all sizes in turn."""
    with captures(NoWork):
        calls = {count: served(count, f"buckets/{count}") for count in BUCKETS}
    sizes = {
        "One size, again and again": lambda n: [1] * TURNS,
        "All sizes in turn": lambda n: [1 + i % n for i in range(TURNS)],
    }
    variants = {
        (name, n): timer("for x in xs: call(x)", call=call, xs=[rows_of(size) for size in order(n)])
        for name, order in sizes.items()
        for n, call in calls.items()
    }
    found = timed(variants, rounds, TURNS, 1)
    for name in sizes:
        yield row(name, "us per call", "buckets", {n: found[name, n] for n in BUCKETS})


def inputs_of(count: int) -> tuple[torch.Tensor, ...]:
    """Inputs of [4, 8], float32 and int64 in turn."""
    return tuple(torch.ones(4, WIDTH, dtype=torch.int64 if i % 2 else torch.float32) for i in range(count))


def copies(count: int) -> Callable[..., torch.Tensor]:
    """The same copies by hand, one launch per dtype."""
    buffers = inputs_of(count)
    floats, longs = list(buffers[0::2]), list(buffers[1::2])

    def copy(*given: torch.Tensor) -> torch.Tensor:
        torch._foreach_copy_(floats, given[0::2])
        if longs:
            torch._foreach_copy_(longs, given[1::2])
        return floats[0]

    return copy


def by_inputs(rounds: int) -> Iterator[Row]:
    """A call with more and more inputs, and its copies alone."""
    variants: dict[tuple[str, int], Timer] = {}
    for count in INPUTS:
        given = inputs_of(count)
        with captures(NoWork):
            call = graphprobe.capture(
                lambda *xs: sum(xs), buckets=[4], outputs="alias", backend="recorder", name=f"inputs/{count}"
            )
            for _ in range(3):
                call(*given)
        variants["A call", count] = timer("call(*given)", call=call, given=given)
        variants["Its copies by hand", count] = timer("call(*given)", call=copies(count), given=given)
    found = timed(variants, rounds, 1, 100)
    call, copy = ({n: found[name, n] for n in INPUTS} for name in ("A call", "Its copies by hand"))
    yield row("A call", "us per call", "inputs", call)
    yield row("Its copies by hand", "us per call", "inputs", copy)
    yield row("The difference", "us per call", "inputs", {n: call[n] - copy[n] for n in INPUTS})


def together(threads: int, step: Callable[[], object]) -> float:
    """Seconds per call of threads that repeat a step, all of them taken together."""
    start, stop = threading.Barrier(threads + 1), threading.Event()
    made = [0] * threads

    def run(place: int) -> None:
        with torch.inference_mode():
            start.wait()
            while not stop.is_set():
                for _ in range(100):
                    step()
                made[place] += 100

    running = [threading.Thread(target=run, args=(place,)) for place in range(threads)]
    for thread in running:
        thread.start()
    start.wait()
    began = time.perf_counter()
    time.sleep(SECONDS)
    stop.set()
    for thread in running:
        thread.join()
    return (time.perf_counter() - began) / sum(made)


def by_threads(rounds: int) -> Iterator[Row]:
    """Calls of one wrapper, and counts of one probe. A wrapper of its own for each round: sharing is for good.

    Medians: how threads hand over a lock and the GIL differs from round to round, and is part of the answer.
    """
    x = rows_of(4)
    found: dict[str, dict[int, list[float]]] = {"call": {}, "count": {}}
    probe = observe("decode", [8], ledger=Ledger())
    for number in range(max(3, rounds // 15)):
        for count in THREADS:
            with captures(NoWork):
                call = served(4, f"threads/{count}/{number}")
            for kind, step in (("call", lambda call=call: call(x)), ("count", lambda: probe.graph_call(8, 8))):
                found[kind].setdefault(count, []).append(together(count, step))
    for kind, name in (("call", "Calls of one wrapper"), ("count", "`observe().graph_call`")):
        yield row(
            name, "per second, in total", "threads", {n: 1 / statistics.median(v) for n, v in found[kind].items()}
        )


def by_warmup(rounds: int) -> Iterator[Row]:
    """Start-up, per bucket: eager runs and captures of `warmup`."""
    found: dict[int, list[float]] = {count: [] for count in WARMED}
    for _ in range(max(3, rounds // 40)):
        for count in WARMED:
            began = time.perf_counter()
            served(count, f"warmup/{count}")
            found[count].append((time.perf_counter() - began) / count * 1e3)
    yield row("`warmup`", "ms per bucket", "buckets", {n: min(v) for n, v in found.items()})


def bytes_of(root: object) -> int:
    """What everything that an object leads to takes, code and classes aside."""
    seen: set[int] = set()
    waiting, total = [root], 0
    while waiting:
        each = waiting.pop()
        if id(each) not in seen and not isinstance(each, (type, ModuleType, FunctionType, BuiltinFunctionType)):
            seen.add(id(each))
            total += sys.getsizeof(each)
            waiting += gc.get_referents(each)
    return total


def count_up(probe: Probe, calls: int, deadline: float) -> int:
    """Count calls of all sizes in turn, until there are so many or it takes too long; returns how many there were."""
    graph_call, sizes, done = probe.graph_call, range(1, SIZES + 1), 0
    while done < calls and time.perf_counter() < deadline:
        for size in sizes[: calls - done]:
            graph_call(size, SIZES)
        done += min(SIZES, calls - done)
    return done


def by_calls(_: int) -> Iterator[Row]:
    """Memory of a ledger after more and more calls of 300 sizes, as many as fit into the time."""
    probe = observe("decode", [SIZES], ledger=Ledger())
    done, points, deadline = 0, {}, time.perf_counter() + PATIENCE
    for until in COUNTS:
        done += count_up(probe, until - done, deadline)
        points[done] = bytes_of(probe) / 1024
    yield row("The ledger, 300 sizes", "KiB", "calls", points)


def main() -> None:
    """Measure and print."""
    given = options(__doc__, 200)
    torch.set_num_threads(1)
    rows: list[Row] = []
    with torch.inference_mode():
        for part in (by_buckets, by_inputs, by_threads, by_warmup, by_calls):
            for each in part(given.rounds):
                rows.append(each)
                show(each)
    write(head("torch") | {"rows": rows}, given.json)


def show(each: Row) -> None:
    """One row."""
    print(f"\n{each['name']}, {each['unit']}, against {each['against']}")
    for point in each["points"]:
        print(f"{point['at']:>12,d} {point['value']:14,.2f} {point['ratio']:8.2f}")


if __name__ == "__main__":
    main()
