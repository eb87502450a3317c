# SPDX-License-Identifier: Apache-2.0
"""Fuses bias, residual and activation into the convolution before them if nothing else reads its result.

    %3 = conv %1 %2 activation=None
    %4 = add %3 %0                      becomes     %3 = conv %1 %2 %0 activation=relu
    %5 = maximum %4 0

Applies to constant weights only, for which code is generated; ATen would run a pass for each of these ops.
"""

from collections.abc import Callable

from blade.backends.disc.ir.constant_parts import parts_of
from blade.backends.disc.ir.convolution import operands
from blade.backends.disc.ir.graph import (
    LEAVES,
    Graph,
    IrBuilder,
    Value,
)
from blade.backends.disc.ir.rewrite import rewrite_values

_CLAMPS = {("maximum", None, 0): "relu", ("minimum", "relu", 6): "relu6"}
"""(op, activation so far, number) -> the combined activation."""


def fuse_conv_epilogue(graph: Graph) -> Graph:
    """``graph`` with epilogues fused into its convolutions."""
    if not any(v.op == "conv" for v in graph.values):
        return graph
    users = graph.users()
    returned = {v.id for v in graph.outputs}

    def is_free(v: Value) -> bool:
        return len(users[v.id]) == 1 and v.id not in returned

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op not in _STEPS:
            return None
        order = sorted(
            range(len(args)), key=lambda k: -v.args[k].id
        )  # the later one first: the other is computed before it
        for k in order:
            conv = args[k]
            if conv.op == "conv" and is_free(v.args[k]) and parts_of(operands(conv).weight):
                made = _STEPS[v.op](b, v, conv, args[1 - k])
                if made is not None:
                    return made
        return None

    return rewrite_values(graph, step)


def _add(b: IrBuilder, v: Value, conv: Value, other: Value) -> Value | None:
    given = operands(conv)
    if conv.attrs["activation"] is not None or given.residual is not None:
        return None
    if other.op in LEAVES or other.dtype != conv.dtype or conv.dtype != v.dtype:
        return None
    if other.op != "broadcast":
        return b.make("conv", [*conv.args, other], conv.shape, conv.dtype, **conv.attrs)
    per_channel = other.attrs["axes"] == (len(conv.shape) - 1,)
    if given.bias is not None or not per_channel or other.args[0].op != "const":
        return None
    return b.make("conv", [*conv.args, other.args[0]], conv.shape, conv.dtype, **conv.attrs)


def _clamp(b: IrBuilder, v: Value, conv: Value, other: Value) -> Value | None:
    if other.op != "fill":
        return None
    name = _CLAMPS.get((v.op, conv.attrs["activation"], other.attrs["value"]))
    if name is None:
        return None
    attrs = {**conv.attrs, "activation": name}
    return b.make("conv", conv.args, conv.shape, conv.dtype, **attrs)


_STEPS: dict[str, Callable[[IrBuilder, Value, Value, Value], Value | None]] = {
    "add": _add,
    "maximum": _clamp,
    "minimum": _clamp,
}
