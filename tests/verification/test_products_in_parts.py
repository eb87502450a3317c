# SPDX-License-Identifier: Apache-2.0
"""Products in parts are the products."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from blade.verification import wide_at_use
from blade.verification.products_in_parts import compute
from blade.verification.wide_at_use import WideAtUse

aten = torch.ops.aten
Shape = tuple[int, ...]


def convolution(transposed: bool = False, groups: int = 1) -> Sequence[Any]:
    zeros = [0, 0]
    return [2, 1], [1, 0], [1, 1], transposed, [1, 0] if transposed else zeros, groups


CASES: dict[str, tuple[Any, Sequence[Shape | None], Sequence[Any]]] = {
    "bmm": (aten.bmm.default, [(5, 3, 4), (5, 4, 6)], ()),
    "mm by columns": (aten.mm.default, [(2, 8), (8, 9)], ()),
    "mm by rows": (aten.mm.default, [(9, 8), (8, 2)], ()),
    "addmm": (aten.addmm.default, [(6,), (9, 8), (8, 6)], ()),
    "convolution": (aten.convolution.default, [(5, 4, 6, 7), (6, 4, 3, 2), None], convolution()),
    "with a bias": (aten.convolution.default, [(5, 4, 6, 7), (6, 4, 3, 2), (6,)], convolution()),
    "grouped": (
        aten.convolution.default,
        [(5, 4, 6, 7), (6, 2, 3, 2), (6,)],
        convolution(groups=2),
    ),
    "transposed": (
        aten.convolution.default,
        [(5, 4, 6, 7), (4, 6, 3, 2), (6,)],
        convolution(transposed=True),
    ),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_at_use, "PART", 512)


def operands(shapes: Sequence[Shape | None], dtype: torch.dtype) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    return [
        None if shape is None else torch.randn(shape, generator=generator).to(dtype)
        for shape in shapes
    ]


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, wide: torch.dtype) -> None:
    op, shapes, how = CASES[name]
    given = operands(shapes, torch.float16)
    want = op(*(None if t is None else t.double() for t in given), *how)
    at_use = [None if t is None else WideAtUse(t, wide) for t in given]
    for args in (given, at_use):
        got = compute(op, (*args, *how), wide)
        assert got.dtype is wide
        torch.testing.assert_close(got, want.to(wide), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False], [True, False, True]])
@pytest.mark.parametrize("name", ["convolution", "with a bias", "grouped", "transposed"])
def test_gradients_of_convolutions(name: str, mask: list[bool]) -> None:
    op, shapes, how = CASES[name]
    x, weight, _ = (None if t is None else t.double() for t in operands(shapes, torch.float16))
    assert x is not None and weight is not None
    gradient = torch.sin(op(x, weight, None, *how))
    channels = [6]
    args = (gradient, x, weight, channels, *how, mask)
    want = aten.convolution_backward.default(*args)
    got = compute(aten.convolution_backward.default, args, torch.float32)
    for mine, theirs, is_wanted in zip(got, want, mask, strict=True):
        assert (mine is not None) is is_wanted
        if is_wanted:
            assert mine.dtype is torch.float32
            torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=1e-5)


def test_ints_and_nothing_have_no_parts() -> None:
    ints, none = torch.ones(3, 3, dtype=torch.int64), torch.ones(0, 3)
    assert compute(aten.mm.default, (ints, ints), torch.float64) is None
    assert compute(aten.mm.default, (none, torch.ones(3, 3)), torch.float64) is None
    assert compute(aten.sin.default, (none,), torch.float64) is None
