# SPDX-License-Identifier: Apache-2.0
"""Models that are given no tensor, or only use its sizes: accepted, and they answer as they did."""

import io
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.config import Config

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]

CONFIG = Config(optimization_pipeline="DISC", timing=False, min_cluster_size=1, cache=False)


class Constants(nn.Module):
    def forward(self) -> torch.Tensor:
        return torch.zeros(2, 3) + torch.arange(3)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self) -> tuple[torch.Tensor, ...]:
        grid = (self.weight * 2).tanh() @ torch.ones(4, 2)
        return grid, grid.sum(), self.weight


class Draws(nn.Module):
    def forward(self) -> torch.Tensor:
        return torch.rand(2, 3) * 2 + 1


class Numbers(nn.Module):
    def forward(self, rows: int, scale: float = 2.0) -> torch.Tensor:
        return torch.ones(rows, 3) * scale + rows


class Untyped(nn.Module):
    def forward(self, rows, flag=True):  # type: ignore[no-untyped-def]
        return torch.ones(rows, 3) * 2 if flag else torch.zeros(rows)


class Zeros(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape[0], 3)


class Sizes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape[0], 3) + torch.arange(3) * x.shape[1]


class Ignores(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2, 3) + 1


def both(model: nn.Module, inputs: Any, config: Config = CONFIG) -> list[torch.jit.ScriptModule]:
    """What ``optimize`` makes of it, and that again, saved and loaded."""
    made, file = blade.optimize(model.eval(), inputs, config), io.BytesIO()
    torch.jit.save(made, file)
    file.seek(0)
    return [made, torch.jit.load(file)]


@pytest.mark.parametrize("inputs", [(), [()], {}, [(), ()]], ids=["()", "[()]", "{}", "twice"])
@pytest.mark.parametrize("make", [Constants, Weights])
def test_nothing_is_given(make: type[nn.Module], inputs: Any) -> None:
    model = make()
    with torch.no_grad():
        for one in both(model, inputs):
            for _ in range(3):
                torch.testing.assert_close(one(), model())


@pytest.mark.parametrize("backend", ["auto", "DISC"])
def test_nothing_is_given_to_a_model_that_draws(backend: str) -> None:
    model = Draws()
    for one in both(model, (), CONFIG.evolve(optimization_pipeline=backend)):
        for seed in (0, 1):
            torch.manual_seed(seed)
            expected = model()
            torch.manual_seed(seed)
            torch.testing.assert_close(one(), expected, rtol=0, atol=0)


def test_numbers_stay_arguments_where_the_model_can_be_scripted() -> None:
    model = Numbers()
    for one in both(model, (3,)):
        for given in ((3,), (1,), (7, 0.5), (40, -1.0)):
            torch.testing.assert_close(one(*given), model(*given))


def test_numbers_are_checked_where_it_can_only_be_traced() -> None:
    model = Untyped()
    optimized, loaded = both(model, (3,))
    for one in (optimized, loaded):
        torch.testing.assert_close(one(), model(3))
        torch.testing.assert_close(one(3), model(3))
    torch.testing.assert_close(optimized(4), model(4))
    torch.testing.assert_close(
        loaded(4), model(4)
    )  # the number of the original is known in this process


@pytest.mark.parametrize("make", [Zeros, Sizes, Ignores])
def test_of_a_tensor_only_its_sizes_are_used(make: type[nn.Module]) -> None:
    model = make()
    for one in both(model, torch.randn(4, 5)):
        for sizes in ((4, 5), (1, 1), (7, 9), (0, 3), (64, 2)):
            x = torch.randn(sizes)
            torch.testing.assert_close(one(x), model(x))


def test_no_sample_at_all_is_refused() -> None:
    with pytest.raises(blade.InputError, match="an empty list; give at least one sample"):
        blade.optimize(Constants().eval(), [], CONFIG)
