# SPDX-License-Identifier: Apache-2.0
"""What is folded into weights computes the same, at every rank, dtype and use of the convolution's result."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blade.capture.capture import capture
from blade.config import Config
from blade.graph.torchscript.fold_constants import fold


class Calls(nn.Module):
    """``function(module, x)``, with parts and a constant."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def normed(kind: type[nn.Module], features: int, **how: bool) -> Any:
    norm: Any = kind(features, **how)
    if norm.track_running_stats:
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.bias, -1, 1)
    return norm


def folded(model: nn.Module, x: Tensor) -> torch.jit.ScriptModule:
    traced = torch.jit.trace(model.eval(), x, check_trace=False)
    frozen = torch._C._freeze_module(traced._c, [], True, False)
    made: torch.jit.ScriptModule = torch.jit._recursive.wrap_cpp_module(frozen)
    fold(made.graph)
    return made


def assert_folded_right(model: nn.Module, *inputs: Tensor) -> list[str]:
    """Compare ``model``, folded at the first input, with itself; return the kinds of ops that are left."""
    with torch.no_grad():
        made = folded(model, inputs[0])
        for x in inputs:
            torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-4, equal_nan=True)
    return [n.kind() for n in made.graph.nodes() if n.kind().startswith(("aten", "prim::unch"))]


def test_a_linear_whose_result_is_used_beside_its_batch_norm_is_not_folded() -> None:
    """Dice, the activation of DIN: p(y) * y + (1 - p(y)) * alpha * y with p a sigmoid of the batch norm."""

    def dice(m: Any, x: Tensor) -> Tensor:
        y = m.linear(x)
        p = torch.sigmoid(m.norm(y))
        return p * y + (1 - p) * m.alpha * y

    torch.manual_seed(0)
    parts = {"linear": nn.Linear(8, 4), "norm": normed(nn.BatchNorm1d, 4), "alpha": torch.rand(4)}
    model = Calls(dice, **parts).eval()
    assert_folded_right(model, torch.randn(3, 8))
    captured = capture(model, torch.randn(3, 8), Config())
    x = torch.randn(5, 8)
    assert captured.how == "trace"
    torch.testing.assert_close(captured.module(x), model(x))


LINEARS: dict[str, tuple[Callable[[Any, Tensor], Any], tuple[int, ...]]] = {
    "alone": (lambda m, x: m.norm(m.linear(x)), (3, 8)),
    "used": (lambda m, x: (lambda y: m.norm(y) * y)(m.linear(x)), (3, 8)),
    "returned": (lambda m, x: (lambda y: (m.norm(y), y))(m.linear(x)), (3, 8)),
    "twice": (lambda m, x: (lambda y: m.norm(y) + m.norm(y + 1))(m.linear(x)), (3, 8)),
    "rank 3": (lambda m, x: m.norm(m.linear(x)), (3, 4, 8)),
}


@pytest.mark.parametrize("name", LINEARS)
def test_a_batch_norm_after_a_linear(name: str) -> None:
    torch.manual_seed(0)
    function, shape = LINEARS[name]
    model = Calls(function, linear=nn.Linear(8, 4), norm=normed(nn.BatchNorm1d, 4))
    assert_folded_right(model, torch.randn(shape))


def test_a_batch_norm_after_a_linear_is_right_at_a_rank_that_was_not_sampled() -> None:
    """With as many features as rows the batch norm's second dimension is no feature of the linear."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), normed(nn.BatchNorm1d, 4)).eval()
    assert_folded_right(model, torch.randn(3, 8), torch.randn(2, 4, 8))


CONVOLUTIONS: dict[str, tuple[Callable[[], Any], type[nn.Module], int]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d, 1),
    "1d transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), nn.BatchNorm1d, 1),
    "2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d, 2),
    "3d": (lambda: nn.Conv3d(4, 6, 3, groups=2), nn.BatchNorm3d, 3),
}

ARITHMETIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda y, c: y + c,
    "add from": lambda y, c: torch.add(c, y, alpha=3),
    "add times": lambda y, c: torch.add(y, c, alpha=3),
    "sub": lambda y, c: y - c,
    "sub from": lambda y, c: c - y,
    "mul": lambda y, c: y * c,
    "div": lambda y, c: y / c,
    "div from": lambda y, c: c / y,
    "chain": lambda y, c: (y * 2 + c) / c - 1,
    "used": lambda y, c: (y * c) + torch.tanh(y),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_constants_after_a_convolution(name: str) -> None:
    torch.manual_seed(0)
    make, norm, dims = CONVOLUTIONS[name]
    convolution = make()
    channels, ones = convolution.out_channels, (1,) * dims
    x = torch.randn(2, 4, *(5,) * dims)
    last = convolution(x).shape[-1]
    shapes = [(), (1,), (channels, *ones), (1, channels, *ones), (last,), (2, 1, channels, *ones)]
    others = [torch.float64, torch.int64, torch.complex64]
    constants = [(shape, torch.float32) for shape in shapes]
    constants += product([(), (1, channels, *ones)], others)
    for (shape, dtype), (how, combine) in product(constants, ARITHMETIC.items()):
        model = Calls(
            lambda m, x: m.combine(m.convolution(x), m.constant),
            convolution=convolution,
            constant=(torch.rand(shape) * 3 + 1).to(dtype),
            combine=combine,
        )
        kinds = assert_folded_right(model, x)
        assert "prim::unchecked_cast" not in kinds
        if how in ("add", "mul") and dtype == torch.float32 and shape == (1, channels, *ones):
            assert len(kinds) == (1 if not convolution.transposed else 2), kinds
    for function in (
        lambda m, x: m.norm(m.convolution(x)),
        lambda m, x: m.norm(m.convolution(x) * 2.5 + 1),
        lambda m, x: (lambda y: (m.norm(y), y))(m.convolution(x)),
        lambda m, x: (lambda y: m.norm(y) * y)(m.convolution(x)),
    ):
        for how in ({}, {"affine": False}, {"track_running_stats": False}):
            parts = {"convolution": convolution, "norm": normed(norm, channels, **how)}
            assert_folded_right(Calls(function, **parts), x)


@pytest.mark.parametrize("how", ["mul", "div", "add"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0])
def test_a_constant_that_is_not_finite_gives_no_nan_that_the_model_does_not(
    how: str, value: float
) -> None:
    torch.manual_seed(0)
    constant = torch.ones(6, 1)
    constant[1] = value
    combine = ARITHMETIC[how]
    model = Calls(
        lambda m, x: combine(m.convolution(x), m.constant),
        convolution=nn.Conv1d(4, 6, 3),
        constant=constant,
    )
    assert_folded_right(model, torch.randn(2, 4, 5))
