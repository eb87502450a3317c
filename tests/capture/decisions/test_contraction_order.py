# SPDX-License-Identifier: Apache-2.0
"""torch.einsum of three tensors, whose order a package chooses by the sizes of the sample."""

import builtins  # the names of this module mean numbers of the graph while a model of it is traced
import io
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import blade

CONFIG = blade.Config(timing=False, cache=False)


class Chain(torch.nn.Module):
    """Not scriptable: a script would answer at all sizes, too."""

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.einsum("bij,bkj,kl->bil", *tensors))


def contract_path(
    equation: str, *operands: Any, **kwargs: Any
) -> tuple[list[tuple[int, ...]], str]:
    """As opt_einsum's: every size is read as an int; then comes the smaller of the first products."""
    sizes = [[builtins.int(n) for n in operand.shape] for operand in operands]
    left = sizes[0][0] * sizes[0][1] * sizes[1][1]
    right = sizes[1][0] * sizes[1][2] * sizes[2][1]
    return [(0, 1) if left < right else (1, 2), (0, 1)], ""


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.einsum asks ``contract_path``, whether or not opt_einsum is installed."""
    package: Any = ModuleType("opt_einsum")
    package.contract_path = contract_path
    of_torch = sys.modules["torch.backends.opt_einsum"].m
    monkeypatch.setitem(sys.modules, "opt_einsum", package)
    for name, value in {
        "is_available": lambda: True,
        "get_opt_einsum": lambda: package,
        "enabled": True,
        "strategy": "auto",
    }.items():
        monkeypatch.setattr(of_torch, name, value)


def sample(batch: int, i: int, j: int, k: int, n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, i, j), torch.randn(batch, k, j), torch.randn(k, n)


@pytest.mark.needs("runtime")
@pytest.mark.usefixtures("orders")
def test_the_order_of_products_is_no_decision() -> None:
    model = Chain().eval()
    optimized = blade.optimize(model, sample(3, 5, 4, 6, 3), CONFIG)
    file = io.BytesIO()
    torch.jit.save(optimized, file)
    loaded = torch.jit.load(io.BytesIO(file.getvalue()))
    for sizes in [(3, 5, 4, 6, 3), (2, 9, 4, 6, 2), (8, 1, 7, 2, 9), (1, 2, 3, 40, 3)]:
        given = sample(*sizes)
        torch.testing.assert_close(loaded(*given), model(*given))
    assert not any(blade.report(optimized).paths), "conditions on sizes"
    assert "original" not in blade.stats(loaded)
    assert sys.modules["opt_einsum"].contract_path is contract_path
