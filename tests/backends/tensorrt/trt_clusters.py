# SPDX-License-Identifier: Apache-2.0
"""Clusters and nodes of small models, as the stages before a backend make them."""

from collections.abc import Callable
from typing import Any

import torch

from blade.capture.capture import capture
from blade.config import Config
from blade.core.captured import Captured
from blade.core.cluster import Cluster, OpNode
from blade.graph.torchscript.extract import extract
from blade.graph.torchscript.group import cluster_blocks
from blade.graph.torchscript.view import GraphView, view


class Plain(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


class Mlp(torch.nn.Module):
    """Two linear layers with a GELU between them, 64 -> 128 -> 32 features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 128), torch.nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x))).softmax(-1)


def seen(model: torch.nn.Module, inputs: Any, config: Config | None = None) -> GraphView:
    """The captured graph of ``model``."""
    return view(capture(model.eval(), inputs, config or Config()))


def nodes_of(model: torch.nn.Module, inputs: Any) -> tuple[OpNode, ...]:
    """What a backend is asked about; pinned nodes are left out."""
    graph = seen(model, inputs)
    return tuple(n for i, n in enumerate(graph.nodes) if i not in graph.excluded)


def traced_nodes(model: torch.nn.Module, *sample: torch.Tensor) -> tuple[OpNode, ...]:
    """``nodes_of`` without the checks of capture: for ops that few models have."""
    with torch.no_grad():
        traced = torch.jit.trace(model.eval(), sample, check_trace=False, strict=False)
    captured = Captured(torch.jit.freeze(traced), model, (sample,), (), (), "trace")
    return tuple(view(captured).nodes)


def cluster_of(model: torch.nn.Module, inputs: Any, config: Config | None = None) -> Cluster:
    """The one cluster that holds every op of ``model``."""
    captured = capture(model.eval(), inputs, config or Config())
    graph = view(captured)
    labels = [
        frozenset[str]() if i in graph.excluded else frozenset({"any"})
        for i in range(len(graph.nodes))
    ]
    groups = [found.nodes for found in cluster_blocks(graph, labels).groups]
    names = list(captured.fixed)
    _, *inputs_of_graph = (v.debugName() for v in captured.module.graph.inputs())

    def is_fixed(name: str, axis: int) -> bool:
        return name in inputs_of_graph and (inputs_of_graph.index(name), axis) in names

    [extracted] = extract(captured, graph, groups, is_fixed)
    return extracted.cluster
