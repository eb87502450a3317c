# SPDX-License-Identifier: Apache-2.0
"""Rows of explicit quantization as PT2E writes it: the ops of ``torch.ops.quantized_decomposed``.

Quantizing is pointwise arithmetic, with the same steps and types as torch's definitions
(torch/ao/quantization/fx/_decomposed.py), and the parameters of a row are a reduction of that row: both
fuse into the kernel that produces the row. Dequantizing stays one op until products have been matched
(lower_quantized.py). The library is not imported here: its ops are registered by name.
"""

from collections.abc import Callable
from typing import Any

import torch

from blade.backends.disc.frontend.ops.table import Lowering, RuleT, lowers_named
from blade.backends.disc.ir.graph import Value

_LIBRARY = "quantized_decomposed"
_BYTES = (torch.int8, torch.uint8)


def _named(*overloads: str) -> Callable[[RuleT], RuleT]:
    return lowers_named(*(f"{_LIBRARY}.{o}" for o in overloads))


@_named("quantize_per_tensor.default", "quantize_per_tensor.tensor", "quantize_per_tensor.tensor2")
def quantize_per_tensor(
    lo: Lowering, x: Value, scale: Any, zero: Any, low: Any, high: Any, dtype: torch.dtype
) -> Value:
    _check(lo, x, dtype)
    inverse = lo.number(1.0 / _number(lo, scale), x)
    y = lo.b.pointwise("round", lo.b.pointwise("mul", x, inverse))
    zero = _number(lo, zero)
    if zero != 0:
        y = lo.b.pointwise("add", y, lo.number(zero, y))
    return _clamped(lo, y, _number(lo, low), _number(lo, high), dtype)


@_named("quantize_per_channel.default")
def quantize_per_channel(
    lo: Lowering,
    x: Value,
    scales: Value,
    zeros: Value,
    axis: int,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Value:
    _check(lo, x, dtype)
    if scales.dtype != torch.float32:
        raise lo.otherwise()
    inverse = lo.b.pointwise("div", lo.number(1.0, scales), scales)
    scaled = lo.b.pointwise("mul", x, _along(lo, inverse, axis))
    y = lo.b.pointwise("round", scaled)
    y = lo.b.pointwise("add", y, lo.b.cast(_along(lo, zeros, axis), y.dtype))
    return _clamped(lo, y, low, high, dtype)


@_named("choose_qparams_per_token.default")
def choose_qparams_per_token(lo: Lowering, x: Value, dtype: torch.dtype) -> list[Value]:
    """Symmetric. The results are float32, even where torch's shape function says otherwise."""
    _check(lo, x, dtype)
    if dtype != torch.int8:
        raise lo.otherwise()
    top = _extremum(lo, "max", lo.b.pointwise("abs", x))
    top = lo.b.pointwise("maximum", top, lo.number(1e-5, top))
    return [lo.b.pointwise("div", top, lo.number(127.0, top)), lo.number(0.0, top)]


@_named("choose_qparams_per_token_asymmetric.default")
def choose_qparams_per_token_asymmetric(lo: Lowering, x: Value, dtype: torch.dtype) -> list[Value]:
    _check(lo, x, dtype)
    least, most = _extremum(lo, "min", x), _extremum(lo, "max", x)
    zero = lo.number(0.0, least)
    least, most = lo.b.pointwise("minimum", least, zero), lo.b.pointwise("maximum", most, zero)
    scale = lo.b.pointwise("sub", most, least)
    scale = lo.b.pointwise("div", scale, lo.number(255.0, scale))
    scale = lo.b.pointwise("maximum", scale, lo.number(torch.finfo(torch.float32).eps, scale))
    low, high = lo.number(-128.0, scale), lo.number(127.0, scale)
    below, above = (lo.b.pointwise("div", x, scale) for x in (least, most))
    errors = [lo.b.pointwise("add", a, b) for a, b in ((low, below), (high, above))]
    above_zero = lo.b.pointwise("gt", lo.b.pointwise("add", *errors), zero, dtype=torch.bool)
    ends = [lo.b.pointwise("sub", a, b) for a, b in ((low, below), (high, above))]
    point = lo.b.pointwise("where", above_zero, *ends)
    point = lo.b.pointwise("minimum", lo.b.pointwise("maximum", point, low), high)
    point = lo.b.cast(lo.b.pointwise("round", point), torch.int64)
    return [lo.b.cast(scale, torch.float64), point]


@_named("quantize_per_token.default")
def quantize_per_token(
    lo: Lowering, x: Value, scales: Value, zeros: Value, low: int, high: int, dtype: torch.dtype
) -> Value:
    _check(lo, x, dtype)
    rows = _per_row(lo, x, scales, zeros)
    exact = torch.promote_types(x.dtype, scales.dtype)
    inverse = lo.b.pointwise("div", lo.number(1.0, rows[0]), rows[0])
    y = lo.b.pointwise("mul", lo.b.cast(x, exact), lo.b.broadcast(inverse, x.shape))
    if not _is_zero(zeros):
        point = lo.b.broadcast(lo.b.cast(rows[1], exact), x.shape)
        y = lo.b.pointwise("add", y, point)
    return _clamped(lo, lo.b.pointwise("round", y), low, high, dtype)


@_named(
    "dequantize_per_tensor.default", "dequantize_per_tensor.tensor", "dequantize_per_tensor.tensor2"
)
def dequantize_per_tensor(
    lo: Lowering, x: Value, scale: Any, zero: Any, *_: Any, out_dtype: Any = None
) -> Value:
    _check_bytes(lo, x)
    numbers: dict[str, Any] = {"scale": float(_number(lo, scale)), "zero": int(_number(lo, zero))}
    return lo.b.make("dequantize", (x,), x.shape, lo.dtype, kind="tensor", **numbers)


@_named("dequantize_per_channel.default")
def dequantize_per_channel(
    lo: Lowering,
    x: Value,
    scales: Value,
    zeros: Value | None,
    axis: int,
    low: int,
    high: int,
    *_: Any,
    out_dtype: Any = None,
) -> Value:
    _check_bytes(lo, x)
    operands = (x, scales) if zeros is None else (x, scales, zeros)
    attrs: dict[str, Any] = {
        "kind": "column",
        "axis": axis % len(x.shape),
        "low": low,
        "high": high,
    }
    return lo.b.make("dequantize", operands, x.shape, lo.dtype, **attrs)


@_named("dequantize_per_token.default")
def dequantize_per_token(
    lo: Lowering, x: Value, scales: Value, zeros: Value, *_: Any, **__: Any
) -> Value:
    _check_bytes(lo, x)
    rows = _per_row(lo, x, scales, zeros)
    return lo.b.make("dequantize", (x, *rows), x.shape, lo.dtype, kind="row")


@_named("dequantize_per_channel_group.default")
def dequantize_per_channel_group(
    lo: Lowering,
    x: Value,
    scales: Value,
    zeros: Value | None,
    low: int,
    high: int,
    dtype: torch.dtype,
    size: int,
    *_: Any,
    **__: Any,
) -> Value:
    _check_bytes(lo, x)
    rows, depth = x.shape
    if not isinstance(depth, int) or depth % size or scales.shape != (rows, depth // size):
        raise lo.otherwise()
    operands = (x, scales) if zeros is None else (x, scales, zeros)
    attrs: dict[str, Any] = {"kind": "group", "low": low, "high": high}
    return lo.b.make("dequantize", operands, x.shape, lo.dtype, **attrs)


def _check(lo: Lowering, x: Value, dtype: torch.dtype) -> None:
    if x.dtype != torch.float32 or dtype not in _BYTES or not x.shape:
        raise lo.otherwise()


def _check_bytes(lo: Lowering, x: Value) -> None:
    if x.dtype not in _BYTES or lo.dtype != torch.float32 or not x.shape:
        raise lo.otherwise()


def _number(lo: Lowering, x: Any) -> Any:
    """The value of a known parameter: a number, or a constant with one element."""
    if isinstance(x, Value):
        if x.op != "fill":
            raise lo.otherwise()
        return x.attrs["value"]
    return x


def _is_zero(x: Value) -> bool:
    return x.op == "fill" and bool(x.attrs["value"] == 0)


def _extremum(lo: Lowering, kind: str, x: Value) -> Value:
    lo.at_least(x.shape[-1], 1, "the extremum of at least one element")
    return lo.b.reduce(kind, x, [len(x.shape) - 1])


def _per_row(lo: Lowering, x: Value, *parameters: Value) -> list[Value]:
    """``parameters`` in the shape of the rows of ``x``."""
    return [lo.b.reshape(p, (*x.shape[:-1], 1)) for p in parameters]


def _along(lo: Lowering, parameter: Value, axis: int) -> Value:
    return lo.b.make("broadcast", (parameter,), lo.shape, parameter.dtype, axes=(axis,))


def _clamped(lo: Lowering, y: Value, low: int, high: int, dtype: torch.dtype) -> Value:
    y = lo.b.pointwise("maximum", y, lo.number(low, y))
    return lo.b.cast(lo.b.pointwise("minimum", y, lo.number(high, y)), dtype)
