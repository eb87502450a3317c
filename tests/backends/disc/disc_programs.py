# SPDX-License-Identifier: Apache-2.0
"""IR graphs made by hand or by hypothesis, compiled and run without any capture."""

from collections.abc import Sequence

import sympy
import torch

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Value,
    contiguous_strides,
    live,
)
from blade.backends.disc.ir.simplify import RULES
from blade.backends.disc.passes.pipeline import PASSES
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.runtime.engine import Engine, make_engine

S0, S1, S2 = (sympy.Symbol(f"s{k}", integer=True, nonnegative=True) for k in range(3))


def new_builder() -> IrBuilder:
    return IrBuilder(RULES)


def add_input(b: IrBuilder, shape: Sequence[object], dtype: torch.dtype = torch.float32) -> Value:
    index = sum(v.op == "input" for v in b.values)
    return b.make("input", (), shape, dtype, index=index)  # type: ignore[arg-type]


def finish(b: IrBuilder, *outputs: Value, constants: Sequence[torch.Tensor] = ()) -> Graph:
    inputs = tuple(v for v in b.values if v.op == "input")
    strides = tuple(contiguous_strides(v.shape) for v in outputs)
    graph = Graph(b.values, outputs, strides, inputs, tuple(constants), tuple(b.facts.values()))
    graph.values = live(graph)
    return graph


def legalized(graph: Graph) -> Graph:
    """``graph`` after all passes of a CPU's pipeline."""
    for _, run_pass in PASSES:
        graph = run_pass(graph)
    return graph


def compile_to_engine(graph: Graph, target: CpuTarget | None = None) -> Engine:
    compiled = compile_ir(graph, target or host())
    return make_engine("test", "disc", compiled.program, compiled.object, compiled.constants)
