# SPDX-License-Identifier: Apache-2.0
"""Functional writes to parts of a tensor: one after another, they are one concatenation."""

import torch
from op_trace import trace

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.ir.graph import Graph, live
from blade.backends.disc.reference.interpret_graph import interpret

aten = torch.ops.aten


def _lowered(function: object, *shapes: tuple[int, ...]) -> tuple[Graph, list[torch.Tensor]]:
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    gm, env = trace(function, inputs, [[True] + [False] * (len(s) - 1) for s in shapes])  # type: ignore[arg-type]
    graph = lower(gm, env)
    graph.values = live(graph)
    return graph, inputs


def _check(function: object, *shapes: tuple[int, ...]) -> Graph:
    graph, inputs = _lowered(function, *shapes)
    [found] = interpret(graph, inputs)
    torch.testing.assert_close(found, function(*inputs), rtol=0, atol=0)  # type: ignore[operator]
    return graph


def _ops(graph: Graph) -> list[str]:
    return [v.op for v in graph.values if v.op in ("concat", "fill", "slice", "call")]


def test_steps_that_fill_a_buffer_are_one_concatenation() -> None:
    def steps(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.size(0), 4, 8)
        for t in range(4):
            out = aten.select_scatter(out, torch.tanh(x[:, t]), 1, t)
        return out

    graph = _check(steps, (3, 4, 8))
    assert _ops(graph).count("concat") == 1
    assert "fill" not in _ops(graph)
    assert len(next(v for v in graph.values if v.op == "concat").args) == 4


def test_what_is_overwritten_is_not_computed() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        out = aten.slice_scatter(torch.zeros(x.size(0), 8), torch.exp(x), 1, 2, 6)
        return aten.slice_scatter(out, torch.tanh(x), 1, 2, 6)

    graph = _check(twice, (3, 4))
    assert "exp" not in {v.op for v in graph.values}
    assert len(next(v for v in graph.values if v.op == "concat").args) == 3


def test_parts_overlap() -> None:
    def overlapping(x: torch.Tensor) -> torch.Tensor:
        out = aten.slice_scatter(torch.ones(x.size(0), 8), x, 1, 1, 5)
        out = aten.slice_scatter(out, x * 2, 1, 3, 7)
        return aten.slice_scatter(out, x[:, :1], 1, 4, 5)

    graph = _check(overlapping, (3, 4))
    assert "call" not in _ops(graph)


def test_an_axis_of_any_size() -> None:
    """What is behind the last part written is as long as the axis leaves it."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        out = x * 2
        out = aten.select_scatter(out, x[0] + 1, 0, 0)
        return aten.select_scatter(out, x[1] + 2, 0, 1)

    graph = _check(rows, (5, 4))
    assert len(next(v for v in graph.values if v.op == "concat").args) == 3


def test_what_was_written_is_read_from_where_it_was_computed() -> None:
    """A tridiagonal system: each step reads the column that the one before wrote."""

    def solve(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        for t in range(1, 5):
            step = out[:, t] - 0.5 * aten.select.int(out, 1, t - 1)
            out = aten.select_scatter(out, step, 1, t)
        return out

    graph = _check(solve, (3, 5))
    assert _ops(graph).count("concat") == 1


def test_a_part_of_a_part_is_read_from_where_it_was_computed() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(x.size(0), 8, 9)[:, 1:-2]
        rows = aten.slice_scatter(rows, torch.tanh(x), 2, 2, -1)
        out = aten.slice_scatter(torch.zeros(x.size(0), 8, 9), rows, 1, 1, -2)
        return out[:, 1:-2, 2:-1].exp()

    assert "concat" not in _ops(_check(inner, (3, 5, 6)))
