# SPDX-License-Identifier: Apache-2.0
"""``Config(memory="low")``: no weight is laid out a second time, and the answers stay the same."""

from collections.abc import Callable

import pytest
import torch

import blade
from blade import Config

pytestmark = pytest.mark.needs("torch_mlir", "runtime")

CONFIG = Config(optimization_pipeline="DISC", strict=True, timing=False, min_cluster_size=1)


class Heads(torch.nn.Module):
    """Products that share an input, which packing would lay side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(24, 40), torch.nn.Linear(24, 40, bias=False)
        self.last = torch.nn.Linear(40, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.nn.functional.silu(self.first(x)) * self.second(x))


class Residual(torch.nn.Module):
    """Convolutions of both kinds with what is fused into them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.depthwise = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.last = torch.nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return torch.relu(x + self.last(torch.nn.functional.relu6(self.depthwise(y))))


def heads() -> tuple[torch.nn.Module, Callable[[int], torch.Tensor]]:
    return Heads(), lambda n: torch.randn(n, 3, 24)


def residual() -> tuple[torch.nn.Module, Callable[[int], torch.Tensor]]:
    return Residual(), lambda n: torch.randn(n, 8, 5 + n, 9)


@pytest.mark.parametrize("make", [heads, residual])
def test_nothing_is_packed_and_the_answers_are_right(
    make: Callable[[], tuple[torch.nn.Module, Callable[[int], torch.Tensor]]],
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    packs = {}
    for memory in ("normal", "low"):
        optimized = blade.optimize(model, inputs(2), CONFIG.evolve(memory=memory))
        program = optimized.cluster_0.engine.program()
        packs[memory] = [line for line in program.splitlines() if line.startswith("pack")]
        for n in (1, 4):
            x = inputs(n)
            torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-5)
        assert blade.stats(optimized)["cluster_0"]["fallbacks"] == 0
    assert packs["normal"] and not packs["low"]
