# SPDX-License-Identifier: Apache-2.0
"""Simplification: per op a list of rules ``(builder, value) -> simpler value | None``.

Rules run when a value is made, so their operands are already simplified. Every rule keeps each element
bit for bit, signed zeros, NaN and infinities included.
"""

import math
from typing import Any

import sympy
import torch

from blade.backends.disc.ir.concat_placement import operand_offsets
from blade.backends.disc.ir.graph import (
    LEAVES,
    IrBuilder,
    Rule,
    Value,
    numel,
    plain,
)
from blade.backends.disc.ir.kernel import POINTWISE, Dim
from blade.backends.disc.ir.pointwise import POINTWISE_REFERENCE, cast

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _is_fill(value: Value, number: Any) -> bool:
    return value.op == "fill" and bool(value.attrs["value"] == number)


def leaf_of_layout(b: IrBuilder, v: Value) -> Value | None:
    """A layout op on a scalar is the scalar at the new shape."""
    inner = v.args[0]
    if inner.op in ("fill", "size"):
        return b.make(inner.op, (), v.shape, v.dtype, **inner.attrs)
    return None


def broadcast_of_broadcast(b: IrBuilder, v: Value) -> Value | None:
    inner = v.args[0]
    if inner.op != "broadcast":
        return None
    axes = tuple(v.attrs["axes"][a] for a in inner.attrs["axes"])
    return b.make("broadcast", inner.args, v.shape, v.dtype, axes=axes)


def broadcast_of_iota(b: IrBuilder, v: Value) -> Value | None:
    inner = v.args[0]
    if inner.op != "iota":
        return None
    return b.make("iota", (), v.shape, v.dtype, axis=v.attrs["axes"][inner.attrs["axis"]])


def broadcast_of_nothing(b: IrBuilder, v: Value) -> Value | None:
    same = v.attrs["axes"] == tuple(range(len(v.shape))) and v.args[0].shape == v.shape
    return v.args[0] if same else None


def broadcast_of_unit_axes(b: IrBuilder, v: Value) -> Value | None:
    """A reshape that only drops axes of size 1, then a broadcast, is one broadcast of the original."""
    inner = v.args[0]
    if inner.op != "reshape" or inner.args[0].op != "broadcast":
        return None
    source = inner.args[0]
    kept = [k for k, d in enumerate(source.shape) if d != 1]
    if tuple(source.shape[k] for k in kept) != inner.shape:
        return None
    place = dict(zip(kept, v.attrs["axes"], strict=True))
    if any(a not in place for a in source.attrs["axes"]):
        return None
    axes = tuple(place[a] for a in source.attrs["axes"])
    return b.make("broadcast", source.args, v.shape, v.dtype, axes=axes)


def reshape_of_reshape(b: IrBuilder, v: Value) -> Value | None:
    inner = v.args[0]
    return b.reshape(inner.args[0], v.shape) if inner.op == "reshape" else None


def reshape_of_iota(b: IrBuilder, v: Value) -> Value | None:
    inner = v.args[0]
    if inner.op != "iota":
        return None
    axis = inner.attrs["axis"]
    counted = inner.shape[axis]
    if any(d != 1 for k, d in enumerate(inner.shape) if k != axis):
        return None
    if [d for d in v.shape if d != 1] != ([counted] if counted != 1 else []) or counted == 1:
        return None
    return b.make("iota", (), v.shape, v.dtype, axis=v.shape.index(counted))


def reshape_of_nothing(b: IrBuilder, v: Value) -> Value | None:
    return v.args[0] if v.args[0].shape == v.shape else None


def permute_of_permute(b: IrBuilder, v: Value) -> Value | None:
    inner = v.args[0]
    if inner.op != "permute":
        return None
    return b.permute(inner.args[0], [inner.attrs["perm"][p] for p in v.attrs["perm"]])


def permute_of_axes_of_size_one(b: IrBuilder, v: Value) -> Value | None:
    """Behind a reshape that inserts them, as of an einsum: [.., n, 1, m] -> [.., n, m, 1]."""
    inner = v.args[0]
    moved = [a for a in v.attrs["perm"] if inner.shape[a] != 1]
    return b.reshape(inner, v.shape) if inner.op == "reshape" and moved == sorted(moved) else None


def permute_of_iota(b: IrBuilder, v: Value) -> Value | None:
    inner = v.args[0]
    if inner.op != "iota":
        return None
    axis = v.attrs["perm"].index(inner.attrs["axis"])
    return b.make("iota", (), v.shape, v.dtype, axis=axis)


def slice_of_iota(b: IrBuilder, v: Value) -> Value | None:
    inner = v.args[0]
    if inner.op != "iota" or any(s != 1 for s in v.attrs["steps"]):
        return None
    start = v.attrs["starts"][inner.attrs["axis"]]
    index = b.make("iota", (), v.shape, v.dtype, **inner.attrs)
    return index if start == 0 else b.pointwise("add", index, b.fill(start, v.shape, v.dtype))


def slice_of_concat(b: IrBuilder, v: Value) -> Value | None:
    """A slice of one operand of a concatenation is read from there: the concatenation need not be."""
    inner = v.args[0]
    if inner.op != "concat" or any(s != 1 for s in v.attrs["steps"]):
        return None
    axis = inner.attrs["axis"]
    found = _operand_around(inner, v.attrs["starts"][axis], v.shape[axis])
    if found is None:
        return None
    part, first = found
    for k, (start, size) in enumerate(zip(v.attrs["starts"], v.shape, strict=True)):
        part = b.slice(part, k, first if k == axis else start, 1, size)
    return part


def _operand_around(concat: Value, start: Dim, size: Dim) -> tuple[Value, Dim] | None:
    """The operand that ``size`` elements from ``start`` are all of, and where they begin in it."""
    for operand, offset in zip(concat.args, operand_offsets(concat), strict=True):
        first = plain(sympy.sympify(start) - offset)
        after = plain(sympy.sympify(operand.shape[concat.attrs["axis"]]) - first - size)
        is_first = isinstance(first, int) and first >= 0
        if is_first and isinstance(after, int) and after >= 0 and size != 0:
            return operand, first
    return None


def concat_of_one(b: IrBuilder, v: Value) -> Value | None:
    axis = v.attrs["axis"]
    parts = [a for a in v.args if a.shape[axis] != 0]
    return parts[0] if len(parts) == 1 and parts[0].shape == v.shape else None


def fold(b: IrBuilder, v: Value) -> Value | None:
    """Constant folding of pointwise ops on scalars, by torch."""
    if not v.args or any(a.op != "fill" for a in v.args):
        return None
    operands = [torch.tensor(a.attrs["value"], dtype=a.dtype) for a in v.args]
    if v.op == "cast":
        result = cast(operands[0], v.dtype)
    else:
        result = POINTWISE_REFERENCE[v.op](*operands)
    return b.fill(result.item(), v.shape, v.dtype)


def neutral(b: IrBuilder, v: Value) -> Value | None:
    """x + 0 on integers, x * 1, x / 1, x ** 1, x & True, x | False, and casts to the same type are x."""
    x, y = v.args
    if v.op == "mul" and _is_fill(x, 1):
        x, y = y, x
    if v.op in ("mul", "div", "div_floor", "div_trunc") and _is_fill(y, 1):
        return x if v.op in ("mul", "div") or v.dtype in INTEGERS else None
    if v.op == "pow" and _is_fill(y, 1):  # in the gradient of a square
        return x
    if v.op in ("add", "sub") and v.dtype in INTEGERS:
        if _is_fill(y, 0):
            return x
        return y if v.op == "add" and _is_fill(x, 0) else None
    return None


def logic(b: IrBuilder, v: Value) -> Value | None:
    if v.dtype != torch.bool:
        return None
    absorbing = v.op in ("bitwise_or", "logical_or")
    for x, y in (v.args, v.args[::-1]):
        if x.op == "fill":
            return x if bool(x.attrs["value"]) == absorbing else y
    return None


def count_is_not_negative(b: IrBuilder, v: Value) -> Value | None:
    """0..n-1 >= c is true for every c <= 0."""
    x, y = v.args
    if x.op == "iota" and y.op == "fill" and y.attrs["value"] <= 0:
        return b.fill(True, v.shape, v.dtype)
    return None


def chosen(b: IrBuilder, v: Value) -> Value | None:
    condition, yes, no = v.args
    if condition.op == "fill":
        return yes if condition.attrs["value"] else no
    return yes if yes is no else None


def cast_of_cast(b: IrBuilder, v: Value) -> Value | None:
    """bool -> integer or float -> bool is the original bool."""
    inner = v.args[0]
    if inner.dtype == v.dtype:
        return inner
    if inner.op == "cast" and inner.args[0].dtype == v.dtype == torch.bool:
        return inner.args[0]
    return None


def hoist_broadcast(b: IrBuilder, v: Value) -> Value | None:
    """Compute before expanding: f(broadcast x, broadcast y, scalar) = broadcast f(x, y, scalar)."""
    wide = [a for a in v.args if a.op not in ("fill", "size")]
    if not wide or any(a.op != "broadcast" for a in wide):
        return None
    core, axes = wide[0].args[0].shape, wide[0].attrs["axes"]
    if any(a.args[0].shape != core or a.attrs["axes"] != axes for a in wide):
        return None
    if numel(core) == numel(v.shape):
        return None
    args = [
        b.make(a.op, (), core, a.dtype, **a.attrs) if a.op in LEAVES else a.args[0] for a in v.args
    ]
    return b.make("broadcast", (b.make(v.op, args, core, v.dtype),), v.shape, v.dtype, axes=axes)


def exact_reciprocal(b: IrBuilder, v: Value) -> Value | None:
    """x / c = x * (1 / c) if c is a power of two: the same bits without a division."""
    x, y = v.args
    if y.op != "fill" or not v.dtype.is_floating_point:
        return None
    number = y.attrs["value"]
    if not math.isfinite(number) or abs(math.frexp(number)[0]) != 0.5:
        return None
    if not 2.0**-60 < abs(number) < 2.0**60:
        return None
    return b.pointwise("mul", x, b.fill(1 / number, v.shape, v.dtype))


RULES: dict[str, list[Rule]] = {op: [fold, hoist_broadcast] for op in POINTWISE}
for _op in ("mul", "div", "div_floor", "div_trunc", "add", "sub", "pow"):
    RULES[_op].insert(0, neutral)
for _op in ("bitwise_and", "bitwise_or", "logical_and", "logical_or"):
    RULES[_op].insert(0, logic)
RULES["ge"].insert(0, count_is_not_negative)
RULES["where"].insert(0, chosen)
RULES["cast"].insert(0, cast_of_cast)
RULES["div"].append(exact_reciprocal)
RULES["broadcast"] = [
    leaf_of_layout,
    broadcast_of_nothing,
    broadcast_of_broadcast,
    broadcast_of_unit_axes,
    broadcast_of_iota,
]
RULES["reshape"] = [leaf_of_layout, reshape_of_nothing, reshape_of_reshape, reshape_of_iota]
RULES["permute"] = [
    leaf_of_layout,
    permute_of_permute,
    permute_of_axes_of_size_one,
    permute_of_iota,
]
RULES["slice"] = [leaf_of_layout, slice_of_iota, slice_of_concat]
RULES["window"] = [leaf_of_layout]
RULES["concat"] = [concat_of_one]
