# SPDX-License-Identifier: Apache-2.0
"""Quantization, and products of integers.

A QuantizeLinear whose result is dequantized with the same scale becomes torch's fake quantization, which
``Config(enable_int8=True)`` turns into integers again. The others are written in floats.
"""

from __future__ import annotations

import numpy as np
import torch

from blade.importers.onnx.emit.dtypes import FLOAT8, WIDE_UNSIGNED, torch_dtype
from blade.importers.onnx.emit.emitter import Emitter, number_text
from blade.importers.onnx.emit.table import NodeView, row
from blade.importers.onnx.emit.values import AnyTensor, TensorValue, Value
from blade.importers.onnx.ops.convolution import conv
from blade.importers.onnx.ops.matmul import matmul
from blade.importers.onnx.ops.pointwise import cast_to


@row("QuantizeLinear")
def quantize_linear(
    e: Emitter, node: NodeView, x: Value, scale: Value, zero: Value | None = None
) -> TensorValue:
    named = node.int("output_dtype", 0)
    to = e.dtype(zero) if zero is not None else torch_dtype(named) if named else torch.uint8
    axis = node.int("axis", 1)
    made = quantized(e, node, x, scale, zero, to, axis)
    name = e.let(made, to, e.sizes(x), node.outputs[0])
    e.quantized[name.text] = (x, scale, zero, axis)
    return name


def quantized(
    e: Emitter,
    node: NodeView,
    x: Value,
    scale: Value,
    zero: Value | None,
    to: torch.dtype,
    axis: int,
) -> str:
    """The text of ``x`` as integers, or as floats of 8 bits."""
    text, factor = e.tensor(x), _spread(e, node, x, scale, axis)
    wide = e.dtype(scale)
    ratio = f"{text}.to({wide}) / {factor}" if e.dtype(x) is not wide else f"{text} / {factor}"
    if to in FLOAT8:
        return cast_to(e, node, TensorValue(f"({ratio})", wide), to).text
    if not ratio.startswith("torch"):
        ratio = f"torch.round({ratio})"
    if zero is not None:
        ratio += f" + {_spread(e, node, x, zero, axis)}.to({wide})"
    info = torch.iinfo(to)
    made = f"torch.clamp({ratio}, min={info.min}, max={info.max})"
    return f"{made}.to(torch.int64).to({to})" if to in WIDE_UNSIGNED else f"{made}.to({to})"


def _spread(e: Emitter, node: NodeView, x: Value, parameter: Value, axis: int) -> str:
    """A scale or zero point, of a tensor, of each index of an axis, or of blocks, to broadcast with ``x``."""
    text, dims = e.tensor(parameter), e.dims(parameter)
    block = node.int("block_size", 0)
    if block:
        if e.dtype(parameter) in (torch.bfloat16, *FLOAT8):
            text = f"{text}.to(torch.float32)"
        size = e.size(x, axis)
        return f"{text}.repeat_interleave({block}, {axis}).narrow({axis}, 0, {size})"
    if dims is None or len(dims) == 0 or dims == (1,):
        return text if dims == () else f"{text}.reshape([])"
    shape = [1] * e.rank(x)
    shape[axis] = -1
    return text if len(shape) == 1 else f"{text}.reshape({shape})"


@row("DequantizeLinear")
def dequantize_linear(
    e: Emitter, node: NodeView, x: Value, scale: Value, zero: Value | None = None
) -> TensorValue:
    axis, named = node.int("axis", 1), node.int("output_dtype", 0)
    kind = torch_dtype(named) if named else e.dtype(scale)
    fake = _fake_quantized(e, x, scale, zero, axis)
    if fake is not None:
        return TensorValue(fake, kind, e.sizes(x))
    return TensorValue(dequantized(e, node, x, scale, zero, axis, kind), kind, e.sizes(x))


def dequantized(
    e: Emitter,
    node: NodeView,
    x: Value,
    scale: Value,
    zero: Value | None,
    axis: int,
    kind: torch.dtype,
) -> str:
    """The text of integers, or of floats of 8 bits, as floats."""
    text, wide = e.tensor(x), e.dtype(scale)
    if e.dtype(x) in FLOAT8:
        text = f"{text}.to({wide})"
    elif zero is not None:
        text = f"({text}.to(torch.int32) - {_spread(e, node, x, zero, axis)}.to(torch.int32)).to({wide})"
    else:
        text = f"{text}.to({wide})"
    made = f"{text} * {_spread(e, node, x, scale, axis)}"
    return made if kind is wide else f"({made}).to({kind})"


def _fake_quantized(
    e: Emitter, x: Value, scale: Value, zero: Value | None, axis: int
) -> str | None:
    """A call of torch's fake quantization, if ``x`` was quantized by the same numbers."""
    if not isinstance(x, TensorValue) or x.text not in e.quantized:
        return None
    source, own_scale, own_zero, own_axis = e.quantized[x.text]
    if not _same(e, scale, own_scale) or not _same(e, zero, own_zero):
        return None
    known = e.known(scale)
    to = e.dtype(x)
    if known is None or to not in (torch.int8, torch.uint8) or e.dtype(source) is not torch.float32:
        return None
    info, text = torch.iinfo(to), e.tensor(source)
    zeros = np.zeros(known.shape, np.int32)
    if zero is not None:
        given = e.known(zero)
        if given is None:
            return None
        zeros = given.astype(np.int32)
    if known.size == 1:
        first, at = number_text(float(known.reshape(()))), int(zeros.reshape(()))
        call = f"{text}, {first}, {at}, {info.min}, {info.max}"
        return f"torch.fake_quantize_per_tensor_affine({call})"
    if axis != own_axis or known.ndim != 1:
        return None
    held = e.tensor(e.constant(zeros, torch.int32, "zero_points"))
    call = f"{text}, {e.tensor(scale)}, {held}, {axis % e.rank(source)}, {info.min}, {info.max}"
    return f"torch.fake_quantize_per_channel_affine({call})"


def _same(e: Emitter, a: Value | None, b: Value | None) -> bool:
    if a is b:
        return True
    if not isinstance(a, AnyTensor) or not isinstance(b, AnyTensor):
        return False
    left, right = e.known(a), e.known(b)
    return left is not None and right is not None and bool(np.array_equal(left, right))


def _reread(
    e: Emitter, node: NodeView, x: Value, scale: Value, zero: Value | None, axis: int
) -> TensorValue:
    """``x`` as floats, for ops that compute on floats inside."""
    fake = _fake_quantized(e, x, scale, zero, axis)
    text = fake or dequantized(e, node, x, scale, zero, axis, e.dtype(scale))
    return e.let(text, e.dtype(scale), e.sizes(x), "dequantized")


def _written(
    e: Emitter, node: NodeView, made: TensorValue, scale: Value, zero: Value
) -> TensorValue:
    real = e.let(made.text, e.dtype(scale), made.dims, "real")
    text = quantized(e, node, real, scale, zero, e.dtype(zero), 1)
    name = e.let(text, e.dtype(zero), made.dims, node.outputs[0])
    e.quantized[name.text] = (real, scale, zero, 1)
    return name


@row("QLinearConv")
def qlinear_conv(
    e: Emitter,
    node: NodeView,
    x: Value,
    xs: Value,
    xz: Value,
    w: Value,
    ws: Value,
    wz: Value,
    ys: Value,
    yz: Value,
    b: Value | None = None,
) -> TensorValue:
    image = _reread(e, node, x, xs, xz, 1)
    kernel = _reread(e, node, w, ws, wz, 0)
    bias = None
    if b is not None:
        factor = f"({e.tensor(xs)} * {e.tensor(ws)}).reshape(-1)"
        bias = e.let(f"{e.tensor(b)}.to(torch.float32) * {factor}", torch.float32, e.sizes(b))
    return _written(e, node, conv(e, node, image, kernel, bias), ys, yz)


@row("QLinearMatMul")
def qlinear_matmul(
    e: Emitter,
    node: NodeView,
    a: Value,
    as_: Value,
    az: Value,
    b: Value,
    bs: Value,
    bz: Value,
    ys: Value,
    yz: Value,
) -> TensorValue:
    left = _reread(e, node, a, as_, az, -2)
    right = _reread(e, node, b, bs, bz, -1)
    return _written(e, node, matmul(e, node, left, right), ys, yz)


@row("MatMulInteger")
def matmul_integer(
    e: Emitter, node: NodeView, a: Value, b: Value, az: Value | None = None, bz: Value | None = None
) -> TensorValue:
    """In float64, which holds such integers exactly."""
    left, right = (f"{e.tensor(one)}.to(torch.float64)" for one in (a, b))
    if az is not None:
        zero = f"{e.tensor(az)}.to(torch.float64)"
        rows = e.dims(az)
        left += f" - {zero}.unsqueeze(-1)" if rows is not None and len(rows) == 1 else f" - {zero}"
    if bz is not None:
        right += f" - {e.tensor(bz)}.to(torch.float64)"
    values = [e.let(left, torch.float64, e.sizes(a)), e.let(right, torch.float64, e.sizes(b))]
    made = matmul(e, node, *values)
    return TensorValue(f"{made.text}.to(torch.int32)", torch.int32, made.dims)
