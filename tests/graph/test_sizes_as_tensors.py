# SPDX-License-Identifier: Apache-2.0
"""A size that trace wrote as a 0-d tensor on the CPU keeps no op from the device it computes on."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from blade.backends.disc.frontend.support import why_not_op
from blade.capture.capture import capture
from blade.config import Config
from blade.core.cluster import OpNode, ValueInfo, values_in
from blade.core.reason import Code
from blade.graph.torchscript.alias import find_aliases
from blade.graph.torchscript.program import read
from blade.graph.torchscript.scalar_lines import find_scalar_lines
from blade.graph.torchscript.view import view

GPU = torch.device("cuda", 0)


class Positions(nn.Module):
    """Places after what was kept, as decoders write them."""

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(x.shape[0])[:, None] + kept.shape[0])


def on_gpu(node: OpNode) -> OpNode:
    """``node`` with all it computes with on a GPU, but for sizes, which torch leaves on the CPU."""

    def moved(value: object) -> object:
        here = isinstance(value, ValueInfo) and value.kind == "tensor" and not value.is_size
        return replace(value, device=GPU) if here else value

    outputs = tuple(replace(v, device=GPU) for v in node.outputs)
    return replace(node, args=tuple(map(moved, node.args)), outputs=outputs)


@pytest.fixture
def add() -> OpNode:
    given = torch.randn(3, 4), torch.randn(2, 4)
    nodes = view(capture(Positions().eval(), given, Config())).nodes
    [found] = [n for n in nodes if n.target is torch.ops.aten.add.Tensor]
    return on_gpu(found)


def test_a_size_is_known_as_one(add: OpNode) -> None:
    assert [v.is_size for v in values_in(add.args)] == [False, True]
    assert [v.device for v in values_in(add.args)] == [GPU, torch.device("cpu")]


def test_an_op_that_takes_a_size_is_on_its_own_device(add: OpNode) -> None:
    asked: list[torch.device] = []
    assert why_not_op(add, asked.append) is None
    assert asked == [GPU]


def with_operand(add: OpNode, rank: int) -> OpNode:
    """``add`` with a tensor of the CPU in place of the size."""
    read = tuple(
        replace(a, is_size=False, rank=rank) if isinstance(a, ValueInfo) and a.is_size else a
        for a in add.args
    )
    return replace(add, args=read)


def test_a_number_of_the_cpu_is_taken(add: OpNode) -> None:
    asked: list[torch.device] = []
    assert why_not_op(with_operand(add, 0), asked.append) is None
    assert asked == [GPU]


def test_any_other_tensor_of_the_cpu_is_refused(add: OpNode) -> None:
    why = why_not_op(with_operand(add, 1), lambda _: None)
    assert why is not None and why.code is Code.UNSUPPORTED_DEVICE


def test_a_result_on_the_cpu_is_refused(add: OpNode) -> None:
    outputs = tuple(replace(v, device=torch.device("cpu"), rank=0) for v in add.outputs)
    why = why_not_op(replace(with_operand(add, 0), outputs=outputs), lambda _: None)
    assert why is not None and why.code is Code.UNSUPPORTED_DEVICE


def test_a_size_may_be_the_sum_of_thousands_of_elements() -> None:
    """As ``sum(lengths.tolist())`` traces: no pass may recurse along it."""
    count = 3000
    lines = ["%n0 : int = prim::Constant[value=0]()", "%one : int = prim::Constant[value=1]()"]
    for k in range(count):
        lines.append(f"%i{k} : int = aten::Int(%x)")
        lines.append(f"%n{k + 1} : int = aten::add(%n{k}, %i{k})")
    lines.append(f"%sizes : int[] = prim::ListConstruct(%n{count})")
    lines += ["%z : Tensor = aten::expand(%y, %sizes, %no)", "return (%z)"]
    text = "\n  ".join(["graph(%x : Tensor, %y : Tensor, %no : bool):", *lines])
    program = read(torch._C.parse_ir(text))
    cheap = find_scalar_lines(program, find_aliases(program))
    kinds = [line.kind for line in program.lines if line.index in cheap]
    assert kinds.count("aten::Int") == kinds.count("aten::add") == count
    assert "aten::expand" not in kinds
