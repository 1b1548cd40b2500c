"""What counting one call costs beside the clients that an engine has.

    python benchmarks/counting.py [--json FILE] [--rounds N]

Nanoseconds per count in one thread, the loop around it included. All count the same thing, a call at batch size 8 that
was served by bucket 8; prometheus_client and OpenTelemetry with the labels that graphprobe exports. A peer that is not
installed is left out, and it is said why.
"""

from __future__ import annotations

from timeit import Timer
from typing import Any

from measuring import head, interleaved, low, options, ratio, timer, write

from graphprobe.ledger import Ledger
from graphprobe.observe import observe

LABELS = {"forward": "decode", "phase": "decode", "mode": "full", "batch_size": "8", "bucket": "8"}
PEER = "prometheus_client, labels().inc()"
"""What everything is held against."""


def ours() -> dict[str, Timer]:
    """An integer, and the two counts of `observe`."""
    probe = observe("decode", [8], ledger=Ledger())
    return {
        "a bare integer": timer("cell[0] += 1", cell=[0]),
        "observe().graph_call": timer("probe.graph_call(8, 8)", probe=probe),
        "observe().eager_call": timer("probe.eager_call(9, 'batch_too_large')", probe=probe),
    }


def prometheus() -> dict[str, Timer]:
    """A counter whose child is looked up at each count, and one whose child was kept."""
    from prometheus_client import CollectorRegistry, Counter

    counter = Counter("calls", "Calls.", list(LABELS), registry=CollectorRegistry())
    look_up = f"counter.labels({', '.join(map(repr, LABELS.values()))}).inc()"
    return {
        PEER: timer(look_up, counter=counter),
        "prometheus_client, a kept child": timer("child.inc()", child=counter.labels(**LABELS)),
    }


def opentelemetry() -> dict[str, Timer]:
    """A counter of the SDK, with a reader that collects on demand."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    counter = MeterProvider([InMemoryMetricReader()]).get_meter("benchmark").create_counter("calls")
    return {"OpenTelemetry SDK, add()": timer("counter.add(1, labels)", counter=counter, labels=LABELS)}


def main() -> None:
    """Measure and print."""
    given = options(__doc__, 1000)
    variants, skipped, packages = ours() | prometheus(), {}, ["prometheus_client"]
    try:
        variants |= opentelemetry()
        packages.append("opentelemetry-sdk")
    except ImportError as error:
        skipped["OpenTelemetry SDK, add()"] = str(error)
    found = interleaved(variants, given.rounds)
    rows = {name: {"ns": low(values) * 1e9, "ratio": ratio(values, found[PEER])} for name, values in found.items()}
    result: dict[str, Any] = head(*packages) | {"beside": PEER, "counting": rows, "skipped": skipped}
    show(result)
    write(result, given.json)


def show(result: dict[str, Any]) -> None:
    """The table."""
    print(f"{'count':36s} {'ns':>8s}   x {result['beside']}")
    for name, row in result["counting"].items():
        print(f"{name:36s} {row['ns']:8.1f}   {row['ratio']:.3f}")
    for name, why in result["skipped"].items():
        print(f"{name:36s} skipped: {why}")


if __name__ == "__main__":
    main()
