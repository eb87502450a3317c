# SPDX-License-Identifier: Apache-2.0
"""Graphs of torch.compile as they are rewritten before support: kernels of attention that torch chose on a GPU."""

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from blade.dynamo.rewrites import apply_rewrites

aten = torch.ops.aten
SHAPE = (2, 4, 8, 16)
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
FLASH = aten._scaled_dot_product_flash_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default


def graph_of(target: Any, args: tuple[Any, ...], taken: tuple[int, ...], heads: int = 4) -> Graph:
    """q, k, v (and a bias) go into ``target``; what is ``taken`` of its results is returned."""
    graph = Graph()
    q, k, v, bias = (graph.placeholder(name) for name in ("q", "k", "v", "bias"))
    q.meta["val"] = torch.empty(SHAPE, device="meta")
    for node in (k, v):
        node.meta["val"] = torch.empty(2, heads, 8, 16, device="meta")
    bias.meta["val"] = torch.empty(2, 4, 8, 8, device="meta")
    named = {"bias": bias}
    given = [named.get(a, a) if isinstance(a, str) else a for a in args]
    made = graph.call_function(target, (q, k, v, *given), {"scale": 0.25})
    parts = [graph.call_function(operator.getitem, (made, i)) for i in taken]
    for part in parts:
        part.meta["val"] = torch.empty(SHAPE, device="meta")
    graph.output(tuple(parts))
    return graph


def computed(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    ("target", "args", "masked", "causal"),
    [
        (EFFICIENT, ("bias", False), True, False),
        (EFFICIENT, (None, True, 0.0, True), False, True),
        (FLASH, (0.0, True), False, True),
        (CUDNN, ("bias", False, 0.0, False, False), True, False),
    ],
)
def test_attention_that_nobody_differentiates_is_attention(
    target: Any, args: tuple[Any, ...], masked: bool, causal: bool
) -> None:
    graph = graph_of(target, args, (0,))
    apply_rewrites(graph)
    [node] = computed(graph)
    assert node.target is aten.scaled_dot_product_attention.default
    assert (node.kwargs["attn_mask"] is not None) == masked
    assert node.kwargs["is_causal"] == causal and node.kwargs["scale"] == 0.25
    assert not node.kwargs["enable_gqa"]
    assert tuple(node.meta["val"].shape) == SHAPE


def test_fewer_heads_of_keys_are_repeated() -> None:
    graph = graph_of(FLASH, (), (0,), heads=2)
    apply_rewrites(graph)
    [node] = computed(graph)
    assert node.kwargs["enable_gqa"]


@pytest.mark.parametrize(
    ("target", "args", "taken"),
    [
        (EFFICIENT, (None, True), (0, 1)),  # its gradient takes the logarithms
        (FLASH, (0.1,), (0,)),  # it drops elements
        (FLASH, (0.0, False, True), (0,)),
    ],
)
def test_what_only_the_kernel_does_stays(
    target: Any, args: tuple[Any, ...], taken: tuple[int, ...]
) -> None:
    graph = graph_of(target, args, taken)
    apply_rewrites(graph)
    assert computed(graph)[0].target is target
