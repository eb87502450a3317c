# SPDX-License-Identifier: Apache-2.0
"""Rows of reductions: written out in pointwise ops and `reduce`."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Value, numel, plain
from blade.core.dtypes import HALVES

aten = torch.ops.aten


def axes_of(x: Value, dim: Any) -> tuple[int, ...]:
    rank = len(x.shape)
    if dim is None or dim == [] or rank == 0:
        return tuple(range(rank))
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    return tuple(sorted({int(d) % rank for d in dims}))


def _reduce(lo: Lowering, kind: str, x: Value, dim: Any) -> Value:
    axes = axes_of(x, dim)
    return lo.b.reshape(lo.b.reduce(kind, x, axes) if axes else x, lo.shape)


def sum_by_axis(lo: Lowering, x: Value, axes: Sequence[int]) -> Value:
    """The sum over ``axes``, the last one first.

    For images, summing rows first exposes more parallel work than summing all pixels at once, and the
    shorter partial sums are more exact.
    """
    for axis in sorted(axes, reverse=True):
        x = lo.b.reduce("sum", x, (axis,))
    return x


def count_of(x: Value, axes: Sequence[int]) -> Any:
    return plain(sympy.sympify(numel([x.shape[a] for a in axes])))


@lowers(aten.sum.default, aten.sum.dim_IntList)
def sum_(lo: Lowering, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    return _reduce(lo, "sum", lo.b.cast(x, lo.dtype), dim)


@lowers(aten.mean.default, aten.mean.dim)
def mean(lo: Lowering, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    x = lo.b.cast(x, wide(lo.dtype))  # a sum may overflow float16 where the mean does not
    total = lo.b.reduce("sum", x, axes_of(x, dim)) if x.shape else x
    count = lo.number(count_of(x, axes_of(x, dim)), total)
    return lo.b.cast(lo.b.reshape(lo.b.pointwise("div", total, count), lo.shape), lo.dtype)


@lowers(aten.prod.default, aten.prod.dim_int)
def prod(lo: Lowering, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    return _reduce(lo, "prod", lo.b.cast(x, lo.dtype), dim)


@lowers(aten.amax.default, aten.max.default)
def amax(lo: Lowering, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    return _extremum(lo, "max", x, dim)


@lowers(aten.amin.default, aten.min.default)
def amin(lo: Lowering, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    return _extremum(lo, "min", x, dim)


@lowers(aten.max.dim)
def max_of_axis(lo: Lowering, x: Value, dim: int, *_: Any) -> list[Value | None]:
    return _value_without_place(lo, "max", x, dim)


@lowers(aten.min.dim)
def min_of_axis(lo: Lowering, x: Value, dim: int, *_: Any) -> list[Value | None]:
    return _value_without_place(lo, "min", x, dim)


def _value_without_place(lo: Lowering, kind: str, x: Value, dim: int) -> list[Value | None]:
    """An extremum, of which nothing reads where it is."""
    if not lo.first_only or x.dtype == torch.bool:
        raise lo.otherwise()
    return [_extremum(lo, kind, x, dim), None]


def _extremum(lo: Lowering, kind: str, x: Value, dim: Any) -> Value:
    # An empty row has no maximum, and torch raises: sizes are guarded to be at least 1.
    for axis in axes_of(x, dim):
        lo.at_least(x.shape[axis], 1, f"{kind} needs at least one element")
    return _reduce(lo, kind, x, dim)


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def any_(lo: Lowering, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    if x.dtype == torch.uint8:
        raise lo.otherwise()
    return _reduce(lo, "any", lo.b.cast(x, torch.bool), dim)


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def all_(lo: Lowering, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    if x.dtype == torch.uint8:
        raise lo.otherwise()
    return _reduce(lo, "all", lo.b.cast(x, torch.bool), dim)


@lowers(aten.var.correction, aten.var.dim, aten.var.default)
def var(lo: Lowering, x: Value, dim: Any = None, *args: Any, **kwargs: Any) -> Value:
    if isinstance(dim, bool):  # var(x, unbiased)
        dim, args = None, (dim,)
    correction = kwargs.get("correction", 1)
    if args and isinstance(args[0], bool):
        correction = 1 if args[0] else 0
    return lo.b.cast(_variance(lo, x, dim, correction), lo.dtype)


def _variance(lo: Lowering, x: Value, dim: Any, correction: Any) -> Value:
    """Computed in float64, as in torch: squares of small numbers underflow float32."""
    axes = axes_of(x, dim)
    _, spread = moments(lo, lo.b.cast(x, torch.float64), axes)
    count = lo.number(count_of(x, axes) - (1 if correction is None else correction), spread)
    count = lo.b.pointwise("maximum", count, lo.number(0, spread))
    return lo.b.reshape(lo.b.pointwise("div", spread, count), lo.shape)


@lowers(aten.std.correction, aten.std.dim, aten.std.default)
def std(lo: Lowering, x: Value, dim: Any = None, *args: Any, **kwargs: Any) -> Value:
    wide = replace(lo, results=(replace(lo.results[0], dtype=torch.float64),))
    return lo.b.cast(lo.b.pointwise("sqrt", var(wide, x, dim, *args, **kwargs)), lo.dtype)


@lowers(aten.linalg_vector_norm.default)
def vector_norm(lo: Lowering, x: Value, ord: Any = 2, dim: Any = None, *_: Any, **__: Any) -> Value:
    dtype = torch.float32 if lo.dtype in HALVES else torch.float64
    x = lo.b.pointwise("abs", lo.b.cast(x, dtype))
    return lo.b.cast(_norm(lo, x, ord, dim), lo.dtype)


def _norm(lo: Lowering, x: Value, ord: Any, dim: Any) -> Value:
    if ord in (math.inf, -math.inf):
        return _extremum(lo, "max" if ord > 0 else "min", x, dim)
    if ord == 0:
        present = lo.b.pointwise("ne", x, lo.number(0, x), dtype=torch.bool)
        return _reduce(lo, "sum", lo.b.cast(present, x.dtype), dim)
    if ord == 1:
        return _reduce(lo, "sum", x, dim)
    if ord == 2:
        return lo.b.pointwise("sqrt", _reduce(lo, "sum", lo.b.pointwise("mul", x, x), dim))
    total = _reduce(lo, "sum", lo.b.pointwise("pow", x, lo.number(ord, x)), dim)
    return lo.b.pointwise("pow", total, lo.number(1 / ord, total))


@lowers(aten.cosine_similarity.default)
def cosine_similarity(lo: Lowering, x: Value, y: Value, dim: int = 1, eps: float = 1e-8) -> Value:
    """Both divided by their length (or ``eps``, if that is more), then multiplied: torch's order."""
    rank = max(len(x.shape), len(y.shape))
    tall, wide = ((1,) * (rank - len(v.shape)) + v.shape for v in (x, y))
    shape = [b if a == 1 else a for a, b in zip(tall, wide, strict=True)]
    parts = [_unit(lo, lo.value(v, lo.dtype, shape), dim, eps) for v in (x, y)]
    return _reduce(lo, "sum", lo.b.pointwise("mul", *parts), dim)


def _unit(lo: Lowering, x: Value, dim: int, eps: float) -> Value:
    wide = lo.b.cast(x, torch.float64 if x.dtype == torch.float32 else x.dtype)
    length = lo.b.reduce("sum", lo.b.pointwise("mul", wide, wide), axes_of(x, dim))
    length = lo.b.cast(lo.b.pointwise("sqrt", length), x.dtype)
    length = lo.b.pointwise("maximum", length, lo.number(eps, length))
    return lo.b.pointwise("div", x, lo.b.broadcast(length, x.shape))


@lowers(aten.logsumexp.default)
def logsumexp(lo: Lowering, x: Value, dim: Any, keepdim: bool = False) -> Value:
    x = lo.b.cast(x, lo.dtype)
    axes = axes_of(x, dim)
    top = lo.b.reduce("max", x, axes) if axes else x
    infinite = lo.b.pointwise("isinf", top, dtype=torch.bool)
    top = lo.b.pointwise("where", infinite, lo.number(0, top), top)
    exps = lo.b.pointwise("exp", lo.b.pointwise("sub", x, lo.b.broadcast(top, x.shape)))
    total = lo.b.reduce("sum", exps, axes) if axes else exps
    result = lo.b.pointwise("add", lo.b.pointwise("log", total), top)
    return lo.b.reshape(result, lo.shape)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over ``dtype``: 16-bit values are summed in float32."""
    return torch.float32 if dtype in HALVES else dtype


def inverse_deviation(lo: Lowering, variance: Value, eps: float) -> Value:
    """1 / sqrt(variance + eps)"""
    return lo.b.pointwise("rsqrt", lo.b.pointwise("add", variance, lo.number(eps, variance)))


def moments(lo: Lowering, x: Value, axes: Sequence[int]) -> tuple[Value, Value]:
    """x minus its mean, and the sum of that squared (axes kept with size 1)."""
    total = lo.b.reduce("sum", x, axes)
    average = lo.b.pointwise("div", total, lo.number(count_of(x, axes), total))
    centred = lo.b.pointwise("sub", x, lo.b.broadcast(average, x.shape))
    return centred, lo.b.reduce("sum", lo.b.pointwise("mul", centred, centred), axes)
