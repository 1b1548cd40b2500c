"""``graphprobe.account`` without a GPU: what it measures, what it says that it cannot, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphprobe.errors import ConfigError
from graphprobe.ledger import LEDGER
from graphprobe.tools.account import account, measure
from graphprobe.tools.balance import Account

MODEL = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
PARAMETERS = 4 * (64 * 64 + 64 + 64 * 8 + 8)


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.zeros(batch, 64),)


def test_on_a_cpu_the_hosts_part_is_measured_and_the_rest_is_said_to_be_missing() -> None:
    found = account(MODEL, rows(2))
    (step,) = found.steps
    assert (step.batch, step.kernels, step.graph, step.filled) == (2, None, None, None)
    assert step.eager is not None
    assert step.eager > 0
    assert step.host is None or 0 < step.host < step.eager
    assert step.bytes_read == PARAMETERS + 2 * 64 * 4
    assert found.weight_bytes == PARAMETERS
    assert (found.device, found.bandwidth) == ("cpu", None)
    text = str(found)
    assert "on cpu there are no launches, no graphs and no floor: only the host's part was measured" in " ".join(
        text.split()
    )
    assert "3 operators" in text


def test_sizes_are_measured_one_by_one_with_arguments_of_their_own() -> None:
    asked: list[int] = []

    def make(batch: int) -> torch.Tensor:
        asked.append(batch)
        return rows(batch)[0]

    found = account(MODEL, make, batches=[4, 1, 2])
    assert [1, 2, 4] == asked == [step.batch for step in found.steps]


def test_a_result_comes_back_from_its_json() -> None:
    found = account(MODEL, rows(2), name="mlp")
    assert found == Account.from_json(found.to_json())
    assert "mlp" == found.name


def test_nothing_is_counted_and_no_gradient_is_kept() -> None:
    """The runs are its own: no ledger has them."""
    before = LEDGER.snapshot()
    grown: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = MODEL(x)
        grown.append(y.requires_grad)
        return y

    account(forward, rows(1))
    assert before == LEDGER.snapshot()
    assert grown
    assert not any(grown)
    assert torch.is_grad_enabled()


def test_keywords_reach_the_forward() -> None:
    seen: set[float] = set()

    def forward(x: torch.Tensor, scale: float) -> torch.Tensor:
        seen.add(scale)
        return x * scale

    account(forward, rows(1), {"scale": 3.0})
    assert {3.0} == seen


def test_an_error_of_the_forward_is_its_own() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        account(broken, rows(1))


@pytest.mark.parametrize(
    ("fn", "args", "options", "says"),
    [
        (3, (), {}, "account needs a forward to call, got int"),
        (MODEL, (torch.tensor(1.0),), {}, "no argument is a tensor with a batch"),
        (MODEL, (torch.zeros(0, 64),), {}, "no argument is a tensor with a batch"),
        (MODEL, rows, {}, "batches does not say for which"),
        (MODEL, rows(1), {"batches": [1, 2]}, "several batches, and the arguments of one"),
        (MODEL, rows, {"batches": [0]}, "bucket"),
    ],
)
def test_what_cannot_be_measured_is_refused(fn: Any, args: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        account(fn, args, **options)


def test_a_forward_that_keeps_its_inputs_itself_is_one_of_batch_1_unless_told() -> None:
    x = rows(3)[0]
    (one,) = account(lambda: MODEL(x)).steps
    (three,) = account(lambda: MODEL(x), batches=[3]).steps
    assert [1, 3] == [one.batch, three.batch]
    assert one.bytes_read == PARAMETERS + 3 * 64 * 4


def test_timelines_need_a_gpu() -> None:
    assert {} == measure(MODEL, rows(1)).timelines
