from __future__ import annotations

import pytest

import graphprobe
from graphprobe.ledger import LEDGER, Ledger, add
from graphprobe.observe import observe
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import ForwardSnapshot, Row, Snapshot
from graphprobe.tools.table import ROWS, WIDTH, advice, percent, table


def graph(size: int, bucket: int, calls: int) -> Row:
    return Row(size, "graph", bucket, None, calls, calls * (bucket - size), mode="full")


def eager(size: int, reason: str, calls: int) -> Row:
    return Row(size, "eager", None, FallbackReason(reason), calls)


def forward(*rows: Row) -> ForwardSnapshot:
    return ForwardSnapshot("decode", (1, 2, 4, 8, 16), rows=rows)


def cells(text: str) -> list[list[str]]:
    """The rows of the first table, split at blanks of two or more."""
    lines = text.splitlines()
    begin = next(n for n, line in enumerate(lines) if set(line) == {"-"})
    body = []
    for line in lines[begin + 1 :]:
        if line.startswith(("hit rate", "and ")):
            break
        body.append([cell.strip() for cell in line.split("  ") if cell.strip()])
    return body


def test_rows(ledger: Ledger) -> None:
    """Each row shows batch size, bucket, path, reason, calls, padding and the mean of its path and bucket."""
    watched = observe("decode", [1, 2, 4], ledger=ledger)
    add(watched.forward.graph_cell(3, 4), 1200)
    add(watched.forward.eager_cell(9, FallbackReason.BATCH_TOO_LARGE), 2)
    watched.forward.time("graph", 4, 0.009, mode="full")
    watched.forward.time("graph", 4, 0.010, mode="full")
    watched.forward.time("eager", None, 0.0429)
    text = table(ledger.snapshot())
    assert text.splitlines()[0] == "decode (in rows; buckets 1, 2, 4)"
    assert text.splitlines()[1].split("  ")[0] == "batch size"
    assert cells(text) == [
        ["3", "4", "graph", "-", "1,200", "1,200", "9.5"],
        ["9", "-", "eager", "batch_too_large", "2", "-", "42.9"],
    ]


def test_eager_time_of_its_size(ledger: Ledger) -> None:
    """An eager row takes the time sampled under its own size before that of all sizes; without a sample it has none."""
    watched = observe("decode", [3], ledger=ledger)
    for size in (3, 9):
        watched.eager_call(size, "not_captured")
    watched.forward.time("eager", 3, 0.002)
    assert [row[-1] for row in cells(table(ledger.snapshot()))] == ["2", "-"]


def test_phase_and_mode_columns() -> None:
    """Phase and mode have a column only where they say something."""
    plain = table(Snapshot({"d": forward(graph(4, 4, 1))}))
    other = Row(4, "graph", 4, None, 1, phase="verify", mode="piecewise")
    rich = table(Snapshot({"d": forward(graph(4, 4, 1), other)}))
    assert "phase" not in plain
    assert "mode" not in plain
    assert cells(rich)[1] == ["verify", "4", "4", "graph", "piecewise", "-", "1", "0", "-"]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ((), "hit rate: no traffic"),
        ((eager(1, "warmup", 3),), "hit rate: no traffic that counts (3 eager calls that do not)"),
        ((graph(4, 4, 3), eager(3, "no_exact_bucket", 1)), "hit rate: 75 % (3 graph, 1 eager)"),
        ((graph(4, 4, 3), eager(1, "warmup", 1)), "hit rate: 100 % (3 graph, 0 eager, 1 not counted)"),
        ((eager(3, "unknown", 2),), "hit rate: 0 % (0 graph, 2 eager)"),
        (
            (graph(4, 4, 3), Row(700, "eager", None, FallbackReason.BATCH_TOO_LARGE, 1, phase="prefill")),
            "hit rate: 75 % (3 graph, 1 eager); without prefill, as alerts have it: 100 %",
        ),
        (
            (Row(700, "eager", None, FallbackReason.BATCH_TOO_LARGE, 1, phase="prefill"),),
            "hit rate: 0 % (0 graph, 1 eager); without prefill, as alerts have it: no traffic",
        ),
        (
            (graph(4, 4, 3), Row(700, "eager", None, FallbackReason.WRONG_PHASE, 1, phase="prefill")),
            "hit rate: 100 % (3 graph, 0 eager, 1 not counted)",
        ),
    ],
)
def test_hit_rate(rows: tuple[Row, ...], line: str) -> None:
    """The hit rate is shown with its counts, and as "no traffic" where no call counts."""
    assert line in table(Snapshot({"decode": forward(*rows)})).splitlines()


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ((), ""),
        ((graph(4, 4, 5), eager(1, "warmup", 9)), ""),
        (
            (graph(4, 4, 2609), eager(3, "no_exact_bucket", 1641)),
            "batch 3 has no bucket: add 3, hit rate 61 % -> 100 %",
        ),
        (
            (graph(4, 4, 60), eager(3, "no_exact_bucket", 30), eager(17, "batch_too_large", 10)),
            "batches 3 and 17 have no bucket: add them, hit rate 60 % -> 100 %",
        ),
        (
            (graph(4, 4, 10), *(eager(n, "no_exact_bucket", n) for n in (3, 5, 6, 7))),
            "batches 5, 6 and 7 have no bucket: add them, hit rate 32 % -> 90 %",
        ),
        (
            (graph(4, 4, 5), eager(3, "no_exact_bucket", 1), eager(4, "signature", 4)),
            "4 of 5 counted eager calls are signature: "
            "these arguments are not those of a captured graph and may not start one",
        ),
        (
            tuple(eager(n, "batch_too_large", 1) for n in range(100, 400)),
            "300 of 300 counted eager calls are batch_too_large: the batch is above the largest bucket",
        ),
        (
            (graph(4, 4, 5), eager(3, "no_exact_bucket", 2), eager(3, "no_exact_bucket", 2), eager(4, "busy", 1)),
            "batch 3 has no bucket: add 3, hit rate 50 % -> 90 %",
        ),
    ],
    ids=["none", "all hit", "one", "two", "three", "reason", "spread", "rest"],
)
def test_advice(rows: tuple[Row, ...], line: str) -> None:
    """The advice names the sizes that win most and the hit rate that their buckets would have given, or the reason."""
    assert advice(forward(*rows)) == line


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (0.614, "61 %"),
        (0.99999, "99.9 %"),
        (0.995, "99.5 %"),
        (1e-9, "0.1 %"),
        (0.004, "0.4 %"),
    ],
)
def test_percent(share: float, text: str) -> None:
    """Only all is 100 % and only nothing is 0 %."""
    assert percent(share) == text


def test_hostile_names() -> None:
    """Markup, emoji codes, newlines and escape sequences in names are shown as they were written, on one line."""
    name = "[red]a[/red] :smile: \x1b[31m\nb"
    shot = Snapshot(
        {name: ForwardSnapshot(name, rows=(graph(1, 1, 1),), unit="[b]")},
        internal_errors={"[x]\n": 2},
        hooks={("vllm", "[h]"): False, ("vllm", "fine"): True},
    )
    lines = table(shot).splitlines()
    assert lines[0] == r"[red]a[/red] :smile: \x1b[31m\nb (in [b]; buckets unknown)"
    assert r"graphprobe failed at [x]\n: 2 times" in lines
    assert "vllm: hook [h] is not bound, its calls are not seen" in lines
    assert "fine" not in table(shot)


@pytest.mark.parametrize("width", [60, WIDTH])
def test_plain_text(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is ASCII without control codes and no line is wider than asked, whatever the environment says."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    shot = ForwardSnapshot(
        "decode" * 40, tuple(range(1, 60)), rows=(graph(3, 4, 10**5), eager(3, "unsupported_device", 10**5))
    )
    text = table(Snapshot({"d": shot}), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()
    assert all(c == "\n" or c.isprintable() for c in text)
    assert ("unsupported_device" in text) == (width > 60)
    assert text.endswith("\n")


def test_many_rows() -> None:
    """The rows with most calls are shown in order of size; all others are summed in one line."""
    rows = [graph(n, 1000, n) for n in range(1, ROWS + 11)]
    text = table(Snapshot({"d": forward(*rows)}))
    assert [row[0] for row in cells(text)] == [str(n) for n in range(11, ROWS + 11)]
    assert "and 10 more rows with 55 calls" in text.splitlines()


def test_nothing_yet() -> None:
    """Without any forward the text says how to get one."""
    assert "graphprobe.capture" in table(Snapshot())


def test_this_process() -> None:
    """Without a snapshot the table is that of this process."""
    try:
        graphprobe.observe("test_this_process").eager_call(3, "unknown")
        assert "test_this_process" in graphprobe.table()
    finally:
        del LEDGER.forwards["test_this_process"]


def test_graphs_that_are_switched_off_are_no_unknown_buckets() -> None:
    """An engine whose every call says so has none; one other reason, and what it has is unknown."""
    off = eager(3, "disabled", 4)
    told = [
        table(Snapshot({"a": ForwardSnapshot("a", rows=rows)})).splitlines()[0]
        for rows in ((off,), (off, eager(4, "unknown", 1)))
    ]
    assert told == ["a (in rows; buckets none: graphs are switched off)", "a (in rows; buckets unknown)"]


def test_an_engine_without_a_call_reads_no_data(ledger: Ledger) -> None:
    """With hooks and no forward, and with a forward that counted nothing; never 0 % or 100 %."""
    ledger.hooks["sglang", "forward"], ledger.hooks["sglang", "draft"] = True, False
    text = table(ledger.snapshot())
    assert text.startswith("sglang: no data: 1 of 2 hooks are in place, and no call was counted\n")
    assert "no forward yet" not in text
    probe = observe("sglang.draft", [4], source="engine", ledger=ledger)
    assert "hit rate: no data (no call was counted)" in table(ledger.snapshot())
    assert "sglang: no data" not in table(ledger.snapshot())
    probe.graph_call(4, 4)
    assert "no data" not in table(ledger.snapshot())


def test_calls_that_launches_do_not_confirm(ledger: Ledger) -> None:
    """A line for each path that has any."""
    probe = observe("sglang", [4], source="engine", ledger=ledger)
    probe.forward.unmatched.update(graph=1234, eager=0)
    assert table(ledger.snapshot()).endswith(
        "sglang: 1,234 graph calls are not confirmed by the graph launches that were seen\n"
    )
