"""Reports of group b: a graph that answers, and answers wrongly."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.helpers import causes, counts, recorded, rows

pytestmark = pytest.mark.usefixtures("own_forwards", "both_modes")


# -- H12, H18: Python state that the forward sets --------------------------------------------------------------------

Step = Callable[[Any, torch.Tensor], torch.Tensor]


def remembers(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last = x * 2
    return self.last + 1


def counts_up(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last += 1
    return x * 2 + self.last


def takes_turns(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last = "odd" if self.last == "even" else "even"
    return x * (2 if self.last == "odd" else 3)


def grows(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last = [*(self.last or ()), x.sum()]
    return x * len(self.last)


STEPS: dict[str, tuple[Step, Any]] = {
    "a tensor": (remembers, None),
    "a counter": (counts_up, 0),
    "a text": (takes_turns, "even"),
    "a list": (grows, None),
}


@dataclass
class Engine:
    last: Any
    step: Any = None


class Decorated:
    def __init__(self, last: Any) -> None:
        self.last = last


def owned(form: str, step: Step, start: Any) -> tuple[Any, Any, Any]:
    """(the captured forward, its controls, the object that the forward sets ``last`` on)."""
    if form in ("module", "class"):
        kind = type("Head", (torch.nn.Module,), {"forward": step})
        head = (recorded(buckets=[2])(kind) if form == "class" else kind)().eval()
        head.last = start
        graphed = head if form == "class" else recorded(head, buckets=[2])
        return graphed, graphed.forward, graphed
    if form == "method":
        graphed_step = recorded(buckets=[2])(step)
        holder = type("Decoder", (Decorated,), {step.__name__: graphed_step})(start)
        bound = getattr(holder, step.__name__)
        return bound, bound, holder
    engine = Engine(start)
    forward = recorded(step.__get__(engine), buckets=[2])
    return forward, forward, engine


@pytest.mark.parametrize("form", ["module", "class", "method", "bound"])
@pytest.mark.parametrize("kind", STEPS)
def test_a_forward_that_sets_an_attribute_stays_eager(form: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """An attribute that the forward rebinds at each call would stay behind under replay: no graph, and it is named.

    DESIGN's reason is ``signature`` (H12, pytorch/pytorch#114844; H18, huggingface/transformers#29221).
    """
    step, start = STEPS[kind]
    forward, controls, holder = owned(form, step, start)
    twin = Engine(start)
    with caplog.at_level(logging.INFO, logger="graphprobe"):
        for _ in range(8):
            x = rows(2)
            assert torch.equal(step(twin, x), forward(x))
            kept, expected = holder.last, twin.last
            assert torch.equal(expected, kept) if isinstance(expected, torch.Tensor) else str(expected) == str(kept)
    found = counts(controls)
    assert 0 == found.get("graph", 0)
    assert 5 <= found["signature"]
    assert "last" in causes(controls)
    assert any("last" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("place", ["submodule", "nested object", "dict", "list", "set of names"])
def test_state_below_the_module_is_never_left_behind(place: str) -> None:
    """What the forward keeps below its module is set at every call, or the call was eager (H12, pytorch#114844)."""

    class Keeps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Identity()
            self.box, self.table, self.items = Engine(None), {"last": None}, [None]
            self.seen: set[int] = set()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            if place == "submodule":
                self.inner.last = y
            elif place == "nested object":
                self.box.last = y
            elif place == "dict":
                self.table["last"] = y
            elif place == "list":
                self.items[0] = y
            else:
                self.seen.add(len(self.seen))
            return y + len(self.seen)

        def kept(self) -> Any:
            places = {"submodule": getattr(self.inner, "last", None), "nested object": self.box.last}
            return {**places, "dict": self.table["last"], "list": self.items[0]}.get(place)

    keeps = recorded(Keeps().eval(), buckets=[2])
    for call in range(1, 7):
        x = rows(2)
        if place == "set of names":
            assert torch.equal(x * 2 + call, keeps(x))
        else:
            assert torch.equal(x * 2, keeps(x))
            assert torch.equal(x * 2, keeps.kept())


@pytest.mark.parametrize("form", ["module", "bound"])
def test_an_attribute_set_once_is_no_state(form: str) -> None:
    """A forward that sets an attribute up at its first call, and then only reads it, is captured (H12, #114844)."""

    def lazy(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.last is None:
            self.last = torch.full((3,), 2.0)
        return x * self.last

    forward, controls, _ = owned(form, lazy, None)
    for _ in range(8):
        x = rows(2)
        assert torch.equal(x * 2, forward(x))
    assert 5 <= counts(controls)["graph"]


@pytest.mark.parametrize(
    ("form", "buffer"),
    [(form, False) for form in ("module", "class", "method", "bound")] + [("module", True), ("class", True)],
    ids=lambda value: {True: "buffer", False: "attribute"}.get(value, value),
)
def test_state_written_in_place_is_a_graph(form: str, buffer: bool) -> None:
    """``self.last += 1`` on a tensor writes in place, which a replay repeats: one step per call (H20, #7737)."""
    forward, controls, holder = owned(form, counts_up, None)
    start = torch.zeros(1)
    if buffer:
        del holder.last
        holder.register_buffer("last", start)
    else:
        holder.last = start
    for call in range(1, 9):
        x = rows(2)
        assert torch.equal(x * 2 + call, forward(x))
        assert call == holder.last.item()
    assert 6 <= counts(controls)["graph"]


POSITION = 0


def from_a_global(name: str) -> tuple[Any, Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        global POSITION
        POSITION += 1
        return x * 2 + POSITION

    return recorded(step, buckets=[2], verify=1, name=name), step


def from_a_closure(name: str) -> tuple[Any, Any]:
    position = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal position
        position += 1
        return x * 2 + position

    return recorded(step, buckets=[2], verify=1, name=name), step


def from_a_list(name: str) -> tuple[Any, Any]:
    position = [0]

    def step(x: torch.Tensor) -> torch.Tensor:
        position[0] += 1
        return x * 2 + position[0]

    return recorded(step, buckets=[2], verify=1, name=name), step


def from_an_iterator(name: str) -> tuple[Any, Any]:
    numbers = iter(range(1, 1000))

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + next(numbers)

    return recorded(step, buckets=[2], verify=1, name=name), step


@pytest.mark.parametrize("make", [from_a_global, from_a_closure, from_a_list, from_an_iterator])
def test_verify_finds_a_position_that_was_baked(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A counter that nothing can recognise is found by ``verify``, which gives eager's result and names the forward.

    It is found on the second replay at the latest; a compared call runs its host code again, so the counter itself
    moves on by more than one there (H18, huggingface/transformers#29221).
    """
    forward, _ = make("positions")
    x, seen = torch.zeros(2, 3), []
    with caplog.at_level(logging.ERROR, logger="graphprobe"):
        for _ in range(8):
            seen.append(forward(x)[0, 0].item())
    assert sorted(set(seen)) == seen, "a baked position would come up twice"
    assert {2: 1} == forward.snapshot().mismatches
    assert 4 <= counts(forward)["verify_failed"]
    assert any("positions" in record.getMessage() for record in caplog.records)


def test_a_position_passed_as_a_tensor_is_right() -> None:
    """The same counter as an argument is copied in at every call (H18, huggingface/transformers#29221)."""
    forward = recorded(lambda x, position: x * 2 + position, buckets=[2])
    for step in range(8):
        x, position = rows(2), torch.tensor(step)
        assert torch.equal(x * 2 + step, forward(x, position))
    assert {"graph": 7, "warmup": 1} == counts(forward)


# -- H13: results that a later call would overwrite ------------------------------------------------------------------

RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x * 2,
    "view": lambda x: (x * 2)[:, :2],
    "view of the input": lambda x: (x[:, 1:], x * 2),
    "input": lambda x: (x, x * 2),
    "tuple": lambda x: (x * 2, x + 1),
    "dict": lambda x: {"logits": x * 2, "hidden": [x + 1]},
    "same twice": lambda x: (x.mul(2),) * 2,
}


def flat(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value.tolist()]
    return [leaf for part in (value.values() if isinstance(value, dict) else value) for leaf in flat(part)]


@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize("pad", [None, "repeat"])
def test_an_older_result_survives_later_calls(kind: str, pad: Any) -> None:
    """Each result is the caller's own: later calls of the same or of another bucket leave it alone.

    (H13, meta-pytorch/gpt-fast#232)
    """
    plain = RESULTS[kind]
    forward = recorded(plain, buckets=[2, 4], pad=pad)
    forward.warmup(lambda bucket: ((rows(bucket),), {}))
    kept = []
    for n in (2, 2, 4, 2, 4, 4, 3, 1, 3, 2):
        x = rows(n)
        expected = flat(plain(x))
        kept.append((expected, forward(x)))
        assert all(flat(result) == values for values, result in kept)
    assert (10 if pad else 7) == counts(forward)["graph"]


def test_a_result_may_be_written_by_its_owner() -> None:
    """Writing into a result touches neither the graph nor another result (H13, meta-pytorch/gpt-fast#232)."""
    forward = recorded(lambda x: x * 2, buckets=[2])
    forward.warmup(lambda bucket: ((rows(bucket),), {}))
    x = rows(2)
    first = forward(x)
    first.zero_()
    assert torch.equal(x * 2, forward(x))


def test_alias_says_by_its_name_that_a_result_is_overwritten() -> None:
    """``outputs="alias"`` hands out the graph's memory: the next call changes the older result (H13, gpt-fast#232)."""
    forward = recorded(lambda x: x * 2, buckets=[2], outputs="alias")
    forward.warmup(lambda bucket: ((rows(bucket),), {}))
    a, b = rows(2), rows(2)
    first = forward(a)
    assert torch.equal(a * 2, first)
    assert torch.equal(b * 2, forward(b))
    assert torch.equal(b * 2, first)


def test_a_decode_loop_feeds_results_back() -> None:
    """A token that goes back in as the next input is what eager would feed (H13, meta-pytorch/gpt-fast#232)."""

    def step(token: torch.Tensor) -> torch.Tensor:
        return token * 2 - 1

    forward = recorded(step, buckets=[2])
    forward.warmup(lambda bucket: ((rows(bucket, 1),), {}))
    token = expected = rows(2, 1)
    history, wanted = [], []
    for _ in range(6):
        token, expected = forward(token), step(expected)
        history.append(token)
        wanted.append(expected)
    assert torch.equal(torch.stack(wanted), torch.stack(history))


# -- H15: pad rows that write ----------------------------------------------------------------------------------------

SLOTS, SCRATCH = 6, 5


def assign(cache: torch.Tensor, idx: torch.Tensor, val: torch.Tensor) -> None:
    cache[idx] = val


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "assignment": assign,
    "index_copy": lambda cache, idx, val: cache.index_copy_(0, idx, val),
    "index_put": lambda cache, idx, val: cache.index_put_((idx,), val),
    "index_add": lambda cache, idx, val: cache.index_add_(0, idx, val),
    "scatter": lambda cache, idx, val: cache.scatter_(0, idx[:, None].expand_as(val), val),
    "view": lambda cache, idx, val: cache.view(SLOTS, 1, 3)[:, 0].index_copy_(0, idx, val),
}


def caching(write: str, where: str) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """(a plain forward of (val, idx) or of (val, idx, cache), its cache, the keywords that tell where that is)."""
    cache = torch.zeros(SLOTS, 3)

    def put(val: torch.Tensor, idx: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        WRITES[write](cache, idx, val)
        return val * 2

    if where == "closure":
        return lambda val, idx: put(val, idx, cache), cache, {}
    return put, cache, {"static": ("cache",)} if where == "static" else {}


@pytest.mark.parametrize("where", ["closure", "static", "argument"])
@pytest.mark.parametrize("write", WRITES)
def test_pad_rows_write_into_the_scratch_slot_alone(write: str, where: str) -> None:
    """Three rows in a bucket of four leave every slot but their own and the scratch one bit-equal.

    (H15, vllm-project/vllm#43810)
    """
    plain, cache, options = caching(write, where)
    forward = recorded(plain, buckets=[2, 4], pad={"val": 0, "idx": SCRATCH}, name=f"{write} {where}", **options)
    rest = () if where == "closure" else (cache,)
    forward.warmup(lambda bucket: ((torch.zeros(bucket, 3), torch.full((bucket,), SCRATCH), *rest), {}))
    cache.copy_(rows(SLOTS))
    for slots in ([0, 1, 2], [4, 2, 0], [3], [1, 3, 4]):
        before, val, idx = cache.clone(), rows(len(slots)), torch.tensor(slots)
        expected = before.clone()
        WRITES[write](expected, idx, val)
        assert torch.equal(val * 2, forward(val, idx, *rest))
        assert torch.equal(expected[:SCRATCH], cache[:SCRATCH])
    assert 4 == counts(forward)["graph"]


@pytest.mark.parametrize("where", ["closure", "static", "argument"])
@pytest.mark.parametrize("pad", ["zeros", "repeat"])
@pytest.mark.parametrize("write", ["assignment", "index_add", "scatter"])
def test_one_word_never_writes_into_slot_zero(write: str, pad: str, where: str) -> None:
    """Zeros as slots would be slot 0: a forward that writes a cache is not padded by one word, so such calls are eager.

    The case asks for a documented default; DESIGN refuses it instead (H15, vllm-project/vllm#43810).
    """
    plain, cache, options = caching(write, where)
    forward = recorded(plain, buckets=[2, 4], pad=pad, name=f"{write} {pad} {where}", **options)
    rest = () if where == "closure" else (cache,)
    forward.warmup(lambda bucket: ((torch.zeros(bucket, 3), torch.full((bucket,), SCRATCH), *rest), {}))
    cache.copy_(rows(SLOTS))
    for slots in ([1, 2, 3], [4, 2, 3], [3], [1, 3]):
        val, idx = rows(len(slots)), torch.tensor(slots)
        expected = cache.clone()
        WRITES[write](expected, idx, val)
        assert torch.equal(val * 2, forward(val, idx, *rest))
        assert torch.equal(expected, cache)
    assert {"graph": 1, "no_exact_bucket": 3} == counts(forward)


def test_a_scratch_slot_in_a_context() -> None:
    """Slots that the engine keeps outside the arguments have their pad value, too (H15, vllm-project/vllm#43810)."""
    cache, steps = torch.zeros(SLOTS, 3), Engine(None)

    def put(val: torch.Tensor) -> torch.Tensor:
        cache[steps.last] = val
        return val * 2

    pad = {"val": 0, "context.last": SCRATCH}
    forward = recorded(put, buckets=[2, 4], pad=pad, context=lambda: steps)

    def make_inputs(bucket: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        steps.last = torch.full((bucket,), SCRATCH)
        return (torch.zeros(bucket, 3),), {}

    forward.warmup(make_inputs)
    for slots in ([0, 1, 2], [4, 2, 0]):
        expected, val = cache.clone(), rows(3)
        steps.last = torch.tensor(slots)
        expected[steps.last] = val
        assert torch.equal(val * 2, forward(val))
        assert torch.equal(expected[:SCRATCH], cache[:SCRATCH])
    assert {"graph": 2} == counts(forward)


# -- H16: tables of another width ------------------------------------------------------------------------------------


def looked_up(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Reads every column of the table: a stale one changes the sum."""
    return x + (table + 1).sum(1, keepdim=True)


@pytest.mark.parametrize("pad", [None, {"x": 0, "table": -1}])
def test_a_narrower_table_leaves_no_old_column(pad: Any) -> None:
    """The columns beyond a narrower table hold the fill value, not those of an earlier call.

    (H16, GeeeekExplorer/nano-vllm#190)
    """
    forward = recorded(looked_up, buckets=[2, 4], narrow={"table": (1, -1)}, pad=pad)
    forward.warmup(lambda bucket: ((rows(bucket, 1), torch.zeros(bucket, 4, dtype=torch.long)), {}))
    # Narrow calls wait for one eager call that shows that the outputs do not follow the width.
    forward(rows(2, 1), torch.zeros(2, 3, dtype=torch.long))
    for n, width in (
        (2, 4),
        (2, 3),
        (2, 1),
        (2, 4),
        (2, 2),
        (4, 4),
        (4, 3),
        (3 if pad else 2, 2),
        (1 if pad else 4, 4),
    ):
        x, table = rows(n, 1), torch.randint(0, 9, (n, width))
        assert torch.equal(looked_up(x, table), forward(x, table))
    assert {"graph": 9, "warmup": 1} == counts(forward)


def test_a_wider_table_is_eager_and_named() -> None:
    """A table one column wider than captured runs eagerly; the cause names it (H16, GeeeekExplorer/nano-vllm#190)."""
    forward = recorded(looked_up, buckets=[2], narrow={"table": (1, -1)})
    forward.warmup(lambda bucket: ((rows(bucket, 1), torch.zeros(bucket, 4, dtype=torch.long)), {}))
    for width in (5, 4, 5, 17):
        x, table = rows(2, 1), torch.randint(0, 9, (2, width))
        assert torch.equal(looked_up(x, table), forward(x, table))
    assert {"graph": 1, "signature": 3} == counts(forward)
    assert "table" in causes(forward)


@pytest.mark.parametrize("width", [3, 5])
def test_another_width_without_a_rule_is_another_call(width: int) -> None:
    """Where nothing is said of the width, neither a narrower nor a wider table meets the captured graph.

    (H16, GeeeekExplorer/nano-vllm#190)
    """
    forward = recorded(looked_up, buckets=[2])
    forward.warmup(lambda bucket: ((rows(bucket, 1), torch.zeros(bucket, 4, dtype=torch.long)), {}))
    for _ in range(3):
        x, table = rows(2, 1), torch.randint(0, 9, (2, width))
        assert torch.equal(looked_up(x, table), forward(x, table))
    assert {"signature": 3} == counts(forward)


def test_a_narrower_table_in_a_context() -> None:
    """The table of a context object is cleared like an argument (H16, GeeeekExplorer/nano-vllm#190)."""
    steps = Engine(None)
    forward = recorded(
        lambda x: looked_up(x, steps.last), buckets=[2], context=lambda: steps, narrow={"context.last": (1, -1)}
    )
    for width in (4, 4, 3, 3, 2, 4, 1):
        x, steps.last = rows(2, 1), torch.randint(0, 9, (2, width))
        assert torch.equal(looked_up(x, steps.last), forward(x))
    assert 4 <= counts(forward)["graph"]


# -- H17: Python values among the arguments --------------------------------------------------------------------------


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


@dataclass
class Limits:
    limit: int


def cut(x: torch.Tensor, limit: Any) -> torch.Tensor:
    return x[:, :limit].sum(1)


@pytest.mark.parametrize("closed", [False, True], ids=["lazy", "warmed up"])
@pytest.mark.parametrize("spelling", ["positional", "keyword", "list", "dict", "dataclass", "text"])
def test_another_number_never_meets_a_graph(spelling: str, closed: bool) -> None:
    """A number that was baked into the launches belongs to its graph: another number gets its own, or runs eagerly.

    (H17, huggingface/transformers#45323)
    """

    def plain(x: torch.Tensor, limit: Any) -> torch.Tensor:
        if spelling in ("list", "dict"):
            return cut(x, limit["n" if spelling == "dict" else 0])
        return cut(x, limit.limit if spelling == "dataclass" else int(limit))

    def call(limit: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        wrapped: Any = {"list": [limit], "dict": {"n": limit}, "dataclass": Limits(limit), "text": str(limit)}
        value = wrapped.get(spelling, limit)
        return ((rows(2, 6),), {"limit": value}) if spelling == "keyword" else ((rows(2, 6), value), {})

    forward = recorded(plain, buckets=[2], name=f"{spelling} {closed}")
    if closed:
        forward.warmup(lambda bucket: call(4))
    for limit in (4, 4, 4, 2, 4, 2, 2, 4, 3):
        args, kwargs = call(limit)
        assert torch.equal(plain(*args, **kwargs), forward(*args, **kwargs))
    wanted = {"graph": 5, "signature": 4} if closed else {"graph": 6, "warmup": 3}
    assert wanted == counts(forward)


ALIKE: list[tuple[Any, Any]] = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    (2, 2 + 0j),
    ("1", 1),
    (None, 0),
    (Side.LEFT, Side.RIGHT),
    (slice(0, 2), slice(0, 3)),
    (float("inf"), float("nan")),
    (torch.float32, torch.float64),
    (torch.Size([1]), (1,)),
    (b"a", "a"),
    (range(2), range(3)),
]


@pytest.mark.parametrize("values", ALIKE, ids=repr)
def test_values_that_look_alike_have_graphs_of_their_own(values: tuple[Any, Any]) -> None:
    """Values that compare equal, or print alike, and mean another launch do not share a graph (H17, #45323)."""

    def plain(x: torch.Tensor, value: Any) -> torch.Tensor:
        same = type(value) is type(values[0]) and repr(value) == repr(values[0])
        return x * (2 if same else 3)

    forward = recorded(plain, buckets=[2], name=repr(values))
    for value in 3 * values:
        x = rows(2)
        assert torch.equal(plain(x, value), forward(x, value))
    assert {"graph": 4, "warmup": 2} == counts(forward)


def test_a_number_that_is_read_from_a_tensor_is_never_baked() -> None:
    """A length that the forward reads back from a tensor keeps such calls eager (H17, transformers#45323)."""
    forward = recorded(lambda x, lengths: cut(x, int(lengths.max())), buckets=[2])
    for limit in (4, 4, 2, 3, 4):
        x, lengths = rows(2, 6), torch.tensor([1, limit])
        assert torch.equal(cut(x, limit), forward(x, lengths))
    assert 0 == counts(forward).get("graph", 0)


def test_a_number_of_an_object_is_followed_or_the_call_is_eager() -> None:
    """An argument of a kind that graphs cannot look into runs eagerly with its name (H17, transformers#45323)."""

    class Settings:
        limit = 4

    settings = Settings()
    forward = recorded(lambda x, settings: cut(x, settings.limit), buckets=[2])
    for limit in (4, 4, 4, 2, 3):
        settings.limit = limit
        x = rows(2, 6)
        assert torch.equal(cut(x, limit), forward(x, settings))
    assert {"signature": 5} == counts(forward)
    assert "settings" in causes(forward)


# -- H20: inputs that the forward writes -----------------------------------------------------------------------------


def advance(lens: torch.Tensor) -> torch.Tensor:
    lens += 1
    return lens


def advance_a_view(lens: torch.Tensor) -> torch.Tensor:
    lens[:1].add_(1)
    lens[1:].add_(1)
    return lens * 1


@pytest.mark.parametrize("pad", [None, "zeros"])
@pytest.mark.parametrize("plain", [advance, advance_a_view])
@pytest.mark.parametrize("outputs", ["clone", "alias"])
def test_lengths_do_not_creep(plain: Any, pad: Any, outputs: str) -> None:
    """An input that the forward increments is copied in afresh: 5 gives 6, at every call.

    The case wants the caller's tensor untouched; DESIGN's exact equality with eager means that it is incremented
    once, as eager does (H20, NVIDIA/TensorRT-LLM#7737).
    """
    forward = recorded(plain, buckets=[2, 4], pad=pad, outputs=outputs)
    forward.warmup(lambda bucket: ((torch.zeros(bucket),), {}))
    for n in (2, 4, 2, 2, 4, 3 if pad else 2, 2, 1 if pad else 4):
        lens = torch.full((n,), 5.0)
        assert [6.0] * n == forward(lens).tolist()
        assert [6.0] * n == lens.tolist()
    assert {"graph": 8} == counts(forward)


def test_a_callers_tensor_moves_once_per_call() -> None:
    """The same tensor passed again and again counts one step per call, through warm-up, capture and replay.

    (H20, NVIDIA/TensorRT-LLM#7737)
    """
    forward, lens = recorded(advance, buckets=[2]), torch.zeros(2)
    for call in range(1, 8):
        assert [call, call] == forward(lens).tolist()
        assert [call, call] == lens.tolist()
    assert {"graph": 6, "warmup": 1} == counts(forward)


def test_declared_lengths_are_put_back_after_warm_up() -> None:
    """Lengths that warm-up moves are restored where ``state=`` names them, then move once per call (H20, #7737)."""
    lens = torch.full((2,), 5.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        lens.add_(1)
        return x + lens[:, None]

    forward = recorded(step, buckets=[2], state=[lens])
    forward.warmup(lambda bucket: ((rows(bucket),), {}))
    assert [5.0, 5.0] == lens.tolist()
    for call in (6, 7, 8):
        x = rows(2)
        assert torch.equal(x + call, forward(x))
        assert [call, call] == lens.tolist()
    assert {"graph": 3} == counts(forward)


# -- H21: views, strides ---------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(4, 4),
    "transposed": lambda: torch.randn(4, 4).t(),
    "every second column": lambda: torch.randn(4, 8)[:, ::2],
    "every second row": lambda: torch.randn(8, 4)[::2],
    "offset": lambda: torch.randn(6, 4)[2:],
    "one row repeated": lambda: torch.randn(1, 4).expand(4, 4),
    "one column repeated": lambda: torch.randn(4, 1).expand(4, 4),
    "windows": lambda: torch.randn(7).unfold(0, 4, 1),
    "diagonal": lambda: torch.randn(4, 4, 4).diagonal(0, 1, 2),
    "flipped": lambda: torch.randn(4, 4).flip(1),
    "real part": lambda: torch.randn(4, 4, dtype=torch.complex64).real,
    "negated imaginary part": lambda: torch.randn(4, 4, dtype=torch.complex64).conj().imag,
}


def attend(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(1) + x.sum(1, keepdim=True)


@pytest.mark.parametrize("closed", [False, True], ids=["lazy", "warmed up"])
def test_a_view_gives_what_eager_gives(closed: bool) -> None:
    """Values are staged, not raw memory: another stride never changes a result, by graph or eagerly.

    (H21, vllm-project/vllm#20426)
    """
    forward = recorded(attend, buckets=[4])
    if closed:
        forward.warmup(lambda bucket: ((torch.zeros(bucket, 4),), {}))
    for _ in range(4):
        for name, make in VIEWS.items():
            x = make()
            # A view with holes is staged contiguously, where a kernel may round differently.
            torch.testing.assert_close(forward(x), attend(x), msg=name)
    assert 4 <= counts(forward)["graph"]


@pytest.mark.parametrize("view", VIEWS)
def test_equal_rows_stay_equal(view: str) -> None:
    """A batch of equal rows gives equal rows, whatever memory it lies in (H21, vllm-project/vllm#20426)."""
    forward = recorded(attend, buckets=[4])
    for _ in range(4):
        x = VIEWS[view]()
        x = x[:1].expand(4, 4) if view.startswith("one") else x.clone(memory_format=torch.preserve_format)
        x.copy_(x[:1].clone().expand(4, 4)) if x.stride(0) else None
        result = forward(x)
        assert torch.equal(result, result[:1].expand(4, 4))
        torch.testing.assert_close(result, attend(x))


@pytest.mark.parametrize("view", VIEWS)
def test_a_forward_that_asks_for_the_strides_gets_the_callers(view: str) -> None:
    """A branch on the layout takes eager's side: the static input is laid out as the argument.

    Rows that share memory cannot be written one by one: there ``verify=`` finds it (H21, vllm-project/vllm#20426).
    """

    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if x.is_contiguous() else 3) + x.stride(0)

    shared = view in ("one row repeated", "one column repeated", "windows")
    forward = recorded(branch, buckets=[4], verify=int(shared))
    for _ in range(4):
        for x in (VIEWS[view](), torch.randn(4, 4)):
            assert torch.equal(branch(x), forward(x))


@pytest.mark.parametrize("n", [1, 3, 4])
def test_padded_views(n: int) -> None:
    """A view is padded and cut like a contiguous batch (H21, vllm-project/vllm#20426)."""
    forward = recorded(attend, buckets=[2, 4], pad="repeat")
    forward.warmup(lambda bucket: ((torch.zeros(bucket, 4),), {}))
    for view in (torch.randn(n, 8)[:, ::2], torch.randn(2 * n, 4)[::2], torch.randn(4, n).t(), torch.randn(n, 4)):
        for _ in range(2):
            torch.testing.assert_close(forward(view), attend(view))
    assert 1 <= counts(forward)["graph"]


def test_arguments_that_are_views_of_one_memory() -> None:
    """Queries and values cut from one tensor are staged apart, with their own values (H21, vllm-project/vllm#20426)."""
    forward = recorded(lambda q, k, v: q * k + v, buckets=[2])
    for _ in range(4):
        q, k, v = rows(2, 9).split(3, dim=1)
        assert torch.equal(q * k + v, forward(q, k, v))
        packed = rows(2, 9)
        assert torch.equal(packed[:, ::3] + 1, forward(packed[:, ::3], torch.ones(2, 3), torch.ones(2, 3)))
    assert 5 <= counts(forward)["graph"]
