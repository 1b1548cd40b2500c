"""A real server of SGLang: what stands on its own page of metrics, held against its own counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from graphprobe.tools.check import check
from tests.dashboards.stack import until
from tests.engines.reading import CALLS, calls, samples, series, settled, value
from tests.engines.serving import needed
from tests.engines.sglang_serving import PYTHON, SIZES, Eager, Server, Servers, passes

needed(PYTHON, "SGLang")

PROMPTS = ("abc def", "the quick brown fox jumps", "1, 2, 3")
TOKENS = [4, 9, 14, 19, 24, 29, 34]
"""Of requests that arrive at once: the batch falls from seven to one."""

Row = tuple[str, str, str]


def rows(page: str, forward: str) -> Counter[Row]:
    """Calls by batch size, bucket and reason."""
    found: Counter[Row] = Counter()
    for one in samples(page, *CALLS):
        if one.labels["forward"] == forward and one.value:
            key = (one.labels["batch_size"], one.labels.get("bucket", ""), one.labels.get("reason", ""))
            found[key] += int(one.value)
    return found


def ask(server: Server) -> list[list[int]]:
    """A request by itself, requests at once, and prompts one after another; the tokens of those that were alone."""
    alone = server.complete("alone", tokens=12)
    server.generate(tuple(f"no. {n}" for n in TOKENS), TOKENS)
    return alone + [tokens for prompt in PROMPTS for tokens in server.complete(prompt, tokens=40)]


@pytest.fixture(scope="module")
def answers(pair: list[Server]) -> list[list[list[int]]]:
    """What both servers said, without us and with us."""
    return [ask(server) for server in pair]


@pytest.fixture(scope="module")
def page(pair: list[Server], answers: object) -> str:
    return settled(pair[1].url, forward="sglang")


def test_each_pass_is_counted_once_on_its_path(page: str) -> None:
    decode, prefill = calls(page, "mode", "sglang"), calls(page, "reason", "sglang.prefill")
    graphs, eager = decode.pop("full"), sum(decode.values())
    assert {"decode_cuda_graph": graphs, "decode_none": eager, "prefill_none": sum(prefill.values())} == passes(page)
    assert graphs > 100
    assert eager > 10


def test_each_size_has_the_graph_of_its_bucket_or_a_reason(page: str) -> None:
    """Those of three are padded to four, those above have no graph."""
    found = rows(page, "sglang")
    assert {(size, bucket) for size, bucket, _ in found if bucket} == {("1", "1"), ("2", "2"), ("3", "4"), ("4", "4")}
    assert {reason for _, bucket, reason in found if not bucket} == {"batch_too_large"}
    assert {int(size.partition("-")[0]) for size, bucket, _ in found if not bucket} <= {5, 6, 7}


def test_each_generated_token_is_a_row_of_a_pass(page: str) -> None:
    """The first one of a request is its prefill's; the engine, which is a pass ahead, runs one more than it needs."""
    found = {int(size): count for size, count in calls(page, "batch_size", "sglang").items()}
    assert all(size <= len(TOKENS) for size in found)
    tokens, requests = (
        int(value(page, name)) for name in ("sglang:generation_tokens_total", "sglang:num_requests_total")
    )
    assert tokens - requests <= sum(size * count for size, count in found.items()) <= tokens
    assert requests == 1 + len(TOKENS) + len(PROMPTS)


def test_each_token_of_a_prompt_is_counted_once(page: str) -> None:
    sizes = calls(page, "batch_size", "sglang.prefill")
    assert sum(int(size) * count for size, count in sizes.items()) == value(page, "sglang:prompt_tokens_total")
    assert set(calls(page, "phase", "sglang.prefill")) == {"prefill"}


def test_what_is_padded_is_a_row_per_pass_of_three(page: str) -> None:
    padded = {one.labels["bucket"]: one.value for one in samples(page, "graphprobe_padding_rows_total") if one.value}
    assert padded == {"4": rows(page, "sglang")["3", "4", ""]}


def test_sizes_and_units_are_those_of_the_engine(page: str) -> None:
    infos = {one.labels["forward"]: one.labels for one in samples(page, "graphprobe_forward_info")}
    assert {name: info["unit"] for name, info in infos.items()} == {"sglang": "requests", "sglang.prefill": "tokens"}
    assert infos["sglang"]["buckets"] == ",".join(map(str, SIZES))
    (uncovered,) = (one for one in samples(page, "graphprobe_uncovered_sizes") if one.labels["forward"] == "sglang")
    assert (uncovered.labels["phase"], uncovered.value) == ("decode", 4)


def test_the_kv_capacity_is_the_engines(page: str) -> None:
    (capacity,) = (one for one in samples(page, "graphprobe_kv_capacity_tokens") if one.labels["forward"] == "sglang")
    assert capacity.value == value(page, "sglang:max_total_num_tokens") == 4096


def test_hooks_are_bound_and_nothing_of_ours_failed(page: str) -> None:
    bound = {one.labels["hook"]: one.value for one in samples(page, "graphprobe_hook_bound")}
    assert bound
    assert 0 not in bound.values(), bound
    assert value(page, "graphprobe_internal_errors_total") == 0


def test_the_page_conforms(pair: list[Server], page: str) -> None:
    """All that is ours: two of SGLang's own names clash in OpenMetrics."""
    report = check(f"{pair[1].url}/metrics")
    assert set(report.forwards) == {"sglang", "sglang.prefill"}
    assert {one.rule for one in report.findings} <= {"openmetrics-elsewhere"}


def test_answers_are_the_same(answers: list[list[list[int]]]) -> None:
    assert answers[0] == answers[1]
    assert len({token for tokens in answers[0] for token in tokens}) > 20, "words of so few tokens hide differences"


def known(server: Server) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Its series; some are told apart by process."""
    found = series(server.page(), "")
    return {(name, frozenset(label for label in labels if label[0] != "pid")) for name, labels in found}


def test_no_series_is_lost(pair: list[Server], answers: object) -> None:
    """Some come only after half a minute without a request."""
    without = known(pair[0])
    until(lambda: without <= known(pair[1]), 60, f"all {len(without)} series of the server without us")
    assert len(without) > 300


def test_without_the_variable_nothing_of_ours_is_there(pair: list[Server], answers: object) -> None:
    assert not series(pair[0].page(), "graphprobe_")
    assert "graphprobe" not in pair[0].said


def test_one_line_says_what_is_observed_and_where(pair: list[Server], page: str) -> None:
    said = [line for line in pair[1].said.splitlines() if "graphprobe" in line and "observes SGLang" in line]
    assert len(said) == 1
    assert "SGLang's own /metrics" in said[0]


def test_replicas_of_data_parallelism_are_ranks(sglang: Servers, tmp_path: Path) -> None:
    """SGLang tells their passes apart by `dp_rank`."""
    settings = {"GRAPHPROBE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    eager = Eager(sglang.python, sglang.model, sglang.folders, tmp_path)
    with eager.serving("--enable-metrics", "--dp-size=2", **settings) as server:
        for number in range(6):
            server.complete(f"request {number}", tokens=5 + number)
        found = settled(server.url, least=2, forward="sglang")
    own: Counter[str] = Counter()
    for one in samples(found, "sglang:cuda_graph_passes_total"):
        if one.labels["mode"].startswith("decode"):
            own[one.labels["dp_rank"]] += int(one.value)
    assert calls(found, "rank", "sglang") == own
    assert len(own) == 2
    assert set(calls(found, "reason", "sglang")) == {"disabled"}
