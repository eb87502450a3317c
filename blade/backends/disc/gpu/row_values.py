# SPDX-License-Identifier: Apache-2.0
"""What is computed from a row's sum alone stays a value of the row, and in the kernel that sums.

    %2 f32[s0, 8, 1] = reduce %1 {sum}          %2 f32[s0, 8, 1] = reduce %1 {sum}
    %3 f32[s0, 8] = reshape %2           ->     %4 f32[s0, 8, 1] = mul %2 0.125
    %4 f32[s0, 8] = mul %3 0.125                %5 f32[s0, 8] = reshape %4

Without the last axis, of size 1, it would be a tensor of its own, with a launch of its own. So would what
is computed of a row's value at each of its elements, where these are seen in another shape: a group norm's
scale is a deviation for every group times a weight for every channel.

    %2 f32[s0, 16, 4] = broadcast %1            %2 f32[s0, 16, 4] = broadcast %1
    %3 f32[s0, 64] = reshape %2          ->     %4 f32[s0, 16, 4] = mul %2 (reshape %w)
    %4 f32[s0, 64] = mul %3 %w                  %5 f32[s0, 64] = reshape %4
"""

from collections.abc import Mapping, Sequence

from blade.backends.disc.fuse import row_source
from blade.backends.disc.ir import LEAVES, Builder, Graph, Rule, Value, rewrite
from blade.backends.disc.kernel import POINTWISE
from blade.backends.disc.simplify import RULES


def keep_row_values(graph: Graph) -> Graph:
    """``graph`` with reshapes that drop a row's axis after what is computed of the row's value."""
    return rewrite(graph, _RULES)


def compute_before(b: Builder, v: Value) -> Value | None:
    """f(row values without their axis, scalars) is f(row values), without its axis."""
    wide = [a for a in v.args if a.op not in ("fill", "size")]
    shape = (*v.shape, 1)
    if not wide or not all(_drops_row_axis(a) for a in wide):
        return None
    operands = [
        b.make(a.op, (), shape, a.dtype, **a.attrs) if a not in wide else a.args[0] for a in v.args
    ]
    return b.reshape(b.make(v.op, operands, shape, v.dtype, **v.attrs), v.shape)


def compute_in_rows(b: Builder, v: Value) -> Value | None:
    """f(rows of one value each, seen in another shape, and what is repeated) is f at the rows' own shape."""
    rows = [a for a in v.args if _repeats_row_values(a)]
    others = [a for a in v.args if a.op not in LEAVES and a not in rows]
    shapes = {a.args[0].shape for a in rows}
    if len(shapes) != 1 or any(a.op != "broadcast" for a in others):
        return None
    (shape,) = shapes
    operands = [
        b.make(a.op, (), shape, a.dtype, **a.attrs) if a.op in LEAVES else b.reshape(a, shape)
        for a in v.args
    ]
    return b.reshape(b.make(v.op, operands, shape, v.dtype, **v.attrs), v.shape)


def _repeats_row_values(v: Value) -> bool:
    source = row_source(v.args[0]) if v.op == "reshape" else None
    return source is not None and (source.op == "reduce" or source.is_pointwise)


def _drops_row_axis(v: Value) -> bool:
    if v.op != "reshape" or v.args[0].shape != (*v.shape, 1):
        return False
    return v.args[0].op == "reduce" or v.args[0].is_pointwise


_RULES: Mapping[str, Sequence[Rule]] = {
    **RULES,
    **{op: [*RULES[op], compute_before, compute_in_rows] for op in POINTWISE},
}
