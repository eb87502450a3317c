# SPDX-License-Identifier: Apache-2.0
"""The graph that is compared is the one that is handed on, unless runs may have changed what it holds."""

from typing import Any

import pytest
import torch
from torch import nn

from blade.capture import candidate
from blade.capture import capture as torchscript
from blade.capture.capture import capture
from blade.capture.clean import forward_of, freeze
from blade.config import Config

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Counts(nn.Module):
    """Writes a buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def counted(*args: Any) -> torch.jit.ScriptModule:
        made.append(freeze(*args))
        return made[-1]

    for module in (torchscript, candidate):
        monkeypatch.setattr(module, "freeze", counted)
    return made


def test_what_holds_nothing_but_constants_is_frozen_once(frozen: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval()
    captured = capture(torch.jit.script(model), X, Config())
    assert len(frozen) == 1 and captured.module is frozen[0]
    assert torch.allclose(captured.module(X), model(X))


def test_what_keeps_a_state_is_frozen_anew(frozen: list[Any]) -> None:
    captured = capture(Counts().eval(), X, Config())
    assert len(frozen) == 2 and captured.module is frozen[1]
    assert torch.equal(captured.module(X), X)
    assert torch.equal(captured.module(X), 2 * X)


def test_a_module_whose_forward_ran_by_itself_takes_edits_of_its_graph() -> None:
    traced = torch.jit.trace(nn.ReLU().eval(), X)
    module = freeze(traced, (), True)
    assert torch.equal(forward_of(module)(X), X.relu())
    [node] = [n for n in module.graph.nodes() if n.kind() == "aten::relu"]
    node.output().replaceAllUsesWith(list(module.graph.inputs())[1])
    assert torch.equal(module(X), X)
