# SPDX-License-Identifier: Apache-2.0
"""Kernels that lay their results out otherwise than their fake ones say, by which graphs are made."""

from collections.abc import Callable

import pytest
import torch

import blade  # noqa: F401  (the backends)


@torch.library.custom_op("blade_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


@turned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def flattened(x: torch.Tensor) -> torch.Tensor:
    return turned(x).reshape(-1)


def computed(x: torch.Tensor) -> torch.Tensor:
    return (turned(x).sin() * 2).reshape(-1).exp()


def split(x: torch.Tensor) -> torch.Tensor:
    return turned(x).reshape(2, -1, x.shape[1]).cos().sum(1)


@pytest.mark.parametrize("function", [flattened, computed, split])
def test_a_view_of_them_is_a_copy(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    compiled = torch.compile(function, backend="disc")
    for rows in (4, 6):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(compiled(x), function(x))
