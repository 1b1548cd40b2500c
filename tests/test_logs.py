"""Text of sizes and logs of engines become snapshots; whatever else comes is named."""

from __future__ import annotations

import contextlib
import gzip
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphprobe.errors import SourceError
from graphprobe.reasons import FallbackReason
from graphprobe.snapshot import Snapshot
from graphprobe.tools import sizes
from graphprobe.tools.sources import Reading, reading


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


class Writer:
    """Reads a text as the file that it is written into."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "source"

    def __call__(self, text: str | bytes, parts: int = 24) -> Reading:
        self.path.write_bytes(text.encode() if isinstance(text, str) else text)
        return reading(self.path, parts=parts)

    def refused(self, text: str | bytes) -> str:
        """The message with which the text is refused, without the name of the file, which starts it."""
        with pytest.raises(SourceError) as caught:
            self(text)
        told = str(caught.value)
        assert told.startswith(f"{self.path}: ") and told.isprintable() and " hint: " in told
        return told.removeprefix(f"{self.path}: ")


def calls(snapshot: Snapshot) -> dict[tuple[int, int | None], int]:
    """Calls by size and bucket of the only forward."""
    (forward,) = snapshot.forwards.values()
    found = {(row.batch_size, row.bucket): row.calls for row in forward.rows}
    assert len(found) == len(forward.rows)
    return found


def by_size(snapshot: Snapshot) -> dict[int, int]:
    return {size: n for (size, _), n in calls(snapshot).items()}


# -- sizes ---------------------------------------------------------------------------------------------------------


def test_one_size_a_line(write: Writer) -> None:
    """Each line is a call; which path served it is not known."""
    found = write("3\n3\n8\n1\n")
    assert {(1, None): 1, (3, None): 2, (8, None): 1} == calls(found.snapshot)
    assert ("sizes", ["sizes"]) == (found.kind, list(found.snapshot.forwards))
    forward = found.snapshot.forwards["sizes"]
    assert {("eager", FallbackReason.UNKNOWN)} == {(row.path, row.reason) for row in forward.rows}
    order, served = found.notes
    assert "one size a call, in the order of time" == order
    assert served.startswith("sizes alone do not tell what served them: a table counts all as eager")


@pytest.mark.parametrize(
    "text",
    [
        "batch_size\n3\n3\n8\n",
        "size\r\n3\r\n3\r\n8\r\n",
        "n\r3\r3\r8\r",
        "\ufeffN\n3\n3\n8",
        "\n# from the scheduler\n\n3\n 3 \n\n8\n\n",
        "3.0\n3.\n+8\n",
        '"time","Batch Size"\n0.5,"3"\n0.7,3\n0.9,8\n',
        "t;size;x\n1;3;\n2;3;a\n3;8;b\n",
        "t\tbs\n.1\t3\n.2\t3\n.3\t8\n",
        "t bs\n.1 3\n.2   3\n.3 8\n",
        "batch size\n3\n3\n8\n",
        "x;step;size\n1;1;3\n1;2;3\n1;3;8\n",
        'note,size\n"a, b",3\n"",3\nc,8\n',
        "tokens,batch_size\n900,3\n900,3\n900,8\n",
        "3 3 8",
        "[3, 3, 8]\n",
        "3,3,8\n",
        '"batch_size"\n"3"\n"3"\n"8"\n',
        '"batch size"\n3\n3\n8\n',
        '"3"\n"3"\n"8"\n',
        "3,\n3,\n8,\n",
        "size,\n3,\n3,\n8,\n",
        "[\n 3,\n 3,\n 8\n]\n",
        "[3.0, 3,\r\n 8]",
    ],
)
def test_ways_to_write_sizes(write: Writer, text: str) -> None:
    """With a header or none, any line ends, delimiters, quotes, blank lines and comments, on one line, or as a list."""
    assert {3: 2, 8: 1} == by_size(write(text).snapshot)


def test_a_list_of_two(write: Writer) -> None:
    """Is two sizes, and not a size with its calls, as two numbers on a line are."""
    assert {3: 1, 2: 1} == by_size(write("[3, 2]").snapshot)
    assert {3: 2} == by_size(write("3, 2").snapshot)


@pytest.mark.parametrize(
    "text",
    [
        "3,2\n8,1\n",
        "size,calls\n3,2\n8,1\n",
        "count;x;n\n2;;3\n1;;8\n",
        "3 2\n8 1\n3 0\n",
        '"3","2",\n"8","1",\n',
        "size,frequency\n3,2\n8,1\n",
        "freq,size\n2,3\n1,8\n",
        "num_calls,t,bs\n2,7,3\n1,9,8\n",
    ],
)
def test_sizes_with_their_calls(write: Writer, text: str) -> None:
    """Two columns, or one named so, say how many calls there were; then there is no order of time."""
    found = write(text)
    assert {3: 2, 8: 1} == by_size(found.snapshot)
    assert () == found.windows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3 3 8", "one size a call, in the order of time"),
        ("3,2\n8,1\n", "sizes from the first column, calls from the second"),
        ("x,Batch Size\n.1,3\n", "sizes from column batch_size, one size a call, in the order of time"),
        ("count;x;n\n2;;3\n", "sizes from column n, calls from column count"),
        (
            "tokens,requests,steps,batch_size,count,calls\n9,9,9,3,9,2\n",
            "sizes from column batch_size (not tokens, requests), calls from column calls (not count)",
        ),
    ],
)
def test_the_columns_that_were_read_are_told(write: Writer, text: str, said: str) -> None:
    """Which of them has the sizes and which the calls, and which might have been meant as well."""
    found = write(text)
    assert said == found.notes[0]
    assert 3 in by_size(found.snapshot)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("batch,size\n0,8\n1,16\n", "batch and size"),
        ("batch,size,calls\n0,8,1\n", "batch and size"),
        ("t,tokens,rows,bs\n0,8,1,2\n", "bs and rows and tokens"),
        ("batch_size,n\n1,5000\n", "batch_size and n"),
        ("x,y,n,size\n1,2,3,4\n", "size and n"),
        ("batch_size,batch_size\n1,8\n", "batch_size and batch_size"),
        ("size,count,freq\n1,8,2\n", "count and freq"),
        ("steps,batch_size\n1,8\n2,16\n3000,8\n", "steps and batch_size"),
        ("size;times\n8;1\n", "size and times"),
        (",batch_size\n0,8\n1,16\n", "one without a name and batch_size"),
    ],
)
def test_columns_that_might_mean_something_else_are_not_guessed(write: Writer, text: str, columns: str) -> None:
    """A step index looks like a count: the message names both, and what to call them."""
    told = write.refused(text)
    assert told.startswith(
        f"columns {columns}: unclear which has the sizes, or calls. hint: name the sizes `batch_size`"
    )
    assert "`calls`" in told


def test_the_headers_are_documented() -> None:
    """docs/advise.md names each, the best first."""
    text = (Path(__file__).parent.parent / "docs" / "advise.md").read_text()
    for names in (sizes.SIZES, sizes.CALLS):
        assert re.search(r",\s".join(f"`{name}`" for name in names), text)


def test_counts_may_be_large(write: Writer) -> None:
    """They are whole numbers without a limit that anybody meets."""
    assert {3: 10_000_000, 8: 999_999_999_999_999} == by_size(write("3,10000000\n8,999999999999999\n").snapshot)


def test_a_batch_without_rows(write: Writer) -> None:
    """Does not count in the hit rate."""
    forward = write("0\n0\n4\n").snapshot.forwards["sizes"]
    assert {0: FallbackReason.EMPTY_BATCH, 4: FallbackReason.UNKNOWN} == {r.batch_size: r.reason for r in forward.rows}


@given(st.lists(st.integers(0, 70), min_size=1, max_size=60), st.integers(1, 30))
def test_windows_are_the_order_of_time(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], parts: int) -> None:
    """Up to so many stretches of the same length, the oldest first, that add up to all."""
    path = tmp_path_factory.getbasetemp() / "sizes"
    path.write_text("\n".join(map(str, sizes)))
    found = reading(path, parts=parts)
    assert min(parts, len(sizes)) == len(found.windows)
    begin = 0
    for window in found.windows:
        there = by_size(window)
        stretch = sizes[begin : begin + sum(there.values())]
        begin += len(stretch)
        assert Counter(stretch) == there
        assert len(sizes) // len(found.windows) <= len(stretch) <= len(sizes) // len(found.windows) + 1
    assert len(sizes) == begin
    assert Counter(sizes) == by_size(found.snapshot)


def test_lines_that_are_no_sizes_are_named(write: Writer) -> None:
    """The first few by number and text, and how many more there are."""
    told = write.refused("batch_size\n3\n-1\n2.5\n4\nx\n\n1048577\n")
    assert told.startswith(
        "no batch size in line 3 (-1), line 4 (2.5), line 6 (x) and 1 more. hint: write whole numbers"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1\n1e3\n", "line 2 (1e3)"),
        ("1\n٣\n", "line 2 (٣)"),
        ("1\n1_000\n", "line 2 (1_000)"),
        (b"1\n\xff\x00\n", r"line 2 (�\x00)"),
        (f"1\n{10**400}\n", f"line 2 ({'1' + 36 * '0'}...)"),
        ("size,calls\n1\n", "line 2 (1)"),
        ("size,calls\n1,-4\n", "line 2 (1,-4)"),
        ("0.25,3\n0.50,4\n", "line 1 (0.25,3), line 2 (0.50,4)"),
        ("-4\n", "line 1 (-4)"),
        ("1\n\u2028\x0b2\n3\x1c4\n", "line 3 (3\\x1c4)"),
        ("1\n3 4\n", "line 2 (3 4)"),
        ("1,2\n3\n", "line 2 (3)"),
        ("a,n\n1\n2,3\n", "line 2 (1)"),
        ("1,024\n2,048\n", "line 1 (1,024), line 2 (2,048)"),
        ("1,000\n", "line 1 (1,000)"),
        ("08\n", "line 1 (08)"),
        ("1.000\n", "line 1 (1.000)"),
        ("size,calls\n8,0100\n", "line 2 (8,0100)"),
        ("size,calls\n1,500,5\n", "line 2 (1,500,5)"),
        ("batch size\n8 4\n", "line 2 (8 4)"),
        ("[1,\n-2]", "line 2 (-2)"),
    ],
)
def test_a_line_that_is_no_size(write: Writer, text: str | bytes, line: str) -> None:
    """Negative, fractional and huge numbers, other digits, marks of thousands, wrong columns: each is named."""
    assert f"no batch size in {line}" in write.refused(text)


@pytest.mark.parametrize("text", ["batch_size\n", "size,calls\n4,0\n", "n\n\n#\n"])
def test_no_size_at_all(write: Writer, text: str) -> None:
    """A header alone, or calls that are none."""
    assert write.refused(text).startswith("no batch size in it. hint: ")


# -- vLLM ----------------------------------------------------------------------------------------------------------

PREFIX = "(APIServer pid=77) INFO 11-30 09:15:0{} [cuda_graph.py:123] "
HEAD = "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |"


def table(*rows: tuple[int, int, str, int], second: int = 0, sizes: str = "[1, 2, 4, 8]", end: str = "\r\n") -> str:
    """One table as vLLM's formatter writes it: each line with the prefix, and a carriage return between them."""
    cells = [f"| {a:<15} | {b:<13} | {b - a:<12} | {mode:<12} | {count:<5} |" for a, b, mode, count in rows]
    lines = ["**CUDAGraph Config Settings:**", "", "- Mode: FULL_AND_PIECEWISE", f"- Capture sizes: {sizes}", ""]
    lines += ["**CUDAGraph Stats:**", "", HEAD, "|" + "|".join("-" * n for n in (17, 15, 14, 14, 7)) + "|", *cells, ""]
    return end.join(PREFIX.format(second) + line for line in lines) + "\n"


OTHER = "(EngineCore pid=80) INFO 11-30 09:15:01 [loggers.py:257] Engine 000: Avg prompt throughput: 32.3 tokens/s\n"
FIRST = table((3, 4, "FULL", 40), (8, 8, "FULL", 7), (300, 300, "NONE", 2), (5, 8, "PIECEWISE", 1))
SECOND = table((3, 4, "FULL", 2), (9, 9, "NONE", 5), second=1)


def test_tables_of_vllm(write: Writer) -> None:
    """Each table counts since the one before, so each is a window and all together are their sum."""
    found = write(OTHER + FIRST + OTHER + SECOND + OTHER)
    assert ("vllm", ["vllm"]) == (found.kind, list(found.snapshot.forwards))
    assert {(3, 4): 42, (8, 8): 7, (300, None): 2, (5, 8): 1, (9, None): 5} == calls(found.snapshot)
    assert [{(3, 4): 40, (8, 8): 7, (300, None): 2, (5, 8): 1}, {(3, 4): 2, (9, None): 5}] == [
        calls(window) for window in found.windows
    ]
    forward = found.snapshot.forwards["vllm"]
    assert ((1, 2, 4, 8), "tokens", "engine") == (forward.buckets, forward.unit, forward.source)
    assert {3: "full", 8: "full", 5: "piecewise", 300: "", 9: ""} == {row.batch_size: row.mode for row in forward.rows}
    assert 42 * 1 + 1 * 3 == forward.padding
    assert 50 / 57 == forward.hit_rate
    (note,) = found.notes
    assert note.startswith("2 tables of --cudagraph-metrics: sizes are tokens of a step, those of prompts and those of")
    assert write(FIRST).notes[0].startswith("1 table of")


def test_more_tables_than_windows(write: Writer) -> None:
    """Neighbours are added up."""
    text = "".join(table((n, 8, "FULL", n)) for n in range(1, 8))
    found = write(text, parts=3)
    assert [{1: 1, 2: 2}, {3: 3, 4: 4}, {5: 5, 6: 6, 7: 7}] == [by_size(window) for window in found.windows]


def test_other_ways_in_which_a_table_is_printed(write: Writer) -> None:
    """As the bare table, with the name of the enum, in colour, and cut off in its last line."""
    bare = FIRST.replace(PREFIX.format(0), "").replace("\r\n", "\n")
    named = bare.replace(" FULL ", " CUDAGraphMode.FULL ")
    coloured = "".join(f"\x1b[0;36m(APIServer pid=7)\x1b[0;0m {line}\n" for line in bare.splitlines())
    for text in (bare, named, coloured):
        assert calls(write(FIRST).snapshot) == calls(write(text).snapshot)
    cut = write(FIRST + SECOND[: SECOND.rindex("| 5")])
    assert {**calls(write(FIRST).snapshot), (3, 4): 42} == calls(cut.snapshot)


def test_rows_that_cannot_be_read(write: Writer) -> None:
    """Are not counted, and a note says how many and where; other lines with bars are none of them."""
    others = "|-----|\n| 5 | 6 | 7 |\n| a | b | c | d | e |\n"
    table_ = FIRST.replace("\r\n", "\n")
    table_ = table_[: table_.rindex(PREFIX.format(0))]
    odd = "| 1,024 | 1,024 | 0 | FULL | 3 |\n| 9 | 16 | 7 | BREAKABLE | 5 |\n"
    found = write(others + table_ + odd + "2026-11-30 | INFO | served\n" + others)
    assert calls(write(FIRST).snapshot) == calls(found.snapshot)
    assert "2 rows of the tables cannot be read, from line 17 on: not counted" in found.notes
    assert not [note for note in write(FIRST + OTHER + SECOND).notes if "cannot be read" in note]
    only = write.refused(HEAD + "\n" + odd)
    assert only.startswith("2 rows of the tables cannot be read, from line 2 on. hint: ")


def test_a_log_of_both_engines(write: Writer) -> None:
    """That of vLLM is read, and the reader is told."""
    found = write(FIRST + OLD + step(3))
    assert ("vllm", calls(write(FIRST).snapshot)) == (found.kind, calls(found.snapshot))
    assert "decode lines of SGLang are in it, too: only vLLM's tables are read" in found.notes
    assert not [note for note in write(FIRST).notes if "SGLang" in note]


def test_colours_are_not_read(write: Writer) -> None:
    """Wherever they are in a line, as a terminal has them and as JSON does."""
    for code in ("\x1b[1;36m{}\x1b[0m", r"\u001b[36m{}\u001b[39m"):

        def dyed(text: str, *words: str, code: str = code) -> str:
            return re.sub("|".join(map(re.escape, words)), lambda found: code.format(found[0]), text)

        table_ = dyed(FIRST, "Unpadded", "Tokens", "FULL", "300", "Capture", "[1")
        assert calls(write(FIRST).snapshot) == calls(write(table_).snapshot)
        assert (1, 2, 4, 8) == write(table_).snapshot.forwards["vllm"].buckets
        steps = OLD + step(3, ranks=" DP0 TP0") + step(4, ranks=" DP0 TP1")
        assert {(3, 4): 1} == calls(write(dyed(steps, "batch", "3", "True", "DP0", "TP", "bs", "[1", "req")).snapshot)


def test_a_table_without_its_settings(write: Writer) -> None:
    """The buckets are not known then; a size that the engine has rounded to is one beside those it has noted."""
    found = write(FIRST[FIRST.index(HEAD) :])
    assert () == found.snapshot.forwards["vllm"].buckets
    assert f"no line says which sizes are captured: {UNLISTED}" in found.notes
    rounded = write(table((3, 6, "FULL", 1), sizes="[1, 2, 4]"))
    assert (1, 2, 4, 6) == rounded.snapshot.forwards["vllm"].buckets


def test_a_table_without_rows(write: Writer) -> None:
    """Was cut off."""
    assert "a table of --cudagraph-metrics without a row" in write.refused(
        FIRST[: FIRST.index(HEAD) + len(HEAD)] + "\n"
    )


def test_a_log_of_vllm_without_a_table(write: Writer) -> None:
    """The message says how to get one."""
    assert "hint: vLLM logs sizes with --cudagraph-metrics" in write.refused(OTHER.replace("Engine", "vllm Engine"))


UNLISTED = "advice cannot compare with today's list unless it is given (buckets=[...])"

# -- SGLang --------------------------------------------------------------------------------------------------------


def step(size: int, graph: str = "cuda graph: True, ", ranks: str = " TP0", more: str = "") -> str:
    head = f"[2026-11-30 09:15:01{ranks}] Decode batch, #running-req: {size}, #token: 9000, token usage: 0.31, "
    return f"{head}{more}{graph}gen throughput (token/s): 1.50, #queue-req: 0\n"


EAGER = "cuda graph: False, "
OLD = "[2026-11-30 09:14:00 TP0] Capture cuda graph bs [1, 2, 4, 8]\n"
PREFILL = "[2026-11-30 09:15:00] Prefill batch, #new-seq: 3, #new-token: 900, #running-req: 3, cuda graph: False, \n"


def test_decode_lines_of_sglang(write: Writer) -> None:
    """A line is a call: of the next bucket where a graph served it, else eager for a cause that is not told."""
    found = write(OLD + PREFILL + step(3) + step(3) + step(12, EAGER) + PREFILL + step(8))
    assert ("sglang", ["sglang"]) == (found.kind, list(found.snapshot.forwards))
    assert {(3, 4): 2, (12, None): 1, (8, 8): 1} == calls(found.snapshot)
    assert [{(3, 4): 1}, {(3, 4): 1}, {(12, None): 1}, {(8, 8): 1}] == [calls(window) for window in found.windows]
    forward = found.snapshot.forwards["sglang"]
    assert ((1, 2, 4, 8), "requests", "engine") == (forward.buckets, forward.unit, forward.source)
    assert {"full", ""} == {row.mode for row in forward.rows}
    assert ("4 decode lines, one in 40 steps: the share of graph calls is no hit rate",) == found.notes


@pytest.mark.parametrize(
    "line",
    [
        step(3),
        step(3).replace("batch,", "batch."),
        step(3).replace("Decode batch,", "Decode batch [4711],"),
        step(3, "npu graph: True, "),
        step(3, "cpu graph: True, "),
        step(3, ranks=""),
        step(3, ranks=" DP1 PP0 ATTN_CP0 TP4 EP4"),
        step(3, more="accept len: 2.77, accept rate: 0.69, "),
        step(3, more="pre-allocated usage: 0.00, #prealloc-req: 0, #transfer-req: 1, #retracted-req: 0, "),
        step(3).replace(
            "#token: 9000, token usage", "#full token: 9, full token usage: 0.49, mamba num: 1, mamba usage"
        ),
        step(3).replace("\n", ", \r\n"),
        "2026-11-30T09:15:01.500Z pod-1 INFO TP0] " + step(3)[step(3).index("Decode") :],
        '{"log": "' + step(3).strip() + '", "stream": "stderr"}\n',
    ],
)
def test_decode_lines_of_other_releases(write: Writer, line: str) -> None:
    """A dot for the comma, the number of the step, other devices and ranks, more fields, and other prefixes."""
    assert {(3, 4): 1} == calls(write(OLD + line).snapshot)


@pytest.mark.parametrize(
    "line",
    [
        OLD,
        "[x] Capture cpu graph bs [1, 2, 4, 8]\n",
        "[x] Capture target decode CUDA graph begin. backend=full, num_tokens_per_bs=1, bs=[1, 2, 4, 8], avail\n",
        "[x] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1, 2, 4, 8], avail\n",
        "[x] Capture target decode CUDA graph end. bs=[1, 2, 4, 8], elapsed=4.10 s, mem usage=0.04 GB\n",
    ],
)
def test_what_was_captured(write: Writer, line: str) -> None:
    """Each release says it in its own way."""
    others = (
        "[x] Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8, 16], avail mem=9.00 GB\n"
        "[x] Capture draft decode CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[3, 5], avail mem=9.00 GB,\n"
        "[x] Capture draft extend CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[3, 5], avail mem=9.00 GB,\n"
    )
    found = write(line + others + step(3))
    assert (1, 2, 4, 8) == found.snapshot.forwards["sglang"].buckets
    assert {(3, 4): 1} == calls(found.snapshot)


def test_nothing_says_what_was_captured(write: Writer) -> None:
    """A graph call is taken to be of its own size, and the reader is told."""
    found = write(step(3))
    assert ({(3, 3): 1}, ()) == (calls(found.snapshot), found.snapshot.forwards["sglang"].buckets)
    told = "no line says which sizes are captured: a graph call is taken to be of its own size, and "
    assert told + UNLISTED in found.notes


def test_how_often_a_step_is_logged(write: Writer) -> None:
    """Is in the arguments that the server logs at its start, on a line of any length."""
    arguments = f"[x] server_args=ServerArgs(model_path='{'m' * 20_000}', decode_log_interval=10, tp_size=1)\n"
    assert "1 decode line, one in 10 steps: the share of graph calls is no hit rate" in write(arguments + step(3)).notes


def test_ranks_with_batches_of_their_own(write: Writer) -> None:
    """Data-parallel ranks are summed; stages of a pipeline log the same steps, of which the first counts."""
    found = write(OLD + step(3, ranks=" DP0 TP0") + step(4, ranks=" DP1 TP1"))
    assert {(3, 4): 1, (4, 4): 1} == calls(found.snapshot)
    assert "2 data-parallel ranks are summed: the largest batch decides on the bucket of all" in found.notes
    staged = OLD + "".join(step(size, ranks=f" PP{stage} TP0") for size in (3, 4) for stage in (0, 1))
    assert {(3, 4): 1, (4, 4): 1} == calls(write(staged).snapshot)
    assert {(3, 4): 1} == calls(write(OLD + step(3, ranks=" PP1 TP0")).snapshot)


def test_ranks_that_log_the_same_steps(write: Writer) -> None:
    """Each step counts once, as the lowest stage and rank of each data-parallel rank has it, in the order of time."""
    own = "1 decode line, one in 40 steps: the share of graph calls is no hit rate"
    tensors = OLD + "".join(step(3, ranks=f" TP{rank}") for rank in (7, 3, 0, 1))
    found = write(tensors)
    assert ({(3, 4): 1}, own) == (calls(found.snapshot), found.notes[0])
    assert "3 lines of other tensor and pipeline ranks left out: they log the same steps" in found.notes
    both = "".join(step(size, ranks=f" PP{pp} TP{tp}") for size in (3, 4) for pp, tp in ((1, 0), (0, 2), (0, 1)))
    assert {(3, 4): 1, (4, 4): 1} == calls(write(OLD + both).snapshot)
    idle = OLD + step(0, ranks=" TP0") + step(3, "", ranks=" TP1") + step(3, "", ranks=" TP2")
    assert {(3, None): 1} == calls(write(idle).snapshot)
    assert "1 line without a word on whether a graph served: counted as eager" in write(idle).notes
    named = step(3, ranks=" TP1") + step(4, ranks=" TP1").replace("\n", " user said TP0\n")
    assert {(3, 4): 1, (4, 4): 1} == calls(write(OLD + named).snapshot)


def test_data_parallel_attention(write: Writer) -> None:
    """Each data-parallel rank has tensor ranks of its own: none is lost, and they come in the order of time."""
    ranks = ((1, 2), (0, 1), (1, 3), (0, 0))
    text = OLD + "".join(step(1 + 2 * n + dp, ranks=f" DP{dp} TP{tp}") for n in range(2) for dp, tp in ranks)
    found = write(text)
    assert [{2: 1}, {1: 1}, {4: 1}, {3: 1}] == [by_size(window) for window in found.windows]
    assert "4 lines of other tensor and pipeline ranks left out: they log the same steps" in found.notes
    alone = write(OLD + step(3, ranks=" DP0 TP0") + step(4, ranks=" DP1 TP1"))
    assert not [note for note in alone.notes if "left out" in note]


def test_lines_that_do_not_tell_the_path(write: Writer) -> None:
    """As of old releases: they count as eager, and the reader is told."""
    found = write(OLD + step(3, "") + step(3))
    assert {(3, None): 1, (3, 4): 1} == calls(found.snapshot)
    assert "1 line without a word on whether a graph served: counted as eager" in found.notes


def test_a_rank_without_a_request(write: Writer) -> None:
    """Decodes along with the others, and says nothing of sizes."""
    assert {(3, 4): 1} == calls(write(OLD + step(0) + step(3)).snapshot)
    assert "no decode line with a running request" in write.refused(OLD + step(0))


def test_a_restart_with_other_buckets(write: Writer) -> None:
    """Each step belongs to the list that was captured before it; the forward has the newest."""
    found = write(OLD + step(3) + OLD.replace("[1, 2, 4, 8]", "[6]") + step(3))
    assert {(3, 4): 1, (3, 6): 1} == calls(found.snapshot)
    assert (6,) == found.snapshot.forwards["sglang"].buckets


def test_a_log_of_sglang_without_a_decode_line(write: Writer) -> None:
    """The message says how often there is one."""
    assert "hint: SGLang logs the size of one in 40 decode steps" in write.refused(OLD + PREFILL)


# -- anything else -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "not a graphprobe snapshot, and nothing else that is read. hint: what is read: a snapshot; a page of"),
        (b"\n\n\r\n", "not a graphprobe snapshot, and nothing else"),
        (b"hello world\n", "what is read: a snapshot; a page of metrics; batch sizes"),
        (b"<html><body>404</body></html>", "not a graphprobe snapshot, and nothing else"),
        (b"\x7fELF\x02\x01\x01\0\0\0", "it is binary, or UTF-16: save it as UTF-8"),
        ("3\n3\n".encode("utf-16"), "it is binary, or UTF-16: save it as UTF-8"),
        (gzip.compress(b"3\n3\n"), "it is compressed. hint: unpack it on the way: zcat FILE | graphprobe"),
        (b"PK\x03\x04\x14\0", "it is compressed"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n", "in a column batch_size"),
        (b"1 2 3\n4 5 6\n", "not a graphprobe snapshot, and nothing else"),
        (b'{"schema": 1', "not a graphprobe snapshot: JSONDecodeError"),
        (b"# TYPE up gauge\nup 1\n", "these are metrics, but none of graphprobe's"),
        (b"\xff\xfe\xfd" * 50, "not a graphprobe snapshot, and nothing else"),
        (b'"' + b"x" * 300_000 + b",1\n", "not a graphprobe snapshot, and nothing else"),
    ],
)
def test_what_is_nothing_that_is_read(write: Writer, text: bytes, told: str) -> None:
    """Is named as what it is where that can be seen, and the message lists what is read."""
    assert told in write.refused(text)


@given(st.binary(max_size=300) | st.text(alphabet="0123456789,;|.- \n\"#'n", max_size=80).map(str.encode))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, body: bytes) -> None:
    """Are read, or refused with a message: nothing else is raised."""
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(body)
    with contextlib.suppress(SourceError):
        assert reading(path).snapshot.counted


HARD = (
    b"| " * 4_000_000,
    b"|" + b" " * 8_000_000,
    b"Decode batch" * 700_000,
    b"#running-req: Decode batch" + b" " * 8_000_000,
    b"Decode batch #running-req: 1 " + b"a graph: " * 1_700 + b"\n",
    (b"Capture target decode " * 700 + b"\n") * 500 + step(1).encode(),
    (b"Capture target decode " + b"bs=" * 60 + b"\n") * 40_000 + step(1).encode(),
    b"- Capture sizes: [" * 400_000 + HEAD.encode(),
    HEAD.encode() + b"\n" + (b"| 1" * 4_000 + b"\n") * 600,
    HEAD.encode() + b"\x1b[0;" * 2_000_000,
    HEAD.encode() + b"Decode batch" * 700_000,
    b"[" + b"1,\n" * 2_000_000 + b"x",
    b"decode_log_interval=" * 400_000 + step(1).encode(),
    b"1" * 8_000_000,
    b"1," * 4_000_000,
    b'"' * 8_000_000,
    b"\n" * 8_000_000,
    b"{" * 8_000_000,
    b"# TYPE graphprobe_" * 400_000,
)


@pytest.mark.parametrize("body", HARD, ids=range(len(HARD)))
def test_no_text_takes_long(write: Writer, body: bytes) -> None:
    """No expression goes over a line again and again: eight megabytes of what looks like a match take seconds."""
    begun = time.monotonic()
    with contextlib.suppress(SourceError):
        write(body)
    assert time.monotonic() - begun < 15


def test_a_long_log_is_read_fast(write: Writer) -> None:
    """Forty megabytes of other lines around a hundred thousand decode lines, and a million sizes."""
    noise = '[2026-11-30 09:15:00] INFO:     127.0.0.1:5450 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n' * 4
    begun = time.monotonic()
    found = write(OLD + "".join(_mixed(noise, 100_000)))
    assert 100_000 == sum(by_size(found.snapshot).values())
    found = write("\n".join(str(n % 97) for n in range(1_000_000)))
    assert 1_000_000 == sum(by_size(found.snapshot).values())
    assert time.monotonic() - begun < 30


def _mixed(noise: str, lines: int) -> Iterable[str]:
    return (noise + step(n % 9 + 1) for n in range(lines))
