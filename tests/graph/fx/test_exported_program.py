# SPDX-License-Identifier: Apache-2.0
"""Clusters as exported programs: same answers, same weights, sizes still symbols."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cutting import cut, trace

from blade.core.cluster import Cluster
from blade.errors import Refused
from blade.graph.fx.exported_program import output_orders, to_exported


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(self.linear(x)) + y
        return h.softmax(-1), h.reshape(h.shape[0] * h.shape[1], 4).sum(-1)


def cluster_of(model: Any, *samples: Sequence[torch.Tensor]) -> Cluster:
    """The only cluster of ``model``."""
    [extracted] = cut(trace(model, *map(tuple, samples)))
    return extracted.cluster


def block_inputs(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, length, 6), torch.randn(batch, length, 4)


def edited(cluster: Cluster, choose: Callable[[list[Any], Any], Sequence[Any]]) -> Cluster:
    """``cluster`` that returns what ``choose(placeholders, output)`` says."""
    graph = cluster.gm.graph
    given = [n for n in graph.nodes if n.op == "placeholder"]
    [returned] = graph.output_node().args[0]
    graph.output_node().args = (tuple(choose(given, returned)),)
    cluster.gm.recompile()
    return cluster


def test_the_program_answers_as_the_cluster_at_every_size() -> None:
    cluster = cluster_of(Block().eval(), block_inputs(3, 5), block_inputs(2, 7))
    module = to_exported(cluster).module()
    for batch, length in ((3, 5), (2, 9), (1, 7), (4, 1), (1, 1)):
        inputs = block_inputs(batch, length)
        torch.testing.assert_close(module(*inputs), cluster.gm(*inputs))


def test_sizes_stay_symbols_and_weights_stay_where_they_are() -> None:
    cluster = cluster_of(Block().eval(), block_inputs(3, 5), block_inputs(2, 7))
    program = to_exported(cluster)
    sizes = [n.meta["val"].shape for n in program.graph.nodes if n.op == "placeholder"][-2:]
    assert all(isinstance(size, torch.SymInt) for shape in sizes for size in shape)
    assert {n: t.data_ptr() for n, t in program.state_dict.items()} == {
        n: t.data_ptr() for n, t in cluster.gm.named_buffers()
    }


def test_the_graph_of_the_cluster_is_left_alone() -> None:
    cluster = cluster_of(Block().eval(), block_inputs(3, 5), block_inputs(2, 7))
    before = str(cluster.gm.graph)
    to_exported(cluster).run_decompositions()
    assert str(cluster.gm.graph) == before


def test_outputs_that_are_inputs_constants_or_given_twice_are_copies() -> None:
    weight = torch.randn(4)
    cluster = cluster_of(lambda x: torch.tanh(x) * weight, [torch.randn(3, 4)], [torch.randn(5, 4)])
    [constant] = [n for n in cluster.gm.graph.nodes if n.op == "get_attr"]
    cluster = edited(cluster, lambda given, y: [given[0], y, y, constant])
    x = torch.randn(6, 4)
    outputs = to_exported(cluster).module()(x)
    torch.testing.assert_close(outputs, (x, torch.tanh(x) * weight, torch.tanh(x) * weight, weight))
    assert len({t.data_ptr() for t in (*outputs, x, weight)}) == 6


def test_zero_dimensions_and_several_dtypes() -> None:
    def mixed(x: torch.Tensor, i: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.double() * 2, (i + 1) * 3, b.logical_not(), x.half() + 1, x.sum() * 2

    inputs = torch.randn(3, 2), torch.arange(3), torch.tensor([True, False])
    cluster = cluster_of(mixed, inputs)
    got = to_exported(cluster).module()(*inputs)
    torch.testing.assert_close(got, cluster.gm(*inputs))
    assert [t.dtype for t in got] == [t.dtype for t in cluster.gm(*inputs)]


def test_row_major_outputs_are_permuted_as_they_lie() -> None:
    def permuted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x) * 2
        return y.permute(2, 0, 1).neg(), y + 1

    cluster = cluster_of(permuted, [torch.randn(3, 4, 5)], [torch.randn(2, 6, 7)])
    assert output_orders(cluster) == [(1, 2, 0), None]
    x = torch.randn(4, 1, 3)
    first, second = to_exported(cluster, row_major=True).module()(x)
    want = cluster.gm(x)
    torch.testing.assert_close(first, want[0].permute(1, 2, 0))
    torch.testing.assert_close(second, want[1])


def test_an_output_with_gaps_is_refused() -> None:
    cluster = cluster_of(lambda x: torch.tanh(x) + 1, [torch.randn(3, 4)], [torch.randn(5, 6)])
    with_gaps = cluster.gm.graph.output_node().args[0][0]
    with_gaps.meta["val"] = with_gaps.meta["val"][:, :2]
    with pytest.raises(Refused, match=r"Output 0 has strides \[6, 1\] at sizes \[5, 2\]"):
        to_exported(cluster, row_major=True)
