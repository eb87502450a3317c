# SPDX-License-Identifier: Apache-2.0
"""Layout ops as strided views: the buffer that holds a value, and where in it.

    view_of(permute(reshape(linear))) -> StridedView(linear, strides=(...), offset=0)

A computed value (or an input, a constant, a library result) is its own base. A layout op is a view of
its operand's base if symbolic strides can express it; otherwise the view is ``None`` and a copy is needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy

from blade.backends.disc.ir.graph import (
    LEAVES,
    Shape,
    Value,
    contiguous_strides,
    numel,
    plain,
)
from blade.backends.disc.ir.kernel import Dim


@dataclass(frozen=True)
class StridedView:
    """The elements of ``base`` at ``offset + sum(strides * index)``, in elements."""

    base: Value
    strides: Shape
    offset: Dim = 0


def view_of(value: Value) -> StridedView | None:
    """The buffer and strides of ``value``; ``None`` for scalars and if a copy is needed."""
    if value.op in LEAVES:
        return None
    if not value.is_layout:
        return StridedView(value, value.strides or contiguous_strides(value.shape))
    inner = view_of(value.args[0])
    return None if inner is None else viewed(value, inner)


def memory_of(v: Value) -> Value:
    """The value in whose memory ``v`` lies: its own unless it is a view."""
    view = view_of(v)
    return v if view is None else view.base


def viewed(value: Value, inner: StridedView) -> StridedView | None:
    """The view of ``value``, a layout op, given the view ``inner`` of its operand."""
    return _STEPS[value.op](value, inner)


def _broadcast(value: Value, inner: StridedView) -> StridedView:
    strides: list[Dim] = [0] * len(value.shape)
    for axis, place in enumerate(value.attrs["axes"]):
        strides[place] = inner.strides[axis]
    return StridedView(inner.base, tuple(strides), inner.offset)


def _permute(value: Value, inner: StridedView) -> StridedView:
    return StridedView(
        inner.base, tuple(inner.strides[p] for p in value.attrs["perm"]), inner.offset
    )


def _slice(value: Value, inner: StridedView) -> StridedView:
    offset, strides = inner.offset, []
    for stride, start, step in zip(
        inner.strides, value.attrs["starts"], value.attrs["steps"], strict=True
    ):
        offset = plain(sympy.sympify(offset) + sympy.sympify(start) * stride)
        strides.append(plain(sympy.sympify(stride) * step))
    return StridedView(inner.base, tuple(strides), offset)


def _window(value: Value, inner: StridedView) -> StridedView:
    offset, strides = sympy.sympify(inner.offset), []
    for stride, start in zip(inner.strides, value.attrs["starts"], strict=True):
        offset = offset + sympy.sympify(start) * stride
    for walk in value.attrs["walks"]:
        strides.append(plain(sum((sympy.sympify(inner.strides[a]) * s for a, s in walk), _ZERO)))
    return StridedView(inner.base, tuple(strides), plain(offset))


def _reshape(value: Value, inner: StridedView) -> StridedView | None:
    strides = reshape_strides(value.args[0].shape, inner.strides, value.shape)
    return None if strides is None else StridedView(inner.base, strides, inner.offset)


_ZERO = sympy.Integer(0)
_STEPS: dict[str, Callable[[Value, StridedView], StridedView | None]] = {
    "broadcast": _broadcast,
    "permute": _permute,
    "slice": _slice,
    "window": _window,
    "reshape": _reshape,
}


def reshape_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides of shape ``new`` over the same elements in the same order; ``None`` if there are none.

    Both shapes are divided, from the right, into the smallest blocks with equal numbers of elements. A
    block that is evenly strided in memory can be split in any way.
    """
    if same(shape, contiguous_strides(shape), strides):
        return contiguous_strides(new)
    old = [(d, s) for d, s in zip(shape, strides, strict=True) if d != 1]
    dims = [d for d in new if d != 1]
    found: list[Dim] = []
    while old or dims:
        cut = _block([d for d, _ in old], dims)
        if cut is None:
            return None
        taken, made = cut
        block, old = old[len(old) - taken :], old[: len(old) - taken]
        if not _even(block):
            return None
        step = block[-1][1]
        part = dims[len(dims) - made :]
        dims = dims[: len(dims) - made]
        found = [plain(sympy.sympify(s) * step) for s in contiguous_strides(part)] + found
    rest = iter(found)
    return tuple(0 if d == 1 else next(rest) for d in new)


def blocks(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of axes of ``old`` and ``new`` with equally many elements, in order.

    Axes of size 1 join the run before them. Empty if the shapes have no such division.
    """
    rest = [k for k, d in enumerate(old) if d != 1]
    made = [k for k, d in enumerate(new) if d != 1]
    starts: list[tuple[int, int]] = []
    while rest or made:
        cut = _block([old[k] for k in rest], [new[k] for k in made])
        if cut is None:
            return []
        starts.insert(0, (rest[-cut[0]], made[-cut[1]]))
        rest, made = rest[: len(rest) - cut[0]], made[: len(made) - cut[1]]
    if not starts:
        return []
    ends = [*starts[1:], (len(old), len(new))]
    starts[0] = (0, 0)
    return [
        (list(range(a, c)), list(range(b, d))) for (a, b), (c, d) in zip(starts, ends, strict=True)
    ]


def row_distance(value: Value, cut: int) -> Dim:
    """The stride of ``value``'s first ``cut`` axes merged into one; they must be evenly strided."""
    view = view_of(value)
    assert view is not None, value
    merged = reshape_strides(value.shape[:cut], view.strides[:cut], (numel(value.shape[:cut]),))
    assert merged is not None, value
    return merged[0]


def _block(old: Sequence[Dim], new: Sequence[Dim]) -> tuple[int, int] | None:
    """Numbers of trailing dims of ``old`` and ``new`` that make the smallest blocks of equal size."""
    for total in range(2, len(old) + len(new) + 1):
        for taken in range(max(1, total - len(new)), min(len(old), total - 1) + 1):
            made = total - taken
            if equal(_product(old[-taken:]), _product(new[-made:])):
                return taken, made
    return None


def _product(dims: Sequence[Dim]) -> sympy.Expr:
    return sympy.Mul(*dims)


def _even(block: Sequence[tuple[Dim, Dim]]) -> bool:
    return all(
        equal(stride, sympy.sympify(block[k + 1][0]) * block[k + 1][1])
        for k, (_, stride) in enumerate(block[:-1])
    )


def equal(a: Dim, b: Dim) -> bool:
    """Whether two size expressions are equal at all sizes, as far as expansion shows."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a == b or sympy.expand(sympy.sympify(a) - b) == 0


def same(shape: Shape, a: Shape, b: Shape) -> bool:
    """Whether two sets of strides address ``shape`` alike; strides of size-1 axes do not matter."""
    return all(d == 1 or equal(x, y) for d, x, y in zip(shape, a, b, strict=True))


def collapse(shape: Shape, accesses: Sequence[Shape]) -> tuple[Shape, list[Shape]]:
    """Merge neighbouring axes that every access traverses evenly; drop axes of size 1."""
    axes = [k for k, d in enumerate(shape) if d != 1]
    dims: list[Dim] = []
    columns: list[list[Dim]] = []
    for k in axes:
        column = [a[k] for a in accesses]
        if dims and all(
            equal(outer, sympy.sympify(shape[k]) * step)
            for outer, step in zip(columns[-1], column, strict=True)
        ):
            dims[-1] = plain(sympy.sympify(dims[-1]) * shape[k])
            columns[-1] = column
        else:
            dims.append(shape[k])
            columns.append(column)
    merged = [tuple(c[i] for c in columns) for i in range(len(accesses))]
    return tuple(dims), merged
