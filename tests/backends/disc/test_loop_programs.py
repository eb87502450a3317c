# SPDX-License-Identifier: Apache-2.0
"""Loops in compiled programs: the state in two buffers, what each iteration reads, and results of all iterations."""

import pytest
import torch
from disc_programs import compile_to_engine
from loop_graphs import N, both_ways, products, recurrence

from blade.backends.disc.ir.loop import body_of, loops
from blade.backends.disc.passes.hoist_products import hoist_products
from blade.backends.disc.reference.interpret_graph import interpret

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]


@pytest.mark.parametrize("keep_iterations", [False, True])
def test_a_recurrence_at_many_lengths(keep_iterations: bool) -> None:
    graph = recurrence(keep_iterations)
    engine = compile_to_engine(graph)
    for length, rows in [(5, 3), (2, 3), (0, 4), (1, 1), (5, 3), (9, 2), (2, 3)]:
        x = torch.randn(length, rows, N)
        found = engine.try_execute([x])
        assert found is not None, engine.last_error()
        for a, b in zip(found, interpret(graph, [x]), strict=True):
            torch.testing.assert_close(a, b)


def test_products_of_what_is_there_before_leave_the_loop() -> None:
    graph = products()
    hoisted = hoist_products(graph)
    assert [v.op for v in hoisted.values].count("linear") == 1  # both slices are of one product
    [loop] = loops(hoisted)
    assert [v.op for v in body_of(loop).graph.values].count("linear") == 1
    engine = compile_to_engine(graph)
    for rows, length in [(3, 5), (1, 1), (2, 0), (4, 7)]:
        x = torch.randn(rows, length, N)
        [want] = interpret(graph, [x])
        torch.testing.assert_close(interpret(hoisted, [x]), [want])
        found = engine.try_execute([x])
        assert found is not None, engine.last_error()
        torch.testing.assert_close(found, [want])


def test_states_of_two_loops_outlive_both() -> None:
    """After an odd number of iterations a state has the memory of its twin, which the second loop must not take."""
    graph = both_ways()
    engine = compile_to_engine(graph)
    for length, rows in [(1, 1), (2, 3), (3, 3), (7, 2), (0, 2), (4, 1)]:
        x = torch.randn(length, rows, N)
        found = engine.try_execute([x])
        assert found is not None, engine.last_error()
        wanted = interpret(graph, [x])
        h = torch.full((rows, N), 0.5)
        back = []
        for one in x.flip(0):
            h = torch.tanh(one + h)
            back.insert(0, h)
        torch.testing.assert_close(wanted[1], torch.stack(back) if back else x)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)
