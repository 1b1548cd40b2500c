"""Hazards of capturing an arbitrary forward that no other test shows; docs/hazards.md has the whole list."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from graphprobe import captures
from graphprobe.dispatch import EAGER, Decision
from graphprobe.graphed import capture
from graphprobe.ledger import Ledger
from graphprobe.options import Options
from graphprobe.reasons import FallbackReason
from graphprobe.sampling import Sampler
from graphprobe.timers import EventTimer
from graphprobe.verify import Verifier
from graphprobe.watch import CHECK
from tests.helpers import counts, recorded, rows

pytestmark = pytest.mark.usefixtures("own_forwards")

Forward = Callable[..., Any]


@pytest.fixture(autouse=True, params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
def mode(request: pytest.FixtureRequest) -> Iterator[Any]:
    torch.manual_seed(0)
    with request.param():
        yield request.param


def causes(forward: Any) -> str:
    return "\n".join(forward.snapshot().causes.values())


def same(forward: Any, plain: Forward, *sizes: int, width: int = 3) -> bool:
    """Whether calls of these sizes give what ``plain`` gives."""
    return all(torch.equal(plain(x), forward(x)) for x in (rows(n, width) for n in sizes))


def outside_inference(make: Callable[[], Any]) -> Any:
    """What ``make`` makes, with normal tensors in it."""
    with torch.inference_mode(False), torch.no_grad():
        return make()


# -- results (4) ---------------------------------------------------------------------------------------------------


class Box:
    """A result of a kind that nobody can look into."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


def test_a_result_that_cannot_be_taken_apart_keeps_the_call_eager() -> None:
    """An object of a class of the engine's own would be one call's for ever: eager, and the cause names its class."""
    forward = recorded(lambda x: Box(x * 2), buckets=[2], name="box")
    for _ in range(4):
        x = rows(2)
        assert torch.equal(x * 2, forward(x).y)
    assert {"warmup": 1, "capture_failed": 3} == counts(forward)
    assert "Box" in causes(forward)


# -- the host (11, 12, 13) -----------------------------------------------------------------------------------------


def lengths(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] > 0).long() + 1


HOST: dict[str, Forward] = {
    "item": lambda x: x * x.sum().item(),
    "float": lambda x: x * float(x.sum()),
    "branch": lambda x: x * 2 if x.sum() > 0 else x * 3,
    "tolist": lambda x: x * sum(x.flatten().tolist()),
    "numpy": lambda x: x * float(x.numpy().sum()),
    "format": lambda x: x * float(f"{x.sum():.3f}"),
    "slice": lambda x: x[: lengths(x)[0]] + 1,
    "nonzero": lambda x: x.nonzero() + 1,
    "where": lambda x: torch.where(x > 0)[0] + 1,
    "argwhere": lambda x: torch.argwhere(x > 0) + 1,
    "mask": lambda x: x[x > 0] + 1,
    "unique": lambda x: torch.unique(x > 0),
    "bincount": lambda x: torch.bincount(lengths(x)),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, lengths(x), 0),
    "narrow": lambda x: torch.narrow(x, 0, lengths(x)[0] - 1, 1) + 1,
    "tensor_split": lambda x: torch.tensor_split(x, lengths(x)[:1])[0] + 1,
    "tensor of a list": lambda x: torch.tensor([x.sum(), 1.0])[:, None] * x,
    "packed sequence": lambda x: torch.nn.utils.rnn.pack_padded_sequence(x, lengths(x), True, False).data + 1,
    "one_hot": lambda x: functional.one_hot(lengths(x)),
}


@pytest.mark.parametrize("name", HOST)
def test_a_forward_that_needs_a_value_on_the_host_is_no_graph(name: str) -> None:
    """However it is spelt: a number, or a shape, that depends on data keeps the forward eager, and eager's results."""
    forward = recorded(HOST[name], buckets=[2], name=name)
    for _ in range(8):
        x = rows(2)
        expected, actual = HOST[name](x), forward(x)
        assert expected.shape == actual.shape and torch.equal(expected, actual)
    assert {"warmup": 1, "capture_failed": 7} == counts(forward)


def flexible(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    q = x[None, None]
    result: torch.Tensor = flex_attention(q, q, q)[0, 0]
    return result


NESTED: dict[str, Forward] = {
    "flex_attention": flexible,
    "cond": lambda x: torch.cond(x.sum() > 0, lambda z: z * 2, lambda z: z * 3, (x,)),
    "map": lambda x: torch._higher_order_ops.map(lambda row: row * 2, x),
    "while_loop": lambda x: torch._higher_order_ops.while_loop(
        lambda i, z: i < 3, lambda i, z: (i + 1, z * 2), (torch.tensor(0), x)
    )[1],
}


@pytest.mark.parametrize("name", NESTED)
def test_an_operator_of_operators_never_breaks_a_call(name: str) -> None:
    """Attention with a function in it, a branch or a loop on the device: by graph or eagerly, eager's result."""
    forward = recorded(NESTED[name], buckets=[4], name=name)
    assert same(forward, NESTED[name], 4, 4, 4, 4, width=16)
    assert 4 == sum(counts(forward).values())


def seeding(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x + torch.randn(3)


def forking(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return x + torch.randn(3)


@pytest.mark.parametrize("forward", [seeding, forking])
def test_a_forward_that_seeds_is_no_graph(forward: Forward) -> None:
    """Eager draws the same numbers at each call, so a replay must not go on drawing."""
    graphed = recorded(forward, buckets=[2], name=forward.__name__)
    assert same(graphed, forward, 2, 2, 2, 2)
    assert "graph" not in counts(graphed)


def test_a_constant_that_the_forward_makes_is_part_of_the_graph() -> None:
    """Numbers that Python turns into a tensor at each call are the same at each call."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0])

    forward = recorded(scaled, buckets=[2], name="constant")
    assert same(forward, scaled, 2, 2, 2)
    assert {"warmup": 1, "graph": 2} == counts(forward)


def counter() -> Forward:
    steps = [0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        steps[0] += 1
        return x * steps[0]

    return forward


def branching() -> Forward:
    return lambda x: x * (2 if captures.capturing() else 3)


@pytest.mark.parametrize("make", [counter, branching], ids=["a counter of its own", "am I capturing"])
def test_what_only_python_knows_is_found_by_verification(make: Callable[[], Forward]) -> None:
    """A forward that counts its calls, or takes another path inside a capture: the compared call is eager's."""
    forward = recorded(make(), buckets=[2], name="verified", verify=1)
    x = torch.ones(2, 1)
    results = [forward(x)[0, 0].item() for _ in range(5)]
    assert {"warmup": 1, "verify_failed": 4} == counts(forward)
    assert {2: 1} == forward.snapshot().mismatches
    assert results == sorted(results)


def test_a_capture_does_not_look_like_tracing_or_compiling() -> None:
    """Code that asks whether it is compiled, scripted or traced takes eager's path inside a capture."""
    seen = set()

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.add((torch.compiler.is_compiling(), torch.jit.is_tracing(), torch.jit.is_scripting()))
        return x * (2 if torch.compiler.is_compiling() or torch.jit.is_tracing() else 3)

    graphed = recorded(forward, buckets=[2], name="asked")
    assert same(graphed, forward, 2, 2, 2)
    assert {"warmup": 1, "graph": 2} == counts(graphed)
    assert {(False, False, False)} == seen


# -- verification is on where it may be (12) -----------------------------------------------------------------------


def attention(x: torch.Tensor) -> torch.Tensor:
    q = x[None, None]
    return functional.scaled_dot_product_attention(q, q, q)[0, 0]


QUIET: dict[str, Forward] = {
    "attention": attention,
    "dropout off": lambda x: functional.dropout(x, 0.5, training=False) * 2,
    "dropout of nothing": lambda x: functional.dropout(x, 0.0, training=True) * 2,
    "rrelu off": lambda x: functional.rrelu(x, training=False),
}


@pytest.mark.parametrize("name", QUIET)
def test_attention_is_verified(name: str) -> None:
    """A forward that could draw random numbers, and draws none, is compared as any other."""
    baked = [0]

    def drifting(x: torch.Tensor) -> torch.Tensor:
        baked[0] += 1
        return QUIET[name](x) * baked[0]

    forward = recorded(drifting, buckets=[2], name=name, verify=1)
    for _ in range(4):
        forward(rows(2))
    assert "verify_failed" in counts(forward)
    assert "verify/off" not in forward.snapshot().causes


# -- training and batch statistics (9, 17) -------------------------------------------------------------------------


class Noisy(torch.nn.Module):
    """A layer that training mode changes."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y * 2


@pytest.mark.parametrize("layer", [torch.nn.Dropout(0.9), torch.nn.BatchNorm1d(3)], ids=["Dropout", "BatchNorm"])
def test_a_layer_that_goes_into_training_mode_is_noticed_within_the_check(layer: torch.nn.Module) -> None:
    """The module stays in eval mode, one layer does not: after 64 calls at most the graph gives way to a new one."""
    module = Noisy(outside_inference(lambda: copy.deepcopy(layer))).eval()
    recorded(module, buckets=[2], name=f"layer {type(layer).__name__}")
    x = torch.ones(2, 3)
    for _ in range(3):
        module(x)
    module.layer.train()
    for _ in range(2 * CHECK):
        module(x)
    assert 1 == counts(module.forward)["static_moved"]
    assert "training" in causes(module.forward)


def batch_norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(x, mean, var, training=True)


def batch_norm_by_name(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return torch.batch_norm(
        x, None, None, running_mean=mean, running_var=var, training=True, momentum=0.1, eps=1e-5, cudnn_enabled=False
    )


def instance_norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    wide = torch.cat([x, 2 * x, x * x]).view(3, -1, 3).permute(1, 2, 0)
    return functional.instance_norm(wide, mean, var, use_input_stats=True)


@pytest.mark.parametrize("norm", [batch_norm, batch_norm_by_name, instance_norm])
def test_running_statistics_move_once_per_call_and_never_with_pad_rows(norm: Forward) -> None:
    """Statistics of the batch are written outside, whatever the operator's schema says: no padding, no second run."""
    stats = outside_inference(lambda: (torch.zeros(3), torch.ones(3)))
    mine = outside_inference(lambda: copy.deepcopy(stats))
    forward = recorded(lambda x: norm(x, *mine), buckets=[2, 4], pad="repeat", name=norm.__name__)
    for n in (2, 2, 4, 4, 3, 2, 4, 3):
        x = rows(n)
        torch.testing.assert_close(forward(x), norm(x, *stats))
        torch.testing.assert_close(mine, stats)
    assert {"warmup": 2, "graph": 4, "no_exact_bucket": 2} == counts(forward)
    assert "pad/writes" in forward.snapshot().causes


def test_batch_norm_in_eval_mode_is_padded() -> None:
    """Running statistics that are only read are weights."""
    norm = outside_inference(lambda: torch.nn.BatchNorm1d(3)).eval()
    module = Noisy(norm).eval()
    plain = copy.deepcopy(module)
    recorded(module, buckets=[2, 4], pad="repeat", name="eval norm")
    assert same(module, plain, 2, 2, 4, 4, 3, 1)
    assert {"warmup": 2, "graph": 4} == counts(module.forward)


# -- pad rows (16) -------------------------------------------------------------------------------------------------

EXPERTS = 4


def routed(weights: torch.Tensor, router: torch.Tensor, x: torch.Tensor, *, capacity: int) -> torch.Tensor:
    """A mixture of experts that drops what an expert has no room for, latest rows first."""
    chosen = (x @ router).argmax(-1)
    taken = (chosen[:, None] == torch.arange(EXPERTS)).long()
    place = (taken.flip(0).cumsum(0).flip(0) - 1).gather(1, chosen[:, None])
    return torch.bmm(x[:, None], weights[chosen])[:, 0] * (place < capacity)


def test_pad_rows_that_take_the_place_of_rows_are_found_by_verification() -> None:
    """Repeated rows fill an expert and real ones are dropped: nothing shows it but a comparison with eager."""
    weights, router = torch.randn(EXPERTS, 3, 3), torch.randn(3, EXPERTS)
    expert = functools.partial(routed, weights, router, capacity=1)
    forward = recorded(lambda x: expert(x), buckets=[4], pad="repeat", name="experts", verify=1)
    forward(rows(4)), forward(rows(3)), forward(rows(4))
    x = rows(1)
    assert torch.equal(expert(x), forward(x))
    assert {4: 1} == forward.snapshot().mismatches
    assert 1 == counts(forward)["verify_failed"]


def test_a_count_of_tokens_per_expert_is_never_padded_by_one_word() -> None:
    """An output that does not follow the batch may have pad rows in it: such calls stay eager, the cause names it."""
    router = torch.randn(3, EXPERTS)

    def load(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = (x @ router).argmax(-1)
        return x * 2, (chosen[:, None] == torch.arange(EXPERTS)).sum(0)

    forward = recorded(load, buckets=[4, 8], pad="repeat", name="load")
    for n in (4, 8, 4, 8, 3, 5):
        x = rows(n)
        assert torch.equal(load(x)[1], forward(x)[1])
    assert {"warmup": 2, "graph": 2, "no_exact_bucket": 2} == counts(forward)
    assert "output[1]" in causes(forward)


# -- models and caches of transformers (4, 14, 18, 19) -------------------------------------------------------------


@pytest.fixture
def decoder() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    return outside_inference(lambda: transformers.AutoModelForCausalLM.from_config(config).eval())


def static_cache(decoder: Any, batch: int) -> Any:
    import transformers

    def made() -> Any:
        cache = transformers.StaticCache(config=decoder.config, max_cache_len=16)
        cache.early_initialization(batch_size=batch, num_heads=1, head_dim=8, dtype=torch.float32, device="cpu")
        return cache

    return outside_inference(made)


def decode(decoder: Any, cache: Any, batch: int, steps: int = 6, **more: Any) -> torch.Tensor:
    """The tokens of greedy decoding. The cache is an argument by name."""
    ids, tokens = torch.arange(batch)[:, None], []
    for _ in range(steps):
        result = decoder(input_ids=ids, past_key_values=cache, use_cache=True, **more)
        assert result.past_key_values is cache
        ids = result.logits[:, -1:].argmax(-1)
        tokens.append(ids)
    return torch.cat(tokens, 1)


BY_REFERENCE: dict[str, Any] = {"static": ("past_key_values",)}


def test_a_static_cache_passed_by_reference_gives_eagers_tokens(decoder: Any) -> None:
    """Token for token, twice over after a reset; the result is a ModelOutput that holds the caller's own cache."""
    expected = decode(decoder, static_cache(decoder, 4), 4)
    recorded(decoder, buckets=[4], name="static cache", **BY_REFERENCE)
    cache = static_cache(decoder, 4)
    assert torch.equal(expected, decode(decoder, cache, 4))
    cache.reset()
    assert torch.equal(expected, decode(decoder, cache, 4))
    assert {"warmup": 1, "graph": 11} == counts(decoder.forward)


def test_a_static_cache_is_bound_to_its_batch(decoder: Any) -> None:
    """A cache of four rows is never padded into; a call with three raises what eager raises, and is not counted."""
    expected = decode(decoder, static_cache(decoder, 3), 3)
    recorded(decoder, buckets=[3, 4], pad="repeat", name="bound", **BY_REFERENCE)
    cache = static_cache(decoder, 4)
    decode(decoder, cache, 4)
    before = counts(decoder.forward)
    with pytest.raises(RuntimeError, match="index_copy_"):
        decode(decoder, cache, 3, steps=1)
    assert before == counts(decoder.forward)
    assert torch.equal(expected, decode(decoder, static_cache(decoder, 3), 3))
    assert {3: 1, 4: 1} == decoder.forward.snapshot().captures


def test_a_position_that_the_model_ignores_is_ignored_by_the_graph(decoder: Any) -> None:
    """``cache_position`` is swallowed by the model, which counts for itself: the graph does as eager does."""
    position = torch.tensor([7])
    expected = decode(decoder, static_cache(decoder, 4), 4, cache_position=position)
    recorded(decoder, buckets=[4], name="position", **BY_REFERENCE)
    assert torch.equal(expected, decode(decoder, static_cache(decoder, 4), 4, cache_position=position))
    assert {"warmup": 1, "graph": 5} == counts(decoder.forward)


@pytest.mark.parametrize("declared", [True, False], ids=["state=", "without"])
def test_warm_up_moves_the_position_of_a_cache_unless_it_is_state(decoder: Any, declared: bool) -> None:
    """Warm-up runs the forward once per bucket; what is named as state is put back, what is not has moved by one."""
    cache = static_cache(decoder, 4)
    position = [layer.cumulative_length for layer in cache.layers]
    recorded(decoder, buckets=[4], name="moved", state=position if declared else None, **BY_REFERENCE)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    inputs = {"input_ids": ids, "past_key_values": cache, "use_cache": True}
    report = decoder.forward.warmup(lambda _: ((), inputs), progress=False)
    assert (4,) == report.captured
    assert [0 if declared else 1] * 2 == [int(p) for p in position]
    decoder(**inputs)
    assert [1 if declared else 2] * 2 == [int(p) for p in position]
    assert {"graph": 1} == counts(decoder.forward)


@pytest.mark.parametrize("static", [(), ("past_key_values",)], ids=["an argument", "by reference"])
def test_a_cache_that_grows_is_no_graph(decoder: Any, static: tuple[str, ...]) -> None:
    """A DynamicCache replaces its tensors at each step: eager, with eager's tokens."""
    transformers = pytest.importorskip("transformers")
    expected = decode(decoder, transformers.DynamicCache(config=decoder.config), 4)
    recorded(decoder, buckets=[4], static=static, name="grows")
    assert torch.equal(expected, decode(decoder, transformers.DynamicCache(config=decoder.config), 4))
    assert "graph" not in counts(decoder.forward)


# -- timing (22) ---------------------------------------------------------------------------------------------------


class Event:
    """Notes the thread that asks for it."""

    asked: list[int]

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        Event.asked.append(threading.get_ident())
        return True

    def elapsed_time(self, later: Event) -> int:
        return 1


def test_no_other_thread_asks_for_an_event(ledger: Ledger) -> None:
    """A query from another thread can end a capture: a reader's snapshot leaves pending samples to the server's."""
    Event.asked = []
    options, entry = Options([2], timing=1), ledger.forward("f")
    sampler = Sampler(options, entry, Verifier(options, entry, lambda *_: None))

    class Device:
        def timer(self) -> EventTimer:
            return EventTimer(Event, lambda: 0, 2)

        def capturing(self) -> bool:
            return False

    device: Any = Device()
    sampler.use(device)
    sampled = sampler.sampled(Decision(EAGER, reason=FallbackReason.NO_EXACT_BUCKET), "decode", None)
    sampled(["time"], lambda *_: 0, (None, (), {}, (), [0]))
    reader = threading.Thread(target=sampler.harvest)
    reader.start()
    reader.join()
    assert [] == Event.asked
    sampler.harvest()
    assert {threading.get_ident()} == set(Event.asked)


# -- autocast (24) -------------------------------------------------------------------------------------------------


def test_no_cast_of_a_weight_is_frozen() -> None:
    """autocast keeps casts of trainable weights: a graph made inside the block casts anew, and leaves none behind."""
    linear = outside_inference(lambda: torch.nn.Linear(3, 3))
    forward = recorded(lambda x: linear(x), buckets=[2], name="autocast")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear(rows(2))
        for _ in range(3):
            forward(rows(2))
    with torch.inference_mode(False), torch.no_grad():
        linear.weight.mul_(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = rows(2)
        assert torch.equal(forward(x), linear(x))
    assert {"warmup": 1, "graph": 3} == counts(forward)


# -- torch.compile inside a capture (25, 26) -----------------------------------------------------------------------


@pytest.fixture
def compiled() -> Iterator[tuple[Any, Any, list[int]]]:
    """A module, the same compiled, and the batch sizes at which the compiled code ran."""
    torch._dynamo.reset()
    ran: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(next(len(a) for a in reversed(args) if a.dim() == 2))
            return graph.forward(*args)

        return run

    module = outside_inference(lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.GELU()).eval())
    yield module, torch.compile(module, dynamic=False, backend=backend), ran
    torch._dynamo.reset()


def test_compiled_code_stays_compiled(compiled: Any) -> None:
    """A capture leaves the caller's compiled function as it was: other sizes still run, and are compiled, as before."""
    module, fast, ran = compiled
    fast(rows(3))
    forward = recorded(lambda x: fast(x), buckets=[4], name="stays")
    for _ in range(3):
        x = rows(4)
        torch.testing.assert_close(forward(x), module(x))
    assert {"warmup": 1, "graph": 2} == counts(forward)
    ran.clear()
    fast(rows(3)), fast(rows(5))
    assert [3, 5] == ran


def test_a_size_that_is_compiled_at_its_capture(compiled: Any) -> None:
    """The eager run had three rows, the graph has four, for which there is no code yet: right results all the same."""
    module, fast, _ = compiled
    forward = recorded(lambda x: fast(x), buckets=[4, 8], pad="repeat", name="recompiled")
    for n in (3, 3, 5, 5, 3, 4, 8, 2):
        x = rows(n)
        torch.testing.assert_close(forward(x), module(x))
    assert 8 == sum(counts(forward).values())
    assert {4: 1, 8: 1} == forward.snapshot().captures


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
@pytest.mark.parametrize("how", ["default", "reduce-overhead"])
def test_inductors_code_inside_a_capture(how: str) -> None:
    """On a CPU ``reduce-overhead`` is plain inductor: captured, and equal within the rounding of fused kernels."""
    torch._dynamo.reset()
    module = outside_inference(lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.GELU()).eval())
    fast = torch.compile(module, mode=how)
    forward = recorded(lambda x: fast(x), buckets=[2, 4], name=f"inductor {how}")
    for n in (2, 2, 4, 4, 2, 4):
        x = rows(n)
        torch.testing.assert_close(forward(x), module(x))
    assert {"warmup": 2, "graph": 4} == counts(forward)
    torch._dynamo.reset()


def test_a_captured_forward_inside_compiled_code_is_eager() -> None:
    """Compiled code takes the forward apart: the inner one is counted as switched off and never replays."""
    torch._dynamo.reset()
    inner = recorded(lambda x: x * 2, buckets=[2], name="inner")
    outer = torch.compile(lambda x: inner(x) + 1, backend="eager")
    for _ in range(4):
        x = rows(2)
        assert torch.equal(outer(x), x * 2 + 1)
    assert set(counts(inner)) <= {"disabled"}
    torch._dynamo.reset()


# -- weights that are sharded, offloaded, or elsewhere (23, 28, 29, 41) --------------------------------------------


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Any]:
    """torch.distributed with this process alone, as a mesh."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    if not distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def test_ranks_that_have_not_agreed_capture_at_warm_up_only(ranks: Any) -> None:
    """With torch.distributed initialised traffic captures nothing; warm-up, which all ranks run, does."""
    forward = recorded(lambda x: x * 2, buckets=[2], name="ranks")
    assert same(forward, lambda x: x * 2, 2, 2, 2)
    assert {"distributed": 3} == counts(forward)
    assert (2,) == forward.warmup(lambda n: ((rows(n),), {}), progress=False).captured
    assert same(forward, lambda x: x * 2, 2, 2, 2)
    assert {"distributed": 3, "graph": 3} == counts(forward)


@pytest.mark.parametrize("agree", [lambda n: n, None], ids=["agree=", "lazy=True"])
def test_ranks_that_agree_capture_in_traffic(ranks: Any, agree: Any) -> None:
    """``agree=``, or ``lazy=True``, says that all ranks come by the same way."""
    forward = recorded(lambda x: x * 2, buckets=[2], name="agreed", agree=agree, lazy=agree is None or None)
    assert same(forward, lambda x: x * 2, 2, 2, 2)
    assert {"warmup": 1, "graph": 2} == counts(forward)


def test_a_dtensor_is_no_input_of_a_graph(ranks: Any) -> None:
    """An argument that is spread over ranks cannot be staged: eager with ``signature``."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    spread = outside_inference(lambda: distribute_tensor(torch.ones(2, 3), ranks, [Replicate()]))
    forward = recorded(lambda x, y: x * 2 + y.to_local(), buckets=[2], name="spread", lazy=True)
    for _ in range(3):
        assert torch.equal(torch.full((2, 3), 3.0), forward(torch.ones(2, 3), spread))
    assert {"signature": 3} == counts(forward)
    assert "DTensor" in causes(forward)


class Sharded(torch.nn.Module):
    """A layer whose weight is a DTensor, as in tensor parallelism."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        from torch.distributed.tensor import Shard, distribute_tensor

        self.mesh = mesh
        self.weight = torch.nn.Parameter(distribute_tensor(torch.randn(3, 3), mesh, [Shard(0)]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        return (DTensor.from_local(x, self.mesh, [Replicate()], run_check=False) @ self.weight).full_tensor()


def test_sharded_weights_give_eagers_results(ranks: Any, mode: Any) -> None:
    """Weights that are DTensors: updated in place or replaced, every call gives what eager gives."""
    if mode is torch.inference_mode:
        pytest.skip("torch refuses this forward in inference mode")
    module = outside_inference(lambda: Sharded(ranks)).eval()
    recorded(module, buckets=[2], name="sharded", lazy=True)
    for step in range(8):
        x = rows(2)
        torch.testing.assert_close(module(x), x @ module.weight.to_local())
        if step == 3:
            module.weight = Sharded(ranks).weight
        module.weight.to_local().mul_(1.5)


@pytest.mark.parametrize("layers", [True, False], ids=["each layer", "the model alone"])
@pytest.mark.parametrize("instance", [True, False], ids=["instance", "function"])
def test_fully_sharded_weights_are_no_graph(ranks: Any, mode: Any, layers: bool, instance: bool) -> None:
    """FSDP gives weights memory for the time of a call only, so a replay would read what was given back."""
    from torch.distributed.fsdp import fully_shard

    if mode is torch.inference_mode:
        pytest.skip("torch refuses FSDP with one rank in inference mode")
    plain = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).eval().requires_grad_(False)
    module = copy.deepcopy(plain)
    for layer in module if layers else ():
        fully_shard(layer, mesh=ranks)
    fully_shard(module, mesh=ranks)
    name = f"fsdp {layers} {instance}"
    forward: Any = recorded(module if instance else lambda x: module(x), buckets=[2], name=name, lazy=True)
    for _ in range(4):
        assert same(forward, plain, 2, 2)
        module.reshard()
    # A model that is sharded as one keeps its weights between calls, and its freed memory is noticed in time.
    assert layers or instance or "weights_moved" in counts(forward)
    assert not (layers or instance) or "graph" not in counts(forward.forward if instance else forward)


def test_a_forward_that_frees_what_it_reads_is_no_graph() -> None:
    """A weight that gets memory for the time of a call is read where it is at each call."""
    kept = outside_inference(lambda: torch.randn(3))
    weight = outside_inference(lambda: kept.clone())
    size = weight.untyped_storage().nbytes()

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight.untyped_storage().resize_(size)
        with torch.inference_mode(False):
            weight.copy_(kept)
        y = x * weight
        weight.untyped_storage().resize_(0)
        return y

    graphed = recorded(forward, buckets=[2], name="freed")
    for _ in range(5):
        x = rows(2)
        assert torch.equal(x * kept, graphed(x))
    assert {"warmup": 1, "capture_failed": 4} == counts(graphed)


def test_a_forward_that_gives_its_weight_other_memory_is_right() -> None:
    """``.data =`` inside the forward, from a tensor that is updated in place meanwhile: eager's results."""
    kept = outside_inference(lambda: torch.randn(3))
    weight = outside_inference(lambda: kept.clone())

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight.data = kept * 2
        return x * weight

    graphed = recorded(forward, buckets=[2], name="data")
    for _ in range(5):
        x = rows(2)
        assert torch.equal(x * (kept * 2), graphed(x))
        with torch.inference_mode(False):
            kept.add_(1)


def test_offloaded_weights_are_no_graph() -> None:
    """accelerate fetches each weight for its call and drops it afterwards: eager, with eager's results."""
    accelerate = pytest.importorskip("accelerate")
    plain = outside_inference(lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).eval())
    module = copy.deepcopy(plain)
    accelerate.cpu_offload(module, execution_device="cpu")
    forward = recorded(lambda x: module(x), buckets=[2], name="offloaded")
    assert same(forward, plain, 2, 2, 2, 2)
    assert "graph" not in counts(forward)


# -- hooks (38) ----------------------------------------------------------------------------------------------------


def test_hooks_below_the_forward_are_named_where_a_graph_passes_them_by() -> None:
    """A hook on a layer runs in eager calls and not in replays: said once, with the layer's name."""
    module = Noisy(outside_inference(lambda: torch.nn.Linear(3, 3))).eval()
    ran: list[int] = []
    module.layer.register_forward_hook(lambda *_: ran.append(1))
    recorded(module, buckets=[2], name="hooked")
    for _ in range(5):
        module(rows(2))
    assert {"warmup": 1, "graph": 4} == counts(module.forward)
    assert 2 == len(ran)
    assert "layer" in module.forward.snapshot().causes["hooks"]


# -- on a GPU only (25, 41, 44) ------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@needs_gpu
def test_a_graph_of_inductor_inside_a_capture_is_refused() -> None:
    """Nested graphs: ``reduce-overhead`` inside a capture cannot be captured; calls are eager and right."""
    torch._dynamo.reset()
    module = outside_inference(lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda().eval())
    fast = torch.compile(module, mode="reduce-overhead")
    forward = capture(lambda x: fast(x), buckets=[4], name="nested")
    for _ in range(6):
        x = torch.randn(4, 64, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(forward(x), module(x), atol=1e-3, rtol=1e-3)
    assert {"warmup": 1, "capture_failed": 5} == counts(forward)


@needs_gpu
def test_a_capture_empties_no_cache() -> None:
    """Memory that the allocator keeps for others is still kept afterwards: no slow allocations in traffic."""
    big = torch.empty(1 << 26, device="cuda")
    del big
    kept = torch.cuda.memory_reserved()
    forward = capture(lambda x: x * 2, buckets=[2], name="kept")
    for _ in range(3):
        forward(torch.randn(2, 3, device="cuda"))
    assert {"warmup": 1, "graph": 2} == counts(forward)
    assert torch.cuda.memory_reserved() >= kept


ALLOCATOR = """
import torch
from graphprobe.graphed import capture
f = capture(lambda x: (x * 2 + 1).relu(), buckets=[2], name="f")
with torch.inference_mode():
    for _ in range(4):
        x = torch.randn(2, 3, device="cuda")
        assert torch.equal(f(x), (x * 2 + 1).relu())
print(sorted({row.path for row in f.snapshot().rows}))
"""


@needs_gpu
@pytest.mark.parametrize(
    ("variable", "paths"),
    [("PYTORCH_NO_CUDA_MEMORY_CACHING=1", "['eager']"), ("PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync", "")],
)
def test_another_allocator_gives_eagers_results(variable: str, paths: str) -> None:
    """Without the caching allocator a capture would end the process: eager. Another one serves as well as it can."""
    name, value = variable.split("=", 1)
    environment = {**os.environ, name: value}
    run = subprocess.run([sys.executable, "-c", ALLOCATOR], capture_output=True, text=True, env=environment)
    assert 0 == run.returncode, run.stderr[-2000:]
    assert paths in run.stdout
