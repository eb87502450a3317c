# SPDX-License-Identifier: Apache-2.0
"""What follows a convolution and nothing else reads goes into it: bias, residual, then an activation.

    %3 = conv %1 %2 activation=None
    %4 = add %3 %0                      becomes     %3 = conv %1 %2 %0 activation=relu
    %5 = maximum %4 0

Only for constant weights, which generated code serves; ATen would make a pass of its own of each.
"""

from collections.abc import Callable

from blade.backends.disc.constants import parts_of
from blade.backends.disc.convolution import operands
from blade.backends.disc.ir import LEAVES, Builder, Graph, Value
from blade.backends.disc.rebuild import rebuild

_CLAMPS = {("maximum", None, 0): "relu", ("minimum", "relu", 6): "relu6"}
"""(op, activation so far, number) -> the activation that makes."""


def absorb(graph: Graph) -> Graph:
    """``graph`` with epilogues in its convolutions."""
    if not any(v.op == "conv" for v in graph.values):
        return graph
    users = graph.users()
    returned = {v.id for v in graph.outputs}

    def is_free(v: Value) -> bool:
        return len(users[v.id]) == 1 and v.id not in returned

    def step(b: Builder, v: Value, args: list[Value]) -> Value | None:
        if v.op not in _STEPS:
            return None
        order = sorted(
            range(len(args)), key=lambda k: -v.args[k].id
        )  # the later one is still to run
        for k in order:
            conv = args[k]
            if conv.op == "conv" and is_free(v.args[k]) and parts_of(operands(conv).weight):
                made = _STEPS[v.op](b, v, conv, args[1 - k])
                if made is not None:
                    return made
        return None

    return rebuild(graph, step)


def _add(b: Builder, v: Value, conv: Value, other: Value) -> Value | None:
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


def _clamp(b: Builder, v: Value, conv: Value, other: Value) -> Value | None:
    if other.op != "fill":
        return None
    name = _CLAMPS.get((v.op, conv.attrs["activation"], other.attrs["value"]))
    if name is None:
        return None
    attrs = {**conv.attrs, "activation": name}
    return b.make("conv", conv.args, conv.shape, conv.dtype, **attrs)


_STEPS: dict[str, Callable[[Builder, Value, Value, Value], Value | None]] = {
    "add": _add,
    "maximum": _clamp,
    "minimum": _clamp,
}
