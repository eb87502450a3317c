# SPDX-License-Identifier: Apache-2.0
"""Axes of size 1 have any stride: random models on inputs laid out at random, at the sample and at other sizes."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import blade

CHANNELS = 4
Op = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_tokens(change: Callable[[torch.Tensor], torch.Tensor]) -> Op:
    return lambda x, _: change(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)


def in_last_axis(change: Callable[[torch.Tensor], torch.Tensor]) -> Op:
    return lambda x, _: change(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


torch.manual_seed(0)
CONVOLUTION, DEPTHWISE = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=4)
LINEAR, NORM, GROUPS = nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4)
for part in (CONVOLUTION, DEPTHWISE, LINEAR, NORM, GROUPS):
    part.requires_grad_(False)
OPS: tuple[Op, ...] = (
    lambda x, y: x + y,
    lambda x, y: x * y.transpose(2, 3).tanh().transpose(2, 3),
    lambda x, _: CONVOLUTION(x),
    lambda x, _: DEPTHWISE(x),
    lambda x, _: GROUPS(x),
    in_last_axis(LINEAR),
    in_last_axis(NORM),
    in_last_axis(torch.clone),
    in_tokens(lambda t: (t @ t.transpose(1, 2) * 0.1).softmax(-1) @ t),
    in_tokens(lambda t: t.softmax(1)),
    lambda x, _: x.softmax(1) + x,
    lambda x, _: x * x.mean(1, keepdim=True),
    lambda x, _: x.mean(2, keepdim=True).squeeze(2).unsqueeze(2).expand_as(x) + x,
    lambda x, y: torch.cat([x, y.expand_as(x)], 2)[:, :, ::2] * 2,
    lambda x, _: torch.cat([x, x.sigmoid()], 1)[:, ::2].contiguous(),
    lambda x, _: (x.reshape(-1, 1, *x.shape[2:]) * 2).view(x.shape),
    lambda x, _: x.contiguous(memory_format=torch.channels_last).relu(),
    lambda x, _: nn.functional.max_pool2d(x, 3, 1, 1) + nn.functional.adaptive_avg_pool2d(x, 1),
    lambda x, _: x.flip(3).roll(1, 2),
)


class Chain(nn.Module):
    def __init__(self, ops: list[Op]) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for op in self.ops:
            x = op(x, y)
        return x * 1.5


def laid_out(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same numbers: permuted in memory, with gaps, and with strides of axes of size 1 that mean nothing."""
    order = rng.sample(range(tensor.dim()), tensor.dim())
    back = [order.index(axis) for axis in range(tensor.dim())]
    tensor = tensor.permute(order).contiguous().permute(back)
    if rng.random() < 0.3:
        axis = rng.randrange(tensor.dim())
        tensor = tensor.repeat_interleave(2, axis).movedim(axis, 0)[::2].movedim(0, axis)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    strides = [
        rng.choice([stride, 0, 1, 7, 1000]) if size == 1 else stride for size, stride in pairs
    ]
    return tensor.as_strided(tensor.shape, strides)


def inputs(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = [
        rng.choice([1, 2, 3]),
        CHANNELS,
        rng.choice([1, 1, 2, 9, 17]),
        rng.choice([1, 1, 3, 8]),
    ]
    beside = [1 if axis != 1 and rng.random() < 0.3 else n for axis, n in enumerate(sizes)]
    return laid_out(torch.randn(sizes), rng), laid_out(torch.randn(beside), rng)


@pytest.mark.parametrize("seed", range(8))
def test_models_answer_as_torch_does(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Chain(rng.choices(OPS, k=rng.randrange(3, 7))).eval()
    sample = inputs(rng)
    config = blade.Config(timing=False, optimization_pipeline="disc", cache=False)
    optimized = blade.optimize(model, sample, config)
    assert any(one.backend == "disc" for one in blade.report(optimized).clusters)
    for given in (sample, *(inputs(rng) for _ in range(6))):
        with torch.no_grad():
            want, got = model(*given), optimized(*given)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
