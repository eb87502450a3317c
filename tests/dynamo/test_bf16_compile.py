# SPDX-License-Identifier: Apache-2.0
"""bfloat16 on CPU through ``torch.compile``: autocast around a model, and training in 16 bits.

Eager tells how far bfloat16 may be from float32: an engine that rounds less often is at most a quarter further away.
"""

import copy
from contextlib import nullcontext
from typing import Any

import graphs
import pytest
import torch
from torch import nn
from torch.nn import functional

import blade

pytestmark = pytest.mark.needs("runtime", "torch_mlir")

BF16 = torch.bfloat16


class Layer(nn.Module):
    """Attention, a norm and a residual feed-forward part."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 70),
            nn.Linear(70, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.joint(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        y = self.norm(x + self.out(y.transpose(1, 2).flatten(2)))
        return y + self.down(functional.gelu(self.up(y)))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 16, 3, 1, 1), nn.Conv2d(16, 16, 3, 2, 1)
        self.head = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(self.one(x).relu()).relu()
        return self.head(y.mean((2, 3)))


class Normed(nn.Module):
    """Batch norm, whose statistics are float32 where its images are not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 6),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found


class Patches(nn.Module):
    """Norms of bfloat16 images whose parameters are float32 under autocast, and resampling."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16)
        self.up, self.groups = nn.Conv2d(16, 12, 1), nn.GroupNorm(3, 12)
        self.frozen, self.head = nn.BatchNorm2d(12).eval(), nn.Conv2d(12, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x)
        z = self.norm(y.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, y.shape[2:])
        y = self.frozen(self.groups(self.up(z.to(y.dtype))).to(y.dtype))
        y = functional.interpolate(y, size=x.shape[2:], mode="bilinear")
        found: torch.Tensor = self.head(y)
        return found


CASES: dict[str, tuple[type[nn.Module], list[tuple[int, ...]]]] = {
    "layer": (Layer, [(2, 5, 32), (1, 17, 32), (3, 40, 32)]),
    "normed": (Normed, [(4, 3, 9, 8), (2, 3, 16, 16), (3, 3, 12, 7)]),
    "patches": (Patches, [(2, 3, 16, 12), (1, 3, 20, 20), (3, 3, 12, 8)]),
    "images": (Images, [(2, 4, 9, 8), (1, 4, 16, 16), (3, 4, 12, 7)]),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return CASES[name][0]()


def away(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm())


@pytest.mark.parametrize("name", CASES)
def test_autocast_around_a_compiled_model(name: str) -> None:
    model = made(name).eval()
    run = torch.compile(model, backend=blade.dynamo.disc, dynamic=True)
    mine = theirs = 0.0
    for shape in CASES[name][1]:
        x = torch.randn(shape)
        with torch.no_grad():
            exact = model(x)
            with torch.autocast("cpu", dtype=BF16):
                got, want = run(x), model(x)
        assert got.dtype == want.dtype
        mine, theirs = mine + away(got, exact), theirs + away(want, exact)
    assert 0 < mine <= 1.25 * theirs
    check_engines()


def check_engines() -> None:
    """Every graph was compiled by DISC, and its engine answered all calls."""
    assert set(graphs.served().values()) == {"disc"}
    for counts in graphs.stats().values():
        assert counts["engine_runs"] > 0
        assert counts["fallbacks"] == 0


def step(run: Any, x: torch.Tensor, narrow: Any, dtype: torch.dtype) -> torch.Tensor:
    with narrow:
        y = run(x.to(dtype))
    loss: torch.Tensor = y.float().square().mean()
    loss.backward()
    return y


@pytest.mark.parametrize("way", ["model", "autocast"])
@pytest.mark.parametrize("name", CASES)
def test_training(name: str, way: str) -> None:
    """Results and gradients, summed over the shapes."""
    exact = made(name)
    dtype = BF16 if way == "model" else torch.float32
    mine, eager = (copy.deepcopy(exact).to(dtype) for _ in range(2))
    run = torch.compile(mine, backend=blade.dynamo.aot_disc, dynamic=True)
    distances = [0.0, 0.0]
    for shape in CASES[name][1]:
        x = torch.randn(shape)
        want = step(exact, x, nullcontext(), torch.float32)
        for k, one in enumerate((run, eager)):
            narrow = torch.autocast("cpu", dtype=BF16) if way == "autocast" else nullcontext()
            distances[k] += away(step(one, x, narrow, dtype), want)
    assert 0 < distances[0] <= 1.25 * distances[1]
    distances = [0.0, 0.0]
    for p, *others in zip(exact.parameters(), mine.parameters(), eager.parameters(), strict=True):
        for k, q in enumerate(others):
            assert q.grad is not None and p.grad is not None
            assert q.grad.dtype == dtype
            distances[k] += away(q.grad, p.grad)
    assert 0 < distances[0] <= 1.25 * distances[1]
    check_engines()
