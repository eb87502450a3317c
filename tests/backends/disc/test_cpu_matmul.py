# SPDX-License-Identifier: Apache-2.0
"""The generated product of two computed matrices, in every layout of the second one."""

from collections.abc import Sequence

import pytest
import sympy
import torch
from disc_programs import S0, S1, S2, add_input, compile_to_engine, finish, new_builder

from blade.backends.disc.cpu.gemm.batched_matmul import PANEL_DEPTH
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.runtime.engine import Engine

pytestmark = pytest.mark.needs("torch_mlir")

S3 = sympy.Symbol("s3", integer=True, nonnegative=True)
SIZES = [  # batch, m, k, n
    (1, 1, 1, 1),
    (2, 3, 5, 7),
    (3, 13, 16, 64),
    (1, 40, 33, 65),
    (2, 200, 20, 31),
    (1, 193, 400, 129),
    (5, 6, 48, 100),
    (1, 200, 2 * PANEL_DEPTH + 5, 33),
    (2, 14, PANEL_DEPTH, 65),
]
EMPTY = [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)]


def product_engine(layout: Sequence[int], lanes: int) -> Engine:
    """a [s0, s1, s2] @ b, which is stored with its axes (batch, k, n) in the order ``layout``."""
    builder = new_builder()
    a = add_input(builder, (S0, S1, S2))
    sizes = (S0, S2, S3)
    stored = add_input(builder, [sizes[k] for k in layout])
    b = builder.permute(stored, [list(layout).index(k) for k in range(3)])
    y = builder.make("matmul", (a, b), (S0, S1, S3), torch.float32)
    engine = compile_to_engine(finish(builder, y), CpuTarget(host().isa, lanes))
    assert "kernel matmul_f32" in engine.program()
    return engine


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("layout", [(0, 1, 2), (0, 2, 1), (1, 2, 0)], ids=str)
def test_any_size_and_layout(layout: tuple[int, ...], lanes: int) -> None:
    engine = product_engine(layout, lanes)
    generator = torch.Generator().manual_seed(lanes)
    for batch, m, k, n in SIZES + EMPTY:
        a = torch.randn(batch, m, k, generator=generator)
        b = torch.randn(batch, k, n, generator=generator)
        [found] = engine.try_execute([a, b.permute(layout).contiguous()]) or pytest.fail(
            engine.last_error()
        )
        # k fused products in any order: within gamma(k + 1) of the sum of their magnitudes
        bound = (
            (k + 1) * 2.0**-24 / (1 - (k + 1) * 2.0**-24) * (a.double().abs() @ b.double().abs())
        )
        assert found.shape == (batch, m, n)
        assert bool(((found - a.double() @ b.double()).abs() <= bound).all()), (batch, m, k, n)


def test_rows_that_are_not_adjacent_are_copied_first() -> None:
    builder = new_builder()
    a = add_input(builder, (S0, S2, S1))
    b = add_input(builder, (S0, S2, S3))
    left = builder.permute(a, (0, 2, 1))
    y = builder.make("matmul", (left, b), (S0, S1, S3), torch.float32)
    engine = compile_to_engine(finish(builder, y))
    assert "aten::" not in engine.program()
    for sizes in [(2, 5, 3, 4), (1, 300, 70, 1), (3, 1, 1, 65), (2, 0, 3, 4)]:
        batch, k, m, n = sizes
        x, w = torch.randn(batch, k, m), torch.randn(batch, k, n)
        [found] = engine.try_execute([x, w]) or pytest.fail(engine.last_error())
        torch.testing.assert_close(found, x.transpose(1, 2) @ w, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize(("columns", "biased"), [(1, True), (64, True), (70, True), (150, False)])
def test_linear_with_weights_that_are_not_constant(columns: int, biased: bool, lanes: int) -> None:
    builder = new_builder()
    x, w = add_input(builder, (S0, S1, 20)), add_input(builder, (columns, 20))
    operands = [x, w, add_input(builder, (columns,))] if biased else [x, w]
    y = builder.make("linear", operands, (S0, S1, columns), torch.float32)
    engine = compile_to_engine(finish(builder, y), CpuTarget(host().isa, lanes))
    assert "aten::" not in engine.program()
    for batch, rows in [(1, 1), (2, 3), (5, 97), (0, 3), (3, 0)]:
        given = [torch.randn(batch, rows, 20), torch.randn(columns, 20), torch.randn(columns)]
        given = given[: len(operands)]
        [found] = engine.try_execute(given) or pytest.fail(engine.last_error())
        torch.testing.assert_close(found, torch.nn.functional.linear(*given), rtol=1e-5, atol=1e-5)


def test_a_single_row_is_left_to_aten() -> None:
    builder = new_builder()
    x, w, bias = add_input(builder, (20,)), add_input(builder, (7, 20)), add_input(builder, (7,))
    x = builder.reshape(x, (1, 20))
    y = builder.make("linear", (x, w, bias), (1, 7), torch.float32)
    engine = compile_to_engine(finish(builder, y))
    assert "aten::addmm.out" in engine.program()
