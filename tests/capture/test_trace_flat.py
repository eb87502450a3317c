# SPDX-License-Identifier: Apache-2.0
"""Tracing without TorchScript modules: the graph is that of a traced module that is frozen, or is left to torch."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.jit import _trace as tracer

from blade.capture import candidate
from blade.capture import capture as torchscript
from blade.capture.capture import capture
from blade.capture.clean import freeze, inline_own
from blade.capture.trace_flat import flat_trace
from blade.config import Config
from blade.graph.torchscript.splice import _attributes as attributes_of_module
from blade.graph.torchscript.splice import clone

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.norm.running_mean = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(self.norm(self.first(x))), x.detach()


class Outer(nn.Module):
    """Two layers with one weight, a sum of a weight, a result that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.one, self.two = Inner(), nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = self.inner(x)
        self.two(y)
        return self.two(self.one(y)) * self.one.bias.sum() + z.shape[0]


class Masks(nn.Module):
    """Buffers of one size: equal, equal at first, and different."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(48.0).reshape(1, 48)
        self.register_buffer("mask", mask)
        self.register_buffer("same", mask.clone())
        self.register_buffer("like", torch.where(mask < 40, mask, 0))
        self.register_buffer("other", -mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.mask + x * self.same
        return y + x * self.like + x * self.other


class Layers(nn.Sequential):
    def __init__(self, count: int) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(count)))


def ops(graph: torch._C.Graph) -> list[tuple[str, str]]:
    return [(n.kind(), n.scopeName()) for n in graph.nodes() if n.kind() != "prim::Constant"]


def tensors(graph: torch._C.Graph) -> list[torch.Tensor]:
    held = [n.output().toIValue() for n in graph.nodes() if n.kind() == "prim::Constant"]
    return [one for one in held if isinstance(one, torch.Tensor)]


def compared(function: Any) -> int:
    """How often two tensors are compared."""
    with torch.autograd.profiler.profile() as profile:
        function()
    return Counter(e.name for e in profile.function_events)["aten::equal"]


def test_the_graph_is_that_of_a_traced_module_that_is_frozen() -> None:
    model = Outer().eval()
    with torch.no_grad():
        made = flat_trace(model, ["x"], [X])
        traced = torch.jit.trace(model, X)
        inline_own(traced)
        wanted = freeze(traced, (), True)
    assert made is not None
    assert ops(made.graph) == ops(wanted.graph)
    assert len(tensors(made.graph)) == len(tensors(wanted.graph))
    assert str(made.forward.schema).partition(" self, ")[2] == "Tensor x) -> Tensor"
    assert torch.equal(made(X), wanted(X))
    shared = {t.data_ptr() for t in tensors(made.graph)} & {
        p.data_ptr() for p in model.parameters()
    }
    assert model.one.weight.data_ptr() in shared  # no copy of it
    assert not any(t.requires_grad for t in tensors(made.graph))
    assert not attributes_of_module(made._c)


def test_equal_weights_are_one_constant() -> None:
    model = Masks().eval()
    made = flat_trace(model, ["x"], [X[:, :1]])
    assert made is not None
    assert len(tensors(made.graph)) == 3
    assert Counter(kind for kind, _ in ops(made.graph))["aten::mul"] == 3  # two are one
    assert torch.equal(made(X[:, :1]), model(X[:, :1]))


def test_capturing_and_copying_do_not_compare_all_weights() -> None:
    captured: list[Any] = []
    assert (
        compared(lambda: captured.append(capture(Layers(24).eval(), X.new_zeros(2, 8), Config())))
        < 24
    )
    assert compared(lambda: captured.append(clone(captured[0].module))) == 0
    assert ops(captured[1].graph) == ops(captured[0].module.graph)


def test_what_writes_to_a_weight_is_traced_as_a_module() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[1:].mul_(1)
            return x * self.calls

    assert flat_trace(Counts().eval(), ["x"], [X]) is None


def test_what_can_be_traced_as_part_of_a_module_only_is(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[Any] = []

    def noted(*args: Any) -> torch.jit.ScriptModule:
        frozen.append(args)
        return freeze(*args)

    for module in (torchscript, candidate):
        monkeypatch.setattr(module, "freeze", noted)
    model = nn.Sequential(torch.jit.script(nn.Linear(3, 4).eval()), nn.ReLU()).eval()
    captured = capture(model, X, Config())
    assert captured.how == "trace" and len(frozen) == 1 and not captured.reasons
    assert torch.equal(captured.module(X), model(X))
    captured = capture(nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), X, Config())
    assert captured.how == "trace" and len(frozen) == 1


def test_the_tracer_is_left_as_it_was_where_the_model_raises() -> None:
    with pytest.raises(RuntimeError):
        flat_trace(nn.Linear(4, 4), ["x"], [X])
    assert tracer._trace_module_map is None and not torch.jit.is_tracing()


@pytest.mark.parametrize("preserved", [(), ("note",)])
def test_what_torch_cannot_optimize_is_taken_as_it_is(
    preserved: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_done(graph: torch._C.Graph) -> None:
        for node in graph.findAllNodes("aten::relu"):
            node.output().replaceAllUsesWith(node.inputsAt(0))
        raise RuntimeError("INTERNAL ASSERT FAILED")

    monkeypatch.setattr("blade.capture.clean.fold", half_done)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU()).eval()
    model.note = "kept"  # type: ignore[assignment]
    x = torch.randn(2, 2, 4, 4)
    captured = capture(model, x, Config(preserved_attributes=preserved))
    torch.testing.assert_close(captured.module(x), model(x))


def test_everything_is_folded_and_products_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("one product of several")

    monkeypatch.setattr(torch._C, "_jit_pass_concat_frozen_linear", never)
    monkeypatch.setattr(torch._C, "_jit_pass_optimize_frozen_graph", never)

    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.convolution, self.norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
            self.norm.running_mean.normal_()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.convolution(x) * 2 + 1) - 3
            return self.a(y) + self.b(y)

    model, x = Folds().eval(), torch.randn(2, 2, 4, 4)
    captured = capture(model, x, Config())
    kinds = [
        node.kind() for node in captured.module.graph.nodes() if node.kind() != "prim::Constant"
    ]
    check = [
        "aten::dim",
        "aten::eq",
        "aten::__not__",
        "prim::If",
    ]  # the batch norm asks for the rank
    assert kinds == [*check, "aten::_convolution", "aten::linear", "aten::linear", "aten::add"]
    torch.testing.assert_close(captured.module(x), model(x), rtol=1e-4, atol=1e-5)
