# SPDX-License-Identifier: Apache-2.0
"""A sample with an empty axis says nothing about other sizes: those are tried, too."""

import pytest
import torch
from entrances import CONFIG

import blade
from blade.capture.derived_shapes import resized


class Unless(torch.nn.Module):
    """As functions of torch.nn do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            return x
        return x * 2 + 1


class OnlyPython(Unless):
    def forward(self, *xs: torch.Tensor) -> torch.Tensor:  # scripts cannot
        return xs[0] if xs[0].numel() == 0 else xs[0] * 2 + 1


class Cached(torch.nn.Module):
    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        known = torch.cat([past, x], 1)
        return torch.softmax(x @ known.mT, -1) @ known, known


@pytest.mark.parametrize("model", [Unless(), OnlyPython()])
def test_a_branch_for_the_empty_is_not_all_there_is(model: torch.nn.Module) -> None:
    optimized = blade.optimize(model.eval(), (torch.randn(0, 3),), CONFIG)
    for rows in (0, 4):
        x = torch.randn(rows, 3)
        assert torch.equal(optimized(x), model(x))


@pytest.mark.needs("runtime")
def test_a_cache_may_be_empty_at_first() -> None:
    model = Cached().eval()
    optimized = blade.optimize(model, (torch.randn(2, 3, 8), torch.randn(2, 0, 8)), CONFIG)
    for new, old in ((3, 0), (1, 5), (4, 4), (0, 2)):
        inputs = torch.randn(2, new, 8), torch.randn(2, old, 8)
        for got, want in zip(optimized(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(got, want)
    assert blade.stats(optimized)["cluster_0"]["engine_runs"] >= 3


@pytest.mark.needs("runtime")
def test_ops_of_an_empty_sample_are_in_an_engine() -> None:
    model = torch.nn.Hardtanh().eval()
    optimized = blade.optimize(model, (torch.randn(1, 0, 3),), CONFIG)
    x = torch.randn(4, 5, 3)
    assert torch.equal(optimized(x), model(x))
    assert blade.stats(optimized)["cluster_0"]["engine_runs"] == 1


def test_what_has_no_second_axis_is_no_batch() -> None:
    """torch reads its size all the same."""

    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.batch_norm(x, mean, var)

    inputs = torch.randn(0), torch.randn(0), torch.rand(0)
    optimized = blade.optimize(Norm().eval(), inputs, CONFIG)
    assert optimized(*inputs).shape == (0,)
    assert any("2 dimensions" in r.detail for r in blade.report(optimized).all_reasons())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_contents_of_what_was_empty(dtype: torch.dtype) -> None:
    [x] = resized((torch.empty(2, 0, 0, dtype=dtype),), {(0, 1): 3, (0, 2): 4})
    assert x.shape == (2, 3, 4) and x.dtype == dtype
    assert len(set(x.flatten().tolist())) == (24 if dtype.is_floating_point else 1)
