# SPDX-License-Identifier: Apache-2.0
"""Kernels write over what they read where nothing else needs it: which slots, and the right values."""

from collections.abc import Callable

import pytest
import sympy
import torch
from cpu_native import symbol
from disc_programs import S0, S1, add_input, compile_to_engine, finish, new_builder

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value
from blade.backends.disc.ir.kernel import (
    Access,
    Arg,
    Compute,
    Gather,
    Kernel,
    Load,
    Stmt,
    Store,
)
from blade.backends.disc.program.buffer_reuse import Liveness, overwritable
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import host

N, M = symbol("n"), symbol("m")
F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
ROWS = (M, sympy.Integer(1))


def pairs(body: list[Stmt], *dtypes: torch.dtype, size: object = M) -> list[tuple[int, int]]:
    """Which of the pointers a kernel over [n, m] may write over which; the last one is written."""
    shapes = [(N, size) for _ in dtypes[:-1]] + [(N, M)]
    buffers = [
        Value(k, "input", (), {"index": k}, shape, dtype)
        for k, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    args = tuple(Arg(d, k == len(dtypes) - 1) for k, d in enumerate(dtypes))
    found = overwritable(Kernel((N,), M, args, tuple(body)), buffers)
    return [(read.id, written.id) for read, written in found]


def load(arg: int, strides: tuple[object, ...] = ROWS, offset: object = 0) -> Load:
    return Load(Access(arg, strides, offset), F32)  # type: ignore[arg-type]


def test_an_operand_read_where_it_is_stored_is_overwritten() -> None:
    body = [load(0), load(1), Compute("add", (0, 1), F32), Store(Access(2, ROWS), 2)]
    assert pairs(body, F32, F32, F32) == [(0, 2), (1, 2)]
    assert pairs(body, F32, I32, F32) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    "other",
    [
        load(0, (sympy.Integer(1), N)),
        load(0, (M, sympy.Integer(0))),
        load(0, offset=1),
        Gather(Access(0, ROWS), 0, 1, F32),
    ],
    ids=["transposed", "broadcast", "shifted", "gathered"],
)
def test_an_operand_read_elsewhere_is_kept(other: Stmt) -> None:
    same, store = load(0), Store(Access(1, ROWS), 2)
    assert pairs([same, other, Compute("add", (0, 1), F32), store], F32, F32) == []


def test_buffers_of_other_sizes_are_kept() -> None:
    body: list[Stmt] = [load(0), Store(Access(1, ROWS), 0)]
    assert pairs(body, F32, F32) == [(0, 1)]
    assert pairs(body, BF16, F32) == []
    assert pairs(body, F32, F32, size=2 * M) == []


def test_a_buffer_stored_in_two_places_overwrites_nothing() -> None:
    stores = [Store(Access(1, ROWS), 0), Store(Access(1, ROWS, M), 0)]
    assert pairs([load(0), *stores], F32, F32) == []


def test_a_slot_is_taken_once_and_only_where_it_ends() -> None:
    lives = Liveness()
    for slot, at in [(0, 0), (1, 0), (0, 1), (2, 1), (3, 1), (1, 1), (1, 2), (2, 2), (4, 2)]:
        lives.touch(slot, at)
    for read, written, at in [(1, 2, 1), (0, 2, 1), (0, 3, 1), (1, 4, 2), (2, 4, 2)]:
        lives.offer(read, written, at)
    assert lives.reused(lambda slot: True) == {
        2: 0,
        4: 1,
    }  # slot 1 is read again, slot 0 taken, slot 4 has its own


def product(b: IrBuilder, *middle: Callable[[Value], Value], again: bool = False) -> Graph:
    """Two matrix products and, between them, a kernel for each of ``middle``."""
    x, y = add_input(b, (S0, S1, S1)), add_input(b, (S0, S1, S1))
    value = first = b.make("matmul", (x, y), (S0, S1, S1), F32)
    for step in middle:
        value = step(value)
    value = b.make("matmul", (value, first if again else y), (S0, S1, S1), F32)
    return finish(b, value)


def reused(graph: Graph) -> list[tuple[int, int]]:
    """Slots that take another's bytes, with the other; both in the order of first use."""
    lines = [s.split() for s in compile_ir(graph, host()).program.splitlines()]
    return [(int(s[1]), int(s[-1])) for s in lines if s[0] == "slot" and "reuse" in s]


def normalized(b: IrBuilder) -> Callable[[Value], Value]:
    def step(x: Value) -> Value:
        centred = b.pointwise("sub", x, row(b, "max", x))
        length = row(
            b, "sum", b.pointwise("abs", b.pointwise("sub", centred, b.fill(1.0, x.shape, F32)))
        )
        return b.pointwise("div", centred, length)

    return step


def row(b: IrBuilder, kind: str, x: Value, axis: int = 2) -> Value:
    total = b.reduce(kind, x, [axis])
    return b.broadcast(total, x.shape)


def centred_columns(b: IrBuilder) -> Callable[[Value], Value]:
    return lambda x: b.pointwise("sub", b.pointwise("tanh", x), row(b, "sum", x, 1))


def symmetric(b: IrBuilder) -> Callable[[Value], Value]:
    return lambda x: b.pointwise("add", b.pointwise("tanh", x), b.permute(x, (0, 2, 1)))


def elementwise(b: IrBuilder) -> Callable[[Value], Value]:
    return lambda x: b.pointwise("tanh", x)


def check(graph: Graph) -> None:
    engine = compile_to_engine(graph)
    torch.manual_seed(0)
    for s0, s1 in [(1, 1), (2, 3), (3, 16), (2, 37), (1, 70), (0, 4)]:
        inputs = [torch.randn(s0, s1, s1) for _ in range(2)]
        found = engine.try_execute(inputs)
        assert found is not None, engine.last_error()
        for have, want in zip(found, interpret(graph, inputs), strict=True):
            torch.testing.assert_close(have, want, rtol=2e-4, atol=2e-4)


@pytest.mark.needs("torch_mlir", "runtime")
@pytest.mark.parametrize(
    ("make", "expected"),
    [(elementwise, 1), (normalized, 1), (centred_columns, 1), (symmetric, 0)],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_products_with_a_kernel_between(
    make: Callable[[IrBuilder], Callable[[Value], Value]], expected: int
) -> None:
    """Rows and columns are read several times before they are stored; a transpose is in the way."""
    b = new_builder()
    graph = product(b, make(b))
    assert len(reused(graph)) == expected
    check(graph)


@pytest.mark.needs("torch_mlir", "runtime")
@pytest.mark.parametrize("make", [elementwise, normalized])
def test_what_is_read_again_is_kept(make: Callable[[IrBuilder], Callable[[Value], Value]]) -> None:
    b = new_builder()
    graph = product(b, make(b), again=True)
    assert reused(graph) == []
    check(graph)


@pytest.mark.needs("torch_mlir", "runtime")
def test_inputs_and_results_are_no_ones_bytes() -> None:
    b = new_builder()
    x, y = add_input(b, (S0, S1, S1)), add_input(b, (S0, S1, S1))
    first = b.make("matmul", (b.pointwise("tanh", x), y), (S0, S1, S1), F32)
    graph = finish(b, b.pointwise("exp", first))
    assert reused(graph) == []
    check(graph)
