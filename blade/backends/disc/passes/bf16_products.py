# SPDX-License-Identifier: Apache-2.0
"""Float32 products with bfloat16 operands on CPU: the sums and everything between products stay float32.

    %3 = linear %x %w                       %1 = cast %x : bf16         in the kernel that computes %x
    %4 = gelu.. %3                  ->      %3 = linear %1 %w : f32     packs %w as bfloat16
                                            %4 = gelu.. %3

Results are float32, so that nothing is rounded but operands. A result that only other products read is rounded where
it is made: its readers would round it to the same numbers.
"""

import torch

from blade.backends.disc.ir.constant_parts import parts_of
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value, rewrite
from blade.backends.disc.ir.rewrite import rewrite_values
from blade.backends.disc.passes.narrow_casts import NARROW_RULES

F32, BF16 = torch.float32, torch.bfloat16
ROUNDED = ("linear", "matmul", "attention")
"""Ops with bfloat16 operands and float32 results."""


def use_bf16_products(graph: Graph) -> Graph:
    """``graph`` with bfloat16 operands of those float32 products for which code is generated."""
    rules = {"linear": [_linear], "matmul": [_matmul], "attention": [_attention]}
    return _narrow_results(rewrite(graph, {**NARROW_RULES, **rules}))


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
    if any(a.dtype != F32 for a in (v, *v.args)):
        return None
    args = [*(b.cast(a, BF16) for a in v.args[:3]), *v.args[3:]]
    return b.make("attention", args, v.shape, F32, **v.attrs)


def widen_biases(graph: Graph) -> Graph:
    """``graph`` with float32 biases of attention on bfloat16: its scores are float32."""
    if not any(v.op == "attention" and v.dtype == BF16 for v in graph.values):
        return graph

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "attention" or v.dtype != BF16 or len(args) < 4:
            return None
        return b.make("attention", [*args[:3], _widened(b, args[3])], v.shape, BF16, **v.attrs)

    return rewrite_values(graph, step)


def _widened(b: IrBuilder, bias: Value) -> Value:
    """``bias`` as float32, converted before it is broadcast."""
    if bias.op != "broadcast":
        return b.cast(bias, F32)
    inner = b.cast(bias.args[0], F32)
    return b.make("broadcast", [inner], bias.shape, F32, **bias.attrs)


def _narrow_results(graph: Graph) -> Graph:
    """Round where they are made the results that are read as bfloat16 only."""
    users, returned = graph.users(), {v.id for v in graph.outputs}

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op == "cast" and v.dtype == BF16 and args[0].dtype == BF16:
            return args[0]
        if v.op not in ROUNDED or v.dtype != F32 or v.args[0].dtype != BF16 or v.id in returned:
            return None
        if not users[v.id] or not all(u.op == "cast" and u.dtype == BF16 for u in users[v.id]):
            return None
        return b.make(v.op, args, v.shape, BF16, **v.attrs)

    return rewrite_values(graph, step)
