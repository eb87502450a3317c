# SPDX-License-Identifier: Apache-2.0
"""Places kernel results directly in the buffer of the only concatenation or copy that reads them.

    %3 = add %1 %2                  the kernel that adds writes [.., 0:8] of %5's memory,
    %5 = concat %3 %4 {axis=1}      and no copy of %3 is made

A concatenation that only another one reads is placed in that one, with its parts. If a copy only reorders
axes (windows of an image, heads of an output), the kernel before it writes in that order instead. What others read,
too, its kernel stores a second time: what the encoder of a U-Net hands to the decoder.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence

import sympy

from blade.backends.disc.ir.graph import (
    Graph,
    Shape,
    Value,
    contiguous_strides,
    plain,
)
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.late_sizes import late_symbols
from blade.backends.disc.ir.views import StridedView, memory_of, reshape_strides, view_of


def place_operands(
    graph: Graph,
    reads: Sequence[tuple[Value, Value]],
    made: Mapping[int, bool],
    copies: Container[int],
) -> dict[int, StridedView]:
    """Id of a value (a kernel's result, a concatenation) -> the part of another buffer it is stored in.

    ``reads``: (reader, operand) for each read from memory; ``made``: ids of values that kernels compute,
    and whether that kernel works on rows; ``copies``: ids of the values that only copy.
    """
    readers: dict[int, list[tuple[Value, Value]]] = {}
    for reader, operand in reads:
        view = view_of(operand)
        if view is not None:
            readers.setdefault(view.base.id, []).append((reader, operand))
    returned = {view.base.id for view in map(view_of, graph.outputs) if view is not None}
    found: dict[int, StridedView] = {}
    for value in reversed(graph.values):  # outer concatenations before inner ones
        each = readers.get(value.id, [])
        if value.id in returned or len(each) != 1:
            continue
        into = each[0][0].op == "concat" or (each[0][0].id in copies and value.id in made)
        if into and (value.id in made or value.op == "concat"):
            place = _part(*each[0], found)
            rows = made.get(value.id, False)
            if place is None or (rows and place.strides[-1] != 1):
                continue
            if _can_begin(place, value):
                found[value.id] = place
    return found


def repeat_operands(
    graph: Graph,
    reads: Sequence[tuple[Value, Value]],
    made: Mapping[int, bool],
    placed: Mapping[int, StridedView],
) -> dict[tuple[int, int], StridedView]:
    """(id of a concatenation, of a kernel's result that others read, too) -> the part to store the result in, as well.

    The arguments are those of ``place_operands``, and what it found.
    """
    by_id = {value.id: value for value in graph.values}
    parts = {
        value.id: Counter(memory_of(a).id for a in value.args)
        for value in graph.values
        if value.op == "concat"
    }
    found: dict[tuple[int, int], StridedView] = {}
    done = set(placed)
    for reader, operand in reads:
        view = view_of(operand)
        if reader.op != "concat" or view is None or view.base.id not in made:
            continue
        value = by_id[view.base.id]
        if value.id in done or parts[reader.id][value.id] != 1:
            continue
        place = _part(reader, operand, placed)
        if place is None or (made[value.id] and place.strides[-1] != 1):
            continue
        if _can_begin(place, value):
            found[reader.id, value.id] = place
            done.add(value.id)
    return found


def _can_begin(place: StridedView, value: Value) -> bool:
    """Whether the sizes of the buffer are known with ``value``: they may depend on elements of another part."""
    return late_symbols(place.base.shape) <= late_symbols(value.shape)


def buffer_of(concat: Value, placed: Mapping[int, StridedView]) -> StridedView:
    """The buffer and strides of ``concat`` (or a copy): its own buffer, or part of another's."""
    return placed.get(concat.id) or StridedView(concat, contiguous_strides(concat.shape))


def operand_offsets(concat: Value) -> list[Dim]:
    """Offset of each operand along the axis."""
    axis, start, found = concat.attrs["axis"], sympy.Integer(0), []
    for part in concat.args:
        found.append(plain(start))
        start = start + part.shape[axis]
    return found


def _part(concat: Value, operand: Value, placed: Mapping[int, StridedView]) -> StridedView | None:
    """The location of ``operand``'s base in ``concat``, if all its elements are there, in any order."""
    whole = buffer_of(concat, placed)
    strides = whole.strides
    first = sympy.Integer(0)
    if concat.op == "concat":
        position = next(k for k, a in enumerate(concat.args) if a is operand)
        first = sympy.sympify(operand_offsets(concat)[position]) * strides[concat.attrs["axis"]]
    at = operand
    while at.is_layout:
        inner = _undone(at, strides)
        if inner is None:
            return None
        at, strides = at.args[0], inner
    return StridedView(whole.base, strides, plain(first + whole.offset))


def _undone(layout: Value, strides: Shape) -> Shape | None:
    """Strides of the operand of ``layout`` that give ``layout`` the strides ``strides``."""
    source = layout.args[0].shape
    if layout.op == "permute":
        perm = layout.attrs["perm"]
        return tuple(strides[perm.index(k)] for k in range(len(perm)))
    if layout.op == "reshape":
        return reshape_strides(layout.shape, strides, source)
    return None
