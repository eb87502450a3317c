# SPDX-License-Identifier: Apache-2.0
"""Rules for casts between float32 and 16 bits around products, shared by the passes that narrow them.

A cast to 16 bits moves to the kernel that computes its operand; a cast from 16 bits to the kernels that read it.
"""

from collections.abc import Mapping, Sequence

import torch

from blade.backends.disc.ir.graph import IrBuilder, Rule, Value
from blade.backends.disc.ir.simplify import RULES
from blade.core.dtypes import HALVES


def drop_cast_and_back(b: IrBuilder, v: Value) -> Value | None:
    """cast(cast(x : f32) : f16) -> x, for x of 16 bits."""
    inner = v.args[0]
    return inner.args[0] if _is_widened(inner) and inner.args[0].dtype == v.dtype else None


def cast_before_layout(b: IrBuilder, v: Value) -> Value | None:
    """Cast to 16 bits before a layout op: in the kernel that computes the value, not in a copy."""
    inner = v.args[0]
    if v.dtype.itemsize != 2 or inner.dtype != torch.float32 or inner.op not in _MOVED:
        return None
    args = [b.cast(a, v.dtype) for a in inner.args]
    return b.make(inner.op, args, v.shape, v.dtype, **inner.attrs)


def cast_before_maximum(b: IrBuilder, v: Value) -> Value | None:
    """Cast to 16 bits before max pooling: the largest number, rounded, is the largest of the rounded."""
    inner = v.args[0]
    if v.dtype.itemsize != 2 or inner.dtype != torch.float32 or inner.op != "spatial":
        return None
    if inner.attrs["target"] is not torch.ops.aten.max_pool2d.default:
        return None
    return b.make("spatial", [b.cast(inner.args[0], v.dtype)], v.shape, v.dtype, **inner.attrs)


def cast_after_layout(b: IrBuilder, v: Value) -> Value | None:
    """Widen a product's result after a layout op: it is moved as 16 bits, and its readers widen it."""
    inner = v.args[0]
    if not _is_widened(inner):
        return None
    return b.cast(b.make(v.op, inner.args, v.shape, inner.args[0].dtype, **v.attrs), v.dtype)


def _is_widened(v: Value) -> bool:
    return v.op == "cast" and v.dtype == torch.float32 and v.args[0].dtype in HALVES


_MOVED = ("permute", "reshape", "broadcast", "concat")
NARROW_RULES: Mapping[str, Sequence[Rule]] = {
    **RULES,
    "cast": [drop_cast_and_back, cast_before_layout, cast_before_maximum, *RULES["cast"]],
    **{op: [*RULES[op], cast_after_layout] for op in ("permute", "reshape", "slice")},
}
