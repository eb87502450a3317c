# SPDX-License-Identifier: Apache-2.0
"""A cluster computes on one device: nodes of several are clustered apart, whoever takes them."""

from dataclasses import replace

import torch
from torch import nn

from blade.capture.capture import capture
from blade.config import Config
from blade.core.cluster import OpNode
from blade.graph.torchscript.group import cluster_blocks
from blade.graph.torchscript.view import GraphView, view

GPU = torch.device("cuda", 0)


class Pair(nn.Module):
    """Two chains that share nothing."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.relu().exp().neg(), y.tanh().cos().abs()


def moved(node: OpNode, device: torch.device) -> OpNode:
    args = tuple(replace(a, device=device) if hasattr(a, "rank") else a for a in node.args)
    return replace(node, args=args, outputs=tuple(replace(v, device=device) for v in node.outputs))


def seen(gpu: set[str]) -> GraphView:
    """The ops named in ``gpu`` on a GPU, the others on the CPU."""
    plain = view(capture(Pair().eval(), (torch.randn(3, 4), torch.randn(3, 4)), Config()))
    kinds = [str(n.target).split(".")[1] for n in plain.nodes]
    nodes = [
        moved(n, GPU) if kind in gpu else n for n, kind in zip(plain.nodes, kinds, strict=True)
    ]
    return replace(plain, nodes=tuple(nodes))


def clusters(graph: GraphView) -> list[set[str]]:
    found = cluster_blocks(graph, [frozenset({"disc", "other"})] * len(graph.nodes))
    assert all(g.label == {"disc", "other"} for g in found.groups)
    return [{str(graph.nodes[n].target).split(".")[1] for n in g.nodes} for g in found.groups]


def test_on_one_device_all_is_one_cluster() -> None:
    assert len(clusters(seen(set()))) == 1
    assert len(clusters(seen({"relu", "exp", "neg", "tanh", "cos", "abs"}))) == 1


def test_on_two_devices_there_are_two() -> None:
    found = clusters(seen({"relu", "exp", "neg"}))
    assert sorted(map(sorted, found)) == [["abs", "cos", "tanh"], ["exp", "neg", "relu"]]


class Scaled(nn.Module):
    """A number of the caller scales a tensor."""

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return x.relu() * (sigma.exp() + 1).cos()


def test_numbers_on_the_cpu_are_no_cluster_beside_a_gpu() -> None:
    sample = torch.randn(3, 4), torch.tensor(0.5)
    plain = view(capture(Scaled().eval(), sample, Config()))
    kinds = [str(n.target).split(".")[1] for n in plain.nodes]
    gpu = ("relu", "mul")
    nodes = [
        moved(n, GPU) if kind in gpu else n for n, kind in zip(plain.nodes, kinds, strict=True)
    ]
    labels = [frozenset({"disc"})] * len(nodes)
    found = cluster_blocks(replace(plain, nodes=tuple(nodes)), labels)
    [group] = found.groups
    assert {kinds[n] for n in group.nodes} == {"relu", "mul"}
    [left] = found.dissolved
    assert {kinds[n] for n in left.nodes} == {"exp", "add", "cos"} and "numbers" in left.detail
    assert len(cluster_blocks(plain, labels).groups) == 1
