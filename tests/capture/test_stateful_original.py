# SPDX-License-Identifier: Apache-2.0
"""Models that write to their own attributes: where no path answers, the original does if its state shows nowhere."""

import warnings

import pytest
import torch
from torch import nn

import blade
from blade.config import Config

pytestmark = pytest.mark.needs("torch_mlir", "runtime")
CONFIG = Config(optimization_pipeline="disc", timing=False, max_paths=1)


class RemembersLength(nn.Module):
    """As Funnel of transformers: the length of a call is kept, and overwritten by the next."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.length = nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[1]
        self.length = int(rows)
        places = torch.tensor([float(k) for k in (*range(rows),)])  # as many as in the trace
        return self.dense(x).relu() + places[:, None]


class AddsUp(RemembersLength):
    """Its answers depend on the calls before."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.mean((0, 1))
        return super().forward(x) + self.total


class Tracks(AddsUp):
    """Its answers do not show what it adds up, but its buffer does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.mean((0, 1))
        return RemembersLength.forward(self, x)


def optimized(model: nn.Module) -> tuple[torch.jit.ScriptModule, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast = blade.optimize(model.eval(), torch.randn(2, 5, 6), CONFIG)
    return fast, " ".join(str(one.message) for one in caught)


def test_a_state_that_no_answer_shows_leaves_other_calls_to_the_original() -> None:
    torch.manual_seed(0)
    model = RemembersLength()
    fast, told = optimized(model)
    assert "There the original model answers, in this process" in told
    for rows in (5, 7, 5, 3, 9):
        x = torch.randn(2, rows, 6)
        torch.testing.assert_close(fast(x), model(x))
    assert blade.stats(fast)["original"]["calls"] == 3


@pytest.mark.parametrize("make", [AddsUp, Tracks])
def test_a_state_that_shows_lets_other_calls_raise_and_the_warning_says_so(
    make: type[nn.Module],
) -> None:
    torch.manual_seed(0)
    fast, told = optimized(make())
    assert "There the call raises." in told and "original model answers" not in told
    with pytest.raises(RuntimeError, match="No captured path answers"):
        fast(torch.randn(2, 7, 6))
