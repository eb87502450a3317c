# SPDX-License-Identifier: Apache-2.0
"""GPU programs whose sizes depend on elements: launches over grids that are known late, by Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import selections
import torch
from cutting import Plain, trace
from run_program import GuardFailed, compile_graph_to_program
from selections import cut_of, every

pytestmark = pytest.mark.needs("triton_interpreter")


@pytest.mark.parametrize(
    "function", [selections.of_a_mask, selections.of_two_masks, selections.of_counting]
)
def test_a_program_launches_over_sizes_that_it_learns(function: Callable[..., Any]) -> None:
    cut = cut_of(trace(Plain(function), *every()))
    program = compile_graph_to_program(cut.cluster.gm, cut.cluster.shape_env)
    assert " late" in program.text
    for inputs in (*cut.samples, *cut.probes):
        want = cut.fallback(*inputs)
        for a, b in zip(program(*inputs), want, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


def test_a_relation_between_sizes_is_guarded_when_it_is_known() -> None:
    x, w = torch.tensor([1.0, -1, 2, 3]), torch.randn(3)
    fewer = torch.tensor([1.0, -1, -2, 3])
    cut = cut_of(trace(Plain(lambda x, w: x[x > 0] * w), (x, w)))
    program = compile_graph_to_program(cut.cluster.gm, cut.cluster.shape_env)
    [inputs] = cut.samples
    torch.testing.assert_close(program(*inputs), [cut.fallback(*inputs)])
    other = [fewer if len(t) == 4 else t for t in inputs]
    with pytest.raises(GuardFailed):
        program(*other)
