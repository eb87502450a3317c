# SPDX-License-Identifier: Apache-2.0
"""Modules as PyTorch Lightning makes them: a property raises where no trainer is attached."""

import pytest
import torch
from torch import nn

import blade
from blade.capture.unattached import readable_properties

CONFIG = blade.Config(timing=False, min_cluster_size=1)


class Lightning(nn.Module):
    _jit_is_scripting = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    @property
    def trainer(self) -> None:
        if not self._jit_is_scripting:
            raise RuntimeError("not attached to a `Trainer`")


class Forecast(Lightning):
    """Draws and writes, so that the module itself is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.layer(x)) + 0 * torch.rand_like(x)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Forecast()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


@pytest.mark.parametrize("kind", [Forecast, Around])
def test_a_module_without_a_trainer_is_traced(kind: type[nn.Module]) -> None:
    model, x = kind().eval(), torch.randn(3, 4)
    optimized = blade.optimize(model, x, CONFIG)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x[:2]), model(x[:2]))
    assert Lightning._jit_is_scripting is False


def test_the_flag_is_set_within_the_block() -> None:
    with readable_properties(Around()), readable_properties(Forecast()):
        assert Lightning._jit_is_scripting and Forecast().trainer is None
    assert not Lightning._jit_is_scripting and "_jit_is_scripting" not in vars(Forecast)
    with readable_properties(nn.Linear(2, 2)):
        assert not Lightning._jit_is_scripting
