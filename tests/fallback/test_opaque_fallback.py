# SPDX-License-Identifier: Apache-2.0
"""What a cluster falls back to is called, not inlined: small graphs, and a module like every other."""

import copy
from collections.abc import Callable

import pytest
import torch
from saved import loaded

import blade

pytestmark = pytest.mark.needs("runtime")

CONFIG = blade.Config(optimization_pipeline="disc", min_cluster_size=1, timing=False)


class Model(torch.nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.outputs = outputs

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = self.second(torch.relu(self.first(x))) + y
        return (z, torch.sigmoid(z), z * y)[: self.outputs]


def sample(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 8), torch.randn(rows, 8)


def disabled(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    module.cluster_0.engine.set_enabled(False)
    return module


class Around(torch.nn.Module):
    def __init__(self, inner: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        answer: tuple[torch.Tensor, torch.Tensor] = self.inner(x, y)
        return answer


def traced_around(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    return torch.jit.trace(Around(module), sample())


def scripted_around(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    return torch.jit.script(Around(module))


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_original_is_not_in_the_graph_that_torchscript_compiles(outputs: int) -> None:
    model = Model(outputs).eval()
    optimized = blade.optimize(model, sample(), CONFIG)
    inlined = str(optimized.inlined_graph)
    assert "try_execute" in inlined
    assert "aten::linear" not in inlined and "aten::relu" not in inlined
    assert f"InterfaceType<Original2to{outputs}>" in inlined
    assert "torch.relu" in optimized.cluster_0.fallback.code
    x = sample(5)
    for made in (lambda one: one, disabled, loaded):
        for got, want in zip(made(optimized)(*x), model(*x), strict=True):
            torch.testing.assert_close(got, want)
    counts = blade.stats(optimized)["cluster_0"]
    assert (counts["engine_runs"], counts["disabled"]) == (1, 1)


@pytest.mark.parametrize(
    "made", [copy.deepcopy, loaded, traced_around, scripted_around], ids=lambda made: made.__name__
)
@pytest.mark.parametrize("serves", [True, False])
def test_copies_files_and_modules_around_it_answer_alike(
    made: Callable[[torch.jit.ScriptModule], torch.jit.ScriptModule], serves: bool
) -> None:
    model = Model(2).eval()
    optimized = blade.optimize(model, sample(), CONFIG)
    if not serves:
        disabled(optimized)
    again = loaded(made(optimized))
    x = sample(7)
    for got, want in zip(again(*x), model(*x), strict=True):
        torch.testing.assert_close(got, want)


def test_its_weights_are_weights_of_the_module() -> None:
    model = Model().eval()
    optimized = blade.optimize(model, sample(), CONFIG)
    names = {name.rpartition(".")[0] for name, _ in optimized.named_buffers()}
    assert names == {"cluster_0.fallback"}
    assert sum(t.numel() for t in optimized.buffers()) == sum(p.numel() for p in model.parameters())
    assert set(optimized.state_dict()) == {name for name, _ in optimized.named_buffers()}
    wide = copy.deepcopy(optimized).double()
    assert {t.dtype for t in wide.buffers()} == {torch.float64}
    x = tuple(t.double() for t in sample(4))
    model.double()
    for got, want in zip(wide(*x), model(*x), strict=True):
        torch.testing.assert_close(got, want)
    assert {t.dtype for t in optimized.buffers()} == {torch.float32}
