# SPDX-License-Identifier: Apache-2.0
"""Rows of ops that move, select or relabel elements and compute nothing."""

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from blade.backends.disc.ir import Value, plain
from blade.backends.disc.kernel import Dim
from blade.backends.disc.ops.table import Lowering, lowers

aten = torch.ops.aten


@lowers(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
)
def reshape(lo: Lowering, x: Value, *_: Any, **__: Any) -> Value:
    return lo.b.reshape(x, lo.shape)


@lowers(
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
)
def same(lo: Lowering, x: Value, *_: Any, **__: Any) -> Value:
    return x


@lowers(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
def dropout(lo: Lowering, x: Value, p: float, train: bool) -> Value:
    if train:
        raise lo.otherwise()
    return x


@lowers(
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
)
def to(lo: Lowering, x: Value, *_: Any, **__: Any) -> Value:
    return lo.b.cast(x, lo.dtype)


@lowers(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)
def transpose(lo: Lowering, x: Value, a: int, b: int) -> Value:
    perm = list(range(len(x.shape)))
    perm[a], perm[b] = perm[b], perm[a]
    return lo.b.permute(x, perm)


@lowers(aten.t.default, aten.numpy_T.default)
def transposed(lo: Lowering, x: Value) -> Value:
    return lo.b.permute(x, range(len(x.shape))[::-1])


@lowers(aten.mT.default)
def matrix_transposed(lo: Lowering, x: Value) -> Value:
    return transpose(lo, x, -2, -1)


@lowers(aten.permute.default)
def permute(lo: Lowering, x: Value, dims: Sequence[int]) -> Value:
    return lo.b.permute(x, [d % len(x.shape) for d in dims])


@lowers(aten.movedim.int)
def movedim(lo: Lowering, x: Value, source: int, destination: int) -> Value:
    rank = len(x.shape)
    perm = [k for k in range(rank) if k != source % rank]
    perm.insert(destination % rank, source % rank)
    return lo.b.permute(x, perm)


@lowers(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def expand(lo: Lowering, x: Value, *_: Any, **__: Any) -> Value:
    return lo.b.broadcast(x, lo.shape)


@lowers(aten.slice.Tensor)
def slice_(
    lo: Lowering, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    axis = dim % len(x.shape)
    first = _clamped(start if start is not None else 0, x.shape[axis])
    return lo.b.slice(x, axis, first, step, lo.shape[axis])


@lowers(aten.narrow.default)
def narrow(lo: Lowering, x: Value, dim: int, start: Any, length: Any) -> Value:
    axis = dim % len(x.shape)
    return lo.b.slice(x, axis, _clamped(start, x.shape[axis]), 1, lo.shape[axis])


@lowers(aten.select.int)
def select(lo: Lowering, x: Value, dim: int, index: Any) -> Value:
    axis = dim % len(x.shape)
    one = lo.b.slice(x, axis, _clamped(index, x.shape[axis]), 1, 1)
    return lo.b.reshape(one, lo.shape)


def _clamped(start: Any, size: Dim) -> Dim:
    """torch's rule for a start: negative counts from the end, then clamp to [0, size]."""
    start = plain(start)
    if isinstance(start, int) and start == 0:
        return 0
    if isinstance(start, int) and start < 0:
        return plain(sympy.Max(0, sympy.sympify(size) + start))
    return plain(sympy.Min(start, size))


@lowers(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default)
def split(lo: Lowering, x: Value, _: Any, dim: int = 0) -> list[Value]:
    axis, start, pieces = dim % len(x.shape), sympy.Integer(0), []
    for result in lo.results:
        pieces.append(lo.b.slice(x, axis, plain(start), 1, result.shape[axis]))
        start = start + result.shape[axis]
    return pieces


@lowers(aten.unbind.int)
def unbind(lo: Lowering, x: Value, dim: int = 0) -> list[Value]:
    axis = dim % len(x.shape)
    pieces = [lo.b.slice(x, axis, k, 1, 1) for k in range(len(lo.results))]
    return [lo.b.reshape(p, r.shape) for p, r in zip(pieces, lo.results, strict=True)]


@lowers(aten.cat.default, aten.concat.default)
def cat(lo: Lowering, tensors: Sequence[Value], dim: int = 0) -> Value:
    # torch skips the legacy 1-d empty tensor whatever the others' rank is
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


@lowers(
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
    aten.scalar_tensor.default,
)
def full(lo: Lowering, *args: Any, **kwargs: Any) -> Value:
    value = args[-1] if len(args) > 1 or not isinstance(args[0], Value) else kwargs["fill_value"]
    return lo.b.fill(value, lo.shape, lo.dtype)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(lo: Lowering, *_: Any, **__: Any) -> Value:
    return lo.b.fill(1, lo.shape, lo.dtype)


@lowers(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def zeros(lo: Lowering, *_: Any, **__: Any) -> Value:
    return lo.b.fill(0, lo.shape, lo.dtype)


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(lo: Lowering, *args: Any, **_: Any) -> Value:
    if lo.dtype.is_floating_point or any(isinstance(a, float) for a in args):
        raise lo.otherwise()
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    index = lo.b.make("iota", (), lo.shape, lo.dtype, axis=0)
    if step != 1:
        index = lo.b.pointwise("mul", index, lo.number(step, index))
    return index if start == 0 else lo.b.pointwise("add", index, lo.number(start, index))
