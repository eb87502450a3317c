# SPDX-License-Identifier: Apache-2.0
"""What draws random numbers is noticed, whatever generator it draws from."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from blade.verification.draws import Draws

X = torch.ones(3)
DRAWING: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.randn(3),
    "own generator": lambda: torch.randn(3, generator=torch.Generator().manual_seed(0)),
    "dropout": lambda: torch.nn.functional.dropout(X, 0.5),
    "python": random.random,
    "numpy": lambda: np.random.rand(3),
}


@pytest.mark.parametrize("how", DRAWING)
def test_drawing_is_seen(how: str) -> None:
    with Draws() as draws:
        DRAWING[how]()
    assert draws.seen


def test_other_ops_draw_nothing() -> None:
    with Draws() as draws:
        torch.nn.functional.scaled_dot_product_attention(*3 * [X.expand(1, 1, 2, 3)])
        torch.nn.functional.dropout(X, 0.5, training=False)
    assert not draws.seen
