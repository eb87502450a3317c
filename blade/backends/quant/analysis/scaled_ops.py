# SPDX-License-Identifier: Apache-2.0
"""Quantization ops for GPUs: 8 bits without a zero point, signed bytes or floats (e4m3), and float32 scales.

    q, scales = ops.quantize_rows(x, dtype)         # [.., K] and [.., 1]: a scale per row
    ops.dequantize_rows(q, scales, torch.float16)
    q = ops.quantize(x, inverses, dtype)            # calibrated; inverses [K]: a factor per column
    ops.dequantize_channels(w, scales, dtype)       # weights [out, in], scales [out]

``torch.ops.blade_quant`` exists for graphs that DISC compiles (backends/disc/frontend/ops/scaled.py lowers
them); torch can also run these ops, on any device.
"""

import torch

from blade.backends.shared.fp8_int8_limits import LARGEST, LEAST

_LIBRARY = torch.library.Library("blade_quant", "DEF")


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize with a scale per row, which maps the row's largest magnitude to the maximum of ``dtype``."""
    x = x.float()
    top = x.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    return _narrowed(x * (LARGEST[dtype] / top), dtype), top / LARGEST[dtype]


def quantize(x: torch.Tensor, inverses: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantize with calibrated scales; values beyond a column's range saturate.

    ``inverses`` is a tensor, so that layers that differ only in their scales share code.
    """
    return _narrowed(x.float() * inverses, dtype)


def dequantize_rows(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (q.float() * scales).to(dtype)


def dequantize_channels(q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (q.float() * scales.unsqueeze(1)).to(dtype)


def dequantize(q: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    return (q.float() * scale).to(dtype)


def round_trip(x: torch.Tensor, dtype: torch.dtype, scale: float | None) -> torch.Tensor:
    """``x`` quantized and dequantized; ``scale``: the calibrated one, ``None``: a scale per row."""
    if scale is None:
        return dequantize_rows(*quantize_rows(x, dtype), x.dtype)
    return dequantize(_narrowed(x.float() * (1.0 / scale), dtype), scale, x.dtype)


def _narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = x if dtype.is_floating_point else torch.round(x)
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


for _schema, _function in (
    ("quantize_rows(Tensor x, ScalarType dtype) -> (Tensor, Tensor)", quantize_rows),
    ("quantize(Tensor x, Tensor inverses, ScalarType dtype) -> Tensor", quantize),
    ("dequantize_rows(Tensor q, Tensor scales, ScalarType dtype) -> Tensor", dequantize_rows),
    (
        "dequantize_channels(Tensor q, Tensor scales, ScalarType dtype) -> Tensor",
        dequantize_channels,
    ),
    ("dequantize(Tensor q, float scale, ScalarType dtype) -> Tensor", dequantize),
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeImplicitAutograd")

ops = torch.ops.blade_quant
