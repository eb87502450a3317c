# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: products in 16 bits with float32 accumulation, everything else in float32.

    %3 = linear %x %w                       %1 = cast %x : f16          stored by the kernel that makes %x
    %4 = gelu.. %3                  ->      %2 = cast %w : f16          once per loaded engine
                                            %3 = linear %1 %2 : f16
                                            %4 = gelu.. (cast %3 : f32)

Sums, norms, softmax, exponentials and powers keep float32, as autocast has it. Inputs and outputs keep their
dtypes. Casts are pointwise: they run in the kernels around the products, and cost no launch.
"""

from collections.abc import Mapping, Sequence

import torch

from blade.backends.disc.gpu.pointwise import HALVES
from blade.backends.disc.ir import Builder, Graph, Rule, Value, rewrite
from blade.backends.disc.simplify import RULES

F32 = torch.float32
PRODUCTS = ("linear", "matmul", "conv", "attention")
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def use_half(graph: Graph, dtype: torch.dtype) -> Graph:
    """``graph`` with its float32 products computed in ``dtype``, float16 or bfloat16."""
    narrowed = {op: [_Narrow(dtype)] for op in (*PRODUCTS, "scaled_linear", "call")}
    return rewrite(graph, {**_RULES, **narrowed})


class _Narrow:
    """The rule that makes a product in ``dtype`` of one in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, b: Builder, v: Value) -> Value | None:
        if v.dtype == F32 and v.op == "scaled_linear":
            return b.cast(b.make(v.op, v.args, v.shape, self.dtype, **v.attrs), F32)
        if v.dtype != F32 or (v.op == "call" and v.attrs["target"] is not _ATTENTION):
            return None
        mask = v.op in ("call", "attention")
        args = [
            b.cast(self._limited(b, a) if mask and k == 3 else a, self.dtype)
            for k, a in enumerate(v.args)
        ]
        return b.cast(b.make(v.op, args, v.shape, self.dtype, v.strides, **v.attrs), F32)

    def _limited(self, b: Builder, bias: Value) -> Value:
        """A mask's least float32 would become -inf in float16, and a row of these NaN."""
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


def narrow_and_back(b: Builder, v: Value) -> Value | None:
    """What was 16 bits, seen as float32, is the same 16 bits again."""
    inner = v.args[0]
    return inner.args[0] if _is_widened(inner) and inner.args[0].dtype == v.dtype else None


def narrow_before_layout(b: Builder, v: Value) -> Value | None:
    """The kernel that makes a value stores it in 16 bits, not one that copies it."""
    inner = v.args[0]
    if v.dtype.itemsize != 2 or inner.dtype != F32 or inner.op not in _MOVED:
        return None
    args = [b.cast(a, v.dtype) for a in inner.args]
    return b.make(inner.op, args, v.shape, v.dtype, **inner.attrs)


def widen_after_layout(b: Builder, v: Value) -> Value | None:
    """A product's result is moved as the 16 bits it is; who computes with it widens it."""
    inner = v.args[0]
    if not _is_widened(inner):
        return None
    return b.cast(b.make(v.op, inner.args, v.shape, inner.args[0].dtype, **v.attrs), v.dtype)


def _is_widened(v: Value) -> bool:
    return v.op == "cast" and v.dtype == F32 and v.args[0].dtype in HALVES


_MOVED = ("permute", "reshape", "broadcast", "concat")
_RULES: Mapping[str, Sequence[Rule]] = {
    **RULES,
    "cast": [narrow_and_back, narrow_before_layout, *RULES["cast"]],
    **{op: [*RULES[op], widen_after_layout] for op in ("permute", "reshape", "slice")},
}
