# SPDX-License-Identifier: Apache-2.0
"""Slices whose bounds are negated sizes: where the size is 0, -0 is the beginning and not the end."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import blade
from blade.config import Config

SLICES: dict[str, Callable[[torch.Tensor, int, int], torch.Tensor]] = {
    "start": lambda x, n, k: x[:, -n:],
    "end": lambda x, n, k: x[:, :-n],
    "both": lambda x, n, k: x[:, -n:-k],
    "difference": lambda x, n, k: x[:, x.shape[1] - 2 * n :],
}


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize("kind", SLICES)
def test_bounds_of_no_size(kind: str) -> None:
    class Sliced(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return SLICES[kind](x.tanh() + x, y.shape[0], y.shape[1]) * 2

    model = Sliced().eval()
    config = Config(optimization_pipeline="disc", timing=False, min_cluster_size=1)
    optimized = blade.optimize(model, (torch.rand(2, 9), torch.rand(3, 1)), config)
    for n in (0, 1, 4, 7):
        for k in (0, 1, 2):
            x, y = torch.rand(3, 11), torch.rand(n, k)
            torch.testing.assert_close(optimized(x, y), model(x, y))
    assert blade.stats(optimized)["cluster_0"]["engine_runs"] > 0
