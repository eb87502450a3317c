# SPDX-License-Identifier: Apache-2.0
"""Indices are checked by the kernel that uses them, as torch's own kernels do on a GPU.

On CPU a check runs before (ops/gather.py) and the original can still answer. Here an index out of bounds stops
the kernel: CUDA reports a device-side assertion, after which the process cannot go on, as in eager mode.
"""

from blade.backends.disc.ir import Builder, Graph, Value
from blade.backends.disc.rebuild import rebuild


def assert_in_kernels(graph: Graph) -> Graph:
    """Gathers assert instead of waiting for a check."""

    def step(b: Builder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "gather" or len(args) < 3:
            return None
        return b.make(v.op, args[:2], v.shape, v.dtype, **v.attrs, asserts=True)

    return rebuild(graph, step)
