# SPDX-License-Identifier: Apache-2.0
"""Which nodes count as layers, in which form their weights are seen, and that running them is the same."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from blade.backends.quant.analysis.layers import find_layers
from blade.core.cluster import Cluster

Make = Callable[..., Cluster]


class Products(nn.Module):
    """Every way to write a product with a constant matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.plain = nn.Linear(8, 8, bias=False)
        self.w = nn.Parameter(torch.randn(8, 8))
        self.b = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.plain(self.linear(x))
        y = torch.addmm(self.b, y, self.w)  # as transformers' Conv1D
        y = torch.mm(y, self.w.t())
        return torch.matmul(y, self.w)


class NotLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))
        self.up = nn.ConvTranspose1d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ x.transpose(-1, -2) @ x  # no constant
        y = torch.addmm(y, y, self.w)  # no bias: a matrix is added
        y = torch.addmm(self.w[0], y, self.w, beta=2.0)
        y = (y.double() @ self.w.double()).float()
        return self.up(y.unsqueeze(0))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.b = nn.Conv2d(6, 6, 3, groups=6, bias=False)
        self.c = nn.Conv1d(6, 4, 1, dilation=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)).flatten(2))


def test_products_are_seen_output_first(cluster_of: Make) -> None:
    model = Products()
    cluster = cluster_of(model, [torch.randn(5, 8)])
    layers = find_layers(cluster.gm)
    assert [layer.kind for layer in layers] == ["linear"] * 5
    wanted = [model.linear.weight, model.plain.weight, model.w.t(), model.w, model.w.t()]
    assert all(torch.equal(a.weight, b) for a, b in zip(layers, wanted, strict=True))
    assert [layer.bias is not None for layer in layers] == [True, False, True, False, False]
    assert [layer.title for layer in layers[:2]] == ["linear", "plain"]


def test_convolutions_are_found_and_what_they_do_not_change(cluster_of: Make) -> None:
    model = Convolutions()
    cluster = cluster_of(model, [torch.randn(2, 3, 9, 9)])
    layers = find_layers(cluster.gm)
    assert [layer.kind for layer in layers] == ["conv"] * 3
    assert [layer.title for layer in layers] == ["a", "b", "c"]
    assert len({layer.signature for layer in layers}) == 3


@pytest.mark.parametrize(("model", "shape"), [(Products(), (5, 8)), (Convolutions(), (2, 3, 9, 9))])
def test_run_is_the_node(cluster_of: Make, model: nn.Module, shape: tuple[int, ...]) -> None:
    cluster = cluster_of(model, [torch.randn(shape)])
    for layer in find_layers(cluster.gm):
        sizes = [
            int(getattr(d, "node", d).hint if hasattr(d, "node") else d)
            for d in layer.x.meta["val"].shape
        ]
        x = torch.randn(sizes)
        held = None if layer.bias is None else getattr(cluster.gm, str(layer.bias.target))
        got = layer.run(x, layer.weight, held)
        args = [
            x if a is layer.x else _value(cluster.gm, a) if isinstance(a, torch.fx.Node) else a
            for a in layer.node.args
        ]
        torch.testing.assert_close(got, layer.node.target(*args))  # type: ignore[operator]


def _value(gm: torch.fx.GraphModule, node: torch.fx.Node) -> torch.Tensor:
    if node.op == "get_attr":
        return getattr(gm, str(node.target))
    return node.target(*[_value(gm, a) if isinstance(a, torch.fx.Node) else a for a in node.args])  # type: ignore[operator, no-any-return]


def test_what_is_no_layer_is_not_found(cluster_of: Make) -> None:
    cluster = cluster_of(NotLayers(), [torch.randn(8, 8)])
    assert find_layers(cluster.gm) == []
