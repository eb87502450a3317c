# SPDX-License-Identifier: Apache-2.0
"""Cells of recurrent layers, whose gates are views that hide behind "unsafe" and are written in place."""

import pytest
import torch
from torch import nn

import blade
from blade.graph.torchscript.name_views import name_views


class Steps(nn.Module):
    """A decoder of two cells."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(8, 16), nn.GRUCell(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = g = x.new_zeros(x.shape[0], 16)
        made = []
        for step in range(3):
            h, c = self.first(x[:, step], (h, c))
            g = self.second(h, g)
            made.append(g)
        return torch.stack(made, 1)


class Halves(nn.Module):
    """What is written through the view is read of its base."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if self.kind == "chunk":
            left = torch.unsafe_chunk(y, 2, 1)[0]
        elif self.kind == "split":
            left = torch.unsafe_split(y, 3, 1)[0]
        else:
            left = torch.unsafe_split_with_sizes(y, [3, 3], 1)[0]
        left.sigmoid_()
        return torch.relu(y) + y.sum(1, keepdim=True)


@pytest.mark.needs("runtime")
def test_cells_are_one_cluster_of_any_batch() -> None:
    torch.manual_seed(0)
    model = Steps().eval()
    config = blade.Config(optimization_pipeline="DISC", timing=False)
    optimized = blade.optimize(model, torch.randn(2, 3, 8), config)
    report = blade.report(optimized)
    assert [cluster.backend for cluster in report.clusters] == ["disc"] and not report.outside
    for batch in (1, 5):
        x = torch.randn(batch, 3, 8)
        torch.testing.assert_close(optimized(x), model(x))


@pytest.mark.parametrize("kind", ["chunk", "split", "split_with_sizes"])
def test_writes_go_to_the_base(kind: str) -> None:
    model = Halves(kind)
    traced = torch.jit.trace(model, (torch.randn(2, 6),))
    name_views(traced.graph)
    kinds = {node.kind() for node in traced.graph.nodes()}
    assert f"aten::{kind}" in kinds and not any("unsafe" in one for one in kinds)
    x = torch.randn(4, 6)
    torch.testing.assert_close(traced(x), model(x))
    optimized = blade.optimize(model.eval(), torch.randn(2, 6), blade.Config(timing=False))
    torch.testing.assert_close(optimized(x), model(x))
