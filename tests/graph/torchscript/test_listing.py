# SPDX-License-Identifier: Apache-2.0
"""The ops of a model as its report lists them."""

import torch
from torch import nn

from blade.capture.capture import capture
from blade.capture.input_summary import summarize_inputs
from blade.config import Config
from blade.graph.torchscript.listing import list_nodes
from blade.graph.torchscript.view import view
from blade.report.graph import InputReport


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y + x * y


def test_every_op_has_its_cluster_its_readers_and_its_place() -> None:
    seen = view(capture(Block().eval(), torch.randn(3, 4), Config()))
    nodes = list_nodes(seen, {"cluster_0": (1, 2)})
    kinds = ["aten::linear", "aten::relu", "aten::mul", "aten::add"]
    assert [n.kind for n in nodes] == kinds
    assert [n.cluster for n in nodes] == [None, "cluster_0", "cluster_0", None]
    assert [set(n.inputs) for n in nodes] == [set(), {0}, {1}, {1, 2}]
    assert [n.name for n in nodes] == [n.name for n in seen.nodes]
    assert nodes[3].source.endswith(".py:22") and "/" not in nodes[3].source


def test_samples_are_remembered_with_what_their_values_may_be() -> None:
    ids = torch.tensor([[7, 2], [30, 5]])
    scores = torch.tensor([0.5, -torch.inf, 3.0])
    mask = torch.tensor([True, False])
    [seen] = summarize_inputs(["ids", "scores", "mask.1"], [(ids, scores, mask)])
    assert seen == (
        InputReport("ids", "int64", (2, 2), 2.0, 30.0),
        InputReport("scores", "float32", (3,), 0.5, 3.0),
        InputReport("mask", "bool", (2,), 0.0, 1.0),
    )
    empty = summarize_inputs(["x"], [(torch.empty(0, 2),), (torch.full((2,), torch.nan),)])
    assert [(one.low, one.high) for (one,) in empty] == [(None, None)] * 2


def test_samples_of_more_than_tensors_are_not_remembered() -> None:
    assert summarize_inputs(["x", "pair"], [(torch.ones(1), (torch.ones(1), torch.ones(1)))]) == ()
