# SPDX-License-Identifier: Apache-2.0
"""Inputs that a compiled program gives other contents: in place where nothing is in the way, else copied."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from disc_programs import S0, S1, add_input, compile_to_engine, finish, new_builder

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Value,
    contiguous_strides,
)
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import host

pytestmark = pytest.mark.needs("torch_mlir", "runtime")
F32 = torch.float32
Made = tuple[list[Value], list[tuple[int, Value]]]  # what is returned; (input, new contents)


def plain(b: IrBuilder, x: Value, y: Value) -> Made:
    return [], [(0, b.pointwise("add", x, y))]


def momentum(b: IrBuilder, x: Value, y: Value) -> Made:
    """One kernel reads and writes both."""
    new = b.pointwise("add", x, y)
    return [], [(0, new), (1, b.pointwise("mul", new, y))]


def apart(b: IrBuilder, x: Value, y: Value) -> Made:
    """Two kernels read both: only the last one may write over what it reads."""
    return [], [(0, b.pointwise("add", x, y)), (1, b.pointwise("mul", x, y))]


def normalized(b: IrBuilder, x: Value, y: Value) -> Made:
    """A row is read as a whole before any of it is stored."""
    total = b.broadcast(b.reduce("sum", b.pointwise("abs", x), [1]), x.shape)
    return [], [(0, b.pointwise("sub", x, b.pointwise("mul", total, y)))]


def beside(b: IrBuilder, x: Value, y: Value) -> Made:
    """A product by the library, which may fail, comes first though the graph has it last."""
    new = b.pointwise("add", x, y)
    return [_product(b, x, y)], [(0, new)]


def after(b: IrBuilder, x: Value, y: Value) -> Made:
    return [], [(1, b.pointwise("sub", y, _product(b, x, y)))]


def returned(b: IrBuilder, x: Value, y: Value) -> Made:
    """What the caller gets must not change with the next call."""
    new = b.pointwise("add", x, y)
    return [new], [(0, new)]


def transposed(b: IrBuilder, x: Value, y: Value) -> Made:
    turned = b.permute(b.reshape(x, (S1, S0)), (1, 0))
    return [], [(0, b.pointwise("add", y, turned))]


def swapped(b: IrBuilder, x: Value, y: Value) -> Made:
    """One goes aside before it is written over."""
    return [], [(0, y), (1, x)]


def read_later(b: IrBuilder, x: Value, y: Value) -> Made:
    """A kernel over other shapes reads x: before or after, but not in the midst."""
    total = b.reduce("sum", b.reshape(b.pointwise("mul", x, y), (S0 * S1,)), [0])
    spread = b.broadcast(b.reshape(total, ()), x.shape)
    return [], [(0, b.pointwise("add", x, spread))]


def equal(b: IrBuilder, x: Value, y: Value) -> Made:
    new = b.pointwise("add", x, y)
    return [], [(0, new), (1, new)]


def shifted(b: IrBuilder, x: Value, y: Value) -> Made:
    rest, row = b.slice(x, 0, 1, 1, S0 - 1), b.slice(y, 0, 0, 1, 1)
    return [], [(0, b.make("concat", (rest, row), x.shape, F32, axis=0))]


CASES: dict[Callable[[IrBuilder, Value, Value], Made], tuple[int, int]] = {
    plain: (1, 0),
    momentum: (2, 0),
    apart: (1, 1),
    normalized: (1, 0),
    beside: (1, 0),
    after: (1, 0),
    returned: (0, 1),
    transposed: (0, 1),
    swapped: (1, 1),
    read_later: (1, 0),
    equal: (1, 1),
    shifted: (0, 1),
}
"""How many inputs are updated in place, and how many by a copy."""


def _product(b: IrBuilder, x: Value, y: Value) -> Value:
    target = torch.ops.aten.hypot.default
    strides = contiguous_strides(x.shape)
    template = tuple(map(_slot, range(2)))
    return b.make("call", (x, y), x.shape, F32, strides, target=target, template=template)


def _slot(k: int) -> object:
    from blade.backends.disc.frontend.ops.table import OperandSlot

    return OperandSlot(k)


def graph_of(make: Callable[[IrBuilder, Value, Value], Made]) -> Graph:
    b = new_builder()
    x, y = add_input(b, (S0, S1)), add_input(b, (S0, S1))
    outputs, updates = make(b, x, y)
    graph = finish(b, *outputs, *(new for _, new in updates))
    return replace(graph, updates=tuple(i for i, _ in updates))


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_updates(make: Callable[[IrBuilder, Value, Value], Made]) -> None:
    graph = graph_of(make)
    program = compile_ir(graph, host()).program
    copies = program.count("call aten::copy_")
    slots = sum(" update " in line for line in program.splitlines())
    assert (slots - copies, copies) == CASES[make], program
    engine = compile_to_engine(graph)
    assert engine.why_unavailable() == ""
    torch.manual_seed(0)
    for s0, s1 in [(1, 1), (2, 3), (3, 16), (2, 37), (7, 70), (300, 128)]:
        inputs = [torch.randn(s0, s1) for _ in range(2)]
        for layout in (lambda t: t, lambda t: t.mT.contiguous().mT):
            given = [layout(t.clone()) for t in inputs]
            want = interpret(graph, inputs)
            found = engine.try_execute(given)
            assert found is not None, engine.last_error()
            for have, expected in zip(
                [*found, *(given[i] for i in graph.updates)], want, strict=True
            ):
                torch.testing.assert_close(have, expected, rtol=2e-4, atol=2e-4)
            for i in {0, 1} - set(graph.updates):
                assert torch.equal(given[i], inputs[i])


def test_an_update_prints() -> None:
    assert "return \nupdate %0 %2" in str(graph_of(plain))
