# SPDX-License-Identifier: Apache-2.0
"""Rows of ops that combine tensors: concatenation, repetition, padding."""

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import PythonMod

from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Value, numel, plain

aten = torch.ops.aten


@lowers(aten.cat.default, aten.concat.default)
def cat(lo: Lowering, tensors: Sequence[Value], dim: int = 0) -> Value:
    # torch skips the legacy 1-d empty tensor at any rank of the others
    parts = [t for t in tensors if t.shape != (0,)] or [tensors[0]]
    parts = [lo.b.cast(t, lo.dtype) for t in parts]
    if len(parts) == 1:
        return parts[0]
    return lo.b.make("concat", parts, lo.shape, lo.dtype, axis=dim % len(lo.shape))


@lowers(aten.stack.default)
def stack(lo: Lowering, tensors: Sequence[Value], dim: int = 0) -> Value:
    axis = dim % len(lo.shape)
    shape = tuple(1 if k == axis else d for k, d in enumerate(lo.shape))
    parts = [lo.b.reshape(lo.b.cast(t, lo.dtype), shape) for t in tensors]
    if len(parts) == 1:
        return parts[0]
    return lo.b.make("concat", parts, lo.shape, lo.dtype, axis=axis)


@lowers(aten.hstack.default)
def hstack(lo: Lowering, tensors: Sequence[Value]) -> Value:
    if any(len(t.shape) < 1 for t in tensors):
        raise lo.otherwise()
    return cat(lo, tensors, 0 if len(lo.shape) == 1 else 1)


@lowers(aten.vstack.default)
def vstack(lo: Lowering, tensors: Sequence[Value]) -> Value:
    if any(len(t.shape) < 2 for t in tensors):
        raise lo.otherwise()
    return cat(lo, tensors, 0)


@lowers(aten.repeat.default, aten.tile.default)
def repeat(lo: Lowering, x: Value, repeats: Sequence[Any]) -> Value:
    rank = max(len(repeats), len(x.shape))
    times = [*[1] * (rank - len(repeats)), *map(plain, repeats)]
    dims = [*[1] * (rank - len(x.shape)), *x.shape]
    x = lo.b.reshape(x, dims)
    if any(t != 1 for t in times):
        pairs = [d for pair in zip(times, dims, strict=True) for d in pair]
        axes = tuple(range(1, 2 * rank, 2))
        x = lo.b.make("broadcast", (x,), pairs, x.dtype, axes=axes)
    return lo.b.reshape(x, lo.shape)


@lowers(aten.repeat_interleave.self_int)
def repeat_interleave(
    lo: Lowering, x: Value, repeats: Any, dim: int | None = None, output_size: Any = None
) -> Value:
    if dim is None or not x.shape:
        raise lo.otherwise()
    axis = dim % len(x.shape)
    wide = (*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :])
    axes = tuple(k for k in range(len(wide)) if k != axis + 1)
    return lo.b.reshape(lo.b.make("broadcast", (x,), wide, x.dtype, axes=axes), lo.shape)


@lowers(aten.roll.default)
def roll(lo: Lowering, x: Value, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Value:
    if not dims:  # flattened
        flat = lo.b.reshape(x, (numel(x.shape),))
        return lo.b.reshape(_rolled(lo, flat, shifts[0], 0), x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(lo, x, shift, dim % len(x.shape))
    return x


def _rolled(lo: Lowering, x: Value, shift: Any, axis: int) -> Value:
    size = x.shape[axis]
    if shift == 0 or size == 0:
        return x
    lo.at_least(size, 1, "an axis that is rolled")
    first = plain(PythonMod(sympy.sympify(-shift), sympy.sympify(size)))
    if first == 0:
        return x
    rest = plain(sympy.sympify(size) - first)
    parts = [lo.b.slice(x, axis, first, 1, rest), lo.b.slice(x, axis, 0, 1, first)]
    return lo.b.make("concat", parts, x.shape, x.dtype, axis=axis)


@lowers(aten.constant_pad_nd.default)
def constant_pad(lo: Lowering, x: Value, pad: Sequence[Any], value: Any = 0) -> Value:
    if not all(isinstance(p, int) for p in pad):
        raise lo.otherwise()
    rank = len(x.shape)
    for k, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        x = _padded(lo, x, rank - 1 - k, before, after, value or 0)
    return x


@lowers(aten.pad.default)
def pad(
    lo: Lowering, x: Value, pad: Sequence[Any], mode: str = "constant", value: Any = None
) -> Value:
    if mode != "constant":
        raise lo.otherwise()
    return constant_pad(lo, x, pad, value)


def _padded(lo: Lowering, x: Value, axis: int, before: int, after: int, value: Any) -> Value:
    cut = -min(before, 0) - min(after, 0)
    if cut:
        lo.at_least(x.shape[axis], cut, "padding by a negative number")
        size = plain(sympy.sympify(x.shape[axis]) - cut)
        x = lo.b.slice(x, axis, -min(before, 0), 1, size)
    parts = [x]
    for width, place in ((before, 0), (after, len(parts))):
        if width > 0:
            shape = tuple(width if k == axis else d for k, d in enumerate(x.shape))
            parts.insert(place if place == 0 else len(parts), lo.b.fill(value, shape, x.dtype))
    if len(parts) == 1:
        return x
    size = plain(sympy.sympify(x.shape[axis]) + max(before, 0) + max(after, 0))
    shape = tuple(size if k == axis else d for k, d in enumerate(x.shape))
    return lo.b.make("concat", parts, shape, x.dtype, axis=axis)
