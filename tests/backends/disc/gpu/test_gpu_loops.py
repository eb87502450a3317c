# SPDX-License-Identifier: Apache-2.0
"""Loops in programs for a GPU, by Triton's interpreter: a launch per fusion group and iteration."""

import pytest
import torch
from loop_graphs import N, recurrence
from run_program import compile_to_program

from blade.backends.disc.reference.interpret_graph import interpret

pytestmark = pytest.mark.needs("triton_interpreter")


def test_a_recurrence_is_a_launch_per_step() -> None:
    graph = recurrence(keep_iterations=True)
    program = compile_to_program(graph)
    for length, rows in [(3, 2), (1, 3), (0, 2)]:
        x = torch.randn(length, rows, N)
        found, ran = program.traced(x)
        for a, b in zip(found, interpret(graph, [x]), strict=True):
            torch.testing.assert_close(a, b)
        assert len(ran) == length + 2  # the state at the start, and the copy that is returned
