# SPDX-License-Identifier: Apache-2.0
"""Functional graphs of ATen ops, written by hand."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

THERE = torch.device("meta")  # stands for a GPU


class Built:
    """A graph whose nodes have stand-ins."""

    def __init__(self) -> None:
        self.graph, self.mode = Graph(), FakeTensorMode(allow_non_fake_inputs=True)

    def input(self, *shape: int, device: torch.device = THERE) -> Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, device=device)
        return node

    def call(self, target: torch._ops.OpOverload, *args: object, **kwargs: object) -> Node:
        node = self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        given = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*given, **kwargs)
        return node

    def places(self, *nodes: Node) -> list[str]:
        return [node.meta["val"].device.type for node in nodes]
