# SPDX-License-Identifier: Apache-2.0
"""Inverses of views: the base that has new elements where a view of it has them.

    v = select(y, 0, 1); v' = neg(v)      ->      y' = select_scatter(y, v', 0, 1)

The table is that of torch's functionalization (``FunctionalInverses.cpp``): a view of a part is scattered
into its base, a view of the whole is viewed backwards. A view whose elements overlap (``expand``) has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.buffers import PIECES, ViewOf, name_of
from blade.graph.torchscript.insert import Inserter
from blade.graph.torchscript.program import Program

_Value = torch._C.Value

_SAME = frozenset("transpose swapaxes swapdims t numpy_T mT".split())
"""Views that are their own inverse, with the same arguments."""

_WHOLE = frozenset("view view_as unflatten unsqueeze squeeze".split())
"""Views of all elements in order."""

_SCATTER = {"slice": "slice_scatter", "select": "select_scatter", "diagonal": "diagonal_scatter"}

_PASSED_ON = ("alias", "detach")


def has_inverse(program: Program, view: ViewOf) -> bool:
    """Whether ``invert`` knows ``view``."""
    overload = resolve(view.line.node)
    assert overload is not None, view
    op = name_of(overload)
    if op == "permute":
        return _constants(program, view.line.inputs[1]) is not None
    if op == "narrow":
        start = view.line.inputs[2]
        return (
            program.constant(start)
            and type(program.held(start)) is int
            and program.held(start) >= 0
        )
    known = (*_SAME, *_WHOLE, *_SCATTER, *_PASSED_ON, *PIECES, "movedim", "moveaxis")
    return op in (*known, "view_as_real", "view_as_complex")


def invert(
    program: Program,
    view: ViewOf,
    base: _Value,
    new: _Value,
    pieces: Callable[[], Sequence[_Value]],
    insert: Inserter,
) -> _Value:
    """``base`` with the elements ``new`` in place of ``view`` of it.

    ``pieces`` makes all views of the list that ``view`` is in, of the present base.
    """
    overload = resolve(view.line.node)
    assert overload is not None, view
    op, rest = name_of(overload), list(view.line.node.inputs())[1:]
    if op in _SCATTER:
        return insert.op(f"aten::{_SCATTER[op]}", [base, new, *rest])
    if op in _SAME:
        return insert.op(f"aten::{op}", [new, *rest])
    if op in _WHOLE:
        return insert.op("aten::reshape_as", [new, base])
    if op in _PASSED_ON:
        return new
    if op in ("movedim", "moveaxis"):
        return insert.op(f"aten::{op}", [new, rest[1], rest[0]])
    if op in ("view_as_real", "view_as_complex"):
        back = "view_as_complex" if op == "view_as_real" else "view_as_real"
        return insert.op(f"aten::{back}", [new])
    if op == "narrow":
        axis, start, length = rest
        end = insert.sum_of_ints(start, length)
        return insert.op("aten::slice_scatter", [base, new, axis, start, end, insert.constant(1)])
    if op == "permute":
        return insert.op("aten::permute", [new, insert.constant(_inverse_order(program, view))])
    assert op in PIECES, view
    return _join(view, op, base, new, list(pieces()), insert)


def _join(
    view: ViewOf, op: str, base: _Value, new: _Value, pieces: list[_Value], insert: Inserter
) -> _Value:
    """All pieces side by side, one of them new, in the memory layout of ``base``."""
    assert view.pick is not None, view
    pieces[view.pick] = new
    axis = list(view.line.node.inputs())[1 if op == "unbind" else 2]
    joined = insert.op(
        "aten::stack" if op == "unbind" else "aten::cat", [insert.tensors(pieces), axis]
    )
    return insert.op("aten::copy", [base, joined, insert.constant(False)])


def _constants(program: Program, value: int) -> list[int] | None:
    """The numbers of a list of constants."""
    line = program.maker(value)
    if program.constant(value):
        held = program.held(value)
        return list(held) if isinstance(held, list) else None
    if line is None or line.kind != "prim::ListConstruct":
        return None
    return (
        [program.held(v) for v in line.inputs] if all(map(program.constant, line.inputs)) else None
    )


def _inverse_order(program: Program, view: ViewOf) -> list[int]:
    order = _constants(program, view.line.inputs[1])
    assert order is not None, view
    places = [axis % len(order) for axis in order]
    return [places.index(k) for k in range(len(order))]
