# SPDX-License-Identifier: Apache-2.0
"""Rows of the quantization for GPU products: the ops of ``torch.ops.blade_quant``.

Quantizing is pointwise arithmetic in float32, and the scale of a row is a reduction of that row: both fuse
into the kernel that produces the row. Dequantizing stays one op until products have been matched
(gpu/passes/lower_scaled.py). The library is not imported here: its ops are registered by name.
"""

import torch

from blade.backends.disc.frontend.ops.table import Lowering, lowers_named
from blade.backends.disc.ir.graph import Value
from blade.backends.shared.fp8_int8_limits import LARGEST, LEAST

_LIBRARY = "blade_quant"


@lowers_named(f"{_LIBRARY}.quantize_rows.default")
def quantize_rows(lo: Lowering, x: Value, dtype: torch.dtype) -> list[Value]:
    x = lo.b.cast(x, torch.float32)
    lo.at_least(x.shape[-1], 1, "the extremum of at least one element")
    top = lo.b.reduce("max", lo.b.pointwise("abs", x), [len(x.shape) - 1])
    top = lo.b.pointwise("maximum", top, lo.number(LEAST, top))
    largest = lo.number(LARGEST[dtype], top)
    inverse = lo.b.broadcast(lo.b.pointwise("div", largest, top), x.shape)
    return [_narrowed(lo, x, inverse, dtype), lo.b.pointwise("div", top, largest)]


@lowers_named(f"{_LIBRARY}.quantize.default")
def quantize(lo: Lowering, x: Value, inverses: Value, dtype: torch.dtype) -> Value:
    x = lo.b.cast(x, torch.float32)
    return _narrowed(lo, x, lo.b.broadcast(inverses, x.shape), dtype)


@lowers_named(f"{_LIBRARY}.dequantize_rows.default")
def dequantize_rows(lo: Lowering, x: Value, scales: Value, dtype: torch.dtype) -> Value:
    return lo.b.make("dequantize", (x, scales), x.shape, dtype, kind="row")


@lowers_named(f"{_LIBRARY}.dequantize_channels.default")
def dequantize_channels(lo: Lowering, x: Value, scales: Value, dtype: torch.dtype) -> Value:
    return lo.b.make("dequantize", (x, scales), x.shape, dtype, kind="column", axis=0)


@lowers_named(f"{_LIBRARY}.dequantize.default")
def dequantize(lo: Lowering, x: Value, scale: float, dtype: torch.dtype) -> Value:
    return lo.b.make("dequantize", (x,), x.shape, dtype, kind="tensor", scale=scale, zero=0)


def _narrowed(lo: Lowering, x: Value, inverse: Value, dtype: torch.dtype) -> Value:
    """``x * inverse`` clamped to the range of ``dtype`` and rounded to nearest."""
    largest = LARGEST[dtype]
    y = lo.b.pointwise("mul", x, inverse)
    if not dtype.is_floating_point:
        y = lo.b.pointwise("round", y)
    y = lo.b.pointwise("maximum", y, lo.number(-largest, y))
    return lo.b.cast(lo.b.pointwise("minimum", y, lo.number(largest, y)), dtype)
