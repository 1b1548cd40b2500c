"""What the advisor prints, and what its JSON says: the same, and nothing that a terminal or a parser trips over."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphprobe.tools.advice import SCHEMA, Advice, Plan
from graphprobe.tools.advisor import advise
from graphprobe.tools.engines import ENGINE
from graphprobe.tools.paste import line
from graphprobe.tools.table import WIDTH, percent
from tests.traffic import dispatched, seen

TIMED: dict[str, Any] = {"times": {1: 9e-3, 16: 10.2e-3, 64: 14e-3}, "eager_times": {1: 27e-3, 64: 31e-3}}
MISSED = seen({(4, 4): 5000}, {(3, "no_exact_bucket"): 5000, (2, "adapter"): 100}, (1, 2, 4))
IDLE = seen({(16, 16): 7000, (8, 8): 3000}, {}, (8, 16, 32))


def flat(found: Advice) -> str:
    """The text on one line, so that where it was broken does not matter."""
    return re.sub(r"\s+", " ", str(found))


def cells(found: Advice, row: str) -> dict[str, str]:
    """A row of the grid, by column."""
    lines = str(found).splitlines()
    head = re.split(r" {2,}", lines[2].strip())
    found_row = next(text for text in lines[3:7] if text.startswith(row))
    return dict(zip(head, re.split(r" {2,}", found_row.strip())[1:], strict=True))


# -- text -------------------------------------------------------------------------------------------------------------


def test_the_grid_has_todays_list_the_proposal_and_no_graph_at_all_side_by_side() -> None:
    """Hit rate, milliseconds, rows padded in all and per call, graphs, memory and capture seconds of each."""
    snapshot = dispatched({3: 4000, 9: 1000}, [4, 16], True)
    found = advise(snapshot, graph_bytes=2 << 20, capture_seconds=0.25, **TIMED)
    assert {
        "hit rate": "100 %", "ms/call": f"{found.now and found.now.seconds * 1e3:.4g}", "rows padded": "11,000",
        "per call": "2.20", "graphs": "2", "MiB": "4.0", "capture s": "0.5",
    } == cells(found, "now")  # fmt: skip
    assert ("0", "0.00", f"{found.best.seconds * 1e3:.4g}") == tuple(
        cells(found, "best")[name] for name in ("rows padded", "per call", "ms/call")
    )
    assert ("0 %", "0", f"{(found.eager_seconds or 0) * 1e3:.4g}") == tuple(
        cells(found, "eager")[name] for name in ("hit rate", "graphs", "ms/call")
    )
    assert str(found).splitlines()[0] == "decode: 5,000 calls, padded dispatch"


def test_what_is_not_known_is_a_dash() -> None:
    """Never a nought: neither memory nor capture seconds were seen, and no eager call was timed."""
    found = advise(MISSED, times={1: 9e-3, 8: 10e-3})
    assert ("-", "-") == (cells(found, "best")["MiB"], cells(found, "now")["capture s"])
    assert "\neager" not in str(found)


def test_a_change_comes_with_the_line_to_paste() -> None:
    """Why, which buckets, and the decorator's line by itself; exact dispatch says so."""
    text = str(advise(MISSED, **TIMED))
    assert "decode: 10,000 calls, exact dispatch" in text
    assert re.search(r"^change it: \d+\.\d % less time per call, [\d.]+ % sure of at least 2 %$", text, re.MULTILINE)
    assert "\nbuckets [3, 4]\n\n@graphprobe.capture(buckets=[3, 4])\n\n" in text


@pytest.mark.parametrize("engine", [name for name in ENGINE if name != "graphprobe"])
def test_the_line_is_that_of_the_engine(engine: str) -> None:
    """As ``engines.line`` writes it, whole and unbroken, comments included."""
    calls = dict.fromkeys(range(1, 41), 1000)
    found = advise(dispatched(calls, [40], True, name=engine), max_batch=40, **TIMED)
    assert line(engine, found.best.buckets, max_batch=40) == found.line
    assert f"\n\n{found.line}\n\n" in str(found)


def test_a_list_that_is_kept_comes_with_no_line_to_paste() -> None:
    """Nobody is to paste what is not worth it; the best list is told where it is faster."""
    calls = dict.fromkeys(range(1, 33), 200)
    text = str(advise(dispatched(calls, range(4, 33, 4), True), **TIMED))
    assert re.search(r"^keep what you have: the best list saves .* less than 2 %$", text, re.MULTILINE)
    assert "\nthe best list so far is [" in text
    assert "@graphprobe" not in text
    assert "the best list so far" not in str(advise(dispatched({4: 2000}, [4], False), **TIMED))


def test_what_can_be_dropped_is_named_with_what_that_saves() -> None:
    """Graphs, memory, start-up, and the line to paste."""
    found = advise(IDLE, graph_bytes={8: 1 << 20, 16: 1 << 20, 32: 3 << 20}, capture_seconds=0.5, **TIMED)
    saved = "or drop 32: the time is the same, and that saves 1 graph, 3.0 MiB, 0.5 s of start-up"
    assert f"{saved}\n\n@graphprobe.capture(buckets=[8, 16])\n" in str(found)
    assert "or drop 32: the time is the same, and that saves 1 graph\n" in str(advise(IDLE, **TIMED))


def test_a_smaller_list_of_other_sizes_is_told_whole() -> None:
    """What is no part of today's list cannot be said by what is dropped."""
    calls = {**dict.fromkeys(range(1, 65), 10), 13: 10_000, 41: 10_000}
    found = advise(dispatched(calls, range(4, 65, 4), True), threshold=0.5, **TIMED)
    assert found.leaner is not None
    assert f"or capture {list(found.leaner.buckets)}: the time is the same, and that saves" in flat(found)


def test_the_frontier_is_drawn_with_both_lists_marked() -> None:
    """Graphs against milliseconds; with one point there is nothing to draw."""
    found = advise(MISSED, **TIMED)
    text = str(found)
    assert "expected time by number of graphs:\ngraphs         ms  above best  (as a bar)\n" in text
    assert (1, 1) == (text.count("<- proposal"), text.count("<- now"))
    assert [(plan.graphs, plan.seconds * 1e3) for plan in found.frontier] == found.points
    now, best = found.marks
    assert ((3, found.now and found.now.seconds * 1e3), (2, found.best.seconds * 1e3)) == (now, best)
    assert "expected time by number" not in str(advise(dispatched({4: 2000}, [4], False), **TIMED))
    assert advise(seen({(4, 4): 5}), **TIMED).marks[0] is None


def test_warnings_come_before_the_picture_and_notes_after_it() -> None:
    """What costs time is not read last."""
    text = str(advise(MISSED, **TIMED))
    assert text.index("warning: 1.0 % of the calls run eagerly") < text.index("expected time") < text.index("note: ")


def test_a_list_of_sixty_four_is_readable() -> None:
    """The list is broken over lines; what is to be pasted is one line."""
    found = advise(dispatched({n * 3: 10_000 for n in range(1, 100)}, range(1, 200, 2), False), **TIMED)
    assert 64 == found.best.graphs
    lines = str(found).splitlines()
    begin = next(i for i, text in enumerate(lines) if text.startswith("buckets ["))
    listed = [text for text in lines[begin:] if re.fullmatch(r"(buckets \[|  )[\d, ]+\]?", text)]
    assert 3 <= len(listed) <= 4
    assert f"buckets {list(found.best.buckets)}" == re.sub(r"\s+", " ", " ".join(listed))
    assert f"@graphprobe.capture(buckets={list(found.best.buckets)})" in lines


def test_a_name_cannot_break_the_text() -> None:
    """Line ends, escapes and letters of other alphabets are written as ASCII, in text, notes and warnings."""
    name = "d\u00e9\n\x1b[31m\ud800"
    found = advise(seen({(4, 4): 2000}, {(8, "batch_too_large"): 9}, (4,), name), largest=4, pad=False, **TIMED)
    first = str(found).splitlines()[0]
    assert "d\\xe9\\n\\x1b[31m\\ud800: 2,009 calls, exact dispatch" == first
    odd = dataclasses.replace(found, notes=("a\nb\x1b",), warnings=("\u2603" * 3,))
    assert "note: a\\nb\\x1b" in str(odd)
    assert "warning: \\u2603\\u2603\\u2603" in str(odd)
    assert name == json.loads(found.to_json())["forward"]


calls = st.dictionaries(st.integers(1, 300), st.integers(1, 10**12), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(calls, st.lists(st.integers(1, 300), min_size=1, max_size=30, unique=True), st.booleans(), st.data())
def test_every_text_is_ascii_and_as_wide_as_a_table(
    seen_calls: dict[int, int], today: list[int], pad: bool, data: st.DataObject
) -> None:
    """But for the lines to paste, which may not be broken."""
    engine = data.draw(st.sampled_from([name for name in ENGINE if pad or ENGINE[name].may_choose]))
    found = advise(
        dispatched(seen_calls, today, pad),
        engine=engine,
        pad=pad if ENGINE[engine].may_choose else None,
        max_batch=data.draw(st.none() | st.integers(max(seen_calls), 400)),
        graph_bytes=data.draw(st.none() | st.just(1.5e6)),
        times=data.draw(st.none() | st.just({1: 0.1, 2: 0.09, 30: 0.2})),
    )
    text = str(found)
    pasted = set(found.line.splitlines())
    if found.leaner is not None:
        pasted |= set(line(engine, found.leaner.buckets, max_batch=found.max_batch, pad=found.pads).splitlines())
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    assert all(len(shown) <= WIDTH for shown in text.splitlines() if shown not in pasted)
    assert not any(shown != shown.rstrip() for shown in text.splitlines())


# -- JSON -------------------------------------------------------------------------------------------------------------


def refused(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")


def read(found: Advice) -> dict[str, Any]:
    """Parsed by the letter of the standard."""
    return json.loads(found.to_json(), parse_constant=refused)  # type: ignore[no-any-return]


PLAN = {field.name for field in dataclasses.fields(Plan)} | {"graphs"}


@pytest.mark.parametrize(
    "found",
    [
        advise(MISSED, **TIMED),
        advise(IDLE, graph_bytes=10, capture_seconds=0.5, max_batch=32, **TIMED),
        advise(seen({}, {(3, "unknown"): 5})),
    ],
    ids=["change", "keep", "nothing known"],
)
def test_json_has_every_name_and_every_value(found: Advice) -> None:
    """All fields, the answer, and what each list is made of; what is not known is null."""
    data = read(found)
    names = {field.name for field in dataclasses.fields(Advice)}
    assert names | {"schema", "keep", "buckets", "hit_rate", "expected_seconds", "line"} == set(data)
    assert SCHEMA == data["schema"]
    for name in names | {"keep", "buckets", "hit_rate", "expected_seconds", "line"}:
        value = getattr(found, name)
        if isinstance(value, Plan):
            assert PLAN == set(data[name])
            assert {part: plain(getattr(value, part)) for part in PLAN} == data[name]
        elif name == "frontier":
            assert [{part: plain(getattr(plan, part)) for part in PLAN} for plan in value] == data[name]
        else:
            assert plain(value) == data[name]


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("keep", [True, False])
def test_the_answer_is_todays_list_where_it_is_kept_and_the_best_one_else(keep: bool) -> None:
    """Buckets, hit rate and expected seconds are of one and the same list, in JSON too."""
    found = advise(MISSED, threshold=0.9 if keep else 0.02, **TIMED)
    assert keep is found.keep
    plan = found.now if keep else found.best
    assert plan is not None
    assert (plan.buckets, plan.hit_rate, plan.seconds) == (found.buckets, found.hit_rate, found.expected_seconds)
    data = read(found)
    answer = data["now" if keep else "best"]
    assert (answer["buckets"], answer["seconds"]) == (data["buckets"], data["expected_seconds"])
    assert percent(plan.hit_rate) in str(found)


def test_a_number_that_is_none_is_never_written() -> None:
    """It would be a mistake of ours, and no parser but Python's would read it."""
    broken = dataclasses.replace(advise(MISSED, **TIMED), gain=float("nan"))
    with pytest.raises(ValueError, match="JSON"):
        broken.to_json()
