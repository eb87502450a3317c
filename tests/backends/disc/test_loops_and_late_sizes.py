# SPDX-License-Identifier: Apache-2.0
"""Loops and sizes that depend on elements, in one engine where the loop has no such size."""

import pytest
import torch
from torch import nn

import blade

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]
CONFIG = blade.Config(optimization_pipeline="disc", timing=False, cache=False)
WIDTH = 8


class SelectsLast(nn.Module):
    """The elements of the last state that are above its mean, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.next = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(x.size(1)):
            h = torch.tanh(x[:, t] + self.next(h))
        return torch.masked_select(h, h > h.mean()) * 2


class RunsOverSelected(SelectsLast):
    """A state per row of x that begins with a positive element."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.index_select(x, 0, torch.nonzero(x[:, 0, 0] > 0).squeeze(1)) * 2
        h = torch.zeros_like(rows[:, 0])
        for t in range(rows.size(1)):
            h = torch.tanh(rows[:, t] + self.next(h))
        return h


@pytest.mark.parametrize("model", [SelectsLast, RunsOverSelected])
def test_answers_at_other_lengths_and_contents(model: type[SelectsLast]) -> None:
    module = model().eval()
    optimized = blade.optimize(torch.jit.script(module), torch.randn(4, 5, WIDTH), CONFIG)
    in_engine = "prim::Loop" not in str(optimized.graph)
    assert in_engine == (model is SelectsLast)
    with torch.no_grad():
        for batch, length in [(4, 5), (2, 9), (1, 1), (4, 2), (4, 2)]:
            x = torch.randn(batch, length, WIDTH)
            torch.testing.assert_close(optimized(x), module(x))
    for name, stats in blade.stats(optimized).items():
        assert stats["engine_runs"] > 0 and stats["fallbacks"] == 0, (name, stats)
