# SPDX-License-Identifier: Apache-2.0
"""Lowers products of quantized operands to int8 products; writes out every other `dequantize`.

    %3 = dequantize %q %s %z {row}                  %4 = int8_linear %q %w %ws %b %s
    %4 = dequantize %w %ws {column, axis=0}   ->
    %5 = linear %3 %4 %b

Activations have one known scale and zero point, or one of each per row. Weights are constant, int8 and
symmetric, with a scale per output channel; beside a float activation they may have groups and zero points. Signed
activations are read as unsigned, shifted by 128 like their zero points.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from blade.backends.disc.ir.constant_parts import parts_of
from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Value,
    live,
    numel,
)
from blade.backends.disc.ir.simplify import RULES
from blade.backends.disc.passes.int8_conv_shapes import Convolution, fit

DEEPEST = (1 << 31) // (255 * 128) - 1
"""The most products of any bytes whose sum fits into 32 bits."""


def lower_int8(graph: Graph, lowerer_of: "Callable[[Graph], Int8Lowerer] | None" = None) -> Graph:
    """``graph`` without `dequantize`. ``lowerer_of`` creates the target's lowerer."""
    if not any(v.op == "dequantize" for v in graph.values):
        return graph
    lowerer = (lowerer_of or Int8Lowerer)(graph)
    for v in live(graph):
        lowerer.step(v)
    outputs = tuple(lowerer.value(v) for v in graph.outputs)
    inputs = tuple(lowerer.value(v) for v in graph.inputs)
    constants = tuple(lowerer.constants)
    made = replace(
        graph, values=lowerer.b.values, outputs=outputs, inputs=inputs, constants=constants
    )
    made.values = live(made)
    return made


@dataclass(frozen=True)
class QuantizedValue:
    """Bytes with their parameters; ``written`` makes the floats. ``axis``: the channel axis of
    column scales.
    """

    kind: str
    bytes: Value
    parameters: tuple[Value, ...]
    axis: int
    number: tuple[float, int]
    limits: tuple[int, int]
    written: Callable[[], Value]


class Int8Lowerer:
    """Makes int8 products in the form that CPUs compute."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.b = IrBuilder(RULES)
        for fact in graph.facts:
            self.b.facts.setdefault(fact.relation, fact)
        self.constants = list(graph.constants)
        self.new: dict[int, Value] = {}
        self.quantized: dict[int, QuantizedValue] = {}

    def value(self, v: Value) -> Value:
        """``v`` in the new graph; a `dequantize` is computed only if its floats are read."""
        if v.id not in self.new:
            self.new[v.id] = self.quantized[v.id].written()
        return self.new[v.id]

    def step(self, v: Value) -> None:
        if v.op == "dequantize":
            self.quantized[v.id] = self.of_dequantize(v)
            return
        if v.is_layout and v.args[0].id in self.quantized:
            moved = self.of_layout(v, self.quantized[v.args[0].id])
            if moved is not None:
                self.quantized[v.id] = moved
                return
        made = None
        if v.op in ("linear", "conv"):
            made = self.product(v) if v.op == "linear" else self.convolution(v)
        if made is None:
            args = [self.value(a) for a in v.args]
            made = self.b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
        self.new[v.id] = made

    def of_dequantize(self, v: Value) -> QuantizedValue:
        x, *parameters = (self.value(a) for a in v.args)
        attrs = v.attrs
        number = (attrs.get("scale", 1.0), attrs.get("zero", 0))
        return QuantizedValue(
            attrs["kind"],
            x,
            tuple(parameters),
            attrs.get("axis", -1),
            number,
            (attrs.get("low", -128), attrs.get("high", 255)),
            lambda: self.floats(x, parameters, v),
        )

    def floats(self, x: Value, parameters: list[Value], like: Value) -> Value:
        """The floats of ``like``, a `dequantize`; computed int8 is read as uint8, as products read it."""
        if like.attrs["kind"] == "tensor" and x.dtype == torch.int8 and parts_of(x) is None:
            shifted = {**like.attrs, "zero": like.attrs["zero"] + 128}
            return dequantized(self.b, self.unsigned(x), parameters, replace(like, attrs=shifted))
        return dequantized(self.b, x, parameters, like)

    def of_layout(self, v: Value, x: QuantizedValue) -> QuantizedValue | None:
        """The same elements after a layout op, if the parameters can follow."""
        moved = self.b.make(v.op, (x.bytes,), v.shape, x.bytes.dtype, **v.attrs)
        written = self.layout_of_floats(v)
        rank = len(x.bytes.shape)
        if x.kind == "tensor":
            return replace(x, bytes=moved, written=written)
        if x.kind == "column" and v.op == "permute":
            axis = v.attrs["perm"].index(x.axis)
            return replace(x, bytes=moved, axis=axis, written=written)
        if x.kind == "row" and v.op == "reshape" and v.shape and v.shape[-1] == x.bytes.shape[-1]:
            rows = tuple(self.b.reshape(p, (*v.shape[:-1], 1)) for p in x.parameters)
            return replace(x, bytes=moved, parameters=rows, written=written)
        if x.kind == "row" and v.op == "permute" and v.attrs["perm"][-1] == rank - 1:
            rows = tuple(self.b.permute(p, v.attrs["perm"]) for p in x.parameters)
            return replace(x, bytes=moved, parameters=rows, written=written)
        return None

    def layout_of_floats(self, v: Value) -> Callable[[], Value]:
        return lambda: self.b.make(v.op, (self.value(v.args[0]),), v.shape, v.dtype, **v.attrs)

    # --- products ---

    def product(self, v: Value) -> Value | None:
        x, w = self.quantized.get(v.args[0].id), self.weight(v.args[1])
        if w is None or v.dtype != torch.float32 or not self.is_weight(w):
            return None
        zeros = self.b.fill(0, v.shape[-1:], torch.float32)
        bias = self.value(v.args[2]) if len(v.args) == 3 else zeros
        known = parts_of(bias) is not None
        constant = bias if known else zeros
        points = [z for z in w.parameters[1:] if not self.is_zero(z)]
        is_int8 = w.kind == "column" and x is not None and x.kind in ("tensor", "row")
        if is_int8 and x is not None and not points:
            given, rows, attrs = self.activation(x)
            operands = (given, w.bytes, w.parameters[0], constant, *rows)
            y = self.b.make("int8_linear", operands, v.shape, v.dtype, **attrs)
        else:
            scales, bits = w.parameters[0], self.bits(w)
            scales = scales if w.kind == "group" else self.b.reshape(scales, (*scales.shape, 1))
            operands = (self.value(v.args[0]), w.bytes, scales, constant)
            attrs = {"bits": bits}
            if points:
                operands = (*operands[:2], self.with_points(scales, points[0]), constant)
                attrs["zeros"] = True
            y = self.b.make("weight_only_linear", operands, v.shape, v.dtype, **attrs)
        return y if known else self.b.pointwise("add", y, self.b.broadcast(bias, v.shape))

    def with_points(self, scales: Value, zeros: Value) -> Value:
        """One constant of both, side by side, [columns, groups] each."""
        columns, groups = (int(d) for d in scales.shape)
        points = self.known(zeros).reshape(columns, groups).float()
        return self.constant(torch.cat((self.known(scales), points), 1))

    def known(self, v: Value) -> torch.Tensor:
        """The elements of ``v``, a reshaped constant."""
        base = v
        while base.op == "reshape":
            base = base.args[0]
        held: torch.Tensor = self.constants[base.attrs["index"]]
        return held.reshape([int(d) for d in v.shape])

    def constant(self, tensor: torch.Tensor) -> Value:
        tensor = tensor.contiguous()
        index, strides = len(self.constants), tuple(tensor.stride())
        self.constants.append(tensor)
        return self.b.make("const", (), tuple(tensor.shape), tensor.dtype, strides, index=index)

    def convolution(self, v: Value) -> Value | None:
        """An int8 convolution of pixels with one scale; a 1x1 convolution becomes a product."""
        x, w = self.quantized.get(v.args[0].id), self.weight(v.args[1])
        if x is None or w is None or x.kind != "tensor" or not self.is_weight(w):
            return None
        if not all(self.is_zero(z) for z in w.parameters[1:]):
            return None
        attrs = dict(v.attrs)
        if attrs.pop("activation") is not None or len(v.args) > 3:
            return None
        bias = self.value(v.args[2]) if len(v.args) == 3 else self.b.fill(0, v.shape[-1:], v.dtype)
        if parts_of(bias) is None:
            return None
        given, _, numbers = self.activation(x)
        plain = [attrs["groups"], *attrs["stride"], *(p + 1 for p in attrs["padding"])]
        if all(n == 1 for n in (*w.bytes.shape[2:], *plain)):
            weight = self.b.reshape(w.bytes, w.bytes.shape[:2])
            operands = (given, weight, w.parameters[0], bias)
            return self.b.make("int8_linear", operands, v.shape, v.dtype, **numbers)
        fitted = fit(self.b, self.constants, Convolution(given, w.bytes, numbers["zero"], attrs))
        if fitted is None:
            return None
        operands = (fitted.x, fitted.weight, w.parameters[0], bias)
        return self.b.make("int8_conv", operands, v.shape, v.dtype, **numbers, **fitted.attrs)

    def weight(self, v: Value) -> QuantizedValue | None:
        """The quantized value behind ``v``; a single scale is repeated for each channel."""
        w = self.quantized.get(v.id)
        parts = None if w is None or w.kind != "tensor" else parts_of(w.bytes)
        if w is None or not parts or w.number[1] != 0:
            return w
        device = self.constants[parts[0].constant].device
        scales = torch.full((int(w.bytes.shape[0]),), w.number[0], device=device)
        return replace(w, kind="column", parameters=(self.constant(scales),), axis=0)

    def is_weight(self, w: QuantizedValue) -> bool:
        """Whether ``w`` is constant int8 with float scales per row or group of a row, and known zero points."""
        by_rows = w.kind == "column" and w.axis == 0
        if not (by_rows or w.kind == "group"):
            return False
        depth, (scales, *zeros) = numel(w.bytes.shape[1:]), w.parameters
        return (
            w.bytes.dtype == torch.int8
            and isinstance(depth, int)
            and depth <= DEEPEST
            and scales.dtype == torch.float32
            and parts_of(w.bytes) is not None
            and parts_of(scales) is not None
            and all(self.is_zero(z) or (_is_plain(z) and _is_plain(scales)) for z in zeros)
        )

    def bits(self, w: QuantizedValue) -> int:
        """4 if all weights fit into 4 bits and pairs of rows share a scale, else 8."""
        depth, scales = w.bytes.shape[1], w.parameters[0]
        size = depth // scales.shape[1] if w.kind == "group" else depth
        parts = parts_of(w.bytes)
        assert parts is not None and isinstance(size, int), w
        held = [self.graph.constants[p.constant] for p in parts]
        least = min(w.limits[0], *(int(c.min()) for c in held))
        most = max(w.limits[1], *(int(c.max()) for c in held))
        return 4 if size % 2 == 0 and least >= -8 and most <= 7 else 8

    def activation(self, x: QuantizedValue) -> tuple[Value, tuple[Value, ...], dict[str, Any]]:
        """The uint8 values, the operands per row, and the attributes."""
        shift = 128 if x.bytes.dtype == torch.int8 else 0
        given = self.unsigned(x.bytes)
        if x.kind == "tensor":
            scale, zero = x.number
            return given, (), {"scale": scale, "zero": zero + shift}
        scales, zeros = x.parameters
        rows = (self.b.cast(scales, torch.float32),)
        attrs = {"scale": 1.0, "zero": shift}
        if self.is_zero(zeros):
            return given, rows, attrs
        points = self.b.cast(zeros, torch.int32)
        if shift:
            points = self.b.pointwise("add", points, self.b.fill(shift, points.shape, points.dtype))
        return given, (*rows, points), {"scale": 1.0, "zero": 0}

    def unsigned(self, x: Value) -> Value:
        if x.dtype == torch.uint8:
            return x
        turned = self.b.pointwise("bitwise_xor", x, self.b.fill(-128, x.shape, x.dtype))
        return self.b.cast(turned, torch.uint8)

    def is_zero(self, v: Value) -> bool:
        """Whether ``v`` is known to be zero everywhere."""
        if v.op == "fill":
            return bool(v.attrs["value"] == 0)
        if v.is_layout:
            return self.is_zero(v.args[0])
        return v.op == "const" and not bool(self.graph.constants[v.attrs["index"]].any())


def _is_plain(v: Value) -> bool:
    """Whether ``v`` is a constant, or one that is reshaped."""
    return v.op == "const" or (v.op == "reshape" and _is_plain(v.args[0]))


def dequantized(b: IrBuilder, x: Value, parameters: list[Value], like: Value) -> Value:
    """``(x - zero) * scale`` computed as in torch, step by step with its type promotion."""
    attrs, shape = like.attrs, like.shape
    if x.dtype.is_floating_point:  # fp8: torch does not promote it
        x = b.cast(x, torch.float32)
    if attrs["kind"] == "tensor":
        zero: Value | None = b.fill(attrs["zero"], shape, like.dtype)
        scale, x = b.fill(attrs["scale"], shape, like.dtype), b.cast(x, like.dtype)
    else:
        scale, *rest = (_spread(b, p, like) for p in parameters)
        zero = rest[0] if rest else None
    if zero is not None:
        x = _promoted(b, "sub", x, zero)
    return b.cast(_promoted(b, "mul", x, scale), like.dtype)


def _promoted(b: IrBuilder, op: str, x: Value, y: Value) -> Value:
    dtype = torch.promote_types(x.dtype, y.dtype)
    return b.pointwise(op, b.cast(x, dtype), b.cast(y, dtype))


def _spread(b: IrBuilder, parameter: Value, like: Value) -> Value:
    """A parameter broadcast to the elements that it belongs to."""
    attrs, shape = like.attrs, like.shape
    if attrs["kind"] == "row":
        return b.broadcast(parameter, shape)
    if attrs["kind"] == "column":
        axes = (attrs["axis"],)
        return b.make("broadcast", (parameter,), shape, parameter.dtype, axes=axes)
    rows, groups = parameter.shape  # a group is an equal part of a row
    wide = (rows, groups, shape[1] // groups)
    each = b.make("broadcast", (parameter,), wide, parameter.dtype, axes=(0, 1))
    return b.reshape(each, shape)
