# SPDX-License-Identifier: Apache-2.0
"""Models that a trace does not serve: torch.export is taken where it answers more."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blade.capture.capture import capture
from blade.config import Config
from blade.errors import BladeWarning, InputError
from blade.graph.torchscript.answer_by_original import answer_by_original
from blade.graph.torchscript.decision_checks import NO_PATH, checks_of
from blade.runtime.originals import register


class Layered(nn.Module):
    """Calls ``function`` with its layer."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer, x)


def _branches(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda a: torch.relu(a), lambda a: a * 2, (layer(x),))


def test_the_original_is_lent_where_a_guard_does_not_hold() -> None:
    model = Layered(_branches).eval()
    with pytest.warns(BladeWarning, match=r"size\(1\) >= 2 does not hold"):
        fixed = Config(strict=False, dynamic_shapes={"x": {0: (2, 2)}})
        captured = capture(model, torch.randn(2, 10, 8), fixed)
    assert captured.how == "export" and captured.original_number
    assert any(check.text.startswith(NO_PATH) for check in checks_of(captured.module.graph))
    answer_by_original(captured.module.graph, captured.original_number)
    register(captured.original_number, captured.module, captured.original.leaves)
    for length in (1, 3, 33):
        for sign in (1, -1):
            x = sign * torch.rand(2, length, 8)
            torch.testing.assert_close(captured.module(x), model(x))


class Same(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x if x is y else x + y
        return torch.cond(z.sum() > 0, lambda a: torch.relu(a), lambda a: a * 2, (z,))


def test_code_that_compares_objects_is_not_exported() -> None:
    with pytest.raises(InputError, match="neither traced nor scripted"):
        capture(Same().eval(), (torch.randn(2, 3), torch.randn(2, 3)), Config())


def test_a_trace_stays() -> None:
    def sized(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x) * float(np.prod(np.array(x.shape)))

    captured = capture(Layered(sized).eval(), torch.ones(2, 10, 8), Config(allow_tracing=True))
    assert captured.how == "trace"
