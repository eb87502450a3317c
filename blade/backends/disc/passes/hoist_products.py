# SPDX-License-Identifier: Apache-2.0
"""Products out of loops: what each iteration multiplies by a weight, and all of it is there before, is one product.

    loop over s1:                              %9 f32[s0, s1, 32] = linear %x %w
        %2 = slice %x starts=(0,t,0)           loop over s1:
        %3 = linear (reshape %2) %w      ->        %2 = slice %9 starts=(0,t,0)

A product of few rows reads the whole weight, at each iteration. One for all iterations reads it once.
"""

from dataclasses import replace

import sympy

from blade.backends.disc.ir.graph import Graph, IrBuilder, Value
from blade.backends.disc.ir.loop import LoopBody, body_of
from blade.backends.disc.ir.rewrite import (
    eliminate_dead_code,
    rewrite_values,
    rewrite_with_builder,
)
from blade.backends.disc.ir.views import equal


def hoist_products(graph: Graph) -> Graph:
    """``graph`` with products in front of the loops that need a slice of them in each iteration."""

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        return _hoisted(b, v, args) if v.op == "loop" else None

    return rewrite_values(graph, step)


def _hoisted(b: IrBuilder, loop: Value, args: list[Value]) -> Value | None:
    body = body_of(loop)
    products = [v for v in body.graph.values if _sliced(v, loop, body) is not None]
    if not products:
        return None
    whole: dict[int, Value] = {}
    for v in products:
        source, *_ = _slice_of(v)
        x = args[source.args[0].attrs["index"]]
        weights = [_copied(b, w) for w in v.args[1:]]
        whole[v.id] = b.make("linear", [x, *weights], (*x.shape[:-1], v.shape[-1]), v.dtype)
    nested = _reading(body, products, whole)
    given = [*args, *whole.values()]
    return b.make("loop", given, loop.shape, loop.dtype, **{**loop.attrs, "body": nested})


def _slice_of(v: Value) -> tuple[Value, int]:
    """The slice that the product ``v`` reads through reshapes, and the axis where it has one element."""
    x = v.args[0]
    while x.op == "reshape":
        x = x.args[0]
    starts = x.attrs.get("starts", ())
    moving = [k for k, start in enumerate(starts) if start != 0]
    return x, moving[0] if len(moving) == 1 else -1


def _sliced(v: Value, loop: Value, body: LoopBody) -> int | None:
    """The axis of the input of which ``v`` multiplies one slice in each iteration, and no slice is left over;
    else ``None``.
    """
    if v.op != "linear" or not all(map(_is_constant, v.args[1:])):
        return None
    x, axis = _slice_of(v)
    if x.op != "slice" or axis < 0 or axis == len(x.shape) - 1 or x.shape[axis] != 1:
        return None
    source, rest = x.args[0], [d for k, d in enumerate(x.shape) if k != axis]
    is_input = source.op == "input" and source.attrs["index"] >= body.carried
    is_whole = all(
        d == s for k, (d, s) in enumerate(zip(x.shape, source.shape, strict=True)) if k != axis
    )
    rows = list(v.args[0].shape) in (rest, list(x.shape))
    moves = body.index in sympy.sympify(x.attrs["starts"][axis]).free_symbols
    fits = is_input and is_whole and rows and moves
    return axis if fits and equal(source.shape[axis], loop.attrs["count"]) else None


def _is_constant(value: Value) -> bool:
    """Whether ``value`` follows from weights alone, by layout and conversion."""
    if value.op == "const":
        return True
    moved = value.is_layout or value.op == "cast"
    return moved and all(map(_is_constant, value.args))


def _copied(b: IrBuilder, value: Value) -> Value:
    args = [_copied(b, a) for a in value.args]
    return b.make(value.op, args, value.shape, value.dtype, value.strides, **value.attrs)


def _reading(body: LoopBody, products: list[Value], whole: dict[int, Value]) -> LoopBody:
    """``body`` with slices of further inputs in place of ``products``."""
    first = len(body.graph.inputs)
    place = {v.id: first + k for k, v in enumerate(products)}
    made: dict[int, Value] = {}

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.id not in place:
            return None
        source, axis = _slice_of(v)
        given = whole[v.id]
        made[v.id] = b.make("input", (), given.shape, given.dtype, index=place[v.id])
        part = b.slice(made[v.id], axis, source.attrs["starts"][axis], 1, 1)
        return b.reshape(part, v.shape)

    b, graph = rewrite_with_builder(body.graph, step)
    inputs = (*graph.inputs, *(made[v.id] for v in products))
    nested = eliminate_dead_code(replace(graph, values=b.values, inputs=inputs))
    return replace(body, graph=nested)
