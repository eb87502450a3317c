# SPDX-License-Identifier: Apache-2.0
"""attributes: what a module's forward may write to."""

import pytest
import torch
from torch import nn

from blade.capture.attributes import may_write
from blade.capture.reference_model import ModelState


class Reads(nn.Module):
    """Branches, loops, lists and tuples, and all of it new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.seen
        if y.size(0) > 2:
            y = y.relu()
        for i in range(y.size(0)):
            y = y + float(i)
        a, b = torch.chunk(y, 2)
        return torch.cat([a, b])


class Writes(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(0) > 2:
            self.seen.add_(1)
        return x + self.seen


class Rebinds(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return x + self.seen


class Inside(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Writes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    ("model", "writes"), [(Reads, False), (Writes, True), (Rebinds, True), (Inside, True)]
)
def test_who_writes(model: type[Reads], writes: bool) -> None:
    module = torch.jit.script(model())
    assert may_write(module) is writes


@pytest.mark.parametrize("model", [Writes, Rebinds, Inside])
def test_what_is_written_is_put_back(model: type[Reads]) -> None:
    module = torch.jit.script(model())
    x = torch.ones(3)
    state = ModelState(module)
    once = module(x)
    assert not torch.equal(module(x), once)
    assert state.restore()
    assert torch.equal(module(x), once)


@pytest.mark.needs("runtime")
def test_an_optimized_module_does_not_write() -> None:
    import blade

    linear = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    config = blade.Config(optimization_pipeline="DISC", timing=False, min_cluster_size=1)
    optimized = blade.optimize(linear, torch.randn(2, 4), config)
    assert not may_write(optimized)
    assert ModelState(optimized)._tensors == []
