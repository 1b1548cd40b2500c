"""A page of metrics becomes the snapshot that it was made of, as far as labels tell it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphprobe.errors import SourceError
from graphprobe.ledger import Ledger, add
from graphprobe.observe import MODES, observe
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot, Times
from graphprobe.tools.page import from_page
from graphprobe.tools.rebuild import Rebuilt
from graphprobe.tools.sources import Reading
from graphprobe.tools.traffic import traffic
from tests.pages import EAGER, GRAPH, MODERN, NAMES, PADDING, PAGE, changed, exposed, filled, ledgers, ranks, without

FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def rebuilt(page: str) -> Rebuilt:
    return from_page(page.encode(), "page")


def rows(page: str, forward: str = "decode") -> dict[tuple[int, str, str], int]:
    """Calls by size, path and reason."""
    found = rebuilt(page).snapshot.forwards[forward].rows
    assert len(found) == len({dataclasses.replace(row, calls=0, padding=0) for row in found})
    return {(row.batch_size, row.path, str(row.reason or "")): row.calls for row in found}


@st.composite
def small(draw: st.DrawFn) -> Ledger:
    """Sizes up to 64, each bucket in one mode; everything else that a page can tell, too."""
    ledger = Ledger()
    for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
        modes = draw(st.dictionaries(st.integers(1, 64), st.sampled_from(MODES), min_size=1, max_size=8))
        unit, source = (
            draw(st.sampled_from(["rows", "tokens"])),
            draw(st.sampled_from(["capture", "observe", "engine"])),
        )
        probe = observe(name, sorted(modes), ledger=ledger, unit=unit, source=source, clock=None)
        for bucket, mode in modes.items():
            phase = draw(st.sampled_from(["decode", "verify"]))
            cell = probe.forward.graph_cell(draw(st.integers(0, bucket)), bucket, phase, mode)
            add(cell, draw(st.integers(0, 10**7)))
            if cell[0] and draw(st.booleans()):
                probe.forward.time("graph", bucket, draw(st.floats(0, 100)), phase, mode)
        for size in draw(st.lists(st.integers(0, 64), max_size=4)):
            probe.eager_call(
                size, draw(st.sampled_from(list(FallbackReason))), draw(st.sampled_from(["decode", "draft"]))
            )
        probe.forward.time("eager", None, draw(st.floats(0, 100)))
        for bucket in draw(st.lists(st.sampled_from(sorted(modes)), max_size=3)):
            outcome = draw(st.sampled_from(["ok", "error", "oom"]))
            probe.forward.captured(bucket, outcome, draw(st.floats(0, 100)), draw(st.integers(-(10**9), 10**9)))
            probe.forward.mismatch(bucket)
        for path in draw(st.sampled_from([(), ("graph", "eager")])):
            probe.forward.unmatched[path] = draw(st.integers(0, 10**9))
        probe.forward.kv_capacity_tokens = draw(st.none() | st.integers(0, 10**9))
        probe.forward.role = draw(st.sampled_from(["", "draft"]))
    ledger.hooks["vllm", "dispatch"] = draw(st.booleans())
    ledger.replays_seen = draw(st.none() | st.lists(st.integers(0, 10**12), min_size=1, max_size=1))
    return ledger


def as_told(snapshot: Snapshot) -> Snapshot:
    """What a page can tell of it: neither the bounds of durations nor causes nor which phases were asked for."""
    forwards = {}
    for name, forward in snapshot.forwards.items():
        times = {key: Times(one.count, one.sum, ()) for key, one in forward.times.items()}
        phases = tuple(dict.fromkeys([*forward.phases, *(row.phase for row in forward.rows if row.path == "graph")]))
        forwards[name] = dataclasses.replace(forward, times=times, causes={}, phases=phases)
    return dataclasses.replace(snapshot, forwards=forwards)


@FEW
@given(small(), st.booleans())
def test_a_page_rebuilds_to_what_was_counted(ledger: Ledger, openmetrics: bool) -> None:
    """Rows, padding, buckets, times, captures, memory and hooks are those of the ledger, in both formats."""
    found = rebuilt(exposed(ledger, openmetrics))
    expected = as_told(ledger.snapshot())
    assert () == found.notes
    for name, forward in expected.forwards.items():
        for field in dataclasses.fields(forward):
            there = getattr(found.snapshot.forwards[name], field.name)
            wanted = getattr(forward, field.name)
            if field.name in ("phases", "live"):
                assert set(wanted) == set(there)
            elif field.name in ("times", "capture_seconds"):
                assert wanted.keys() == there.keys()
            else:
                assert wanted == there, field.name
        assert {key: one.mean for key, one in forward.times.items()} == pytest.approx(
            {key: one.mean for key, one in found.snapshot.forwards[name].times.items()}
        )
    assert expected.hooks == found.snapshot.hooks
    assert expected.replays_seen == found.snapshot.replays_seen
    assert set(expected.forwards) == set(found.snapshot.forwards)


@FEW
@given(ledgers(wide=True))
def test_no_call_is_lost(ledger: Ledger) -> None:
    """Whatever sizes there are: graph calls, eager calls and padding add up, but for calls that were folded away."""
    found = rebuilt(exposed(ledger))
    expected = ledger.snapshot().forwards
    calls = sum(f.graph_calls + f.eager_calls for f in found.snapshot.forwards.values())
    assert sum(f.graph_calls + f.eager_calls for f in expected.values()) == calls + found.folded
    if not found.folded:
        for name, forward in found.snapshot.forwards.items():
            assert expected[name].hit_rate == forward.hit_rate
            # Two ranges of one bucket share what is left, each rounded down.
            assert 0 <= expected[name].padding - forward.padding <= len(forward.rows)


def test_a_range_is_its_upper_end_and_its_padding_what_was_counted(ledger: Ledger) -> None:
    """Sizes 65 and 70 in the bucket 72 are told as 65-72: the rows added are still those that were added."""
    probe = observe("decode", [8, 72], ledger=ledger)
    for size, calls in ((65, 3), (70, 5), (7, 2)):
        for _ in range(calls):
            probe.graph_call(size, 72 if size > 8 else 8)
    probe.eager_call(100, "batch_too_large")
    found = rebuilt(exposed(ledger))
    graph = [row for row in found.snapshot.forwards["decode"].rows if row.path == "graph"]
    assert [(7, 8, 2, 2), (72, 72, 8, 3 * 7 + 5 * 2)] == [(r.batch_size, r.bucket, r.calls, r.padding) for r in graph]
    assert (128, "eager", "batch_too_large") in rows(exposed(ledger))
    assert ("9 calls have a range for a size, as 65-72: its upper end is taken",) == found.notes


def test_processes_are_summed_and_gauges_the_largest(ledger: Ledger) -> None:
    """Three ranks of a host on one page: counts of all, the memory of one, and a note that says so."""
    page = ranks(PAGE, "0", "1", "2")
    page = changed('graphprobe_graph_pool_bytes{rank="1",forward="decode"} 1.048576e+06', "graphprobe_graph_pool_bytes"
                   '{rank="1",forward="decode"} 9e+06', page)  # fmt: skip
    one, found = rebuilt(PAGE).snapshot.forwards["decode"], rebuilt(page)
    forward = found.snapshot.forwards["decode"]
    assert [3 * row.calls for row in one.rows] == [row.calls for row in forward.rows]
    assert 3 * one.padding == forward.padding
    assert 9_000_000 == forward.pool_bytes
    assert one.buckets == forward.buckets
    assert "3 processes are summed" in found.notes


def test_processes_with_different_buckets() -> None:
    """The list that most of them have counts, and the reader is told."""
    page = ranks(PAGE, "0", "1", "2")
    page = changed('info{rank="0",backend="",buckets="1,2,4,72"', 'info{rank="0",backend="",buckets="1,2"', page)
    found = rebuilt(page)
    assert (1, 2, 4, 72) == found.snapshot.forwards["decode"].buckets
    assert "processes have different buckets, and the list of most of them counts: decode" in found.notes


def test_calls_without_a_size_are_left_out_and_told(ledger: Ledger) -> None:
    """``all`` is what folding leaves of the sizes of a forward with too many label sets."""
    page = exposed(filled(ledger)) + EAGER.replace('batch_size="3"', 'batch_size="all"').replace(" 0.0", " 7.0") + "\n"
    assert 0 == rows(page).get((3, "eager", "no_exact_bucket"), 0)
    assert "7 calls have no size (batch_size=all, or none), and are left out" in rebuilt(page).notes


def test_nothing_but_calls_without_a_size_is_refused() -> None:
    """There is nothing left to look at, and the snapshot of the same process has it."""
    page = EAGER.replace('batch_size="3"', 'batch_size="all"').replace(" 0.0", " 1234.0") + "\n"
    with pytest.raises(SourceError, match=r"page: none of 1,234 calls has a size.*hint: read the exporter's /snapshot"):
        rebuilt(page)


def test_a_forward_that_folds_to_the_end() -> None:
    """Our own exporter at the last step: the calls are known, and no size is."""
    ledger = Ledger()
    probe = observe("decode", [8], ledger=ledger)
    for phase in range(600):
        probe.eager_call(9, "adapter", f"p{phase}")
    with pytest.raises(SourceError, match=r"none of 600 calls has a size"):
        rebuilt(exposed(ledger))


@pytest.mark.parametrize(
    ("reason", "note"),
    [("my_reason", ("reasons that are none of the contract's count as unknown: my_reason",)), ("unknown", ())],
)
def test_a_reason_of_its_own(reason: str, note: tuple[str, ...]) -> None:
    """Counts as unknown."""
    page = EAGER.replace("no_exact_bucket", reason).replace(" 0.0", " 4.0") + "\n"
    assert {(3, "eager", "unknown"): 4} == rows(page)
    assert note == rebuilt(page).notes


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-3.0"])
def test_a_value_that_is_no_count(value: str) -> None:
    """Is left out and told, and spoils no other series."""
    found = rebuilt(changed(GRAPH, GRAPH.replace(" 1.0", f" {value}")))
    assert [(72, 72, 1)] == [
        (r.batch_size, r.bucket, r.calls) for r in found.snapshot.forwards["decode"].rows if r.bucket
    ]
    assert "1 values that are no numbers or negative are left out" in found.notes


def test_calls_alone(ledger: Ledger) -> None:
    """An engine that exports nothing but its calls has a forward without buckets."""
    page = f"{GRAPH}\n{LARGER}\n"
    forward = rebuilt(page).snapshot.forwards["decode"]
    assert ((), "rows", "observe") == (forward.buckets, forward.unit, forward.source)
    assert {(3, "graph", ""): 1, (128, "eager", "batch_too_large"): 10_000_000} == rows(page)


LARGER = (
    'graphprobe_eager_calls_total{batch_size="73-128",forward="decode",phase="decode",reason="batch_too_large"} 1e+07'
)


def test_a_page_that_was_cut_off() -> None:
    """What is there is read, and the reader is told that it is not all."""
    found = rebuilt(PAGE[: PAGE.index(PADDING) + 60])
    assert 2 == found.snapshot.forwards["decode"].graph_calls
    assert any(note.startswith("the page is not whole (ends within a line") for note in found.notes)


def test_metrics_of_somebody_else() -> None:
    """Are named as such."""
    with pytest.raises(SourceError, match=r"page: these are metrics, but none of graphprobe's. hint: "):
        rebuilt("# TYPE up gauge\nup 1\n")


def test_times_of_several_modes_are_of_the_one_with_most_calls(ledger: Ledger) -> None:
    """Durations are told by bucket alone."""
    probe = observe("decode", [4], ledger=ledger)
    for mode, calls in (("piecewise", 5), ("full", 2)):
        for _ in range(calls):
            probe.graph_call(4, 4, mode)
        probe.forward.time("graph", 4, 0.5, mode=mode)
    forward = rebuilt(exposed(ledger)).snapshot.forwards["decode"]
    assert {("decode", "graph", "piecewise", 4): Times(2, 1.0, ())} == forward.times
    assert 0.5 == forward.mean_seconds("graph", 4)


def test_many_series_take_no_longer_than_they_are_many() -> None:
    """A hundred thousand label sets of one forward, each bucket with several ranges."""
    line = 'graphprobe_graph_calls_total{{batch_size="{}-{}",bucket="{}",forward="f",mode="full",phase="decode"}} 1\n'
    page = "".join(line.format(65 + n % 9, 80 + n % 7, 100 + n) for n in range(20_000))
    begun = time.monotonic()
    found = rebuilt(page).snapshot.forwards["f"]
    assert 20_000 == found.graph_calls == Counter(row.path for row in found.rows)["graph"]
    assert time.monotonic() - begun < 20


def test_openmetrics_is_the_same() -> None:
    """The other format has the same samples."""
    assert rebuilt(PAGE).snapshot == rebuilt(MODERN).snapshot
    assert isinstance(rebuilt(without("# ")).snapshot.forwards["decode"], ForwardSnapshot)
    assert Row(3, "graph", 4, None, 1, 1, mode="full") in rebuilt(PAGE).snapshot.forwards["decode"].rows


# -- pages that are not as they should be ------------------------------------------------------------------------------

CALLS = (
    'graphprobe_graph_calls_total{{{more}forward="d",phase="decode",mode="full",batch_size="{size}",bucket="{size}"}} '
)
INFO = (
    'graphprobe_forward_info{{{more}forward="d",unit="rows",buckets="{listed}",backend="",source="capture",role=""}} 1'
)


def bare(listed: str = "2,4", more: str = "", calls: str = "450") -> str:
    return f"{CALLS.format(size=4, more=more)}{calls}\n{INFO.format(listed=listed, more=more)}\n"


@pytest.mark.parametrize("listed", ["2, 4", "[2, 4]", " 2,4 ", "4,2"])
def test_a_list_with_blanks_or_brackets_is_the_same_list(listed: str) -> None:
    assert (2, 4) == rebuilt(bare(listed)).snapshot.forwards["d"].buckets


def test_a_list_that_cannot_be_read_is_none_and_is_told() -> None:
    """A part of it would look like a list that the engine never had."""
    found = rebuilt(bare("1,2,max"))
    assert () == found.snapshot.forwards["d"].buckets
    assert any("buckets that cannot be read" in note and "1,2,max" in note for note in found.notes)


def test_a_series_that_is_there_twice_counts_once() -> None:
    """The scrape of one process, pasted three times, is no more traffic."""
    found = rebuilt(bare() * 3)
    assert [450] == [row.calls for row in found.snapshot.forwards["d"].rows]
    assert "4 series are there twice, and the last of each counts" in found.notes
    assert {"d": 1} == found.processes


def test_processes_are_counted_by_forward() -> None:
    """A forward that one of four processes has is not the sum of four."""
    page = "".join(bare(more=f'rank="{n}",') for n in range(8))
    other = bare(more='rank="0",').replace('"d"', '"e"')
    assert {"d": 8, "e": 1} == rebuilt(page + other).processes
    assert ({"d": 8}, 3600) == (
        rebuilt(page).processes,
        sum(r.calls for r in rebuilt(page).snapshot.forwards["d"].rows),
    )


@pytest.mark.parametrize("calls", ["1e308", "9.9e15", "+Inf", "NaN", "-1"])
def test_a_value_that_no_counter_can_have_is_left_out(calls: str) -> None:
    """Two of the largest would be infinite together."""
    page = "".join(bare(more=f'rank="{n}",', calls=calls) for n in range(2))
    found = rebuilt(page)
    assert () == found.snapshot.forwards["d"].rows
    assert "2 values that are no numbers or negative are left out" in found.notes


def test_the_list_of_most_processes_is_todays() -> None:
    """Of eight, one has another list."""
    lists = ["1,2,4"] * 7 + ["1,2,3"]
    page = "".join(bare(listed, f'rank="{n}",') for n, listed in enumerate(lists))
    for text in (page, "\n".join(reversed(page.splitlines())) + "\n"):
        assert (1, 2, 4) == rebuilt(text).snapshot.forwards["d"].buckets


def test_a_renamed_label_and_a_lost_suffix_are_named() -> None:
    """A scrape renames the label forward where it has one itself; OpenTelemetry can drop _total."""
    renamed = rebuilt(bare().replace("forward=", "exported_forward="))
    assert any("without the label forward" in note and "honor_labels" in note for note in renamed.notes)
    lost = rebuilt(bare().replace("calls_total", "calls"))
    assert any("graphprobe_graph_calls; are its suffixes kept?" in note for note in lost.notes)
    with pytest.raises(SourceError, match=r"no calls yet.*are its suffixes kept"):
        traffic(Reading(lost.snapshot, notes=lost.notes))
    with pytest.raises(SourceError, match="the label batch_size is missing"):
        rebuilt(bare().replace('batch_size="4",', ""))
