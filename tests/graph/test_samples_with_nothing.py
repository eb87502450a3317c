# SPDX-License-Identifier: Apache-2.0
"""Samples with nothing in them: what there will be more of in the next call."""

import pytest
import torch
from torch import nn

import blade


class Pointwise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.relu() * 2 + 1).tanh()


class Heads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = x.view(batch, length, 2, width // 2).transpose(1, 2).relu()
        return (heads + 1).transpose(1, 2).reshape(batch, length, width).tanh()


@pytest.mark.parametrize("model", [Pointwise(), Heads()])
@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 3, 8)])
def test_every_op_is_served(model: nn.Module, shape: tuple[int, ...]) -> None:
    config = blade.Config(timing=False, optimization_pipeline="disc", cache=False)
    optimized = blade.optimize(model.eval(), torch.randn(shape), config)
    report = blade.report(optimized)
    assert [one.backend for one in report.clusters] == ["disc"] and not report.outside
    for other in [shape, (1, 1, 8), (3, 5, 8)]:
        x = torch.randn(other)
        torch.testing.assert_close(optimized(x), model(x))
