"""Lines of a page, read as Prometheus reads them."""

from __future__ import annotations

import contextlib
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from graphprobe.tools.grammar import Unreadable, metadata, sample

LINES = {
    # line: (in the text format, in OpenMetrics), as Prometheus 2.42 takes it (True) or refuses the page for it.
    "x 1": (True, True),
    "x 1 1.5": (False, True),
    "x 1 1700000000000": (True, True),
    "x 1 -5": (False, True),
    "x -nan": (False, False),
    "x +nan": (False, False),
    "x NaN": (True, True),
    "x inf": (True, True),
    "x Infinity": (True, True),
    "x -Inf": (True, True),
    "x 1e999": (False, False),
    f"x {'9' * 4000}": (False, False),
    "x 1_0": (False, False),
    "x 0x10": (False, False),
    "x 1f": (False, False),
    "x 1.": (True, True),
    "x .5": (True, True),
    "x 1E+5": (True, True),
    "x \u0661": (False, False),
    "x\u00a01": (False, False),
    "x\f1": (False, False),
    "x 1\v": (False, False),
    "x": (False, False),
    "x 1 2 3": (False, False),
    "  x 1": (False, False),
    "x 1  ": (True, False),
    "x\t1": (True, False),
    'x{a="b"}1': (True, False),
    'x {a="b"} 1': (True, False),
    'x{ a = "b" , c="d" } 1': (True, False),
    'x{a="b",} 1': (True, False),
    'x{,a="b"} 1': (False, False),
    'x{a="b",,c="d"} 1': (False, False),
    'x{a="b",a="c"} 1': (False, False),
    'x{__name__="y"} 1': (False, False),
    r'x{a="\t"} 1': (True, True),
    'x{a="\r"} 1': (True, True),
    "\ufeffx 1": (False, False),
    'x{a:b="c"} 1': (False, False),
    "1x 1": (False, False),
    "x-y 1": (False, False),
    'x{a="b" 1': (False, False),
    "x{a=} 1": (False, False),
    "x{a='b'} 1": (False, False),
    'x 1 # {a="b"} 1': (False, True),
    "# TYPE x gauge": (True, True),
    "# TYPE": (True, False),
    "# TYPE ": (False, False),
    "# HELP x": (True, False),
    "# HELP x ": (True, True),
    "# TYPE v=x gauge": (False, False),
    "# hello": (True, False),
    "#TYPE x count": (True, False),
    "#\tTYPE\tx\tgauge": (True, False),
    "# UNIT x_bytes bytes": (True, True),
    "# EOF": (True, True),
}
"""An exemplar is for counters and bounds, and a time may be far in the past: what a line may say is not looked at."""


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_line_is_read_where_prometheus_reads_it(line: str, openmetrics: bool) -> None:
    """What Prometheus refuses is Unreadable, what it takes is read."""
    try:
        metadata(line, openmetrics) if line.startswith("#") else sample(line, openmetrics)
        read = True
    except Unreadable:
        read = False
    assert LINES[line][openmetrics] == read


@given(
    st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True), st.text(max_size=8), max_size=4),
    st.floats(),
)
def test_what_the_client_writes_is_read_as_it_was(labels: dict[str, str], value: float) -> None:
    """Any labels and any value that prometheus_client writes, in both formats, come back."""
    labels = {f"l_{name}": text for name, text in labels.items()}
    registry = CollectorRegistry()
    gauge = Gauge("x", "help", list(labels), registry=registry)
    (gauge.labels(**labels) if labels else gauge).set(value)
    for openmetrics, page in ((False, generate_latest(registry)), (True, generate_openmetrics(registry))):
        (line,) = (line for line in page.decode().split("\n") if line.startswith("x"))
        read = sample(line, openmetrics)
        assert ("x", labels) == (read.name, read.labels)
        assert read.value == value or (math.isnan(value) and math.isnan(read.value))


def test_names_and_labels_may_be_quoted() -> None:
    """Prometheus 3 writes names that are not its own between quotes, inside the braces."""
    read = sample(r'{"a.b", "c.\"d"="e", f="g"} 1', False)
    assert ("a.b", {'c."d': "e", "f": "g"}) == (read.name, read.labels)
    with pytest.raises(Unreadable, match="two names"):
        sample('x{"a.b"} 1', False)


def test_the_cause_is_told() -> None:
    """Why a line cannot be read, where that is known."""
    for line, why in (("x -nan", "'-nan' is no number"), ('x{a="1",a="2"} 1', "a label twice"), ("{} 1", "no name")):
        with pytest.raises(Unreadable, match=why):
            sample(line, False)


SLOW = {
    "quotes": lambda n: 'x{a="' + r"\"" * n + '"} 1 2 3',
    "backslashes": lambda n: 'x{a="' + "\\" * n + '"} 1',
    "labels": lambda n: "x{" + ",".join(f'a{i}="1"' for i in range(n // 4)) + "} 1 2 3",
    "open quotes": lambda n: "x{" + 'a="' * n,
    "commas": lambda n: "x{" + "a=," * n,
    "spaces": lambda n: "x{" + " " * n + "]" + " " * n,
    "spaces before a label": lambda n: 'x{a="b"' + " " * n + "]",
    "spaces after the name": lambda n: "x" + " " * n + "{",
    "spaces after the value": lambda n: "x 1" + " " * n + "2 3",
    "a long name": lambda n: "x" * n + "-",
    "a long number": lambda n: "x " + "1" * n + "z",
    "metadata": lambda n: "# TYPE" + " " * n + '"',
}


@pytest.mark.parametrize("case", SLOW)
@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_line_takes_no_longer_than_it_is_long(case: str, openmetrics: bool) -> None:
    """A line of 16 times the length takes about 16 times as long, not 256 times, whatever is on it."""

    def cost(length: int) -> float:
        line = SLOW[case](length)
        best = math.inf
        for _ in range(3):
            begun = time.process_time()
            with contextlib.suppress(Unreadable):
                metadata(line, openmetrics) if line.startswith("#") else sample(line, openmetrics)
            best = min(best, time.process_time() - begun)
        return best

    assert cost(64_000) < 80 * max(cost(4_000), 1e-4)
