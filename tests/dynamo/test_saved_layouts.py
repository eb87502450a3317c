# SPDX-License-Identifier: Apache-2.0
"""Images that forward saves for backward: in the order in which convolutions compute them, and copied by neither."""

import copy
from collections.abc import Callable, Iterator

import graphs
import pytest
import torch
from torch.fx import GraphModule

import blade
from blade.backends.disc import compiler
from blade.backends.disc.fusion.fuse import Fused, FusionGroup, is_copy
from blade.dynamo import forward_backward

nn = torch.nn


class Block(nn.Module):
    def __init__(self, groups: int = 1, pool: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.first(x)))
        y = self.pool(y + nn.functional.hardswish(self.second(y)))
        return self.last(y.mean((2, 3)))


@pytest.fixture
def backward_inputs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what backward graphs take."""
    found: list[tuple[int, ...]] = []
    cut: Callable[..., tuple[GraphModule, GraphModule]] = forward_backward.partition

    def spy(*args: object, **kwargs: object) -> tuple[GraphModule, GraphModule]:
        forward, backward = cut(*args, **kwargs)
        taken = [n for n in backward.graph.nodes if n.op == "placeholder"]
        found.extend(tuple(n.meta["val"].shape) for n in taken)
        return forward, backward

    monkeypatch.setattr("blade.dynamo.backends.partition", spy)
    return found


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[object, ...]]]:
    """The shapes of images that kernels do nothing with but copy."""
    found: list[tuple[object, ...]] = []
    last = compiler.shorten_lives

    def spy(fused: Fused) -> Fused:
        groups = [u for u in fused.units if isinstance(u, FusionGroup)]
        found.extend(g.shape for g in groups if is_copy(g) and len(g.shape) == 4)
        return last(fused)

    monkeypatch.setattr(compiler, "shorten_lives", spy)
    yield found


def check(model: nn.Module, x: torch.Tensor, tolerance: float = 1e-4) -> None:
    other = copy.deepcopy(model)
    options = {"timing": False}
    compiled = torch.compile(model, backend=blade.dynamo.aot_disc, options=options)
    for run in (compiled, other):
        run(x).square().sum().backward()
    for mine, want in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, want.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pool", [False, True])
def test_images_cross_with_channels_last(
    pool: bool, backward_inputs: list[tuple[int, ...]], copies: list[tuple[object, ...]]
) -> None:
    check(Block(pool=pool).train(), torch.randn(2, 4, 10, 6))
    assert (2, 10, 6, 8) in backward_inputs
    assert (2, 8, 10, 6) not in backward_inputs
    assert set(graphs.served().values()) == {"disc"}
    if not pool:
        assert (2, 8, 10, 6) not in copies


def test_what_a_gradient_in_groups_reads_crosses_as_it_is(
    backward_inputs: list[tuple[int, ...]],
) -> None:
    check(Block(groups=8).train(), torch.randn(2, 4, 10, 6))
    assert (2, 8, 10, 6) in backward_inputs


def test_images_of_doubles_cross_as_they_are(backward_inputs: list[tuple[int, ...]]) -> None:
    check(Block().double().train(), torch.randn(2, 4, 10, 6).double(), 1e-9)
    assert (2, 8, 10, 6) in backward_inputs
    assert (2, 10, 6, 8) not in backward_inputs


def test_outputs_of_the_model_lie_as_torch_says() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3)).train()
    compiled = torch.compile(model, backend=blade.dynamo.aot_disc, options={"timing": False})
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    y = compiled(x)
    want = model(x)
    assert y.stride() == want.stride()
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    (mine,) = torch.autograd.grad(y.sum(), x)
    (theirs,) = torch.autograd.grad(want.sum(), x)
    assert mine.stride() == theirs.stride()
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


class Patches(nn.Module):
    """A transformer's stream of patches, which torch keeps in the order of axes of the convolution's image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.place = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 6, 16))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x).mean(1)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_rows_cross_as_rows(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: a program for it reads rows of 16 one after the other, and copies none of them."""
    strides: list[tuple[int, ...]] = []
    cut: Callable[..., tuple[GraphModule, GraphModule]] = forward_backward.partition

    def spy(*args: object, **kwargs: object) -> tuple[GraphModule, GraphModule]:
        forward, backward = cut(*args, **kwargs)
        taken = (n.meta["val"] for n in backward.graph.nodes if n.op == "placeholder")
        strides.extend(v.stride() for v in taken if v.shape == (2, 6, 16))
        return forward, backward

    monkeypatch.setattr("blade.dynamo.backends.partition", spy)
    if on_gpu:
        monkeypatch.setattr("blade.dynamo.saved_layouts._is_on_cpu", lambda value: False)
    torch.manual_seed(0)
    check(Patches().train(), torch.randn(2, 3, 8, 12))
    assert ((96, 1, 6) in strides) != on_gpu
    assert strides.count((96, 16, 1)) >= 2 * on_gpu
