# SPDX-License-Identifier: Apache-2.0
"""Which numbers of a functional graph are constants of another device's kernels."""

import math

import pytest
import torch
from built_graph import THERE, Built
from torch.fx import GraphModule, Node

from blade.dynamo.fold_numbers import fold_numbers

aten = torch.ops.aten


class WithNumber(Built):
    """One input of ``THERE`` and the constant 64 of the CPU."""

    def __init__(self, device: torch.device = THERE, number: object = 64.0) -> None:
        super().__init__()
        self.module = torch.nn.Module()
        self.module.number = torch.tensor(number)  # type: ignore[assignment]
        self.x = self.input(3, 4, device=device)
        held = self.graph.get_attr("number")
        with self.mode:
            held.meta["val"] = torch.empty((), dtype=self.module.number.dtype)
        self.number = self.call(aten.lift_fresh_copy.default, held)

    def folded(self, *outputs: Node) -> list[torch._ops.OpOverload]:
        self.graph.output(outputs)
        owner = GraphModule(self.module, self.graph)
        with self.mode:  # as AOTAutograd does
            fold_numbers(owner.graph)
        owner.graph.eliminate_dead_code()
        owner.graph.lint()
        self.nodes = [node for node in owner.graph.nodes if node.op == "call_function"]
        return [node.target for node in self.nodes]


def test_a_scale_is_a_constant_of_the_gpu() -> None:
    b = WithNumber()
    root = b.call(aten.sqrt.default, b.call(aten.mul.Tensor, b.number, 3))
    scale = b.call(aten._to_copy.default, root, dtype=torch.float16)
    assert b.folded(b.call(aten.div.Tensor, b.x, scale)) == [
        aten.full.default,
        aten.div.Tensor,
    ]
    [fill, _] = b.nodes
    assert fill.args == ([], torch.tensor(math.sqrt(192)).half().item())
    assert fill.kwargs == {"dtype": torch.float16, "device": THERE}
    assert fill.meta["val"].device == THERE and fill.meta["val"].dtype == torch.float16


@pytest.mark.parametrize("number", [3, True])
def test_whole_numbers_keep_their_dtype(number: object) -> None:
    b = WithNumber(number=number)
    b.folded(b.call(aten.mul.Tensor, b.x, b.number))
    assert b.nodes[0].args == ([], number)
    assert b.nodes[0].kwargs["dtype"] == b.module.number.dtype


def test_what_the_cpu_reads_stays_beside_it() -> None:
    b = WithNumber()
    root = b.call(aten.sqrt.default, b.number)
    kinds = b.folded(b.call(aten.mul.Tensor, b.x, root), root)
    assert kinds.count(aten.sqrt.default) == kinds.count(aten.full.default) == 1


@pytest.mark.parametrize("case", ["drawn", "of the CPU", "not pointwise"])
def test_what_is_left_alone(case: str) -> None:
    b = WithNumber(torch.device("cpu") if case == "of the CPU" else THERE)
    number = b.number
    if case == "drawn":
        number = b.call(aten.bernoulli.default, number)
    if case == "not pointwise":
        rows = b.call(aten.arange.default, 2, device=THERE)
        out = b.call(aten.index_put.default, b.x, [rows], number)
    else:
        out = b.call(aten.mul.Tensor, b.x, number)
    assert aten.full.default not in b.folded(out)
