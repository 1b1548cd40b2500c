"""What `graphprobe check` says of pages that break the metric contract in one place, and of none that conforms."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphprobe import metrics
from graphprobe.ledger import Ledger
from graphprobe.observe import observe
from graphprobe.tools import contract
from graphprobe.tools.check import findings
from graphprobe.tools.findings import MANY, RULES
from graphprobe.tools.series import NAMES
from tests.pages import (
    COUNT,
    EAGER,
    FOLDS,
    GRAPH,
    INFINITE,
    LARGE,
    MODERN,
    OPENMETRICS,
    PADDING,
    PAGE,
    TEXT,
    changed,
    exposed,
    ledgers,
    ranks,
    replaced,
    rules,
    told,
    without,
)

FORWARD_INFO = 'graphprobe_forward_info{forward="decode",unit="tokens",buckets="1",source="engine"} 1\n'
BUILD_INFO = 'graphprobe_build_info{version="2",contract="1"} 1\n'
NOT_BORN = "missing for forward decode, phase decode: "

DURATION = "graphprobe_forward_duration_seconds"
SUMMARY = without(f"{DURATION}_bucket", changed(f"# TYPE {DURATION} histogram", f"# TYPE {DURATION} summary"))

BROKEN: dict[str, tuple[str, str, str]] = {
    # What must exist.
    "no build info": ("missing", without("graphprobe_build_info"), "error graphprobe_build_info: missing"),
    "no forward info": (
        "missing",
        without("graphprobe_forward_info"),
        "error graphprobe_forward_info: missing for forward decode",
    ),
    "durations by halves": (
        "missing",
        without("graphprobe_forward_seconds_total"),
        "error graphprobe_forward_seconds_total: missing for forward decode, phase decode, path eager (export",
    ),
    "another contract": (
        "contract",
        changed('contract="1"', 'contract="2"'),
        "contract '2', this graphprobe checks 1",
    ),
    # Types, help texts, names and labels.
    "wrong type": (
        "type",
        changed("# TYPE graphprobe_bucket_captured gauge", "# TYPE graphprobe_bucket_captured counter"),
        "error graphprobe_bucket_captured: type counter (write # TYPE graphprobe_bucket_captured gauge)",
    ),
    "a summary": (
        "type",
        SUMMARY,
        f"error {DURATION}: type summary (write # TYPE {DURATION} histogram, and its samples",
    ),
    "quantiles of a summary": (
        "type",
        SUMMARY.replace(f"{DURATION} summary\n", f'{DURATION} summary\n{DURATION}{{forward="x",quantile="0.5"}} 1\n'),
        f"error {DURATION}: type summary (write # TYPE {DURATION} histogram, and its samples as {DURATION}_bucket",
    ),
    "quantiles in a histogram": (
        "type",
        changed(f"{DURATION} histogram\n", f'{DURATION} histogram\n{DURATION}{{forward="x",quantile="0.5"}} 1\n'),
        f"error {DURATION}: a sample without _bucket, _sum or _count (write # TYPE {DURATION} histogram, and",
    ),
    "no type": ("type", without("# TYPE graphprobe_captures_total"), "error graphprobe_captures_total: no type"),
    "type of a name without _total": (
        "type",
        changed("# TYPE graphprobe_graph_calls_total", "# TYPE graphprobe_graph_calls"),
        "error graphprobe_graph_calls_total: no type",
    ),
    "no help": (
        "help",
        without("# HELP graphprobe_captures_total"),
        "warning graphprobe_captures_total: no help text (write # HELP graphprobe_captures_total Attempts",
    ),
    "unknown metric": (
        "unknown-metric",
        PAGE + "graphprobe_graph_call_total 1\n",
        "error graphprobe_graph_call_total: no metric of the contract (write graphprobe_graph_calls_total)",
    ),
    "unlike any metric": (
        "unknown-metric",
        PAGE + "graphprobe_zzz 1\n",
        "error graphprobe_zzz: no metric of the contract (the prefix graphprobe_ belongs to the contract",
    ),
    "unknown metric, quoted": (
        "unknown-metric",
        PAGE + '{"graphprobe.graph.calls"} 1\n',
        "error graphprobe.graph.calls: no metric of the contract",
    ),
    "unknown family": ("unknown-metric", PAGE + "# TYPE graphprobe_zzz gauge\n", "error graphprobe_zzz: no metric"),
    "a hit rate": ("unknown-metric", PAGE + "graphprobe_hit_rate 0.9\n", "error graphprobe_hit_rate: no metric"),
    "unknown label": (
        "unknown-label",
        changed(GRAPH, GRAPH.replace("{", '{request="7",')),
        "(its labels are forward, phase, mode, batch_size, bucket; one of your own is on every series)",
    ),
    "a label of another metric": (
        "unknown-label",
        replaced(r"^(?!graphprobe_hook)(\w+)\{", r'\1{engine="0",'),
        "bucket; one of your own has another name)",
    ),
    "rank on few": (
        "unknown-label",
        replaced(r"^(graphprobe_g.*\{)", r'\1rank="0",'),
        "unknown label rank",
    ),
    "rank on most": (
        "label-on-some",
        changed('graphprobe_build_info{rank="0",', "graphprobe_build_info{", ranks(PAGE, "0")),
        "no rank on {backend=",
    ),
    "missing label": ("missing-label", changed(GRAPH, GRAPH.replace('bucket="4",', "")), "no bucket on"),
    "empty label": ("missing-label", changed(EAGER, EAGER.replace("no_exact_bucket", "")), "no reason on"),
    "graph without mode": (
        "missing-label",
        changed('mode="full",path="graph"', 'mode="",path="graph"'),
        "no mode on",
    ),
    # Words.
    "unknown reason": (
        "unknown-word",
        changed('reason="empty_batch"', 'reason="Empty"'),
        "unknown reason 'Empty' of decode",
    ),
    "reason of another language": (
        "unknown-word",
        changed('reason="empty_batch"', 'reason="EmptyBatch"'),
        "unknown reason 'EmptyBatch' of decode (write empty_batch)",
    ),
    "mode of another language": ("unknown-word", changed('mode="piecewise"', 'mode="PIECEWISE"'), "(write piecewise)"),
    "unknown phase": (
        "unknown-word",
        changed('phase="verify"', 'phase="Verify!"'),
        "error graphprobe_graph_calls_total: unknown phase",
    ),
    "own phase": (
        "own-word",
        changed('phase="verify"', 'phase="encode"'),
        "warning graphprobe_graph_calls_total: unknown phase 'encode'",
    ),
    "own unit": ("own-word", changed('unit="rows"', 'unit="frames"'), "warning graphprobe_forward_info: unknown unit"),
    "unknown mode": ("unknown-word", changed('mode="piecewise"', 'mode="partial"'), "unknown mode 'partial'"),
    "unknown outcome": ("unknown-word", changed('outcome="oom"', 'outcome="failed"'), "unknown outcome 'failed'"),
    "unknown path": (
        "unknown-word",
        changed('path="eager"', 'path="eagerly"'),
        "unknown path 'eagerly' of decode (write eager)",
    ),
    "unknown source": ("unknown-word", changed('source="capture"', 'source="rust"'), "unknown source 'rust'"),
    # Sizes.
    "exact above 64": ("batch-size", changed(LARGE, LARGE.replace("73-128", "100")), "batch_size '100' on"),
    "what to write instead": ("batch-size", changed(LARGE, LARGE.replace("73-128", "100")), "(write 73-128)"),
    "range below 64": ("batch-size", changed(EAGER, EAGER.replace('"3"', '"3-4"')), "batch_size '3-4' on"),
    "another range": ("batch-size", changed('batch_size="65-72"', 'batch_size="65-71"'), "(write 65-72)"),
    "leading zero": ("batch-size", changed(EAGER, EAGER.replace('"3"', '"03"')), "batch_size '03' on"),
    "no size": ("batch-size", changed(EAGER, EAGER.replace('"3"', '"three"')), "batch_size 'three' on"),
    "other digits": ("batch-size", changed(EAGER, EAGER.replace('"3"', '"\u0663"')), "batch_size '\u0663' on"),
    "all": ("batch-size", changed(EAGER, EAGER.replace('"3"', '"all"')), "batch_size 'all' on"),
    "bucket below the batch": (
        "batch-size",
        changed(GRAPH, GRAPH.replace('bucket="4"', 'bucket="2"')),
        "batch_size 3 above bucket 2",
    ),
    "bucket range": ("bucket", changed(GRAPH, GRAPH.replace('bucket="4"', 'bucket="3-4"')), "bucket '3-4' on"),
    "bucket list": ("bucket", changed('buckets="1,2,4,72"', 'buckets="1,4,2,72"'), "buckets '1,4,2,72' of decode"),
    "bucket of no list": (
        "unlisted-bucket",
        changed(GRAPH, GRAPH.replace('bucket="4"', 'bucket="5"')),
        "bucket 5 of decode is not in its list",
    ),
    "no list": (
        "unlisted-bucket",
        changed('buckets="1,2,4,72"', 'buckets=""'),
        "warning graphprobe_graph_calls_total: decode lists no buckets (name all in the label buckets of graphprobe_f",
    ),
    # Zeros.
    "bucket not born": (
        "no-zero",
        without(r'graphprobe_graph_calls_total\{batch_size="2"'),
        f"error graphprobe_graph_calls_total: {NOT_BORN}bucket 2 (export it at 0",
    ),
    "the line to add": (
        "no-zero",
        without(r'graphprobe_graph_calls_total\{batch_size="2"'),
        'graphprobe_graph_calls_total{forward="decode", phase="decode", mode="full", batch_size="2", bucket="2"} 0)',
    ),
    "size not born": (
        "no-zero",
        without(r'graphprobe_eager_calls_total\{batch_size="(3|17|18)"'),
        f"{NOT_BORN}no_exact_bucket at size 3, 17-18",
    ),
    "first range not born": (
        "no-zero",
        without(r"graphprobe_eager_calls_total.*batch_too_large"),
        f"{NOT_BORN}batch_too_large at size 73",
    ),
    "no eager calls": (
        "no-zero",
        without("graphprobe_eager_calls_total"),
        f"{NOT_BORN}no_exact_bucket at size 3, 5-64",
    ),
    "no padding": ("no-zero", without("graphprobe_padding_rows_total"), f"{NOT_BORN}bucket 1, 2, 4, 72"),
    # Values.
    "negative counter": ("value", changed(GRAPH, GRAPH[:-3] + "-1"), "value -1 on"),
    "NaN counter": ("value", changed(GRAPH, GRAPH[:-3] + "NaN"), "value nan on"),
    "infinite counter": ("value", changed(GRAPH, GRAPH[:-3] + "+Inf"), "value inf on"),
    "half a call": ("value", changed(GRAPH, GRAPH[:-3] + "1.5"), "(it counts whole things)"),
    "half a byte": ("value", replaced(r"^(graphprobe_graph_pool_bytes\S+) .*", r"\1 1.5"), "(it counts whole things)"),
    "negative gauge": ("value", replaced(r"^(graphprobe_kv\S+) .*", r"\1 -1"), "(it is never negative)"),
    "NaN gauge": ("value", replaced(r"^(graphprobe_kv\S+) .*", r"\1 nan"), "(leave a series out where"),
    "neither 0 nor 1": ("value", replaced(r"^(graphprobe_hook\S+) .*", r"\1 2"), "(it is 0 or 1)"),
    "info of 0": ("value", replaced(r"^(graphprobe_forward_info\S+) .*", r"\1 0"), "(an info is always 1)"),
    "padded total": ("padding", changed(PADDING, PADDING[:-3] + "9e6"), "9e+06 rows, the calls explain 1: {bucket="),
    # Twice.
    "twice": ("duplicate", changed(GRAPH, f"{GRAPH}\n{GRAPH}"), "twice on the page"),
    "twice, in another order": (
        "duplicate",
        changed(GRAPH, GRAPH + "\n" + GRAPH.replace('bucket="4",', "").replace("}", ',bucket="4",}')),
        "twice on the page",
    ),
    "twice, an empty label and none": (
        "duplicate",
        changed(INFINITE, INFINITE + "\n" + INFINITE.replace(',mode=""', "")),
        "twice on the page",
    ),
    "second forward info": ("duplicate", PAGE + FORWARD_INFO, "a second one of decode"),
    "second build info": ("duplicate", PAGE + BUILD_INFO, "a second one of the process"),
    # Histograms.
    "no +Inf": ("histogram", without(r"graphprobe_forward_duration_seconds_bucket.*\+Inf"), "no +Inf bound"),
    "another word for +Inf": ("histogram", changed('le="+Inf"', 'le="inf"'), 'write le="0.0001", ..., le="+Inf"'),
    "nothing but +Inf": (
        "histogram",
        without(r'graphprobe_forward_duration_seconds_bucket\{[^}]*le="[0-9]'),
        "no bound but +Inf",
    ),
    "not cumulative": (
        "histogram",
        changed(
            'le="0.0032",mode="full",path="graph",phase="decode"} 1.0',
            'le="0.0032",mode="full",path="graph",phase="decode"} 2.0',
        ),
        "bounds are not cumulative",
    ),
    "count is another": ("histogram", changed(COUNT, COUNT[:-3] + "7"), "count 7, +Inf 1"),
    "no count": ("histogram", without("graphprobe_forward_duration_seconds_count"), "no _count"),
    "no sum": ("histogram", without("graphprobe_forward_duration_seconds_sum"), "no _sum"),
    "no number": ("histogram", changed('le="0.0032",mode="full"', 'le="low",mode="full"'), "a bound that is no number"),
    "no finite number": ("histogram", changed('le="0.0032",mode="full"', 'le="1e999",mode="full"'), "is no number"),
    "no bound": ("histogram", changed(INFINITE, INFINITE.replace('le="+Inf",', "")), "a bound that is no number"),
    "bound twice": ("histogram", changed('le="0.0032",mode="full"', 'le="1.6e-3",mode="full"'), "a bound twice"),
    "one bound less": (
        "bounds",
        without(r'graphprobe_forward_duration_seconds_bucket\{forward="decode",le="0.0032",mode="full"'),
        "15 bounds from 5e-05 to 0.8192 and +Inf, others have 16",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_fault_is_named(case: str) -> None:
    """A page that breaks the contract in one place gets a finding of that rule: the place, and what to write."""
    rule, page, expected = BROKEN[case]
    assert page != PAGE
    assert rule in rules(page)
    assert expected in told(page)


@pytest.mark.parametrize("case", ["unknown metric", "own phase", "exact above 64", "rank on few", "rank on most"])
def test_one_fault_hides_no_other(case: str) -> None:
    """Findings on a page with two faults are those of both."""
    _, page, expected = BROKEN[case]
    found = told(changed('outcome="oom"', 'outcome="failed"', page))
    assert expected in found
    assert "unknown outcome 'failed'" in found


ONE = ("rank on most", "unknown reason", "padded total", "one bound less", "half a byte", "quantiles of a summary")


@pytest.mark.parametrize("case", ONE)
def test_one_fault_is_one_finding(case: str) -> None:
    """A fault is told once, and not again by what follows from it."""
    rule, page, _ = BROKEN[case]
    assert [rule] == [finding.rule for finding in findings(page, TEXT)]


def test_every_zero_is_missed() -> None:
    """Whichever of the series that our exporter bears is left out, it is missed; of a forward that was called, too."""
    ledger = Ledger()
    observe("decode", [1, 2, 4, 72], ledger=ledger)
    born = [line for line in exposed(ledger).split("\n") if re.match(r"graphprobe_(graph|eager|padding)\w+\{", line)]
    assert 4 + 4 + 61 + 1 == len(born)
    for line in born:
        assert "no-zero" in rules(PAGE.replace(line.rsplit(" ", 1)[0] + " ", "x 1 #")), line


def test_other_bounds_are_allowed() -> None:
    """An engine may choose the bounds of its histograms, as long as all of its series have the same."""
    other = replaced(r'^(graphprobe_forward_duration_seconds_bucket.*)le="0\.0032"', r'\1le="0.004"')
    assert set() == rules(other)
    assert set() == rules(without(r'graphprobe_forward_duration_seconds_bucket\{[^}]*le="[0-9.e-]*[25]6?"'))


def test_the_bounds_of_most_series_are_those_that_others_lack() -> None:
    """Of many series the few are told, whichever of them have more bounds."""
    page = ranks(PAGE, "0", "1")
    page = replaced(r'^graphprobe_forward_duration_seconds_bucket\{[^}]*le="0.0032".*\n', "", page, count=3)
    (found,) = (finding for finding in findings(page, TEXT) if finding.rule == "bounds")
    assert found.what.startswith("16 bounds from 5e-05 to 0.8192 and +Inf, others have 15")


def many(count: int) -> str:
    """The page with so many more label sets of its forward."""
    reasons = ("busy", "grad", "unknown", "ragged", "adapter", "signature", "not_captured")
    extra = [EAGER.replace('"3"', f'"{n}"').replace("no_exact_bucket", r) for n in range(1, 65) for r in reasons]
    return changed(EAGER, "\n".join([EAGER, *extra[:count]]))


def test_series_are_bounded() -> None:
    """More than 500 label sets of one forward are an error; a histogram counts as one."""
    assert "unbounded" in rules(many(448))
    first = re.search(r"error : forward decode has (\d+) label sets", told(many(448)))
    assert first
    assert "" == told(many(448 - (int(first[1]) - metrics.LIMIT)))
    assert "decode has 501 label sets" in told(many(449 - (int(first[1]) - metrics.LIMIT)))


def test_an_engine_may_have_more_series() -> None:
    """Its one forward has many sizes, modes and phases: 2,000 label sets of it are no error, more are."""
    engine = re.sub('source="[a-z]+"', 'source="engine"', many(448))
    assert "unbounded" not in rules(engine)
    more = [EAGER.replace('"3"', f'"{n}"').replace("no_exact_bucket", "unknown") for n in range(65, 2_000)]
    assert "unbounded" in rules(engine.replace(EAGER, "\n".join([EAGER, *more])))


def test_every_rank_has_its_own_bound() -> None:
    """Two ranks on one page are two processes: each may have 500, and each needs its infos and its zeros."""
    page = ranks(many(200), "0", "1")
    assert page.count("rank=") > metrics.LIMIT
    assert "" == told(page)
    assert "missing for forward decode (rank=1)" in told(without(r'graphprobe_forward_info\{rank="1"', page))
    assert "missing (rank=1)" in told(without(r'graphprobe_build_info\{rank="1"', page))
    zero = without(r'graphprobe_padding_rows_total\{rank="1",bucket="2"', page)
    assert "forward decode, phase decode (rank=1): bucket 2" in told(zero)


def ended(rank: str, page: str) -> str:
    """A page without the gauges and infos of one rank."""
    gauges = "|".join(metric.name for metric in metrics.CATALOGUE if metric.kind in ("gauge", "info"))
    return without(rf'(?:{gauges})\{{rank="{rank}"', page)


def test_a_process_of_which_only_counters_are_left_has_ended() -> None:
    """On a page where others live that is a warning, by all of its labels; with a gauge it lives, and lacks infos."""
    page = ended("[01]", ranks(PAGE, "0", "1", "2"))
    assert {"ended"} == rules(page)
    assert "warning : rank 0 has ended: its counters stay, its gauges and infos are gone" in told(page)
    assert "rank 1 has ended" in told(page)
    assert "rank 2 has" not in told(page)
    apart = re.sub(r'rank="(\d)"', r'rank="\1",replica="a\1"', page)
    assert "rank 1, replica a1 has ended" in told(apart)
    info = 'graphprobe_kv_capacity_tokens{rank="2"'
    assert "missing (rank=1)" in told(page.replace(info, info.replace("2", "1")))


def test_the_sizes_of_a_process_that_has_ended_may_be_any() -> None:
    """Its buckets are no longer told; what is no size at all is an error all the same."""
    ledger = Ledger()
    observe("decode", [1, 65, 96], ledger=ledger).graph_call(70, 96)
    page = ended("1", ranks(exposed(ledger), "0", "1"))
    assert 'batch_size="65"' in page
    assert {"ended"} == rules(page)
    other = page.replace('rank="1",batch_size="65"', 'rank="1",batch_size="65-"')
    assert "batch_size '65-' on {rank=\"1\"" in told(other)


def test_where_every_process_has_ended_nobody_says_which_contract_it_is() -> None:
    """A page of nothing but counters lacks its infos, and the hint says what may have happened."""
    page = ended(r"\d", ranks(PAGE, "0", "1"))
    assert {"missing"} == rules(page)
    assert "has every process of this page ended?" in told(page)
    assert "ended" not in told(without("graphprobe_build_info"))


def test_a_series_without_its_rank_is_of_nobody_who_has_ended() -> None:
    """It is told as what it is: a label that is not on all."""
    page = changed('graphprobe_replays_seen_total{rank="1"}', "graphprobe_replays_seen_total{}", ranks(PAGE, "0", "1"))
    assert {"label-on-some", "missing"} == rules(page)


def test_the_gauges_of_several_processes_have_a_bound_each() -> None:
    """Where a pid tells gauges apart each process may have as many as one, and most series may have a pid then."""
    one = 'graphprobe_bucket_captured{{bucket="{}",forward="x",pid="{}"}} 1'
    captured = [one.format(n % 200 + 1, n // 200) for n in range(1000)]
    page = replaced(r"^(graphprobe_bucket_captured\{.*)$", "\n".join([r"\1", *captured]), count=1)
    info = [f'graphprobe_forward_info{{forward="x",unit="rows",source="engine",pid="{pid}"}} 1' for pid in range(5)]
    page = replaced(r"^(graphprobe_forward_info\{.*)$", "\n".join([r"\1", *info]), page)
    assert page.count("pid=") > page.count("\ngraphprobe_") / 2
    assert set() == rules(page)


def test_a_rank_that_folded_excuses_no_other() -> None:
    """Coarser labels are allowed to the process that counts its folds, not to its neighbours."""
    page = ranks(changed(LARGE, LARGE.replace("73-128", "65-128")), "0", "1")
    page = replaced(re.escape(FOLDS.replace("{", '{rank="1",')) + "0.0", FOLDS.replace("{", '{rank="1",') + "1.0", page)
    assert "(rank=0)" in told(page)
    assert "rank=1" not in re.sub(r'rank="1"', "", told(page))
    assert {"batch-size", "no-zero"} == rules(page)


def test_a_page_without_a_fold_has_no_folded_labels() -> None:
    """Coarser ranges than the contract's are an error unless the process says that it had to fold."""
    page = changed(LARGE, LARGE.replace("73-128", "65-128"))
    assert "write 73-128" in told(page)
    assert "" == told(changed(f"{FOLDS}0.0", f"{FOLDS}1.0", page))


def test_folded_labels_have_a_form_too() -> None:
    """Where labels were folded a bucket is a size, a range or all, and nothing else."""
    page = changed(f"{FOLDS}0.0", f"{FOLDS}1.0")
    for bucket, fine in (("3-4", True), ("all", True), ("4-3", False), ("four", False), ("4-", False)):
        assert fine == (set() == rules(changed(GRAPH, GRAPH.replace('bucket="4"', f'bucket="{bucket}"'), page))), bucket


def test_a_constant_label_is_no_request() -> None:
    """A label of every series may tell a host's ranks apart, not thousands of requests."""
    lines = [f'graphprobe_replays_seen_total{{request="{n}"}} 1' for n in range(1000)]
    page = "# HELP graphprobe_replays_seen_total x\n# TYPE graphprobe_replays_seen_total counter\n" + "\n".join(lines)
    assert "label request has 1,000 values" in told(page + "\n")
    assert "unbounded" in rules(page + "\n")


def test_forwards_are_bounded() -> None:
    """A forward per request is told."""
    infos = [f'graphprobe_forward_info{{forward="f{n}",unit="rows",source="engine"}} 1' for n in range(300)]
    page = replaced(r"^(graphprobe_forward_info.*)$", "\\1\n" + "\n".join(infos))
    assert "301 forwards in one process" in told(page)
    assert {"many-forwards"} == rules(page)


def test_padding_may_be_behind_the_calls() -> None:
    """Counters of a page are read one after the other: calls in between explain a difference, ranges leave room."""
    calls = changed(GRAPH, GRAPH[:-3] + "1000")
    assert "padding" in rules(calls)
    assert set() == rules(changed(PADDING, PADDING[:-3] + "995", calls))
    assert set() == rules(changed(PADDING, PADDING[:-3] + "1200", calls))
    wide = 'graphprobe_padding_rows_total{bucket="72",forward="decode",phase="verify"} '
    seven = re.sub(r'(batch_size="65-72".*phase="verify"}) .*', r"\1 10000", PAGE)
    assert set() == rules(replaced(re.escape(wide) + ".*", f"{wide}70000", seven))
    assert "10000 rows" not in told(seven)
    assert "padding" in rules(replaced(re.escape(wide) + ".*", f"{wide}90000", seven))


def test_counters_that_fell() -> None:
    """Between two pages of a process a counter neither falls nor vanishes; gauges may."""
    more = changed(GRAPH, GRAPH[:-3] + "2")
    assert "" == told(more, earlier=PAGE)
    assert "fell from 2 to 1" in told(PAGE, earlier=more)
    assert {"fell"} == rules(PAGE, earlier=more)
    assert "gone at the second read" in told(changed(LARGE + "\n", ""), earlier=PAGE)
    assert "gone" in rules(changed(LARGE + "\n", ""), earlier=PAGE)
    assert "fell from 1 to 0" in told(changed(COUNT, COUNT[:-3] + "0"), earlier=PAGE)
    assert "" == told(replaced(r"^(graphprobe_kv\S+) .*", r"\1 1"), earlier=PAGE)
    assert "" == told(without("# HELP graphprobe_kv_.*\n# TYPE graphprobe_kv_.*\ngraphprobe_kv_"), earlier=PAGE)


def test_a_label_that_is_empty_may_be_left_out_later() -> None:
    """To Prometheus it is the same series, which has not vanished then."""
    assert "" == told(changed(',mode="",', ","), earlier=PAGE)


def test_the_words_are_those_of_the_code() -> None:
    """What the contract knows for a label is what the package itself lets through."""
    pytest.importorskip("torch")
    from graphprobe import options

    assert (options.PHASES, options.UNITS) == (contract.WORDS["phase"], contract.WORDS["unit"])
    labels = {label for metric in metrics.CATALOGUE for label in metric.labels}
    assert set(contract.WORDS) <= labels


@settings(max_examples=40, deadline=None)
@given(ledgers(wide=True), st.booleans())
def test_whatever_we_count_keeps_the_contract(ledger: Ledger, openmetrics: bool) -> None:
    """The page of any ledger passes in both formats, and is a good second page of itself; hooks may be off."""
    page, kind = exposed(ledger, openmetrics), OPENMETRICS if openmetrics else TEXT
    assert (set() if all(ledger.hooks.values()) else {"hook"}) == rules(page, kind, earlier=page), told(page, kind)


ITERATIONS = 'vllm:iteration_tokens_total_count{engine="0"} 1e9\n'

Spoil = Callable[[str], tuple[str | bytes, str | None, str | None]]


def spoilt(pattern: str, new: str, count: int = 1) -> Spoil:
    """A fault that is one change of the text."""
    return lambda page: (replaced(pattern, new, page, count), TEXT, None)


VIOLATIONS: dict[str, Spoil] = {
    "content-type": lambda page: (page, "text/html", None),
    "encoding": lambda page: (page.encode() + b"# \xff\n", TEXT, None),
    "syntax": spoilt(r"^(graphprobe_build_info\{.*) 1.0$", r"\1 one"),
    "too-long": lambda page: (page + "x" * 20_000 + " 1\n", TEXT, None),
    "no-metric": lambda page: (page.replace("graphprobe_", "other_"), TEXT, None),
    "metadata": spoilt(r"^(# TYPE graphprobe_eager_calls_total counter)$", "\\1\n\\1"),
    "type": spoilt("^# TYPE graphprobe_graph_calls_total counter", "# TYPE graphprobe_graph_calls_total gauge"),
    "help": spoilt("^# HELP graphprobe_eager_calls_total .*\n", ""),
    "timestamp": spoilt(r"^(graphprobe_eager_calls_total\{.*)$", r"\1 1700000000000"),
    "unknown-metric": lambda page: (page + "graphprobe_hits 1\n", TEXT, None),
    "unknown-label": spoilt(r"^graphprobe_graph_calls_total\{", 'graphprobe_graph_calls_total{request="7",'),
    "missing-label": spoilt(r"(^graphprobe_eager_calls_total\{.*)phase=", r"\1other="),
    "label-on-some": lambda page: (
        re.sub(r"^(?!graphprobe_build_info)(\w+)\{", r'\1{rank="0",', page, flags=re.MULTILINE),
        TEXT,
        None,
    ),
    "unknown-word": spoilt(r'(^graphprobe_eager_calls_total\{.*)reason="\w+"', r'\1reason="x_y_z"'),
    "own-word": spoilt(r'(^graphprobe_eager_calls_total\{.*)phase="\w+"', r'\1phase="encode"'),
    "batch-size": spoilt(r'^graphprobe_graph_calls_total\{batch_size="', 'graphprobe_graph_calls_total{batch_size="0'),
    "bucket": spoilt(r'(^graphprobe_graph_calls_total\{.*)bucket="', r'\1bucket="0'),
    "unlisted-bucket": spoilt(
        r'^(graphprobe_graph_calls_total\{)batch_size="[\d-]+",bucket="\d+"(.*)$',
        '\\g<0>\n\\1batch_size="1",bucket="99999"\\2',
    ),
    "value": spoilt(r"(^graphprobe_graph_calls_total\{.*) .*$", r"\1 -1"),
    "padding": spoilt(r"(^graphprobe_padding_rows_total\{.*) .*$", r"\1 1e12"),
    "duplicate": spoilt(r"^graphprobe_graph_calls_total\{.*$", "\\g<0>\n\\g<0>"),
    "histogram": spoilt(r"(^graphprobe_forward_duration_seconds_count\{.*) .*$", r"\1 77"),
    "bounds": spoilt(r'^graphprobe_forward_duration_seconds_bucket\{.*le="0.0001",.*\n', ""),
    "unbounded": spoilt(
        r'^graphprobe_eager_calls_total\{batch_size="[\d-]+",(.*),reason=.*$',
        "\n".join(f'graphprobe_eager_calls_total{{batch_size="1",\\1,reason="r{n}"}} 0' for n in range(2100)),
    ),
    "many-forwards": lambda page: (
        page + "".join(f'graphprobe_graph_calls_total{{forward="f{n}"}} 0\n' for n in range(201)),
        TEXT,
        None,
    ),
    "contract": spoilt('contract="1"', 'contract="0"'),
    "missing": spoilt("^graphprobe_build_info.*\n", ""),
    "no-zero": spoilt(r"^graphprobe_eager_calls_total.*batch_too_large.*\n", "", 0),
    "no-forward": lambda page: (without(r".*\bforward=", page), TEXT, None),
    "ended": lambda page: (ended("1", ranks(page, "0", "1")), TEXT, None),
    "hook": lambda page: (page + 'graphprobe_hook_bound{engine="x",hook="y"} 0\n', TEXT, None),
    "internal-error": lambda page: (page + 'graphprobe_internal_errors_total{where="x"} 1\n', TEXT, None),
    "engine-silent": lambda page: (page + 'graphprobe_graph_calls_total{forward="vllm"} 0\n' + ITERATIONS, TEXT, None),
    "engine-launches": lambda page: (
        page + 'graphprobe_replay_mismatches_total{forward="x",path="graph"} 16\n',
        TEXT,
        None,
    ),
    "engine-steps": lambda page: (page + 'graphprobe_graph_calls_total{forward="vllm"} 1\n' + ITERATIONS, TEXT, None),
    "fell": lambda page: (page, TEXT, replaced(r"(^graphprobe_graph_calls_total\{.*) .*$", r"\1 1e15", page, 1)),
    "gone": lambda page: (page, TEXT, page + 'graphprobe_internal_errors_total{where="x"} 0\n'),
}
"""Rule -> how to break it on any page of ours in the text format."""

ELSEWHERE = {
    "openmetrics": "tests/test_exposition.py: in that format",
    "openmetrics-elsewhere": "tests/test_exposition.py: in that format",
    "unit": "tests/test_exposition.py: in that format",
    "second-read": "tests/test_check.py: a process that ends between two reads",
}


def test_every_rule_is_tried() -> None:
    """Each thing that can be found is found somewhere in these tests."""
    assert set(RULES) == set(VIOLATIONS) | set(ELSEWHERE)
    assert not set(VIOLATIONS) & set(ELSEWHERE)


@pytest.mark.parametrize("rule", VIOLATIONS)
@settings(max_examples=5, deadline=None)
@given(ledger=ledgers())
def test_a_violation_is_reported_by_its_name(rule: str, ledger: Ledger) -> None:
    """Whatever else is on a page of ours, the one thing that is spoilt on it is found, under its name."""
    page = exposed(ledger)
    body, kind, earlier = VIOLATIONS[rule](page)
    assert body != page or (kind, earlier) != (TEXT, None)
    assert rule in rules(body, kind, earlier=earlier)


def test_few_findings_of_a_kind_are_told() -> None:
    """Five of one kind are told, the others counted, so that a broken page stays readable."""
    page = PAGE + "".join(f"bad line {n} here\n" for n in range(100))
    found = [f for f in findings(page) if "cannot be read" in f.what or "more like these" in f.what]
    assert MANY + 1 == len(found)
    assert "and 95 more like these" == found[-1].what


def test_every_metric_has_a_name_of_its_own() -> None:
    """A sample is of one metric."""
    assert len(NAMES) == len(metrics.CATALOGUE) + 2
    assert MODERN.endswith("# EOF\n")
