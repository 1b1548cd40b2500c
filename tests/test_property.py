from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphprobe.graphed import capture
from graphprobe.snapshot import ForwardSnapshot

torch.set_num_threads(1)
names = (f"property {n}" for n in itertools.count())
bounded = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

BUCKETS = st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True)
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


def forward(x: torch.Tensor, y: torch.Tensor, scale: float = 1.0, *, shift: Any = None) -> Any:
    """Row by row, so that padding cannot change a row: [batch, width] in, a dict of [batch, width] and [batch] out."""
    z = x * scale + y.to(x.dtype)[:, None]
    if shift is not None:
        z = z + shift
    return {"z": z, "first": [z[:, 0]], "scale": scale}


CALL = st.fixed_dictionaries(
    {
        "n": st.integers(0, 7),
        "width": st.sampled_from([1, 3]),
        "dtype": st.sampled_from([torch.float32, torch.float64]),
        "scale": st.sampled_from([1.0, 2.0, 1, True, -0.0]),
        "shift": st.sampled_from([None, 0, 3]),
        "spelling": st.sampled_from(["positional", "mixed", "keywords", "default"]),
        "strided": st.booleans(),
        "mode": st.sampled_from(list(MODES)),
    }
)


def tensors(call: dict[str, Any], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-8, 9, (call["n"], 2 * call["width"]), generator=generator).to(call["dtype"])
    x = wide[:, ::2] if call["strided"] else wide[:, : call["width"]].contiguous()
    return x, torch.randint(0, 9, (call["n"],), generator=generator)


def spelled(call: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    scale, more = call["scale"], {} if call["shift"] is None else {"shift": call["shift"]}
    return {
        "positional": ((x, y, scale), more),
        "mixed": ((x,), {"scale": scale, "y": y, **more}),
        "keywords": ((), {**more, "scale": scale, "y": y, "x": x}),
        "default": ((x, y), more),
    }[call["spelling"]]


def check_books(snapshot: ForwardSnapshot, calls: int) -> None:
    """The sums that always hold."""
    assert calls == snapshot.graph_calls + snapshot.eager_calls == sum(row.calls for row in snapshot.rows)
    counted = sum(row.calls for row in snapshot.rows if row.reason is not None and row.reason.counted)
    total = snapshot.graph_calls + counted
    assert snapshot.hit_rate == (snapshot.graph_calls / total if total else None)
    for row in snapshot.rows:
        assert (row.path == "graph") == (row.reason is None) == (row.bucket is not None)
        assert row.bucket is None or row.bucket in snapshot.buckets
        assert row.padding == (0 if row.bucket is None else row.calls * (row.bucket - row.batch_size))
    assert snapshot.graph_calls == 0 or sum(snapshot.captures.values()) > 0


@bounded
@given(
    BUCKETS,
    st.sampled_from([None, "zeros", "repeat", {"x": 3, "y": "repeat"}]),
    st.integers(0, 2),
    st.sampled_from(["clone", "alias"]),
    st.lists(CALL, min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=40),
)
def test_any_sequence_of_calls_equals_eager(
    buckets: list[int], pad: Any, eager_first: int, outputs: str, pool: list[dict[str, Any]], order: list[int]
) -> None:
    """Whatever sizes, dtypes, spellings, numbers, layouts and modes come in whatever order: eager's result, and the
    books balance after every sequence."""
    graphed = capture(
        forward,
        buckets=buckets,
        pad=pad,
        eager_first=eager_first,
        outputs=outputs,
        backend="recorder",
        name=next(names),
    )
    for seed, index in enumerate(order):
        call = pool[index % len(pool)]
        args, kwargs = spelled(call, *tensors(call, seed))
        with MODES[call["mode"]]():
            expected, actual = forward(*args, **kwargs), graphed(*args, **kwargs)
        assert (expected["z"].dtype, expected["z"].shape) == (actual["z"].dtype, actual["z"].shape)
        assert torch.equal(expected["z"], actual["z"])
        assert torch.equal(expected["first"][0], actual["first"][0])
        assert (type(expected["scale"]), expected["scale"]) == (type(actual["scale"]), actual["scale"])
    check_books(graphed.snapshot(), len(order))


@bounded
@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.booleans(), st.booleans())
def test_state_moves_as_in_eager(sizes: list[int], padded: bool, timed: bool) -> None:
    """A cache and a random stream after any sequence of sizes are those of eager."""

    def make() -> tuple[torch.Tensor, Any]:
        cache = torch.zeros(6, 2)

        def step(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            cache.index_add_(0, slots, x)
            return x + cache[slots] + torch.rand(2)

        return cache, step

    cache, step = make()
    other, plain = make()
    graphed = capture(
        step, buckets=[1, 2, 4], pad={"x": 0, "slots": 5} if padded else None, timing=int(timed), backend="recorder",
        name=next(names),
    )  # fmt: skip
    with torch.no_grad():
        for seed, n in enumerate(sizes):
            x, slots = torch.arange(2.0 * n).reshape(n, 2), torch.arange(n) % 5
            torch.manual_seed(seed)
            expected, after = plain(x, slots), torch.rand(1)
            torch.manual_seed(seed)
            assert torch.equal(expected, graphed(x, slots))
            assert torch.equal(after, torch.rand(1))
            assert torch.equal(other[:5], cache[:5])
    check_books(graphed.snapshot(), len(sizes))


@contextlib.contextmanager
def changed(graphed: Any, what: str) -> Iterator[None]:
    if what == "disabled":
        graphed.enabled = False
    elif what == "reset":
        graphed.reset()
    elif what == "warmup":
        graphed.warmup(lambda n: ((torch.ones(n, 2),), {}))
    yield
    graphed.enabled = True


@bounded
@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from(["call"] * 6 + ["disabled", "reset", "warmup", "replace"])),
        max_size=40,
    )
)
def test_any_sequence_of_control_equals_eager(steps: list[tuple[int, str]]) -> None:
    """Warm-up, reset, switching off and replaced tensors, between calls in any order, change no result and no sum."""
    holder = {"w": torch.ones(2)}

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * holder["w"]

    graphed = capture(step, buckets=[1, 2, 4], pad="zeros", backend="recorder", name=next(names))
    with torch.no_grad():
        for i, (n, what) in enumerate(steps):
            if what == "replace":
                holder["w"] = torch.full((2,), float(i))
            with changed(graphed, what):
                x = torch.arange(2.0 * n).reshape(n, 2)
                assert torch.equal(x * holder["w"], graphed(x))
    check_books(graphed.snapshot(), len(steps))
