# SPDX-License-Identifier: Apache-2.0
"""Random IR graphs: the compiled program answers as the interpreter does, at any size."""

import hypothesis.strategies as st
import pytest
import torch
from disc_programs import S0, S1, S2, add_input, compile_to_engine, finish, new_builder
from hypothesis import HealthCheck, given, settings

from blade.backends.disc.ir.graph import Graph, IrBuilder, Value
from blade.backends.disc.reference.interpret_graph import interpret

pytestmark = pytest.mark.needs("torch_mlir")
SIZES = st.sampled_from([1, 2, 3, 5, 8, 17, 33])


def grow(draw: st.DrawFn, b: IrBuilder, pool: list[Value]) -> Value:
    """One more value from earlier ones."""
    x = draw(st.sampled_from(pool))
    kind = draw(
        st.sampled_from("unary binary scalar row reduce permute merge slice cat gather".split())
    )
    rank = len(x.shape)
    if kind == "binary":
        y = draw(st.sampled_from([v for v in pool if v.shape == x.shape]))
        return b.pointwise(draw(st.sampled_from(["add", "mul", "maximum"])), x, y)
    if kind == "scalar":
        number = draw(st.sampled_from([0.5, -1.25, 2.0]))
        return b.pointwise("add", x, b.fill(number, x.shape, x.dtype))
    if kind == "row" and rank:
        total = b.reduce(draw(st.sampled_from(["sum", "max"])), x, [rank - 1])
        return b.pointwise("sub", x, b.broadcast(total, x.shape))
    if kind == "reduce" and rank:
        axis = draw(st.integers(0, rank - 1))
        return b.broadcast(b.reduce("sum", x, [axis]), x.shape)
    if kind == "permute" and rank > 1:
        return b.permute(x, draw(st.permutations(range(rank))))
    if kind == "merge" and rank > 1:
        return b.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))
    if kind == "slice" and rank and x.shape[-1] == 8:
        return b.slice(x, rank - 1, draw(st.integers(0, 3)), draw(st.sampled_from([1, 2])), 3)
    if kind == "gather" and rank:
        return gathered(draw, b, x)
    if kind == "cat" and rank:
        axis = draw(st.integers(0, rank - 1))
        shape = tuple(2 * d if k == axis else d for k, d in enumerate(x.shape))
        return b.make("concat", (x, x), shape, x.dtype, axis=axis)
    return b.pointwise(draw(st.sampled_from(["tanh", "neg", "sigmoid", "abs"])), x)


def gathered(draw: st.DrawFn, b: IrBuilder, x: Value) -> Value:
    """Elements of ``x`` along one axis by an index that depends on some of the axes."""
    rank, integer = len(x.shape), torch.int64
    axis = draw(st.integers(0, rank - 1))
    index = b.fill(draw(st.integers(0, 5)), x.shape, integer)
    for other in draw(st.sets(st.integers(0, rank - 1))):
        counted = b.make("iota", (), x.shape, integer, axis=other)
        index = b.pointwise("fma", index, b.fill(3, x.shape, integer), counted)
    index = b.pointwise("remainder", index, b.fill(x.shape[axis], x.shape, integer))
    axes = tuple(None if k == axis else k for k in range(rank))
    return b.make("gather", (x, index), x.shape, x.dtype, axis=axis, axes=axes)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    b = new_builder()
    pool = [add_input(b, (S0, S1, 8)), add_input(b, (S2, S1)), add_input(b, (S0, S1, 8))]
    for _ in range(draw(st.integers(1, 12))):
        pool.append(grow(draw, b, pool))
    chosen = [v for v in pool[-3:] if v.op != "input"]
    return finish(b, *(chosen or [b.pointwise("neg", pool[0])]))


@given(graphs(), st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=2, max_size=3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_compiled_program_answers_as_the_interpreter(
    graph: Graph, sizes: list[tuple[int, int, int]]
) -> None:
    engine = compile_to_engine(graph)
    torch.manual_seed(0)
    for s0, s1, s2 in sizes:
        inputs = [torch.randn(s0, s1, 8), torch.randn(s2, s1), torch.randn(s0, s1, 8)]
        inputs = inputs[: len(graph.inputs)]
        expected = interpret(graph, inputs)
        found = engine.try_execute(inputs)
        assert found is not None, engine.last_error() or engine.stats()
        for have, want in zip(found, expected, strict=True):
            assert have.shape == want.shape
            # sums that cancel are off by their terms' rounding, not by their own
            finite = want[torch.isfinite(want)]
            largest = float(finite.abs().max()) if finite.numel() else 0.0
            atol = 2e-5 * max(1.0, largest)
            torch.testing.assert_close(have, want, rtol=2e-5, atol=atol, equal_nan=True)
