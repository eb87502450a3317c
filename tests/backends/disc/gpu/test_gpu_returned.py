# SPDX-License-Identifier: Apache-2.0
"""Constants that are computed once and then returned, or given to an op of ATen: in their own shape."""

from typing import Any

import pytest
import torch
from op_trace import trace
from run_program import compile_to_program

from blade.backends.disc.frontend.lower import lower

pytestmark = pytest.mark.needs("triton_interpreter")

FREQUENCIES = torch.rand(32, generator=torch.Generator().manual_seed(0)).half()


def test_a_constant_that_is_returned_has_its_shape() -> None:
    def function(x: torch.Tensor) -> Any:
        return FREQUENCIES[None, :, None].float().expand(1, -1, 1), x * 2

    x = torch.randn(3, 4).half()
    gm, shape_env = trace(function, [x], [(True, True)])
    program = compile_to_program(lower(gm, shape_env))
    for given in (x, torch.randn(5, 2).half()):
        for got, want in zip(program(given), function(given), strict=True):
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
            assert torch.equal(got, want)
    slots = [line for line in program.text.splitlines() if line.startswith("slot ")]
    outputs = next(line for line in program.text.splitlines() if line.startswith("outputs "))
    assert not any(slots[int(k)].split()[2] == "const" for k in outputs.split()[2:])


def test_a_constant_that_a_call_reads_has_its_shape() -> None:
    """Rotary positions: (1, width, 1) @ (1, 1, length)."""

    def function(at: torch.Tensor) -> Any:
        return FREQUENCIES[None, :, None].float() @ at[:, None, :].float()

    at = torch.arange(7)[None]
    gm, shape_env = trace(function, [at], [(False, True)])
    program = compile_to_program(lower(gm, shape_env))
    assert any(name.startswith("aten::") for name in program.ran(at))
    for given in (at, torch.arange(3, 8)[None]):
        [got], want = program(given), function(given)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)
