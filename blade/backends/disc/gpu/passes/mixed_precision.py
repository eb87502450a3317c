# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: products in 16 bits with float32 accumulation, everything else in float32.

    %3 = linear %x %w                       %1 = cast %x : f16          in the kernel that computes %x
    %4 = gelu.. %3                  ->      %2 = cast %w : f16          once per loaded engine
                                            %3 = linear %1 %2 : f16
                                            %4 = gelu.. (cast %3 : f32)

Sums, norms, softmax, exponentials and powers keep float32, as in autocast. Inputs and outputs keep their
dtypes. Casts are pointwise: they run in the kernels around the products and need no launch.
"""

import math

import torch

from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Value,
    rewrite,
)
from blade.backends.disc.passes.narrow_casts import NARROW_RULES

F32 = torch.float32
PRODUCTS = ("linear", "matmul", "conv", "attention")
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def use_mixed_precision(graph: Graph, dtype: torch.dtype) -> Graph:
    """``graph`` with its float32 products computed in ``dtype``, float16 or bfloat16."""
    narrowed = {op: [_HalfProducts(dtype)] for op in (*PRODUCTS, "scaled_linear", "call")}
    return rewrite(graph, {**NARROW_RULES, **narrowed})


class _HalfProducts:
    """The rule that replaces a float32 product by one in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.lowest = dtype, torch.finfo(dtype).min

    def __call__(self, b: IrBuilder, v: Value) -> Value | None:
        if v.dtype == F32 and v.op == "scaled_linear":
            return b.cast(b.make(v.op, v.args, v.shape, self.dtype, **v.attrs), F32)
        if v.dtype != F32 or (v.op == "call" and v.attrs["target"] is not _ATTENTION):
            return None
        mask = v.op in ("call", "attention")
        args = [b.cast(a, self.dtype) for a in v.args[:3]]
        args += [b.cast(self._limited(b, a) if mask else a, self.dtype) for a in v.args[3:]]
        attrs = dict(v.attrs)
        if (fill := attrs.get("fill")) is not None:  # as it is in the bias
            nearest = fill if math.isinf(fill) else max(fill, self.lowest)
            attrs["fill"] = float(torch.tensor(nearest).to(self.dtype))
        return b.cast(b.make(v.op, args, v.shape, self.dtype, v.strides, **attrs), F32)

    def _limited(self, b: IrBuilder, bias: Value) -> Value:
        """Limit a mask to float16's range: its lowest float32 would become -inf, and a row of these NaN."""
        if torch.finfo(self.dtype).min <= torch.finfo(F32).min or bias.dtype != F32:
            return bias
        if bias.op == "broadcast":
            core = self._limited(b, bias.args[0])
            return b.make("broadcast", (core,), bias.shape, bias.dtype, **bias.attrs)
        lowest = b.fill(torch.finfo(self.dtype).min, bias.shape, F32)
        never = b.fill(float("-inf"), bias.shape, F32)
        limited = b.pointwise("maximum", bias, lowest)
        is_never = b.pointwise("eq", bias, never, dtype=torch.bool)
        return b.pointwise("where", is_never, bias, limited)
