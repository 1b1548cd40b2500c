"""``graphprobe.account`` without a GPU: what it measures, what it says that it cannot, and what it refuses."""

from __future__ import annotations

import dataclasses
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
    text = " ".join(str(found).split())
    assert "on cpu there are no launches, no graphs and no floor: the step and the host's part are measured" in text
    assert "operators the host" in text


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


def test_tensors_are_found_in_lists_dicts_and_dataclasses() -> None:
    @dataclasses.dataclass
    class Inputs:
        ids: torch.Tensor

    x = rows(5)[0]
    for given in (({"ids": x},), ([x],), (Inputs(x),), {"ids": x}):
        fn = lambda one: MODEL(x)  # noqa: E731
        assert [5] == [step.batch for step in account(fn, given).steps]


def test_a_list_of_arguments_is_one_argument_each() -> None:
    """As a function that makes inputs may return them."""
    (step,) = account(torch.add, [torch.ones(3), torch.ones(3)]).steps
    assert (step.batch, step.bytes_read) == (3, 24)


def test_a_forward_that_has_not_run_when_it_returns_is_refused() -> None:
    async def later(x: torch.Tensor) -> torch.Tensor:
        return x

    def some(x: torch.Tensor) -> Any:
        yield x

    for unfinished in (later, some):
        with pytest.raises(ConfigError, match="has not run when it returns"):
            account(unfinished, rows(1))


def test_the_callers_random_numbers_and_profiler_go_on() -> None:
    """Dropout draws some thousand times in between; a second profiler would end the first."""
    dropout = torch.nn.Dropout()
    torch.manual_seed(0)
    want = [torch.rand(1), torch.rand(1)]
    torch.manual_seed(0)
    have = [torch.rand(1)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        torch.ones(3).cumsum(0)
        (step,) = account(dropout, rows(1)).steps
    have.append(torch.rand(1))
    assert want == have
    assert (step.host, "the host is not known" in step.notes[0]) == (None, True)
    assert any(event.key == "aten::cumsum" for event in theirs.key_averages())


def test_an_operator_that_cannot_be_looked_at_is_no_error() -> None:
    """torch.cond is an operator of operators; what it reads is not known then."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        return y

    (step,) = account(forward, rows(1)).steps
    assert step.eager is not None
    assert step.bytes_read is None
