# SPDX-License-Identifier: Apache-2.0
"""FlexAttention on a GPU: engines against torch's own implementation, and training."""

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import blade
import blade.dynamo

pytestmark = pytest.mark.gpu
T = torch.Tensor


class Attention(nn.Module):
    bias: T

    def __init__(self, is_biased: bool) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)
        self.is_biased = is_biased
        self.register_buffer("bias", torch.randn(4, 64))

    def forward(self, x: T) -> T:
        q, k, v = (
            one.unflatten(-1, (4, 16)).transpose(1, 2) for one in self.project(x).chunk(3, -1)
        )
        bias = self.bias

        def biased(score: T, b: T, h: T, i: T, j: T) -> T:
            return score + bias[h, (i - j).abs()]

        def causal(b: T, h: T, i: T, j: T) -> T:
            return i >= j

        blocks = create_block_mask(causal, None, None, x.shape[1], x.shape[1], device=x.device)
        y = flex_attention(q, k, v, biased if self.is_biased else None, blocks)
        return y.transpose(1, 2).flatten(2)  # type: ignore[union-attr]


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("how", ["disc", "optimize"])
def test_inference(how: str, is_biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True
    )  # torch's own answer, not compiled
    model = Attention(is_biased).eval().cuda()
    x = torch.randn(2, 32, 64, device="cuda")
    with torch.no_grad():
        if how == "disc":
            compiled = torch.compile(model, backend=blade.dynamo.disc)
        else:
            compiled = blade.optimize(
                model, (x,), blade.Config(optimization_pipeline="disc", timing=False)
            )
        for length in (32, 48):
            x = torch.randn(2, length, 64, device="cuda")
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("is_biased", [False, True])
def test_training(is_biased: bool) -> None:
    model = Attention(is_biased).cuda()
    x = torch.randn(2, 32, 64, device="cuda")
    wanted = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    compiled = torch.compile(model, backend=blade.dynamo.aot_disc)
    found = torch.autograd.grad(compiled(x).square().mean(), list(model.parameters()))
    for one, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, want, rtol=1e-3, atol=1e-4)
