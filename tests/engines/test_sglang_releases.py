"""Servers of other releases of SGLang than the installed one, whose Python files are in front of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engines.reading import CALLS, calls, samples, settled, value
from tests.engines.serving import needed
from tests.engines.sglang_serving import PYTHON, Servers, passes
from tests.engines.sglang_trees import RELEASES

needed(PYTHON, "SGLang")

TREES = os.environ.get("GRAPHPROBE_SGLANG_TREES", "")


@pytest.mark.skipif(not TREES, reason="needs GRAPHPROBE_SGLANG_TREES, which tests.engines.sglang_trees makes")
@pytest.mark.parametrize("release", RELEASES)
def test_each_pass_is_counted_once_on_its_path(sglang: Servers, release: str) -> None:
    tree = Path(TREES).absolute() / release
    with sglang.serving("--enable-metrics", plugin=tree, GRAPHPROBE="1") as server:
        server.complete("alone", tokens=12)
        server.generate(("one", "two", "three", "four", "five"), [4, 9, 14, 19, 24])
        page = settled(server.url, forward="sglang")
    assert f"observes SGLang {release}" in server.said
    decode, prefill = calls(page, "mode", "sglang"), calls(page, "reason", "sglang.prefill")
    graphs, eager = decode.pop("full"), sum(decode.values())
    assert {"decode_cuda_graph": graphs, "decode_none": eager, "prefill_none": sum(prefill.values())} == passes(page)
    assert graphs > 20
    assert eager > 2
    buckets = {(one.labels["batch_size"], one.labels["bucket"]) for one in samples(page, CALLS[0]) if one.value}
    assert {("1", "1"), ("3", "4")} <= buckets <= {("1", "1"), ("2", "2"), ("3", "4"), ("4", "4")}
    assert value(page, "graphprobe_internal_errors_total") == 0
