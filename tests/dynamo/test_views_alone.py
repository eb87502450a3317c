# SPDX-License-Identifier: Apache-2.0
"""Graphs of views: of a gradient, and of what is conjugated when it is read."""

from collections.abc import Callable

import graphs
import pytest
import torch

import blade
from blade.core.reason import Code

ALL = {"timing": False, "min_cluster_size": 1}


def compare(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Answers and gradients of ``fn`` are eager's."""
    torch._dynamo.reset()
    found = []
    for f in (fn, torch.compile(fn, backend=blade.dynamo.aot_disc, options=ALL)):
        own = x.clone().requires_grad_()
        y = f(own)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        found.append((y.detach(), own.grad))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.needs("runtime")
def test_what_is_conjugated_reaches_the_engine() -> None:
    compare(lambda x: torch.fft.hfft(x, n=6), torch.randn(5, 6, 7))
    reports = graphs.reports()
    assert not {r.code for report in reports for r in report.all_reasons()} & {Code.WRONG_VALUES}
    assert any("_fft_c2r" in str(c.ops) for r in reports for c in r.clusters if c.backend == "disc")


@pytest.mark.needs("runtime")
def test_views_of_a_gradient_are_nothing_to_compute() -> None:
    compare(torch.diagflat, torch.randn(4))
    backward = graphs.reports()[-1]
    assert {r.code for r in backward.all_reasons()} == {Code.ALIASES}
    assert "nothing to compute" in backward.explain()
