# SPDX-License-Identifier: Apache-2.0
"""Ops whose results depend on how a tensor lies in memory, and gradients that have no memory."""

from collections.abc import Callable, Sequence

import pytest
import torch

import blade

pytestmark = pytest.mark.needs("runtime")
ALL = {"timing": False, "min_cluster_size": 1}


def solved(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve(x, torch.ones(5, 2))


def compare(fn: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Answers and gradients of ``fn`` are eager's, twice; strides of the inputs are kept."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=blade.dynamo.aot_disc, options=ALL)
    for _ in range(2):
        found = []
        for f in (fn, compiled):
            own = [x.detach().requires_grad_() for x in inputs]
            y = f(*own)
            weight = torch.linspace(-1, 1, y.numel()).view_as(y)
            found.append((y.detach(), *torch.autograd.grad(y, own, weight)))
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("fn", [torch.linalg.det, torch.logdet, solved])
@pytest.mark.parametrize("part", ["rows", "all"])
def test_of_a_matrix_that_is_not_contiguous(fn: Callable[..., torch.Tensor], part: str) -> None:
    """What is kept for the gradient are the factors of the matrix, or of its transpose."""
    large = torch.randn(5, 10)
    x = large[:, ::2] if part == "rows" else large[:, :5].contiguous()
    positive = x @ x.mT + torch.diag(torch.arange(1.0, 6.0)) + 0.1 * torch.ones(5, 5).triu()
    x.copy_(positive)
    compare(fn, [x])


def test_a_gradient_of_zeros_without_memory() -> None:
    compare(torch.sgn, [torch.randn(20, 20)])


def test_zeros_without_memory_reach_a_backward_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.sin(x) * 2, backend=blade.dynamo.aot_disc, options=ALL)
    x = torch.randn(4, 5, requires_grad=True)
    torch.sgn(compiled(x)).sum().backward()
    assert torch.equal(x.grad, torch.zeros(4, 5))


def test_counting_in_the_memory_of_an_input_is_left_to_torch() -> None:
    def scatter(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return torch.as_strided_scatter(x, part, (2, 2), (2, 1), 1) * 2

    compare(scatter, [torch.randn(3, 3), torch.randn(2, 2)])
    reasons = [str(r.detail) for one in blade.dynamo.reports() for r in one.all_reasons()]
    assert any("lies in memory" in reason for reason in reasons)
