# SPDX-License-Identifier: Apache-2.0
"""Float32 products with bfloat16 operands on CPU: the sums and everything between products stay float32.

    %3 = linear %x %w                       %1 = cast %x : bf16         in the kernel that computes %x
    %4 = gelu.. %3                  ->      %3 = linear %1 %w : f32     packs %w as bfloat16
                                            %4 = gelu.. %3

Results are float32, so that nothing is rounded but operands. A result that only other products read is rounded where
it is made: its readers would round it to the same numbers.
"""

from collections.abc import Callable, Mapping, Set
from functools import partial

import torch

from blade.backends.disc.ir.attention import widened
from blade.backends.disc.ir.constant_parts import parts_of
from blade.backends.disc.ir.convolution import operands
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value, live, rewrite
from blade.backends.disc.ir.rewrite import rewrite_values
from blade.backends.disc.passes.bf16_convs import can_pair, is_narrow_conv
from blade.backends.disc.passes.legalize import QUANTIZED
from blade.backends.disc.passes.narrow_casts import NARROW_RULES

F32, BF16 = torch.float32, torch.bfloat16
ROUNDED = ("linear", "matmul", "attention", "conv")
"""Ops with bfloat16 operands and float32 results."""


def use_bf16_products(graph: Graph, sixteenths: int = 16) -> Graph:
    """``graph`` with bfloat16 operands of those float32 products for which code is generated.

    ``sixteenths``: how many of every 16 products, spread evenly over the graph.
    """
    products = [v.id for v in live(graph) if v.op in _RULES]
    chosen = {
        v for k, v in enumerate(products) if (k + 1) * sixteenths // 16 > k * sixteenths // 16
    }
    narrowed = rewrite_values(graph, partial(_narrow, chosen))
    return rewrite(narrowed, NARROW_RULES)


def _narrow(chosen: Set[int], b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
    """``v`` on bfloat16 if it is ``chosen``."""
    if v.id not in chosen:
        return None
    copied = Value(v.id, v.op, tuple(args), v.attrs, v.shape, v.dtype, v.strides)
    return _RULES[v.op](b, copied)


def _linear(b: IrBuilder, v: Value) -> Value | None:
    x, *constants = v.args
    if v.dtype != F32 or x.dtype != F32 or any(parts_of(c) is None for c in constants):
        return None
    return b.make("linear", [b.cast(x, BF16), *constants], v.shape, F32)


def _matmul(b: IrBuilder, v: Value) -> Value | None:
    if any(a.dtype != F32 for a in (v, *v.args)) or v.shape[-2] == 1:
        return None
    x, y, *bias = v.args
    return b.make("matmul", [b.cast(x, BF16), b.cast(y, BF16), *bias], v.shape, F32)


def _attention(b: IrBuilder, v: Value) -> Value | None:
    """Operands that an int8 product makes would have to be rounded by a pass of their own: they stay float32."""
    if any(a.dtype != F32 for a in (v, *v.args)):
        return None
    if any(_source(a).op in QUANTIZED for a in v.args[:3]):
        return None
    args = [*(b.cast(a, BF16) for a in v.args[:3]), *v.args[3:]]
    return b.make("attention", args, v.shape, F32, **v.attrs)


def _source(v: Value) -> Value:
    while v.is_layout:
        v = v.args[0]
    return v


def _conv(b: IrBuilder, v: Value) -> Value | None:
    if any(a.dtype != F32 for a in (v, *v.args)):
        return None
    x, *rest = v.args
    made = b.make("conv", [b.cast(x, BF16), *rest], v.shape, F32, **v.attrs)
    return made if is_narrow_conv(made) or can_pair(made) else None


_RULES: Mapping[str, Callable[[IrBuilder, Value], Value | None]] = {
    "linear": _linear,
    "matmul": _matmul,
    "attention": _attention,
    "conv": _conv,
}


def widen_biases(graph: Graph) -> Graph:
    """``graph`` with float32 biases and sinks of attention on bfloat16: its scores are float32."""
    if not any(v.op == "attention" and v.dtype == BF16 for v in graph.values):
        return graph

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "attention" or v.dtype != BF16 or len(args) < 4:
            return None
        wide = [widened(b, a) for a in args[3:]]
        return b.make("attention", [*args[:3], *wide], v.shape, BF16, **v.attrs)

    return rewrite_values(graph, step)


def narrow_results(graph: Graph) -> Graph:
    """Round where they are made the results that are read as bfloat16, or as residuals of convolutions, only."""
    users, returned = graph.users(), {v.id for v in graph.outputs}

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op == "cast" and v.dtype == BF16 and args[0].dtype == BF16:
            return args[0]
        if v.op not in ROUNDED or v.dtype != F32 or v.args[0].dtype != BF16 or v.id in returned:
            return None
        readers = users[v.id]
        rounding = [u for u in readers if u.op == "cast" and u.dtype == BF16]
        if not readers or not all(u in rounding or _adds(u, v) for u in readers):
            return None
        return b.make(v.op, args, v.shape, BF16, **v.attrs)

    return rewrite_values(graph, step)


def _adds(user: Value, v: Value) -> bool:
    """Whether ``user`` is a convolution on bfloat16 that adds ``v``, in any float dtype."""
    return user.op == "conv" and is_narrow_conv(user) and operands(user).residual is v
