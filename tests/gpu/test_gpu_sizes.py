# SPDX-License-Identifier: Apache-2.0
"""Sizes that trace writes as 0-d tensors on the CPU: a decoder's positions and mask are part of its one engine."""

import pytest
import torch
from entrances import Optimized
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.needs("runtime")]


class Step(nn.Module):
    """One step of a decoder that keeps what it has seen: positions, a mask by them, and what is kept."""

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        all_of = torch.cat([kept, x], 1)
        past = kept.shape[1]
        places = torch.arange(x.shape[1], device=x.device) + past
        far = places[:, None] - torch.arange(all_of.shape[1], device=x.device)
        offset = torch.as_tensor(past).to(x.device)
        scores = (x @ all_of.transpose(1, 2)).masked_fill(far < 0, float("-inf"))
        return scores.softmax(-1) @ all_of + offset, all_of


def test_a_step_of_a_decoder_is_one_engine() -> None:
    def inputs(batch: int, new: int, past: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, new, 16, device="cuda"), torch.randn(
            batch, past, 16, device="cuda"
        )

    model = Step().eval()
    run = Optimized(model, inputs(2, 3, 5))
    assert run.served() == 1, run.reasons()
    for shape in ((2, 3, 5), (1, 1, 9), (4, 2, 1), (1, 1, 9), (1, 1, 9)):
        given = inputs(*shape)
        for got, want in zip(run(*given), model(*given), strict=True):
            torch.testing.assert_close(got, want)
