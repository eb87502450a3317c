# SPDX-License-Identifier: Apache-2.0
"""A tensor of the CPU without dimensions is a number for a program of a GPU; no other tensor of the CPU is."""

import pytest
import torch
from run_program import compile_graph_to_program
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.errors import Refused

pytestmark = pytest.mark.needs("triton_interpreter")


def scaled(number: torch.Tensor) -> tuple[GraphModule, ShapeEnv]:
    """``relu(x * n) + n`` for ``x`` on a GPU and ``n`` like ``number``."""
    aten, graph, env = torch.ops.aten, Graph(), ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with mode:
        x = torch.empty(4, 6, device="meta")
    n = mode.from_tensor(number)
    gpu = torch._subclasses.FakeTensor(mode, x, torch.device("cuda", 0))
    given = graph.placeholder("x"), graph.placeholder("n")
    given[0].meta["val"], given[1].meta["val"] = gpu, n
    product = graph.call_function(aten.mul.Tensor, given)
    positive = graph.call_function(aten.relu.default, (product,))
    total = graph.call_function(aten.add.Tensor, (positive, given[1]))
    for node in (product, positive, total):
        node.meta["val"] = gpu
    graph.output((total,))
    return GraphModule(torch.nn.Module(), graph), env


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_it_is_an_input_that_kernels_read(dtype: torch.dtype) -> None:
    number = torch.tensor(3, dtype=dtype)
    program = compile_graph_to_program(*scaled(number))
    kind = {torch.float64: "f64", torch.float32: "f32", torch.int64: "i64"}[dtype]
    assert f"input 1 {kind} cuda 0 number" in program.text.splitlines()
    assert not any(line.startswith("call") for line in program.text.splitlines())
    x = torch.randn(4, 6)
    for other in (number, number - 5):
        torch.testing.assert_close(program(x, other), [torch.relu(x * other) + other])


def test_a_vector_of_the_cpu_is_none() -> None:
    with pytest.raises(Refused, match="on another device"):
        compile_graph_to_program(*scaled(torch.randn(6)))
