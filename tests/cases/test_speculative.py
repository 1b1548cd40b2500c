"""Speculative decoding, tokens and requests: reports from public engines, each as a test (H42 to H46)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import graphprobe
from graphprobe.errors import ConfigError
from graphprobe.observe import observe
from graphprobe.snapshot import Row
from tests.helpers import counts, recorded, rows

pytestmark = pytest.mark.usefixtures("own_forwards", "both_modes")


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def in_requests(tokens: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    """The inputs of ``bucket`` requests of so many tokens each."""
    return lambda bucket: ((rows(bucket * tokens),), {})


def serve(forward: Any, *sizes: int) -> None:
    for n in sizes:
        x = rows(n)
        assert torch.equal(double(x), forward(x))


# -- H42: three tokens per request -----------------------------------------------------------------------------------


def test_steps_of_whole_requests_are_hits() -> None:
    """With three tokens per request 3, 6 and 12 rows are 1, 2 and 4 requests, and replay.

    The snapshot and the table count in requests and say so; the tokens beside them ("4 requests / 12 tokens") are
    not shown (H42, vllm-project/vllm#27325).
    """
    forward = recorded(double, buckets=[1, 2, 4], unit="requests", tokens_per_request=3, name="decode")
    assert (1, 2, 4) == forward.warmup(in_requests(3)).captured
    serve(forward, 3, 6, 12)
    found = forward.snapshot()
    assert ("requests", (1, 2, 4)) == (found.unit, found.buckets)
    assert {Row(n, "graph", n, None, 1, 0, "decode", "full") for n in (1, 2, 4)} == set(found.rows)
    assert "decode (in requests; buckets 1, 2, 4)" in graphprobe.table()


@pytest.mark.parametrize("pad", [None, "repeat"], ids=["exact", "padded"])
@pytest.mark.parametrize(("unit", "buckets"), [("requests", [1, 2, 4]), ("tokens", [3, 6, 12]), ("rows", [3, 6, 12])])
def test_rows_that_are_no_whole_requests_are_ragged(unit: str, buckets: list[int], pad: str | None) -> None:
    """A broken step runs eagerly with a reason of its own, is never padded into a graph, and counts as a miss.

    (H42, vllm-project/vllm#27325).
    """
    forward = recorded(double, buckets=buckets, unit=unit, tokens_per_request=3, pad=pad, name="decode")
    forward.warmup(in_requests(3 if unit == "requests" else 1))
    serve(forward, 5, 1, 2, 4, 7, 11)
    assert {"ragged": 6} == counts(forward)
    assert 0.0 == forward.snapshot().hit_rate
    serve(forward, 3, 6, 12)
    assert {"ragged": 6, "graph": 3} == counts(forward)


def test_more_requests_than_the_largest_bucket_are_named_in_requests() -> None:
    """Five requests with buckets up to four are five too many for no token limit (H42, vllm-project/vllm#27325)."""
    forward = recorded(double, buckets=[1, 2, 4], unit="requests", tokens_per_request=3, pad="repeat", name="decode")
    forward.warmup(in_requests(3))
    serve(forward, 9, 15)
    assert {"graph": 1, "batch_too_large": 1} == counts(forward)
    assert {3, 5} == {row.batch_size for row in forward.snapshot().rows}


def test_token_buckets_below_the_largest_step_are_named_before_traffic(caplog: pytest.LogCaptureFixture) -> None:
    """What requests x tokens needs and the list lacks is said when the forward is declared (H42, vllm#27325)."""
    forward = recorded(double, buckets=[1, 2, 4, 8], max_batch=12, unit="tokens", pad="repeat", name="decode")
    assert {"decode": 4} == forward.snapshot().uncovered
    assert ["decode: sizes without a bucket up to 12: 9-12"] == [r.getMessage() for r in caplog.records]
    enough = graphprobe.decode_buckets(max_seqs=4, spec_tokens=2)
    assert () == graphprobe.coverage(enough, 12, padded=True)


# -- H43: the limit that the draft needs -----------------------------------------------------------------------------


def test_the_tokens_that_a_draft_needs_are_computed_not_found_by_hand() -> None:
    """32 requests with 16 draft tokens need 544 rows: decode_buckets ends there, coverage shows what is missing.

    An advice that prints the 544 is part of the advisor, not tested here (H43, vllm-project/vllm#50488).
    """
    buckets = graphprobe.decode_buckets(max_seqs=32, spec_tokens=16)
    assert 544 == 32 * (1 + 16) == buckets[-1]
    assert () == graphprobe.coverage(buckets, 544, padded=True)
    assert tuple(range(513, 545)) == graphprobe.coverage([1, 2, 4, *range(8, 513, 8)], 544, padded=True)
    assert all(bucket % 17 == 0 for bucket in buckets)


@pytest.mark.parametrize(("seqs", "draft"), [(8, 3), (32, 16), (6, 6), (1, 0), (5, 1), (100, 2)])
def test_every_step_of_whole_requests_fits_a_decode_bucket(seqs: int, draft: int) -> None:
    """No step from one request to all of them is above, and none of the buckets is larger than the largest step.

    (H43, vllm-project/vllm#50488).
    """
    buckets = graphprobe.decode_buckets(max_seqs=seqs, spec_tokens=draft)
    forward = recorded(
        double, buckets=buckets, unit="tokens", tokens_per_request=1 + draft, pad="repeat", name="decode"
    )
    forward.warmup(in_requests(1))
    serve(forward, *(n * (1 + draft) for n in range(1, seqs + 1)))
    assert {"graph": seqs} == counts(forward)
    assert seqs * (1 + draft) == buckets[-1]


def test_the_list_in_force_is_shown_beside_the_wish() -> None:
    """A list that collapses to one entry shows: ``live`` has what can replay, ``buckets`` what was asked for.

    (H43, vllm-project/vllm#50488).
    """
    forward = recorded(double, buckets=[1, 2, 4], max_graphs=1, name="decode")
    report = forward.warmup(in_requests(1))
    assert ((4,), (1, 2)) == (report.captured, report.missing)
    found = forward.snapshot()
    assert ((1, 2, 4), {1: False, 2: False, 4: True}) == (found.buckets, found.live)
    assert {4: 1} == {bucket: n for bucket, n in found.captures.items() if n}
    serve(forward, 1, 2, 4)
    assert {"graph": 1, "not_captured": 2} == counts(forward)


# -- H44: one request is not two -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [None, "repeat"], ids=["exact", "padded"])
@pytest.mark.parametrize("warm", [True, False], ids=["warmup", "lazy"])
def test_one_request_with_drafts_has_one_graph_of_its_own_size(pad: str | None, warm: bool) -> None:
    """One request of four tokens: exactly one graph, captured with four rows, none with eight (H44, vllm#30330)."""
    sizes = []

    def step(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.shape[0])
        return x * 2

    forward = recorded(step, buckets=[1], unit="requests", tokens_per_request=4, pad=pad, name="decode")
    if warm:
        forward.warmup(in_requests(4))
    serve(forward, 4, 4, 4)
    assert {4} == set(sizes)
    assert ({1: 1}, {1: True}) == (forward.snapshot().captures, forward.snapshot().live)
    assert (3 if warm else 2) == counts(forward)["graph"]
    assert {1} == {row.batch_size for row in forward.snapshot().rows}
    serve(forward, 8)
    assert ({1: 1}, 1) == (forward.snapshot().captures, counts(forward)["batch_too_large"])


def test_one_request_is_among_the_decode_buckets() -> None:
    """The step of a single request has its own bucket, not that of two (H44, vllm-project/vllm#30330)."""
    assert [4] == graphprobe.decode_buckets(max_seqs=1, spec_tokens=3)
    assert 4 == graphprobe.decode_buckets(max_seqs=8, spec_tokens=3)[0]


# -- H45: the list is taken as it was written ------------------------------------------------------------------------

WISH = [1, 2, 4, 8, 16, 24, 32, 40, 42]


@pytest.mark.parametrize("unit", ["rows", "tokens", "requests"])
def test_an_odd_maximum_is_kept(unit: str) -> None:
    """A wished maximum of 42 is 42 in every place that shows it, and its step replays (H45, vllm#37865)."""
    width = 7 if unit == "requests" else 1
    forward = recorded(double, buckets=WISH, unit=unit, tokens_per_request=width, name="decode")
    assert tuple(WISH) == forward.warmup(in_requests(width)).captured
    serve(forward, 42 * width)
    assert (Row(42, "graph", 42, None, 1, 0, "decode", "full"),) == forward.snapshot().rows
    assert tuple(WISH) == forward.snapshot().buckets == observe("engine", WISH).snapshot().buckets


def test_the_verify_step_of_all_requests_has_its_bucket() -> None:
    """Six requests with six draft tokens are 42 rows, which decode_buckets does not round (H45, vllm#37865)."""
    assert 42 == graphprobe.decode_buckets(max_seqs=6, spec_tokens=6)[-1]


@pytest.mark.parametrize(
    "wrong", [[*WISH, 42], [0, *WISH], [*WISH, 42.5], [*WISH, -1], [*WISH, True], [*WISH, 1 << 30]]
)
@pytest.mark.parametrize("take", [lambda b: recorded(double, buckets=b, name="decode"), lambda b: observe("engine", b)])
def test_a_list_that_would_have_to_change_is_refused(take: Any, wrong: list[Any]) -> None:
    """Nothing in the list is dropped or rounded in silence; only its order is free (H45, vllm-project/vllm#37865)."""
    with pytest.raises(ConfigError, match="bucket"):
        take(wrong)


def test_another_list_under_the_same_name_is_said_with_both(caplog: pytest.LogCaptureFixture) -> None:
    """Where the metrics keep the first list of a name the log shows from which and to which (H45, vllm#37865)."""
    recorded(double, buckets=[1, 2, 40], name="decode")
    forward = recorded(double, buckets=[1, 2, 42], name="decode")
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 == sum("[1, 2, 40]" in text and "[1, 2, 42]" in text for text in texts)
    forward.warmup(in_requests(1))
    serve(forward, 42)
    assert {"graph": 1} == counts(forward)


# -- H46: pad rows never reach the sampler ---------------------------------------------------------------------------


class Step(NamedTuple):
    tokens: torch.Tensor
    requests: torch.Tensor


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    last: torch.Tensor
    width: int = 2


def last(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 2, x.shape[1])[:, -1]


PADDED = [
    double,
    last,
    lambda x: (x * 2, last(x)),
    lambda x: [last(x), x + 1],
    lambda x: {"tokens": x * 2, "requests": last(x), "nested": [(x + 1, {"last": last(x).argmax(-1)})]},
    lambda x: Step(x * 2, last(x)),
    lambda x: Output(x * 2, last(x)),
    lambda x: ((x * 2).t(), x.view(-1, 2, 3), last(x).t().contiguous()),
    lambda x: torch.arange(x.shape[0]),
    lambda x: (x[:, :2], last(x)[:, None], None, 3, "n"),
]
"""Outputs with a row per token or a row per request, in every container."""

REFUSED = [
    lambda x: list(x.unbind(0)),
    lambda x: (x * 2, x.shape[0]),
    lambda x: (x * 2, x.shape[0] // 2),
    lambda x: {str(n): row for n, row in enumerate(x.unbind(0))},
    lambda x: (x * 2).flatten(),
    lambda x: (x * 2, [1] * x.shape[0]),
    lambda x: (x * 2, x.sum(0)),
    lambda x: x @ x.t(),
]
"""Outputs of which cutting rows would not make those of a smaller step."""


def flat(value: Any) -> list[Any]:
    """The leaves of a result, tensors as lists."""
    if isinstance(value, torch.Tensor):
        return [tuple(value.shape), *value.flatten().tolist()]
    if isinstance(value, dict):
        return [leaf for key in value for leaf in (key, *flat(value[key]))]
    if dataclasses.is_dataclass(value):
        return flat(vars(value))
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(leaf for item in value for leaf in flat(item))]
    return [value]


@pytest.mark.parametrize("outputs", ["clone", "alias"])
@pytest.mark.parametrize("pad", ["repeat", "zeros", {"x": 9}], ids=["repeat", "zeros", "dict"])
@pytest.mark.parametrize("buckets", [[4], [2, 4]], ids=str)
@pytest.mark.parametrize("step", PADDED, ids=range(len(PADDED)))
def test_each_output_is_cut_to_the_callers_rows(step: Any, buckets: list[int], pad: Any, outputs: str) -> None:
    """Three requests of two tokens in a bucket of four: six rows where there is one per token, three where there is
    one per request, never eight or four (H46, NVIDIA/TensorRT-LLM#5058).
    """

    def forward(x: torch.Tensor) -> Any:
        # A graph of views alone would be empty.
        return step(x * 1)

    graphed = recorded(
        forward, buckets=buckets, unit="requests", tokens_per_request=2, pad=pad, outputs=outputs, name="decode"
    )
    graphed.warmup(in_requests(2))
    for requests in (3, 3, 1, 4, 2, 3):
        x = rows(2 * requests)
        assert flat(step(x)) == flat(graphed(x))
    # With one bucket known the first padded call is the second observation.
    assert ({"graph": 6} if len(buckets) == 2 else {"warmup": 1, "graph": 5}) == counts(graphed)


@pytest.mark.parametrize("buckets", [[4], [2, 4], [1, 2, 4]], ids=str)
@pytest.mark.parametrize("warm", [True, False], ids=["warmup", "lazy"])
@pytest.mark.parametrize("step", REFUSED, ids=range(len(REFUSED)))
def test_an_output_that_cannot_be_cut_is_never_padded(step: Any, warm: bool, buckets: list[int]) -> None:
    """A list of rows, a number of rows, a sum over rows: padded steps stay eager and right, exact ones replay.

    (H46, NVIDIA/TensorRT-LLM#5058).
    """

    def forward(x: torch.Tensor) -> Any:
        # A graph of views alone would be empty.
        return step(x * 1)

    graphed = recorded(forward, buckets=buckets, unit="requests", tokens_per_request=2, pad="repeat", name="decode")
    if warm:
        graphed.warmup(in_requests(2))
    for requests in (4, 4, 3, 3, 1, 4, 2, 3, 4):
        x = rows(2 * requests)
        assert flat(step(x)) == flat(graphed(x))
    assert 2 <= counts(graphed)["graph"]
    assert 0 == graphed.snapshot().padding


@pytest.mark.parametrize("unit", ["requests", "tokens"])
def test_an_output_that_stops_growing_is_never_cut(unit: str) -> None:
    """Four rows of eight are no row per request where they were a row per token before (H46, TensorRT-LLM#5058)."""

    def clipped(x: torch.Tensor) -> torch.Tensor:
        return x[:4] * 2

    buckets = [1, 2, 4] if unit == "requests" else [2, 4, 8]
    forward = recorded(clipped, buckets=buckets, unit=unit, tokens_per_request=2, pad="repeat", name="decode")
    for n in (2, 2, 4, 4, 8, 8, 6, 6):
        x = rows(n)
        assert torch.equal(clipped(x), forward(x))


def test_an_argument_per_request_beside_tokens_never_mixes_them() -> None:
    """A length per request is padded by requests where the tokens are padded by rows, and cut likewise.

    (H46, NVIDIA/TensorRT-LLM#5058).
    """

    def step(x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * lengths.view(-1, 1).expand(-1, 2).reshape(-1, 1), lengths + 1

    forward = recorded(step, buckets=[2, 4], unit="requests", tokens_per_request=2, pad="repeat", name="decode")
    forward.warmup(lambda bucket: ((rows(2 * bucket), torch.randn(bucket)), {}))
    for requests in (4, 3, 2, 3, 1, 4):
        x, lengths = rows(2 * requests), torch.randn(requests)
        assert flat(step(x, lengths)) == flat(forward(x, lengths))
    assert {"graph": 6} == counts(forward)
