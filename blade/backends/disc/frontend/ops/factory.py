# SPDX-License-Identifier: Apache-2.0
"""Rows of ops that create tensors from sizes: constants, ranges, triangles."""

from typing import Any

import torch

from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Value

aten = torch.ops.aten


@lowers(
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
    aten.scalar_tensor.default,
)
def full(lo: Lowering, *args: Any, **kwargs: Any) -> Value:
    value = args[-1] if len(args) > 1 or not isinstance(args[0], Value) else kwargs["fill_value"]
    return lo.b.fill(value, lo.shape, lo.dtype)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(lo: Lowering, *_: Any, **__: Any) -> Value:
    return lo.b.fill(1, lo.shape, lo.dtype)


@lowers(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def zeros(lo: Lowering, *_: Any, **__: Any) -> Value:
    return lo.b.fill(0, lo.shape, lo.dtype)


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(lo: Lowering, *args: Any, **_: Any) -> Value:
    # torch accumulates fractional steps in its own way.
    if any(isinstance(a, (float, torch.SymFloat)) for a in args):
        raise lo.otherwise()
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    dtype = torch.int64 if lo.dtype.is_floating_point else lo.dtype
    index = lo.b.make("iota", (), lo.shape, dtype, axis=0)
    if step != 1:
        index = lo.b.pointwise("mul", index, lo.number(step, index))
    if start != 0:
        index = lo.b.pointwise("add", index, lo.number(start, index))
    return lo.b.cast(index, lo.dtype)


@lowers(aten.tril.default)
def tril(lo: Lowering, x: Value, diagonal: Any = 0) -> Value:
    return _triangle(lo, "le", x, diagonal)


@lowers(aten.triu.default)
def triu(lo: Lowering, x: Value, diagonal: Any = 0) -> Value:
    return _triangle(lo, "ge", x, diagonal)


def _triangle(lo: Lowering, op: str, x: Value, diagonal: Any) -> Value:
    rank = len(x.shape)
    row, column = (lo.b.make("iota", (), x.shape, torch.int64, axis=rank - k) for k in (2, 1))
    limit = lo.b.pointwise("add", row, lo.number(diagonal, row))
    inside = lo.b.pointwise(op, column, limit, dtype=torch.bool)
    return lo.b.pointwise("where", inside, x, lo.number(0, x))
