# SPDX-License-Identifier: Apache-2.0
"""A script whose branches return different types is loaded as it was saved."""

import io
from typing import Any

import pytest
import torch
from torch import nn

from blade.core import torchscript
from blade.graph.torchscript.keep_types import keep_types


class AnyOf(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        if x.numel() == 0:
            return None
        if x.dim() > 1:
            if x.size(0) > 2:
                return {"x": x}
            return x, x * 2
        return x, x * 2, x + 1


def test_what_is_returned_is_loaded() -> None:
    model = AnyOf().eval()
    frozen: Any = torch.jit.freeze(torch.jit.script(model))
    with pytest.raises(RuntimeError, match="Type mismatch"):
        torchscript.load(io.BytesIO(torchscript.to_bytes(frozen)))
    keep_types(frozen.graph)
    frozen.graph.lint()
    once = torchscript.load(io.BytesIO(torchscript.to_bytes(frozen)))
    twice = torchscript.load(io.BytesIO(torchscript.to_bytes(once)))
    for sizes in ((3,), (2, 3), (4, 3), (0,)):
        x = torch.randn(sizes)
        for module in (frozen, once, twice):
            torch.testing.assert_close(module(x), model(x), rtol=0, atol=0)


def test_other_graphs_are_left_alone() -> None:
    class Optional(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor | None:
            if x.dim() > 1:
                return x * 2
            return None

    frozen: Any = torch.jit.freeze(torch.jit.script(Optional().eval()))
    before = str(frozen.graph)
    keep_types(frozen.graph)
    assert str(frozen.graph) == before
