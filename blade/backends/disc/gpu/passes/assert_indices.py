# SPDX-License-Identifier: Apache-2.0
"""Kernels check their own indices on a GPU, as torch's kernels do.

On CPU a check runs first (ops/gather.py), and the original can still answer. On a GPU an index out of bounds
stops the kernel: CUDA reports a device-side assertion, after which the process cannot continue, as in eager
mode.
"""

from blade.backends.disc.ir.graph import Graph, IrBuilder, Value
from blade.backends.disc.ir.rewrite import rewrite_values


def assert_indices(graph: Graph) -> Graph:
    """``graph`` with gathers that assert their indices instead of depending on a check."""

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "gather" or len(args) < 3:
            return None
        return b.make(v.op, args[:2], v.shape, v.dtype, **v.attrs, asserts=True)

    return rewrite_values(graph, step)
