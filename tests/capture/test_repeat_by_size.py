# SPDX-License-Identifier: Apache-2.0
"""``repeat_interleave`` by a size is no look-up of as many rows as a tensor says."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import blade
from blade.capture.capture import capture
from blade.capture.patch_repeat_interleave import patched_repeat_interleave
from blade.config import Config


class Calls(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(x, y)


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "method": lambda x, y: x.repeat_interleave(y.shape[0], 1) * 2,
    "method, by name": lambda x, y: x.repeat_interleave(repeats=y.shape[0], dim=-1) * 2,
    "function": lambda x, y: torch.repeat_interleave(x, y.shape[0], dim=0) * 2,
    "function, by name": lambda x, y: torch.repeat_interleave(input=x, repeats=y.shape[0]) * 2,
    "output_size": lambda x, y: (
        torch.repeat_interleave(x, y.shape[0], dim=1, output_size=x.shape[1] * y.shape[0]) * 2
    ),
    "computed": lambda x, y: x.repeat_interleave(y.shape[0] % 4 + 1, dim=-2) * 2,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_size_is_a_number(name: str) -> None:
    model = Calls(CALLS[name]).eval()
    captured = capture(model, (torch.randn(2, 3), torch.randn(5)), Config())
    assert "aten::repeat_interleave" not in [node.kind() for node in captured.module.graph.nodes()]
    for rows, columns, times in [(2, 3, 5), (1, 4, 1), (4, 1, 3), (2, 2, 2)]:
        x, y = torch.randn(rows, columns), torch.randn(times)
        got = captured.module(x, y)
        assert torch.equal(got, model(x, y)) and got.is_contiguous()


def test_the_result_shares_no_memory_with_what_is_repeated_once() -> None:
    def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(y.shape[0], 1).add_(1) + x

    captured = capture(Calls(writes).eval(), (torch.randn(2, 3), torch.randn(1)), Config())
    x, y = torch.zeros(2, 3), torch.zeros(1)
    assert torch.equal(captured.module(x, y), torch.ones(2, 3)) and not x.any()


def test_tensors_and_numbers_are_repeated_by_as_before() -> None:
    x, counts = torch.randn(3, 2), torch.tensor([1, 0, 2])
    before = torch.repeat_interleave
    with patched_repeat_interleave, patched_repeat_interleave:
        assert torch.equal(x.repeat_interleave(counts, 0), x[[0, 2, 2]])
        assert torch.equal(torch.repeat_interleave(counts), torch.tensor([0, 2, 2]))
        traced = torch.jit.trace(
            lambda x: (x.repeat_interleave(counts, 0), x.repeat_interleave(2)), x
        )
    assert "repeat_interleave" not in vars(torch.Tensor) and torch.repeat_interleave is before
    rows, all_twice = traced(x)
    assert torch.equal(rows, x[[0, 2, 2]])
    assert torch.equal(all_twice, x.flatten().repeat_interleave(2))


def test_it_is_served() -> None:
    model = Calls(lambda x, y: (x.repeat_interleave(y.shape[0], 1) + 1).relu() * 2).eval()
    config = blade.Config(timing=False, optimization_pipeline="disc", cache=False)
    optimized = blade.optimize(model, (torch.randn(2, 3), torch.randn(5)), config)
    report = blade.report(optimized)
    assert [one.backend for one in report.clusters] == ["disc"] and not report.outside
    x, y = torch.randn(4, 2), torch.randn(3)
    torch.testing.assert_close(optimized(x, y), model(x, y))
