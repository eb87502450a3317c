# SPDX-License-Identifier: Apache-2.0
"""Norms and activations whose results backward computes again, or reads where the next product saved them."""

import copy
from collections import Counter

import graphs
import pytest
import torch
from torch import nn

import blade

SIDE = 6


class Modulated(nn.Module):
    """Layer norms as in DiT: their results are multiplied, in bfloat16 or not."""

    def __init__(self, affine: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=affine)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x).sin()) * self.scale)


def images(*between: nn.Module) -> nn.Sequential:
    """Without a bias where its gradient is 0, as before a norm of every channel."""
    first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    return nn.Sequential(first, *between, nn.Conv2d(8, 4, 1)).train()


def saved(model: nn.Module, x: torch.Tensor, want: nn.Module | None = None) -> Counter[torch.dtype]:
    """How many tensors of eight values per pixel cross to backward; its gradients are compared with eager's."""
    found: dict[int, torch.dtype] = {}

    def seen(t: torch.Tensor) -> torch.Tensor:
        if t.numel() == x.numel() // x.shape[1] * 8:
            found[t.data_ptr()] = t.dtype
        return t

    other = copy.deepcopy(model) if want is None else want
    compiled = torch.compile(model, backend=blade.dynamo.aot_disc, options={"timing": False})
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda t: t):
        loss = compiled(x).square().sum()
    loss.backward()
    other(x).square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        off = (mine.grad - theirs.grad).norm() / theirs.grad.norm().clamp_min(1e-6)
        assert off < (0.02 if x.dtype == torch.bfloat16 else 1e-4), name
    for (name, mine), theirs in zip(model.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)
    return Counter(found.values())


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.Hardswish(), nn.ReLU6(), nn.LeakyReLU(0.1)])
@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False), nn.GroupNorm(2, 8), nn.GroupNorm(8, 8)],
    ids=["batch", "batch_bare", "groups", "instances"],
)
def test_a_norm_and_its_activation_save_two_images(norm: nn.Module, activation: nn.Module) -> None:
    """What the norm reads and what the next convolution does; not what is between them."""
    torch.manual_seed(0)
    x = torch.randn(3, 3, SIDE, SIDE)
    assert saved(images(copy.deepcopy(norm), activation), x) == {torch.float32: 2}
    assert set(graphs.served().values()) == {"disc"}


def test_an_activation_in_place_saves_no_copy() -> None:
    x = torch.randn(3, 3, SIDE, SIDE)
    assert saved(images(nn.BatchNorm2d(8), nn.SiLU(inplace=True)), x) == {torch.float32: 2}


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.Hardtanh(-0.5, 0.5), nn.LeakyReLU(0.1)])
def test_activations_are_saved_once(activation: nn.Module) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, SIDE, SIDE)
    assert saved(images(activation), x) == {torch.float32: 1}


def test_a_slope_below_zero_reads_what_the_activation_read() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, SIDE, SIDE)
    assert saved(images(nn.LeakyReLU(-0.5)), x) == {torch.float32: 2}


@pytest.mark.parametrize("affine", [False, True])
def test_a_layer_norm_is_computed_again(affine: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8, 8)
    # x, the product, the sine, and what the second product reads
    assert saved(Modulated(affine), x) == {torch.float32: 4}


def test_a_layer_norm_of_one_row() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 8))
    torch.manual_seed(0)
    compiled = torch.compile(model, backend=blade.dynamo.aot_disc, options={"timing": False})
    x = torch.randn(8)
    for p, w in zip(
        torch.autograd.grad(compiled(x).square().sum(), list(model.parameters())),
        torch.autograd.grad(model(x).square().sum(), list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(p, w, rtol=1e-4, atol=1e-5)


def test_norms_of_halves_with_wide_parameters() -> None:
    """As under autocast: statistics are float32, and the result is rounded once more."""
    torch.manual_seed(0)
    model = images(nn.BatchNorm2d(8), nn.SiLU()).bfloat16()
    model[1].float()
    want = copy.deepcopy(model)
    x = torch.randn(3, 3, SIDE, SIDE).bfloat16()
    assert saved(model, x, want) == {torch.bfloat16: 2}


def test_statistics_of_halves_are_too_coarse() -> None:
    torch.manual_seed(0)
    model = images(nn.BatchNorm2d(8), nn.SiLU()).bfloat16()
    assert saved(model, torch.randn(3, 3, SIDE, SIDE).bfloat16()) == {torch.bfloat16: 3}


def test_any_batch_and_a_result_of_the_model() -> None:
    """Sizes are symbols, and a norm's result is returned as well as computed again."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8)
            self.batch, self.last = nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.norm(self.first(x))
            z = self.batch(nn.functional.silu(y))
            return z, self.last(nn.functional.silu(z))

    torch.manual_seed(0)
    model = Both().train()
    other = copy.deepcopy(model)
    compiled = torch.compile(
        model, backend=blade.dynamo.aot_disc, dynamic=True, options={"timing": False}
    )
    for batch in (2, 5):
        x = torch.randn(batch, 3, SIDE, SIDE)
        for run in (compiled, other):
            z, y = run(x)
            (z.sin().sum() + y.square().sum()).backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert set(graphs.served().values()) == {"disc"}
