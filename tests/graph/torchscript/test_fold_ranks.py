# SPDX-License-Identifier: Apache-2.0
"""Ranks that scripted functions ask for inside of a trace."""

from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.capture.capture import capture
from blade.core.captured import Captured

T = torch.Tensor


def normalized(x: T, eps: float = 1e-8) -> T:
    """As asteroid's, over all axes but the first."""
    dims: list[int] = torch.arange(1, len(x.shape)).tolist()
    mean = x.mean(dim=dims, keepdim=True)
    return (x - mean) / torch.sqrt(torch.var(x, dim=dims, keepdim=True, unbiased=False) + eps)


def widened(x: T) -> T:
    return x[None] if x.shape[0] > 3 else x


def encoded(x: T, filters: T) -> T:
    """As asteroid's: a convolution for waves of one, two or three dimensions, of one channel or several."""
    if x.ndim == 1:
        return torch.conv1d(x[None, None], filters).squeeze()
    if x.ndim == 2:
        return torch.conv1d(x.unsqueeze(1), filters)
    batch, channels, length = x.shape
    if channels == 1:
        return torch.conv1d(x, filters)
    return torch.conv1d(x.reshape(-1, 1, length), filters).view(
        batch, channels, filters.shape[0], -1
    )


def scripted(function: Any, *args: Any) -> Any:
    return torch.jit.script(function)(*args) if torch.jit.is_tracing() else function(*args)


class Separates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 8, 3), nn.Conv1d(8, 4, 3)

    def forward(self, x: T) -> T:
        y = scripted(normalized, self.first(x).relu())
        return scripted(normalized, self.second(y).tanh()) * 2


class Encodes(Separates):
    def forward(self, x: T) -> T:
        filters = self.second.weight[:, :1]
        return super().forward(scripted(encoded, x.unsqueeze(1), filters))


class Widens(nn.Module):
    """The rank of what the second function gets depends on a size."""

    def forward(self, x: T) -> T:
        y = scripted(widened, torch.tanh(x))
        return scripted(normalized, y * 2).sum() + y.mean()


def of(model: nn.Module, x: T) -> Captured:
    return capture(model.eval(), (x,), blade.Config())


def kinds(captured: Captured) -> set[str]:
    return {node.kind() for node in captured.module.graph.nodes()}


def test_branches_on_ranks_fold_as_well() -> None:
    model = Encodes()
    captured = of(model, torch.randn(2, 30))
    assert not kinds(captured) & {"prim::tolist", "aten::len", "aten::arange"}
    for batch, length in ((2, 30), (5, 17), (1, 9)):
        x = torch.randn(batch, length)
        torch.testing.assert_close(captured.module(x), model(x))


def test_they_are_constants() -> None:
    model = Separates()
    captured = of(model, torch.randn(2, 4, 30))
    assert not kinds(captured) & {"prim::tolist", "aten::len", "aten::arange"}
    assert captured.paths[0].conditions == ("x.dim() == 3",)
    for batch, length in ((2, 30), (5, 17)):
        x = torch.randn(batch, 4, length)
        torch.testing.assert_close(captured.module(x), model(x))
    with pytest.raises(torch.jit.Error, match=r"x\.dim\(\) == 3"):
        captured.module(torch.randn(4, 30))


@pytest.mark.needs("runtime", "torch_mlir")
def test_the_model_is_one_cluster_and_the_original_answers_at_other_ranks() -> None:
    model = Separates().eval()
    config = blade.Config(optimization_pipeline="disc", timing=False)
    module = blade.optimize(model, (torch.randn(2, 4, 30),), config)
    assert [cluster.backend for cluster in blade.report(module).clusters] == ["disc"]
    for sizes in ((2, 4, 30), (3, 4, 12), (4, 30)):
        x = torch.randn(sizes)
        torch.testing.assert_close(module(x), model(x))


@pytest.mark.parametrize("rows", [2, 6])
def test_a_rank_that_a_branch_decides_is_none(rows: int) -> None:
    model = Widens()
    captured = of(model, torch.randn(rows, 5, 7))
    assert "prim::tolist" in kinds(captured)
    for n in (2, 3, 4, 6):
        x = torch.randn(n, 5, 7)
        torch.testing.assert_close(captured.module(x), model(x))
