"""Pages of metrics for the tests of `graphprobe check`: one with every metric, random ones, and how to spoil them."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from graphprobe.export.prometheus import Collector
from graphprobe.ledger import Ledger
from graphprobe.observe import MODES, observe
from graphprobe.reasons import FallbackReason
from graphprobe.sentinel import PATIENCE, SILENT
from graphprobe.tools.check import findings
from graphprobe.tools.findings import RULES

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def exposed(ledger: Ledger, openmetrics: bool = False) -> str:
    """What a registry with our collector prints."""
    registry = CollectorRegistry()
    registry.register(Collector(ledger))
    return str((generate_openmetrics if openmetrics else generate_latest)(registry).decode())


def filled(ledger: Ledger, name: str = "decode") -> Ledger:
    """Every kind of metric has a sample; sizes on both sides of 64, and above the largest bucket."""
    watched = observe(name, [1, 2, 4, 72], ledger=ledger, source="capture", clock=None)
    watched.graph_call(3, 4)
    watched.graph_call(70, 72, mode="piecewise", phase="verify")
    watched.eager_call(100, "batch_too_large")
    watched.eager_call(0, "empty_batch")
    forward = watched.forward
    forward.time("graph", 4, 0.003, mode="full")
    forward.time("eager", None, 3.0)
    forward.captured(4, "ok", 0.5, -8)
    forward.captured(2, "oom", 0.5, None)
    forward.mismatch(4)
    forward.unmatched.update(graph=2, eager=0)
    forward.holders[0].pool_bytes = 1 << 20
    forward.uncovered["decode"] = 68
    forward.pool_estimate_bytes, forward.kv_capacity_tokens = 5, 6
    ledger.hooks["vllm", "dispatch"] = True
    ledger.replays_seen = [9]
    return ledger


PAGE = exposed(filled(Ledger()))
MODERN = exposed(filled(Ledger()), openmetrics=True)

GRAPH = 'graphprobe_graph_calls_total{batch_size="3",bucket="4",forward="decode",mode="full",phase="decode"} 1.0'
EAGER = 'graphprobe_eager_calls_total{batch_size="3",forward="decode",phase="decode",reason="no_exact_bucket"} 0.0'
LARGE = 'graphprobe_eager_calls_total{batch_size="73-128",forward="decode",phase="decode",reason="batch_too_large"} 1.0'
PADDING = 'graphprobe_padding_rows_total{bucket="4",forward="decode",phase="decode"} 1.0'
INFINITE = (
    'graphprobe_forward_duration_seconds_bucket{forward="decode",le="+Inf",mode="",path="eager",phase="decode"} 1.0'
)
COUNT = 'graphprobe_forward_duration_seconds_count{forward="decode",mode="",path="eager",phase="decode"} 1.0'
FOLDS = 'graphprobe_internal_errors_total{where="label_limit"} '


def changed(old: str, new: str, page: str = PAGE) -> str:
    """The page with one text instead of another, which must be on it."""
    assert old in page, f"no {old} on the page"
    return page.replace(old, new)


def replaced(pattern: str, new: str, page: str = PAGE, count: int = 0) -> str:
    """The page with every match, or so many, changed; at least one must be there."""
    kept, number = re.subn(pattern, new, page, count=count, flags=re.MULTILINE)
    assert number, f"no {pattern} on the page"
    return kept


def without(pattern: str, page: str = PAGE) -> str:
    """The page without the lines that start so."""
    return replaced(rf"^{pattern}.*\n", "", page)


def ranks(page: str, *numbers: str) -> str:
    """A page that the ranks of a host share: every series once for each, with its rank."""
    page = re.sub(r"^(graphprobe_replays_seen_total) ", r"\1{} ", page, flags=re.MULTILINE)
    lines = re.sub(r"^(\w+)\{(.*)$", "\n".join(rf'\1{{rank="{n}",\2' for n in numbers), page, flags=re.MULTILINE)
    return lines.replace(",}", "}")


def told(page: str | bytes, content_type: str | None = TEXT, **options: Any) -> str:
    """The findings as text, one a line; all of them are what the command can print."""
    found = findings(page, content_type, **options)
    assert all(f.hint and f.what.isprintable() and f.metric.isprintable() for f in found)
    assert all(RULES[f.rule].severity == f.severity for f in found)
    return "\n".join(f"{f.severity} {f.metric}: {f.what} ({f.hint})" for f in found)


def rules(page: str | bytes, content_type: str | None = TEXT, **options: Any) -> set[str]:
    """The names of what was found."""
    return {finding.rule for finding in findings(page, content_type, **options)}


SIZES = st.integers(0, 70) | st.sampled_from([71, 128, 129, 500, 4096, 100_000])
PHASES = st.sampled_from(["decode", "prefill", "verify", "draft"])
NAMES = st.sampled_from(["decode", "vllm.drafter", 'a"b\\c\nd', "é {x=1}", " ", "# EOF", "1"]) | st.text(min_size=1)


@st.composite
def ledgers(draw: st.DrawFn, wide: bool = False) -> Ledger:
    """Whatever may be counted: any forwards, buckets, sizes, phases, durations, captures, hooks and failures.

    With ``wide`` there is a forward that has to fold its labels, now and then.
    """
    ledger = Ledger()
    for reason in list(FallbackReason)[: draw(st.sampled_from([0, 0, 12, 27]) if wide else st.just(0))]:
        for size in range(100):
            observe("wide", [8, 80], ledger=ledger).eager_call(size, reason)
    for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
        _count(draw, name, ledger)
    for engine in draw(st.lists(st.sampled_from(["vllm", "sglang", "é"]), unique=True)):
        ledger.hooks[engine, "dispatch"] = draw(st.booleans())
    if draw(st.booleans()):
        # An engine whose hooks are in place and that launches more is told where it has no call.
        ledger.replays_seen = [draw(st.integers(0, SILENT - 1 if any(ledger.hooks.values()) else 10**12))]
    return ledger


def _count(draw: st.DrawFn, name: str, ledger: Ledger) -> None:
    buckets = draw(st.lists(st.integers(1, 600), min_size=1, max_size=12, unique=True))
    source = draw(st.sampled_from(["capture", "observe", "engine"]))
    watched = observe(name, sorted(buckets), ledger=ledger, source=source, clock=None)
    for bucket in draw(st.lists(st.sampled_from(buckets), max_size=6)):
        size = draw(st.integers(0, bucket))
        watched.graph_call(size, bucket, mode=draw(st.sampled_from(MODES)), phase=draw(PHASES))
    for size in draw(st.lists(SIZES, max_size=6)):
        watched.eager_call(size, draw(st.sampled_from(list(FallbackReason))), phase=draw(PHASES))
    for path in draw(st.sampled_from([(), ("graph", "eager")])):
        watched.forward.unmatched[path] = draw(st.integers(0, PATIENCE - 1))
    seconds = st.floats(0, 100)
    watched.forward.time("graph", buckets[0], draw(seconds), mode="full")
    watched.forward.time("eager", None, draw(seconds), draw(PHASES))
    for bucket in draw(st.lists(st.sampled_from(buckets), max_size=3)):
        outcome, growth = draw(st.sampled_from(["ok", "error", "oom"])), draw(st.none() | st.integers(-(10**9), 10**9))
        watched.forward.captured(bucket, outcome, draw(seconds), growth)
        watched.forward.mismatch(bucket)
    watched.forward.uncovered[draw(PHASES)] = draw(st.integers(0, 5000))
