# SPDX-License-Identifier: Apache-2.0
"""Rows of `embedding_bag` with bags of one length, as a lookup and a reduction: one kernel.

    indices [n * length], offsets 0, length, 2 * length ..      -> weight[indices].reshape(n, length, d).amax(1)

`nn.EmbeddingBag` makes such offsets for indices with two axes. Bags with offsets that are data remain ATen's: the
length of a reduction is a size. So do sums, and means of long rows: ATen's kernel (FBGEMM's) prefetches rows and was
up to 1.2 times as fast where the table is larger than the caches.
"""

from dataclasses import replace

import sympy
import torch

from blade.backends.disc.frontend.ops.gather import INDICES, embedding
from blade.backends.disc.frontend.ops.table import Lowering, ResultType, lowers
from blade.backends.disc.ir.graph import Value, contiguous_strides, numel, plain
from blade.backends.disc.ir.kernel import Dim

aten = torch.ops.aten
_SUM, _MEAN, _MAX = range(3)
_MEAN_COLUMNS = 48  # the longest rows whose means were measured to be no slower than ATen's


@lowers(
    aten.embedding_bag.default,
    aten.embedding_bag.padding_idx,
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
)
def embedding_bag(
    lo: Lowering,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> list[Value | None]:
    length = _step(offsets)
    padded = padding_idx is not None and padding_idx != -1
    if (
        not lo.first_only
        or lo.dtype not in lo.forms.bags
        or not _pays(mode, weight.shape[1])
        or length is None
        or include_last_offset
        or per_sample_weights is not None
        or padded
        or indices.dtype not in INDICES
    ):
        raise lo.otherwise()
    bags = _whole(numel(indices.shape), length)
    if bags is None or isinstance(bags, int) != isinstance(lo.shape[0], int):
        raise lo.otherwise()
    if bags != lo.shape[0]:
        lo.b.require(sympy.Eq(lo.shape[0], bags, evaluate=False), "bags of one length")
    lo.at_least(length, 1, "bags that have elements")
    shape = (bags, length, weight.shape[1])
    rows = replace(lo, results=(ResultType(shape, lo.dtype, contiguous_strides(shape)),))
    found = embedding(rows, weight, lo.b.reshape(indices, shape[:2]))
    if found.op != "gather":
        raise lo.otherwise()
    bag = _largest(lo, found) if mode == _MAX else _average(lo, found)
    bag = lo.b.reshape(bag, lo.shape)
    return [bag, None, None, None]  # the others are for a backward pass


def _pays(mode: int, columns: Dim) -> bool:
    return mode == _MAX or (mode == _MEAN and isinstance(columns, int) and columns <= _MEAN_COLUMNS)


def _average(lo: Lowering, found: Value) -> Value:
    total = lo.b.reduce("sum", found, (1,))
    return lo.b.pointwise("div", total, lo.number(sympy.sympify(found.shape[1]), total))


def _largest(lo: Lowering, found: Value) -> Value:
    """The largest row elements. ATen's comparison passes over NaN, unless NaN is the first."""
    b = lo.b
    table, index, *check = found.args
    one = b.slice(index, 1, 0, 1, 1)
    first = b.make("gather", (table, one, *check), one.shape, lo.dtype, **found.attrs)
    least = lo.number(float("-inf"), found)
    is_nan = b.pointwise("isnan", found, dtype=torch.bool)
    largest = b.reduce("max", b.pointwise("where", is_nan, least, found), (1,))
    return b.pointwise("where", b.pointwise("isnan", first, dtype=torch.bool), first, largest)


def _whole(count: Dim, length: Dim) -> Dim | None:
    """``count / length``, if that is whole at all sizes."""
    if isinstance(count, int) and isinstance(length, int):
        return count // length if length > 0 and count % length == 0 else None
    ratio = sympy.cancel(sympy.sympify(count) / length)
    return plain(ratio) if ratio.is_polynomial() and ratio.is_integer else None


def _step(offsets: Value) -> Dim | None:
    """``n`` if ``offsets`` are 0, n, 2n ..; ``None`` if they are others, or data."""
    while offsets.op == "cast":
        (offsets,) = offsets.args
    if offsets.op == "iota":
        return 1
    if offsets.op != "mul":
        return None
    index, step = offsets.args
    if index.op != "iota" or step.op not in ("fill", "size"):
        return None
    found: Dim = step.attrs["value"]
    return found
