# SPDX-License-Identifier: Apache-2.0
"""Rows of compute-intensive ops: they become library ops (GEMM, gather)."""

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.gather import index_along
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Value

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@lowers(aten.linear.default)
def linear(lo: Lowering, x: Value, weight: Value, bias: Value | None = None) -> Value:
    if len(weight.shape) != 2 or not x.shape or x.dtype not in FLOATS:
        raise lo.otherwise()
    args = (x, weight) if bias is None else (x, weight, bias)
    return lo.b.make("linear", args, lo.shape, lo.dtype)


@lowers(aten.addmm.default)
def addmm(lo: Lowering, bias: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    plain_bias = len(bias.shape) == 1 and bias.shape[0] == b.shape[1]
    if beta == 1 and alpha == 1 and plain_bias and a.dtype in FLOATS:
        return linear(lo, a, lo.b.permute(b, (1, 0)), bias)
    return _plus(lo, mm, bias, a, b, beta, alpha)


@lowers(aten.addmv.default)
def addmv(lo: Lowering, bias: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    return _plus(lo, mv, bias, a, b, beta, alpha)


@lowers(aten.baddbmm.default)
def baddbmm(lo: Lowering, bias: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    return _plus(lo, bmm, bias, a, b, beta, alpha)


def _plus(
    lo: Lowering, product: Any, bias: Value, a: Value, b: Value, beta: Any, alpha: Any
) -> Value:
    """beta * bias + alpha * product; with beta 0, NaN in the bias is ignored."""
    if a.dtype not in (
        torch.float32,
        torch.float64,
    ):  # 16-bit results are rounded once, after the sum
        raise lo.otherwise()
    y: Value = product(lo, a, b)
    if alpha != 1:
        y = lo.b.pointwise("mul", y, lo.number(alpha, y))
    if beta == 0:
        return y
    x = lo.value(bias, lo.dtype)
    if beta != 1:
        return lo.b.pointwise("fma", x, lo.number(beta, x), y)
    return lo.b.pointwise("add", y, x)


@lowers(aten.mm.default)
def mm(lo: Lowering, a: Value, b: Value) -> Value:
    return linear(lo, a, lo.b.permute(b, (1, 0)))


@lowers(aten.bmm.default)
def bmm(lo: Lowering, a: Value, b: Value) -> Value:
    if a.dtype not in FLOATS:
        raise lo.otherwise()
    return lo.b.make("matmul", (a, b), lo.shape, lo.dtype)


@lowers(aten.mv.default)
def mv(lo: Lowering, a: Value, b: Value) -> Value:
    return _times_vector(lo, a, b)


@lowers(aten.dot.default)
def dot(lo: Lowering, a: Value, b: Value) -> Value:
    return _times_vector(lo, a, b)


@lowers(aten.outer.default)
def outer(lo: Lowering, a: Value, b: Value) -> Value:
    column = lo.b.reshape(a, (*a.shape, 1))
    return lo.b.pointwise("mul", lo.value(column, lo.dtype), lo.value(b, lo.dtype))


def _times_vector(lo: Lowering, a: Value, b: Value) -> Value:
    """Sum of ``a`` times the vector ``b`` over the last axis of ``a``."""
    if a.dtype not in FLOATS:
        raise lo.otherwise()
    a = a if len(a.shape) > 1 else lo.b.reshape(a, (1, *a.shape))
    weight = lo.b.reshape(b, (1, *b.shape))
    y = lo.b.make("linear", (a, weight), (*a.shape[:-1], 1), lo.dtype)
    return lo.b.reshape(y, lo.shape)


@lowers(aten.kron.default)
def kron(lo: Lowering, a: Value, b: Value) -> Value:
    rank = len(lo.shape)
    tall, wide = ((1,) * (rank - len(v.shape)) + v.shape for v in (a, b))
    x = lo.b.reshape(a, [d for size in tall for d in (size, 1)])
    y = lo.b.reshape(b, [d for size in wide for d in (1, size)])
    shape = [d for pair in zip(tall, wide, strict=True) for d in pair]
    product = lo.b.pointwise("mul", lo.value(x, lo.dtype, shape), lo.value(y, lo.dtype, shape))
    return lo.b.reshape(product, lo.shape)


@lowers(aten.matmul.default)
def matmul(lo: Lowering, a: Value, b: Value) -> Value:
    if a.dtype not in FLOATS or not a.shape or not b.shape:
        raise lo.otherwise()
    if len(b.shape) == 1:
        return _times_vector(lo, a, b)
    if len(a.shape) == 1 and len(b.shape) == 2:
        return _times_vector(lo, lo.b.permute(b, (1, 0)), a)
    if len(a.shape) == 1:
        raise lo.otherwise()
    if len(b.shape) == 2:
        return linear(lo, a, lo.b.permute(b, (1, 0)))
    batch = lo.shape[:-2]
    a = lo.b.broadcast(a, (*batch, *a.shape[-2:]))
    b = lo.b.broadcast(b, (*batch, *b.shape[-2:]))
    return lo.b.make("matmul", (a, b), lo.shape, lo.dtype)


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(lo: Lowering, x: Value, indices: Sequence[Value | None]) -> Value:
    """Indices that are 0..n-1 along an axis of their own each select everything: a change of layout."""
    known = [i for i in indices if i is not None]
    rank = max((len(i.shape) for i in known), default=0)
    axes = [_counted_axis(i, rank) for i in indices]
    found = [a for a in axes if a is not None]
    if len(indices) != len(found) or found != sorted(set(found)):
        return index_along(lo, x, indices)
    for axis, counted in enumerate(found):
        size = lo.shape[counted]
        if size != x.shape[axis]:
            lo.b.require(sympy.Le(size, x.shape[axis]), "index within bounds")
            x = lo.b.slice(x, axis, 0, 1, size)
    rest = range(rank, rank + len(x.shape) - len(found))
    return lo.b.make("broadcast", (x,), lo.shape, lo.dtype, axes=(*found, *rest))


def _counted_axis(index: Value | None, rank: int) -> int | None:
    """The result axis along which ``index`` is 0, 1, 2, ...; ``None`` if it is not an ``iota``."""
    if index is None or index.op != "iota":
        return None
    return int(index.attrs["axis"]) + rank - len(index.shape)
