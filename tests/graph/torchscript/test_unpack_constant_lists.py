# SPDX-License-Identifier: Apache-2.0
"""Weights that freezing leaves in a constant list (recurrent layers) become constants one by one."""

import pytest
import torch

import blade
from blade.graph.torchscript.unpack_constant_lists import unpack_constant_lists

CONFIG = blade.Config(timing=False, min_cluster_size=1)


class Gates(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.GRU(4, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0].tanh()


def _lists(graph: torch._C.Graph) -> list[torch._C.Node]:
    kinds = [n for n in graph.nodes() if n.kind() == "prim::Constant"]
    return [n for n in kinds if n.output().type().str() == "Tensor[]"]


def test_lists_are_spread_and_the_tensors_stay_the_same() -> None:
    model = Gates().eval()
    frozen = torch.jit.freeze(torch.jit.trace(model, torch.randn(3, 7, 4)))
    [node] = _lists(frozen.graph)
    before = [t.data_ptr() for t in node.output().toIValue()]
    x = torch.randn(3, 7, 4)
    want = frozen(x)
    unpack_constant_lists(frozen.graph)
    frozen.graph.lint()
    assert not _lists(frozen.graph)
    [layer] = [n for n in frozen.graph.nodes() if n.kind() == "aten::gru"]
    made = list(layer.inputs())[2].node()
    assert made.kind() == "prim::ListConstruct"
    assert [v.toIValue().data_ptr() for v in made.inputs()] == before
    assert torch.equal(frozen(x), want)


class Pairs(torch.nn.Module):
    """Freezing turns both indices, and the whole axis before them, into one constant list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self.pairs[0], self.pairs[1]].tanh() * 2


@pytest.mark.needs("runtime", "torch_mlir")
def test_indices_that_are_weights_are_compiled() -> None:
    model = Pairs().eval()
    optimized = blade.optimize(model, torch.randn(3, 4, 4), CONFIG)
    report = blade.report(optimized)
    assert [c.backend for c in report.clusters] == ["disc"]
    assert not report.outside
    x = torch.randn(5, 4, 4)
    torch.testing.assert_close(optimized(x), model(x))


class Enlarged(torch.nn.Module):
    """The size is an optional list of ints, which are sizes of another tensor."""

    def forward(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x * 2, size=like.shape[-2:]) + like


@pytest.mark.needs("runtime", "torch_mlir")
def test_an_optional_list_of_sizes_is_compiled() -> None:
    def sample(batch: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, 2, 5, 4), torch.randn(batch, 2, size, size + 1)

    model = Enlarged().eval()
    optimized = blade.optimize(model, sample(2, 7), CONFIG)
    report = blade.report(optimized)
    assert [c.backend for c in report.clusters] == ["disc"]
    assert not report.outside
    inputs = sample(3, 9)
    torch.testing.assert_close(optimized(*inputs), model(*inputs))


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_recurrent_layer_is_one_cluster_at_any_length(kind: type[torch.nn.Module]) -> None:
    model = kind(4, 5, 2, bidirectional=True).eval()
    optimized = blade.optimize(model, torch.randn(7, 3, 4), CONFIG)
    assert [c.backend for c in blade.report(optimized).clusters] == ["disc"]
    for shape in ((7, 3, 4), (1, 3, 4), (9, 1, 4), (2, 8, 4)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(optimized(x), model(x))
    [counters] = blade.stats(optimized).values()
    assert counters["engine_runs"] == 4


class Losses(torch.nn.Module):
    """Begins sums that a loss reads in training, as libraries of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = torch.tensor(0.5, requires_grad=True)
        y = self.layer(torch.relu(self.layer(x)))
        return y, total + y.sum(), torch.zeros(1, requires_grad=True), torch.stack([total, total])


@pytest.mark.parametrize("gradients", [True, False])
def test_a_constant_that_requires_a_gradient_stays_one(gradients: bool) -> None:
    model, x = Losses().eval(), torch.randn(3, 4)
    with torch.set_grad_enabled(gradients):
        optimized = blade.optimize(model, x, CONFIG)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x[:2]), model(x[:2]))
