# SPDX-License-Identifier: Apache-2.0
"""Running TorchScript without its own compilers."""

import pytest
import torch

from blade.core.torchscript import op_by_op


def _is_optimized() -> bool:
    return bool(torch._C._get_graph_executor_optimize())


def test_only_the_call_runs_op_by_op() -> None:
    seen = []

    def function(x: torch.Tensor, *, by: float) -> torch.Tensor:
        seen.append(_is_optimized())
        return x * by

    assert torch.equal(op_by_op(function)(torch.ones(3), by=2.0), torch.full((3,), 2.0))
    assert seen == [False] and _is_optimized()


def test_what_is_raised_passes_and_the_executor_is_on_again() -> None:
    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        op_by_op(fails)()
    assert _is_optimized()
