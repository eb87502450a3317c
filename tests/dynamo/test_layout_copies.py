# SPDX-License-Identifier: Apache-2.0
"""GPU programs of training steps, compiled without a GPU: how often they copy a value into another order of axes.

``benchmarks/gpu_layouts.py`` tells the kinds of copies. Weights in 32 bits are converted, and their gradients back into
torch's order; these are not counted here.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_layouts import LayoutCopy, training_layouts  # noqa: E402 - found beside the scripts

SMALL = 2048  # bytes that are not worth a look: sums and statistics


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(self.part(*sizes) for sizes in ((3, 16), (16, 32))))
        self.last = nn.Conv2d(32, 8, 1)

    def part(self, given: int, made: int) -> nn.Module:
        conv = nn.Conv2d(given, made, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(made), nn.LeakyReLU(0.1), nn.MaxPool2d(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.parts(x)).mean((2, 3))


class Decoder(nn.Module):
    """One level of a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.below = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.last = nn.Sequential(nn.Conv2d(32, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.up(self.below(nn.functional.max_pool2d(x, 2)))
        return self.last(torch.cat([x, y], 1)).mean((2, 3))


class Separable(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU6(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU6(),
            nn.Conv2d(16, 24, 1, bias=False),
            nn.BatchNorm2d(24),
            nn.AdaptiveAvgPool2d(1),
        )


class Speech(nn.Module):
    """The convolutions of a Conformer on what convolutions of a wave make."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv1d(4, 32, 5, 2), nn.GELU(), nn.Conv1d(32, 32, 3), nn.GELU()
        )
        self.before, self.after = nn.Conv1d(32, 64, 1), nn.Conv1d(32, 32, 1)
        self.depthwise, self.norm = nn.Conv1d(32, 32, 7, padding=3, groups=32), nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.depthwise(nn.functional.glu(self.before(x), 1))
        return (x + self.after(nn.functional.silu(self.norm(y)))).mean(2)


class Enlarging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.shuffle, self.last = nn.PixelShuffle(2), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.shuffle(self.second(self.first(x)))).mean((2, 3))


# the gradient of a mean is repeated over its image
MEAN = {"copy": 1}
MODULES: dict[str, tuple[nn.Module, tuple[int, ...], dict[str, int], dict[str, int]]] = {
    "convolution, norm and pool": (Pooled(), (4, 3, 32, 32), {}, MEAN),
    # patches of the gradient are rows of a product
    "U-Net": (Decoder(), (4, 3, 32, 32), {}, {"copy": 1}),
    "depthwise": (Separable(), (4, 3, 32, 32), {}, {}),
    "speech": (Speech(), (4, 4, 1024), {}, MEAN),
    # the shuffle, with the bias, and its gradient
    "pixel shuffle": (Enlarging(), (4, 3, 16, 16), {"strided": 1}, {"copy": 2}),
}


def counted(copies: list[LayoutCopy]) -> Counter[str]:
    return Counter(c.kind for c in copies if c.kind != "convert" and c.moved > SMALL)


@pytest.mark.parametrize("name", MODULES)
def test_a_step_copies_little(name: str) -> None:
    module, shape, forward, backward = MODULES[name]
    found = training_layouts(module.train(), [torch.randn(shape)])
    copies = {side: [c for one in programs for c in one.copies] for side, programs in found.items()}
    assert counted(copies["forward"]) == forward, copies["forward"]
    assert counted(copies["backward"]) == backward, copies["backward"]


def test_a_copy_has_a_size_and_a_kind() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).transpose(1, 2).contiguous()

    found = training_layouts(Turned(), [torch.randn(4, 8, 16)])
    [program] = found["forward"]
    [copy] = program.copies
    assert (copy.kind, copy.moved) == ("strided", 4 * 8 * 16 * 4)
    assert program.moved == 4 * 8 * 16 * 4 * 2 + 8 * 16 * 4
    assert program.copied == copy.moved
