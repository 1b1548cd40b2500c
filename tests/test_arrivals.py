"""Traces of requests: what is read, and what is refused with its line."""

from __future__ import annotations

import io
import os
import threading
import types
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from graphprobe.errors import ConfigError, SourceError
from graphprobe.tools import arrivals as module
from graphprobe.tools.arrivals import Request, arrivals
from tests.servers import Server

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TWO = HEADER + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799601,3180,8\n"
TRACES = Path(os.environ.get("GRAPHPROBE_TRACES") or Path(__file__).parents[2] / "shared" / "data")


def one(stamp: str = "2023-11-16 18:17:03", context: str = "5", generate: str = "2") -> str:
    return f"{HEADER}{stamp},{context},{generate}\n"


def seconds(*stamps: str) -> list[float]:
    return [request.arrival for request in arrivals(HEADER + "".join(f"{stamp},1,1\n" for stamp in stamps))]


def test_a_trace_is_read_to_the_last_digit_of_its_times() -> None:
    assert arrivals(TWO) == [Request(0.0, 4808, 10), Request(2.0000001, 3180, 8)]


def test_requests_that_are_not_in_order_are_sorted_and_equal_times_keep_theirs() -> None:
    late, early = "2023-11-16 18:17:09,1,1\n", "2023-11-16 18:17:03,{},2\n"
    read = arrivals(HEADER + late + early.format(7) + early.format(6))
    assert read == [Request(0.0, 7, 2), Request(0.0, 6, 2), Request(6.0, 1, 1)]


def test_with_speed_four_requests_arrive_four_times_as_fast() -> None:
    assert [request.arrival for request in arrivals(TWO, speed=4)] == [0.0, 2.0000001 / 4]


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf"), "4", True, None])
def test_a_speed_that_is_none_is_refused(speed: object) -> None:
    with pytest.raises(ConfigError, match="speed must be a number above 0"):
        arrivals(TWO, speed=speed)  # type: ignore[arg-type]


def test_columns_are_found_by_name_in_any_order_and_among_others() -> None:
    text = "Model,GeneratedTokens, TIMESTAMP ,ContextTokens\nx, 3 , 2023-11-16 18:17:03,9 \n"
    assert arrivals(text) == [Request(0.0, 9, 3)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_any_end_of_line_a_byte_order_mark_and_empty_lines_are_read(end: str, tmp_path: Path) -> None:
    file = tmp_path / "day.csv"
    text = TWO.replace("\n", end + end)
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert arrivals(file) == arrivals(str(file)) == arrivals("\ufeff" + TWO) == arrivals(TWO)


def test_times_with_a_zone_are_compared_across_zones_and_those_without_are_utc() -> None:
    found = seconds("2024-05-10 02:00:00.5+02:00", "2024-05-10T00:00:01Z", "2024-05-10 00:00:02.009930")
    assert found == [0.0, 0.5, 1.50993]


def test_a_trace_comes_from_standard_input_and_from_a_url(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(TWO.encode())))

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200 if handler.path == "/day.csv" else 404)
        handler.end_headers()
        handler.wfile.write(TWO.encode())

    server.reply = reply
    assert arrivals("-") == arrivals(f"{server.url}/day.csv") == arrivals(TWO)
    with pytest.raises(SourceError, match=r"HTTP 404\. hint: the columns are"):
        arrivals(f"{server.url}/night.csv")


def test_a_server_that_does_not_answer_costs_the_timeout_which_is_five_seconds_unless_given(server: Server) -> None:
    stop = threading.Event()
    server.reply = lambda handler: stop.wait(20)
    try:
        with pytest.raises(SourceError, match=r"no whole answer in 0\.3 s"):
            arrivals(server.url, timeout=0.3)
        with pytest.raises(SourceError, match=r"no whole answer in 5(\.0)? s"):
            arrivals(server.url)
    finally:
        stop.set()
    with pytest.raises(ConfigError, match="timeout must be a time in seconds"):
        arrivals(server.url, timeout=0)


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("\n", 1, "found nothing"),
        ("2023-11-16 18:17:03,1,1\n", 1, "not the names of the columns"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,1\n", 1, "not the names of the columns"),
        (TWO + "2023-11-16 18:17:03,1\n", 4, "2 fields, the first line has 3"),
        (TWO + "\n2023-11-16 18:17:03,1,1,1\n", 5, "4 fields, the first line has 3"),
        (one("yesterday"), 2, "TIMESTAMP 'yesterday' is no time"),
        (one("1700000000"), 2, "is no time"),
        (one("2023-02-30 18:17:03"), 2, "day is out of range"),
        (one("2023-11-16 18:17:03.1234567890"), 2, "is no time"),
        (one(context="-1"), 2, "ContextTokens must be a whole number from 0"),
        (one(context="1.5"), 2, "ContextTokens must be"),
        (one(context=""), 2, "ContextTokens must be"),
        (one(context="\u0663"), 2, "ContextTokens must be"),
        (one(generate="0"), 2, "GeneratedTokens must be a whole number from 1"),
        (one(generate="nan"), 2, "GeneratedTokens must be"),
        (one(generate="9" * 5000), 2, "GeneratedTokens must be"),
        (one(generate="1073741825"), 2, "GeneratedTokens must be"),
        (HEADER + '"2023-11-16 18:17:03,1,1\n', 2, "1 fields"),
        (TWO + '"2023-11-16 18:17:04,1,1\n' + "2023-11-16 18:17:05,1,1\n" * 5, 4, "a quote .* runs to line 9"),
        (TWO + '\n"' + "2023-11-16 18:17:05,1,1\n" * 9_000, 5, "field larger .*a quote that opens there"),
        ('"' + HEADER + "2023-11-16 18:17:05,1,1\n", 1, "a quote that opens there runs to line 2"),
    ],
)
def test_a_line_that_is_no_request_is_refused_with_its_number_and_a_hint(text: str, line: int, why: str) -> None:
    with pytest.raises(SourceError, match=rf"trace: line {line}: .*{why}.*hint: the columns are TIMESTAMP"):
        arrivals(text)


def test_a_trace_without_a_request_is_refused() -> None:
    with pytest.raises(SourceError, match="no request in it"):
        arrivals(HEADER)
    with pytest.raises(SourceError, match="/dev/null: line 1: found nothing"):
        arrivals("/dev/null")


def test_years_between_two_requests_are_taken_for_an_error() -> None:
    with pytest.raises(SourceError, match="span 730,485 days"):
        seconds("2023-11-16 18:17:03", "0023-11-16 18:17:03")


def test_a_file_that_is_no_text_is_refused_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "day.csv.gz"
    file.write_bytes(TWO.encode() + b"\x1f\x8b\xff")
    with pytest.raises(SourceError, match=r"day\.csv\.gz: line 4: not UTF-8. hint: is it compressed\?"):
        arrivals(file)


def test_a_file_that_is_absent_or_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="absent: No such file"):
        arrivals(tmp_path / "absent")
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    with pytest.raises(SourceError, match="longer than 1 MiB"):
        arrivals("/dev/zero")


@pytest.mark.parametrize(
    "values",
    [(-0.1, 1, 1), (float("nan"), 1, 1), (float("inf"), 1, 1), (0.0, -1, 1), (0.0, 1, 0), (0.0, 1, 1 << 31)],
)
def test_a_request_that_cannot_be_is_not_made(values: tuple[float, int, int]) -> None:
    with pytest.raises(ConfigError, match="no request: Request"):
        Request(*values)


@pytest.mark.parametrize(
    ("name", "requests", "tokens", "last"),
    [("conv", 19366, 4088665, 3501.721937), ("code", 8819, 245896, 3435.948056)],
)
def test_the_azure_traces_are_read_whole(name: str, requests: int, tokens: int, last: float) -> None:
    file = TRACES / f"azure_llm_2023_{name}.csv"
    if not file.exists():
        pytest.skip(f"no trace {file}: set GRAPHPROBE_TRACES to the folder that has it")
    read = arrivals(file)
    assert (len(read), sum(r.generate for r in read), read[-1].arrival) == (requests, tokens, last)
