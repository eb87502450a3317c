# SPDX-License-Identifier: Apache-2.0
"""A batch norm in training writes what it keeps, which no schema of torch's says."""

import pytest
import torch
from torch import nn

import blade
from blade.core.reason import Code


class Norm(nn.Module):
    def __init__(self, training: bool) -> None:
        super().__init__()
        self.in_training = training

    def forward(self, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        y = nn.functional.batch_norm(x.exp() * 2 + 1, mean, var, None, None, self.in_training)
        return y.tanh() * 2 + 1


@pytest.mark.parametrize("training", [True, False])
def test_it_is_left_to_torch(training: bool) -> None:
    model = Norm(training).eval()

    def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rng = torch.Generator().manual_seed(0)
        return torch.randn(3, 4, 5, generator=rng), torch.zeros(4), torch.ones(4)

    config = blade.Config(timing=False, optimization_pipeline="disc", cache=False)
    optimized = blade.optimize(model, inputs(), config)
    report = blade.report(optimized)
    codes = {one.code for one in report.all_reasons()}
    assert (Code.MUTATES in codes) is training and Code.WRONG_VALUES not in codes
    assert dict(report.outside) == ({"aten::batch_norm": 1} if training else {})
    given, expected = inputs(), inputs()
    torch.testing.assert_close(optimized(*given), model(*expected))
    for mine, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
