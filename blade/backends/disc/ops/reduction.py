# SPDX-License-Identifier: Apache-2.0
"""Rows of reductions, softmax and normalization: written out in pointwise ops and `reduce`."""

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from blade.backends.disc.ir import Value, numel, plain
from blade.backends.disc.ops.table import Lowering, float_dtype, lowers

aten = torch.ops.aten


def _axes(x: Value, dim: Any) -> tuple[int, ...]:
    rank = len(x.shape)
    if dim is None or dim == [] or rank == 0:
        return tuple(range(rank))
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    return tuple(sorted({int(d) % rank for d in dims}))


def _reduce(lo: Lowering, kind: str, x: Value, dim: Any) -> Value:
    axes = _axes(x, dim)
    return lo.b.reshape(lo.b.reduce(kind, x, axes) if axes else x, lo.shape)


def _count(x: Value, axes: Sequence[int]) -> Any:
    return plain(sympy.sympify(numel([x.shape[a] for a in axes])))


@lowers(aten.sum.default, aten.sum.dim_IntList)
def sum_(lo: Lowering, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    return _reduce(lo, "sum", lo.b.cast(x, lo.dtype), dim)


@lowers(aten.mean.default, aten.mean.dim)
def mean(lo: Lowering, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    x = lo.b.cast(x, lo.dtype)
    total = lo.b.reduce("sum", x, _axes(x, dim)) if x.shape else x
    count = lo.number(_count(x, _axes(x, dim)), total)
    return lo.b.reshape(lo.b.pointwise("div", total, count), lo.shape)


@lowers(aten.prod.default, aten.prod.dim_int)
def prod(lo: Lowering, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    return _reduce(lo, "prod", lo.b.cast(x, lo.dtype), dim)


@lowers(aten.amax.default, aten.max.default)
def amax(lo: Lowering, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    return _extremum(lo, "max", x, dim)


@lowers(aten.amin.default, aten.min.default)
def amin(lo: Lowering, x: Value, dim: Any = None, *_: Any, **__: Any) -> Value:
    return _extremum(lo, "min", x, dim)


def _extremum(lo: Lowering, kind: str, x: Value, dim: Any) -> Value:
    # An empty row has no maximum: torch raises, so a size that may be 0 stays with torch.
    for axis in _axes(x, dim):
        lo.b.require(sympy.Ge(x.shape[axis], 1), f"{kind} needs at least one element")
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
    axes = _axes(x, dim)
    _, spread = _moments(lo, x, axes)
    count = lo.number(_count(x, axes) - (1 if correction is None else correction), spread)
    zero = lo.number(0, spread)
    count = lo.b.pointwise("maximum", count, zero)
    return lo.b.reshape(lo.b.pointwise("div", spread, count), lo.shape)


@lowers(aten.std.correction, aten.std.dim, aten.std.default)
def std(lo: Lowering, x: Value, dim: Any = None, *args: Any, **kwargs: Any) -> Value:
    return lo.b.pointwise("sqrt", var(lo, x, dim, *args, **kwargs))


def _moments(lo: Lowering, x: Value, axes: Sequence[int]) -> tuple[Value, Value]:
    """x minus its mean, and the sum of that squared (axes kept with size 1)."""
    total = lo.b.reduce("sum", x, axes)
    average = lo.b.pointwise("div", total, lo.number(_count(x, axes), total))
    centred = lo.b.pointwise("sub", x, lo.b.broadcast(average, x.shape))
    return centred, lo.b.reduce("sum", lo.b.pointwise("mul", centred, centred), axes)


@lowers(aten.softmax.int, aten._softmax.default)
def softmax(lo: Lowering, x: Value, dim: int, *_: Any) -> Value:
    exps, total = _exponentials(lo, x, dim)
    return lo.b.pointwise("div", exps, lo.b.broadcast(total, exps.shape))


def _exponentials(lo: Lowering, x: Value, dim: int) -> tuple[Value, Value]:
    shifted = _shifted(lo, x, dim)
    exps = lo.b.pointwise("exp", shifted)
    return exps, lo.b.reduce("sum", exps, _axes(x, dim))


def _shifted(lo: Lowering, x: Value, dim: int) -> Value:
    x = lo.b.cast(x, lo.dtype)
    top = lo.b.reduce("max", x, _axes(x, dim)) if x.shape else x
    return lo.b.pointwise("sub", x, lo.b.broadcast(top, x.shape))


@lowers(aten.log_softmax.int, aten._log_softmax.default)
def log_softmax(lo: Lowering, x: Value, dim: int, *_: Any) -> Value:
    shifted = _shifted(lo, x, dim)
    total = lo.b.reduce("sum", lo.b.pointwise("exp", shifted), _axes(x, dim))
    log = lo.b.broadcast(lo.b.pointwise("log", total), shifted.shape)
    return lo.b.pointwise("sub", shifted, log)


@lowers(aten.layer_norm.default)
def layer_norm(
    lo: Lowering,
    x: Value,
    normalized_shape: Sequence[Any],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Value:
    rank = len(x.shape)
    axes = range(rank - len(normalized_shape), rank)
    dtype = float_dtype(x.dtype)
    centred, spread = _moments(lo, x, tuple(axes))
    return _scaled(lo, centred, spread, _count(x, tuple(axes)), weight, bias, eps, dtype)


def _scaled(
    lo: Lowering,
    centred: Value,
    spread: Value,
    count: Any,
    weight: Value | None,
    bias: Value | None,
    eps: float,
    dtype: torch.dtype,
) -> Value:
    variance = lo.b.pointwise("div", spread, lo.number(count, spread))
    scale = lo.b.pointwise("add", variance, lo.number(eps, variance))
    scale = lo.b.pointwise("rsqrt", scale)
    y = lo.b.pointwise("mul", centred, lo.b.broadcast(scale, centred.shape))
    if weight is None:
        return y if bias is None else lo.b.pointwise("add", y, lo.value(bias, dtype))
    w = lo.value(weight, dtype)
    return (
        lo.b.pointwise("mul", y, w)
        if bias is None
        else lo.b.pointwise("fma", y, w, lo.value(bias, dtype))
    )


@lowers(aten.rms_norm.default)
def rms_norm(
    lo: Lowering, x: Value, normalized_shape: Sequence[Any], weight: Any = None, eps: Any = None
) -> Value:
    axes = tuple(range(len(x.shape) - len(normalized_shape), len(x.shape)))
    squares = lo.b.reduce("sum", lo.b.pointwise("mul", x, x), axes)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled(lo, x, squares, _count(x, axes), weight, None, eps, x.dtype)
