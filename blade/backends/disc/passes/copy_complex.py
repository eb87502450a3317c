# SPDX-License-Identifier: Apache-2.0
"""Copies of complex tensors are calls of torch's ops, because no kernel reads complex numbers.

%3 c64[s0, 4] = cast %2      ->      %3 = call %2 {target=aten.repeat, template=(%0, (1, 1))}
"""

import torch

from blade.backends.disc.frontend.ops.table import OperandSlot
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value, contiguous_strides
from blade.backends.disc.ir.rewrite import rewrite_values

_COPY = torch.ops.aten.repeat.default  # its result is row-major, whatever it repeats


def copy_complex(graph: Graph) -> Graph:
    """``graph`` without kernels that copy complex numbers."""

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "cast" or not v.dtype.is_complex:
            return None
        template = (OperandSlot(0), (1,) * len(v.shape))
        strides = contiguous_strides(v.shape)
        return b.make(
            "call", args, v.shape, v.dtype, strides, target=_COPY, template=template, **v.attrs
        )

    return rewrite_values(graph, step)
