# SPDX-License-Identifier: Apache-2.0
"""Graphs with loops, made by hand."""

import sympy
import torch
from disc_programs import S0, S1, add_input, finish, new_builder

from blade.backends.disc.ir.graph import Graph, Value
from blade.backends.disc.ir.loop import LoopBody

T = sympy.Symbol("t0", integer=True, nonnegative=True)
N = 8


def recurrence(keep_iterations: bool = False) -> Graph:
    """``h = tanh(x[t] + h)`` over x of shape [s1, s0, 8]; returns the last h, and all of them."""
    inner = new_builder()
    h, x = add_input(inner, (S0, N)), add_input(inner, (S1, S0, N))
    here = inner.reshape(inner.slice(x, 0, T, 1, 1), (S0, N))
    new = inner.pointwise("tanh", inner.pointwise("add", here, h))
    body = LoopBody(finish(inner, new, new) if keep_iterations else finish(inner, new), T, 1)
    b = new_builder()
    x = add_input(b, (S1, S0, N))
    start = b.fill(0.5, (S0, N), torch.float32)
    loop = b.make("loop", (start, x), (S0, N), torch.float32, body=body, count=S1)
    outputs: list[Value] = [b.make("carried", (loop,), (S0, N), torch.float32, index=0)]
    if keep_iterations:
        outputs.append(b.make("item", (loop,), (S1, S0, N), torch.float32, index=0))
    return finish(b, *outputs)


def products() -> Graph:
    """``h = tanh(x[t] @ w.T + h @ w.T)``, and x read from its end."""
    weight = torch.randn(N, N) / N
    inner = new_builder()
    h, x = add_input(inner, (S0, N)), add_input(inner, (S0, S1, N))
    w = inner.make("const", (), (N, N), torch.float32, (N, 1), index=0)

    def product(of: Value) -> Value:
        return inner.make("linear", (of, w), (S0, N), torch.float32)

    first = inner.reshape(inner.slice(x, 1, T, 1, 1), (S0, N))
    last = inner.reshape(inner.slice(x, 1, S1 - 1 - T, 1, 1), (S0, N))
    total = inner.pointwise("add", product(first), product(last))
    new = inner.pointwise("tanh", inner.pointwise("add", total, product(h)))
    b = new_builder()
    x = add_input(b, (S0, S1, N))
    start = b.fill(0.5, (S0, N), torch.float32)
    body = LoopBody(finish(inner, new), T, 1)
    loop = b.make("loop", (start, x), (S0, N), torch.float32, body=body, count=S1)
    state = b.make("carried", (loop,), (S0, N), torch.float32, index=0)
    return finish(b, state, constants=(weight,))


def both_ways() -> Graph:
    """``h = tanh(x[t] + h)`` from both ends; returns both last states, added, and what the way back gave."""
    b = new_builder()
    x = add_input(b, (S1, S0, N))
    start = b.fill(0.5, (S0, N), torch.float32)
    loops = []
    for k, backwards in enumerate((False, True)):
        t = sympy.Symbol(f"t{k}", integer=True, nonnegative=True)
        inner = new_builder()
        h, whole = add_input(inner, (S0, N)), add_input(inner, (S1, S0, N))
        at = S1 - 1 - t if backwards else t
        here = inner.reshape(inner.slice(whole, 0, at, 1, 1), (S0, N))
        new = inner.pointwise("tanh", inner.pointwise("add", here, h))
        body = LoopBody(finish(inner, new, new), t, 1, backwards)
        loops.append(b.make("loop", (start, x), (S0, N), torch.float32, body=body, count=S1))
    states = [b.make("carried", (one,), (S0, N), torch.float32, index=0) for one in loops]
    back = b.make("item", (loops[1],), (S1, S0, N), torch.float32, index=0)
    return finish(b, b.pointwise("add", *states), back)
