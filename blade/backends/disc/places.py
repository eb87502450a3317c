# SPDX-License-Identifier: Apache-2.0
"""Where kernels store what only a concatenation or a copy reads: straight into its place there.

%3 = add %1 %2                  the kernel that adds writes [.., 0:8] of %5's memory,
%5 = concat %3 %4 {axis=1}      and no copy of %3 is made

A concatenation that only another one reads has its place there too, and so have its parts. A copy that
only puts axes in another order (windows of an image, heads of an output) is made by the kernel before it.
"""

from collections.abc import Container, Mapping, Sequence

import sympy

from blade.backends.disc.ir import Graph, Shape, Value, contiguous_strides, plain
from blade.backends.disc.kernel import Dim
from blade.backends.disc.views import View, reshape_strides, view_of


def places(
    graph: Graph,
    reads: Sequence[tuple[Value, Value]],
    made: Mapping[int, bool],
    copies: Container[int],
) -> dict[int, View]:
    """Id of a value (a kernel's result, a concatenation) -> the part of another buffer it is stored in.

    ``reads``: (reader, operand) wherever memory is read; ``made``: the values that kernels make, and
    whether that kernel walks rows; ``copies``: ids of the values that only copy.
    """
    readers: dict[int, list[tuple[Value, Value]]] = {}
    for reader, operand in reads:
        view = view_of(operand)
        if view is not None:
            readers.setdefault(view.base.id, []).append((reader, operand))
    returned = {view.base.id for view in map(view_of, graph.outputs) if view is not None}
    found: dict[int, View] = {}
    for value in reversed(graph.values):  # the outer concatenation before the inner one
        each = readers.get(value.id, [])
        if value.id in returned or len(each) != 1:
            continue
        into = each[0][0].op == "concat" or (each[0][0].id in copies and value.id in made)
        if into and (value.id in made or value.op == "concat"):
            place = _part(*each[0], found)
            rows = made.get(value.id, False)
            if place is not None and not (rows and place.strides[-1] != 1):
                found[value.id] = place
    return found


def home(concat: Value, placed: Mapping[int, View]) -> View:
    """Where ``concat`` (or a copy) lies: in its own buffer or in another's."""
    return placed.get(concat.id) or View(concat, contiguous_strides(concat.shape))


def starts(concat: Value) -> list[Dim]:
    """Where each operand begins along the axis."""
    axis, start, found = concat.attrs["axis"], sympy.Integer(0), []
    for part in concat.args:
        found.append(plain(start))
        start = start + part.shape[axis]
    return found


def _part(concat: Value, operand: Value, placed: Mapping[int, View]) -> View | None:
    """The place of ``operand``'s base in ``concat``, if its elements are all there, in some order."""
    whole = home(concat, placed)
    strides = whole.strides
    first = sympy.Integer(0)
    if concat.op == "concat":
        position = next(k for k, a in enumerate(concat.args) if a is operand)
        first = sympy.sympify(starts(concat)[position]) * strides[concat.attrs["axis"]]
    at = operand
    while at.is_layout:
        inner = _undone(at, strides)
        if inner is None:
            return None
        at, strides = at.args[0], inner
    return View(whole.base, strides, plain(first + whole.offset))


def _undone(layout: Value, strides: Shape) -> Shape | None:
    """Strides of the operand of ``layout`` so that ``layout`` has ``strides``."""
    source = layout.args[0].shape
    if layout.op == "permute":
        perm = layout.attrs["perm"]
        return tuple(strides[perm.index(k)] for k in range(len(perm)))
    if layout.op == "reshape":
        return reshape_strides(layout.shape, strides, source)
    return None
