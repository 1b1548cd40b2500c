"""A real server over HTTP: what stands on its own page of metrics, held against its own counts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graphprobe.tools.check import check
from tests.engines.reading import calls, samples, series, settled, value
from tests.engines.serving import Engine, Site, needed

needed()

PROMPTS = ("abc def", "the quick brown fox jumps", "1, 2, 3")

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def page(observed: Engine) -> str:
    """Its metrics after a few requests, some of them at once."""
    observed.complete("alone", tokens=12)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda n: observed.complete(f"no. {n}", tokens=10 + 3 * n), range(5)))
    return settled(observed.url)


def iterations(page: str) -> int:
    return int(value(page, "vllm:iteration_tokens_total_count"))


def test_each_iteration_of_the_engine_is_one_call(page: str) -> None:
    assert calls(page, "forward") == {"vllm": iterations(page)}
    assert iterations(page) > 12


def test_each_scheduled_token_is_counted_once(page: str) -> None:
    """vLLM counts the first generated token of a request with its prompt, so that it has one more per request."""
    tokens = sum(int(size) * count for size, count in calls(page, "batch_size").items())
    own = value(page, "vllm:iteration_tokens_total_sum") - value(page, "vllm:request_success_total")
    assert tokens == own


def test_every_call_says_that_graphs_are_off(page: str) -> None:
    """There are none on a CPU, and none with --enforce-eager."""
    assert set(calls(page, "reason")) == {"disabled"}


def test_prompts_and_what_follows_are_told_apart(page: str) -> None:
    """The first request has one prefill and eleven steps of one token."""
    phases = calls(page, "phase")
    assert phases["prefill"] >= 1
    assert phases["decode"] >= 11
    assert set(phases) <= {"prefill", "decode", "mixed"}


def test_the_unit_is_tokens(page: str) -> None:
    infos = [one.labels for one in samples(page, "graphprobe_forward_info") if one.labels["forward"] == "vllm"]
    assert [(info["unit"], info["source"]) for info in infos] == [("tokens", "engine")]


def test_the_kv_capacity_is_the_engines(page: str) -> None:
    (config,) = samples(page, "vllm:cache_config_info")
    assert value(page, "graphprobe_kv_capacity_tokens") == int(config.labels["kv_cache_size_tokens"])


def test_hooks_are_bound_and_nothing_of_ours_failed(page: str) -> None:
    bound = {one.labels["hook"]: one.value for one in samples(page, "graphprobe_hook_bound")}
    assert bound
    assert 0 not in bound.values(), bound
    assert value(page, "graphprobe_internal_errors_total") == 0


def test_the_page_conforms(observed: Engine, page: str) -> None:
    report = check(f"{observed.url}/metrics")
    assert (report.forwards, report.findings) == (("vllm",), ())


def test_answers_are_the_same_and_no_series_is_lost(plain: Engine, observed: Engine) -> None:
    """Each prompt alone, for what is batched together differs from run to run, and with it the last bits."""
    answers = [[engine.complete(prompt, tokens=40) for prompt in PROMPTS] for engine in (plain, observed)]
    assert answers[0] == answers[1]
    assert len({token for (tokens,) in answers[0] for token in tokens}) > 20, "words of so few tokens hide differences"
    without, with_us = (engine.page() for engine in (plain, observed))
    assert series(without, "vllm:")
    assert series(without, "") <= series(with_us, "")


def test_without_the_variable_nothing_of_ours_is_there(plain: Engine) -> None:
    plain.complete("one more")
    assert not series(plain.page(), "graphprobe_")


def test_two_api_servers_need_no_variable(site: Site) -> None:
    """vLLM makes a directory itself then."""
    with site.serving("--api-server-count=2", GRAPHPROBE="1") as engine:
        for number in range(6):
            engine.complete(f"request {number}", tokens=6)
        found = settled(engine.url)
    assert calls(found, "forward") == {"vllm": iterations(found)}
    assert iterations(found) == 36


def test_ranks_of_tensor_parallelism_count_the_same(site: Site, tmp_path: Path) -> None:
    settings = {"GRAPHPROBE": "1", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with site.serving("--tensor-parallel-size=2", **settings) as engine:
        engine.complete("abc def", tokens=10)
        found = settled(engine.url, least=2)
        assert check(f"{engine.url}/metrics").findings == ()
    assert calls(found, "rank") == {"0": iterations(found), "1": iterations(found)}
    assert iterations(found) == 10


def test_engines_of_data_parallelism_are_ranks(site: Site) -> None:
    """vLLM tells their iterations apart by `engine`, and has an API server for each."""
    with site.serving("--data-parallel-size=2", GRAPHPROBE="1", VLLM_CPU_OMP_THREADS_BIND="0|1") as engine:
        for number in range(6):
            engine.complete(f"request {number}", tokens=5 + number)
        found = settled(engine.url, least=2)
    own = {one.labels["engine"]: int(one.value) for one in samples(found, "vllm:iteration_tokens_total_count")}
    assert calls(found, "rank") == own
    assert sum(own.values()) == 45


def test_steps_that_verify_drafts_are_a_phase(site: Site, tmp_path: Path) -> None:
    """Drafts of n-grams are found in text that repeats itself."""
    settings = {"GRAPHPROBE": "1", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    with site.serving(f"--speculative-config={json.dumps(NGRAM)}", **settings) as engine:
        engine.complete("abcabcabcabcabc", tokens=40)
        found = settled(engine.url)
    assert sum(calls(found, "phase").values()) == iterations(found)
    assert calls(found, "phase")["verify"] > 0
    assert value(found, "vllm:spec_decode_num_drafts_total") == calls(found, "phase")["verify"]
