# SPDX-License-Identifier: Apache-2.0
"""Lowering of 8-bit products for tensor cores: both operands are signed bytes, or floats (e4m3).

    %3 = dequantize %q %s {row}                     %5 f16 = scaled_linear %q %w %ws %b %s
    %4 = dequantize %w %ws {column, axis=0}   ->
    %5 f16 = linear %3 %4 %b

The activation has one scale, or one per row, and no zero point; weights are constant, with a scale per output
channel. Any other `dequantize` is expanded into pointwise ops.
"""

import torch

from blade.backends.disc.gpu.gemm.tile_table_8bit import EIGHT_BIT
from blade.backends.disc.ir.constant_parts import parts_of
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.passes.lower_quantized import DEEPEST, Int8Lowerer, QuantizedValue

RESULTS = (torch.float32, torch.float16, torch.bfloat16)


class ScaledLowerer(Int8Lowerer):
    """Creates 8-bit products for GPUs."""

    def product(self, v: Value) -> Value | None:
        x, w = self.quantized.get(v.args[0].id), self.weight(v.args[1])
        if x is None or w is None or v.dtype not in RESULTS or not _fit(x, w):
            return None
        if not (self.is_scaled_weight(w) and self.is_scaled_activation(x)):
            return None
        bias = self.value(v.args[2]) if len(v.args) == 3 else self.b.fill(0, v.shape[-1:], v.dtype)
        if bias.op != "fill" and parts_of(bias) is None:
            return None
        scales, number = w.parameters[0], x.number[0]
        if x.kind == "tensor" and scales.op == "const":
            scales, number = self.times(scales, number), 1.0
        operands = [x.bytes, w.bytes, scales, bias]
        if x.kind == "row":
            operands.append(self.b.cast(x.parameters[0], torch.float32))
        return self.b.make("scaled_linear", operands, v.shape, v.dtype, scale=number)

    def times(self, scales: Value, number: float) -> Value:
        """A constant times ``number``, so that layers that differ only in calibration share code."""
        index = len(self.constants)
        self.constants.append(self.constants[scales.attrs["index"]] * number)
        return self.b.make("const", (), scales.shape, scales.dtype, scales.strides, index=index)

    def convolution(self, v: Value) -> Value | None:
        """None: cuDNN computes the convolution on floats."""
        return None

    def is_scaled_weight(self, w: QuantizedValue) -> bool:
        scales, *zeros = w.parameters
        return (
            w.kind == "column"
            and w.axis == 0
            and scales.dtype == torch.float32
            and parts_of(w.bytes) is not None
            and parts_of(scales) is not None
            and all(self.is_zero(z) for z in zeros)
        )

    def is_scaled_activation(self, x: QuantizedValue) -> bool:
        if x.kind == "tensor":
            return x.number[1] == 0
        return x.kind == "row" and all(self.is_zero(z) for z in x.parameters[1:])


def _fit(x: QuantizedValue, w: QuantizedValue) -> bool:
    """Do both have one type, and a depth whose sums fit 32 bits?"""
    depth = w.bytes.shape[-1]
    same = x.bytes.dtype == w.bytes.dtype and w.bytes.dtype in EIGHT_BIT
    return same and isinstance(depth, int) and 0 < depth <= DEEPEST
