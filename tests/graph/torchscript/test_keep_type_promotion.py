# SPDX-License-Identifier: Apache-2.0
"""Constants without dimensions promote in what is returned as they do in the model, executed and saved."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import blade

CONFIG = blade.Config(
    timing=False, min_cluster_size=3
)  # nothing is compiled: TorchScript's own executor


class Beside(torch.nn.Module):
    def __init__(self, op: Callable[..., Any], constant: Any) -> None:
        super().__init__()
        self.op = op
        if isinstance(constant, torch.Tensor):
            self.register_buffer("constant", constant)
        else:
            self.constant = constant

    def forward(self, x: torch.Tensor) -> Any:
        return self.op(x, self.constant)


def check(op: Callable[..., Any], constant: Any, x: torch.Tensor) -> None:
    model = Beside(op, constant).eval()
    want = model(x)
    optimized = blade.optimize(model, (x,), CONFIG)
    file = io.BytesIO()
    torch.jit.save(optimized, file)
    file.seek(0)
    for module in (optimized, torch.jit.load(file)):
        for _ in range(3):  # the executor rewrites its graph anew in the first two
            torch.testing.assert_close(module(x), want, rtol=0, atol=0)


X = torch.tensor([3, -7, 0, 5])
OPS = [torch.add, torch.sub, torch.mul, torch.div]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float32])
@pytest.mark.parametrize("op", OPS)
def test_a_tensor_of_another_width_counts(op: Callable[..., Any], dtype: torch.dtype) -> None:
    check(op, torch.tensor(2.3, dtype=dtype), X)


@pytest.mark.parametrize("constant", [True, torch.tensor(True), torch.tensor(False)])
@pytest.mark.parametrize("op", [torch.add, torch.mul])
@pytest.mark.parametrize("x", [X, X > 0, X.to(torch.float16)])
def test_a_bool_is_an_operand(op: Callable[..., Any], constant: Any, x: torch.Tensor) -> None:
    check(op, constant, x)


@pytest.mark.parametrize("op", [torch.mul, torch.floor_divide])
@pytest.mark.parametrize("number", [2.5, 2])
def test_a_number_stays_one_in_a_file(op: Callable[..., Any], number: float) -> None:
    check(op, number, X)


def test_a_number_stays_one_beside_a_rounding_mode() -> None:
    check(lambda x, c: torch.div(x, c, rounding_mode="floor"), 2.5, X)


def test_a_narrow_integer_beside_bools() -> None:
    check(torch.mul, torch.tensor(5, dtype=torch.int8), X > 0)
