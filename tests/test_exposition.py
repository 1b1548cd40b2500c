"""The text of a page: two formats that are easily taken for each other, and bodies that are no page at all."""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphprobe.tools import exposition
from graphprobe.tools.check import findings
from tests.pages import EAGER, GRAPH, LARGE, MODERN, OPENMETRICS, PAGE, TEXT, changed, replaced, rules, told, without

BROKEN: dict[str, tuple[str, str, str]] = {
    "no such type": ("syntax", changed("replays_seen_total counter", "replays_seen_total count"), "'count' is no type"),
    "no such type of another": ("syntax", PAGE + "# TYPE x count\n", "'count' is no type"),
    "a word after the type": ("syntax", changed("captures_total counter", "captures_total counter x"), "is no type"),
    "type twice": (
        "metadata",
        changed("# TYPE graphprobe_captures_total counter\n", "# TYPE graphprobe_captures_total counter\n" * 2),
        "a second TYPE",
    ),
    "type after samples": (
        "metadata",
        changed(GRAPH, GRAPH + "\n# HELP graphprobe_graph_calls_total again"),
        "HELP after samples",
    ),
    "interrupted": ("metadata", changed(GRAPH + "\n", "") + GRAPH + "\n", "interrupted by another metric"),
    "interrupted by a stranger": ("metadata", changed(GRAPH, "x 1\n" + GRAPH), "interrupted by another metric"),
    "16 bits a letter": ("encoding", PAGE.encode("utf-16-le").decode(), "binary, or UTF-16: full of NULs"),
    "unreadable line": ("syntax", PAGE + "graphprobe_x{a=\n", "cannot be read: graphprobe_x{a="),
    "unreadable line of another": ("syntax", PAGE + "vllm:x 1 2 3\n", "cannot be read: vllm:x 1 2 3"),
    "no value": ("syntax", changed(GRAPH, GRAPH[:-4]), "cannot be read"),
    "words for a value": ("syntax", changed(GRAPH, GRAPH[:-3] + "many"), "('many' is no number)"),
    "printf's NaN": ("syntax", PAGE + "x -nan\n", "('-nan' is no number)"),
    "time that is none": ("syntax", changed(GRAPH, GRAPH + " soon"), "cannot be read"),
    "label twice": ("syntax", changed(GRAPH, GRAPH.replace("{", '{bucket="4",')), "(a label twice)"),
    "bare quote": ("syntax", changed('torch="', 'torch=""'), "cannot be read"),
    "no type named": ("syntax", PAGE + "# TYPE graphprobe_x\n", "('' is no type): # TYPE graphprobe_x"),
    "line feed in a value": ("syntax", changed(EAGER, EAGER.replace("no_exact", "no\nexact")), "cannot be read"),
    "wrong escape": ("syntax", changed('torch="', r'torch="\t'), r"no such escape: \t"),
    "carriage returns": ("syntax", PAGE.replace("\n", "\r\n"), r"ends with \r\n (end lines with \n alone)"),
    "cut off": ("syntax", PAGE[:-9], "ends within a line"),
    "exemplar": ("syntax", changed(GRAPH, GRAPH + ' # {trace="x"} 1'), "(only OpenMetrics has exemplars)"),
    "byte order mark": ("syntax", "\ufeff" + PAGE, r"line 1 cannot be read: \ufeff# HELP"),
    "time": ("timestamp", changed(GRAPH, GRAPH + " 1700000000000"), "line 7 has a time: 1700000000000"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_fault_of_the_text_is_named(case: str) -> None:
    """A page with one bad place gets a finding of that rule: the line, and what to write."""
    rule, page, expected = BROKEN[case]
    assert page != PAGE
    assert rule in rules(page)
    assert expected in told(page)


@pytest.mark.parametrize("case", ["wrong escape", "interrupted", "printf's NaN", "carriage returns", "time"])
def test_a_bad_text_hides_no_other_fault(case: str) -> None:
    """What else is on the page is still found."""
    _, page, expected = BROKEN[case]
    found = told(changed('outcome="oom"', 'outcome="failed"', page))
    assert expected in found
    assert "unknown outcome 'failed'" in found


@pytest.mark.parametrize(
    ("rule", "old", "new", "expected"),
    [
        ("openmetrics", "# EOF\n", "", "not OpenMetrics: Missing # EOF"),
        ("openmetrics", "# EOF\n", "# EOF\nx 1\n", "not OpenMetrics: Received line after # EOF"),
        ("openmetrics", "# EOF\n", "# EOF\n# EOF\n", "not OpenMetrics: Received line after # EOF"),
        ("openmetrics", "\n# HELP graphprobe_build", "\n\n# HELP graphprobe_build", "blank line"),
        ("openmetrics", f"{GRAPH}\n", f'{GRAPH} # {{a="b"}}\n', "not OpenMetrics"),
        ("type", "# TYPE graphprobe_graph_calls counter", "# TYPE graphprobe_graph_calls_total counter", "no type"),
        ("syntax", "# TYPE graphprobe_build info", "# TYPE graphprobe_build untyped", "'untyped' is no type"),
        ("type", "# TYPE graphprobe_graph_calls counter", "# TYPE graphprobe_graph_calls gauge", "type gauge"),
        ("unit", "# UNIT graphprobe_graph_pool_bytes bytes", "# UNIT graphprobe_graph_pool_bytes ms", "unit ms"),
        ("syntax", "# EOF\n", "# hello\n# EOF\n", "(neither HELP, TYPE, UNIT nor EOF): # hello"),
        ("syntax", f"{GRAPH}\n", f"{GRAPH} \n", "cannot be read"),
    ],
)
def test_openmetrics_is_held_to_its_own_rules(rule: str, old: str, new: str, expected: str) -> None:
    """An OpenMetrics page is read strictly, and its metadata leaves suffixes out."""
    page = changed(old, new, MODERN)
    assert expected in told(page, OPENMETRICS)
    assert rule in rules(page, OPENMETRICS)


def test_openmetrics_of_others_is_their_own() -> None:
    """What is wrong with the format of another metric, and Prometheus takes it, is a warning."""
    page = changed("# EOF\n", "# TYPE x info\nx_info 2\n# EOF\n", MODERN)
    found = told(page, OPENMETRICS)
    assert found.startswith("warning : not OpenMetrics: Info samples can only have value one: x_info 2")
    assert {"openmetrics-elsewhere"} == rules(page, OPENMETRICS)
    assert {"openmetrics"} == rules(changed("# EOF\n", "", page), OPENMETRICS)


def test_openmetrics_may_have_exemplars_and_births() -> None:
    """Exemplars, _created and an info that is written as a gauge are allowed."""
    page = changed(GRAPH, f'{GRAPH} # {{trace="}}x # {{"}} 1.0 1700000000.5', MODERN)
    ok = 'graphprobe_captures_total{bucket="4",forward="decode",outcome="ok"} 1.0\n'
    page = changed(ok, ok + ok.replace("_total", "_created"), page)
    page = changed("# TYPE graphprobe_build info", "# TYPE graphprobe_build_info gauge", page)
    page = changed("# HELP graphprobe_build ", "# HELP graphprobe_build_info ", page)
    assert "" == told(page, OPENMETRICS)


def test_a_file_tells_its_format() -> None:
    """Without a content type the metadata tells, with or without # EOF."""
    assert "" == told(MODERN, None)
    assert "" == told(PAGE, None)
    assert "" == told(PAGE + "# EOF\n", None)
    assert {"openmetrics"} == rules(changed("# EOF\n", "", MODERN), None)


def test_a_comment_may_say_eof() -> None:
    """In the text format # EOF is a comment like any other, wherever it stands."""
    assert "" == told(PAGE + "# EOF\n")
    assert "" == told("# EOF\n# UNIT x y\n# hello\n#\n" + PAGE)


def test_a_format_under_the_content_type_of_the_other() -> None:
    """Either way that is one finding, and not one for each metric."""
    found = told(MODERN, TEXT)
    assert "error : the content type is that of the text format, the metadata that of OpenMetrics" in found
    assert {"content-type"} == rules(MODERN, TEXT)
    assert "error : the content type is that of OpenMetrics, the page is in the text format" in told(PAGE, OPENMETRICS)
    assert {"content-type"} == rules(PAGE, OPENMETRICS)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("", "content type 'missing'"),
        ("text/html; charset=utf-8", "content type 'text/html; charset=utf-8': Prometheus 3 refuses the page"),
        ("application/json", "content type"),
        ("application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily", "content type"),
        ("text/plain; version=0.0.3", "no such version"),
        ("text/plain; charset=latin-1", "the page must be UTF-8"),
        ("text/plain", ""),
        ("TEXT/PLAIN;VERSION=0.0.4", ""),
        (None, ""),
    ],
)
def test_content_type(kind: str | None, expected: str) -> None:
    """Prometheus 3 takes no page of another type; a file has none."""
    found = told(PAGE, kind)
    assert expected in found if expected else found == ""


def test_counters_without_total_are_no_openmetrics() -> None:
    """A page whose counters lack their suffix everywhere is in the text format, and lacks it."""
    page = replaced("_total", "")
    for kind in (TEXT, None):
        assert not {"openmetrics", "content-type"} & rules(page, kind)
        assert "graphprobe_graph_calls: no metric of the contract (write graphprobe_graph_calls_total)" in told(
            page, kind
        )


def test_a_page_for_people_is_not_told_line_by_line() -> None:
    """A login page is no page of metrics, which is all there is to say of it."""
    page = "<html>\n<body>\n<h1>Log in</h1>\n" + 40 * "<p>please\n"
    assert {"content-type", "no-metric"} == rules(page, "text/html")
    assert "syntax" in rules(page, TEXT)


def test_any_character_may_be_in_a_label() -> None:
    """Where it is UTF-8 Prometheus takes it, a NUL too."""
    assert "" == told(changed('forward="decode"', 'forward="a\0b\x85\u2028\x1b\r😀"'))


def test_an_empty_page() -> None:
    """Nothing at all is an error of one line."""
    for kind in (TEXT, OPENMETRICS, None):
        assert {"no-metric"} == rules(b"", kind) - {"openmetrics"}


def test_a_page_written_by_hand() -> None:
    """Another language's way of writing: a page of the engine's own metrics around, empty labels left out, no .0."""
    page = replaced(r"(\d)\.0$", r"\1", changed(',mode="",', ","))
    page = re.sub(r'(?<="),(?=\w)', ", ", page).replace(' role="",', "")
    own = (
        '# HELP my_seconds x\n# TYPE my_seconds summary\nmy_seconds{quantile="0.5"} NaN\nmy_seconds_sum 1\n\n# hello\n'
    )
    assert ", forward=" in page
    assert "" == told(f"{own}{page}{own.replace('my', 'other')}")


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "line feeds": b"\n" * 100_000,
    "binary": bytes(range(256)) * 1000,
    "zeros": bytes(1 << 20),
    "compressed": b"\x1f\x8b\x08\x00" + random.Random(1).randbytes(5000),
    "utf-16": PAGE.encode("utf-16"),
    "html": b"<html><body>login</body></html>",
    "json": b'{"schema": 1, "forwards": {}}',
    "protobuf": b"\x0a\x1cgraphprobe_graph_calls_total\x12\x05calls\x18\x00" * 1000,
    "endless line": b"graphprobe_" + b"a" * (10 << 20),
    "endless label": b'graphprobe_graph_calls_total{forward="' + b"x" * (10 << 20) + b'"} 1\n',
    "endless help": b"# HELP graphprobe_graph_calls_total " + b"x" * (10 << 20) + b"\n",
    "a million quotes": b'graphprobe_x{a="' + b'\\"' * 1_000_000 + b'"} 1\n',
    "backslashes": b'graphprobe_x{a="' + b"\\" * 15_000 + b'"} 1\n',
    "open braces": (b"graphprobe_x{" + b'a="' * 5000 + b"\n") * 50,
    "long lines": (b'x{a="' + b'\\"' * 8000 + b'"} 1\n') * 40,
    "spaces": (b"# TYPE" + b" " * 16_000 + b"x\n") * 40,
    "huge number": b"graphprobe_replays_seen_total " + b"9" * 4000 + b"\n",
    "thousands of series": b"".join(b'graphprobe_replays_seen_total{r="%d"} 1\n' % n for n in range(2_000)),
    "thousands of names": b"".join(b"graphprobe_n%d_total 1\n" % n for n in range(2_000)),
    "thousands of labels": b"graphprobe_replays_seen_total{%s} 1\n" % b",".join(b'l%d="1"' % n for n in range(1_500)),
    "thousands of reasons": b"".join(
        b'graphprobe_eager_calls_total{forward="f",phase="decode",batch_size="1",reason="r%d"} 1\n' % n
        for n in range(2_000)
    ),
    "thousands of forwards": b"".join(
        b'graphprobe_forward_info{forward="f%d",unit="rows",source="engine",buckets="1"} 1\n' % n for n in range(2_000)
    ),
    "thousands of phases": b"".join(
        b'graphprobe_graph_calls_total{forward="f",phase="p%d",mode="full",batch_size="1",bucket="1"} 1\n' % n
        for n in range(2_000)
    )
    + b'graphprobe_forward_info{forward="f",unit="rows",source="engine",buckets="1"} 1\n',
    "thousands of buckets": b'graphprobe_forward_info{forward="f",unit="rows",source="engine",buckets="%s"} 1\n'
    % b",".join(b"%d" % n for n in range(1, 3_000)),
    "huge buckets": b'graphprobe_forward_info{forward="f",unit="rows",source="engine",buckets="999999999"} 1\n',
    "thousands of bounds": b"".join(
        b'graphprobe_forward_duration_seconds_bucket{forward="f",le="%d"} 1\n' % n for n in range(2_000)
    ),
    "digits of others": (GRAPH.replace('"3"', '"²"') + "\n").encode(),
    "surrogates": b'graphprobe_x{a="\xed\xa0\x80"} 1\n',
    "escapes of a terminal": b'graphprobe_x{a="\x1b[2J\x07"} 1\ngraphprobe_\x1b[2J 1\n',
    "type of everything": b"# TYPE graphprobe_graph_calls_total \x00counter\n# TYPE\n# HELP\n#\n# UNIT x\n",
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("kind", [TEXT, OPENMETRICS, None])
def test_a_hostile_body_is_a_finding(case: str, kind: str | None) -> None:
    """Whatever the bytes are: findings, few and short, soon, and no exception."""
    begun = time.process_time()
    found = findings(HOSTILE[case], kind)
    assert time.process_time() - begun < 15
    assert 0 < len(found) < 700
    assert any(f.severity == "error" for f in found)
    assert all(len(f"{f.metric}{f.what}") < 400 and f"{f.metric}{f.what}".isprintable() for f in found)


GROWING: dict[str, Callable[[int], str]] = {
    "our series": lambda n: "".join(
        f'graphprobe_graph_calls_total{{batch_size="1",bucket="1",forward="f{i % 50}",mode="full",phase="decode",'
        f'rank="{i}"}} {i}\n'
        for i in range(n)
    ),
    "others": lambda n: "".join(f'vllm:latency_bucket{{engine="0",le="{i}"}} {i}\n' for i in range(n)),
    "one series": lambda n: f"{GRAPH}\n" * n,
    "phases": lambda n: "".join(GRAPH.replace('phase="decode"', f'phase="p{i}"') + "\n" for i in range(n)),
    "forwards": lambda n: "".join(
        f'graphprobe_forward_info{{forward="f{i}",unit="rows",source="engine",buckets="1,2,{i + 3}"}} 1\n'
        for i in range(n)
    ),
    "bounds": lambda n: "".join(
        f'graphprobe_forward_duration_seconds_bucket{{forward="f",le="{i}"}} 1\n' for i in range(n)
    ),
    "histograms": lambda n: "".join(
        f'graphprobe_forward_duration_seconds_bucket{{forward="f{i}",le="+Inf"}} 1\n' for i in range(n)
    ),
    "families": lambda n: "".join(f"# TYPE graphprobe_x{i} counter\ngraphprobe_x{i} 1\n" for i in range(n)),
    "labels of our own": lambda n: "".join(f'graphprobe_replays_seen_total{{l{i}="1"}} 1\n' for i in range(n)),
    "words": lambda n: "".join(EAGER.replace("no_exact_bucket", f"r{i}") + "\n" for i in range(n)),
    "lines that are none": lambda n: "?\n" * n,
}


@pytest.mark.parametrize("case", GROWING)
def test_a_page_takes_no_longer_than_it_is_long(case: str) -> None:
    """A page of 16 times the length takes about 16 times as long, not 256 times, whatever is on it."""

    def cost(count: int) -> float:
        page = PAGE + GROWING[case](count)
        # A collection of all that other tests have left takes longer than the page, and comes when it likes.
        gc.collect()
        gc.disable()
        try:
            begun = time.process_time()
            findings(page, TEXT, earlier=page)
            return time.process_time() - begun
        finally:
            gc.enable()

    assert cost(4_800) < 80 * max(cost(300), 0.02)


@pytest.mark.parametrize("limit", ["MAX_BYTES", "MAX_SAMPLES", "MAX_SECONDS"])
def test_limits(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a limit nothing is looked at, and that is said."""
    monkeypatch.setattr(exposition, limit, {"MAX_BYTES": 1 << 20, "MAX_SAMPLES": 10, "MAX_SECONDS": 0.0}[limit])
    assert re.search("the rest.* (was left|was not looked at)", told(PAGE * 100))
    assert "too-long" in rules(PAGE * 100)


def test_what_was_not_read_has_not_vanished(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second page that is given up is not compared with the first."""
    monkeypatch.setattr(exposition, "MAX_SAMPLES", 10)
    assert "gone" in rules(EAGER + "\n", earlier=LARGE + "\n")
    assert "gone" not in rules(PAGE, earlier=LARGE + "\n")


def page_of_pieces(page: str) -> st.SearchStrategy[str]:
    """Our page with lines dropped, repeated and spoilt."""
    lines = page.splitlines(keepends=True)
    spoilt = st.builds(
        lambda line, at, text, cut: line[: at % len(line)] + text + line[at % len(line) + cut :],
        st.sampled_from(lines),
        st.integers(0, 200),
        st.text(st.sampled_from('{}"\\,= \n\t#1aé\r\0+-.NaInf:_'), max_size=4),
        st.integers(0, 3),
    )
    return st.lists(st.sampled_from(lines) | spoilt | st.text(max_size=20), max_size=30).map("".join)


def page_with_a_fault(page: str) -> st.SearchStrategy[str]:
    """Our whole page, one place of it spoilt."""
    text = st.text(st.sampled_from('{}"\\,= \n\t#19aé\r\0+-.NaInf:_') | st.characters(), max_size=4)
    return st.builds(
        lambda at, new, cut: page[:at] + new + page[at + cut :], st.integers(0, len(page)), text, st.integers(0, 40)
    )


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(page_of_pieces(PAGE), page_of_pieces(MODERN), page_with_a_fault(PAGE), page_with_a_fault(MODERN)),
    st.sampled_from([TEXT, OPENMETRICS, None]),
)
def test_no_page_raises(page: str, kind: str | None) -> None:
    """Any mixture of good and bad lines gives findings that can be printed, each with a hint."""
    for finding in findings(page, kind, earlier=PAGE):
        assert finding.severity in ("error", "warning")
        assert finding.what
        assert finding.hint
        assert f"{finding.metric}{finding.what}".isprintable()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.text(max_size=60))
def test_no_bytes_raise(body: bytes, kind: str) -> None:
    """Any bytes under any content type give findings."""
    assert findings(body, kind)


def test_a_page_with_crlf_alone_is_whole_otherwise() -> None:
    """Carriage returns are the one thing that is told of a page that has them everywhere."""
    assert {"syntax"} == rules(PAGE.replace("\n", "\r\n"))
    assert "type" not in rules(without("# UNIT", MODERN).replace("\n", "\r\n"), OPENMETRICS)
