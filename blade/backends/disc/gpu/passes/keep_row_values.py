# SPDX-License-Identifier: Apache-2.0
"""Values computed only from a row's sum stay row values, in the kernel that sums.

    %2 f32[s0, 8, 1] = reduce %1 {sum}          %2 f32[s0, 8, 1] = reduce %1 {sum}
    %3 f32[s0, 8] = reshape %2           ->     %4 f32[s0, 8, 1] = mul %2 0.125
    %4 f32[s0, 8] = mul %3 0.125                %5 f32[s0, 8] = reshape %4

Without the last axis, of size 1, the value would be a separate tensor with a separate launch. The same
holds for a row value that is combined with others at each element in another shape: a group norm's scale is
a deviation per group times a weight per channel.

    %2 f32[s0, 16, 4] = broadcast %1            %2 f32[s0, 16, 4] = broadcast %1
    %3 f32[s0, 64] = reshape %2          ->     %4 f32[s0, 16, 4] = mul %2 (reshape %w)
    %4 f32[s0, 64] = mul %3 %w                  %5 f32[s0, 64] = reshape %4
"""

from collections.abc import Mapping, Sequence

from blade.backends.disc.fusion.fuse import row_source
from blade.backends.disc.ir.graph import (
    LEAVES,
    Graph,
    IrBuilder,
    Rule,
    Value,
    rewrite,
)
from blade.backends.disc.ir.kernel import POINTWISE
from blade.backends.disc.ir.simplify import RULES

_DEEPEST = 2  # ops on inputs, one after the other


def keep_row_values(graph: Graph) -> Graph:
    """``graph`` with reshapes that drop a row's axis moved after the computations on row values."""
    return rewrite(graph, _RULES)


def compute_before(b: IrBuilder, v: Value) -> Value | None:
    """f(reshape(row values), others) -> reshape(f(row values, others)); reshape drops the row's axis.

    The others are scalars and what is computed from inputs alone, such as a running mean.
    """
    if not any(map(_drops_row_axis, v.args)):
        return None
    operands = [a.args[0] if _drops_row_axis(a) else _with_row_axis(b, a) for a in v.args]
    known = [o for o in operands if o is not None]
    if len(known) != len(operands):
        return None
    shape = (*v.shape, 1)
    return b.reshape(b.make(v.op, known, shape, v.dtype, **v.attrs), v.shape)


def _with_row_axis(b: IrBuilder, v: Value, depth: int = 0) -> Value | None:
    """``v``, with an axis of one element added, if a few ops compute it from leaves."""
    shape = (*v.shape, 1)
    if v.op in ("fill", "size"):
        return b.make(v.op, (), shape, v.dtype, **v.attrs)
    if v.op in ("input", "const"):
        return b.reshape(v, shape)
    if not v.is_pointwise or depth == _DEEPEST:
        return None
    operands = [_with_row_axis(b, a, depth + 1) for a in v.args]
    known = [o for o in operands if o is not None]
    if len(known) != len(operands):
        return None
    return b.make(v.op, known, shape, v.dtype, **v.attrs)


def compute_in_rows(b: IrBuilder, v: Value) -> Value | None:
    """f(reshape(broadcast row values), repeated values) -> reshape(f(..)), with f at the rows' own shape."""
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
