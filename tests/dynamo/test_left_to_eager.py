# SPDX-License-Identifier: Apache-2.0
"""Where no engine serves, torch.compile runs Dynamo's own graph: a functional one would be slower than eager mode."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import blade


def _writes_in_place(call: Callable[[], object]) -> bool:
    """Whether ``call`` adds in place. A dispatch mode would make Dynamo leave the call to eager mode."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call()
    return "aten::add_" in {one.key for one in seen.key_averages()}


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        for k in range(3):
            out[:, k] += torch.tanh(x[:, k]) * self.scale[k]
        return out.clone()


def _given() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    return x, torch.ones(6, 3)


@pytest.mark.parametrize("served", [False, True])
def test_a_graph_without_engines_writes_in_place(served: bool) -> None:
    torch._dynamo.reset()
    model = Writes().eval()
    options = {"min_cluster_size": 1 if served else 1000, "timing": False}
    compiled = torch.compile(model, backend=blade.dynamo.disc, options=options)
    x, out = _given()
    want = out.clone()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x, out), model(x, want))
            torch.testing.assert_close(out, want)
        assert _writes_in_place(lambda: model(x, out))
        assert _writes_in_place(lambda: compiled(x, out)) is not served


def test_engines_that_lose_leave_it_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    from blade.dynamo import compete

    monkeypatch.setattr(compete, "compete", lambda *_: compete.Competition(None))
    torch._dynamo.reset()
    model = Writes().eval()
    compiled = torch.compile(model, backend=blade.dynamo.disc)
    x, out = _given()
    want = out.clone()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x, out), model(x, want))
        model.scale.mul_(2.0)  # seen, as in eager mode
        torch.testing.assert_close(compiled(x, out), model(x, want))
        assert _writes_in_place(lambda: compiled(x, out))
        model(x, want)
    torch.testing.assert_close(out, want)


def test_training_keeps_its_graphs() -> None:
    torch._dynamo.reset()
    model = Writes()
    compiled = torch.compile(
        model, backend=blade.dynamo.aot_disc, options={"min_cluster_size": 1000}
    )
    x, _ = _given()
    compiled(x, torch.zeros(6, 3)).sum().backward()
    assert model.scale.grad is not None
    torch.testing.assert_close(model.scale.grad, torch.tanh(x).sum(0))
