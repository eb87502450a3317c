# SPDX-License-Identifier: Apache-2.0
"""Models that a trace does not serve: torch.export is taken where it answers more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan

from blade.capture.capture import capture
from blade.config import Config

SIZES = ((2, 5), (7, 3), (4, 33))


class Layered(nn.Module):
    """Calls ``function`` with its layer."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer, x)


def _scans(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def step(h: torch.Tensor, x_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(layer(h) + x_t)
        return h, h.clone()

    return scan(step, x[:, 0] * 0, x.transpose(0, 1))[1]


def _loops(layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    def goes_on(i: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return i < 3

    def body(i: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, torch.tanh(h)

    start = torch.zeros((), dtype=torch.long)
    return {"last": torch.while_loop(goes_on, body, (start, layer(x)))[1], "input": x * 2}


def _branches(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda a: torch.relu(a), lambda a: a * 2, (layer(x),))


def _flat(output: Any) -> tuple[torch.Tensor, ...]:
    return tuple(output.values()) if isinstance(output, dict) else (output,)


@pytest.mark.parametrize(
    ("function", "share"), [(_scans, 1.0), (_loops, 1.0), (_branches, 0.7)], ids=["scan", "while", "cond"]
)
def test_control_flow_of_torch_is_served(function: Callable[..., Any], share: float) -> None:
    model = Layered(function).eval()
    captured = capture(model, torch.randn(2, 10, 8), Config(strict=False))
    assert captured.how == "export"
    for sizes in SIZES:
        for scale in (1.0, -1.0):
            x = scale * torch.rand(*sizes, 8)
            got = captured.module(x)
            torch.testing.assert_close(_flat_tuple(got), _flat(model(x)))


def _flat_tuple(output: Any) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)
