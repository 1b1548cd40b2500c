from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from graphprobe.operators import composed, draws, lasting, needs_host, writes_of
from graphprobe.watch import Watch

aten = torch.ops.aten


def test_indexing_by_numbers_needs_no_host() -> None:
    """An index tensor of integers has a known result shape; a mask has not."""
    x, ids = torch.ones(4), torch.tensor([0, 2])
    assert not needs_host(aten.index.Tensor, (x, [ids]), {}, "cpu")
    assert needs_host(aten.index.Tensor, (x, [x > 0]), {}, "cpu")
    with Watch([x, ids], torch.device("cpu")):
        x[ids]
        torch.where(ids > 0, ids, ids)


@pytest.mark.parametrize("classes", [(4, "cuda", False), (-1, "cuda", True), (4, "cpu", True)])
def test_a_number_of_classes_makes_a_shape_known(classes: tuple[int, str, bool]) -> None:
    """one_hot with it needs no host on a device; a CPU checks the range all the same."""
    number, device, expected = classes
    assert expected is needs_host(aten.one_hot.default, (torch.zeros(2, dtype=torch.long), number), {}, device)


@pytest.mark.parametrize(("training", "written"), [(True, 2), (False, 0)])
def test_statistics_are_written_in_training(training: bool, written: int) -> None:
    """A batch norm's schema does not say so, by position or by keyword."""
    x, mean, var = torch.ones(2, 3), torch.zeros(3), torch.ones(3)
    args = (x, None, None, mean, var, training, 0.1, 1e-5)
    assert written == len(list(writes_of(aten.native_batch_norm.default, args, {})))
    assert written == len(list(writes_of(aten.batch_norm.default, (*args, False), {})))
    named = {"running_mean": mean, "running_var": var, "training": training}
    assert written == len(list(writes_of(aten.batch_norm.default, (x, None, None), named)))


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (aten.rand_like.default, (torch.ones(1),), True),
        (aten.add.Tensor, (torch.ones(1), 1), False),
        (aten.native_dropout.default, (torch.ones(1), 0.5, True), True),
        (aten.native_dropout.default, (torch.ones(1), 0.5, False), False),
        (aten.native_dropout.default, (torch.ones(1), 0.0, True), False),
        (aten.scaled_dot_product_attention.default, (torch.ones(1), torch.ones(1), torch.ones(1)), False),
        (aten.scaled_dot_product_attention.default, (torch.ones(1), torch.ones(1), torch.ones(1), None, 0.1), True),
    ],
)
def test_what_draws_random_numbers(func: Any, args: tuple[Any, ...], expected: bool) -> None:
    """An operator that may draw does not with p=0, by default or as given, or outside training."""
    assert expected is draws(func, args, {})


def test_composed_operators_are_taken_apart() -> None:
    """In inference mode they reach a mode whole; what they write is seen all the same."""
    assert composed(aten.linear.default, "cpu") and not composed(aten.addmm.default, "cpu")
    x, mean, var = torch.ones(2, 3), torch.zeros(3), torch.ones(3)
    watch = Watch([x, mean, var], torch.device("cpu"))
    with torch.inference_mode(), watch:
        torch.nn.functional.batch_norm(x, mean, var, training=True)
    assert {1, 2} == watch.written


def test_a_file_that_is_merely_named_so_is_no_compiled_code(tmp_path: Path) -> None:
    """Only torch's own inductor and the files it writes count: a user's file may be called what it likes."""
    for folder, expected in {"my_inductor": False, "torchinductor_me": True}.items():
        file = tmp_path / folder / "model.py"
        file.parent.mkdir()
        file.write_text(
            "from graphprobe.operators import in_compiled_code\n\n\ndef call():\n    return in_compiled_code()\n"
        )
        assert expected is runpy.run_path(str(file))["call"]()


def test_the_seed_of_fused_attention_is_no_copy_to_the_host() -> None:
    """Memory-efficient attention gives its seed and offset back on the CPU; any other number there is a copy."""
    result = (torch.empty(2, 4, device="meta"), torch.zeros(3), torch.tensor(7), torch.tensor(8))
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert ["meta", "cpu"] == [t.device.type for t in lasting(attention, result)]
    assert 4 == len(list(lasting(torch.ops.aten.add.Tensor, result)))
