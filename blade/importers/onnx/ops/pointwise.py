# SPDX-License-Identifier: Apache-2.0
"""Functions of single elements: arithmetic, comparisons, logic, casts."""

from __future__ import annotations

import torch

from blade.importers.onnx.emit.dtypes import FLOAT8, WIDE_UNSIGNED, torch_dtype
from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import NodeView, row
from blade.importers.onnx.emit.values import (
    ConstantValue,
    HostValue,
    Number,
    Sizes,
    TensorValue,
    Value,
)

_UNARY = {
    "Abs": "torch.abs({x})",
    "Acos": "torch.acos({x})",
    "Acosh": "torch.acosh({x})",
    "Asin": "torch.asin({x})",
    "Asinh": "torch.asinh({x})",
    "Atan": "torch.atan({x})",
    "Atanh": "torch.atanh({x})",
    "BitwiseNot": "torch.bitwise_not({x})",
    "Ceil": "torch.ceil({x})",
    "Cos": "torch.cos({x})",
    "Cosh": "torch.cosh({x})",
    "Det": "torch.det({x})",
    "Erf": "torch.erf({x})",
    "Erfc": "torch.erfc({x})",  # no op of ONNX: tf2onnx leaves it
    "Exp": "torch.exp({x})",
    "Floor": "torch.floor({x})",
    "IsNaN": "torch.isnan({x})",
    "Log": "torch.log({x})",
    "Neg": "torch.neg({x})",
    "Not": "torch.logical_not({x})",
    "Reciprocal": "torch.reciprocal({x})",
    "Relu": "torch.relu({x})",
    "Round": "torch.round({x})",
    "Sigmoid": "torch.sigmoid({x})",
    "Sign": "torch.sign({x})",
    "Sin": "torch.sin({x})",
    "Sinh": "torch.sinh({x})",
    "Softplus": "torch.ops.aten.softplus({x})",
    "Softsign": "{x} / (1 + torch.abs({x}))",
    "Sqrt": "torch.sqrt({x})",
    "Tan": "torch.tan({x})",
    "Tanh": "torch.tanh({x})",
}

_BINARY = {
    "Add": "{a} + {b}",
    "Sub": "{a} - {b}",
    "Mul": "{a} * {b}",
    "And": "torch.logical_and({a}, {b})",
    "Or": "torch.logical_or({a}, {b})",
    "Xor": "torch.logical_xor({a}, {b})",
    "BitwiseAnd": "torch.bitwise_and({a}, {b})",
    "BitwiseOr": "torch.bitwise_or({a}, {b})",
    "BitwiseXor": "torch.bitwise_xor({a}, {b})",
    "Equal": "{a} == {b}",
    "Less": "{a} < {b}",
    "LessOrEqual": "{a} <= {b}",
    "Greater": "{a} > {b}",
    "GreaterOrEqual": "{a} >= {b}",
}
_LITERALS = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Equal",
    "Less",
    "LessOrEqual",
    "Greater",
    "GreaterOrEqual",
)
_ORDERED = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Div", "Mod", "Min", "Max", "Abs")
"""Of these the answer in int64 is another one for the upper half of uint64."""
_COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")


@row(*_UNARY)
def unary(e: Emitter, node: NodeView, x: Value) -> str | TensorValue:
    dtype = None if isinstance(x, TensorValue) and x.dtype is None else e.dtype(x)
    text = wide(e, node, x)
    made = _UNARY[node.op].format(x=text)
    if dtype in WIDE_UNSIGNED:
        made = f"({made}).to({dtype})"
    return TensorValue(made, torch.bool if node.op == "IsNaN" else dtype, e.sizes(x))


def wide(e: Emitter, node: NodeView, x: Value) -> str:
    """A tensor in a type that torch computes in: int64 for the wider unsigned integers."""
    found = None if isinstance(x, TensorValue) and x.dtype is None else e.dtype(x)
    if found not in WIDE_UNSIGNED:
        return e.tensor(x)
    if found is torch.uint64 and (node.op in _ORDERED or node.op.startswith("Reduce")):
        raise NotImported("torch compares no uint64.")
    return f"{e.tensor(x)}.to(torch.int64)"


@row(*_BINARY)
def binary(e: Emitter, node: NodeView, a: Value, b: Value) -> str | TensorValue:
    left, right = operands(e, node, a, b)
    text = _BINARY[node.op].format(a=left, b=right)
    kind = _binary_dtype(e, a, b)
    if kind in WIDE_UNSIGNED and node.op not in _COMPARISONS:
        text = f"({text}).to({kind})"
    result = torch.bool if node.op in (*_COMPARISONS, "And", "Or", "Xor") else kind
    return TensorValue(text, result, broadcast(e, a, b))


def _binary_dtype(e: Emitter, a: Value, b: Value) -> torch.dtype | None:
    for one in (a, b):
        if not isinstance(one, TensorValue) or one.dtype is not None:
            return e.dtype(one)
    return None


def broadcast(e: Emitter, *values: Value) -> Sizes | None:
    """The sizes of an elementwise result."""
    found = [e.sizes(one) for one in values]
    if any(one is None for one in found):
        return None
    known = [one for one in found if one is not None]
    rank = max(len(one) for one in known)
    padded = [(1,) * (rank - len(one)) + one for one in known]
    return tuple(_common_size(sizes) for sizes in zip(*padded))


def _common_size(sizes: tuple[int | Number | None, ...]) -> int | Number | None:
    """The size that these broadcast to."""
    large = [one for one in sizes if isinstance(one, int) and one != 1]
    if large:
        return large[0]
    rest = {one for one in sizes if one != 1}
    return rest.pop() if len(rest) == 1 else None if rest else 1


def operands(e: Emitter, node: NodeView, a: Value, b: Value) -> tuple[str, str]:
    """The texts of two operands; a constant of one element is a number where that keeps type and rank."""
    for one, other, is_left in ((b, a, False), (a, b, True)):
        text = literal_beside(e, one, other) if node.op in _LITERALS else None
        if text is not None:
            beside = wide(e, node, other)
            return (text, beside) if is_left else (beside, text)
    return wide(e, node, a), wide(e, node, b)


def literal_beside(e: Emitter, constant: Value, other: Value) -> str | None:
    """The text of a number, or ``None`` if ``constant`` has to be a tensor beside ``other``."""
    if not isinstance(constant, (ConstantValue, HostValue)) or not isinstance(other, TensorValue):
        return None
    if other.dims is None or other.dtype is None or other.dtype is torch.bool:
        return None
    if constant.array.size != 1 or constant.array.ndim > len(other.dims):
        return None
    if not len(other.dims) or constant.dtype.is_complex:
        return None
    return e.literal(constant)


@row("Div")
def div(e: Emitter, node: NodeView, a: Value, b: Value) -> TensorValue:
    left, right = operands(e, node, a, b)
    kind = _binary_dtype(e, a, b)
    if kind is None or kind.is_floating_point or kind.is_complex:
        return TensorValue(f"{left} / {right}", kind, broadcast(e, a, b))
    if isinstance(a, ConstantValue) and not left.startswith("self."):
        left = e.tensor(a)
    text = f'torch.div({left}, {right}, rounding_mode="trunc")'
    if kind in WIDE_UNSIGNED:
        text += f".to({kind})"
    return TensorValue(text, kind, broadcast(e, a, b))


@row("Mod")
def mod(e: Emitter, node: NodeView, a: Value, b: Value) -> TensorValue:
    name = "fmod" if node.int("fmod", 0) else "remainder"
    kind = _binary_dtype(e, a, b)
    text = f"torch.{name}({wide(e, node, a)}, {wide(e, node, b)})"
    if kind in WIDE_UNSIGNED:
        text += f".to({kind})"
    return TensorValue(text, kind, broadcast(e, a, b))


@row("Pow")
def power(e: Emitter, node: NodeView, a: Value, b: Value) -> TensorValue:
    kind = e.dtype(a)
    dims = broadcast(e, a, b)
    number = literal_beside(e, b, a) if e.is_float(a) else None
    if number is not None:
        return TensorValue(f"torch.pow({e.tensor(a)}, {number})", kind, dims)
    text = f"torch.pow({wide(e, node, a)}, {wide(e, node, b)})"
    return TensorValue(f"{text}.to({kind})", kind, dims)


@row("Min", "Max")
def extreme(e: Emitter, node: NodeView, *values: Value) -> TensorValue:
    name = {"Min": "minimum", "Max": "maximum"}[node.op]
    text = wide(e, node, values[0])
    for one in values[1:]:
        text = f"torch.{name}({text}, {wide(e, node, one)})"
    kind = e.dtype(values[0])
    if kind in WIDE_UNSIGNED:
        text += f".to({kind})"
    return TensorValue(text, kind, broadcast(e, *values))


@row("Sum", "Mean")
def total(e: Emitter, node: NodeView, *values: Value) -> TensorValue:
    text = " + ".join(e.tensor(one) for one in values)
    if node.op == "Mean":
        text = f"({text}) / {len(values)}"
    return TensorValue(text, e.dtype(values[0]), broadcast(e, *values))


@row("BitShift")
def bit_shift(e: Emitter, node: NodeView, a: Value, b: Value) -> TensorValue:
    way = node.text("direction", "LEFT").lower()
    kind = e.dtype(a)
    if kind is torch.uint64 and way == "right":
        raise NotImported("torch shifts no uint64.")
    text = f"torch.bitwise_{way}_shift({wide(e, node, a)}, {wide(e, node, b)})"
    if kind in WIDE_UNSIGNED:
        text += f".to({kind})"
    return TensorValue(text, kind, broadcast(e, a, b))


@row("Where")
def where(e: Emitter, node: NodeView, condition: Value, a: Value, b: Value) -> TensorValue:
    dims = broadcast(e, condition, a, b)
    kind = e.dtype(a)
    texts = [e.tensor(a), e.tensor(b)]
    for k, (one, other) in enumerate(((a, b), (b, a))):
        if kind.is_floating_point and isinstance(other, TensorValue):
            found = literal_beside(e, one, other)
            texts[k] = texts[k] if found is None or dims is None else found
            if found is not None and len(dims or ()) != len(e.dims(other) or ()):
                texts[k] = e.tensor(one)
    return TensorValue(f"torch.where({e.tensor(condition)}, {texts[0]}, {texts[1]})", kind, dims)


@row("Clip")
def clip(
    e: Emitter, node: NodeView, x: Value, low: Value | None = None, high: Value | None = None
) -> TensorValue:
    kind = e.dtype(x)
    limits = [None if one is None else e.literal(one) for one in (low, high)]
    if all(one is None or text is not None for one, text in zip((low, high), limits)):
        given = [f"{name}={text}" for name, text in zip(("min", "max"), limits) if text is not None]
        if not given:
            return TensorValue(e.tensor(x), kind, e.sizes(x))
        made = f"torch.clamp({wide(e, node, x)}, {', '.join(given)})"
    else:
        made = wide(e, node, x)
        if low is not None:
            made = f"torch.maximum({made}, {wide(e, node, low)})"
        if high is not None:
            made = f"torch.minimum({made}, {wide(e, node, high)})"
    if kind in WIDE_UNSIGNED:
        made += f".to({kind})"
    return TensorValue(made, kind, e.sizes(x))


@row("IsInf")
def is_inf(e: Emitter, node: NodeView, x: Value) -> str:
    text = e.tensor(x)
    negative, positive = node.int("detect_negative", 1), node.int("detect_positive", 1)
    if negative and positive:
        return f"torch.isinf({text})"
    if not negative and not positive:
        return f"torch.zeros_like({text}, dtype=torch.bool)"
    return f"torch.{'isneginf' if negative else 'isposinf'}({text})"


@row("Cast")
def cast(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    return cast_to(e, node, x, torch_dtype(node.int("to", 0)))


@row("CastLike")
def cast_like(e: Emitter, node: NodeView, x: Value, like: Value) -> TensorValue:
    return cast_to(e, node, x, e.dtype(like))


def cast_to(e: Emitter, node: NodeView, x: Value, to: torch.dtype) -> TensorValue:
    """``x`` in another type; to floats of 8 bits it saturates unless the node says otherwise."""
    text, source = e.tensor(x), e.dtype(x)
    if source is to:
        return TensorValue(text, to, e.sizes(x))
    if to in FLOAT8 and node.int("saturate", 1):
        most = torch.finfo(to).max
        if source in FLOAT8:
            text = f"{text}.to(torch.float32)"
        text = f"torch.clamp({text}, min={-most}, max={most})"
    elif to in FLOAT8 and to is torch.float8_e4m3fn:
        text = f"run.without_saturation({text}, 464.0)"
    return TensorValue(f"{text}.to({to})", to, e.sizes(x))


@row("BitCast")
def bit_cast(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    to = torch_dtype(node.int("to", 0))
    own = e.dtype(x)
    if own.itemsize != to.itemsize or own.is_floating_point or to.is_floating_point:
        raise NotImported("TorchScript reads no bits of floats.")
    if to is torch.bool:
        raise NotImported("A boolean has no other bits than 0 and 1.")
    return TensorValue(f"{e.tensor(x)}.to({to})", to, e.sizes(x))
