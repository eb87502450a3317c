# SPDX-License-Identifier: Apache-2.0
"""What is computed from a row's sum alone stays a value of the row, and in the kernel that sums.

    %2 f32[s0, 8, 1] = reduce %1 {sum}          %2 f32[s0, 8, 1] = reduce %1 {sum}
    %3 f32[s0, 8] = reshape %2           ->     %4 f32[s0, 8, 1] = mul %2 0.125
    %4 f32[s0, 8] = mul %3 0.125                %5 f32[s0, 8] = reshape %4

Without the last axis, of size 1, it would be a tensor of its own, with a launch of its own.
"""

from collections.abc import Mapping, Sequence

from blade.backends.disc.ir import Builder, Graph, Rule, Value, rewrite
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


def _drops_row_axis(v: Value) -> bool:
    if v.op != "reshape" or v.args[0].shape != (*v.shape, 1):
        return False
    return v.args[0].op == "reduce" or v.args[0].is_pointwise


_RULES: Mapping[str, Sequence[Rule]] = {
    **RULES,
    **{op: [*RULES[op], compute_before] for op in POINTWISE},
}
