"""SGLang 0.5.11 to 0.5.13, whose runners have other names and places: passes are counted with their paths and sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import graphprobe
from graphprobe.ledger import LEDGER
from tests.integrations.engine import forward, rows
from tests.integrations.sglang_engine import Engine

Make = Callable[..., Engine]
OLD = str(Path(__file__).with_name("fake_legacy"))


@pytest.fixture
def old(strict: None, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes engines of the old layout."""
    monkeypatch.setenv("GRAPHPROBE_TIMING", "0")
    monkeypatch.syspath_prepend(OLD)
    graphprobe.instrument("sglang")
    return Engine


def test_passes_are_counted_with_their_buckets(old: Make) -> None:
    """Decode by requests, padded to the next graph."""
    old().decode(1, 3, 3, 9)
    found = rows("sglang")
    assert {row: calls for row, calls in found.items() if len(row) == 4} == {
        ("decode", 1, "full", 1): 1,
        ("decode", 3, "full", 4): 2,
    }
    assert [("decode", 9)] == [row[:2] for row in found if len(row) == 3]


@pytest.mark.parametrize(("backend", "mode"), [("breakable", "breakable"), ("tc_piecewise", "piecewise")])
def test_prefill_is_counted_apart(old: Make, backend: str, mode: str) -> None:
    """By tokens; each kind of graph had a runner of its own."""
    engine = old(prefill=(16, 32), prefill_backend=backend)
    engine.prefill(10, 20, 40)
    found = rows("sglang.prefill")
    assert [("prefill", 10, mode, 16), ("prefill", 20, mode, 32)] == [row for row in found if len(row) == 4]
    assert [("prefill", 40)] == [row[:2] for row in found if len(row) == 3]
    assert forward("sglang.prefill").buckets == (16, 32)


def test_captures_of_a_drafter_are_no_calls_and_its_rounds_are(old: Make) -> None:
    """Captures draft, too."""
    engine = old(speculative="eagle", drafter=True, sizes=(1, 2))
    assert rows("sglang.drafter") == {}
    engine.draft(1, 2, 3)
    found = rows("sglang.drafter")
    assert [("draft", 1, "full", 1), ("draft", 2, "full", 2)] == [row for row in found if len(row) == 4]
    assert [("draft", 3)] == [row[:2] for row in found if len(row) == 3]
    assert sum(found.values()) == 3


def test_no_hook_is_missing(old: Make) -> None:
    """What these releases do not have is not asked for."""
    old(prefill=(16,), speculative="eagle", drafter=True).decode(1)
    assert [] == [name for (_, name), bound in LEDGER.hooks.items() if not bound]
    assert {("sglang", "pass"), ("sglang", "draft_eagle_legacy")} <= set(LEDGER.hooks)


def test_sizes_and_tokens_of_the_cache_are_told(old: Make) -> None:
    """With the first pass at the latest."""
    old(sizes=(1, 2)).decode(1)
    assert (forward("sglang").buckets, forward("sglang").kv_capacity_tokens) == ((1, 2), 4096)


def test_older_releases_are_refused(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.10 has no plugins, and other runners still."""
    monkeypatch.syspath_prepend(OLD)
    package = __import__("sglang")
    monkeypatch.setattr(package, "__version__", "0.5.10.post1")
    with pytest.raises(graphprobe.errors.DidNotInstrument) as caught:
        graphprobe.instrument("sglang")
    assert "0.5.10" in str(caught.value) and "0.5.11" in str(caught.value)
    assert LEDGER.hooks == {}
