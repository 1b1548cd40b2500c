from __future__ import annotations

from typing import Any

import pytest
import torch

from graphprobe.staging import Input, Staging, _together, fewest


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


def staged(*inputs: Input, rows: int = 4, tensors: Any = None) -> Staging:
    return Staging(inputs, tensors or [torch.zeros(2, 3) for _ in inputs], rows)


def filled(staging: Staging, rows: int, tensors: list[torch.Tensor]) -> None:
    staging.copier(rows, tensors)(tensors)


def test_a_buffer_has_the_rows_of_the_bucket() -> None:
    """Along the batch dimension a buffer has the bucket's rows, elsewhere the tensor's size, and its dtype."""
    x, w = torch.zeros(2, 3, dtype=torch.float16), torch.zeros(5, 2)
    staging = staged(Input("x", 0, 0), Input("w", 1, None), tensors=[x, w])
    assert [(4, 3), (5, 2)] == [tuple(b.shape) for b in staging.buffers]
    assert [torch.float16, torch.float32] == [b.dtype for b in staging.buffers]


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, 3).t(), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)]
)
def test_a_dense_layout_is_kept(tensor: torch.Tensor) -> None:
    """Kernels and output strides follow the layout of the input."""
    assert tensor.stride() == Input("x", 0, None).buffer(tensor, 4).stride()


def test_a_view_with_holes_is_staged_with_its_holes() -> None:
    """A forward may ask for the strides, and a kernel may follow them."""
    assert (6, 2) == Input("x", 0, 0).buffer(torch.zeros(2, 6)[:, ::2], 4).stride()


@pytest.mark.parametrize(
    "tensor", [torch.zeros(1, 3).expand(2, 3), torch.zeros(2, 4096)[:, 0], torch.zeros(2, 3).unfold(1, 2, 1)]
)
def test_a_view_that_would_share_or_waste_memory_is_staged_densely(tensor: torch.Tensor) -> None:
    """Rows that lie in one memory cannot be written one by one; a cache's column takes little room."""
    assert Input("x", 0, None).buffer(tensor, 4).is_contiguous()


def test_a_buffer_made_in_inference_mode_can_be_written_outside() -> None:
    """A bucket captured in inference mode serves calls in no_grad mode, too."""
    with torch.inference_mode():
        buffer = Input("x", 0, 0).buffer(torch.zeros(2, 3), 4)
    buffer.copy_(torch.ones(4, 3))
    assert not buffer.is_inference()


def test_copies() -> None:
    """Every tensor of a call reaches its own buffer, whatever dtype and however many of each."""
    tensors = [
        torch.randn(4, 3),
        torch.randint(9, (4,)),
        torch.randn(4, 1),
        torch.randn(2, 2),
        torch.randint(9, (4, 2)),
    ]
    inputs = [Input(f"x{i}", i, 0 if t.shape[0] == 4 else None) for i, t in enumerate(tensors)]
    staging = staged(*inputs, tensors=tensors)
    staging.copier(4, tensors)(tensors)
    assert [t.tolist() for t in tensors] == [b.tolist() for b in staging.buffers]


def test_the_split_copier_does_the_same() -> None:
    """The first copy and the rest, done apart, fill what the whole fills."""
    tensors = [torch.randn(4, 3), torch.randint(9, (4,)), torch.randint(9, (4,)), torch.ones(4, dtype=torch.bool)]
    staging = staged(*(Input(f"x{i}", i, 0) for i in range(4)), tensors=tensors)
    index, copy, buffer, more = staging.copier(4, tensors).split()
    assert index is not None
    assert more is not None
    copy(tensors[index])
    assert buffer is staging.buffers[index]
    more(tensors)
    assert [t.tolist() for t in tensors] == [b.tolist() for b in staging.buffers]


def test_one_tensor_leaves_no_rest() -> None:
    """With a single exact input the copy is all there is; with two of one dtype the launch covers both."""
    tensors = [torch.zeros(4, 3), torch.zeros(4, 3)]
    assert None is staged(Input("x", 0, 0)).copier(4, tensors[:1]).split()[3]
    index, copy, buffer, more = staged(Input("x", 0, 0), Input("y", 1, 0)).copier(4, tensors).split()
    assert (None, None, None, False) == (index, copy, buffer, more is None)


def test_the_buffer_itself_is_not_copied() -> None:
    """A caller that passes the static input (an aliased output, say) pays nothing and loses nothing."""
    staging = staged(Input("x", 0, 0))
    staging.buffers[0].fill_(7)
    filled(staging, 4, [staging.buffers[0]])
    assert 7.0 == float(staging.buffers[0].mean())


@pytest.mark.parametrize(("fill", "tail"), [("zeros", 0.0), ("repeat", 5.0), (9, 9.0), (-1.5, -1.5)])
def test_pad_rows(fill: Any, tail: float) -> None:
    """Rows above the caller's hold the fill, the caller's are untouched."""
    staging = staged(Input("x", 0, 0, fill))
    staging.buffers[0].fill_(77)
    staging.drifting = True
    filled(staging, 2, [torch.full((2, 3), 5.0)])
    assert [5.0, 5.0, tail, tail] == staging.buffers[0][:, 0].tolist()


def test_a_callable_fill() -> None:
    """It gets the pad rows of the buffer and the caller's tensor, and fills in place."""
    seen = []

    def fill(pad: torch.Tensor, source: torch.Tensor) -> None:
        seen.append((tuple(pad.shape), tuple(source.shape)))
        pad.copy_(source[:1].expand_as(pad) * 10)

    staging = staged(Input("x", 0, 0, fill), rows=5)
    filled(staging, 2, [torch.tensor([[1.0], [2.0]]).expand(2, 3)])
    assert [((3, 3), (2, 3))] == seen
    assert [1.0, 2.0, 10.0, 10.0, 10.0] == staging.buffers[0][:, 0].tolist()


def test_padding_along_another_dimension() -> None:
    """The batch dimension need not be the first."""
    staging = staged(Input("x", 0, 1, "repeat"), rows=3, tensors=[torch.zeros(2, 2)])
    filled(staging, 2, [torch.tensor([[1.0, 2.0], [3.0, 4.0]])])
    assert [[1, 2, 2], [3, 4, 4]] == staging.buffers[0].tolist()


@pytest.mark.parametrize("sizes", [(4, 2, 3, 1, 2, 4, 3), (1, 4, 1, 3, 2), (3, 3, 2, 2, 4, 1)])
def test_constant_pad_rows_are_right_in_any_order(sizes: tuple[int, ...]) -> None:
    """Rows that a larger batch left behind never show up below a smaller one."""
    staging = staged(Input("x", 0, 0, "zeros"), Input("y", 1, 0, 7))
    for n in sizes:
        x = torch.full((n, 3), float(n))
        filled(staging, n, [x, x])
        assert [float(n)] * n + [0.0] * (4 - n) == staging.buffers[0][:, 0].tolist()
        assert [float(n)] * n + [7.0] * (4 - n) == staging.buffers[1][:, 0].tolist()


def test_a_graph_that_writes_its_inputs_gets_fresh_pad_rows_each_time() -> None:
    """Where a forward changes a static input in place, constant rows are written at every call."""
    staging = staged(Input("x", 0, 0, "zeros"))
    staging.drifting = True
    copier = staging.copier(2, [torch.ones(2, 3)])
    for _ in range(2):
        copier([torch.ones(2, 3)])
        assert [1.0, 1.0, 0.0, 0.0] == staging.buffers[0][:, 0].tolist()
        staging.buffers[0].add_(1)


def test_narrow() -> None:
    """A tensor that is smaller than captured fills its part, and the rest holds the fill, at every call."""
    staging = staged(Input("t", 0, 0, None, (1, -1)), rows=2, tensors=[torch.zeros(2, 4)])
    for width in (4, 2, 3, 1):
        filled(staging, 2, [torch.full((2, width), float(width))])
        assert [[float(width)] * width + [-1.0] * (4 - width)] * 2 == staging.buffers[0].tolist()


def test_narrow_with_pad_rows() -> None:
    """Both rules hold at once: narrow columns and padded rows."""
    staging = staged(Input("t", 0, 0, 0, (1, -1)), rows=3, tensors=[torch.zeros(2, 4)])
    filled(staging, 2, [torch.ones(2, 2)])
    assert [[1, 1, -1, -1], [1, 1, -1, -1], [0, 0, 0, 0]] == staging.buffers[0].tolist()


def test_views() -> None:
    """The caller's part of each buffer is memory of the buffer; what does not follow the batch is whole."""
    staging = staged(Input("x", 0, 1), Input("w", 1, None), rows=4, tensors=[torch.zeros(3, 2), torch.zeros(5)])
    x, w = staging.views(2)
    assert [(3, 2), (5,)] == [tuple(x.shape), tuple(w.shape)]
    x.fill_(1)
    assert [1, 1, 0, 0] == staging.buffers[0][0].tolist()


def bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any bits, signalling NaNs among them."""
    size = torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


KINDS = [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.float64]


@pytest.mark.parametrize("first", KINDS, ids=str)
@pytest.mark.parametrize("second", KINDS, ids=str)
def test_copies_of_two_dtypes_in_one_launch_are_bit_equal(first: torch.dtype, second: torch.dtype) -> None:
    """A number that is seen as another one on the way is the same number at the end, a NaN with its payload."""
    sources = [bits(4, 3, dtype=first), bits(4, 5, dtype=second), bits(4, 7, dtype=second)]
    buffers = [torch.zeros_like(t) for t in sources]
    launches = fewest(list(enumerate(buffers)), sources)
    assert 1 == len(launches)
    for members in launches:
        _together(members)(sources)
    for source, buffer in zip(sources, buffers, strict=True):
        assert torch.equal(source.view(torch.uint8), buffer.view(torch.uint8))


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (torch.zeros(4, dtype=torch.int64)[:, None].expand(4, 6), "a row of one element"),
        (torch.zeros(4, 12, dtype=torch.int64)[:, ::2], "a row with holes"),
        (torch.zeros((), dtype=torch.int64), "no row"),
        (torch.zeros(4, 6, dtype=torch.complex64), "a complex number, whose layout may be conjugate"),
        (torch.zeros(1024, 64, dtype=torch.int64), "too many bytes to go in small pieces"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_seen_as_another_dtype_has_a_launch_of_its_own(odd: torch.Tensor, why: str) -> None:
    """And the others still share theirs."""
    sources = [torch.zeros(4, dtype=torch.int16), torch.zeros(4, dtype=torch.int32), odd]
    buffers = [torch.zeros(t.shape, dtype=t.dtype) for t in sources]
    launches = fewest(list(enumerate(buffers)), sources)
    assert [[0, 1], [2]] == sorted(sorted(index for index, _, _ in members) for members in launches)
    for members in launches:
        for index, buffer, kind in members:
            (buffer if kind is None else buffer.view(kind)).copy_(
                sources[index] if kind is None else sources[index].view(kind)
            )


def test_many_tensors_of_a_wider_dtype_keep_their_launch() -> None:
    """To see nine of them as another dtype would cost more than a launch."""
    sources = [
        *(torch.zeros(4, dtype=torch.int64) for _ in range(9)),
        *(torch.zeros(4, dtype=torch.int32) for _ in range(9)),
    ]
    assert [9, 9] == [len(members) for members in fewest(list(enumerate(sources)), sources)]


def test_what_is_handed_out_is_the_same_for_each_number_of_rows() -> None:
    """So that a caller may write into it and pass it, and nothing is copied."""
    staging = staged(Input("x", 0, 0), Input("y", 1, 0))
    views = staging.hand_out(2)
    assert [view is again for view, again in zip(views, staging.hand_out(2), strict=True)] == [True, True]
    for number, view in enumerate(views):
        view.fill_(number + 1)
    staging.buffers[1][2:] = 9
    filled(staging, 2, views)
    assert [[1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 9.0, 9.0]] == [b[:, 0].tolist() for b in staging.buffers]


def test_a_group_is_copied_where_one_of_its_tensors_is_not_the_buffer() -> None:
    """The others are copied onto themselves."""
    staging = staged(Input("x", 0, 0), Input("y", 1, 0))
    staging.buffers[0].fill_(3)
    filled(staging, 4, [staging.buffers[0], torch.full((4, 3), 5.0)])
    assert [3.0, 5.0] == [float(b.mean()) for b in staging.buffers]


def test_a_number_whose_sign_is_pending_is_copied_by_its_own_dtype() -> None:
    """As bits it would lose the sign."""
    pending = torch._neg_view(torch.ones(4, 3))
    sources = [torch.zeros(4, dtype=torch.int32), pending]
    assert [1, 1] == [
        len(members) for members in fewest([(0, torch.zeros(4, dtype=torch.int32)), (1, torch.zeros(4, 3))], sources)
    ]


def test_pad_rows_are_right_after_a_fill_that_raised() -> None:
    """A callable of the caller's that fails leaves no rows of an earlier call where constants belong."""

    def fails(pad: torch.Tensor, source: torch.Tensor) -> None:
        raise ValueError("theirs")

    staging = staged(Input("x", 0, 0, "zeros"), Input("y", 1, 0, fails))
    filled(staging, 4, [torch.ones(4, 3), torch.ones(4, 3)])
    with pytest.raises(ValueError, match="theirs"):
        filled(staging, 2, [torch.ones(2, 3), torch.ones(2, 3)])
    assert [1.0, 1.0, 0.0, 0.0] == staging.buffers[0][:, 0].tolist()
