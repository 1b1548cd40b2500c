"""`graphprobe advise` on what the vLLM integration exports: the page of the engine itself, a file, a snapshot."""

from __future__ import annotations

import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graphprobe import advise
from graphprobe.cli import app
from graphprobe.ledger import Ledger
from graphprobe.observe import observe
from graphprobe.tools.sources import reading
from tests.pages import TEXT, exposed, ranks
from tests.servers import Server

LINE = "--compilation-config '{\"cudagraph_capture_sizes\": [%s]}'"


def serving(width: int = 1) -> Ledger:
    """An engine of up to 8 requests with sizes up to 16 tokens: those of 20 and more run eagerly where width is 4."""
    ledger = Ledger()
    phase = "verify" if width > 1 else "decode"
    probe = observe("vllm", [4, 8, 16], unit="tokens", source="engine", role="target", ledger=ledger)
    probe.forward.phases = (phase,)
    for requests in range(1, 9):
        tokens = requests * width
        bucket = next((size for size in (4, 8, 16) if size >= tokens), None)
        for _ in range(1500):
            if bucket:
                probe.graph_call(tokens, bucket, "full", phase)
            else:
                probe.eager_call(tokens, "batch_too_large", phase)
    for _ in range(40):
        probe.eager_call(900, "batch_too_large", "prefill")
    draft = observe("vllm.drafter", unit="tokens", source="engine", role="drafter", ledger=ledger)
    draft.eager_call(4, "disabled", "draft")
    return ledger


def positions(count: int) -> str:
    """What vLLM says of each position of a draft, from its start on."""
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    lines = [f'{name}_total{{engine="0",model_name="m",position="{n}"}} 0.0' for n in range(count)]
    return "\n".join([f"# HELP {name}_total Accepted.", f"# TYPE {name}_total counter", *lines]) + "\n"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The page of an engine that drafts three tokens ahead; ours stands in the middle of its own."""
    path = tmp_path / "metrics"
    path.write_text('# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 3\n')
    path.write_text(path.read_text() + exposed(serving(4)) + positions(3))
    return path


def test_the_answer_is_what_vllm_takes_for_the_sizes_that_were_missing(page: Path) -> None:
    """Nothing is named: forward, engine, unit, today's list and the width of a request are all read."""
    found = advise(page)
    assert ("vllm", "vllm", "tokens", (4, 8, 16)) == (found.forward, found.engine, found.unit, found.now.buckets)
    assert 0.5 == found.now.hit_rate and 1.0 == found.best.hit_rate
    assert 32 == found.best.buckets[-1]
    assert found.line.startswith(LINE % ", ".join(map(str, found.best.buckets)))
    assert any("3 tokens ahead" in note for note in found.notes)
    assert any(note.startswith("vllm.drafter ") for note in found.notes)


def test_sizes_are_whole_requests_where_the_page_says_how_many_tokens_each_has(page: Path) -> None:
    """V1 would round others up; ragged steps between them are padded to whole requests, too."""
    ledger = serving(4)
    probe = observe("vllm", ledger=ledger)
    for _ in range(9000):
        probe.eager_call(19, "batch_too_large", "verify")
    text = exposed(ledger)
    page.write_text(text + positions(3))
    assert not [size for size in advise(page).best.buckets if size % 4]
    page.write_text(text)
    found = advise(page)
    assert 19 in found.best.buckets
    assert any("give spec_tokens" in note for note in found.notes)
    assert not [size for size in advise(page, spec_tokens=3).best.buckets if size % 4]


def test_a_page_without_speculative_steps_has_no_width(page: Path) -> None:
    """The series of positions may be there: what counts is what ran."""
    page.write_text(exposed(serving(1)) + positions(3))
    found = advise(page)
    assert found.now.hit_rate == 1.0
    assert not any("ahead" in note or "spec_tokens" in note for note in found.notes)


def test_what_is_given_counts_more_than_what_is_read(page: Path) -> None:
    """An engine that is to be asked about seven tokens, and another engine."""
    assert not [size for size in advise(page, spec_tokens=7).best.buckets if size % 8]
    assert "cuda-graph-bs" in advise(page, engine="sglang").line


@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_width_of_a_draft_is_read_off_its_positions(page: Path, count: int) -> None:
    """One series each; none where nothing is drafted."""
    page.write_text(exposed(serving(1)) + (positions(count) if count else ""))
    assert count == reading(page).spec_tokens


def test_ranks_of_one_engine_change_nothing_but_the_sum(page: Path) -> None:
    """Each has counted every step, so shares and lists are those of one."""
    one = advise(page)
    page.write_text(ranks(exposed(serving(4)), "0", "1") + positions(3))
    two = advise(page)
    assert (one.best.buckets, 2 * one.calls) == (two.best.buckets, two.calls)
    assert (one.now.seconds, one.now.hit_rate) == (two.now.seconds, two.now.hit_rate)


def test_a_snapshot_of_the_worker_gives_the_same_list() -> None:
    """Where an endpoint of our own serves it, and vLLM's series are not beside it, the width is given."""
    snapshot = serving(4).snapshot()
    assert 32 == advise(snapshot, spec_tokens=3).best.buckets[-1]


def test_the_command_takes_the_address_of_the_engine(server: Server, page: Path) -> None:
    """vLLM has no /snapshot: its page of metrics is read, and the line to paste is printed."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        found = handler.path == "/metrics"
        handler.send_response(200 if found else 404)
        handler.send_header("Content-Type", TEXT)
        handler.end_headers()
        handler.wfile.write(page.read_bytes() if found else b'{"detail":"Not Found"}')

    server.reply = reply
    done = CliRunner().invoke(app, ["advise", server.url], env={"COLUMNS": "110"})
    assert 0 == done.exit_code, done.output
    assert re.search(r"--compilation-config '\{\"cudagraph_capture_sizes\": \[[\d, ]+, 32\]\}'", done.output)


def test_what_is_said_is_in_words_of_options(page: Path) -> None:
    """The command has --spec-tokens."""
    page.write_text(exposed(serving(4)))
    output: Any = CliRunner().invoke(app, ["advise", str(page)]).output
    assert "give --spec-tokens" in " ".join(output.split())
