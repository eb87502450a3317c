# SPDX-License-Identifier: Apache-2.0
"""A number that was traced into a tensor is one for ops that take no numbers."""

import torch
from torch import nn

import blade


class Marks(nn.Module):
    """What transformers does to find which frames of audio are padding; ``1`` is shared with ``lengths - 1``."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        last = torch.zeros(x.shape[:2], dtype=lengths.dtype, device=x.device)
        last[(torch.arange(x.shape[0], device=x.device), lengths - 1)] = 1
        seen = last.flip([-1]).cumsum(-1).flip([-1]).bool()
        return x.relu() * seen[..., None] + 1


def test_index_put_of_a_number() -> None:
    model = Marks().eval()
    sample = torch.randn(3, 5, 4), torch.tensor([1, 3, 5])
    config = blade.Config(timing=False, optimization_pipeline="disc", cache=False)
    optimized = blade.optimize(model, sample, config)
    report = blade.report(optimized)
    assert [one.backend for one in report.clusters] == ["disc"] and not report.outside
    for rows, frames in [(1, 2), (4, 7)]:
        x, lengths = torch.randn(rows, frames, 4), torch.randint(1, frames + 1, (rows,))
        torch.testing.assert_close(optimized(x, lengths), model(x, lengths))
