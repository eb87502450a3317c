# SPDX-License-Identifier: Apache-2.0
"""Products of a library get copies of what they read of an input that the program writes.

    %3 = written %2 {input=1}                                       %5 = cast %4
    %4 = slice %3                               ->                  %6 = matmul %1 %5
    %6 = matmul %1 %4

A CUDA graph knows the arguments of our own kernels, and gives them the caller's memory. What a library's kernel reads
has to lie where it lay when the graph was recorded: the whole input would be copied there and back at each launch.
"""

from blade.backends.disc.ir.graph import Graph, IrBuilder, Value
from blade.backends.disc.ir.rewrite import rewrite_values
from blade.backends.disc.ir.views import memory_of
from blade.backends.disc.passes.legalize import copy

_OF_LIBRARIES = ("matmul", "linear", "scaled_linear", "conv", "conv_weight_gradient", "call")


def copy_written(graph: Graph) -> Graph:
    """``graph`` with such copies."""

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op not in _OF_LIBRARIES or all(memory_of(a).op != "written" for a in args):
            return None
        own = [copy(b, a) if memory_of(a).op == "written" else a for a in args]
        return b.make(v.op, own, v.shape, v.dtype, v.strides, **v.attrs)

    return rewrite_values(graph, step)
