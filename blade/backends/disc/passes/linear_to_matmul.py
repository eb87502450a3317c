# SPDX-License-Identifier: Apache-2.0
"""Linear layers with computed weights, as in training, become matrix products.

    %3 = linear %x %w %bias         x [s0, s1, 768], w [3072, 768], an input
                                    ->
    %1 = reshape %x                 [1, s0*s1, 768]
    %2 = permute %w                 [1, 768, 3072]
    %3 = matmul %1 %2 %bias         [1, s0*s1, 3072], reshaped

The generated product packs its second matrix on the fly, in any layout. This suits weights that change in
every step, and their gradients.
"""

import torch

from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Value,
    numel,
)
from blade.backends.disc.ir.rewrite import rewrite_values
from blade.backends.disc.passes.legalize import NARROW_SOURCES, is_packed


def linear_to_matmul(graph: Graph) -> Graph:
    """``graph`` with generated products wherever weights cannot be packed in advance."""

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "linear" or is_packed(v) or v.dtype not in NARROW_SOURCES:
            return None
        if any(a.dtype != v.dtype for a in args):
            return None
        x, weight, *bias = args
        if v.dtype == torch.bfloat16:  # a generated product takes its bias in float32
            bias = [b.cast(c, torch.float32) for c in bias]
        rows, (columns, depth) = numel(x.shape[:-1]), weight.shape
        if rows == 1:  # a vector: stays with ATen
            return None
        left = b.reshape(x, (1, rows, depth))
        right = b.reshape(b.permute(weight, (1, 0)), (1, depth, columns))
        product = b.make("matmul", [left, right, *bias], (1, rows, columns), v.dtype)
        return b.reshape(product, v.shape)

    return rewrite_values(graph, step)
