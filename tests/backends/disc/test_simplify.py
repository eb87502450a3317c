# SPDX-License-Identifier: Apache-2.0
"""Every simplification gives the same bits as the value it replaces, and the rules that matter fire."""

import math
from collections.abc import Callable

import pytest
import sympy
import torch

from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Value,
    live,
)
from blade.backends.disc.ir.simplify import RULES
from blade.backends.disc.reference.interpret_graph import interpret

F32, I64, BOOL = torch.float32, torch.int64, torch.bool
M = sympy.Symbol("m", integer=True, positive=True)
N = sympy.Symbol("n", integer=True, positive=True)
Make = Callable[[IrBuilder, Value, Value], Value]
NUMBERS = torch.tensor(
    [math.nan, -0.0, 0.0, math.inf, -math.inf, 1.5, -2.25, 3e38, 1e-42, 7.0, -1.0, 2.0]
)


def cast(b: IrBuilder, x: Value, dtype: torch.dtype) -> Value:
    return b.pointwise("cast", x, dtype=dtype)


def number(b: IrBuilder, value: float, like: Value) -> Value:
    return b.fill(value, like.shape, like.dtype)


def iota(b: IrBuilder, size: sympy.Expr | int) -> Value:
    return b.make("iota", (), (size,), I64, axis=0)


def twice(b: IrBuilder, x: Value, y: Value) -> Value:
    return b.make("concat", (x, y), (2 * M, N), x.dtype, axis=0)


# x is f32[m, n], i is i64[m, n]; the op that should be left (None: any), and the value
CASES: dict[str, tuple[str | None, Make]] = {
    "x * 1": ("input", lambda b, x, i: b.pointwise("mul", x, number(b, 1, x))),
    "1 * x": ("input", lambda b, x, i: b.pointwise("mul", number(b, 1, x), x)),
    "x / 1": ("input", lambda b, x, i: b.pointwise("div", x, number(b, 1, x))),
    "x ** 1": ("input", lambda b, x, i: b.pointwise("pow", x, number(b, 1, x))),
    "i ** 1": ("input", lambda b, x, i: b.pointwise("pow", i, number(b, 1, i))),
    "x ** 2 stays": ("pow", lambda b, x, i: b.pointwise("pow", x, number(b, 2, x))),
    "x + 0 keeps -0": ("add", lambda b, x, i: b.pointwise("add", x, number(b, 0, x))),
    "x - 0": (None, lambda b, x, i: b.pointwise("sub", x, number(b, 0, x))),
    "floor(x / 1) stays": (
        "div_floor",
        lambda b, x, i: b.pointwise("div_floor", x, number(b, 1, x)),
    ),
    "i + 0": ("input", lambda b, x, i: b.pointwise("add", i, number(b, 0, i))),
    "0 + i": ("input", lambda b, x, i: b.pointwise("add", number(b, 0, i), i)),
    "i // 1": ("input", lambda b, x, i: b.pointwise("div_floor", i, number(b, 1, i))),
    "x / 4": ("mul", lambda b, x, i: b.pointwise("div", x, number(b, 4, x))),
    "x / -0.5": ("mul", lambda b, x, i: b.pointwise("div", x, number(b, -0.5, x))),
    "x / 3 stays": ("div", lambda b, x, i: b.pointwise("div", x, number(b, 3, x))),
    "x / 2**100 stays": ("div", lambda b, x, i: b.pointwise("div", x, number(b, 2.0**100, x))),
    "fold": ("fill", lambda b, x, i: b.pointwise("exp", number(b, 0.3, x))),
    "fold two": ("fill", lambda b, x, i: b.pointwise("div", number(b, 1, x), number(b, 3, x))),
    "fold cast": ("fill", lambda b, x, i: cast(b, number(b, 2.7, x), I64)),
    "bool of bool": (
        "isnan",
        lambda b, x, i: cast(b, cast(b, b.pointwise("isnan", x, dtype=BOOL), F32), BOOL),
    ),
    "int of float stays": ("cast", lambda b, x, i: cast(b, cast(b, i, F32), I64)),
    "chosen": (
        "input",
        lambda b, x, i: b.pointwise("where", b.fill(True, x.shape, BOOL), x, number(b, 2, x)),
    ),
    "same either way": (
        "input",
        lambda b, x, i: b.pointwise("where", b.pointwise("isnan", x, dtype=BOOL), x, x),
    ),
    "and true": (
        "isnan",
        lambda b, x, i: b.pointwise(
            "bitwise_and", b.pointwise("isnan", x, dtype=BOOL), b.fill(True, x.shape, BOOL)
        ),
    ),
    "or true": (
        "fill",
        lambda b, x, i: b.pointwise(
            "logical_or", b.fill(True, x.shape, BOOL), b.pointwise("isnan", x, dtype=BOOL)
        ),
    ),
    "count >= 0": (
        "fill",
        lambda b, x, i: b.pointwise("ge", iota(b, N), b.fill(0, (N,), I64), dtype=BOOL),
    ),
    "count >= 1 stays": (
        "ge",
        lambda b, x, i: b.pointwise("ge", iota(b, N), b.fill(1, (N,), I64), dtype=BOOL),
    ),
    "two permutations": ("input", lambda b, x, i: b.permute(b.permute(x, (1, 0)), (1, 0))),
    "two reshapes": ("reshape", lambda b, x, i: b.reshape(b.reshape(x, (M * N,)), (N, M))),
    "there and back": ("input", lambda b, x, i: b.reshape(b.reshape(x, (M * N,)), (M, N))),
    "two broadcasts": (
        "broadcast",
        lambda b, x, i: b.broadcast(b.broadcast(x, (3, M, N)), (2, 3, M, N)),
    ),
    "slice of a count": ("add", lambda b, x, i: b.slice(iota(b, N), 0, 1, 1, N - 1)),
    "layout of a count": (
        "iota",
        lambda b, x, i: b.permute(b.broadcast(iota(b, N), (M, N)), (1, 0)),
    ),
    "layout of a number": ("fill", lambda b, x, i: b.slice(number(b, 7, x), 0, 1, 1, M - 1)),
    "compute, then expand": (
        "broadcast",
        lambda b, x, i: b.pointwise("exp", b.broadcast(x, (4, M, N))),
    ),
    "slice of an operand": (
        "input",
        lambda b, x, i: b.slice(twice(b, x, number(b, 2, x)), 0, 0, 1, M),
    ),
    "slice within the last operand": (
        "slice",
        lambda b, x, i: b.slice(twice(b, number(b, 2, x), x), 0, M + 1, 1, 1),
    ),
    "slice of both operands stays": (
        "slice",
        lambda b, x, i: b.slice(twice(b, x, number(b, 2, x)), 0, 1, 1, M),
    ),
    "concat of one": (
        "input",
        lambda b, x, i: b.make("concat", (x, b.fill(0, (0, N), F32)), (M, N), F32, axis=0),
    ),
}


def run(make: Make, rules: bool, x: torch.Tensor, i: torch.Tensor) -> tuple[Value, torch.Tensor]:
    b = IrBuilder(RULES if rules else None)
    vx = b.make("input", (), (M, N), F32, index=0)
    vi = b.make("input", (), (M, N), I64, index=1)
    made = make(b, vx, vi)
    graph = Graph(b.values, (made,), ((),), (vx, vi))
    graph.values = live(graph)
    return made, interpret(graph, [x, i])[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (12, 1), (2, 6)])
def test_the_same_bits(name: str, shape: tuple[int, int]) -> None:
    left, make = CASES[name]
    x = NUMBERS.reshape(shape)
    i = torch.arange(12).reshape(shape) - 5
    simple, got = run(make, True, x, i)
    _, want = run(make, False, x, i)
    assert left in (None, simple.op), str(simple)
    assert got.dtype == want.dtype and got.shape == want.shape
    if not got.is_floating_point():
        assert torch.equal(got, want)
        return
    assert torch.equal(got.isnan(), want.isnan())
    kept = ~got.isnan()
    assert torch.equal(got[kept], want[kept])
    assert torch.equal(got[kept].signbit(), want[kept].signbit())
