# SPDX-License-Identifier: Apache-2.0
"""Kernels of which there would be so many programs that each is given more: the same values, fewer programs."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from cpu_native import evaluate
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_kernels import (
    BF16,
    F16,
    F32,
    S0,
    S1,
    S2,
    _args,
    _random,
    gelu,
    kernels,
    layer_norm,
    softmax,
)
from triton_interpreter import TARGET, both, check, chosen, run

from blade.backends.disc.gpu.emit import tile_table as shapes
from blade.backends.disc.gpu.emit.kernel import emit
from blade.backends.disc.ir.kernel import (
    Access,
    Compute,
    Const,
    Dim,
    Kernel,
    Load,
    Reduce,
    Stmt,
    Store,
)

pytestmark = pytest.mark.needs("triton_interpreter")

WIDTHS = (24, 64, 320, 384, 512, 768, 1000, 1024, 1536)
MANY = 1 << 20


@pytest.fixture
def all_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "FEW", 0)
    monkeypatch.setattr(shapes, "FEW_ROWS", 0)


def in_halves(kernel: Kernel, dtype: torch.dtype = F16) -> Kernel:
    body = tuple(s if isinstance(s, Store) else replace(s, dtype=dtype) for s in kernel.body)
    return replace(kernel, args=tuple(replace(a, dtype=dtype) for a in kernel.args), body=body)


def masked_softmax(inner: Dim) -> Kernel:
    """Of x / 8 + mask, which all rows of a matrix share."""
    at = (S1 * inner, inner, 1)
    body: tuple[Stmt, ...] = (
        Load(Access(0, at), F16),
        Const(0.125, F16),
        Compute("mul", (0, 1), F16),
        Load(Access(1, (inner, 0, 1)), F16),
        Compute("add", (2, 3), F16),
        Reduce("max", 4, F16),
        Compute("sub", (4, 5), F16),
        Compute("exp", (6,), F16),
        Reduce("sum", 7, F16),
        Compute("div", (7, 8), F16),
        Store(Access(2, at), 9),
    )
    return Kernel((S0, S1), inner, _args([F16] * 2, [F16]), body)


def chain() -> Kernel:
    """tanh(x) * sigmoid(x)"""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (1,)), F16),
        Compute("tanh", (0,), F16),
        Compute("sigmoid", (0,), F16),
        Compute("mul", (1, 2), F16),
        Store(Access(1, (1,)), 3),
    )
    return Kernel((), S0, _args([F16], [F16]), body)


@pytest.mark.parametrize("dtype", (F16, BF16), ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_and_points_of_a_constant_length(
    width: int, dtype: torch.dtype, all_are_many: None
) -> None:
    rng = torch.Generator().manual_seed(width)
    count = 11 * width
    x, residual, *weights = [t.to(dtype) for t in _random(rng, count, count, width, width, width)]
    out = torch.full((count + 20,), 7.0).to(dtype)
    norm, points = in_halves(layer_norm(width), dtype), in_halves(gelu(width), dtype)
    for rows in (0, 1, 11):
        check(norm, [x, weights[0], residual, *weights[1:], out], {"s0": rows})
        check(points, [x, weights[0], out], {"s0": rows})


@pytest.mark.parametrize("width", (8, 256, 264, 384, 512, 520, 777, 1024, 1032))
def test_softmax_of_rows_of_any_length(width: int) -> None:
    rng = torch.Generator().manual_seed(width)
    x, mask = (t.to(F16) for t in _random(rng, 6 * width, 2 * width))
    x[0], mask[width - 1] = float("-inf"), float("-inf")
    out = torch.full((6 * width + 20,), 7.0).to(F16)
    for inner in (width, S2):
        check(masked_softmax(inner), [x, mask, out], {"s0": 2, "s1": 3, "s2": width})


@pytest.mark.parametrize("length", (0, 1, 1000, 2048, 2049, 5000))
def test_elements_of_one_dimension(length: int, all_are_many: None) -> None:
    x = torch.linspace(-12, 12, length).to(F16)
    check(chain(), [x, torch.full((length + 20,), 7.0).to(F16)], {"s0": length})


@settings(max_examples=25, deadline=None, derandomize=True)
@given(kernels(), st.integers(0, 2**31))
def test_random_kernels(kernel: Kernel, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    with mock.patch.multiple(shapes, FEW=0, FEW_ROWS=0):
        for s0, s1, s2 in ((2, 3, 5), (3, 2, 8), (2, 2, 41)):
            buffers = _random(rng, *[s0 * s1 * max(s2, 32) for _ in kernel.args])
            for got, want in both(kernel, buffers, {"s0": s0, "s1": s1, "s2": s2}):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("width", (64, 384, 768, 1024))
def test_many_programs_move_enough_each_and_few_are_as_many_or_more(width: int) -> None:
    norm, points, softmaxed = layer_norm(width), gelu(width), softmax(F32, inner=width)
    for kernel, moved in ((norm, 3), (points, 2), (softmaxed, 2)):
        choices = emit(in_halves(kernel), TARGET)
        few, many = (chosen(choices, {"s0": n}) for n in (32, MANY))
        programs = evaluate(many.grid[0], {"s0": MANY})
        assert MANY * width * 2 * moved >= shapes.PROGRAM_BYTES * programs
        assert evaluate(few.grid[0], {"s0": MANY}) >= programs


def test_a_layer_norm_far_from_zero_keeps_its_variance(all_are_many: None) -> None:
    """Two passes over registers: the mean is subtracted before squares are summed."""
    width = 768
    x = 1000 + torch.randn(4, width, generator=torch.Generator().manual_seed(1))
    x = x.to(F16)
    zero, one = torch.zeros(width, dtype=F16), torch.ones(width, dtype=F16)
    out = torch.zeros(4 * width, dtype=F16)
    kernel = in_halves(layer_norm(width))
    arguments = [x.flatten(), zero, torch.zeros(4 * width, dtype=F16), one, zero, out]
    run(kernel, emit(kernel, TARGET), arguments, {"s0": 4})
    want = torch.nn.functional.layer_norm(x.double(), (width,)).flatten()
    torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=2e-3)
