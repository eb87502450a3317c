# SPDX-License-Identifier: Apache-2.0
"""Calls that no path of an optimized module answers: another module is made for them."""

import pytest
import torch
from torch import nn

import blade
from blade.config import Config

QUICK = Config(optimization_pipeline="disc", timing=False, time_budget=None)


class Chooses(nn.Module):
    """A path of its own for inputs that begin with 7, which no made-up input does, and an error for 8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] == 7:
            return x.tanh() + x
        if x[0, 0] == 8:
            raise ValueError("no 8")
        return x.softmax(-1) * 2


def _beginning(first: float, rows: int) -> torch.Tensor:
    x = torch.rand(rows, 4)
    x[0, 0] = first
    return x


@torch.no_grad()
def test_missed_calls_get_a_module_of_their_own() -> None:
    model = Chooses().eval()
    fast = blade.accelerate(model, config=QUICK)
    for first in (1.0, 7.0):
        for _ in range(3):
            x = _beginning(first, 5)
            torch.testing.assert_close(fast(x), model(x))
        assert blade.wait(fast, 120)
    stats = blade.stats(fast)
    assert stats["original"]["calls"] == 6 and stats["call 2"]["calls"] == 0
    for first in (7.0, 1.0, 7.0):
        x = _beginning(first, 5)
        torch.testing.assert_close(fast(x), model(x))
    stats = blade.stats(fast)
    assert [stats[name]["calls"] for name in ("call 1", "call 2", "original")] == [1, 2, 6]
    for _ in range(2):
        with pytest.raises(ValueError, match="no 8"):
            fast(_beginning(8.0, 5))
    assert blade.stats(fast)["original"]["calls"] == 8
    with torch.no_grad():
        x = _beginning(7.0, 5)
        torch.testing.assert_close(fast(x), model(x))
    assert blade.stats(fast)["call 2"]["calls"] == 3
