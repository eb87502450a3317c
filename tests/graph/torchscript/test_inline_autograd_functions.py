# SPDX-License-Identifier: Apache-2.0
"""``torch.autograd.Function`` in a model: traced, it is the ops of its forward."""

import io
from typing import Any

import pytest
import torch

import blade


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class Twice(torch.autograd.Function):
    """Calls another one, takes plain numbers, returns two."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, by: float) -> Any:  # type: ignore[override]
        y = Swish.apply(x) * by + w
        return y, y.sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        return grads[0], None, None


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = Twice.apply(self.inner(x), self.w, 2.0)
        return Swish.apply(a) + b[:, None]


@pytest.mark.needs("runtime", "torch_mlir")
def test_a_function_is_served_and_saved() -> None:
    model = Model().eval()
    config = blade.Config(timing=False, optimization_pipeline="disc")
    optimized = blade.optimize(model, torch.randn(2, 3), config)
    report = blade.report(optimized)
    assert [one.backend for one in report.clusters] == ["disc"] and not report.outside
    saved = io.BytesIO()
    torch.jit.save(optimized, saved)
    saved.seek(0)
    for module in (optimized, torch.jit.load(saved)):
        for batch in (1, 2, 5):
            x = torch.randn(batch, 3)
            with torch.no_grad():
                torch.testing.assert_close(module(x), model(x))
