# SPDX-License-Identifier: Apache-2.0
"""Rows of scaled dot-product attention.

Work that can be shared is moved out of the op: a boolean mask, which torch would convert again in every
layer, becomes an additive float mask at its own shape, one value for all layers.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.table import Lowering, ResultType, lowers
from blade.backends.disc.ir.attention import (
    attend,
    changes_nothing,
    grouped,
    unrepeated,
    why_not,
)
from blade.backends.disc.ir.flash_attention import attend_and_sum, attention_gradient
from blade.backends.disc.ir.flash_attention import why_not as flash_attention_why_not
from blade.backends.disc.ir.graph import Shape, Value, contiguous_strides
from blade.backends.disc.ir.views import view_of

aten = torch.ops.aten


@lowers(aten.scaled_dot_product_attention.default)
def attention(
    lo: Lowering,
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    if dropout_p != 0.0:
        raise lo.otherwise()
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zero, never = (lo.b.fill(x, attn_mask.shape, q.dtype) for x in (0.0, -math.inf))
        bias = lo.b.pointwise("where", attn_mask, zero, never)
    if bias is not None and changes_nothing(bias):
        bias = None
    if isinstance(scale, (int, float)):
        factor = float(scale)
    elif scale is None and isinstance(q.shape[-1], int):
        factor = 1 / math.sqrt(max(1, q.shape[-1]))
    else:
        factor = math.nan
    if math.isnan(factor) or why_not(q, k, v, bias, lo.forms) is not None:
        return _called(lo, q, k, v, bias, is_causal, scale, enable_gqa)
    lead = lo.shape[:-2]
    shape = (*lead, q.shape[-2], k.shape[-2])
    _require_equal(lo, v.shape[-2:-1], shape[-1:], "as many values as keys")
    if bias is not None:
        _require_equal(lo, bias.shape, shape, "a mask of the scores' shape")
    wide = None if bias is None else lo.b.broadcast(bias, shape)
    q = lo.b.broadcast(q, (*lead, *q.shape[-2:]))
    few = [unrepeated(x) for x in (k, v)]
    if len(lead) < 4 and all(x is not None and x.shape[:-3] == lead[:-1] for x in few):
        one, other = (x for x in few if x is not None)
        if one.shape[-3] == other.shape[-3]:
            return grouped(lo.b, q, one, other, wide, factor, is_causal, hides=True)
    if enable_gqa and k.shape[-3] != q.shape[-3]:
        if not (isinstance(k.shape[-3], int) and isinstance(q.shape[-3], int)) or len(lead) == 4:
            return _called(lo, q, k, v, bias, is_causal, scale, enable_gqa)
        k, v = (lo.b.broadcast(x, (*lead[:-1], *x.shape[-3:])) for x in (k, v))
        return grouped(lo.b, q, k, v, wide, factor, is_causal, hides=True)
    k, v = (lo.b.broadcast(x, (*lead, *x.shape[-2:])) for x in (k, v))
    return attend(lo.b, q, k, v, wide, factor, is_causal, hides=True)


def _require_equal(lo: Lowering, have: Shape, want: Shape, why: str) -> None:
    """Rely on sizes, aligned at the end, being equal or 1; torch's shape function does not check them."""
    for a, b in zip(reversed(have), reversed(want), strict=False):
        if a not in (1, b):
            lo.b.require(sympy.Eq(a, b), why)


def _called(
    lo: Lowering,
    q: Value,
    k: Value,
    v: Value,
    bias: Value | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Value:
    args = (q, k, v, bias, 0.0, is_causal, scale, enable_gqa)
    result: Value = lo.call(aten.scaled_dot_product_attention.default, args)
    return result


_ALIGNED = 8  # elements between the rows of a bias, for torch's memory-efficient attention


@lowers(aten._scaled_dot_product_efficient_attention.default)
def efficient_attention(
    lo: Lowering,
    q: Value,
    k: Value,
    v: Value,
    attn_bias: Value | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    bias = _aligned(lo, attn_bias)
    args = (q, k, v, bias, compute_log_sumexp, dropout_p, is_causal, scale)
    return lo.call(aten._scaled_dot_product_efficient_attention.default, args)


@lowers(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_attention_backward(
    lo: Lowering,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    attn_bias: Value | None,
    out: Value,
    *rest: Any,
    is_causal: bool = False,
    scale: float | None = None,
) -> Any:
    """``rest``: the sums, the generator's state, dropout, which gradients are asked for, causal or not."""
    rest = rest if len(rest) == 6 else (*rest, is_causal)
    args = (grad, q, k, v, _aligned(lo, attn_bias), _as_forward_lays_it(lo, out), *rest, scale)
    return lo.call(aten._scaled_dot_product_efficient_attention_backward.default, args)


def _as_forward_lays_it(lo: Lowering, out: Value) -> Value:
    """``out`` [N, heads, rows, width] in memory as [N, rows, heads, width].

    The kernel reads it so, whatever its strides are.
    """
    rows = lo.b.permute(out, (0, 2, 1, 3))
    view = view_of(rows)
    if view is None or view.strides != contiguous_strides(rows.shape):
        rows = _row_major(lo, rows.shape, aten.repeat.default, rows, (1, 1, 1, 1))
    return lo.b.permute(rows, (0, 2, 1, 3))


def _aligned(lo: Lowering, bias: Value | None) -> Value | None:
    """``bias`` in memory with rows of a multiple of ``_ALIGNED`` elements, if torch has padded it to that.

    Padding that is cut off again is simplified away here, so that a call pads.
    """
    row = None if bias is None else bias.shape[-1]
    if bias is None or not isinstance(row, int) or row % _ALIGNED == 0:
        return bias
    axes = bias.attrs.get("axes")
    if bias.op == "broadcast" and axes and axes[-1] == len(bias.shape) - 1:  # without copies
        narrow = _padded(lo, bias.args[0])
        return lo.b.make("broadcast", (narrow,), bias.shape, bias.dtype, axes=axes)
    return _padded(lo, bias)


def _padded(lo: Lowering, x: Value) -> Value:
    """``x``, a part of new memory with longer rows."""
    *lead, row = x.shape
    more = -row % _ALIGNED
    wide = _row_major(lo, (*lead, row + more), aten.constant_pad_nd.default, x, (0, more), 0.0)
    return lo.b.slice(wide, len(lead), 0, 1, row)


def _row_major(
    lo: Lowering, shape: Shape, op: torch._ops.OpOverload, x: Value, *others: Any
) -> Value:
    """What ``op``, which lays its result out row by row, makes of ``x``."""
    result = ResultType(shape, x.dtype, contiguous_strides(shape))
    made: Value = replace(lo, results=(result,), places=None).call(op, (x, *others))
    return made


@lowers(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(
    lo: Lowering,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> list[Value]:
    """Attention in training, with the log-sum-exp that its gradient needs."""
    case = _case(lo, q, k, v, attn_mask, dropout_p, scale)
    return list(attend_and_sum(lo.b, *case.operands, case.bias, case.scale, is_causal))


@lowers(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_backward(
    lo: Lowering,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    logs: Value,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> list[Value]:
    case = _case(lo, q, k, v, attn_mask, dropout_p, scale)
    shape = (*q.shape[:3], v.shape[3])
    grad, out = (_of_shape(lo, x, shape) for x in (grad, out))
    logs = _of_shape(lo, logs, shape[:3])
    delta = lo.b.reduce("sum", lo.b.pointwise("mul", grad, out), (3,))
    delta = lo.b.reshape(delta, logs.shape)
    how = (case.bias, case.scale, is_causal)
    return list(attention_gradient(lo.b, grad, case.operands, logs, delta, *how))


@dataclass(frozen=True)
class _AttentionOperands:
    """Operands of generated attention: q, k and v, a mask at the shape of the scores, the scale."""

    operands: tuple[Value, Value, Value]
    bias: Value | None
    scale: float


def _case(
    lo: Lowering,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    dropout_p: float,
    scale: float | None,
) -> _AttentionOperands:
    """The operands; raises ``NotLowered`` for cases of ATen's op. Empty sizes are guarded: ATen
    divides by 0.
    """
    for size in (*q.shape, *k.shape):
        lo.at_least(size, 1, "attention between elements")
    known = isinstance(scale, (int, float)) or (scale is None and isinstance(q.shape[-1], int))
    if dropout_p != 0.0 or not known or flash_attention_why_not(q, k, v, mask) is not None:
        raise lo.otherwise()
    k = _of_shape(lo, k, (*q.shape[:2], k.shape[2], q.shape[3]))
    v = _of_shape(lo, v, (*k.shape[:3], v.shape[3]))
    factor = 1 / math.sqrt(int(q.shape[-1])) if scale is None else float(scale)
    shape = (*q.shape[:3], k.shape[2])
    return _AttentionOperands(
        (q, k, v), None if mask is None else lo.b.broadcast(mask, shape), factor
    )


def _of_shape(lo: Lowering, x: Value, shape: Shape) -> Value:
    """``x`` at ``shape``; relies on its sizes being equal to these."""
    for axis, (size, wanted) in enumerate(zip(x.shape, shape, strict=True)):
        if size != wanted:
            lo.b.require(sympy.Eq(size, wanted), "sizes of attention")
            x = lo.b.slice(x, axis, 0, 1, wanted)
    return x
