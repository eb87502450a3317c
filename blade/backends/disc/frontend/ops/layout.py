# SPDX-License-Identifier: Apache-2.0
"""Rows of ops that move, select or reinterpret elements without computing."""

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Value, numel, plain
from blade.backends.disc.ir.kernel import Dim
from blade.graph.shapes.symbolic import is_late

aten = torch.ops.aten


@lowers(
    aten.unsqueeze.default,
    aten.flatten.using_ints,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.ravel.default,
    aten.atleast_1d.default,
    aten.atleast_2d.default,
    aten.atleast_3d.default,
)
def reshape(lo: Lowering, x: Value, *_: Any, **__: Any) -> Value:
    return lo.b.reshape(x, lo.shape)


@lowers(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def view(lo: Lowering, x: Value, sizes: Sequence[Any], *_: Any) -> Value:
    _free_size(lo, sizes)
    return lo.b.reshape(x, lo.shape)


@lowers(aten.unflatten.int)
def unflatten(lo: Lowering, x: Value, dim: int, sizes: Sequence[Any]) -> Value:
    _free_size(lo, sizes)
    return lo.b.reshape(x, lo.shape)


def _free_size(lo: Lowering, sizes: Sequence[Any]) -> None:
    """Rely on sizes next to a -1 being at least 1; next to a 0 torch cannot infer it."""
    if any(isinstance(d, int) and d == -1 for d in sizes):
        for size in sizes:
            lo.at_least(size, 1, "sizes beside -1")


@lowers(aten.view_copy.default)
def view_copy(lo: Lowering, x: Value, sizes: Any) -> Value:
    if not isinstance(sizes, list):  # view_copy.dtype
        raise lo.otherwise()
    return view(lo, x, sizes)


@lowers(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(lo: Lowering, x: Value, dims: Any = None) -> Value:
    rank = len(x.shape)
    axes = range(rank) if dims is None else dims if isinstance(dims, (list, tuple)) else [dims]
    for axis in {a % rank for a in axes} if rank else ():
        if not isinstance(x.shape[axis], int):
            lo.b.require(sympy.Ne(x.shape[axis], 1), "squeeze keeps this axis")
    return lo.b.reshape(x, lo.shape)


@lowers(
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
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
    aten._autocast_to_full_precision.default,
    aten._autocast_to_reduced_precision.default,
    torch.ops.prims.convert_element_type.default,
)
def to(lo: Lowering, x: Value, *_: Any, **__: Any) -> Value:
    return lo.b.cast(x, lo.dtype)


@lowers(aten.copy.default)
def copied(lo: Lowering, x: Value, source: Value, non_blocking: bool = False) -> Value:
    return lo.b.broadcast(lo.b.cast(source, lo.dtype), lo.shape)


@lowers(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)
def transpose(lo: Lowering, x: Value, a: int, b: int) -> Value:
    perm = list(range(len(x.shape)))
    if perm:
        perm[a], perm[b] = perm[b], perm[a]
    return lo.b.permute(x, perm)


@lowers(aten.t.default, aten.numpy_T.default)
def transposed(lo: Lowering, x: Value) -> Value:
    return lo.b.permute(x, range(len(x.shape))[::-1])


@lowers(aten.mT.default, aten.mH.default, aten.adjoint.default, aten.matrix_H.default)
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


@lowers(aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist)
def movedims(lo: Lowering, x: Value, source: Any, destination: Any) -> Value:
    rank = len(x.shape)
    sources, places = (
        [d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
        for dims in (source, destination)
    )
    moved = dict(zip(places, sources, strict=True))
    rest = iter(k for k in range(rank) if k not in sources)
    return lo.b.permute(x, [moved[k] if k in moved else next(rest) for k in range(rank)])


@lowers(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def expand(lo: Lowering, x: Value, *_: Any, **__: Any) -> Value:
    return lo.b.broadcast(x, lo.shape)


@lowers(aten.slice.Tensor)
def slice_(
    lo: Lowering, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    axis = dim % len(x.shape)
    first = clamped(start if start is not None else 0, x.shape[axis])
    size = lo.shape[axis]
    if size != x.shape[axis] and not _holds_for_empty(x.shape[axis], size):
        lo.at_least(x.shape[axis], 1, "slice of a non-empty axis")
    if not isinstance(size, int):
        lo.at_least(size, 0, "slice within bounds")
    for bound in (start, end):
        if not isinstance(bound, int | None) and sympy.sympify(plain(bound)).is_negative:
            lo.at_least(-plain(bound), 1, "slice counted from the end")  # -0 is the beginning
    return lo.b.slice(x, axis, first, step, size)


def _holds_for_empty(size: Dim, sliced: Dim) -> bool:
    """Whether ``sliced`` is 0 for ``size`` 0, although these expressions assume positive sizes."""
    if not isinstance(size, sympy.Symbol):
        return isinstance(size, int)
    if is_late(size):  # torch does not assume that there is an element
        return True
    left: bool = sympy.sympify(sliced).subs(size, 0) == 0
    return left


@lowers(aten.narrow.default)
def narrow(lo: Lowering, x: Value, dim: int, start: Any, length: Any) -> Value:
    axis = dim % len(x.shape)
    return lo.b.slice(x, axis, clamped(start, x.shape[axis]), 1, lo.shape[axis])


@lowers(aten.select.int)
def select(lo: Lowering, x: Value, dim: int, index: Any) -> Value:
    axis = dim % len(x.shape)
    if isinstance(index, int):
        lo.at_least(x.shape[axis], index + 1 if index >= 0 else -index, "index within bounds")
    elif not isinstance(x.shape[axis], int) or not isinstance(index, int):
        lo.b.require(sympy.Lt(index, x.shape[axis], evaluate=False), "index within bounds")
        lo.b.require(sympy.Ge(index, 0, evaluate=False), "index within bounds")
    known = isinstance(index, int)
    start = clamped(index, x.shape[axis]) if known else plain(index)  # required to be within
    one = lo.b.slice(x, axis, start, 1, 1)
    return lo.b.reshape(one, lo.shape)


def clamped(start: Any, size: Dim) -> Dim:
    """torch's rule for a start: negative counts from the end, then clamp to [0, size]."""
    start = plain(start)
    if isinstance(start, int) and start == 0:
        return 0
    if sympy.sympify(
        start
    ).is_negative:  # an unknown sign counts as not negative (shape_functions.py)
        return plain(sympy.Max(0, sympy.sympify(size) + start))
    return plain(sympy.Min(start, size))


@lowers(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split.sizes,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
    aten.split_copy.Tensor,
    aten.split_with_sizes_copy.default,
)
def split(lo: Lowering, x: Value, _: Any, dim: int = 0) -> list[Value]:
    axis, start, pieces = dim % len(x.shape), sympy.Integer(0), []
    for result in lo.results:
        lo.at_least(result.shape[axis], 0, "split within bounds")
        pieces.append(lo.b.slice(x, axis, plain(start), 1, result.shape[axis]))
        start = start + result.shape[axis]
    return pieces


@lowers(aten.hsplit.int, aten.hsplit.array)
def hsplit(lo: Lowering, x: Value, where: Any) -> list[Value]:
    return split(lo, x, where, 0 if len(x.shape) == 1 else 1)


@lowers(aten.vsplit.int, aten.vsplit.array)
def vsplit(lo: Lowering, x: Value, where: Any) -> list[Value]:
    return split(lo, x, where, 0)


@lowers(aten.dsplit.int, aten.dsplit.array)
def dsplit(lo: Lowering, x: Value, where: Any) -> list[Value]:
    return split(lo, x, where, 2)


@lowers(aten.unbind.int, aten.unbind_copy.int)
def unbind(lo: Lowering, x: Value, dim: int = 0) -> list[Value]:
    axis = dim % len(x.shape)
    pieces = [lo.b.slice(x, axis, k, 1, 1) for k in range(len(lo.results))]
    return [lo.b.reshape(p, r.shape) for p, r in zip(pieces, lo.results, strict=True)]


@lowers(aten.broadcast_tensors.default)
def broadcast_tensors(lo: Lowering, tensors: Sequence[Value]) -> list[Value]:
    return [lo.b.broadcast(t, r.shape) for t, r in zip(tensors, lo.results, strict=True)]


@lowers(aten.meshgrid.default, aten.meshgrid.indexing)
def meshgrid(lo: Lowering, tensors: Sequence[Value], indexing: str = "ij") -> list[Value]:
    axes = list(range(len(tensors)))
    if indexing == "xy" and len(axes) > 1:
        axes[:2] = 1, 0
    vectors = [lo.b.reshape(t, (numel(t.shape),)) for t in tensors]
    return [
        lo.b.make("broadcast", (t,), lo.shape, t.dtype, axes=(k,))
        for k, t in zip(axes, vectors, strict=True)
    ]


@lowers(aten.pixel_shuffle.default)
def pixel_shuffle(lo: Lowering, x: Value, factor: int) -> Value:
    _never_empty(lo, x)
    *batch, _, height, width = x.shape
    k = len(batch)
    y = lo.b.reshape(x, (*batch, lo.shape[k], factor, factor, height, width))
    y = lo.b.permute(y, [*range(k), k, k + 3, k + 1, k + 4, k + 2])
    return lo.b.reshape(y, lo.shape)


def _never_empty(lo: Lowering, x: Value) -> None:
    """Rely on ``x`` not being empty: torch keeps the shape of an empty tensor."""
    for size in x.shape:
        lo.at_least(size, 1, "shuffled pixels")


@lowers(aten.pixel_unshuffle.default)
def pixel_unshuffle(lo: Lowering, x: Value, factor: int) -> Value:
    _never_empty(lo, x)
    *batch, channels = x.shape[:-2]
    height, width = lo.shape[-2:]
    k = len(batch)
    y = lo.b.reshape(x, (*batch, channels, height, factor, width, factor))
    y = lo.b.permute(y, [*range(k), k, k + 2, k + 4, k + 1, k + 3])
    return lo.b.reshape(y, lo.shape)


@lowers(aten.channel_shuffle.default)
def channel_shuffle(lo: Lowering, x: Value, groups: int) -> Value:
    batch, channels, *rest = x.shape
    y = lo.b.reshape(x, (batch, groups, plain(sympy.sympify(channels) / groups), *rest))
    y = lo.b.permute(y, [0, 2, 1, *range(3, len(rest) + 3)])
    return lo.b.reshape(y, lo.shape)
