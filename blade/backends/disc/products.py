# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights are not known yet, as in training, become products of two computed matrices.

    %3 = linear %x %w %bias         x [s0, s1, 768], w [3072, 768], an input
                                    ->
    %1 = reshape %x                 [1, s0*s1, 768]
    %2 = permute %w                 [1, 768, 3072]
    %3 = matmul %1 %2 %bias         [1, s0*s1, 3072], reshaped

The generated product packs what it reads of the second matrix as it goes, in any layout; it is what
weights that change in every step want, and their gradients.
"""

import torch

from blade.backends.disc.ir import Builder, Graph, Value, numel
from blade.backends.disc.legalize import is_packed
from blade.backends.disc.rebuild import rebuild


def multiply_computed(graph: Graph) -> Graph:
    """``graph`` with generated products wherever weights cannot be packed beforehand."""

    def step(b: Builder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "linear" or is_packed(v) or any(a.dtype != torch.float32 for a in args):
            return None
        x, weight, *bias = args
        rows, (columns, depth) = numel(x.shape[:-1]), weight.shape
        if rows == 1:  # a vector: ATen's
            return None
        left = b.reshape(x, (1, rows, depth))
        right = b.reshape(b.permute(weight, (1, 0)), (1, depth, columns))
        product = b.make("matmul", [left, right, *bias], (1, rows, columns), v.dtype)
        return b.reshape(product, v.shape)

    return rebuild(graph, step)
