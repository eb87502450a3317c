# SPDX-License-Identifier: Apache-2.0
"""Models that one process compiles and saves, and another loads (test_aot_compile.py)."""

import torch
from torch import nn
from torch.nn import functional


class Scores(nn.Module):
    """Two outputs, a weight used twice, and a size that the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(16, 24), nn.LayerNorm(24)
        self.shift = nn.Parameter(torch.randn(24))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(functional.gelu(self.up(x))) + self.shift
        return y.softmax(-1) / x.shape[0], (y @ self.up.weight).sum(0)


class Trained(nn.Module):
    """Batch norm writes its statistics, dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(functional.gelu(self.norm(self.up(x))), 0.2, self.training)
        return self.down(y).tanh()  # type: ignore[no-any-return]


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + torch.rand(16)).relu() - torch.randn_like(x)
